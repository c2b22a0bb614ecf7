//! Collectives on the memory of CUDA devices, for any framework: NCCL, with the failures of a [`phalanx::ProcessGroup`].
//!
//! libcuda and libnccl (2.27 or later) are opened at run time. Nothing of CUDA is needed to build this crate, and where they are missing,
//! [`Device::open`] and [`Communicator::new`] say so.
//!
//! | To | see |
//! |---|---|
//! | move and combine the memory of devices | [`Communicator`], [`Work`] |
//! | do so with the host's memory too | [`DeviceGroup`] |
//! | launch several calls as one | [`Communicator::group_calls`] |
//! | go from group to group in an elastic job | [`CommunicatorHandle`] |
//! | use several devices in one process | [`DeviceGroup::of_devices`], [`DeviceBuffer::copy_from_peer`], [`Device::memory_info`] |
//! | have memory on a device | [`DeviceBuffer`] |
//! | lend a framework's tensors | [`DeviceSlice`], [`DeviceMemory`] |
//! | compute meanwhile | [`Stream`], [`Communicator::after`], [`Work::order`] |
//!
//! The guide, `docs/guide/nccl.md` in the repository, says how it is tested, and on which hardware.

mod communicator;
mod cuda;
mod element;
mod found;
mod group;
mod library;
mod nccl;

pub use communicator::{
    CallRecord, CallState, Communicator, CommunicatorHandle, CommunicatorOptions, GroupCalls, Work,
};
pub use cuda::{Device, DeviceBuffer, DeviceMemory, DeviceSlice, MemoryInfo, Stream};
pub use element::{DType, Element};
pub use found::{FoundCuda, FoundNccl, find_cuda, find_nccl};
pub use group::{DeviceGroup, Place};

/// The programs of the README and of the guide must compile.
#[cfg(doctest)]
mod guide {
    #[doc = include_str!("../README.md")]
    struct Readme;
    #[doc = include_str!("../../../docs/guide/nccl.md")]
    struct Nccl;
}
