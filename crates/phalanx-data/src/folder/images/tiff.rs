//! The pages of a TIFF.

/// The tag that says what kind of page it is, and its bit for a smaller copy of another page.
const NEW_SUBFILE_TYPE: u64 = 254;
const IS_REDUCED: u64 = 1;
/// More pages than this are not counted.
const MAX_PAGES: usize = 1 << 16;

/// How many pages a TIFF has, without smaller copies of them. None if its list of pages leads out of the file.
pub(super) fn pages(bytes: &[u8]) -> Option<usize> {
    let reader = Reader::of(bytes)?;
    let (mut next, mut pages) = (reader.number(reader.first, reader.offset), 0);
    for _ in 0..MAX_PAGES {
        let at = next?;
        if at == 0 {
            return Some(pages);
        }
        let (is_reduced, behind) = reader.page(at)?;
        pages += usize::from(!is_reduced);
        next = behind;
    }
    Some(pages)
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

    /// Whether the page is a smaller copy, and where the next one is.
    fn page(&self, at: u64) -> Option<(bool, Option<u64>)> {
        let entries = self.number(at, self.count)?;
        let first = at.checked_add(self.count)?;
        let end = first.checked_add(entries.checked_mul(self.entry)?)?;
        if end > self.bytes.len() as u64 {
            return None;
        }
        let kinds = (0..entries).map(|entry| first + entry * self.entry);
        let kind = kinds.into_iter().find(|at| self.number(*at, 2) == Some(NEW_SUBFILE_TYPE));
        // Its value is a LONG behind tag, type and count.
        let kind = kind.and_then(|at| self.number(at + 4 + self.offset, 4)).unwrap_or(0);
        Some((kind & IS_REDUCED != 0, self.number(end, self.offset)))
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

    #[test]
    fn a_list_of_pages_without_an_end_is_not_followed_for_ever() {
        // One page of no entry, which is its own next.
        let round = [&b"II"[..], &[42, 0, 8, 0, 0, 0], &[0, 0], &[8, 0, 0, 0]].concat();
        assert_eq!(pages(&round), Some(MAX_PAGES));
        assert_eq!(pages(&round[..9]), None);
        let one = [&b"MM"[..], &[0, 42, 0, 0, 0, 8], &[0, 0], &[0, 0, 0, 0]].concat();
        assert_eq!((pages(&one), pages(b"II")), (Some(1), None));
    }
}
