//! What the ranks of one host meet on for a collective, and how they reach each other's memory there.
//!
//! Each rank has a part of the control block at the start of its [`Arena`]; it writes its own part, and reads the others':
//!
//! ```text
//!   doorbell   rung, sleeping               on lines of their own, as all that follows
//!   done       the last call in whose memory this rank is done; 0 again once a call has failed
//!   staged     windows that this rank has filled
//!   taken      windows of everybody's with which this rank is done
//!   slot 0     sequence, call (16 bytes), what memory, its length, a note, then bytes that travel in the slot
//!   slot 1     the same: calls with even numbers have the one, calls with odd numbers the other
//!   staging    two windows, filled in turn
//! ```
//!
//! All ranks of the control block make the same calls. A call begins with each rank's word in its slot, published by the
//! sequence number, and with the wait for everybody's: then all know what all call, and what memory they bring. That is
//! all for few bytes, which travel in the slot ([`ControlBlock::small`], [`SharedOperation::slots`]). Two slots are enough: a rank that
//! writes call n+2 has seen everybody's word on call n+1, which nobody gives before it is done with call n.
//! Nobody reads its own slot, but a copy: its lines have gone to the processors of those who read them.
//!
//! Many bytes are reached where they are, if every rank brings a whole region of its arena ([`SharedOperation::combine`],
//! [`SharedOperation::read`]), and the call ends when everybody is done. Else they pass through the staging buffers
//! ([`SharedOperation::stage`]): the others read a window ([`SharedOperation::take`]), or each of them changes its own block of it
//! ([`SharedOperation::combine_staged`]) for the owner, who then finds the result where its input was ([`SharedOperation::take_back`]).
//! What each rank brings stands in its slot, so all decide alike.

mod operation;
mod wait;

use std::io;
use std::ops::Range;
use std::sync::Arc;

pub use self::operation::{Protocol, SharedOperation, share};
use self::wait::Waits;
use crate::arena::{Arena, Mapping, PAGE};
use crate::shared::Doorbell;
use crate::sync::{Ordering, fence};

/// Two cache lines: processors fetch them in pairs.
const LINE: usize = 128;
/// Bytes of a word on a call, before those that travel with it in the slot: so few that the smallest calls need one
/// line.
const HEAD: usize = 40;
/// The most bytes that travel in a slot, with the note before them.
pub const SMALL: usize = 16 << 10;
/// The most bytes of the next slot that are fetched ahead of the call.
const READY: usize = 1 << 10;
/// The same where one peer alone has read it.
const READY_FOR_ONE: usize = 4 << 10;
/// Bytes of each staging buffer: all of them stay in a second-level cache.
pub const WINDOW: usize = if cfg!(loom) { 64 } else { 256 << 10 };
/// Staging buffers of each rank: while the others work on one, the next is filled.
const BUFFERS: usize = 2;

const START: usize = PAGE;
const DONE: usize = START + 2 * LINE;
const STAGED: usize = DONE + LINE;
const TAKEN: usize = STAGED + LINE;
const SLOTS: usize = TAKEN + LINE;
const SLOT: usize = SMALL + LINE;
const STAGING: usize = (SLOTS + 2 * SLOT).next_multiple_of(PAGE);
/// Bytes of a rank's part of the control block.
pub(crate) const BYTES: usize = STAGING + BUFFERS * WINDOW - START;

/// A call as the ranks compare it.
pub type Call = [u8; 16];

/// What a rank brings to a call, besides the call itself; it stands in the lowest bits of the offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Brings {
    /// Memory that others do not reach.
    Ordinary = 0,
    /// A region that others may write.
    Lent = 1,
    /// A region that others may read.
    Shown = 2,
    /// Bytes in the slot.
    Small = 3,
}

/// Puts the first window of some memory into a staging buffer.
pub type Fill<'a, E> = &'a dyn Fn(&[u8], &mut [u8]) -> Result<(), E>;

/// How the bytes of ordinary memory set out when a call begins.
pub enum Ordinary<'a, E> {
    /// This part of it travels in the slot; the rest is nobody else's.
    InSlot(Range<usize>),
    /// The first window is staged before the call is published, so that nobody waits for it apart.
    InWindow(Fill<'a, E>),
    /// It is staged when everybody has come.
    Later,
}

/// Asked now and then during a wait for the member with this index: an error ends the wait.
pub type Watch<'a, E> = &'a mut dyn FnMut(usize) -> Result<(), E>;

/// A word on a call: the call, what memory, and its length.
type Fields = [u64; 4];

/// This rank's copy of the bytes in its slot, aligned for elements of every type as those are.
#[repr(align(64))]
struct Said([u8; SMALL]);

/// One rank's end of the control block.
pub struct ControlBlock {
    me: usize,
    own: Arc<Arena>,
    members: Vec<Arc<Mapping>>,
    waits: Waits,
    sequence: u64,
    /// This rank's own word on this call, and the bytes that travel with it. The slot is for the others: this rank's
    /// processor would have to wait for lines that a peer's processor is reading.
    word: Fields,
    said: Box<Said>,
    /// Bytes of this call's note, which all ranks that make the same call have.
    note: usize,
    /// Bytes of this call in the own slot, with the note.
    in_own_slot: usize,
    /// Windows staged and taken so far.
    staged: u64,
    taken: u64,
    still_lent: Option<io::Error>,
}

impl ControlBlock {
    /// The control block of the ranks whose arenas are given, in an order on which all agree; `own` stands at `me`. None if it
    /// does not, or if there is somebody twice.
    pub fn new(own: Arc<Arena>, members: Vec<Arc<Mapping>>, me: usize) -> Option<Self> {
        let distinct = members
            .iter()
            .enumerate()
            .all(|(index, one)| members[..index].iter().all(|other| !Arc::ptr_eq(one, other)));
        (distinct && Arc::ptr_eq(members.get(me)?, own.mapping())).then(|| Self {
            me,
            own,
            waits: Waits::new(members.len()),
            members,
            sequence: 0,
            word: Fields::default(),
            said: Box::new(Said([0; SMALL])),
            note: 0,
            in_own_slot: 0,
            staged: 0,
            taken: 0,
            still_lent: None,
        })
    }

    /// This rank's place among the members.
    pub fn me(&self) -> usize {
        self.me
    }

    /// The number of members.
    pub fn members(&self) -> usize {
        self.members.len()
    }

    /// A call with `bytes` in the slot, at most [`SMALL`]; gives every member's word when all have come.
    pub fn small<E>(&mut self, call: Call, bytes: &[u8], watch: Watch<'_, E>) -> Result<Slots<'_>, E> {
        self.bring(call, &[], bytes, None, Some(0..bytes.len()));
        self.meet(watch)?;
        Ok(Slots { control_block: self })
    }

    /// The members that have not given their word on this rank's latest call.
    pub fn missing(&self) -> impl Iterator<Item = usize> {
        let late = |member: &Mapping| member.word(self.slot()).load(Ordering::Acquire) < self.sequence;
        let others = self.members.iter().enumerate().filter(|(index, _)| *index != self.me);
        others.filter_map(move |(index, member)| late(member).then_some(index))
    }

    /// A call in which others may write into `memory`, if it is a whole region and everybody brings one of the same
    /// length. Otherwise its bytes travel as `ordinary` says: in the slots, if nobody lends a region and all say so;
    /// else in the windows that `work` stages.
    ///
    /// After an error the region is cut off, so that a peer that still works on the call does no harm; should that not be
    /// possible, [`still_lent`](Self::still_lent) says why.
    pub fn in_place<R, E>(
        &mut self,
        call: Call,
        memory: &mut [u8],
        ordinary: Ordinary<'_, E>,
        watch: Watch<'_, E>,
        work: impl FnOnce(&mut SharedOperation<'_, '_, E>) -> Result<R, E>,
    ) -> Result<R, E> {
        let region = self.own.find(memory);
        let lent = region.map(|offset| operation::Lent::new(self.own.clone(), offset));
        let results = self.staged;
        let (mut small, mut ahead) = (None, false);
        match ordinary {
            Ordinary::InSlot(part) => small = Some(part),
            Ordinary::InWindow(fill) if region.is_none() => {
                self.stage(&mut *watch, |window| fill(memory, window))?;
                // Published with the call: nobody waits for it before.
                self.own.mapping().word(STAGED).store(self.staged, Ordering::Release);
                ahead = true;
            }
            Ordinary::InWindow(_) | Ordinary::Later => {}
        }
        self.bring(call, &[], memory, region.map(|offset| (Brings::Lent, offset)), small);
        let windows = operation::Windows { ahead, results };
        let outcome = SharedOperation::hold(self, operation::Memory::InPlace(memory), windows, watch, work);
        match (lent, &outcome) {
            (Some(lent), Ok(_)) => lent.end(),
            (Some(lent), Err(_)) => self.still_lent = lent.cut_off().err(),
            (None, _) => {}
        }
        outcome
    }

    /// Why the memory of the last call, which failed, could not be cut off: a peer that is late may write into it yet.
    pub fn still_lent(&mut self) -> Option<io::Error> {
        self.still_lent.take()
    }

    /// A call in which others may read `memory`, if it and everybody's is a whole region. Otherwise as
    /// [`in_place`](Self::in_place). Who brings no bytes goes along with what the others bring.
    ///
    /// The `note` reaches everybody, whichever way the bytes take; that of a call is equally long on every rank.
    pub fn apart<R, E>(
        &mut self,
        call: Call,
        note: &[u8],
        memory: &[u8],
        small: Option<Range<usize>>,
        watch: Watch<'_, E>,
        work: impl FnOnce(&mut SharedOperation<'_, '_, E>) -> Result<R, E>,
    ) -> Result<R, E> {
        let region = self.own.find(memory);
        self.bring(call, note, memory, region.map(|offset| (Brings::Shown, offset)), small);
        let windows = operation::Windows { ahead: false, results: self.staged };
        SharedOperation::hold(self, operation::Memory::Apart(memory), windows, watch, work)
    }

    /// Begins a call, with a region if there is one.
    fn bring(
        &mut self,
        call: Call,
        note: &[u8],
        memory: &[u8],
        region: Option<(Brings, usize)>,
        small: Option<Range<usize>>,
    ) {
        self.sequence += 1;
        self.note = note.len();
        self.in_own_slot = note.len();
        self.put(0, note);
        match (region, small) {
            (Some((brings, offset)), _) => self.publish(call, brings, offset, memory.len()),
            (None, Some(part)) => {
                let bytes = &memory[part];
                self.put(note.len(), bytes);
                self.in_own_slot += bytes.len();
                self.publish(call, Brings::Small, 0, bytes.len());
                self.said.0[note.len()..self.in_own_slot].copy_from_slice(bytes);
            }
            (None, None) => self.publish(call, Brings::Ordinary, 0, memory.len()),
        }
        // Nobody waits for this copy.
        self.said.0[..note.len()].copy_from_slice(note);
    }

    /// Copies `bytes` into the slot of a call that is not published yet.
    fn put(&mut self, start: usize, bytes: &[u8]) {
        assert!(start + bytes.len() <= SMALL, "too many bytes for a slot");
        let place = self.slot() + HEAD + start;
        // SAFETY: in the own slot, which no peer reads: whoever could has seen a later call; see the module.
        unsafe { self.own.mapping().lend_mut(place, bytes.len()) }.copy_from_slice(bytes);
    }

    /// Where this call's slot lies in each part of the control block.
    fn slot(&self) -> usize {
        SLOTS + (self.sequence % 2) as usize * SLOT
    }

    fn publish(&mut self, call: Call, brings: Brings, offset: usize, bytes: usize) {
        let (slot, own) = (self.slot(), self.own.mapping());
        let (first, second) = call.split_at(8);
        self.word = [number(first), number(second), (offset | brings as usize) as u64, bytes as u64];
        for (index, word) in self.word.into_iter().enumerate() {
            own.word(slot + 8 + 8 * index).store(word, Ordering::Relaxed);
        }
        // Whoever sleeps is woken in `meet`.
        own.word(slot).store(self.sequence, Ordering::Release);
    }

    /// Waits for everybody's word on this call, which this rank has published.
    fn meet<E>(&self, watch: Watch<'_, E>) -> Result<(), E> {
        // Most often all come at once. The fence before the doorbells costs less when what was written has left this
        // processor, and nobody should wait for it.
        let have_come = self.waits.a_few(|| self.missing().next().is_none());
        fence(Ordering::SeqCst);
        self.wake();
        if !have_come {
            self.await_all(self.slot(), self.sequence, watch)?;
        }
        self.ready_next_slot();
        Ok(())
    }

    /// Fetches what this rank will write next, while it is busy with other things: the peers' processors have read what
    /// stood there.
    fn ready_next_slot(&self) {
        let next = SLOTS + ((self.sequence + 1) % 2) as usize * SLOT;
        let ready = if self.members.len() == 2 { READY_FOR_ONE } else { READY };
        self.own.mapping().fetch_to_write(next, HEAD + self.in_own_slot.min(ready));
    }

    /// Shows the others that this rank has reached `value`, and wakes those that sleep.
    fn show(&self, counter: usize, value: u64) {
        // Releases what was written before. Sequentially consistent, with the load in `wake`: either that sees a sleeper's
        // flag, or the sleeper, after its own fence, sees this.
        self.own.mapping().word(counter).swap(value, Ordering::SeqCst);
        self.wake();
    }

    /// Wakes those that sleep.
    fn wake(&self) {
        for (index, member) in self.members.iter().enumerate() {
            if index != self.me {
                doorbell(member).wake();
            }
        }
    }

    /// Takes back that this rank is done: its call has failed.
    fn withdraw(&self) {
        self.own.mapping().word(DONE).swap(0, Ordering::SeqCst);
        // Before whatever is written into the memory from now on: who reads that, and looks here after it, sees this.
        fence(Ordering::SeqCst);
    }

    /// Waits until the others' `counter` has reached `value`.
    fn await_all<E>(&self, counter: usize, value: u64, watch: Watch<'_, E>) -> Result<(), E> {
        for (index, member) in self.members.iter().enumerate() {
            if index != self.me {
                let counter = member.word(counter);
                let ready = || counter.load(Ordering::Acquire) >= value;
                self.waits.until(ready, doorbell(self.own.mapping()), || watch(index))?;
            }
        }
        Ok(())
    }

    /// A field of a member's word on this call.
    fn field(&self, member: usize, index: usize) -> u64 {
        if member == self.me {
            return self.word[index];
        }
        self.members[member].word(self.slot() + 8 + 8 * index).load(Ordering::Relaxed)
    }

    /// Bytes of a member's slot on this call; none if there is no room for so many.
    fn in_slot(&self, member: usize, start: usize, bytes: usize) -> &[u8] {
        if start.checked_add(bytes).is_none_or(|end| end > SMALL) {
            return &[];
        }
        if member == self.me {
            return &self.said.0[start..start + bytes];
        }
        // SAFETY: in the member's slot, whose bytes were published with the sequence number that this rank has seen, and
        // stay until this rank has given its word on the next call, which needs this borrow of the control block to end.
        unsafe { self.members[member].lend(self.slot() + HEAD + start, bytes) }
    }

    fn call_of(&self, member: usize) -> Call {
        let mut call = [0; 16];
        call[..8].copy_from_slice(&self.field(member, 0).to_le_bytes());
        call[8..].copy_from_slice(&self.field(member, 1).to_le_bytes());
        call
    }
}

/// What the members said in their slots, until the next call.
pub struct Slots<'a> {
    control_block: &'a ControlBlock,
}

impl<'a> Slots<'a> {
    /// What `member` calls.
    pub fn call(&self, member: usize) -> Call {
        self.control_block.call_of(member)
    }

    /// The bytes that `member` sent with it; none if it sent them otherwise, which only another call does.
    pub fn bytes(&self, member: usize) -> &'a [u8] {
        match self.control_block.brings(member) == Brings::Small as u64 {
            true => {
                self.control_block.in_slot(member, self.control_block.note, self.control_block.length(member))
            }
            false => &[],
        }
    }
}

fn doorbell(mapping: &Mapping) -> Doorbell<'_> {
    Doorbell::new(mapping.half_word(START), mapping.half_word(START + LINE))
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

#[cfg(loom)]
#[cfg(test)]
mod models;
// Miri has no files for the arenas.
#[cfg(not(any(loom, miri)))]
#[cfg(test)]
mod tests;
