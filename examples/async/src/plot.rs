//! Images a second as bars, and accuracy against time.

use std::path::Path;

use anyhow::Result;
use common::canvas::{self, Area, COLOURS, Color, HPos, RGBColor, Rectangle, Text, text};
use common::curves::{self, Axes, Curve};

use crate::Outcome;

const WIDTH: u32 = 1500;
const HEIGHT: u32 = 620;
/// Of the panel with the bars.
const BARS: u32 = 600;
/// Of a bar and the gap below it, and where it begins.
const LINE: i32 = 60;
const THICK: i32 = 36;
const LEFT: i32 = 140;
const TOP: i32 = 80;

/// Draws `outcomes` into the file at `path`.
pub fn draw(path: &Path, outcomes: &[Outcome]) -> Result<()> {
    canvas::draw(path, (WIDTH, HEIGHT), |root| {
        let (left, right) = root.split_horizontally(BARS);
        bars(&left, outcomes)?;
        curves(&right, outcomes)
    })
}

fn colour(place: usize) -> RGBColor {
    COLOURS[place % COLOURS.len()]
}

/// Images a second of all ranks; the bars' colours are those of the curves.
fn bars(area: &Area<'_>, outcomes: &[Outcome]) -> Result<()> {
    area.draw(&Text::new("images a second, all ranks", (BARS as i32 / 2, 40), text(24.0, HPos::Center)))?;
    let most = outcomes.iter().map(|outcome| outcome.images_per_second).fold(f64::MIN_POSITIVE, f64::max);
    for (place, outcome) in outcomes.iter().enumerate() {
        let top = TOP + LINE * place as i32;
        let middle = top + THICK / 2;
        let length = (f64::from(BARS as i32 - LEFT - 110) * outcome.images_per_second / most) as i32;
        let bar = [(LEFT, top), (LEFT + length, top + THICK)];
        area.draw(&Rectangle::new(bar, colour(place).filled()))?;
        area.draw(&Text::new(outcome.way.name(), (LEFT - 12, middle), text(21.0, HPos::Right)))?;
        let label = format!("{:.0}", outcome.images_per_second);
        area.draw(&Text::new(label, (LEFT + length + 10, middle), text(20.0, HPos::Left)))?;
    }
    Ok(())
}

fn curves(area: &Area<'_>, outcomes: &[Outcome]) -> Result<()> {
    let points = || outcomes.iter().flat_map(|outcome| outcome.accuracy.iter());
    let end = points().map(|(seconds, _)| *seconds).fold(f64::MIN_POSITIVE, f64::max);
    let axes = Axes {
        title: "unseen digits recognised, against seconds of training",
        x: 0.0..end,
        y: 0.0..1.0,
        x_label: &|seconds| format!("{seconds:.0} s"),
        y_label: &|share| format!("{:.0} %", 100.0 * share),
    };
    let curve = |(place, outcome): (usize, &Outcome)| Curve {
        points: outcome.accuracy.clone(),
        colour: colour(place),
        width: 3,
        dots: false,
    };
    curves::draw(area, &axes, &outcomes.iter().enumerate().map(curve).collect::<Vec<_>>())
}
