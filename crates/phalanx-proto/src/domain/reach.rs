//! Which memory of its host a rank could map.
//!
//! Every rank reads what all tell, so this is short: a bit for each rank of the same host, and one reason.

use serde::{Deserialize, Serialize};

/// The longest reason that a rank tells.
const MAX_REASON: usize = 500;
/// The reason for the memory of other ranks, after the first.
const LIKEWISE: &str = "it cannot map the memory of others";

/// Which memory of the ranks of its host a rank could map, as it tells all ranks. By default it is that of none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reach {
    /// Why not that of the first rank whose memory it could not map.
    reason: String,
    /// Of which ranks not: a bit for each, the lowest of the first byte for the first.
    missing: Vec<u8>,
}

impl Reach {
    /// For each rank of the host, in order, why its memory cannot be mapped; None if it can.
    pub fn new<'a>(obstacles: impl IntoIterator<Item = Option<&'a str>>) -> Self {
        let (mut first, mut missing) = (None, Vec::new());
        for (index, obstacle) in obstacles.into_iter().enumerate() {
            if index % 8 == 0 {
                missing.push(0u8);
            }
            if let (Some(reason), Some(bits)) = (obstacle, missing.last_mut()) {
                *bits |= 1u8 << (index % 8);
                first.get_or_insert(reason);
            }
        }
        let reason = first.unwrap_or_default();
        Self { reason: reason[..reason.floor_char_boundary(MAX_REASON)].to_owned(), missing }
    }

    /// Whether the rank could map the memory of the one with this `index`. It could not, if it tells nothing of it.
    pub fn has(&self, index: usize) -> bool {
        self.missing.get(index / 8).is_some_and(|bits| bits >> (index % 8) & 1 == 0)
    }

    /// Why the rank could not map the memory of the one with this `index`; None if it could.
    pub fn obstacle(&self, index: usize) -> Option<&str> {
        if self.has(index) {
            return None;
        }
        let is_first = !self.reason.is_empty() && (0..index).all(|before| self.has(before));
        Some(if is_first { self.reason.as_str() } else { LIKEWISE })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(reach: &Reach) -> Vec<u8> {
        postcard::to_stdvec(reach).unwrap()
    }

    #[test]
    fn a_rank_tells_whose_memory_it_can_map_and_why_not() {
        let obstacles = [None, Some("rank 1 has gone"), None, Some("rank 3 has none"), None];
        let heard: Reach = postcard::from_bytes(&told(&Reach::new(obstacles))).unwrap();
        let found: Vec<_> = (0..5).map(|index| heard.obstacle(index)).collect();
        assert_eq!(found, [None, Some("rank 1 has gone"), None, Some(LIKEWISE), None]);
        // One that tells of fewer ranks than there are can map no others.
        assert_eq!(heard.obstacle(9), Some(LIKEWISE));
        assert_eq!(Reach::default().obstacle(0), Some(LIKEWISE));
        assert!(Reach::new([None; 8]).has(7) && !Reach::new([None; 8]).has(8));
    }

    #[test]
    fn what_a_rank_tells_is_short_whatever_its_reasons() {
        assert!(told(&Reach::new([None; 8])).len() <= 3);
        assert!(told(&Reach::new([None; 256])).len() <= 36);
        let long = "\u{1d11e}".repeat(1000);
        let told = told(&Reach::new([Some(long.as_str()); 256]));
        assert!(told.len() <= MAX_REASON + 40, "{}", told.len());
    }
}
