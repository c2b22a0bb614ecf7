//! `phalanx plan`: a pipeline's schedule as a picture.

use std::fmt::Write as _;
use std::io::{self, Write};
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use phalanx::pipeline::{Action, Costs, Pass, Plan as Pipeline, Schedule, Timeline};

use crate::output::print;
use crate::render::wants_colour;

/// Draw the schedule of a pipeline, with its bubble and what each rank holds
///
/// A line is a rank, a cell a unit of time: F0 is the forward pass of micro-batch 0, B0 its backward pass.
/// Dots are time in which a rank waits. Where ranks have several stages, a letter says which.
#[derive(Args, Debug)]
pub(crate) struct Plan {
    /// In which order micro-batches go through the stages
    #[arg(long, value_enum, default_value_t = Name::OneForwardOneBackward)]
    schedule: Name,

    /// The number of ranks
    #[arg(long, value_name = "N", default_value_t = 4)]
    ranks: usize,

    /// The number of micro-batches of a batch
    #[arg(long, value_name = "N", default_value_t = 8)]
    microbatches: usize,

    /// The number of stages on each rank, for interleaved [default: 2]
    #[arg(long, value_name = "N")]
    stages_per_rank: Option<usize>,

    /// The time of a forward pass, in cells
    #[arg(long, value_name = "CELLS", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
    forward: u32,

    /// The time of a backward pass, in cells
    #[arg(long, value_name = "CELLS", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=200))]
    backward: u32,

    /// The time until another rank has a result, in cells
    #[arg(long, value_name = "CELLS", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=100))]
    transfer: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Name {
    /// All forward passes, then all backward passes
    Gpipe,
    /// Forward and backward passes in turn
    #[value(name = "1f1b")]
    OneForwardOneBackward,
    /// 1f1b with several stages on each rank
    Interleaved,
}

/// The width of a line's cells, before the picture goes on below. The picture of the defaults is not divided.
const COLUMNS: usize = 100;
/// More cells than somebody would look at: of a rank, and of all.
const MOST_CELLS: usize = 4096;
const MOST_CELLS_OF_ALL: usize = 1 << 18;
/// Stages of a rank, if they are interleaved and nobody says how many.
const STAGES: usize = 2;

pub(crate) fn run(options: &Plan) -> ExitCode {
    let drawn = text(options, wants_colour(&io::stdout()));
    match drawn.and_then(|text| print(text.as_bytes())) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            let _ = writeln!(io::stderr(), "phalanx: {message}");
            ExitCode::FAILURE
        }
    }
}

fn text(options: &Plan, colour: bool) -> Result<String, String> {
    if options.stages_per_rank.is_some() && options.schedule != Name::Interleaved {
        return Err("--stages-per-rank is for --schedule interleaved: in the others each rank has one stage"
            .to_owned());
    }
    let schedule = match options.schedule {
        Name::Gpipe => Schedule::GPipe,
        Name::OneForwardOneBackward => Schedule::OneForwardOneBackward,
        Name::Interleaved => {
            Schedule::Interleaved { stages_per_rank: options.stages_per_rank.unwrap_or(STAGES) }
        }
    };
    let plan = schedule.plan(options.ranks, options.microbatches).map_err(|error| error.to_string())?;
    let costs = Costs {
        forward: options.forward.into(),
        backward: options.backward.into(),
        transfer: options.transfer.into(),
    };
    let timeline = plan.timeline(&costs).map_err(|error| error.to_string())?;
    let mut text = String::new();
    let cells = timeline.end() as usize;
    if cells <= MOST_CELLS && cells.saturating_mul(plan.ranks()) <= MOST_CELLS_OF_ALL {
        draw(&mut text, &plan, &timeline, colour);
    } else {
        let _ = writeln!(text, "{} ranks of {cells} cells: too many for a picture\n", plan.ranks());
    }
    table(&mut text, &plan, &timeline);
    Ok(text)
}

/// The picture, in blocks of [`COLUMNS`].
fn draw(text: &mut String, plan: &Pipeline, timeline: &Timeline, colour: bool) {
    let several = plan.stages() > plan.ranks();
    let width = plan.microbatches().saturating_sub(1).to_string().len() + 2 + usize::from(several);
    let cells = timeline.end() as usize;
    let rows: Vec<Vec<Option<(Action, bool)>>> = (0..plan.ranks())
        .map(|rank| {
            let mut row = vec![None; cells];
            for interval in timeline.rank(rank) {
                // Times are whole numbers of cells.
                let cells = &mut row[interval.start as usize..interval.end as usize];
                for (index, cell) in cells.iter_mut().enumerate() {
                    *cell = Some((interval.action, index == 0));
                }
            }
            row
        })
        .collect();
    let digits = plan.ranks().saturating_sub(1).to_string().len();
    let block = (COLUMNS / width).max(1);
    for first in (0..cells).step_by(block) {
        for (rank, row) in rows.iter().enumerate() {
            let _ = write!(text, "rank {rank:>digits$}  ");
            for cell in row.iter().skip(first).take(block) {
                cell_text(text, *cell, plan, width, several, colour);
            }
            let trimmed = text.trim_end_matches(' ').len();
            text.truncate(trimmed);
            text.push('\n');
        }
        text.push('\n');
    }
}

fn cell_text(
    text: &mut String,
    cell: Option<(Action, bool)>,
    plan: &Pipeline,
    width: usize,
    several: bool,
    colour: bool,
) {
    let Some((action, first)) = cell else {
        let _ = write!(text, "{:<width$}", ".");
        return;
    };
    let (letter, code) = match action.pass {
        Pass::Forward => ('F', "36"),
        Pass::Backward => ('B', "32"),
    };
    let mut label = String::new();
    if first {
        let _ = write!(label, "{letter}{}", action.microbatch);
        if several {
            let stage = action.stage / plan.ranks();
            // Letters for as many stages as a rank is likely to have.
            label.push(
                u8::try_from(stage)
                    .ok()
                    .filter(|stage| *stage < 26)
                    .map_or('?', |stage| (b'a' + stage) as char),
            );
        }
    } else {
        label.extend(std::iter::repeat_n('-', width - 1));
    }
    let padding = " ".repeat(width.saturating_sub(label.len()));
    if colour {
        let _ = write!(text, "\x1b[{code}m{label}\x1b[0m{padding}");
    } else {
        let _ = write!(text, "{label}{padding}");
    }
}

/// What each rank holds and how long it waits.
fn table(text: &mut String, plan: &Pipeline, timeline: &Timeline) {
    let _ = writeln!(text, "rank  holds at most  waits");
    // Of all ranks: looked at once.
    let end = timeline.end();
    for rank in 0..plan.ranks() {
        let busy: f64 = timeline.rank(rank).iter().map(|interval| interval.end - interval.start).sum();
        let waits = 100.0 * (1.0 - busy / end);
        let _ = writeln!(text, "{rank:>4}  {:>13}  {waits:>4.1} %", plan.peak_activations(rank));
    }
    let _ = writeln!(
        text,
        "{end} cells, bubble {:.1} %; held are activations of micro-batches, counted for each stage",
        100.0 * timeline.bubble()
    );
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Arguments {
        #[command(flatten)]
        plan: Plan,
    }

    fn drawn(arguments: &str) -> Result<String, String> {
        let arguments = std::iter::once("plan").chain(arguments.split_whitespace());
        text(&Arguments::try_parse_from(arguments).unwrap().plan, false)
    }

    #[test]
    fn a_cell_is_a_unit_of_time() {
        let expected = "\
rank 0  F0 F1 .  .  B0 -- .  B1 --
rank 1  .  F0 B0 -- F1 B1 -- .  .

rank  holds at most  waits
   0              2  33.3 %
   1              1  33.3 %
9 cells, bubble 33.3 %; held are activations of micro-batches, counted for each stage
";
        assert_eq!(drawn("--ranks 2 --microbatches 2").unwrap(), expected);
    }

    #[test]
    fn stages_have_letters_and_long_pictures_go_on_below() {
        let text = drawn("--schedule interleaved --ranks 2 --microbatches 2").unwrap();
        assert!(text.starts_with("rank 0  F0a F1a F0b F1b"), "{text}");
        assert!(text.contains(" B0b ---"), "{text}");
        let text = drawn("--ranks 2 --microbatches 32").unwrap();
        let blocks = |text: &str| text.lines().filter(|line| line.starts_with("rank 0 ")).count();
        assert_eq!((blocks(&text), blocks(&drawn("").unwrap())), (4, 1), "{text}");
        assert!(text.lines().all(|line| line.len() <= 8 + COLUMNS) && text.contains("B31"), "{text}");
    }

    #[test]
    fn what_cannot_be_planned_or_drawn_is_said() {
        let error = drawn("--schedule interleaved --ranks 4 --microbatches 6").unwrap_err();
        assert!(error.contains("no multiple of the ranks"), "{error}");
        let error = drawn("--microbatches 0").unwrap_err();
        assert!(error.contains("needs at least one rank, one micro-batch and one stage"), "{error}");
        let text = drawn("--ranks 2 --microbatches 2000").unwrap();
        assert!(
            text.starts_with("2 ranks of 6003 cells: too many for a picture")
                && text.contains("6003 cells, bubble 0.0 %"),
            "{text}"
        );
        let text = drawn("--ranks 1000 --microbatches 1").unwrap();
        assert!(text.starts_with("1000 ranks of 3000 cells: too many for a picture"), "{text}");
        let error = drawn("--stages-per-rank 3").unwrap_err();
        assert!(error.starts_with("--stages-per-rank is for --schedule interleaved"), "{error}");
    }
}
