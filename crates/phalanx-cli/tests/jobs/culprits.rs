//! Which rank `phalanx run` blames for the end of a job, of programs that call `init` and nothing else of a launcher.

use std::error::Error;
use std::panic;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use phalanx::ReduceOp;
use phalanx::checkpoint::Checkpoints;

use crate::ROLE;
use crate::support::{bare, output, text};

/// How rank `CULPRIT` ends, and whether the others unwrap the error that they see.
const CULPRIT: &str = "TEST_CULPRIT";
const HOW: &str = "TEST_HOW";
const UNWRAPS: &str = "TEST_UNWRAPS";

pub const TESTS: &[(&str, fn())] = &[
    ("a_panic_an_error_and_an_abort_are_blamed_on_the_rank_that_had_it", blamed),
    ("a_peers_end_that_a_rank_has_outlived_is_not_its_own_failure", outlived),
    ("a_peers_error_that_a_rank_has_outlived_is_not_blamed_for_its_own", outlived_error),
    ("a_panic_that_was_caught_is_not_reported_for_a_later_one", caught),
];

/// What this program does as a worker, and as a `main` that returns an error does.
pub fn work() {
    if let Err(error) = train() {
        eprintln!("Error: {error}");
        std::process::exit(1);
    }
}

fn train() -> Result<(), Box<dyn Error>> {
    let (culprit, how) = (std::env::var(CULPRIT)?, std::env::var(HOW)?);
    let is_culprit = std::env::var("RANK")? == culprit;
    // Who causes the end is the last to come to its own.
    let _late = (is_culprit && how == "told").then_some(Late);
    let group = phalanx::init()?;
    if how == "told" {
        // An error of rank 0, of which the other hears.
        let opened = Checkpoints::open("/proc/no/such/folder", &group);
        assert!(opened.is_err());
    }
    if how == "caught" {
        let caught = panic::catch_unwind(|| panic!("out of luck"));
        assert!(caught.is_err());
    }
    let mut data = vec![1.0_f32; 1000];
    for step in 0.. {
        if is_culprit && step == 5 {
            match how.as_str() {
                "panic" | "told" => panic!("no such sample"),
                // As of a program that ends itself, without a word for its launcher.
                "caught" => std::process::exit(101),
                "error" => return Err("no data".into()),
                "abort" => std::process::abort(),
                "leave" => return Ok(()),
                other => panic!("no way {other}"),
            }
        }
        let outcome = group.all_reduce(&mut data, ReduceOp::Avg);
        if how == "leave" && outcome.is_err() {
            std::process::exit(3);
        }
        match std::env::var_os(UNWRAPS) {
            Some(_) => outcome.unwrap(),
            None => outcome?,
        }
    }
    Ok(())
}

/// Takes its time when it is dropped.
struct Late;

impl Drop for Late {
    fn drop(&mut self) {
        thread::sleep(Duration::from_millis(500));
    }
}

/// Standard error and the exit code of a job whose rank `culprit` ends so.
fn run(world: usize, culprit: usize, how: &str, unwraps: bool) -> (String, Option<i32>) {
    let mut command = bare();
    command.args(["--nproc-per-node", &world.to_string(), "--"]).arg(std::env::current_exe().unwrap());
    command.env(ROLE, "culprits").env(CULPRIT, culprit.to_string()).env(HOW, how).env("RUST_BACKTRACE", "0");
    if unwraps {
        command.env(UNWRAPS, "1");
    }
    let output = output(command);
    (text(&output.stderr), output.status.code())
}

fn blamed() {
    let runs =
        [(2, 40), (4, 20)].into_iter().flat_map(|(world, runs)| (0..runs).map(move |run| (world, run)));
    for (index, (world, number)) in runs.enumerate() {
        let (how, code) = [("panic", 101), ("error", 1), ("panic", 101), ("abort", 134)][number % 4];
        let culprit = number % world;
        // Every other run with busy processors.
        let (err, ended) = if index % 2 == 0 {
            run(world, culprit, how, number % 3 == 0)
        } else {
            beside_busy_loops(|| run(world, culprit, how, number % 3 == 0))
        };
        let (_, report) = err.split_once("The first failure").unwrap();
        let rank = format!("rank    {culprit} of {world}");
        assert!(report.contains(&rank) && ended == Some(code), "{how} of rank {culprit}: {ended:?} {err}");
        if how == "panic" {
            assert_eq!(report.matches("no such sample").count(), 1, "{err}");
            assert_eq!(report.matches("culprits.rs:").count(), 1, "{err}");
            assert!(report.contains("error   panicked at "), "{err}");
        }
    }
}

fn beside_busy_loops<T>(run: impl FnOnce() -> T) -> T {
    /// The loops end also if `run` panics.
    struct Over<'a>(&'a AtomicBool);
    impl Drop for Over<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let _over = Over(&over);
        for _ in 0..thread::available_parallelism().map_or(2, usize::from) {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        run()
    })
}

fn outlived() {
    let (err, code) = run(2, 1, "leave", false);
    let (_, report) = err.split_once("The first failure").unwrap();
    assert!(report.contains("rank    0 of 2") && code == Some(3), "{err}");
    assert!(!report.contains("left the group"), "{err}");
}

/// Both have heard of the other's failure: rank 1 of one that has not ended it, long ago.
fn outlived_error() {
    let (err, code) = run(2, 1, "told", false);
    let (_, report) = err.split_once("The first failure").unwrap();
    assert!(report.contains("rank    1 of 2") && code == Some(101), "{err}");
    assert!(report.contains("no such sample"), "{err}");
}

fn caught() {
    let (err, code) = run(2, 1, "caught", false);
    let (_, report) = err.split_once("The first failure").unwrap();
    assert!(report.contains("rank    1 of 2") && code == Some(101), "{err}");
    assert!(!report.contains("error   panicked at "), "{err}");
}
