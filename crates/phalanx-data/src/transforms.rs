//! What is done to images on the way into a batch, under torchvision's names and with its numbers.
//!
//! ```
//! use phalanx_data::transforms::{Normalize, RandomHorizontalFlip, RandomResizedCrop};
//! use phalanx_data::{DataLoader, Dataset, folder::ImageFolder, worker_info};
//! # let root = tempfile::tempdir().unwrap();
//! # std::fs::create_dir(root.path().join("cat")).unwrap();
//! # image::RgbImage::from_pixel(40, 30, image::Rgb([124, 116, 104])).save(root.path().join("cat/1.png")).unwrap();
//! # let root = root.path();
//!
//! let (crop, flip, normalize) = (RandomResizedCrop::new(224), RandomHorizontalFlip::new(0.5), Normalize::imagenet());
//! let photos = ImageFolder::open(root)?.map(move |sample| {
//!     let seed = worker_info().expect("only loaders read this").item_seed;
//!     Ok((flip.apply(crop.apply(&sample.image, seed)?, seed), sample.class))
//! });
//! let loader = DataLoader::builder(photos).batch_size(64).num_workers(4).collate_each(
//!     |items| (Vec::with_capacity(items * 3 * 224 * 224), Vec::with_capacity(items)),
//!     move |(pixels, classes): &mut (Vec<f32>, Vec<usize>), (image, class)| {
//!         normalize.add_to(&image, pixels); // [items, 3, 224, 224]
//!         classes.push(class);
//!         Ok(())
//!     },
//! );
//! # let (pixels, classes) = loader.build()?.iter().next().unwrap()?;
//! # assert_eq!((pixels.len(), classes), (3 * 224 * 224, vec![0]));
//! # assert!(pixels.iter().all(|value| value.abs() < 0.02));
//! # Ok::<(), phalanx::Error>(())
//! ```
//!
//! Sizes change as Pillow's `BILINEAR` and torchvision's `antialias=True` do it: each pixel is the mean, weighted by a triangle, of all pixels
//! that it covers. The crate `fast_image_resize` computes it with the widest instructions that the processor has, and rounds as Pillow does;
//! the crate `image` does the same sums in floats, which takes several times as long.

use std::cell::RefCell;
use std::fmt;
use std::ops::RangeInclusive;

use fast_image_resize::images::{TypedCroppedImage, TypedImage, TypedImageRef};
use fast_image_resize::pixels::U8x3;
use fast_image_resize::{FilterType, ResizeAlg, ResizeOptions, Resizer};
use image::RgbImage;
use phalanx::{Error, Result};

use crate::worker::mix;

/// What tells the draws of different transforms of one item apart.
const CROP: u64 = 1;
const FLIP: u64 = 2;
/// The longest side of a scaled image: 64 times that of most models. An image of 1 x 65,535 would otherwise become one of 10 GB.
const MAX_SIDE: u32 = 1 << 14;

/// Scales images; torchvision's `Resize`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resize {
    size: Size,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Size {
    Shorter(u32),
    Exact { width: u32, height: u32 },
}

impl Resize {
    /// To this length of the shorter side; the longer one keeps its proportion. torchvision's `Resize(size)`.
    pub fn new(shorter_side: u32) -> Self {
        Self { size: Size::Shorter(shorter_side) }
    }

    /// To this width and height, whatever becomes of the proportion. torchvision's `Resize((height, width))`.
    pub fn exact(width: u32, height: u32) -> Self {
        Self { size: Size::Exact { width, height } }
    }

    /// The image, scaled.
    ///
    /// # Errors
    /// If it has no pixel, or is to have none or a side of more than 16,384.
    pub fn apply(&self, image: &RgbImage) -> Result<RgbImage> {
        let (width, height) = image.dimensions();
        let size = match self.size {
            Size::Exact { width, height } => (width, height),
            Size::Shorter(side) => {
                let (short, long) = (width.min(height).max(1), width.max(height));
                let longer = u64::from(side) * u64::from(long) / u64::from(short);
                let longer = u32::try_from(longer).unwrap_or(u32::MAX);
                if width <= height { (side, longer) } else { (longer, side) }
            }
        };
        scaled(image, Area { left: 0, top: 0, width, height }, size)
    }
}

/// Cuts out the middle; torchvision's `CenterCrop`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CenterCrop {
    side: u32,
}

impl CenterCrop {
    /// A square with sides of so many pixels.
    pub fn new(side: u32) -> Self {
        Self { side }
    }

    /// The middle of the image.
    ///
    /// # Errors
    /// If the image is smaller. torchvision fills it up with black.
    pub fn apply(&self, image: &RgbImage) -> Result<RgbImage> {
        let (width, height) = image.dimensions();
        let (Some(left), Some(top)) = (width.checked_sub(self.side), height.checked_sub(self.side)) else {
            return Err(Error::invalid_argument(format!(
                "an image of {width} x {height} pixels has no middle of {0} x {0}",
                self.side
            ))
            .with_remedy("apply `Resize` first"));
        };
        // As Python's `round` does: half to the even one.
        let half = |rest: u32| if rest % 4 == 3 { rest / 2 + 1 } else { rest / 2 };
        Ok(image::imageops::crop_imm(image, half(left), half(top), self.side, self.side).to_image())
    }
}

/// Cuts out a part by chance, and scales it to a square; torchvision's `RandomResizedCrop`.
#[derive(Clone, Debug, PartialEq)]
pub struct RandomResizedCrop {
    side: u32,
    scale: RangeInclusive<f64>,
    ratio: RangeInclusive<f64>,
}

impl RandomResizedCrop {
    /// A square with sides of so many pixels. The part has 0.08 to 1 of the image's area, and sides of 3:4 to 4:3, as in torchvision.
    pub fn new(side: u32) -> Self {
        Self { side, scale: 0.08..=1.0, ratio: 0.75..=4.0 / 3.0 }
    }

    /// The part's share of the area.
    ///
    /// # Panics
    /// If the range is empty, or has anything but numbers above 0.
    pub fn scale(self, scale: RangeInclusive<f64>) -> Self {
        assert!(
            is_positive(&scale),
            "a part of {scale:?} of the area: the numbers have to be above 0, the smaller one first"
        );
        Self { scale, ..self }
    }

    /// The part's width by its height.
    ///
    /// # Panics
    /// If the range is empty, or has anything but numbers above 0.
    pub fn ratio(self, ratio: RangeInclusive<f64>) -> Self {
        assert!(
            is_positive(&ratio),
            "a ratio of {ratio:?}: the numbers have to be above 0, the smaller one first"
        );
        Self { ratio, ..self }
    }

    /// A part of the image, scaled. It depends on the seed alone: [`WorkerInfo::item_seed`](crate::WorkerInfo::item_seed), which is
    /// another one for each item in each epoch. Two views of one item need two seeds, such as `seed` and `seed + 1`: from the same one both are
    /// the same part.
    ///
    /// # Errors
    /// If the image has no pixel, or is to have none or a side of more than 16,384.
    pub fn apply(&self, image: &RgbImage, seed: u64) -> Result<RgbImage> {
        scaled(image, self.area(image.dimensions(), seed), (self.side, self.side))
    }

    /// As torchvision chooses it: ten tries, and else the largest part in the middle whose sides are allowed.
    fn area(&self, (width, height): (u32, u32), seed: u64) -> Area {
        let (wide, high) = (f64::from(width), f64::from(height));
        let (least, most) = (self.ratio.start().ln(), self.ratio.end().ln());
        for attempt in 0..10 {
            let draw = |which: u64| uniform(mix(&[CROP, seed, attempt, which]));
            let area = wide * high * between(*self.scale.start(), *self.scale.end(), draw(0));
            let ratio = between(least, most, draw(1)).exp();
            let (w, h) = ((area * ratio).sqrt().round() as u32, (area / ratio).sqrt().round() as u32);
            if w > 0 && w <= width && h > 0 && h <= height {
                let place = |rest: u32, draw: f64| (draw * (f64::from(rest) + 1.0)) as u32;
                let (left, top) = (place(width - w, draw(2)), place(height - h, draw(3)));
                return Area { left, top, width: w, height: h };
            }
        }
        let ratio = wide / high;
        let (w, h) = if ratio < *self.ratio.start() {
            (width, ((wide / self.ratio.start()).round() as u32).min(height))
        } else if ratio > *self.ratio.end() {
            (((high * self.ratio.end()).round() as u32).min(width), height)
        } else {
            (width, height)
        };
        Area { left: (width - w) / 2, top: (height - h) / 2, width: w, height: h }
    }
}

/// Turns left and right around by chance; torchvision's `RandomHorizontalFlip`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RandomHorizontalFlip {
    probability: f64,
}

impl RandomHorizontalFlip {
    /// With this probability.
    ///
    /// # Panics
    /// If it is not from 0 to 1.
    pub fn new(probability: f64) -> Self {
        assert!(
            (0.0..=1.0).contains(&probability),
            "a probability of {probability}: it has to be from 0 to 1"
        );
        Self { probability }
    }

    /// The image as it is, or flipped. It depends on the seed alone, as in [`RandomResizedCrop::apply`], and not on what that draws from the
    /// same one.
    pub fn apply(&self, mut image: RgbImage, seed: u64) -> RgbImage {
        if uniform(mix(&[FLIP, seed])) < self.probability {
            image::imageops::flip_horizontal_in_place(&mut image);
        }
        image
    }
}

/// Makes floats of pixels, `(x / 255 - mean) / std`, one channel after the other: torchvision's `ToTensor` and `Normalize`, with the same bits.
/// Its `ToDtype(torch.float32, scale=True)` multiplies by 1 / 255, which gives some of the 256 steps another last bit.
#[derive(Clone)]
pub struct Normalize {
    /// Of each channel, what each of the 256 steps becomes.
    values: Box<[[f32; 256]; 3]>,
}

impl Normalize {
    /// With the mean and the standard deviation of each channel: red, green, blue.
    ///
    /// # Panics
    /// If a standard deviation is not a finite number above 0, or a pixel would become infinite or NaN.
    pub fn new(mean: [f32; 3], std: [f32; 3]) -> Self {
        let is_positive = |std: &f32| *std > 0.0 && std.is_finite();
        assert!(
            std.iter().all(is_positive),
            "standard deviations of {std:?}: each has to be above 0, and finite"
        );
        let value = |channel: usize, step: usize| (step as f32 / 255.0 - mean[channel]) / std[channel];
        let values: [[f32; 256]; 3] =
            std::array::from_fn(|channel| std::array::from_fn(|step| value(channel, step)));
        assert!(
            values.iter().flatten().all(|value| value.is_finite()),
            "means of {mean:?} and standard deviations of {std:?}: a pixel would become infinite or NaN"
        );
        Self { values: Box::new(values) }
    }

    /// With ImageNet's, for which most models with weights were trained.
    pub fn imagenet() -> Self {
        Self::new([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    }

    /// The image as floats: all of its red ones, row by row, then the green ones and the blue ones.
    pub fn apply(&self, image: &RgbImage) -> Vec<f32> {
        let mut values = Vec::with_capacity(image.as_raw().len());
        self.add_to(image, &mut values);
        values
    }

    /// Adds what [`apply`](Self::apply) gives to a batch, for
    /// [`collate_each`](crate::DataLoaderBuilder::collate_each): nothing is copied twice.
    pub fn add_to(&self, image: &RgbImage, batch: &mut Vec<f32>) {
        let (pixels, _) = image.as_raw().as_chunks::<3>();
        for (channel, values) in self.values.iter().enumerate() {
            batch.extend(pixels.iter().map(|pixel| values[usize::from(pixel[channel])]));
        }
    }
}

impl fmt::Debug for Normalize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let black = self.values.each_ref().map(|values| values[0]);
        let white = self.values.each_ref().map(|values| values[255]);
        write!(f, "Normalize(0 becomes {black:?}, 255 becomes {white:?})")
    }
}

/// A part of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Area {
    left: u32,
    top: u32,
    width: u32,
    height: u32,
}

thread_local! {
    /// With the memory for a scaled image's rows, which is used again.
    static RESIZER: RefCell<Resizer> = RefCell::new(Resizer::new());
}

/// A part of the image, scaled to a width and a height.
fn scaled(image: &RgbImage, area: Area, (width, height): (u32, u32)) -> Result<RgbImage> {
    let from = image.dimensions();
    let failed = |cause: &dyn fmt::Display| {
        Error::invalid_argument(format!(
            "an image of {} x {} pixels cannot be scaled to {width} x {height}: {cause}",
            from.0, from.1
        ))
    };
    if area.width == 0 || area.height == 0 || width == 0 || height == 0 {
        return Err(failed(&"one of them has no pixel"));
    }
    if width.max(height) > MAX_SIDE {
        return Err(failed(&format_args!("a side may have {MAX_SIDE} pixels")));
    }
    // Of the type of these pixels alone: the calls that take images of any type compile for all thirteen, which takes four times as long as the rest
    // of this crate.
    let source = TypedImageRef::<U8x3>::from_buffer(from.0, from.1, image.as_raw());
    let source = source.map_err(|error| failed(&error))?;
    // `ResizeOptions::crop` would let pixels beside the area weigh in at its edges.
    let source = TypedCroppedImage::new(source, area.left, area.top, area.width, area.height)
        .map_err(|error| failed(&error))?;
    let mut scaled = RgbImage::new(width, height);
    let mut target = TypedImage::<U8x3>::from_buffer(width, height, &mut scaled);
    let target = target.as_mut().map_err(|error| failed(error))?;
    let options = ResizeOptions::new().resize_alg(ResizeAlg::Convolution(FilterType::Bilinear));
    RESIZER
        .with_borrow_mut(|resizer| resizer.resize_typed(&source, target, &options))
        .map_err(|error| failed(&error))?;
    Ok(scaled)
}

fn is_positive(range: &RangeInclusive<f64>) -> bool {
    *range.start() > 0.0 && range.start() <= range.end() && range.end().is_finite()
}

/// From 0 up to 1, of 53 bits.
fn uniform(bits: u64) -> f64 {
    (bits >> 11) as f64 / (1_u64 << 53) as f64
}

fn between(least: f64, most: f64, draw: f64) -> f64 {
    least + (most - least) * draw
}
