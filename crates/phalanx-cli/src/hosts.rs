//! The options of a job on several hosts that are reached over ssh, which are horovodrun's.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{ArgAction, Args};
use phalanx::WorldSize;
use phalanx::launch::{HostList, RemoteShell};

use crate::cli::seconds;
use crate::processes::out_of_range;

/// The options that say where to run in another way.
const ELSEWHERE: [&str; 6] =
    ["nnodes", "node_rank", "rdzv_backend", "rdzv_endpoint", "standalone", "nproc_per_node"];

/// The longest file of hosts that is read, in bytes.
const FILE_LIMIT: u64 = 16 << 20;

#[derive(Args, Debug)]
#[command(next_help_heading = "Several hosts, one command")]
pub(crate) struct HostOptions {
    /// The hosts, and how many workers each takes: a launcher is started on each, over ssh. Ranks fill them in order
    #[arg(short = 'H', long, value_name = "HOST:SLOTS,..", conflicts_with_all = ELSEWHERE)]
    pub(crate) hosts: Option<HostList>,

    /// A file with the hosts, and how many workers each takes: one `host slots=4` or `host:4` a line
    #[arg(long, value_name = "FILE", conflicts_with_all = ELSEWHERE, conflicts_with = "hosts")]
    pub(crate) hostfile: Option<PathBuf>,

    /// The number of workers, written -np; all slots of the hosts if not given
    #[arg(short = 'p', long = "num-proc", visible_alias = "np", value_name = "N", conflicts_with_all = ["nproc_per_node", "nnodes"])]
    pub(crate) num_proc: Option<u32>,

    // The first letter of -np.
    #[arg(short = 'n', hide = true, action = ArgAction::SetTrue, requires = "num_proc")]
    np: bool,

    /// The port of the hosts' ssh servers [default: ssh's own]
    #[arg(long, value_name = "PORT")]
    pub(crate) ssh_port: Option<u16>,

    /// The file of ssh's private key [default: ssh's own]
    #[arg(long, value_name = "FILE")]
    pub(crate) ssh_identity_file: Option<PathBuf>,

    /// How long the hosts may take to answer, and then their launchers to find each other
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    pub(crate) start_timeout: Duration,
}

impl HostOptions {
    /// The hosts of the job, each with its number of workers, if any were named.
    pub(crate) fn placed(&self) -> Result<Option<HostList>, String> {
        let list = self.named()?;
        list.map(|list| list.place(self.num_proc).map_err(|error| error.to_string())).transpose()
    }

    /// The hosts that were named, with all their slots.
    pub(crate) fn named(&self) -> Result<Option<HostList>, String> {
        let list = match (&self.hosts, &self.hostfile) {
            (Some(hosts), _) => hosts.clone(),
            (None, Some(file)) => {
                let named = |error: &dyn std::fmt::Display| format!("--hostfile {}: {error}", file.display());
                let text = read(file).map_err(|error| named(&error))?;
                HostList::from_file(&text).map_err(|error| named(&error))?
            }
            (None, None) => return Ok(None),
        };
        Ok(Some(list))
    }

    /// An error if the program's name is the rest of a list of hosts with blanks.
    pub(crate) fn check_blanks(&self, given: &[OsString], program: &OsStr) -> Result<(), String> {
        // `phalanx launch` puts a program of its own before the words that were given.
        if given.iter().all(|word| word != program) {
            return Ok(());
        }
        // Of the command's own words, which come before the program.
        let own = given.iter().take_while(|word| *word != program).map(|word| word.as_encoded_bytes());
        let (mut is_cut, mut is_value) = (false, false);
        for word in own {
            let is_list = is_value || word.starts_with(b"-H") || word.starts_with(b"--hosts=");
            is_cut |= is_list && word.ends_with(b",");
            is_value = word == b"-H" || word == b"--hosts";
        }
        let begins = program.as_encoded_bytes().starts_with(b",");
        if self.hosts.is_none() || !(is_cut || begins) {
            return Ok(());
        }
        Err(format!(
            "the list of hosts contains blanks, so that {} was taken for the program: write it without, as in -H a:1,b:1",
            program.display()
        ))
    }

    /// The number of workers on this machine alone, if it was given.
    pub(crate) fn here(&self) -> Result<Option<WorldSize>, String> {
        let size = |count| WorldSize::new(count).map_err(|_| format!("-np {count}: {}", out_of_range()));
        self.num_proc.map(size).transpose()
    }

    /// A note about options of ssh, for a job that needs none.
    pub(crate) fn unused_here(&self) -> Option<String> {
        let (verb, options) = match (self.ssh_port.is_some(), self.ssh_identity_file.is_some()) {
            (false, false) => return None,
            (true, false) => ("has", "--ssh-port"),
            (false, true) => ("has", "--ssh-identity-file"),
            (true, true) => ("have", "--ssh-port and --ssh-identity-file"),
        };
        Some(format!(
            "{options} {verb} no effect: this job runs on this machine; name hosts with -H or --hostfile"
        ))
    }

    pub(crate) fn shell(&self) -> RemoteShell {
        let shell = match std::env::var_os("PHALANX_RSH") {
            Some(program) => RemoteShell::default().program(&program),
            None => RemoteShell::default(),
        };
        let shell = self.ssh_port.into_iter().fold(shell, RemoteShell::port);
        self.ssh_identity_file.iter().fold(shell, RemoteShell::identity)
    }
}

/// The text of `file`, which may be a pipe.
fn read(file: &Path) -> io::Result<String> {
    let mut text = String::new();
    let count =
        File::open(file)?.take(FILE_LIMIT + 1).read_to_string(&mut text).map_err(|error| {
            match error.kind() {
                ErrorKind::InvalidData => io::Error::other("it is no text in UTF-8"),
                _ => error,
            }
        })?;
    if count as u64 > FILE_LIMIT {
        return Err(io::Error::other(format!("it has more than {FILE_LIMIT} bytes")));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use crate::cli::{Cli, Command};

    fn parse(words: &[&str]) -> Result<super::HostOptions, String> {
        let words = ["phalanx", "run"].iter().chain(words);
        match Cli::try_parse_from(words).map_err(|error| error.to_string())?.command {
            Command::Run(run) => Ok(run.hosts),
            _ => Err("not run".to_owned()),
        }
    }

    #[test]
    fn a_list_with_blanks_does_not_start_one_of_its_hosts() {
        let checked = |words: &[&str]| {
            let given: Vec<std::ffi::OsString> = words.iter().map(Into::into).collect();
            let program = words
                .iter()
                .position(|word| *word == "b:1" || *word == ",b:1" || *word == "./train")
                .unwrap();
            parse(words).unwrap().check_blanks(&given, words[program].as_ref())
        };
        let cause = checked(&["-H", "a:1,", "b:1", "./train"]).unwrap_err();
        assert!(cause.contains("b:1 was taken for the program") && cause.contains("-H a:1,b:1"), "{cause}");
        assert!(checked(&["--hosts", "a:1", ",b:1", "./train"]).is_err());
        assert_eq!(checked(&["-H", "a:1,b:1", "./train"]), Ok(()));
        assert_eq!(checked(&["-H", "a:1, b:1", "./train"]), Ok(()));
    }

    #[test]
    fn horovods_options_are_understood() {
        let options =
            parse(&["-np", "3", "-H", "a:2,b:2", "--ssh-port", "7", "./train", "-np", "9"]).unwrap();
        let placed = options.placed().unwrap().unwrap();
        let pairs: Vec<_> = placed.hosts().iter().map(|host| (host.name(), host.slots())).collect();
        assert_eq!(pairs, [("a", 2), ("b", 1)]);
        assert_eq!(parse(&["-np", "3", "./train"]).unwrap().here().unwrap().unwrap().get(), 3);
        assert!(
            parse(&["-np", "0", "./train"]).unwrap().here().unwrap_err().starts_with("-np 0: give a number")
        );
        assert!(parse(&["--np", "9", "-H", "a:2", "./train"]).unwrap().placed().is_err());
        for bad in [
            &["-H", "a:x", "./train"][..],
            &["-H", "a:2", "--nnodes", "2", "./train"],
            &["-H", "a:2", "--hostfile", "f", "./train"],
            &["-n", "3", "./train"],
        ] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
        assert!(parse(&["--hostfile", "/does/not/exist", "./train"]).unwrap().placed().is_err());
        let endless = parse(&["--hostfile", "/dev/zero", "./train"]).unwrap().placed().unwrap_err();
        assert!(endless.starts_with("--hostfile /dev/zero: it has more than"), "{endless}");
        assert_eq!(parse(&["-np", "2", "./train"]).unwrap().unused_here(), None);
        let note = parse(&["--ssh-port", "7", "./train"]).unwrap().unused_here().unwrap();
        assert!(note.starts_with("--ssh-port has no effect") && note.contains("-H or --hostfile"), "{note}");
    }
}
