//! The variables of Phalanx: values that no group takes, and names that nothing reads.

use std::env;

use phalanx::{Credentials, GroupOptions};

use super::finding::Report;

/// What all of them begin with.
const PREFIX: &str = "PHALANX_";
/// How each goes on, as docs/variables.md has them.
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
/// How those of this project's own tests go on.
const OF_TESTS: [&str; 2] = ["TEST_", "SOAK_"];

pub(super) fn look(report: &mut Report) {
    let set = env::vars_os().filter(|(_, value)| !value.is_empty());
    let unknown = unknown(set.filter_map(|(name, _)| name.into_string().ok()));
    if !unknown.is_empty() {
        report.advise("unknown", unknown.join(", "), "nothing reads these variables: are their names right?");
    }
    let group = GroupOptions::from_env().and_then(|options| options.heartbeat.check());
    for error in [group, Credentials::from_env().map(drop)].into_iter().filter_map(Result::err) {
        let remedy = error.remedy().unwrap_or("correct the variable, or unset it");
        report.bad("settings", error.full_cause(), remedy);
    }
}

/// Those of `names` that are like ours, and none of them.
fn unknown(names: impl Iterator<Item = String>) -> Vec<String> {
    let is_known =
        |rest: &str| KNOWN.contains(&rest) || OF_TESTS.iter().any(|prefix| rest.starts_with(prefix));
    let is_unknown = |name: &String| name.strip_prefix(PREFIX).is_some_and(|rest| !is_known(rest));
    let mut unknown: Vec<String> = names.filter(is_unknown).collect();
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
}
