//! Two processes of this host, and an all_reduce between them: measures shared memory and TCP.

use std::io::{self, Read, Write};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use phalanx::{Error, ProcessGroup, ReduceOp, Result};
use serde::{Deserialize, Serialize};

use super::finding::Report;

/// A trial takes some tenths of a second.
const TIMEOUT: Duration = Duration::from_secs(30);
/// The elements (f32) of the calls that measure latency and bandwidth: 4 B and 1 MiB.
const SMALL: usize = 1;
const LARGE: usize = 1 << 18;
/// Calls are timed in so many rounds; the median counts.
const ROUNDS: usize = 15;
/// Calls of a round.
const CALLS: u32 = 20;

/// Seconds for a call, as the first process reports them.
#[derive(Debug, Serialize, Deserialize)]
struct Times {
    small: f64,
    large: f64,
}

pub(super) fn look(report: &mut Report) {
    for (check, transport, remedy) in [
        (
            "shared memory",
            "shm",
            "may processes of one user open each other's /proc/<pid>/fd, and is memory limited?",
        ),
        ("tcp", "tcp", "may processes connect to each other at the loopback?"),
    ] {
        match measure(transport).and_then(|text| summary(&text)) {
            Ok(text) => report.good(check, text),
            Err(cause) => report.bad(check, cause, remedy),
        }
    }
}

/// The output of the first of two processes.
fn measure(transport: &str) -> Result<String, String> {
    let program = std::env::current_exe().map_err(|error| format!("this program is not found: {error}"))?;
    let mut command = Command::new(program);
    command.args(["doctor", "--measure", &CALLS.to_string()]);
    // In an environment without a launcher's variables: they are not its ranks.
    command.env_clear().envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
    command.env("PHALANX_TRANSPORT", transport);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    finish(command.spawn().map_err(|error| format!("two processes cannot be started: {error}"))?)
}

/// Its output, or why there is none.
fn finish(mut child: Child) -> Result<String, String> {
    let deadline = Instant::now() + TIMEOUT;
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(5)),
            Ok(None) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("two processes were not done within {} s", TIMEOUT.as_secs()));
            }
            Err(error) => return Err(error.to_string()),
        }
    };
    let (mut out, mut err) = (String::new(), String::new());
    // The output is short: it fits into the pipes.
    let _ = child.stdout.take().map(|mut pipe| pipe.read_to_string(&mut out));
    let _ = child.stderr.take().map(|mut pipe| pipe.read_to_string(&mut err));
    match status.success() {
        true => Ok(out),
        false => Err(err.lines().next().unwrap_or("two processes have failed without a message").to_owned()),
    }
}

fn summary(text: &str) -> Result<String, String> {
    let times: Times = serde_json::from_str(text).map_err(|error| format!("not understood: {error}"))?;
    let bytes = LARGE * size_of::<f32>();
    let mebibytes = bytes >> 20;
    let (small, rate) = (times.small * 1e6, bytes as f64 / times.large / 1e9);
    Ok(format!("all_reduce of 2 processes: 4 B in {small:.1} µs, {mebibytes} MiB at {rate:.1} GB/s"))
}

/// Starts two processes that are timed, or is one of them; under a launcher, one of its workers.
pub(super) fn work(calls: u32) -> ExitCode {
    match phalanx::spawn(2, || time_both(calls)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "{error}");
            ExitCode::FAILURE
        }
    }
}

fn time_both(calls: u32) -> Result<()> {
    let group = phalanx::init()?;
    let times = Times { small: time(&group, SMALL, calls)?, large: time(&group, LARGE, calls)? };
    if group.rank().is_main() {
        let text = serde_json::to_string(&times).map_err(|error| Error::aborted(error.to_string()))?;
        writeln!(io::stdout(), "{text}").map_err(|error| Error::io("the times cannot be written", error))?;
    }
    Ok(())
}

/// Seconds for an all_reduce of so many elements, after its result was checked.
fn time(group: &ProcessGroup, elements: usize, calls: u32) -> Result<f64> {
    let (rank, world) = (group.rank().get(), group.world_size().get());
    let mut data = vec![(rank + 1) as f32; elements];
    group.all_reduce(&mut data, ReduceOp::Sum)?;
    let sum = (1..=world).sum::<u32>() as f32;
    if data.iter().any(|element| *element != sum) {
        return Err(Error::aborted("results came out wrong"));
    }
    // Sums of zeros stay zero, however many calls are made.
    data.fill(0.0);
    let mut round = || {
        let started = Instant::now();
        (0..calls).try_for_each(|_| group.all_reduce(&mut data, ReduceOp::Sum))?;
        Ok(started.elapsed().as_secs_f64() / f64::from(calls.max(1)))
    };
    // The first is for warming up.
    round()?;
    let mut times = (0..ROUNDS).map(|_| round()).collect::<Result<Vec<_>>>()?;
    times.sort_by(f64::total_cmp);
    Ok(times[ROUNDS / 2])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latency_and_bandwidth_are_said() {
        let said = "all_reduce of 2 processes: 4 B in 1.2 µs, 1 MiB at 20.0 GB/s";
        let times = Times { small: 1.25e-6, large: 52.4288e-6 };
        assert_eq!(summary(&serde_json::to_string(&times).unwrap()), Ok(said.to_owned()));
        assert!(summary("").is_err() && summary("{}").is_err());
    }
}
