use std::cell::RefCell;
use std::net::{Ipv4Addr, TcpListener};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread;
use std::time::Instant;

use phalanx_proto::rendezvous::Identity;

use super::*;
use crate::env::RendezvousEndpoint;
use crate::group::{GroupOptions, ProcessGroup};
use crate::interrupt::interruptible;
use crate::store::{Store, far_away};

const RANK_0: tcp::Host = tcp::Host::Rank0 { bind: None };

fn world(size: u32) -> WorldSize {
    WorldSize::new(size).unwrap()
}

fn config(rank: u32, size: u32) -> RankConfig {
    RankConfig::given("test", Some(Rank::new(rank)), Some(world(size))).unwrap()
}

/// A process of its own, though it is a thread.
fn identity(process: u32, host: &str) -> Identity {
    let process = process.to_string();
    Identity { host: host.into(), process: process.clone(), host_id: host.into(), process_id: process }
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

/// Of this host, and of one test: nobody else is given its port meanwhile.
fn free_address() -> String {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let ip = [127, 0, 7, NEXT.fetch_add(1, Ordering::Relaxed)];
    TcpListener::bind((Ipv4Addr::from(ip), 0)).unwrap().local_addr().unwrap().to_string()
}

/// Runs `join` for each of `configs` in a thread of its own, and keeps all worlds until every thread is done.
fn run<T: Send>(configs: &[RankConfig], join: impl Fn(&RankConfig, u32) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let join = &join;
        let threads: Vec<_> =
            configs.iter().zip(0..).map(|(config, i)| scope.spawn(move || join(config, i))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn configs(size: u32) -> Vec<RankConfig> {
    (0..size).map(|rank| config(rank, size)).collect()
}

/// Every rank hears every other one in the store that it got.
fn talk(worlds: &[Rendezvous]) {
    for world in worlds {
        world.store.set(&format!("said/{}", world.rank), b"here", soon()).unwrap();
    }
    for world in worlds {
        for rank in world.world_size.ranks() {
            assert_eq!(world.store.get(&format!("said/{rank}"), soon()).unwrap(), b"here");
        }
    }
}

#[test]
fn a_world_of_more_ranks_than_a_store_serves_is_refused_at_once() {
    let size = crate::store::MAX_RANKS + 1;
    // Nothing listens there, and rank 7 would wait for it.
    let refused = |host| {
        let late = Deadline::after(Duration::from_secs(600));
        tcp::join("127.0.0.1:9", host, &config(7, size), &identity(7, "host"), late).unwrap_err()
    };
    for host in [RANK_0, tcp::Host::Launcher] {
        let error = refused(host);
        let said = error.to_string();
        assert!(error.is_environment() && said.contains("8001 ranks") && said.contains("file:///"), "{said}");
    }
}

#[test]
fn urls_are_checked() {
    assert_eq!(Url::parse("env://").unwrap(), Url::Env);
    assert_eq!(Url::parse("tcp://[::1]:29500").unwrap(), Url::Tcp("[::1]:29500".into()));
    assert_eq!(Url::parse("file:///a/b").unwrap(), Url::File("/a/b".into()));
    for bad in
        ["", "tcp://host", "tcp://:1", "tcp://h:0", "tcp://h:70000", "file://a", "file:///", "etcd://a:1"]
    {
        let error = Url::parse(bad).unwrap_err();
        assert!(error.is_invalid_argument() && error.remedy().is_some(), "{error}");
    }
    let error = from_url("tcp://127.0.0.1:1", None, None, Duration::ZERO).unwrap_err();
    assert!(error.to_string().contains("needs a rank"), "{error}");
}

#[test]
fn a_rank_and_a_world_size_that_a_program_gives_stand_for_the_variables() {
    const MASTER: [(&str, &str); 2] = [("MASTER_ADDR", "node0"), ("MASTER_PORT", "29500")];
    let read = |set: &[(&str, &str)], rank: Option<u32>, size: Option<u32>| {
        let lookup =
            |name: &str| set.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        launched(lookup, rank.map(Rank::new), size.map(world))
    };
    let with = |more: &[(&'static str, &'static str)]| [&MASTER[..], more].concat();
    // Those that are empty count as unset, and a program goes before those that are set.
    let launchers = [vec![], vec![("RANK", " ")], vec![("RANK", "0"), ("WORLD_SIZE", "4")]];
    for set in launchers.map(|more| with(&more[..])) {
        let env = read(&set, Some(1), Some(2)).unwrap().unwrap();
        assert_eq!((env.rank.get(), env.world_size.get()), (1, 2), "{set:?}");
        let address = "node0".to_owned();
        assert_eq!(env.rendezvous, RendezvousEndpoint::Master { address, port: 29500 }, "{set:?}");
    }
    let said = read(&MASTER, Some(1), None).unwrap_err().to_string();
    assert!(said.contains("WORLD_SIZE is not set") && !said.contains("RANK is not set"), "{said}");
    assert!(read(&MASTER, None, None).unwrap_err().to_string().contains("RANK is not set"));
    assert!(read(&MASTER, Some(2), Some(2)).is_err());
    assert!(read(&MASTER[..0], Some(1), Some(2)).unwrap().is_none());
}

#[test]
fn without_a_launcher_only_rank_0_of_one_is_a_world_of_one() {
    let of = |rank: Option<u32>, size: Option<u32>| {
        without_launcher(rank.map(Rank::new), size.map(world)).map(|alone| alone.world_size)
    };
    for (rank, size) in [(None, None), (None, Some(1)), (Some(0), Some(1))] {
        assert_eq!(of(rank, size).unwrap(), WorldSize::ONE);
    }
    for (rank, size, said) in [
        (Some(3), None, "WORLD_SIZE is not set"),
        (Some(0), None, "WORLD_SIZE is not set"),
        (None, Some(2), "MASTER_PORT, which are not set"),
        (Some(1), Some(2), "MASTER_PORT, which are not set"),
        (Some(1), Some(1), "rank 1 is outside a world of 1"),
    ] {
        let error = of(rank, size).unwrap_err();
        assert!(error.to_string().contains(said), "{error}");
    }
}

#[test]
fn rank_0_s_store_has_the_record_of_each_process_that_it_empties_when_that_ends() {
    let address = free_address();
    let worlds: Vec<Rendezvous> = run(&configs(2), |config, i| {
        tcp::join(&address, RANK_0, config, &identity(i, "here"), soon()).unwrap()
    });
    let store = TcpStore::connect(&address, soon()).unwrap();
    for config in configs(2) {
        let key = tcp::record_key(&config).unwrap();
        assert!(store.check(&[&key], soon()).unwrap(), "{key}");
    }
    drop(store);
    // Rank 0 last: it serves the store as long as others use it.
    worlds.into_iter().rev().for_each(drop);
}

#[test]
fn a_rank_that_fails_after_the_roll_call_tells_the_others_why() {
    let store: SharedStore = Arc::new(MemoryStore::new());
    let mut arrived = run(&configs(2), |config, i| {
        arrival::arrive(&store, None, config, &identity(i, "here"), soon()).unwrap().met().unwrap()
    });
    // It reads there on which host each rank is.
    store.set("phalanx/0/rank/0", b"garbage", soon()).unwrap();
    let late = arrived.pop().unwrap();
    let here = Ipv4Addr::LOCALHOST.into();
    let error = config(1, 2).met(late, here, KeepAlive(Held::Nothing), soon()).unwrap_err();
    assert_eq!(error.rank(), Some(Rank::new(1)), "{error}");
    // Rank 0 has read it before, and waits in the group's store.
    let Arrived { store, group_number, .. } = arrived.pop().unwrap();
    let main = Rendezvous {
        store,
        rank: Rank::MAIN,
        world_size: world(2),
        local_world_size: 2,
        group_number: Some(group_number),
        ..alone()
    };
    let options = GroupOptions { timeout: Duration::from_secs(120), ..GroupOptions::default() };
    let told = ProcessGroup::join(main, options).err().unwrap();
    assert!(told.rank() == Some(Rank::new(1)) && told.to_string().contains("garbage"), "{told}");
}

#[test]
fn a_world_of_one_needs_nobody() {
    let alone = alone();
    assert_eq!((alone.world_size, alone.local_world_size), (WorldSize::ONE, 1));
    assert!(alone.interface.is_loopback());
    // Not even a free port.
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    tcp::join(&address, RANK_0, &config(0, 1), &identity(0, "a"), soon()).unwrap();
}

#[test]
fn ranks_meet_over_tcp_and_know_their_neighbours() {
    let address = free_address();
    let worlds: Vec<Rendezvous> = run(&configs(4), |config, i| {
        tcp::join(&address, RANK_0, config, &identity(i, "here"), soon()).unwrap()
    });
    talk(&worlds);
    let locals: Vec<(u32, u32)> =
        worlds.iter().map(|world| (world.local_rank, world.local_world_size)).collect();
    assert_eq!(locals, [(0, 4), (1, 4), (2, 4), (3, 4)]);
    assert!(worlds.iter().all(|world| world.interface.is_loopback()));
    // Rank 0 may go first: the others still finish, and it does not wait for its whole grace.
    let mut worlds = worlds.into_iter();
    let main = worlds.next().unwrap();
    let started = Instant::now();
    thread::scope(|scope| {
        scope.spawn(move || drop(main));
        for world in worlds {
            assert_eq!(world.store.get("said/0", soon()).unwrap(), b"here");
        }
    });
    assert!(started.elapsed() < GRACE);
}

#[test]
fn under_an_agent_every_rank_is_a_client_and_restarts_do_not_meet() {
    let agent = TcpStoreServer::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let port = agent.local_addr().port().to_string();
    let join = |rank: u32, restart: u32, process: u32| {
        let env = LaunchEnv::from_lookup(|name| {
            Some(match name {
                "RANK" | "LOCAL_RANK" => rank.to_string(),
                "WORLD_SIZE" | "LOCAL_WORLD_SIZE" => "2".to_owned(),
                "MASTER_ADDR" => "localhost".to_owned(),
                "MASTER_PORT" => port.clone(),
                "TORCHELASTIC_USE_AGENT_STORE" => "True".to_owned(),
                "TORCHELASTIC_RESTART_COUNT" => restart.to_string(),
                _ => return None,
            })
        });
        env::join(&env.unwrap().unwrap(), Credentials::default(), &identity(process, "here"), soon()).unwrap()
    };
    let join = &join;
    for restart in 0..2 {
        // The same processes may meet twice in one life.
        for _ in 0..2 {
            let worlds: Vec<Rendezvous> = run(&configs(2), |config, i| join(config.rank.get(), restart, i));
            assert!(!worlds[0].store.check(&["said/0"], soon()).unwrap());
            talk(&worlds);
            assert_eq!(worlds[1].generation, Generation(u64::from(restart)));
            assert_eq!((worlds[1].local_rank, worlds[1].local_world_size), (1, 2));
        }
    }
}

#[test]
fn missing_ranks_are_named_on_every_rank_that_came() {
    let address = free_address();
    let came: Vec<RankConfig> = [0, 2].map(|rank| config(rank, 4)).to_vec();
    let errors = run(&came, |config, i| {
        let started = Instant::now();
        // Enough for both to come on a busy machine.
        let deadline = Deadline::after(Duration::from_secs(6));
        let error = tcp::join(&address, RANK_0, config, &identity(i, "a"), deadline).unwrap_err();
        assert!(started.elapsed() < Duration::from_secs(20));
        error
    });
    for error in errors {
        let said = error.to_string();
        assert!(error.is_timeout() && said.contains("ranks 1, 3 of 4 have not arrived"), "{said}");
        assert_eq!(error.peer(), Some(Rank::new(1)));
    }
}

#[test]
fn missing_ranks_are_named_over_a_slow_network_too() {
    let server = TcpStoreServer::bind(([127, 0, 0, 1], 0).into()).unwrap();
    // For a round trip for each, the time that is kept for this would be too short.
    let (address, _) = far_away(&server, Duration::from_millis(150));
    let store: SharedStore = Arc::new(TcpStore::connect(address, soon()).unwrap());
    let deadline = Deadline::after(Duration::from_secs(10));
    let error = arrival::arrive(&store, None, &config(0, 64), &identity(0, "a"), deadline).err().unwrap();
    let said = error.to_string();
    assert!(said.contains("ranks 1, 2, 3, 4, 5, 6, 7, 8 and more of 64 have not arrived"), "{said}");
}

/// Joins as each of `configs`, in any kind of store: all must fail, and say `what`.
fn all_fail(configs: &[RankConfig], what: &str) {
    let address = free_address();
    let deadline = soon();
    let over_tcp = run(configs, |config, i| {
        tcp::join(&address, RANK_0, config, &identity(i, "a"), deadline).unwrap_err()
    });
    let store: SharedStore = Arc::new(MemoryStore::new());
    let in_memory = run(configs, |config, i| {
        arrival::arrive(&store, None, config, &identity(i, "a"), deadline).err().unwrap()
    });
    for error in over_tcp.into_iter().chain(in_memory) {
        assert!(error.is_mismatch() && error.to_string().contains(what), "{error}");
    }
}

#[test]
fn a_rank_that_comes_twice_is_an_error_on_every_rank() {
    // With rank 2 missing, so that the world cannot be complete before the second process comes.
    all_fail(&[config(0, 3), config(1, 3), config(1, 3)], "two processes have rank 1: process ");
}

#[test]
fn world_sizes_that_differ_are_an_error_on_every_rank() {
    all_fail(&[config(0, 2), config(1, 3)], "expects a world of");
}

#[test]
fn a_port_in_use_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let error =
        tcp::join(&address.to_string(), RANK_0, &config(0, 2), &identity(0, "a"), soon()).unwrap_err();
    let said = error.to_string();
    assert!(error.is_address_in_use() && said.contains(&address.port().to_string()), "{said}");
    assert!(said.contains("MASTER_PORT"), "{said}");
}

#[test]
fn an_address_of_another_host_is_named() {
    let error = tcp::join("192.0.2.1:29500", RANK_0, &config(0, 2), &identity(0, "a"), soon()).unwrap_err();
    assert!(error.to_string().contains("192.0.2.1 is no address of this host"), "{error}");
}

#[test]
fn ranks_meet_in_a_file_whatever_an_earlier_job_left_and_whoever_comes_first() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("meet");
    let join = |config: &RankConfig, i: u32| file::join(&path, config, &identity(i, "a"), soon()).unwrap();
    let mut stale = None;
    for order in [[0, 1, 2], [2, 1, 0], [1, 0, 2]] {
        if let Some(stale) = &stale {
            // The whole file of an earlier job, as a crash leaves it.
            std::fs::write(&path, stale).unwrap();
        }
        let configs: Vec<RankConfig> = order.iter().map(|rank| config(*rank, 3)).collect();
        let worlds: Vec<Rendezvous> = run(&configs, |config, i| {
            if i > 0 && stale.is_some() {
                // The first is well on its way: it has written to the old file, or has replaced it.
                let changed = || std::fs::read(&path).ok() != stale;
                while !changed() {
                    thread::yield_now();
                }
            }
            join(config, i)
        });
        assert!(!worlds[0].store.check(&["said/0"], soon()).unwrap());
        talk(&worlds);
        assert!(worlds.iter().all(|world| world.interface.is_loopback() && world.local_world_size == 3));
        stale = Some(std::fs::read(&path).unwrap());
        drop(worlds);
        assert!(!path.exists(), "rank 0 removes the file");
    }
}

#[test]
fn no_rank_writes_what_others_have_said_into_the_file_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("meet");
    let _worlds: Vec<Rendezvous> =
        run(&configs(16), |config, i| file::join(&path, config, &identity(i, "a"), soon()).unwrap());
    let content = std::fs::read(&path).unwrap();
    let count = |name: &[u8]| content.windows(name.len()).filter(|part| *part == name).count();
    assert_eq!((count(b"hello/"), count(b"welcome/")), (15, 15));
}

#[test]
fn a_stale_file_alone_is_not_taken_for_a_world() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("meet");
    let worlds: Vec<Rendezvous> =
        run(&configs(2), |config, i| file::join(&path, config, &identity(i, "a"), soon()).unwrap());
    let stale = std::fs::read(&path).unwrap();
    drop(worlds);
    std::fs::write(&path, stale).unwrap();
    let deadline = Deadline::after(Duration::from_secs(3));
    let error = file::join(&path, &config(1, 2), &identity(1, "a"), deadline).unwrap_err();
    assert!(error.is_timeout() && error.to_string().contains("rank 0 has not answered"), "{error}");
    // Rank 0 alone names who is missing.
    let deadline = Deadline::after(Duration::from_secs(3));
    let error = file::join(&path, &config(0, 2), &identity(0, "a"), deadline).unwrap_err();
    assert!(error.is_timeout() && error.to_string().contains("rank 1 of 2 has not arrived"), "{error}");
}

thread_local! {
    /// The file at which this thread's checks look.
    static WATCHED: RefCell<PathBuf> = RefCell::default();
}

/// Ends the wait when there is something of this name in the file.
fn ends_with(name: &[u8]) -> Result<()> {
    let content = std::fs::read(WATCHED.with_borrow(PathBuf::clone)).unwrap_or_default();
    match content.windows(name.len()).any(|part| part == name) {
        true => Err(Error::aborted("enough")),
        false => Ok(()),
    }
}

#[test]
fn who_ends_its_wait_before_all_have_met_in_a_file_tells_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("meet");
    let join = |rank: u32| file::join(&path, &config(rank, 3), &identity(rank, "a"), soon()).unwrap_err();
    WATCHED.set(path.clone());
    // Rank 0 has answered rank 1, and rank 2 never comes.
    let (own, told) = thread::scope(|scope| {
        let other = scope.spawn(|| join(1));
        let own = interruptible(|| ends_with(b"welcome/"), || join(0));
        (own, other.join().unwrap())
    });
    assert!(own.is_aborted() && own.to_string().contains("enough"), "{own}");
    assert!(told.is_aborted() && told.to_string().contains("rank 0 has left the start"), "{told}");
    // Rank 2 has not been answered yet.
    let store = FileStore::create(&path).unwrap();
    let own = interruptible(|| ends_with(b"hello/"), || join(2));
    assert!(own.is_aborted() && own.to_string().contains("enough"), "{own}");
    let verdict = store.get("phalanx/0/verdict", soon()).unwrap();
    assert!(String::from_utf8_lossy(&verdict).contains("rank 2 has left the start"), "{verdict:?}");
}

#[test]
fn rank_0_hears_in_a_file_that_another_has_ended_its_wait_though_not_all_have_come() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("meet");
    // Rank 2 never comes. Rank 0 would wait for it during most of this time.
    let deadline = Deadline::after(Duration::from_secs(3600));
    let join = |rank: u32| file::join(&path, &config(rank, 3), &identity(rank, "a"), deadline).unwrap_err();
    WATCHED.set(path.clone());
    let (own, told) = thread::scope(|scope| {
        let main = scope.spawn(|| join(0));
        let own = interruptible(|| ends_with(b"welcome/"), || join(1));
        (own, main.join().unwrap())
    });
    assert!(own.is_aborted() && own.to_string().contains("enough"), "{own}");
    assert!(told.is_aborted() && told.to_string().contains("rank 1 has left the start"), "{told}");
}

/// Waits until rank 1 has come for the second time to the store at `address`.
fn wait_for_the_second_arrival_of_1(address: &str) {
    let store = TcpStore::connect(address, soon()).unwrap();
    store.wait(&["phalanx/1/rank/1"], soon()).unwrap();
}

#[test]
fn the_same_processes_meet_again_whoever_is_first() {
    let address = free_address();
    let join = |config: &RankConfig, i: u32| {
        tcp::join(&address, RANK_0, config, &identity(i, "here"), soon()).unwrap()
    };
    run(&configs(2), |config, i| {
        for meeting in 0..4 {
            let world = join(config, i);
            assert!(!world.store.check(&[&format!("said/{i}")], soon()).unwrap());
            talk_alone(&world);
            if meeting == 1 && i == 0 {
                // It still has the last world.
                wait_for_the_second_arrival_of_1(&address);
            }
            if meeting == 2 && i == 1 {
                // Until rank 0 serves the next one.
                drop(world.keep_alive);
                thread::sleep(Duration::from_millis(300));
            }
        }
    });
}

/// This rank's part of `talk`.
fn talk_alone(world: &Rendezvous) {
    world.store.set(&format!("said/{}", world.rank), b"here", soon()).unwrap();
    for rank in world.world_size.ranks() {
        assert_eq!(world.store.get(&format!("said/{rank}"), soon()).unwrap(), b"here");
    }
}

#[test]
fn a_second_world_beside_the_first_is_refused_on_every_rank() {
    let address = free_address();
    let started = Instant::now();
    run(&configs(2), |config, i| {
        let join = || tcp::join(&address, RANK_0, config, &identity(i, "here"), soon());
        let first = join().unwrap();
        if i == 0 {
            wait_for_the_second_arrival_of_1(&address);
        }
        let error = join().unwrap_err();
        let said = error.to_string();
        assert!(said.contains("rank 0 of another group already"), "{said}");
        assert!(error.is_invalid_argument() && said.contains("new_group"), "{said}");
        drop(first);
        // They are told, and meet again.
        talk_alone(&join().unwrap());
    });
    assert!(started.elapsed() < Duration::from_secs(20));
}

#[test]
fn a_rank_that_comes_once_more_than_rank_0_is_told_why_nobody_is_there() {
    let address = free_address();
    run(&configs(2), |config, i| {
        let first = tcp::join(&address, RANK_0, config, &identity(i, "here"), soon()).unwrap();
        if i == 0 {
            wait_for_the_second_arrival_of_1(&address);
            return;
        }
        drop(first);
        let deadline = Deadline::after(Duration::from_secs(4));
        let error = tcp::join(&address, RANK_0, config, &identity(i, "here"), deadline).unwrap_err();
        let said = error.to_string();
        assert!(error.is_timeout() && said.contains("rank 0 has left the group"), "{said}");
    });
}
