//! A job with a key among a thousand strangers, some of which send whatever may be understood.

#[path = "../../../phalanx-core/src/testing/descriptors.rs"]
mod descriptors;

use std::collections::VecDeque;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use phalanx::store::{Store, TcpStore, TcpStoreServer};
use phalanx::{Credentials, Deadline, JobKey, ReduceOp, Tls};
use rustix::process::Uid;
use rustix::thread::set_thread_res_uid;

use self::descriptors::raise_descriptors;
use crate::certificates::Authority;
use crate::harness::ROLE;
use crate::support::world::{in_time, without_reminders};

/// Set for ranks: the file whose presence ends the training.
const STOP: &str = "PHALANX_TEST_STOP";
const RANKS: u32 = 3;
const STRANGERS: usize = 1000;
const LIMIT: Duration = Duration::from_secs(60);
/// The memory that each stranger may take, in bytes.
const MEMORY: usize = 4096;

/// Clients that begin as PyTorch's do.
const IMITATORS: usize = 10_000;
/// The longest that they may hold anybody up.
const DELAY_LIMIT: Duration = Duration::from_secs(2);

/// They need root: to be somebody else.
pub const PRIVILEGED: &[(&str, fn())] = &[(
    "ten_thousand_imitators_of_another_user_disturb_nobody",
    ten_thousand_imitators_of_another_user_disturb_nobody,
)];

pub const TESTS: &[(&str, fn())] = &[
    ("a_stranger_takes_little_memory", a_stranger_takes_little_memory),
    ("a_stranger_over_tls_takes_little_memory", a_stranger_over_tls_takes_little_memory),
    ("strangers_disturb_neither_a_start_nor_a_training", strangers_disturb_neither_a_start_nor_a_training),
    ("ten_thousand_imitators_disturb_nobody", ten_thousand_imitators_disturb_nobody),
];

/// What this program does as a rank.
pub fn play(_: &str) {
    train(Path::new(&std::env::var_os(STOP).unwrap()));
}

/// A rank: sums until rank 0 sees that it is time to stop.
fn train(stop: &Path) {
    let group = phalanx::init().unwrap();
    let mut step = 0;
    loop {
        let mut data = vec![1i64; 1 << 12];
        data[0] = i64::from(group.rank().is_main() && stop.exists());
        group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert!(data[1..].iter().all(|sum| *sum == i64::from(RANKS)));
        if step == 10 {
            println!("training");
        }
        if data[0] > 0 && step > 10 {
            return;
        }
        step += 1;
    }
}

fn soon() -> Deadline {
    Deadline::after(LIMIT)
}

fn serve(key: &JobKey) -> TcpStoreServer {
    TcpStoreServer::bind_with_key(([127, 0, 0, 1], 0).into(), key.clone()).unwrap()
}

/// Beginnings of what a store and a rank understand.
const BEGINNINGS: [&[u8]; 5] = [
    b"",
    b"PHXS\x01\0\0\0",
    b"PHXH\x03\0\x01\0",
    b"\0\xce\xf7\x85\x3c",
    b"\0\xce\xf7\x85\x3c\x06\xff\xff\xff\xff",
];

/// A stranger who says nothing, or something.
fn stranger(address: SocketAddr, number: usize) -> Option<TcpStream> {
    let mut stream = TcpStream::connect_timeout(&address, LIMIT / 2).ok()?;
    let beginning = BEGINNINGS[number % BEGINNINGS.len()];
    let noise: Vec<u8> = (0..number % 200).map(|place| (number * 31 + place * 7) as u8).collect();
    let _ = stream.write_all(beginning).and_then(|()| stream.write_all(&noise));
    Some(stream)
}

/// This process's own memory, in bytes.
fn resident() -> usize {
    memory("VmRSS:")
}

/// The most that it was since the last call of this, which begins with what it is now.
fn most_resident() -> usize {
    let most = memory("VmHWM:");
    fs::write("/proc/self/clear_refs", "5").unwrap();
    most
}

fn memory(what: &str) -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(what)).unwrap();
    line.split_ascii_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 1024
}

/// With both ends of the connections in this process, whose own memory for the strangers' ends is a descriptor each.
fn a_stranger_takes_little_memory() {
    raise_descriptors(2 * STRANGERS as u64 + 100);
    let key = JobKey::generate().unwrap();
    let server = serve(&key);
    let store = TcpStore::connect_with_key(server.local_addr(), &key, soon()).unwrap();
    let before = resident();
    // Half a greeting, which is more than silence takes.
    let strangers: Vec<TcpStream> = (0..STRANGERS)
        .map(|_| {
            let mut stream = TcpStream::connect(server.local_addr()).unwrap();
            stream.write_all(&BEGINNINGS[1][..6]).unwrap();
            stream
        })
        .collect();
    // A client that comes later is let in later.
    TcpStore::connect_with_key(server.local_addr(), &key, soon()).unwrap();
    let each = resident().saturating_sub(before) / STRANGERS;
    eprintln!("{STRANGERS} strangers at once: {each} bytes each");
    assert!(each <= MEMORY, "{each} bytes");
    assert_eq!(store.num_keys(soon()).unwrap(), 0);
    drop(strangers);
}

/// What a client of TLS says first.
fn client_hello(credentials: &Credentials) -> Vec<u8> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| TcpStore::connect_with(address, credentials, soon()).unwrap_err());
        let (mut stream, _) = listener.accept().unwrap();
        let mut record = [0; 5];
        stream.read_exact(&mut record).unwrap();
        let mut rest = vec![0; usize::from(u16::from_be_bytes([record[3], record[4]]))];
        stream.read_exact(&mut rest).unwrap();
        // In the words of one that speaks no TLS, so that the client goes.
        stream.write_all(&[21, 3, 3, 0, 2, 2, 70]).unwrap();
        [&record[..], &rest].concat()
    })
}

/// In the same way, one that has said a client hello and waits; and one that has said most of the longest that are
/// heard. Few of the former have a state of TLS at once, whatever it takes, and the others have their turn.
fn a_stranger_over_tls_takes_little_memory() {
    raise_descriptors(2 * STRANGERS as u64 + 100);
    let (ca, folder) = (Authority::new(), tempfile::tempdir().unwrap());
    let [ca, certificate, key] = ca.write(&ca.certificate(), folder.path());
    let credentials = Credentials { key: None, tls: Some(Tls::read(&ca, &certificate, &key).unwrap()) };
    // A ClientHello of 1783 bytes, in a record of its own: as long as may be.
    let long = [&[22, 3, 1, 6, 0xfb, 1, 0, 6, 0xf7][..], &[0; 1750]];
    for (what, words) in [("all", client_hello(&credentials)), ("most", long.concat())] {
        let server = TcpStoreServer::bind_with(([127, 0, 0, 1], 0).into(), credentials.clone()).unwrap();
        // What the first client costs, code that is read from disk above all, costs no other.
        TcpStore::connect_with(server.local_addr(), &credentials, soon()).unwrap();
        let before = resident();
        most_resident();
        let strangers: Vec<TcpStream> = (0..STRANGERS)
            .map(|_| {
                let mut stream = TcpStream::connect(server.local_addr()).unwrap();
                stream.write_all(&words).unwrap();
                stream
            })
            .collect();
        let store = TcpStore::connect_with(server.local_addr(), &credentials, soon()).unwrap();
        let each = most_resident().saturating_sub(before) / STRANGERS;
        eprintln!("{STRANGERS} strangers with {what} of the TLS client hello: {each} bytes each");
        assert!(each <= MEMORY, "{what}: {each} bytes");
        assert_eq!(store.num_keys(soon()).unwrap(), 0);
        drop(strangers);
    }
}

struct Ranks(Vec<Child>);

impl Drop for Ranks {
    fn drop(&mut self) {
        for rank in &mut self.0 {
            let _ = rank.kill();
            let _ = rank.wait();
        }
    }
}

fn strangers_disturb_neither_a_start_nor_a_training() {
    raise_descriptors(4 * STRANGERS as u64);
    let folder = tempfile::tempdir().unwrap();
    let (file, stop) = (folder.path().join("job.key"), folder.path().join("stop"));
    let key = JobKey::generate().unwrap();
    key.write_new(&file).unwrap();
    let server = serve(&key);
    let address = server.local_addr();
    let mut strangers: Vec<TcpStream> =
        (0..STRANGERS).filter_map(|number| stranger(address, number)).collect();
    assert_eq!(strangers.len(), STRANGERS);

    let ranks = (0..RANKS).map(|rank| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .env(ROLE, "strangers::rank")
            .env(STOP, &stop)
            .env("PHALANX_JOB_KEY_FILE", &file)
            .env("PHALANX_TRANSPORT", "tcp");
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", RANKS.to_string());
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", address.port().to_string());
        command.env("TORCHELASTIC_USE_AGENT_STORE", "True");
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    });
    let mut ranks = Ranks(ranks.collect());
    let mut outputs: Vec<_> = ranks.0.iter_mut().map(|rank| rank.stdout.take().unwrap()).collect();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let done = &done;
        scope.spawn(move || {
            let mut held = Vec::new();
            for number in 0.. {
                if done.load(Ordering::Relaxed) {
                    return;
                }
                held.extend(stranger(address, number));
                // Some stay, and the others hang up in the middle.
                let count = held.len();
                held.drain(..count.saturating_sub(STRANGERS / 2));
                // The system has only so many ports, and keeps those of ended connections for a while.
                std::thread::sleep(Duration::from_millis(2));
            }
        });
        for output in &mut outputs {
            let mut line = String::new();
            BufReader::new(output).read_line(&mut line).unwrap();
            assert_eq!(line, "training\n");
        }
        // And once more, while they train.
        strangers.extend((0..STRANGERS).filter_map(|number| stranger(address, number)));
        let store = TcpStore::connect_with_key(address, &key, soon()).unwrap();
        assert!(store.num_keys(soon()).unwrap() > 0);
        fs::write(&stop, "").unwrap();
        done.store(true, Ordering::Relaxed);
    });
    let deadline = Instant::now() + LIMIT;
    for rank in &mut ranks.0 {
        while rank.try_wait().unwrap().is_none() {
            assert!(Instant::now() < deadline, "a rank hangs");
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut said = String::new();
        rank.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        let said = without_reminders(&said);
        assert!(rank.wait().unwrap().success() && said.is_empty(), "{said}");
    }
}

/// For a client that begins as PyTorch's do, the server asks the kernel whose it is.
fn ten_thousand_imitators_disturb_nobody() {
    in_time(DELAY_LIMIT, "imitators", || imitate(None));
}

/// Of root's programs, and of the user 65534's.
fn ten_thousand_imitators_of_another_user_disturb_nobody() {
    in_time(DELAY_LIMIT, "imitators", || imitate(Some(65534)));
}

/// How long somebody was held up at most.
fn imitate(user: Option<u32>) -> Duration {
    raise_descriptors(4 * STRANGERS as u64);
    let key = JobKey::generate().unwrap();
    let server = serve(&key);
    let address = server.local_addr();
    let (began, finished) = (AtomicBool::new(false), AtomicBool::new(false));
    let (mut longest, mut asked) = (Duration::ZERO, 0);
    std::thread::scope(|scope| {
        let (began, finished) = (&began, &finished);
        scope.spawn(move || {
            if let Some(user) = user.map(Uid::from_raw) {
                // Of this thread alone.
                set_thread_res_uid(user, user, user).unwrap();
            }
            let mut held = VecDeque::new();
            for number in 0..IMITATORS {
                let mut stream = TcpStream::connect(address).unwrap();
                // Some have been hung up on already.
                let _ = stream.write_all(BEGINNINGS[3]);
                held.push_back(stream);
                if held.len() > STRANGERS {
                    held.pop_front();
                }
                if number == STRANGERS {
                    began.store(true, Ordering::Relaxed);
                }
            }
            finished.store(true, Ordering::Relaxed);
        });
        while !began.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(1));
        }
        // One client with the key, and one of this user's programs without, for as long as they come.
        while !finished.load(Ordering::Relaxed) || asked == 0 {
            let since = Instant::now();
            TcpStore::connect_with_key(address, &key, soon()).unwrap().num_keys(soon()).unwrap();
            TcpStore::connect(address, soon()).unwrap().num_keys(soon()).unwrap();
            longest = longest.max(since.elapsed());
            asked += 1;
        }
    });
    let since = Instant::now();
    server.drain(soon());
    let end = since.elapsed();
    eprintln!(
        "{IMITATORS} imitators: {asked} times two clients were let in, in {longest:?} at most; the end took {end:?}"
    );
    longest.max(end)
}
