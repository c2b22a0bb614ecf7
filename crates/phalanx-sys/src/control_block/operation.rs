//! A call with many bytes, once every rank has given its word on it.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::{BUFFERS, Brings, Call, ControlBlock, DONE, STAGED, STAGING, Slots, TAKEN, WINDOW, Watch};
use crate::arena::Arena;

/// What this rank brings.
pub(super) enum Memory<'a> {
    InPlace(&'a mut [u8]),
    Apart(&'a [u8]),
}

impl Memory<'_> {
    /// What the call may change.
    fn as_mut_slice(&mut self) -> Option<&mut [u8]> {
        match self {
            Self::InPlace(memory) => Some(memory),
            Self::Apart(_) => None,
        }
    }
}

/// How the bytes of a call get from rank to rank; the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// Everybody reaches everybody's memory.
    Direct,
    /// In the slots.
    Small,
    /// Through the staging buffers.
    Staged,
}

/// A call of all members, under way.
pub struct SharedOperation<'a, 'w, E> {
    control_block: &'a mut ControlBlock,
    memory: Memory<'a>,
    protocol: Protocol,
    windows: Windows,
    watch: Watch<'w, E>,
}

/// This rank's windows in a call.
pub(super) struct Windows {
    /// The first one is staged already.
    pub(super) ahead: bool,
    /// The next one that is taken back.
    pub(super) results: u64,
}

/// A region that peers may write into. Unless the call comes to its end, it is cut off from them.
pub(super) struct Lent {
    arena: Arc<Arena>,
    offset: usize,
    ended: bool,
}

impl Lent {
    pub(super) fn new(arena: Arc<Arena>, offset: usize) -> Self {
        Self { arena, offset, ended: false }
    }

    /// Every peer has said that it is done.
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
        // The work has panicked, and there is nobody to tell.
        let _ = cut;
    }
}

impl<'a, 'w, E> SharedOperation<'a, 'w, E> {
    /// Waits for everybody's word, does the `work`, and waits until everybody is done.
    pub(super) fn hold<R>(
        control_block: &'a mut ControlBlock,
        memory: Memory<'a>,
        windows: Windows,
        watch: Watch<'w, E>,
        work: impl FnOnce(&mut SharedOperation<'a, 'w, E>) -> Result<R, E>,
    ) -> Result<R, E> {
        control_block.meet(&mut *watch)?;
        let apart = matches!(memory, Memory::Apart(_));
        let small = |member| control_block.brings(member) == Brings::Small as u64;
        let direct = |member| match &memory {
            Memory::InPlace(memory) => {
                control_block.region(member, Brings::Lent).is_some_and(|region| region.len() == memory.len())
            }
            Memory::Apart(_) => control_block.region(member, Brings::Shown).is_some(),
        };
        let all = |goes: &dyn Fn(usize) -> bool| {
            (0..control_block.members())
                .all(|member| apart && control_block.length(member) == 0 || goes(member))
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
            control_block.show(DONE, control_block.sequence);
            let mut done = control_block.await_all(DONE, control_block.sequence, &mut *watch);
            if done.is_ok() {
                // Once more. Who gave up while another still combined has taken its word back and moved its memory, so what
                // that other has combined since, for all, may lack its part. Who takes it back after this look harms
                // nobody: nobody combines any more.
                done = control_block.await_all(DONE, control_block.sequence, watch);
            }
            if done.is_err() {
                // From now on this rank's memory may hold anything. Whoever has not seen it done has not read it to the end
                // either, and must not take what it reads for the call's.
                control_block.withdraw();
            }
            done?;
        }
        Ok(outcome)
    }

    /// How the bytes get from rank to rank.
    pub fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// This rank's place among the members.
    pub fn me(&self) -> usize {
        self.control_block.me
    }

    /// The number of members.
    pub fn members(&self) -> usize {
        self.control_block.members()
    }

    /// What `member` calls.
    pub fn call(&self, member: usize) -> Call {
        self.control_block.call_of(member)
    }

    /// The note that `member` sent with its call.
    pub fn note(&self, member: usize) -> &[u8] {
        self.control_block.in_slot(member, 0, self.control_block.note)
    }

    /// What all said in their slots, and what this rank brought, to be changed.
    ///
    /// # Panics
    /// If the memory is direct.
    pub fn slots<R>(&mut self, work: impl FnOnce(&Slots<'_>, &mut [u8]) -> R) -> R {
        assert_ne!(self.protocol, Protocol::Direct, "the others may be writing into it");
        let memory = self.memory.as_mut_slice().unwrap_or_default();
        work(&Slots { control_block: self.control_block }, memory)
    }

    /// Lends this rank's [`share`] of every member's memory, in the order of the members. The memory is dealt out to the
    /// first `owners` members in multiples of `unit`, on both of which all must agree: a process that does not keeps to
    /// no protocol; see [`shared`](crate::shared) on trust.
    ///
    /// # Panics
    /// If the memory is not direct, or not lent for writing.
    pub fn combine<R>(&mut self, owners: usize, unit: usize, work: impl FnOnce(&mut [&mut [u8]]) -> R) -> R {
        let (control_block, own) = (&*self.control_block, self.memory.as_mut_slice());
        assert!(self.protocol == Protocol::Direct && own.is_some(), "it is not lent");
        let own = own.unwrap_or_default();
        // All regions have this length, or the way would be another.
        let share = share(own.len(), unit, owners, control_block.me);
        let mut own = Some(&mut own[share.clone()]);
        let mut shares: Vec<&mut [u8]> = (0..control_block.members())
            .filter_map(|member| {
                if member == control_block.me {
                    return own.take();
                }
                let region = control_block.region(member, Brings::Lent).unwrap_or(0..0);
                // SAFETY: every member has lent this region and waits until this one is done; each touches the share of
                // its own number, and shares of one length do not overlap. The regions of different members lie in
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
    /// If the memory is not direct, or is lent for writing.
    pub fn read<R>(&self, work: impl FnOnce(&[&[u8]]) -> R) -> R {
        assert!(
            self.protocol == Protocol::Direct && matches!(self.memory, Memory::Apart(_)),
            "it is not shown"
        );
        let regions: Vec<&[u8]> = (0..self.members())
            .map(|member| {
                let region = self.control_block.region(member, Brings::Shown).unwrap_or(0..0);
                // SAFETY: its owner lends it for reading, and waits until this rank is done. (One whose call failed does
                // not wait. Then what is read is of no use, and this call ends with an error too: that member is not done,
                // or has withdrawn.)
                unsafe { self.control_block.members[member].lend(region.start, region.len()) }
            })
            .collect();
        work(&regions)
    }

    /// Fills the next window, and shows it to the others.
    pub fn stage(&mut self, fill: impl FnOnce(&[u8], &mut [u8]) -> Result<(), E>) -> Result<(), E> {
        assert_eq!(self.protocol, Protocol::Staged, "the others may be writing into it");
        if std::mem::take(&mut self.windows.ahead) {
            return Ok(());
        }
        let memory = match &self.memory {
            Memory::InPlace(memory) => &**memory,
            Memory::Apart(memory) => memory,
        };
        self.control_block.stage(&mut *self.watch, |window| fill(memory, window))?;
        self.control_block.show(STAGED, self.control_block.staged);
        Ok(())
    }

    /// Lends everybody's next window, in the order of the members, with what this rank brought.
    pub fn take(&mut self, work: impl FnOnce(&[&[u8]], &mut [u8]) -> Result<(), E>) -> Result<(), E> {
        self.await_staged()?;
        // The windows are no part of what this rank brought.
        let windows: Vec<&[u8]> = self.control_block.windows().collect();
        work(&windows, self.memory.as_mut_slice().unwrap_or_default())?;
        self.show_taken();
        Ok(())
    }

    /// Lends this rank's block of everybody else's next window, in the order of the members without this one, to be
    /// changed, with what this rank brought. A window has a block of `bytes` for each member, on which all must agree, as
    /// all must call this for the window; see [`shared`](crate::shared) on trust.
    ///
    /// # Panics
    /// If so many blocks do not fit into a window.
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
            // SAFETY: the member has staged the window, and leaves it alone until this rank has shown it as taken, which needs
            // this borrow to end. Every other rank touches the block of its own number, and blocks do not overlap.
            .map(|(_, member)| unsafe { member.lend_mut(start, bytes) })
            .collect();
        work(&mut blocks, self.memory.as_mut_slice().unwrap_or_default())?;
        self.show_taken();
        Ok(())
    }

    /// Lends this rank's own window back, when everybody has combined into it, with what this rank brought. Windows come
    /// back in the order in which they were staged.
    ///
    /// # Panics
    /// If the window has been filled again, or is not staged yet.
    pub fn take_back(&mut self, work: impl FnOnce(&[u8], &mut [u8]) -> Result<(), E>) -> Result<(), E> {
        let (number, staged) = (self.windows.results, self.control_block.staged);
        assert!(number < staged && staged - number <= BUFFERS as u64, "the window is another's by now");
        self.control_block.await_all(TAKEN, number + 1, &mut *self.watch)?;
        // SAFETY: everybody has shown it as taken, and nobody touches it until this rank stages it again, which has not
        // happened yet, as just checked, and needs this borrow to end.
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

/// Where window `number` lies in each part of the control block.
fn window(number: u64) -> usize {
    STAGING + (number % BUFFERS as u64) as usize * WINDOW
}

impl ControlBlock {
    /// What `member` brings to this call, by its number.
    pub(super) fn brings(&self, member: usize) -> u64 {
        self.field(member, 2) & 3
    }

    /// The bytes of what `member` brings, as it says.
    pub(super) fn length(&self, member: usize) -> usize {
        usize::try_from(self.field(member, 3)).unwrap_or(usize::MAX)
    }

    /// Where the memory is that `member` brings as `wanted`. None if it brings none, or none that it can have.
    pub(super) fn region(&self, member: usize, wanted: Brings) -> Option<Range<usize>> {
        let (word, bytes) = (self.field(member, 2), self.length(member));
        let offset = usize::try_from(word & !3).ok()?;
        (self.brings(member) == wanted as u64 && self.members[member].holds(offset, bytes))
            .then(|| offset..offset + bytes)
    }

    /// Fills the next window, which is not shown yet.
    pub(super) fn stage<E>(
        &mut self,
        watch: Watch<'_, E>,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let taken = (self.staged + 1).saturating_sub(BUFFERS as u64);
        // This rank too: it would wait for itself.
        assert!(self.taken >= taken, "more is staged than there are buffers");
        self.await_all(TAKEN, taken, watch)?;
        // SAFETY: in the own part of the control block. Everybody has taken what was in the window, and nobody looks at it before it
        // is shown, which needs this borrow to end.
        fill(unsafe { self.own.mapping().lend_mut(window(self.staged), WINDOW) })?;
        self.staged += 1;
        Ok(())
    }

    /// Everybody's window that this rank takes next, which all have staged.
    fn windows(&self) -> impl Iterator<Item = &[u8]> {
        let offset = window(self.taken);
        self.members.iter().map(move |member| {
            // SAFETY: in the member's part of the control block. It was shown as staged, and is filled again only when this rank
            // has shown it as taken, which needs this borrow of the control block to end.
            unsafe { member.lend(offset, WINDOW) }
        })
    }
}

/// The share of number `index` when `bytes` are dealt out to `owners` in multiples of `unit`; what is over goes to the
/// last of them, and nothing to whoever comes after.
pub fn share(bytes: usize, unit: usize, owners: usize, index: usize) -> Range<usize> {
    let units = bytes / unit;
    let bound = |index: usize| match index {
        index if index >= owners => bytes,
        index => (index * (units / owners) + index.min(units % owners)) * unit,
    };
    bound(index)..bound(index + 1)
}
