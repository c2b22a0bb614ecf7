//! Launchers that join, stand still and leave, at stores that are slow or have other clients.

use std::io::Read;
use std::net::{TcpListener, TcpStream};

use super::super::membership::Departure;
use super::super::rendezvous_store::connect;
use super::*;
use crate::cluster::Hosting;
use crate::credentials::Credentials;
use crate::store::{MemoryStore, TcpStoreServer};

/// A relay between clients and a store, which records their requests.
struct Between {
    listener: TcpListener,
    heard: Arc<Mutex<Vec<u8>>>,
}

impl Between {
    fn listen() -> Self {
        Self { listener: TcpListener::bind("127.0.0.1:0").unwrap(), heard: Arc::default() }
    }

    fn port(&self) -> u16 {
        self.listener.local_addr().unwrap().port()
    }

    /// Passes everything on, the first of it after a pause in each direction.
    fn pass_to(&self, store: SocketAddr, pause: Duration) {
        let (listener, heard) = (self.listener.try_clone().unwrap(), Arc::clone(&self.heard));
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (client, store) = (client.unwrap(), TcpStream::connect(store).unwrap());
                let back = (store.try_clone().unwrap(), client.try_clone().unwrap(), None);
                for (mut from, mut to, heard) in [(client, store, Some(Arc::clone(&heard))), back] {
                    std::thread::spawn(move || {
                        std::thread::sleep(pause);
                        let mut bytes = [0; 4096];
                        while let Ok(count @ 1..) = from.read(&mut bytes) {
                            if to.write_all(&bytes[..count]).is_err() {
                                return;
                            }
                            if let Some(heard) = &heard {
                                heard.lock().extend(&bytes[..count]);
                            }
                        }
                    });
                }
            }
        });
    }

    /// Waits until a client has said this.
    fn hears(&self, words: &[u8], limit: Deadline) {
        while !self.heard.lock().windows(words.len()).any(|said| said == words) {
            assert!(!limit.has_passed(), "nobody has said {:?}", String::from_utf8_lossy(words));
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn whoever_serves_the_store_joins_first() {
    let server = TcpStoreServer::bind(([127, 0, 0, 1], 0).into()).unwrap();
    let address = server.local_addr();
    let between = Between::listen();
    between.pass_to(address, Duration::ZERO);
    let cluster = Cluster::new(2, 2, "127.0.0.1", between.port()).unwrap().hosting(Hosting::Connect);
    let settings = Settings { min_nodes: 2, max_nodes: 2, max_restarts: 0 };
    let node = |id, serves_store| Node {
        id: NodeId(id),
        host: "here".to_owned(),
        workers: 1,
        node_rank: None,
        serves_store,
        process: None,
        role: "default".to_owned(),
    };
    let mut handler = RendezvousHandler::start(
        &cluster,
        Access::default(),
        "job".to_owned(),
        move |serves| node(7, serves),
        settings,
    )
    .unwrap();
    let limit = Deadline::after(Duration::from_secs(20));
    while handler.look().0.is_none() {
        assert!(!limit.has_passed());
        std::thread::sleep(Duration::from_millis(1));
    }
    // It asks for the first entry, and waits.
    between.hears(b"log/0", limit);
    let store = TcpStore::connect(address, limit).unwrap();
    let store: SharedStore = Arc::new(PrefixStore::new("job", Arc::new(store)));
    assert!(!store.check(&["log/0"], limit).unwrap(), "it did not wait");

    let log = Log::<MembershipState>::new(store, Mac::none());
    log.append(&Entry::Join { node: node(1, true), settings }, limit).unwrap();
    let next = log.read(1, limit).unwrap();
    assert_eq!(next, crate::log::Read::Entry(Entry::Join { node: node(7, false), settings }));
}

#[test]
fn a_panic_of_the_thread_is_told() {
    let server = TcpStoreServer::bind(([127, 0, 0, 1], 0).into()).unwrap();
    let cluster = Cluster::new(2, 2, "127.0.0.1", server.local_addr().port()).unwrap();
    let settings = Settings { min_nodes: 2, max_nodes: 2, max_restarts: 0 };
    let mut handler = RendezvousHandler::start(
        &cluster.hosting(Hosting::Connect),
        Access::default(),
        "job".to_owned(),
        |_| panic!("it knows no node"),
        settings,
    )
    .unwrap();
    let limit = Deadline::after(Duration::from_secs(20));
    let error = loop {
        if let Some(error) = handler.look().1.lost {
            break error;
        }
        assert!(!limit.has_passed(), "nobody has heard of it");
        std::thread::sleep(Duration::from_millis(1));
    };
    assert!(error.is_aborted() && error.to_string().contains("panicked"), "{error}");
    assert!(error.remedy().is_some(), "{error}");
}

#[test]
fn what_a_launcher_waits_for_when_the_job_is_over_is_told_to_its_caller_who_may_end_that() {
    let cluster = Cluster::at_any_port(2, "127.0.0.1").unwrap();
    let settings = Settings { min_nodes: 2, max_nodes: 2, max_restarts: 0 };
    let node = |serves_store| Node {
        id: NodeId(7),
        host: "here".to_owned(),
        workers: 1,
        node_rank: Some(0),
        serves_store,
        process: None,
        role: "default".to_owned(),
    };
    let mut handler =
        RendezvousHandler::start(&cluster, Access::default(), "job".to_owned(), node, settings).unwrap();
    let limit = Deadline::after(Duration::from_secs(60));
    let address = loop {
        if let Some(address) = handler.look().0.and_then(|reached| reached.served_at) {
            break address;
        }
        assert!(!limit.has_passed(), "it serves no store");
        std::thread::sleep(Duration::from_millis(1));
    };
    let _stays = TcpStore::connect(address, limit).unwrap();
    let mut told = Vec::new();
    handler.finish(&mut |news: Option<&str>| {
        told.extend(news.map(str::to_owned));
        told.is_empty()
    });
    assert!(
        told.len() == 1 && told[0].contains("waits, 20 s at most, until the launchers of other nodes"),
        "{told:?}"
    );
}

#[test]
fn whoever_is_given_up_leaves_no_key() {
    let server = TcpStoreServer::bind(([127, 0, 0, 1], 0).into()).unwrap();
    let (address, limit) = (server.local_addr(), Deadline::after(Duration::from_secs(60)));
    let store = TcpStore::connect(address, limit).unwrap();
    let store: SharedStore = Arc::new(PrefixStore::new("job", Arc::new(store)));
    let log = Log::<MembershipState>::new(Arc::clone(&store), Mac::none());
    let settings = Settings { min_nodes: 2, max_nodes: 3, max_restarts: 0 };
    let node = |id| Node {
        id: NodeId(id),
        host: "here".to_owned(),
        workers: 1,
        node_rank: None,
        serves_store: false,
        process: None,
        role: "default".to_owned(),
    };
    store.add(&NodeId(1).heartbeat_key(), 1, limit).unwrap();
    log.append(&Entry::Join { node: node(1), settings }, limit).unwrap();
    let cluster = Cluster::new(2, 3, "127.0.0.1", address.port()).unwrap().hosting(Hosting::Connect);
    // Nobody is missed here.
    let cluster = cluster.keep_alive(Duration::from_secs(1), Some(3600));
    let mut handler =
        RendezvousHandler::start(&cluster, Access::default(), "job".to_owned(), move |_| node(7), settings)
            .unwrap();
    let mut wait_until = |what: &dyn Fn(&View<MembershipState>) -> bool| {
        while !what(&handler.look().1) {
            assert!(!limit.has_passed());
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    wait_until(&|view| view.state.present().count() == 2);
    let key = NodeId(7).heartbeat_key();
    assert!(store.check(&[&key], limit).unwrap());
    let why = Departure::Silent(Duration::from_secs(1));
    log.append(&Entry::Left { node: NodeId(7), why }, limit).unwrap();
    wait_until(&View::is_given_up);
    drop(handler);
    while store.check(&[&key], limit).unwrap() {
        assert!(!limit.has_passed(), "its key has stayed");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn whoever_ends_before_it_has_joined_leaves_no_key() {
    let server = TcpStoreServer::bind(([127, 0, 0, 1], 0).into()).unwrap();
    let (address, limit) = (server.local_addr(), Deadline::after(Duration::from_secs(60)));
    let store = PrefixStore::new("job", Arc::new(TcpStore::connect(address, limit).unwrap()));
    let settings = Settings { min_nodes: 2, max_nodes: 2, max_restarts: 0 };
    let node = |_| Node {
        id: NodeId(7),
        host: "here".to_owned(),
        workers: 1,
        node_rank: None,
        serves_store: false,
        process: None,
        role: "default".to_owned(),
    };
    let cluster = Cluster::new(2, 2, "127.0.0.1", address.port()).unwrap().hosting(Hosting::Connect);
    let handler =
        RendezvousHandler::start(&cluster, Access::default(), "job".to_owned(), node, settings).unwrap();
    let key = NodeId(7).heartbeat_key();
    let wait_until_it_is_there = |is_there: bool| {
        while store.check(&[&key], limit).unwrap() != is_there {
            assert!(!limit.has_passed(), "is its key there? {}", !is_there);
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    // Nobody has registered the job, so it waits.
    wait_until_it_is_there(true);
    drop(handler);
    wait_until_it_is_there(false);
}

#[test]
fn launchers_that_come_and_go_without_end_keep_a_small_store() {
    const LAUNCHERS: u64 = 300;
    let limit = Deadline::after(Duration::from_secs(60));
    let store: SharedStore = Arc::new(MemoryStore::new());
    let replica = Arc::new(Replica::<MembershipState>::new(|_| ()));
    let log = Log::new(Arc::clone(&store), Mac::none());
    let mut first = Participant::start_at_first_entry(log, Arc::clone(&replica)).unwrap();
    let settings = Settings { min_nodes: 2, max_nodes: 3, max_restarts: 0 };
    let join = |id: NodeId| {
        let host = "here".to_owned();
        let node = Node {
            id,
            host,
            workers: 1,
            node_rank: None,
            serves_store: false,
            process: None,
            role: "default".to_owned(),
        };
        store.add(&id.heartbeat_key(), 1, limit).unwrap();
        Entry::Join { node, settings }
    };
    let id = NodeId(7);
    assert!(first.enter(id, id.heartbeat_key(), &join(id), limit).unwrap());
    let (interval, silence) = (Duration::from_millis(5), Duration::from_secs(1));
    first.watch(Heartbeats { interval, silence, must_be_answered: true }, |_, _| Ok(())).unwrap();
    for id in (100..100 + LAUNCHERS).map(NodeId) {
        first.append(&join(id), limit).unwrap();
        first.append(&Entry::Left { node: id, why: Departure::Signal(15) }, limit).unwrap();
    }
    // The entries since the last state, of which each two name one that has gone; the first entry, the base and its state, how far was
    // removed, and the heartbeats of the one that is there.
    while store.num_keys(limit).unwrap() > 110 {
        assert!(!limit.has_passed(), "the log has {} keys", store.num_keys(limit).unwrap());
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(store.check(&[&id.heartbeat_key()], limit).unwrap());
    assert!(replica.view().lost.is_none());
    first.close();
}

#[test]
fn a_job_that_regroups_without_end_keeps_a_small_store_and_takes_newcomers() {
    const ROUNDS: u64 = 500;
    let limit = Deadline::after(Duration::from_secs(60));
    let store: SharedStore = Arc::new(MemoryStore::new());
    let log = |key: Option<&[u8; 32]>| Log::new(Arc::clone(&store), Mac::new(key, "job"));
    let start = |key| {
        let replica = Arc::new(Replica::<MembershipState>::new(|_| ()));
        (Participant::start_at_first_entry(log(key), Arc::clone(&replica)).unwrap(), replica)
    };
    let wait_until = |replica: &Replica<MembershipState>, round: u64| {
        let mut view = replica.view();
        while view.state.round() < round {
            assert!(!limit.has_passed(), "round {} of {round}", view.state.round());
            replica.wait_until(&mut view, limit.instant());
        }
    };
    let (mut first, replica) = start(Some(&[1; 32]));
    let settings = Settings { min_nodes: 1, max_nodes: 1, max_restarts: 0 };
    let id = NodeId(7);
    let node = Node {
        id,
        host: "here".to_owned(),
        workers: 1,
        node_rank: None,
        serves_store: false,
        process: None,
        role: "default".to_owned(),
    };
    first.announce(&id.heartbeat_key(), limit).unwrap();
    let join = Entry::Join { node, settings };
    assert!(first.enter(id, id.heartbeat_key(), &join, limit).unwrap());
    let (interval, silence) = (Duration::from_millis(5), Duration::from_secs(1));
    first.watch(Heartbeats { interval, silence, must_be_answered: true }, |_, _| Ok(())).unwrap();
    for round in 0..ROUNDS {
        first.append(&Entry::Ended { round, node: id, succeeded: false }, limit).unwrap();
    }
    wait_until(&replica, ROUNDS);
    // The entries since the last state, which is soon that of the last hundred rounds; the first entry, the base and its state, how far was
    // removed, and heartbeats.
    while store.num_keys(limit).unwrap() > 70 {
        assert!(!limit.has_passed(), "the log has {} keys", store.num_keys(limit).unwrap());
        std::thread::sleep(Duration::from_millis(5));
    }
    let (newcomer, its) = start(Some(&[1; 32]));
    wait_until(&its, ROUNDS);
    assert_eq!(its.view().state, replica.view().state);
    newcomer.close();
    // Whoever has another key, or none, is told so.
    for key in [Some(&[2; 32]), None] {
        let (stranger, its) = start(key);
        let mut view = its.view();
        while view.lost.is_none() {
            assert!(!limit.has_passed(), "it has read {:?}", view.state);
            its.wait_until(&mut view, limit.instant());
        }
        let error = view.lost.clone().unwrap();
        drop(view);
        stranger.close();
        assert!(error.remedy().is_some_and(|remedy| remedy.contains("--job-key-file")), "{error}");
    }
    first.close();
}

#[test]
fn a_store_that_is_slow_to_answer_is_waited_for() {
    let server = TcpStoreServer::bind(([127, 0, 0, 1], 0).into()).unwrap();
    let between = Between::listen();
    between.pass_to(server.local_addr(), Duration::from_secs(1));
    let cluster = Cluster::new(2, 2, "127.0.0.1", between.port()).unwrap();
    let deadline = Deadline::after(Duration::from_secs(20));
    let replica = Replica::new(|_| ());
    let store = connect(&cluster, Credentials::none(), None, &replica, deadline, &|| false).unwrap();
    assert_eq!(store.add("key", 1, deadline).unwrap(), 1);
}

#[test]
fn a_job_that_nobody_has_begun_is_named() {
    let server = TcpStoreServer::bind(([127, 0, 0, 1], 0).into()).unwrap();
    let cluster = Cluster::new(2, 2, "127.0.0.1", server.local_addr().port()).unwrap();
    let deadline = Deadline::after(Duration::from_millis(20));
    let error = wait_for_host(&Replica::new(|_| ()), &cluster, deadline).unwrap_err();
    assert!(
        error.is_timeout() && error.to_string().contains("no launcher has registered this job"),
        "{error}"
    );
    assert!(error.remedy().unwrap().contains("--rdzv-id"));
}
