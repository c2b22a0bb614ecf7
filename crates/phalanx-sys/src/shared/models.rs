//! The protocols of rings and doorbells under loom, with every interleaving that the memory model allows.
//!
//! Loom reports an access to a byte that belongs to the other side at that time, and a sleeper that is never woken.

use std::sync::Arc;
use std::time::Duration;

use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;

use super::modelled::WATCHED;
use super::*;

/// Runs every interleaving, or only those with at most `preemptions` preemptions.
fn model(preemptions: Option<usize>, run: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.check(run);
}

fn segment(ring_bytes: usize) -> Arc<Segment> {
    let layout = Layout { rings: 1, ring_bytes }.check().unwrap();
    let memory = Memory::new(layout.words(), layout.data(0)..layout.data(1));
    Arc::new(Segment { memory, layout })
}

fn ends(segment: &Arc<Segment>) -> (Producer, Consumer) {
    (segment.producer(0).unwrap(), segment.consumer(0).unwrap())
}

/// The bytes to send: `pieces` of `WATCHED` bytes, each piece with a different number.
fn numbered(pieces: u8) -> Vec<u8> {
    (0..pieces).flat_map(|piece| [piece; WATCHED]).collect()
}

/// Sends `bytes`, at most `most` at once. Calls `wait` when there is no room.
fn send(producer: &mut Producer, bytes: &[u8], most: usize, mut wait: impl FnMut(&mut Producer)) {
    let mut sent = 0;
    while sent < bytes.len() {
        let pushed = producer.push(&bytes[sent..bytes.len().min(sent.saturating_add(most))]).unwrap();
        sent += pushed;
        if pushed == 0 {
            wait(producer);
        } else {
            producer.publish();
            producer.doorbell().ring();
        }
    }
}

/// Receives what should be `bytes`, at most `most` at once. Calls `wait` when the ring is empty, and `taken` after each
/// read.
fn receive(
    consumer: &mut Consumer,
    bytes: &[u8],
    most: usize,
    mut wait: impl FnMut(&mut Consumer),
    taken: impl Fn(),
) {
    let mut received = 0;
    while received < bytes.len() {
        let waiting = consumer.peek(most).unwrap();
        let count = waiting.len();
        assert_eq!(waiting, &bytes[received..received + count]);
        received += count;
        if count == 0 {
            wait(consumer);
        } else {
            consumer.consume(count);
            taken();
        }
    }
}

/// `pieces` through a ring of `ring_bytes`, by threads that poll.
fn pass(ring_bytes: usize, pieces: u8, pushed: usize, peeked: usize) {
    model(None, move || {
        let (mut producer, mut consumer) = ends(&segment(ring_bytes));
        let sender = thread::spawn(move || {
            send(&mut producer, &numbered(pieces), pushed, |_| thread::yield_now());
        });
        receive(&mut consumer, &numbered(pieces), peeked, |_| thread::yield_now(), || ());
        sender.join().unwrap();
        assert_eq!(consumer.peek(WATCHED), Ok(&[][..]));
    });
}

#[test]
fn loom_every_byte_arrives_once_and_in_order() {
    pass(ALIGNMENT, 3, WATCHED, WATCHED);
}

#[test]
fn loom_pieces_go_around_the_end_of_the_ring() {
    pass(2 * ALIGNMENT, 6, 3 * WATCHED, 3 * WATCHED);
}

#[test]
fn loom_a_full_ring_is_taken_at_once() {
    pass(ALIGNMENT, 4, usize::MAX, usize::MAX);
}

/// `pieces` through a ring of one line. As ranks do, each side sleeps on the doorbell of its own segment when the ring
/// is full, or empty.
fn pass_asleep(pieces: u8, preemptions: Option<usize>) {
    model(preemptions, move || {
        let (ours, theirs) = (segment(ALIGNMENT), segment(ALIGNMENT));
        let (mut producer, mut consumer) = ends(&theirs);
        let bell = ours.clone();
        let sender = thread::spawn(move || {
            send(&mut producer, &numbered(pieces), ALIGNMENT, |ring| {
                ours.doorbell().sleep_unless(Duration::MAX, || ring.room() != Ok(0));
            });
        });
        let wait = |ring: &mut Consumer| {
            theirs.doorbell().sleep_unless(Duration::MAX, || ring.peek(WATCHED) != Ok(&[]));
        };
        receive(&mut consumer, &numbered(pieces), ALIGNMENT, wait, || bell.doorbell().ring());
        sender.join().unwrap();
    });
}

#[test]
fn loom_a_reader_asleep_misses_nothing() {
    pass_asleep(2, None);
}

#[test]
fn loom_both_ends_asleep_miss_nothing() {
    pass_asleep(4, Some(4));
}

/// One thread sleeps until all of `ringers` have rung.
fn gather(ringers: usize, preemptions: Option<usize>) {
    model(preemptions, move || {
        let segment = segment(ALIGNMENT);
        let come = Arc::new(AtomicUsize::new(0));
        let ringers: Vec<_> = (0..ringers)
            .map(|_| {
                let (segment, come) = (segment.clone(), come.clone());
                thread::spawn(move || {
                    come.fetch_add(1, Ordering::Relaxed);
                    segment.doorbell().ring();
                })
            })
            .collect();
        let mut seen = 0;
        while seen < ringers.len() {
            segment.doorbell().sleep_unless(Duration::MAX, || come.load(Ordering::Relaxed) > seen);
            seen = come.load(Ordering::Relaxed);
        }
        ringers.into_iter().for_each(|ringer| ringer.join().unwrap());
    });
}

#[test]
fn loom_no_ring_is_missed() {
    gather(1, None);
}

#[test]
fn loom_no_ring_is_missed_whoever_rings() {
    gather(2, Some(3));
}

/// Two threads of a process sleep until a byte has arrived.
#[test]
fn loom_all_sleepers_are_woken() {
    model(Some(2), || {
        let segment = segment(ALIGNMENT);
        let come = [(); 2].map(|()| Arc::new(AtomicUsize::new(0)));
        let sleep = |segment: Arc<Segment>, come: Arc<AtomicUsize>| {
            move || {
                while come.load(Ordering::Relaxed) == 0 {
                    segment.doorbell().sleep_unless(Duration::MAX, || come.load(Ordering::Relaxed) != 0);
                }
            }
        };
        let sleepers = come.clone().map(|come| thread::spawn(sleep(segment.clone(), come)));
        for come in come {
            come.store(1, Ordering::Relaxed);
            segment.doorbell().ring();
        }
        sleepers.into_iter().for_each(|sleeper| sleeper.join().unwrap());
    });
}

#[test]
fn loom_an_end_is_given_out_once() {
    model(None, || {
        let segment = segment(ALIGNMENT);
        let other = segment.clone();
        let claim = thread::spawn(move || other.producer(0).is_some());
        let claimed = segment.producer(0).is_some();
        assert!(claimed ^ claim.join().unwrap());
    });
}

/// Data that is offered, and becomes something else when the offer has been withdrawn.
#[test]
fn loom_what_is_copied_after_an_offer_was_withdrawn_does_not_count() {
    model(None, || {
        let (mut producer, consumer) = ends(&segment(ALIGNMENT));
        let data = Arc::new(AtomicUsize::new(1));
        let offered = producer.offer(&[]);
        let other = data.clone();
        let writer = thread::spawn(move || {
            drop(offered);
            other.store(2, Ordering::Relaxed);
        });
        let copied = data.load(Ordering::Relaxed);
        assert!(copied == 1 || consumer.is_withdrawn(1));
        writer.join().unwrap();
    });
}

#[test]
fn loom_a_writer_that_sees_the_answer_sees_it_whole() {
    model(None, || {
        let (mut producer, mut consumer) = ends(&segment(ALIGNMENT));
        let offer = producer.offer(&[]);
        let read = Arc::new(AtomicUsize::new(0));
        let other = read.clone();
        let reader = thread::spawn(move || {
            other.store(1, Ordering::Relaxed);
            consumer.answer(1, Answer::Copied);
        });
        if producer.answer().unwrap() == Some(Answer::Copied) {
            // The memory may be used again: it has been read.
            assert_eq!(read.load(Ordering::Relaxed), 1);
        }
        drop(offer);
        reader.join().unwrap();
    });
}
