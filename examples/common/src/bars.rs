//! Panels of bars, as a PNG.

use std::path::Path;

use anyhow::Result;
use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

use crate::canvas::{self, Area, INK, LEGEND, text};

/// Of each panel, in pixels.
const WIDTH: u32 = 540;
const HEIGHT: u32 = 470;
/// From the bottom of a panel to its bars, from its top to the highest, and at its sides.
const FLOOR: i32 = 60;
const TOP: i32 = 110;
const MARGIN: i32 = 30;

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
    let rows = panels.len().div_ceil(columns.max(1));
    let size = (WIDTH * columns as u32, HEIGHT * rows as u32 + LEGEND);
    canvas::draw(path, size, |root| {
        let (top, rest) = root.split_vertically(LEGEND);
        canvas::legend(&top, legend)?;
        for (area, panel) in rest.split_evenly((rows, columns)).iter().zip(panels) {
            bars(area, panel)?;
        }
        Ok(())
    })
}

/// Bars with their numbers above, and the names of their groups below.
fn bars(area: &Area<'_>, panel: &Panel) -> Result<()> {
    let (width, height) = area.dim_in_pixel();
    let text = |size: f64| text(size, HPos::Center);
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
