//! Builds the mesh: every rank listens, connects to the lower ranks, and accepts the higher ones.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc;
use std::thread;

use serde::{Deserialize, Serialize};

use super::accept::{Pair, accept};
use super::control::Connections;
use super::dial::dial;
use super::{MeshConfig, start_failure, stop_probe};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::host;
use crate::random;
use crate::rank::Rank;
use crate::wire::auth::NONCE;
use crate::wire::control::{Control, Notice};
use crate::wire::handshake::GroupSecret;
use crate::wire::hello::{Channel, Hello, JobId};

/// The longest host name that is shown.
const MAX_HOST: usize = 255;

/// One rank's connections to all others.
pub(crate) struct Mesh {
    pub connections: Connections,
    /// By rank.
    pub hosts: Vec<String>,
}

/// Where a rank listens, as written to the store.
#[derive(Serialize, Deserialize)]
pub(super) struct Address {
    pub socket: SocketAddr,
    pub host: String,
}

/// Connects this rank with all others. If that fails, it tells them, so that none waits for it until its deadline.
pub(crate) fn mesh(config: &MeshConfig<'_>, deadline: Deadline) -> Result<Mesh> {
    let host = host::name();
    let (mut below, mut above) = (Vec::new(), Vec::new());
    above.resize_with(config.world.count() - config.rank.index() - 1, Pair::default);
    let hosts = build(config, &host, &mut below, &mut above, deadline);
    let mut connections = Connections::default();
    for Pair { data, control, messages } in below.into_iter().chain([Pair::default()]).chain(above) {
        connections.data.push(data);
        connections.control.push(control);
        connections.messages.push(messages);
    }
    match hosts {
        Ok(hosts) => Ok(Mesh { connections, hosts }),
        Err(error) => {
            let error = start_failure::report(config, &host, error);
            // A rank that has all its connections no longer reads the store.
            connections.tell(&Control::Failure(Notice::of(&error)), |_| true);
            Err(error)
        }
    }
}

/// Makes the connections to the lower and higher ranks. Returns the host of each rank.
fn build(
    config: &MeshConfig<'_>,
    host: &str,
    below: &mut Vec<Pair>,
    above: &mut [Pair],
    deadline: Deadline,
) -> Result<Vec<String>> {
    stop_probe::publish_process(config.store, config.rank, deadline)?;
    let job = agree_on_job(config, host, deadline)?;
    let secret = GroupSecret::new(config.credentials.key.as_ref(), &job);
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
    let (stop, stopped) = UnixStream::pair()
        .map_err(|error| Error::io("cannot make a socket pair that stops the accepting thread", error))?;
    let (finish, finished) = mpsc::channel();
    let missing = AtomicUsize::new(usize::MAX);

    thread::scope(|scope| {
        // Accepting begins before the address is published, so that foreign connections cannot fill the listener's
        // queue.
        let (listener, secret, missing) = (&listener, &secret, &missing);
        let accepting = scope.spawn(move || {
            let outcome = accept(listener, &stopped, config, (own, secret), above, missing, deadline);
            drop(finish);
            outcome
        });
        let connecting = exchange_addresses(config, host, listener, deadline).and_then(|addresses| {
            for (peer, address) in config.world.ranks().zip(&addresses).take(config.rank.index()) {
                let to = |channel| {
                    dial(config, host, address, (own.on(channel, peer), secret), deadline).map(Some)
                };
                let (data, control) = (to(Channel::Data)?, to(Channel::Control)?);
                below.push(Pair { data, control, messages: to(Channel::Messages)? });
            }
            start_failure::watch(config, host, (&addresses, below), missing, &finished)?;
            Ok(addresses.into_iter().map(|address| address.host).collect())
        });
        if connecting.is_err() {
            drop(stop);
        }
        let accepting =
            accepting.join().unwrap_or_else(|_| Err(Error::aborted("the accepting thread panicked")));
        // If both failed, accepting failed because it was stopped.
        connecting.and_then(|hosts| accepting.map(|()| hosts))
    })
}

pub(super) fn listen(interface: IpAddr) -> Result<TcpListener> {
    let listener = TcpListener::bind((interface, 0));
    let listener =
        listener.map_err(|error| Error::io(format!("no port could be opened on {interface}"), error))?;
    listener.set_nonblocking(true).map_err(|error| Error::io("the listener failed", error))?;
    Ok(listener)
}

/// Rank 0 draws the number that distinguishes this group's connections from all others.
fn agree_on_job(config: &MeshConfig<'_>, host: &str, deadline: Deadline) -> Result<JobId> {
    const KEY: &str = "mesh/job";
    if config.rank.is_main() {
        let job: JobId = random::bytes()?;
        config.store.set(KEY, &job, deadline)?;
        return Ok(job);
    }
    start_failure::wait_for(config, host, &[(Rank::MAIN, KEY.into())], deadline)?;
    let drawn = config.store.get(KEY, deadline)?;
    drawn.try_into().map_err(|_| Error::protocol("the store holds a malformed job number"))
}

fn exchange_addresses(
    config: &MeshConfig<'_>,
    host: &str,
    listener: &TcpListener,
    deadline: Deadline,
) -> Result<Vec<Address>> {
    let socket = listener.local_addr().map_err(|error| Error::io("the listener has no address", error))?;
    let malformed =
        |error| Error::protocol("the store holds a malformed address of a rank").with_source(error);
    let own = postcard::to_stdvec(&Address { socket, host: host.to_owned() }).map_err(malformed)?;
    config.store.set(&key(config.rank), &own, deadline)?;
    let keys: Vec<(Rank, String)> = config.world.ranks().map(|rank| (rank, key(rank))).collect();
    start_failure::wait_for(config, host, &keys, deadline)?;
    let keys: Vec<&str> = keys.iter().map(|(_, key)| key.as_str()).collect();
    let values = config.store.multi_get(&keys, deadline)?;
    let addresses = values.iter().map(|bytes| postcard::from_bytes::<Address>(bytes).map_err(malformed));
    addresses
        .map(|address| {
            let mut address = address?;
            address.host.truncate(address.host.floor_char_boundary(MAX_HOST));
            Ok(address)
        })
        .collect()
}

pub(super) fn key(rank: Rank) -> String {
    format!("mesh/address/{rank}")
}

pub(super) fn no_descriptors(what: &str, error: io::Error) -> Error {
    Error::io(what, error)
        .with_remedy("each group needs three open files for every other rank: raise the limit (`ulimit -n`)")
}

/// For [`fuzzing`](crate::fuzzing): decodes where a rank listens.
#[cfg(any(test, fuzzing))]
pub(in crate::transport) fn fuzz(bytes: &[u8]) -> bool {
    let Ok(address) = postcard::from_bytes::<Address>(bytes) else { return false };
    let again =
        postcard::to_stdvec(&address).is_ok_and(|bytes| postcard::from_bytes::<Address>(&bytes).is_ok());
    assert!(again && address.host.len() <= bytes.len());
    true
}
