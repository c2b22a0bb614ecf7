//! Curves in one system of axes.

use std::ops::Range;

use anyhow::Result;
use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

use crate::canvas::{Area, FAINT, FONT, INK, text};

/// The axes: what they show, from where to where, and what stands at their ticks.
pub struct Axes<'a> {
    /// What the curves are.
    pub title: &'a str,
    /// From left to right.
    pub x: Range<f64>,
    /// From the bottom to the top.
    pub y: Range<f64>,
    /// A place on the x-axis in words.
    pub x_label: &'a dyn Fn(&f64) -> String,
    /// A place on the y-axis in words.
    pub y_label: &'a dyn Fn(&f64) -> String,
}

/// Points and the colour of the line through them.
pub struct Curve {
    /// In the order of the line.
    pub points: Vec<(f64, f64)>,
    /// Of the line.
    pub colour: RGBColor,
    /// Its width in pixels.
    pub width: u32,
    /// Whether each point has a dot.
    pub dots: bool,
}

/// Draws `curves` in `area`, those behind over those before.
pub fn draw(area: &Area<'_>, axes: &Axes<'_>, curves: &[Curve]) -> Result<()> {
    let mut chart = ChartBuilder::on(area)
        .margin(18)
        .caption(axes.title, text(24.0, HPos::Left))
        .x_label_area_size(46)
        .y_label_area_size(70)
        .build_cartesian_2d(axes.x.clone(), axes.y.clone())?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .bold_line_style(FAINT)
        .axis_style(INK)
        .label_style((FONT, 19.0).into_font().color(&INK))
        .x_label_formatter(axes.x_label)
        .y_label_formatter(axes.y_label)
        .draw()?;
    for Curve { points, colour, width, dots } in curves {
        chart.draw_series(LineSeries::new(points.clone(), colour.stroke_width(*width)))?;
        if *dots {
            chart.draw_series(points.iter().map(|point| Circle::new(*point, 5, colour.filled())))?;
        }
    }
    Ok(())
}
