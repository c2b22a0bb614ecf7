//! `phalanx bench startup`: from the command to the first collective.

use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use phalanx::{Error, ProcessGroup, ReduceOp, Result};

use crate::measure::{monotonic, percentile};
use crate::options::MAX_ITERATIONS;
use crate::report::print;

/// Time from the command to the first collective
#[derive(Args, Debug)]
#[command(long_about = ABOUT, after_long_help = MANUAL)]
pub(crate) struct Startup {
    /// How many processes take part
    #[arg(long, visible_alias = "nproc_per_node", default_value_t = 2, value_name = "N",
          value_parser = clap::value_parser!(u32).range(1..=64))]
    nproc_per_node: u32,

    /// How many jobs are started
    #[arg(short = 'n', long, default_value_t = 200, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=MAX_ITERATIONS))]
    iterations: u32,

    /// Be one of the ranks
    #[arg(long, hide = true)]
    worker: bool,

    /// Go on for so many seconds after the first collective, as one of the ranks
    #[arg(long, hide = true, requires = "worker", default_value_t = 0.0, value_name = "SECONDS")]
    seconds: f64,

    /// Stay in the group for so many seconds after the first collective, as one of the ranks, and do nothing
    #[arg(long, hide = true, requires = "worker", default_value_t = 0.0, value_name = "SECONDS")]
    rest: f64,

    /// Be a program that does nothing
    #[arg(long, hide = true, conflicts_with = "worker")]
    alone: bool,
}

const ABOUT: &str = "\
Times how long a job takes from its command to the end of its first collective.

Starts `phalanx run` with a program whose ranks make one all_reduce of 4 bytes each, and, alternating with it, the same program \
alone, which does nothing. The difference is what launching, rendezvous and connecting cost.";

const MANUAL: &str = "\
Rows (milliseconds over all starts):
  program  from when the program is started until it runs
  job      from when `phalanx run` is started until the last rank has the result of its all_reduce
  beyond   the time of the job minus the median of the program

Examples:
  phalanx bench startup
  phalanx bench startup --nproc-per-node 8 -n 1000";

/// Between two collectives of a rank that goes on.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// One process takes less, unless it hangs.
const START_LIMIT: Duration = Duration::from_secs(60);
/// So much longer may each further process take: many share few processors.
const PROCESS_LIMIT: Duration = Duration::from_secs(2);
/// Between two looks at whether a command that has closed its output has ended.
const END_INTERVAL: Duration = Duration::from_millis(1);
/// Stands before the time in nanoseconds that a process reports.
const MARK: &str = "phalanx-startup ";

impl Startup {
    pub(crate) fn run(&self) -> Result<()> {
        if self.alone {
            return report_time();
        }
        if self.worker {
            let group = phalanx::init()?;
            group.all_reduce(&mut [1f32], ReduceOp::Sum)?;
            report_time()?;
            thread::sleep(Duration::try_from_secs_f64(self.rest).unwrap_or_default());
            return self.go_on(&group);
        }
        let program = std::env::current_exe().map_err(|error| unstarted(Path::new("this program"), error))?;
        let launcher = launcher(&program);
        let (mut alone, mut job) = (Vec::new(), Vec::new());
        for _ in 0..self.iterations {
            alone.push(time(Command::new(&program).args(["startup", "--alone"]), 1)?);
            let mut command = Command::new(&launcher);
            command.args(["run", "--nproc-per-node", &self.nproc_per_node.to_string(), "--"]).arg(&program);
            job.push(time(command.args(["startup", "--worker"]), self.nproc_per_node)?);
        }
        let [alone, job] = [alone, job].map(|mut times| {
            times.sort_by(f64::total_cmp);
            [50, 99].map(|percent| percentile(&times, percent))
        });
        print(&format!("{:<8} {:>8} {:>8}\n{:<8} {:>8} {:>8}\n", "", "p50", "p99", "", "ms", "ms"))?;
        for (name, [p50, p99]) in
            [("program", alone), ("job", job), ("beyond", job.map(|time| time - alone[0]))]
        {
            print(&format!("{name:<8} {p50:>8.1} {p99:>8.1}\n"))?;
        }
        Ok(())
    }
}

impl Startup {
    /// Makes collectives until the time is up for one of the ranks.
    fn go_on(&self, group: &ProcessGroup) -> Result<()> {
        let began = monotonic();
        let mut is_over = [f32::from(u8::from(self.seconds <= 0.0))];
        while is_over == [0.0] {
            thread::sleep(POLL_INTERVAL);
            let elapsed = monotonic().saturating_sub(began).as_secs_f64();
            is_over = [f32::from(u8::from(elapsed >= self.seconds))];
            group.all_reduce(&mut is_over, ReduceOp::Max)?;
        }
        Ok(())
    }
}

/// The command `phalanx`: beside this program, or else in PATH.
fn launcher(program: &Path) -> PathBuf {
    let beside = program.with_file_name("phalanx");
    if beside.exists() { beside } else { "phalanx".into() }
}

/// Prints the time at which this process has done its part.
fn report_time() -> Result<()> {
    print(&format!("{MARK}{}\n", monotonic().as_nanos()))
}

/// The milliseconds from the start of `command` until the last of so many processes has reported.
fn time(command: &mut Command, processes: u32) -> Result<f64> {
    let started = monotonic();
    let (text, status) = finish(command, limit(processes))?;
    let text = String::from_utf8_lossy(&text);
    // A launcher shows the rank in front.
    let reported = text.lines().filter_map(|line| line.split_once(MARK)?.1.trim().parse::<u64>().ok());
    let reported: Vec<u64> = reported.collect();
    match reported.iter().max() {
        Some(last) if reported.len() == processes as usize && status.success() => {
            Ok(Duration::from_nanos(*last).saturating_sub(started).as_secs_f64() * 1e3)
        }
        _ => Err(Error::aborted(format!(
            "of {processes} processes {} have reported, and {} has ended with {status}",
            reported.len(),
            command.get_program().display()
        ))),
    }
}

/// How long the start of so many processes may take, with their ends.
fn limit(processes: u32) -> Duration {
    START_LIMIT + PROCESS_LIMIT.saturating_mul(processes.saturating_sub(1))
}

/// What `command` prints on standard output, and how it ends, if it does within `limit`.
fn finish(command: &mut Command, limit: Duration) -> Result<(Vec<u8>, ExitStatus)> {
    let started = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
    let mut child = started.map_err(|error| unstarted(Path::new(command.get_program()), error))?;
    let deadline = Instant::now() + limit;
    let (say, said) = channel();
    let out = child.stdout.take();
    thread::spawn(move || {
        let mut text = Vec::new();
        // What cannot be read is missing among the reports.
        let _ = out.map(|mut out| out.read_to_end(&mut text));
        let _ = say.send(text);
    });
    let text = said.recv_timeout(limit).ok();
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break Some(status),
            Ok(None) if text.is_some() && Instant::now() < deadline => thread::sleep(END_INTERVAL),
            Ok(None) | Err(_) => break None,
        }
    };
    let (Some(text), Some(status)) = (text, status) else {
        let _ = child.kill();
        let _ = child.wait();
        let program = command.get_program().display();
        return Err(Error::aborted(format!("{program} was not done within {} s", limit.as_secs())));
    };
    Ok((text, status))
}

fn unstarted(program: &Path, error: io::Error) -> Error {
    let remedy = match error.kind() {
        ErrorKind::NotFound => "install the command: cargo install --path crates/phalanx-cli",
        _ => "see whether other programs can be started",
    };
    Error::aborted(format!("{} cannot be started: {error}", program.display())).with_remedy(remedy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_that_fails_after_its_reports_is_no_start() {
        let script = |script: &str| time(Command::new("sh").args(["-c", script]), 1);
        assert!(script("echo '[0] phalanx-startup 1'").is_ok());
        let error = script("echo '[0] phalanx-startup 1'; exit 3").unwrap_err().to_string();
        assert!(error.contains("1 have reported") && error.contains("exit status: 3"), "{error}");
        let error = script("echo phalanx-startup soon").unwrap_err().to_string();
        assert!(error.contains("0 have reported"), "{error}");
    }

    #[test]
    fn a_command_that_hangs_is_ended_and_many_processes_have_more_time() {
        let mut hangs = Command::new("sleep");
        let error = finish(hangs.arg("600"), Duration::from_millis(50)).unwrap_err().to_string();
        assert!(error.contains("sleep was not done within"), "{error}");
        assert_eq!([1, 256].map(limit), [60, 570].map(Duration::from_secs));
    }
}
