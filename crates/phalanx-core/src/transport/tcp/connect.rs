//! Builds the mesh: every rank listens, connects to the lower ranks, and accepts the higher ones.

use std::io;
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{OnceLock, mpsc};
use std::thread;

use serde::{Deserialize, Serialize};

use super::accept::{Accepted, Early, Pair, accept};
use super::connection::Connection;
use super::connections::{Connections, Requests};
use super::dial::{Attempt, attempt_together, dial};
use super::on_demand::{Caller, at_start, is_on_demand};
use super::start_failure::{self, Watch};
use super::{MeshConfig, all_tell, stop_probe};
use crate::deadline::Deadline;
use crate::error::{Error, Kind, Result};
use crate::host;
use crate::key::JobKey;
use crate::poll;
use crate::random;
use crate::rank::Rank;
use crate::store;
use crate::transport::bootstrap;
use crate::wire::auth::NONCE;
use crate::wire::control::{Control, Notice};
use crate::wire::handshake::GroupSecret;
use crate::wire::hello::{Channel, Hello, JobId};

/// The key of the number that distinguishes a group's connections.
const JOB: &str = "mesh/job";
/// Where each rank writes its address.
pub(super) const ADDRESS: &str = "mesh/address";
/// The longest host name that is shown.
const MAX_HOST: usize = 255;

/// One rank's connections to all others.
pub(crate) struct Mesh {
    pub connections: Connections,
    /// By rank.
    pub hosts: Vec<String>,
    /// Makes the connections that the start does not.
    pub caller: Option<Caller>,
    /// What the ranks have told each other when they were connected, by rank; nothing if nothing was to be told.
    pub told: Vec<Vec<u8>>,
}

/// Where a rank listens, as written to the store.
#[derive(Serialize, Deserialize)]
pub(super) struct Address {
    pub socket: SocketAddr,
    pub host: String,
}

/// What each rank of a group announces with its address, so that one request tells all. No key has two writers then: a rank that is there
/// twice is an error.
pub(crate) struct Announcement<'a> {
    /// This rank's own.
    pub own: Vec<u8>,
    /// Reads those of all ranks, by rank. An error ends the start on every rank.
    pub read: &'a dyn Fn(&[&[u8]]) -> Result<()>,
    /// What this rank tells the others when all are connected. Whoever has heard all knows that nobody reads the store any more.
    pub then: &'a dyn Fn() -> Result<Vec<u8>>,
}

/// Connects this rank with all others. If that fails, it tells them, so that none waits for it until its deadline.
pub(crate) fn mesh_with(
    config: &MeshConfig<'_>,
    announcement: Option<&Announcement<'_>>,
    deadline: Deadline,
) -> Result<Mesh> {
    let host = host::name();
    let (mut below, mut above) = (Vec::new(), Vec::new());
    above.resize_with(config.world.count() - config.rank.index() - 1, Pair::default);
    let built = build(config, announcement, &host, (&mut below, &mut above), deadline);
    let mut connections = Connections::default();
    let slot = |made: Option<Connection>| made.map_or_else(OnceLock::new, OnceLock::from);
    for Pair { data, control, messages } in below.into_iter().chain([Pair::default()]).chain(above) {
        connections.data.push(slot(data));
        connections.control.push(control);
        connections.messages.push(slot(messages));
    }
    let tell = announcement.map(|announcement| announcement.then);
    let built = built.and_then(|built| {
        let exchange = |own| all_tell::exchange(config, &built.hosts, &connections, own, deadline);
        let told = tell.map(|tell| tell().and_then(exchange)).transpose()?.unwrap_or_default();
        Ok((built, told))
    });
    match built {
        Ok((Built { hosts, early, on_demand }, told)) => {
            connections.keep_early(early);
            let (caller, requests) = on_demand.unzip();
            connections.requests = requests;
            Ok(Mesh { connections, hosts, caller, told })
        }
        Err(error) => {
            let error = start_failure::report_failed_start(config.store, config.rank, &host, error);
            // A rank that has all its connections no longer reads the store.
            connections.tell(&Control::Failure(Notice::of(&error)), |_| true);
            Err(error)
        }
    }
}

/// The connections of a group in which nothing is announced.
#[cfg(test)]
pub(super) fn mesh(config: &MeshConfig<'_>, deadline: Deadline) -> Result<Mesh> {
    mesh_with(config, None, deadline)
}

/// What a start leaves beside its connections.
struct Built {
    /// By rank.
    hosts: Vec<String>,
    early: Vec<Early>,
    /// If some connections are made at their first use.
    on_demand: Option<(Caller, Requests)>,
}

/// Makes the start's connections to the lower and higher ranks.
fn build(
    config: &MeshConfig<'_>,
    announcement: Option<&Announcement<'_>>,
    host: &str,
    (below, above): (&mut Vec<Pair>, &mut [Pair]),
    deadline: Deadline,
) -> Result<Built> {
    let job = config.number.map_or_else(|| agree_on_job(config, host, deadline), Ok)?;
    let secret = GroupSecret::new(config.credentials.key.as_ref().map(JobKey::bytes), &job);
    let own = Hello {
        group: secret.name(),
        generation: config.generation,
        rank: config.rank,
        world: config.world.get(),
        // These differ between connections.
        to: config.rank,
        channel: Channel::Data,
        nonce: [0; NONCE],
    };
    let listener = listen(config.interface)?;
    // Nobody calls the highest rank.
    let is_called = !above.is_empty() || is_on_demand(config.world);
    // The lowest calls nobody. Where all others are on this host and answer at once, it would wait longer for a thread than for them.
    let (addresses, accepted) = match is_called && config.rank.is_main() && poll::is_prompt() {
        true => accept_here(config, announcement, host, &listener, (own, &secret), above, deadline)?,
        false => {
            let accepts = is_called.then_some(above);
            accept_beside(config, announcement, host, &listener, (own, &secret), (below, accepts), deadline)?
        }
    };
    let hosts = addresses.iter().map(|address| address.host.clone()).collect();
    let Accepted { early, pending } = accepted;
    // Also without a peer on its host: one that listens at another address of this host is near for this rank alone.
    let on_demand = is_on_demand(config.world)
        .then(|| Caller::new(listener, addresses, (own, secret), config.credentials.tls.clone(), pending));
    Ok(Built { hosts, early, on_demand: on_demand.transpose()? })
}

/// What a rank has when all that call it at the start have done so: the others' addresses, and what is left of accepting.
type Met = (Vec<Address>, Accepted);

/// Asks for the addresses, and then accepts the higher ranks, which this one need not call. Connections that come before wait in the listener's
/// queue.
fn accept_here(
    config: &MeshConfig<'_>,
    announcement: Option<&Announcement<'_>>,
    host: &str,
    listener: &TcpListener,
    own: (Hello, &GroupSecret),
    above: &mut [Pair],
    deadline: Deadline,
) -> Result<Met> {
    let addresses = exchange_addresses(config, announcement, host, listener, deadline)?;
    let missing = AtomicUsize::new(usize::MAX);
    let mut watch = Watch::new(config, host, &addresses);
    let mut meanwhile = || watch.look(&[], &missing, deadline);
    let accepted = accept(listener, None, config, own, above, (&missing, &mut meanwhile), deadline)?;
    Ok((addresses, accepted))
}

/// Asks for the addresses and calls the lower ranks, while a thread accepts the higher ones, if any call this rank.
fn accept_beside(
    config: &MeshConfig<'_>,
    announcement: Option<&Announcement<'_>>,
    host: &str,
    listener: &TcpListener,
    own: (Hello, &GroupSecret),
    (below, above): (&mut Vec<Pair>, Option<&mut [Pair]>),
    deadline: Deadline,
) -> Result<Met> {
    let (stop, stopped) = UnixStream::pair()
        .map_err(|error| Error::io("cannot make a socket pair that stops the accepting thread", error))?;
    let (finish, finished) = mpsc::channel();
    let missing = AtomicUsize::new(usize::MAX);

    thread::scope(|scope| {
        // Accepting begins before the address is published, so that foreign connections cannot fill the listener's
        // queue.
        let missing = &missing;
        let is_prompt = poll::is_prompt();
        let accept = |above| {
            move || {
                let mut meanwhile = || Ok(());
                let accept = || {
                    accept(listener, Some(&stopped), config, own, above, (missing, &mut meanwhile), deadline)
                };
                let outcome = poll::promptly(is_prompt, accept);
                drop(finish);
                outcome
            }
        };
        let start =
            |above| thread::Builder::new().name("phalanx-accept".into()).spawn_scoped(scope, accept(above));
        let accepting = above.map(start).transpose().map_err(|error| {
            Error::not_started("a thread that connects ranks could not be started", error)
        })?;
        let exchanged = exchange_addresses(config, announcement, host, listener, deadline);
        let connecting = exchanged.and_then(|addresses| {
            below.resize_with(config.rank.index(), Pair::default);
            dial_all(config, host, &addresses, own, below, deadline)?;
            let mut watch = Watch::new(config, host, &addresses);
            start_failure::watch(&mut watch, below, missing, &finished, deadline)?;
            Ok(addresses)
        });
        if connecting.is_err() {
            // To close it is not enough: a process that is forked from this one meanwhile has it open, too.
            let _ = stop.shutdown(Shutdown::Both);
        }
        let accepting = accepting.map_or_else(
            || Ok(Accepted::default()),
            |thread| thread.join().unwrap_or_else(|_| Err(Error::panicked("the accepting thread panicked"))),
        );
        // If both failed, accepting failed because it was stopped.
        connecting.and_then(|addresses| accepting.map(|accepted| (addresses, accepted)))
    })
}

/// The most connections that are made at a time.
const DIALS_AT_ONCE: usize = 32;

/// The most ranks of this host that are called before the first of their answers is read.
const CALLS_AT_ONCE: usize = 8;

/// Connects to all lower ranks. Those on other hosts are dialled by several threads, because each connection takes three round trips.
/// Within a host that would only cost threads: there one thread calls several ranks, beginning with the next lower one, so that not all
/// ranks call the same one at once.
fn dial_all(
    config: &MeshConfig<'_>,
    host: &str,
    addresses: &[Address],
    (own, secret): (Hello, &GroupSecret),
    below: &mut [Pair],
    deadline: Deadline,
) -> Result<()> {
    let is_near = |address: &Address| address.socket.ip() == config.interface;
    let (mut near, mut far) = (Vec::new(), Vec::new());
    let lower: Vec<_> = config.world.ranks().zip(addresses).zip(&mut *below).collect();
    for ((peer, address), pair) in lower.into_iter().rev() {
        let channels = at_start(config.world, is_near(address));
        let to = if is_near(address) { &mut near } else { &mut far };
        let into = [
            (Channel::Data, &mut pair.data),
            (Channel::Control, &mut pair.control),
            (Channel::Messages, &mut pair.messages),
        ];
        let into = into.into_iter().filter(|(channel, _)| channels.contains(channel));
        to.extend(into.map(|(channel, into)| (peer, address, channel, into)));
    }
    let has_failed = AtomicBool::new(false);
    type To<'a> = (Rank, &'a Address, Channel, &'a mut Option<Connection>);
    let dial = |(peer, address, channel, into): To<'_>, first: Option<Attempt>| {
        let hello = (own.on(channel, peer), secret);
        let made = dial(config, host, address, hello, first, &has_failed, deadline);
        made.map(|connection| *into = Some(connection))
    };
    // A TLS handshake is work of both sides: there is nothing to gain.
    let at_once =
        if config.credentials.tls.is_some() { 1 } else { CALLS_AT_ONCE * at_start(config.world, true).len() };
    let dial_near = |mut near: Vec<To<'_>>| -> Result<()> {
        while !near.is_empty() {
            let rest = near.split_off(near.len().min(at_once));
            let peers = near.iter().map(|(peer, address, channel, _)| (*address, own.on(*channel, *peer)));
            let attempts = attempt_together(config, peers, secret, deadline)?;
            near.into_iter().zip(attempts).try_for_each(|(to, first)| dial(to, Some(first)))?;
            near = rest;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let threads = DIALS_AT_ONCE.min(far.len());
        let mut shares: Vec<Vec<_>> = Vec::new();
        shares.resize_with(threads, Vec::new);
        for (index, one) in far.into_iter().enumerate() {
            shares[index % threads].push(one);
        }
        let (dial, has_failed) = (&dial, &has_failed);
        let mut failed = Ok(());
        let mut dialling = Vec::new();
        for share in shares {
            let run = move || {
                share
                    .into_iter()
                    .try_for_each(|to| dial(to, None))
                    .inspect_err(|_| has_failed.store(true, Ordering::Relaxed))
            };
            match thread::Builder::new().name("phalanx-dial".into()).spawn_scoped(scope, run) {
                Ok(thread) => dialling.push(thread),
                Err(error) => {
                    failed =
                        Err(Error::not_started("a thread that connects ranks could not be started", error));
                    break;
                }
            }
        }
        let mut outcome = failed.and_then(|()| dial_near(near));
        if outcome.is_err() {
            has_failed.store(true, Ordering::Relaxed);
        }
        for thread in dialling {
            let dialled = thread
                .join()
                .unwrap_or_else(|_| Err(Error::panicked("a thread that connects ranks panicked")));
            // A rank that has stopped because of another's failure knows less than that.
            outcome = match (outcome, dialled) {
                (Ok(()), dialled) => dialled,
                (Err(first), Err(other)) if first.kind() == Kind::Aborted => Err(other),
                (Err(first), _) => Err(first),
            };
        }
        outcome
    })?;
    // Both ends see by the connection whether they are on one host. The peer's address may say so where the connection does not.
    for ((peer, address), pair) in config.world.ranks().zip(addresses).zip(below) {
        let is_within_host = pair.control.as_ref().is_some_and(Connection::is_within_host);
        let made = at_start(config.world, is_near(address));
        for channel in at_start(config.world, is_within_host).iter().filter(|channel| !made.contains(channel))
        {
            dial((peer, address, *channel, pair.connection(*channel)), None)?;
        }
    }
    Ok(())
}

pub(super) fn listen(interface: IpAddr) -> Result<TcpListener> {
    store::listen(SocketAddr::new(interface, 0)).map_err(|error| {
        Error::io(format!("no port could be opened on {interface}"), error).with_remedy_if_none(
            "has this host still that address? GLOO_SOCKET_IFNAME names another interface",
        )
    })
}

/// Rank 0 draws the number that distinguishes this group's connections from all others.
fn agree_on_job(config: &MeshConfig<'_>, host: &str, deadline: Deadline) -> Result<JobId> {
    let (name, process) = stop_probe::process_record(config.rank)?;
    if config.rank.is_main() {
        let job: JobId = random::bytes()?;
        config.store.multi_set(&[(&name, &process), (JOB, &job)], deadline)?;
        return Ok(job);
    }
    let keys = [(Rank::MAIN, JOB.into())];
    let drawn = start_failure::exchange(config, host, &[(&name, &process)], &keys, deadline)?;
    let drawn = drawn.into_iter().next().unwrap_or_default();
    drawn.try_into().map_err(|_| Error::malformed("the store holds a malformed job number"))
}

/// Publishes where this rank listens. Returns the addresses of all ranks, by rank.
pub(super) fn exchange_addresses(
    config: &MeshConfig<'_>,
    announcement: Option<&Announcement<'_>>,
    host: &str,
    listener: &TcpListener,
    deadline: Deadline,
) -> Result<Vec<Address>> {
    let socket = listener.local_addr().map_err(|error| Error::io("the listener has no address", error))?;
    let malformed =
        |error| Error::malformed("the store holds a malformed address of a rank").with_source(error);
    let mut own = postcard::to_stdvec(&Address { socket, host: host.to_owned() }).map_err(malformed)?;
    let own_key = key(config.rank);
    let values = match announcement {
        None => {
            let tells_process = config.tells_process && config.number.is_some();
            let process = tells_process.then(|| stop_probe::process_record(config.rank)).transpose()?;
            let process = process.as_ref().map(|(name, process)| (name.as_str(), process.as_slice()));
            let pairs: Vec<(&str, &[u8])> =
                process.into_iter().chain([(own_key.as_str(), own.as_slice())]).collect();
            bootstrap::of_all(config, ADDRESS, |gathered, keys| match gathered {
                None => start_failure::exchange(config, host, &pairs, keys, deadline),
                Some(pair) => start_failure::exchange(config, host, &[pair], keys, deadline),
            })?
        }
        Some(announcement) => {
            own.extend_from_slice(&announcement.own);
            // No other request has told which process this is.
            let (name, process) = stop_probe::process_record(config.rank)?;
            let pairs: [(&str, &[u8]); 2] = [(&name, &process), (&own_key, &own)];
            bootstrap::of_all(config, ADDRESS, |gathered, keys| match gathered {
                None => start_failure::exchange_once(config, host, &pairs, keys, deadline),
                Some(pair) => start_failure::exchange(config, host, &[pair], keys, deadline),
            })?
        }
    };
    let mut announced = Vec::with_capacity(values.len());
    let addresses = values.iter().map(|bytes| {
        let (address, rest) = read_address(bytes).map_err(malformed)?;
        announced.push(rest);
        Ok(address)
    });
    let addresses = addresses.collect::<Result<_>>()?;
    announcement.map_or(Ok(()), |announcement| (announcement.read)(&announced))?;
    Ok(addresses)
}

/// The address that a rank has published, and what it has announced with it.
pub(super) fn read_address(bytes: &[u8]) -> postcard::Result<(Address, &[u8])> {
    let (mut address, rest) = postcard::take_from_bytes::<Address>(bytes)?;
    address.host.truncate(address.host.floor_char_boundary(MAX_HOST));
    Ok((address, rest))
}

pub(super) fn key(rank: Rank) -> String {
    bootstrap::key(ADDRESS, rank)
}

/// The keys under which `rank` writes to the store while the mesh is built.
pub(crate) fn keys_of(rank: Rank) -> Vec<String> {
    let job = rank.is_main().then(|| JOB.to_owned());
    bootstrap::keys_of(ADDRESS, rank).into_iter().chain([stop_probe::key(rank)]).chain(job).collect()
}

pub(super) fn no_descriptors(what: &str, error: io::Error) -> Error {
    Error::io(what, error).with_remedy(
        "each group needs up to three open files for every other rank: raise the limit (`ulimit -n`)",
    )
}

/// For `phalanx::fuzzing`: decodes where a rank listens.
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
pub(in crate::transport) fn fuzz(bytes: &[u8]) -> bool {
    let Ok(address) = postcard::from_bytes::<Address>(bytes) else { return false };
    let again =
        postcard::to_stdvec(&address).is_ok_and(|bytes| postcard::from_bytes::<Address>(&bytes).is_ok());
    assert!(again && address.host.len() <= bytes.len());
    true
}
