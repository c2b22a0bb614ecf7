//! What a TIFF says of its pages.

use std::collections::HashSet;

/// The tag that says what kind of page it is, and its bit for a smaller copy of another page.
const NEW_SUBFILE_TYPE: u64 = 254;
const IS_REDUCED: u64 = 1;
/// The tag that says what samples there are besides the colours, and that of an opacity by which the colours were multiplied.
const EXTRA_SAMPLES: u64 = 338;
const IS_ASSOCIATED: u64 = 1;
/// The tag of how the pixels are compressed, and the number of JPEG.
const COMPRESSION: u64 = 259;
const IS_JPEG: u64 = 7;
/// The tags of where the strips or tiles are, and of their lengths.
const PARTS: [(u64, u64); 2] = [(273, 279), (324, 325)];
/// The most pages, and the most entries of all of them together.
const MAX_PAGES: usize = 1 << 16;
const MAX_ENTRIES: u64 = 1 << 20;

/// How many pages a TIFF has, without smaller copies of them. The error says what is wrong with its list of pages.
pub(super) fn pages(bytes: &[u8]) -> Result<usize, &'static str> {
    const CUT_OFF: &str = "it is cut off: its list of pages leads out of the file";
    let reader = Reader::of(bytes).ok_or(CUT_OFF)?;
    let (mut next, mut pages) = (reader.number(reader.first, reader.offset), 0);
    let (mut seen, mut entries) = (HashSet::new(), 0);
    loop {
        let at = next.ok_or(CUT_OFF)?;
        if at == 0 {
            return Ok(pages);
        }
        if !seen.insert(at) {
            return Err("its list of pages comes back to one that was there before");
        }
        let page = reader.page(at).ok_or(CUT_OFF)?;
        entries += page.entries;
        if seen.len() > MAX_PAGES || entries > MAX_ENTRIES {
            return Err("its list of pages is longer than any picture's");
        }
        pages += usize::from(!reader.is_reduced(&page));
        next = page.next;
    }
}

/// Whether the colours of the first page were multiplied by its opacity.
pub(super) fn is_premultiplied(bytes: &[u8]) -> bool {
    let samples = Reader::of(bytes).and_then(|reader| {
        let page = reader.page(reader.number(reader.first, reader.offset)?)?;
        let at = reader.find(&page, EXTRA_SAMPLES)?;
        let (count, place) = (reader.number(at + 4, reader.offset)?, at + 4 + reader.offset);
        // Each has two bytes. More than have room in the entry are elsewhere.
        let place = if count <= reader.offset / 2 { place } else { reader.number(place, reader.offset)? };
        reader.number(place, 2)
    });
    samples == Some(IS_ASSOCIATED)
}

/// Whether the first page is JPEG of which the file lacks a part. The decoder fills that with grey; in other compressions it is an error there.
pub(super) fn is_cut_off_jpeg(bytes: &[u8]) -> bool {
    Reader::of(bytes).and_then(|reader| reader.has_jpeg_outside()).unwrap_or(false)
}

/// A page: where its entries begin, how many they are, and where the next page is.
struct Page {
    first: u64,
    entries: u64,
    next: Option<u64>,
}

struct Reader<'a> {
    bytes: &'a [u8],
    is_little_endian: bool,
    /// Where the place of the first page is.
    first: u64,
    /// Bytes of an offset, of a count of entries, and of an entry.
    offset: u64,
    count: u64,
    entry: u64,
}

impl<'a> Reader<'a> {
    fn of(bytes: &'a [u8]) -> Option<Self> {
        let is_little_endian = bytes.starts_with(b"II");
        let small = Self { bytes, is_little_endian, first: 4, offset: 4, count: 2, entry: 12 };
        match small.number(2, 2)? {
            42 => Some(small),
            43 => Some(Self { first: 8, offset: 8, count: 8, entry: 20, ..small }),
            _ => None,
        }
    }

    fn page(&self, at: u64) -> Option<Page> {
        let entries = self.number(at, self.count)?;
        let first = at.checked_add(self.count)?;
        let end = first.checked_add(entries.checked_mul(self.entry)?)?;
        let is_inside = end <= self.bytes.len() as u64;
        is_inside.then(|| Page { first, entries, next: self.number(end, self.offset) })
    }

    /// Whether the page is a smaller copy of another.
    fn is_reduced(&self, page: &Page) -> bool {
        let kind = self.find(page, NEW_SUBFILE_TYPE);
        // Its value is a LONG behind tag, type and count.
        let kind = kind.and_then(|at| self.number(at + 4 + self.offset, 4)).unwrap_or(0);
        kind & IS_REDUCED != 0
    }

    /// Whether the first page is JPEG, and a strip or tile of it leads out of the file.
    fn has_jpeg_outside(&self) -> Option<bool> {
        let page = self.page(self.number(self.first, self.offset)?)?;
        let compression = self.find(&page, COMPRESSION)?;
        if self.number(compression + 4 + self.offset, 2)? != IS_JPEG {
            return Some(false);
        }
        let parts = PARTS.iter().filter_map(|(places, lengths)| {
            Some(self.numbers(&page, *places)?.zip(self.numbers(&page, *lengths)?))
        });
        let all = self.bytes.len() as u64;
        Some(parts.flatten().any(|(place, length)| place.checked_add(length).is_none_or(|end| end > all)))
    }

    /// The numbers of the entry with this tag.
    fn numbers(&self, page: &Page, tag: u64) -> Option<impl Iterator<Item = u64>> {
        let at = self.find(page, tag)?;
        // By its type: SHORT, LONG, LONG8.
        let each = match self.number(at + 2, 2)? {
            3 => 2,
            4 => 4,
            16 => 8,
            _ => return None,
        };
        let (count, own) = (self.number(at + 4, self.offset)?, at + 4 + self.offset);
        let length = count.checked_mul(each)?;
        // More than have room in the entry are elsewhere.
        let first = if length <= self.offset { own } else { self.number(own, self.offset)? };
        let is_inside = first.checked_add(length)? <= self.bytes.len() as u64;
        is_inside.then(|| (0..count).map_while(move |index| self.number(first + index * each, each)))
    }

    /// Where the entry with this tag begins.
    fn find(&self, page: &Page, tag: u64) -> Option<u64> {
        let mut entries = (0..page.entries).map(|entry| page.first + entry * self.entry);
        entries.find(|at| self.number(*at, 2) == Some(tag))
    }

    /// The number of so many bytes at a place.
    fn number(&self, at: u64, length: u64) -> Option<u64> {
        let at = usize::try_from(at).ok()?;
        let bytes = self.bytes.get(at..at.checked_add(length as usize)?)?;
        let join = |number, byte: &u8| number << 8 | u64::from(*byte);
        Some(if self.is_little_endian {
            bytes.iter().rev().fold(0, join)
        } else {
            bytes.iter().fold(0, join)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small(first: u32, pages: &[(u16, u32)]) -> Vec<u8> {
        let mut bytes = [&b"II\x2a\0"[..], &first.to_le_bytes()].concat();
        for (entries, next) in pages {
            bytes.extend(entries.to_le_bytes());
            bytes.extend(vec![0; usize::from(*entries) * 12]);
            bytes.extend(next.to_le_bytes());
        }
        bytes
    }

    #[test]
    fn a_tiff_whose_jpeg_was_cut_off_is_an_error() {
        use super::super::decode::{Options, decode};

        let read = |file: &[u8]| match decode(file, Options::default()) {
            Ok(image) => Ok(image.into_rgb8().into_raw()),
            Err(cause) => Err(cause.text().to_owned()),
        };
        let file = include_bytes!("../../../tests/files/images/jpeg.tif");
        // Its pixels stand behind all else here, so that nothing else is cut off.
        let reader = Reader::of(file).unwrap();
        let page = reader.page(reader.number(4, 4).unwrap()).unwrap();
        let value = |tag: u64| reader.find(&page, tag).unwrap() as usize + 8;
        let number = |tag: u64| reader.number(value(tag) as u64, 4).unwrap() as usize;
        let (place, length) = (number(273), number(279));
        let mut moved = [&file[..], &file[place..place + length]].concat();
        moved[value(273)..value(273) + 4].copy_from_slice(&(file.len() as u32).to_le_bytes());
        assert!(read(file).is_ok());
        assert_eq!(read(&moved), read(file));
        for missing in [1, length / 2, length - 2] {
            let error = read(&moved[..moved.len() - missing]).unwrap_err();
            assert!(error.contains("cut off"), "{error}");
        }
    }

    #[test]
    fn a_list_of_pages_without_an_end_is_an_error() {
        // One page of no entry, which is its own next; two that follow each other.
        for round in [small(8, &[(0, 8)]), small(8, &[(0, 14), (0, 8)])] {
            assert!(pages(&round).unwrap_err().contains("comes back"));
        }
        assert!(pages(&small(8, &[(0, 8)])[..9]).unwrap_err().contains("cut off"));
        assert_eq!(pages(&small(8, &[(0, 14), (2, 0)])), Ok(2));
        let one = [&b"MM"[..], &[0, 42, 0, 0, 0, 8], &[0, 0], &[0, 0, 0, 0]].concat();
        assert_eq!((pages(&one), pages(b"II").is_err()), (Ok(1), true));
    }

    #[test]
    fn a_list_of_pages_is_followed_so_far_as_a_picture_needs() {
        // Each page has one entry.
        let places: Vec<u64> = (0..2000).map(|page| 8 + 18 * page).collect();
        let mut bytes = b"II\x2a\0\x08\0\0\0".to_vec();
        for place in &places[1..] {
            bytes.extend([1, 0]);
            bytes.extend([0; 12]);
            bytes.extend((*place as u32).to_le_bytes());
        }
        bytes.extend([0; 6]);
        assert_eq!(pages(&bytes), Ok(2000));
        // Pages of so many entries that they overlap.
        let mut large = small(8, &[]);
        large.resize(1 << 20, 0);
        for page in 0..40usize {
            let (at, entries) = (8 + 4 * page, 60_000u16);
            large[at..at + 2].copy_from_slice(&entries.to_le_bytes());
            let end = at + 2 + 12 * usize::from(entries);
            large[end..end + 4].copy_from_slice(&(12 + 4 * page as u32).to_le_bytes());
        }
        assert!(pages(&large).unwrap_err().contains("longer than"));
    }
}
