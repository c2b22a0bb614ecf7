//! How a language model's perplexity falls, as a PNG.

use std::path::Path;

use anyhow::{Context, Result};
use common::canvas::{self, BLUE, LEGEND, ORANGE};
use common::curves::{self, Axes, Curve};
use roberta::train::Epoch;
use serde::Deserialize;

const WIDTH: u32 = 1200;
const HEIGHT: u32 = 700;

/// A line of `metrics.jsonl`.
#[derive(Deserialize)]
struct Line {
    tag: Option<String>,
    step: Option<u64>,
    /// NaN and the infinities are texts.
    value: Option<serde_json::Value>,
}

/// Draws the perplexity of each step's texts, from the record in `run`, and that of the held-out texts after each epoch.
///
/// # Errors
/// If the record cannot be read, or the file at `path` cannot be written.
pub fn draw(path: &Path, run: &Path, epochs: &[Epoch]) -> Result<()> {
    let record = run.join("metrics.jsonl");
    let text =
        std::fs::read_to_string(&record).with_context(|| format!("cannot read {}", record.display()))?;
    let held_out = epochs.iter().map(|epoch| (epoch.steps as f64, epoch.held_out.perplexity().log10()));
    let (steps, held_out) = (of_steps(&text)?, held_out.collect::<Vec<_>>());
    let all = || steps.iter().chain(&held_out);
    let last = all().map(|(step, _)| *step).fold(1.0, f64::max);
    let least = all().map(|(_, exponent)| *exponent).fold(f64::MAX, f64::min) - 0.05;
    let most = all().map(|(_, exponent)| *exponent).fold(least + 0.1, f64::max);
    let axes = Axes {
        title: "perplexity of masked tokens, against steps",
        x: 0.0..last,
        y: least..most,
        x_label: &|step| format!("{step:.0}"),
        y_label: &|exponent| format!("{:.0}", 10_f64.powf(*exponent)),
    };
    let curves = [
        Curve { points: steps, colour: BLUE, width: 1, dots: false },
        Curve { points: held_out, colour: ORANGE, width: 3, dots: true },
    ];
    canvas::draw(path, (WIDTH, HEIGHT + LEGEND), |root| {
        let (top, rest) = root.split_vertically(LEGEND);
        canvas::legend(&top, &[("texts of a step", BLUE), ("held-out texts, after each epoch", ORANGE)])?;
        curves::draw(&rest, &axes, &curves)
    })
}

/// Of each step that is in a record, the logarithm of its perplexity.
fn of_steps(record: &str) -> Result<Vec<(f64, f64)>> {
    let lines = record.lines().map(serde_json::from_str::<Line>).collect::<Result<Vec<_>, _>>()?;
    let losses = lines.iter().filter(|line| line.tag.as_deref() == Some("train/loss"));
    let losses = losses.filter_map(|line| Some((line.step? as f64, line.value.as_ref()?.as_f64()?)));
    Ok(losses.map(|(step, loss)| (step, loss * std::f64::consts::LOG10_E)).collect())
}
