//! The server side: one thread and one runtime, with one task for each client.
//!
//! It has a runtime because it may have a thousand clients. tokio is used for nothing else.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::pending;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr};
use std::rc::Rc;
use std::thread::JoinHandle;
use std::time::Duration;

use phalanx_sys::tcp;
use rustix::process::{Resource, getrlimit};
use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet, LocalSet};
use tokio::time::{Instant, sleep, sleep_until};

use super::access::{Access, Admission, KeylessClients};
use super::client_connection::{ACKNOWLEDGEMENT_TIMEOUT, keep_alive};
use super::resolve::{NO_ADDRESS_REMEDY, resolve_patiently};
use super::server_connection::{Shared, serve};
use super::server_stream::Stream;
use crate::credentials::Credentials;
use crate::deadline::Deadline;
use crate::error::{Error, LOOPBACK_IS_DOWN, Result, no_more_files};
use crate::host::is_localhost;
use crate::interfaces::is_every_hosts;
use crate::interrupt;
use crate::key::JobKey;
use crate::notice::Aside;

/// How often a server that drains asks whether it goes on.
const DRAIN_INTERVAL: Duration = Duration::from_millis(5);
/// The most connections at a time. For a new one the oldest that is not authenticated yet is closed; if all are, the new one is.
const MAX_CONNECTIONS: usize = 65_536;
/// The most ranks of a job that a server is for. Some connections are left for launchers and tools.
pub const MAX_RANKS: u32 = 8_000;
/// Over a network a rank makes two connections at once, on which two threads wait. Each may ask on another one whether the start has failed; and a
/// worker of an elastic job reads the log, and sends heartbeats.
const _: () = assert!(8 * MAX_RANKS as usize <= MAX_CONNECTIONS);
/// The most connections that are not authenticated yet; for a new one the oldest is closed. All of a job's ranks may
/// come at once and must fit: to be authenticated takes a round trip, in which no other rank may be in their place.
const MAX_PENDING: usize = 2 * MAX_RANKS as usize;
/// One in so many descriptors may be a connection that is not authenticated yet.
const PENDING_SHARE: u64 = 4;
/// The pause in accepting when the process has run out of descriptors.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(20);

/// Serves a store to [`TcpStore`](super::TcpStore)s and to PyTorch's clients.
///
/// It runs on its own thread. Dropping it closes every connection at once; [`drain`](Self::drain) first lets the
/// clients finish.
///
/// ```
/// use std::time::Duration;
/// use phalanx::Deadline;
/// use phalanx::store::{Store, TcpStore, TcpStoreServer};
///
/// let server = TcpStoreServer::bind(([127, 0, 0, 1], 0).into())?;
/// let deadline = Deadline::after(Duration::from_secs(5));
/// let store = TcpStore::connect(server.local_addr(), deadline)?;
/// store.set("greeting", b"hello", deadline)?;
/// assert_eq!(store.get("greeting", deadline)?, b"hello");
/// # Ok::<(), phalanx::Error>(())
/// ```
#[derive(Debug)]
pub struct TcpStoreServer {
    address: SocketAddr,
    orders: mpsc::UnboundedSender<Order>,
    thread: Option<JoinHandle<()>>,
    process: u32,
}

/// An order of the owner to the thread.
#[derive(Clone, Copy, Debug)]
enum Order {
    /// Serve until no client is left, or until this time.
    Drain(std::time::Instant),
    Stop,
}

impl TcpStoreServer {
    /// Binds to `address`, port 0 for any, and starts to serve.
    ///
    /// # Errors
    /// If the port is taken, if `address` is not of this host, or if it means all of the host's addresses: every
    /// process that reaches this store may use it, so it must not be open to every network.
    pub fn bind(address: SocketAddr) -> Result<Self> {
        Self::bind_for(address, Access::default())
    }

    /// [`bind`](Self::bind) for a job with this key. Clients must know it, except programs of this user on this host:
    /// they could read the key, and PyTorch's clients cannot use it.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn bind_with_key(address: SocketAddr, key: JobKey) -> Result<Self> {
        Self::bind_with(address, key.into())
    }

    /// [`bind`](Self::bind) for a job with these credentials. Clients must have them, except programs of this user on
    /// this host: they could read the files, and PyTorch's clients can use neither key nor TLS.
    ///
    /// # Errors
    /// As [`bind`](Self::bind), and if a certificate cannot be used.
    pub fn bind_with(address: SocketAddr, credentials: Credentials) -> Result<Self> {
        Self::bind_for(address, Access::to(credentials, KeylessClients::OfThisUser))
    }

    #[doc(hidden)]
    pub fn bind_for(address: SocketAddr, access: Access) -> Result<Self> {
        if address.ip().is_unspecified() {
            return Err(Error::environment(format!("{address} would open the store to every network"))
                .with_remedy(
                    "let MASTER_ADDR be the one address at which the other ranks reach this host, or name the address \
                     with PHALANX_BIND",
                ));
        }
        Self::bind_anywhere(address, access)
    }

    /// [`bind_for`](Self::bind_for), but allows all of the host's addresses at once, for users who have asked for it.
    #[doc(hidden)]
    pub fn bind_anywhere(address: SocketAddr, access: Access) -> Result<Self> {
        let socket = listen(address).map_err(|error| bind_error(address, error))?;
        let address = socket.local_addr().map_err(|error| bind_error(address, error))?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()
            .map_err(|error| Error::io("cannot start the store's runtime", error))?;
        let listener = {
            let _entered = runtime.enter();
            TcpListener::from_std(socket).map_err(|error| bind_error(address, error))?
        };
        let (orders, inbox) = mpsc::unbounded_channel();
        let thread = std::thread::Builder::new()
            .name("phalanx-store".into())
            .spawn(move || {
                LocalSet::new().block_on(&runtime, run(listener, access, inbox));
            })
            .map_err(|error| Error::not_started("cannot start the store's thread", error))?;
        Ok(Self { address, orders, thread: Some(thread), process: std::process::id() })
    }

    /// Binds to the first address of this host among the [`addresses_to_serve`].
    #[doc(hidden)]
    pub fn bind_to(address: &str, access: Access, deadline: Deadline) -> Result<Self> {
        let mut failure = None;
        for target in addresses_to_serve(address, deadline)? {
            match Self::bind_for(target, access.clone()) {
                Err(error) if error.io_kind() == Some(ErrorKind::AddrNotAvailable) => failure = Some(error),
                result => return result,
            }
        }
        Err(failure.unwrap_or_else(|| Error::environment(format!("{address} has no address"))))
    }

    /// The address it listens on, with the actual port.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// The address at which this host reaches it.
    #[doc(hidden)]
    pub fn reachable_addr(&self) -> SocketAddr {
        let mut address = self.address;
        match address.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
            IpAddr::V6(ip) if ip.is_unspecified() => address.set_ip(Ipv6Addr::LOCALHOST.into()),
            _ => {}
        }
        address
    }

    /// Continues to serve until every admitted client has closed its connections, or until `deadline`; then stops.
    pub fn drain(mut self, deadline: Deadline) {
        self.finish(Order::Drain(deadline.instant()));
    }

    /// As [`drain`](Self::drain), as long as `goes_on` says so, which is asked every few milliseconds.
    pub fn drain_while(self, deadline: Deadline, mut goes_on: impl FnMut() -> bool) {
        // As below. What follows this is that `self` is dropped.
        let _ = self.orders.send(Order::Drain(deadline.instant()));
        while self.thread.as_ref().is_some_and(|thread| !thread.is_finished()) && goes_on() {
            std::thread::sleep(DRAIN_INTERVAL);
        }
    }

    /// Whether this process serves, and is not one that was forked from that.
    pub(crate) fn is_own(&self) -> bool {
        self.process == std::process::id()
    }

    fn finish(&mut self, order: Order) {
        if !self.is_own() {
            // The parent goes on to serve.
            std::mem::forget(self.thread.take());
            return;
        }
        // A thread that has ended has stopped serving, which is the goal.
        let _ = self.orders.send(order);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for TcpStoreServer {
    fn drop(&mut self) {
        self.finish(Order::Stop);
    }
}

/// The addresses of `address`, `host:port`, at which a store is to be served there. Those that other hosts may reach come before the
/// loopback. A name that has no address yet is waited for, as clients do.
pub fn addresses_to_serve(address: &str, deadline: Deadline) -> Result<Vec<SocketAddr>> {
    let mut targets = resolve_patiently(address, deadline).map_err(|error| {
        interrupt::cause(&error).unwrap_or_else(|| {
            Error::io(format!("cannot find the address of {address}, where the store is to be served"), error)
                .with_remedy(NO_ADDRESS_REMEDY)
        })
    })?;
    targets.sort_by_key(|target| is_every_hosts(target.ip()));
    Ok(targets)
}

/// Warns if `host` is a name that leads elsewhere for others than here, where it is `bound`, the loopback: Debian maps a host's own name
/// to 127.0.1.1.
pub fn warn_of_own_name(host: &str, bound: IpAddr) {
    let host = host.trim_matches(['[', ']']);
    if is_every_hosts(bound) && !is_localhost(host) && host.parse::<IpAddr>().is_err() {
        // Whoever serves the store has not joined yet, and the others wait for it: standard error may have no reader.
        Aside::default().warn(format!(
            "{host} is {bound} on this host, where its store listens: other hosts cannot reach it there. If there are others, give the \
             address at which they reach this host, as MASTER_ADDR (--master-addr, --rdzv-endpoint) or as PHALANX_BIND (--bind)"
        ));
    }
}

/// A socket that listens at `address`. Its queue is long: a flood of connections must not delay others.
pub fn listen(address: SocketAddr) -> std::io::Result<std::net::TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    // The port can be reused at once after a former job, whatever its connections' state.
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

fn bind_error(address: SocketAddr, error: std::io::Error) -> Error {
    let remedy = match error.kind() {
        ErrorKind::AddrInUse => format!(
            "another program, perhaps an earlier job, listens on port {}: end it, or set MASTER_PORT (`phalanx run \
             --master-port`) to a free port for every rank",
            address.port()
        ),
        // While it is up, each of its addresses of IPv4 can be listened at.
        ErrorKind::AddrNotAvailable if address.is_ipv4() && address.ip().is_loopback() => {
            LOOPBACK_IS_DOWN.to_owned()
        }
        ErrorKind::AddrNotAvailable => {
            format!("{} is no address of this host: is MASTER_ADDR that of the host of rank 0?", address.ip())
        }
        // Ranks and launchers tell it to each other without its interface.
        ErrorKind::InvalidInput if matches!(address, SocketAddr::V6(v6) if v6.ip().is_unicast_link_local()) =>
        {
            format!(
                "{} is an address of one link, at which ranks cannot meet: give another address of this host",
                address.ip()
            )
        }
        ErrorKind::PermissionDenied => {
            format!("port {} needs privileges: set MASTER_PORT to 1024 or more", address.port())
        }
        _ => no_more_files(&error).unwrap_or("are MASTER_ADDR and MASTER_PORT right?").into(),
    };
    Error::io(format!("cannot serve the store on {address}"), error).with_remedy(remedy)
}

/// The most connections that wait to be accepted, if the kernel allows as many (net.core.somaxconn).
const BACKLOG: i32 = 16_384;

/// The clients that are not authenticated yet. Unlimited foreign connections must not use up the process's descriptors.
struct PendingClients {
    /// By number, the oldest first.
    clients: Rc<RefCell<BTreeMap<u64, AbortHandle>>>,
    most: usize,
    /// Whether one was closed for another.
    has_closed: Cell<bool>,
}

impl PendingClients {
    fn new() -> Self {
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let most = usize::try_from(descriptors / PENDING_SHARE).unwrap_or(usize::MAX);
        Self { clients: Rc::default(), most: most.clamp(1, MAX_PENDING), has_closed: Cell::new(false) }
    }

    /// Whether there is room for another client beside so many. If they are too many, the oldest pending one is closed.
    fn make_room(&self, clients: usize) -> bool {
        if clients < MAX_CONNECTIONS && self.clients.borrow().len() < self.most {
            return true;
        }
        let oldest = self.clients.borrow_mut().pop_first();
        oldest.is_some_and(|(_, task)| {
            task.abort();
            self.has_closed.set(true);
            true
        })
    }

    /// What a person should know when one was closed for another.
    fn crowded(&self) -> String {
        let most = self.most;
        // A limit of descriptors that is higher lets no more of them in.
        let remedy = match most < MAX_PENDING {
            true => {
                ". If they are ranks, raise the limit of descriptors of the process that serves the store (`ulimit -n`)"
            }
            false => "",
        };
        format!(
            "the store closes connections that have not shown yet that they are of this job: more than {most} of them have come at a time, or \
             {MAX_CONNECTIONS} connections in all{remedy}"
        )
    }

    /// What the task of the client with this number keeps until it is admitted.
    fn outside(&self, number: u64) -> Outside {
        Outside { clients: Rc::clone(&self.clients), number }
    }

    fn push(&self, number: u64, task: AbortHandle) {
        self.clients.borrow_mut().insert(number, task);
    }
}

/// A client that is not admitted yet, which is pending until this is dropped.
struct Outside {
    clients: Rc<RefCell<BTreeMap<u64, AbortHandle>>>,
    number: u64,
}

impl Drop for Outside {
    fn drop(&mut self) {
        self.clients.borrow_mut().remove(&self.number);
    }
}

/// An admitted client, which counts until this is dropped: a task that panics, or is aborted, must not keep a drain waiting.
struct Inside(Rc<Cell<usize>>);

impl Inside {
    fn enter(clients: &Rc<Cell<usize>>) -> Self {
        clients.update(|clients| clients + 1);
        Self(Rc::clone(clients))
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        self.0.update(|clients| clients.saturating_sub(1));
    }
}

/// A listener whose port is free when this is dropped. To close it is not enough: a process that was forked from this one has it open, too, and
/// the kernel would go on to accept clients there, which nobody serves.
struct Listening(TcpListener);

impl Drop for Listening {
    fn drop(&mut self) {
        // Without it the port stays taken until that process ends.
        let _ = SockRef::from(&self.0).shutdown(Shutdown::Both);
    }
}

async fn run(listener: TcpListener, access: Access, mut orders: mpsc::UnboundedReceiver<Order>) {
    let listener = Listening(listener);
    let shared = Rc::new(RefCell::new(Shared::default()));
    let admission = Rc::new(Admission::new(access));
    let mut clients = JoinSet::new();
    let (pending_clients, mut number) = (PendingClients::new(), 0_u64);
    // Stopping does not wait for unauthenticated clients.
    let inside = Rc::<Cell<usize>>::default();
    // All clients wait for this thread.
    let aside = Aside::default();
    let mut draining: Option<Instant> = None;
    let (mut told, mut told_full, mut told_crowded) = (false, false, false);
    while draining.is_none() || inside.get() > 0 {
        tokio::select! {
            order = orders.recv() => match order {
                Some(Order::Drain(until)) => draining = Some(until.into()),
                Some(Order::Stop) | None => return,
            },
            () = at(draining) => return,
            Some(_) = clients.join_next() => {}
            accepted = listener.0.accept() => match accepted {
                Ok((stream, peer)) => {
                    // Those that have ended count no more.
                    while clients.try_join_next().is_some() {}
                    if !pending_clients.make_room(clients.len()) {
                        if !std::mem::replace(&mut told_full, true) {
                            aside.warn(format!(
                                "the store refuses {peer}, and others from here on: it has {MAX_CONNECTIONS} connections, the most that it takes"
                            ));
                        }
                        continue;
                    }
                    if pending_clients.has_closed.get() && !std::mem::replace(&mut told_crowded, true) {
                        aside.warn(pending_clients.crowded());
                    }
                    number += 1;
                    let (admission, shared) = (Rc::clone(&admission), Rc::clone(&shared));
                    let (outside, inside) = (pending_clients.outside(number), Rc::clone(&inside));
                    let task = clients.spawn_local(async move {
                        tune(&stream);
                        let on_admitted = move || {
                            drop(outside);
                            Inside::enter(&inside)
                        };
                        if let Err(error) = serve(Stream::new(stream), admission, shared, on_admitted).await {
                            tracing::debug!("the store dropped {peer}: {error}");
                        }
                    });
                    pending_clients.push(number, task);
                    // Who is accepted is heard before the next ones are: in a flood it would be the oldest that nobody has heard yet, and
                    // be closed.
                    tokio::task::yield_now().await;
                }
                Err(error) => {
                    if !std::mem::replace(&mut told, true) {
                        let hint = no_more_files(&error).unwrap_or("it is tried again");
                        aside.warn(format!("the store cannot accept a client: {error} ({hint})"));
                    }
                    sleep(ACCEPT_RETRY_DELAY).await;
                }
            },
        }
    }
}

async fn at(moment: Option<Instant>) {
    match moment {
        Some(moment) => sleep_until(moment).await,
        None => pending().await,
    }
}

/// Small answers are sent at once; a vanished host is noticed. If a socket refuses an option, it still works.
fn tune(stream: &TcpStream) {
    let _ = stream.set_nodelay(true);
    keep_alive(stream);
    let _ = tcp::recover_soon(stream, ACKNOWLEDGEMENT_TIMEOUT);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::notice::tests::are_told_aside;
    use crate::store::TcpStore;

    #[test]
    fn a_server_goes_on_when_a_process_that_was_forked_from_its_own_drops_it() {
        let mut server = TcpStoreServer::bind(([127, 0, 0, 1], 0).into()).unwrap();
        let (address, orders) = (server.local_addr(), server.orders.clone());
        // Of no process.
        server.process = 0;
        drop(server);
        TcpStore::connect(address, Deadline::after(Duration::from_secs(20))).unwrap();
        let _ = orders.send(Order::Stop);
    }

    #[test]
    fn a_port_is_free_again_while_a_process_that_was_forked_from_its_server_s_lives() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
        let socket = listen(([127, 0, 0, 1], 0).into()).unwrap();
        let address = socket.local_addr().unwrap();
        // As that process has it.
        let _copy = socket.try_clone().unwrap();
        let _entered = runtime.enter();
        drop(Listening(TcpListener::from_std(socket).unwrap()));
        TcpStoreServer::bind(address).unwrap();
    }

    #[test]
    fn the_oldest_pending_client_gives_way_and_an_admitted_one_stays() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        LocalSet::new().block_on(&runtime, async {
            let mut clients = JoinSet::new();
            let queue = PendingClients { most: 2, ..PendingClients::new() };
            let mut come = |number: u64, is_admitted: bool| {
                assert!(queue.make_room(0));
                let outside = queue.outside(number);
                let task = clients.spawn_local(async move {
                    let _outside = (!is_admitted).then_some(outside);
                    pending::<()>().await;
                });
                queue.push(number, task.clone());
                task
            };
            let inside = come(1, true);
            tokio::task::yield_now().await;
            let (first, second, _third) = (come(2, false), come(3, false), come(4, false));
            tokio::task::yield_now().await;
            assert_eq!([&inside, &first, &second].map(AbortHandle::is_finished), [false, true, false]);
            // At the most connections of all, too; and if none is pending, the new one is refused.
            assert_eq!([(); 3].map(|()| queue.make_room(MAX_CONNECTIONS)), [true, true, false]);
            tokio::task::yield_now().await;
            assert_eq!([&inside, &second].map(AbortHandle::is_finished), [false, true]);
        });
    }

    #[test]
    fn a_higher_limit_of_descriptors_is_advised_where_it_lets_more_clients_in() {
        let said = [2, MAX_PENDING].map(|most| PendingClients { most, ..PendingClients::new() }.crowded());
        assert_eq!(said.map(|said| said.contains("ulimit -n")), [true, false]);
    }

    #[test]
    fn all_ranks_of_the_largest_world_may_come_before_the_first_is_admitted() {
        let queue = PendingClients { most: MAX_PENDING, ..PendingClients::new() };
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        LocalSet::new().block_on(&runtime, async {
            let mut clients = JoinSet::new();
            for number in 0..2 * u64::from(MAX_RANKS) {
                assert!(queue.make_room(clients.len()));
                queue.push(number, clients.spawn_local(pending::<()>()));
            }
            assert_eq!(queue.clients.borrow().len(), 2 * MAX_RANKS as usize, "one was closed for another");
        });
    }

    #[test]
    fn an_address_of_one_link_is_no_place_to_meet() {
        // EINVAL.
        let error = bind_error("[fe80::1]:0".parse().unwrap(), std::io::Error::from_raw_os_error(22));
        assert!(error.remedy().unwrap().contains("fe80::1 is an address of one link"), "{error}");
    }

    #[test]
    fn a_warning_of_a_host_s_own_name_does_not_hold_up_who_serves_the_store() {
        are_told_aside(|| warn_of_own_name("node0", Ipv4Addr::new(127, 0, 1, 1).into()));
    }

    #[test]
    fn a_client_whose_task_panics_counts_no_more() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let count = Rc::<Cell<usize>>::default();
        LocalSet::new().block_on(&runtime, async {
            let mut clients = JoinSet::new();
            for panics in [false, true] {
                let count = Rc::clone(&count);
                clients.spawn_local(async move {
                    let _inside = Inside::enter(&count);
                    tokio::task::yield_now().await;
                    assert!(!panics, "as a fault of the server would");
                });
            }
            let mut ended = Vec::new();
            while let Some(outcome) = clients.join_next().await {
                ended.push(outcome.is_ok());
            }
            ended.sort_unstable();
            assert_eq!((ended, count.get()), (vec![false, true], 0));
        });
    }
}
