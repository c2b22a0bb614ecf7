//! Checkpoints of real processes: killed at any moment, on a full disk, and of several ranks.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use phalanx::checkpoint::{Checkpoints, Saved, Snapshot};
use phalanx::testing::{Fabric, run};
use phalanx::{DType, Error, ProcessGroup};

use crate::harness::ROLE;

const FOLDER: &str = "PHALANX_TEST_FOLDER";
const LIMIT: Duration = Duration::from_secs(30);
/// A checkpoint of the tests takes a little more than this many bytes.
const BYTES: usize = 400 << 10;

pub const TESTS: &[(&str, fn())] = &[
    (
        "a_writer_that_is_killed_at_any_moment_loses_nothing",
        a_writer_that_is_killed_at_any_moment_loses_nothing,
    ),
    ("a_disk_without_room_is_said_and_loses_nothing", a_disk_without_room_is_said_and_loses_nothing),
    ("every_rank_gets_what_rank_0_has_saved", every_rank_gets_what_rank_0_has_saved),
    ("all_ranks_hear_why_rank_0_cannot", all_ranks_hear_why_rank_0_cannot),
    ("ranks_do_not_begin_anew_beside_damaged_ones", ranks_do_not_begin_anew_beside_damaged_ones),
    ("old_ones_go_and_torn_ones_are_named", old_ones_go_and_torn_ones_are_named),
    ("going_back_makes_newer_ones", going_back_makes_newer_ones),
    ("two_jobs_do_not_share_a_folder", two_jobs_do_not_share_a_folder),
    ("opening_anew_hands_over_what_is_in_flight", opening_anew_hands_over_what_is_in_flight),
    ("what_fails_while_filling_writes_nothing", what_fails_while_filling_writes_nothing),
    ("a_panic_in_lent_memory_is_an_error", a_panic_in_lent_memory_is_an_error),
    ("a_save_says_that_it_waits_for_the_one_before", a_save_says_that_it_waits_for_the_one_before),
    (
        "a_program_without_a_subscriber_hears_of_what_is_passed_over",
        a_program_without_a_subscriber_hears_of_what_is_passed_over,
    ),
];

/// It mounts a small file system.
pub const PRIVILEGED: &[(&str, fn())] =
    &[("a_full_file_system_is_said_and_loses_nothing", a_full_file_system_is_said_and_loses_nothing)];

/// What this program does as one that saves.
pub fn play(scenario: &str) {
    let folder = std::env::var(FOLDER).unwrap();
    match scenario {
        "save" => save_for_ever(folder.as_ref()),
        "newest" => eprintln!("{}", alone(folder.as_ref()).newest().unwrap_err()),
        "full" => save_until_full(folder.as_ref()),
        "slow" => save_to_a_slow_disk(folder.as_ref()),
        other => panic!("no scenario {other}"),
    }
}

fn alone(folder: &Path) -> Checkpoints {
    Checkpoints::open(folder, &ProcessGroup::alone().unwrap()).unwrap()
}

fn save(checkpoints: &Checkpoints, step: u64) -> phalanx::Result<()> {
    checkpoints.save(step, |snapshot| {
        snapshot.tensor("weights", &[BYTES / 8], &vec![step as f32; BYTES / 8])?;
        snapshot.part("optimizer", vec![step as u8; BYTES / 2])?;
        snapshot.value("step", &step)
    })
}

/// Checks every byte; gives the step.
fn check(saved: &Saved) -> u64 {
    let step = saved.step();
    assert!(saved.tensor("weights").unwrap().to_vec::<f32>().unwrap() == vec![step as f32; BYTES / 8]);
    assert!(saved.part("optimizer").unwrap() == vec![step as u8; BYTES / 2]);
    assert_eq!(saved.value::<u64>("step").unwrap(), step);
    step
}

/// Goes on from the newest, and says which steps are safe, until it is killed.
fn save_for_ever(folder: &Path) {
    let checkpoints = alone(folder).keep(2);
    let start = checkpoints.newest().unwrap().map_or(0, |saved| check(&saved));
    for step in start + 1.. {
        save(&checkpoints, step).unwrap();
        checkpoints.finish().unwrap();
        println!("{step}");
    }
}

/// Saves until something does not fit, and says what.
fn save_until_full(folder: &Path) {
    let checkpoints = alone(folder).keep(100);
    let failed = (1..=100).find_map(|step| {
        let outcome = save(&checkpoints, step).and_then(|()| checkpoints.finish());
        outcome.err()
    });
    println!("{}", failed.unwrap());
}

/// Memory that another thread can read when standard input has ended.
struct Awaited(std::thread::ThreadId);

impl AsRef<[u8]> for Awaited {
    fn as_ref(&self) -> &[u8] {
        if std::thread::current().id() != self.0 {
            std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
        }
        &[0; 4]
    }
}

/// Saves twice; the first one takes until standard input has ended.
fn save_to_a_slow_disk(folder: &Path) {
    let checkpoints = alone(folder);
    let lent = Awaited(std::thread::current().id());
    checkpoints.save(1, |snapshot| snapshot.tensor_bytes("lent", DType::F32, &[1], lent)).unwrap();
    save(&checkpoints, 2).unwrap();
    checkpoints.finish().unwrap();
}

/// This program as `scenario`, behind `wrapper`, a shell command that ends in `exec "$@"`, if one is needed.
fn start(scenario: &str, folder: &Path, wrapper: Option<&str>) -> Child {
    let program = std::env::current_exe().unwrap();
    let mut command = match wrapper {
        None => Command::new(program),
        Some(wrapper) => {
            let mut command = Command::new("sh");
            command.args(["-c", wrapper, "sh"]).arg(program);
            command
        }
    };
    command
        .env(ROLE, format!("checkpoints::{scenario}"))
        .env(FOLDER, folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command.spawn().unwrap()
}

fn a_writer_that_is_killed_at_any_moment_loses_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut kept = 0;
    let mut random = 1u64;
    for life in 0..40 {
        let mut child = start("save", folder.path(), None);
        let mut lines = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        // Its first word, and then up to some moment within the next saves.
        lines.read_line(&mut line).unwrap();
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        std::thread::sleep(Duration::from_micros((random >> 33) % 20_000));
        child.kill().unwrap();
        lines.read_to_string(&mut line).unwrap();
        let end = child.wait_with_output().unwrap();
        // A line that the kill has cut short says nothing.
        let safe = line.rsplit_once('\n').and_then(|(whole, _)| whole.lines().last());
        let safe: u64 =
            safe.unwrap_or_else(|| panic!("{}", String::from_utf8_lossy(&end.stderr))).parse().unwrap();
        let checkpoints = alone(folder.path());
        let step = check(&checkpoints.newest().unwrap().unwrap());
        assert!(safe > kept && step >= safe && step <= safe + 1, "life {life}: {kept}, {safe}, {step}");
        assert!(checkpoints.skipped().is_empty(), "{:?}", checkpoints.skipped());
        kept = step;
    }
}

/// Runs `save_until_full` behind `wrapper`; what it has said, which must name no room.
fn fill(folder: &Path, wrapper: &str) -> String {
    let mut child = start("full", folder, Some(wrapper));
    let deadline = Instant::now() + LIMIT;
    while child.try_wait().unwrap().is_none() {
        assert!(Instant::now() < deadline, "it hangs");
        std::thread::sleep(Duration::from_millis(2));
    }
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn a_disk_without_room_is_said_and_loses_nothing() {
    let folder = tempfile::tempdir().unwrap();
    save(&alone(folder.path()), 7).unwrap();
    // Files may have half of what they need. By default a signal comes with it that ends the process.
    let said = fill(folder.path(), &format!("ulimit -f {}; exec \"$@\"", BYTES / 4 / 512));
    assert!(
        said.contains("cannot write the checkpoint of step 1 to ") && said.contains("ulimit -f"),
        "{said}"
    );
    let checkpoints = alone(folder.path());
    assert_eq!(check(&checkpoints.newest().unwrap().unwrap()), 7);
    assert!(checkpoints.skipped().is_empty());
}

fn a_full_file_system_is_said_and_loses_nothing() {
    // A file system of 1 MiB, in a mount namespace of its own.
    let folder = tempfile::tempdir().unwrap();
    let mount =
        "mount -t tmpfs -o size=1m tmpfs \"$PHALANX_TEST_FOLDER\" && mkdir \"$PHALANX_TEST_FOLDER/kept\"";
    // The newest is looked for where it was written: the file system goes with its namespace.
    let script = format!("unshare -m sh -c '{mount} && \"$@\" && ls \"$PHALANX_TEST_FOLDER\"' sh \"$@\"");
    let said = fill(folder.path(), &script);
    assert!(
        said.contains("cannot write the checkpoint of step 3 to ") && said.contains("make room"),
        "{said}"
    );
    let (_, left) = said.split_once('\n').unwrap();
    assert_eq!(left, "00000001-step-1\n00000002-step-2\nkept\n");
}

fn every_rank_gets_what_rank_0_has_saved() {
    for fabric in Fabric::ALL {
        for world in [1, 2, 3] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("runs/digits");
            run(world, fabric, |group| {
                let rank = group.rank().get();
                let checkpoints = Checkpoints::open(&path, &group).unwrap();
                assert!(checkpoints.newest().unwrap().is_none());
                let filled = std::cell::Cell::new(false);
                for step in [10, 20] {
                    let outcome = checkpoints.save(step, |snapshot| {
                        filled.set(true);
                        snapshot.tensor("own", &[2], &[rank as i32, step as i32])?;
                        snapshot.tensor_bytes("lent", DType::BF16, &[1, 2], vec![1u8, 2, 3, 4])?;
                        snapshot.value("state", &(step, vec![0.1f64, f64::NAN]))
                    });
                    outcome.unwrap();
                }
                assert_eq!(filled.get(), rank == 0);
                checkpoints.finish().unwrap();
                let saved = checkpoints.newest().unwrap().unwrap();
                assert_eq!((saved.step(), saved.world_size()), (20, world));
                assert_eq!(saved.tensor("own").unwrap().to_vec::<i32>().unwrap(), [0, 20]);
                let lent = saved.tensor("lent").unwrap();
                assert_eq!(
                    (lent.dtype(), lent.shape(), &*lent.bytes().unwrap()),
                    (DType::BF16, &[1, 2][..], &[1, 2, 3, 4][..])
                );
                let (step, numbers): (u64, Vec<f64>) = saved.value("state").unwrap();
                assert!(step == 20 && numbers[0].to_bits() == 0.1f64.to_bits() && numbers[1].is_nan());
                assert_eq!(saved.part_names().collect::<Vec<_>>(), ["state"]);
                let names: Vec<&str> = saved.tensors().map(|(name, _)| name).collect();
                assert_eq!(names, ["lent", "own"]);
                // The error says that a tensor is missing, or is something else.
                let error = saved.tensor("other").unwrap_err();
                assert!(error.is_mismatch() && error.to_string().contains("lent, own"), "{error}");
                assert!(saved.tensor("own").unwrap().to_vec::<f32>().unwrap_err().is_mismatch());
                assert!(saved.tensor("own").unwrap().copy_to(&mut [0i32; 3]).unwrap_err().is_mismatch());
                assert!(saved.value::<(u64, u64, u64, u64)>("state").unwrap_err().is_mismatch());
                assert!(saved.part("other").unwrap_err().is_mismatch());
            });
        }
    }
}

fn all_ranks_hear_why_rank_0_cannot() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a file");
    std::fs::write(&path, "not a folder").unwrap();
    let errors = run(3, Fabric::Tcp, |group| Checkpoints::open(&path, &group).unwrap_err());
    let is_told = |error: &Error| error.to_string().contains("a file") && error.remedy().is_some();
    assert!(errors.iter().all(is_told), "{errors:?}");
    assert!(errors[1].to_string().starts_with("rank 0 ("), "{errors:?}");
    // A later version's checkpoint is not silently replaced by an older one.
    let path = folder.path().join("later");
    save(&alone(&path), 1).unwrap();
    let manifest = path.join("00000001-step-1/manifest.json");
    let text = std::fs::read_to_string(&manifest).unwrap().replace("\"version\": 1", "\"version\": 3");
    std::fs::write(&manifest, text).unwrap();
    let errors = run(2, Fabric::Tcp, |group| Checkpoints::open(&path, &group).unwrap().newest().unwrap_err());
    assert!(errors.iter().all(|error| error.to_string().contains("version 3")), "{errors:?}");
}

fn ranks_do_not_begin_anew_beside_damaged_ones() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = alone(folder.path());
    save(&checkpoints, 1).unwrap();
    checkpoints.finish().unwrap();
    drop(checkpoints);
    std::fs::remove_file(folder.path().join("00000001-step-1/manifest.json")).unwrap();
    let errors =
        run(3, Fabric::Tcp, |group| Checkpoints::open(folder.path(), &group).unwrap().newest().unwrap_err());
    for error in errors {
        assert!(
            error.to_string().contains("the only checkpoint in ")
                && error.to_string().contains("00000001-step-1"),
            "{error}"
        );
    }
    assert_eq!(names(folder.path()), ["00000001-step-1"]);
}

fn names(folder: &Path) -> Vec<String> {
    let names =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| !name.starts_with('.')).collect();
    names.sort_unstable();
    names
}

fn old_ones_go_and_torn_ones_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = alone(folder.path()).keep(2);
    for step in [5, 6, 7, 8] {
        save(&checkpoints, step).unwrap();
    }
    checkpoints.finish().unwrap();
    assert_eq!(names(folder.path()), ["00000003-step-7", "00000004-step-8"]);
    let tensors = folder.path().join("00000004-step-8/tensors.safetensors");
    File::options().write(true).open(&tensors).unwrap().set_len(1000).unwrap();
    assert_eq!(check(&checkpoints.newest().unwrap().unwrap()), 7);
    let skipped = checkpoints.skipped();
    assert_eq!(skipped.len(), 1);
    assert!(
        skipped[0].folder.ends_with("00000004-step-8")
            && skipped[0].cause.contains("tensors.safetensors has 1000")
    );
    // A torn checkpoint does not count, and is removed with the old ones.
    save(&checkpoints, 9).unwrap();
    checkpoints.finish().unwrap();
    assert_eq!(names(folder.path()), ["00000003-step-7", "00000004-step-8", "00000005-step-9"]);
    save(&checkpoints, 10).unwrap();
    checkpoints.finish().unwrap();
    assert_eq!(names(folder.path()), ["00000005-step-9", "00000006-step-10"]);
}

fn going_back_makes_newer_ones() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = alone(folder.path());
    for step in [100, 50, 50] {
        save(&checkpoints, step).unwrap();
    }
    drop(checkpoints);
    let checkpoints = alone(folder.path());
    assert_eq!(check(&checkpoints.newest().unwrap().unwrap()), 50);
    assert_eq!(names(folder.path()), ["00000001-step-100", "00000002-step-50", "00000003-step-50"]);
}

fn two_jobs_do_not_share_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let mut other = start("save", folder.path(), None);
    let mut lines = BufReader::new(other.stdout.take().unwrap());
    lines.read_line(&mut String::new()).unwrap();
    let error = Checkpoints::open(folder.path(), &ProcessGroup::alone().unwrap()).unwrap_err();
    let named =
        format!("another process writes checkpoints to {}: process {}", folder.path().display(), other.id());
    assert!(error.is_environment() && error.to_string().contains(&named), "{error}");
    other.kill().unwrap();
    other.wait().unwrap();
    alone(folder.path());
}

fn opening_anew_hands_over_what_is_in_flight() {
    let folder = tempfile::tempdir().unwrap();
    let first = alone(folder.path());
    save(&first, 1).unwrap();
    // Under another name of the same folder, while that is written.
    let second = alone(&folder.path().join("."));
    assert_eq!(check(&second.newest().unwrap().unwrap()), 1);
    let error = save(&first, 2).unwrap_err();
    assert!(error.is_invalid_argument() && error.to_string().contains("opened anew"), "{error}");
    save(&second, 3).unwrap();
    drop(first);
    save(&second, 4).unwrap();
    drop(second);
    // Its thread has ended, or is about to.
    let third = alone(folder.path());
    save(&third, 5).unwrap();
    third.finish().unwrap();
    assert_eq!(names(folder.path()), ["00000002-step-3", "00000003-step-4", "00000004-step-5"]);
}

fn what_fails_while_filling_writes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = alone(folder.path());
    let error = checkpoints.save(1, |_| Err(Error::aborted("the loss is NaN"))).unwrap_err();
    assert!(error.is_aborted());
    // What one rank saves alone is whole.
    let slice = |snapshot: &mut Snapshot| snapshot.slice("w", &[4], &[0], &[2], &[1f32; 2]);
    let error = checkpoints.save(2, slice).unwrap_err();
    assert!(error.is_invalid_argument() && error.to_string().contains("w[0:2] is a slice"), "{error}");
    checkpoints.finish().unwrap();
    assert!(checkpoints.newest().unwrap().is_none());
}

/// Memory that cannot be read twice: once to check its length, and not again to write it.
struct Vanishing(std::cell::Cell<bool>);

impl AsRef<[u8]> for Vanishing {
    fn as_ref(&self) -> &[u8] {
        if self.0.replace(true) {
            std::panic::resume_unwind(Box::new("the memory has gone"));
        }
        &[0; 4]
    }
}

fn a_panic_in_lent_memory_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = alone(folder.path());
    let lend = checkpoints.save(1, |snapshot| {
        snapshot.tensor_bytes("lent", DType::F32, &[1], Vanishing(std::cell::Cell::new(false)))
    });
    lend.unwrap();
    let error = checkpoints.finish().unwrap_err();
    assert!(error.to_string().contains("panicked"), "{error}");
    // Nobody is left to write: that is said at once, and not waited for.
    assert!(save(&checkpoints, 2).unwrap_err().is_aborted());
    checkpoints.finish().unwrap();
}

fn a_save_says_that_it_waits_for_the_one_before() {
    let folder = tempfile::tempdir().unwrap();
    let mut slow = start("slow", folder.path(), None);
    let (input, lines) = (slow.stdin.take().unwrap(), BufReader::new(slow.stderr.take().unwrap()).lines());
    let (tell, told) = channel();
    std::thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| tell.send(line)));
    let said = told.recv_timeout(2 * LIMIT);
    drop(input);
    let ended = slow.wait().unwrap();
    let line = format!(
        "phalanx: warning: the checkpoint of step 1 is still being written to {}, and this rank waits for that (",
        folder.path().display()
    );
    assert!(said.as_ref().is_ok_and(|said| said.starts_with(&line)), "{said:?}");
    assert!(ended.success(), "{:?}", told.iter().collect::<Vec<_>>());
    assert_eq!(names(folder.path()), ["00000001-step-1", "00000002-step-2"]);
}

fn a_program_without_a_subscriber_hears_of_what_is_passed_over() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = alone(folder.path()).keep(3);
    for step in 1..=3 {
        save(&checkpoints, step).unwrap();
        checkpoints.finish().unwrap();
    }
    drop(checkpoints);
    let damaged = std::fs::read_dir(folder.path()).unwrap().filter_map(|entry| {
        let folder = entry.unwrap().path();
        let largest = std::fs::read_dir(&folder)
            .ok()?
            .map(|file| file.unwrap())
            .max_by_key(|file| file.metadata().unwrap().len())?;
        let file = std::fs::OpenOptions::new().write(true).open(largest.path()).unwrap();
        file.set_len(largest.metadata().unwrap().len() / 2).unwrap();
        Some(folder)
    });
    let damaged: Vec<PathBuf> = damaged.collect();
    assert_eq!(damaged.len(), 3);
    let end = start("newest", folder.path(), None).wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&end.stderr);
    assert!(end.status.success(), "{said}");
    for folder in &damaged {
        let line =
            format!("phalanx: warning: the checkpoint {} is incomplete and is skipped: ", folder.display());
        assert_eq!(said.matches(&line).count(), 1, "{said}");
    }
    assert!(said.contains("all 3 checkpoints in "), "{said}");
}
