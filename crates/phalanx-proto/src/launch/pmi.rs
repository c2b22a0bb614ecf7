//! The first version of MPICH's process management interface (PMI), as Hydra speaks it, the launcher of MPICH and of Intel MPI: lines of
//! text over a connection that each process inherits. Its key-value space is where the ranks of a job tell each other one address.
//!
//! ```text
//! process     cmd=init pmi_version=1 pmi_subversion=1
//! launcher    cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0
//! process     cmd=get_my_kvsname
//! launcher    cmd=my_kvsname kvsname=kvs_29_0
//! rank 0      cmd=put kvsname=kvs_29_0 key=phalanx value=10.0.0.1:40123
//! launcher    cmd=put_result rc=0 msg=success
//! process     cmd=barrier_in
//! launcher    cmd=barrier_out                        when all ranks are in
//! process     cmd=get kvsname=kvs_29_0 key=phalanx
//! launcher    cmd=get_result rc=0 msg=success value=10.0.0.1:40123
//! process     cmd=finalize
//! launcher    cmd=finalize_ack
//! ```
//!
//! After a process's first line the launcher takes the end of the connection without `finalize` for a crash, and kills the job: MPICH 4
//! and Intel MPI do. So the conversation is finished at once, also where it comes to nothing.

use crate::error::{Error, Result};

/// The key under which rank 0 puts its address.
const KEY: &str = "phalanx";
/// The longest line that is read. The protocol's own limit is 1024.
pub const LINE_LIMIT: usize = 4096;

/// What a process asks its launcher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// Begins.
    Init,
    /// Asks for the name of the job's key-value space.
    SpaceName,
    /// Puts rank 0's address into the space of this name.
    Put(String, String),
    /// Waits until all ranks are here.
    Barrier,
    /// Gets rank 0's address from the space of this name.
    Get(String),
    /// Ends the conversation: there is no other one.
    Finalize,
}

impl Request {
    /// The line to send.
    pub fn line(&self) -> String {
        match self {
            Self::Init => "cmd=init pmi_version=1 pmi_subversion=1\n".to_owned(),
            Self::SpaceName => "cmd=get_my_kvsname\n".to_owned(),
            Self::Put(space, value) => format!("cmd=put kvsname={space} key={KEY} value={value}\n"),
            Self::Barrier => "cmd=barrier_in\n".to_owned(),
            Self::Get(space) => format!("cmd=get kvsname={space} key={KEY}\n"),
            Self::Finalize => "cmd=finalize\n".to_owned(),
        }
    }

    /// Reads the launcher's answer: the value that was asked for, or nothing where the answer is only that it was done.
    ///
    /// # Errors
    /// If it is not the answer to this request, or says that the request failed.
    pub fn answer(&self, line: &str) -> Result<String> {
        let (command, value) = match self {
            Self::Init => ("response_to_init", None),
            Self::SpaceName => ("my_kvsname", Some("kvsname")),
            Self::Put(..) => ("put_result", None),
            Self::Barrier => ("barrier_out", None),
            Self::Get(_) => ("get_result", Some("value")),
            Self::Finalize => ("finalize_ack", None),
        };
        let field = |name: &str| {
            let mut fields = line.split_ascii_whitespace().filter_map(|field| field.split_once('='));
            fields.find(|(found, _)| *found == name).map(|(_, value)| value)
        };
        let refused = |why: &str| {
            Error::protocol(format!(
                "mpirun's answer to {:?} {why}: {:?}",
                self.line().trim_end(),
                line.trim_end()
            ))
        };
        if field("cmd") != Some(command) {
            return Err(refused("is not understood"));
        }
        if field("rc").is_some_and(|code| code != "0") {
            return Err(refused("is an error"));
        }
        match value {
            None => Ok(String::new()),
            Some(name) => match field(name).filter(|value| !value.is_empty()) {
                Some(value) => Ok(value.to_owned()),
                None => Err(refused("has no value")),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn answers_of_each_launcher_are_read() {
        let space = || "kvs_29_0".to_owned();
        let get = Request::Get(space());
        for (request, answer, value) in [
            // MPICH 4.0, Intel MPI 2021, MPICH 5.0.
            (&Request::Init, "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0\n", ""),
            (&Request::Init, "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=2\n", ""),
            (
                &Request::SpaceName,
                "cmd=my_kvsname kvsname=kvs_29_0_466540082_login\n",
                "kvs_29_0_466540082_login",
            ),
            (&Request::SpaceName, "cmd=my_kvsname rc=0 kvsname=kvs_79_0\n", "kvs_79_0"),
            (&Request::Put(space(), "10.0.0.1:7".into()), "cmd=put_result rc=0 msg=success\n", ""),
            (&Request::Barrier, "cmd=barrier_out\n", ""),
            (&Request::Barrier, "cmd=barrier_out tag=0\n", ""),
            (&get, "cmd=get_result rc=0 msg=success value=[fd00::1]:7\n", "[fd00::1]:7"),
            (&get, "cmd=get_result rc=0 value=10.0.0.1:7\n", "10.0.0.1:7"),
            (&Request::Finalize, "cmd=finalize_ack\n", ""),
        ] {
            assert_eq!(request.answer(answer).unwrap(), value, "{request:?}");
            assert!(request.line().starts_with("cmd=") && request.line().ends_with('\n'));
        }
        for (answer, why) in [
            ("cmd=get_result rc=-1 msg=key_phalanx_not_found value=unknown\n", "is an error"),
            ("cmd=get_result rc=1\n", "is an error"),
            ("cmd=get_result rc=0\n", "has no value"),
            ("cmd=get_result rc=0 value=\n", "has no value"),
            ("cmd=barrier_out\n", "is not understood"),
            ("\n", "is not understood"),
        ] {
            let error = get.answer(answer).unwrap_err().to_string();
            assert!(error.contains(why) && error.contains("cmd=get kvsname"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn any_answer_is_read_or_refused(line in "[a-z_= 0-9\\n]{0,60}") {
            for request in [Request::Init, Request::SpaceName, Request::Barrier, Request::Get("s".into()), Request::Finalize] {
                if let Ok(value) = request.answer(&line) {
                    prop_assert!(!value.contains(char::is_whitespace));
                }
            }
        }
    }
}
