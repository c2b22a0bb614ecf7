//! The variables of Phalanx: wrong values, and names that nothing reads.

use std::env;

use phalanx::{Credentials, GroupOptions};

use super::finding::Report;

/// The beginning of all names.
const PREFIX: &str = "PHALANX_";
/// The rest of each name, as docs/variables.md has them.
const KNOWN: [&str; 34] = [
    "AS_GLOO",
    "AS_HOROVOD",
    "BIND",
    "BLAME_FILE",
    "CUDA_LIBRARY",
    "ELASTIC",
    "GRACE_PERIOD",
    "HEARTBEAT_INTERVAL",
    "HEARTBEAT_TIMEOUT",
    "HOROVODRUN",
    "HOST_ID",
    "JOB_KEY_FILE",
    "JOB_TAG",
    "LAUNCHER_STORE",
    "LIBTORCH_PYTHON",
    "LOG_FORMAT",
    "NCCL_LIBRARY",
    "NCCL_RECORD",
    "NETWORK_TIMEOUT",
    "OBJECTS",
    "OPEN_STORE",
    "RENDEZVOUS",
    "RESET_LIMIT",
    "RSH",
    "SPAWN",
    "TCH_PYTHON",
    "TLS_CA",
    "TLS_CERT",
    "TLS_KEY",
    "TRACE",
    "TRANSPORT",
    "TUNING",
    "UNEXPECTED_BYTES",
    "UNTESTED_TORCH",
];
/// The rest of names in this project's own tests.
const OF_TESTS: [&str; 2] = ["TEST_", "SOAK_"];
/// The end of the variable with which Kubernetes tells each pod of a service. The service's other variables have the same beginning, followed by one of
/// [`OF_SERVICES`].
const SERVICE_HOST: &str = "_SERVICE_HOST";
const OF_SERVICES: [&str; 2] = ["_SERVICE_", "_PORT"];

/// Reports unknown names and wrong values. Returns whether all values are right.
pub(super) fn look(report: &mut Report) -> bool {
    let set = env::vars_os().filter(|(_, value)| !value.is_empty());
    let unknown = unknown(set.filter_map(|(name, _)| name.into_string().ok()));
    if !unknown.is_empty() {
        report.advise("unknown", unknown.join(", "), "nothing reads these variables: are their names right?");
    }
    let group = GroupOptions::from_env().and_then(|options| options.heartbeat.check());
    let mut takes_all = true;
    for error in [group, Credentials::from_env().map(drop)].into_iter().filter_map(Result::err) {
        takes_all = false;
        report.failed("settings", &error, "correct the variable, or unset it");
    }
    takes_all
}

/// Those of `names` that are like ours, and none of them. Kubernetes sets others, for a service whose name is like ours.
fn unknown(names: impl Iterator<Item = String>) -> Vec<String> {
    let names: Vec<String> = names.collect();
    let services: Vec<&str> = names.iter().filter_map(|name| name.strip_suffix(SERVICE_HOST)).collect();
    let is_of_service = |name: &str| {
        let mut rests = services.iter().filter_map(|service| name.strip_prefix(service));
        rests.any(|rest| OF_SERVICES.iter().any(|next| rest.starts_with(next)))
    };
    let is_known =
        |rest: &str| KNOWN.contains(&rest) || OF_TESTS.iter().any(|prefix| rest.starts_with(prefix));
    let is_unknown = |name: &&String| {
        name.strip_prefix(PREFIX).is_some_and(|rest| !is_known(rest)) && !is_of_service(name)
    };
    let mut unknown: Vec<String> = names.iter().filter(is_unknown).cloned().collect();
    unknown.sort_unstable();
    unknown
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_variables_of_the_page_are_known_and_no_others() {
        let page = include_str!("../../../../docs/variables.md");
        let words = page.split(|letter: char| !letter.is_ascii_uppercase() && letter != '_');
        let of_tests = |rest: &str| OF_TESTS.iter().any(|prefix| rest.starts_with(prefix));
        let rests = words.filter_map(|word| word.strip_prefix(PREFIX));
        let listed: BTreeSet<&str> = rests.filter(|rest| !rest.is_empty() && !of_tests(rest)).collect();
        assert_eq!(listed, BTreeSet::from(KNOWN));
        let names = ["TRACE", "TRACES", "TEST_X"].map(|rest| format!("{PREFIX}{rest}"));
        let names = names.into_iter().chain(["PATH".to_owned()]);
        assert_eq!(unknown(names), [format!("{PREFIX}TRACES")]);
    }

    #[test]
    fn what_kubernetes_says_of_a_service_is_no_misspelt_variable() {
        for service in ["ETCD_", ""] {
            let rests = ["SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_CLIENT", "PORT", "PORT_2379_TCP_ADDR"];
            let mut names = rests.map(|rest| format!("{PREFIX}{service}{rest}")).to_vec();
            let other = format!("{PREFIX}HEARTBEAT");
            names.push(other.clone());
            assert_eq!(unknown(names.into_iter()), [other]);
        }
        // Without its host it is no service.
        let port = format!("{PREFIX}ETCD_PORT");
        assert_eq!(unknown(std::iter::once(port.clone())), [port]);
    }
}
