//! Builds the mesh: every rank listens, connects to the ranks below it, and accepts those above.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use getrandom::fill;
use serde::{Deserialize, Serialize};

use super::accept::{Pair, accept};
use super::connection::Connection;
use super::control::Connections;
use super::stop_probe::{self, StopProbe};
use super::{MeshConfig, start};
use crate::deadline::Deadline;
use crate::error::{Error, Kind, Result, no_more_files};
use crate::notice::Reminders;
use crate::rank::Rank;
use crate::tls::{Refusal, Tls};
use crate::wire::auth::{NONCE, TAG, nonce};
use crate::wire::control::{Control, Notice};
use crate::wire::handshake::{ANSWER, Caller, GroupSecret};
use crate::wire::hello::{Channel, HELLO, Hello, JobId};
use crate::wire::tls;

/// How long one try to connect may take before the next one: its packets may have met a host that was not up yet.
const CONNECTING: Duration = Duration::from_secs(10);
/// A rank listens before its address is known. A rank that refuses for this long has gone.
const REFUSED: Duration = Duration::from_secs(1);
/// A rank that listens answers at once, from a thread that does nothing else. Who has not for this long is frozen.
const ANSWERING: Duration = Duration::from_secs(10);
/// The longest pause between tries.
const PAUSE: Duration = Duration::from_millis(200);
/// The longest host name that is shown.
const MAX_HOST: usize = 255;

/// One rank's connections to all others.
pub(crate) struct Mesh {
    pub connections: Connections,
    /// By rank.
    pub hosts: Vec<String>,
}

/// Where a rank listens, as it stands in the store.
#[derive(Serialize, Deserialize)]
pub(super) struct Address {
    pub socket: SocketAddr,
    pub host: String,
}

/// Connects this rank with all others. A rank that cannot tells them, so that none waits for it until its deadline.
pub(crate) fn mesh(place: &MeshConfig<'_>, deadline: Deadline) -> Result<Mesh> {
    let mut host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    host.truncate(host.floor_char_boundary(MAX_HOST));
    let (mut below, mut above) = (Vec::new(), Vec::new());
    above.resize_with(place.world.count() - place.rank.index() - 1, Pair::default);
    let hosts = build(place, &host, &mut below, &mut above, deadline);
    let mut connections = Connections::default();
    for Pair { data, control, messages } in below.into_iter().chain([Pair::default()]).chain(above) {
        connections.data.push(data);
        connections.control.push(control);
        connections.messages.push(messages);
    }
    match hosts {
        Ok(hosts) => Ok(Mesh { connections, hosts }),
        Err(error) => {
            let error = start::report(place, &host, error);
            // Who has all its connections no longer looks into the store.
            connections.tell(&Control::Failure(Notice::of(&error)), |_| true);
            Err(error)
        }
    }
}

/// Makes the connections to the ranks below and above; gives the host of each rank.
fn build(
    place: &MeshConfig<'_>,
    host: &str,
    below: &mut Vec<Pair>,
    above: &mut [Pair],
    deadline: Deadline,
) -> Result<Vec<String>> {
    stop_probe::publish_process(place.store, place.rank, deadline)?;
    let job = agree_on_job(place, host, deadline)?;
    let secret = GroupSecret::new(place.credentials.key.as_ref(), &job);
    let own = Hello {
        group: secret.name(),
        generation: place.generation,
        rank: place.rank,
        world: place.world.get(),
        // These differ from connection to connection.
        to: place.rank,
        channel: Channel::Data,
        nonce: [0; NONCE],
    };
    let listener = listen(place.interface)?;
    let (stop, stopped) =
        UnixStream::pair().map_err(|error| Error::io("the accepting thread has no signal", error))?;
    let (finish, finished) = mpsc::channel();
    let missing = AtomicUsize::new(usize::MAX);

    thread::scope(|scope| {
        // Accepting begins before the address is published, so that strangers cannot fill the listener's queue.
        let (listener, secret, missing) = (&listener, &secret, &missing);
        let accepting = scope.spawn(move || {
            let outcome = accept(listener, &stopped, place, (own, secret), above, missing, deadline);
            drop(finish);
            outcome
        });
        let connecting = exchange_addresses(place, host, listener, deadline).and_then(|addresses| {
            for (peer, address) in place.world.ranks().zip(&addresses).take(place.rank.index()) {
                let to = |channel| {
                    connect(place, host, address, (own.on(channel, peer), secret), deadline).map(Some)
                };
                let (data, control) = (to(Channel::Data)?, to(Channel::Control)?);
                below.push(Pair { data, control, messages: to(Channel::Messages)? });
            }
            start::watch(place, host, (&addresses, below), missing, &finished)?;
            Ok(addresses.into_iter().map(|address| address.host).collect())
        });
        if connecting.is_err() {
            drop(stop);
        }
        let accepting =
            accepting.join().unwrap_or_else(|_| Err(Error::aborted("the accepting thread panicked")));
        // If both failed, accepting did because it was stopped.
        connecting.and_then(|hosts| accepting.map(|()| hosts))
    })
}

fn listen(interface: IpAddr) -> Result<TcpListener> {
    let listener = TcpListener::bind((interface, 0));
    let listener =
        listener.map_err(|error| Error::io(format!("no port could be opened on {interface}"), error))?;
    listener.set_nonblocking(true).map_err(|error| Error::io("the listener failed", error))?;
    Ok(listener)
}

/// Rank 0 draws the number that tells this group's connections from all others.
fn agree_on_job(place: &MeshConfig<'_>, host: &str, deadline: Deadline) -> Result<JobId> {
    const KEY: &str = "mesh/job";
    let mut job = JobId::default();
    if place.rank.is_main() {
        fill(&mut job)
            .map_err(|error| Error::io("no random numbers", io::Error::other(error.to_string())))?;
        place.store.set(KEY, &job, deadline)?;
        return Ok(job);
    }
    start::wait_for(place, host, &[(Rank::MAIN, KEY.into())], deadline)?;
    let drawn = place.store.get(KEY, deadline)?;
    drawn.try_into().map_err(|_| Error::protocol("the store holds a malformed job number"))
}

fn exchange_addresses(
    place: &MeshConfig<'_>,
    host: &str,
    listener: &TcpListener,
    deadline: Deadline,
) -> Result<Vec<Address>> {
    let socket = listener.local_addr().map_err(|error| Error::io("the listener has no address", error))?;
    let malformed =
        |error| Error::protocol("the store holds a malformed address of a rank").with_source(error);
    let own = postcard::to_stdvec(&Address { socket, host: host.to_owned() }).map_err(malformed)?;
    place.store.set(&key(place.rank), &own, deadline)?;
    let keys: Vec<(Rank, String)> = place.world.ranks().map(|rank| (rank, key(rank))).collect();
    start::wait_for(place, host, &keys, deadline)?;
    let keys: Vec<&str> = keys.iter().map(|(_, key)| key.as_str()).collect();
    let values = place.store.multi_get(&keys, deadline)?;
    let addresses = values.iter().map(|bytes| postcard::from_bytes::<Address>(bytes).map_err(malformed));
    addresses
        .map(|address| {
            let mut address = address?;
            address.host.truncate(address.host.floor_char_boundary(MAX_HOST));
            Ok(address)
        })
        .collect()
}

fn key(rank: Rank) -> String {
    format!("mesh/address/{rank}")
}

/// Connects to a peer until it works or the deadline passes: a listener's queue may be full, a stranger's connection may
/// be dropped. Gives up early where trying again is in vain.
fn connect(
    place: &MeshConfig<'_>,
    host: &str,
    address: &Address,
    (own, secret): (Hello, &GroupSecret),
    deadline: Deadline,
) -> Result<Connection> {
    let peer = own.to;
    let unreachable = format!("rank {peer} ({}) could not be reached at {}", address.host, address.socket);
    let mut pause = Duration::from_millis(1);
    let mut refusing: Option<Instant> = None;
    let mut reminders = Reminders::new();
    loop {
        let own = own.saying(nonce()?);
        let error = match introduce(address.socket, own, secret, place.credentials.tls.as_ref(), deadline) {
            Ok((stream, hello)) if hello.rank == peer => return Ok(stream),
            Ok((_, hello)) => {
                return Err(Error::protocol(format!("{unreachable}: rank {} answered", hello.rank))
                    .with_peer(peer)
                    .with_remedy("do all hosts have addresses of their own?"));
            }
            Err(error) => error,
        };
        match error.kind() {
            io::ErrorKind::InvalidData => {
                let remedy = Refusal::remedy(&error).unwrap_or(
                    "start every rank with the same build, the same job key (PHALANX_JOB_KEY_FILE) and the same \
                     world size",
                );
                return Err(Error::io(unreachable, error).with_peer(peer).with_remedy(remedy));
            }
            // The end of the patience with which the answer is read.
            io::ErrorKind::WouldBlock if !deadline.has_passed() => {
                return Err(StopProbe::new(place).explain(peer, mute(peer, address)));
            }
            _ if no_more_files(&error).is_some() => return Err(no_descriptors(&unreachable, error)),
            io::ErrorKind::ConnectionRefused => {
                if refusing.get_or_insert_with(Instant::now).elapsed() >= REFUSED {
                    return Err(start::gone(peer, address));
                }
            }
            _ => refusing = None,
        }
        if deadline.remaining() <= pause {
            return Err(Error::io(unreachable, error)
                .with_peer(peer)
                .with_remedy("is it alive, and does a firewall stand between?"));
        }
        reminders.remind(|| format!("rank {} waits: {unreachable}: {error}", place.rank));
        thread::sleep(pause);
        pause = (pause * 2).min(PAUSE);
        if pause == PAUSE {
            start::check(place, host).map_err(|error| match error.peer() {
                // The store is gone, and with it the rank that served it.
                None if refusing.is_some() => start::gone(peer, address),
                _ => error,
            })?;
        }
    }
}

/// The error for a rank whose host takes connections for it, while it says nothing itself.
fn mute(peer: Rank, address: &Address) -> Error {
    let Address { host, socket } = address;
    let cause = format!("rank {peer} ({host}) has not answered at {socket} for {} s", ANSWERING.as_secs());
    Error::new(Kind::PeerFailed, cause)
        .with_peer(peer)
        .with_remedy("is its process stopped, or its host out of memory?")
}

/// Once it has said who it is, a rank waits for each answer, and then gives up the whole start: the peer drops the
/// connection if it wants no more of it. Who only tried again could be counted as connected by a peer that answers late
/// and listens no more; and who did not wait for the last answer could count on a peer that has dropped it.
fn introduce(
    address: SocketAddr,
    own: Hello,
    secret: &GroupSecret,
    tls: Option<&Tls>,
    deadline: Deadline,
) -> io::Result<(Connection, Hello)> {
    let invalid = |error| io::Error::new(io::ErrorKind::InvalidData, error);
    let patience = || deadline.remaining().max(Duration::from_millis(1));
    let stream = TcpStream::connect_timeout(&address, patience().min(CONNECTING))?;
    stream.set_nodelay(true)?;
    stream.set_write_timeout(Some(patience()))?;
    let mut stream = Connection::new(stream);
    let secret = match tls {
        Some(tls) => &secure(&mut stream, secret, tls, deadline.at_most(ANSWERING))?,
        None => secret,
    };
    let caller = Caller::new(own);
    let said = say(&stream, caller.hello());
    // Who does not accept this rank's certificate may have hung up already; why, it has said before.
    if tls.is_none() {
        said?;
    }
    let mut answer = [0; ANSWER];
    let (hello, proof) = answer.split_at_mut(HELLO);
    // A refusal is no longer than a hello, and that of a peer with TLS much shorter.
    let (start, rest) = hello.split_at_mut(tls::REFUSAL.len());
    hear(&stream, start, deadline)?;
    if tls.is_none() && tls::is_alert(start) {
        return Err(Refusal::wanted());
    }
    hear(&stream, rest, deadline)?;
    if let Some(hello) = hello.first_chunk() {
        Hello::decode(hello).map_err(invalid)?;
    }
    hear(&stream, proof, deadline)?;
    let answered = caller.answered(secret, answer).map_err(invalid)?;
    say(&stream, answered.proof())?;
    let mut welcome = [0; TAG];
    hear(&stream, &mut welcome, deadline)?;
    let hello = answered.welcomed(secret, &welcome).map_err(invalid)?;
    stream.admit();
    stream.socket().set_nonblocking(true)?;
    Ok((stream, hello))
}

/// Puts TLS above the connection; gives the group's secret as it is on this one.
fn secure(
    stream: &mut Connection,
    secret: &GroupSecret,
    tls: &Tls,
    deadline: Deadline,
) -> io::Result<GroupSecret> {
    stream.encrypt(tls.client()?);
    loop {
        wait_until(stream, deadline)?;
        if stream.handshake()? {
            break;
        }
    }
    Ok(stream.binding()?.map_or_else(|| secret.clone(), |binding| secret.bound(&binding)))
}

/// Sends all of `bytes` on a connection that blocks.
fn say(stream: &Connection, mut bytes: &[u8]) -> io::Result<()> {
    loop {
        let (taken, is_out) = stream.send(&[IoSlice::new(bytes)])?;
        bytes = &bytes[taken..];
        match (bytes.is_empty(), is_out) {
            (true, true) => return Ok(()),
            (_, true) => {}
            // The time in which it was to be taken has passed.
            (_, false) => return Err(io::ErrorKind::TimedOut.into()),
        }
    }
}

/// Receives as much as `into` holds from a connection that blocks, whose peer is to answer at once.
fn hear(stream: &Connection, mut into: &mut [u8], deadline: Deadline) -> io::Result<()> {
    let deadline = deadline.at_most(ANSWERING);
    while !into.is_empty() {
        wait_until(stream, deadline)?;
        match stream.receive(&mut [IoSliceMut::new(into)]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => into = &mut into[count..],
            // Whether the patience has ended is looked at above.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Lets the next read of a connection that blocks last until `deadline`. If that has passed, the error is that of a read
/// which has lasted so long.
fn wait_until(stream: &Connection, deadline: Deadline) -> io::Result<()> {
    match deadline.remaining() {
        Duration::ZERO => Err(io::ErrorKind::WouldBlock.into()),
        left => stream.socket().set_read_timeout(Some(left)),
    }
}

pub(super) fn no_descriptors(what: &str, error: io::Error) -> Error {
    Error::io(what, error)
        .with_remedy("each group needs three open files for every other rank: raise the limit (`ulimit -n`)")
}

/// For [`fuzzing`](crate::fuzzing): where a rank listens.
#[cfg(any(test, fuzzing))]
pub(in crate::transport) fn fuzz(bytes: &[u8]) -> bool {
    let Ok(address) = postcard::from_bytes::<Address>(bytes) else { return false };
    let again =
        postcard::to_stdvec(&address).is_ok_and(|bytes| postcard::from_bytes::<Address>(&bytes).is_ok());
    assert!(again && address.host.len() <= bytes.len());
    true
}

#[cfg(test)]
mod tests {
    use super::super::pending::HANDSHAKE;
    use super::*;
    use crate::credentials::Credentials;
    use crate::health::Heartbeat;
    use crate::key::JobKey;
    use crate::rank::Generation;
    use crate::store::{MemoryStore, Store};
    use crate::wire::hello::REFUSAL;
    use crate::world_size::WorldSize;
    use std::io::{Read, Write};
    use std::net::Ipv4Addr;
    use std::sync::atomic::{AtomicBool, Ordering};

    fn place(store: &MemoryStore, rank: u32) -> MeshConfig<'_> {
        place_in(store, rank, 2)
    }

    fn place_in(store: &MemoryStore, rank: u32, world: u32) -> MeshConfig<'_> {
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
        }
    }

    /// Leaves the address of a rank that has died since.
    fn bury(store: &MemoryStore, rank: u32) {
        let socket = listen(Ipv4Addr::LOCALHOST.into()).unwrap().local_addr().unwrap();
        let own = postcard::to_stdvec(&Address { socket, host: "gone".into() }).unwrap();
        store.set(&key(Rank::new(rank)), &own, Deadline::after(Duration::from_secs(1))).unwrap();
    }

    #[test]
    fn strangers_hold_nobody_up() {
        let store = MemoryStore::new();
        // Heard one after the other, each for as long as a handshake may take, they would take many times as long.
        let deadline = Deadline::after(HANDSHAKE * 10);
        thread::scope(|scope| {
            let main =
                scope.spawn(|| mesh(&place(&store, 0), deadline).map(|mesh| mesh.connections.data.len()));
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
            mesh(&place(&store, 1), deadline).unwrap();
            assert_eq!(main.join().unwrap().unwrap(), 2);
        });
    }

    /// A peer that knows everything but the key, and says all that it can think of.
    fn noise(own: Hello, number: usize) -> Vec<u8> {
        let mut bytes = [&own.saying([number as u8; NONCE]).encode()[..], &[number as u8; TAG]].concat();
        match number % 4 {
            0 => bytes.truncate(number % HELLO),
            1 => bytes.truncate(HELLO),
            2 => {
                let place = number * 7 % (8 * bytes.len());
                bytes[place / 8] ^= 1 << (place % 8);
            }
            _ => {}
        }
        bytes
    }

    #[test]
    fn a_thousand_strangers_and_one_that_makes_noise_hold_nobody_up() {
        let (store, key) = (MemoryStore::new(), JobKey::generate().unwrap());
        let credentials = Credentials::from(key.clone());
        let deadline = Deadline::after(Duration::from_secs(60));
        let place = |rank| MeshConfig { credentials: &credentials, ..place_in(&store, rank, 3) };
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            let early = [0, 1].map(|rank| {
                let place = place(rank);
                scope.spawn(move || mesh(&place, deadline).map(|mesh| mesh.connections))
            });
            let address: Address =
                postcard::from_bytes(&store.get(&self::key(Rank::MAIN), deadline).unwrap()).unwrap();
            let job = store.get("mesh/job", deadline).unwrap().try_into().unwrap();
            let own = Hello {
                group: GroupSecret::new(Some(&key), &job).name(),
                generation: Generation(0),
                rank: Rank::new(2),
                to: Rank::MAIN,
                world: 3,
                channel: Channel::Data,
                nonce: [0; NONCE],
            };
            let stranger = move |number| {
                let mut stranger = TcpStream::connect(address.socket).ok()?;
                let _ = stranger.write_all(&noise(own, number));
                Some(stranger)
            };
            let done = &done;
            scope.spawn(move || {
                // A hundred at a time stay, and the others hang up in the middle.
                let mut held = std::collections::VecDeque::new();
                for number in 0.. {
                    held.extend(stranger(number));
                    if held.len() > 100 {
                        held.pop_front();
                    }
                    if done.load(Ordering::Relaxed) {
                        return;
                    }
                    // The system has only so many ports, and keeps those of ended connections for a while.
                    thread::sleep(Duration::from_millis(1));
                }
            });
            let strangers: Vec<_> = (0..1000).filter_map(|number| stranger(number * 3)).collect();
            assert!(strangers.len() > 900, "{}", strangers.len());
            let late = mesh(&place(2), deadline);
            done.store(true, Ordering::Relaxed);
            let late = late.unwrap().connections;
            let [zero, one] = early.map(|rank| rank.join().unwrap().unwrap());
            // What stands is what it should be: each end is the other's.
            for (rank, (below, above)) in [(0, (&zero, &late)), (1, (&one, &late))] {
                let pairs = [
                    (&below.data, &above.data),
                    (&below.control, &above.control),
                    (&below.messages, &above.messages),
                ];
                for (below, above) in pairs {
                    let (below, above) = (below[2].as_ref().unwrap(), above[rank].as_ref().unwrap());
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
                let place = MeshConfig { credentials: &credentials[rank as usize], ..place(&store, rank) };
                scope.spawn(move || mesh(&place, deadline).err().unwrap())
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
        let error = mesh(&place(&store, 1), deadline).err().unwrap();
        assert!(error.to_string().contains("rank 0 (gone) could not be reached at"), "{error}");
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
                let place = place_in(&store, rank, 3);
                scope.spawn(move || mesh(&place, deadline).err().unwrap())
            });
            ranks.map(|rank| rank.join().unwrap())
        });
        assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
        for error in errors {
            assert!(error.is_peer_failure() && error.peer() == Some(Rank::new(1)), "{error}");
            assert!(error.rank().is_some() && error.operation() == Some("joining the group"), "{error}");
        }
    }

    #[test]
    fn a_rank_that_is_frozen_while_others_connect_is_named_by_all() {
        let store = MemoryStore::new();
        // Its kernel takes connections; nobody accepts them.
        let frozen = listen(Ipv4Addr::LOCALHOST.into()).unwrap();
        let address = Address { socket: frozen.local_addr().unwrap(), host: "node7".into() };
        let within = Deadline::after(Duration::from_secs(1));
        store.set(&key(Rank::new(1)), &postcard::to_stdvec(&address).unwrap(), within).unwrap();
        let started = Instant::now();
        let deadline = Deadline::after(ANSWERING * 10);
        let errors = thread::scope(|scope| {
            let ranks = [0, 2].map(|rank| {
                let place = place_in(&store, rank, 3);
                scope.spawn(move || mesh(&place, deadline).err().unwrap())
            });
            ranks.map(|rank| rank.join().unwrap())
        });
        assert!(started.elapsed() < ANSWERING * 2, "{:?}", started.elapsed());
        for error in errors {
            assert!(error.is_peer_failure() && error.peer() == Some(Rank::new(1)), "{error}");
            assert!(error.to_string().contains("rank 1 (node7) has not answered at"), "{error}");
        }
    }

    #[test]
    fn a_rank_that_died_before_it_connected_is_named_by_those_who_accept() {
        let store = MemoryStore::new();
        bury(&store, 1);
        let started = Instant::now();
        let error = mesh(&place(&store, 0), Deadline::after(Duration::from_secs(60))).err().unwrap();
        assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
        assert!(error.is_peer_failure() && error.peer() == Some(Rank::new(1)), "{error}");
    }

    #[test]
    fn a_rank_that_never_says_where_it_listens_is_named() {
        let store = MemoryStore::new();
        let error = mesh(&place(&store, 0), Deadline::after(Duration::from_millis(50))).err().unwrap();
        assert!(error.is_timeout() && error.peer() == Some(Rank::new(1)), "{error}");
    }

    #[test]
    fn a_rank_of_another_version_is_told_both_versions_whoever_connects() {
        let store = MemoryStore::new();
        let deadline = Deadline::after(Duration::from_secs(60));
        let secret = GroupSecret::new(None, &[1; 16]);
        let own = Hello {
            group: secret.name(),
            generation: Generation(0),
            rank: Rank::new(1),
            to: Rank::MAIN,
            world: 2,
            channel: Channel::Data,
            nonce: [0; NONCE],
        };
        let of_version_2 = |mut hello: [u8; HELLO]| {
            hello[4..6].copy_from_slice(&2u16.to_le_bytes());
            hello
        };
        thread::scope(|scope| {
            // One that connects is told at once, and holds nobody up.
            let main = scope.spawn(|| mesh(&place(&store, 0), deadline).map(|_| ()));
            let address = store.get(&key(Rank::MAIN), deadline).unwrap();
            let address: Address = postcard::from_bytes(&address).unwrap();
            let mut old = TcpStream::connect(address.socket).unwrap();
            old.write_all(&of_version_2(own.encode())).unwrap();
            let mut answer = [0; HELLO];
            old.read_exact(&mut answer).unwrap();
            assert_eq!(answer, REFUSAL);
            mesh(&place(&store, 1), deadline).unwrap();
            main.join().unwrap().unwrap();
            // One that is connected to answers so.
            let old = listen(Ipv4Addr::LOCALHOST.into()).unwrap();
            let address = Address { socket: old.local_addr().unwrap(), host: "node7".into() };
            old.set_nonblocking(false).unwrap();
            scope.spawn(move || {
                let (mut stream, _) = old.accept().unwrap();
                stream.read_exact(&mut [0; HELLO]).unwrap();
                stream.write_all(&of_version_2(REFUSAL)).unwrap();
            });
            let (store, started) = (MemoryStore::new(), Instant::now());
            let error = connect(&place(&store, 1), "here", &address, (own, &secret), deadline).unwrap_err();
            assert!(error.to_string().contains("a peer speaks version 2, this one 3"), "{error}");
            assert!(error.remedy().unwrap().contains("the same build"), "{error}");
            assert!(error.peer() == Some(Rank::MAIN) && started.elapsed() < Duration::from_secs(20));
        });
    }

    #[test]
    fn a_rank_of_a_former_life_gives_up_at_once() {
        let store = MemoryStore::new();
        let deadline = Deadline::after(Duration::from_secs(60));
        thread::scope(|scope| {
            let main = scope.spawn(|| mesh(&place(&store, 0), deadline).map(|_| ()));
            let address = store.get(&key(Rank::MAIN), deadline).unwrap();
            let address: Address = postcard::from_bytes(&address).unwrap();
            let stale = place(&store, 1);
            let secret = GroupSecret::new(None, &[1; 16]);
            let own = Hello {
                group: secret.name(),
                generation: Generation(0),
                rank: Rank::new(1),
                to: Rank::MAIN,
                world: 2,
                channel: Channel::Data,
                nonce: [0; NONCE],
            };
            let started = Instant::now();
            let error = connect(&stale, "here", &address, (own, &secret), deadline).unwrap_err();
            assert!(error.to_string().contains("not of its job"), "{error}");
            assert!(started.elapsed() < Duration::from_secs(20));
            mesh(&stale, deadline).unwrap();
            main.join().unwrap().unwrap();
        });
    }
}
