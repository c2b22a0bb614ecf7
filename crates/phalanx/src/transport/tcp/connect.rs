//! Builds the mesh: every rank listens, connects to the ranks below it, and accepts those above.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use getrandom::fill;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};

use super::Place;
use super::control::Connections;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::wire::hello::{Channel, HELLO, Hello, JobId};

/// A stranger gets this long to introduce itself.
const HANDSHAKE: Duration = Duration::from_secs(2);
/// A peer gets this long to answer: on a host with many ranks it may have to wait for a processor first.
const ANSWER: Duration = Duration::from_secs(10);
/// Connections that may be introducing themselves at once; the oldest gives way.
const MAX_PENDING: usize = 256;
/// The longest host name that is shown.
const MAX_HOST: usize = 255;

/// One rank's connections to all others.
pub(super) struct Mesh {
    pub connections: Connections,
    /// By rank.
    pub hosts: Vec<String>,
}

/// Where a rank listens, as it stands in the store.
#[derive(Serialize, Deserialize)]
struct Address {
    socket: SocketAddr,
    host: String,
}

pub(super) fn mesh(place: &Place<'_>, deadline: Deadline) -> Result<Mesh> {
    let (rank, world) = (place.rank, place.world);
    let job = agree_on_job(place, deadline)?;
    let own = |channel| Hello { job, epoch: place.epoch, rank, world: world.get(), channel };
    let listener = listen(place.interface)?;
    let (stop, stopped) =
        UnixStream::pair().map_err(|error| Error::io("the accepting thread has no signal", error))?;

    // Accepting begins before the address is known to anybody, so that strangers cannot fill the listener's queue.
    let (above, addresses, below) = thread::scope(|scope| {
        let above = scope.spawn(|| accept(&listener, &stopped, place, own(Channel::Data), deadline));
        let addresses = exchange_addresses(place, &listener, deadline);
        let below = addresses.as_ref().map_err(Error::clone).and_then(|addresses| {
            let pair = |(peer, address)| {
                let to = |channel| connect(address, peer, own(channel), deadline);
                Ok((to(Channel::Data)?, to(Channel::Control)?))
            };
            world.ranks().zip(addresses).take(rank.index()).map(pair).collect::<Result<Vec<_>>>()
        });
        if below.is_err() {
            drop(stop);
        }
        let above = above.join().unwrap_or_else(|_| Err(Error::aborted("the accepting thread panicked")));
        (above, addresses, below)
    });
    let addresses = addresses?;
    let mut pairs: Vec<_> = below?.into_iter().map(|(data, control)| (Some(data), Some(control))).collect();
    pairs.push((None, None));
    pairs.extend(above?);
    let (data, control) = pairs.into_iter().unzip();
    let connections = Connections { control, data };
    Ok(Mesh { connections, hosts: addresses.into_iter().map(|address| address.host).collect() })
}

fn listen(interface: IpAddr) -> Result<TcpListener> {
    let listener = TcpListener::bind((interface, 0));
    let listener =
        listener.map_err(|error| Error::io(format!("no port could be opened on {interface}"), error))?;
    listener.set_nonblocking(true).map_err(|error| Error::io("the listener failed", error))?;
    Ok(listener)
}

/// Rank 0 draws the number that tells this group's connections from all others.
fn agree_on_job(place: &Place<'_>, deadline: Deadline) -> Result<JobId> {
    const KEY: &str = "mesh/job";
    let mut job = JobId::default();
    if place.rank.is_main() {
        fill(&mut job)
            .map_err(|error| Error::io("no random numbers", io::Error::other(error.to_string())))?;
        place.store.set(KEY, &job, deadline)?;
        return Ok(job);
    }
    let drawn = place.store.get(KEY, deadline)?;
    drawn.try_into().map_err(|_| Error::protocol("the store holds a malformed job number"))
}

fn exchange_addresses(place: &Place<'_>, listener: &TcpListener, deadline: Deadline) -> Result<Vec<Address>> {
    let socket = listener.local_addr().map_err(|error| Error::io("the listener has no address", error))?;
    let mut host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    host.truncate(host.floor_char_boundary(MAX_HOST));
    let malformed =
        |error| Error::protocol("the store holds a malformed address of a rank").with_source(error);
    let own = postcard::to_stdvec(&Address { socket, host }).map_err(malformed)?;
    place.store.set(&key(place.rank), &own, deadline)?;
    let keys: Vec<String> = place.world.ranks().map(key).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
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

/// Connects to `peer` until it works or the deadline passes: a listener's queue may be full, a handshake may be slow.
fn connect(address: &Address, peer: Rank, own: Hello, deadline: Deadline) -> Result<TcpStream> {
    let mut pause = Duration::from_millis(1);
    loop {
        let error = match introduce(address.socket, own, deadline) {
            Ok((stream, hello)) => {
                own.accept(&hello)?;
                if hello.rank == peer {
                    return Ok(stream);
                }
                io::Error::other(format!("rank {} answered", hello.rank))
            }
            Err(error) => error,
        };
        if deadline.remaining() <= pause {
            return Err(Error::io(
                format!("rank {peer} ({}) could not be reached at {}", address.host, address.socket),
                error,
            )
            .with_peer(peer)
            .with_remedy("is it alive, and does a firewall stand between?"));
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(200));
    }
}

fn introduce(address: SocketAddr, own: Hello, deadline: Deadline) -> io::Result<(TcpStream, Hello)> {
    let patience = deadline.remaining().clamp(Duration::from_millis(1), ANSWER);
    let mut stream = TcpStream::connect_timeout(&address, patience)?;
    stream.set_read_timeout(Some(patience))?;
    stream.set_write_timeout(Some(patience))?;
    stream.write_all(&own.encode())?;
    let mut answer = [0; HELLO];
    stream.read_exact(&mut answer)?;
    let hello = Hello::decode(&answer).map_err(io::Error::other)?;
    settle(&stream)?;
    Ok((stream, hello))
}

/// The settings of a connection that is part of the mesh.
fn settle(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)
}

/// A connection that has not introduced itself yet.
struct Pending {
    stream: TcpStream,
    bytes: [u8; HELLO],
    filled: usize,
    deadline: Deadline,
}

type Pair = (Option<TcpStream>, Option<TcpStream>);

/// Accepts both connections of every rank above this one, or stops when `stopped` is closed at its other end. A stranger
/// is dropped, and holds nobody up.
fn accept(
    listener: &TcpListener,
    stopped: &UnixStream,
    place: &Place<'_>,
    own: Hello,
    deadline: Deadline,
) -> Result<Vec<Pair>> {
    let first = place.rank.index() + 1;
    let mut pairs: Vec<Pair> = (first..place.world.count()).map(|_| (None, None)).collect();
    let mut pending: Vec<Pending> = Vec::new();
    loop {
        let missing = pairs.iter().position(|(data, control)| data.is_none() || control.is_none());
        let Some(missing) = missing else { return Ok(pairs) };
        if deadline.has_passed() {
            let peer = Rank::new((first + missing) as u32);
            return Err(Error::timeout(format!("rank {peer} did not connect in time"))
                .with_peer(peer)
                .with_remedy("is it alive, and does a firewall stand between?"));
        }
        if wait_for_arrivals(listener, stopped, &pending, deadline)? {
            return Err(Error::aborted("accepting was stopped"));
        }
        while let Ok((stream, _)) = listener.accept() {
            if stream.set_nonblocking(true).is_ok() {
                if pending.len() == MAX_PENDING {
                    pending.remove(0);
                }
                pending.push(Pending {
                    stream,
                    bytes: [0; HELLO],
                    filled: 0,
                    deadline: Deadline::after(HANDSHAKE),
                });
            }
        }
        let mut still_pending = Vec::with_capacity(pending.len());
        for mut connection in pending {
            match connection.advance() {
                Progress::Waiting => still_pending.push(connection),
                Progress::Dropped => {}
                Progress::Said(hello) => welcome(connection.stream, own, hello, first, &mut pairs),
            }
        }
        pending = still_pending;
    }
}

/// Waits until somebody connects or speaks, or a patience ends. True if `stopped` is closed.
fn wait_for_arrivals(
    listener: &TcpListener,
    stopped: &UnixStream,
    pending: &[Pending],
    deadline: Deadline,
) -> Result<bool> {
    let mut fds = vec![PollFd::new(stopped, PollFlags::IN), PollFd::new(listener, PollFlags::IN)];
    fds.extend(pending.iter().map(|connection| PollFd::new(&connection.stream, PollFlags::IN)));
    let patience =
        pending.iter().map(|connection| connection.deadline).fold(deadline, Deadline::min).remaining();
    let timeout = Timespec { tv_sec: patience.as_secs() as i64, tv_nsec: i64::from(patience.subsec_nanos()) };
    match poll(&mut fds, Some(&timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(!fds[0].revents().is_empty()),
        Err(error) => Err(Error::io("waiting for peers failed", error.into())),
    }
}

enum Progress {
    Waiting,
    Dropped,
    Said(Hello),
}

impl Pending {
    fn advance(&mut self) -> Progress {
        match (&self.stream).read(&mut self.bytes[self.filled..]) {
            Ok(0) => Progress::Dropped,
            Ok(count) => {
                self.filled += count;
                match self.filled == HELLO {
                    true => Hello::decode(&self.bytes).map_or(Progress::Dropped, Progress::Said),
                    false => Progress::Waiting,
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && !self.deadline.has_passed() => {
                Progress::Waiting
            }
            Err(_) => Progress::Dropped,
        }
    }
}

/// Answers a rank above and keeps its connection. A rank that tries again replaces its earlier try.
fn welcome(stream: TcpStream, own: Hello, hello: Hello, first: usize, pairs: &mut [Pair]) {
    let own = Hello { channel: hello.channel, ..own };
    if let Err(error) = own.accept(&hello) {
        tracing::warn!(%error, "a connection was turned away");
        return;
    }
    let Some((data, control)) = hello.rank.index().checked_sub(first).and_then(|index| pairs.get_mut(index))
    else {
        return;
    };
    // 48 bytes into an empty connection: they go out whole or the connection is broken.
    if (&stream).write_all(&own.encode()).and_then(|()| settle(&stream)).is_ok() {
        *match hello.channel {
            Channel::Data => data,
            Channel::Control => control,
        } = Some(stream);
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::time::Instant;

    use super::*;
    use crate::rank::{Epoch, WorldSize};
    use crate::store::{MemoryStore, Store};

    fn place(store: &MemoryStore, rank: u32) -> Place<'_> {
        let interface = Ipv4Addr::LOCALHOST.into();
        let world = WorldSize::new(2).unwrap();
        Place { store, rank: Rank::new(rank), world, epoch: Epoch(0), interface }
    }

    #[test]
    fn strangers_hold_nobody_up() {
        let store = MemoryStore::new();
        let deadline = Deadline::after(Duration::from_secs(20));
        thread::scope(|scope| {
            let main =
                scope.spawn(|| mesh(&place(&store, 0), deadline).map(|mesh| mesh.connections.data.len()));
            let address = store.get(&key(Rank::MAIN), deadline).unwrap();
            let address: Address = postcard::from_bytes(&address).unwrap();
            let job = store.get("mesh/job", deadline).unwrap().try_into().unwrap();
            let mut strangers = Vec::new();
            for number in 0..200u8 {
                let mut stranger = TcpStream::connect(address.socket).unwrap();
                let hello = Hello {
                    job: if number % 3 == 0 { job } else { [number; 16] },
                    epoch: Epoch(u64::from(number % 2)),
                    rank: Rank::new(u32::from(number)),
                    world: 3,
                    channel: Channel::Data,
                };
                // Silence, half a handshake, a wrong one.
                let _ = stranger.write_all(&hello.encode()[..usize::from(number) * HELLO / 199]);
                strangers.push(stranger);
            }
            let started = Instant::now();
            mesh(&place(&store, 1), deadline).unwrap();
            assert_eq!(main.join().unwrap().unwrap(), 2);
            assert!(started.elapsed() < HANDSHAKE, "the ranks waited for strangers");
        });
    }

    #[test]
    fn a_rank_that_does_not_come_is_named() {
        let store = MemoryStore::new();
        let own = postcard::to_stdvec(&Address {
            // A port that was free a moment ago.
            socket: listen(Ipv4Addr::LOCALHOST.into()).unwrap().local_addr().unwrap(),
            host: "gone".into(),
        });
        store.set(&key(Rank::new(0)), &own.unwrap(), Deadline::after(Duration::from_secs(1))).unwrap();
        store.set("mesh/job", &[0; 16], Deadline::after(Duration::from_secs(1))).unwrap();
        let deadline = Deadline::after(Duration::from_millis(100));
        let error = mesh(&place(&store, 1), deadline).err().unwrap();
        assert!(error.to_string().contains("rank 0 (gone) could not be reached at"), "{error}");
        assert_eq!(error.peer(), Some(Rank::MAIN));
    }
}
