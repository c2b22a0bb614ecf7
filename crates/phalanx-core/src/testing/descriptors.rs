//! Descriptors for tests with many connections.

use rustix::process::{Resource, getrlimit, setrlimit};

/// Raises the limit of descriptors as far as the system allows: other tests of this process, which run beside this one, need some,
/// too.
pub(crate) fn raise_descriptors(needed: u64) {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    let raised = setrlimit(Resource::Nofile, limit);
    assert!(
        raised.is_ok() && limit.current.is_none_or(|current| current >= needed),
        "this test needs {needed} descriptors: raise `ulimit -Hn`"
    );
}
