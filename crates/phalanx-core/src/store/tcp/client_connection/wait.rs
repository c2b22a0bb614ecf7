//! Waits on a connection of the client, and how they end: by the server's answer, at the deadline, or because the caller asks for it.

use std::io;
use std::time::Duration;

use phalanx_sys::tcp;

use super::{Link, Owed, unexpected_wait};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::interrupt;
use crate::store::WATCH_INTERVAL;
use crate::wire::store::{Op, WAIT_CANCELLED, WAIT_DONE};

/// How long to wait for a server's answer to a cancellation: a key may have come at the last moment. A later answer is read before
/// that of the next request.
const CANCEL_GRACE: Duration = Duration::from_millis(50);
/// The longest time for which a client that waits does not look at something else.
const WATCH_LIMIT: Duration = Duration::from_secs(2);

/// How a wait ended.
#[derive(Debug)]
pub(in crate::store::tcp) enum WaitOutcome {
    /// All keys have come: their values, if they were asked for in the same request.
    Values(Vec<Vec<u8>>),
    /// The deadline has passed.
    TimedOut,
    /// The caller does not want to go on, for this reason.
    Stopped(Error),
}

impl Link {
    /// Sends `request`, which ends in a wait, and waits for its answer, and for this many `values` after it. `go_on`, if there is one,
    /// is called several times a second, but not while the answer may still be on its way, unless the program checks this
    /// thread's waits. If the keys do not come, the wait is cancelled, and the connection can be used again.
    pub fn wait(
        &mut self,
        request: &[u8],
        values: usize,
        go_on: Option<&mut dyn FnMut() -> Result<()>>,
    ) -> io::Result<WaitOutcome> {
        self.send(request)?;
        self.wait_for_answer(values, go_on)
    }

    /// Ends a wait that has been sent, and whose answer nobody wants.
    pub fn leave_wait(&mut self, values: usize) -> io::Result<()> {
        self.send(&[Op::CancelWait as u8])?;
        self.owed.push_back(Owed::Wait { values });
        Ok(())
    }

    /// Sends `request`, a wait after which the server does something, and reads its `values`. None if the wait was not over at `until`: the
    /// server has then said that it was cancelled, and has done nothing.
    pub fn wait_or_cancel(
        &mut self,
        request: &[u8],
        values: usize,
        until: Deadline,
    ) -> io::Result<Option<Vec<Vec<u8>>>> {
        self.send(request)?;
        let end = self.deadline;
        self.deadline = end.min(until);
        let answer = self.take();
        self.deadline = end;
        match answer {
            Ok([WAIT_DONE]) => return self.values(values).map(Some),
            Ok([other]) => return Err(unexpected_wait(other)),
            Err(error) if error.kind() != io::ErrorKind::TimedOut || end.has_passed() => return Err(error),
            Err(_) => self.send(&[Op::CancelWait as u8])?,
        }
        let came = match self.take()? {
            [WAIT_CANCELLED] => return Ok(None),
            [WAIT_DONE] => self.values(values)?,
            [other] => return Err(unexpected_wait(other)),
        };
        // The wait was over at the last moment. The answer to the cancellation comes after the values.
        match self.take()? {
            [WAIT_CANCELLED] => Ok(Some(came)),
            [other] => Err(unexpected_wait(other)),
        }
    }

    /// Waits until an answer begins to come. Calls `go_on` several times a second; an error of that ends the wait, after which the
    /// connection cannot be used.
    pub fn wait_to_read(&mut self, go_on: &mut dyn FnMut() -> Result<()>) -> io::Result<Result<()>> {
        let end = self.deadline;
        let interval = self.watch_interval();
        let next_look = || end.at_most(interrupt::at_most(interval));
        let mut look_at = next_look();
        while self.start == self.buffer.len() {
            self.deadline = look_at;
            let arrived = self.read_some();
            self.deadline = end;
            match arrived {
                Ok(()) => {}
                Err(error) if error.kind() != io::ErrorKind::TimedOut || end.has_passed() => {
                    return Err(error);
                }
                Err(_) => {
                    if let Err(error) = go_on() {
                        return Ok(Err(error));
                    }
                    look_at = next_look();
                }
            }
        }
        Ok(Ok(()))
    }

    /// [`wait`](Self::wait) after the request has been sent, and the answers before that of the wait read.
    pub fn wait_for_answer(
        &mut self,
        values: usize,
        mut go_on: Option<&mut dyn FnMut() -> Result<()>>,
    ) -> io::Result<WaitOutcome> {
        let end = self.deadline;
        let interval = self.watch_interval();
        let stopped = loop {
            if go_on.is_some() {
                self.deadline = end.at_most(interrupt::at_most(interval));
            }
            match self.take() {
                Ok([WAIT_DONE]) => {
                    self.deadline = end;
                    return self.values(values).map(WaitOutcome::Values);
                }
                Ok([WAIT_CANCELLED]) => return Ok(WaitOutcome::TimedOut),
                Ok([other]) => return Err(unexpected_wait(other)),
                Err(error) if error.kind() != io::ErrorKind::TimedOut => return Err(error),
                Err(_) if end.has_passed() => break None,
                Err(_) => {}
            }
            if let Some(Err(error)) = go_on.as_mut().map(|go_on| go_on()) {
                break Some(error);
            }
        };
        self.deadline = Deadline::after(CANCEL_GRACE);
        if let Some(error) = stopped {
            return self.leave_wait(values).map(|()| WaitOutcome::Stopped(error));
        }
        self.send(&[Op::CancelWait as u8])?;
        match self.take() {
            Ok([WAIT_DONE]) => {
                // The keys have come at the last moment. The answer to the cancellation comes after the values.
                let came = self.values(values)?;
                self.owed.push_back(Owed::Wait { values: 0 });
                Ok(WaitOutcome::Values(came))
            }
            Ok([WAIT_CANCELLED]) => Ok(WaitOutcome::TimedOut),
            Ok([other]) => Err(unexpected_wait(other)),
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                self.owed.push_back(Owed::Wait { values });
                Ok(WaitOutcome::TimedOut)
            }
            Err(error) => Err(error),
        }
    }

    /// The values after the answer to a wait.
    fn values(&mut self, count: usize) -> io::Result<Vec<Vec<u8>>> {
        self.rest(|link| (0..count).map(|_| link.next_value()).collect())
    }

    /// How often this client looks at something else while it waits.
    fn watch_interval(&self) -> Duration {
        watch_interval(tcp::path(&self.stream).map_or(Duration::ZERO, |path| path.round_trip))
    }
}

/// How often a client that waits looks at something else. On a slow network that takes several round trips itself, in which an answer
/// that has come lies unread; and an answer whose packet was lost comes three round trips later.
fn watch_interval(round_trip: Duration) -> Duration {
    (round_trip * 5).clamp(WATCH_INTERVAL, WATCH_LIMIT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_looks_away_from_an_answer_that_is_on_its_way() {
        let milliseconds = Duration::from_millis;
        assert_eq!(
            [0, 1, 80, 400, 3000].map(|trip| watch_interval(milliseconds(trip)).as_millis()),
            [200, 200, 400, 2000, 2000]
        );
    }
}
