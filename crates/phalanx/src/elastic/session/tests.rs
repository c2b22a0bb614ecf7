//! A store that says nothing, and a worker that does.

use super::*;
use crate::store::{MemoryStore, Store};

/// What is known comes at once; what would change something is not answered, in the order in which it comes, before the
/// store is woken.
#[derive(Default)]
struct Silent {
    store: MemoryStore,
    state: Mutex<Silence>,
    changed: Condvar,
}

#[derive(Default)]
struct Silence {
    asked: usize,
    is_awake: bool,
}

impl Silent {
    fn wait_until(&self, what: impl Fn(&Silence) -> bool, deadline: Deadline) -> Result<()> {
        let mut state = self.state.lock();
        let mut in_time = true;
        while !what(&state) && in_time {
            in_time = !self.changed.wait_until(&mut state, deadline.instant()).timed_out();
        }
        if what(&state) { Ok(()) } else { Err(Error::timeout("the store is silent")) }
    }

    fn change(&self, how: impl FnOnce(&mut Silence)) {
        how(&mut self.state.lock());
        self.changed.notify_all();
    }
}

impl Store for Silent {
    fn set(&self, key: &str, value: &[u8], deadline: Deadline) -> Result<()> {
        self.store.set(key, value, deadline)
    }

    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        self.store.get(key, deadline)
    }

    fn wait(&self, keys: &[&str], deadline: Deadline) -> Result<()> {
        self.store.wait(keys, deadline)
    }

    fn check(&self, keys: &[&str], deadline: Deadline) -> Result<bool> {
        self.store.check(keys, deadline)
    }

    fn add(&self, key: &str, amount: i64, deadline: Deadline) -> Result<i64> {
        self.store.add(key, amount, deadline)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8], deadline: Deadline) -> Result<Vec<u8>> {
        self.change(|state| state.asked += 1);
        self.wait_until(|state| state.is_awake, deadline)?;
        self.store.compare_set(key, expected, desired, deadline)
    }

    fn delete_key(&self, key: &str, deadline: Deadline) -> Result<bool> {
        self.store.delete_key(key, deadline)
    }

    fn num_keys(&self, deadline: Deadline) -> Result<usize> {
        self.store.num_keys(deadline)
    }

    fn append(&self, key: &str, value: &[u8], deadline: Deadline) -> Result<()> {
        self.store.append(key, value, deadline)
    }

    fn multi_get(&self, keys: &[&str], deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        self.store.multi_get(keys, deadline)
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])], deadline: Deadline) -> Result<()> {
        self.store.multi_set(pairs, deadline)
    }
}

fn gone(id: u64) -> Entry {
    Entry::Gone { worker: WorkerId(id), by: WorkerId(id), why: Departure::Ended }
}

#[test]
fn nobody_waits_for_a_silent_store_longer_than_by_the_own_deadline() {
    let store = Arc::new(Silent::default());
    let me = Worker { id: WorkerId(0), host: "here".to_owned(), place: 0, process: 1 };
    let shared = Shared::new(Arc::clone(&store) as SharedStore, me).unwrap();
    let long = Deadline::after(Duration::from_secs(20));
    thread::scope(|scope| {
        // As the training thread does when it has left its group.
        let first = scope.spawn(|| shared.append_until(&gone(1), long));
        store.wait_until(|state| state.asked > 0, long).unwrap();
        // As its last word, or what the watch has seen.
        let started = Instant::now();
        let error = shared.append_until(&gone(2), Deadline::after(Duration::from_millis(50))).unwrap_err();
        assert!(error.is_timeout(), "{error}");
        assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
        // And what is known is known.
        assert!(shared.seen.lock().state.verdict().is_none());
        store.change(|state| state.is_awake = true);
        first.join().unwrap().unwrap();
    });
    shared.append_until(&gone(3), long).unwrap();
    let log = [0, 1].map(|index| compacted_log::read(&*store, index, long).unwrap());
    assert_eq!(log, [1, 3].map(|id| Read::Entry(gone(id))));
}

#[test]
fn a_frozen_successor_is_not_heard_by_the_beats_of_the_one_before() {
    let store: SharedStore = Arc::new(MemoryStore::new());
    let limit = Deadline::after(Duration::from_secs(20));
    let worker = |place, process| {
        let id = beat::next_id(&*store, place, limit).unwrap();
        Worker { id, host: "here".to_owned(), place, process }
    };
    // Given up, though it has not read that yet.
    let before = Shared::new(Arc::clone(&store), worker(1, 10)).unwrap();
    let (successor, me) = (worker(1, 11), worker(0, 12));
    let watcher = Shared::new(Arc::clone(&store), me.clone()).unwrap();
    let settings = Settings { min: 2, max: 2, reset_limit: None };
    for worker in [&me, &successor] {
        watcher.take(Entry::Join { worker: worker.clone(), settings });
        store.add(&beat::key(worker), 1, limit).unwrap();
    }
    let (interval, silence) = (Duration::from_millis(20), Duration::from_millis(200));
    let [mut ears, mut unused] = [(), ()].map(|()| Liveness::new(interval, silence));
    let next = watcher.seen.lock().next;
    assert_eq!(next, 2);
    let gone = loop {
        assert!(!limit.has_passed(), "the successor's silence was never noticed");
        look(&before, &mut unused, limit).unwrap();
        look(&watcher, &mut ears, limit).unwrap();
        if store.check(&["log/0"], limit).unwrap() {
            break compacted_log::read(&*store, 0, limit).unwrap();
        }
        thread::sleep(interval);
    };
    let Read::Entry(Entry::Gone { worker, by, why: Departure::Silent(_) }) = gone else { panic!("{gone:?}") };
    assert_eq!((worker, by), (successor.id, me.id));
}
