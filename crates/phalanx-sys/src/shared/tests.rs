use std::sync::Arc;
use std::thread;
use std::time::Duration;

use super::*;
use crate::sync::Ordering;

const LAYOUT: Layout = Layout { rings: 2, ring_bytes: 128 };
/// How much to send where sending takes time: Miri is slow.
const MANY: u64 = if cfg!(miri) { 200 } else { 20_000 };

/// The memory of one process as mapped by it and by another process.
#[cfg(not(miri))]
fn mapped() -> [Arc<Segment>; 2] {
    let (own, invitation) = Segment::create(LAYOUT, 7).unwrap();
    let other = Segment::open(std::process::id(), invitation.descriptor(), LAYOUT, 7).unwrap();
    [own, other]
}

/// Miri has no anonymous files: both are the same mapping.
#[cfg(miri)]
fn mapped() -> [Arc<Segment>; 2] {
    let segment = Arc::new(Segment::private(LAYOUT).unwrap());
    [segment.clone(), segment]
}

fn pair() -> (Producer, Consumer) {
    let [own, other] = mapped();
    (other.producer(1).unwrap(), own.consumer(1).unwrap())
}

#[test]
fn bytes_come_out_as_they_went_in_around_the_end() {
    let (mut producer, mut consumer) = pair();
    let bytes: Vec<u8> = (0..=255).cycle().take(if cfg!(miri) { 1_000 } else { 10_000 }).collect();
    let (mut sent, mut received) = (0, Vec::new());
    while received.len() < bytes.len() {
        sent += producer.push(&bytes[sent..(sent + 77).min(bytes.len())]).unwrap();
        assert_eq!(consumer.peek(0).unwrap(), b"", "nothing is seen before it is published");
        producer.publish();
        let seen = consumer.peek(50).unwrap().to_vec();
        consumer.consume(seen.len());
        received.extend(seen);
    }
    assert_eq!(received, bytes);
}

#[test]
fn a_full_ring_takes_no_more() {
    let (mut producer, mut consumer) = pair();
    assert_eq!(producer.push(&[1; 100]), Ok(100));
    assert_eq!(producer.push(&[2; 100]), Ok(28));
    assert_eq!(producer.push(&[3; 100]), Ok(0));
    producer.publish();
    assert_eq!(consumer.peek(usize::MAX).unwrap().len(), 128);
    consumer.consume(1);
    assert_eq!(producer.push(&[3; 100]), Ok(1));
}

#[test]
fn who_takes_from_a_ring_that_is_half_full_knows_it() {
    let (mut producer, mut consumer) = pair();
    let mut take = |written: usize| {
        assert_eq!(producer.push(&vec![1; written]), Ok(written));
        producer.publish();
        let waiting = consumer.peek(64).unwrap().len();
        consumer.consume(waiting);
        consumer.was_half_full()
    };
    assert!(!take(63));
    assert!(take(64));
    assert!(!take(1));
    assert!(take(128));
    // What was there at the last look has not all been taken.
    assert!(take(0));
}

#[test]
fn positions_that_a_peer_cannot_have_are_refused() {
    let (producer, mut consumer) = pair();
    producer.segment.written(1).store(129, Ordering::Relaxed);
    assert_eq!(consumer.peek(1), Err(Corrupt));
    producer.segment.written(1).store(100, Ordering::Relaxed);
    assert_eq!(consumer.peek(128).unwrap().len(), 100);
    producer.segment.written(1).store(99, Ordering::Relaxed);
    assert_eq!(consumer.peek(128), Err(Corrupt), "what was published is taken back");
    let (mut producer, consumer) = pair();
    consumer.segment.consumed(1).store(1, Ordering::Relaxed);
    assert_eq!(producer.push(&[0; 200]), Err(Corrupt));
}

#[test]
fn sleepers_are_woken_and_miss_nothing() {
    let (mut producer, mut consumer) = pair();
    let segment = consumer.segment.clone();
    thread::scope(|scope| {
        scope.spawn(move || {
            for number in 0..MANY {
                while producer.push(&number.to_le_bytes()).unwrap() == 0 {
                    thread::yield_now();
                }
                producer.publish();
                producer.doorbell().ring();
            }
        });
        for number in 0..MANY {
            while consumer.peek(8).unwrap().is_empty() {
                let started = std::time::Instant::now();
                let limit = Duration::from_secs(10);
                segment.doorbell().sleep_unless(limit, || consumer.peek(8) != Ok(&[]));
                assert!(started.elapsed() < limit, "a ring was missed");
            }
            assert_eq!(consumer.peek(8).unwrap(), number.to_le_bytes());
            consumer.consume(8);
        }
    });
}

// Miri copies from no process.
#[cfg(not(miri))]
mod offers {
    use super::*;

    fn copied(consumer: &Consumer, length: usize) -> Vec<u8> {
        let mut into = vec![0; length];
        assert_eq!(consumer.copy_offered(std::process::id(), 0, &mut into).unwrap(), length);
        into
    }

    #[test]
    fn the_reader_copies_what_is_offered_and_answers() {
        let (mut producer, mut consumer) = pair();
        let pid = std::process::id();
        for (number, answer) in [(1, Answer::Copied), (2, Answer::Refused), (3, Answer::Copied)] {
            let bytes: Vec<u8> = (0..=255).cycle().skip(number as usize).take(100_000).collect();
            let offer = producer.offer(&bytes);
            assert_eq!((offer.number(), producer.answer()), (number, Ok(None)));
            assert_eq!(copied(&consumer, bytes.len()), bytes);
            let mut end = [0; 10];
            assert_eq!(consumer.copy_offered(pid, 99_990, &mut end).unwrap(), 10);
            assert_eq!(end, bytes[99_990..]);
            assert!(consumer.is_kept(number, pid).unwrap());
            consumer.answer(number, answer);
            assert_eq!(producer.answer(), Ok(Some(answer)));
        }
    }

    #[test]
    fn what_is_copied_from_an_offer_that_was_withdrawn_does_not_count() {
        let (mut producer, consumer) = pair();
        let mut bytes = vec![1; 1000];
        let offer = producer.offer(&bytes);
        drop(offer);
        bytes.fill(2);
        assert_eq!(copied(&consumer, 1000), bytes);
        assert!(!consumer.is_kept(1, std::process::id()).unwrap());
    }

    #[test]
    fn a_process_that_has_not_this_memory_has_offered_nothing() {
        let (mut producer, consumer) = pair();
        let bytes = [1; 8];
        let _offer = producer.offer(&bytes);
        // As if another program ran in the process: something else is where the nonce was.
        let nonce = (consumer.segment.memory.address(8), producer.segment.memory.address(8));
        assert_ne!(nonce.0, nonce.1, "two mappings");
        let place = FIELDS + POSITIONS + 24;
        consumer.segment.memory.word(place).store(bytes.as_ptr().addr() as u64, Ordering::Relaxed);
        assert!(!consumer.is_kept(1, std::process::id()).unwrap());
        consumer.segment.memory.word(place).store(8, Ordering::Relaxed);
        assert!(consumer.is_kept(1, std::process::id()).is_err(), "there is no memory");
        let mut into = [0; 8];
        assert!(consumer.copy_offered(u32::MAX, 0, &mut into).is_err(), "no process has this number");
    }

    #[test]
    fn an_answer_to_no_offer_is_refused() {
        let (producer, mut consumer) = pair();
        assert_eq!(producer.answer(), Ok(Some(Answer::Copied)), "nothing is awaited");
        consumer.answer(7, Answer::Copied);
        assert_eq!(producer.answer(), Err(Corrupt));
    }
}
