//! The one progress bar of the job.

use std::io;
use std::time::Instant;

use indicatif::{ProgressBar, ProgressStyle};

use super::Sink;
use crate::{Console, Outcome, Record, Value};

/// How many scalars are shown beside the bar.
const SHOWN: usize = 4;
/// Figures of machines are not.
const LEFT_OUT: &str = "system/";

/// A progress bar with the newest scalars; where there is no terminal, a line now and then. It shows the step that was logged last.
pub struct Progress {
    console: Console,
    steps: Option<u64>,
    /// Where there is a terminal.
    bar: Option<ProgressBar>,
    step: Option<u64>,
    /// The newest scalars, by tag, in the order in which they were first logged.
    scalars: Vec<(String, f64)>,
    /// The first step of this attempt, and when it was logged, in seconds since 1970.
    began: Option<(u64, f64)>,
    /// When the newest record was logged.
    newest: f64,
    /// The last line, where there is no terminal: when, and for which step.
    written: Option<(Instant, u64)>,
}

impl Progress {
    /// On this console, towards `steps` if they are known.
    pub fn new(console: Console, steps: Option<u64>) -> Self {
        let bar = console.bar(steps);
        if let Some(bar) = &bar {
            let template = match steps {
                Some(_) => "{wide_bar} {pos}/{len}  {elapsed} < {eta}  {msg}",
                None => "{spinner} {pos}  {elapsed}  {msg}",
            };
            // The template is a constant, which a test has seen.
            bar.set_style(
                ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()),
            );
        }
        let (step, scalars) = (None, Vec::new());
        Self { console, steps, bar, step, scalars, began: None, newest: 0.0, written: None }
    }

    fn message(&self) -> String {
        let scalars = self.scalars.iter().map(|(tag, value)| format!("{tag} {}", short(*value)));
        scalars.collect::<Vec<_>>().join("  ")
    }

    /// A line for what is no terminal.
    fn line(&self, step: u64) -> String {
        let of_all = match self.steps {
            Some(steps) if steps > 0 => {
                // The product of large numbers has more than 64 bits.
                let percent = u128::from(step.min(steps)) * 100 / u128::from(steps);
                format!("/{steps} ({percent} %)")
            }
            _ => String::new(),
        };
        let rate = self.began.map(|(first, began)| step.saturating_sub(first) as f64 / (self.newest - began));
        let rate = rate.filter(|rate| rate.is_finite() && *rate > 0.0);
        let rate = rate.map_or(String::new(), |rate| format!("  {} steps/s", short(rate)));
        format!("step {step}{of_all}{rate}  {}", self.message()).trim_end().to_owned()
    }
}

impl Sink for Progress {
    fn name(&self) -> &str {
        "progress bar"
    }

    fn resume(&mut self, step: u64) -> io::Result<()> {
        if let Some(bar) = &self.bar {
            bar.set_position(step);
            bar.reset_eta();
        }
        Ok(())
    }

    fn write(&mut self, record: &Record) -> io::Result<()> {
        let (Value::Scalar(value), Some(step)) = (&record.value, record.step) else { return Ok(()) };
        self.step = self.step.max(Some(step));
        self.began.get_or_insert((step, record.time));
        self.newest = record.time;
        if record.tag.starts_with(LEFT_OUT) {
            return Ok(());
        }
        if let Some((_, newest)) = self.scalars.iter_mut().find(|(tag, _)| *tag == record.tag) {
            *newest = *value;
        } else if self.scalars.len() < SHOWN {
            self.scalars.push((record.tag.clone(), *value));
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        let Some(step) = self.step else { return Ok(()) };
        match &self.bar {
            Some(bar) => {
                bar.set_message(self.message());
                bar.set_position(step);
            }
            None if self.written.is_none_or(|(at, _)| at.elapsed() >= self.console.interval()) => {
                self.written = Some((Instant::now(), step));
                self.console.println(&self.line(step));
            }
            None => {}
        }
        Ok(())
    }

    fn finish(&mut self, outcome: &Outcome) -> io::Result<()> {
        // Steps that are counted from 0 end one before their number.
        let step = self.step.map(|step| match self.steps {
            Some(steps) if *outcome == Outcome::Finished && step.checked_add(1) == Some(steps) => steps,
            _ => step,
        });
        match (&self.bar, step) {
            (Some(bar), step) => {
                if let Some(step) = step {
                    bar.set_position(step);
                }
                bar.abandon();
            }
            (None, Some(step)) if self.written.is_none_or(|(_, written)| written != step) => {
                self.console.println(&self.line(step));
            }
            (None, _) => {}
        }
        if let Outcome::Failed(cause) = outcome {
            self.console.println(&format!("the run has failed: {cause}"));
        }
        Ok(())
    }
}

/// A number of about four digits.
fn short(value: f64) -> String {
    match value.abs() {
        size if value == 0.0 || (0.001..10_000.0).contains(&size) => {
            let digits = if size >= 100.0 {
                1
            } else if size >= 1.0 {
                3
            } else {
                4
            };
            format!("{value:.digits$}")
        }
        size if size.is_finite() => format!("{value:.2e}"),
        _ => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        let values = [0.0, 0.5, 0.12345, 1.5, 123.456, 12345.6, 1e-5, f64::NAN, f64::NEG_INFINITY, -2.25];
        let texts =
            ["0.0000", "0.5000", "0.1235", "1.500", "123.5", "1.23e4", "1.00e-5", "NaN", "-inf", "-2.250"];
        assert_eq!(values.map(short), texts);
    }

    #[test]
    fn any_number_of_steps_has_its_share() {
        let of = |steps, step| {
            let mut progress = Progress::new(Console::lines(io::sink()), Some(steps));
            progress.step = Some(step);
            progress.finish(&Outcome::Finished).unwrap();
            progress.line(step)
        };
        assert_eq!(of(8, 2), "step 2/8 (25 %)");
        let most = u64::MAX;
        assert_eq!(of(most, most), format!("step {most}/{most} (100 %)"));
        assert_eq!(of(most, most / 2), format!("step {}/{most} (49 %)", most / 2));
    }

    #[test]
    fn the_templates_can_be_read() {
        for template in
            ["{wide_bar} {pos}/{len}  {elapsed} < {eta}  {msg}", "{spinner} {pos}  {elapsed}  {msg}"]
        {
            ProgressStyle::with_template(template).unwrap();
        }
    }
}
