//! One handle for one group after another.
//!
//! A `Ddp`, its reducer, what counts its bytes, and layers that exchange statistics have clones of one handle. So an
//! elastic job changes the group in one place. Only the reducer is told besides, because the memory of its buckets is
//! the old group's.

use std::fmt;
use std::ptr;
use std::sync::{Arc, Weak};

use parking_lot::RwLock;

use super::{Communicator, Inner, WeakHandle, Work, forward_to_group};
use crate::buffer::Buffer;
use crate::caller::Caller;
use crate::collective::ReduceOp;
use crate::error::Result;
use crate::rank::Rank;

/// A handle that leads to one group after another: in an [elastic](crate::elastic) job each round has a group of its own.
/// Clones lead to the same group, so that whatever calls collectives together goes over together.
///
/// ```
/// use phalanx::{Communicator, GroupHandle, ProcessGroup, WorldSize};
/// let handle = GroupHandle::new(ProcessGroup::alone()?); // until there is another
/// let layers = handle.clone();
/// let group = ProcessGroup::in_process(WorldSize::new(2)?)?.remove(0);
/// handle.rebind(group);
/// assert_eq!(layers.world_size().get(), 2);
/// # Ok::<(), phalanx::Error>(())
/// ```
#[derive(Clone)]
pub struct GroupHandle {
    group: Arc<RwLock<Arc<dyn Communicator>>>,
    /// The user's call that the collectives of this clone are parts of.
    pub(crate) caller: Option<Caller>,
}

impl GroupHandle {
    /// A handle to `group`.
    pub fn new<C: Communicator + 'static>(group: C) -> Self {
        Self { group: Arc::new(RwLock::new(Arc::new(group))), caller: None }
    }

    /// Has this handle, and all its clones, lead to `group` from now on.
    ///
    /// Not inside [`JoinGroup::join`](crate::join::JoinGroup::join), whose ranks would miss each other.
    pub fn rebind<C: Communicator + 'static>(&self, group: C) {
        // The last handle of a group waits for what it has started.
        let before = std::mem::replace(&mut *self.group.write(), Arc::new(group));
        drop(before);
    }

    /// As [`ProcessGroup::in_call`](crate::ProcessGroup::in_call).
    pub fn in_call(&self, caller: Caller) -> Self {
        self.as_part_of(self.caller.or(Some(caller)))
    }

    /// A clone for this call in place of its own.
    pub(crate) fn as_part_of(&self, caller: Option<Caller>) -> Self {
        Self { group: self.group.clone(), caller }
    }

    /// What gives this clone again as long as there is one.
    pub(crate) fn downgrade(&self) -> impl Fn() -> Option<Self> + Send + Sync + use<> {
        let (group, caller) = (Arc::downgrade(&self.group), self.caller);
        move || Some(Self { group: group.upgrade()?, caller })
    }

    fn group(&self) -> Arc<dyn Communicator> {
        self.group.read().clone()
    }

    /// The group as its collectives are called: in this clone's call.
    fn called(&self) -> Arc<dyn Communicator> {
        match self.caller {
            Some(caller) => self.group().in_call(caller),
            None => self.group(),
        }
    }
}

impl Communicator for GroupHandle {
    forward_to_group!(self => self.group());

    fn in_call(&self, caller: Caller) -> Arc<dyn Communicator> {
        Arc::new(self.in_call(caller))
    }

    fn active_ranks(&self) -> usize {
        self.group().active_ranks()
    }

    fn uneven_joins(&self) -> u64 {
        self.group().uneven_joins()
    }

    fn weak_handle(&self) -> Option<WeakHandle> {
        let handle = self.downgrade();
        Some(Arc::new(move || -> Option<Arc<dyn Communicator>> { Some(Arc::new(handle()?)) }))
    }

    fn all_reduce_async(&self, buffer: Buffer, op: ReduceOp) -> Result<Work> {
        self.called().all_reduce_async(buffer, op)
    }

    fn broadcast_async(&self, buffer: Buffer, root: Rank) -> Result<Work> {
        self.called().broadcast_async(buffer, root)
    }

    fn reduce_scatter_v_async(&self, buffer: Buffer, counts: &[usize], op: ReduceOp) -> Result<Work> {
        self.called().reduce_scatter_v_async(buffer, counts, op)
    }

    fn all_gather_v_in_place_async(&self, buffer: Buffer, counts: &[usize]) -> Result<Work> {
        self.called().all_gather_v_in_place_async(buffer, counts)
    }
}

/// The group to which a handle led. The group may end meanwhile.
#[derive(Debug)]
pub(crate) struct Binding(Option<Weak<Inner>>);

impl Binding {
    /// The group to which `group` leads, or `group` itself.
    pub fn of(group: &dyn Communicator) -> Self {
        Self(group.process_group().map(|group| Arc::downgrade(&group.inner)))
    }

    /// Whether `group` leads to another group by now. False for a communicator that is neither a group nor a handle.
    pub fn is_other(&self, group: &dyn Communicator) -> bool {
        match (&self.0, group.process_group()) {
            (Some(before), Some(now)) => !ptr::eq(before.as_ptr(), Arc::as_ptr(&now.inner)),
            (None, _) | (_, None) => false,
        }
    }
}

impl fmt::Debug for GroupHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GroupHandle(rank {} of {})", self.rank(), self.world_size())
    }
}
