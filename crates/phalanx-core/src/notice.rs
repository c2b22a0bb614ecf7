//! Warnings for the user although nothing has failed: work that is skipped, and long waits.
//!
//! They go to the program's `tracing` subscriber. In a program without one they would be lost, so they go to standard
//! error.

use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread::{Builder, scope};
use std::time::{Duration, Instant};

use tracing::dispatcher::{self, Dispatch};

use crate::rank::Rank;
use crate::world_size::WorldSize;

/// When to report a wait; after the last, again each time that interval has passed.
const REMINDERS: [Duration; 4] =
    [Duration::from_secs(5), Duration::from_secs(15), Duration::from_secs(30), Duration::from_secs(60)];

/// At most so many of the ranks that wait for the same report it: thousands of lines that say the same would hide all else.
pub(crate) const REPORTING: u32 = 16;
/// When another rank reports its wait, once: it may be the only one that waits for a certain rank.
const LATE_REMINDER_DELAY: Duration = Duration::from_secs(60);

/// Whether `rank` is one of those that report a long wait. They are on all hosts, in all places there: any of them may be missing itself.
pub(crate) fn reports(rank: Rank, world: WorldSize) -> bool {
    let distance = match world.get() <= REPORTING {
        true => 1,
        false => world.get().div_ceil(REPORTING) | 1,
    };
    rank.get().is_multiple_of(distance)
}

/// Warns the user.
pub fn warn(what: impl Display) {
    tracing::warn!("{what}");
    if !dispatcher::has_been_set() {
        // The test harness captures what `eprintln` prints, and only that, and shows it with a failed test.
        #[cfg(test)]
        eprintln!("phalanx: warning: {what}");
        // `eprintln` would panic if standard error is closed.
        #[cfg(not(test))]
        let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("phalanx: warning: {what}\n"));
    }
}

/// Has another thread warn as this one would: a program may set a subscriber for one thread alone.
fn as_here(warns: impl FnOnce() + Send) -> impl FnOnce() + Send {
    // To set one, even none, says that the program has one.
    let subscriber = dispatcher::has_been_set().then(|| dispatcher::get_default(Dispatch::clone));
    move || match subscriber {
        Some(subscriber) => dispatcher::with_default(&subscriber, warns),
        None => warns(),
    }
}

/// Warnings that wait to be written at one time; further ones are dropped.
const MAX_ASIDE: usize = 4;

/// Warns from threads of their own, for one that must not block: standard error blocks if nobody reads it.
#[derive(Clone, Debug, Default)]
pub struct Aside(Arc<AtomicUsize>);

impl Aside {
    /// Warns the user, unless too much waits to be written already, or the system gives no thread.
    pub fn warn(&self, what: String) {
        let waiting = Arc::clone(&self.0);
        if waiting.fetch_add(1, Ordering::Relaxed) >= MAX_ASIDE {
            waiting.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        let write = as_here(move || {
            warn(what);
            waiting.fetch_sub(1, Ordering::Relaxed);
        });
        if Builder::new().name("phalanx-notice".into()).spawn(write).is_err() {
            self.0.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Reports a long wait now and then. It never blocks: the waiting thread has a deadline, and may hold what others need.
#[derive(Debug)]
pub(crate) struct Reminders {
    started: Instant,
    /// When to report it next. None: never again.
    next: Option<Duration>,
    repeats: bool,
    aside: Aside,
}

impl Reminders {
    /// The wait begins, of one that nobody else reports.
    pub(crate) fn new() -> Self {
        Self { started: Instant::now(), next: Some(REMINDERS[0]), repeats: true, aside: Aside::default() }
    }

    /// A wait of `rank` for other ranks of its `world` begins.
    pub(crate) fn of(rank: Rank, world: WorldSize) -> Self {
        match reports(rank, world) {
            true => Self::new(),
            false => Self { next: Some(LATE_REMINDER_DELAY), repeats: false, ..Self::new() },
        }
    }

    /// Reports `what` is waited for, if it is time.
    pub(crate) fn remind(&mut self, what: impl FnOnce() -> String) {
        let waited = self.started.elapsed();
        if self.next.is_some_and(|next| waited >= next) {
            self.next = self.repeats.then(|| after(waited));
            self.aside.warn(format!("{} ({} s so far)", what(), waited.as_secs()));
        }
    }

    fn left(&self) -> Duration {
        self.next.unwrap_or(Duration::MAX).saturating_sub(self.started.elapsed())
    }
}

/// The time of the first reminder after a wait of `waited`.
fn after(waited: Duration) -> Duration {
    let [.., last] = REMINDERS;
    let minutes = waited.as_secs() / last.as_secs() + 1;
    REMINDERS
        .into_iter()
        .find(|reminder| *reminder > waited)
        .unwrap_or(last * u32::try_from(minutes).unwrap_or(u32::MAX))
}

/// As [`while_waiting`], if this process is one that `reports` it.
pub(crate) fn while_waiting_if<R>(
    reports: bool,
    what: impl Fn() -> String + Send,
    wait: impl FnOnce() -> R,
) -> R {
    if reports { while_waiting(what, wait) } else { wait() }
}

/// Reports now and then `what` is waited for while `wait` runs. For waits that cannot do it themselves.
pub fn while_waiting<R>(what: impl Fn() -> String + Send, wait: impl FnOnce() -> R) -> R {
    let (done, ended) = channel::<()>();
    scope(|scope| {
        let remind = as_here(move || {
            let mut reminders = Reminders::new();
            while ended.recv_timeout(reminders.left()) == Err(RecvTimeoutError::Timeout) {
                reminders.remind(&what);
            }
        });
        // If the thread cannot be started, there are no reports.
        let _ = Builder::new().name("phalanx-waiting".into()).spawn_scoped(scope, remind);
        let outcome = wait();
        drop(done);
        outcome
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::mpsc::Sender;
    use std::thread::{self, ThreadId};

    use super::*;

    #[test]
    fn reminders_become_rare() {
        let seconds = [0, 4, 5, 14, 15, 30, 59, 60, 61, 119, 120, 3000];
        let next = seconds.map(|waited| after(Duration::from_secs(waited)).as_secs());
        assert_eq!(next, [5, 5, 15, 15, 30, 60, 60, 120, 120, 120, 180, 3060]);
    }

    /// A subscriber of one thread, to which no write must be left: it does not come back, as from standard error that nobody reads.
    struct Stuck {
        thread: ThreadId,
        told: Sender<()>,
    }

    impl tracing::Subscriber for Stuck {
        fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
            true
        }

        fn event(&self, _: &tracing::Event<'_>) {
            assert_ne!(thread::current().id(), self.thread, "the thread that waits has written itself");
            let _ = self.told.send(());
        }

        fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
            tracing::span::Id::from_u64(1)
        }

        fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

        fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

        fn enter(&self, _: &tracing::span::Id) {}

        fn exit(&self, _: &tracing::span::Id) {}
    }

    /// Another thread tells this thread's subscriber what `warns` says.
    pub(crate) fn are_told_aside(warns: impl FnOnce()) {
        let (told, heard) = channel();
        let stuck = Stuck { thread: thread::current().id(), told };
        tracing::subscriber::with_default(stuck, || {
            warns();
            heard.recv_timeout(Duration::from_secs(60)).unwrap();
        });
    }

    #[test]
    fn a_reminder_does_not_hold_up_the_thread_that_waits() {
        let mut reminders = Reminders::new();
        reminders.next = Some(Duration::ZERO);
        are_told_aside(|| reminders.remind(|| "rank 1 is waited for".to_owned()));
        assert!(reminders.next.unwrap() >= REMINDERS[0]);
    }

    #[test]
    fn of_many_ranks_some_report_a_long_wait_and_not_all_in_the_same_place_of_their_hosts() {
        let reporting = |ranks: u32| -> Vec<u32> {
            let world = WorldSize::new(ranks).unwrap();
            world.ranks().filter(|rank| reports(*rank, world)).map(Rank::get).collect()
        };
        assert_eq!(reporting(16), (0..16).collect::<Vec<u32>>());
        assert_eq!((reporting(17).len(), reporting(4096).len(), reporting(8000).len()), (6, 16, 16));
        let places: std::collections::BTreeSet<u32> =
            reporting(512).into_iter().map(|rank| rank % 8).collect();
        assert_eq!((reporting(512)[0], places.len()), (0, 8));
    }

    #[test]
    fn the_rest_of_many_ranks_reports_a_wait_late_and_once() {
        let world = WorldSize::new(512).unwrap();
        assert_eq!(Reminders::of(Rank::MAIN, world).next, Some(REMINDERS[0]));
        let mut reminders = Reminders::of(Rank::new(1), world);
        assert_eq!(reminders.next, Some(LATE_REMINDER_DELAY));
        reminders.started = Instant::now().checked_sub(LATE_REMINDER_DELAY).unwrap();
        are_told_aside(|| reminders.remind(|| "rank 9 is waited for".to_owned()));
        assert_eq!(reminders.next, None);
    }

    #[test]
    fn a_wait_that_is_over_holds_nobody_up() {
        let started = Instant::now();
        assert_eq!(while_waiting(|| unreachable!(), || 7), 7);
        assert!(started.elapsed() < REMINDERS[0]);
    }
}
