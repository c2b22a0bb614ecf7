//! `phalanx bench faults`: how soon survivors know that a rank was killed, or is frozen.

mod traces;
mod trial;
mod worker;

use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use phalanx::{Error, Result, TransportKind, WorldSize};
use serde::Serialize;

use self::traces::Traces;
use self::trial::{Fault, Trial, Verdict};
pub(super) use self::worker::now;

/// How often a long run says how far it is.
const PROGRESS: Duration = Duration::from_secs(10);

/// Time from a fault to the survivors' errors
#[derive(Args, Debug)]
#[command(long_about = ABOUT, after_long_help = MANUAL)]
pub(crate) struct Faults {
    /// How many processes take part, in each of several worlds
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "2,4",
          value_parser = clap::value_parser!(u32).range(2..=64))]
    worlds: Vec<u32>,

    /// How many worlds lose a rank to SIGKILL
    #[arg(long, value_name = "N", default_value_t = 200)]
    kills: u32,

    /// How many worlds have a rank frozen by SIGSTOP
    #[arg(long, value_name = "N", default_value_t = 20)]
    freezes: u32,

    /// What carries the data: tcp or shm [default: shm]
    #[arg(long, value_name = "KIND")]
    transport: Option<TransportKind>,

    /// Where the sequence of moments begins
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    seed: u64,

    /// Print a line of JSON for each row, or write it to a file besides printing the table
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,

    /// Be one of the ranks
    #[arg(long, hide = true)]
    worker: bool,
}

const ABOUT: &str = "\
Times how long it takes from a fault to the error of each survivor.

Starts worlds of processes that train (a barrier, an all_reduce of 1 MiB, a millisecond of something else), kills or \
freezes one of each at a random moment, and takes the time until the others' calls return an error.";

const MANUAL: &str = "\
Columns:
  faults   how many worlds had the fault, each with another rank and moment
  p50, p99, max   milliseconds from just before the signal was sent until a survivor's call returned the error, over \
all survivors of all worlds
  hangs    survivors that had no error after 20 s
  unnamed  survivors whose error is no peer's failure, or names another rank; the exit code is 1 if there are any, or \
hangs, or if this command holds more descriptors or threads in the end than before

Every ten seconds a line on standard error says how far it is, and what this command holds.

Examples:
  phalanx bench faults
  phalanx bench faults --worlds 8 --kills 1000 --freezes 0 --transport tcp --json faults.json
  PHALANX_HEARTBEAT_TIMEOUT=0.5 phalanx bench faults --kills 0";

#[derive(Debug, Serialize)]
struct Row {
    fault: Fault,
    ranks: u32,
    transport: String,
    faults: u32,
    p50_ms: f64,
    p99_ms: f64,
    max_ms: f64,
    hangs: usize,
    unnamed: usize,
}

impl Faults {
    pub(super) fn run(&self) -> Result<()> {
        if self.worker {
            return worker::run();
        }
        let mut report = Report::start(self)?;
        let (mut moments, mut bad, mut told) = (Moments(self.seed), 0, Instant::now());
        let before = Traces::now();
        for ranks in &self.worlds {
            let world = WorldSize::new(*ranks)?;
            for (fault, count) in [(Fault::Kill, self.kills), (Fault::Freeze, self.freezes)] {
                if count == 0 {
                    continue;
                }
                let mut verdicts = Vec::new();
                for number in 0..count {
                    let trial = Trial { fault, world, victim: number % ranks, transport: self.transport };
                    verdicts.extend(trial.run(moments.next())?);
                    if told.elapsed() >= PROGRESS {
                        told = Instant::now();
                        let (now, memory, done) = (Traces::now(), traces::resident(), number + 1);
                        eprintln!(
                            "phalanx bench faults: {fault}, {ranks} ranks: {done} of {count}; {memory:.1} MiB, {now}"
                        );
                    }
                }
                let row = self.row(fault, *ranks, count, &verdicts);
                bad += row.hangs + row.unnamed;
                report.row(&row)?;
                for text in verdicts.iter().filter_map(|verdict| verdict.complaint.as_deref()).take(3) {
                    eprintln!("phalanx bench faults: {text}");
                }
            }
        }
        if let Some(left) = before.left() {
            return Err(Error::aborted(left));
        }
        match bad {
            0 => Ok(()),
            _ => Err(Error::aborted(format!(
                "{bad} survivors had no error, or one that does not name the rank"
            ))),
        }
    }

    fn row(&self, fault: Fault, ranks: u32, faults: u32, verdicts: &[Verdict]) -> Row {
        let mut times: Vec<f64> = verdicts
            .iter()
            .filter_map(|verdict| verdict.after)
            .map(|after| after.as_secs_f64() * 1e3)
            .collect();
        times.sort_by(f64::total_cmp);
        let at =
            |part: usize| times.get((times.len() * part / 100).min(times.len().saturating_sub(1))).copied();
        let hangs = verdicts.iter().filter(|verdict| verdict.after.is_none()).count();
        let complaints = verdicts.iter().filter(|verdict| verdict.complaint.is_some()).count();
        Row {
            fault,
            ranks,
            transport: self.transport.unwrap_or(TransportKind::SharedMemory).to_string(),
            faults,
            p50_ms: at(50).unwrap_or(f64::NAN),
            p99_ms: at(99).unwrap_or(f64::NAN),
            max_ms: at(100).unwrap_or(f64::NAN),
            hangs,
            unnamed: complaints - hangs,
        }
    }
}

/// Where rows go, as they come.
struct Report {
    table: bool,
    json: Option<Box<dyn Write>>,
}

impl Report {
    fn start(options: &Faults) -> Result<Self> {
        let (table, json): (_, Option<Box<dyn Write>>) = match &options.json {
            None => (true, None),
            Some(path) if path.as_os_str() == "-" => (false, Some(Box::new(io::stdout()))),
            Some(path) => {
                let file = File::create(path).map_err(|error| {
                    Error::invalid_argument(format!("--json {} cannot be written: {error}", path.display()))
                })?;
                (true, Some(Box::new(file)))
            }
        };
        let mut report = Self { table, json };
        let heading = ["fault", "ranks", "transport", "faults", "p50", "p99", "max", "hangs", "unnamed"];
        report.line(&heading.map(str::to_owned))?;
        report.line(&["", "", "", "", "ms", "ms", "ms", "", ""].map(str::to_owned))?;
        Ok(report)
    }

    fn row(&mut self, row: &Row) -> Result<()> {
        if let Some(json) = &mut self.json {
            let line = serde_json::to_string(row).map_err(|error| unwritten(error.into()))?;
            writeln!(json, "{line}").and_then(|()| json.flush()).map_err(unwritten)?;
        }
        let Row { fault, ranks, transport, faults, p50_ms, p99_ms, max_ms, hangs, unnamed } = row;
        let times = [p50_ms, p99_ms, max_ms].map(|time| format!("{time:.2}"));
        let [p50, p99, max] = times;
        self.line(&[
            fault.to_string(),
            ranks.to_string(),
            transport.clone(),
            faults.to_string(),
            p50,
            p99,
            max,
            hangs.to_string(),
            unnamed.to_string(),
        ])
    }

    fn line(&mut self, cells: &[String; 9]) -> Result<()> {
        if !self.table {
            return Ok(());
        }
        let [fault, ranks, transport, faults, p50, p99, max, hangs, unnamed] = cells;
        let line = format!(
            "{fault:<7} {ranks:>5} {transport:>9} {faults:>6} {p50:>9} {p99:>9} {max:>9} {hangs:>5} {unnamed:>7}"
        );
        writeln!(io::stdout(), "{}", line.trim_end()).map_err(unwritten)
    }
}

fn unwritten(error: io::Error) -> Error {
    Error::aborted(format!("the results cannot be written: {error}"))
}

/// Moments within a few steps of the training, the same for the same seed (SplitMix64: Steele, Lea and Flood, 2014).
struct Moments(u64);

impl Moments {
    fn next(&mut self) -> Duration {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        Duration::from_micros((mixed ^ mixed >> 31) % 20_000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_differ_and_come_again_for_the_same_seed() {
        let moments = |seed| {
            let mut moments = Moments(seed);
            (0..100).map(|_| moments.next()).collect::<Vec<_>>()
        };
        assert_eq!(moments(7), moments(7));
        assert_ne!(moments(7), moments(8));
        let distinct: std::collections::HashSet<_> = moments(7).into_iter().collect();
        assert!(distinct.len() > 95 && distinct.iter().all(|moment| *moment < Duration::from_millis(20)));
    }
}
