//! Memory of batches, in processes whose allocator has not seen anything else.

use std::process::Command;

use phalanx_data::{DataLoader, Dataset, InMemory};

use crate::harness::ROLE;

pub const STACK: &str = "stack";

pub const TESTS: &[(&str, fn())] =
    &[("batches_take_memory_that_was_freed", batches_take_memory_that_was_freed)];

/// Copies lists of items of 48 KiB into batches of 3 MiB, without workers and with two, and says how many pages the second passes got.
pub fn stack() {
    // Pages of 4 KiB are counted: some systems give huge ones to every process. A kernel without those may not know the call.
    let _ = rustix::thread::disable_transparent_huge_pages(true);
    for workers in [0, 2] {
        let items = (0..2048).collect::<InMemory<u32>>().map(|n| Ok(vec![n as f32; 12 << 10]));
        let loader = DataLoader::builder(items).batch_size(64).num_workers(workers);
        let loader = loader.collate(|items| Ok(items.concat())).build().unwrap();
        let pass = || {
            let before = page_faults();
            loader.iter().for_each(|batch| assert_eq!(batch.unwrap().len(), 64 * (12 << 10)));
            page_faults() - before
        };
        pass();
        println!("{}", pass());
    }
}

/// Those of this process that needed no disk.
fn page_faults() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    // The name of the program may have blanks in it; two numbers, and the state, stand between it and the seventh.
    let rest = stat.rsplit_once(')').unwrap().1;
    rest.split_whitespace().nth(7).unwrap().parse().unwrap()
}

/// Without a variable of the environment. With glibc's limits at what a process begins with, each batch gets new pages: that is how the other
/// one is known to have seen them.
fn batches_take_memory_that_was_freed() {
    let faults = |limit: Option<&str>| -> Vec<u64> {
        let mut program = Command::new(std::env::current_exe().unwrap());
        program.env(ROLE, STACK).env_remove("MALLOC_TRIM_THRESHOLD_").env_remove("MALLOC_MMAP_THRESHOLD_");
        if let Some(limit) = limit {
            program.env("MALLOC_TRIM_THRESHOLD_", limit).env("MALLOC_MMAP_THRESHOLD_", limit);
        }
        let output = program.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap().lines().map(|line| line.parse().unwrap()).collect()
    };
    let (ours, small) = (faults(None), faults(Some("131072")));
    assert_eq!((ours.len(), small.len()), (2, 2));
    for (ours, small) in ours.iter().zip(&small) {
        // A pass copies 96 MiB, 24,576 pages of 4 KiB.
        assert!(*small > 20_000 && ours * 4 < *small, "{ours} and {small}");
    }
}
