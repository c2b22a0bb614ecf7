//! The two ways side by side.

use std::path::Path;

use anyhow::Result;
use common::bars::{self, Panel};
use common::canvas::{BLUE, ORANGE};

use super::Figures;

/// Draws `dp` and `ddp` into the file at `path`.
pub fn draw(path: &Path, dp: &Figures, ddp: &Figures) -> Result<()> {
    let panel = |title: &str, digits, value: fn(&Figures) -> f64| Panel {
        title: title.to_owned(),
        groups: vec![
            ("DataParallel".to_owned(), vec![(value(dp), ORANGE)]),
            ("Ddp".to_owned(), vec![(value(ddp), ORANGE)]),
        ],
        digits,
    };
    let memory = |figures: &Figures| vec![(figures.peak_main_mb, ORANGE), (figures.peak_other_mb, BLUE)];
    let panels = [
        panel("epoch (s)", 2, |figures| figures.epoch_s),
        Panel {
            title: "peak memory (MB)".to_owned(),
            groups: vec![("DataParallel".to_owned(), memory(dp)), ("Ddp".to_owned(), memory(ddp))],
            digits: 0,
        },
        panel("moved in a step (MB)", 0, |figures| figures.moved_mb),
    ];
    let legend = [("main replica, rank 0, or all together", ORANGE), ("the other replicas or ranks", BLUE)];
    bars::draw(path, &legend, &panels, panels.len())
}
