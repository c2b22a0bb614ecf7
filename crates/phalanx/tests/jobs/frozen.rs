//! Ranks that are alive but frozen, and wake again: real processes that are stopped and continued.

use std::fmt::Display;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

use phalanx::rendezvous::{self, Rendezvous};
use phalanx::store::{PrefixStore, Store, TcpStore};
use phalanx::{Buffer, DType, Deadline, Generation, GroupOptions, ProcessGroup, Rank, ReduceOp, WorldSize};
use rustix::process::{Signal, getpid, kill_process};

use crate::support::world::{LIMIT, World, end_with, idle, in_time, train};

/// The promise is 1.5 s, with a time-out of one; this machine may have other things to do.
const DETECTION_LIMIT: Duration = Duration::from_secs(4);

pub const TESTS: &[(&str, fn())] = &[
    ("a_frozen_rank_is_named_by_all", a_frozen_rank_is_named_by_all),
    ("a_frozen_rank_is_named_by_who_waits_for_another", a_frozen_rank_is_named_by_who_waits_for_another),
    ("a_frozen_rank_is_named_by_who_is_next_to_it_when_others_have_left", named_when_others_have_left),
    ("a_rank_that_freezes_before_the_group_stands_is_named", a_rank_that_freezes_before_is_named),
    ("who_is_continued_before_the_group_stands_is_waited_for", who_is_continued_before_is_waited_for),
    ("a_rank_that_is_slow_is_not_frozen", a_rank_that_is_slow_is_not_frozen),
    ("nobody_is_accused_on_a_machine_that_is_busy", nobody_is_accused_on_a_machine_that_is_busy),
    ("a_job_that_freezes_as_a_whole_goes_on", a_job_that_freezes_as_a_whole_goes_on),
    ("without_heartbeats_a_freeze_means_nothing", without_heartbeats_a_freeze_means_nothing),
    ("a_rank_that_thaws_disturbs_nobody", a_rank_that_thaws_disturbs_nobody),
];

/// What this program does as a rank.
pub fn play(scenario: &str) {
    end_with(match scenario {
        "train" => train(),
        "idle" => idle(),
        "chain" => chain(),
        "left" => left(),
        "regroup" => regroup(),
        "late" => late(),
        other => panic!("no scenario {other}"),
    });
}

/// Each rank waits for a word of the next one.
fn chain() -> phalanx::Result<()> {
    let group = phalanx::init()?;
    println!("training");
    let next = Rank::new((group.rank().get() + 1) % group.world_size().get());
    group.recv(&mut [0u8; 8], next)
}

/// The ranks of one host that are next to rank 4 leave. Each of the others waits for a word of the next that has stayed.
fn left() -> phalanx::Result<()> {
    const STAY: [u32; 5] = [0, 1, 4, 7, 8];
    let group = phalanx::init()?;
    let place = STAY.iter().position(|rank| *rank == group.rank().get());
    let Some(place) = place else {
        group.leave()?;
        println!("training");
        return Ok(());
    };
    println!("training");
    group.recv(&mut [0u8; 8], Rank::new(STAY[(place + 1) % STAY.len()]))
}

/// Joins a group; the victim is stopped after it has come to the roll-call.
fn late() -> phalanx::Result<()> {
    let met = rendezvous::from_env(LIMIT)?;
    if std::env::var("VICTIM").is_ok_and(|victim| victim == met.rank.to_string()) {
        kill_process(getpid(), Signal::STOP).unwrap();
    }
    let mut options = GroupOptions::from_env()?;
    options.timeout = LIMIT * 3;
    ProcessGroup::join(met, options)?.barrier()
}

/// Trains until somebody is lost, then with those that are left, until the test says that it is enough.
fn regroup() -> phalanx::Result<()> {
    let first = rendezvous::from_env(LIMIT)?;
    let (store, me, world) = (first.store.clone(), first.rank, first.world_size);
    let interface = first.interface;
    let mut options = GroupOptions::from_env()?;
    options.timeout = LIMIT;
    let group = ProcessGroup::join(first, options.clone())?;
    let mut kept = Kept::new(&group)?;
    let error = loop {
        if let Err(error) = kept.step(&group, world) {
            break error;
        }
        if kept.steps == 10 {
            println!("training");
        }
    };
    let lost = error.peer().filter(|_| error.is_peer_failure()).ok_or_else(|| error.clone())?;
    // Whatever is called from now on ends with the same error.
    for _ in 0..3 {
        assert_eq!(kept.step(&group, world).unwrap_err().peer(), Some(lost));
        assert_eq!(group.barrier().unwrap_err().peer(), Some(lost));
    }
    if lost == me {
        // The others have given this rank up.
        return Err(error);
    }
    kept.mark();

    let rank = Rank::new(me.get() - u32::from(me > lost));
    let left = WorldSize::new(world.get() - 1)?;
    let second = Rendezvous {
        store: Arc::new(PrefixStore::new("second", store.clone())),
        rank,
        world_size: left,
        local_rank: rank.get(),
        local_world_size: left.get(),
        generation: Generation(1),
        interface,
        ..rendezvous::alone()
    };
    let group = ProcessGroup::join(second, options)?;
    println!("regrouped without {lost}");
    let mut again = Kept::new(&group)?;
    let mut enough = [0u8];
    let told = told(std::env::var("MASTER_PORT").unwrap())?;
    while enough[0] == 0 {
        again.step(&group, left)?;
        kept.check_mark();
        enough[0] = u8::from(rank.is_main() && told.check(&["enough"], Deadline::after(LIMIT))?);
        group.broadcast(&mut enough, Rank::MAIN)?;
    }
    println!("right");
    Ok(())
}

/// Where the test says that it is enough.
fn told(port: impl Display) -> phalanx::Result<TcpStore> {
    TcpStore::connect(format!("127.0.0.1:{port}"), Deadline::after(LIMIT))
}

/// Memory that goes through every way of a collective: the slots, the staging buffers, registered memory.
struct Kept {
    small: Vec<i64>,
    staged: Vec<i64>,
    registered: Buffer,
    steps: usize,
}

impl Kept {
    fn new(group: &ProcessGroup) -> phalanx::Result<Self> {
        let registered = group.alloc(DType::I64, 1 << 17)?;
        Ok(Self { small: vec![0; 4], staged: vec![0; 1 << 16], registered, steps: 0 })
    }

    /// Sums what all ranks bring, each way once, and checks it.
    fn step(&mut self, group: &ProcessGroup, world: WorldSize) -> phalanx::Result<()> {
        let own = i64::from(group.rank().get() + 1) * (self.steps as i64 + 1);
        let sum = i64::from(world.get() * (world.get() + 1) / 2) * (self.steps as i64 + 1);
        let registered = self.registered.as_mut_slice::<i64>()?;
        for memory in [&mut self.small[..], &mut self.staged, registered] {
            memory.fill(own);
            group.all_reduce(memory, ReduceOp::Sum)?;
            assert!(memory.iter().all(|element| *element == sum), "a wrong sum in step {}", self.steps);
        }
        self.steps += 1;
        Ok(())
    }

    /// Uses the memory of the failed group for something else.
    fn mark(&mut self) {
        self.registered.as_mut_slice::<i64>().unwrap().fill(MARK);
    }

    fn check_mark(&self) {
        let memory = self.registered.as_slice::<i64>().unwrap();
        assert!(
            memory.iter().all(|element| *element == MARK),
            "a late rank has written into a survivor's memory"
        );
    }
}

const MARK: i64 = 0x0102_0304_0506_0708;

fn a_rank_that_freezes_before_is_named() {
    for (world, victim) in [(2, 0), (2, 1), (4, 2)] {
        let mut ranks = World::start("frozen::late", world, false, &[("VICTIM", &victim.to_string())]);
        let process = ranks.ranks[victim].id();
        ranks.await_all_but(&[victim]);
        ranks.send(victim, Signal::CONT);
        let (outcomes, _) = ranks.end();
        for (rank, (code, error)) in outcomes.iter().enumerate() {
            assert_eq!(*code, Some(3), "rank {rank}: {error}");
            let named = error.contains(&format!("rank {victim} ("))
                && error.contains(&format!("is frozen: its process {process} is stopped"))
                && error.contains(&format!("kill -CONT {process}"));
            assert!(named, "rank {rank}: {error}");
        }
    }
}

/// Waits until a signal has stopped this rank; gives a moment before that.
fn await_stop(rank: &Child) -> Instant {
    let (path, deadline) = (format!("/proc/{}/stat", rank.id()), Instant::now() + LIMIT);
    let mut before = Instant::now();
    loop {
        let looked = Instant::now();
        let stat = std::fs::read_to_string(&path).unwrap();
        if stat.contains(") T ") {
            return before;
        }
        assert!(looked < deadline, "it is not stopped: {stat}");
        before = looked;
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn who_is_continued_before_is_waited_for() {
    // In time, which is 5 s, and where it may stand still for as long as it likes.
    let deadline = Instant::now() + LIMIT * 6;
    for (seconds, timeout) in [(3, "1"), (8, "0")] {
        let variables = [("VICTIM", "1"), ("PHALANX_HEARTBEAT_TIMEOUT", timeout)];
        let mut ranks = loop {
            let ranks = World::start("frozen::late", 3, false, &variables);
            let stopped = await_stop(&ranks.ranks[1]);
            std::thread::sleep(Duration::from_secs(seconds));
            // On a busy machine this process may have slept for longer than it meant to: that says nothing.
            if timeout == "0" || stopped.elapsed() < Duration::from_secs(4) {
                break ranks;
            }
            assert!(Instant::now() < deadline, "this machine is too busy for a stop of less than 4 s");
        };
        assert!(ranks.ranks.iter_mut().all(|rank| rank.try_wait().unwrap().is_none()), "{:?}", ranks.end());
        ranks.send(1, Signal::CONT);
        let (outcomes, _) = ranks.end();
        assert!(outcomes.iter().all(|(code, _)| *code == Some(0)), "{outcomes:?}");
    }
}

/// Freezes `victim`; every survivor must name it in time.
fn survivors_name(scenario: &str, world: u32, victim: usize) {
    for transport in ["tcp", "shm"] {
        in_time(DETECTION_LIMIT, transport, || {
            let mut ranks = World::start(
                &format!("frozen::{scenario}"),
                world,
                false,
                &[("PHALANX_TRANSPORT", transport)],
            );
            ranks.training();
            let frozen = ranks.send(victim, Signal::STOP);
            let took = ranks.await_all_but(&[victim]) - frozen;
            ranks.send(victim, Signal::CONT);
            let (outcomes, _) = ranks.end();
            for (rank, (code, error)) in outcomes.iter().enumerate() {
                assert_eq!(*code, Some(3), "rank {rank}: {error}");
                // The frozen rank hears the same of itself, or that the others have ended since.
                let named = error.contains(&format!("rank {victim} (")) && silence(error) >= Some(1.0);
                assert!(named || rank == victim, "rank {rank}: {error}");
            }
            took
        });
    }
}

fn named_when_others_have_left() {
    for transport in ["tcp", "shm"] {
        in_time(DETECTION_LIMIT, transport, || {
            let mut ranks = World::start("frozen::left", 9, false, &[("PHALANX_TRANSPORT", transport)]);
            ranks.training();
            let frozen = ranks.send(4, Signal::STOP);
            let took = ranks.await_all_but(&[4]) - frozen;
            ranks.send(4, Signal::CONT);
            let (outcomes, _) = ranks.end();
            for rank in [0, 1, 7, 8] {
                let (code, error) = &outcomes[rank];
                let is_named = error.contains("rank 4 (") && silence(error) >= Some(1.0);
                assert!(*code == Some(3) && is_named, "rank {rank}: {code:?} {error}");
            }
            for rank in [2, 3, 5, 6] {
                assert_eq!(outcomes[rank].0, Some(0), "rank {rank}: {}", outcomes[rank].1);
            }
            took
        });
    }
}

/// For how many seconds somebody has not been heard of.
fn silence(error: &str) -> Option<f64> {
    let (_, rest) = error.split_once("has not been heard of for ")?;
    rest.split_once(' ')?.0.parse().ok()
}

fn a_frozen_rank_is_named_by_all() {
    for (world, victim) in [(2, 0), (2, 1), (4, 2)] {
        survivors_name("train", world, victim);
    }
    survivors_name("idle", 4, 0);
}

fn a_frozen_rank_is_named_by_who_waits_for_another() {
    survivors_name("chain", 4, 1);
}

/// Half of the time-out, and eight tenths of it.
fn a_rank_that_is_slow_is_not_frozen() {
    const TIMEOUT: Duration = Duration::from_secs(3);
    let deadline = Instant::now() + LIMIT * 6;
    'again: loop {
        let mut ranks = World::start("frozen::train", 3, false, &[("PHALANX_HEARTBEAT_TIMEOUT", "3")]);
        ranks.training();
        for (victim, tenths) in [(0, 5), (1, 8), (2, 8)] {
            let stopped = ranks.send(victim, Signal::STOP);
            std::thread::sleep(TIMEOUT * tenths / 10);
            ranks.send(victim, Signal::CONT);
            // On a busy machine this process may have slept for longer than it meant to: that says nothing.
            if stopped.elapsed() > TIMEOUT * 9 / 10 {
                assert!(
                    Instant::now() < deadline,
                    "this machine is too busy for a stop of less than {TIMEOUT:?}"
                );
                continue 'again;
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        assert!(ranks.ranks.iter_mut().all(|rank| rank.try_wait().unwrap().is_none()), "{:?}", ranks.end());
        return;
    }
}

/// Four ranks and eight processes that never sleep, on a machine that may have two processors.
fn nobody_is_accused_on_a_machine_that_is_busy() {
    struct Busy(Vec<Child>);
    impl Drop for Busy {
        fn drop(&mut self) {
            for child in &mut self.0 {
                let _ = child.kill();
                let _ = child.wait();
            }
        }
    }
    let spin = || Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
    let _busy = Busy((0..8).map(|_| spin()).collect());
    for transport in ["tcp", "shm"] {
        let mut ranks = World::start("frozen::train", 4, false, &[("PHALANX_TRANSPORT", transport)]);
        ranks.training();
        std::thread::sleep(Duration::from_secs(5));
        assert!(ranks.ranks.iter_mut().all(|rank| rank.try_wait().unwrap().is_none()), "{:?}", ranks.end());
    }
}

fn a_job_that_freezes_as_a_whole_goes_on() {
    let deadline = Instant::now() + LIMIT * 6;
    'again: loop {
        let mut ranks = World::start("frozen::train", 3, false, &[]);
        ranks.training();
        for signal in [Signal::STOP, Signal::CONT] {
            let first = Instant::now();
            for rank in 0..3 {
                ranks.send(rank, signal);
            }
            // If this process was held up meanwhile, they have not frozen as a whole: that says nothing.
            if first.elapsed() > Duration::from_millis(500) {
                assert!(Instant::now() < deadline, "this machine is too busy for three signals at once");
                continue 'again;
            }
            std::thread::sleep(Duration::from_secs(2));
        }
        assert!(ranks.ranks.iter_mut().all(|rank| rank.try_wait().unwrap().is_none()), "{:?}", ranks.end());
        return;
    }
}

fn without_heartbeats_a_freeze_means_nothing() {
    // One that does not beat is not missed; one that does not listen misses nobody.
    for off in ["PHALANX_HEARTBEAT_INTERVAL", "PHALANX_HEARTBEAT_TIMEOUT"] {
        let mut ranks = World::start("frozen::idle", 2, false, &[(off, "0")]);
        ranks.training();
        ranks.send(1, Signal::STOP);
        std::thread::sleep(Duration::from_secs(3));
        assert!(ranks.ranks[0].try_wait().unwrap().is_none(), "{off}");
        ranks.send(1, Signal::CONT);
        ranks.kill(0);
        ranks.end();
    }
}

fn a_rank_that_thaws_disturbs_nobody() {
    for (round, transport) in ["shm", "tcp", "shm", "shm"].into_iter().enumerate() {
        let (world, victim) = (3 + round % 2, round % 3);
        let variables = [("PHALANX_TRANSPORT", transport), ("PHALANX_HEARTBEAT_TIMEOUT", "1")];
        let mut ranks = World::start("frozen::regroup", world as u32, false, &variables);
        ranks.training();
        // Somewhere in a step.
        std::thread::sleep(Duration::from_micros(1237 * (round as u64 + 1)));
        ranks.send(victim, Signal::STOP);
        let mut survivors = Vec::new();
        for rank in (0..world).filter(|rank| *rank != victim) {
            let mut out = BufReader::new(ranks.ranks[rank].stdout.take().unwrap());
            let mut line = String::new();
            out.read_line(&mut line).unwrap();
            assert_eq!(line, format!("regrouped without {victim}\n"), "rank {rank}, round {round}");
            survivors.push(out);
        }
        ranks.send(victim, Signal::CONT);
        let others: Vec<usize> = (0..world).filter(|rank| *rank != victim).collect();
        ranks.await_all_but(&others);
        let status = ranks.ranks[victim].try_wait().unwrap().unwrap();
        assert_eq!(status.code(), Some(3), "every call of the thawed rank ends with an error");
        // The others are at it for a while yet.
        std::thread::sleep(Duration::from_millis(300));
        told(ranks.port).unwrap().set("enough", b"1", Deadline::after(LIMIT)).unwrap();
        for mut out in survivors {
            let mut line = String::new();
            out.read_line(&mut line).unwrap();
            assert_eq!(line, "right\n", "{:?}", ranks.end());
        }
        let (outcomes, _) = ranks.end();
        let codes: Vec<_> = outcomes.iter().map(|(code, _)| *code).collect();
        assert!(
            (0..world).all(|rank| codes[rank] == Some(if rank == victim { 3 } else { 0 })),
            "{outcomes:?}"
        );
    }
}
