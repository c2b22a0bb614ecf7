//! Which clients are accepted, which are refused, and what refused ones cost.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use super::{Access, KeylessClients, Refusals, TcpStore, TcpStoreServer};
use crate::credentials::Credentials;
use crate::deadline::Deadline;
use crate::key::JobKey;
use crate::store::Store;
use crate::wire::auth::{NONCE, TAG};
use crate::wire::greeting::{ANSWER, CALL, Initiator, StoreSecret};
use crate::wire::store::{Frame, MAGIC, Op};

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

fn key() -> JobKey {
    JobKey::generate().unwrap()
}

fn serve(key: &JobKey, keyless: KeylessClients) -> TcpStoreServer {
    TcpStoreServer::bind_for(([127, 0, 0, 1], 0).into(), Access::to(key.clone().into(), keyless)).unwrap()
}

fn connect(server: &TcpStoreServer) -> TcpStream {
    let stream = TcpStream::connect(server.local_addr()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    stream
}

/// From another of this host's addresses.
pub(super) fn bound_to(ip: [u8; 4], server: &TcpStoreServer) -> TcpStream {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::from((ip, 0)).into()).unwrap();
    socket.connect(&server.local_addr().into()).unwrap();
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    stream
}

fn is_dropped(mut stream: &TcpStream) -> bool {
    match stream.read(&mut [0; 64]) {
        Ok(count) => count == 0,
        Err(error) => error.kind() == io::ErrorKind::ConnectionReset,
    }
}

#[test]
fn who_knows_the_key_is_let_in_and_nobody_else() {
    let key = key();
    let server = serve(&key, KeylessClients::None);
    let store = TcpStore::connect_with_key(server.local_addr(), &key, soon()).unwrap();
    store.set("key", b"value", soon()).unwrap();
    assert_eq!(store.get("key", soon()).unwrap(), b"value");
    // Also later connections: this one is made while the other waits.
    thread::scope(|scope| {
        let waiting = scope.spawn(|| store.get("later", soon()).unwrap());
        thread::sleep(Duration::from_millis(20));
        store.set("later", b"now", soon()).unwrap();
        assert_eq!(waiting.join().unwrap(), b"now");
    });

    let other = TcpStore::connect_with_key(server.local_addr(), &self::key(), soon()).unwrap_err();
    assert!(other.to_string().contains("does not know this job's key"), "{other}");
    let none = TcpStore::connect(server.local_addr(), soon()).unwrap_err();
    assert!(none.remedy().unwrap().contains("PHALANX_JOB_KEY_FILE"), "{none}");
}

#[test]
fn a_server_without_the_key_hears_nothing_but_a_number_and_zeros() {
    let key = key();
    // A server without a key is not a store of this job, although it would answer.
    let server = TcpStoreServer::bind(([127, 0, 0, 1], 0).into()).unwrap();
    let error = TcpStore::connect_with_key(server.local_addr(), &key, soon()).unwrap_err();
    assert!(error.remedy().unwrap().contains("it has no job key"), "{error}");

    // A server with a false proof.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let heard = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut call = [0; CALL];
        stream.read_exact(&mut call).unwrap();
        let mut answer = [7; ANSWER];
        answer[..CALL].copy_from_slice(&call);
        stream.write_all(&answer).unwrap();
        let mut more = Vec::new();
        stream.read_to_end(&mut more).unwrap();
        more
    });
    let error = TcpStore::connect_with_key(address, &key, soon()).unwrap_err();
    assert!(error.to_string().contains("does not know this job's key"), "{error}");
    assert_eq!(heard.join().unwrap(), [0; TAG]);
}

#[test]
fn this_users_programs_on_this_host_need_no_key_where_they_are_let_in() {
    let key = key();
    let address = serve(&key, KeylessClients::OfThisUser);
    for _ in 0..3 {
        let plain = TcpStore::connect(address.local_addr(), soon()).unwrap();
        plain.add("plain", 1, soon()).unwrap();
    }
    let store = TcpStore::connect_with_key(address.local_addr(), &key, soon()).unwrap();
    assert_eq!(store.get("plain", soon()).unwrap(), b"3");
    let open = serve(&key, KeylessClients::All);
    TcpStore::connect(open.local_addr(), soon()).unwrap().num_keys(soon()).unwrap();
    // Without a key all clients are accepted, whatever else was requested.
    let access = Access::to(Credentials::default(), KeylessClients::None);
    let server = TcpStoreServer::bind_for(([127, 0, 0, 1], 0).into(), access).unwrap();
    TcpStore::connect(server.local_addr(), soon()).unwrap().num_keys(soon()).unwrap();
}

#[test]
fn an_old_proof_is_of_no_use() {
    let key = key();
    let server = serve(&key, KeylessClients::None);
    let secret = StoreSecret::new(key.bytes());
    let initiator = Initiator::new([1; NONCE]);
    let mut honest = connect(&server);
    honest.write_all(initiator.call()).unwrap();
    let mut answer = [0; ANSWER];
    honest.read_exact(&mut answer).unwrap();
    let proof = initiator.answered(&secret, &answer).unwrap();
    let ping = Frame::new(Op::Ping).u32(7).into_bytes();
    honest.write_all(&[&proof[..], &ping].concat()).unwrap();
    let mut echo = [0; 4];
    honest.read_exact(&mut echo).unwrap();
    assert_eq!(echo, 7_u32.to_le_bytes());

    let mut replayed = connect(&server);
    replayed.write_all(initiator.call()).unwrap();
    replayed.read_exact(&mut answer).unwrap();
    replayed.write_all(&[&proof[..], &ping].concat()).unwrap();
    assert!(is_dropped(&replayed));
}

#[test]
fn the_first_refusal_is_told_and_the_server_goes_on() {
    let (key, (mut heard, pipe)) = (key(), io::pipe().unwrap());
    let access = Access::to(key.clone().into(), KeylessClients::None).telling(&Refusals(Arc::new(pipe)));
    let server = TcpStoreServer::bind_for(([127, 0, 0, 1], 0).into(), access).unwrap();
    // A connection that is not a client's is not reported.
    let mut junk = bound_to([127, 0, 0, 9], &server);
    junk.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    assert!(is_dropped(&junk));
    let mut plain = connect(&server);
    plain.write_all(&Frame::new(Op::Validate).u32(MAGIC).into_bytes()).unwrap();
    assert!(is_dropped(&plain));
    let mut line = [0; 10];
    heard.read_exact(&mut line).unwrap();
    assert_eq!(&line, b"127.0.0.1\n");
    // One with another key finds that out from the server's answer, and says so.
    TcpStore::connect_with_key(server.local_addr(), &self::key(), soon()).unwrap_err();
    heard.read_exact(&mut line).unwrap();
    drop(heard);
    // The reader has gone: that does no harm.
    let mut unproven = connect(&server);
    unproven.write_all(&[Initiator::new([1; NONCE]).call(), &[0; TAG][..]].concat()).unwrap();
    let mut answer = [0; ANSWER];
    unproven.read_exact(&mut answer).unwrap();
    assert!(is_dropped(&unproven));
    TcpStore::connect_with_key(server.local_addr(), &key, soon()).unwrap().num_keys(soon()).unwrap();
}

/// What a foreign connection does.
fn misbehave(number: usize, address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    let call = *Initiator::new([number as u8; NONCE]).call();
    let bytes = match number % 5 {
        0 => Vec::new(),
        1 => call[..number % CALL].to_vec(),
        2 => call.to_vec(),
        3 => [&call[..], &[number as u8; TAG]].concat(),
        _ => vec![number as u8; number % 300],
    };
    let _ = (&stream).write_all(&bytes);
    stream
}

#[test]
fn strangers_of_every_kind_disturb_nobody() {
    let key = key();
    let server = serve(&key, KeylessClients::None);
    let strangers: Vec<TcpStream> = (0..200).map(|number| misbehave(number, server.local_addr())).collect();
    let store = TcpStore::connect_with_key(server.local_addr(), &key, soon()).unwrap();
    for _ in 0..100 {
        store.add("works", 1, soon()).unwrap();
    }
    drop(strangers);
    assert_eq!(store.get("works", soon()).unwrap(), b"100");
}
