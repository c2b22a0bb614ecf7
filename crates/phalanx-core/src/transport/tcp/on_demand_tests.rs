//! Two ranks that connect at first use: at once, with one that has ended, that never answers, or that is of another job.
#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::io::{IoSlice, IoSliceMut};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::OnceLock;
use std::thread::JoinHandle;

use super::super::connect::listen;
use super::super::connection::Connection;
use super::*;
use crate::credentials::Credentials;
use crate::rank::Generation;
use crate::transport::messages::{LineEnd, Messages, Rings};
use crate::wire::auth::NONCE;
use crate::wire::hello::JobId;

const LIMIT: Duration = Duration::from_secs(60);
const RANKS: [Rank; 2] = [Rank::new(0), Rank::new(1)];

#[test]
fn two_ranks_keep_the_same_of_two_calls() {
    let [low, high] = RANKS;
    assert_eq!(verdict(low, high, Known::Calls), Verdict::KeepInstead);
    assert_eq!(verdict(high, low, Known::Calls), Verdict::Refuse);
    for (own, peer) in [(low, high), (high, low)] {
        assert_eq!(verdict(own, peer, Known::Nothing), Verdict::Keep);
        // There may be data in the first one.
        assert_eq!(verdict(own, peer, Known::Connected), Verdict::Refuse);
    }
}

/// All orders in which two ranks can begin to call and take each other's calls lead to one connection, which both have.
#[test]
fn whatever_comes_first_a_pair_has_one_connection() {
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Event {
        /// Rank 0 or 1 begins to call.
        Begins(usize),
        /// The call of rank 0 or 1 arrives at the other.
        Arrives(usize),
    }
    use Event::{Arrives, Begins};
    let mut possible = 0;
    for order in orders([Begins(0), Begins(1), Arrives(0), Arrives(1)]) {
        let at = |event| order.iter().position(|other| *other == event).unwrap();
        if (0..2).any(|rank| at(Arrives(rank)) < at(Begins(rank))) {
            continue;
        }
        possible += 1;
        // Whose call each of the two has kept, and which of them calls.
        let (mut kept, mut calls) = ([None; 2], [false; 2]);
        for event in order {
            match event {
                // It has a connection already, so it does not call.
                Begins(rank) => calls[rank] = kept[rank].is_none(),
                Arrives(caller) if calls[caller] => {
                    let other = 1 - caller;
                    let known = match kept[other] {
                        Some(_) => Known::Connected,
                        None if calls[other] => Known::Calls,
                        None => Known::Nothing,
                    };
                    if verdict(RANKS[other], RANKS[caller], known) != Verdict::Refuse {
                        (kept, calls) = ([Some(caller); 2], [false; 2]);
                    }
                }
                Arrives(_) => {}
            }
        }
        assert!(kept[0].is_some() && kept[0] == kept[1], "{order:?}: {kept:?}");
    }
    assert_eq!(possible, 6);
}

/// All orders of four.
fn orders<T: Copy>(all: [T; 4]) -> Vec<[T; 4]> {
    let mut orders = Vec::new();
    for number in 0..256 {
        let places = [number % 4, number / 4 % 4, number / 16 % 4, number / 64];
        if (0..4).all(|place| places.contains(&place)) {
            orders.push(places.map(|place| all[place]));
        }
    }
    orders
}

/// One rank, whose thread answers and calls.
struct End {
    connections: Arc<Connections>,
    health: Arc<Health>,
    thread: Option<JoinHandle<()>>,
}

impl End {
    fn ask(&self, channel: Channel) {
        self.connections.ask(channel, self.peer());
    }

    fn peer(&self) -> Rank {
        RANKS.into_iter().find(|peer| self.connections.is_peer(*peer)).unwrap()
    }

    fn await_one(&self, channel: Channel) -> &Connection {
        let deadline = Deadline::after(LIMIT);
        loop {
            if let Some(connection) = self.connections.get(channel, self.peer()) {
                return connection;
            }
            assert!(!deadline.has_passed() && !self.health.has_failed(), "{:?}", self.health.cause());
            self.connections.await_connection(channel, self.peer(), deadline.remaining());
        }
    }
}

impl Drop for End {
    fn drop(&mut self) {
        self.connections.requests.as_ref().unwrap().stop();
        let ended = self.thread.take().unwrap().join();
        assert!(ended.is_ok() || std::thread::panicking());
    }
}

fn pair() -> [End; 2] {
    pair_of([[7; 16]; 2], Credentials::none())
}

/// Two ranks of these jobs.
fn pair_of(jobs: [JobId; 2], credentials: &Credentials) -> [End; 2] {
    let listeners = RANKS.map(|_| listen(Ipv4Addr::LOCALHOST.into()).unwrap());
    let sockets = listeners.each_ref().map(|listener| listener.local_addr().unwrap());
    let control = control();
    let mut parts = listeners.into_iter().zip(control).zip(jobs).zip(RANKS);
    [(); 2].map(|()| {
        let (((listener, control), job), own) = parts.next().unwrap();
        end(own, job, listener, sockets, control, credentials)
    })
}

/// Both ends of a control connection.
fn control() -> [Connection; 2] {
    let meeting = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(meeting.local_addr().unwrap()).unwrap();
    [near, meeting.accept().unwrap().0].map(Connection::new)
}

/// The rank `own` of two that listen at `sockets`.
fn end(
    own: Rank,
    job: JobId,
    listener: TcpListener,
    sockets: [SocketAddr; 2],
    control: Connection,
    credentials: &Credentials,
) -> End {
    let secret = GroupSecret::new(None, &job);
    let hello = Hello {
        group: secret.name(),
        generation: Generation(0),
        rank: own,
        to: own,
        world: 2,
        channel: Channel::Data,
        nonce: [0; NONCE],
    };
    let addresses = sockets.map(|socket| Address { socket, host: "here".into() });
    let (caller, requests) =
        Caller::new(listener, addresses.into(), (hello, secret), credentials.tls.clone(), Vec::new())
            .unwrap();
    let mut all = vec![None, None];
    all[1 - own.index()] = Some(control);
    let slots = || vec![OnceLock::new(), OnceLock::new()];
    let connections =
        Arc::new(Connections { control: all, data: slots(), messages: slots(), requests: Some(requests) });
    let health = Health::new(own, vec!["here".into(), "here".into()]);
    let (shared, heard, on_failure) = (connections.clone(), health.clone(), connections.clone());
    health.on_failure(Box::new(move |_| on_failure.shut()));
    let thread = std::thread::spawn(move || {
        caller.run(&shared, shared.requests.as_ref().unwrap(), &heard);
    });
    End { connections, health, thread: Some(thread) }
}

fn are_the_same(one: &Connection, other: &Connection) {
    let (one, other) = (one.socket(), other.socket());
    assert_eq!(one.local_addr().unwrap(), other.peer_addr().unwrap());
    assert_eq!(one.peer_addr().unwrap(), other.local_addr().unwrap());
}

#[test]
fn only_one_has_to_ask() {
    let [low, high] = pair();
    low.ask(Channel::Data);
    are_the_same(low.await_one(Channel::Data), high.await_one(Channel::Data));
    high.ask(Channel::Messages);
    are_the_same(low.await_one(Channel::Messages), high.await_one(Channel::Messages));
    // Asking again changes nothing.
    let before = low.await_one(Channel::Data).socket().local_addr().unwrap();
    [&low, &high].into_iter().for_each(|end| end.ask(Channel::Data));
    assert_eq!(low.await_one(Channel::Data).socket().local_addr().unwrap(), before);
}

#[test]
fn two_that_ask_at_once_get_one_connection() {
    for _ in 0..50 {
        let ends = pair();
        std::thread::scope(|scope| {
            for end in &ends {
                scope.spawn(|| Channel::ALL.into_iter().for_each(|channel| end.ask(channel)));
            }
        });
        for channel in [Channel::Data, Channel::Messages] {
            let [low, high] = &ends;
            are_the_same(low.await_one(channel), high.await_one(channel));
        }
    }
}

#[cfg(feature = "tls")]
#[test]
fn they_are_encrypted_as_those_of_the_start() {
    let credentials = Credentials { tls: Some(crate::tls::tests::good()), ..Credentials::default() };
    let ends = pair_of([[7; 16]; 2], &credentials);
    ends.iter().for_each(|end| end.ask(Channel::Data));
    let [low, high] = ends.each_ref().map(|end| end.await_one(Channel::Data));
    are_the_same(low, high);
    assert!(low.is_encrypted() && high.is_encrypted());
}

#[test]
fn what_a_peer_sent_before_it_left_comes() {
    let [low, high] = pair();
    high.ask(Channel::Data);
    let sent = high.await_one(Channel::Data);
    sent.send(&[IoSlice::new(b"last words")]).unwrap();
    // From here on its goodbye may be read, before the thread that has taken its call goes on.
    low.health.left(RANKS[1]);
    assert!(low.connections.may_come(Channel::Data, RANKS[1]));
    let received = low.connections.get(Channel::Data, RANKS[1]).unwrap();
    drop(high);
    let mut words = [0; 10];
    received.socket().set_nonblocking(false).unwrap();
    received.receive(&mut [IoSliceMut::new(&mut words)]).unwrap();
    assert_eq!(&words, b"last words");
}

#[test]
fn a_peer_that_has_left_is_not_waited_for() {
    let [low, high] = pair();
    drop(high);
    low.health.left(RANKS[1]);
    low.ask(Channel::Messages);
    let deadline = Deadline::after(LIMIT);
    while low.connections.may_come(Channel::Messages, RANKS[1]) {
        assert!(!deadline.has_passed());
        std::thread::sleep(Duration::from_millis(1));
    }
    // Asking again changes nothing, and it is no failure: an operation that needs the peer says so.
    low.ask(Channel::Messages);
    assert!(!low.connections.may_come(Channel::Messages, RANKS[1]) && !low.health.has_failed());
}

/// Rank 0. The kernel of rank 1 accepts its calls, but nobody answers while these are kept.
fn beside_one_that_never_answers() -> (End, (TcpListener, Connection)) {
    let listeners = RANKS.map(|_| listen(Ipv4Addr::LOCALHOST.into()).unwrap());
    let sockets = listeners.each_ref().map(|listener| listener.local_addr().unwrap());
    let ([listener, silent], [control, held]) = (listeners, control());
    (end(RANKS[0], [7; 16], listener, sockets, control, Credentials::none()), (silent, held))
}

#[test]
fn a_group_that_has_failed_waits_for_no_connection() {
    let (low, _silent) = beside_one_that_never_answers();
    let mut lines =
        Messages::over(RANKS[0], &low.connections, Rings::none(2), &low.health, false, Box::new(()));
    let (outbound, inbound) = (lines.outbound[1].as_mut().unwrap(), lines.inbound[1].as_mut().unwrap());
    low.ask(Channel::Messages);
    low.health.left(RANKS[1]);
    // What the peer has sent before it left may still come, and a thread that waits for it sleeps meanwhile,
    assert!(outbound.may_come() && inbound.may_come());
    assert!(!outbound.is_ready() && !inbound.is_ready());
    low.health.fail(Error::aborted("a test"));
    // but the thread that would make the connection has ended, or is about to.
    assert!(!outbound.may_come() && !inbound.may_come());
    assert!(!outbound.is_ready() && !inbound.is_ready());
}

#[test]
fn a_peer_that_never_answers_holds_up_no_end() {
    let (low, _silent) = beside_one_that_never_answers();
    low.ask(Channel::Data);
    low.connections.await_connection(Channel::Data, RANKS[1], Duration::from_millis(50));
    assert!(low.connections.get(Channel::Data, RANKS[1]).is_none() && !low.health.has_failed());
}

#[test]
fn a_rank_of_another_job_is_named() {
    let [low, high] = pair_of([[7; 16], [8; 16]], Credentials::none());
    low.ask(Channel::Data);
    let deadline = Deadline::after(LIMIT);
    while !low.health.has_failed() {
        assert!(!deadline.has_passed());
        low.connections.await_connection(Channel::Data, RANKS[1], Duration::from_millis(10));
    }
    let error = low.health.cause().unwrap();
    assert_eq!(error.peer(), Some(RANKS[1]));
    assert!(error.to_string().contains("rank 1 (here) could not be reached at"), "{error}");
    assert!(error.to_string().contains("not of its job"), "{error}");
    assert!(!high.health.has_failed());
}
