//! The two ways side by side, as a PNG.

use std::fs::File;
use std::io::BufWriter;
use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{FontStyle, register_font};

use super::Figures;

const WIDTH: u32 = 1600;
const HEIGHT: u32 = 560;
/// From the bottom of a panel to its bars, and from its top to the highest.
const MARGIN: i32 = 70;
const TOP: i32 = 110;

/// The machine may have no fonts: the text is drawn with this one.
static ROBOTO: &[u8] = include_bytes!("../../../crates/phalanx-bench/assets/Roboto-Regular.ttf");
const FONT: &str = "sans-serif";

/// Okabe and Ito's colours, which the colour-blind can tell apart.
const BLUE: RGBColor = RGBColor(0, 114, 178);
const ORANGE: RGBColor = RGBColor(213, 94, 0);
const INK: RGBColor = RGBColor(40, 40, 40);

/// Draws `dp` and `ddp` into the file at `path`.
pub fn draw(path: &Path, dp: &Figures, ddp: &Figures) -> Result<()> {
    register_font(FONT, FontStyle::Normal, ROBOTO).map_err(|_| anyhow!("the font cannot be read"))?;
    let mut pixels = vec![0; (WIDTH * HEIGHT * 3) as usize];
    {
        let root = BitMapBackend::with_buffer(&mut pixels, (WIDTH, HEIGHT)).into_drawing_area();
        root.fill(&WHITE)?;
        let panels = root.split_evenly((1, 3));
        bars(&panels[0], "epoch (s)", &[("DataParallel", dp.epoch_s, ORANGE), ("Ddp", ddp.epoch_s, BLUE)])?;
        bars(
            &panels[1],
            "peak memory (MB)",
            &[
                ("main", dp.peak_main_mb, ORANGE),
                ("other", dp.peak_other_mb, ORANGE),
                ("rank 0", ddp.peak_main_mb, BLUE),
                ("other", ddp.peak_other_mb, BLUE),
            ],
        )?;
        bars(
            &panels[2],
            "moved, or given to collectives, in a step (MB)",
            &[("DataParallel", dp.moved_mb, ORANGE), ("Ddp", ddp.moved_mb, BLUE)],
        )?;
        root.present()?;
    }
    let mut encoder = png::Encoder::new(BufWriter::new(File::create(path)?), WIDTH, HEIGHT);
    encoder.set_color(png::ColorType::Rgb);
    let mut writer = encoder.write_header()?;
    writer.write_image_data(&pixels)?;
    Ok(writer.finish()?)
}

/// A bar for each value, from zero, with its name below and its number above.
fn bars(
    area: &DrawingArea<BitMapBackend<'_>, Shift>,
    title: &str,
    values: &[(&str, f64, RGBColor)],
) -> Result<()> {
    let (width, height) = area.dim_in_pixel();
    let text = |size: f64| (FONT, size).into_font().color(&INK).pos(Pos::new(HPos::Center, VPos::Center));
    area.draw(&Text::new(title.to_owned(), (width as i32 / 2, 36), text(28.0)))?;
    let highest = values.iter().map(|(_, value, _)| *value).fold(f64::MIN_POSITIVE, f64::max);
    let (floor, slot) = (height as i32 - MARGIN, (width as i32 - MARGIN) / values.len() as i32);
    for (number, (name, value, colour)) in values.iter().enumerate() {
        let middle = MARGIN / 2 + slot * number as i32 + slot / 2;
        let top = floor - (f64::from(floor - TOP) * value / highest) as i32;
        let bar = [(middle - slot / 3, top), (middle + slot / 3, floor)];
        area.draw(&Rectangle::new(bar, colour.filled()))?;
        let digits = if *value < 10.0 { 2 } else { 0 };
        area.draw(&Text::new(format!("{value:.digits$}"), (middle, top - 18), text(22.0)))?;
        area.draw(&Text::new((*name).to_owned(), (middle, floor + 26), text(22.0)))?;
    }
    Ok(())
}
