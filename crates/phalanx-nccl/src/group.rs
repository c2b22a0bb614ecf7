//! One handle for host memory and for device memory.

use std::fmt;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use phalanx::{Error, ProcessGroup, Rank, ReduceOp, Result, WorldSize};

use crate::communicator::{Communicator, CommunicatorOptions, Siblings};
use crate::cuda::{Device, DeviceMemory};

/// A [`ProcessGroup`] for the memory of hosts and a [`Communicator`] for that of devices, as PyTorch's backend `cpu:gloo,cuda:nccl`:
/// where the memory is decides which of them moves it. They have one failure.
///
/// ```no_run
/// use phalanx::ReduceOp;
/// use phalanx_nccl::{Device, DeviceBuffer, DeviceGroup};
///
/// let group = phalanx::init()?;
/// let device = Device::of_local_rank(&group)?;
/// let group = DeviceGroup::new(group, &device)?;
/// let mut loss = [0.25f32]; // shared memory or TCP
/// group.all_reduce(&mut loss[..], ReduceOp::Avg)?;
/// let mut gradients = DeviceBuffer::from_slice(group.device().stream(), &[1.0f32; 1024])?; // NCCL
/// group.all_reduce(&mut gradients, ReduceOp::Avg)?;
/// # Ok::<(), phalanx::Error>(())
/// ```
#[derive(Clone)]
pub struct DeviceGroup {
    host: ProcessGroup,
    device: Communicator,
}

/// Memory of the host or of a device: what a [`DeviceGroup`] takes. Slices are the host's, and every [`DeviceMemory`] is a device's. Nothing
/// else implements it.
pub trait Place: sealed::Sealed {
    /// Combines the ranks' elements, in place.
    ///
    /// # Errors
    /// As the group's or the communicator's call.
    fn all_reduce(&mut self, group: &DeviceGroup, op: ReduceOp) -> Result<()>;

    /// Copies the root's elements to every rank.
    ///
    /// # Errors
    /// As the group's or the communicator's call.
    fn broadcast(&mut self, group: &DeviceGroup, root: Rank) -> Result<()>;

    /// Combines the ranks' elements on the root.
    ///
    /// # Errors
    /// As the group's or the communicator's call.
    fn reduce(&mut self, group: &DeviceGroup, root: Rank, op: ReduceOp) -> Result<()>;

    /// Sends the elements to a rank.
    ///
    /// # Errors
    /// As the group's or the communicator's call.
    fn send(&mut self, group: &DeviceGroup, peer: Rank) -> Result<()>;

    /// Receives elements of a rank.
    ///
    /// # Errors
    /// As the group's or the communicator's call.
    fn recv(&mut self, group: &DeviceGroup, peer: Rank) -> Result<()>;
}

mod sealed {
    pub trait Sealed {}

    impl<T: phalanx::Element> Sealed for [T] {}
    impl<M: crate::cuda::DeviceMemory> Sealed for M {}
}

impl<T: phalanx::Element> Place for [T] {
    fn all_reduce(&mut self, group: &DeviceGroup, op: ReduceOp) -> Result<()> {
        group.host.all_reduce(self, op)
    }

    fn broadcast(&mut self, group: &DeviceGroup, root: Rank) -> Result<()> {
        group.host.broadcast(self, root)
    }

    fn reduce(&mut self, group: &DeviceGroup, root: Rank, op: ReduceOp) -> Result<()> {
        group.host.reduce(self, root, op)
    }

    fn send(&mut self, group: &DeviceGroup, peer: Rank) -> Result<()> {
        group.host.send(self, peer)
    }

    fn recv(&mut self, group: &DeviceGroup, peer: Rank) -> Result<()> {
        group.host.recv(self, peer)
    }
}

impl<M: DeviceMemory> Place for M {
    fn all_reduce(&mut self, group: &DeviceGroup, op: ReduceOp) -> Result<()> {
        group.device.all_reduce(self, op)
    }

    fn broadcast(&mut self, group: &DeviceGroup, root: Rank) -> Result<()> {
        group.device.broadcast(self, root)
    }

    fn reduce(&mut self, group: &DeviceGroup, root: Rank, op: ReduceOp) -> Result<()> {
        group.device.reduce(self, root, op)
    }

    fn send(&mut self, group: &DeviceGroup, peer: Rank) -> Result<()> {
        group.device.send(self, peer)
    }

    fn recv(&mut self, group: &DeviceGroup, peer: Rank) -> Result<()> {
        group.device.recv(self, peer)
    }
}

impl DeviceGroup {
    /// The group `host`, with a communicator for `device`. Every rank must call it, as [`Communicator::new`].
    ///
    /// # Errors
    /// As [`Communicator::new`].
    pub fn new(host: ProcessGroup, device: &Device) -> Result<Self> {
        Self::with_options(host, device, CommunicatorOptions::default())
    }

    /// As [`new`](Self::new), with options for this communicator and for those of its parts.
    ///
    /// # Errors
    /// As [`Communicator::new`].
    pub fn with_options(host: ProcessGroup, device: &Device, options: CommunicatorOptions) -> Result<Self> {
        let device = Communicator::with_options(&host, device, options)?;
        Ok(Self { host, device })
    }

    /// A group of `devices`, all of this process, without a launcher and without a store: NCCL's `ncclCommInitAll`. The first device is that
    /// of rank 0, and so on.
    ///
    /// Each rank needs a thread of its own, because its calls wait for those of the others:
    ///
    /// ```no_run
    /// use phalanx::ReduceOp;
    /// use phalanx_nccl::{Device, DeviceBuffer, DeviceGroup};
    ///
    /// let groups = DeviceGroup::of_devices(&Device::all()?)?;
    /// let sum = |group: &DeviceGroup| -> phalanx::Result<()> {
    ///     let mut sums = DeviceBuffer::from_slice(group.device().stream(), &[1.0f32; 1024])?;
    ///     group.all_reduce(&mut sums, ReduceOp::Sum)
    /// };
    /// std::thread::scope(|scope| {
    ///     let ranks: Vec<_> = groups.iter().map(|group| scope.spawn(move || sum(group))).collect();
    ///     ranks.into_iter().try_for_each(|rank| rank.join().expect("no rank panics"))
    /// })?;
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    ///
    /// One thread may drop all of them: the last drop waits for the end of all.
    ///
    /// # Errors
    /// If there is no device, or one of them twice; and as [`Communicator::new`].
    #[doc(alias = "ncclCommInitAll")]
    pub fn of_devices(devices: &[Device]) -> Result<Vec<Self>> {
        let options = CommunicatorOptions::default();
        Self::of_devices_with_options(devices, phalanx::group::DEFAULT_TIMEOUT, options)
    }

    /// As [`of_devices`](Self::of_devices), with the time-out of the groups, which limits this function too, and options for the communicators.
    ///
    /// # Errors
    /// As [`of_devices`](Self::of_devices).
    pub fn of_devices_with_options(
        devices: &[Device],
        timeout: Duration,
        options: CommunicatorOptions,
    ) -> Result<Vec<Self>> {
        if let Some((_, twice)) =
            devices.iter().enumerate().find(|(at, device)| devices[..*at].contains(*device))
        {
            return Err(Error::invalid_argument(format!("{twice:?} is there twice"))
                .with_remedy("name each device once: NCCL has one rank for each"));
        }
        let world = WorldSize::new(u32::try_from(devices.len()).unwrap_or(u32::MAX))?;
        let (hosts, siblings) = (ProcessGroup::in_process(world)?, Arc::new(Siblings::default()));
        thread::scope(|scope| {
            let start = |(host, device): (ProcessGroup, &Device)| {
                let (device, siblings) = (device.clone(), siblings.clone());
                let thread = thread::Builder::new().name(format!("phalanx-nccl-new-{}", host.rank()));
                thread.spawn_scoped(scope, move || -> Result<Self> {
                    let host = host.with_timeout(timeout);
                    let device = Communicator::among(&host, &device, options, Some(siblings))?;
                    Ok(Self { host, device })
                })
            };
            // All are started before one is waited for. Without its thread a rank leaves the group, which ends the wait of the others.
            let ranks: Vec<_> = hosts.into_iter().zip(devices).map(start).collect();
            let made = ranks.into_iter().map(|rank| match rank {
                Ok(rank) => rank.join().unwrap_or_else(|panic| resume_unwind(panic)),
                Err(cause) => Err(Error::environment(format!("no thread to connect a device: {cause}"))),
            });
            // All are waited for before an error is returned.
            made.collect::<Vec<Result<Self>>>().into_iter().collect()
        })
    }

    /// The group for the memory of hosts.
    pub fn host(&self) -> &ProcessGroup {
        &self.host
    }

    /// The communicator for the memory of devices.
    pub fn device(&self) -> &Communicator {
        &self.device
    }

    /// Combines the ranks' elements, in place on every rank.
    ///
    /// # Errors
    /// As the group's or the communicator's call.
    pub fn all_reduce<P: Place + ?Sized>(&self, memory: &mut P, op: ReduceOp) -> Result<()> {
        memory.all_reduce(self, op)
    }

    /// Copies the root's elements to every rank.
    ///
    /// # Errors
    /// As the group's or the communicator's call.
    pub fn broadcast<P: Place + ?Sized>(&self, memory: &mut P, root: Rank) -> Result<()> {
        memory.broadcast(self, root)
    }

    /// Combines the ranks' elements on the root.
    ///
    /// # Errors
    /// As the group's or the communicator's call.
    pub fn reduce<P: Place + ?Sized>(&self, memory: &mut P, root: Rank, op: ReduceOp) -> Result<()> {
        memory.reduce(self, root, op)
    }

    /// Sends the elements to `peer`.
    ///
    /// # Errors
    /// As the group's or the communicator's call.
    pub fn send<P: Place + ?Sized>(&self, memory: &mut P, peer: Rank) -> Result<()> {
        memory.send(self, peer)
    }

    /// Receives elements of `peer`.
    ///
    /// # Errors
    /// As the group's or the communicator's call.
    pub fn recv<P: Place + ?Sized>(&self, memory: &mut P, peer: Rank) -> Result<()> {
        memory.recv(self, peer)
    }

    /// A group of these `ranks`, with a communicator of its own; None on a rank that is not in the list. Every rank must call it, as
    /// [`ProcessGroup::new_group`].
    ///
    /// A communicator has an identity of its own, and is not split off the first one with `ncclCommSplit`: that would have every rank of
    /// this group take part, members or not, and tie the failures of both together.
    ///
    /// # Errors
    /// As [`ProcessGroup::new_group`] and [`Communicator::new`].
    pub fn new_group(&self, ranks: &[Rank]) -> Result<Option<Self>> {
        self.host.new_group(ranks)?.map(|host| self.part(host)).transpose()
    }

    /// Splits the group by `color`, as [`ProcessGroup::split`], with a communicator for each part.
    ///
    /// # Errors
    /// As [`ProcessGroup::split`] and [`Communicator::new`].
    #[doc(alias = "ncclCommSplit")]
    pub fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Self>> {
        self.host.split(color, key)?.map(|host| self.part(host)).transpose()
    }

    fn part(&self, host: ProcessGroup) -> Result<Self> {
        let (device, options) = (self.device.device(), self.device.options());
        let device = Communicator::among(&host, device, options, self.device.siblings())?;
        Ok(Self { host, device })
    }
}

impl fmt::Debug for DeviceGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceGroup({:?}, {:?})", self.host, self.device)
    }
}
