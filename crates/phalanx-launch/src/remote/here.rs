//! Which host is this machine.

use std::net::IpAddr;
use std::time::Duration;

use crate::deadline::Deadline;
use crate::host;
use crate::interfaces;
use crate::store::{host_port, resolve};

/// How long the look-up of this host's own name may take. The launcher handles no signals meanwhile.
const LOOK_UP_TIMEOUT: Duration = Duration::from_secs(5);

/// Whether `name` means this machine.
pub(super) fn is_here(name: &str) -> bool {
    if host::is_localhost(name) {
        return true;
    }
    // A dot at its end says that no domain follows.
    let name = name.trim_end_matches('.');
    if let Ok(address) = name.parse::<IpAddr>() {
        return interfaces::is_own(address);
    }
    let look_up = || {
        let found = resolve(&host_port(name, 0), Deadline::after(LOOK_UP_TIMEOUT)).ok()?;
        Some(found.into_iter().map(|address| address.ip()).collect::<Vec<_>>())
    };
    means_this_machine(name, &host::name(), look_up, interfaces::is_own)
}

/// Whether `name` is that of the machine that is called `own`. Another machine may have the same name, and a name with a domain
/// begins with the label of others: so it counts only if it resolves to this machine, or, this machine's whole name, if it does not
/// resolve. The name of another machine is not looked up: where names do not resolve, each would take its time.
fn means_this_machine(
    name: &str,
    own: &str,
    look_up: impl FnOnce() -> Option<Vec<IpAddr>>,
    is_own: impl Fn(IpAddr) -> bool,
) -> bool {
    // Capitals make no difference in the names of hosts.
    let label = |name: &str| name.split('.').next().map(str::to_ascii_lowercase);
    if label(name) != label(own) {
        return false;
    }
    match look_up() {
        Some(found) => found.into_iter().any(is_own),
        None => name.eq_ignore_ascii_case(own),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_this_machine_only_if_it_leads_here() {
        let found = |text: &str| Some(vec![text.parse::<IpAddr>().unwrap()]);
        let is = |name, own, found| {
            means_this_machine(
                name,
                own,
                || found,
                |address| address.is_loopback() || address.to_string() == "10.0.0.1",
            )
        };
        assert!(is("node", "node", found("127.0.1.1")) && is("node", "node", found("10.0.0.1")));
        assert!(is("node", "node", None) && is("node.a.example", "node", found("10.0.0.1")));
        assert!(is("NODE", "node", None) && is("node.a.example", "Node", found("10.0.0.1")));
        assert!(is_here("Localhost") && is_here("localhost."));
        // Another machine of the same name, a name that only begins alike, and another name of this one.
        assert!(!is("node", "node", found("10.0.0.2")));
        assert!(!is("node.a.example", "node", None) && !is("node.b.example", "node", found("10.0.0.2")));
        assert!(!is("other", "node", found("10.0.0.1")));
    }

    #[test]
    fn the_names_of_other_machines_are_not_looked_up() {
        for name in ["other", "other.a.example", "node1"] {
            assert!(!means_this_machine(name, "node", || panic!("{name} was looked up"), |_| true));
        }
    }
}
