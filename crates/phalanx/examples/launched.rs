//! Checks that a launcher's processes are one group:
//!
//! ```text
//! phalanx run --nproc-per-node 4 -- target/debug/examples/launched 4
//! ```
//!
//! The first argument is how many ranks there should be: where a launcher's variables are not understood, each process is a
//! world of one. The second, if there is one, is a rank that exits with 7 once all have met, for a launcher that is to end
//! the others; or it is `notice`: the ranks make steps until they are told that the job's time ends. `tests/launchers` runs it under torchrun, mpirun and Slurm.

use std::error::Error;
use std::process::{ExitCode, exit};
use std::thread::sleep;
use std::time::Duration;

use phalanx::{EndNotice, ReduceOp};

const ELEMENTS: i64 = 100_000;

fn main() -> ExitCode {
    match check() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn check() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let expected: u32 = arguments.next().ok_or("say how many ranks there should be: launched 4")?.parse()?;
    let second = arguments.next();
    let mut notice = match second.as_deref() {
        Some("notice") => Some(EndNotice::new()?),
        _ => None,
    };
    let fails = second.filter(|_| notice.is_none()).map(|rank| rank.parse::<u32>()).transpose()?;

    let group = phalanx::init()?;
    let (rank, world) = (group.rank(), group.world_size());
    if world.get() != expected {
        return Err(format!("this is a world of {world}, and not of {expected}").into());
    }
    let mut ranks = vec![0; world.count()];
    group.all_gather(&[i64::from(rank.get())], &mut ranks)?;
    if !ranks.iter().copied().eq(0..i64::from(expected)) {
        return Err(format!("the ranks are {ranks:?}").into());
    }
    let factor = i64::from(rank.get()) + 1;
    let mut sums: Vec<i64> = (0..ELEMENTS).map(|index| index * factor).collect();
    group.all_reduce(&mut sums, ReduceOp::Sum)?;
    let factors = i64::from(expected) * (i64::from(expected) + 1) / 2;
    if !sums.iter().copied().eq((0..ELEMENTS).map(|index| index * factors)) {
        return Err("the sum is wrong".into());
    }
    // Rank 0 says it for all: launchers mix up lines that are written at once.
    let mut locals = vec![0; world.count()];
    group.all_gather(&[i64::from(group.local_rank())], &mut locals)?;
    if rank.is_main() {
        println!("one group of {world}, local ranks {locals:?}");
    }
    if fails == Some(rank.get()) {
        exit(7);
    }
    if let Some(notice) = &mut notice {
        let mut step = 1_i64;
        while !notice.agreed(&group)? {
            step += 1;
            sleep(Duration::from_millis(20));
        }
        let mut steps = vec![0; world.count()];
        group.all_gather(&[step], &mut steps)?;
        let is_same = steps.iter().all(|other| *other == step);
        if rank.is_main() {
            println!("noticed, all {world} in the same step: {is_same}");
        }
    }
    group.barrier()?;
    Ok(())
}
