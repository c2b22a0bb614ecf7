//! Workers that train by themselves for a while, and then move towards each other: the arithmetic over slices, and the
//! collectives and messages of a group.

use std::mem::discriminant;

use serde::{Deserialize, Serialize};

use super::optimizer::{Sgd, UpdateRule};
use crate::buffer::Buffer;
use crate::collective::ReduceOp;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::group::{P2pOp, ProcessGroup, Work};
use crate::hash::fnv1a;
use crate::rank::Rank;
use crate::sampler::random_permutation;

/// The most steps, and bytes, of a state: counting on from there never overflows.
const MAX_STEPS: u64 = u64::MAX / 2;

/// How workers come together.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum LocalMethod {
    /// Local SGD: all workers take the mean of their parameters.
    ///
    /// Source: S. Stich, *Local SGD Converges Fast and Communicates Little*, 2019.
    Average,
    /// EASGD, in its synchronous form: each worker x and the centre c, of which all have a copy, move towards each other, by α (x −
    /// c). The centre moves by the sum for all workers.
    ///
    /// Source: S. Zhang, A. Choromanska and Y. LeCun, *Deep Learning with Elastic Averaging SGD*, 2015.
    Elastic {
        /// α. The paper's stable choice is 0.9 divided by the number of workers. With more than 2 / (workers + 1) they would move away from the centre.
        moving_rate: f32,
    },
    /// Decentralised averaging: each worker takes the mean of its own parameters and those of its two neighbours on the ring of
    /// ranks. No rank waits for one further away.
    ///
    /// Source: X. Lian et al., *Can Decentralized Algorithms Outperform Centralized Algorithms?*, 2017.
    Ring,
    /// Each worker takes the mean with one other, drawn at random each time; all ranks draw the same pairs. If the world size is
    /// odd, one worker has no partner.
    RandomPairs {
        /// All ranks must have the same; its lower 32 bits count.
        seed: u64,
    },
    /// An outer optimizer. Its gradient is the mean change of the workers' parameters since the last outer step, with the opposite
    /// sign. All workers continue from its result.
    ///
    /// Sources: J. Wang et al., *SlowMo*, 2020; A. Douillard et al., *DiLoCo*, 2023.
    Outer(Sgd),
}

impl LocalMethod {
    /// DiLoCo's outer step: Nesterov's momentum 0.9, learning rate 0.7.
    pub fn diloco() -> Self {
        Self::Outer(Sgd { nesterov: true, ..Sgd::new(0.7).with_momentum(0.9) })
    }

    /// Slow momentum: momentum without Nesterov's form, whose velocity is in units of the parameters. A learning rate of 1
    /// and momentum 0 is [`Average`](Self::Average).
    pub fn slow_momentum(learning_rate: f32, momentum: f32) -> Self {
        Self::Outer(Sgd::new(learning_rate).with_momentum(momentum))
    }

    /// An error if no training of so many workers goes by its rates: the parameters of all would become NaN.
    fn check(self, workers: u32) -> Result<()> {
        match self {
            Self::Average | Self::Ring | Self::RandomPairs { .. } => Ok(()),
            Self::Elastic { moving_rate } => {
                // A meeting multiplies the way from the centre to the workers' mean by 1 - α (workers + 1).
                let largest = (2.0 / (f64::from(workers) + 1.0)) as f32;
                if (0.0..=largest).contains(&moving_rate) {
                    return Ok(());
                }
                let cause = format!(
                    "the moving rate of LocalUpdates is {moving_rate}, by which the parameters of {workers} workers would grow without end"
                );
                Err(Error::invalid_argument(cause).with_remedy(format!(
                    "give it one from 0 to {largest}, such as 0.9 divided by the number of workers"
                )))
            }
            Self::Outer(rule) => rule.check(),
        }
    }

    /// Whether workers keep a centre, and whether they keep a velocity.
    fn keeps(self) -> (bool, bool) {
        match self {
            Self::Average | Self::Ring | Self::RandomPairs { .. } => (false, false),
            Self::Elastic { .. } => (true, false),
            Self::Outer(rule) => (true, rule.states() > 0),
        }
    }
}

/// Training that communicates only every few steps.
///
/// A run that is interrupted continues with [`resume`](Self::resume), from what [`state`](Self::state) returns.
///
/// ```
/// use phalanx::asynchronous::{LocalMethod, LocalUpdates};
/// use phalanx::{ProcessGroup, WorldSize};
/// let groups = ProcessGroup::in_process(WorldSize::new(2)?)?;
/// std::thread::scope(|scope| {
///     for group in groups {
///         scope.spawn(move || {
///             let mut parameters = [1.0f32; 3];
///             let mut local = LocalUpdates::new(&group, LocalMethod::diloco(), 10, &mut parameters)?;
///             for step in 1..=20 {
///                 parameters.iter_mut().for_each(|p| *p -= 0.01 * *p); // this worker's own optimizer
///                 let bytes = local.step(&mut parameters)?;
///                 assert_eq!(bytes.is_some(), step % 10 == 0);
///             }
///             assert_eq!(local.bytes_per_step(), 1.2); // 12 bytes every 10 steps
///             Ok::<(), phalanx::Error>(())
///         });
///     }
/// });
/// # Ok::<(), phalanx::Error>(())
/// ```
///
/// If the program sends messages of its own ([`ProcessGroup::send`]), give it a group of its own
/// ([`ProcessGroup::new_group`]).
#[derive(Debug)]
pub struct LocalUpdates {
    group: ProcessGroup,
    state: LocalState,
    /// The elements that are sent.
    scratch: Vec<f32>,
}

/// What [`LocalUpdates`] keeps from step to step: the numbers of steps, and the centre or the velocity of an outer optimizer. It is
/// the same on every rank, but for the bytes that the rank has given to the group.
///
/// ```
/// use phalanx::ProcessGroup;
/// use phalanx::asynchronous::{LocalMethod, LocalState, LocalUpdates};
/// let group = ProcessGroup::alone()?;
/// let mut parameters = [1.0f32; 3];
/// let mut local = LocalUpdates::new(&group, LocalMethod::diloco(), 10, &mut parameters)?;
/// local.step(&mut parameters)?;
/// let saved = (parameters, serde_json::to_string(local.state())?);
///
/// let (parameters, state) = (saved.0, serde_json::from_str::<LocalState>(&saved.1)?);
/// let resumed = LocalUpdates::resume(&group, LocalMethod::diloco(), 10, &parameters, state)?;
/// assert_eq!(resumed.state(), local.state());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LocalState {
    method: LocalMethod,
    every: u64,
    elements: usize,
    steps: u64,
    /// How often the workers have come together.
    rounds: u64,
    /// The bytes that this rank has given to the group.
    bytes: u64,
    /// EASGD's centre, or the parameters after the last outer step.
    center: Vec<f32>,
    /// The velocity of an outer optimizer with momentum.
    velocity: Vec<f32>,
}

impl LocalState {
    /// Checks that all ranks have the same settings and states, and that none of them has a `check` that failed. An error on
    /// every rank.
    fn agree(&self, group: &ProcessGroup, check: Result<()>) -> Result<()> {
        let settings = (fnv1a(format!("{:?}", self.method).bytes()), self.every, self.elements as u64);
        let reached = (self.steps, self.rounds, bits(&self.center), bits(&self.velocity));
        let failure = check.err();
        let own = (settings, reached, failure.as_ref().map(|error| (error.kind(), error.to_string())));
        let all = group.all_gather_object(&own)?;
        if let Some(error) = failure {
            return Err(error);
        }
        if self.every == 0 {
            return Err(Error::invalid_argument("LocalUpdates with an interval of 0 steps")
                .with_remedy("give the number of steps after which the workers come together: 1 or more"));
        }
        let (rank, peer) = (group.rank(), |index: usize| Rank::new(index as u32));
        if let Some((other, (kind, cause))) = all
            .iter()
            .enumerate()
            .find_map(|(other, (_, _, failure))| failure.as_ref().map(|failure| (other, failure)))
        {
            return Err(
                Error::new(*kind, format!("rank {other} cannot go on: {cause}")).with_peer(peer(other))
            );
        }
        if let Some(other) = all.iter().position(|(other, _, _)| *other != settings) {
            return Err(Error::mismatch(format!(
                "rank {other} has made its LocalUpdates with another method, interval or number of parameters than rank {rank}"
            ))
            .with_peer(peer(other))
            .with_remedy("every rank must name the same"));
        }
        if let Some(other) = all.iter().position(|(_, other, _)| *other != reached) {
            return Err(Error::mismatch(format!(
                "the saved state of rank {other} is of step {}, that of rank {rank} of step {}, or they are of different runs",
                all[other].1.0, self.steps
            ))
            .with_peer(peer(other))
            .with_remedy("every rank must load what was saved after the same step"));
        }
        Ok(())
    }

    /// Takes the memory for what is kept, and for what is `sent` by the methods that reduce: zeros where there is nothing yet.
    fn take_memory(&mut self, sent: &mut Vec<f32>) -> Result<()> {
        let (elements, (has_center, has_velocity)) = (self.elements, self.method.keeps());
        let reduces = match self.method {
            LocalMethod::Average | LocalMethod::Elastic { .. } | LocalMethod::Outer(_) => true,
            LocalMethod::Ring | LocalMethod::RandomPairs { .. } => false,
        };
        let places = [(&mut self.center, has_center), (&mut self.velocity, has_velocity), (sent, reduces)];
        for (place, _) in places.into_iter().filter(|(_, is_needed)| *is_needed) {
            let more = elements.saturating_sub(place.len());
            place.try_reserve_exact(more).map_err(|error| no_memory(elements).with_source(error))?;
            place.resize(elements, 0.0);
        }
        Ok(())
    }

    /// Checks that this state is one of these settings, and whole.
    fn fits(&self, method: LocalMethod, every: u64, elements: usize) -> Result<()> {
        let is_of_kind =
            discriminant(&self.method) == discriminant(&method) && self.method.keeps() == method.keeps();
        if !is_of_kind || (self.every, self.elements) != (every, elements) {
            return Err(Error::invalid_argument(format!(
                "the state is of {:?} every {} steps, with {} parameters, and not of {method:?} every {every} steps, with {elements}",
                self.method, self.every, self.elements
            ))
            .with_remedy("name the method, the interval and the model with which it was saved"));
        }
        if self.steps > MAX_STEPS || self.rounds > self.steps || self.bytes > MAX_STEPS {
            return Err(Error::invalid_argument(format!(
                "the state counts {} steps, {} meetings and {} bytes, which no run has",
                self.steps, self.rounds, self.bytes
            ))
            .with_remedy("load a state that is whole"));
        }
        let (has_center, has_velocity) = method.keeps();
        let expected = |kept: bool| if kept { elements } else { 0 };
        if (self.center.len(), self.velocity.len()) != (expected(has_center), expected(has_velocity)) {
            return Err(Error::invalid_argument("the state has lost a part of its centre or its velocity")
                .with_remedy("load a state that is whole"));
        }
        Ok(())
    }
}

/// A hash of the elements' bits.
fn bits(elements: &[f32]) -> u64 {
    fnv1a(elements.iter().flat_map(|element| element.to_le_bytes()))
}

impl LocalUpdates {
    /// Workers that come together every `every` steps. `parameters` become rank 0's on every rank. All ranks must call it, with
    /// the same method and interval.
    ///
    /// # Errors
    /// If `every` is 0, if no training goes by a rate of the method, such as a negative one, if method, interval or the number of parameters differ between ranks, or if a
    /// rank has no memory for what the method keeps: on every rank. If the group fails.
    pub fn new(
        group: &ProcessGroup,
        method: LocalMethod,
        every: u64,
        parameters: &mut [f32],
    ) -> Result<Self> {
        let mut state = LocalState {
            method,
            every,
            elements: parameters.len(),
            steps: 0,
            rounds: 0,
            bytes: 0,
            center: Vec::new(),
            velocity: Vec::new(),
        };
        let mut scratch = Vec::new();
        let memory = method.check(group.world_size().get()).and_then(|()| state.take_memory(&mut scratch));
        state.agree(group, memory)?;
        group.broadcast(parameters, Rank::MAIN)?;
        if !state.center.is_empty() {
            state.center.copy_from_slice(parameters);
        }
        Ok(Self { group: group.clone(), state, scratch })
    }

    /// Workers that continue from where they were when each saved its parameters and its [`state`](Self::state). The rank's
    /// parameters stay as they are. All ranks must call it. The world size may be another, if each rank has a state, and so may the
    /// rates of the method, but not what kind it is.
    ///
    /// # Errors
    /// If the state is of another method or interval, of another number of parameters, or of another step than the other ranks'
    /// states, or counts more than any run has, or if no training goes by a rate of the method, such as a negative one, or a rank has no memory for what the method sends:
    /// on every rank. If the group fails.
    pub fn resume(
        group: &ProcessGroup,
        method: LocalMethod,
        every: u64,
        parameters: &[f32],
        state: LocalState,
    ) -> Result<Self> {
        let fits =
            method.check(group.world_size().get()).and_then(|()| state.fits(method, every, parameters.len()));
        let (mut state, mut scratch) = (LocalState { method, ..state }, Vec::new());
        let ready = fits.and_then(|()| state.take_memory(&mut scratch));
        state.agree(group, ready)?;
        Ok(Self { group: group.clone(), state, scratch })
    }

    /// What later steps depend on besides the parameters, to be saved with them.
    pub fn state(&self) -> &LocalState {
        &self.state
    }

    /// After each step of this worker's own optimizer. When it is time, moves `parameters` as the method says, and
    /// returns the bytes that this rank has given to the group; otherwise None.
    ///
    /// # Errors
    /// As [`ProcessGroup::all_reduce`] or [`ProcessGroup::isend`]. If `parameters` are not as many as before, or a rank has no memory for the
    /// parameters of its peers: each ends the group. After an error the step is not done, and parameters and state are what they were before it.
    pub fn step(&mut self, parameters: &mut [f32]) -> Result<Option<u64>> {
        if self.state.elements != parameters.len() {
            let cause = format!(
                "LocalUpdates was made with {} parameters, and this step has {}",
                self.state.elements,
                parameters.len()
            );
            let error = Error::invalid_argument(cause).with_remedy("give the same parameters in each step");
            // The others make it, and wait for this rank when they come together.
            self.group.abort(error.clone());
            return Err(error);
        }
        let steps = self.state.steps + 1;
        let bytes = match steps.is_multiple_of(self.state.every) {
            true => Some(self.come_together(parameters)? * size_of_val(parameters) as u64),
            false => None,
        };
        // A meeting that has failed is none: a run that goes on from the state repeats it.
        self.state.steps = steps;
        self.state.rounds += u64::from(bytes.is_some());
        self.state.bytes += bytes.unwrap_or(0);
        Ok(bytes)
    }

    /// The bytes that this rank has given to the group, divided by the number of steps; 0 before the first step.
    pub fn bytes_per_step(&self) -> f64 {
        if self.state.steps == 0 { 0.0 } else { self.state.bytes as f64 / self.state.steps as f64 }
    }

    /// Returns how often this rank has given its parameters to the group. After an error nothing has changed.
    fn come_together(&mut self, parameters: &mut [f32]) -> Result<u64> {
        let Self { group, state, scratch } = self;
        let LocalState { method, rounds, center, velocity, .. } = state;
        let (world, round) = (group.world_size().get(), *rounds + 1);
        let is_alone = world == 1;
        scratch.clear();
        match *method {
            LocalMethod::Average => {
                scratch.extend_from_slice(parameters);
                group.all_reduce(scratch, ReduceOp::Avg)?;
                parameters.copy_from_slice(scratch);
                Ok(u64::from(!is_alone))
            }
            LocalMethod::Elastic { moving_rate } => {
                scratch.extend(stretch(parameters, center, moving_rate));
                group.all_reduce(scratch, ReduceOp::Sum)?;
                let pulls = parameters.iter_mut().zip(center).zip(&*scratch);
                pulls.for_each(|((p, c), sum)| {
                    *p -= (*p - *c) * moving_rate;
                    *c += sum;
                });
                Ok(u64::from(!is_alone))
            }
            LocalMethod::Outer(rule) => {
                scratch.extend(stretch(center, parameters, 1.0));
                group.all_reduce(scratch, ReduceOp::Avg)?;
                let mut states = [velocity.as_mut_slice()];
                let states = &mut states[..rule.states()];
                rule.update(round, 1.0, center, scratch, states);
                parameters.copy_from_slice(center);
                Ok(u64::from(!is_alone))
            }
            LocalMethod::Ring => gossip(group, parameters, &neighbours(group.rank(), world)),
            LocalMethod::RandomPairs { seed } => {
                let partner = partner(group.rank(), world, seed, round);
                gossip(group, parameters, partner.as_slice())
            }
        }
    }
}

/// Takes the mean of this rank's parameters and those of `peers`, which do the same with this one.
fn gossip(group: &ProcessGroup, parameters: &mut [f32], peers: &[Rank]) -> Result<u64> {
    let messages = messages(parameters, peers)
        .map_err(|error| group.fail_half_way("exchange its parameters with other ranks", &error))?;
    let works = group.batch_isend_irecv(messages)?;
    let done = works.into_iter().map(Work::wait).collect::<Result<Vec<Buffer>>>()?;
    let theirs = done.iter().take(peers.len()).map(Buffer::as_slice::<f32>).collect::<Result<Vec<_>>>()?;
    let share = 1.0 / (peers.len() + 1) as f32;
    parameters.iter_mut().for_each(|p| *p *= share);
    for theirs in theirs {
        parameters.iter_mut().zip(theirs).for_each(|(p, theirs)| *p += theirs * share);
    }
    Ok(peers.len() as u64)
}

/// The parameters of each of `peers`, and then this rank's own to each of them.
fn messages(parameters: &[f32], peers: &[Rank]) -> Result<Vec<P2pOp>> {
    let memory = || {
        let memory = Buffer::try_zeroed(DType::F32, parameters.len());
        memory.map_err(|error| no_memory(parameters.len()).with_source(error))
    };
    let receive = peers.iter().map(|peer| memory().map(|theirs| P2pOp::recv(theirs, *peer)));
    let send = peers.iter().map(|peer| {
        let mut own = memory()?;
        own.as_mut_slice::<f32>()?.copy_from_slice(parameters);
        Ok(P2pOp::send(own, *peer))
    });
    receive.chain(send).collect()
}

fn no_memory(elements: usize) -> Error {
    Error::out_of_memory(format!("there is no memory for a copy of {elements} parameters"))
        .with_remedy("start fewer ranks on this host, or train a smaller model")
}

/// How far `from` is beyond `to`, times `rate`.
fn stretch(from: &[f32], to: &[f32], rate: f32) -> impl Iterator<Item = f32> {
    from.iter().zip(to).map(move |(from, to)| (from - to) * rate)
}

/// The ranks beside `rank` on the ring, each once.
fn neighbours(rank: Rank, world: u32) -> Vec<Rank> {
    let (before, after) = ((rank.get() + world - 1) % world, (rank.get() + 1) % world);
    match world {
        1 => Vec::new(),
        2 => vec![Rank::new(after)],
        _ => vec![Rank::new(before), Rank::new(after)],
    }
}

/// The rank that `rank` meets in this round: neighbours in a random order of all ranks. The same pairs on all ranks.
fn partner(rank: Rank, world: u32, seed: u64, round: u64) -> Option<Rank> {
    let order = random_permutation(world as usize, seed.wrapping_mul(0x9e37_79b1).wrapping_add(round));
    let place = order.iter().position(|member| *member == rank.index())?;
    order.get(place ^ 1).map(|partner| Rank::new(*partner as u32))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn pairs_are_the_same_seen_from_both(world in 1u32..20, seed: u64, round in 0u64..100) {
            let partners: Vec<_> = (0..world).map(|rank| partner(Rank::new(rank), world, seed, round)).collect();
            for (rank, other) in partners.iter().enumerate() {
                if let Some(other) = other {
                    prop_assert!(other.index() != rank);
                    prop_assert_eq!(partners[other.index()], Some(Rank::new(rank as u32)));
                }
            }
            prop_assert_eq!(partners.iter().filter(|partner| partner.is_none()).count() as u32, world % 2);
        }
    }

    #[test]
    fn a_state_that_no_run_has_is_refused() {
        let (group, method) = (ProcessGroup::alone().unwrap(), LocalMethod::Average);
        let mut parameters = [1.0f32; 3];
        let mut local = LocalUpdates::new(&group, method, 1, &mut parameters).unwrap();
        local.step(&mut parameters).unwrap();
        let state = local.state().clone();
        let resume = |state| LocalUpdates::resume(&group, method, 1, &parameters, state);
        resume(state.clone()).unwrap();
        for damaged in [
            LocalState { steps: u64::MAX, ..state.clone() },
            LocalState { rounds: u64::MAX, ..state.clone() },
            LocalState { bytes: u64::MAX, ..state.clone() },
        ] {
            let error = resume(damaged).unwrap_err();
            assert!(error.is_invalid_argument() && error.to_string().contains("no run has"), "{error}");
        }
    }

    #[test]
    fn memory_that_is_not_there_is_an_error() {
        for method in [LocalMethod::Average, LocalMethod::Elastic { moving_rate: 0.1 }, LocalMethod::diloco()]
        {
            let mut parameters = [1.0f32; 3];
            let group = ProcessGroup::alone().unwrap();
            let local = LocalUpdates::new(&group, method, 1, &mut parameters).unwrap();
            // More bytes than processors can address.
            let mut state = LocalState { elements: 1 << 58, ..local.state().clone() };
            let error = state.take_memory(&mut Vec::new()).unwrap_err();
            assert!(error.is_out_of_memory() && error.remedy().is_some(), "{error}");
        }
    }

    #[test]
    fn every_rank_meets_every_other() {
        let met: std::collections::BTreeSet<_> =
            (0..200).filter_map(|round| partner(Rank::new(2), 6, 7, round)).collect();
        assert_eq!(met.len(), 5);
        assert_eq!(neighbours(Rank::new(0), 4), [Rank::new(3), Rank::new(1)]);
        assert_eq!((neighbours(Rank::MAIN, 2).len(), neighbours(Rank::MAIN, 1).len()), (1, 0));
    }
}
