//! Files become pictures, or errors that name the cause.

use std::cmp::Ordering;
use std::io::Cursor;

use image::codecs::bmp::BmpDecoder;
use image::codecs::png::PngDecoder;
use image::codecs::pnm::{PnmDecoder, PnmHeader, PnmSubtype, SampleEncoding};
use image::codecs::tiff::TiffDecoder;
use image::codecs::webp::WebPDecoder;
use image::metadata::Orientation;
use image::{ColorType, DynamicImage, ImageDecoder, ImageError, ImageFormat, Limits};

use super::{MAX_BYTES, MAX_SIDE, jpeg, tiff};

/// Why there is no picture.
pub(super) enum Cause {
    /// Its bytes are no picture, or not all of one.
    Damaged(String),
    /// It is one that is not decoded.
    Unsupported(String),
    /// A limit is exceeded.
    TooLarge(String),
    /// It has more than one picture.
    Several(String),
}

impl Cause {
    pub fn text(&self) -> &str {
        let (Self::Damaged(text) | Self::Unsupported(text) | Self::TooLarge(text) | Self::Several(text)) =
            self;
        text
    }

    pub fn remedy(&self) -> &'static str {
        match self {
            Self::Damaged(_) => "copy it again, or remove the file",
            Self::Unsupported(_) => "write it again as PNG or JPEG with 8 bits for each channel",
            Self::TooLarge(_) => "make it smaller: a side may have 32,768 pixels, and an image 512 MiB",
            Self::Several(_) => {
                "write them to a file each, or ask for the first with `ImageFolder::first_frame`"
            }
        }
    }
}

impl From<ImageError> for Cause {
    fn from(error: ImageError) -> Self {
        match error {
            ImageError::Unsupported(error) => Self::Unsupported(error.to_string()),
            ImageError::Limits(error) => Self::TooLarge(error.to_string()),
            error => Self::Damaged(error.to_string()),
        }
    }
}

/// How files are read.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Options {
    pub apply_orientation: bool,
    pub first_frame: bool,
}

/// Decodes the file whose content is `bytes`.
pub(super) fn decode(bytes: &[u8], options: Options) -> Result<DynamicImage, Cause> {
    let format = format(bytes)?;
    let several = |what: &str| match options.first_frame {
        true => Ok(()),
        false => Err(Cause::Several(format!("it has {what}, of which the first alone would be read"))),
    };
    let mut file = Cursor::new(bytes);
    let (mut image, orientation) = match format {
        ImageFormat::Jpeg => jpeg::decode(bytes)?,
        ImageFormat::Png => {
            let decoder = PngDecoder::with_limits(&mut file, limits())?;
            if decoder.is_apng()? {
                several("an animation")?;
            }
            read(decoder)?
        }
        ImageFormat::WebP => {
            check_riff(bytes)?;
            let decoder = WebPDecoder::new(&mut file)?;
            if decoder.has_animation() {
                several("an animation")?;
            }
            read(decoder)?
        }
        ImageFormat::Tiff => {
            let cut = || Cause::Damaged("it is cut off: its list of pages leads out of the file".into());
            let pages = tiff::pages(bytes).ok_or_else(cut)?;
            if pages > 1 {
                several(&format!("{pages} pages"))?;
            }
            read(TiffDecoder::new(&mut file)?)?
        }
        ImageFormat::Pnm => {
            let decoder = PnmDecoder::new(&mut file)?;
            let is_text = is_text(decoder.header());
            let image = read(decoder)?;
            let end = usize::try_from(file.position()).unwrap_or(usize::MAX);
            if is_text && !bytes.last().is_some_and(u8::is_ascii_whitespace) {
                // The format asks for it, and half a number is a number.
                return Err(Cause::Damaged(
                    "it is cut off: no blank or line break follows its last number".into(),
                ));
            }
            if bytes.get(end..).is_some_and(|rest| rest.iter().any(|byte| !byte.is_ascii_whitespace())) {
                several("more behind its first image")?;
            }
            image
        }
        ImageFormat::Bmp => read(BmpDecoder::new(&mut file)?)?,
        other => return Err(Cause::Unsupported(format!("it is in the format {other:?}"))),
    };
    if matches!(image.color(), ColorType::Rgb32F | ColorType::Rgba32F) {
        return Err(Cause::Unsupported("its pixels are floats, whose range is not known".into()));
    }
    // As Pillow does: of TIFF it is a part of the picture, of other formats a remark.
    if options.apply_orientation || format == ImageFormat::Tiff {
        image.apply_orientation(orientation);
    }
    Ok(image)
}

/// By what is in it: many a .jpg is a PNG.
fn format(bytes: &[u8]) -> Result<ImageFormat, Cause> {
    // With offsets of 64 bits, which `guess_format` does not know.
    if bytes.starts_with(b"II\x2b\0") || bytes.starts_with(b"MM\0\x2b") {
        return Ok(ImageFormat::Tiff);
    }
    image::guess_format(bytes).map_err(|_| Cause::Damaged("it begins like no image".into()))
}

/// Whether a WebP is as long as it says: of a shorter one, also with another behind it, the decoder makes a picture.
fn check_riff(bytes: &[u8]) -> Result<(), Cause> {
    let length = bytes.get(4..8).map(|size| u32::from_le_bytes([size[0], size[1], size[2], size[3]]));
    let (says, has) = (u64::from(length.unwrap_or(u32::MAX)) + 8, bytes.len() as u64);
    match says.cmp(&has) {
        Ordering::Equal => Ok(()),
        Ordering::Greater => Err(Cause::Damaged(format!("it is cut off: it has {has} of {says} bytes"))),
        Ordering::Less => {
            Err(Cause::Damaged(format!("it should have {says} bytes, and has {has}: were files joined?")))
        }
    }
}

fn limits() -> Limits {
    let mut limits = Limits::default();
    (limits.max_image_width, limits.max_image_height) = (Some(MAX_SIDE), Some(MAX_SIDE));
    limits.max_alloc = Some(MAX_BYTES);
    limits
}

pub(super) fn check_size(width: u32, height: u32, bytes_per_pixel: u8) -> Result<(), Cause> {
    let bytes = u64::from(width).saturating_mul(height.into()).saturating_mul(bytes_per_pixel.into());
    if width <= MAX_SIDE && height <= MAX_SIDE && bytes <= MAX_BYTES {
        return Ok(());
    }
    Err(Cause::TooLarge(format!("it has {width} x {height} pixels")))
}

fn read(mut decoder: impl ImageDecoder) -> Result<(DynamicImage, Orientation), Cause> {
    let (width, height) = decoder.dimensions();
    check_size(width, height, decoder.color_type().bytes_per_pixel())?;
    decoder.set_limits(limits())?;
    let orientation = decoder.orientation()?;
    Ok((DynamicImage::from_decoder(decoder)?, orientation))
}

fn is_text(header: &PnmHeader) -> bool {
    match header.subtype() {
        PnmSubtype::Bitmap(encoding) | PnmSubtype::Graymap(encoding) | PnmSubtype::Pixmap(encoding) => {
            encoding == SampleEncoding::Ascii
        }
        PnmSubtype::ArbitraryMap => false,
    }
}
