//! `phalanx bench startup`: from the command to the first collective.

use std::io::{self, Write};
use std::process::{Command, Stdio};
use std::time::Duration;

use clap::Args;
use phalanx::{Error, ReduceOp, Result};

use super::faults::now;

/// Time from the command to the first collective
#[derive(Args, Debug)]
#[command(long_about = ABOUT, after_long_help = MANUAL)]
pub(crate) struct Startup {
    /// How many processes take part
    #[arg(long, visible_alias = "nproc_per_node", default_value_t = 2, value_name = "N",
          value_parser = clap::value_parser!(u32).range(1..=64))]
    nproc_per_node: u32,

    /// How many jobs are started
    #[arg(short = 'n', long, default_value_t = 200, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    iterations: u32,

    /// Be one of the ranks
    #[arg(long, hide = true)]
    worker: bool,

    /// Be a program that does nothing
    #[arg(long, hide = true, conflicts_with = "worker")]
    alone: bool,
}

const ABOUT: &str = "\
Times how long a job takes from its command to the end of its first collective.

Starts `phalanx run` with a program whose ranks make one all_reduce of 4 bytes each, and in turn with it the same program \
alone, which does nothing: what the first takes longer is what launching, meeting and connecting cost.";

const MANUAL: &str = "\
Rows (milliseconds over all starts):
  program  from when the program is started until it runs
  job      from when `phalanx run` is started until the last rank has the result of its all_reduce
  beyond   what the job takes longer than the median of the program

Examples:
  phalanx bench startup
  phalanx bench startup --nproc-per-node 8 -n 1000";

/// In front of the time in nanoseconds that a process tells.
const TOLD: &str = "phalanx-startup ";

impl Startup {
    pub(super) fn run(&self) -> Result<()> {
        if self.alone {
            return tell();
        }
        if self.worker {
            let group = phalanx::init()?;
            group.all_reduce(&mut [1f32], ReduceOp::Sum)?;
            return tell();
        }
        let program = std::env::current_exe().map_err(unstarted)?;
        let (mut alone, mut job) = (Vec::new(), Vec::new());
        for _ in 0..self.iterations {
            let mut command = Command::new(&program);
            alone.push(time(command.args(["bench", "startup", "--alone"]), 1)?);
            let mut command = Command::new(&program);
            command.args(["run", "--nproc-per-node", &self.nproc_per_node.to_string(), "--"]).arg(&program);
            job.push(time(command.args(["bench", "startup", "--worker"]), self.nproc_per_node)?);
        }
        let (alone, job) = (Spread::of(alone), Spread::of(job));
        let beyond = Spread { p50: job.p50 - alone.p50, p99: job.p99 - alone.p50 };
        line(&["", "p50", "p99"].map(str::to_owned))?;
        for (name, Spread { p50, p99 }) in [("program", alone), ("job", job), ("beyond", beyond)] {
            line(&[name.to_owned(), format!("{p50:.1}"), format!("{p99:.1}")])?;
        }
        Ok(())
    }
}

/// Milliseconds.
struct Spread {
    p50: f64,
    p99: f64,
}

impl Spread {
    fn of(mut times: Vec<Duration>) -> Self {
        times.sort_unstable();
        let at = |part: usize| {
            let time = times.get((times.len() * part / 100).min(times.len().saturating_sub(1)));
            time.map_or(f64::NAN, |time| time.as_secs_f64() * 1e3)
        };
        Self { p50: at(50), p99: at(99) }
    }
}

/// Says when this process is where it should be.
fn tell() -> Result<()> {
    // One write, so that the lines of several processes do not mix.
    let line = format!("{TOLD}{}\n", now().as_nanos());
    io::stdout().write_all(line.as_bytes()).map_err(unwritten)
}

/// How long it takes from the start of `command` until the last of so many processes has told its time.
fn time(command: &mut Command, processes: u32) -> Result<Duration> {
    let started = now();
    let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output().map_err(unstarted)?;
    let text = String::from_utf8_lossy(&output.stdout);
    // A launcher shows the rank in front.
    let told = text.lines().filter_map(|line| line.split_once(TOLD)?.1.trim().parse::<u64>().ok());
    let told: Vec<u64> = told.collect();
    match told.iter().max() {
        Some(last) if told.len() == processes as usize => {
            Ok(Duration::from_nanos(*last).saturating_sub(started))
        }
        _ => Err(Error::aborted(format!("of {processes} processes {} have told their time", told.len()))),
    }
}

fn line(cells: &[String; 3]) -> Result<()> {
    let [name, p50, p99] = cells;
    writeln!(io::stdout(), "{name:<8} {p50:>8} {p99:>8}").map_err(unwritten)
}

fn unstarted(error: io::Error) -> Error {
    Error::aborted(format!("this program cannot be started once more: {error}"))
}

fn unwritten(error: io::Error) -> Error {
    Error::aborted(format!("the results cannot be written: {error}"))
}
