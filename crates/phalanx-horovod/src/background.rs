//! The background thread: in each cycle it negotiates, and executes what is ready.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use phalanx::adapter::Aside;
use phalanx::trace::{Trace, Track};
use phalanx::{Error, Rank, ReduceOp, Result, panic_message};

use crate::autotune::Autotune;
use crate::engine::{Groups, Inbox, Pace, Shared, Submitted, shut_down};
use crate::execute::{Executor, Works};
use crate::handle::{Completer, Outcome};
use crate::options::{Options, is_set};
use crate::topology::numbered_among;
use phalanx_proto::horovod::controller::{Batch, Controller, StallTimes, fuse};
use phalanx_proto::horovod::message::{Message, Refusal, Refused, Response, Round, Settings};

/// A rank that has nothing in flight begins a cycle after so long, for what is not negotiated: ranks that leave, and stalls.
const IDLE_INTERVAL: Duration = Duration::from_millis(50);
/// The most names that have a track of their own in a timeline. Others share one.
const MAX_TRACKS: u32 = 4096;
/// After so long, and then as often, a timeline is added to its file: a process that is killed has written no more than that.
const WRITE_INTERVAL: Duration = Duration::from_secs(5);

pub(crate) struct Background {
    shared: Arc<Shared>,
    groups: Groups,
    controller: Controller,
    executor: Executor,
    /// The tensors that this rank has in flight.
    works: Works,
    joins: Option<Completer>,
    leaves: bool,
    /// The program waits for a handle.
    waits: bool,
    /// In the last cycle, the program of some rank did not.
    any_computes: bool,
    settings: Settings,
    /// On rank 0, if it is asked for.
    autotune: Option<Autotune>,
    timeline: Timeline,
    /// Warns: all ranks wait for the thread's cycles.
    aside: Aside,
}

impl Background {
    pub fn new(shared: Arc<Shared>, groups: Groups, options: &Options, timeline: Timeline) -> Self {
        let stall = StallTimes {
            warn: options.stall_check_time,
            end: options.stall_shutdown_time.unwrap_or(groups.control.timeout()),
        };
        let settings = Settings {
            threshold: options.fusion_threshold,
            cycle_micros: options.cycle_time.as_micros().try_into().unwrap_or(u64::MAX),
        };
        let (rank, size) = (groups.control.rank(), groups.control.world_size().count());
        Self {
            controller: Controller::new(rank, size, options.cache_capacity, stall, Instant::now()),
            executor: Executor::new(groups.data.clone(), settings.threshold),
            shared,
            groups,
            works: Works::default(),
            joins: None,
            leaves: false,
            waits: false,
            any_computes: true,
            settings,
            autotune: (options.autotune && rank.is_main()).then(|| Autotune::new(settings, is_set)),
            timeline,
            aside: Aside::default(),
        }
    }

    pub fn run(mut self) {
        self.groups.data.keep_apart();
        let ended = catch_unwind(AssertUnwindSafe(|| self.cycles())).unwrap_or_else(|panic| {
            let (rank, whose) = (self.groups.control.rank(), numbered_among(&self.groups.control));
            let said = panic_message(&*panic);
            Err(Error::panicked(format!("Horovod's thread of rank {rank} panicked: {said}{whose}")))
        });
        let cause = ended.unwrap_or_else(|cause| {
            self.groups.abort(&cause);
            cause
        });
        self.fail_all(&cause);
    }

    /// Cycles until a rank shuts down. Returns which one.
    fn cycles(&mut self) -> Result<Error> {
        loop {
            let begin = Instant::now();
            if let Some(end) = self.cycle()? {
                return Ok(end);
            }
            let timeout = self.groups.control.timeout();
            self.shared.pause(&pace(&self.settings, (begin, timeout), self.any_computes));
        }
    }

    /// One cycle. Returns why it is the last one, if a rank has shut down.
    fn cycle(&mut self) -> Result<Option<Error>> {
        let now = Instant::now();
        self.take_in();
        let mut vector = self.controller.vector(now, self.waits);
        self.groups.control.all_reduce::<i64>(bytemuck::cast_slice_mut(&mut vector), ReduceOp::BAnd)?;
        let next = self.controller.combined(&vector)?;
        self.any_computes = next.any_computes;
        let round = if next.negotiate { self.negotiate(now)? } else { Round::default() };
        if let Some(warning) = self.controller.warning(now) {
            self.aside.warn(format!("{warning}{}", numbered_among(&self.groups.control)));
        }
        let (all_joined, stalled, settings) = (round.all_joined, round.stalled.clone(), round.settings);
        let ready = self.controller.finish(round)?;
        self.end_refused();
        self.carry_out(&ready)?;
        if let Some(autotune) = &mut self.autotune
            && let Some(settings) = autotune.moved(ready.iter().map(Response::bytes).sum(), Instant::now())
        {
            self.controller.set(settings);
        }
        if let Some(last) = all_joined {
            self.shared.rejoin();
            if let Some(done) = self.joins.take() {
                done.complete(Ok(Outcome { last, ..Outcome::default() }));
            }
        }
        if let Some(cause) = stalled {
            return Err(Error::timeout(format!("{cause}{}", numbered_among(&self.groups.control)))
                .with_remedy("do all ranks submit the same names? a rank without data calls join"));
        }
        if let Some(settings) = settings {
            self.settings = settings;
            self.executor.set_threshold(settings.threshold);
        }
        self.shared.counts.cycles.fetch_add(1, Ordering::Relaxed);
        self.timeline.write_if_due(Instant::now());
        if next.leaving { self.who_leaves().map(Some) } else { Ok(None) }
    }

    fn take_in(&mut self) {
        let Inbox { submitted, joins, leaves, waits, timeline } = self.shared.take();
        self.waits = waits;
        if let Some(mut next) = timeline {
            std::mem::swap(&mut self.timeline, &mut next.timeline);
            next.timeline.finish();
        }
        for submitted in submitted {
            match submitted {
                Submitted::Operation(submission) => {
                    self.timeline.submitted(&submission.request.name);
                    self.controller.submit(submission.request.clone(), submission.at);
                    self.works.add(submission);
                }
                Submitted::Refusal(refusal) => self.controller.refuse(refusal),
            }
        }
        if joins.is_some() {
            self.joins = joins;
            self.controller.join();
        }
        if leaves {
            self.leaves = true;
            self.controller.leave();
        }
    }

    fn negotiate(&mut self, now: Instant) -> Result<Round> {
        let begin = Instant::now();
        let control = &self.groups.control;
        let message: Message = self.controller.message(now);
        let round = match control.gather_object(&message, Rank::MAIN)? {
            Some(messages) => Some(self.controller.round(messages, now)?),
            None => None,
        };
        let round = control.broadcast_object(round.as_ref(), Rank::MAIN)?;
        self.shared.counts.rounds.fetch_add(1, Ordering::Relaxed);
        self.timeline.negotiated(begin, message.requests.len());
        Ok(round)
    }

    /// Ends what other ranks have refused.
    fn end_refused(&mut self) {
        let refused = self.controller.refused();
        if refused.is_empty() {
            return;
        }
        self.shared.release(refused.iter().map(|refused| refused.refusal.name.as_str()));
        let (now, whose) = (Instant::now(), numbered_among(&self.groups.control));
        for Refused { refusal: Refusal { name, cause }, rank, .. } in refused {
            let error = format!("{name:?}: rank {rank} cannot take part{whose}: {cause}");
            let error = Error::mismatch(error)
                .with_peer(Rank::new(rank))
                .with_remedy("correct the call of that rank, whose own error says what to do");
            self.works.end(&name, Err(error));
            self.timeline.carried_out(&[&name], now);
        }
    }

    fn carry_out(&mut self, ready: &[Response]) -> Result<()> {
        if ready.is_empty() {
            return Ok(());
        }
        self.shared.release(ready.iter().map(|response| response.request.name.as_str()));
        for batch in fuse(ready, self.settings.threshold) {
            let begin = Instant::now();
            let names: Vec<&str> = match &batch {
                Batch::Reduce(fused) => {
                    self.executor.reduce(ready, fused, &mut self.works)?;
                    let names =
                        fused.members.iter().map(|member| ready[member.response].request.name.as_str());
                    if self.timeline.is_enabled() { names.collect() } else { Vec::new() }
                }
                Batch::Single(index) => {
                    let response = &ready[*index];
                    self.executor.single(response, &mut self.works)?;
                    vec![&response.request.name]
                }
            };
            self.timeline.carried_out(&names, begin);
            self.shared.counts.batches.fetch_add(1, Ordering::Relaxed);
        }
        self.shared.counts.tensors.fetch_add(ready.len() as u64, Ordering::Relaxed);
        self.shared.counts.fusion_bytes.store(self.executor.fusion_bytes(), Ordering::Relaxed);
        Ok(())
    }

    /// Names the ranks that have shut down.
    fn who_leaves(&mut self) -> Result<Error> {
        let mut all = vec![0u8; self.groups.control.world_size().count()];
        self.groups.control.all_gather(&[u8::from(self.leaves)], &mut all)?;
        let leaving = |rank: &usize| all[*rank] != 0;
        let own = self.groups.control.rank().index();
        if leaving(&own) {
            return Ok(shut_down());
        }
        let first = (0..all.len()).find(leaving).unwrap_or(own);
        let whose = numbered_among(&self.groups.control);
        Ok(Error::aborted(format!("rank {first} has shut Horovod down{whose}"))
            .with_peer(Rank::new(first as u32))
            .with_remedy("all ranks must make the same calls before the first one shuts down"))
    }

    /// Ends every handle.
    fn fail_all(&mut self, cause: &Error) {
        let Inbox { submitted, joins, .. } = self.shared.end(cause);
        let submitted = submitted.into_iter().filter_map(|submitted| match submitted {
            Submitted::Operation(submission) => Some(submission.done),
            Submitted::Refusal(_) => None,
        });
        for done in submitted.chain(joins).chain(self.joins.take()) {
            done.complete(Err(cause.clone()));
        }
        self.works.fail_all(cause);
        self.timeline.finish();
    }
}

/// After a cycle that began at `begin`. A rank whose program waits begins the next one at once, and waits there for the others: they must come
/// before its `timeout`.
fn pace(settings: &Settings, (begin, timeout): (Instant, Duration), any_computes: bool) -> Pace {
    let cycle = Duration::from_micros(settings.cycle_micros).min(timeout / 4);
    Pace { soon: begin + cycle, late: begin + cycle.max(IDLE_INTERVAL), any_computes }
}

/// The negotiation and the operation of each name, as events.
#[derive(Default)]
pub(crate) struct Timeline {
    trace: Trace,
    /// A track for each name, and since when it is in flight. Names without a track of their own are here while they are in flight.
    names: HashMap<String, (u32, Instant)>,
    /// When its events were last added to the file.
    written: Option<Instant>,
    /// What adds them: a disk that is slow, or a rank that is stopped while it has the file, must not hold up the cycles of all.
    writer: Option<JoinHandle<()>>,
}

impl Timeline {
    pub fn new(trace: Trace) -> Self {
        Self { trace, names: HashMap::new(), written: None, writer: None }
    }

    /// A timeline in a file of its own. Rank 0 begins it before all others.
    pub fn to_file(path: &Path, rank: Rank) -> Self {
        Self::new(if rank.is_main() { Trace::to_file(path, rank) } else { Trace::onto_file(path, rank) })
    }

    fn is_enabled(&self) -> bool {
        self.trace.is_enabled()
    }

    fn write_if_due(&mut self, now: Instant) {
        if !self.is_enabled() {
            return;
        }
        let since = *self.written.get_or_insert(now);
        let is_writing = self.writer.as_ref().is_some_and(|writer| !writer.is_finished());
        if is_writing || now.saturating_duration_since(since) < WRITE_INTERVAL {
            return;
        }
        let trace = self.trace.clone();
        // Without a thread the events wait for the next time.
        self.writer = Builder::new().name("phalanx-timeline".into()).spawn(move || trace.flush()).ok();
        self.written = Some(now);
    }

    /// Adds the events that are left to the file, behind those that are just being added.
    fn finish(&mut self) {
        self.join_writer();
        self.trace.flush();
    }

    fn join_writer(&mut self) {
        // It has no result.
        let _ = self.writer.take().map(JoinHandle::join);
    }

    fn submitted(&mut self, name: &str) {
        if self.is_enabled() {
            let track = u32::try_from(self.names.len()).map_or(MAX_TRACKS, |track| track.min(MAX_TRACKS));
            self.names.entry(name.to_owned()).or_insert((track, Instant::now())).1 = Instant::now();
        }
    }

    fn negotiated(&self, begin: Instant, requests: usize) {
        let args = [("requests", requests.into())];
        self.trace.complete(Track::Negotiation, "round", begin, Instant::now(), &args);
    }

    fn carried_out(&mut self, names: &[&str], begin: Instant) {
        if !self.is_enabled() {
            return;
        }
        let end = Instant::now();
        for name in names {
            // A rank that has joined has submitted nothing.
            let Some(&(number, since)) = self.names.get(*name) else { continue };
            let track = Track::Tensor(number);
            self.trace.complete(track, format!("negotiate {name}"), since, begin, &[]);
            let args = [("tensors in this batch", names.len().into())];
            self.trace.complete(track, format!("carry out {name}"), begin, end, &args);
            if number == MAX_TRACKS {
                self.names.remove(*name);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_cycles_are_never_back_to_back() {
        let begin = Instant::now();
        let pace = |cycle_micros, timeout| {
            let settings = Settings { threshold: 0, cycle_micros };
            let Pace { soon, late, .. } = pace(&settings, (begin, timeout), true);
            (soon - begin, late - begin)
        };
        let long = Duration::MAX;
        assert_eq!(pace(0, long), (Duration::ZERO, IDLE_INTERVAL));
        assert_eq!(pace(2_000, long), (Duration::from_millis(2), IDLE_INTERVAL));
        assert_eq!(pace(60_000, long), (Duration::from_millis(60), Duration::from_millis(60)));
        // Other ranks, which may have begun the next cycle, wait no longer.
        let (cycle, timeout) = (10_000_000, Duration::from_secs(8));
        assert_eq!(pace(cycle, timeout), (Duration::from_secs(2), Duration::from_secs(2)));
    }

    #[test]
    fn a_timeline_is_in_its_file_before_the_job_ends() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.json");
        let mut timeline = Timeline::to_file(&path, Rank::MAIN);
        let begin = Instant::now();
        let text = || std::fs::read_to_string(&path).unwrap_or_default();
        for (name, at) in [("first", begin), ("second", begin + WRITE_INTERVAL)] {
            timeline.submitted(name);
            timeline.carried_out(&[name], begin);
            assert!(text().is_empty(), "it is written now and then");
            timeline.write_if_due(at);
            timeline.join_writer();
        }
        assert!(text().contains("carry out first") && text().contains("carry out second"), "{}", text());
        timeline.submitted("third");
        timeline.carried_out(&["third"], begin);
        timeline.write_if_due(begin + WRITE_INTERVAL * 3 / 2);
        timeline.join_writer();
        assert!(!text().contains("carry out third"));
        timeline.write_if_due(begin + WRITE_INTERVAL * 2);
        timeline.join_writer();
        assert!(text().contains("carry out third"));
    }

    #[test]
    fn a_timeline_that_cannot_be_written_now_holds_up_no_cycle() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.json");
        let mut timeline = Timeline::to_file(&path, Rank::MAIN);
        // As of a rank that is stopped while it adds.
        let other = std::fs::File::create_new(&path).unwrap();
        other.lock().unwrap();
        let begin = Instant::now();
        timeline.write_if_due(begin);
        timeline.submitted("first");
        timeline.carried_out(&["first"], begin);
        timeline.write_if_due(begin + WRITE_INTERVAL);
        assert!(timeline.writer.as_ref().is_some_and(|writer| !writer.is_finished()));
        // The next cycles do not wait for it, and begin no other.
        timeline.write_if_due(begin + WRITE_INTERVAL * 2);
        assert_eq!(timeline.written, Some(begin + WRITE_INTERVAL));
        drop(other);
        timeline.finish();
        drop(timeline);
        assert!(std::fs::read_to_string(&path).unwrap().contains("carry out first"));
    }

    #[test]
    fn a_timeline_of_names_without_end_has_an_end() {
        let folder = tempfile::tempdir().unwrap();
        let mut timeline = Timeline::to_file(&folder.path().join("t.json"), Rank::MAIN);
        timeline.submitted("kept");
        for index in 0..3 * MAX_TRACKS {
            let name = format!("loss of step {index}");
            timeline.submitted(&name);
            timeline.carried_out(&[&name], Instant::now());
        }
        assert_eq!(timeline.names.len(), MAX_TRACKS as usize);
        assert_eq!(timeline.names["kept"].0, 0);
    }
}
