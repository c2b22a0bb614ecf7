//! What Open MPI's variables say of the host on which its mpirun runs. They do not say on which host rank 0 is.

use crate::hash::fnv1a;

/// The host of mpirun, where the ranks meet if rank 0 is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MpirunHost {
    /// The job's name.
    pub id: String,
    /// The host's name, or its address.
    pub address: String,
    /// A port below those that Linux gives out itself. Two jobs on one host may have the same one by chance.
    pub port: u16,
}

impl MpirunHost {
    /// Reads the variables of a process that mpirun has started; none where they do not name the host, or give it several addresses, of
    /// which not all need be reached from other hosts.
    pub fn read(lookup: impl Fn(&str) -> Option<String>) -> Option<Self> {
        let job = lookup("PMIX_NAMESPACE")?;
        let address = match prrte_host(&job) {
            Some(host) => host.to_owned(),
            None => only_address(&lookup("OMPI_MCA_orte_hnp_uri")?)?.to_owned(),
        };
        let port = 20_000 + fnv1a(job.bytes()) % 10_000;
        Some(Self { id: format!("mpirun-{job}"), address, port: port as u16 })
    }
}

/// Open MPI 5: `prterun-HOST-PROCESS@JOB`, or `prte-..` where the launcher runs by itself.
fn prrte_host(job: &str) -> Option<&str> {
    let rest = job.strip_prefix("prterun-").or_else(|| job.strip_prefix("prte-"))?;
    let (launcher, number) = rest.rsplit_once('@')?;
    let (host, process) = launcher.rsplit_once('-')?;
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    (is_number(number) && is_number(process) && is_host(host)).then_some(host)
}

/// Open MPI 4: `NUMBER.0;tcp://ADDRESS,..:PORT`.
fn only_address(uri: &str) -> Option<&str> {
    let (_, contacts) = uri.split_once(';')?;
    let (address, port) = contacts.strip_prefix("tcp://")?.rsplit_once(':')?;
    let is_plain = port.parse::<u16>().is_ok() && address.parse::<std::net::Ipv4Addr>().is_ok();
    is_plain.then_some(address)
}

fn is_host(name: &str) -> bool {
    let is_part = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
    !name.is_empty() && !name.starts_with('-') && name.bytes().all(is_part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_of_mpirun_is_read() {
        let host = |job: &str, uri: &str| {
            let set = |value: &str| Some(value.to_owned()).filter(|value| !value.is_empty());
            MpirunHost::read(|name| match name {
                "PMIX_NAMESPACE" => set(job),
                "OMPI_MCA_orte_hnp_uri" => set(uri),
                _ => None,
            })
        };
        let found = host("prterun-login-1-28@1", "").unwrap();
        assert_eq!((found.address.as_str(), found.id.as_str()), ("login-1", "mpirun-prterun-login-1-28@1"));
        assert!((20_000..30_000).contains(&found.port));
        assert_eq!(host("prte-n7.example-9@2", "").unwrap().address, "n7.example");
        let uri = "81788928.0;tcp://10.77.0.254:51197";
        assert_eq!(host("81788929", uri).unwrap().address, "10.77.0.254");
        assert_ne!(host("81788929", uri).unwrap().port, host("81788930", uri).unwrap().port);
        for (job, uri) in [
            ("", uri),
            ("81788929", ""),
            // Of several addresses each may be that of a network which other hosts do not reach.
            ("81788929", "81788928.0;tcp://10.77.0.254,172.17.0.1:51197"),
            ("81788929", "81788928.0;tcp6://[fd00::1]:51197"),
            ("81788929", "10.77.0.254:51197"),
            ("prterun-login@1", ""),
            ("prterun--28@1", ""),
            ("prterun-a b-28@1", ""),
            ("prterun-login-28@", ""),
        ] {
            assert_eq!(host(job, uri), None, "{job} {uri}");
        }
    }
}
