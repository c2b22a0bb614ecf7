//! A launcher among others that come, go, and are stopped at any moment.

use std::io::ErrorKind;
use std::ops::ControlFlow;
use std::sync::Arc;

use phalanx_proto::wire::control::ProcessId;

use super::super::rendezvous_handler::stopped_while_joining;
use super::*;
use crate::cluster::Hosting;
use crate::deadline::Deadline;
use crate::log::Machine;
use crate::log::{Log, Mac, Read};
use crate::refusals::Refused;
use crate::store::{PrefixStore, SharedStore, TcpStore};

const SETTINGS: Settings = Settings { min_nodes: 2, max_nodes: 2, max_restarts: 0 };

/// The other launchers of a job of two nodes, and their store.
struct Others {
    server: TcpStoreServer,
    store: SharedStore,
    log: Log<MembershipState>,
    limit: Deadline,
}

impl Others {
    fn new() -> Self {
        let server = TcpStoreServer::bind(([127, 0, 0, 1], 0).into()).unwrap();
        let limit = Deadline::after(Duration::from_secs(60));
        let store = TcpStore::connect(server.local_addr(), limit).unwrap();
        let store: SharedStore = Arc::new(PrefixStore::new("phalanx/launch/test", Arc::new(store)));
        let log = Log::new(Arc::clone(&store), Mac::none());
        Self { server, store, log, limit }
    }

    fn join(&self, id: u64, host: &str, node_rank: u32, process: Option<ProcessId>) {
        let (id, host, serves_store) = (NodeId(id), host.to_owned(), node_rank == 0);
        let role = "default".to_owned();
        let node = Node { id, host, workers: 1, node_rank: Some(node_rank), serves_store, process, role };
        self.store.add(&id.heartbeat_key(), 1, self.limit).unwrap();
        self.log.append(&Entry::Join { node, settings: SETTINGS }, self.limit).unwrap();
    }

    /// What this node is told of them. None of them is missed.
    fn cluster(&self) -> Cluster {
        let cluster = Cluster::new(2, 2, "127.0.0.1", self.server.local_addr().port()).unwrap();
        cluster.keep_alive(Duration::from_secs(1), Some(3600)).hosting(Hosting::Connect)
    }
}

#[test]
fn a_node_for_which_there_is_no_room_is_told_so() {
    let others = Others::new();
    others.join(1, "elsewhere", 0, None);
    others.join(2, "further", 1, None);
    let (cluster, refused) = (others.cluster(), Refused::new().unwrap());
    let job = Job::new("unused", WorldSize::new(1).unwrap());
    let mut node = MultiNode::new(&job, &cluster, "test".to_owned(), refused.refusals()).unwrap();
    while !node.view.state.is_present(node.me) {
        assert!(!others.limit.has_passed(), "it has not joined");
        node.take_news();
        node.check().unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
    let error = node.too_few(Instant::now());
    assert!(
        error.is_timeout() && error.to_string().contains("the 2 nodes of the round that runs"),
        "{error}"
    );
}

#[test]
fn a_node_of_a_round_whose_store_nobody_names_is_told_so() {
    let others = Others::new();
    others.join(1, "elsewhere", 0, None);
    let (cluster, refused) = (others.cluster().node_rank(1), Refused::new().unwrap());
    let job = Job::new("unused", WorldSize::new(1).unwrap());
    let mut node = MultiNode::new(&job, &cluster, "test".to_owned(), refused.refusals()).unwrap();
    while node.view.state.running().is_none() {
        assert!(!others.limit.has_passed(), "the round has not begun");
        node.take_news();
        node.check().unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(node.placement().unwrap().is_none());
    let error = node.too_few(Instant::now());
    assert!(error.is_timeout() && error.to_string().contains("a round has begun with this node"), "{error}");
}

#[test]
fn a_time_in_which_this_process_was_stopped_is_no_time_in_which_nobody_came() {
    let (since, second) = (Instant::now(), Duration::from_secs(1));
    let began = since + 10 * second;
    let at = |waited: Duration, timeout: Duration| {
        without_standstill(since, began, began + waited, timeout) - since
    };
    // It was woken, or was slow.
    assert_eq!(at(second, 600 * second), Duration::ZERO);
    assert_eq!(at(604 * second, 600 * second), Duration::ZERO);
    // It has as much time left as it had before.
    assert_eq!(at(900 * second, 600 * second), 900 * second);
    assert_eq!(at(second, Duration::MAX), Duration::ZERO);
}

#[test]
fn of_many_nodes_that_come_a_line_a_second_is_shown_and_the_last_at_once() {
    let left = |nodes, max, milliseconds| left_to_show(nodes, max, Duration::from_millis(milliseconds));
    assert_eq!((left(1, FEW_NODES, 0), left(500, 500, 0), left(499, 500, 1000)), (None, None, None));
    assert_eq!(left(499, 500, 300), Some(Duration::from_millis(700)));
}

#[test]
fn whoever_stood_still_while_it_joined_blames_nobody() {
    let others = Others::new();
    others.join(1, "elsewhere", 0, None);
    let (cluster, refused) = (others.cluster().node_rank(1), Refused::new().unwrap());
    let job = Job::new("unused", WorldSize::new(1).unwrap());
    let mut node = MultiNode::new(&job, &cluster, "test".to_owned(), refused.refusals()).unwrap();
    while !node.view.state.present().any(|other| other.serves_store) {
        assert!(!others.limit.has_passed(), "it has not read the first entry");
        node.take_news();
        std::thread::sleep(Duration::from_millis(1));
    }
    // The store was reached before.
    node.take_news();
    let error = node.store_is_lost(stopped_while_joining());
    assert!(error.is_peer_left() && !error.to_string().contains("node 0"), "{error}");
    let error = node.store_is_lost(Error::timeout("no answer"));
    assert!(error.to_string().contains("node 0 (elsewhere) does not answer"), "{error}");
    // What is wrong with the log, or with a call, is what it is.
    for error in [Error::protocol("an entry cannot be decoded"), Error::invalid_argument("no number")] {
        let told = node.store_is_lost(error.clone());
        assert_eq!((told.kind(), told.cause()), (error.kind(), error.cause()));
        assert!(told.remedy().is_some() && !told.to_string().contains("node 0"), "{told}");
    }
    let closed = Error::new(Kind::Io, "the store has closed the connection");
    let error = node.store_is_lost(closed.clone());
    assert!(error.to_string().contains("node 0 (elsewhere) is gone"), "{error}");
    // Whose machine has slept has lost its connections, and node 0 is there.
    node.view.stood_still = Some(Duration::from_secs(1200));
    let error = node.store_is_lost(closed);
    assert!(error.is_peer_left() && error.to_string().contains("stood still for 1200 s"), "{error}");
    assert!(!error.to_string().contains("node 0") && error.remedy().is_some(), "{error}");
}

#[test]
fn who_serves_the_store_and_stood_still_does_not_blame_those_who_have_ended_for_that() {
    let others = Others::new();
    others.join(1, "elsewhere", 0, None);
    let (cluster, refused) = (others.cluster().node_rank(1), Refused::new().unwrap());
    let job = Job::new("unused", WorldSize::new(1).unwrap());
    let mut node = MultiNode::new(&job, &cluster, "test".to_owned(), refused.refusals()).unwrap();
    node.me = NodeId(7);
    node.reached = Some(Reached { served_at: Some(others.server.local_addr()), store_address: None });
    let mut running = MembershipState::default();
    for (id, host, rank) in [(node.me, "here", 0), (NodeId(8), "further", 1)] {
        let (host, role) = (host.to_owned(), "default".to_owned());
        let (node_rank, serves_store) = (Some(rank), rank == 0);
        let node = Node { id, host, workers: 1, node_rank, serves_store, process: None, role };
        running.apply(Entry::Join { node, settings: SETTINGS }).unwrap();
    }
    let time = Some(Duration::from_secs(14));
    // When the end begins, and when the workers have ended.
    for (first, later) in [(None, time), (time, None)] {
        (node.view.state, node.view.stood_still) = (Arc::new(running.clone()), first);
        node.note_end();
        let left = Entry::Left { node: NodeId(8), why: Departure::Ended };
        Arc::make_mut(&mut node.view.state).apply(left).unwrap();
        node.note_end();
        node.view.stood_still = later;
        let ended = Entry::Ended { round: running.round(), node: node.me, succeeded: false };
        Arc::make_mut(&mut node.view.state).apply(ended).unwrap();
        node.note_end();
        let job_end = node.view.state.job_end().unwrap();
        match (first, node.outcome(job_end)) {
            (None, Ok(Outcome::NodeFailed(failure))) => {
                assert!(
                    failure.to_string().starts_with("node 1 (further): its launcher has ended"),
                    "{failure}"
                );
            }
            (Some(_), Err(error)) => {
                let said = error.to_string();
                assert!(error.is_peer_left() && said.contains("stood still for 14 s"), "{said}");
                assert!(
                    said.contains("node 1 (further) got no answer") && error.remedy().is_some(),
                    "{said}"
                );
            }
            (_, outcome) => panic!("{outcome:?}"),
        }
    }
}

#[test]
fn a_signal_while_other_nodes_are_waited_for_does_not_hide_the_failure() {
    let folder = tempfile::tempdir().unwrap();
    let cluster = Cluster::file(2, 2, folder.path().join("launchers")).unwrap().local_addr("127.0.0.1");
    let (job, refused) = (Job::new("unused", WorldSize::new(1).unwrap()), Refused::new().unwrap());
    let mut node = MultiNode::new(&job, &cluster, "test".to_owned(), refused.refusals()).unwrap();
    let mut state = MembershipState::default();
    for id in [7, 8] {
        let (id, host, role) = (NodeId(id), "here".to_owned(), "default".to_owned());
        let node = Node { id, host, workers: 1, node_rank: None, serves_store: false, process: None, role };
        state.apply(Entry::Join { node, settings: SETTINGS }).unwrap();
    }
    node.view.state = Arc::new(state.clone());
    assert!(matches!(node.leave_at(Signal::INT), Outcome::Interrupted(Signal::INT)));
    let failure = WorkerFailure { rank: 1, blames: None, detail: Vec::new() };
    state.apply(Entry::Failed { round: 0, node: NodeId(8), failure }).unwrap();
    node.view.state = Arc::new(state);
    let outcome = node.leave_at(Signal::INT);
    assert!(matches!(&outcome, Outcome::Failed(failure) if failure.rank.get() == 1), "{outcome:?}");
    // It is a first signal all the same, and the next one ends the wait for those who have not heard of the end.
    assert!(node.was_interrupted);
}

#[test]
fn the_store_of_a_round_ends_with_the_round() {
    let folder = tempfile::tempdir().unwrap();
    let cluster = Cluster::file(1, 1, folder.path().join("launchers")).unwrap().local_addr("127.0.0.1");
    let (job, refused) = (Job::new("unused", WorldSize::new(1).unwrap()), Refused::new().unwrap());
    let mut node = MultiNode::new(&job, &cluster, "test".to_owned(), refused.refusals()).unwrap();
    let mut observer = |_: Event<'_>| ControlFlow::Continue(());
    let mut control = Control { signals: None, observer: &mut observer, refused, stops: false };
    let gathered = node.gather(&mut control).unwrap();
    assert!(matches!(gathered, Gathered::Placed(_)) && node.store.is_some(), "{gathered:?}");
    let next = node.after_attempt(AttemptEnd::Elsewhere, &mut control).unwrap();
    assert!(matches!(next, AfterAttempt::Restart) && node.store.is_none(), "{next:?}");
}

#[test]
fn an_observer_ends_the_wait_for_other_nodes() {
    let folder = tempfile::tempdir().unwrap();
    let cluster = Cluster::file(2, 2, folder.path().join("launchers")).unwrap().local_addr("127.0.0.1");
    let (job, refused) = (Job::new("unused", WorldSize::new(1).unwrap()), Refused::new().unwrap());
    let mut node = MultiNode::new(&job, &cluster, "test".to_owned(), refused.refusals()).unwrap();
    let mut observer = |event: Event<'_>| match event {
        Event::Gathering { .. } => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    };
    let mut control = Control { signals: None, observer: &mut observer, refused, stops: false };
    let gathered = node.gather(&mut control).unwrap();
    assert!(matches!(gathered, Gathered::Over(Outcome::Stopped)) && node.has_left, "{gathered:?}");
}

#[test]
fn a_disk_without_room_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let cluster = Cluster::file(1, 1, folder.path().join("launchers")).unwrap().local_addr("127.0.0.1");
    let (job, refused) = (Job::new("unused", WorldSize::new(1).unwrap()), Refused::new().unwrap());
    let node = MultiNode::new(&job, &cluster, "test".to_owned(), refused.refusals()).unwrap();
    let remedy = |kind: ErrorKind| {
        let error = node.store_is_lost(Error::io("cannot add", std::io::Error::from(kind)));
        error.remedy().map(str::to_owned).unwrap_or_default()
    };
    assert!(remedy(ErrorKind::StorageFull).contains("make room on the disk"));
    assert!(remedy(ErrorKind::NotConnected).contains("is the launchers' store up"));
}

/// It has its place, and is given up, before it looks at what the log says: as if it had been stopped in that moment.
#[test]
fn a_replacement_that_is_given_up_at_once_is_told_so() {
    let others = Others::new();
    let (log, limit) = (&others.log, others.limit);
    others.join(1, "elsewhere", 0, None);
    // A process that had the number of this one is gone.
    let gone = process::own().map(|mut process| {
        process.started += 1;
        process
    });
    others.join(2, &host::name(), 1, gone);
    let cluster = others.cluster().node_rank(1);
    let job = Job::new("unused", WorldSize::new(1).unwrap());
    let refused = Refused::new().unwrap();
    let mut node = MultiNode::new(&job, &cluster, "test".to_owned(), refused.refusals()).unwrap();
    let first = node.me;
    while node.me == first {
        assert!(!limit.has_passed(), "it has not asked for the place");
        node.take_news();
        node.check().unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
    // What is known of the first number is not about the second.
    node.check().unwrap();
    let entries: Vec<Entry> = (2..5)
        .map(|index| match log.read(index, limit).unwrap() {
            Read::Entry(entry) => entry,
            other => panic!("{other:?}"),
        })
        .collect();
    assert!(matches!(&entries[0], Entry::Join { node, .. } if node.id == first), "{entries:?}");
    assert_eq!(entries[1], Entry::Left { node: NodeId(2), why: Departure::Replaced });
    assert!(matches!(&entries[2], Entry::Join { node: again, .. } if again.id == node.me), "{entries:?}");
    // A heartbeat under the first number, which may still be on its way, finds a counter.
    assert!(others.store.add(&first.heartbeat_key(), 0, limit).unwrap() > 0);
    let why = Departure::Silent(Duration::from_secs(1));
    log.append(&Entry::Left { node: node.me, why }, limit).unwrap();
    while !node.is_given_up() {
        assert!(!limit.has_passed(), "it does not know that it was given up");
        node.take_news();
        std::thread::sleep(Duration::from_millis(1));
    }
    let error = node.check().unwrap_err();
    assert!(error.to_string().contains("the other nodes got no heartbeat from this node"), "{error}");
}
