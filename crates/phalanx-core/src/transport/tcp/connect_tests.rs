//! Ranks that connect, together with foreign clients, dead and frozen ranks.

use std::cell::Cell;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use socket2::{Domain, Socket, Type};

use super::accept::{MAX_PENDING, Pair, TURNED_AWAY_LIMIT, accept, take_arrivals};
use super::connect::{Address, exchange_addresses, key, keys_of, listen, mesh};
use super::connection::Connection;
use super::dial::{ANSWER_TIMEOUT, attempt_together, dial};
use super::pending::{HandshakeLimit, Pending, Progress};
use super::{MeshConfig, stop_probe};
use crate::credentials::Credentials;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::health::Heartbeat;
use crate::interrupt::interruptible;
use crate::key::JobKey;
use crate::poll::promptly;
use crate::proc_stat::ProcStat;
use crate::rank::{Generation, Rank};
use crate::store::{MemoryStore, Store};
use crate::testing::descriptors::raise_descriptors;
use crate::transport::process;
use crate::wire::auth::{HANDSHAKE_TIMEOUT, NONCE, TAG};
use crate::wire::control::ProcessId;
use crate::wire::handshake::GroupSecret;
use crate::wire::hello::{Channel, HELLO, Hello, REFUSAL};
use crate::world_size::WorldSize;

/// The hello of rank `rank` of `world` to rank 0, on its data connection.
fn hello_to_main(secret: &GroupSecret, rank: u32, world: u32) -> Hello {
    Hello {
        group: secret.name(),
        generation: Generation(0),
        rank: Rank::new(rank),
        to: Rank::MAIN,
        world,
        channel: Channel::Data,
        nonce: [0; NONCE],
    }
}

fn config(store: &MemoryStore, rank: u32) -> MeshConfig<'_> {
    config_in(store, rank, 2)
}

fn config_in(store: &MemoryStore, rank: u32, world: u32) -> MeshConfig<'_> {
    let interface = Ipv4Addr::LOCALHOST.into();
    let world = WorldSize::new(world).unwrap();
    let credentials = Credentials::none();
    let heartbeat = Heartbeat::default();
    MeshConfig {
        store,
        rank: Rank::new(rank),
        world,
        generation: Generation(0),
        interface,
        credentials,
        heartbeat,
        number: None,
        tells_process: false,
        marks_left: false,
        watch: &|| Ok(()),
    }
}

/// Publishes the address of a rank that has died since: one at which no other test listens.
fn bury(store: &MemoryStore, rank: u32) {
    let socket = listen(Ipv4Addr::new(127, 0, 6, 2).into()).unwrap().local_addr().unwrap();
    let own = postcard::to_stdvec(&Address { socket, host: "gone".into() }).unwrap();
    store.set(&key(Rank::new(rank)), &own, Deadline::after(Duration::from_secs(1))).unwrap();
}

#[test]
fn each_of_many_ranks_has_all_addresses_and_asks_for_few() {
    const RANKS: u32 = 260;
    let (store, world) = (MemoryStore::new(), WorldSize::new(RANKS).unwrap());
    let (listener, deadline) =
        (listen(Ipv4Addr::LOCALHOST.into()).unwrap(), Deadline::after(Duration::from_secs(60)));
    let ask = |rank: Rank| {
        let (config, host) = (config_in(&store, rank.get(), RANKS), format!("host {rank}"));
        let addresses = exchange_addresses(&config, None, &host, &listener, deadline).unwrap();
        assert!(
            addresses
                .into_iter()
                .map(|address| address.host)
                .eq(world.ranks().map(|rank| format!("host {rank}")))
        );
    };
    thread::scope(|scope| {
        for rank in world.ranks() {
            let ask = &ask;
            scope.spawn(move || ask(rank));
        }
    });
    // Two have gathered those of all: that is enough for the others.
    let delete = |keys: Vec<String>| {
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        store.delete_keys(&keys, deadline).unwrap();
    };
    delete(world.ranks().map(key).collect());
    assert_eq!(store.num_keys(deadline).unwrap(), 2);
    ask(Rank::new(1));
    delete(world.ranks().flat_map(keys_of).collect());
    assert_eq!(store.num_keys(deadline).unwrap(), 0);
}

#[test]
fn a_rank_among_many_that_does_not_come_is_named_and_not_who_gathers_its_address() {
    const RANKS: u32 = 258;
    let (store, world) = (MemoryStore::new(), WorldSize::new(RANKS).unwrap());
    let (listener, soon) =
        (listen(Ipv4Addr::LOCALHOST.into()).unwrap(), Deadline::after(Duration::from_millis(300)));
    let missing = Rank::new(3);
    for rank in world.ranks().filter(|rank| *rank != missing) {
        store.set(&key(rank), b"an address", Deadline::after(Duration::from_secs(20))).unwrap();
    }
    let config = config_in(&store, 257, RANKS);
    let outcome = exchange_addresses(&config, None, "here", &listener, soon);
    let error = outcome.err().unwrap();
    assert!(error.is_timeout() && error.peer() == Some(missing), "{error}");
    // All have come, and none of those that gather has written what it has gathered.
    store.set(&key(missing), b"an address", Deadline::after(Duration::from_secs(20))).unwrap();
    let soon = Deadline::after(Duration::from_millis(300));
    let error = exchange_addresses(&config, None, "here", &listener, soon).err().unwrap();
    assert!(error.is_timeout() && error.peer() == Some(Rank::MAIN), "{error}");
    assert!(error.to_string().contains("the addresses that it gathers"), "{error}");
}

#[test]
fn a_rank_that_died_while_it_gathered_addresses_is_named_long_before_the_deadline() {
    const RANKS: u32 = 257;
    let (store, within) = (MemoryStore::new(), Deadline::after(Duration::from_secs(20)));
    // All have come, and rank 0 does not write what it has gathered.
    bury(&store, 0);
    let address = store.get(&key(Rank::MAIN), within).unwrap();
    for rank in 1..RANKS - 1 {
        store.set(&key(Rank::new(rank)), &address, within).unwrap();
    }
    let listener = listen(Ipv4Addr::LOCALHOST.into()).unwrap();
    let config = config_in(&store, RANKS - 1, RANKS);
    let deadline = Deadline::after(Duration::from_secs(60));
    let error = exchange_addresses(&config, None, "here", &listener, deadline).err().unwrap();
    assert!(error.is_peer_failure() && error.peer() == Some(Rank::MAIN), "{error}");
    assert!(error.to_string().contains("it no longer listens at"), "{error}");
}

#[test]
fn a_flood_fits_into_the_listener_s_queue() {
    let listener = listen(Ipv4Addr::LOCALHOST.into()).unwrap();
    // Nobody accepts them. One that finds the queue full is tried again by the kernel after a second.
    let strangers: Vec<_> = (0..300)
        .map(|number| {
            let stranger =
                TcpStream::connect_timeout(&listener.local_addr().unwrap(), Duration::from_secs(5));
            stranger.unwrap_or_else(|error| panic!("connection {number}: {error}"))
        })
        .collect();
    drop(strangers);
}

/// A rank's connection is followed by more silent ones than may be pending.
#[test]
fn a_silent_flood_does_not_displace_a_rank_that_has_said_who_it_is() {
    let store = MemoryStore::new();
    let config = config(&store, 0);
    let secret = GroupSecret::new(None, &[7; 16]);
    let listener = listen(config.interface).unwrap();
    let address = listener.local_addr().unwrap();
    let mut rank = TcpStream::connect(address).unwrap();
    rank.write_all(&hello_to_main(&secret, 1, 2).encode()).unwrap();
    let _strangers: Vec<_> = (0..300).map(|_| TcpStream::connect(address).unwrap()).collect();
    let own = Hello { to: Rank::MAIN, rank: Rank::MAIN, ..hello_to_main(&secret, 0, 2) };
    let mut pending = Vec::new();
    let is_rank = |one: &Pending| one.stream.socket().peer_addr().unwrap() == rank.local_addr().unwrap();
    for _ in 0..300 {
        take_arrivals(&listener, None, MAX_PENDING, &secret, &mut pending).unwrap();
        let mut limit = HandshakeLimit::among(&pending);
        for one in &mut pending {
            let is_waiting = matches!(one.advance(own, 1, &mut limit), Progress::Waiting);
            assert!(is_waiting, "nobody has said anything wrong");
        }
        assert!(pending.iter().any(is_rank), "the rank was dropped for a stranger");
    }
    assert!(pending.len() > 200);
}

#[test]
fn ranks_that_know_their_number_ask_nobody_for_it_and_tell_which_process_they_are() {
    let (store, deadline) = (MemoryStore::new(), Deadline::after(Duration::from_secs(60)));
    let rank = |rank| MeshConfig { number: Some([7; 16]), tells_process: true, ..config(&store, rank) };
    thread::scope(|scope| {
        let main = scope.spawn(|| mesh(&rank(0), deadline));
        let other = mesh(&rank(1), deadline).unwrap();
        drop((main.join().unwrap().unwrap(), other));
    });
    assert!(!store.check(&["mesh/job"], deadline).unwrap());
    let processes = [0, 1].map(|rank| stop_probe::key(Rank::new(rank)));
    assert!(store.check(&[&processes[0], &processes[1]], deadline).unwrap());
}

#[test]
fn strangers_hold_nobody_up() {
    let store = MemoryStore::new();
    // One after the other, each with the time of a handshake, they would take many times as long.
    let deadline = Deadline::after(HANDSHAKE_TIMEOUT * 10);
    thread::scope(|scope| {
        let main = scope.spawn(|| mesh(&config(&store, 0), deadline).map(|mesh| mesh.connections.data.len()));
        let address = store.get(&key(Rank::MAIN), deadline).unwrap();
        let address: Address = postcard::from_bytes(&address).unwrap();
        let job = store.get("mesh/job", deadline).unwrap().try_into().unwrap();
        let group = GroupSecret::new(None, &job).name();
        let mut strangers = Vec::new();
        for number in 0..200u8 {
            let mut stranger = TcpStream::connect(address.socket).unwrap();
            let hello = Hello {
                group: if number % 3 == 0 { group } else { [number; 16] },
                generation: Generation(u64::from(number % 2)),
                rank: Rank::new(u32::from(number)),
                to: Rank::MAIN,
                world: 3,
                channel: Channel::Data,
                nonce: [number; NONCE],
            };
            // Silence, half a handshake, a wrong one.
            let _ = stranger.write_all(&hello.encode()[..usize::from(number) * HELLO / 199]);
            strangers.push(stranger);
        }
        mesh(&config(&store, 1), deadline).unwrap();
        assert_eq!(main.join().unwrap().unwrap(), 2);
    });
}

/// Messages of a peer that knows everything but the key.
fn noise(own: Hello, number: usize) -> Vec<u8> {
    let mut bytes = [&own.saying([number as u8; NONCE]).encode()[..], &[number as u8; TAG]].concat();
    match number % 4 {
        0 => bytes.truncate(number % HELLO),
        1 => bytes.truncate(HELLO),
        2 => {
            let bit = number * 7 % (8 * bytes.len());
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        _ => {}
    }
    bytes
}

#[test]
fn a_thousand_strangers_and_one_that_makes_noise_hold_nobody_up() {
    // Both sides are in this process.
    raise_descriptors(2600);
    let (store, key) = (MemoryStore::new(), JobKey::generate().unwrap());
    let credentials = Credentials::from(key.clone());
    let deadline = Deadline::after(Duration::from_secs(60));
    let config = |rank| MeshConfig { credentials: &credentials, ..config_in(&store, rank, 3) };
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let early = [0, 1].map(|rank| {
            let config = config(rank);
            scope.spawn(move || mesh(&config, deadline).map(|mesh| mesh.connections))
        });
        let address: Address =
            postcard::from_bytes(&store.get(&super::connect::key(Rank::MAIN), deadline).unwrap()).unwrap();
        let job = store.get("mesh/job", deadline).unwrap().try_into().unwrap();
        let own = hello_to_main(&GroupSecret::new(Some(key.bytes()), &job), 2, 3);
        let stranger = move |number| {
            let mut stranger = TcpStream::connect(address.socket).ok()?;
            let _ = stranger.write_all(&noise(own, number));
            Some(stranger)
        };
        let done = &done;
        scope.spawn(move || {
            // A hundred at a time stay, and the others close the connection in the middle.
            let mut held = std::collections::VecDeque::new();
            for number in 0.. {
                held.extend(stranger(number));
                if held.len() > 100 {
                    held.pop_front();
                }
                if done.load(Ordering::Relaxed) {
                    return;
                }
                // The number of ports is limited, and those of closed connections stay in use for a while.
                thread::sleep(Duration::from_millis(1));
            }
        });
        let strangers: Vec<_> = (0..1000).filter_map(|number| stranger(number * 3)).collect();
        assert!(strangers.len() > 900, "{}", strangers.len());
        let late = mesh(&config(2), deadline);
        done.store(true, Ordering::Relaxed);
        let late = late.unwrap().connections;
        let [zero, one] = early.map(|rank| rank.join().unwrap().unwrap());
        // The connections are right: each end is the other's.
        for (rank, (below, above)) in [(0, (&zero, &late)), (1, (&one, &late))] {
            let pairs = [
                (below.data[2].get(), above.data[rank].get()),
                (below.control[2].as_ref(), above.control[rank].as_ref()),
                (below.messages[2].get(), above.messages[rank].get()),
            ];
            for (below, above) in pairs {
                let (below, above) = (below.unwrap(), above.unwrap());
                assert_eq!(below.socket().peer_addr().unwrap(), above.socket().local_addr().unwrap());
            }
        }
    });
}

#[test]
fn ranks_with_different_keys_are_told_at_once() {
    let store = MemoryStore::new();
    let credentials = [(), ()].map(|()| Credentials::from(JobKey::generate().unwrap()));
    let deadline = Deadline::after(Duration::from_secs(60));
    let started = Instant::now();
    thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| {
            let config = MeshConfig { credentials: &credentials[rank as usize], ..config(&store, rank) };
            scope.spawn(move || mesh(&config, deadline).err().unwrap())
        });
        for rank in ranks {
            let error = rank.join().unwrap();
            assert!(error.to_string().contains("another job key"), "{error}");
            assert!(error.remedy().unwrap().contains("PHALANX_JOB_KEY_FILE"));
        }
    });
    assert!(started.elapsed() < Duration::from_secs(20));
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let store = MemoryStore::new();
    bury(&store, 0);
    store.set("mesh/job", &[0; 16], Deadline::after(Duration::from_secs(1))).unwrap();
    let deadline = Deadline::after(Duration::from_millis(100));
    let error = mesh(&config(&store, 1), deadline).err().unwrap();
    // After a pause it may have been refused for so long that it is taken for lost.
    let said = ["rank 0 (gone) could not be reached at", "rank 0 (gone) was lost: it no longer listens at"];
    assert!(said.iter().any(|said| error.to_string().contains(said)), "{error}");
    assert_eq!((error.peer(), error.rank()), (Some(Rank::MAIN), Some(Rank::new(1))));
}

#[test]
fn a_rank_that_died_since_is_named_by_all_long_before_the_deadline() {
    let store = MemoryStore::new();
    bury(&store, 1);
    let started = Instant::now();
    let deadline = Deadline::after(Duration::from_secs(60));
    let errors = thread::scope(|scope| {
        let ranks = [0, 2].map(|rank| {
            let config = config_in(&store, rank, 3);
            scope.spawn(move || mesh(&config, deadline).err().unwrap())
        });
        ranks.map(|rank| rank.join().unwrap())
    });
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
    for error in errors {
        assert!(error.is_peer_failure() && error.peer() == Some(Rank::new(1)), "{error}");
        assert!(error.rank().is_some() && error.operation() == Some("joining the group"), "{error}");
    }
}

/// One rank of the world is frozen while the others connect: its kernel accepts connections, but the process does not.
fn all_name_the_frozen(world: u32, frozen: u32, is_prompt: bool) {
    let store = MemoryStore::new();
    let listener = listen(Ipv4Addr::LOCALHOST.into()).unwrap();
    let address = Address { socket: listener.local_addr().unwrap(), host: "node7".into() };
    let within = Deadline::after(Duration::from_secs(1));
    store.set(&key(Rank::new(frozen)), &postcard::to_stdvec(&address).unwrap(), within).unwrap();
    if frozen == 0 {
        store.set("mesh/job", &[0; 16], within).unwrap();
    }
    let started = Instant::now();
    let deadline = Deadline::after(ANSWER_TIMEOUT * 10);
    let errors: Vec<Error> = thread::scope(|scope| {
        let ranks = (0..world).filter(|rank| *rank != frozen).map(|rank| {
            let config = config_in(&store, rank, world);
            scope.spawn(move || promptly(is_prompt, || mesh(&config, deadline)).err().unwrap())
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert!(started.elapsed() < ANSWER_TIMEOUT * 5, "{:?}", started.elapsed());
    for error in errors {
        assert!(error.is_peer_failure() && error.peer() == Some(Rank::new(frozen)), "{error}");
        assert!(error.to_string().contains(&format!("rank {frozen} (node7) has not answered at")), "{error}");
    }
}

#[test]
fn a_rank_that_is_frozen_while_others_connect_is_named_by_all() {
    all_name_the_frozen(3, 1, false);
}

#[test]
fn a_rank_that_is_frozen_is_named_also_by_one_that_accepts_on_its_own_thread() {
    all_name_the_frozen(3, 1, true);
}

/// The others call it together with ranks that answer.
#[test]
fn a_rank_that_is_frozen_behind_others_that_answer_is_named_by_all() {
    all_name_the_frozen(4, 0, false);
}

#[test]
fn a_rank_that_died_before_it_connected_is_named_by_those_who_accept() {
    // A thread of rank 0, or its own, where the others answer at once.
    for is_prompt in [false, true] {
        let store = MemoryStore::new();
        bury(&store, 1);
        let started = Instant::now();
        let connect = || mesh(&config(&store, 0), Deadline::after(Duration::from_secs(60)));
        let error = promptly(is_prompt, connect).err().unwrap();
        assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
        assert!(error.is_peer_failure() && error.peer() == Some(Rank::new(1)), "{error}");
    }
}

#[test]
fn the_program_may_end_the_wait_for_those_who_call() {
    fn ends() -> Result<()> {
        Err(Error::invalid_argument("enough"))
    }
    for is_prompt in [false, true] {
        let store = MemoryStore::new();
        // It listens, and calls nobody.
        let listener = listen(Ipv4Addr::LOCALHOST.into()).unwrap();
        let address = Address { socket: listener.local_addr().unwrap(), host: "node7".into() };
        let within = Deadline::after(Duration::from_secs(1));
        store.set(&key(Rank::new(1)), &postcard::to_stdvec(&address).unwrap(), within).unwrap();
        let connect = || mesh(&config(&store, 0), Deadline::after(Duration::from_secs(60))).err();
        let error = promptly(is_prompt, || interruptible(ends, connect)).unwrap();
        assert!(error.is_invalid_argument() && error.to_string().contains("enough"), "{error}");
    }
}

/// It has come to the roll-call, and ends before it listens.
#[test]
fn a_rank_whose_process_has_ended_is_named_by_all_long_before_the_deadline() {
    let mut peer = Command::new("sleep").arg("600").spawn().unwrap();
    let stat = ProcStat::read(peer.id().cast_signed()).unwrap().unwrap();
    let process = ProcessId { pid: peer.id(), started: stat.started, ..process::own().unwrap() };
    peer.kill().unwrap();
    peer.wait().unwrap();
    // Whatever is to be ignored: it is not silent, but gone.
    for timeout in [Duration::ZERO, Heartbeat::default().timeout] {
        let store = MemoryStore::new();
        let record = postcard::to_stdvec(&("node7", Some(process))).unwrap();
        let deadline = Deadline::after(Duration::from_secs(600));
        store.set(&stop_probe::key(Rank::new(1)), &record, deadline).unwrap();
        let errors = thread::scope(|scope| {
            let ranks = [0, 2].map(|rank| {
                let heartbeat = Heartbeat { timeout, ..Heartbeat::default() };
                let config = MeshConfig { heartbeat, ..config_in(&store, rank, 3) };
                scope.spawn(move || mesh(&config, deadline).err().unwrap())
            });
            ranks.map(|rank| rank.join().unwrap())
        });
        for error in errors {
            assert!(error.is_peer_failure() && error.peer() == Some(Rank::new(1)), "{error}");
            let said = format!(
                "rank 1 was lost before it was connected: its process {} on node7 has ended",
                peer.id()
            );
            assert!(error.to_string().contains(&said), "{error}");
        }
    }
}

/// Its process cannot be seen, as on another host.
#[test]
fn a_rank_of_which_the_store_says_that_it_has_left_is_named_by_all() {
    let (store, deadline) = (MemoryStore::new(), Deadline::after(Duration::from_secs(600)));
    let own = process::own().unwrap();
    let elsewhere = ProcessId { boot: own.boot ^ 1, ..own };
    let record = postcard::to_stdvec(&("node7", Some(elsewhere))).unwrap();
    store.set(&stop_probe::key(Rank::new(1)), &record, deadline).unwrap();
    let errors = thread::scope(|scope| {
        let ranks = [0, 2].map(|rank| {
            let config = MeshConfig { marks_left: true, ..config_in(&store, rank, 3) };
            scope.spawn(move || mesh(&config, deadline).err().unwrap())
        });
        // Both wait for it.
        store.wait(&[&key(Rank::MAIN), &key(Rank::new(2))], deadline).unwrap();
        store.set(&stop_probe::key(Rank::new(1)), stop_probe::LEFT, deadline).unwrap();
        ranks.map(|rank| rank.join().unwrap())
    });
    for error in errors {
        assert!(error.is_peer_failure() && error.peer() == Some(Rank::new(1)), "{error}");
        assert!(error.to_string().contains("its connection with the store has closed"), "{error}");
    }
}

/// Over PyTorch's store that would be several round trips each time, in which no address is looked for.
#[test]
fn a_record_that_the_store_never_empties_is_read_once() {
    let (store, deadline) = (MemoryStore::new(), Deadline::after(Duration::from_secs(600)));
    let own = process::own().unwrap();
    let elsewhere = ProcessId { boot: own.boot ^ 1, ..own };
    let record = postcard::to_stdvec(&("node7", Some(elsewhere))).unwrap();
    store.set(&stop_probe::key(Rank::new(1)), &record, deadline).unwrap();
    let looks = AtomicUsize::new(0);
    // It is called before each look at the record.
    let watch = || match looks.fetch_add(1, Ordering::Relaxed) {
        // Whoever reads it again finds another.
        1 => store.set(&stop_probe::key(Rank::new(1)), stop_probe::LEFT, deadline),
        3 => Err(Error::aborted("looked often")),
        _ => Ok(()),
    };
    let error = mesh(&MeshConfig { watch: &watch, ..config(&store, 0) }, deadline).err().unwrap();
    assert!(error.to_string().contains("looked often"), "{error}");
}

#[test]
fn a_rank_that_never_says_where_it_listens_is_named() {
    let store = MemoryStore::new();
    let error = mesh(&config(&store, 0), Deadline::after(Duration::from_millis(50))).err().unwrap();
    assert!(error.is_timeout() && error.peer() == Some(Rank::new(1)), "{error}");
}

#[test]
fn a_rank_of_another_version_is_told_both_versions_whoever_connects() {
    let store = MemoryStore::new();
    let deadline = Deadline::after(Duration::from_secs(60));
    let secret = GroupSecret::new(None, &[1; 16]);
    let own = hello_to_main(&secret, 1, 2);
    let of_version_2 = |mut hello: [u8; HELLO]| {
        hello[4..6].copy_from_slice(&2u16.to_le_bytes());
        hello
    };
    thread::scope(|scope| {
        // A rank that connects gets the error at once, and delays no other.
        let main = scope.spawn(|| mesh(&config(&store, 0), deadline).map(|_| ()));
        let address = store.get(&key(Rank::MAIN), deadline).unwrap();
        let address: Address = postcard::from_bytes(&address).unwrap();
        let mut old = TcpStream::connect(address.socket).unwrap();
        old.write_all(&of_version_2(own.encode())).unwrap();
        let mut answer = [0; HELLO];
        old.read_exact(&mut answer).unwrap();
        assert_eq!(answer, REFUSAL);
        mesh(&config(&store, 1), deadline).unwrap();
        main.join().unwrap().unwrap();
        // A rank that is connected to answers with this.
        let old = listen(Ipv4Addr::LOCALHOST.into()).unwrap();
        let address = Address { socket: old.local_addr().unwrap(), host: "node7".into() };
        old.set_nonblocking(false).unwrap();
        scope.spawn(move || {
            let (mut stream, _) = old.accept().unwrap();
            stream.read_exact(&mut [0; HELLO]).unwrap();
            stream.write_all(&of_version_2(REFUSAL)).unwrap();
        });
        let (store, started) = (MemoryStore::new(), Instant::now());
        let error = dial(
            &config(&store, 1),
            "here",
            &address,
            (own, &secret),
            None,
            &AtomicBool::new(false),
            deadline,
        )
        .unwrap_err();
        assert!(error.to_string().contains("a peer speaks version 2, this one 4"), "{error}");
        assert!(error.remedy().unwrap().contains("the same build"), "{error}");
        assert!(error.peer() == Some(Rank::MAIN) && started.elapsed() < Duration::from_secs(20));
    });
}

/// Counts what this thread warns of while it accepts.
#[derive(Clone, Default)]
struct Warnings(Arc<AtomicUsize>);

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN && metadata.target().ends_with("tcp::accept")
    }

    fn event(&self, _: &tracing::Event<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::Id {
        tracing::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::Id, _: &tracing::Id) {}
    fn enter(&self, _: &tracing::Id) {}
    fn exit(&self, _: &tracing::Id) {}
}

#[test]
fn connections_that_are_turned_away_do_not_fill_the_log() {
    let store = MemoryStore::new();
    let (config, secret) = (config(&store, 0), GroupSecret::new(None, &[1; 16]));
    let listener = listen(config.interface).unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = UnixStream::pair().unwrap();
    let mut old = hello_to_main(&secret, 1, 2).encode();
    old[4..6].copy_from_slice(&2u16.to_le_bytes());
    let strangers = thread::spawn(move || {
        for _ in 0..2 * TURNED_AWAY_LIMIT {
            let mut stranger = TcpStream::connect(address).unwrap();
            stranger.write_all(&old).unwrap();
            stranger.read_exact(&mut [0; HELLO]).unwrap();
        }
        drop(stop);
    });
    let (own, warnings) = (hello_to_main(&secret, 0, 2), Warnings::default());
    let (waits_for, deadline) = (AtomicUsize::new(0), Deadline::after(Duration::from_secs(60)));
    let error = tracing::subscriber::with_default(warnings.clone(), || {
        accept(
            &listener,
            Some(&stopped),
            &config,
            (own, &secret),
            &mut [Pair::default()],
            (&waits_for, &mut || Ok(())),
            deadline,
        )
    });
    let error = error.err().unwrap();
    strangers.join().unwrap();
    assert!(error.to_string().contains("stopped"), "{error}");
    assert_eq!(warnings.0.load(Ordering::Relaxed), TURNED_AWAY_LIMIT);
}

#[test]
fn a_rank_of_a_former_life_gives_up_at_once() {
    let store = MemoryStore::new();
    let deadline = Deadline::after(Duration::from_secs(60));
    thread::scope(|scope| {
        let main = scope.spawn(|| mesh(&config(&store, 0), deadline).map(|_| ()));
        let address = store.get(&key(Rank::MAIN), deadline).unwrap();
        let address: Address = postcard::from_bytes(&address).unwrap();
        let stale = config(&store, 1);
        let secret = GroupSecret::new(None, &[1; 16]);
        let own = hello_to_main(&secret, 1, 2);
        let started = Instant::now();
        let error = dial(&stale, "here", &address, (own, &secret), None, &AtomicBool::new(false), deadline)
            .unwrap_err();
        assert!(error.to_string().contains("not of its job"), "{error}");
        assert!(started.elapsed() < Duration::from_secs(20));
        mesh(&stale, deadline).unwrap();
        main.join().unwrap().unwrap();
    });
}

/// Whatever error the program has: others are not waited for meanwhile, and nobody is called again.
#[test]
fn who_waits_for_an_answer_may_end_the_wait() {
    thread_local! {
        static LOOKED: Cell<u32> = const { Cell::new(0) };
    }
    /// As what a handler of a signal raises, it comes once.
    fn first_fails() -> Result<()> {
        LOOKED.set(LOOKED.get() + 1);
        if LOOKED.get() == 1 { Err(Error::invalid_argument("enough")) } else { Ok(()) }
    }
    let store = MemoryStore::new();
    let config = config_in(&store, 2, 3);
    let deadline = Deadline::after(Duration::from_secs(60));
    // Their kernel takes the calls.
    let silent = [0, 1].map(|_| listen(Ipv4Addr::LOCALHOST.into()).unwrap());
    let addresses = silent
        .each_ref()
        .map(|listener| Address { socket: listener.local_addr().unwrap(), host: "node7".into() });
    let secret = GroupSecret::new(None, &[1; 16]);
    let own = [0, 1].map(|rank| Hello { to: Rank::new(rank), ..hello_to_main(&secret, 2, 3) });
    let together = || attempt_together(&config, addresses.iter().zip(own), &secret, deadline).map(drop);
    let error = interruptible(first_fails, together).unwrap_err();
    assert!(error.is_invalid_argument() && error.to_string().contains("enough"), "{error}");
    LOOKED.set(0);
    let has_failed = AtomicBool::new(false);
    let one = || dial(&config, "here", &addresses[0], (own[0], &secret), None, &has_failed, deadline);
    let error = interruptible(first_fails, || one().map(drop)).unwrap_err();
    assert!(error.is_invalid_argument() && error.to_string().contains("enough"), "{error}");
    assert_eq!(LOOKED.get(), 1);
}

#[test]
fn who_calls_again_and_again_may_end_that() {
    fn ends() -> Result<()> {
        Err(Error::aborted("enough"))
    }
    let (store, done) = (MemoryStore::new(), AtomicBool::new(false));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = Address { socket: listener.local_addr().unwrap(), host: "node7".into() };
    let secret = GroupSecret::new(None, &[1; 16]);
    let error = thread::scope(|scope| {
        // It drops all connections.
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                drop(listener.accept());
            }
        });
        let own = hello_to_main(&secret, 1, 2);
        let (has_failed, deadline) = (AtomicBool::new(false), Deadline::after(Duration::from_secs(60)));
        let call = || dial(&config(&store, 1), "here", &address, (own, &secret), None, &has_failed, deadline);
        let error = interruptible(ends, || call().err());
        done.store(true, Ordering::Relaxed);
        drop(TcpStream::connect(address.socket));
        error.unwrap()
    });
    assert!(error.is_aborted() && error.to_string().contains("enough"), "{error}");
}

/// A connection of rank 1 to rank 0, of two.
fn call_main(
    store: &MemoryStore,
    address: &Address,
    secret: &GroupSecret,
    channel: Channel,
    deadline: Deadline,
) -> Connection {
    let own = Hello { channel, ..hello_to_main(secret, 1, 2) };
    let failed = AtomicBool::new(false);
    dial(&config(store, 1), "here", address, (own, secret), None, &failed, deadline).unwrap()
}

/// How long rank 1 takes to connect to rank 0 where its first packet is lost: the kernel drops that of a connection which finds the listener's
/// queue full, and sends it again after a second.
fn connecting_without_the_first_packet() -> Duration {
    let store = MemoryStore::new();
    let deadline = Deadline::after(Duration::from_secs(60));
    thread::scope(|scope| {
        let main = scope.spawn(|| mesh(&config(&store, 0), deadline).map(|_| ()));
        let address = store.get(&key(Rank::MAIN), deadline).unwrap();
        let address: Address = postcard::from_bytes(&address).unwrap();
        let secret = GroupSecret::new(None, &store.get("mesh/job", deadline).unwrap().try_into().unwrap());
        let front = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        front.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).unwrap();
        front.listen(0).unwrap();
        let front = TcpListener::from(front);
        let far = Address { socket: front.local_addr().unwrap(), host: "far".into() };
        let _full = TcpStream::connect(far.socket).unwrap();
        let peer = address.socket;
        scope.spawn(move || {
            // By then the first packet has been dropped, and no other call been made.
            thread::sleep(Duration::from_millis(50));
            drop(front.accept().unwrap());
            let (called, _) = front.accept().unwrap();
            let peer = TcpStream::connect(peer).unwrap();
            for (from, to) in [(&called, &peer), (&peer, &called)] {
                let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                thread::spawn(move || std::io::copy(&mut &from, &mut &to));
            }
        });
        // Nobody calls it: the higher rank calls the lower one.
        bury(&store, 1);
        let started = Instant::now();
        let data = call_main(&store, &far, &secret, Channel::Data, deadline);
        let took = started.elapsed();
        let control = call_main(&store, &address, &secret, Channel::Control, deadline);
        let messages = call_main(&store, &address, &secret, Channel::Messages, deadline);
        main.join().unwrap().unwrap();
        drop((data, control, messages));
        took
    })
}

#[test]
fn the_second_of_two_calls_counts_where_the_first_packet_of_the_first_was_lost() {
    /// The first comes through after a second.
    const LIMIT: Duration = Duration::from_millis(900);
    // Now and then the machine may stand still meanwhile, and not each time.
    let late: Vec<_> =
        (0..4).map(|_| connecting_without_the_first_packet()).take_while(|took| *took >= LIMIT).collect();
    assert!(late.len() < 4, "{late:?}");
}
