//! How long each rank takes for a step, and which rank holds up the others.
//!
//! The ranks exchange their times every [`WINDOW`] steps, in one small collective, with what their [optimizers](super::optimizer_steps) have done in
//! these. No rank waits for it: the result is read after a later step, whose buckets come after it in the work queue.
//!
//! What optimizers have done is exchanged once more, after their first step: a program may make a reducer for each epoch, or end each with an uneven
//! `join`, after which the ranks count anew, and no epoch may have a whole window.

use std::time::{Duration, Instant};

use super::optimizer_steps::{self, OptimizerSteps, WINDOW};
use crate::buffer::Buffer;
use crate::caller::Caller;
use crate::collective::ReduceOp;
use crate::error::Result;
use crate::group::{Communicator, Work};
use crate::notice::warn;
use crate::rank::Rank;
use crate::world_size::WorldSize;

/// The step in which the ranks tell of their optimizers for the first time: these have made one step since the first averages.
const FIRST: usize = 2;
/// How many numbers a rank tells: its times, and those of its optimizer.
const NUMBERS: usize = 2 + optimizer_steps::NUMBERS;
/// A rank is slow if its own time is at least [`SLOW`] times the median of all ranks and [`MIN_DELAY`] more, and if another rank waits
/// longer than it by at least this [`SHARE`] of a step.
const SLOW: f64 = 1.5;
const MIN_DELAY: Duration = Duration::from_millis(1);
const SHARE: f64 = 0.1;
/// The time between two warnings.
const WARNING_INTERVAL: Duration = Duration::from_secs(600);

/// How long a step takes on one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTime {
    /// From the averages of the step before to the end of backward: the optimizer, the loading of data, forward and backward, with
    /// whatever else the program does, and waits for, between two steps, without what it has
    /// [reported](super::Reducer::waited).
    pub own: Duration,
    /// From there until the averages have come: for other ranks, and for the network. With the waits that were reported.
    pub wait: Duration,
}

/// Times the steps of this rank, and compares the ranks.
#[derive(Default)]
pub(super) struct StepTimer {
    /// The end of the last step.
    last: Option<Instant>,
    /// Since then, in collectives outside of the reducer.
    waited: Duration,
    /// The steps of this window; all ranks have the same.
    steps: usize,
    /// Whether the ranks have told of their optimizers since they began to count.
    has_told: bool,
    own: Vec<Duration>,
    wait: Vec<Duration>,
    optimizer: OptimizerSteps,
    /// What all ranks tell, on its way.
    exchange: Option<Work>,
    /// By rank.
    times: Vec<StepTime>,
    warned: Option<Instant>,
    /// Whether the ranks' counts of steps may differ.
    is_stopped: bool,
}

impl StepTimer {
    /// The ranks begin to count anew, all together: some have not taken part in the last steps.
    pub(super) fn restart(&mut self) {
        self.optimizer.restart();
        let (times, optimizer) = (std::mem::take(&mut self.times), self.optimizer);
        *self = Self { times, optimizer, warned: self.warned, ..Self::default() };
    }

    /// No step counts until [`restart`](Self::restart). The group is another, whose ranks may have learned that a step apart:
    /// they would exchange their times in different steps. The times of now are those of ranks of the last group.
    pub(super) fn stop(&mut self) {
        self.optimizer.restart();
        *self = Self { optimizer: self.optimizer, warned: self.warned, is_stopped: true, ..Self::default() };
    }

    pub(super) fn times(&self) -> &[StepTime] {
        &self.times
    }

    /// Some of the time between two steps was spent in a collective.
    pub(super) fn waited(&mut self, time: Duration) {
        self.waited = self.waited.saturating_add(time);
    }

    /// The optimizer, whose steps are compared with those of the other ranks.
    pub(super) fn optimizer(&mut self) -> &mut OptimizerSteps {
        &mut self.optimizer
    }

    /// A step has ended. An error if the ranks' optimizers have differed in the last window.
    pub(super) fn step(
        &mut self,
        group: &dyn Communicator,
        backward_end: Instant,
        end: Instant,
    ) -> Result<()> {
        if self.is_stopped || group.world_size() == WorldSize::ONE {
            return Ok(());
        }
        let waited = std::mem::take(&mut self.waited);
        if let Some(last) = self.last.replace(end) {
            self.own.push(backward_end.saturating_duration_since(last).saturating_sub(waited));
            self.wait.push(end.saturating_duration_since(backward_end).saturating_add(waited));
        }
        let compared = self.receive(group, end);
        self.steps += 1;
        if self.steps == WINDOW {
            let times = [&mut self.own, &mut self.wait].map(|times| median(times).as_secs_f64());
            self.tell(group, times);
            self.steps = 0;
            self.own.clear();
            self.wait.clear();
        } else if self.steps == FIRST && !self.has_told {
            self.tell(group, [0.0; 2]);
        }
        compared
    }

    /// Begins to exchange these times, and what the optimizers have done since the last exchange.
    fn tell(&mut self, group: &dyn Communicator, times: [f64; 2]) {
        self.has_told = true;
        let mut all = vec![0.0; NUMBERS * group.world_size().count()];
        let place = NUMBERS * group.rank().index();
        all[place..place + 2].copy_from_slice(&times);
        all[place + 2..place + NUMBERS].copy_from_slice(&self.optimizer.take());
        // Zeros and one number are added up. If the group has failed, the next step says so.
        let work =
            group.in_call(Caller::DdpBackward).all_reduce_async(Buffer::from_slice(&all), ReduceOp::Sum);
        self.exchange = work.ok();
    }

    /// Reads what all ranks have told, if it has come. An error if their optimizers have differed.
    pub(super) fn receive(&mut self, group: &dyn Communicator, now: Instant) -> Result<()> {
        // If the group has failed, the next step says so.
        let here = self.exchange.take_if(|exchange| exchange.is_completed());
        let Some(Ok(all)) = here.map(Work::wait) else { return Ok(()) };
        let Ok(all) = all.as_slice::<f64>() else { return Ok(()) };
        let seconds = |seconds: f64| Duration::try_from_secs_f64(seconds).unwrap_or_default();
        let ranks = all.as_chunks::<NUMBERS>().0.iter();
        let time = |[own, wait, ..]: &[f64; NUMBERS]| StepTime { own: seconds(*own), wait: seconds(*wait) };
        let times: Vec<StepTime> = ranks.clone().map(time).collect();
        // The first exchange has none.
        let has_times = times.iter().any(|time| *time != StepTime::default());
        if has_times {
            self.times = times;
        }
        if has_times
            && group.rank().is_main()
            && let Some(straggler) = straggler(&self.times)
            && self.warned.is_none_or(|warned| now.saturating_duration_since(warned) >= WARNING_INTERVAL)
        {
            self.warned = Some(now);
            warn(straggler);
        }
        optimizer_steps::compare(ranks.map(|[_, _, steps @ ..]| *steps))
    }
}

/// The warning about the slowest rank, if it is slow.
fn straggler(times: &[StepTime]) -> Option<String> {
    // Ranks without data have no times.
    let took_part = |time: &StepTime| *time != StepTime::default();
    let mut own: Vec<Duration> = times.iter().filter(|time| took_part(time)).map(|time| time.own).collect();
    let usual = median(&mut own);
    let (rank, slowest) = times.iter().enumerate().max_by_key(|(_, time)| time.own)?;
    // The time that all ranks wait is the network's.
    let longest_wait = times.iter().map(|time| time.wait).max().unwrap_or_default();
    let excess = longest_wait.saturating_sub(slowest.wait);
    let factor = slowest.own.as_secs_f64() / usual.as_secs_f64();
    let is_slow = slowest.own >= usual.mul_f64(SLOW)
        && slowest.own.saturating_sub(usual) >= MIN_DELAY
        && excess >= (slowest.own + slowest.wait).mul_f64(SHARE);
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    is_slow.then(|| {
        format!(
            "rank {} holds up the others: a step takes {:.1} ms there, {factor:.1} times the median of all ranks ({:.1} ms), and \
             in each step others wait up to {:.1} ms longer than it; look at what else its machine does, and at how long its \
             batches take to load",
            Rank::new(rank as u32),
            ms(slowest.own),
            ms(usual),
            ms(excess)
        )
    })
}

/// The median; of an even number the lower one, so that of two ranks it is the faster.
fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times.get(times.len().saturating_sub(1) / 2).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;
    use crate::reducer::fake;

    const fn ms(own: u64, wait: u64) -> StepTime {
        StepTime { own: Duration::from_millis(own), wait: Duration::from_millis(wait) }
    }

    /// Ranks that wait for the slowest; those of zero take no part.
    fn times<const N: usize>(own: [u64; N]) -> [StepTime; N] {
        let most = own.iter().copied().max().unwrap_or(0);
        own.map(|own| if own == 0 { StepTime::default() } else { ms(own, most - own) })
    }

    #[test]
    fn the_slowest_rank_is_named_from_one_and_a_half_medians_on() {
        let warning = straggler(&times([100, 102, 150, 98])).unwrap();
        assert!(warning.contains("rank 2 holds up") && warning.contains("1.5 times"), "{warning}");
        assert!(warning.contains("150.0 ms there") && warning.contains("(100.0 ms)"), "{warning}");
        assert!(warning.contains("up to 52.0 ms longer than it"), "{warning}");
        assert_eq!(straggler(&times([100, 102, 149, 98])), None);
        // Of two ranks the faster is the measure; ranks without data are none.
        assert!(straggler(&times([150, 100])).is_some_and(|warning| warning.contains("rank 0")));
        assert!(straggler(&times([0, 0, 0, 150, 100])).is_some_and(|warning| warning.contains("rank 3")));
        assert_eq!(straggler(&times([0, 100, 100])), None);
        // Short times differ for many reasons.
        let [short, long] = [100, 900].map(Duration::from_micros);
        let brief = [StepTime { own: short, wait: long }, StepTime { own: long, wait: short }];
        assert_eq!(straggler(&brief), None);
        assert_eq!(straggler(&[]), None);
    }

    #[test]
    fn the_network_is_no_ranks_fault() {
        // Rank 1 takes 20 ms longer by itself, but all wait for the network.
        assert_eq!(straggler(&[ms(30, 1020), ms(50, 1000), ms(30, 1020)]), None);
        assert_eq!(straggler(&[ms(30, 1000), ms(50, 1000), ms(30, 990)]), None);
        let warning = straggler(&[ms(30, 170), ms(50, 150), ms(30, 165)]).unwrap();
        assert!(warning.contains("rank 1") && warning.contains("up to 20.0 ms longer"), "{warning}");
        assert_eq!(straggler(&[ms(30, 169), ms(50, 150), ms(30, 165)]), None);
    }

    #[test]
    fn what_is_reported_as_waited_is_no_time_of_its_own() {
        let begin = Instant::now();
        let times = fake::run(2, |group| {
            let mut timer = StepTimer::default();
            // Rank 1 takes 9 s for a step; rank 0 waits 6 s for it in another collective.
            let waited = if group.rank().is_main() { Duration::from_secs(6) } else { Duration::ZERO };
            for step in 1..=WINDOW as u64 {
                let end = begin + Duration::from_secs(10 * step);
                timer.waited(waited);
                timer.step(&*group, end - Duration::from_secs(1), end).unwrap();
            }
            let exchanged = timer.exchange.take().unwrap().wait().unwrap();
            let ranks = exchanged.as_slice::<f64>().unwrap().as_chunks::<NUMBERS>().0;
            ranks.iter().map(|[own, wait, ..]| [*own, *wait]).collect::<Vec<_>>()
        });
        assert_eq!(times, [[[3.0, 7.0], [9.0, 1.0]], [[3.0, 7.0], [9.0, 1.0]]]);
    }

    #[test]
    fn the_ranks_tell_each_other_every_window_and_one_says_it_at_most_every_pause() {
        let begin = Instant::now();
        let together = Barrier::new(3);
        let ranks = fake::run(3, |group| {
            let mut timer = StepTimer::default();
            let (mut now, mut seen, mut warned) = (begin, Vec::new(), Vec::<Instant>::new());
            for _ in 0..10 * WINDOW {
                // Rank 1 takes 10 s for a step, the others 2 s; they wait 8 s.
                let wait = if group.rank() == Rank::new(1) { 0 } else { 8 };
                now += Duration::from_secs(10);
                together.wait(); // As the buckets' averages hold the ranks together.
                timer.step(&*group, now - Duration::from_secs(wait), now).unwrap();
                seen.push(timer.times().to_vec());
                warned.extend(timer.warned.filter(|at| warned.last() != Some(at)));
            }
            (group.calls().len(), seen, warned)
        });
        // Looked at here: a thread that fails would leave the others at the barrier.
        let told: Vec<StepTime> =
            [(2, 8), (10, 0), (2, 8)].map(|(own, wait)| ms(own * 1000, wait * 1000)).into();
        for (rank, (calls, seen, warned)) in ranks.into_iter().enumerate() {
            assert_eq!(
                calls, 11,
                "a collective in each window, and one after the first step of the optimizers"
            );
            assert!(seen[..WINDOW].iter().all(Vec::is_empty));
            assert!(seen[WINDOW + 1..].iter().all(|times| *times == told), "{:?}", seen.last());
            if rank == 0 {
                assert!(
                    warned.len() > 1 && warned.is_sorted_by(|a, b| *b - *a >= WARNING_INTERVAL),
                    "{warned:?}"
                );
            } else {
                assert!(warned.is_empty(), "{warned:?}");
            }
        }
    }

    #[test]
    fn ranks_that_have_taken_different_steps_count_anew_together() {
        fake::run(2, |group| {
            let mut timer = StepTimer::default();
            for _ in 0..5 + group.rank().index() {
                timer.step(&*group, Instant::now(), Instant::now()).unwrap();
            }
            assert_eq!(group.calls().len(), 1);
            timer.optimizer().step([1.0], []);
            timer.stop();
            timer.restart();
            // How much rounding may be is known as before.
            let [steps, .., highest] = timer.optimizer().take();
            assert!(steps == 1.0 && highest > 0.5);
            let calls = (1..=WINDOW).map(|_| {
                timer.step(&*group, Instant::now(), Instant::now()).unwrap();
                group.calls().len()
            });
            let expected = |step: usize| 1 + usize::from(step >= FIRST) + usize::from(step == WINDOW);
            assert_eq!(calls.collect::<Vec<_>>(), (1..=WINDOW).map(expected).collect::<Vec<_>>());
        });
    }
}
