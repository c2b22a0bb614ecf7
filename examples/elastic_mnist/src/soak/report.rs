//! What the soak has shown, and what must hold.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use anyhow::{Result, ensure};
use phalanx::launch::Outcome;

use super::Trial;
use super::faults::{Fault, Kind};
use super::system::Held;

/// How much worse the mean accuracy may be than without faults, in percentage points: more than trainings differ by chance.
const ACCURACY: f64 = 0.5;
/// How much the launcher and a worker may grow, in MiB.
const GROWTH: f64 = 32.0;

pub struct Report {
    pub workers: usize,
    pub quiet: Trial,
    pub soaked: Trial,
    /// What is left.
    pub processes: Vec<u32>,
    pub shared_memory: Vec<String>,
    /// What this process held before and after.
    pub descriptors: (Option<Held>, Option<Held>),
}

impl Report {
    /// The first thing that does not hold.
    pub fn check(&self) -> Result<()> {
        let Trial { seen, outcome, report, .. } = &self.soaked;
        let said = || {
            let lines: Vec<&str> = seen.errors.iter().map(String::as_str).collect();
            lines.join("\n")
        };
        ensure!(
            matches!(self.quiet.report.outcome, Outcome::Succeeded),
            "without faults: {}",
            ended(&self.quiet.report.outcome)
        );
        if let Some(hang) = &outcome.hang {
            anyhow::bail!("{hang}\n{}", said());
        }
        ensure!(matches!(report.outcome, Outcome::Succeeded), "{}\n{}", ended(&report.outcome), said());
        ensure!(!outcome.faults.is_empty(), "no fault was made");
        ensure!(seen.given_up.is_empty(), "places were given up: {:?}", seen.given_up);
        ensure!(
            seen.done.len() == self.workers,
            "{} of {} workers have come to the end",
            seen.done.len(),
            self.workers
        );
        let hashes: BTreeSet<&String> = seen.done.values().collect();
        ensure!(hashes.len() == 1, "the models differ: {:?}", seen.done);
        ensure!(
            outcome.unexplained.is_empty(),
            "workers were accused of what they had not done: {:?}",
            outcome.unexplained
        );
        let (quiet, soaked) = (mean(&self.quiet.seen.accuracies), mean(&seen.accuracies));
        ensure!(soaked >= quiet - ACCURACY / 100.0, "accuracy {soaked}, without faults {quiet}");
        ensure!(self.processes.is_empty(), "processes are left: {:?}", self.processes);
        ensure!(self.shared_memory.is_empty(), "shared memory is left: {:?}", self.shared_memory);
        let (before, after) = self.descriptors;
        let count = |held: Option<Held>| held.map(|held| held.descriptors);
        ensure!(
            count(before) == count(after),
            "descriptors are left: {:?} before, {:?} after",
            count(before),
            count(after)
        );
        let grown = |first: Held, last: Held| last.memory - first.memory;
        if let Some((first, last)) = outcome.launcher {
            ensure!(grown(first, last) < GROWTH, "the launcher has grown: {first}, then {last}");
        }
        for (pid, (_, first, last)) in &outcome.workers {
            ensure!(grown(*first, *last) < GROWTH, "worker {pid} has grown: {first}, then {last}");
            ensure!(
                last.descriptors <= first.descriptors + 4,
                "worker {pid} loses descriptors: {first}, then {last}"
            );
            ensure!(last.threads <= first.threads + 4, "worker {pid} loses threads: {first}, then {last}");
        }
        Ok(())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Trial { seen, outcome, report, lasted } = &self.soaked;
        let mut by_kind: BTreeMap<Option<Kind>, Vec<Fault>> = BTreeMap::new();
        for fault in &outcome.faults {
            by_kind.entry(Some(fault.kind)).or_default().push(*fault);
        }
        by_kind.insert(None, outcome.faults.clone());
        writeln!(
            f,
            "\n| fault | times | next commit p50 | p99 | longest | all there again p50 | longest | steps lost, mean | most |"
        )?;
        writeln!(f, "|---|---|---|---|---|---|---|---|---|")?;
        // All of them last.
        let (all, kinds): (Vec<_>, Vec<_>) = by_kind.iter().partition(|(kind, _)| kind.is_none());
        for (kind, faults) in kinds.into_iter().chain(all).filter(|(_, faults)| !faults.is_empty()) {
            let name = kind.map_or("all".to_owned(), |kind| kind.to_string());
            let commit = sorted(faults.iter().map(|fault| fault.commit));
            let whole = sorted(faults.iter().map(|fault| fault.whole));
            let lost: Vec<u64> = faults.iter().map(|fault| fault.lost).collect();
            writeln!(
                f,
                "| {name} | {} | {:.2} s | {:.2} s | {:.2} s | {:.2} s | {:.2} s | {:.1} | {} |",
                faults.len(),
                at(&commit, 0.5),
                at(&commit, 0.99),
                at(&commit, 1.0),
                at(&whole, 0.5),
                at(&whole, 1.0),
                lost.iter().sum::<u64>() as f64 / lost.len() as f64,
                lost.iter().max().unwrap_or(&0),
            )?;
        }
        writeln!(
            f,
            "\n{:.1} minutes, {} groups, {} workers replaced, {} steps committed, {} lost",
            lasted.as_secs_f64() / 60.0,
            seen.rounds.len(),
            report.replacements,
            seen.steps,
            outcome.faults.iter().map(|fault| fault.lost).sum::<u64>()
        )?;
        for (name, accuracies) in [("with", &seen.accuracies), ("without", &self.quiet.seen.accuracies)] {
            let percent = sorted_numbers(accuracies.values().map(|accuracy| 100.0 * accuracy));
            let (worst, best) = (percent.first().unwrap_or(&f64::NAN), percent.last().unwrap_or(&f64::NAN));
            writeln!(
                f,
                "accuracy {name} faults: {} trainings, mean {:.2} %, {worst:.2} to {best:.2} %",
                percent.len(),
                100.0 * mean(accuracies)
            )?;
        }
        let models: BTreeSet<&String> = seen.done.values().collect();
        writeln!(
            f,
            "{} workers have come to the end, with {} different models",
            seen.done.len(),
            models.len()
        )?;
        writeln!(
            f,
            "left: {} processes, {} objects in /dev/shm; groups nobody can explain: {}",
            self.processes.len(),
            self.shared_memory.len(),
            outcome.unexplained.len()
        )?;
        if let Some((first, last)) = outcome.launcher {
            writeln!(f, "launcher: {first}; at the end {last}")?;
        }
        // The one that has outlived most.
        if let Some((_, (time, first, last))) = outcome.workers.iter().max_by_key(|(_, (time, ..))| *time) {
            writeln!(f, "the oldest worker: {first}; {:.1} minutes later {last}", time.as_secs_f64() / 60.0)?;
        }
        Ok(())
    }
}

fn ended(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Failed(failure) => failure.to_string(),
        other => format!("{other:?}"),
    }
}

fn mean(accuracies: &BTreeMap<u64, f64>) -> f64 {
    accuracies.values().sum::<f64>() / accuracies.len() as f64
}

fn sorted(durations: impl Iterator<Item = Duration>) -> Vec<f64> {
    sorted_numbers(durations.map(|duration| duration.as_secs_f64()))
}

fn sorted_numbers(numbers: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut numbers: Vec<f64> = numbers.collect();
    numbers.sort_unstable_by(f64::total_cmp);
    numbers
}

/// The value below which this share of all lies.
fn at(sorted: &[f64], share: f64) -> f64 {
    sorted.get((sorted.len().saturating_sub(1) as f64 * share).round() as usize).copied().unwrap_or(f64::NAN)
}
