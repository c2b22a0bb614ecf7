//! Checkpoints of which every rank writes a part: read by any number of ranks, refused where they make no whole, and of processes
//! that are killed, or have no room, while they write.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use phalanx::checkpoint::{Checkpoints, Saved, Snapshot};
use phalanx::store::TcpStoreServer;
use phalanx::testing::{Fabric, run};
use phalanx::{DType, Error, ProcessGroup, Result};
use rustix::process::{Resource, Rlimit, Signal, getpid, kill_process, setrlimit};

use crate::support::world::{LIMIT, Place, World};

const FOLDER: &str = "PHALANX_TEST_FOLDER";
/// The rank that does not end a write.
const HELD: &str = "PHALANX_TEST_HELD";
/// A rank's part of a processes' checkpoint takes about this many bytes.
const BYTES: usize = 2 << 20;

pub const TESTS: &[(&str, fn())] = &[
    ("any_number_of_ranks_reads_what_any_number_wrote", any_number_of_ranks_reads_what_any_number_wrote),
    ("what_makes_no_whole_is_refused_on_every_rank", what_makes_no_whole_is_refused_on_every_rank),
    ("a_damaged_or_missing_shard_is_passed_over_by_all", a_damaged_or_missing_shard_is_passed_over_by_all),
    ("ranks_that_see_different_folders_are_told", ranks_that_see_different_folders_are_told),
    ("ranks_without_a_file_of_their_own_look_too", ranks_without_a_file_of_their_own_look_too),
    ("a_slow_disk_is_no_failure_of_the_group", a_slow_disk_is_no_failure_of_the_group),
    ("a_panic_of_one_rank_s_thread_is_named_on_all", a_panic_of_one_rank_s_thread_is_named_on_all),
    (
        "who_looks_for_a_folder_hears_that_another_rank_has_failed",
        who_looks_for_a_folder_hears_that_another_rank_has_failed,
    ),
    ("both_kinds_go_into_one_folder_and_old_ones_go", both_kinds_go_into_one_folder_and_old_ones_go),
    ("the_program_s_collectives_go_on_meanwhile", the_program_s_collectives_go_on_meanwhile),
    ("a_rank_that_is_killed_while_it_writes_is_named", || a_rank_ends_while_it_writes("kill")),
    ("a_rank_without_room_is_named_on_all_and_they_go_on", || a_rank_ends_while_it_writes("full")),
    ("a_job_that_is_killed_at_any_moment_loses_nothing", a_job_that_is_killed_at_any_moment_loses_nothing),
];

/// What this program does as a rank.
pub fn play(scenario: &str) {
    let outcome = match scenario {
        "save" => save_for_ever(),
        "kill" | "full" => save_thrice(scenario),
        other => panic!("no scenario {other}"),
    };
    if let Err(error) = outcome {
        eprintln!("{error}");
        std::process::exit(1);
    }
}

fn alone(folder: &Path) -> Checkpoints {
    Checkpoints::open(folder, &ProcessGroup::alone().unwrap()).unwrap()
}

/// The part of `whole` that a rank has: as even as whole things allow.
fn share(whole: usize, rank: usize, world: usize) -> (usize, usize) {
    let (from, to) = (whole * rank / world, whole * (rank + 1) / world);
    (from, to - from)
}

/// An element of a tensor of `side` x `side`.
fn element(side: usize, row: usize, column: usize) -> f32 {
    (row * side + column) as f32 + 0.5
}

fn block(side: usize, (row, rows): (usize, usize), (column, columns): (usize, usize)) -> Vec<f32> {
    (row..row + rows)
        .flat_map(|row| (column..column + columns).map(move |column| element(side, row, column)))
        .collect()
}

/// The state of a rank: rows, columns and two blocks of matrices, some of them empty, and whole tensors that go round.
fn fill(snapshot: &mut Snapshot, rank: usize, world: usize) -> Result<()> {
    const SIDE: usize = 7;
    let (whole, (from, length)) = ((0, SIDE), share(SIDE, rank, world));
    snapshot.slice(
        "rows",
        &[SIDE, SIDE],
        &[from, 0],
        &[length, SIDE],
        &block(SIDE, (from, length), whole),
    )?;
    snapshot.slice(
        "columns",
        &[SIDE, SIDE],
        &[0, from],
        &[SIDE, length],
        &block(SIDE, whole, (from, length)),
    )?;
    let (few, some) = share(3, rank, world);
    snapshot.slice("few", &[3], &[few], &[some], &vec![rank as u8; some])?;
    // The upper and the lower half of this rank's columns apart.
    for (row, rows) in [(0, 3), (3, 4)] {
        let elements = block(SIDE, (row, rows), (from, length));
        snapshot.slice("blocks", &[SIDE, SIDE], &[row, from], &[rows, length], &elements)?;
    }
    for number in (0..5).filter(|number| number % world == rank) {
        snapshot.tensor(&format!("layer{number}.weight"), &[2, 1], &[number as i64, -1])?;
    }
    if rank == 0 {
        snapshot.tensor("scalar", &[], &[0.1f64])?;
        snapshot.value("epoch", &7u64)?;
    }
    snapshot.part(&format!("random-{rank}"), vec![rank as u8; rank])
}

fn check(saved: &Saved, by: usize, rank: usize, world: usize) {
    const SIDE: usize = 7;
    for name in ["rows", "columns", "blocks"] {
        let tensor = saved.tensor(name).unwrap();
        assert_eq!((tensor.dtype(), tensor.shape()), (DType::F32, &[SIDE, SIDE][..]));
        assert_eq!(tensor.to_vec::<f32>().unwrap(), block(SIDE, (0, SIDE), (0, SIDE)), "{name}");
        // What this rank would need of it, by rows, and a part of that.
        let (from, length) = share(SIDE, rank, world);
        let own = tensor.slice(&[from, 0], &[length, SIDE]).unwrap();
        assert_eq!(own.to_vec::<f32>().unwrap(), block(SIDE, (from, length), (0, SIDE)), "{name}");
        let inner = own.slice(&[0, 2], &[length, 4]).unwrap();
        assert_eq!(inner.to_vec::<f32>().unwrap(), block(SIDE, (from, length), (2, 4)), "{name}");
        assert!(own.slice(&[0, 4], &[length, 4]).unwrap_err().is_invalid_argument());
    }
    let few = saved.tensor("few").unwrap().to_vec::<u8>().unwrap();
    let expected: Vec<u8> = (0..by).flat_map(|rank| vec![rank as u8; share(3, rank, by).1]).collect();
    assert_eq!(few, expected);
    for number in 0..5i64 {
        let layer = saved.tensor(&format!("layer{number}.weight")).unwrap();
        assert_eq!((layer.shape(), layer.to_vec::<i64>().unwrap()), (&[2, 1][..], vec![number, -1]));
    }
    assert_eq!(saved.tensor("scalar").unwrap().to_vec::<f64>().unwrap()[0].to_bits(), 0.1f64.to_bits());
    assert_eq!((saved.value::<u64>("epoch").unwrap(), saved.world_size()), (7, by as u32));
    for rank in 0..by {
        assert_eq!(saved.part(&format!("random-{rank}")).unwrap(), vec![rank as u8; rank]);
    }
    assert_eq!(saved.tensors().len(), 10);
    let error = saved.tensor("rows").unwrap().to_vec::<f64>().unwrap_err();
    assert!(error.is_mismatch(), "{error}");
}

fn any_number_of_ranks_reads_what_any_number_wrote() {
    for by in 1..=4u32 {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("runs/sharded");
        let fabric = Fabric::ALL[by as usize % 4];
        run(by, fabric, |group| {
            let checkpoints = Checkpoints::open(&path, &group).unwrap();
            let rank = group.rank().index();
            checkpoints.save_sharded(100, |snapshot| fill(snapshot, rank, by as usize)).unwrap();
            checkpoints.finish().unwrap();
            check(&checkpoints.newest().unwrap().unwrap(), by as usize, rank, by as usize);
        });
        for world in 1..=4 {
            run(world, Fabric::InProcess, |group| {
                let saved = Checkpoints::open(&path, &group).unwrap().newest().unwrap().unwrap();
                assert_eq!(saved.step(), 100);
                check(&saved, by as usize, group.rank().index(), world as usize);
            });
        }
    }
}

/// Every rank's error of a save that all refuse.
fn refused(path: &Path, fill: impl Fn(&mut Snapshot, usize) -> Result<()> + Sync) -> Vec<Error> {
    run(3, Fabric::Tcp, |group| {
        let checkpoints = Checkpoints::open(path, &group).unwrap();
        let rank = group.rank().index();
        let error = checkpoints.save_sharded(1, |snapshot| fill(snapshot, rank)).unwrap_err();
        // Nothing is written, nothing has failed, and the next one is sound.
        checkpoints.finish().unwrap();
        assert!(checkpoints.newest().unwrap().is_none());
        checkpoints.save_sharded(2, |snapshot| self::fill(snapshot, rank, 3)).unwrap();
        checkpoints.finish().unwrap();
        check(&checkpoints.newest().unwrap().unwrap(), 3, rank, 3);
        error
    })
}

fn what_makes_no_whole_is_refused_on_every_rank() {
    let in_folder = |fill: &(dyn Fn(&mut Snapshot, usize) -> Result<()> + Sync), said: &[&str]| {
        let folder = tempfile::tempdir().unwrap();
        for error in refused(folder.path(), fill) {
            assert!(said.iter().all(|said| error.to_string().contains(said)), "{error}");
        }
    };
    let rows = |snapshot: &mut Snapshot, from: usize, length: usize| {
        snapshot.slice("w", &[9, 2], &[from, 0], &[length, 2], &vec![1f32; length * 2])
    };
    in_folder(
        &|snapshot, rank| rows(snapshot, rank * 2, 4),
        &["\"w\"", "rank 0 has [0:4, 0:2], and rank 1 has [2:6, 0:2]"],
    );
    in_folder(
        &|snapshot, rank| rows(snapshot, rank * 3, 3 - rank % 2),
        &["\"w\"", "2 of 18 elements", "rank 1 has [3:5, 0:2]"],
    );
    in_folder(&|snapshot, _| snapshot.tensor("w", &[1], &[1f32]), &["\"w\"", "rank 0 has", "rank 1 has"]);
    in_folder(
        &|snapshot, _| snapshot.part("random", [1]),
        &["the part \"random\" is saved twice: by rank 0, and by rank 1"],
    );
    in_folder(
        &|snapshot, rank| match rank {
            0 => snapshot.tensor("w", &[2], &[1f32; 2]),
            _ => snapshot.tensor("w", &[2], &[1i32; 2]),
        },
        &["is f32 [2] on rank 0, and i32 [2] on rank 1"],
    );
    in_folder(
        &|_, rank| if rank == 2 { Err(Error::aborted("the loss is NaN")) } else { Ok(()) },
        &["the loss is NaN"],
    );
    let folder = tempfile::tempdir().unwrap();
    let errors = run(2, Fabric::InProcess, |group| {
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        let step = u64::from(group.rank().get());
        let error = checkpoints.save_sharded(step, |_| Ok(())).unwrap_err();
        if group.rank().is_main() {
            let slice = |snapshot: &mut Snapshot| snapshot.slice("w", &[2], &[0], &[2], &[1f32; 2]);
            assert!(checkpoints.save(3, slice).unwrap_err().is_invalid_argument());
        }
        error
    });
    assert!(errors.iter().all(|error| error.is_mismatch() && error.to_string().contains("rank 1 step 1")));
}

/// Three checkpoints of three ranks.
fn thrice(path: &Path) {
    run(3, Fabric::InProcess, |group| {
        let checkpoints = Checkpoints::open(path, &group).unwrap();
        for step in 1..=3 {
            checkpoints.save_sharded(step, |snapshot| fill(snapshot, group.rank().index(), 3)).unwrap();
        }
        checkpoints.finish().unwrap();
    });
}

fn a_damaged_or_missing_shard_is_passed_over_by_all() {
    let folder = tempfile::tempdir().unwrap();
    thrice(folder.path());
    // One bit of the last, which no length betrays, and a file of the one before.
    let damaged = folder.path().join("00000003-step-3/rank-00002-of-00003.safetensors");
    let mut bytes = std::fs::read(&damaged).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&damaged, bytes).unwrap();
    std::fs::remove_file(folder.path().join("00000002-step-2/rank-00001-of-00003.safetensors")).unwrap();
    for world in 1..=4 {
        run(world, Fabric::InProcess, |group| {
            let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
            let saved = checkpoints.newest().unwrap().unwrap();
            assert_eq!(saved.step(), 1);
            check(&saved, 3, group.rank().index(), world as usize);
            let causes: Vec<String> =
                checkpoints.skipped().into_iter().map(|skipped| skipped.cause).collect();
            assert_eq!(
                causes,
                [
                    "the checksum of rank-00002-of-00003.safetensors is wrong",
                    "rank-00001-of-00003.safetensors is missing"
                ]
            );
        });
    }
}

fn ranks_that_see_different_folders_are_told() {
    let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    thrice(folder.path());
    let start = Instant::now();
    let errors = run(2, Fabric::Tcp, |group| {
        let path = if group.rank().is_main() { folder.path() } else { other.path() };
        // Half of that is for rank 1 to look.
        let checkpoints = Checkpoints::open(path, &group).unwrap().with_timeout(LIMIT / 2);
        let unread = checkpoints.newest().unwrap_err();
        checkpoints.save_sharded(4, |snapshot| fill(snapshot, group.rank().index(), 2)).unwrap();
        let unwritten = checkpoints.finish().unwrap_err();
        [unread, unwritten]
    });
    assert!(start.elapsed() < LIMIT);
    for error in errors.into_iter().flatten() {
        let said = error.to_string();
        assert!(said.starts_with("rank 1 (") && said.contains("does not see"), "{said}");
        assert!(error.remedy().unwrap().contains("disk that all ranks share"), "{said}");
    }
    // Rank 0 has removed what it had begun; to open the folder removes it in any case.
    assert_nothing_begun(folder.path());
    assert_eq!(alone(folder.path()).newest().unwrap().unwrap().step(), 3);
}

fn ranks_without_a_file_of_their_own_look_too() {
    let (folder, other, empty) =
        (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    // One file of tensors, and another of the same name and length.
    for (path, element) in [(folder.path(), 1f32), (other.path(), 2f32)] {
        let checkpoints = alone(path);
        checkpoints.save_sharded(1, |snapshot| snapshot.tensor("w", &[4], &[element; 4])).unwrap();
        checkpoints.finish().unwrap();
    }
    for seen in [&other, &empty] {
        let errors = run(3, Fabric::InProcess, |group| {
            let path = if group.rank().index() == 2 { seen.path() } else { folder.path() };
            Checkpoints::open(path, &group).unwrap().newest().unwrap_err()
        });
        for error in errors {
            let said = error.to_string();
            assert!(said.starts_with("rank 2 (") && said.contains("does not see what rank 0 sees"), "{said}");
            assert!(error.remedy().unwrap().contains("disk that all ranks share"), "{said}");
        }
    }
    run(3, Fabric::InProcess, |group| {
        let saved = Checkpoints::open(folder.path(), &group).unwrap().newest().unwrap().unwrap();
        assert_eq!(saved.tensor("w").unwrap().to_vec::<f32>().unwrap(), [1.0; 4]);
    });
}

/// Memory that takes some time to read where it is written, as if the disk were slow.
struct Slow(std::thread::ThreadId, std::cell::Cell<Duration>);

impl AsRef<[u8]> for Slow {
    fn as_ref(&self) -> &[u8] {
        if std::thread::current().id() != self.0 {
            std::thread::sleep(self.1.take());
        }
        &[0; 4]
    }
}

fn a_slow_disk_is_no_failure_of_the_group() {
    let (short, long) = (Duration::from_secs(3), Duration::from_secs(7));
    let folder = tempfile::tempdir().unwrap();
    run(2, Fabric::Tcp, |group| {
        let checkpoints = Checkpoints::open(folder.path(), &group.with_timeout(short)).unwrap();
        let checkpoints = checkpoints.with_timeout(LIMIT);
        let save_slowly = |checkpoints: &Checkpoints, step| {
            let slow = Slow(std::thread::current().id(), std::cell::Cell::new(long));
            checkpoints.save(step, |snapshot| snapshot.tensor_bytes("slow", DType::F32, &[1], slow)).unwrap();
        };
        // Rank 0 waits for what it alone writes, and rank 1 for rank 0.
        save_slowly(&checkpoints, 1);
        checkpoints.save_sharded(2, |snapshot| fill(snapshot, group.rank().index(), 2)).unwrap();
        save_slowly(&checkpoints, 3);
        assert_eq!(checkpoints.newest().unwrap().unwrap().step(), 3);
        // No longer than it may: that is an error of the call, on both.
        let checkpoints = checkpoints.with_timeout(short / 3);
        save_slowly(&checkpoints, 4);
        let saved = checkpoints.save_sharded(5, |snapshot| fill(snapshot, group.rank().index(), 2));
        let error = saved.unwrap_err();
        assert!(error.to_string().contains("the checkpoint of step 4 is still being written"), "{error}");
        assert!(group.failure().is_none(), "{:?}", group.failure());
        group.barrier().unwrap();
    });
}

/// Nothing is left of what was not finished.
fn assert_nothing_begun(folder: &Path) {
    let names = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
    let begun: Vec<_> = names.filter(|name| name.to_string_lossy().starts_with(".writing")).collect();
    assert!(begun.is_empty(), "{begun:?}");
}

/// Memory that cannot be read where it is written.
struct Vanishing(std::thread::ThreadId);

impl AsRef<[u8]> for Vanishing {
    fn as_ref(&self) -> &[u8] {
        if std::thread::current().id() != self.0 {
            std::panic::resume_unwind(Box::new("the memory has gone"));
        }
        &[0; 4]
    }
}

fn a_panic_of_one_rank_s_thread_is_named_on_all() {
    for culprit in [0, 2] {
        let folder = tempfile::tempdir().unwrap();
        let start = Instant::now();
        let errors = run(3, Fabric::Tcp, |group| {
            let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
            let rank = group.rank().index();
            checkpoints.save_sharded(1, |snapshot| fill(snapshot, rank, 3)).unwrap();
            let saved = checkpoints.save_sharded(2, |snapshot| {
                let memory = Vanishing(std::thread::current().id());
                if rank == culprit { snapshot.tensor_bytes("lent", DType::F32, &[1], memory) } else { Ok(()) }
            });
            saved.unwrap();
            let error = checkpoints.finish().unwrap_err();
            // Nobody writes any more on one of them: all hear of it, and none waits.
            checkpoints.save_sharded(3, |snapshot| fill(snapshot, rank, 3)).unwrap_err();
            assert_eq!(checkpoints.newest().unwrap().unwrap().step(), 1);
            error
        });
        assert!(start.elapsed() < LIMIT);
        for error in errors {
            let said = error.to_string();
            assert!(said.starts_with(&format!("rank {culprit} (")) && said.contains("panicked"), "{said}");
        }
    }
}

fn who_looks_for_a_folder_hears_that_another_rank_has_failed() {
    let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let start = Instant::now();
    let errors = run(3, Fabric::Tcp, |group| {
        // Rank 1 will not see what rank 0 makes. By itself it would look for a minute.
        let rank = group.rank().index();
        let path = if rank == 1 { other.path() } else { folder.path() };
        let checkpoints = Checkpoints::open(path, &group).unwrap();
        let saved = checkpoints.save_sharded(1, |snapshot| {
            let memory = Vanishing(std::thread::current().id());
            if rank == 2 { snapshot.tensor_bytes("lent", DType::F32, &[1], memory) } else { Ok(()) }
        });
        saved.unwrap();
        checkpoints.finish().unwrap_err()
    });
    assert!(start.elapsed() < LIMIT);
    for error in errors {
        let said = error.to_string();
        assert!(said.starts_with("rank 2 (") && said.contains("panicked"), "{said}");
    }
}

fn both_kinds_go_into_one_folder_and_old_ones_go() {
    let folder = tempfile::tempdir().unwrap();
    run(2, Fabric::SharedMemory, |group| {
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap().keep(2);
        let rank = group.rank().index();
        for step in 1..=6 {
            match step % 2 {
                0 => checkpoints.save(step, |snapshot| snapshot.value("step", &step)).unwrap(),
                _ => checkpoints.save_sharded(step, |snapshot| fill(snapshot, rank, 2)).unwrap(),
            }
        }
        checkpoints.finish().unwrap();
        let saved = checkpoints.newest().unwrap().unwrap();
        assert_eq!(saved.value::<u64>("step").unwrap(), 6);
    });
    let mut names: Vec<String> = std::fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| !name.starts_with('.'))
        .collect();
    names.sort_unstable();
    assert_eq!(names, ["00000005-step-5", "00000006-step-6"]);
    let files = std::fs::read_dir(folder.path().join("00000005-step-5")).unwrap();
    let mut files: Vec<String> = files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
    files.sort_unstable();
    assert_eq!(
        files,
        [
            "epoch.part",
            "manifest.json",
            "random-0.part",
            "random-1.part",
            "rank-00000-of-00002.safetensors",
            "rank-00001-of-00002.safetensors"
        ]
    );
}

fn the_program_s_collectives_go_on_meanwhile() {
    let folder = tempfile::tempdir().unwrap();
    run(3, Fabric::TwoHosts, |group| {
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        let (rank, mut sum) = (group.rank().index(), [0i64; 64]);
        for step in 1..=20 {
            checkpoints.save_sharded(step, |snapshot| fill(snapshot, rank, 3)).unwrap();
            for _ in 0..rank + 10 {
                // As many on every rank, however far its thread has come.
                std::thread::yield_now();
            }
            sum.fill(1);
            group.all_reduce(&mut sum, phalanx::ReduceOp::Sum).unwrap();
            assert_eq!(sum, [3; 64]);
        }
        checkpoints.finish().unwrap();
        assert_eq!(checkpoints.newest().unwrap().unwrap().step(), 20);
    });
}

/// Where the processes of a test save.
fn folder() -> PathBuf {
    std::env::var_os(FOLDER).unwrap().into()
}

/// What happens to a process when a part of its file has been written.
#[derive(Clone, Copy)]
enum Fault {
    Kill,
    Hold,
}

/// A rank's elements, and what happens when the thread that writes takes them.
struct Lent {
    elements: Vec<u8>,
    caller: std::thread::ThreadId,
    rank: usize,
    fault: Option<Fault>,
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        if let Some(fault) = self.fault
            && std::thread::current().id() != self.caller
            && is_writing(&folder(), self.rank)
        {
            if let Fault::Kill = fault {
                kill_process(getpid(), Signal::KILL).unwrap();
            }
            loop {
                std::thread::park();
            }
        }
        &self.elements
    }
}

/// A rank's part of the state after `step` of a job of processes.
fn save(checkpoints: &Checkpoints, group: &ProcessGroup, step: u64, fault: Option<Fault>) -> Result<()> {
    let (rank, world) = (group.rank().index(), group.world_size().count());
    checkpoints.save_sharded(step, |snapshot| {
        let (elements, caller) = (vec![step as u8; BYTES], std::thread::current().id());
        let (place, lent) = ((&[rank, 0][..], &[1, BYTES][..]), Lent { elements, caller, rank, fault });
        snapshot.slice_bytes("weights", DType::U8, &[world, BYTES], place, lent)?;
        snapshot.value(&format!("step-{rank}"), &step)
    })
}

/// Checks every byte; gives the step.
fn check_all(saved: &Saved) -> u64 {
    let (step, world) = (saved.step(), saved.world_size() as usize);
    assert!(saved.tensor("weights").unwrap().to_vec::<u8>().unwrap() == vec![step as u8; world * BYTES]);
    for rank in 0..world {
        assert_eq!(saved.value::<u64>(&format!("step-{rank}")).unwrap(), step);
    }
    step
}

/// Saves three times; rank 1 meets its end in the second.
fn save_thrice(fault: &str) -> Result<()> {
    let group = phalanx::init()?.with_timeout(LIMIT);
    let checkpoints = Checkpoints::open(folder(), &group)?.with_timeout(LIMIT);
    save(&checkpoints, &group, 1, None)?;
    checkpoints.finish()?;
    let is_victim = group.rank().get() == 1;
    let limit = |current| setrlimit(Resource::Fsize, Rlimit { current, maximum: None }).unwrap();
    let kill = (is_victim && fault == "kill").then_some(Fault::Kill);
    if is_victim && fault == "full" {
        limit(Some(BYTES as u64 / 2));
    }
    group.barrier()?;
    let outcome = save(&checkpoints, &group, 2, kill).and_then(|()| checkpoints.finish());
    println!("{}", outcome.unwrap_err());
    if fault == "kill" {
        return Ok(());
    }
    limit(None);
    // They may go on: with the same group of threads, and in the same folder.
    save(&checkpoints, &group, 3, None)?;
    checkpoints.finish()
}

/// Whether this rank of three has begun to write a file that is not finished yet.
fn is_writing(runs: &Path, rank: usize) -> bool {
    let entries = std::fs::read_dir(runs).into_iter().flatten().flatten();
    let mut begun = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(".writing-"));
    begun.any(|entry| entry.path().join(format!("rank-{rank:05}-of-00003.safetensors")).exists())
}

fn a_rank_ends_while_it_writes(fault: &str) {
    let folder = tempfile::tempdir().unwrap();
    let server = TcpStoreServer::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let port = server.local_addr().port();
    let place = Place { address: "127.0.0.1", port, served_by_rank_0: false };
    let start = |rank| {
        let mut command = Command::new("sh");
        command.args(["-c", "exec \"$0\""]).arg(std::env::current_exe().unwrap());
        let variables = [(FOLDER, folder.path().to_str().unwrap())];
        place.rank(command, &format!("sharded::{fault}"), (rank, 3), &variables)
    };
    let mut world = World { ranks: (0..3).map(start).collect(), port, server: Some(server), held: None };
    world.await_all_but(&[]);
    for (rank, child) in std::mem::take(&mut world.ranks).into_iter().enumerate() {
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr);
        if fault == "kill" && rank == 1 {
            assert!(!output.status.success());
            continue;
        }
        assert!(output.status.success(), "rank {rank}: {said}{errors}");
        assert!(said.contains("rank 1"), "rank {rank}: {said}{errors}");
        if fault == "full" {
            assert!(
                said.contains("cannot write the checkpoint of step 2") && said.contains("ulimit -f"),
                "rank {rank}: {said}{errors}"
            );
        }
    }
    // Rank 0 has removed what it had begun. Where a rank has died, another may still have added to it: then `open` does.
    if fault == "full" {
        assert_nothing_begun(folder.path());
    }
    let checkpoints = alone(folder.path());
    let step = check_all(&checkpoints.newest().unwrap().unwrap());
    assert_eq!(step, if fault == "kill" { 1 } else { 3 });
    assert!(checkpoints.skipped().is_empty(), "{:?}", checkpoints.skipped());
    assert_nothing_begun(folder.path());
}

/// Goes on from the newest, and says which steps are safe, until it is killed. The rank that is told so never ends its third write.
fn save_for_ever() -> Result<()> {
    let group = phalanx::init()?.with_timeout(LIMIT);
    let checkpoints = Checkpoints::open(folder(), &group)?.keep(2).with_timeout(LIMIT);
    let start = checkpoints.newest()?.map_or(0, |saved| check_all(&saved));
    let held = std::env::var(HELD).is_ok_and(|rank| rank == group.rank().to_string());
    for step in start + 1.. {
        save(&checkpoints, &group, step, (held && step == start + 3).then_some(Fault::Hold))?;
        checkpoints.finish()?;
        println!("{step}");
    }
    Ok(())
}

fn a_job_that_is_killed_at_any_moment_loses_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (mut kept, mut random, mut half_done) = (0, 1u64, 0);
    for life in 0..15 {
        let path = folder.path().to_str().unwrap();
        // Every third time some rank is sure to have half a file, and rank 0, which would remove that, is killed first.
        let held = (life % 3 == 0).then_some(life / 3 % 3);
        let rank = held.map_or_else(String::new, |rank| rank.to_string());
        let mut world = World::start("sharded::save", 3, false, &[(FOLDER, path), (HELD, &rank)]);
        let mut lines = BufReader::new(world.ranks[0].stdout.take().unwrap());
        let mut line = String::new();
        lines.read_line(&mut line).unwrap();
        if let Some(rank) = held {
            lines.read_line(&mut line).unwrap();
            let start = Instant::now();
            while !is_writing(folder.path(), rank) {
                assert!(start.elapsed() < LIMIT, "rank {rank} writes nothing: {line}");
                std::thread::sleep(Duration::from_millis(1));
            }
        } else {
            // Up to some moment within the next saves; the ranks in some order.
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            std::thread::sleep(Duration::from_micros((random >> 33) % 30_000));
        }
        for rank in 0..3 {
            world.kill((rank + life) % 3);
        }
        world.await_all_but(&[]);
        lines.read_to_string(&mut line).unwrap();
        // A line that the kill has cut short says nothing.
        let safe = line.rsplit_once('\n').and_then(|(whole, _)| whole.lines().last());
        let safe: u64 = safe
            .unwrap_or_else(|| {
                let mut said = String::new();
                world.ranks[0].stderr.take().unwrap().read_to_string(&mut said).unwrap();
                panic!("{said}")
            })
            .parse()
            .unwrap();
        let begun = std::fs::read_dir(folder.path()).unwrap();
        let begun = begun
            .filter(|entry| entry.as_ref().unwrap().file_name().to_string_lossy().starts_with(".writing"))
            .count();
        assert!(held.is_none() || begun == 1, "life {life}: {begun} were half done");
        half_done += begun;
        let checkpoints = alone(folder.path());
        let step = check_all(&checkpoints.newest().unwrap().unwrap());
        assert!(safe > kept && step >= safe && step <= safe + 1, "life {life}: {kept}, {safe}, {step}");
        assert!(checkpoints.skipped().is_empty(), "{:?}", checkpoints.skipped());
        assert_nothing_begun(folder.path());
        kept = step;
    }
    assert!(half_done >= 5, "{half_done}");
    println!("{half_done} were half done");
}
