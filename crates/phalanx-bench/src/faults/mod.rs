//! `phalanx bench faults`: how soon survivors know that a rank was killed, or is frozen.

mod resources;
mod trial;
mod worker;

use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use phalanx::{Error, GroupOptions, Result, TransportKind, WorldSize};
use serde::Serialize;

use self::resources::Resources;
use self::trial::{Fault, Trial, Verdict};
use crate::measure::percentile;
use crate::report::Report;
use crate::values::mix;

/// How often a long run shows its progress.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);

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

    /// What carries the data: tcp or shm [default: what PHALANX_TRANSPORT says, else shm]
    #[arg(long, value_name = "KIND")]
    transport: Option<TransportKind>,

    /// The seed of the moments at which ranks fail
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

Every ten seconds a line on standard error shows the progress, and the memory, descriptors and threads of this command.

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
    pub(crate) fn run(&self) -> Result<()> {
        if self.worker {
            return worker::run();
        }
        if self.kills == 0 && self.freezes == 0 {
            return Err(Error::invalid_argument("there are no faults to time")
                .with_remedy("give --kills or --freezes a number above 0"));
        }
        let transport = self.transport.or(GroupOptions::from_env()?.transport);
        let mut report = Report::new(self.json.as_deref())?;
        HEADING.iter().try_for_each(|cells| report.line(&line(cells)))?;
        let (mut delays, mut bad, mut shown) = (Delays(self.seed), 0, Instant::now());
        let before = Resources::now();
        for ranks in &self.worlds {
            let world = WorldSize::new(*ranks)?;
            for (fault, count) in [(Fault::Kill, self.kills), (Fault::Freeze, self.freezes)] {
                if count == 0 {
                    continue;
                }
                let mut verdicts = Vec::new();
                for number in 0..count {
                    let trial = Trial { fault, world, victim: number % ranks, transport };
                    verdicts.extend(trial.run(delays.next())?);
                    if shown.elapsed() >= PROGRESS_INTERVAL {
                        shown = Instant::now();
                        let (now, memory, done) = (Resources::now(), resources::resident(), number + 1);
                        eprintln!(
                            "phalanx bench faults: {fault}, {ranks} ranks: {done} of {count}; {memory:.1} MiB, {now}"
                        );
                    }
                }
                let row = Row::new(fault, *ranks, transport, count, &verdicts);
                bad += row.hangs + row.unnamed;
                report.json(&row)?;
                report.line(&row.to_string())?;
                for text in verdicts.iter().filter_map(|verdict| verdict.complaint.as_deref()).take(3) {
                    eprintln!("phalanx bench faults: {text}");
                }
            }
        }
        if let Some(leaked) = before.leaked() {
            return Err(Error::aborted(leaked));
        }
        match bad {
            0 => Ok(()),
            _ => Err(Error::aborted(format!(
                "{bad} survivors had no error, or one that does not name the rank"
            ))),
        }
    }
}

impl Row {
    fn new(
        fault: Fault,
        ranks: u32,
        transport: Option<TransportKind>,
        faults: u32,
        verdicts: &[Verdict],
    ) -> Self {
        let mut times: Vec<f64> = verdicts
            .iter()
            .filter_map(|verdict| verdict.after)
            .map(|after| after.as_secs_f64() * 1e3)
            .collect();
        times.sort_by(f64::total_cmp);
        let hangs = verdicts.iter().filter(|verdict| verdict.after.is_none()).count();
        let complaints = verdicts.iter().filter(|verdict| verdict.complaint.is_some()).count();
        Self {
            fault,
            ranks,
            transport: transport.unwrap_or(TransportKind::SharedMemory).to_string(),
            faults,
            p50_ms: percentile(&times, 50),
            p99_ms: percentile(&times, 99),
            max_ms: percentile(&times, 100),
            hangs,
            unnamed: complaints - hangs,
        }
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Row { fault, ranks, transport, faults, p50_ms, p99_ms, max_ms, hangs, unnamed } = self;
        let [p50, p99, max] = [p50_ms, p99_ms, max_ms].map(|time| format!("{time:.2}"));
        let [fault, ranks, faults] = [fault.to_string(), ranks.to_string(), faults.to_string()];
        let [hangs, unnamed] = [hangs, unnamed].map(usize::to_string);
        f.write_str(&line(&[&fault, &ranks, transport, &faults, &p50, &p99, &max, &hangs, &unnamed]))
    }
}

const HEADING: [[&str; 9]; 2] = [
    ["fault", "ranks", "transport", "faults", "p50", "p99", "max", "hangs", "unnamed"],
    ["", "", "", "", "ms", "ms", "ms", "", ""],
];

fn line(cells: &[&str; 9]) -> String {
    let [fault, ranks, transport, faults, p50, p99, max, hangs, unnamed] = cells;
    format!(
        "{fault:<7} {ranks:>5} {transport:>9} {faults:>6} {p50:>9} {p99:>9} {max:>9} {hangs:>5} {unnamed:>7}"
    )
}

/// Delays of a few training steps, the same for the same seed (SplitMix64).
struct Delays(u64);

impl Delays {
    fn next(&mut self) -> Duration {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        Duration::from_micros(mix(self.0) % 20_000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_differ_and_come_again_for_the_same_seed() {
        let delays = |seed| {
            let mut delays = Delays(seed);
            (0..100).map(|_| delays.next()).collect::<Vec<_>>()
        };
        assert_eq!(delays(7), delays(7));
        assert_ne!(delays(7), delays(8));
        let distinct: std::collections::HashSet<_> = delays(7).into_iter().collect();
        assert!(distinct.len() > 95 && distinct.iter().all(|delay| *delay < Duration::from_millis(20)));
    }
}
