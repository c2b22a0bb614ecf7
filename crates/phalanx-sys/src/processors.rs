//! How many processors the ranks of this host have together.

use std::sync::OnceLock;

/// Whether each of `ranks` ranks of this host can have a processor of its own. If not, one that polls may keep another from going on.
///
/// All processors of the host count, not those that this process is bound to: a launcher may bind each rank to its own.
pub fn suffice_for(ranks: usize) -> bool {
    static ONLINE: OnceLock<usize> = OnceLock::new();
    ranks <= *ONLINE.get_or_init(online)
}

fn online() -> usize {
    // SAFETY: it accesses no memory of this process.
    let online = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) };
    usize::try_from(online).unwrap_or(1)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn processors_suffice_for_as_many_ranks_as_there_are_processors() {
        assert!(suffice_for(1) && suffice_for(online()));
        assert!(!suffice_for(online() + 1));
    }
}
