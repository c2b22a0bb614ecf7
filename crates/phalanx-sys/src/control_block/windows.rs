//! Data that passes through staging buffers, one window at a time.
//!
//! Windows are numbered through all calls. A rank fills a window, and publishes its number as `staged`. The others work on
//! it when all ranks have staged theirs, and each publishes the number as `taken`. When all have, the owner takes the
//! window back, and its buffer is free.
//!
//! While all ranks keep pace, two buffers take turns, which stay in a cache. A peer that is late, because it has no
//! processor, need not stop this rank: it fills further buffers meanwhile, and the peer finds them filled. So each
//! window is in the usual buffer in which the last one is not, or in the first free one if that is in use. Its owner
//! publishes which one that is beside `staged`. While the others work on a small window, its owner fetches the lines of the
//! other usual buffer, which they have in their caches.
//!
//! Where processors write slowly to what another one has read ([`rereads_slowly`](crate::processors::rereads_slowly)), windows that are only read
//! take turns with all buffers: by the time that one is filled again, its lines have left the readers' caches.

use std::ops::Range;

use super::operation::{Memory, Protocol, SharedOperation, with_all};
use super::wait::Patience;
use super::{BUFFERS, ControlBlock, STAGED, STAGING, TAKEN, USUAL, WINDOW, Watch};
use crate::sync::Ordering;

/// Blocks of a window begin at cache lines, so that no two ranks write the same line.
const BLOCK_ALIGNMENT: usize = if cfg!(loom) { 32 } else { 64 };

/// The most bytes of the next window that are prefetched: they stay in the first-level cache meanwhile.
const READY_WINDOW: usize = 16 << 10;

/// How far a rank is with its windows, and where they are.
#[derive(Default)]
pub(super) struct Staging {
    /// Windows of this rank that all ranks have taken, and that it has taken back.
    pub(super) free: u64,
    /// Windows that this rank has filled.
    pub(super) staged: u64,
    /// Windows of all ranks that this rank has worked on.
    taken: u64,
    /// The buffer of each window from `free` to `staged`, at the window's number modulo their number.
    pub(super) buffers: [usize; BUFFERS],
    /// Whether there is memory for more than the usual buffers. None if it was never asked for.
    pub(super) has_all: Option<bool>,
    /// Whether windows take turns with all buffers, for which there is memory.
    pub(super) rotates: bool,
}

/// Called with a window's number in its call, the window, and this rank's memory.
pub type TakeBack<'a, E> = &'a mut dyn FnMut(usize, &[u8], &mut [u8]) -> Result<(), E>;

/// This rank's windows in a call.
pub(super) struct Windows {
    /// The first window is already staged.
    pub(super) ahead: bool,
    /// The number of the first window.
    pub(super) first: u64,
    /// How long this rank polls before it runs ahead of a late peer.
    pub(super) patience: Patience,
}

impl Staging {
    pub(super) fn staged(&self) -> u64 {
        self.staged
    }

    /// Buffers that are in use.
    fn in_use(&self) -> usize {
        (self.staged - self.free) as usize
    }

    /// The buffer of a window in use.
    fn buffer(&self, number: u64) -> usize {
        assert!((self.free..self.staged).contains(&number), "the window is not in use");
        self.buffers[slot(number)]
    }

    /// The buffer whose turn it is, if it is free, and otherwise the first that is.
    pub(super) fn free_buffer(&self) -> usize {
        let in_use = (self.free..self.staged).fold(0u32, |in_use, number| in_use | 1 << self.buffer(number));
        let next = if self.rotates {
            self.last_buffer().map_or(0, |last| (last + 1) % BUFFERS)
        } else {
            self.other_buffer()
        };
        if in_use & 1 << next == 0 {
            return next;
        }
        let buffer = (!in_use).trailing_zeros() as usize;
        assert!(buffer < BUFFERS, "more is staged than there are buffers");
        buffer
    }

    /// The usual buffer in which the last window is not.
    fn other_buffer(&self) -> usize {
        usize::from(self.last_buffer() == Some(0))
    }

    fn last_buffer(&self) -> Option<usize> {
        self.staged.checked_sub(1).map(|number| self.buffers[slot(number)])
    }

    /// How many windows a rank fills before it works on the first of them.
    fn turns(&self) -> usize {
        if self.rotates { BUFFERS } else { USUAL }
    }
}

/// What a rank does next with the windows of a call.
enum Step {
    Stage,
    Work,
    TakeBack,
}

impl<E> SharedOperation<'_, '_, E> {
    /// Lets the windows of this call take turns with all buffers, if there is memory for them. For windows that are only read.
    pub fn rotate(&mut self) {
        self.rotates = true;
    }

    /// Passes `count` windows, at least one. `fill` copies this rank's memory into the window with a number. `work` then
    /// calls [`take`](Self::take) or [`combine_staged`](Self::combine_staged), once for each window. `take_back`, if
    /// given, gets each of this rank's windows when all ranks have done that. If members pass different `count`s, they wait
    /// for each other, or get each other's windows of another call.
    ///
    /// # Panics
    /// If the protocol is not [`Protocol::Staged`], if windows of this operation have passed before, or if an earlier call has
    /// failed between windows.
    pub fn pass(
        &mut self,
        count: usize,
        mut fill: impl FnMut(usize, &[u8], &mut [u8]) -> Result<(), E>,
        mut work: impl FnMut(&mut Self, usize) -> Result<(), E>,
        mut take_back: Option<TakeBack<'_, E>>,
    ) -> Result<(), E> {
        assert_eq!(self.protocol, Protocol::Staged, "the others may be writing into it");
        let Windows { ahead, first, .. } = self.windows;
        let Staging { staged, taken, .. } = self.control_block.staging;
        // So all ranks count alike: what has staged and taken as many windows as this one.
        assert_eq!(
            (staged, taken),
            (first + u64::from(ahead), first),
            "windows have passed before, or a call has failed"
        );
        self.control_block.staging.rotates = self.rotates && self.control_block.has_all_buffers();
        let turns = self.control_block.staging.turns();
        // Windows of earlier calls of which it is not known that all have taken them.
        while self.control_block.staging.in_use() - usize::from(ahead) + turns > BUFFERS {
            self.control_block.await_all(TAKEN, self.control_block.staging.free + 1, &mut *self.watch)?;
            self.control_block.staging.free += 1;
        }
        let (mut staged, mut taken, mut back) = (usize::from(ahead), 0, 0);
        loop {
            let step = if staged < count && staged < taken + turns {
                // Fill the buffer that comes back next, or another one if that takes long.
                let has_buffer = staged - back < turns || !self.is_back() && self.has_buffer();
                if has_buffer { Step::Stage } else { Step::TakeBack }
            } else if taken < staged {
                // If a peer is late, this rank does what it can do without it.
                match () {
                    () if self.is_staged() => Step::Work,
                    () if back < taken && self.is_back() => Step::TakeBack,
                    () if staged < count && self.has_buffer() => Step::Stage,
                    () => Step::Work,
                }
            } else if back < count && take_back.is_some() {
                Step::TakeBack
            } else {
                // A buffer that is not taken back is free when all ranks have begun the next call.
                return Ok(());
            };
            match step {
                Step::Stage => {
                    self.stage(|memory, window| fill(staged, memory, window))?;
                    staged += 1;
                }
                Step::Work => {
                    work(self, taken)?;
                    taken += 1;
                }
                Step::TakeBack => {
                    self.take_back(|window, memory| match &mut take_back {
                        Some(take_back) => take_back(back, window, memory),
                        None => Ok(()),
                    })?;
                    back += 1;
                }
            }
        }
    }

    /// Lends all members' next window, in the order of the members, together with this rank's memory.
    ///
    /// # Panics
    /// If a member's [`Division`](super::Division) combines windows.
    pub fn take(&mut self, work: impl FnOnce(&[&[u8]], &mut [u8]) -> Result<(), E>) -> Result<(), E> {
        assert!(self.reads_windows, "the others write into the windows");
        self.await_staged()?;
        let (control_block, number) = (&*self.control_block, self.control_block.staging.taken);
        // The windows do not overlap this rank's memory.
        let windows: Vec<&[u8]> = (control_block.members.iter().enumerate())
            .map(|(index, member)| {
                let window = control_block.window(index, number);
                // SAFETY: in the member's part of the control block. It was published as staged, and is filled again
                // only when this rank has published it as taken, which needs this borrow to end. No rank combines into it,
                // because none has given such a division.
                unsafe { member.lend(window.start, window.len()) }
            })
            .collect();
        work(&windows, self.memory.as_mut_slice().unwrap_or_default())?;
        self.show_taken();
        Ok(())
    }

    /// Lends the next window of the only other member for writing, together with this rank's memory: nobody else reads it, so what has been
    /// read may be overwritten, as [`take`](crate::copy::take) does.
    ///
    /// # Panics
    /// As [`take`](Self::take), and if there are not two members.
    pub fn take_from_other(
        &mut self,
        work: impl FnOnce(&mut [u8], &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        assert!(self.reads_windows && self.members() == 2, "somebody else may use the window");
        self.await_staged()?;
        let (control_block, other) = (&*self.control_block, 1 - self.control_block.me);
        let window = control_block.window(other, control_block.staging.taken);
        // SAFETY: in the member's part of the control block. It was published as staged, and its owner does not access it until
        // this rank has published it as taken, which needs this borrow to end. There is no third member.
        let window = unsafe { control_block.members[other].lend_mut(window.start, window.len()) };
        work(window, self.memory.as_mut_slice().unwrap_or_default())?;
        self.show_taken();
        Ok(())
    }

    /// Lends the first `bytes` of this rank's block of each other member's next window for writing, in the order of the
    /// members without this one, together with this rank's memory. A window has a block for each member, at
    /// [`block_start`].
    ///
    /// # Panics
    /// If the block is shorter, if the call's [`Division`](super::Division) does not combine windows, or if the members
    /// have given different ones.
    pub fn combine_staged(
        &mut self,
        bytes: usize,
        work: impl FnOnce(&mut [&mut [u8]], &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let is_alike = self.division().is_some_and(|division| division.combines_windows);
        assert!(is_alike, "the others read the windows");
        assert!(bytes <= block_bytes(self.members()), "the blocks do not fit into a window");
        self.await_staged()?;
        let (control_block, number) = (&*self.control_block, self.control_block.staging.taken);
        let block = block_start(control_block.members(), control_block.me);
        let blocks = control_block.others().map(|(index, member)| {
            let window = control_block.window(index, number);
            // SAFETY: the member has staged the window, and does not touch it until this rank has published it as
            // taken, which needs this borrow to end. Every other rank accesses only its own block, because all have
            // given a division that combines windows, and blocks do not overlap.
            unsafe { member.lend_mut(window.start + block, bytes) }
        });
        let memory = &mut self.memory;
        with_all(blocks, |blocks| work(blocks, memory.as_mut_slice().unwrap_or_default()))?;
        self.show_taken();
        self.control_block.ready_next_window(bytes);
        Ok(())
    }

    /// Fills the next window, and publishes it.
    fn stage(&mut self, fill: impl FnOnce(&[u8], &mut [u8]) -> Result<(), E>) -> Result<(), E> {
        let memory = match &self.memory {
            Memory::InPlace(memory) => &**memory,
            Memory::OutOfPlace(memory) => memory,
        };
        self.control_block.stage(|window| fill(memory, window))?;
        self.control_block.show(STAGED, self.control_block.staging.staged);
        Ok(())
    }

    /// Lends this rank's oldest window, after all ranks have taken it, together with this rank's memory. Then its buffer
    /// is free.
    fn take_back(&mut self, work: impl FnOnce(&[u8], &mut [u8]) -> Result<(), E>) -> Result<(), E> {
        let control_block = &*self.control_block;
        let number = control_block.staging.free;
        assert!(number < control_block.staging.taken, "this rank would wait for itself");
        control_block.await_all(TAKEN, number + 1, &mut *self.watch)?;
        let window = control_block.window(control_block.me, number);
        // SAFETY: all ranks have published it as taken. No rank accesses it until this rank stages another in its
        // buffer, which needs this borrow to end.
        let window = unsafe { control_block.own.mapping().lend(window.start, window.len()) };
        work(window, self.memory.as_mut_slice().unwrap_or_default())?;
        self.control_block.staging.free += 1;
        Ok(())
    }

    /// Polls for a while whether all members have staged the next window.
    fn is_staged(&mut self) -> bool {
        self.is_reached(STAGED, self.control_block.staging.taken + 1)
    }

    /// Polls for a while whether all others have taken this rank's oldest window.
    fn is_back(&mut self) -> bool {
        self.is_reached(TAKEN, self.control_block.staging.free + 1)
    }

    fn is_reached(&mut self, counter: usize, value: u64) -> bool {
        self.control_block.has_reached(counter, value, &mut self.windows.patience)
    }

    fn has_buffer(&mut self) -> bool {
        self.control_block.has_buffer()
    }

    fn await_staged(&mut self) -> Result<(), E> {
        assert_eq!(self.protocol, Protocol::Staged, "the others may be writing into it");
        let Staging { staged, taken, .. } = self.control_block.staging;
        assert!(staged > taken, "what is taken must be staged");
        self.control_block.await_all(STAGED, taken + 1, &mut *self.watch)
    }

    fn show_taken(&mut self) {
        self.control_block.staging.taken += 1;
        self.control_block.show(TAKEN, self.control_block.staging.taken);
    }
}

impl ControlBlock {
    /// Fills the first window of a call that is not published yet. The call's header publishes the window, too.
    pub(super) fn stage_ahead<E>(
        &mut self,
        watch: Watch<'_, E>,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        // Peers may still be working on windows of the last call.
        while self.staging.in_use() > 0
            && self.has_reached(TAKEN, self.staging.free + 1, &mut Patience::none())
        {
            self.staging.free += 1;
        }
        if !self.has_buffer() {
            self.await_all(TAKEN, self.staging.free + 1, watch)?;
            self.staging.free += 1;
        }
        self.stage(fill)?;
        self.own.mapping().word(STAGED).store(self.staging.staged, Ordering::Release);
        Ok(())
    }

    /// All members have published a call. If its first window has this number on all of them, they have taken all earlier
    /// ones. Otherwise a member has passed fewer, and windows are free when it says so.
    pub(super) fn free_windows_before(&mut self, first: u64) {
        if self.counts_windows_alike() {
            self.staging.free = self.staging.free.max(first);
        }
    }

    /// Prefetches the window that this rank will probably fill next, for writing, while it waits for those that combine
    /// into this one. Of each other member's block it prefetches `bytes`, if they are few.
    fn ready_next_window(&self, bytes: usize) {
        if bytes * (self.members() - 1) <= READY_WINDOW {
            let buffer = in_buffer(self.staging.other_buffer());
            for (index, _) in self.others() {
                let block = buffer.start + block_start(self.members(), index);
                self.own.mapping().fetch_to_write(block, bytes);
            }
        }
    }

    /// Whether there is a buffer for another window.
    fn has_buffer(&mut self) -> bool {
        match self.staging.in_use() {
            in_use if in_use < USUAL => true,
            in_use => in_use < BUFFERS && self.has_all_buffers(),
        }
    }

    /// Whether there is memory for all buffers. It is asked for once.
    fn has_all_buffers(&mut self) -> bool {
        let own = &self.own;
        *self.staging.has_all.get_or_insert_with(|| own.complete_control_block().is_ok())
    }

    /// Fills the next window, without publishing it. There must be a buffer for it.
    fn stage<E>(&mut self, fill: impl FnOnce(&mut [u8]) -> Result<(), E>) -> Result<(), E> {
        assert!(self.own.mapping().is_filled(), "the staging buffers have no memory");
        let (number, buffer) = (self.staging.staged, self.staging.free_buffer());
        let place = in_buffer(buffer);
        // SAFETY: in this rank's own part of the control block. All ranks have taken the window that was in this buffer, or
        // have begun a later call, for which `pass` compares the counts. No rank accesses the buffer before the next window
        // is published, which needs this borrow to end.
        fill(unsafe { self.own.mapping().lend_mut(place.start, place.len()) })?;
        self.staging.buffers[slot(number)] = buffer;
        self.staging.staged += 1;
        // Published with the window. All ranks have taken the window whose buffer was noted here.
        self.own.mapping().half_word(noted(number)).store(buffer as u32, Ordering::Relaxed);
        Ok(())
    }

    /// Where `member`'s window is. The member has published it as staged, and not all ranks have taken it.
    pub(super) fn window(&self, member: usize, number: u64) -> Range<usize> {
        in_buffer(match member {
            member if member == self.me => self.staging.buffer(number),
            // A buffer's number, whatever the peer has written.
            member => {
                self.members[member].half_word(noted(number)).load(Ordering::Relaxed) as usize % BUFFERS
            }
        })
    }
}

/// The offset in a window of the block of the member with this `index`, if each of `members` members has one.
pub fn block_start(members: usize, index: usize) -> usize {
    index * block_bytes(members)
}

/// Bytes of each member's block of a window.
fn block_bytes(members: usize) -> usize {
    WINDOW / members / BLOCK_ALIGNMENT * BLOCK_ALIGNMENT
}

/// The offset and length of a buffer in each part of the control block.
fn in_buffer(buffer: usize) -> Range<usize> {
    let start = STAGING + buffer * WINDOW;
    start..start + WINDOW
}

/// The offset of the place that says in which buffer window `number` is.
pub(super) fn noted(number: u64) -> usize {
    STAGED + 8 + 4 * slot(number)
}

/// No two windows in use have the same.
fn slot(number: u64) -> usize {
    (number % BUFFERS as u64) as usize
}
