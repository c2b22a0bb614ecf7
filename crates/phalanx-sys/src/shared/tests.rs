use std::fs::File;
use std::thread;

use rustix::fs::{MemfdFlags, memfd_create};

use super::*;

const LAYOUT: Layout = Layout { rings: 2, ring_bytes: 128 };

fn pair() -> (Producer, Consumer) {
    let (own, invitation) = Segment::create(LAYOUT, 7).unwrap();
    let other = Segment::open(std::process::id(), invitation.descriptor(), LAYOUT, 7).unwrap();
    (other.producer(1).unwrap(), own.consumer(1).unwrap())
}

#[test]
fn only_the_right_memory_is_opened() {
    let (own, invitation) = Segment::create(LAYOUT, 7).unwrap();
    let open = |layout, nonce| Segment::open(std::process::id(), invitation.descriptor(), layout, nonce);
    assert!(open(LAYOUT, 8).is_err());
    assert!(open(Layout { rings: 200, ..LAYOUT }, 7).is_err());
    assert!(open(Layout { ring_bytes: 100, ..LAYOUT }, 7).is_err());
    let device = File::open("/dev/null").unwrap();
    let error = Segment::open(std::process::id(), device.as_raw_fd(), LAYOUT, 7).unwrap_err();
    assert_eq!(error.to_string(), "it is not a segment");
    let file = tempfile();
    assert!(Segment::open(std::process::id(), file.as_raw_fd(), LAYOUT, 7).is_err(), "it could shrink");
    assert!(own.consumer(2).is_none());
    let first = own.consumer(0);
    assert!(first.is_some() && own.consumer(0).is_none());
}

#[test]
fn an_end_is_given_out_once_also_to_other_mappings() {
    let (own, invitation) = Segment::create(LAYOUT, 7).unwrap();
    let others =
        [(); 2].map(|()| Segment::open(std::process::id(), invitation.descriptor(), LAYOUT, 7).unwrap());
    let producer = others[0].producer(1);
    assert!(producer.is_some() && others[1].producer(1).is_none() && own.producer(1).is_none());
    let consumer = own.consumer(1);
    assert!(consumer.is_some() && others[0].consumer(1).is_none() && others[1].consumer(0).is_some());
}

fn tempfile() -> OwnedFd {
    let fd = memfd_create(NAME, MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, LAYOUT.bytes() as u64).unwrap();
    fd
}

#[test]
fn bytes_come_out_as_they_went_in_around_the_end() {
    let (mut producer, mut consumer) = pair();
    let bytes: Vec<u8> = (0..=255).cycle().take(10_000).collect();
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
fn positions_that_a_peer_cannot_have_are_refused() {
    let (producer, mut consumer) = pair();
    producer.segment.written(1).store(129, Ordering::Relaxed);
    assert_eq!(consumer.peek(1), Err(Corrupt));
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
            for number in 0..20_000u64 {
                while producer.push(&number.to_le_bytes()).unwrap() == 0 {
                    thread::yield_now();
                }
                producer.publish();
                producer.doorbell().ring();
            }
        });
        for number in 0..20_000u64 {
            while consumer.peek(8).unwrap().is_empty() {
                let started = std::time::Instant::now();
                let written = segment.written(1);
                let seen = consumer.written;
                let limit = Duration::from_secs(10);
                segment.doorbell().sleep_unless(limit, || written.load(Ordering::Acquire) != seen);
                assert!(started.elapsed() < limit, "a ring was missed");
            }
            assert_eq!(consumer.peek(8).unwrap(), number.to_le_bytes());
            consumer.consume(8);
        }
    });
}
