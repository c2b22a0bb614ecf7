//! A call with large data, after all slot headers have been seen.
//!
//! # A late rank does no harm
//!
//! A rank that was frozen in a collective may wake after the others have given up, and write into memory that they use
//! for something else by then. So before a rank returns the error, it moves its data to other pages, at the same
//! addresses: the late rank writes into pages that nobody uses. It also withdraws its report that it is done (`done` is
//! 0). The late rank's call reads that, and fails without a result.
//!
//! Staging buffers stay where they are. Ranks read and write only windows that were reported as filled, and a rank that
//! has failed fills no window again.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::windows::Windows;
use super::{
    Call, ControlBlock, DONE, Division, LENGTH, MemoryKind, Needs, OFFSET, REFUSED, Slots, Watch, offered,
};
use crate::arena::{Arena, Mapping};
use crate::sync::{Ordering, fence};

/// Bytes that are copied at once out of another process. Between two copies this rank looks whether to go on.
pub(super) const COPIED: usize = 32 << 20;

/// The memory that this rank gives to the call.
pub(super) enum Memory<'a> {
    InPlace(&'a mut [u8]),
    OutOfPlace(&'a [u8]),
}

impl Memory<'_> {
    /// The memory that the call may change.
    pub(super) fn as_mut_slice(&mut self) -> Option<&mut [u8]> {
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
    /// Out of each other's processes.
    Copied,
    /// Through the staging buffers.
    Staged,
}

/// A call of all members, in progress.
pub struct SharedOperation<'a, 'w, E> {
    pub(super) control_block: &'a mut ControlBlock,
    pub(super) memory: Memory<'a>,
    pub(super) protocol: Protocol,
    /// Whether all members have given the same division.
    divides_alike: bool,
    /// Whether all members read windows, and none writes into them.
    pub(super) reads_windows: bool,
    pub(super) windows: Windows,
    /// Whether the windows of this call are to take turns with all buffers.
    pub(super) rotates: bool,
    /// Whether this rank could not copy out of another's process.
    refuses: bool,
    pub(super) watch: Watch<'w, E>,
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
    /// Waits for all ranks' headers, does the `work`, and waits until all ranks are done. If members have offered their memory, and divide
    /// alike, they copy it if one brings `copied_from` bytes and more.
    pub(super) fn hold<R>(
        control_block: &'a mut ControlBlock,
        (memory, copied_from): (Memory<'a>, Option<usize>),
        windows: Windows,
        watch: Watch<'w, E>,
        work: impl FnOnce(&mut SharedOperation<'a, 'w, E>) -> Result<R, E>,
    ) -> Result<R, E> {
        control_block.wait_for_all(&mut *watch)?;
        control_block.free_windows_before(windows.first);
        let (divides_alike, reads_windows) = (control_block.divides_alike(), control_block.reads_windows());
        let out_of_place = matches!(memory, Memory::OutOfPlace(_));
        let small = |member| control_block.memory_kind(member) == MemoryKind::InSlot as u64;
        let direct = |member| match &memory {
            Memory::InPlace(memory) => {
                let region = control_block.region(member, MemoryKind::Lent);
                divides_alike && region.is_some_and(|region| region.len() == memory.len())
            }
            Memory::OutOfPlace(_) => control_block.region(member, MemoryKind::Shown).is_some(),
        };
        let all = |goes: &dyn Fn(usize) -> bool| {
            (0..control_block.members())
                .all(|member| out_of_place && control_block.length(member) == 0 || goes(member))
        };
        let is_long = copied_from.is_some_and(|least| {
            (0..control_block.members()).any(|member| control_block.length(member) >= least)
        });
        let protocol = match all(&small) {
            true => Protocol::Small,
            false if all(&direct) => Protocol::Direct,
            // Members may make one call in place and not in place: then the same block is elsewhere in their memory.
            false if is_long && divides_alike && all(&|member| control_block.offered(member) != 0) => {
                Protocol::Copied
            }
            false => Protocol::Staged,
        };
        let refuses = control_block.refuses;
        let mut operation = SharedOperation {
            control_block,
            memory,
            protocol,
            divides_alike,
            reads_windows,
            windows,
            rotates: false,
            refuses,
            watch,
        };
        let outcome = work(&mut operation)?;
        let SharedOperation { control_block, protocol, refuses, watch, .. } = operation;
        if protocol == Protocol::Small {
            control_block.take_slot();
        }
        if refuses && protocol == Protocol::Copied {
            // Published with `done`.
            control_block.own.mapping().word(REFUSED).store(control_block.sequence, Ordering::Relaxed);
        }
        if matches!(protocol, Protocol::Direct | Protocol::Copied) {
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
        if protocol == Protocol::Copied && control_block.is_refused() {
            control_block.copies = false;
        }
        Ok(outcome)
    }

    /// How the data moves between ranks.
    pub fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// How the members divide the work. None if they do not: the call is not in place, or they have given different ones.
    pub(super) fn division(&self) -> Option<Division> {
        Division::of(self.control_block.own_header[2]).filter(|_| self.divides_alike)
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

    /// Bytes of the memory that `member` gives, as it says.
    pub fn length(&self, member: usize) -> usize {
        self.control_block.length(member)
    }

    /// Lends the data in all slots, and this rank's memory for writing.
    ///
    /// # Panics
    /// If the protocol is [`Protocol::Direct`].
    pub fn slots<R>(&mut self, work: impl FnOnce(&Slots<'_>, &mut [u8]) -> R) -> R {
        assert_ne!(self.protocol, Protocol::Direct, "the others may be writing into it");
        let memory = self.memory.as_mut_slice().unwrap_or_default();
        work(&Slots { control_block: self.control_block, needs: Needs::All }, memory)
    }

    /// Lends this rank's [`share`] of every member's memory, in the order of the members, as the call's [`Division`] says.
    ///
    /// # Panics
    /// If the protocol is not [`Protocol::Direct`], or the memory is not lent for writing.
    pub fn combine<R>(&mut self, work: impl FnOnce(&mut [&mut [u8]]) -> R) -> R {
        let division = self.division();
        let (control_block, own) = (&*self.control_block, self.memory.as_mut_slice());
        assert!(self.protocol == Protocol::Direct && own.is_some(), "it is not lent");
        // Where memory is lent there is a division, and without one nothing would be shared.
        let (own, Some(division)) = (own.unwrap_or_default(), division) else { return work(&mut []) };
        // All regions have this length, and all members this division; otherwise the protocol would not be Direct.
        let share = share(own.len(), division.unit, division.owners, control_block.me);
        let mut own = Some(&mut own[share.clone()]);
        let shares = (0..control_block.members()).filter_map(|member| {
            if member == control_block.me {
                return own.take();
            }
            let region = control_block.region(member, MemoryKind::Lent).unwrap_or(0..0);
            // SAFETY: every member has lent this region and waits until this rank is done. Each rank accesses only
            // its own share, and shares of one length and division do not overlap, because all members have
            // different indices. The regions of different members are in different arenas. Both is what the claims
            // to the arenas ensure.
            Some(unsafe { control_block.members[member].lend_mut(region.start + share.start, share.len()) })
        });
        with_all(shares, work)
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

    /// Copies a part of `member`'s memory, from byte `at` on, out of its process. If this cannot be done, here or at an earlier time in this
    /// call, nothing is copied, and the call has no result; see [`ControlBlock::out_of_place`].
    ///
    /// The member keeps its memory until this rank is done. If its call fails before, this one fails, too, whatever has been copied.
    ///
    /// # Panics
    /// If the protocol is not [`Protocol::Copied`], or the member has not so much memory.
    pub fn copy(&mut self, member: usize, at: usize, into: &mut [u8]) -> Result<(), E> {
        assert_eq!(self.protocol, Protocol::Copied, "it is not offered");
        copy(self.control_block, (member, at), into, &mut self.refuses, &mut *self.watch)
    }

    /// Copies a part of `member`'s memory, as [`copy`](Self::copy) does, to the same place in this rank's memory.
    ///
    /// # Panics
    /// As [`copy`](Self::copy), and if this rank's memory is not given for writing, or has no such part.
    pub fn copy_in_place(&mut self, member: usize, part: Range<usize>) -> Result<(), E> {
        assert_eq!(self.protocol, Protocol::Copied, "it is not offered");
        let into = &mut self.memory.as_mut_slice().unwrap_or_default()[part.clone()];
        copy(self.control_block, (member, part.start), into, &mut self.refuses, &mut *self.watch)
    }
}

/// Copies `member`'s memory from byte `at` on, unless this rank `refuses`, or has to from now on.
fn copy<E>(
    control_block: &ControlBlock,
    (member, at): (usize, usize),
    into: &mut [u8],
    refuses: &mut bool,
    watch: Watch<'_, E>,
) -> Result<(), E> {
    let has_all = at.checked_add(into.len()).is_some_and(|end| end <= control_block.length(member));
    assert!(has_all, "beyond the member's memory");
    let first = control_block.offered(member).saturating_add(at as u64);
    for (index, piece) in into.chunks_mut(COPIED).enumerate() {
        if *refuses {
            break;
        }
        if index > 0 {
            watch(member, None)?;
        }
        let address = first.saturating_add((index * COPIED) as u64);
        *refuses = control_block.members[member].read_owner(address, piece).is_err();
    }
    Ok(())
}

impl ControlBlock {
    /// Where `member` offers its memory in its process; 0 if it does not.
    fn offered(&self, member: usize) -> u64 {
        self.members[member].word(offered(self.meetings)).load(Ordering::Relaxed)
    }

    /// Whether a member has refused to copy in this rank's latest call, which all have done.
    fn is_refused(&self) -> bool {
        let refused = |member: &Arc<Mapping>| member.word(REFUSED).load(Ordering::Relaxed);
        self.members.iter().any(|member| refused(member) == self.sequence)
    }

    /// The kind of memory that `member` gives to this call, as a number.
    pub(super) fn memory_kind(&self, member: usize) -> u64 {
        self.field(member, 2) & 3
    }

    /// Whether all members have given the same division.
    fn divides_alike(&self) -> bool {
        let division = |member| self.field(member, 2) & Division::MASK;
        (0..self.members()).all(|member| division(member) == division(self.me))
    }

    /// Whether no member combines windows. It does not matter whether they make the call in place.
    fn reads_windows(&self) -> bool {
        let reads = |division: Division| !division.combines_windows;
        (0..self.members()).all(|member| Division::of(self.field(member, 2)).is_none_or(reads))
    }

    /// Whether all members have passed the same number of windows before this call.
    pub(super) fn counts_windows_alike(&self) -> bool {
        let first = |member| self.field(member, 3) & !LENGTH;
        (0..self.members()).all(|member| first(member) == first(self.me))
    }

    /// The length of the memory that `member` gives, as its header says.
    pub(super) fn length(&self, member: usize) -> usize {
        usize::try_from(self.field(member, 3) & LENGTH).unwrap_or(usize::MAX)
    }

    /// The range of the memory that `member` gives as `wanted`. None if it gives another kind, or if the range is not
    /// valid.
    pub(super) fn region(&self, member: usize, wanted: MemoryKind) -> Option<Range<usize>> {
        let (word, bytes) = (self.field(member, 2), self.length(member));
        let offset = usize::try_from(word & OFFSET).ok()?;
        (self.memory_kind(member) == wanted as u64 && self.members[member].holds(offset, bytes))
            .then(|| offset..offset + bytes)
    }
}

/// Calls `work` with these slices. If they are few it does not allocate, which would take as long as a small call.
pub fn with_all<'a, R>(
    mut slices: impl Iterator<Item = &'a mut [u8]>,
    work: impl FnOnce(&mut [&'a mut [u8]]) -> R,
) -> R {
    let (mut few, mut count): ([&mut [u8]; 8], _) = (Default::default(), 0);
    while let Some(slice) = slices.next() {
        if count == few.len() {
            let more = few.into_iter().chain([slice]).chain(slices);
            return work(&mut more.collect::<Vec<_>>());
        }
        few[count] = slice;
        count += 1;
    }
    work(&mut few[..count])
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
