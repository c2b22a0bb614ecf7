//! The largest batch of a device that a cap on its memory allows: batches are tried, each in processes of its own.

use std::path::Path;
use std::process::Stdio;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use common::memory::{self, Peaks};
use roberta::strategy::{Devices, Strategy};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::compare::own;

/// Larger batches of a device are not tried.
const MAX_BATCH: usize = 4096;
/// What a process says whose memory the system has refused: Rust's, and the system's ENOMEM and EAGAIN for threads.
const REFUSED: [&str; 3] = ["memory allocation of ", "(os error 12)", "(os error 11)"];

/// What refuses memory beyond the cap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Cap {
    /// The program's allocator, which knows whose memory it is: for every strategy
    Allocator,
    /// The system, to each process (RLIMIT_DATA): for strategies with a process for each device
    Rlimit,
}

impl Cap {
    /// # Errors
    /// If it cannot cap a device of these.
    pub fn check(self, devices: Devices) -> Result<()> {
        let several = matches!(devices.strategy, Strategy::Dp | Strategy::Towers) && devices.count > 1;
        ensure!(
            self == Self::Allocator || !several,
            "--memory-by rlimit caps processes, and {} has {} devices in one: leave it out of --strategies, or take \
             --memory-by allocator",
            devices.name(),
            devices.count
        );
        Ok(())
    }

    /// From now on no device of this process gets more than `bytes`, with its part of what processes share, as it was when somebody
    /// [looked](Peaks::look).
    ///
    /// # Errors
    /// If the system refuses to.
    pub fn limit(self, peaks: &mut Peaks, bytes: usize) -> Result<()> {
        match self {
            Self::Allocator => peaks.limit(bytes),
            Self::Rlimit => {
                let bytes = bytes.saturating_sub(peaks.shared()) as u64;
                let maximum = getrlimit(Resource::Data).maximum;
                setrlimit(Resource::Data, Rlimit { current: Some(bytes), maximum })
                    .context("RLIMIT_DATA cannot be set")?;
            }
        }
        Ok(())
    }

    fn refused(self, said: &str) -> bool {
        match self {
            Self::Allocator => said.contains(memory::EXCEEDED),
            Self::Rlimit => REFUSED.iter().any(|words| said.contains(words)),
        }
    }
}

/// The largest batch of a device that trains while no device gets more than `limit` bytes; 0 if none does.
///
/// # Errors
/// If a batch fails for another reason.
pub fn largest_batch(devices: Devices, cap: Cap, limit: usize) -> Result<usize> {
    let (mut has_room, mut has_none) = (0, 1);
    while fits(devices, has_none, cap, limit)? {
        has_room = has_none;
        if has_none >= MAX_BATCH {
            return Ok(has_room);
        }
        has_none *= 2;
    }
    while has_none - has_room > 1 {
        let middle = has_room.midpoint(has_none);
        if fits(devices, middle, cap, limit)? {
            has_room = middle;
        } else {
            has_none = middle;
        }
    }
    Ok(has_room)
}

fn fits(devices: Devices, batch: usize, cap: Cap, limit: usize) -> Result<bool> {
    let mut command = own(devices, Path::new("/dev/null"))?;
    command.args(["--batch-size", &batch.to_string(), "--limit-bytes", &limit.to_string()]);
    eprintln!("{}: tries batches of {batch}", devices.name());
    let begin = Instant::now();
    let output = command.stdout(Stdio::null()).stderr(Stdio::piped()).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    let fits = output.status.success();
    if fits || cap.refused(&said) {
        let (fit, seconds) = (if fits { "have room" } else { "have none" }, begin.elapsed().as_secs_f64());
        eprintln!("{}: batches of {batch} {fit} ({seconds:.1} s)", devices.name());
        return Ok(fits);
    }
    bail!("{} with a batch of {batch} failed: {said}", devices.name())
}
