//! Collectives on the memory of CUDA devices, which NCCL moves.

use phalanx::{Error, ProcessGroup, Rank, Result};
use phalanx_nccl::{Communicator, Device, DeviceBuffer, Stream};

use crate::collectives::{Case, Collective};
use crate::options::{Bench, DeviceKind};
use crate::values::Value;

/// The communicator, if devices are wanted.
pub(crate) fn connect(options: &Bench, group: &ProcessGroup) -> Result<Option<Communicator>> {
    match options.device {
        DeviceKind::Cpu => Ok(None),
        DeviceKind::Cuda => Communicator::new(group, &Device::of_local_rank(group)?).map(Some),
    }
}

/// Whether NCCL has this collective.
pub(crate) fn supports(collective: Collective) -> bool {
    match collective {
        Collective::AllReduce | Collective::AllGather | Collective::ReduceScatter | Collective::Broadcast => {
            true
        }
        Collective::Reduce | Collective::AllToAll | Collective::Barrier | Collective::SendRecv => true,
        Collective::Gather | Collective::Scatter | Collective::AllGatherV | Collective::AllToAllV => false,
        Collective::AllReduceCoalesced => false,
    }
}

/// A rank's memory on its device.
pub(crate) struct DeviceBuffers<T: Value> {
    stream: Stream,
    input: DeviceBuffer<T::OnDevice>,
    output: DeviceBuffer<T::OnDevice>,
}

impl<T: Value> DeviceBuffers<T> {
    pub(crate) fn new(nccl: &Communicator, input: usize, output: usize) -> Result<Self> {
        let stream = Stream::new(nccl.device())?;
        let input = DeviceBuffer::zeroed(&stream, input)?;
        Ok(Self { input, output: DeviceBuffer::zeroed(&stream, output)?, stream })
    }

    pub(crate) fn write(&mut self, input: &[T], output: &[T]) -> Result<()> {
        self.input.write(&self.stream, bytemuck::cast_slice(input))?;
        self.output.write(&self.stream, bytemuck::cast_slice(output))
    }

    pub(crate) fn read(&self, input: &mut [T], output: &mut [T]) -> Result<()> {
        input.copy_from_slice(bytemuck::cast_slice(&self.input.to_vec(&self.stream)?));
        output.copy_from_slice(bytemuck::cast_slice(&self.output.to_vec(&self.stream)?));
        Ok(())
    }
}

/// Calls once, and waits for the device.
pub(crate) fn call<T: Value>(
    nccl: &Communicator,
    case: &Case<'_>,
    partner: Option<Rank>,
    memory: &mut DeviceBuffers<T>,
) -> Result<()> {
    let DeviceBuffers { input, output, .. } = memory;
    match case.collective {
        Collective::AllReduce => nccl.all_reduce(input, case.op),
        Collective::Broadcast => nccl.broadcast(input, case.root),
        Collective::AllGather => nccl.all_gather(input, output),
        Collective::ReduceScatter => nccl.reduce_scatter(input, output, case.op),
        Collective::Reduce => nccl.reduce(input, case.root, case.op),
        Collective::AllToAll => nccl.all_to_all(input, output),
        Collective::Barrier => nccl.barrier(),
        Collective::SendRecv => match partner {
            Some(partner) if partner > nccl.rank() => {
                nccl.send(input, partner)?;
                nccl.recv(output, partner)
            }
            Some(partner) => {
                nccl.recv(output, partner)?;
                nccl.send(input, partner)
            }
            None => Ok(()),
        },
        Collective::Gather | Collective::Scatter | Collective::AllGatherV | Collective::AllToAllV => {
            Err(unsupported(case.collective))
        }
        Collective::AllReduceCoalesced => Err(unsupported(case.collective)),
    }
}

/// The error for what NCCL does not have.
pub(crate) fn unsupported(collective: Collective) -> Error {
    Error::invalid_argument(format!("NCCL has no {collective}")).with_remedy("leave --device cuda away")
}
