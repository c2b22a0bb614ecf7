//! Lists of hosts in messages: a job may have hundreds.

/// The most that a message shows.
const SHOWN: usize = 8;

/// The first of these names, and how many there are more.
pub(super) fn listed(names: &[&str]) -> String {
    let (shown, others) = names.split_at(names.len().min(SHOWN));
    match others.len() {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_many_hosts_a_message_names_the_first() {
        let names: Vec<String> = (0..500).map(|host| format!("node{host}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        assert_eq!(listed(&names[..1]), "node0");
        assert_eq!(listed(&names[..8]), "node0, node1, node2, node3, node4, node5, node6, node7");
        assert_eq!(listed(&names), format!("{} and 492 more", listed(&names[..8])));
    }
}
