//! Mutations of valid messages.

use std::hash::{BuildHasher, RandomState};

/// Numbers that look random, and are the same for the same seed: SplitMix64.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// One that nobody has had before.
    pub fn seed() -> u64 {
        RandomState::new().hash_one(0)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// One of 0 to `end` - 1.
    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }
}

/// Some of the `requests`, one after the other, after a client's opening; or a recorded `greeting`, again. Wrong, most of the
/// time.
pub fn some(random: &mut Random, requests: &[Vec<u8>], greeting: Option<&[u8]>) -> Vec<u8> {
    let mut message = match greeting {
        Some(greeting) if random.below(3) == 0 => greeting.to_vec(),
        _ => {
            let count = 1 + random.below(6);
            let mut message = requests[0].clone();
            (0..count).for_each(|_| message.extend(&requests[1 + random.below(requests.len() - 1)]));
            message
        }
    };
    (0..random.below(4)).for_each(|_| mutate(random, &mut message));
    message
}

/// The same with one thing wrong.
pub fn mutate(random: &mut Random, message: &mut Vec<u8>) {
    if message.is_empty() {
        return;
    }
    let at = random.below(message.len());
    match random.below(6) {
        0 => message[at] ^= 1 << random.below(8),
        1 => message.truncate(at),
        2 => (0..random.below(64)).for_each(|_| message.push(random.next() as u8)),
        // Said twice, or from the middle again.
        3 => message.extend_from_within(at..),
        // A length that is another: short, long, or as long as no memory is.
        4 => {
            let lengths = [0, 1, 8192, 8 << 20, (8 << 20) + 1, u32::MAX.into(), 1 << 63, u64::MAX];
            let length = lengths[random.below(lengths.len())].to_le_bytes();
            let end = (at + 8).min(message.len());
            message[at..end].copy_from_slice(&length[..end - at]);
        }
        _ => drop(message.drain(..at)),
    }
}
