//! JPEG, read strictly: a file whose picture is not whole is an error, where decoders fill the rest with grey.
//!
//! image's own use of zune-jpeg fills what is missing of a picture that is cut off. In strict mode that is an error.
//! The decoder does not ask whether the end marker is there; `whole` does. Nor does it ask whether the picture is complete in front of it: for that
//! there is `ONES`. It takes some files for others than libjpeg does, which Pillow and browsers use; `as_libjpeg` knows them.

use std::borrow::Cow;

use image::metadata::Orientation;
use image::{DynamicImage, GrayImage, RgbImage};
use zune_jpeg::JpegDecoder;
use zune_jpeg::errors::DecodeErrors;
use zune_jpeg::zune_core::bytestream::ZCursor;
use zune_jpeg::zune_core::colorspace::ColorSpace;
use zune_jpeg::zune_core::options::DecoderOptions;

use super::MAX_SIDE;
use super::decode::{Cause, EXIF_MARK, check_size, orientation};

const START_OF_IMAGE: u8 = 0xd8;
const END_OF_IMAGE: u8 = 0xd9;
const START_OF_SCAN: u8 = 0xda;
const APP0: u8 = 0xe0;
const APP1: u8 = 0xe1;
const APP14: u8 = 0xee;
/// The most scans. Each may pass over all of the picture with few bytes, so that a small file of many takes hours.
const MAX_SCANS: usize = 500;
/// Sixteen bytes of ones, as scans have them. Behind the data of a scan the decoder goes on with zeros, which are codes: a picture whose end is missing
/// would be filled with something. No code is all ones, so behind these such a picture is an error. The decoder looks eight bytes ahead.
const ONES: [[u8; 2]; 16] = [[0xff, 0]; 16];

/// The picture, and how it is to be turned.
pub(super) fn decode(bytes: &[u8]) -> Result<(DynamicImage, Orientation), Cause> {
    let end = whole(bytes).map_err(|cause| Cause::Damaged(cause.to_owned()))?;
    let mut bytes = as_libjpeg(bytes)?;
    if let Some(end) = end {
        bytes = Cow::Owned([&bytes[..end], ONES.as_flattened(), &bytes[end..]].concat());
    }
    let side = MAX_SIDE as usize;
    let options = DecoderOptions::default().set_strict_mode(true).set_max_width(side).set_max_height(side);
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(&*bytes), options);
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
    let orientation = exif(&bytes).map_or(Orientation::NoTransforms, orientation);
    let image = if is_gray {
        GrayImage::from_raw(width, height, pixels).map(DynamicImage::from)
    } else {
        RgbImage::from_raw(width, height, pixels).map(DynamicImage::from)
    };
    let image = image.ok_or_else(|| Cause::Damaged("it has fewer pixels than it announces".into()))?;
    Ok((image, orientation))
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
/// films there. Gives where the data of the last scan end. None if something is between them and the end marker, or they are those of the first scan
/// of a progressive picture, behind which the decoder has to see the marker.
fn whole(bytes: &[u8]) -> Result<Option<usize>, &'static str> {
    const CUT_OFF: &str = "it is cut off: its end marker is missing";
    let (mut at, mut scans) = (2, 0);
    let (mut is_sequential, mut is_in_scan) = (false, false);
    let mut sent = Sent::default();
    loop {
        let (marker, behind) = next_marker(bytes, at).ok_or(CUT_OFF)?;
        at = behind;
        match marker {
            END_OF_IMAGE if scans > 0 && !sent.is_all() => {
                return Err("scans are missing: decoders would make it blurred or grey");
            }
            END_OF_IMAGE if scans > 0 => {
                return Ok((is_in_scan && (is_sequential || scans > 1)).then_some(at - 2));
            }
            END_OF_IMAGE => return Err("it ends before its first scan"),
            START_OF_IMAGE => return Err("it is cut off: another JPEG begins inside of it"),
            marker if stands_alone(marker) => {}
            marker => {
                is_in_scan = marker == START_OF_SCAN;
                is_sequential |= matches!(marker, 0xc0 | 0xc1);
                scans += usize::from(is_in_scan);
                if scans > MAX_SCANS {
                    return Err("it has more scans than any picture");
                }
                sent.add(marker, segment(bytes, at).unwrap_or_default());
                let length = bytes.get(at..at + 2).ok_or(CUT_OFF)?;
                at += usize::from(u16::from_be_bytes([length[0], length[1]])).max(2);
            }
        }
    }
}

/// What scans have given of each component. A progressive picture has each of its coefficients in several: first the upper bits, then the next
/// one. libjpeg takes what is there, so Pillow shows a picture of which scans are missing blurred, or without its colours.
#[derive(Default)]
struct Sent {
    is_progressive: bool,
    /// By their names: the lowest bit of each coefficient that has come.
    components: Vec<(u8, [u8; 64])>,
    /// Whether a scan had the next bit of what had not come.
    has_gap: bool,
}

impl Sent {
    /// For a bit that has not come.
    const NONE: u8 = u8::MAX;

    fn add(&mut self, marker: u8, content: &[u8]) {
        if matches!(marker, 0xc0..=0xc2) {
            let components = content.get(6..).unwrap_or_default().as_chunks::<3>().0;
            self.is_progressive = marker == 0xc2;
            self.components = components.iter().map(|one| (one[0], [Self::NONE; 64])).collect();
        } else if marker == START_OF_SCAN {
            self.scan(content);
        }
    }

    /// The decoder judges a scan whose segment is too short.
    fn scan(&mut self, content: &[u8]) {
        let Some((count, rest)) = content.split_first() else { return };
        let Some((names, rest)) = rest.split_at_checked(2 * usize::from(*count)) else { return };
        let Some(&[first, last, bits]) = rest.first_chunk::<3>() else { return };
        let (places, before, bit) = match self.is_progressive {
            true => (usize::from(first)..usize::from(last) + 1, bits >> 4, bits & 0xf),
            // Decoders pass over what it says of them.
            false => (0..64, 0, 0),
        };
        for (name, sent) in &mut self.components {
            if names.as_chunks::<2>().0.iter().any(|one| one[0] == *name) {
                for sent in sent.get_mut(places.clone()).into_iter().flatten() {
                    self.has_gap |= before > 0 && *sent != before;
                    *sent = bit;
                }
            }
        }
    }

    fn is_all(&self) -> bool {
        !self.has_gap && self.components.iter().all(|(_, sent)| sent.iter().all(|bit| *bit == 0))
    }
}

/// The next marker from `at` on, and the place behind it: 0xff, more of them as filling, and a byte that is neither that nor 0.
fn next_marker(bytes: &[u8], mut at: usize) -> Option<(u8, usize)> {
    loop {
        at += bytes.get(at..)?.iter().position(|byte| *byte == 0xff)? + 1;
        match *bytes.get(at)? {
            0 => at += 1,
            0xff => {}
            marker => return Some((marker, at + 1)),
        }
    }
}

/// Restarts, and a marker for arithmetic coding.
fn stands_alone(marker: u8) -> bool {
    matches!(marker, 0x01 | 0xd0..=0xd7)
}

/// What a segment has, which begins with its length at `at`.
fn segment(bytes: &[u8], at: usize) -> Option<&[u8]> {
    let length = bytes.get(at..)?.first_chunk::<2>()?;
    bytes.get(at + 2..at + usize::from(u16::from_be_bytes(*length)))
}

/// The first EXIF, with its mark. If there are two, the decoder gives the last one.
fn exif(bytes: &[u8]) -> Option<&[u8]> {
    let mut at = 2;
    loop {
        let (marker, behind) = next_marker(bytes, at)?;
        at = behind;
        if stands_alone(marker) {
            continue;
        }
        let content = segment(bytes, behind)?;
        match marker {
            START_OF_SCAN => return None,
            APP1 if content.starts_with(EXIF_MARK) => return Some(content),
            // Tables, frames, other programs' data, comments.
            0..=u8::MAX => at += 2 + content.len(),
        }
    }
}

/// The file as the decoder makes of it what libjpeg does.
///
/// - Of three components libjpeg asks JFIF's marker which colours they are, then Adobe's, and then their names. The decoder asks their names and then
///   Adobe's marker. So that marker says here what libjpeg takes it for. Four of which it says that they are YCbCr are YCCK.
/// - If the first component has fewer samples in a row than another, or in a column while there are four in a row, the decoder gives other
///   pixels. That was found by comparing all ways to sample three components and many of four.
fn as_libjpeg(bytes: &[u8]) -> Result<Cow<'_, [u8]>, Cause> {
    let (mut at, mut has_jfif, mut adobe, mut components) = (2, false, None, Vec::new());
    while let Some((marker, behind)) = next_marker(bytes, at) {
        at = behind;
        if stands_alone(marker) {
            continue;
        }
        let Some(content) = segment(bytes, behind) else { break };
        match marker {
            START_OF_SCAN => break,
            APP0 => has_jfif |= content.len() >= 14 && content.starts_with(b"JFIF\0"),
            APP14 if content.len() >= 12 && content.starts_with(b"Adobe") => adobe = Some(behind + 2 + 11),
            // The start of a frame, of any kind: the others are tables.
            0xc0..=0xcf if !matches!(marker, 0xc4 | 0xc8 | 0xcc) => {
                components = content.get(6..).unwrap_or_default().as_chunks::<3>().0.to_vec();
            }
            // Tables, other programs' data, comments.
            0..=u8::MAX => {}
        }
        at += 2 + content.len();
    }
    // Of each component: its name, its samples in a row and in a column, and its table.
    let samples = |one: &[u8; 3]| (one[1] >> 4, one[1] & 0xf);
    let most = |of: fn((u8, u8)) -> u8| components.iter().map(samples).map(of).max().unwrap_or(0);
    let (row, column) = (most(|samples| samples.0), most(|samples| samples.1));
    if let Some(first) = components.first().map(samples)
        && (first.0 < row || (first.1 < column && row > 2))
    {
        return Err(Cause::Unsupported("its first component has fewer samples than another".into()));
    }
    let is_called_rgb = components.iter().map(|one| one[0]).eq(*b"RGB");
    let said = adobe.and_then(|at: usize| bytes.get(at).copied());
    let saying = |at: usize, transform: u8| {
        Cow::<[u8]>::Owned([&bytes[..at], &[transform], &bytes[at + 1..]].concat())
    };
    match (components.len(), said, adobe) {
        (3, ..) if is_called_rgb && (has_jfif || said.is_some_and(|transform| transform != 0)) => {
            let cause = "its components are named R, G and B, and a marker says that they are other colours";
            Err(Cause::Unsupported(cause.into()))
        }
        (3, Some(0), Some(at)) if has_jfif => Ok(saying(at, 1)),
        (4, Some(1), Some(at)) => Ok(saying(at, 2)),
        _ => Ok(Cow::Borrowed(bytes)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The file with other names of its components, without the segments of JFIF and Adobe, and with these behind its start.
    fn with(file: &[u8], names: Option<&[u8]>, first: &[u8]) -> Vec<u8> {
        let (mut at, mut other) = (2, [&file[..2], first].concat());
        loop {
            let (marker, behind) = next_marker(file, at).unwrap();
            let mut content = segment(file, behind).unwrap().to_vec();
            let end = behind + 2 + content.len();
            // Where the first name stands, and how far apart they are.
            let places = match marker {
                0xc0 => Some((6, 3)),
                START_OF_SCAN => Some((1, 2)),
                _ => None,
            };
            for (index, name) in names.into_iter().flatten().enumerate() {
                if let Some((first, apart)) = places {
                    content[first + index * apart] = *name;
                }
            }
            if marker != APP0 && marker != APP14 {
                other.extend([&file[at..behind + 2], &content[..]].concat());
            }
            at = end;
            if marker == START_OF_SCAN {
                return [&other[..], &file[end..]].concat();
            }
        }
    }

    /// Adobe's segment with this transform.
    fn adobe(transform: u8) -> Vec<u8> {
        [&b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00"[..], &[transform]].concat()
    }

    fn pixels(file: &[u8]) -> Result<Vec<u8>, String> {
        match decode(file) {
            Ok((image, _)) => Ok(image.into_rgb8().into_raw()),
            Err(cause) => Err(cause.text().to_owned()),
        }
    }

    /// Which files have which colours is what `jpeg_read_header` of libjpeg-turbo 2.1 says of these very files (`jpeg_color_space`), and
    /// that two of them have the same pixels what its `jpeg_read_scanlines` gives.
    #[test]
    fn components_have_the_colours_that_libjpeg_takes_them_for() {
        const JFIF: &[u8] = b"\xff\xe0\x00\x10JFIF\x00\x01\x01\x00\x00\x01\x00\x01\x00\x00";
        let file = include_bytes!("../../../tests/files/images/444.jpg");
        let of = |names: Option<&[u8]>, first: &[u8]| pixels(&with(file, names, first));
        let (ycbcr, rgb) = (pixels(file), of(None, &adobe(0)));
        assert!(ycbcr.is_ok() && rgb.is_ok() && ycbcr != rgb);
        assert_eq!(of(Some(b"RGB"), b""), rgb);
        assert_eq!(of(Some(b"RGB"), &adobe(0)), rgb);
        let both = [JFIF, &adobe(0)].concat();
        let other: [(Option<&[u8]>, &[u8]); 4] =
            [(None, b""), (Some(b"\x00\x01\x02"), b""), (None, &both), (None, &adobe(1))];
        for (names, first) in other {
            assert_eq!(of(names, first), ycbcr, "{names:?} {first:?}");
        }
        // libjpeg takes these for YCbCr, and the decoder for red, green and blue.
        for first in [JFIF, &adobe(1), &both] {
            let refused = of(Some(b"RGB"), first).unwrap_err();
            assert!(refused.contains("named R, G and B"), "{refused}");
        }
        let file = include_bytes!("../../../tests/files/images/cmyk.jpg");
        let of = |transform| pixels(&with(file, None, &adobe(transform)));
        assert_eq!((of(0), of(1)), (pixels(file), of(2)));
        assert!(of(0).is_ok() && of(1).is_ok() && of(0) != of(1));
    }

    #[test]
    fn a_first_component_with_fewer_samples_than_another_is_refused() {
        let file = include_bytes!("../../../tests/files/images/444.jpg");
        let frame = file.windows(2).position(|two| two == b"\xff\xc0").unwrap() + 4 + 6;
        let sampled = |factors: [u8; 3]| {
            let mut file = file.to_vec();
            (0..3).for_each(|component| file[frame + 3 * component + 1] = factors[component]);
            as_libjpeg(&file).map(drop).map_err(|cause| cause.text().to_owned())
        };
        for factors in [[0x11; 3], [0x22, 0x11, 0x11], [0x41, 0x21, 0x11], [0x21, 0x12, 0x12]] {
            assert_eq!(sampled(factors), Ok(()), "{factors:?}");
        }
        for factors in [[0x11, 0x22, 0x22], [0x12, 0x21, 0x11], [0x22, 0x22, 0x41], [0x41, 0x11, 0x22]] {
            assert!(sampled(factors).unwrap_err().contains("fewer samples"), "{factors:?}");
        }
    }

    /// Of two Pillow takes the first: longer EXIF than a segment holds goes on in the next one.
    #[test]
    fn a_picture_is_turned_as_its_first_exif_says() {
        let file = include_bytes!("../../../tests/files/images/444.jpg");
        let turned = |values: &[u16]| {
            let segments = values.iter().flat_map(|value| {
                let entry = [&[0x01_u8, 0x12, 0, 3, 0, 0, 0, 1][..], &value.to_be_bytes(), &[0, 0]].concat();
                let exif = [EXIF_MARK, b"MM\0\x2a\0\0\0\x08\0\x01", &entry, &[0; 4]].concat();
                [&[0xff, APP1][..], &(exif.len() as u16 + 2).to_be_bytes(), &exif].concat()
            });
            let segments: Vec<u8> = segments.collect();
            decode(&with(file, None, &segments)).map(|(_, orientation)| orientation).ok()
        };
        assert_eq!(turned(&[]), Some(Orientation::NoTransforms));
        assert_eq!(turned(&[6]), Some(Orientation::Rotate90));
        assert_eq!(turned(&[6, 3]), Some(Orientation::Rotate90));
        assert_eq!(turned(&[3, 6]), Some(Orientation::Rotate180));
    }

    /// libjpeg warns of them, and Pillow shows what is missing in grey.
    #[test]
    fn a_picture_that_ends_before_its_end_marker_is_an_error() {
        let files: [&[u8]; 5] = [
            include_bytes!("../../../tests/files/images/420.jpg"),
            include_bytes!("../../../tests/files/images/444.jpg"),
            include_bytes!("../../../tests/files/images/cmyk.jpg"),
            include_bytes!("../../../tests/files/images/gray.jpg"),
            include_bytes!("../../../tests/files/images/restarts.jpg"),
        ];
        for file in files {
            assert!(decode(file).is_ok());
            let (begin, end) = (file.windows(2).rposition(|two| two == b"\xff\xda").unwrap(), file.len() - 2);
            // Behind the segment that begins the scan; in its last bytes may be nothing but filling.
            for cut in begin + 16..end - 4 {
                assert!(decode(&[&file[..cut], &file[end..]].concat()).is_err(), "{cut} of {}", file.len());
            }
        }
        // Of the ten scans of a progressive one the first is whole, and of the second two bytes are there.
        let file = include_bytes!("../../../tests/files/images/progressive.jpg");
        let mut scans = file.windows(2).enumerate().filter(|(_, two)| *two == b"\xff\xda");
        let (second, _) = scans.nth(1).unwrap();
        assert!(decode(file).is_ok());
        assert!(decode(&[&file[..second + 12], &file[file.len() - 2..]].concat()).is_err());
    }

    /// Pillow takes these, and shows them blurred, or without a colour.
    #[test]
    fn a_picture_of_which_a_scan_is_missing_is_an_error() {
        /// Where each scan begins, and where its data end.
        fn scans(file: &[u8]) -> Vec<(usize, usize)> {
            let (mut at, mut scans) = (2, Vec::new());
            while let Some((marker, behind)) = next_marker(file, at) {
                at = behind;
                if marker == START_OF_SCAN {
                    let mut end = behind;
                    while let Some((marker, behind)) = next_marker(file, end)
                        && stands_alone(marker)
                    {
                        end = behind;
                    }
                    let end = next_marker(file, end).unwrap().1 - 2;
                    scans.push((at - 2, end));
                } else if !stands_alone(marker) && marker != END_OF_IMAGE {
                    at += 2 + segment(file, at).unwrap().len();
                }
            }
            scans
        }
        let file = include_bytes!("../../../tests/files/images/progressive.jpg");
        let all = scans(file);
        assert_eq!((all.len(), decode(file).is_ok()), (10, true));
        for (start, end) in all {
            let without = [&file[..start], &file[end..]].concat();
            assert!(whole(&without).unwrap_err().contains("scans are missing"), "{start}");
        }
        // A picture whose only scan lacks its last component.
        let file = include_bytes!("../../../tests/files/images/444.jpg");
        let start = scans(file)[0].0;
        assert!(whole(file).is_ok());
        let mut without = file.to_vec();
        assert_eq!(without[start + 2..start + 5], [0, 12, 3]);
        without.drain(start + 9..start + 11);
        without[start + 3..start + 5].copy_from_slice(&[10, 2]);
        assert!(whole(&without).unwrap_err().contains("scans are missing"));
    }

    #[test]
    fn a_file_is_whole_up_to_its_own_end_marker() {
        // Start, a segment with another end marker in it (a preview), a scan with a stuffed byte and a restart, the end.
        let whole_file = [
            &[0xff, 0xd8, 0xff, 0xe1, 0, 6, 0xff, 0xd8, 0xff, 0xd9][..],
            &[0xff, 0xff, 0xda, 0, 3, 9, 1, 0xff, 0, 2, 0xff, 0xd0, 3, 0xff, 0xd9],
        ]
        .concat();
        assert_eq!(whole(&whole_file), Ok(None));
        assert_eq!(whole(&[&whole_file[..], b"film"].concat()), Ok(None));
        assert_eq!(whole(&[&whole_file[..], &whole_file].concat()), Ok(None));
        let of = |scans: usize| {
            let scans = [0xff, START_OF_SCAN, 0, 3, 9, 1].repeat(scans);
            [&[0xff, START_OF_IMAGE][..], &scans, &[0xff, END_OF_IMAGE]].concat()
        };
        let end = Some(2 + 6 * MAX_SCANS);
        assert_eq!((whole(&of(MAX_SCANS)), whole(&of(MAX_SCANS + 1)).is_err()), (Ok(end), true));
        for end in 2..whole_file.len() {
            assert!(whole(&whole_file[..end]).is_err(), "{end}");
            let joined = [&whole_file[..end], &whole_file].concat();
            // In front of the scan the other file's bytes pass for a segment's, which the decoder notices.
            assert!(end < 16 || whole(&joined).is_err(), "{end}");
        }
    }
}
