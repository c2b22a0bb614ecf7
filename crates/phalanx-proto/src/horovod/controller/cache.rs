//! The responses that the ranks have agreed on before. Every rank holds the same responses in the same slots, so that a bit can stand for one.

use std::collections::{BTreeMap, BTreeSet};

use crate::horovod::message::Response;
use crate::horovod::request::Request;

/// Responses in numbered slots; the one that has been unused for the longest time makes room for a new one.
#[derive(Debug)]
pub(super) struct Cache {
    capacity: usize,
    slots: Vec<Option<Cached>>,
    by_name: BTreeMap<String, usize>,
    free: BTreeSet<usize>,
    /// Slots by the time of their last use.
    by_use: BTreeSet<(u64, usize)>,
    time: u64,
}

#[derive(Debug)]
struct Cached {
    response: Response,
    /// This rank's own request; none if it had joined.
    own: Option<Request>,
    used: u64,
}

/// What the cache says of a request.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Lookup {
    /// It is known under this slot.
    Hit(usize),
    /// This slot has its name, but another request.
    Stale(usize),
    Unknown,
}

impl Cache {
    pub fn new(capacity: usize) -> Self {
        Self {
            capacity,
            slots: Vec::new(),
            by_name: BTreeMap::new(),
            free: BTreeSet::new(),
            by_use: BTreeSet::new(),
            time: 0,
        }
    }

    /// The number of slots that have ever been used, the same on every rank.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    pub fn lookup(&self, request: &Request) -> Lookup {
        let Some(slot) = self.slot_of(&request.name) else { return Lookup::Unknown };
        let own = self.slots[slot].as_ref().and_then(|cached| cached.own.as_ref());
        if own == Some(request) { Lookup::Hit(slot) } else { Lookup::Stale(slot) }
    }

    /// The slot that has this name.
    pub fn slot_of(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    /// The slots of responses with this property.
    pub fn find(&self, property: impl Fn(&Response) -> bool) -> impl Iterator<Item = usize> {
        let slots = self.slots.iter().enumerate();
        slots
            .filter(move |(_, cached)| cached.as_ref().is_some_and(|cached| property(&cached.response)))
            .map(|(slot, _)| slot)
    }

    pub fn is_used(&self, slot: usize) -> bool {
        self.slots.get(slot).is_some_and(Option::is_some)
    }

    /// The response in `slot`, which is used now.
    pub fn take_up(&mut self, slot: usize) -> Option<Response> {
        self.time += 1;
        let cached = self.slots.get_mut(slot)?.as_mut()?;
        self.by_use.remove(&(cached.used, slot));
        cached.used = self.time;
        self.by_use.insert((cached.used, slot));
        Some(cached.response.clone())
    }

    /// Keeps a response. Returns the slot that it has taken from another one, if it has.
    pub fn insert(&mut self, response: Response, own: Option<Request>) -> Option<usize> {
        if self.capacity == 0 {
            return None;
        }
        let mut taken = self.by_name.get(&response.request.name).copied();
        if taken.is_none() && self.free.is_empty() && self.slots.len() == self.capacity {
            taken = self.by_use.first().map(|(_, slot)| *slot);
        }
        if let Some(slot) = taken {
            self.evict(slot);
        }
        let slot = self.free.pop_first().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        self.time += 1;
        self.by_name.insert(response.request.name.clone(), slot);
        self.by_use.insert((self.time, slot));
        self.slots[slot] = Some(Cached { response, own, used: self.time });
        taken
    }

    /// Forgets what is in `slot`.
    pub fn evict(&mut self, slot: usize) {
        if let Some(cached) = self.slots.get_mut(slot).and_then(Option::take) {
            self.by_name.remove(&cached.response.request.name);
            self.by_use.remove(&(cached.used, slot));
            self.free.insert(slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::horovod::request::Kind;

    fn request(name: &str) -> Request {
        Request { name: name.into(), kind: Kind::Allgather, parts: Vec::new() }
    }

    fn response(name: &str) -> Response {
        Response { request: request(name), rows: Vec::new(), absent: Vec::new(), error: None }
    }

    #[test]
    fn what_was_unused_for_the_longest_time_makes_room() {
        let mut cache = Cache::new(2);
        assert_eq!(cache.insert(response("a"), Some(request("a"))), None);
        assert_eq!(cache.insert(response("b"), Some(request("b"))), None);
        assert!(cache.take_up(0).is_some());
        assert_eq!(cache.insert(response("c"), Some(request("c"))), Some(1));
        assert_eq!(cache.lookup(&request("b")), Lookup::Unknown);
        assert_eq!(cache.lookup(&request("a")), Lookup::Hit(0));
        cache.evict(0);
        assert!(!cache.is_used(0) && cache.take_up(0).is_none());
        assert_eq!(cache.insert(response("d"), None), None, "the free slot");
        assert_eq!(cache.lookup(&request("d")), Lookup::Stale(0), "this rank had joined");
    }

    #[test]
    fn another_request_of_the_same_name_is_stale_and_no_capacity_is_no_cache() {
        let mut cache = Cache::new(1);
        cache.insert(response("a"), Some(request("a")));
        assert_eq!(cache.lookup(&Request { kind: Kind::Barrier, ..request("a") }), Lookup::Stale(0));
        let mut none = Cache::new(0);
        none.insert(response("a"), Some(request("a")));
        assert_eq!((none.slots(), none.lookup(&request("a"))), (0, Lookup::Unknown));
    }
}
