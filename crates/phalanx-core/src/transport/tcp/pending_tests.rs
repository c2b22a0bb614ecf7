//! The limits of an unauthenticated connection, and which one is dropped for another.
#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use super::accept::make_room;
use super::connection::Connection;
use super::pending::{AT_ONCE, HandshakeLimit, Pending, Progress};
use super::tls_tests::client_hello;
use super::*;
use crate::tls::Tls;
use crate::tls::tests::good;
use crate::wire::auth::{NONCE, least_handshake_time};
use crate::wire::handshake::GroupSecret;
use crate::wire::hello::{Channel, Hello};

/// A client at the port of rank 0 of two.
struct Knock {
    client: TcpStream,
    pending: Pending,
}

fn secret() -> GroupSecret {
    GroupSecret::new(None, &[1; 16])
}

fn hello(rank: u32) -> Hello {
    let channel = Channel::Data;
    let (rank, to) = (Rank::new(rank), Rank::MAIN);
    Hello {
        group: secret().name(),
        generation: Generation(0),
        rank,
        to,
        world: 2,
        channel,
        nonce: [0; NONCE],
    }
}

impl Knock {
    fn new(tls: Option<&Tls>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (stream, _) = listener.accept().unwrap();
        stream.set_nonblocking(true).unwrap();
        let mut pending = Pending::new(Connection::new(stream), tls, &secret());
        pending.give_time();
        Self { client, pending }
    }

    fn say(&mut self, bytes: &[u8]) {
        self.client.write_all(bytes).unwrap();
        let mut fds = [PollFd::new(self.pending.stream.socket(), PollFlags::IN)];
        assert_eq!(poll(&mut fds, Some(Duration::from_secs(10))).unwrap(), 1);
    }

    fn advance(&mut self, limit: &mut HandshakeLimit) -> Progress {
        self.pending.advance(hello(0), 1, limit)
    }

    /// A client that has sent its whole ClientHello.
    fn with_client_hello(tls: &Tls, limit: &mut HandshakeLimit) -> Self {
        let mut knock = Self::new(Some(tls));
        knock.say(&client_hello());
        assert!(matches!(knock.advance(limit), Progress::Waiting));
        knock.pending.give_time();
        knock
    }
}

fn none() -> HandshakeLimit {
    HandshakeLimit { free: 0, waiting: 0 }
}

#[test]
fn who_speaks_another_version_is_turned_away_with_both_versions() {
    let mut knock = Knock::new(None);
    let mut old = hello(1).encode();
    old[4] = 2;
    // These bytes are the same in every version.
    knock.say(&old[..6]);
    let Progress::TurnedAway(error, _) = knock.advance(&mut none()) else { panic!("it was taken") };
    assert!(error.to_string().contains("a peer speaks version 2, this one 4"), "{error}");
}

#[test]
fn no_state_of_tls_is_made_before_the_first_record_is_there_and_a_turn() {
    let mut knock = Knock::new(Some(&good()));
    let mut limit = HandshakeLimit { free: 1, waiting: 0 };
    let record = client_hello();
    let (last, most) = record.split_last().unwrap();
    for byte in most {
        knock.say(&[*byte]);
        assert!(matches!(knock.advance(&mut limit), Progress::Waiting));
        assert!(!knock.pending.stream.is_encrypted() && !knock.pending.waits_for_tls());
    }
    knock.say(&[*last]);
    let mut full = none();
    assert!(matches!(knock.advance(&mut full), Progress::Waiting));
    assert!(!knock.pending.stream.is_encrypted() && knock.pending.waits_for_tls());
    assert_eq!((full.free, full.waiting), (0, 1));
    // It is neither read nor timed as long as no other is done.
    assert!(knock.pending.next_check(&full).is_none());
    limit.waiting = 1;
    assert!(knock.pending.next_check(&limit).unwrap().has_passed());
    assert!(matches!(knock.advance(&mut limit), Progress::Waiting));
    assert!(knock.pending.stream.is_encrypted() && !knock.pending.waits_for_tls());
    assert_eq!((limit.free, limit.waiting), (0, 0));
}

#[test]
fn what_is_not_a_first_record_is_dropped_and_no_memory_is_made_for_it() {
    for head in [[22, 3, 1, 0x40, 0, 1, 0, 0x3f, 0xfc], [22, 3, 1, 0, 100, 2, 0, 0, 96], [22; 9]] {
        let mut knock = Knock::new(Some(&good()));
        knock.say(&head);
        assert!(matches!(knock.advance(&mut none()), Progress::Dropped));
        assert!(!knock.pending.stream.is_encrypted());
    }
}

#[test]
fn a_handshake_that_has_had_its_time_gives_way_to_one_that_waits() {
    let tls = good();
    let mut slow = Knock::with_client_hello(&tls, &mut HandshakeLimit { free: 1, waiting: 0 });
    let mut next = Knock::with_client_hello(&tls, &mut none());
    let mut limit = HandshakeLimit { free: 0, waiting: 1 };
    assert!(matches!(slow.advance(&mut limit), Progress::Waiting));
    // However long the round trip is that the kernel has measured.
    let longest = least_handshake_time(Duration::MAX);
    assert!(slow.pending.next_check(&limit).unwrap().remaining() <= longest);
    assert!(slow.pending.next_check(&none()).unwrap().remaining() > longest);
    thread::sleep(longest);
    assert!(matches!(slow.advance(&mut none()), Progress::Waiting));
    assert!(matches!(slow.advance(&mut limit), Progress::Dropped));
    // One is dropped for the waiting one.
    assert_eq!((limit.free, limit.waiting), (1, 1));
    assert!(matches!(slow.advance(&mut limit), Progress::Waiting));
    assert!(matches!(next.advance(&mut limit), Progress::Waiting));
    assert!(next.pending.stream.is_encrypted());
    let limit = HandshakeLimit::among(&[next.pending, Knock::with_client_hello(&tls, &mut none()).pending]);
    assert_eq!((limit.free, limit.waiting), (AT_ONCE - 1, 1));
}

#[test]
fn of_those_who_have_got_least_far_the_oldest_gives_way() {
    let tls = good();
    let mut limit = HandshakeLimit { free: 1, waiting: 0 };
    let mut proving = Knock::new(None);
    proving.say(&hello(1).encode());
    assert!(matches!(proving.advance(&mut none()), Progress::Waiting));
    let plain = Knock::new(None);
    let speaking = Knock::with_client_hello(&tls, &mut limit);
    let [waits, waits_too] = [(), ()].map(|()| Knock::with_client_hello(&tls, &mut none()));
    let [silent, silent_too] = [(), ()].map(|()| Knock::new(Some(&tls)));
    // By age, and the order in which each is dropped.
    let knocks =
        [(proving, 6), (waits, 2), (silent, 0), (plain, 5), (speaking, 4), (silent_too, 1), (waits_too, 3)];
    let mut going = [None; 7];
    let (mut clients, mut pending) = (Vec::new(), Vec::new());
    for (knock, place) in knocks {
        going[place] = Some(knock.client.local_addr().unwrap());
        clients.push(knock.client);
        pending.push(knock.pending);
    }
    let here = |pending: &[Pending]| -> Vec<_> {
        pending.iter().map(|pending| Some(pending.stream.socket().peer_addr().unwrap())).collect()
    };
    make_room(&mut pending, 8);
    assert_eq!(pending.len(), 7);
    for next in going {
        assert!(here(&pending).contains(&next));
        let most = pending.len();
        make_room(&mut pending, most);
        assert!(pending.len() == most - 1 && !here(&pending).contains(&next));
    }
}
