//! What the examples that compare ways to train share: plots as PNG files, how much memory each replica holds, and how well
//! communication hides behind backward.

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod bars;
pub mod canvas;
pub mod curves;
pub mod memory;
pub mod overlap;

/// The middle one of `values`, the larger of two; NaN if there is none.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
