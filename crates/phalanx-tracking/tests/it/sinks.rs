//! Sinks that fail, are slow or panic; and what a program is told.

use std::io;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use phalanx_tracking::{Outcome, Record, Sink};

/// What a sink got, and how it behaves.
#[derive(Default)]
pub struct Behaviour {
    /// Records of successful flushes.
    pub kept: Vec<Record>,
    pub resumed: Vec<u64>,
    pub outcome: Option<Outcome>,
    /// So many calls of `flush` fail.
    pub failures: usize,
    /// `write` waits while it is set.
    pub blocked: bool,
    pub panics: bool,
    /// Calls of `write`.
    pub writes: usize,
}

#[derive(Clone, Default)]
pub struct Probe {
    pub behaviour: Arc<Mutex<Behaviour>>,
    changed: Arc<Condvar>,
    taken: Vec<Record>,
}

impl Probe {
    pub fn new(behaviour: Behaviour) -> Self {
        Self { behaviour: Arc::new(Mutex::new(behaviour)), ..Self::default() }
    }

    pub fn release(&self) {
        self.behaviour.lock().blocked = false;
        self.changed.notify_all();
    }

    pub fn steps(&self) -> Vec<u64> {
        self.behaviour.lock().kept.iter().map(|record| record.step.unwrap()).collect()
    }
}

impl Sink for Probe {
    fn name(&self) -> &str {
        "probe"
    }

    fn resume(&mut self, step: u64) -> io::Result<()> {
        self.behaviour.lock().resumed.push(step);
        Ok(())
    }

    fn write(&mut self, record: &Record) -> io::Result<()> {
        let mut behaviour = self.behaviour.lock();
        behaviour.writes += 1;
        assert!(!behaviour.panics, "a bug in a sink");
        self.changed.wait_while(&mut behaviour, |behaviour| behaviour.blocked);
        self.taken.push(record.clone());
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        let mut behaviour = self.behaviour.lock();
        if behaviour.failures > 0 {
            behaviour.failures -= 1;
            self.taken.clear();
            return Err(io::ErrorKind::StorageFull.into());
        }
        behaviour.kept.append(&mut self.taken);
        Ok(())
    }

    fn finish(&mut self, outcome: &Outcome) -> io::Result<()> {
        self.behaviour.lock().outcome = Some(outcome.clone());
        Ok(())
    }
}

/// The warnings of this thread and of nobody else.
#[derive(Clone, Default)]
pub struct Heard(Arc<Mutex<Vec<u8>>>);

impl io::Write for Heard {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Heard {
    /// Runs `work`; gives what it has told its user, and what it returned.
    pub fn during<T>(work: impl FnOnce() -> T) -> (String, T) {
        let heard = Self::default();
        let writer = heard.clone();
        let subscriber =
            tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
        let outcome = tracing::subscriber::with_default(subscriber, work);
        let text = String::from_utf8(heard.0.lock().clone()).unwrap();
        (text, outcome)
    }
}
