//! The hosts of a job, and how many workers each takes: pure.

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};
use crate::host_manager::host_key;
use crate::world_size::MAX_WORLD_SIZE;

/// A host and its number of slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    name: String,
    slots: u32,
}

impl Host {
    /// Its name for ssh, with a user's name before an `@` if given.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its number of slots.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// The host of this name, which another list has given.
    pub(super) fn named(name: &str, slots: u32) -> Self {
        Self { name: name.to_owned(), slots }
    }

    /// Its name or address alone.
    pub(super) fn address(&self) -> &str {
        self.name.rsplit_once('@').map_or(&self.name, |(_, address)| address)
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// The hosts of a job, in the order in which ranks fill them.
///
/// It is read from Horovod's list, `node1:4,node2:4`, or from [a file](Self::from_file). A host without a number has
/// one slot. If a host is listed twice, its slots are added up. An IPv6 address must be in brackets. The default is
/// empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostList(Vec<Host>);

impl HostList {
    /// Reads a file in Horovod's and Open MPI's format: `node1 slots=4` or `node1:4` a line, and comments behind a `#`.
    ///
    /// # Errors
    /// If a line is no host: the error has its number. If there is no host.
    pub fn from_file(text: &str) -> Result<Self> {
        Self::from_lines(text, 1, u32::saturating_add)?.check()
    }

    /// Reads what a discovery script prints: the same format, with so many slots for a host without a number. If it prints a host twice,
    /// the last line counts, as in Horovod. There may be no host.
    pub(super) fn discovered(text: &str, slots: u32) -> Result<Self> {
        Self::from_lines(text, slots, |_, last| last)
    }

    /// `again` gives the slots of a host that is listed twice.
    fn from_lines(text: &str, slots: u32, again: fn(u32, u32) -> u32) -> Result<Self> {
        // Some editors begin a file with a byte order mark.
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let lines = text.lines().map(|line| line.split_once('#').map_or(line, |(line, _)| line).trim());
        let hosts = lines.enumerate().filter(|(_, line)| !line.is_empty()).map(|(number, line)| {
            host_of_line(line, slots)
                .map_err(|cause| Error::invalid_argument(format!("line {}: {cause}", number + 1)))
        });
        Self::collect(hosts, again)
    }

    /// Places `workers` on the hosts, in order, each filled before the next, and returns the hosts used, with the
    /// number on each; all slots if no number is given.
    ///
    /// # Errors
    /// If the hosts have fewer slots, or it is more workers than a job may have, or none.
    pub fn place(&self, workers: Option<u32>) -> Result<Self> {
        let slots: u64 = self.0.iter().map(|host| u64::from(host.slots)).sum();
        let workers = workers.map_or(slots, u64::from);
        if workers > slots {
            let s = if slots == 1 { "" } else { "s" };
            return Err(Error::invalid_argument(format!(
                "{workers} workers, but the hosts have {slots} slot{s}"
            ))
            .with_remedy("give the hosts more slots, host:slots, or start fewer workers"));
        }
        if workers == 0 || workers > MAX_WORLD_SIZE.into() {
            let cause = format!("a job has at least one and at most {MAX_WORLD_SIZE} workers");
            return Err(Error::invalid_argument(cause));
        }
        let mut left = workers;
        let mut placed = Vec::new();
        for host in &self.0 {
            let taken = left.min(host.slots.into());
            left -= taken;
            if taken > 0 {
                placed.push(Host { name: host.name.clone(), slots: taken as u32 });
            }
        }
        Ok(Self(placed))
    }

    /// The hosts.
    pub fn hosts(&self) -> &[Host] {
        &self.0
    }

    fn collect(hosts: impl Iterator<Item = Result<Host>>, again: fn(u32, u32) -> u32) -> Result<Self> {
        let (mut list, mut places) = (Vec::<Host>::new(), HashMap::<String, usize>::new());
        for host in hosts {
            let host = host?;
            let key = host_key(&host.name);
            match places.get(&key) {
                Some(place) => list[*place].slots = again(list[*place].slots, host.slots),
                None => {
                    places.insert(key, list.len());
                    list.push(host);
                }
            }
        }
        Ok(Self(list))
    }

    fn check(self) -> Result<Self> {
        if self.0.is_empty() { Err(Error::invalid_argument("there is no host")) } else { Ok(self) }
    }
}

impl FromStr for HostList {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let entries = text.split(',').map(str::trim).filter(|entry| !entry.is_empty());
        let hosts = entries.map(|entry| host(entry, 1).map_err(Error::invalid_argument));
        Self::collect(hosts, u32::saturating_add)?.check()
    }
}

/// `node1 slots=4`, or `node1:4`.
fn host_of_line(line: &str, default: u32) -> Result<Host, String> {
    // Blanks may stand around the equals sign.
    let line = line.replace('=', " = ");
    let mut words = line.split_whitespace();
    let mut host = host(words.next().unwrap_or_default(), default)?;
    while let Some(key) = words.next() {
        let value = match (words.next(), words.next()) {
            (Some("="), Some(value)) => value,
            _ => return Err(format!("{key:?} is not KEY=VALUE")),
        };
        match key {
            "slots" => host.slots = slots(value)?,
            // Open MPI's bound for oversubscription, which is not supported here.
            "max_slots" | "max-slots" => {}
            _ => return Err(format!("there is no {key:?}: write `host slots=4`, or `host:4`")),
        }
    }
    Ok(host)
}

/// `node1`, `node1:4`, `user@node1:4`, `[::1]:4`.
fn host(entry: &str, default: u32) -> Result<Host, String> {
    let (name, number) = match entry.rsplit_once(':') {
        // An address in brackets has colons of its own.
        Some((name, number)) if !number.ends_with(']') => (name, slots(number)?),
        _ => (entry, default),
    };
    let (user, address) = name.rsplit_once('@').map_or((None, name), |(user, address)| (Some(user), address));
    let bare = address.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(address);
    if bare == address && address.contains(':') {
        return Err(format!("{entry:?}: an IPv6 address stands in brackets, [::1]:4"));
    }
    // ssh would take a leading dash for an option, and a shell the other characters for syntax.
    let is_odd = |c: char| !(c.is_alphanumeric() || "-._%:".contains(c));
    let is_bad = |part: &str| part.is_empty() || part.starts_with('-') || part.contains(is_odd);
    if is_bad(bare) || user.is_some_and(is_bad) {
        return Err(format!("{entry:?} is not a host; write host:slots, or user@host:slots"));
    }
    let name = user.map_or_else(|| bare.to_owned(), |user| format!("{user}@{bare}"));
    Ok(Host { name, slots: number })
}

fn slots(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(slots @ 1..=MAX_WORLD_SIZE) => Ok(slots),
        _ => Err(format!("{text:?} is not a number of slots")),
    }
}

/// For `phalanx::fuzzing`: a list, a file, or a script's output; after a 0, a 1, or a 2.
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
#[doc(hidden)]
pub fn fuzz(bytes: &[u8]) -> bool {
    let Some((kind, Ok(text))) = bytes.split_first().map(|(kind, text)| (kind, str::from_utf8(text))) else {
        return false;
    };
    let list = match kind {
        0 => text.parse::<HostList>(),
        1 => HostList::from_file(text),
        2 => HostList::discovered(text, 3).and_then(HostList::check),
        _ => return false,
    };
    let Ok(list) = list else { return false };
    for host in list.hosts() {
        // It becomes an argument of ssh's command line.
        assert!(!host.name().starts_with('-') && !host.address().starts_with('-'));
        assert!(!host.name().contains(|c: char| c.is_whitespace() || c.is_control()) && host.slots() > 0);
    }
    let slots: u64 = list.hosts().iter().map(|host| u64::from(host.slots())).sum();
    assert_eq!(list.place(None).is_ok(), slots <= MAX_WORLD_SIZE.into());
    let placed = list.place(Some(1));
    assert!(placed.is_ok_and(|placed| placed.hosts().iter().map(Host::slots).eq([1])));
    true
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pairs(list: &HostList) -> Vec<(&str, u32)> {
        list.hosts().iter().map(|host| (host.name(), host.slots())).collect()
    }

    #[test]
    fn a_list_is_horovods() {
        let list: HostList = "node1:4, me@node2:2,10.0.0.3,[fe80::1%eth0]:3,node1:1".parse().unwrap();
        assert_eq!(pairs(&list), [("node1", 5), ("me@node2", 2), ("10.0.0.3", 1), ("fe80::1%eth0", 3)]);
        assert_eq!(list.hosts()[1].address(), "node2");
        for bad in [
            "",
            ",",
            "a:0",
            "a:-1",
            "a:x",
            ":4",
            "-oProxyCommand=x:1",
            "a b",
            "a;b:1",
            "::1",
            "me@:1",
            "a:99999",
        ] {
            assert!(bad.parse::<HostList>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_file_is_open_mpis_or_horovods() {
        let text =
            "# ours\nnode1 slots=4\n\n  node2:2  # the small one\nnode3\nnode4 slots = 3 max_slots=5\nnode1";
        let list = HostList::from_file(text).unwrap();
        assert_eq!(pairs(&list), [("node1", 5), ("node2", 2), ("node3", 1), ("node4", 3)]);
        assert_eq!(HostList::from_file(&format!("\u{feff}{text}")).unwrap(), list);
        let cause = HostList::from_file("node1\nnode2 slot=4").unwrap_err().to_string();
        assert!(cause.contains("line 2") && cause.contains("slot"), "{cause}");
        for bad in ["# nothing", "node1 slots", "node1 slots=", "node1 4", "node1 slots=0"] {
            assert!(HostList::from_file(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn of_a_host_that_a_script_prints_twice_the_last_line_counts() {
        let list = HostList::discovered("node1\nnode2:2\nnode1:1\nnode2:2\n", 3).unwrap();
        assert_eq!(pairs(&list), [("node1", 1), ("node2", 2)]);
        assert!(HostList::discovered("# nothing\n\n", 3).unwrap().hosts().is_empty());
    }

    #[test]
    fn a_host_is_the_same_in_capitals_and_with_a_dot_at_its_end() {
        let list: HostList = "Node1.a.example:2,me@node1:1,node1.A.example.:3,Me@node1:1".parse().unwrap();
        assert_eq!(pairs(&list), [("Node1.a.example", 5), ("me@node1", 1), ("Me@node1", 1)]);
    }

    #[test]
    fn ranks_fill_hosts_in_order() {
        let list: HostList = "a:2,b:3,c:1".parse().unwrap();
        assert_eq!(pairs(&list.place(Some(4)).unwrap()), [("a", 2), ("b", 2)]);
        assert_eq!(list.place(None).unwrap(), list);
        assert!(list.place(Some(7)).unwrap_err().to_string().contains("6 slots"));
        assert!(list.place(Some(0)).is_err());
    }

    proptest! {
        #[test]
        fn no_text_makes_the_reader_panic_or_gives_ssh_an_option(text in "\\PC{0,40}") {
            for list in [text.parse::<HostList>(), HostList::from_file(&text)].into_iter().flatten() {
                for host in list.hosts() {
                    prop_assert!(!host.name().starts_with('-') && !host.name().contains(char::is_whitespace));
                    prop_assert!(host.slots() > 0);
                }
            }
        }
    }
}
