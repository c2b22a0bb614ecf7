//! A call with large data, after all slot headers have been seen.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::{BUFFERS, Call, ControlBlock, DONE, MemoryKind, STAGED, STAGING, Slots, TAKEN, WINDOW, Watch};
use crate::arena::Arena;
use crate::sync::{Ordering, fence};

/// The memory that this rank gives to the call.
pub(super) enum Memory<'a> {
    InPlace(&'a mut [u8]),
    OutOfPlace(&'a [u8]),
}

impl Memory<'_> {
    /// The memory that the call may change.
    fn as_mut_slice(&mut self) -> Option<&mut [u8]> {
        match self {
            Self::InPlace(memory) => Some(memory),
            Self::OutOfPlace(_) => None,
        }
    }
}

/// How the data of a call moves between ranks; the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// All ranks access each other's memory.
    Direct,
    /// In the slots.
    Small,
    /// Through the staging buffers.
    Staged,
}

/// A call of all members, in progress.
pub struct SharedOperation<'a, 'w, E> {
    control_block: &'a mut ControlBlock,
    memory: Memory<'a>,
    protocol: Protocol,
    windows: Windows,
    watch: Watch<'w, E>,
}

/// This rank's windows in a call.
pub(super) struct Windows {
    /// The first window is already staged.
    pub(super) ahead: bool,
    /// The number of the next window to take back.
    pub(super) results: u64,
}

/// A region that peers may write into. If the call does not complete, the region is cut off from them.
pub(super) struct Lent {
    arena: Arc<Arena>,
    offset: usize,
    ended: bool,
}

impl Lent {
    pub(super) fn new(arena: Arc<Arena>, offset: usize) -> Self {
        Self { arena, offset, ended: false }
    }

    /// All peers are done.
    pub(super) fn end(mut self) {
        self.ended = true;
    }

    /// The call has failed.
    pub(super) fn cut_off(mut self) -> io::Result<()> {
        self.ended = true;
        // SAFETY: the call holds the region's memory exclusively as long as this lives.
        unsafe { self.arena.cut_off(self.offset) }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        // SAFETY: the call holds the region's memory exclusively as long as this lives.
        let cut = unsafe { self.arena.cut_off(self.offset) };
        // The work has panicked: there is no caller to return the error to.
        let _ = cut;
    }
}

impl<'a, 'w, E> SharedOperation<'a, 'w, E> {
    /// Waits for all ranks' headers, does the `work`, and waits until all ranks are done.
    pub(super) fn hold<R>(
        control_block: &'a mut ControlBlock,
        memory: Memory<'a>,
        windows: Windows,
        watch: Watch<'w, E>,
        work: impl FnOnce(&mut SharedOperation<'a, 'w, E>) -> Result<R, E>,
    ) -> Result<R, E> {
        control_block.wait_for_all(&mut *watch)?;
        let out_of_place = matches!(memory, Memory::OutOfPlace(_));
        let small = |member| control_block.memory_kind(member) == MemoryKind::InSlot as u64;
        let direct = |member| match &memory {
            Memory::InPlace(memory) => control_block
                .region(member, MemoryKind::Lent)
                .is_some_and(|region| region.len() == memory.len()),
            Memory::OutOfPlace(_) => control_block.region(member, MemoryKind::Shown).is_some(),
        };
        let all = |goes: &dyn Fn(usize) -> bool| {
            (0..control_block.members())
                .all(|member| out_of_place && control_block.length(member) == 0 || goes(member))
        };
        let protocol = match all(&small) {
            true => Protocol::Small,
            false if all(&direct) => Protocol::Direct,
            false => Protocol::Staged,
        };
        let mut operation = SharedOperation { control_block, memory, protocol, windows, watch };
        let outcome = work(&mut operation)?;
        let SharedOperation { control_block, protocol, watch, .. } = operation;
        if protocol == Protocol::Direct {
            // For the fence in `withdraw`: if `work` has read what a rank wrote after it withdrew, the check below sees that. It
            // holds on processors. The language has no rule for it, because those reads are not atomic.
            fence(Ordering::Acquire);
            control_block.show(DONE, control_block.sequence);
            let mut done = control_block.await_all(DONE, control_block.sequence, &mut *watch);
            if done.is_ok() {
                // Check again. A rank that gave up while another was still combining has withdrawn its `done` and moved
                // its memory. What that other rank has combined since then may lack its part. A withdrawal after this
                // check is harmless, because no rank is combining any more.
                done = control_block.await_all(DONE, control_block.sequence, watch);
            }
            if done.is_err() {
                // From now on this rank's memory may be overwritten. A rank that has not seen this rank's `done` may
                // not have read all of it, and must not use what it reads as the call's data.
                control_block.withdraw();
            }
            done?;
        }
        Ok(outcome)
    }

    /// How the data moves between ranks.
    pub fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// This rank's index among the members.
    pub fn me(&self) -> usize {
        self.control_block.me
    }

    /// The number of members.
    pub fn members(&self) -> usize {
        self.control_block.members()
    }

    /// The call of `member`.
    pub fn call(&self, member: usize) -> Call {
        self.control_block.call_of(member)
    }

    /// The note that `member` sent with its call.
    pub fn note(&self, member: usize) -> &[u8] {
        self.control_block.in_slot(member, 0, self.control_block.note)
    }

    /// Lends the data in all slots, and this rank's memory for writing.
    ///
    /// # Panics
    /// If the protocol is [`Protocol::Direct`].
    pub fn slots<R>(&mut self, work: impl FnOnce(&Slots<'_>, &mut [u8]) -> R) -> R {
        assert_ne!(self.protocol, Protocol::Direct, "the others may be writing into it");
        let memory = self.memory.as_mut_slice().unwrap_or_default();
        work(&Slots { control_block: self.control_block }, memory)
    }

    /// Lends this rank's [`share`] of every member's memory, in the order of the members. The memory is divided among
    /// the first `owners` members in multiples of `unit`. All members must pass the same two values; see
    /// [`shared`](crate::shared) on trust.
    ///
    /// # Panics
    /// If the protocol is not [`Protocol::Direct`], or the memory is not lent for writing.
    pub fn combine<R>(&mut self, owners: usize, unit: usize, work: impl FnOnce(&mut [&mut [u8]]) -> R) -> R {
        let (control_block, own) = (&*self.control_block, self.memory.as_mut_slice());
        assert!(self.protocol == Protocol::Direct && own.is_some(), "it is not lent");
        let own = own.unwrap_or_default();
        // All regions have this length; otherwise the protocol would not be Direct.
        let share = share(own.len(), unit, owners, control_block.me);
        let mut own = Some(&mut own[share.clone()]);
        let mut shares: Vec<&mut [u8]> = (0..control_block.members())
            .filter_map(|member| {
                if member == control_block.me {
                    return own.take();
                }
                let region = control_block.region(member, MemoryKind::Lent).unwrap_or(0..0);
                // SAFETY: every member has lent this region and waits until this rank is done. Each rank accesses only
                // its own share, and shares of one length do not overlap. The regions of different members are in
                // different arenas.
                Some(unsafe {
                    control_block.members[member].lend_mut(region.start + share.start, share.len())
                })
            })
            .collect();
        work(&mut shares)
    }

    /// Lends every member's whole memory, in the order of the members, for reading.
    ///
    /// # Panics
    /// If the protocol is not [`Protocol::Direct`], or the memory is lent for writing.
    pub fn read<R>(&self, work: impl FnOnce(&[&[u8]]) -> R) -> R {
        assert!(
            self.protocol == Protocol::Direct && matches!(self.memory, Memory::OutOfPlace(_)),
            "it is not shown"
        );
        let regions: Vec<&[u8]> = (0..self.members())
            .map(|member| {
                let region = self.control_block.region(member, MemoryKind::Shown).unwrap_or(0..0);
                // SAFETY: its owner lends it for reading, and waits until this rank is done. (A rank whose call failed
                // does not wait. Then the data read is not used, because this call fails too: that rank is not done, or
                // has withdrawn.)
                unsafe { self.control_block.members[member].lend(region.start, region.len()) }
            })
            .collect();
        work(&regions)
    }

    /// Fills the next window, and publishes it.
    pub fn stage(&mut self, fill: impl FnOnce(&[u8], &mut [u8]) -> Result<(), E>) -> Result<(), E> {
        assert_eq!(self.protocol, Protocol::Staged, "the others may be writing into it");
        if std::mem::take(&mut self.windows.ahead) {
            return Ok(());
        }
        let memory = match &self.memory {
            Memory::InPlace(memory) => &**memory,
            Memory::OutOfPlace(memory) => memory,
        };
        self.control_block.stage(&mut *self.watch, |window| fill(memory, window))?;
        self.control_block.show(STAGED, self.control_block.staged);
        Ok(())
    }

    /// Lends all members' next window, in the order of the members, together with this rank's memory.
    pub fn take(&mut self, work: impl FnOnce(&[&[u8]], &mut [u8]) -> Result<(), E>) -> Result<(), E> {
        self.await_staged()?;
        // The windows do not overlap this rank's memory.
        let windows: Vec<&[u8]> = self.control_block.windows().collect();
        work(&windows, self.memory.as_mut_slice().unwrap_or_default())?;
        self.show_taken();
        Ok(())
    }

    /// Lends this rank's block of each other member's next window for writing, in the order of the members without this
    /// one, together with this rank's memory. A window has a block of `bytes` for each member. All members must pass
    /// the same `bytes`, and all must call this for the window; see [`shared`](crate::shared) on trust.
    ///
    /// # Panics
    /// If the blocks do not fit into a window.
    pub fn combine_staged(
        &mut self,
        bytes: usize,
        work: impl FnOnce(&mut [&mut [u8]], &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        assert!(bytes <= WINDOW / self.members(), "the blocks do not fit into a window");
        self.await_staged()?;
        let (control_block, start) =
            (&*self.control_block, window(self.control_block.taken) + self.control_block.me * bytes);
        let others = control_block.members.iter().enumerate().filter(|(index, _)| *index != control_block.me);
        let mut blocks: Vec<&mut [u8]> = others
            // SAFETY: the member has staged the window, and does not touch it until this rank has published it as
            // taken, which needs this borrow to end. Every other rank accesses only its own block, and blocks do not
            // overlap.
            .map(|(_, member)| unsafe { member.lend_mut(start, bytes) })
            .collect();
        work(&mut blocks, self.memory.as_mut_slice().unwrap_or_default())?;
        self.show_taken();
        Ok(())
    }

    /// Lends this rank's own window, after all ranks have combined into it, together with this rank's memory. Windows
    /// are taken back in the order in which they were staged.
    ///
    /// # Panics
    /// If the window has been filled again, or is not staged yet.
    pub fn take_back(&mut self, work: impl FnOnce(&[u8], &mut [u8]) -> Result<(), E>) -> Result<(), E> {
        let (number, staged) = (self.windows.results, self.control_block.staged);
        assert!(number < staged && staged - number <= BUFFERS as u64, "the window is another's by now");
        self.control_block.await_all(TAKEN, number + 1, &mut *self.watch)?;
        // SAFETY: all ranks have published it as taken. No rank accesses it until this rank stages it again, which has
        // not happened yet, as just checked, and needs this borrow to end.
        let window = unsafe { self.control_block.own.mapping().lend(window(number), WINDOW) };
        work(window, self.memory.as_mut_slice().unwrap_or_default())?;
        self.windows.results += 1;
        Ok(())
    }

    fn await_staged(&mut self) -> Result<(), E> {
        assert_eq!(self.protocol, Protocol::Staged, "the others may be writing into it");
        let taken = self.control_block.taken;
        assert!(self.control_block.staged > taken, "what is taken must be staged");
        self.control_block.await_all(STAGED, taken + 1, &mut *self.watch)
    }

    fn show_taken(&mut self) {
        self.control_block.taken += 1;
        self.control_block.show(TAKEN, self.control_block.taken);
    }
}

/// The offset of window `number` in each part of the control block.
fn window(number: u64) -> usize {
    STAGING + (number % BUFFERS as u64) as usize * WINDOW
}

impl ControlBlock {
    /// The kind of memory that `member` gives to this call, as a number.
    pub(super) fn memory_kind(&self, member: usize) -> u64 {
        self.field(member, 2) & 3
    }

    /// The length of the memory that `member` gives, as its header says.
    pub(super) fn length(&self, member: usize) -> usize {
        usize::try_from(self.field(member, 3)).unwrap_or(usize::MAX)
    }

    /// The range of the memory that `member` gives as `wanted`. None if it gives another kind, or if the range is not
    /// valid.
    pub(super) fn region(&self, member: usize, wanted: MemoryKind) -> Option<Range<usize>> {
        let (word, bytes) = (self.field(member, 2), self.length(member));
        let offset = usize::try_from(word & !3).ok()?;
        (self.memory_kind(member) == wanted as u64 && self.members[member].holds(offset, bytes))
            .then(|| offset..offset + bytes)
    }

    /// Fills the next window without publishing it.
    pub(super) fn stage<E>(
        &mut self,
        watch: Watch<'_, E>,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let taken = (self.staged + 1).saturating_sub(BUFFERS as u64);
        // This includes this rank: it would wait for itself.
        assert!(self.taken >= taken, "more is staged than there are buffers");
        self.await_all(TAKEN, taken, watch)?;
        // SAFETY: in this rank's own part of the control block. All ranks have taken the window's last content, and no
        // rank reads it before it is published, which needs this borrow to end.
        fill(unsafe { self.own.mapping().lend_mut(window(self.staged), WINDOW) })?;
        self.staged += 1;
        Ok(())
    }

    /// The window of each member that this rank takes next. All members have staged it.
    fn windows(&self) -> impl Iterator<Item = &[u8]> {
        let offset = window(self.taken);
        self.members.iter().map(move |member| {
            // SAFETY: in the member's part of the control block. It was published as staged, and is filled again only
            // when this rank has published it as taken, which needs this borrow of the control block to end.
            unsafe { member.lend(offset, WINDOW) }
        })
    }
}

/// The share of owner `index` when `bytes` are divided among `owners` in multiples of `unit`. The last owner gets the
/// remainder. An index beyond the owners gets nothing.
pub fn share(bytes: usize, unit: usize, owners: usize, index: usize) -> Range<usize> {
    let units = bytes / unit;
    let bound = |index: usize| match index {
        index if index >= owners => bytes,
        index => (index * (units / owners) + index.min(units % owners)) * unit,
    };
    bound(index)..bound(index + 1)
}
