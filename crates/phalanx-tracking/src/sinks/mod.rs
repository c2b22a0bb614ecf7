//! Where records go.

mod append_file;
mod csv;
mod json_lines;
mod progress;
mod tensorboard;

use std::io;

use crate::{Outcome, Record};

pub use self::csv::Csv;
pub use json_lines::JsonLines;
pub use progress::Progress;
pub use tensorboard::TensorBoard;

/// Takes records; one thread on rank 0 calls it. A kind of one's own is given to
/// [`RunOptions::sink`](crate::RunOptions::sink).
///
/// Records are [written](Self::write) one by one and count as recorded once [`flush`](Self::flush) has succeeded. If any call
/// fails, the sink is to forget what it was given since the last successful `flush`, and to be ready for the next call: the same
/// records come again, a second later, as many as there is memory for. The first error is a warning to the user; at the end the
/// report says what is lost. A sink that panics is not called again.
///
/// ```
/// use std::io;
/// use phalanx_tracking::{Outcome, Record, Sink};
///
/// /// Counts.
/// #[derive(Default)]
/// struct Counter(u64);
///
/// impl Sink for Counter {
///     fn name(&self) -> &str {
///         "counter"
///     }
///     fn resume(&mut self, _step: u64) -> io::Result<()> {
///         Ok(())
///     }
///     fn write(&mut self, _record: &Record) -> io::Result<()> {
///         self.0 += 1;
///         Ok(())
///     }
///     fn flush(&mut self) -> io::Result<()> {
///         Ok(())
///     }
///     fn finish(&mut self, _outcome: &Outcome) -> io::Result<()> {
///         println!("{} records", self.0);
///         Ok(())
///     }
/// }
/// # let folder = tempfile::tempdir().unwrap();
/// # use phalanx_tracking::{Run, RunOptions};
/// let options = RunOptions::new(folder.path()).sink(|_directory| Ok(Box::new(Counter::default())));
/// let run = Run::start(&phalanx::init()?, options)?;
/// # run.finish()?;
/// # Ok::<(), phalanx::Error>(())
/// ```
pub trait Sink: Send {
    /// What messages call it.
    fn name(&self) -> &str;

    /// A new attempt continues at `step`: what earlier ones have recorded at it and behind it no longer counts. It is called before
    /// the records that are affected, and again if it or what follows fails.
    ///
    /// # Errors
    /// If it cannot be carried out now.
    fn resume(&mut self, step: u64) -> io::Result<()>;

    /// Takes a record; it may be kept in memory until the next [`flush`](Self::flush).
    ///
    /// # Errors
    /// If it cannot be taken.
    fn write(&mut self, record: &Record) -> io::Result<()>;

    /// Hands on what was taken: to the system, a server, a screen.
    ///
    /// # Errors
    /// If it cannot be handed on.
    fn flush(&mut self) -> io::Result<()>;

    /// Nothing more comes: it was flushed before, if that was possible.
    ///
    /// # Errors
    /// If the end cannot be recorded.
    fn finish(&mut self, outcome: &Outcome) -> io::Result<()>;
}

/// As it is written where numbers are text: JSON has no word for them, CSV's readers know these.
fn non_finite(value: f64) -> &'static str {
    match value {
        value if value.is_nan() => "NaN",
        value if value > 0.0 => "Infinity",
        _ => "-Infinity",
    }
}
