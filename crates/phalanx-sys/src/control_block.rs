//! The shared-memory control block: where the ranks of one host synchronise a collective and reach each other's memory.
//!
//! Each rank has a part of the control block at the start of its [`Arena`]. It writes its own part, and reads the
//! others':
//!
//! ```text
//!   doorbell   rung, sleeping               on cache lines of their own, as everything below
//!   processor  where this rank was when it began its last call; beside `sleeping`, because it changes seldom
//!   done       the last call in which this rank has finished with the others' memory; 0 again once a call has failed;
//!              beside it, the last call in which it could not copy out of another's process, and where its memory is in
//!              its own one: in two words, for meetings with even and odd numbers
//!   staged     windows that this rank has filled; beside it, in which staging buffer each of the last ones is
//!   taken      windows of all ranks that this rank has worked on
//!   slot 0     header: sequence, call (16 bytes), kind and offset of memory, its length; then a note, and data: behind
//!              the header if both end with its cache line, and otherwise from the next line on
//!   slot 1     the same; meetings with even numbers use slot 0, meetings with odd numbers slot 1
//!   posts      a ring of smaller slots
//!   staging    buffers, each for one window
//! ```
//!
//! All ranks of the control block make the same calls. Most calls are meetings: at the start each rank writes its slot header,
//! publishes it with the sequence number, and waits for the headers of all ranks. Then every rank knows what all ranks
//! call, and which memory they give. If the data is small, it is in the slots, and the call is complete
//! ([`SmallCall::slots`], [`SharedOperation::slots`]). Two slots are enough: a rank that writes meeting n+2 has seen
//! all ranks' headers of meeting n+1, and a rank publishes that header only when it has finished meeting n. A rank does not
//! read its own slot, but a copy: the slot's cache lines have moved to the processors of its readers.
//!
//! A call with little data that goes to one rank, or comes from one, is no meeting: a rank that needs nobody's data goes on at once
//! ([`post`](ControlBlock::post)).
//!
//! An arena is a rank's own in one control block, once and for all: the claim to it is in the shared memory, so that it
//! holds however often the arena is mapped. The claim says with which members, and at which index, and a rank waits for
//! ever for one whose claim says otherwise. So two ranks cannot take the same share of a region for theirs.
//!
//! Larger data is read and written in place, if every rank gives a whole region of its arena
//! ([`SharedOperation::combine`], [`SharedOperation::read`]). The call ends when all ranks are done. Otherwise the data
//! passes through the staging buffers, one window at a time ([`SharedOperation::pass`]). The slot header says what each
//! rank gives, and how it would divide the work, so all ranks choose the same protocol and the same shares.
//!
//! Much data that is only copied can go past all shared memory: each rank says with its header where its data is, and the others copy it out
//! of its process ([`SharedOperation::copy`]). If a rank cannot, the call has no result on any rank, and nobody copies so any more.

mod division;
mod operation;
mod post;
mod wait;
mod windows;

use std::io;
use std::ops::Range;
use std::sync::Arc;

pub use self::division::Division;
pub use self::operation::{Protocol, SharedOperation, share, with_all};
pub use self::post::{Difference, Needs, POSTED, PostedCall};
use self::post::{POSTS_END, Posts};
use self::wait::{Patience, Processor, Waits};
use self::windows::{Staging, Windows};
pub use self::windows::{TakeBack, block_start};
use crate::arena::{Arena, Mapping, PAGE};
use crate::copy::{copy, take_lines};
use crate::shared::Doorbell;
use crate::sync::{Ordering, fence};

/// Two cache lines: processors fetch them in pairs.
const LINE: usize = 128;
/// Bytes of a slot header. It is so small that the smallest calls need one cache line.
const HEAD: usize = 40;
/// What is longer than the rest of the header's cache line begins at the next one. Then no line is read for some bytes
/// only, and copies are aligned.
const BODY: usize = 64;
/// The most bytes that fit behind a slot header, including the note.
pub const SMALL: usize = 16 << 10;
/// The most bytes of the next slot that are prefetched.
const READY: usize = 1 << 10;
/// The same if only one peer has read the slot.
const READY_FOR_ONE: usize = 4 << 10;
/// Bytes of each staging buffer: two fit into a second-level cache.
pub const WINDOW: usize = if cfg!(loom) { 64 } else { 256 << 10 };
/// Staging buffers of each rank.
const BUFFERS: usize = if cfg!(loom) { 3 } else { 8 };
/// The buffers that are in use while all ranks keep pace: while the others work on one, the next is filled. The others
/// are for the time in which a peer is late, and get memory when that first happens.
const USUAL: usize = 2;

const START: usize = PAGE;
const PROCESSOR: usize = START + LINE + 4;
const DONE: usize = START + 2 * LINE;
const REFUSED: usize = DONE + 8;
const OFFERED: usize = DONE + 16;
const STAGED: usize = DONE + LINE;
const TAKEN: usize = STAGED + LINE;
const SLOTS: usize = TAKEN + LINE;
const SLOT: usize = SMALL + LINE;
pub(crate) const STAGING: usize = POSTS_END.next_multiple_of(PAGE);
/// The end of a rank's part of the control block.
pub(crate) const END: usize = STAGING + BUFFERS * WINDOW;
/// The end of what has memory from the beginning.
pub(crate) const ALLOCATED: usize = STAGING + USUAL * WINDOW;

/// The number of a call that no rank makes.
const NEVER: u64 = u64::MAX / 2;

/// A call as the ranks compare it: a number, whose halves stay in registers.
pub type Call = u128;

/// The part of a header's word that is the offset of a region. The kind and the division are in the bits around it.
const OFFSET: u64 = 0x0000_FFFF_FFFF_FFC0;
/// The part of a header's word that is a length. The number of the call's first window is in the bits above, as far as it fits.
const LENGTH: u64 = (1 << 48) - 1;

/// The kind of memory that a rank gives to a call. It is in the lowest bits of the header's offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MemoryKind {
    /// Memory that other ranks cannot access.
    Unregistered = 0,
    /// A region that other ranks may write.
    Lent = 1,
    /// A region that other ranks may read.
    Shown = 2,
    /// Data in the slot.
    InSlot = 3,
}

/// Copies the first window of some memory into a staging buffer.
pub type Fill<'a, E> = &'a dyn Fn(&[u8], &mut [u8]) -> Result<(), E>;

/// How unregistered memory is sent when a call begins.
pub enum Unregistered<'a, E> {
    /// This part of it is copied into the slot. No other rank needs the rest.
    InSlot(Range<usize>),
    /// The first window is staged before the call is published, which saves a wait for it.
    InWindow(Fill<'a, E>),
    /// It is staged after all headers have been seen.
    Later,
}

/// Called now and then during a wait, with the index of the member waited for, and when a member is found to make another call than this
/// rank. An error ends the wait.
pub type Watch<'a, E> = &'a mut dyn FnMut(usize, Option<Difference>) -> Result<(), E>;

/// What a rank brings to a call in which ranks may read each other's memory.
#[derive(Clone, Debug)]
pub struct Brought<'a> {
    /// All ranks receive it, with every protocol. In one call it has the same length on every rank.
    pub note: &'a [u8],
    /// What the others may read.
    pub memory: &'a [u8],
    /// The part of it that is copied into the slot, if all ranks do so and no rank shows a region.
    pub small: Option<Range<usize>>,
    /// If a rank brings so many bytes and more, ranks copy out of each other's processes. The same on every rank; ignored once that
    /// [has been refused](ControlBlock::copies).
    pub copied_from: Option<usize>,
}

/// A call with little data that this rank has begun.
#[must_use = "without its slots this rank does not know that the others have made the call"]
pub struct SmallCall<'a> {
    control_block: &'a mut ControlBlock,
}

impl<'a> SmallCall<'a> {
    /// All members' slots, when all have been published.
    pub fn slots<E>(self, watch: Watch<'_, E>) -> Result<Slots<'a>, E> {
        self.control_block.wait_for_all(watch)?;
        Ok(Slots { control_block: self.control_block, needs: Needs::All })
    }
}

/// A call out of place that this rank has begun. If it is dropped, the others wait for this rank in vain.
#[must_use = "the others wait until this rank has finished the call"]
pub struct CallOutOfPlace<'a> {
    control_block: &'a mut ControlBlock,
    memory: &'a [u8],
    copied_from: Option<usize>,
    windows: Windows,
}

impl CallOutOfPlace<'_> {
    /// Waits for the others, does the `work`, and returns when all ranks have done theirs.
    ///
    /// Returns None on every rank if one of them could not copy: then all must make the call again.
    pub fn finish<R, E>(
        self,
        watch: Watch<'_, E>,
        work: impl FnOnce(&mut SharedOperation<'_, '_, E>) -> Result<R, E>,
    ) -> Result<Option<R>, E> {
        let Self { control_block, memory, copied_from, windows } = self;
        let copied = control_block.copies;
        let given = (operation::Memory::OutOfPlace(memory), copied_from);
        let outcome = SharedOperation::hold(&mut *control_block, given, windows, watch, work)?;
        Ok((copied == control_block.copies).then_some(outcome))
    }
}

/// A slot header without the sequence number: the call, the memory, and its length.
type Fields = [u64; 4];

/// This rank's copy of the data in its slot, with the same alignment, which is enough for elements of every type.
#[repr(align(64))]
struct SlotData([u8; SMALL]);

/// One rank's handle to the control block.
pub struct ControlBlock {
    me: usize,
    own: Arc<Arena>,
    members: Vec<Arc<Mapping>>,
    waits: Waits,
    /// The processor that this rank has published.
    processor: Processor,
    sequence: u64,
    /// How many of these calls were meetings, and the latest one in each of the two slots.
    meetings: u64,
    met: [u64; 2],
    posts: Posts,
    /// The offset of the latest call's slot in each part of the control block, and the number that says there that it is published.
    slot: usize,
    published: u64,
    /// The last call in which this rank has seen the headers that it needs. If that is not the one before the next, a late rank may read this
    /// rank's slot of that one, and its window, at any time: then this rank writes to its slots no more, and begins no call.
    seen: u64,
    /// A copy of this rank's own slot header and data of this call. Reading the slot would have to wait for cache lines
    /// that a peer's processor is reading.
    own_header: Fields,
    own_data: Box<SlotData>,
    /// Bytes of this call's note. All ranks that make the same call have the same length.
    note: usize,
    /// Bytes of this call in this rank's own slot, including the note.
    in_own_slot: usize,
    staging: Staging,
    /// Whether every other rank's claim is known to be to this control block.
    is_joined: bool,
    /// Whether members may copy out of each other's processes, as far as they have tried.
    copies: bool,
    /// Whether this rank copies nothing, for tests.
    refuses: bool,
    still_shared: Option<io::Error>,
}

impl ControlBlock {
    /// The control block of the ranks with these arenas, in an order on which all ranks agree. `own` is at index `me`.
    /// Returns None if it is not, if an arena is there twice, through whichever mappings, or if `own` has been given to a
    /// control block before.
    pub fn new(own: Arc<Arena>, members: Vec<Arc<Mapping>>, me: usize) -> Option<Self> {
        let identities: Vec<u64> = members.iter().map(|member| member.identity()).collect();
        let distinct = (1..identities.len()).all(|index| !identities[..index].contains(&identities[index]));
        if !distinct || !Arc::ptr_eq(members.get(me)?, own.mapping()) {
            return None;
        }
        // Published to the other ranks with the header of the first call.
        let claim = claim(&identities, me);
        own.mapping().claim().compare_exchange(0, claim, Ordering::Relaxed, Ordering::Relaxed).ok()?;
        Some(Self {
            me,
            own,
            waits: Waits::new(members.len()),
            members,
            processor: 0,
            sequence: 0,
            meetings: 0,
            met: [0; 2],
            posts: Posts::default(),
            slot: SLOTS,
            published: 0,
            seen: 0,
            own_header: Fields::default(),
            own_data: Box::new(SlotData([0; SMALL])),
            note: 0,
            in_own_slot: 0,
            staging: Staging::default(),
            is_joined: false,
            copies: cfg!(not(loom)),
            refuses: false,
            still_shared: None,
        })
    }

    /// This rank's index among the members.
    pub fn me(&self) -> usize {
        self.me
    }

    /// The number of members.
    pub fn members(&self) -> usize {
        self.members.len()
    }

    /// Begins a call with `bytes` in the slot, at most [`SMALL`].
    ///
    /// The others know of it at once. What this rank does before it looks at the [slots](SmallCall::slots), it does while they come.
    #[inline]
    pub fn small(&mut self, call: Call, bytes: &[u8]) -> SmallCall<'_> {
        let header = Announcement { call, division: 0, first: self.staging.staged() };
        self.begin(header, &[], bytes, None, Some(0..bytes.len()));
        SmallCall { control_block: self }
    }

    /// The members that have not published their header of this rank's latest call.
    pub fn missing(&self) -> impl Iterator<Item = usize> {
        self.others().filter_map(|(index, member)| (!self.has_come(index, member)).then_some(index))
    }

    /// A call in which other ranks may write into `memory`, if it is a whole region and all ranks give one of the same
    /// length. Otherwise the data is sent as `unregistered` says: in the slots, if all ranks do so and no rank lends a
    /// region; else in windows.
    ///
    /// After an error the region is cut off, so that a peer that is still working on the call does no harm. If that
    /// fails, [`still_shared`](Self::still_shared) says why.
    pub fn in_place<R, E>(
        &mut self,
        call: Call,
        memory: &mut [u8],
        (division, unregistered): (Division, Unregistered<'_, E>),
        watch: Watch<'_, E>,
        work: impl FnOnce(&mut SharedOperation<'_, '_, E>) -> Result<R, E>,
    ) -> Result<R, E> {
        self.lend(call, memory, (division, Some(unregistered)), watch, work)
    }

    /// The same with memory that the others copy out of this rank's process if it is no region. If they do not [copy](Self::copies), it is
    /// staged after all headers have been seen.
    ///
    /// Returns None on every rank if one of them could not copy: then all must make the call again.
    pub fn offered_in_place<R, E>(
        &mut self,
        call: Call,
        memory: &mut [u8],
        division: Division,
        watch: Watch<'_, E>,
        work: impl FnOnce(&mut SharedOperation<'_, '_, E>) -> Result<R, E>,
    ) -> Result<Option<R>, E> {
        let copied = self.copies;
        let outcome = self.lend(call, memory, (division, None), watch, work)?;
        Ok((copied == self.copies).then_some(outcome))
    }

    /// A call in place. Memory that is no region is offered if it is not said how else it is sent.
    fn lend<R, E>(
        &mut self,
        call: Call,
        memory: &mut [u8],
        (division, unregistered): (Division, Option<Unregistered<'_, E>>),
        watch: Watch<'_, E>,
        work: impl FnOnce(&mut SharedOperation<'_, '_, E>) -> Result<R, E>,
    ) -> Result<R, E> {
        let region = self.own.find(memory);
        let lent = region.map(|offset| operation::Lent::new(self.own.clone(), offset));
        let first = self.staging.staged();
        let copied_from = (unregistered.is_none() && self.copies).then_some(0);
        let (mut small, mut ahead) = (None, false);
        match unregistered {
            Some(Unregistered::InSlot(part)) => small = Some(part),
            // A late peer would take it for the next window of the call that was given up.
            Some(Unregistered::InWindow(fill)) if region.is_none() && !self.has_given_up() => {
                self.stage_ahead(&mut *watch, |window| fill(memory, window))?;
                ahead = true;
            }
            Some(Unregistered::InWindow(_) | Unregistered::Later) | None => {}
        }
        if copied_from.is_some() {
            self.offer(memory);
        }
        let header = Announcement { call, division: division.bits(), first };
        self.begin(header, &[], memory, region.map(|offset| (MemoryKind::Lent, offset)), small);
        let windows = Windows { ahead, first, patience: Patience::new() };
        let given = (operation::Memory::InPlace(memory), copied_from);
        let outcome = SharedOperation::hold(self, given, windows, watch, work);
        match (lent, &outcome) {
            (Some(lent), Ok(_)) => lent.end(),
            (Some(lent), Err(_)) => self.still_shared = lent.cut_off().err(),
            (None, _) => {}
        }
        outcome
    }

    /// Why the memory of the last call, which failed, could not be cut off. A late peer may still write into it.
    pub fn still_shared(&mut self) -> Option<io::Error> {
        self.still_shared.take()
    }

    /// Whether members may copy out of each other's processes: until one of them could not. The same on every member after each call.
    pub fn copies(&self) -> bool {
        self.copies
    }

    /// As if the kernel did not allow this rank to copy, from the next call on.
    #[doc(hidden)]
    pub fn refuse_copies(&mut self) {
        self.refuses = true;
    }

    /// Begins a call in which other ranks may read what is `brought`, if all ranks' memory is a whole region, or if it is so much that
    /// they copy it out of each other's processes. Otherwise as [`in_place`](Self::in_place). A rank without data does not affect which
    /// protocol is used.
    ///
    /// The others know of it at once. What this rank does before it [finishes](CallOutOfPlace::finish) the call, it does while they come.
    pub fn out_of_place<'a>(&'a mut self, call: Call, brought: Brought<'a>) -> CallOutOfPlace<'a> {
        let Brought { note, memory, small, copied_from } = brought;
        let copied_from = copied_from.filter(|_| self.copies);
        let region = self.own.find(memory);
        let first = self.staging.staged();
        let header = Announcement { call, division: 0, first };
        if copied_from.is_some() {
            self.offer(memory);
        }
        // Who brings nothing may still have much for itself.
        let is_little = small.is_some() && !memory.is_empty();
        self.begin(header, note, memory, region.map(|offset| (MemoryKind::Shown, offset)), small);
        if !is_little {
            // Before what this rank does next, which may take long.
            fence(Ordering::SeqCst);
            self.wake();
        }
        let windows = Windows { ahead: false, first, patience: Patience::new() };
        CallOutOfPlace { control_block: self, memory, copied_from, windows }
    }

    /// Says where the others may copy this `memory` of the next call out of this process. Nowhere, if it is so little that it fits into a slot:
    /// to ask for this process's number takes longer than to copy it. Nor if this process was forked from the one that has made the arena.
    fn offer(&self, memory: &[u8]) {
        let own = self.own.mapping();
        // Exposed: others read it, though no code of this process lends it to them.
        let address =
            if memory.len() > SMALL && own.is_own() { memory.as_ptr().expose_provenance() as u64 } else { 0 };
        own.word(offered(self.meetings + 1)).store(address, Ordering::Relaxed);
    }

    /// Whether this rank has begun a call and not seen the headers that it needs.
    fn has_given_up(&self) -> bool {
        self.seen != self.sequence
    }

    /// Begins a meeting, with a region if there is one.
    fn begin(
        &mut self,
        header: Announcement,
        note: &[u8],
        memory: &[u8],
        region: Option<(MemoryKind, usize)>,
        small: Option<Range<usize>>,
    ) {
        if self.has_given_up() {
            self.give_up();
            return;
        }
        self.sequence += 1;
        self.meetings += 1;
        self.slot = slot_of(self.meetings);
        self.published = self.sequence;
        self.publish_processor();
        let bytes = small.filter(|_| region.is_none()).map(|part| &memory[part]);
        self.note = note.len();
        self.in_own_slot = note.len() + bytes.map_or(0, <[u8]>::len);
        self.put(0, note);
        match (region, bytes) {
            (Some((kind, offset)), _) => self.publish(header, kind, offset, memory.len()),
            (None, Some(bytes)) => {
                self.put(note.len(), bytes);
                self.publish(header, MemoryKind::InSlot, 0, bytes.len());
                copy(bytes, &mut self.own_data.0[note.len()..self.in_own_slot]);
            }
            (None, None) => self.publish(header, MemoryKind::Unregistered, 0, memory.len()),
        }
        // After publishing: no rank waits for this copy.
        self.own_data.0[..note.len()].copy_from_slice(note);
    }

    /// From now on each call waits until its `watch` ends it.
    fn give_up(&mut self) {
        (self.sequence, self.published) = (NEVER, NEVER);
    }

    /// Copies `bytes` into the slot of a call that is not published yet. `in_own_slot` says how many there will be in all.
    fn put(&mut self, start: usize, bytes: &[u8]) {
        assert!(self.in_own_slot <= self.room(), "too many bytes for a slot");
        let place = self.slot + data_start(self.in_own_slot) + start;
        // SAFETY: in this rank's own slot. No peer reads it now, because all have seen a later call; see the module, and `post`.
        copy(bytes, unsafe { self.own.mapping().lend_mut(place, bytes.len()) });
    }

    /// The most bytes that fit into this call's slot.
    fn room(&self) -> usize {
        if self.is_post() { POSTED } else { SMALL }
    }

    /// Tells the ranks that wait for this one where it is. It is only a hint: the kernel may move this rank at any time.
    fn publish_processor(&mut self) {
        let now = self.waits.processor();
        if self.processor != now {
            self.processor = now;
            self.own.mapping().half_word(PROCESSOR).store(now, Ordering::Relaxed);
        }
    }

    fn publish(&mut self, header: Announcement, kind: MemoryKind, offset: usize, bytes: usize) {
        let (slot, own) = (self.slot, self.own.mapping());
        let memory = offset as u64 | header.division | kind as u64;
        // The longest address of a processor has 57 bits, and the longest region is shorter than `LENGTH`.
        let length = (bytes as u64).min(LENGTH) | header.first << LENGTH.count_ones();
        self.own_header = [header.call as u64, (header.call >> 64) as u64, memory, length];
        for (index, word) in self.own_header.into_iter().enumerate() {
            own.word(slot + 8 + 8 * index).store(word, Ordering::Relaxed);
        }
        // Sleeping ranks are woken in `wait_for`.
        own.word(slot).store(self.published, Ordering::Release);
    }

    /// Waits for all ranks' headers of this meeting. This rank has published its own.
    fn wait_for_all<E>(&mut self, watch: Watch<'_, E>) -> Result<(), E> {
        if !self.wait_for(Needs::All, &mut *watch)? {
            self.compare_meetings(&mut *watch)?;
        }
        self.compare_posts(watch)?;
        self.met[(self.meetings % 2) as usize] = self.sequence;
        self.seen = self.sequence;
        let ready = if self.members.len() == 2 { READY_FOR_ONE } else { READY };
        self.ready_slot(slot_of(self.meetings + 1), ready);
        Ok(())
    }

    /// Waits for the headers of this call that this rank `needs`. It has published its own. Returns whether all had come to this very call when it
    /// first looked; at a meeting some may have come by more posts.
    #[inline]
    fn wait_for<E>(&mut self, needs: Needs, watch: Watch<'_, E>) -> Result<bool, E> {
        // Usually all ranks come at once. The fence before the doorbells is cheaper when the stores have left this
        // processor, and no rank should wait for the fence.
        let is_here = |(index, member): (usize, &Mapping)| {
            member.word(self.slot).load(Ordering::Acquire) == self.published
                && (self.is_joined || self.is_member(index, member))
        };
        let have_come = self.waits.a_few(|| self.needed(needs).all(is_here));
        fence(Ordering::SeqCst);
        self.wake();
        if !have_come {
            // Those that have come, but not to this control block, are waited for until `watch` ends the wait.
            self.needed(needs).try_for_each(|(index, member)| {
                self.await_member(index, || self.has_come(index, member), &mut *watch)
            })?;
        }
        self.is_joined |= needs == Needs::All;
        Ok(have_come)
    }

    /// The others that a rank with these `needs` waits for.
    fn needed(&self, needs: Needs) -> impl Iterator<Item = (usize, &Mapping)> {
        self.others().filter(move |(index, _)| needs.includes(*index))
    }

    /// Waits until a member is `ready`.
    fn await_member<E>(&self, index: usize, ready: impl Fn() -> bool, watch: Watch<'_, E>) -> Result<(), E> {
        let peer = || processor_of(&self.members[index]);
        self.waits.until(ready, peer, doorbell(self.own.mapping()), || watch(index, self.other_call(index)))
    }

    /// Whether a member has published its header of this rank's latest call, as a member of this control block.
    fn has_come(&self, index: usize, member: &Mapping) -> bool {
        member.word(self.slot).load(Ordering::Acquire) >= self.published
            && (self.is_joined || self.is_member(index, member))
    }

    /// Whether a member that has published a header has claimed its arena for these members, in this order.
    fn is_member(&self, index: usize, member: &Mapping) -> bool {
        let identities: Vec<u64> = self.members.iter().map(|member| member.identity()).collect();
        member.claim().load(Ordering::Relaxed) == claim(&identities, index)
    }

    /// Prefetches the slot that this rank will write next, while it is busy with other things: the slot's cache lines
    /// are in the caches of the peers that have read it. Of its data at most `most` bytes.
    fn ready_slot(&self, next: usize, most: usize) {
        self.own.mapping().fetch_to_write(next, data_start(self.in_own_slot) + self.in_own_slot.min(most));
    }

    /// Publishes that this rank's `counter` has reached `value`, and wakes sleeping ranks.
    fn show(&self, counter: usize, value: u64) {
        // Releases earlier stores. Sequentially consistent with the load in `wake`: either that load sees a sleeper's
        // flag, or the sleeper, after its own fence, sees this store.
        self.own.mapping().word(counter).swap(value, Ordering::SeqCst);
        self.wake();
    }

    /// Wakes sleeping ranks.
    fn wake(&self) {
        self.others().for_each(|(_, member)| doorbell(member).wake());
    }

    /// Withdraws this rank's `done`, because its call has failed.
    fn withdraw(&self) {
        self.own.mapping().word(DONE).swap(0, Ordering::SeqCst);
        // Orders this before all later stores into the memory: a rank that reads one of those, and then reads `done`,
        // sees 0.
        fence(Ordering::SeqCst);
    }

    /// Waits until the others' `counter` has reached `value`.
    fn await_all<E>(&self, counter: usize, value: u64, watch: Watch<'_, E>) -> Result<(), E> {
        self.others().try_for_each(|(index, member)| {
            self.await_member(index, || member.word(counter).load(Ordering::Acquire) >= value, &mut *watch)
        })
    }

    /// Polls for a while whether the others' `counter` has reached `value`, as `patience` says.
    fn has_reached(&self, counter: usize, value: u64, patience: &mut Patience) -> bool {
        self.others().all(|(_, member)| {
            let ready = || member.word(counter).load(Ordering::Acquire) >= value;
            self.waits.a_while(ready, || processor_of(member), patience)
        })
    }

    /// The other members, with their indices.
    fn others(&self) -> impl Iterator<Item = (usize, &Mapping)> {
        let members = self.members.iter().map(|member| &**member).enumerate();
        members.filter(move |(index, _)| *index != self.me)
    }

    /// A field of a member's header of this call.
    #[inline]
    fn field(&self, member: usize, index: usize) -> u64 {
        if member == self.me {
            return self.own_header[index];
        }
        self.members[member].word(self.slot + 8 + 8 * index).load(Ordering::Relaxed)
    }

    /// Bytes of a member's slot of this call. Empty if the slot is too short for them.
    #[inline]
    fn in_slot(&self, member: usize, start: usize, bytes: usize) -> &[u8] {
        if start.checked_add(bytes).is_none_or(|end| end > self.room()) {
            return &[];
        }
        if member == self.me {
            return &self.own_data.0[start..start + bytes];
        }
        let in_all = self.in_all(member);
        // SAFETY: in the member's slot. These bytes were published with the sequence number that this rank has seen.
        // They stay until this rank publishes the next call, which needs this borrow of the control block to end.
        unsafe { self.members[member].lend(self.slot + data_start(in_all) + start, bytes) }
    }

    /// Bytes in a member's slot of this call, as the member says, including the note.
    #[inline]
    fn in_all(&self, member: usize) -> usize {
        match self.memory_kind(member) == MemoryKind::InSlot as u64 {
            true => self.note.saturating_add(self.length(member)),
            false => self.note,
        }
    }

    /// Takes the lines of the data in the other of two members' slot: this rank has read them, and nobody else does. Of less data the owner
    /// fetches the lines itself.
    fn take_slot(&mut self) {
        if self.members.len() != 2 {
            return;
        }
        let other = 1 - self.me;
        let bytes = self.in_all(other);
        if (READY + 1..=SMALL).contains(&bytes) {
            // SAFETY: in the member's slot, behind its header. The member writes there again only when it has seen this rank's header
            // of the next call, and there is no third one.
            take_lines(unsafe { self.members[other].lend_mut(self.slot + BODY, bytes) });
        }
    }

    #[inline]
    fn call_of(&self, member: usize) -> Call {
        u128::from(self.field(member, 1)) << 64 | u128::from(self.field(member, 0))
    }
}

/// What a rank tells the others of a call, besides its memory.
#[derive(Clone, Copy)]
struct Announcement {
    call: Call,
    /// The bits of its [`Division`].
    division: u64,
    /// The number of this rank's first window.
    first: u64,
}

/// The members' slots, until the next call.
pub struct Slots<'a> {
    control_block: &'a ControlBlock,
    /// Whose slots this rank has waited for. It reads no other.
    needs: Needs,
}

impl<'a> Slots<'a> {
    /// The call of `member`.
    #[inline]
    pub fn call(&self, member: usize) -> Call {
        self.control_block.call_of(member)
    }

    /// The data in `member`'s slot. Empty if this rank has not waited for it, or if it is not there, which happens only if the calls differ.
    #[inline]
    pub fn bytes(&self, member: usize) -> &'a [u8] {
        let control_block = self.control_block;
        let is_readable =
            self.needs.includes(member) && control_block.memory_kind(member) == MemoryKind::InSlot as u64;
        match is_readable {
            true => control_block.in_slot(member, control_block.note, control_block.length(member)),
            false => &[],
        }
    }
}

/// Where the data of a slot begins, if there are so many bytes of it, including the note.
fn data_start(bytes: usize) -> usize {
    if bytes <= BODY - HEAD { HEAD } else { BODY }
}

/// The offset of the slot of the meeting with this number.
fn slot_of(meeting: u64) -> usize {
    SLOTS + (meeting % 2) as usize * SLOT
}

/// The offset of the word that says where a rank's memory of the meeting with this number is in its process.
fn offered(meeting: u64) -> usize {
    OFFERED + 8 * (meeting % 2) as usize
}

/// The processor on which a member began its last call.
fn processor_of(member: &Mapping) -> Processor {
    member.half_word(PROCESSOR).load(Ordering::Relaxed)
}

fn doorbell(mapping: &Mapping) -> Doorbell<'_> {
    Doorbell::new(mapping.half_word(START), mapping.half_word(START + LINE))
}

/// What the member with this `index` claims, if these are the members. It is not 0.
fn claim(identities: &[u64], index: usize) -> u64 {
    const PRIME: u64 = 0x0000_0100_0000_01B3;
    let words = identities.iter().copied().chain([identities.len() as u64, index as u64]);
    let mixed = words.fold(0xCBF2_9CE4_8422_2325_u64, |hash, word| {
        let hash = (hash ^ word).wrapping_mul(PRIME);
        hash ^ hash >> 29
    });
    mixed.max(1)
}

#[cfg(loom)]
#[cfg(test)]
mod models;
// Miri has no files for the arenas.
#[cfg(not(any(loom, miri)))]
#[cfg(test)]
mod post_tests;
#[cfg(not(any(loom, miri)))]
#[cfg(test)]
mod tests;
