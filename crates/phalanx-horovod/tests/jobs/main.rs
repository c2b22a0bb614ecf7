//! Real processes: this program starts itself as the workers, so that it has a `main` of its own.
//! `cargo test -p phalanx-horovod --test jobs`
#![allow(clippy::unwrap_used, clippy::panic, reason = "it is a test, though it has no harness")]

mod elastic;
#[path = "../../../phalanx-core/tests/support/environment.rs"]
mod environment;
#[path = "../../../phalanx-core/tests/support/harness.rs"]
mod harness;
#[path = "../../../phalanx-core/tests/support/ranks.rs"]
mod ranks;

use std::path::Path;
use std::process::Output;
use std::time::{Duration, Instant};

use libtest_mimic::Arguments;
use phalanx_horovod::{Horovod, Op};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::ranks::Worker;

const WORLD: usize = 3;
/// No job takes longer, or it hangs.
const LIMIT: Duration = Duration::from_secs(120);
/// The folder in which workers say that they have come to the step in which one dies.
const HERE: &str = "PHALANX_TEST_HOROVOD_HERE";

const TESTS: &[(&str, fn())] = &[
    ("what_dies_or_fails_in_an_elastic_job_leaves_the_others_at_the_last_commit", elastic::the_others_go_on),
    ("a_process_that_dies_is_named_by_every_handle", a_process_dies),
    ("an_adasum_for_which_a_rank_has_no_memory_is_an_error_on_every_rank", no_memory),
    ("the_fusion_buffer_is_all_the_memory_that_is_added", memory),
    ("variables_reach_every_rank_and_bad_ones_are_named", variables),
];

fn main() {
    match harness::role().as_deref() {
        Some("elastic") => return elastic::work(),
        Some(role) => return work(role),
        None => {}
    }
    let trials = TESTS.iter().map(|(name, test)| harness::trial(*name, *test));
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit()
}

fn work(role: &str) {
    harness::abort_after(LIMIT);
    let hvd = match phalanx_horovod::init() {
        Ok(hvd) => hvd,
        Err(error) => return println!("init: {error}"),
    };
    match role {
        "options" => {
            let options = hvd.options();
            println!("{} {:?} {}", options.fusion_threshold, options.cycle_time, options.cache_capacity);
            hvd.barrier().unwrap();
        }
        "memory" => measure(&hvd),
        "narrow" => narrow(&hvd),
        _ => train(&hvd),
    }
}

fn train(hvd: &Horovod) {
    for step in 0.. {
        let submit = |index| hvd.allreduce_async(&format!("t{index}"), vec![1.0f32; 1000], Op::Sum);
        if step == 20 {
            // Not before the others have what they waited for in the step before.
            let folder = std::env::var(HERE).unwrap();
            std::fs::write(Path::new(&folder).join(hvd.rank().to_string()), "").unwrap();
            if hvd.rank().get() == 1 {
                let begun = Instant::now();
                while std::fs::read_dir(&folder).unwrap().count() < WORLD {
                    assert!(begun.elapsed() < Duration::from_secs(60), "the others do not come");
                    std::thread::sleep(Duration::from_millis(1));
                }
                std::process::abort();
            }
        }
        let handles: Vec<_> = (0..5).map(submit).collect();
        let outcomes = handles.into_iter().map(|handle| handle.and_then(|handle| handle.synchronize()));
        let errors: Vec<_> = outcomes.filter_map(Result::err).collect();
        if let [first, ..] = &errors[..] {
            let is_named = errors.iter().all(|error| error.peer().map(phalanx::Rank::get) == Some(1));
            println!("{} handles failed in step {step}; rank 1 is named: {is_named}: {first}", errors.len());
            return;
        }
    }
}

/// KiB of memory of this process, as the kernel counts them under this name.
fn kib(name: &str) -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(name)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// KiB of memory of this process: its own, and what it shares with other processes.
fn resident() -> (usize, usize) {
    (kib("RssAnon:"), kib("RssShmem:"))
}

/// Rank 1 gets no more memory than its tensor has, and an Adasum needs twice as much.
fn narrow(hvd: &Horovod) {
    const BYTES: usize = 128 << 20;
    let tensor = vec![1.0f32; BYTES / 4];
    // What the first call needs is there.
    hvd.allreduce("small", [1.0f32], Op::Adasum).unwrap();
    if hvd.rank().get() == 1 {
        let current = Some(((kib("VmSize:") << 10) + BYTES / 2) as u64);
        setrlimit(Resource::As, Rlimit { current, ..getrlimit(Resource::As) }).unwrap();
    }
    match hvd.allreduce("large", tensor, Op::Adasum) {
        Ok(_) => println!("it has had the memory"),
        Err(error) => println!("out of memory: {}: {error}", error.is_out_of_memory()),
    }
}

/// Reduces 80 tensors of 512 KiB five times, and prints how many KiB were added meanwhile.
fn measure(hvd: &Horovod) {
    const ELEMENTS: usize = 1 << 17;
    let mut tensors: Vec<Vec<f32>> = (0..80).map(|_| vec![1.0; ELEMENTS]).collect();
    hvd.barrier().unwrap();
    let (before, mut most) = (resident(), (0, 0));
    for _ in 0..5 {
        let submitted = tensors.drain(..).enumerate();
        let handles: Vec<_> = submitted
            .map(|(index, data)| hvd.allreduce_async(&format!("t{index}"), data, Op::Average).unwrap())
            .collect();
        for handle in handles {
            tensors.push(handle.synchronize().unwrap().into_memory::<Vec<f32>>().unwrap());
            let now = resident();
            most = (now.0.max(most.0), now.1.max(most.1));
        }
    }
    let stats = hvd.stats();
    assert!(stats.batches < stats.names, "it has fused: {stats:?}");
    assert!(tensors.iter().flatten().all(|value| *value == 1.0));
    let (own, shared) = (most.0.saturating_sub(before.0), most.1.saturating_sub(before.1));
    println!("{own} {shared} {}", stats.fusion_bytes / 1024);
    hvd.barrier().unwrap();
}

/// Starts a world of workers, and returns what they print, by rank.
fn world(role: &str, variables: &[(&str, &str)]) -> Vec<Output> {
    world_of(WORLD, role, variables)
}

fn world_of(count: usize, role: &str, variables: &[(&str, &str)]) -> Vec<Output> {
    let (_server, mut workers) = ranks::start(role, count as u32, variables);
    workers.iter_mut().map(Worker::output).collect()
}

fn a_process_dies() {
    let here = tempfile::tempdir().unwrap();
    let outputs = world("train", &[(HERE, here.path().to_str().unwrap())]);
    for rank in [0, 2] {
        let text = String::from_utf8_lossy(&outputs[rank].stdout);
        assert!(
            text.contains("5 handles failed in step 20; rank 1 is named: true"),
            "rank {rank}: {outputs:?}"
        );
    }
}

fn no_memory() {
    let outputs = world_of(2, "narrow", &[]);
    for (rank, output) in outputs.iter().enumerate() {
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("no memory for an adasum"), "{rank}: {outputs:?}");
    }
    assert!(String::from_utf8_lossy(&outputs[1].stdout).starts_with("out of memory: true"), "{outputs:?}");
}

fn memory() {
    let threshold = 8 << 10; // KiB
    let outputs = world("memory", &[("HOROVOD_FUSION_THRESHOLD", &(threshold << 10).to_string())]);
    for output in &outputs {
        let text = String::from_utf8_lossy(&output.stdout);
        println!("KiB added, shared, and of the fusion buffer: {text}");
        let numbers: Vec<usize> = text.split_whitespace().map(|number| number.parse().unwrap()).collect();
        let [own, shared, fusion] = numbers[..] else { panic!("{outputs:?}") };
        assert!(fusion > 0 && fusion <= threshold, "{text}");
        // A rank maps the fusion buffers of all, in which it combines its share.
        assert!(shared <= WORLD * threshold + 1024, "{text}");
        assert!(own <= 4096, "{own} KiB beside the fusion buffer");
    }
}

fn variables() {
    let set = [
        ("HOROVOD_FUSION_THRESHOLD", "1048576"),
        ("HOROVOD_CYCLE_TIME", "2.5"),
        ("HOROVOD_NUM_NCCL_STREAMS", "2"),
    ];
    let outputs = world("options", &set);
    for output in &outputs {
        assert_eq!(String::from_utf8_lossy(&output.stdout), "1048576 2.5ms 1024\n", "{outputs:?}");
    }
    let warned = |output: &Output| {
        String::from_utf8_lossy(&output.stderr).contains("HOROVOD_NUM_NCCL_STREAMS has no meaning")
    };
    assert_eq!(outputs.iter().map(warned).collect::<Vec<_>>(), [true, false, false]);
    for output in world("options", &[("HOROVOD_CYCLE_TIME", "fast")]) {
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(text.contains(r#"HOROVOD_CYCLE_TIME="fast": it must be a number"#), "{text}");
    }
}
