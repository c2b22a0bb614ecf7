//! The calls that a communicator can make, as data.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::ptr::{with_exposed_provenance as address, with_exposed_provenance_mut as address_mut};
use std::sync::Arc;

use phalanx::{Error, Rank, ReduceOp, Result, WorldSize};

use crate::cuda::{RawStream, Span};
use crate::nccl::{Comm, Nccl, SUCCESS, op_for};

/// One call, with the memory that it reads and writes.
#[derive(Clone, Debug)]
pub(super) enum Call {
    AllReduce {
        memory: Span,
        op: ReduceOp,
    },
    Broadcast {
        memory: Span,
        root: Rank,
    },
    Reduce {
        memory: Span,
        op: ReduceOp,
        root: Rank,
    },
    AllGather {
        input: Span,
        output: Span,
    },
    ReduceScatter {
        input: Span,
        output: Span,
        op: ReduceOp,
    },
    AllToAll {
        input: Span,
        output: Span,
    },
    /// Rank r's part has `counts[r]` elements.
    AllGatherV {
        input: Span,
        output: Span,
        counts: Arc<[usize]>,
    },
    ReduceScatterV {
        input: Span,
        output: Span,
        counts: Arc<[usize]>,
        op: ReduceOp,
    },
    Send {
        memory: Span,
        peer: Rank,
    },
    Recv {
        memory: Span,
        peer: Rank,
    },
    Barrier {
        memory: Span,
    },
}

impl Call {
    /// An error if the memory is on another device, the sizes do not fit, or a rank is not in the world. `rank` makes the call.
    pub(super) fn check(&self, world: WorldSize, rank: Rank, device: u32) -> Result<()> {
        let (Self::AllReduce { memory, .. }
        | Self::Broadcast { memory, .. }
        | Self::Reduce { memory, .. }
        | Self::AllGather { input: memory, .. }
        | Self::ReduceScatter { input: memory, .. }
        | Self::AllToAll { input: memory, .. }
        | Self::AllGatherV { input: memory, .. }
        | Self::ReduceScatterV { input: memory, .. }
        | Self::Send { memory, .. }
        | Self::Recv { memory, .. }
        | Self::Barrier { memory }) = *self;
        let output = match *self {
            Self::AllGather { output, .. }
            | Self::ReduceScatter { output, .. }
            | Self::AllToAll { output, .. }
            | Self::AllGatherV { output, .. }
            | Self::ReduceScatterV { output, .. } => output,
            Self::AllReduce { .. }
            | Self::Broadcast { .. }
            | Self::Reduce { .. }
            | Self::Send { .. }
            | Self::Recv { .. }
            | Self::Barrier { .. } => memory,
        };
        if let Some(span) = [memory, output].into_iter().find(|span| span.device != device) {
            return Err(Error::invalid_argument(format!(
                "the memory is on device {}, and the communicator on device {device}",
                span.device
            )));
        }
        let (from, to, ranks) = (memory.len, output.len, world.count());
        let fits = match self {
            Self::AllGather { .. } => from.checked_mul(ranks) == Some(to),
            Self::ReduceScatter { .. } => to.checked_mul(ranks) == Some(from),
            Self::AllToAll { .. } => from == to && from.is_multiple_of(ranks),
            Self::AllGatherV { counts, .. } => fits_parts(counts, ranks, rank, from, to),
            Self::ReduceScatterV { counts, .. } => fits_parts(counts, ranks, rank, to, from),
            Self::AllReduce { .. }
            | Self::Broadcast { .. }
            | Self::Reduce { .. }
            | Self::Send { .. }
            | Self::Recv { .. }
            | Self::Barrier { .. } => true,
        };
        if !fits {
            return Err(Error::invalid_argument(format!(
                "{self}: {from} elements cannot become {to} among {ranks} ranks"
            )));
        }
        match self {
            Self::AllReduce { op, .. }
            | Self::Reduce { op, .. }
            | Self::ReduceScatter { op, .. }
            | Self::ReduceScatterV { op, .. } => {
                op_for(*op, memory.dtype)?;
            }
            Self::Broadcast { .. }
            | Self::AllGather { .. }
            | Self::AllToAll { .. }
            | Self::AllGatherV { .. }
            | Self::Send { .. }
            | Self::Recv { .. }
            | Self::Barrier { .. } => {}
        }
        if let Self::Broadcast { root: rank, .. }
        | Self::Reduce { root: rank, .. }
        | Self::Send { peer: rank, .. }
        | Self::Recv { peer: rank, .. } = self
        {
            world.rank(rank.get())?;
        }
        Ok(())
    }

    /// Whether it waits for `rank`.
    pub(super) fn needs(&self, rank: Rank) -> bool {
        match self {
            Self::Send { peer, .. } | Self::Recv { peer, .. } => *peer == rank,
            Self::AllReduce { .. }
            | Self::Broadcast { .. }
            | Self::Reduce { .. }
            | Self::AllGather { .. }
            | Self::ReduceScatter { .. }
            | Self::AllToAll { .. }
            | Self::AllGatherV { .. }
            | Self::ReduceScatterV { .. }
            | Self::Barrier { .. } => true,
        }
    }

    /// Whether it moves nothing, and waits for nobody. NCCL discards such a collective, too, but if `NCCL_CHECK_POINTERS` is set, not before it has looked
    /// at the addresses, which memory without elements does not have. A message without elements is one all the same.
    fn is_empty(&self) -> bool {
        match self {
            Self::AllReduce { memory, .. } | Self::Broadcast { memory, .. } | Self::Reduce { memory, .. } => {
                memory.len == 0
            }
            Self::AllGather { input: part, .. } | Self::ReduceScatter { output: part, .. } => part.len == 0,
            Self::AllToAll { .. }
            | Self::AllGatherV { .. }
            | Self::ReduceScatterV { .. }
            | Self::Send { .. }
            | Self::Recv { .. }
            | Self::Barrier { .. } => false,
        }
    }

    /// Queues it on `stream`.
    ///
    /// # Safety
    /// The communicator and the stream are alive and of the current device, and the memory stays until the call is done.
    pub(super) unsafe fn launch(
        &self,
        nccl: &Nccl,
        comm: Comm,
        stream: RawStream,
        world: usize,
        me: Rank,
    ) -> Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        // The addresses are the device's: this process never reads them.
        let read = |span: Span| address::<c_void>(span.pointer as usize);
        let write = |span: Span| address_mut::<c_void>(span.pointer as usize);
        let number = |rank: Rank| rank.get() as c_int;
        // SAFETY: for each call: the caller promises that handles and memory are alive, and `check` has compared the counts with
        // the memory's sizes.
        let (function, code) = unsafe {
            match self.clone() {
                Self::AllReduce { memory, op } => {
                    let (count, dtype) = (memory.len, memory.dtype.code());
                    let code = nccl.with_op(op, memory.dtype, comm, |op| {
                        (nccl.ncclAllReduce)(read(memory), write(memory), count, dtype, op, comm, stream)
                    })?;
                    ("ncclAllReduce", code)
                }
                Self::Barrier { memory } => {
                    let (count, dtype) = (memory.len, memory.dtype.code());
                    let code =
                        (nccl.ncclAllReduce)(read(memory), write(memory), count, dtype, 0, comm, stream);
                    ("ncclAllReduce", code)
                }
                Self::Broadcast { memory, root } => {
                    let (count, dtype, root) = (memory.len, memory.dtype.code(), number(root));
                    let code =
                        (nccl.ncclBroadcast)(read(memory), write(memory), count, dtype, root, comm, stream);
                    ("ncclBroadcast", code)
                }
                Self::Reduce { memory, op, root } => {
                    let (count, dtype, root) = (memory.len, memory.dtype.code(), number(root));
                    let code = nccl.with_op(op, memory.dtype, comm, |op| {
                        (nccl.ncclReduce)(read(memory), write(memory), count, dtype, op, root, comm, stream)
                    })?;
                    ("ncclReduce", code)
                }
                Self::AllGather { input, output } => {
                    let (count, dtype) = (input.len, input.dtype.code());
                    (
                        "ncclAllGather",
                        (nccl.ncclAllGather)(read(input), write(output), count, dtype, comm, stream),
                    )
                }
                Self::ReduceScatter { input, output, op } => {
                    let (count, dtype) = (output.len, output.dtype.code());
                    let code = nccl.with_op(op, input.dtype, comm, |op| {
                        (nccl.ncclReduceScatter)(read(input), write(output), count, dtype, op, comm, stream)
                    })?;
                    ("ncclReduceScatter", code)
                }
                Self::Send { memory, peer } => {
                    let (count, dtype, peer) = (memory.len, memory.dtype.code(), number(peer));
                    ("ncclSend", (nccl.ncclSend)(read(memory), count, dtype, peer, comm, stream))
                }
                Self::Recv { memory, peer } => {
                    let (count, dtype, peer) = (memory.len, memory.dtype.code(), number(peer));
                    ("ncclRecv", (nccl.ncclRecv)(write(memory), count, dtype, peer, comm, stream))
                }
                // NCCL has a function for it only since 2.28.
                Self::AllToAll { input, output } => {
                    let each = input.len / world;
                    for rank in 0..world {
                        let peer = Rank::new(rank as u32);
                        let (from, to) = (input.part(rank * each, each), output.part(rank * each, each));
                        Self::Send { memory: from, peer }.launch(nccl, comm, stream, world, me)?;
                        Self::Recv { memory: to, peer }.launch(nccl, comm, stream, world, me)?;
                    }
                    ("ncclSend", SUCCESS)
                }
                // For parts of different sizes NCCL has no function. Every rank is the root of its own part, and reads or writes its own
                // memory there; the other ranks give an address that is not used.
                Self::AllGatherV { input, output, counts } => {
                    let mut code = SUCCESS;
                    for (root, start, count) in parts(&counts) {
                        let part = output.part(start, count);
                        let (from, dtype) = (if root == me { input } else { part }, part.dtype.code());
                        if code == SUCCESS {
                            code = (nccl.ncclBroadcast)(
                                read(from),
                                write(part),
                                count,
                                dtype,
                                number(root),
                                comm,
                                stream,
                            );
                        }
                    }
                    ("ncclBroadcast", code)
                }
                Self::ReduceScatterV { input, output, counts, op } => {
                    let mut code = SUCCESS;
                    for (root, start, count) in parts(&counts) {
                        let part = input.part(start, count);
                        let (to, dtype) = (if root == me { output } else { part }, part.dtype.code());
                        if code == SUCCESS {
                            code = nccl.with_op(op, part.dtype, comm, |op| {
                                let root = number(root);
                                (nccl.ncclReduce)(read(part), write(to), count, dtype, op, root, comm, stream)
                            })?;
                        }
                    }
                    ("ncclReduce", code)
                }
            }
        };
        // In a group, which every call here is in, NCCL only notes the call.
        if code == SUCCESS { Ok(()) } else { Err(nccl.error(function, code)) }
    }
}

impl fmt::Display for Call {
    /// As the core's errors have calls, with the device's kind before them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = |span: &Span| format!("{} x {}", span.len, span.dtype);
        match self {
            Self::AllReduce { memory, op } => write!(f, "cuda all_reduce({op}, {})", size(memory)),
            Self::Broadcast { memory, root } => {
                write!(f, "cuda broadcast(from rank {root}, {})", size(memory))
            }
            Self::Reduce { memory, op, root } => {
                write!(f, "cuda reduce({op}, to rank {root}, {})", size(memory))
            }
            Self::AllGather { input, .. } => write!(f, "cuda all_gather({})", size(input)),
            Self::ReduceScatter { input, op, .. } => write!(f, "cuda reduce_scatter({op}, {})", size(input)),
            Self::AllToAll { input, .. } => write!(f, "cuda all_to_all({})", size(input)),
            Self::AllGatherV { output, .. } => write!(f, "cuda all_gather_v(to {})", size(output)),
            Self::ReduceScatterV { input, op, .. } => {
                write!(f, "cuda reduce_scatter_v({op}, {})", size(input))
            }
            Self::Send { memory, peer } => write!(f, "cuda send(to rank {peer}, {})", size(memory)),
            Self::Recv { memory, peer } => write!(f, "cuda recv(from rank {peer}, {})", size(memory)),
            Self::Barrier { .. } => f.write_str("cuda barrier"),
        }
    }
}

/// Whether there is a part for each rank, this rank's has `own` elements, and all together `all`.
fn fits_parts(counts: &[usize], ranks: usize, rank: Rank, own: usize, all: usize) -> bool {
    let total = counts.iter().try_fold(0usize, |total, count| total.checked_add(*count));
    counts.len() == ranks && counts.get(rank.index()) == Some(&own) && total == Some(all)
}

/// The parts that have elements: whose it is, where it starts, and how many it has.
fn parts(counts: &[usize]) -> impl Iterator<Item = (Rank, usize, usize)> {
    let starts = counts.iter().scan(0, |next, count| {
        *next += count;
        Some(*next - count)
    });
    let ranks = (0..).map(Rank::new);
    ranks
        .zip(starts.zip(counts))
        .filter(|(_, (_, count))| **count > 0)
        .map(|(rank, (start, count))| (rank, start, *count))
}

/// What errors call several calls that are launched as one.
pub(super) fn name(calls: &[Call]) -> String {
    match calls {
        [] => "cuda group()".to_owned(),
        [call] => call.to_string(),
        [first, ..] => format!("cuda group({} calls, the first is {first})", calls.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::DType;

    fn span(len: usize) -> Span {
        Span { pointer: 0, len, dtype: DType::F32, device: 0 }
    }

    #[test]
    fn sizes_devices_and_ranks_are_checked_before_anything_is_launched() {
        let world = WorldSize::new(3).unwrap();
        let check = |call: Call| call.check(world, Rank::new(1), 0).map_err(|error| error.to_string());
        assert_eq!(check(Call::AllGather { input: span(2), output: span(6) }), Ok(()));
        let error = check(Call::AllGather { input: span(2), output: span(5) }).unwrap_err();
        assert_eq!(error, "cuda all_gather(2 x f32): 2 elements cannot become 5 among 3 ranks");
        assert!(check(Call::ReduceScatter { input: span(6), output: span(3), op: ReduceOp::Sum }).is_err());
        assert!(check(Call::AllToAll { input: span(4), output: span(4) }).is_err());
        // Rank 1 has three of six elements, or of seven.
        let counts: Arc<[usize]> = [1, 3, 2].into();
        let gather = |input, output, counts: &Arc<[usize]>| {
            check(Call::AllGatherV { input: span(input), output: span(output), counts: counts.clone() })
        };
        assert_eq!(gather(3, 6, &counts), Ok(()));
        let error = gather(3, 7, &counts).unwrap_err();
        assert_eq!(error, "cuda all_gather_v(to 7 x f32): 3 elements cannot become 7 among 3 ranks");
        assert!(gather(2, 6, &counts).is_err());
        assert!(gather(3, 6, &[1, 3, 2, 0].into()).is_err());
        assert!(gather(usize::MAX, 2, &[usize::MAX, usize::MAX, 4].into()).is_err());
        let scatter = Call::ReduceScatterV { input: span(6), output: span(3), counts, op: ReduceOp::Sum };
        assert_eq!(check(scatter), Ok(()));
        assert!(check(Call::Send { memory: span(1), peer: Rank::new(3) }).is_err());
        assert!(check(Call::AllReduce { memory: span(1), op: ReduceOp::BAnd }).is_err());
        let elsewhere = Span { device: 1, ..span(1) };
        let error = check(Call::Broadcast { memory: elsewhere, root: Rank::MAIN }).unwrap_err();
        assert_eq!(error, "the memory is on device 1, and the communicator on device 0");
    }

    #[test]
    fn parts_without_elements_are_left_out() {
        let found: Vec<_> = parts(&[2, 0, 3]).collect();
        assert_eq!(found, [(Rank::new(0), 0, 2), (Rank::new(2), 2, 3)]);
    }
}
