//! The collectives that can be timed. A new one is a line in each `match`.

use std::fmt;

use clap::ValueEnum;
use phalanx::{Buffer, ProcessGroup, Rank, ReduceOp, Result};
use phalanx_nccl::Communicator;
use serde::{Deserialize, Serialize};

use crate::device::{self, DeviceBuffers};
use crate::options::Memory;
use crate::values::{Value, Values};

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub(crate) enum Collective {
    AllReduce,
    AllGather,
    ReduceScatter,
    Broadcast,
    Reduce,
    Gather,
    Scatter,
    AllToAll,
    /// Rank r brings r+1 times as much as rank 0
    AllGatherV,
    /// Rank r gets r+1 times as much as rank 0
    AllToAllV,
    /// In 16 slices
    AllReduceCoalesced,
    Barrier,
    /// Ranks 0 and 1, 2 and 3 and so on, there and back
    SendRecv,
}

impl Collective {
    /// Whether it combines elements, so that the operation matters.
    pub(crate) fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::AllReduceCoalesced | Self::ReduceScatter | Self::Reduce)
    }

    /// Whether one rank differs from the others.
    pub(crate) fn has_root(self) -> bool {
        matches!(self, Self::Broadcast | Self::Reduce | Self::Gather | Self::Scatter)
    }

    /// Whether it moves data.
    pub(crate) fn has_data(self) -> bool {
        self != Self::Barrier
    }

    /// Whether the whole consists of equal shares, one for each rank.
    pub(crate) fn has_shares(self) -> bool {
        match self {
            Self::AllGather | Self::ReduceScatter | Self::Gather | Self::Scatter | Self::AllToAll => true,
            Self::AllReduce | Self::AllReduceCoalesced | Self::AllGatherV | Self::AllToAllV => false,
            Self::Broadcast | Self::Reduce | Self::Barrier | Self::SendRecv => false,
        }
    }

    /// How often the data travels in one call.
    pub(crate) fn trips(self) -> f64 {
        if self == Self::SendRecv { 2.0 } else { 1.0 }
    }

    /// nccl-tests' factor from size over time to what each rank's link carries.
    pub(crate) fn bus_factor(self, world: u32) -> f64 {
        let others = f64::from(world.saturating_sub(1)) / f64::from(world.max(1));
        match self {
            Self::AllReduce | Self::AllReduceCoalesced => 2.0 * others,
            Self::AllGatherV | Self::AllToAllV => others,
            Self::AllGather | Self::ReduceScatter | Self::Gather | Self::Scatter | Self::AllToAll => others,
            Self::Broadcast | Self::Reduce | Self::Barrier | Self::SendRecv => 1.0,
        }
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.to_possible_value().map_or(Ok(()), |value| f.write_str(value.get_name()))
    }
}

/// A collective on so many elements, as one rank sees it.
pub(crate) struct Case<'a> {
    pub(crate) group: &'a ProcessGroup,
    /// What moves the memory of devices, if that is what is moved.
    nccl: Option<&'a Communicator>,
    pub(crate) collective: Collective,
    pub(crate) op: ReduceOp,
    pub(crate) root: Rank,
    /// Elements of the whole.
    pub(crate) count: usize,
    /// Each rank's part of the whole, in `all_gather_v` and `all_to_all_v`.
    uneven: Vec<usize>,
    /// What each rank sends to this one in `all_to_all_v`: this one's part of each whole.
    received: Vec<usize>,
}

/// Small tensors are reduced many at a time.
const SLICES: usize = 16;

/// A rank's memory for a case.
pub(crate) struct Buffers<T: Value> {
    /// The input. Where the result takes its place, it is also the output.
    input: Buffer,
    output: Buffer,
    /// The same on a device.
    device: Option<DeviceBuffers<T>>,
}

impl<T: Value> Buffers<T> {
    /// Zeros that are written: what was never written is one page, which stays in the cache.
    pub(crate) fn clear(&mut self) -> Result<()> {
        self.input.as_bytes_mut().fill(0);
        self.output.as_bytes_mut().fill(0);
        self.lend()
    }

    /// Copies them to the device.
    fn lend(&mut self) -> Result<()> {
        let Some(device) = &mut self.device else { return Ok(()) };
        device.write(self.input.as_slice()?, self.output.as_slice()?)
    }

    /// Copies them back.
    fn take(&mut self) -> Result<()> {
        let Some(device) = &self.device else { return Ok(()) };
        device.read(self.input.as_mut_slice()?, self.output.as_mut_slice()?)
    }
}

impl<'a> Case<'a> {
    pub(crate) fn new(
        group: &'a ProcessGroup,
        nccl: Option<&'a Communicator>,
        collective: Collective,
        op: ReduceOp,
        root: Rank,
        count: usize,
    ) -> Self {
        let world = group.world_size().count();
        // Rank r's part is r+1 times as long as rank 0's, but for rounding.
        let start = |rank: usize| {
            (count as u128 * (rank * (rank + 1)) as u128 / (world * (world + 1)) as u128) as usize
        };
        let uneven: Vec<_> = (0..world).map(|rank| start(rank + 1) - start(rank)).collect();
        let received = vec![uneven[group.rank().index()]; world];
        Self { group, nccl, collective, op, root, count, uneven, received }
    }

    /// How many elements the input and the output of this rank have.
    fn lengths(&self) -> (usize, usize) {
        let share = self.count / self.group.world_size().count();
        match self.collective {
            Collective::AllReduce | Collective::AllReduceCoalesced => (self.count, 0),
            Collective::Broadcast | Collective::Reduce => (self.count, 0),
            Collective::Gather if self.is_root() => (share, self.count),
            Collective::Gather => (share, 0),
            Collective::Scatter if self.is_root() => (self.count, share),
            Collective::Scatter => (0, share),
            Collective::AllToAll => (self.count, self.count),
            Collective::AllGatherV => (self.received[0], self.count),
            Collective::AllToAllV => (self.count, self.received.iter().sum()),
            Collective::AllGather => (share, self.count),
            Collective::ReduceScatter => (self.count, share),
            Collective::SendRecv => (self.count, self.count),
            Collective::Barrier => (0, 0),
        }
    }

    /// The bytes of this rank's buffers in the host's memory.
    pub(crate) fn bytes<T: Value>(&self) -> usize {
        let (input, output) = self.lengths();
        input.saturating_add(output).saturating_mul(size_of::<T>())
    }

    pub(crate) fn buffers<T: Value>(&self, memory: Memory) -> Result<Buffers<T>> {
        let (input, output) = self.lengths();
        let alloc = |elements| match memory {
            Memory::Ordinary => Buffer::try_zeroed(T::DTYPE, elements),
            Memory::Registered => self.group.alloc(T::DTYPE, elements),
        };
        let device = self.nccl.map(|nccl| DeviceBuffers::new(nccl, input, output)).transpose()?;
        Ok(Buffers { input: alloc(input)?, output: alloc(output)?, device })
    }

    pub(crate) fn call<T: Value>(&self, buffers: &mut Buffers<T>) -> Result<()> {
        let group = self.group;
        if let (Some(nccl), Some(memory)) = (self.nccl, &mut buffers.device) {
            return device::call(nccl, self, self.partner(), memory);
        }
        let (input, output) = (buffers.input.as_mut_slice::<T>()?, buffers.output.as_mut_slice::<T>()?);
        match self.collective {
            Collective::AllReduce => group.all_reduce(input, self.op),
            Collective::Broadcast => group.broadcast(input, self.root),
            Collective::AllGather => group.all_gather(input, output),
            Collective::ReduceScatter => group.reduce_scatter(input, output, self.op),
            Collective::Reduce => group.reduce(input, self.root, self.op),
            Collective::Gather => group.gather(input, output, self.root),
            Collective::Scatter => group.scatter(input, output, self.root),
            Collective::AllToAll => group.all_to_all(input, output),
            Collective::AllGatherV => group.all_gather_v(input, output, &self.uneven),
            Collective::AllToAllV => group.all_to_all_v(input, &self.uneven, output, &self.received),
            Collective::AllReduceCoalesced => {
                let mut slices: Vec<_> = input.chunks_mut(self.count.div_ceil(SLICES).max(1)).collect();
                group.all_reduce_coalesced(&mut slices, self.op)
            }
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
    pub(crate) fn check<T: Value>(&self, buffers: &mut Buffers<T>, values: &Values) -> Result<u64> {
        values.fill(buffers.input.as_mut_slice::<T>()?, self.group.rank().get(), 0);
        // No element of an earlier result may pass for one of this.
        buffers.output.as_bytes_mut().fill(u8::MAX);
        buffers.lend()?;
        self.call::<T>(buffers)?;
        buffers.take()?;

        let (me, world) = (self.group.rank().get(), self.group.world_size().get());
        let share = self.count / world as usize;
        let (in_place, output) = (buffers.input.as_slice::<T>()?, buffers.output.as_slice::<T>()?);
        // Parts of so many elements from each rank, from that rank's element `start` on.
        let gathered = |lengths: &[usize], start: usize| {
            let (mut rest, mut wrong) = (output, 0);
            for (rank, length) in (0..world).zip(lengths) {
                let (part, others) = rest.split_at(*length);
                wrong += values.not_copied(part, rank, start);
                rest = others;
            }
            wrong
        };
        let even = vec![share; world as usize];
        let mine = me as usize * share;
        Ok(match self.collective {
            Collective::Reduce if !self.is_root() => 0,
            Collective::AllReduce | Collective::AllReduceCoalesced | Collective::Reduce => {
                values.not_combined(in_place, 0)
            }
            Collective::Broadcast => values.not_copied(in_place, self.root.get(), 0),
            Collective::ReduceScatter => values.not_combined(output, mine),
            Collective::Gather if !self.is_root() => 0,
            Collective::AllGather | Collective::Gather => gathered(&even, 0),
            Collective::AllGatherV => gathered(&self.uneven, 0),
            Collective::Scatter => values.not_copied(output, self.root.get(), mine),
            Collective::AllToAll => gathered(&even, mine),
            Collective::AllToAllV => gathered(&self.received, self.uneven[..me as usize].iter().sum()),
            Collective::SendRecv => {
                self.partner().map_or(0, |partner| values.not_copied(output, partner.get(), 0))
            }
            Collective::Barrier => 0,
        })
    }

    fn is_root(&self) -> bool {
        self.group.rank() == self.root
    }

    /// The rank with which this one exchanges messages; the last of an odd world has none.
    fn partner(&self) -> Option<Rank> {
        self.group.world_size().rank(self.group.rank().get() ^ 1).ok()
    }
}
