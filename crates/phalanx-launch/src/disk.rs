//! A disk that may not answer, as one of a network whose server is gone. Whoever asks it waits in the kernel, perhaps for ever, so the supervisor
//! lets a thread ask.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// How long an answer is waited for. Servers that are busy take seconds.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// For how long a disk that has not answered is not asked again: each worker's file would be waited for.
const SILENCE_INTERVAL: Duration = Duration::from_secs(60);

/// The disk of a job's logs.
#[derive(Clone, Debug)]
pub(super) struct Disk {
    timeout: Duration,
    /// When it has not answered.
    silent_at: Arc<Mutex<Option<Instant>>>,
}

impl Default for Disk {
    fn default() -> Self {
        Self { timeout: ANSWER_TIMEOUT, silent_at: Arc::default() }
    }
}

impl Disk {
    /// The result of `ask`; none if the disk does not answer.
    pub(super) fn answer<T: Send + 'static>(
        &self,
        ask: impl FnOnce() -> T + Clone + Send + 'static,
    ) -> Option<T> {
        if self.silent_at.lock().is_some_and(|at| at.elapsed() < SILENCE_INTERVAL) {
            return None;
        }
        let (tell, told) = channel();
        let ask_here = ask.clone();
        let run = move || drop(tell.send(ask()));
        let answer = match thread::Builder::new().name("phalanx-disk".into()).spawn(run) {
            Ok(_) => told.recv_timeout(self.timeout).ok(),
            // There is no room for a thread.
            Err(_) => Some(ask_here()),
        };
        *self.silent_at.lock() = answer.is_none().then(Instant::now);
        answer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_does_not_answer_is_waited_for_once() {
        let disk = Disk::default();
        assert_eq!(disk.answer(|| 7), Some(7));
        let hasty = Disk { timeout: Duration::from_millis(20), ..disk.clone() };
        assert_eq!(hasty.answer(|| thread::sleep(Duration::from_secs(600))), None);
        // Nor is another file on it.
        assert_eq!(disk.answer(|| 7), None);
        *disk.silent_at.lock() = Instant::now().checked_sub(SILENCE_INTERVAL);
        assert_eq!(disk.answer(|| 7), Some(7));
    }
}
