//! Between the training loop and the thread that writes: bounded, and nobody waits to put something in.
//!
//! It drops and counts rather than waits: a record must not hold up what it observes.

use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::{Outcome, Record};

/// The most memory that waiting records may take; pictures reach it before the number of records does.
pub(crate) const MAX_BYTES: usize = 64 << 20;

pub(crate) struct Queue {
    state: Mutex<State>,
    /// For the writer: there is something to do at once.
    changed: Condvar,
    /// For those who wait for the writer.
    settled: Condvar,
    capacity: usize,
}

#[derive(Default)]
struct State {
    records: Vec<Record>,
    bytes: usize,
    dropped: u64,
    /// How often somebody has asked to be told when everything is written, and up to which of them that was done.
    asked: u64,
    answered: u64,
    /// Set when nothing more will come.
    outcome: Option<Outcome>,
}

/// What the writing thread takes at once.
pub(crate) struct Batch {
    pub records: Vec<Record>,
    /// For [`Queue::settle`], when they are written.
    pub asked: u64,
    /// How the run has ended, if it has.
    pub outcome: Option<Outcome>,
}

impl Queue {
    pub fn new(capacity: usize) -> Self {
        Self {
            state: Mutex::default(),
            changed: Condvar::new(),
            settled: Condvar::new(),
            capacity: capacity.max(1),
        }
    }

    /// Puts a record in, or counts it where there is no room. Says whether it is the first without room.
    pub fn push(&self, record: Record) -> bool {
        let size = record.size();
        let mut state = self.state.lock();
        if state.records.len() >= self.capacity
            || (state.bytes + size > MAX_BYTES && !state.records.is_empty())
        {
            state.dropped += 1;
            return state.dropped == 1;
        }
        state.bytes += size;
        state.records.push(record);
        if state.is_urgent(self.capacity) {
            self.changed.notify_one();
        }
        false
    }

    /// Nothing more will come. The first outcome stays.
    pub fn close(&self, outcome: Outcome) {
        self.state.lock().outcome.get_or_insert(outcome);
        self.changed.notify_one();
    }

    /// Waits until the writer has dealt with everything that is there now; says whether it has within `timeout`.
    pub fn wait_until_written(&self, timeout: Duration) -> bool {
        let mut state = self.state.lock();
        state.asked += 1;
        let asked = state.asked;
        self.changed.notify_one();
        self.settled.wait_while_for(&mut state, |state| state.answered < asked, timeout);
        state.answered >= asked
    }

    /// The writer has dealt with a batch.
    pub fn settle(&self, asked: u64) {
        self.state.lock().answered = asked;
        self.settled.notify_all();
    }

    /// Everything that is there after `pause`, or before that if it fills up or the end has come.
    pub fn take(&self, pause: Duration) -> Batch {
        let mut state = self.state.lock();
        let wait = |state: &mut State| state.outcome.is_none() && !state.is_urgent(self.capacity);
        self.changed.wait_while_for(&mut state, wait, pause);
        state.bytes = 0;
        Batch {
            records: std::mem::take(&mut state.records),
            asked: state.asked,
            outcome: state.outcome.clone(),
        }
    }

    /// How many records found no room.
    pub fn dropped(&self) -> u64 {
        self.state.lock().dropped
    }
}

impl State {
    fn is_urgent(&self, capacity: usize) -> bool {
        self.records.len() * 2 >= capacity || self.bytes * 2 >= MAX_BYTES || self.asked > self.answered
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Picture, Value};

    fn record(step: u64) -> Record {
        Record { step: Some(step), time: 0.0, tag: "loss".into(), value: Value::Scalar(0.0) }
    }

    #[test]
    fn what_finds_no_room_is_counted_and_said_once() {
        let queue = Queue::new(3);
        let said: Vec<bool> = (0..6).map(|step| queue.push(record(step))).collect();
        assert_eq!(said, [false, false, false, true, false, false]);
        let steps: Vec<_> = queue.take(Duration::ZERO).records.iter().map(|record| record.step).collect();
        assert_eq!((steps, queue.dropped()), (vec![Some(0), Some(1), Some(2)], 3));
        assert!(!queue.push(record(7)), "there is room again");
        assert_eq!(queue.take(Duration::ZERO).records.len(), 1);
    }

    #[test]
    fn pictures_are_bounded_by_their_bytes() {
        let queue = Queue::new(1000);
        let side = 4096;
        for step in 0..6 {
            let picture = Picture::gray(side, side, vec![0; (side * side) as usize]).unwrap();
            queue.push(Record { value: Value::Picture(picture), ..record(step) });
        }
        assert_eq!((queue.take(Duration::ZERO).records.len(), queue.dropped()), (3, 3));
    }

    #[test]
    fn the_end_wakes_the_writer() {
        let queue = Queue::new(10);
        std::thread::scope(|scope| {
            let taken = scope.spawn(|| queue.take(Duration::from_secs(600)));
            queue.push(record(1));
            queue.close(Outcome::Finished);
            let batch = taken.join().unwrap();
            assert_eq!((batch.records.len(), batch.outcome), (1, Some(Outcome::Finished)));
        });
    }
}
