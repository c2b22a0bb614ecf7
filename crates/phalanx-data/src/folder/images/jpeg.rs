//! JPEG, read strictly: a file whose picture is not whole is an error, where decoders fill the rest with grey.
//!
//! image's own use of zune-jpeg fills what is missing of a picture that is cut off. In strict mode that is an error.
//! The decoder does not ask whether the end marker is there; `whole` does.

use image::metadata::Orientation;
use image::{DynamicImage, GrayImage, RgbImage};
use zune_jpeg::JpegDecoder;
use zune_jpeg::errors::DecodeErrors;
use zune_jpeg::zune_core::bytestream::ZCursor;
use zune_jpeg::zune_core::colorspace::ColorSpace;
use zune_jpeg::zune_core::options::DecoderOptions;

use super::MAX_SIDE;
use super::decode::{Cause, check_size};

const START_OF_IMAGE: u8 = 0xd8;
const END_OF_IMAGE: u8 = 0xd9;
const START_OF_SCAN: u8 = 0xda;

/// The picture, and how it is to be turned.
pub(super) fn decode(bytes: &[u8]) -> Result<(DynamicImage, Orientation), Cause> {
    whole(bytes).map_err(|cause| Cause::Damaged(cause.to_owned()))?;
    let side = MAX_SIDE as usize;
    let options = DecoderOptions::default().set_strict_mode(true).set_max_width(side).set_max_height(side);
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(bytes), options);
    decoder.decode_headers().map_err(cause)?;
    let (Some((width, height)), Some(space)) = (decoder.dimensions(), decoder.input_colorspace()) else {
        return Err(Cause::Damaged("it has no dimensions".into()));
    };
    let is_gray = space == ColorSpace::Luma;
    let (width, height) = (width as u32, height as u32);
    check_size(width, height, if is_gray { 1 } else { 3 })?;
    let wanted = if is_gray { ColorSpace::Luma } else { ColorSpace::RGB };
    decoder.set_options(options.jpeg_set_out_colorspace(wanted));
    let pixels = decoder.decode().map_err(cause)?;
    let orientation = decoder.exif().and_then(|exif| Orientation::from_exif_chunk(exif));
    let image = if is_gray {
        GrayImage::from_raw(width, height, pixels).map(DynamicImage::from)
    } else {
        RgbImage::from_raw(width, height, pixels).map(DynamicImage::from)
    };
    let image = image.ok_or_else(|| Cause::Damaged("it has fewer pixels than it announces".into()))?;
    Ok((image, orientation.unwrap_or(Orientation::NoTransforms)))
}

fn cause(error: DecodeErrors) -> Cause {
    match error {
        DecodeErrors::Unsupported(what) => Cause::Unsupported(format!("{what:?}")),
        DecodeErrors::LargeDimensions(side) => Cause::TooLarge(format!("a side has {side} pixels")),
        // Its debug form is its display form.
        error => Cause::Damaged(format!("{error:?}").trim().to_owned()),
    }
}

/// Whether all segments and scans are there, up to the end marker. What follows it is no part of the picture: cameras put previews and
/// films there.
fn whole(bytes: &[u8]) -> Result<(), &'static str> {
    const CUT_OFF: &str = "it is cut off: its end marker is missing";
    let mut at = 2;
    let mut in_scan = false;
    loop {
        // The next marker: 0xff, more of them as filling, and a byte that is neither that nor 0.
        let marker = loop {
            let rest = bytes.get(at..).ok_or(CUT_OFF)?;
            at += rest.iter().position(|byte| *byte == 0xff).ok_or(CUT_OFF)? + 1;
            match *bytes.get(at).ok_or(CUT_OFF)? {
                0 => at += 1,
                0xff => {}
                marker => break marker,
            }
        };
        at += 1;
        match marker {
            END_OF_IMAGE if in_scan => return Ok(()),
            END_OF_IMAGE => return Err("it ends before its first scan"),
            START_OF_IMAGE => return Err("it is cut off: another JPEG begins inside of it"),
            // Restarts, and a marker for arithmetic coding, stand alone.
            0x01 | 0xd0..=0xd7 => {}
            marker => {
                in_scan |= marker == START_OF_SCAN;
                let length = bytes.get(at..at + 2).ok_or(CUT_OFF)?;
                at += usize::from(u16::from_be_bytes([length[0], length[1]])).max(2);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_whole_up_to_its_own_end_marker() {
        // Start, a segment with another end marker in it (a preview), a scan with a stuffed byte and a restart, the end.
        let whole_file = [
            &[0xff, 0xd8, 0xff, 0xe1, 0, 6, 0xff, 0xd8, 0xff, 0xd9][..],
            &[0xff, 0xff, 0xda, 0, 3, 9, 1, 0xff, 0, 2, 0xff, 0xd0, 3, 0xff, 0xd9],
        ]
        .concat();
        assert_eq!(whole(&whole_file), Ok(()));
        assert_eq!(whole(&[&whole_file[..], b"film"].concat()), Ok(()));
        assert_eq!(whole(&[&whole_file[..], &whole_file].concat()), Ok(()));
        for end in 2..whole_file.len() {
            assert!(whole(&whole_file[..end]).is_err(), "{end}");
            let joined = [&whole_file[..end], &whole_file].concat();
            // In front of the scan the other file's bytes pass for a segment's, which the decoder notices.
            assert!(end < 16 || whole(&joined).is_err(), "{end}");
        }
    }
}
