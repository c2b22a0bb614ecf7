//! From one device of this process to another.
//!
//! A copy is queued on a stream of the device to which it goes, behind what a stream of the other device has been given; and that stream goes
//! on behind the copy. So each device's own streams say until when its memory is used, and `freeing` asks no others.

use phalanx::{Deadline, Error, Result};

use super::buffer::{DeviceBuffer, longest};
use super::device::Device;
use super::memory::DeviceMemory;
use super::raw::{Access, PEER_ACCESS_ALREADY_ENABLED};
use super::stream::Stream;
use crate::element::Element;

impl Device {
    /// Lets what runs on this device reach the memory of `peer` directly, over NVLink or PCI Express, for as long as both are open. Without
    /// it the driver may take copies between the two through the host's memory. Once it is on, it stays on, for all that this process has on
    /// them; the other direction is a call of its own. NCCL needs none of this: it sees to its own transports, and
    /// [`Communicator::new`](crate::Communicator::new) opens the pools to it.
    ///
    /// Memory of a pool has an access of its own. This opens the pool that is the current one of `peer`, from which a [`DeviceBuffer`] is taken:
    /// the default pool, unless another library has set one (`cuDeviceSetMemPool`). If one is set later, call this again.
    ///
    /// Returns whether the machine can do that. If not, copies work all the same.
    ///
    /// # Errors
    /// If the driver refuses.
    #[doc(alias("cuCtxEnablePeerAccess", "cudaDeviceEnablePeerAccess", "torch.cuda.can_device_access_peer"))]
    pub fn enable_peer_access(&self, peer: &Self) -> Result<bool> {
        if self == peer {
            return Ok(true);
        }
        if !self.can_reach(peer)? {
            return Ok(false);
        }
        let bound = self.bind()?;
        // SAFETY: the context is alive as long as `peer`. Zero is the only value that the flags may have.
        let code = unsafe { (self.cuda().cuCtxEnablePeerAccess)(peer.context(), 0) };
        drop(bound);
        if code != PEER_ACCESS_ALREADY_ENABLED {
            self.cuda().check("cuCtxEnablePeerAccess", code)?;
        }
        self.open_pool_of(peer)?;
        Ok(true)
    }

    /// Lets what runs on this device reach the current pool of `peer`, if the machine can do that.
    pub(crate) fn reach_pool_of(&self, peer: &Self) -> Result<()> {
        if self == peer || !self.can_reach(peer)? { Ok(()) } else { self.open_pool_of(peer) }
    }

    /// Whether the machine lets this device reach the memory of another one.
    fn can_reach(&self, peer: &Self) -> Result<bool> {
        let (handle, peer, mut can) = (self.handle()?, peer.handle()?, 0);
        // SAFETY: it writes one number there.
        let code = unsafe { (self.cuda().cuDeviceCanAccessPeer)(&mut can, handle, peer) };
        self.cuda().check("cuDeviceCanAccessPeer", code).map(|()| can != 0)
    }

    /// Opens the pool from which `cuMemAllocAsync` takes memory on `peer`, if it has any: it need not be the default one.
    fn open_pool_of(&self, peer: &Self) -> Result<()> {
        if !peer.has_pools() {
            return Ok(());
        }
        let (cuda, mut pool) = (self.cuda(), std::ptr::null_mut());
        let _bound = self.bind()?;
        // SAFETY: it writes one pointer there.
        let code = unsafe { (cuda.cuDeviceGetMemPool)(&mut pool, peer.handle()?) };
        cuda.check("cuDeviceGetMemPool", code)?;
        let access = Access::of_device(self.handle()?);
        // SAFETY: it is the device's current pool, which whoever has set it keeps as long as it is that. It reads one description.
        let code = unsafe { (cuda.cuMemPoolSetAccess)(pool, &access, 1) };
        cuda.check("cuMemPoolSetAccess", code)
    }
}

impl<T: Element> DeviceBuffer<T> {
    /// Queues a copy of the elements of `other`, which may be on another device of this process, into this buffer. No thread waits.
    ///
    /// `stream` is of this buffer's device, and `other_stream` of that of `other`. The copy comes behind all that both have been given so
    /// far, and what they are given from now on comes behind the copy. So both buffers may be dropped at once.
    /// [`Device::enable_peer_access`] makes copies direct.
    ///
    /// # Errors
    /// If the numbers of elements differ, a stream is not of its buffer's device, the driver refuses, or a graph is captured from a stream.
    #[doc(alias("cuMemcpyPeerAsync", "cudaMemcpyPeerAsync"))]
    pub fn copy_from_peer(&mut self, stream: &Stream, other: &Self, other_stream: &Stream) -> Result<()> {
        self.check(stream, other.len())?;
        other.check(other_stream, other.len())?;
        stream.wait_for(other_stream)?;
        if self.is_empty() {
            return Ok(());
        }
        let bytes = self.len() * size_of::<T>();
        // SAFETY: both have as many bytes, on the devices of their streams. This one is freed behind `stream`; and the other one behind
        // `other_stream`, which waits for the copy.
        unsafe { queue(stream, self.pointer(), (other.device(), other.pointer()), bytes) }?;
        other_stream.wait_for(stream).or_else(|error| {
            // Then this thread waits for the copy. If that fails too, nothing on that device is freed any more.
            stream.synchronize(longest()).map_err(|_| {
                other.device().unsettled();
                error
            })
        })
    }
}

impl Stream {
    /// Copies the elements of `from`, which may be on another device of this process, to `to`, which is on this stream's device, behind what
    /// this stream has been given; and waits for the copy. It is for tensors that are [lent](crate::DeviceSlice). What computes `from`, or
    /// has used `to`, is done before, or this stream waits for it ([`wait_for`](Self::wait_for)).
    ///
    /// Both are given back. After a time-out the copy may still come, so both are kept for good then.
    ///
    /// # Errors
    /// If the numbers of elements differ, `to` is on another device, the stream does not get to the copy before `deadline`, or a graph is
    /// captured from it.
    pub fn copy<N, M>(&self, to: N, from: M, deadline: Deadline) -> Result<(N, M)>
    where
        N: DeviceMemory,
        M: DeviceMemory<Element = N::Element>,
    {
        self.check_copy(&to, &from)?;
        if !to.is_empty() {
            // SAFETY: both stay until the copy is done, or for good.
            unsafe { self.queue_copy(&to, &from) }?;
            if let Err(error) = self.synchronize(deadline) {
                std::mem::forget((to, from));
                return Err(error);
            }
        }
        Ok((to, from))
    }

    /// Several copies as [`copy`](Self::copy), of which each is `(to, from)`, one behind the other, with one wait for all of them.
    ///
    /// # Errors
    /// As [`copy`](Self::copy). If one does not fit, none is made. If the driver refuses one, those before it are made.
    pub fn copy_all<N, M>(&self, copies: Vec<(N, M)>, deadline: Deadline) -> Result<Vec<(N, M)>>
    where
        N: DeviceMemory,
        M: DeviceMemory<Element = N::Element>,
    {
        copies.iter().try_for_each(|(to, from)| self.check_copy(to, from))?;
        let mut with_elements = copies.iter().filter(|(to, _)| !to.is_empty()).peekable();
        if with_elements.peek().is_none() {
            return Ok(copies);
        }
        let queued = with_elements.try_for_each(|(to, from)| {
            // SAFETY: both stay until the copy is done, or for good: also if the driver refuses a later one, as below.
            unsafe { self.queue_copy(to, from) }
        });
        match self.synchronize(deadline) {
            Ok(()) => queued.map(|()| copies),
            Err(error) => {
                std::mem::forget(copies);
                Err(queued.err().unwrap_or(error))
            }
        }
    }

    /// An error if `from` cannot be copied to `to` on this stream.
    fn check_copy<N, M>(&self, to: &N, from: &M) -> Result<()>
    where
        N: DeviceMemory,
        M: DeviceMemory<Element = N::Element>,
    {
        self.check_not_captured()?;
        if to.device() != self.device() {
            return Err(Error::invalid_argument(format!(
                "a copy to {:?} cannot be queued on {self:?}",
                to.device()
            )));
        }
        if to.len() != from.len() {
            let (to, from) = (to.len(), from.len());
            return Err(Error::invalid_argument(format!("{from} elements cannot be copied to {to}")));
        }
        Ok(())
    }

    /// Queues a copy that [fits](Self::check_copy).
    ///
    /// # Safety
    /// Both stay until this stream has done it.
    unsafe fn queue_copy<N, M>(&self, to: &N, from: &M) -> Result<()>
    where
        N: DeviceMemory,
        M: DeviceMemory<Element = N::Element>,
    {
        let bytes = to.len() * size_of::<N::Element>();
        // SAFETY: both have as many bytes, where their types promise. That they stay, the caller says.
        unsafe { queue(self, to.pointer(), (from.device(), from.pointer()), bytes) }
    }
}

/// Queues a copy to an address on the stream's device.
///
/// # Safety
/// There are as many bytes at both addresses, `from` on `device`, and both stay until the stream has done the copy.
unsafe fn queue(stream: &Stream, to: u64, (device, from): (&Device, u64), bytes: usize) -> Result<()> {
    let own = stream.device();
    let _bound = own.bind()?;
    let cuda = own.cuda();
    if device == own {
        // SAFETY: the caller says so.
        let code = unsafe { (cuda.cuMemcpyDtoDAsync_v2)(to, from, bytes, stream.raw()) };
        return cuda.check("cuMemcpyDtoDAsync", code);
    }
    // SAFETY: the caller says so, and both devices have their contexts.
    let code =
        unsafe { (cuda.cuMemcpyPeerAsync)(to, own.context(), from, device.context(), bytes, stream.raw()) };
    cuda.check("cuMemcpyPeerAsync", code)
}
