//! A PNG file to draw in, its font and its colours.

use std::fs::File;
use std::io::BufWriter;
use std::path::Path;

use anyhow::{Context, Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{Pos, VPos};
use plotters::style::{FontStyle, register_font};

pub use plotters::prelude::{PathElement, Rectangle, Text};
pub use plotters::style::text_anchor::HPos;
pub use plotters::style::{Color, RGBColor};

/// The machine may have no fonts: the text is drawn with this one.
static ROBOTO: &[u8] = include_bytes!("../../../crates/phalanx-bench/assets/Roboto-Regular.ttf");
pub(crate) const FONT: &str = "sans-serif";

/// Of text and axes, and of the lines behind curves.
pub const INK: RGBColor = RGBColor(40, 40, 40);
pub(crate) const FAINT: RGBColor = RGBColor(225, 225, 225);
/// Okabe and Ito's colours, which the colour-blind can tell apart; black instead of the yellow, which is hardly seen on white.
pub const COLOURS: [RGBColor; 8] = [
    RGBColor(0, 0, 0),
    RGBColor(86, 180, 233),
    BLUE,
    RGBColor(0, 158, 115),
    ORANGE,
    RGBColor(230, 159, 0),
    RGBColor(204, 121, 167),
    RGBColor(136, 34, 85),
];
/// Their blue.
pub const BLUE: RGBColor = RGBColor(0, 114, 178);
/// Their orange that is nearly red.
pub const ORANGE: RGBColor = RGBColor(213, 94, 0);

/// The height of a legend.
pub const LEGEND: u32 = 60;

/// A part of a picture, in pixels from its upper left corner.
pub type Area<'a> = DrawingArea<BitMapBackend<'a>, Shift>;

/// Text of so many pixels, whose place is its left end, its middle or its right end.
pub fn text(size: f64, place: HPos) -> TextStyle<'static> {
    (FONT, size).into_font().color(&INK).pos(Pos::new(place, VPos::Center))
}

/// Writes the file at `path`: a picture of `width` by `height` pixels, which `paint` draws on white.
pub fn draw(
    path: &Path,
    (width, height): (u32, u32),
    paint: impl FnOnce(&Area<'_>) -> Result<()>,
) -> Result<()> {
    register_font(FONT, FontStyle::Normal, ROBOTO).map_err(|_| anyhow!("the font cannot be read"))?;
    let mut pixels = vec![0; (width * height * 3) as usize];
    {
        let root = BitMapBackend::with_buffer(&mut pixels, (width, height)).into_drawing_area();
        root.fill(&WHITE)?;
        paint(&root)?;
        root.present()?;
    }
    let file = File::create(path).with_context(|| format!("{} cannot be written", path.display()))?;
    let mut encoder = png::Encoder::new(BufWriter::new(file), width, height);
    encoder.set_color(png::ColorType::Rgb);
    let mut writer = encoder.write_header()?;
    writer.write_image_data(&pixels)?;
    Ok(writer.finish()?)
}

/// What the colours mean, in an area of [`LEGEND`] pixels' height.
pub fn legend(area: &Area<'_>, legend: &[(&str, RGBColor)]) -> Result<()> {
    let mut left = 30;
    let style = text(24.0, HPos::Left);
    for (name, colour) in legend {
        area.draw(&Rectangle::new([(left, 24), (left + 22, 46)], colour.filled()))?;
        area.draw(&Text::new((*name).to_owned(), (left + 34, 35), style.clone()))?;
        left += 34 + area.estimate_text_size(name, &style)?.0 as i32 + 60;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_has_its_size_and_what_was_painted() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("picture.png");
        draw(&path, (40, 30), |root| {
            root.draw(&Rectangle::new([(0, 0), (19, 29)], BLUE.filled()))?;
            legend(root, &[("a", ORANGE)])
        })
        .unwrap();
        let mut reader =
            png::Decoder::new(std::io::BufReader::new(File::open(&path).unwrap())).read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        let frame = reader.next_frame(&mut pixels).unwrap();
        assert_eq!((frame.width, frame.height), (40, 30));
        assert_eq!((&pixels[..3], &pixels[39 * 3..40 * 3]), (&[0, 114, 178][..], &[255; 3][..]));
        let error = draw(Path::new("/proc/none/picture.png"), (4, 3), |_| Ok(())).unwrap_err();
        assert!(format!("{error:#}").contains("/proc/none/picture.png cannot be written"), "{error:#}");
    }
}
