//! A ring whose peer may write any position, for the fuzz target `ring` and for the tests.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::shared::{Layout, Segment};

const LAYOUT: Layout = Layout { rings: 1, ring_bytes: 128 };

/// Runs `script` on both ends of a ring, two bytes for each step: the operation, and a number. While both ends keep to
/// the protocol, the bytes read are the bytes written. An end that breaks it must not make the other access memory
/// outside the ring.
///
/// Returns whether anything was read.
pub fn ring(script: &[u8]) -> bool {
    let Ok(segment) = Segment::private(LAYOUT).map(Arc::new) else { return false };
    let Some((mut producer, mut consumer)) = segment.producer(0).zip(segment.consumer(0)) else {
        return false;
    };
    let (mut next, mut pushed, mut published) = (0u8, VecDeque::new(), VecDeque::new());
    let (mut written, mut consumed) = (0u64, 0u64);
    // The other end's position when the reader last read it, which it does only where it needs more.
    let mut seen = 0u64;
    let (mut honest, mut any) = (true, false);
    // The position that this end believes the other to have; asking for more than the ring holds makes it read it.
    let fits = |waiting: Option<u64>| waiting.is_some_and(|waiting| waiting <= LAYOUT.ring_bytes as u64);
    for step in script.chunks_exact(2) {
        let most = usize::from(step[1]);
        match step[0] % 6 {
            0 => {
                let bytes: Vec<u8> = (0..most).map(|at| next.wrapping_add(at as u8)).collect();
                let result = producer.push(&bytes);
                let room = LAYOUT.ring_bytes - (pushed.len() + published.len()).min(LAYOUT.ring_bytes);
                assert!(!honest || result == Ok(most.min(room)));
                let theirs = segment.consumed(0).load(Ordering::Relaxed);
                assert!(most <= LAYOUT.ring_bytes || result.is_ok() == fits(written.checked_sub(theirs)));
                let count = result.unwrap_or(0);
                assert!(count <= most);
                next = next.wrapping_add(count as u8);
                written += count as u64;
                pushed.extend(&bytes[..count]);
            }
            1 => {
                producer.publish();
                published.append(&mut pushed);
            }
            2 => {
                let looks = seen - consumed < most as u64;
                let result = consumer.peek(most);
                let theirs = segment.written(0).load(Ordering::Relaxed);
                assert!(!honest || result.is_ok());
                let is_possible = theirs >= seen && fits(theirs.checked_sub(consumed));
                assert_eq!(result.is_ok(), is_possible || !looks);
                let Ok(waiting) = result else { continue };
                seen = if looks { theirs } else { seen };
                assert!(waiting.len() <= most.min(LAYOUT.ring_bytes));
                assert!(!honest || waiting.iter().eq(published.iter().take(waiting.len())));
                assert!(!honest || !waiting.is_empty() || most == 0 || published.is_empty());
                any |= !waiting.is_empty();
            }
            3 => {
                let looks = seen - consumed < most as u64;
                let Ok(waiting) = consumer.peek(most).map(<[u8]>::len) else { continue };
                seen = if looks { segment.written(0).load(Ordering::Relaxed) } else { seen };
                consumer.consume(waiting);
                consumed += waiting as u64;
                published.drain(..waiting.min(published.len()));
            }
            // From here on they act as peers that break the protocol.
            4 => {
                segment.written(0).store(position(step[1]), Ordering::Relaxed);
                honest = false;
            }
            _ => {
                segment.consumed(0).store(position(step[1]), Ordering::Relaxed);
                honest = false;
            }
        }
    }
    any
}

/// Small positions, and those next to the largest number.
fn position(byte: u8) -> u64 {
    (i64::from(byte.cast_signed()) * 3).cast_unsigned()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn what_the_fuzzer_has_found_before_is_still_right() {
        let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/ring");
        let mut valid = 0;
        for file in fs::read_dir(seeds).unwrap() {
            let path = file.unwrap().path();
            let reads = path.file_name().unwrap().to_str().unwrap().starts_with("valid");
            assert_eq!(ring(&fs::read(&path).unwrap()), reads, "does {} read anything?", path.display());
            valid += usize::from(reads);
        }
        assert!(valid > 0, "no seed reads anything");
    }
}
