//! What the ranks of a step have gathered and scattered, to be compared.

use phalanx::{Error, ProcessGroup, Rank, Result};
use serde::{Deserialize, Serialize};

use super::super::mixed;

/// Calls of a step that are kept to show the first that differs.
const CALLS_SHOWN: usize = 1 << 12;

/// What was gathered and scattered since the ranks compared it.
#[derive(Default)]
pub(super) struct Calls {
    hash: u64,
    count: u64,
    first: Vec<Call>,
}

/// A collective, of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Call {
    Gather(u32),
    Scatter(u32),
}

impl Calls {
    /// Adds a call.
    pub fn add(&mut self, call: Call) {
        let number = match call {
            Call::Gather(unit) => u64::from(unit) << 1,
            Call::Scatter(unit) => (u64::from(unit) << 1) | 1,
        };
        self.hash = mixed([self.hash, number]);
        self.count += 1;
        if self.first.len() < CALLS_SHOWN {
            self.first.push(call);
        }
    }

    /// An error on every rank unless all have made the same calls, and all are weighted or none is; gives whether their `flags` are equal
    /// too, and the sum of their weights, which is added in the order of ranks.
    pub fn compare(
        &self,
        group: &ProcessGroup,
        flags: &[u8],
        weight: Option<f64>,
    ) -> Result<(bool, Option<f64>)> {
        let flags = mixed(flags.iter().copied().map(u64::from)) as i64;
        let bits = weight.unwrap_or_default().to_bits() as i64;
        let own = [self.count as i64, self.hash as i64, flags, i64::from(weight.is_some()), bits];
        let mut all = vec![0; own.len() * group.world_size().count()];
        group.all_gather(&own, &mut all)?;
        let made = |rank: &[i64]| [rank[0], rank[1]];
        let Some(other) = all.chunks(own.len()).position(|other| made(other) != made(&all)) else {
            let mut ranks = all.chunks(own.len());
            if let Some(other) = ranks.clone().position(|other| other[3] != all[3]) {
                let (with, without) = if all[3] == 1 { (0, other) } else { (other, 0) };
                return Err(Error::mismatch(format!(
                    "rank {with} calls Fsdp::backward_weighted or backward_no_sync_weighted, and rank {without} a backward pass without a \
                     weight"
                ))
                .with_peer(Rank::new(other as u32))
                .with_remedy("give every pass of a step a weight, on every rank, or none; a rank without samples has the weight 0"));
            }
            let sum = weight.map(|_| ranks.clone().map(|rank| f64::from_bits(rank[4] as u64)).sum());
            return Ok((ranks.all(|other| other[2] == own[2]), sum));
        };
        let lists = group.all_gather_object(&self.first)?;
        let place = lists[0].iter().zip(&lists[other]).take_while(|(one, other)| one == other).count();
        let describe = |rank: usize| match lists[rank].get(place) {
            Some(Call::Gather(unit)) => format!("gathers unit {unit}"),
            Some(Call::Scatter(unit)) => format!("scatters the gradients of unit {unit}"),
            None => "ends".to_owned(),
        };
        let cause = if place < CALLS_SHOWN {
            format!("in call {} rank 0 {}, and rank {other} {}", place + 1, describe(0), describe(other))
        } else {
            let count = |rank: usize| all[rank * own.len()];
            format!(
                "after the first {CALLS_SHOWN} calls, of {} on rank 0, and of {} on rank {other}",
                count(0),
                count(other)
            )
        };
        Err(Error::mismatch(format!("the ranks use the units of a sharded model differently: {cause}"))
            .with_peer(Rank::new(other as u32))
            .with_remedy(
                "let every rank's forward pass use the same units in the same order, whatever its data",
            ))
    }
}

#[cfg(test)]
mod tests {
    use phalanx::WorldSize;

    use super::*;

    #[test]
    fn a_difference_after_the_calls_that_are_kept_is_told_with_their_number() {
        let groups = ProcessGroup::in_process(WorldSize::new(2).unwrap()).unwrap();
        let errors = std::thread::scope(|scope| {
            let rank = |group: ProcessGroup| {
                let mut calls = Calls::default();
                for _ in 0..CALLS_SHOWN + group.rank().index() {
                    calls.add(Call::Gather(0));
                }
                scope.spawn(move || calls.compare(&group, &[], None).unwrap_err().to_string())
            };
            let threads: Vec<_> = groups.into_iter().map(rank).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        for error in errors {
            assert!(
                error.contains("after the first 4096 calls, of 4096 on rank 0, and of 4097 on rank 1"),
                "{error}"
            );
        }
    }
}
