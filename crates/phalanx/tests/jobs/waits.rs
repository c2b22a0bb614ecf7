//! Calls that wait for long, and say for whom: real processes.

use std::io::{BufRead, BufReader, Read};
use std::time::Duration;

use phalanx::checkpoint::Checkpoints;
use phalanx::store::{Store, TcpStore};
use phalanx::{Deadline, ProcessGroup, Rank, ReduceOp};

use crate::support::world::{LIMIT, World, end_with};

pub const TESTS: &[(&str, fn())] = &[
    ("a_call_that_waits_for_long_says_for_whom", a_call_that_waits_for_long_says_for_whom),
    ("what_takes_long_as_announced_is_not_reported", what_takes_long_as_announced_is_not_reported),
];

/// Longer than a call waits before it reports.
const LATE_RANK_DELAY: Duration = Duration::from_secs(7);

/// What this program does as a rank.
pub fn play(scenario: &str) {
    end_with(match scenario {
        "late" => late(),
        "message" => message(),
        "announced" => announced(),
        other => panic!("no scenario {other}"),
    });
}

/// Rank 1 makes its second call when the test says so.
fn late() -> phalanx::Result<()> {
    let group = phalanx::init()?;
    group.barrier()?;
    if group.rank() == Rank::new(1) {
        await_word()?;
    }
    group.all_reduce(&mut [1f32; 4], ReduceOp::Sum)
}

/// Rank 1 waits for a message of rank 2, which sends it when the test says so.
fn message() -> phalanx::Result<()> {
    let group = phalanx::init()?;
    match group.rank().get() {
        1 => group.recv(&mut [0u8], Rank::new(2))?,
        2 => await_word().and_then(|()| group.send(&[7u8], Rank::new(1)))?,
        _ => {}
    }
    group.barrier()
}

fn await_word() -> phalanx::Result<()> {
    let port = std::env::var("MASTER_PORT").unwrap();
    let store = TcpStore::connect(format!("127.0.0.1:{port}"), Deadline::after(LIMIT))?;
    store.wait(&["word"], Deadline::after(LIMIT * 10))
}

/// Each rank in turn takes long, in sections of which the others know.
fn announced() -> phalanx::Result<()> {
    let group = phalanx::init()?;
    group.main_process_first(|| {
        std::thread::sleep(LATE_RANK_DELAY);
        Ok(())
    })?;
    group.barrier()?;
    let folder = std::env::var("FOLDER").unwrap();
    save(&group, &folder)
}

fn save(group: &ProcessGroup, folder: &str) -> phalanx::Result<()> {
    let checkpoints = Checkpoints::open(folder, group)?;
    checkpoints.save(1, |snapshot| {
        std::thread::sleep(LATE_RANK_DELAY);
        snapshot.value("step", &1)
    })?;
    group.barrier()
}

fn a_call_that_waits_for_long_says_for_whom() {
    let late = "all_reduce(sum, 4 x f32) #1";
    let last = "it is in no call of this group; its last was #0";
    for (scenario, call, awaited, transport) in [
        ("late", late, last, "shm"),
        ("late", late, last, "tcp"),
        ("message", "barrier #0", "it is in recv from rank 2", "shm"),
    ] {
        let mut world =
            World::start(&format!("waits::{scenario}"), 3, false, &[("PHALANX_TRANSPORT", transport)]);
        // Both ranks say it, each in its own time; one that is let go before says nothing more.
        let mut says = |rank: usize, expected: &str| {
            let mut errors = world.ranks[rank].stderr.take().map(BufReader::new).unwrap();
            let mut said = String::new();
            while !said.contains(expected) {
                let count = errors.read_line(&mut said).unwrap();
                assert!(count > 0, "{scenario} over {transport}: rank {rank} has ended, and said {said:?}");
            }
            (errors, said)
        };
        let (mut errors, mut said) = says(0, "rank 1 (");
        let (mut errors_of_1, mut said_by_1) = says(1, "for this rank");
        let store = TcpStore::connect(format!("127.0.0.1:{}", world.port), Deadline::after(LIMIT)).unwrap();
        store.set("word", b"go on", Deadline::after(LIMIT)).unwrap();
        let (outcomes, _) = world.end_within(LIMIT);
        errors.read_to_string(&mut said).unwrap();
        errors_of_1.read_to_string(&mut said_by_1).unwrap();
        let context = format!("{scenario} over {transport}: {said} {said_by_1} {outcomes:?}");
        assert!(outcomes.iter().all(|(code, _)| *code == Some(0)), "{context}");
        assert!(
            said.contains(" has waited for 5 s in ") && said.contains(&format!(" in {call} for rank 1 (")),
            "{context}"
        );
        assert!(said.contains(awaited), "{context}");
        assert!(said_by_1.contains(&format!(" in {call} for this rank, rank 1 (")), "{context}");
        assert!(said_by_1.contains(awaited), "{context}");
    }
}

fn what_takes_long_as_announced_is_not_reported() {
    let folder = tempfile::tempdir().unwrap();
    let variables = [("FOLDER", folder.path().to_str().unwrap())];
    let world = World::start("waits::announced", 2, false, &variables);
    let (outcomes, _) = world.end_within(LIMIT * 5);
    for (code, said) in outcomes {
        // On a slow machine a rank may say at the start for whom it waits.
        let is_of_the_start = |line: &str| {
            line.contains(" waits for the others: ") || line.contains(" waits for the store at ")
        };
        let said: Vec<&str> = said.lines().filter(|line| !is_of_the_start(line)).collect();
        assert!(code == Some(0) && said.is_empty(), "{code:?} {said:?}");
    }
}
