//! Time and bus bandwidth against size, as a PNG.

use std::error::Error as StdError;
use std::fs::{self, File, OpenOptions};
use std::io::BufWriter;
use std::ops::Range;
use std::path::{Path, PathBuf};

use clap::Args;
use phalanx::{Error, Result};
use plotters::coord::Shift;
use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint};
use plotters::element::DashedPathElement;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{FontStyle, register_font};

use crate::collectives::Collective;
use crate::points::{Point, cases, read, select};
use crate::report::size;

/// Pixels of the file: its width, and the height of the title, of a line of the legend and of what lies below.
/// It is drawn `FINE` times as large in each direction: plotters does not smooth thick lines.
const WIDTH: u32 = 1800;
const TITLE: u32 = 70;
const LINE: u32 = 34;
const PANELS: u32 = 696;
const FINE: u32 = 3;

/// Between the figure's edge and the legend.
const MARGIN: i32 = 28;
/// What a curve takes in the legend beside its name: a piece of it, and the gap to the next.
const SAMPLE: i32 = 44;
const GAP: i32 = 10;
const APART: i32 = 36;
const LABEL: i32 = 21;

/// Okabe and Ito's colours, which the colour-blind can tell apart; without the yellow, which is hardly seen on white. Then
/// three of Paul Tol's, which are darker.
const COLOURS: [RGBColor; 9] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(136, 34, 85),
    RGBColor(51, 34, 136),
    RGBColor(140, 140, 40),
];
/// As many markers, which is not a divisor of the number of colours: a colour that comes again has another one.
const SHAPES: usize = 5;
const INK: RGBColor = RGBColor(40, 40, 40);
const FAINT: RGBColor = RGBColor(225, 225, 225);
const LIMIT: RGBColor = RGBColor(110, 110, 110);

/// The machine may have no fonts: the text is drawn with this one.
const FONT: &str = "sans-serif";
/// So many pixels lower, its small letters stand in the middle of the line.
const LOWER: i32 = 3;
static ROBOTO: &[u8] = include_bytes!("../assets/Roboto-Regular.ttf");

/// Draw what `bench --json` and bench/peers/run.py have measured
#[derive(Args, Debug)]
pub(crate) struct Plot {
    /// Files with a line of JSON for each size
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,

    /// Where to
    #[arg(short, long, value_name = "PNG")]
    output: PathBuf,

    /// Of which collective, if the files have several
    #[arg(long, value_enum)]
    collective: Option<Collective>,

    /// With how many ranks, if the files have several numbers
    #[arg(long, value_name = "N")]
    ranks: Option<u32>,
}

impl Plot {
    pub(crate) fn run(&self) -> Result<()> {
        is_none_of(&self.output, &self.files)?;
        let mut points = read(&self.files, &[])?;
        points.retain(|point| self.collective.is_none_or(|collective| point.collective == collective));
        points.retain(|point| self.ranks.is_none_or(|ranks| point.ranks == ranks));
        let Some(first) = points.first() else {
            return Err(Error::invalid_argument("the files have no such times")
                .with_remedy(format!("they have those of {}", cases(&read(&self.files, &[])?))));
        };
        let (collective, ranks) = (first.collective, first.ranks);
        if points.iter().any(|point| (point.collective, point.ranks) != (collective, ranks)) {
            return Err(Error::invalid_argument(format!("the files have times of {}", cases(&points)))
                .with_remedy("choose with --collective and --ranks"));
        }
        Figure { points, ..Figure::new(&self.output, collective, ranks, &[], &[])? }.draw()
    }
}

/// An error if the picture would take the place of one of the files with the times.
fn is_none_of(picture: &Path, files: &[PathBuf]) -> Result<()> {
    let Ok(picture) = fs::canonicalize(picture) else { return Ok(()) };
    match files.iter().find(|file| fs::canonicalize(file).is_ok_and(|file| file == picture)) {
        Some(file) => {
            let cause = format!("{} has the times, and the picture would take its place", file.display());
            Err(Error::invalid_argument(cause)
                .with_remedy("give the picture another name, such as times.png"))
        }
        None => Ok(()),
    }
}

/// A plot that grows, and is drawn at last.
pub(crate) struct Figure {
    path: PathBuf,
    file: File,
    title: String,
    points: Vec<Point>,
}

/// A name's points, in the order of their sizes, and how it looks.
struct Curve {
    name: String,
    points: Vec<Point>,
    look: Look,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Look {
    /// A competitor's: a line with a marker of this shape at each point, a hollow one where the colours come again.
    Measured { colour: RGBColor, shape: usize, hollow: bool },
    /// What the hardware allows: dashes of so many pixels.
    Limit { dash: i32 },
}

impl Look {
    /// Of the curve that has so many of its kind before it.
    fn new(limit: bool, before: usize) -> Self {
        match limit {
            true => Self::Limit { dash: if before == 0 { 9 } else { 3 } },
            false => Self::Measured {
                colour: COLOURS[before % COLOURS.len()],
                shape: before % SHAPES,
                hollow: before >= COLOURS.len(),
            },
        }
    }

    fn limit(self) -> bool {
        matches!(self, Self::Limit { .. })
    }
}

impl Figure {
    /// Reads what was measured before, but for the curves that are measured `now`, and opens the file, so that no measurement
    /// is in vain.
    pub(crate) fn new(
        path: &Path,
        collective: Collective,
        ranks: u32,
        now: &[String],
        peers: &[PathBuf],
    ) -> Result<Self> {
        let mut points =
            if peers.is_empty() { Vec::new() } else { select(read(peers, now)?, collective, ranks)? };
        points.retain(|point| !now.contains(&point.name));
        // An earlier picture stays until this one is drawn.
        let opened = OpenOptions::new().write(true).create(true).truncate(false).open(path);
        let file = opened.map_err(|error| {
            Error::invalid_argument(format!("{} cannot be written: {error}", path.display()))
        })?;
        Ok(Self { path: path.to_owned(), file, title: format!("{collective}, {ranks} ranks"), points })
    }

    pub(crate) fn add(&mut self, point: Point) {
        self.points.push(point);
    }

    pub(crate) fn draw(self) -> Result<()> {
        let failed = |error: Box<dyn StdError>| {
            Error::aborted(format!("{} cannot be drawn: {error}", self.path.display()))
        };
        let (pixels, height) = render(&self.title, &curves(self.points)).map_err(failed)?;
        encode(self.file, &pixels, height).map_err(|error| failed(error.into()))
    }
}

/// The points of each name, in the order in which the names come.
fn curves(points: Vec<Point>) -> Vec<Curve> {
    let mut curves: Vec<Curve> = Vec::new();
    for point in points {
        match curves.iter_mut().find(|curve| curve.name == point.name) {
            Some(curve) => curve.points.push(point),
            None => {
                let before = curves.iter().filter(|curve| curve.look.limit() == point.limit).count();
                let (name, look) = (point.name.clone(), Look::new(point.limit, before));
                curves.push(Curve { name, points: vec![point], look });
            }
        }
    }
    for curve in &mut curves {
        curve.points.sort_by(|one, other| one.bytes.total_cmp(&other.bytes));
    }
    curves
}

type Area<'a> = DrawingArea<BitMapBackend<'a>, Shift>;
type Drawn = Result<(), Box<dyn StdError>>;

/// The whole figure as RGB bytes, and its height.
fn render(title: &str, curves: &[Curve]) -> Result<(Vec<u8>, u32), Box<dyn StdError>> {
    register_font(FONT, FontStyle::Normal, ROBOTO).map_err(|_| "the font cannot be read")?;
    let places = legend(curves.iter().map(|curve| curve.name.as_str()))?;
    let head = TITLE + LINE * places.last().map_or(1, |(line, _)| line + 1);
    let height = head + PANELS;
    let mut pixels = vec![0; (WIDTH * height * FINE * FINE * 3) as usize];
    {
        let root = BitMapBackend::with_buffer(&mut pixels, (WIDTH * FINE, height * FINE)).into_drawing_area();
        root.fill(&WHITE)?;
        let (head, body) = root.split_vertically(head * FINE);
        head.draw(&Text::new(title.to_owned(), (fine(MARGIN), fine(18)), text(30)))?;
        for (curve, place) in curves.iter().zip(places) {
            curve.name(&head, place)?;
        }
        let (left, right) = body.split_horizontally(WIDTH * FINE / 2);
        let micros = |point: &Point| point.time_us * 1e-6;
        panel(&left, "time of a call", curves, &micros, &|seconds| unit(seconds, "s"))?;
        panel(&right, "bus bandwidth", curves, &Point::bus_bandwidth, &|rate| unit(rate, "B/s"))?;
        root.present()?;
    }
    Ok((shrink(&pixels, height), height))
}

/// Where each name goes: its line, and how far from the left, in pixels of the file. A line takes as many as fit.
fn legend<'a>(names: impl Iterator<Item = &'a str>) -> Result<Vec<(u32, i32)>, Box<dyn StdError>> {
    let (mut line, mut left) = (0, MARGIN);
    let mut places = Vec::new();
    for name in names {
        let (width, _) = text(LABEL).font.box_size(name)?;
        let width = SAMPLE + GAP + width.div_ceil(FINE) as i32;
        if left > MARGIN && left + width > WIDTH as i32 - MARGIN {
            (line, left) = (line + 1, MARGIN);
        }
        places.push((line, left));
        left += width + APART;
    }
    Ok(places)
}

/// One quantity against size, both logarithmic.
fn panel(
    area: &Area<'_>,
    title: &str,
    curves: &[Curve],
    quantity: &dyn Fn(&Point) -> f64,
    label: &dyn Fn(f64) -> String,
) -> Drawn {
    let places = |curve: &Curve| -> Vec<_> {
        let places = curve.points.iter().map(|point| (point.bytes.log2(), quantity(point).log10()));
        places.filter(|(_, y)| y.is_finite()).collect()
    };
    let all: Vec<_> = curves.iter().flat_map(places).collect();
    let x = Exponents::around(all.iter().map(|(x, _)| *x));
    let y = Exponents::around(all.iter().map(|(_, y)| *y));
    let mut chart = ChartBuilder::on(area)
        .margin(fine(14))
        .margin_right(fine(34))
        .caption(title, text(24))
        .x_label_area_size(fine(52))
        .y_label_area_size(fine(104))
        .build_cartesian_2d(x, y)?;
    chart
        .configure_mesh()
        .bold_line_style(FAINT.stroke_width(FINE))
        .axis_style(INK.stroke_width(FINE))
        .label_style(text(20))
        .x_label_formatter(&|power| size(power.exp2().round()))
        .y_label_formatter(&|power| label(10f64.powf(*power)))
        .y_label_offset(fine(LOWER))
        .set_all_tick_mark_size(fine(6))
        .draw()?;
    // What is named first lies on top.
    for curve in curves.iter().rev() {
        let places = places(curve);
        chart.plotting_area().draw(&curve.line(places.clone()))?;
        for place in places {
            chart.plotting_area().draw(&curve.marker(place))?;
        }
    }
    Ok(())
}

impl Curve {
    /// The curve's entry in the legend.
    fn name(&self, area: &Area<'_>, (line, left): (u32, i32)) -> Drawn {
        let (left, middle) = (fine(left), fine((TITLE + LINE * line) as i32 + GAP));
        area.draw(&self.line(vec![(left, middle), (left + fine(SAMPLE), middle)]))?;
        area.draw(&self.marker((left + fine(SAMPLE / 2), middle)))?;
        let label = text(LABEL).pos(Pos::new(HPos::Left, VPos::Center));
        let place = (left + fine(SAMPLE + GAP), middle + fine(LOWER));
        area.draw(&Text::new(self.name.clone(), place, label))?;
        Ok(())
    }

    /// A line through `places`; a limit's is dashed.
    fn line<'a, P: Clone + 'static>(&self, places: Vec<P>) -> DynElement<'a, BitMapBackend<'a>, P> {
        match self.look {
            Look::Limit { dash } => {
                let style = LIMIT.stroke_width(fine(3) as u32);
                DashedPathElement::new(places, fine(dash), fine(6), style).into_dyn()
            }
            Look::Measured { colour, .. } => {
                PathElement::new(places, colour.stroke_width(fine(3) as u32)).into_dyn()
            }
        }
    }

    /// Colour is not all that tells curves apart.
    fn marker<'a, P: Clone + 'static>(&self, place: P) -> DynElement<'a, BitMapBackend<'a>, P> {
        let at = EmptyElement::at(place);
        let Look::Measured { colour, shape, hollow } = self.look else { return at.into_dyn() };
        let inside = if hollow { WHITE } else { colour };
        let (outer, inner) = (fine(6), fine(3));
        let polygon = |corners: &[(i32, i32)], radius: i32, colour: RGBColor| {
            let corners: Vec<_> = corners.iter().map(|(x, y)| (x * radius / 4, y * radius / 4)).collect();
            Polygon::new(corners, colour.filled())
        };
        let corners: &[(i32, i32)] = match shape {
            0 => {
                let circle = |radius: i32, colour: RGBColor| Circle::new((0, 0), radius, colour.filled());
                return (at + circle(outer, colour) + circle(inner, inside)).into_dyn();
            }
            1 => &[(-4, -4), (4, -4), (4, 4), (-4, 4)],
            2 => &[(0, -5), (5, 4), (-5, 4)],
            3 => &[(0, -6), (6, 0), (0, 6), (-6, 0)],
            _ => &[(0, 5), (5, -4), (-5, -4)],
        };
        (at + polygon(corners, outer, colour) + polygon(corners, inner, inside)).into_dyn()
    }
}

/// The logarithms of a quantity, with ticks at whole ones.
struct Exponents {
    range: Range<f64>,
    ticks: Vec<f64>,
}

impl Exponents {
    /// From the least to the greatest, with a little room; some seven ticks.
    fn around(exponents: impl Iterator<Item = f64> + Clone) -> Self {
        let least = exponents.clone().fold(f64::INFINITY, f64::min);
        let greatest = exponents.fold(f64::NEG_INFINITY, f64::max);
        if least > greatest {
            return Self { range: 0.0..1.0, ticks: Vec::new() };
        }
        let room = ((greatest - least) * 0.04).max(0.2);
        let step = ((greatest - least) / 7.0).ceil().max(1.0);
        let first = (least - room).ceil();
        let ticks = (0..).map(|tick| first + f64::from(tick) * step);
        let ticks = ticks.take_while(|tick| *tick <= greatest + room).collect();
        Self { range: least - room..greatest + room, ticks }
    }
}

impl Ranged for Exponents {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, exponent: &f64, (from, to): (i32, i32)) -> i32 {
        let part = (exponent - self.range.start) / (self.range.end - self.range.start);
        from + (part * f64::from(to - from)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        if hint.weight().allow_light_points() { Vec::new() } else { self.ticks.clone() }
    }

    fn range(&self) -> Range<f64> {
        self.range.clone()
    }
}

/// A power of ten with its unit: 10 µs, 1 GB/s.
fn unit(value: f64, unit: &str) -> String {
    let prefixes = [(1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n")];
    // A power of ten comes out of logarithms a little too small.
    let value = value * (1.0 + 1e-9);
    let (scale, prefix) = prefixes.into_iter().find(|(scale, _)| value >= *scale).unwrap_or((1e-9, "n"));
    format!("{:.0} {prefix}{unit}", value / scale)
}

fn text(pixels: i32) -> TextStyle<'static> {
    (FONT, fine(pixels)).into_font().color(&INK)
}

fn fine(pixels: i32) -> i32 {
    pixels * FINE as i32
}

/// Each pixel of the file is the mean of those that were drawn for it.
fn shrink(pixels: &[u8], height: u32) -> Vec<u8> {
    let fine = FINE as usize;
    let line = (WIDTH * FINE * 3) as usize;
    let mean = |x: usize, y: usize, channel: usize| {
        let all =
            (0..fine * fine).map(|n| (y * fine + n / fine) * line + (x * fine + n % fine) * 3 + channel);
        (all.map(|at| u32::from(pixels[at])).sum::<u32>() / (FINE * FINE)) as u8
    };
    let places = (0..height as usize).flat_map(|y| (0..WIDTH as usize).map(move |x| (x, y)));
    places.flat_map(|(x, y)| [mean(x, y, 0), mean(x, y, 1), mean(x, y, 2)]).collect()
}

fn encode(file: File, pixels: &[u8], height: u32) -> Result<(), png::EncodingError> {
    if file.metadata()?.is_file() {
        file.set_len(0)?;
    }
    let mut encoder = png::Encoder::new(BufWriter::new(file), WIDTH, height);
    encoder.set_color(png::ColorType::Rgb);
    let mut writer = encoder.write_header()?;
    writer.write_image_data(pixels)?;
    writer.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_have_units() {
        assert_eq!([unit(1e-7, "s"), unit(1e-3, "s"), unit(1e10, "B/s")], ["100 ns", "1 ms", "10 GB/s"]);
    }

    #[test]
    fn what_is_measured_now_takes_the_place_of_no_other_curve() {
        let folder = tempfile::tempdir().unwrap();
        let peers = folder.path().join("before.json");
        let line = |name: &str| {
            format!(
                r#"{{"name": "{name}", "collective": "broadcast", "ranks": 2, "bytes": 4, "time_us": 1.0}}"#
            )
        };
        fs::write(&peers, ["tcp", "tcp, tree", "tcp, ring"].map(line).concat()).unwrap();
        let now = ["tcp, tree", "tcp, ring"].map(str::to_owned);
        let picture = folder.path().join("now.png");
        let figure = Figure::new(&picture, Collective::Broadcast, 2, &now, &[peers]).unwrap();
        assert!(figure.points.iter().map(|point| point.name.as_str()).eq(["tcp"]), "{:?}", figure.points);
    }

    #[test]
    fn an_earlier_picture_stays_until_this_one_is_drawn() {
        let folder = tempfile::tempdir().unwrap();
        let picture = folder.path().join("x.png");
        let earlier = vec![7u8; 4 << 20];
        fs::write(&picture, &earlier).unwrap();
        let figure = || Figure::new(&picture, Collective::Broadcast, 2, &[], &[]).unwrap();
        drop(figure());
        assert_eq!(fs::read(&picture).unwrap(), earlier);
        let (name, collective) = ("tcp".to_owned(), Collective::Broadcast);
        let mut figure = figure();
        figure.add(Point { name, collective, ranks: 2, bytes: 4.0, time_us: 1.0, limit: false });
        figure.draw().unwrap();
        let drawn = fs::read(&picture).unwrap();
        assert!(drawn.starts_with(b"\x89PNG") && drawn.len() < earlier.len(), "{}", drawn.len());
        assert_eq!(&drawn[drawn.len() - 8..][..4], b"IEND");
    }

    #[test]
    fn twelve_curves_look_different() {
        let looks: Vec<_> = (0..12).map(|before| Look::new(false, before)).collect();
        for (place, look) in looks.iter().enumerate() {
            assert!(!looks[..place].contains(look), "{look:?} comes twice");
        }
        assert_ne!(Look::new(true, 0), Look::new(true, 1));
    }

    #[test]
    fn a_long_legend_has_several_lines() {
        register_font(FONT, FontStyle::Normal, ROBOTO).ok().unwrap();
        let names = ["a name of some length"; 12];
        let places = legend(names.into_iter()).unwrap();
        assert_eq!(places.len(), names.len());
        assert!(places.iter().all(|(_, left)| (MARGIN..WIDTH as i32 - 200).contains(left)), "{places:?}");
        assert!(places.windows(2).all(|pair| pair[0] < pair[1]), "{places:?}");
        assert!((1..4).contains(&places[11].0), "{places:?}");
        assert_eq!(legend(["gloo"].into_iter()).unwrap(), [(0, MARGIN)]);
    }

    #[test]
    fn an_axis_has_room_and_whole_exponents() {
        let axis = Exponents::around([2.0, 26.0].into_iter());
        assert!(axis.range.start < 2.0 && axis.range.end > 26.0);
        assert_eq!(axis.ticks, [2.0, 6.0, 10.0, 14.0, 18.0, 22.0, 26.0]);
        assert_eq!(Exponents::around([3.0].into_iter()).ticks, [3.0]);
        assert!(Exponents::around(std::iter::empty()).ticks.is_empty());
    }
}
