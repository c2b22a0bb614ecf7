//! The collectives that can be timed. A new one is a line in each `match`.

use std::fmt;

use clap::ValueEnum;
use phalanx::{Buffer, ProcessGroup, Rank, ReduceOp, Result};
use serde::{Deserialize, Serialize};

use super::options::Memory;
use super::values::{Value, Values};

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub(super) enum Collective {
    AllReduce,
    AllGather,
    ReduceScatter,
    Broadcast,
    Barrier,
    /// Ranks 0 and 1, 2 and 3 and so on, there and back
    SendRecv,
}

impl Collective {
    /// Does it combine elements, so that the operation matters?
    pub(super) fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::ReduceScatter)
    }

    /// Is there a rank that differs from the others?
    pub(super) fn has_root(self) -> bool {
        matches!(self, Self::Broadcast)
    }

    /// Does it move data?
    pub(super) fn has_data(self) -> bool {
        self != Self::Barrier
    }

    /// Does the whole consist of equal shares, one for each rank?
    pub(super) fn has_shares(self) -> bool {
        matches!(self, Self::AllGather | Self::ReduceScatter)
    }

    /// How often the data travels in one call.
    pub(super) fn trips(self) -> f64 {
        if self == Self::SendRecv { 2.0 } else { 1.0 }
    }

    /// nccl-tests' factor from size over time to what each rank's link carries.
    pub(super) fn bus_factor(self, world: u32) -> f64 {
        let others = f64::from(world.saturating_sub(1)) / f64::from(world.max(1));
        match self {
            Self::AllReduce => 2.0 * others,
            Self::AllGather | Self::ReduceScatter => others,
            Self::Broadcast | Self::Barrier | Self::SendRecv => 1.0,
        }
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.to_possible_value().map_or(Ok(()), |value| f.write_str(value.get_name()))
    }
}

/// A collective on so many elements, as one rank sees it.
pub(super) struct Case<'a> {
    pub(super) group: &'a ProcessGroup,
    pub(super) collective: Collective,
    pub(super) op: ReduceOp,
    pub(super) root: Rank,
    /// Elements of the whole.
    pub(super) count: usize,
}

/// A rank's memory for a case.
pub(super) struct Buffers {
    /// What goes in. Where the result takes its place, it is also what comes out.
    input: Buffer,
    output: Buffer,
}

impl Buffers {
    /// Zeros that are written: what was never written is one page, which stays in the cache.
    pub(super) fn clear(&mut self) {
        self.input.as_bytes_mut().fill(0);
        self.output.as_bytes_mut().fill(0);
    }
}

impl Case<'_> {
    pub(super) fn buffers<T: Value>(&self, memory: Memory) -> Buffers {
        let share = self.count / self.group.world_size().count();
        let (input, output) = match self.collective {
            Collective::AllReduce | Collective::Broadcast => (self.count, 0),
            Collective::AllGather => (share, self.count),
            Collective::ReduceScatter => (self.count, share),
            Collective::SendRecv => (self.count, self.count),
            Collective::Barrier => (0, 0),
        };
        let alloc = |elements| match memory {
            Memory::Ordinary => Buffer::zeroed(T::DTYPE, elements),
            Memory::Registered => self.group.alloc(T::DTYPE, elements),
        };
        Buffers { input: alloc(input), output: alloc(output) }
    }

    pub(super) fn call<T: Value>(&self, buffers: &mut Buffers) -> Result<()> {
        let group = self.group;
        let (input, output) = (buffers.input.as_mut_slice::<T>()?, buffers.output.as_mut_slice::<T>()?);
        match self.collective {
            Collective::AllReduce => group.all_reduce(input, self.op),
            Collective::Broadcast => group.broadcast(input, self.root),
            Collective::AllGather => group.all_gather(input, output),
            Collective::ReduceScatter => group.reduce_scatter(input, output, self.op),
            Collective::Barrier => group.barrier(),
            Collective::SendRecv => match self.partner() {
                Some(partner) if partner > group.rank() => {
                    group.send(input, partner)?;
                    group.recv(output, partner)
                }
                Some(partner) => {
                    group.recv(output, partner)?;
                    group.send(input, partner)
                }
                None => Ok(()),
            },
        }
    }

    /// Calls once with elements that tell where they come from; how many came out wrong on this rank.
    pub(super) fn check<T: Value>(&self, buffers: &mut Buffers, values: &Values) -> Result<u64> {
        values.fill(buffers.input.as_mut_slice::<T>()?, self.group.rank().get(), 0);
        // No element of an earlier result may pass for one of this.
        buffers.output.as_bytes_mut().fill(u8::MAX);
        self.call::<T>(buffers)?;

        let (me, world) = (self.group.rank().get(), self.group.world_size().get());
        let share = self.count / world as usize;
        let (in_place, output) = (buffers.input.as_slice::<T>()?, buffers.output.as_slice::<T>()?);
        Ok(match self.collective {
            Collective::AllReduce => values.not_combined(in_place, 0),
            Collective::Broadcast => values.not_copied(in_place, self.root.get(), 0),
            Collective::ReduceScatter => values.not_combined(output, me as usize * share),
            Collective::AllGather if share > 0 => (0..world)
                .zip(output.chunks(share))
                .map(|(rank, part)| values.not_copied(part, rank, 0))
                .sum(),
            Collective::SendRecv => {
                self.partner().map_or(0, |partner| values.not_copied(output, partner.get(), 0))
            }
            Collective::AllGather | Collective::Barrier => 0,
        })
    }

    /// The rank with which this one exchanges messages; the last of an odd world has none.
    fn partner(&self) -> Option<Rank> {
        self.group.world_size().rank(self.group.rank().get() ^ 1).ok()
    }
}
