//! Workers that train by themselves for a while, and then move towards each other: the arithmetic over slices, and the
//! collectives and messages of a group.

use super::optimizer::{Sgd, UpdateRule};
use crate::buffer::Buffer;
use crate::collective::ReduceOp;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::group::{P2pOp, ProcessGroup};
use crate::hash::fnv1a;
use crate::rank::Rank;
use crate::sampler::random_permutation;

/// How workers come together.
#[derive(Clone, Copy, Debug, PartialEq)]
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
        /// α. The paper's stable choice is 0.9 divided by the number of workers.
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
}

/// Training that communicates only every few steps.
///
/// The velocity of an outer optimizer, and the number of the step, cannot be saved yet: a run that is started again begins them anew.
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
    method: LocalMethod,
    every: u64,
    steps: u64,
    rounds: u64,
    bytes: u64,
    elements: usize,
    /// EASGD's centre, or the parameters after the last outer step.
    center: Vec<f32>,
    velocity: Vec<f32>,
    /// What is sent.
    scratch: Vec<f32>,
}

impl LocalUpdates {
    /// Workers that come together every `every` steps. `parameters` become rank 0's on every rank. All ranks must call it, with
    /// the same method and interval.
    ///
    /// # Errors
    /// If `every` is 0, or method, interval or the number of parameters differ between ranks: on every rank. If the group fails.
    pub fn new(
        group: &ProcessGroup,
        method: LocalMethod,
        every: u64,
        parameters: &mut [f32],
    ) -> Result<Self> {
        let own = (fnv1a(format!("{method:?}").bytes()), every, parameters.len() as u64);
        let settings = group.all_gather_object(&own)?;
        if every == 0 {
            return Err(Error::invalid_argument("workers that come together every 0 steps take no step"));
        }
        if let Some(other) = settings.iter().position(|setting| *setting != own) {
            return Err(Error::mismatch(format!(
                "rank {other} has made its LocalUpdates with another method, interval or number of parameters than rank {}",
                group.rank()
            ))
            .with_peer(Rank::new(other as u32))
            .with_remedy("every rank must name the same"));
        }
        group.broadcast(parameters, Rank::MAIN)?;
        let (has_center, has_velocity) = match method {
            LocalMethod::Average | LocalMethod::Ring | LocalMethod::RandomPairs { .. } => (false, false),
            LocalMethod::Elastic { .. } => (true, false),
            LocalMethod::Outer(rule) => (true, rule.states() > 0),
        };
        Ok(Self {
            group: group.clone(),
            method,
            every,
            steps: 0,
            rounds: 0,
            bytes: 0,
            elements: parameters.len(),
            center: if has_center { parameters.to_vec() } else { Vec::new() },
            velocity: vec![0.0; if has_velocity { parameters.len() } else { 0 }],
            scratch: Vec::new(),
        })
    }

    /// After each step of this worker's own optimizer. When it is time, moves `parameters` as the method says, and
    /// returns the bytes that this rank has given to the group; otherwise None.
    ///
    /// # Errors
    /// If `parameters` are not as many as before. As [`ProcessGroup::all_reduce`] or [`ProcessGroup::isend`].
    pub fn step(&mut self, parameters: &mut [f32]) -> Result<Option<u64>> {
        if self.elements != parameters.len() {
            return Err(Error::invalid_argument(format!(
                "there were {} parameters, and now there are {}",
                self.elements,
                parameters.len()
            )));
        }
        self.steps += 1;
        if !self.steps.is_multiple_of(self.every) {
            return Ok(None);
        }
        self.rounds += 1;
        let copies = self.come_together(parameters)?;
        let bytes = copies * size_of_val(parameters) as u64;
        self.bytes += bytes;
        Ok(Some(bytes))
    }

    /// The bytes that this rank has given to the group, by steps.
    pub fn bytes_per_step(&self) -> f64 {
        if self.steps == 0 { 0.0 } else { self.bytes as f64 / self.steps as f64 }
    }

    /// Returns how often this rank has given its parameters to the group.
    fn come_together(&mut self, parameters: &mut [f32]) -> Result<u64> {
        let world = self.group.world_size().get();
        let is_alone = world == 1;
        match self.method {
            LocalMethod::Average => {
                self.group.all_reduce(parameters, ReduceOp::Avg)?;
                Ok(u64::from(!is_alone))
            }
            LocalMethod::Elastic { moving_rate } => {
                self.scratch.clear();
                self.scratch.extend(stretch(parameters, &self.center, moving_rate));
                parameters.iter_mut().zip(&self.scratch).for_each(|(p, pull)| *p -= pull);
                self.group.all_reduce(&mut self.scratch, ReduceOp::Sum)?;
                self.center.iter_mut().zip(&self.scratch).for_each(|(c, pull)| *c += pull);
                Ok(u64::from(!is_alone))
            }
            LocalMethod::Outer(rule) => {
                self.scratch.clear();
                self.scratch.extend(stretch(&self.center, parameters, 1.0));
                self.group.all_reduce(&mut self.scratch, ReduceOp::Avg)?;
                let mut states = [self.velocity.as_mut_slice()];
                let states = &mut states[..rule.states()];
                rule.update(self.rounds, 1.0, &mut self.center, &self.scratch, states);
                parameters.copy_from_slice(&self.center);
                Ok(u64::from(!is_alone))
            }
            LocalMethod::Ring => self.gossip(parameters, &neighbours(self.group.rank(), world)),
            LocalMethod::RandomPairs { seed } => {
                let partner = partner(self.group.rank(), world, seed, self.rounds);
                self.gossip(parameters, partner.as_slice())
            }
        }
    }

    /// Takes the mean of this rank's parameters and those of `peers`, which do the same with this one.
    fn gossip(&self, parameters: &mut [f32], peers: &[Rank]) -> Result<u64> {
        let receive =
            peers.iter().map(|peer| P2pOp::recv(Buffer::zeroed(DType::F32, parameters.len()), *peer));
        let send = peers.iter().map(|peer| P2pOp::send(Buffer::from_slice(parameters), *peer));
        let mut works = self.group.batch_isend_irecv(receive.chain(send).collect())?;
        let sent = works.split_off(peers.len());
        let share = 1.0 / (peers.len() + 1) as f32;
        parameters.iter_mut().for_each(|p| *p *= share);
        for work in works {
            let theirs = work.wait()?;
            parameters.iter_mut().zip(theirs.as_slice::<f32>()?).for_each(|(p, theirs)| *p += theirs * share);
        }
        for work in sent {
            work.wait()?;
        }
        Ok(peers.len() as u64)
    }
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
    fn every_rank_meets_every_other() {
        let met: std::collections::BTreeSet<_> =
            (0..200).filter_map(|round| partner(Rank::new(2), 6, 7, round)).collect();
        assert_eq!(met.len(), 5);
        assert_eq!(neighbours(Rank::new(0), 4), [Rank::new(3), Rank::new(1)]);
        assert_eq!((neighbours(Rank::MAIN, 2).len(), neighbours(Rank::MAIN, 1).len()), (1, 0));
    }
}
