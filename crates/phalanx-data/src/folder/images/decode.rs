//! Files become pictures, or errors that name the cause.

use std::cmp::Ordering;
use std::io::Cursor;

use image::codecs::bmp::BmpDecoder;
use image::codecs::png::PngDecoder;
use image::codecs::pnm::{PnmDecoder, PnmHeader, PnmSubtype, SampleEncoding};
use image::codecs::tiff::TiffDecoder;
use image::codecs::webp::WebPDecoder;
use image::metadata::Orientation;
use image::{ColorType, DynamicImage, ImageDecoder, ImageError, ImageFormat, Limits, Rgba};

use super::{MAX_BYTES, MAX_SIDE, jpeg, tiff};

/// In front of EXIF in a JPEG.
pub(super) const EXIF_MARK: &[u8] = b"Exif\0\0";

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
            check_length(bytes, u64::from(number_at(bytes, 4).unwrap_or(u32::MAX)) + 8)?;
            let decoder = WebPDecoder::new(&mut file)?;
            if decoder.has_animation() {
                several("an animation")?;
            }
            read(decoder)?
        }
        ImageFormat::Tiff => {
            let pages = tiff::pages(bytes).map_err(|cause| Cause::Damaged(cause.into()))?;
            if pages > 1 {
                several(&format!("{pages} pages"))?;
            }
            if tiff::is_cut_off_jpeg(bytes) {
                return Err(Cause::Damaged("it is cut off: a part of its pixels is missing".into()));
            }
            let (mut image, orientation) = read(TiffDecoder::new(&mut file)?)?;
            if tiff::is_premultiplied(bytes) {
                divide_by_opacity(&mut image)?;
            }
            (image, orientation)
        }
        ImageFormat::Pnm => {
            let decoder = PnmDecoder::new(&mut file)?;
            let pam = decoder.header().as_arbitrary();
            if pam.is_some_and(|pam| pam.tupltype.is_none() && pam.maxval > u32::from(u8::MAX)) {
                // The decoder takes each half of a sample for one.
                let cause = "its header has no TUPLTYPE, which says what its samples of 16 bits are";
                return Err(Cause::Unsupported(cause.into()));
            }
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
        ImageFormat::Bmp => {
            if let Some(length) = bmp_length(bytes) {
                check_length(bytes, length)?;
            }
            read(BmpDecoder::new(&mut file)?)?
        }
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

/// How long a BMP says that it is. None if it does not: OS/2's have the length of their header there, and some programs write 0.
fn bmp_length(bytes: &[u8]) -> Option<u64> {
    const OS2_HEADER: u32 = 12;
    let length = number_at(bytes, 2).filter(|length| *length > 0)?;
    (number_at(bytes, 14)? != OS2_HEADER).then_some(u64::from(length))
}

/// The little-endian number at a place.
fn number_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|number| u32::from_le_bytes(*number))
}

/// Whether a file is as long as it says: of a shorter one, also with another behind it, decoders of WebP and BMP make a picture.
fn check_length(bytes: &[u8], says: u64) -> Result<(), Cause> {
    let has = bytes.len() as u64;
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
    let orientation = match decoder.exif_metadata()? {
        Some(exif) => orientation(&exif),
        // A TIFF has it among its own entries.
        None => decoder.orientation()?,
    };
    Ok((DynamicImage::from_decoder(decoder)?, orientation))
}

/// How EXIF says that a picture is to be turned. In front of it may be the mark that it has in a JPEG, also twice: some programs write that
/// into other formats, and Pillow passes over it.
pub(super) fn orientation(mut exif: &[u8]) -> Orientation {
    while let Some(rest) = exif.strip_prefix(EXIF_MARK) {
        exif = rest;
    }
    Orientation::from_exif_chunk(exif).unwrap_or(Orientation::NoTransforms)
}

/// Divides colours that were multiplied by their opacity. Those of which nothing is seen are black, as in Pillow.
fn divide_by_opacity(image: &mut DynamicImage) -> Result<(), Cause> {
    let divided = |colour: u32, opacity: u32, most: u32| {
        let colour = (colour * most).checked_div(opacity).unwrap_or(0);
        colour.min(most)
    };
    match image {
        DynamicImage::ImageRgba8(image) => {
            for Rgba([colours @ .., opacity]) in image.pixels_mut() {
                for colour in colours {
                    *colour = divided((*colour).into(), (*opacity).into(), u8::MAX.into()) as u8;
                }
            }
        }
        DynamicImage::ImageRgba16(image) => {
            for Rgba([colours @ .., opacity]) in image.pixels_mut() {
                for colour in colours {
                    *colour = divided((*colour).into(), (*opacity).into(), u16::MAX.into()) as u16;
                }
            }
        }
        DynamicImage::ImageLuma8(_)
        | DynamicImage::ImageLuma16(_)
        | DynamicImage::ImageRgb8(_)
        | DynamicImage::ImageRgb16(_)
        | DynamicImage::ImageRgb32F(_)
        // Floats are refused.
        | DynamicImage::ImageRgba32F(_) => {}
        other => {
            let cause = format!("its colours were multiplied by their opacity, and are {:?}", other.color());
            return Err(Cause::Unsupported(cause));
        }
    }
    Ok(())
}

fn is_text(header: &PnmHeader) -> bool {
    match header.subtype() {
        PnmSubtype::Bitmap(encoding) | PnmSubtype::Graymap(encoding) | PnmSubtype::Pixmap(encoding) => {
            encoding == SampleEncoding::Ascii
        }
        PnmSubtype::ArbitraryMap => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A TIFF of one row, with samples of so many bits and this kind of opacity.
    fn tiff_with_opacity(channels: u32, bits: u32, kind: u32, samples: &[u8]) -> Vec<u8> {
        const SHORT: u32 = 3;
        const LONG: u32 = 4;
        let width = samples.len() as u32 * 8 / bits / channels;
        let (depths, pixels) = (8 + 2 + 11 * 12 + 4, 8 + 2 + 11 * 12 + 4 + 8);
        let entries: [(u32, u32, u32, u32); 11] = [
            (256, LONG, 1, width),
            (257, LONG, 1, 1),
            // Two have room in the entry.
            (258, SHORT, channels, if channels == 2 { bits << 16 | bits } else { depths }),
            (259, SHORT, 1, 1),
            (262, SHORT, 1, if channels == 2 { 1 } else { 2 }),
            (273, LONG, 1, pixels),
            (277, SHORT, 1, channels),
            (278, LONG, 1, 1),
            (279, LONG, 1, samples.len() as u32),
            (284, SHORT, 1, 1),
            (338, SHORT, 1, kind),
        ];
        let mut bytes = b"II\x2a\0\x08\0\0\0\x0b\0".to_vec();
        for (tag, kind, count, value) in entries {
            bytes.extend((tag | kind << 16).to_le_bytes());
            bytes.extend([count, value].map(u32::to_le_bytes).concat());
        }
        bytes.extend([0; 4]);
        bytes.extend([bits as u16; 4].map(u16::to_le_bytes).concat());
        bytes.extend(samples);
        bytes
    }

    /// Pillow's rule (`unpackRGBa`): a colour times 255 by the opacity, cut off at 255, and nothing where the opacity is 0.
    #[test]
    fn colours_of_a_tiff_that_were_multiplied_by_their_opacity_are_divided_by_it() {
        let samples = [[100_u8, 50, 0, 128], [200, 200, 200, 100], [9, 9, 9, 0], [7, 8, 9, 255]].concat();
        let colours = |file: &[u8]| match decode(file, Options::default()) {
            Ok(image) => image.into_rgb8().into_raw(),
            Err(cause) => panic!("{}", cause.text()),
        };
        assert_eq!(
            colours(&tiff_with_opacity(4, 8, 1, &samples)),
            [199, 99, 0, 255, 255, 255, 0, 0, 0, 7, 8, 9]
        );
        assert_eq!(
            colours(&tiff_with_opacity(4, 8, 2, &samples)),
            [100, 50, 0, 200, 200, 200, 9, 9, 9, 7, 8, 9]
        );
        // Of 16 bits: 0x2000 by 0x4000 is 32767 of 65535, which is rounded to 127 of 255.
        let samples = [0x2000_u16, 0x4000, 0, 0x4000].map(u16::to_le_bytes).concat();
        assert_eq!(colours(&tiff_with_opacity(4, 16, 1, &samples)), [127, 255, 0]);
        assert_eq!(colours(&tiff_with_opacity(4, 16, 2, &samples)), [32, 64, 0]);
        // Of gray this is not decoded, and is not taken for the plain colour.
        assert!(decode(&tiff_with_opacity(2, 8, 1, &[100, 128, 200, 100]), Options::default()).is_err());
    }

    #[test]
    fn a_pam_of_which_half_samples_would_be_read_is_refused() {
        let read = |most: u32, of: &str| {
            let header = format!("P7\nWIDTH 1\nHEIGHT 1\nDEPTH 1\nMAXVAL {most}\n{of}ENDHDR\n");
            let samples: &[u8] = if most > 255 { &[0x80, 0x80] } else { &[0x80] };
            let file = [header.as_bytes(), samples].concat();
            let image = decode(&file, Options { first_frame: true, ..Options::default() });
            image.map(|image| image.into_rgb8().into_raw()).map_err(|cause| cause.text().to_owned())
        };
        for (most, of) in [(65535, "TUPLTYPE GRAYSCALE\n"), (255, "TUPLTYPE GRAYSCALE\n"), (255, "")] {
            assert_eq!(read(most, of), Ok(vec![0x80; 3]), "{most} {of}");
        }
        assert!(read(65535, "").unwrap_err().contains("TUPLTYPE"));
    }

    /// As `Image.save` of Pillow before 9.3 wrote it if it was given the EXIF of a JPEG.
    #[test]
    fn the_mark_of_a_jpeg_s_exif_in_a_webp_is_passed_over() {
        let file = include_bytes!("../../../tests/files/images/turned.webp");
        let at = file.windows(4).position(|four| four == b"EXIF").unwrap();
        let exif = &file[at + 8..at + 8 + number_at(file, at + 4).unwrap() as usize];
        let marked = |times: usize| {
            let exif = [EXIF_MARK.repeat(times), exif.to_vec()].concat();
            let mut file = [&file[..at + 4], &(exif.len() as u32).to_le_bytes(), &exif].concat();
            let length = file.len() as u32 - 8;
            file[4..8].copy_from_slice(&length.to_le_bytes());
            match decode(&file, Options { apply_orientation: true, ..Options::default() }) {
                Ok(image) => (image.width(), image.height()),
                Err(cause) => panic!("{}", cause.text()),
            }
        };
        // It is 20 pixels wide and 13 high as it is stored.
        assert_eq!([0, 1, 2].map(marked), [(13, 20); 3]);
    }

    #[test]
    fn a_bmp_is_as_long_as_it_says_if_it_says_so() {
        let bmp = |says: u32, header: u32| {
            let mut bytes = [b"BM", &says.to_le_bytes()[..], &[0; 8], &header.to_le_bytes()].concat();
            bytes.resize(60, 7);
            bytes
        };
        assert_eq!([bmp_length(&bmp(60, 40)), bmp_length(&bmp(90, 124))], [Some(60), Some(90)]);
        // Not said, OS/2's, and cut off before it is.
        assert_eq!([bmp_length(&bmp(0, 40)), bmp_length(&bmp(26, 12)), bmp_length(b"BM\x3c\0")], [None; 3]);
        assert!(check_length(&bmp(60, 40), 60).is_ok());
        let text = |says| check_length(&bmp(60, 40), says).err().unwrap().text().to_owned();
        assert!(text(61).contains("cut off") && text(59).contains("joined"));
    }
}
