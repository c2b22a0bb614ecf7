//! Calls that wait for long: pure, apart from the notes that operations leave.
//!
//! A rank that has waited in one call for [5, 15 and 60 s](REPORT_DELAYS) asks the rank that it waits for, on the control
//! connections. That one may itself wait in the same call: then it passes the question on to the rank that it waits for. The rank
//! at the end of this chain reports what it is in, to its own user and to rank 0. A call that is not stuck costs no message.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::calls::LOOK_INTERVAL;
use crate::caller::Caller;
use crate::notice::Aside;
use crate::rank::{Rank, Sequence};
use crate::wire::control::{AwaitedState, LongWait};
use crate::wire::frame::{Call, Header};

/// A wait is reported when it has lasted this long.
const REPORT_DELAYS: [Duration; 3] =
    [Duration::from_secs(5), Duration::from_secs(15), Duration::from_secs(60)];
/// After a report, the first report of another call waits for this long: each step of a training may have a slow rank.
const QUIET_INTERVAL: Duration = Duration::from_secs(60);
/// Data that has moved since then may be on its way still.
const MOVING_LIMIT: Duration = Duration::from_secs(2);
/// The most lines that one call writes at one delay: several ranks may be awaited.
const MAX_LINES: usize = 4;
/// … in this time.
const LINES_INTERVAL: Duration = Duration::from_secs(5);
/// The most lines that are remembered, so that they are not written again.
const MAX_KNOWN: usize = 64;

const NOBODY: u32 = u32::MAX;

/// What a rank does with a question that has reached it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// It waits itself: the question goes to this rank.
    PassOn(Rank, LongWait),
    Report(AwaitedState),
    /// The wait has a known reason: data is moving, or the section was announced.
    Silence,
}

/// What a rank knows of itself.
#[derive(Clone, Debug, Default)]
pub(crate) struct OwnState {
    /// The call that began last.
    pub last: Option<Sequence>,
    /// The call that runs, if it has run for a while.
    pub running: Option<Header>,
    /// The rank that it waits for.
    pub awaited: Option<Rank>,
    pub is_moving: bool,
    /// Whether it is in a section that takes long, as its ranks know.
    pub is_announced: bool,
    pub elsewhere: Option<String>,
}

/// The answer of a rank whose state is `own` to `wait`, in a world of `ranks`.
pub(crate) fn answer(own: OwnState, wait: LongWait, ranks: u32) -> Answer {
    let asked = wait.call.sequence;
    if own.is_announced {
        return Answer::Silence;
    }
    if own.last.is_none_or(|last| last < asked) {
        let OwnState { last, running, elsewhere, .. } = own;
        return Answer::Report(AwaitedState::NotCalled { last, running, elsewhere });
    }
    match own.awaited.filter(|_| own.running.is_some_and(|running| running.sequence == asked)) {
        Some(_) if own.is_moving => Answer::Silence,
        // A wait that comes back to its origin has gone through ranks that have all made the call.
        Some(next) if next != wait.origin && wait.hops < ranks => {
            Answer::PassOn(next, LongWait { hops: wait.hops + 1, ..wait })
        }
        Some(_) | None => Answer::Report(AwaitedState::Called),
    }
}

/// Whether a call of `caller` may take long, as all its ranks know.
const fn is_announced(caller: Caller) -> bool {
    matches!(
        caller,
        Caller::MainProcessFirst
            | Caller::LocalMainProcessFirst
            | Caller::CheckpointsOpen
            | Caller::CheckpointsNewest
            | Caller::CheckpointsRead
            | Caller::CheckpointsSaveSharded
            | Caller::RunStart
            | Caller::TrainStateCheckpoint
            | Caller::TrainStateResume
            | Caller::ShardedStateLoad
    )
}

/// When a wait is reported: pure.
#[derive(Debug, Default)]
struct Schedule {
    /// The running call, and the number of its waits.
    current: Option<(Sequence, u64)>,
    looked: Option<Instant>,
    /// How long the running call has waited without moving data.
    waited: Duration,
    /// How long ago the running call has moved data, if it has.
    moved: Option<Duration>,
    /// How many of [`REPORT_DELAYS`] have passed.
    reported: usize,
    last_report: Option<Instant>,
}

impl Schedule {
    /// `running` is the call that runs now, with the number of its waits. Returns how long it has waited if it is time to report
    /// it.
    fn look(&mut self, now: Instant, running: Option<(Sequence, u64)>) -> Option<Duration> {
        // A rank that was asleep itself knows nothing of the others.
        let passed = self.looked.map_or(Duration::ZERO, |looked| now.saturating_duration_since(looked));
        let passed = passed.min(LOOK_INTERVAL * 2);
        self.looked = Some(now);
        let before = std::mem::replace(&mut self.current, running);
        let (sequence, waits) = running?;
        match before.filter(|(known, _)| *known == sequence) {
            Some((_, known)) if known == waits => {
                self.waited += passed;
                self.moved = self.moved.map(|moved| moved + passed);
            }
            Some(_) => (self.waited, self.moved, self.reported) = (Duration::ZERO, Some(Duration::ZERO), 0),
            None => (self.waited, self.moved, self.reported) = (Duration::ZERO, None, 0),
        }
        let due = REPORT_DELAYS.iter().filter(|delay| **delay <= self.waited).count();
        if due <= self.reported {
            return None;
        }
        let is_first = std::mem::replace(&mut self.reported, due) == 0 && due == 1;
        let quiet = |last: Instant| now.saturating_duration_since(last) < QUIET_INTERVAL;
        if is_first && self.last_report.is_some_and(quiet) {
            return None;
        }
        self.last_report = Some(now);
        Some(self.waited)
    }
}

/// What the operations of a group note, and what has been reported.
#[derive(Debug)]
pub(crate) struct Waits {
    /// The number of the collective that began last, plus one.
    begun: AtomicU64,
    awaited: AtomicU32,
    /// How many waits have begun. A wait on a connection ends when data moves.
    count: AtomicU64,
    /// The call that waits in shared memory for long.
    in_memory: Mutex<Option<Header>>,
    /// Whether a message is awaited, with its peer: see [`message`](Self::message).
    message: AtomicU64,
    is_awaiting_message: AtomicBool,
    schedule: Mutex<Schedule>,
    /// What this rank has written of calls that wait.
    written: Mutex<Written>,
    /// What this rank has passed on: many ranks may wait for one, whose wait is the same.
    passed_on: Mutex<Written>,
    /// The thread that watches writes nothing itself: it sends the heartbeats.
    pub aside: Aside,
}

/// The lines that this rank has written, of at most [`MAX_KNOWN`] of which it knows that they are repeated.
#[derive(Debug, Default)]
struct Written {
    known: VecDeque<(Sequence, Rank, u32)>,
    /// When the lines of the last [`LINES_INTERVAL`] were written.
    recent: VecDeque<Instant>,
}

impl Written {
    /// Whether `line` is to be written `now`: not again, and not too many at once, whatever peers send.
    fn admits(&mut self, line: (Sequence, Rank, u32), now: Instant) -> bool {
        while self.recent.front().is_some_and(|then| now.saturating_duration_since(*then) >= LINES_INTERVAL) {
            self.recent.pop_front();
        }
        if self.known.contains(&line) || self.recent.len() >= MAX_LINES {
            return false;
        }
        self.recent.push_back(now);
        self.known.push_back(line);
        if self.known.len() > MAX_KNOWN {
            self.known.pop_front();
        }
        true
    }
}

impl Default for Waits {
    fn default() -> Self {
        Self {
            begun: AtomicU64::new(0),
            awaited: AtomicU32::new(NOBODY),
            count: AtomicU64::new(0),
            in_memory: Mutex::default(),
            message: AtomicU64::new(0),
            is_awaiting_message: AtomicBool::new(false),
            schedule: Mutex::default(),
            written: Mutex::default(),
            passed_on: Mutex::default(),
            aside: Aside::default(),
        }
    }
}

impl Waits {
    /// A collective begins.
    pub(crate) fn begin(&self, sequence: Sequence) {
        self.begun.store(sequence.0 + 1, Ordering::Relaxed);
        self.awaited.store(NOBODY, Ordering::Relaxed);
    }

    /// The running collective is about to sleep until `peer` sends or receives.
    pub(crate) fn sleep(&self, peer: Rank) {
        self.awaited.store(peer.get(), Ordering::Relaxed);
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    /// `call` has waited for `peer` in shared memory for a while. Returns whether it was not known.
    pub(crate) fn waits_in_memory(&self, call: Header, peer: Rank) -> bool {
        self.awaited.store(peer.get(), Ordering::Relaxed);
        self.in_memory.lock().replace(call).is_none()
    }

    /// The wait in shared memory has ended.
    pub(crate) fn ends_in_memory(&self) {
        *self.in_memory.lock() = None;
    }

    /// A call on the program's thread waits for a message to or from `peer`; None: it has ended.
    pub(crate) fn message(&self, peer: Option<(Rank, bool)>) {
        if let Some((peer, receives)) = peer {
            self.message.store(u64::from(peer.get()) << 1 | u64::from(receives), Ordering::Relaxed);
        }
        self.is_awaiting_message.store(peer.is_some(), Ordering::Relaxed);
    }

    /// The message that a call waits for, as its user calls it. In a group of some ranks, `members` are their numbers in the first one,
    /// which is what all others know.
    pub(crate) fn awaited_message(&self, members: Option<&[Rank]>) -> Option<String> {
        let message = self.message.load(Ordering::Relaxed);
        let text = if message & 1 == 1 { "recv from" } else { "send to" };
        let peer = message >> 1;
        let member = members.and_then(|members| members.get(usize::try_from(peer).ok()?));
        let is_awaited = self.is_awaiting_message.load(Ordering::Relaxed);
        is_awaited.then(|| match member {
            Some(member) => format!("{text} global rank {member}"),
            None => format!("{text} rank {peer}"),
        })
    }

    /// The call that has waited in shared memory for a while.
    pub(crate) fn in_memory(&self) -> Option<Header> {
        *self.in_memory.lock()
    }

    /// A check of `running`, the call of `own` that runs. Returns what is to be asked, and whom.
    pub(crate) fn look(&self, own: Rank, now: Instant, running: Option<Header>) -> Option<LongWait> {
        let count = self.count.load(Ordering::Relaxed);
        let waited = self.schedule.lock().look(now, running.map(|running| (running.sequence, count)))?;
        let call = running.filter(|running| !running.call.caller.is_some_and(is_announced))?;
        let seconds = u32::try_from(waited.as_secs()).unwrap_or(u32::MAX);
        let call = Header { payload: 0, ..call };
        Some(LongWait { call, origin: own, awaited: self.awaited()?, seconds, hops: 0 })
    }

    fn awaited(&self) -> Option<Rank> {
        let peer = self.awaited.load(Ordering::Relaxed);
        (peer != NOBODY).then(|| Rank::new(peer))
    }

    /// What this rank knows of itself; `running` is its call that runs.
    pub(crate) fn own_state(&self, running: Option<Header>) -> OwnState {
        let last = self.begun.load(Ordering::Relaxed).checked_sub(1).map(Sequence);
        let is_moving = self.schedule.lock().moved.is_some_and(|moved| moved < MOVING_LIMIT);
        OwnState { last, running, awaited: self.awaited(), is_moving, is_announced: false, elsewhere: None }
    }

    /// Whether a line about `rank`, which `wait` ends at, is to be written: many ranks may wait for one.
    pub(crate) fn is_new(&self, wait: &LongWait, rank: Rank) -> bool {
        self.written.lock().admits(line(wait, rank), Instant::now())
    }

    /// Whether `wait`, or another rank's in the same call, has not been passed on to `next` yet.
    pub(crate) fn passes_on(&self, wait: &LongWait, next: Rank) -> bool {
        self.passed_on.lock().admits(line(wait, next), Instant::now())
    }
}

/// What distinguishes a line about `rank`, at which `wait` ends, from others.
fn line(wait: &LongWait, rank: Rank) -> (Sequence, Rank, u32) {
    let seconds = u64::from(wait.seconds);
    let delay = REPORT_DELAYS.iter().filter(|delay| delay.as_secs() <= seconds).count() as u32;
    (wait.call.sequence, rank, delay)
}

/// The call `call` of another group whose ranks are `members` in the first group.
pub(crate) fn in_group(call: &Call, sequence: Sequence, members: Option<&[Rank]>) -> String {
    const SHOWN: usize = 8;
    let Some(members) = members else { return format!("{call} {sequence} of the first group") };
    let shown: Vec<String> = members.iter().take(SHOWN).map(Rank::to_string).collect();
    let more = if members.len() > SHOWN { ", .." } else { "" };
    format!("{call} {sequence} of the group of global ranks {}{more}", shown.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::rank::Generation;
    use crate::wire::control::WaitReport;
    use crate::wire::frame::{History, Operation};

    fn header(sequence: u64) -> Header {
        Header {
            call: Call::new(Operation::Barrier, DType::U8, 0),
            sequence: Sequence(sequence),
            generation: Generation(0),
            history: History::default(),
            payload: 0,
        }
    }

    fn wait() -> LongWait {
        LongWait { call: header(7), origin: Rank::MAIN, awaited: Rank::new(1), seconds: 5, hops: 0 }
    }

    /// The seconds at which a call is reported that waits from second 0 on, with a check each half second.
    fn reports(running: impl Fn(u64) -> Option<(Sequence, u64)>, seconds: u64) -> Vec<u64> {
        let (mut schedule, start) = (Schedule::default(), Instant::now());
        let checks = (0..seconds * 2).map(|check| (check, start + Duration::from_millis(500) * check as u32));
        checks.filter_map(|(check, now)| schedule.look(now, running(check / 2)).map(|_| check / 2)).collect()
    }

    #[test]
    fn a_call_that_waits_is_reported_after_5_15_and_60_seconds() {
        assert_eq!(reports(|_| Some((Sequence(3), 1)), 3600), [5, 15, 60]);
        assert!(reports(|_| None, 100).is_empty());
        // A new call each four seconds, and one whose data moves each four seconds.
        assert!(reports(|second| Some((Sequence(second / 4), 1)), 100).is_empty());
        assert!(reports(|second| Some((Sequence(3), second / 4)), 100).is_empty());
    }

    #[test]
    fn steps_that_are_all_slow_are_reported_once_a_minute() {
        let slow = reports(|second| Some((Sequence(second / 10), 1)), 140);
        assert_eq!(slow, [5, 65, 125]);
        // One that stays is reported soon all the same.
        let stuck = reports(|second| Some((Sequence((second / 10).min(2)), 1)), 100);
        assert_eq!(stuck, [5, 35, 80]);
    }

    #[test]
    fn a_rank_that_was_stopped_itself_reports_nothing() {
        let (mut schedule, now) = (Schedule::default(), Instant::now());
        let running = Some((Sequence(0), 1));
        assert_eq!(schedule.look(now, running), None);
        assert_eq!(schedule.look(now + Duration::from_secs(3600), running), None);
    }

    #[test]
    fn the_rank_that_has_not_made_the_call_says_what_it_is_in() {
        let own = OwnState { last: Some(Sequence(6)), ..OwnState::default() };
        let Answer::Report(state) = answer(own.clone(), wait(), 4) else { panic!("no report") };
        let report = WaitReport { wait: wait(), state };
        assert_eq!(
            report.for_main("rank 1 (b)", "rank 0 (a)", "rank 1 (b)", false),
            "rank 0 (a) has waited for 5 s in barrier #7 for rank 1 (b): it is in no call of this group; its last was #6"
        );
        assert_eq!(
            report.for_awaited("rank 1 (b)", "rank 0 (a)").as_deref(),
            Some(
                "rank 0 (a) has waited for 5 s in barrier #7 for this rank, rank 1 (b): it is in no call of this group; its last \
                 was #6"
            )
        );
        let in_call = OwnState { running: Some(header(6)), awaited: Some(Rank::new(2)), ..own.clone() };
        let Answer::Report(state) = answer(in_call, wait(), 4) else { panic!("no report") };
        assert_eq!(state.text().as_deref(), Some("is in barrier #6"));
        let elsewhere = OwnState { elsewhere: Some("recv from rank 3".into()), ..own.clone() };
        let Answer::Report(state) = answer(elsewhere, wait(), 4) else { panic!("no report") };
        assert_eq!(state.text().as_deref(), Some("is in recv from rank 3"));
        let announced = OwnState { is_announced: true, ..own };
        assert_eq!(answer(announced, wait(), 4), Answer::Silence);
    }

    #[test]
    fn a_rank_that_waits_in_the_same_call_passes_the_question_on() {
        let own = |awaited| OwnState {
            last: Some(Sequence(7)),
            running: Some(header(7)),
            awaited: Some(Rank::new(awaited)),
            ..OwnState::default()
        };
        let next = LongWait { hops: 1, ..wait() };
        assert_eq!(answer(own(2), wait(), 4), Answer::PassOn(Rank::new(2), next));
        // Round a circle, or into one that does not go through the origin.
        let called = Answer::Report(AwaitedState::Called);
        assert_eq!(answer(own(0), wait(), 4), called);
        assert_eq!(answer(own(2), LongWait { hops: 4, ..wait() }, 4), called);
        let moving = OwnState { is_moving: true, ..own(2) };
        assert_eq!(answer(moving, wait(), 4), Answer::Silence);
        let ended = OwnState { last: Some(Sequence(9)), ..OwnState::default() };
        assert_eq!(answer(ended, wait(), 4), called);
    }

    #[test]
    fn what_many_ranks_ask_is_passed_on_once() {
        let (waits, next) = (Waits::default(), Rank::new(2));
        let of = |origin, seconds| LongWait { origin: Rank::new(origin), seconds, ..wait() };
        let asked = [of(3, 5), of(4, 5), of(3, 6), of(5, 15)];
        assert_eq!(asked.map(|wait| waits.passes_on(&wait, next)), [true, false, false, true]);
    }

    #[test]
    fn a_message_in_a_group_of_some_ranks_is_named_by_the_first_group() {
        let waits = Waits::default();
        assert_eq!(waits.awaited_message(None), None);
        waits.message(Some((Rank::new(1), true)));
        assert_eq!(waits.awaited_message(None).as_deref(), Some("recv from rank 1"));
        let members = [Rank::new(2), Rank::new(5)];
        assert_eq!(waits.awaited_message(Some(&members)).as_deref(), Some("recv from global rank 5"));
        waits.message(Some((Rank::MAIN, false)));
        assert_eq!(waits.awaited_message(Some(&members)).as_deref(), Some("send to global rank 2"));
    }

    #[test]
    fn announced_calls_ask_nobody_and_one_line_is_enough() {
        let waits = Waits::default();
        waits.begin(Sequence(7));
        waits.sleep(Rank::new(1));
        let start = Instant::now();
        let asked = |caller| {
            *waits.schedule.lock() = Schedule::default();
            let call = Call { caller, ..header(7).call };
            let running = Header { call, ..header(7) };
            (0..=10).find_map(|check| waits.look(Rank::MAIN, start + LOOK_INTERVAL * check, Some(running)))
        };
        assert_eq!(asked(None), Some(wait()));
        assert_eq!(asked(Some(Caller::CheckpointsNewest)), None);
        assert_eq!(asked(Some(Caller::TrainStateResume)), None);
        assert_eq!(asked(Some(Caller::MainProcessFirst)), None);
        let lines = [wait(), wait(), LongWait { seconds: 16, ..wait() }];
        assert_eq!(lines.map(|wait| waits.is_new(&wait, Rank::new(1))), [true, false, true]);
    }

    #[test]
    fn whatever_peers_send_lines_are_few_and_none_silences_the_next() {
        let (mut written, start) = (Written::default(), Instant::now());
        let line = |sequence: u64, rank: u32| (Sequence(sequence), Rank::new(rank), 1);
        assert!(written.admits(line(u64::MAX, 1), start));
        assert!(written.admits(line(7, 1), start), "a later call of a peer's hides no earlier one");
        assert!(!written.admits(line(7, 1), start), "a line is not written again");
        let admitted = (0..1000).filter(|sequence| written.admits(line(*sequence, 2), start)).count();
        assert_eq!(admitted, MAX_LINES - 2);
        let later = start + LINES_INTERVAL;
        assert!(!written.admits(line(7, 1), later) && written.admits(line(8, 1), later));
        assert!(written.known.len() <= MAX_KNOWN);
    }
}
