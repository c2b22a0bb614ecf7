//! Images a second as bars, and accuracy against time.

use std::fs::File;
use std::io::BufWriter;
use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{FontStyle, register_font};

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

/// The machine may have no fonts: the text is drawn with this one.
static ROBOTO: &[u8] = include_bytes!("../../../crates/phalanx-bench/assets/Roboto-Regular.ttf");
const FONT: &str = "sans-serif";

const INK: RGBColor = RGBColor(40, 40, 40);
const FAINT: RGBColor = RGBColor(225, 225, 225);
/// Okabe and Ito's colours, which the colour-blind can tell apart; black instead of the yellow, which is hardly seen on white.
const COLOURS: [RGBColor; 8] = [
    RGBColor(0, 0, 0),
    RGBColor(86, 180, 233),
    RGBColor(0, 114, 178),
    RGBColor(0, 158, 115),
    RGBColor(213, 94, 0),
    RGBColor(230, 159, 0),
    RGBColor(204, 121, 167),
    RGBColor(136, 34, 85),
];

type Area<'a> = DrawingArea<BitMapBackend<'a>, Shift>;

/// Draws `outcomes` into the file at `path`.
pub fn draw(path: &Path, outcomes: &[Outcome]) -> Result<()> {
    register_font(FONT, FontStyle::Normal, ROBOTO).map_err(|_| anyhow!("the font cannot be read"))?;
    let mut pixels = vec![0; (WIDTH * HEIGHT * 3) as usize];
    {
        let root = BitMapBackend::with_buffer(&mut pixels, (WIDTH, HEIGHT)).into_drawing_area();
        root.fill(&WHITE)?;
        let (left, right) = root.split_horizontally(BARS);
        bars(&left, outcomes)?;
        curves(&right, outcomes)?;
        root.present()?;
    }
    let mut encoder = png::Encoder::new(BufWriter::new(File::create(path)?), WIDTH, HEIGHT);
    encoder.set_color(png::ColorType::Rgb);
    let mut writer = encoder.write_header()?;
    writer.write_image_data(&pixels)?;
    Ok(writer.finish()?)
}

fn colour(place: usize) -> RGBColor {
    COLOURS[place % COLOURS.len()]
}

fn text(size: f64, place: HPos) -> TextStyle<'static> {
    (FONT, size).into_font().color(&INK).pos(Pos::new(place, VPos::Center))
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
    let mut chart = ChartBuilder::on(area)
        .margin(18)
        .caption("unseen digits recognised, against seconds of training", text(24.0, HPos::Left))
        .x_label_area_size(46)
        .y_label_area_size(70)
        .build_cartesian_2d(0.0..end, 0.0..1.0)?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .bold_line_style(FAINT)
        .axis_style(INK)
        .label_style((FONT, 19.0).into_font().color(&INK))
        .x_label_formatter(&|seconds| format!("{seconds:.0} s"))
        .y_label_formatter(&|share| format!("{:.0} %", 100.0 * share))
        .draw()?;
    for (place, outcome) in outcomes.iter().enumerate() {
        chart.draw_series(LineSeries::new(outcome.accuracy.clone(), colour(place).stroke_width(3)))?;
    }
    Ok(())
}
