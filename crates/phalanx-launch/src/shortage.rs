//! What to do where the system has no room for another process or thread.
//!
//! Before a job has begun this is an error at once: a person sees it, and raises the limit. Later the job may have trained for days, and what
//! takes the room often ends within seconds: another job's start, or processes that are still ending. So it waits, for a limited time.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::attempts::Control;
use super::event::Event;
use super::nodes::AttemptEnd;
use crate::error::{Error, Result};

/// How long a job that has begun waits for room.
const SHORTAGE_TIMEOUT: Duration = Duration::from_secs(60);
/// How often it tries again meanwhile.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// How often to look meanwhile whether a signal has come.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A lack of processes, threads, memory, or files of the whole host, for what a job starts.
#[derive(Debug)]
pub(super) struct Shortage {
    /// Whether the job's workers have been started before.
    has_begun: bool,
    /// Since when nothing could be started.
    since: Option<Instant>,
}

impl Shortage {
    pub(super) fn new(has_begun: bool) -> Self {
        Self { has_begun, since: None }
    }

    /// All workers have been started.
    pub(super) fn begin(&mut self) {
        self.has_begun = true;
    }

    /// Something could be started.
    pub(super) fn end(&mut self) {
        self.since = None;
    }

    /// A start has failed with `error`. Returns when to try it again, and what a person should know of that.
    ///
    /// # Errors
    /// `error`, if it has another reason, the job has not begun, or this has lasted too long.
    pub(super) fn retry(&mut self, error: Error, now: Instant) -> Result<(Instant, Option<String>)> {
        let is_shortage = [Errno::AGAIN, Errno::NOMEM, Errno::NFILE]
            .iter()
            .any(|no| error.errno() == Some(no.raw_os_error()));
        if !self.has_begun || !is_shortage {
            return Err(error);
        }
        let limit = SHORTAGE_TIMEOUT.as_secs();
        let error = error
            .with_remedy_if_none("free memory on this host, or raise the memory limit of this container");
        let news = self.since.is_none().then(|| format!("{error}; it is tried again for {limit} s"));
        if now.saturating_duration_since(*self.since.get_or_insert(now)) >= SHORTAGE_TIMEOUT {
            return Err(error.adding(format!(", tried again for {limit} s")));
        }
        Ok((now + RETRY_INTERVAL, news))
    }

    /// The result of `start`, once there is room for what it starts. A signal, or the observer, ends the wait.
    ///
    /// # Errors
    /// As those of [`retry`](Self::retry).
    pub(super) fn wait_for<T>(
        &mut self,
        control: &mut Control<'_>,
        mut start: impl FnMut(&mut Control<'_>) -> Result<T>,
    ) -> Result<ControlFlow<AttemptEnd, T>> {
        loop {
            let error = match start(control) {
                Ok(started) => {
                    self.end();
                    return Ok(ControlFlow::Continue(started));
                }
                Err(error) => error,
            };
            let (at, news) = self.retry(error, Instant::now())?;
            if let Some(text) = news {
                control.tell(Event::Warning { text: &text });
            }
            while Instant::now() < at {
                if let Some(signal) = control.read_end() {
                    return Ok(ControlFlow::Break(AttemptEnd::Interrupted(signal)));
                }
                if control.stops {
                    return Ok(ControlFlow::Break(AttemptEnd::Stopped));
                }
                std::thread::sleep(POLL_INTERVAL);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;
    use crate::refusals::Refused;

    fn refused(errno: Errno) -> Error {
        Error::not_started(
            "cannot start ./train as rank 3",
            io::Error::from_raw_os_error(errno.raw_os_error()),
        )
    }

    #[test]
    fn a_job_that_has_begun_waits_for_room_with_one_warning_and_not_for_ever() {
        let (mut shortage, start) = (Shortage::new(true), Instant::now());
        for errno in [Errno::AGAIN, Errno::NOMEM] {
            let (at, news) = shortage.retry(refused(errno), start).unwrap();
            assert_eq!(at, start + RETRY_INTERVAL);
            let news = news.unwrap();
            let limit = if errno == Errno::AGAIN { "`ulimit -u`, or pids.max" } else { "memory limit" };
            assert!(news.contains("./train as rank 3") && news.contains(limit), "{news}");
            let (_, news) = shortage.retry(refused(errno), start + SHORTAGE_TIMEOUT / 2).unwrap();
            assert_eq!(news, None);
            let error = shortage.retry(refused(errno), start + SHORTAGE_TIMEOUT).unwrap_err();
            assert_eq!(error.errno(), Some(errno.raw_os_error()));
            let text = error.to_string();
            assert!(text.contains("rank 3, tried again for 60 s: ") && text.contains(limit), "{text}");
            // It has begun again since.
            shortage.end();
        }
    }

    #[test]
    fn the_first_start_and_other_errors_do_not_wait() {
        let now = Instant::now();
        let mut shortage = Shortage::new(false);
        assert!(shortage.retry(refused(Errno::AGAIN), now).is_err());
        shortage.begin();
        assert!(shortage.retry(refused(Errno::AGAIN), now).is_ok());
        for other in [Errno::NOENT, Errno::ACCESS, Errno::MFILE] {
            let error = shortage.retry(refused(other), now).unwrap_err();
            assert!(!error.to_string().contains("tried again"), "{error}");
        }
    }

    #[test]
    fn what_has_no_room_at_first_is_started_later_unless_the_job_is_ended() {
        let mut warnings = 0;
        let mut observer = |event: Event<'_>| {
            warnings += u32::from(matches!(event, Event::Warning { .. }));
            ControlFlow::Continue(())
        };
        let refusals = Refused::new().unwrap();
        let mut control = Control { signals: None, observer: &mut observer, refused: refusals, stops: false };
        let mut tries = 0;
        let started = Shortage::new(true).wait_for(&mut control, |_| {
            tries += 1;
            if tries < 2 { Err(refused(Errno::AGAIN)) } else { Ok(7) }
        });
        assert!(matches!(started, Ok(ControlFlow::Continue(7))));
        control.stops = true;
        let ended = Shortage::new(true).wait_for(&mut control, |_| Err::<(), Error>(refused(Errno::AGAIN)));
        assert!(matches!(ended, Ok(ControlFlow::Break(AttemptEnd::Stopped))));
        drop(control);
        assert_eq!(warnings, 2);
    }
}
