//! A peer that knows how everything is said, key and all, and says each thing a little wrong, hundreds of times while ranks
//! meet and while they train.

mod messages;
mod mutate;
mod process;
mod relay;

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use phalanx::store::{Store, TcpStore, TcpStoreServer};
use phalanx::{Deadline, JobKey, ReduceOp};

use crate::harness::ROLE;
use messages::Insider;
use mutate::Random;
use process::{Process, Use};
use relay::Relay;

/// Set for a rank: the file whose presence ends the training.
const STOP: &str = "PHALANX_TEST_STOP";
/// By which a failure is repeated.
const SEED: &str = "PHALANX_TEST_SEED";
const RANKS: u32 = 3;
const LIMIT: Duration = Duration::from_secs(60);
/// How many wrong messages each listener gets, while ranks meet and then while they train.
const WRONG: usize = 200;
/// How much more memory a process may have had at most than one that nobody disturbs.
const MEMORY: u64 = 24 << 20;

pub const TESTS: &[(&str, fn())] = &[(
    "wrong_messages_disturb_neither_a_start_nor_a_training",
    wrong_messages_disturb_neither_a_start_nor_a_training,
)];

/// What this program does as a part of the job.
pub fn play(part: &str) {
    match part {
        "store" => serve(),
        "rank" => train(),
        other => panic!("no part {other}"),
    }
}

fn soon() -> Deadline {
    Deadline::after(LIMIT)
}

/// The job's store, until nobody holds its standard input any more.
fn serve() {
    let key = JobKey::read(std::env::var_os("PHALANX_JOB_KEY_FILE").unwrap()).unwrap();
    let server = TcpStoreServer::bind_with_key(([127, 0, 0, 1], 0).into(), key).unwrap();
    println!("{}", server.local_addr());
    let _ = std::io::stdin().read(&mut [0]);
}

/// A rank: the same sums again and again, until rank 0 sees that it is time to stop.
fn train() {
    let stop = std::env::var_os(STOP).unwrap();
    let group = phalanx::init().unwrap();
    let mut random = Random::new(group.rank().get().into());
    let own: Vec<f32> = (0..5000).map(|_| random.next() as f32 / 3e9).collect();
    let mut first = Vec::new();
    loop {
        let mut sums = own.clone();
        group.all_reduce(&mut sums, ReduceOp::Sum).unwrap();
        let bits: Vec<u32> = sums.iter().map(|sum| sum.to_bits()).collect();
        if first.is_empty() {
            let hash =
                bits.iter().fold(0u64, |hash, bits| (hash ^ u64::from(*bits)).wrapping_mul(0x100_0000_01b3));
            println!("{hash:016x}");
            first.clone_from(&bits);
        }
        assert!(bits == first, "a sum has changed");
        let mut ends = [i64::from(group.rank().is_main() && Path::new(&stop).exists())];
        group.all_reduce(&mut ends, ReduceOp::Max).unwrap();
        if ends[0] > 0 {
            return;
        }
        // So long a model takes, and others have the processor.
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A store and its ranks.
struct Job {
    folder: tempfile::TempDir,
    store: Process,
    address: SocketAddr,
    key: JobKey,
    ranks: Vec<Process>,
}

impl Job {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("job.key");
        let key = JobKey::generate().unwrap();
        key.write_new(&file).unwrap();
        let mut store =
            Process::start(&[(ROLE, "hostile::store".as_ref()), ("PHALANX_JOB_KEY_FILE", file.as_os_str())]);
        let address = store.line().parse().unwrap();
        Self { folder, store, address, key, ranks: Vec::new() }
    }

    fn file(&self) -> std::path::PathBuf {
        self.folder.path().join("job.key")
    }

    /// The next rank, which finds the store at `address`.
    fn start_rank(&mut self, address: SocketAddr) {
        let (file, stop) = (self.file(), self.folder.path().join("stop"));
        let (rank, world, port) =
            (self.ranks.len().to_string(), RANKS.to_string(), address.port().to_string());
        let store = format!("127.0.0.1 {port}");
        self.ranks.push(Process::start(&[
            (ROLE, "hostile::rank".as_ref()),
            (STOP, stop.as_os_str()),
            ("PHALANX_JOB_KEY_FILE", file.as_os_str()),
            ("PHALANX_TRANSPORT", "tcp".as_ref()),
            ("RANK", rank.as_ref()),
            ("WORLD_SIZE", world.as_ref()),
            ("MASTER_ADDR", "127.0.0.1".as_ref()),
            ("MASTER_PORT", port.as_ref()),
            ("TORCHELASTIC_USE_AGENT_STORE", "True".as_ref()),
            ("PHALANX_LAUNCHER_STORE", store.as_ref()),
        ]));
    }

    /// What the ranks' sums are, once all train.
    fn sums(&mut self) -> Vec<String> {
        self.ranks.iter_mut().map(Process::line).collect()
    }

    fn processes(&self) -> impl Iterator<Item = &Process> {
        std::iter::once(&self.store).chain(&self.ranks)
    }

    fn end(mut self) {
        fs::write(self.folder.path().join("stop"), "").unwrap();
        self.ranks.iter_mut().for_each(Process::has_ended_well);
    }
}

fn wrong_messages_disturb_neither_a_start_nor_a_training() {
    let seed = std::env::var(SEED).map_or_else(|_| Random::seed(), |seed| seed.parse().unwrap());
    let repeat = Repeat(seed);
    // How it is when nobody disturbs it.
    let mut quiet = Job::new();
    let address = quiet.address;
    (0..RANKS).for_each(|_| quiet.start_rank(address));
    let expected = quiet.sums();
    assert!(expected.iter().all(|sums| *sums == expected[0]));
    let greeting = record_a_greeting(&quiet);
    let deadline = Instant::now() + LIMIT;
    let usual: Vec<Use> = quiet.processes().map(|process| process.uses_at_rest(deadline)).collect();
    quiet.end();

    let mut job = Job::new();
    let (done, heard) = (AtomicBool::new(false), [const { AtomicUsize::new(0) }; 2]);
    let (address, file) = (job.address, job.file());
    let enough = |of: &AtomicUsize, count| {
        let deadline = Instant::now() + LIMIT;
        while of.load(Ordering::Relaxed) < count {
            assert!(Instant::now() < deadline, "the peer is not heard");
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    std::thread::scope(|scope| {
        let (done, [at_store, at_ranks]) = (&done, &heard);
        let _end = process::OnDrop(|| done.store(true, Ordering::Relaxed));
        scope.spawn(|| {
            let mut random = Random::new(seed);
            let mut held = Vec::new();
            while !done.load(Ordering::Relaxed) {
                let message = mutate::some(&mut random, &messages::requests(), Some(&greeting));
                say(&mut random, address, &message, &mut held);
                at_store.fetch_add(1, Ordering::Relaxed);
            }
        });
        // The last rank is held up between the roll-call and its first look for the others, who listen for it.
        let relay = Relay::to(address, Some(messages::MESH));
        (1..RANKS).for_each(|_| job.start_rank(address));
        job.start_rank(relay.address());
        let insider = Insider::new(&file, &TcpStore::connect_with_key(address, &job.key, soon()).unwrap());
        let insider = Arc::new(insider);
        let posing = Arc::clone(&insider);
        scope.spawn(move || {
            let mut random = Random::new(seed ^ 1);
            let mut held = Vec::new();
            while !done.load(Ordering::Relaxed) && posing.pose(&mut random, &mut held) {
                at_ranks.fetch_add(1, Ordering::Relaxed);
            }
        });
        enough(at_store, WRONG);
        enough(at_ranks, WRONG);
        enough(&insider.answered, WRONG / 4);
        relay.release();
        assert_eq!(job.sums(), expected);
        // No rank listens while it trains.
        assert!(job.ranks.iter().all(|rank| !rank.listens()));
        enough(at_store, at_store.load(Ordering::Relaxed) + WRONG);
    });
    let [at_store, at_ranks] = heard.map(AtomicUsize::into_inner);
    let store = TcpStore::connect_with_key(address, &job.key, soon()).unwrap();
    assert!(store.num_keys(soon()).unwrap() > 0);
    drop(store);
    // What the peer has left to be done is done first, however busy the machine is.
    let deadline = Instant::now() + LIMIT;
    for (process, usual) in job.processes().zip(&usual) {
        let mut uses = process.uses();
        while uses.threads.len() > usual.threads.len() || uses.descriptors > usual.descriptors {
            assert!(
                Instant::now() < deadline,
                "{uses:?} remain, and {usual:?} are usual: {:?}",
                process.descriptors()
            );
            std::thread::sleep(Duration::from_millis(10));
            uses = process.uses();
        }
        assert!(uses.peak <= usual.peak + MEMORY, "{} bytes at most, and usually {}", uses.peak, usual.peak);
        eprintln!("{} KiB more than usual", uses.peak.saturating_sub(usual.peak) >> 10);
    }
    job.end();
    eprintln!("{at_store} wrong clients of the store, {at_ranks} wrong ranks");
    std::mem::forget(repeat);
}

/// Dropped, it says how to repeat what has failed.
struct Repeat(u64);

impl Drop for Repeat {
    fn drop(&mut self) {
        eprintln!("again with {SEED}={}", self.0);
    }
}

/// What a client of the store that knows the key says, from its first byte on.
fn record_a_greeting(job: &Job) -> Vec<u8> {
    let relay = Relay::to(job.address, None);
    let store = TcpStore::connect_with_key(relay.address(), &job.key, soon()).unwrap();
    store.set("recorded", b"value", soon()).unwrap();
    assert_eq!(store.add("counted", 1, soon()).unwrap(), 1);
    relay.said()
}

/// Says so in a new connection, and perhaps stays.
fn say(random: &mut Random, address: SocketAddr, message: &[u8], held: &mut Vec<TcpStream>) {
    let Some(mut stream) = messages::connect(address) else { return };
    let _ = stream.write_all(message);
    if random.below(3) == 0 {
        // If it is answered at all.
        let _ = stream.set_read_timeout(Some(Duration::from_millis(10)));
        let _ = stream.read(&mut [0; 256]);
    }
    held.push(stream);
    let stay = random.below(32);
    held.drain(..held.len().saturating_sub(stay));
}
