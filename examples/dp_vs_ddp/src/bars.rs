//! Panels of bars, as a PNG.

use std::fs::File;
use std::io::BufWriter;
use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{FontStyle, register_font};

/// Of each panel, in pixels.
const WIDTH: u32 = 540;
const HEIGHT: u32 = 470;
/// Of the legend.
const LEGEND: u32 = 60;
/// From the bottom of a panel to its bars, from its top to the highest, and at its sides.
const FLOOR: i32 = 60;
const TOP: i32 = 110;
const MARGIN: i32 = 30;

/// The machine may have no fonts: the text is drawn with this one.
static ROBOTO: &[u8] = include_bytes!("../../../crates/phalanx-bench/assets/Roboto-Regular.ttf");
const FONT: &str = "sans-serif";

/// Okabe and Ito's colours, which the colour-blind can tell apart.
pub const BLUE: RGBColor = RGBColor(0, 114, 178);
pub const ORANGE: RGBColor = RGBColor(213, 94, 0);
const INK: RGBColor = RGBColor(40, 40, 40);

/// Bars that are compared with each other, from zero.
pub struct Panel {
    /// What is shown, and its unit.
    pub title: String,
    /// A name, and the bars above it.
    pub groups: Vec<(String, Vec<(f64, RGBColor)>)>,
    /// Behind the point of the numbers above the bars.
    pub digits: usize,
}

/// Draws `panels`, so many in a row, into the file at `path`, below what the colours mean.
pub fn draw(path: &Path, legend: &[(&str, RGBColor)], panels: &[Panel], columns: usize) -> Result<()> {
    register_font(FONT, FontStyle::Normal, ROBOTO).map_err(|_| anyhow!("the font cannot be read"))?;
    let rows = panels.len().div_ceil(columns.max(1));
    let (width, height) = (WIDTH * columns as u32, HEIGHT * rows as u32 + LEGEND);
    let mut pixels = vec![0; (width * height * 3) as usize];
    {
        let root = BitMapBackend::with_buffer(&mut pixels, (width, height)).into_drawing_area();
        root.fill(&WHITE)?;
        let (top, rest) = root.split_vertically(LEGEND);
        explain(&top, legend)?;
        for (area, panel) in rest.split_evenly((rows, columns)).iter().zip(panels) {
            bars(area, panel)?;
        }
        root.present()?;
    }
    let mut encoder = png::Encoder::new(BufWriter::new(File::create(path)?), width, height);
    encoder.set_color(png::ColorType::Rgb);
    let mut writer = encoder.write_header()?;
    writer.write_image_data(&pixels)?;
    Ok(writer.finish()?)
}

fn explain(area: &DrawingArea<BitMapBackend<'_>, Shift>, legend: &[(&str, RGBColor)]) -> Result<()> {
    let mut left = MARGIN;
    let style = (FONT, 24.0).into_font().color(&INK).pos(Pos::new(HPos::Left, VPos::Center));
    for (name, colour) in legend {
        area.draw(&Rectangle::new([(left, 24), (left + 22, 46)], colour.filled()))?;
        area.draw(&Text::new((*name).to_owned(), (left + 34, 35), style.clone()))?;
        left += 34 + area.estimate_text_size(name, &style)?.0 as i32 + 60;
    }
    Ok(())
}

/// Bars with their numbers above, and the names of their groups below.
fn bars(area: &DrawingArea<BitMapBackend<'_>, Shift>, panel: &Panel) -> Result<()> {
    let (width, height) = area.dim_in_pixel();
    let text = |size: f64| (FONT, size).into_font().color(&INK).pos(Pos::new(HPos::Center, VPos::Center));
    area.draw(&Text::new(panel.title.clone(), (width as i32 / 2, 44), text(27.0)))?;
    let all = || panel.groups.iter().flat_map(|(_, bars)| bars.iter());
    let highest = all().map(|(value, _)| *value).fold(f64::MIN_POSITIVE, f64::max);
    let (floor, inside) = (height as i32 - FLOOR, width as i32 - 2 * MARGIN);
    let slot = inside / panel.groups.len().max(1) as i32;
    area.draw(&PathElement::new(vec![(MARGIN, floor), (width as i32 - MARGIN, floor)], INK))?;
    for (number, (name, bars)) in panel.groups.iter().enumerate() {
        let middle = MARGIN + slot * number as i32 + slot / 2;
        let wide = (slot * 3 / 4 / bars.len().max(1) as i32).min(110);
        let mut left = middle - wide * bars.len() as i32 / 2;
        for (value, colour) in bars {
            let top = floor - (f64::from(floor - TOP) * value / highest) as i32;
            area.draw(&Rectangle::new([(left + 2, top), (left + wide - 2, floor)], colour.filled()))?;
            let label = format!("{value:.0$}", panel.digits);
            let size = if wide < 50 { 17.0 } else { 21.0 };
            area.draw(&Text::new(label, (left + wide / 2, top - 16), text(size)))?;
            left += wide;
        }
        area.draw(&Text::new(name.clone(), (middle, floor + 26), text(22.0)))?;
    }
    Ok(())
}
