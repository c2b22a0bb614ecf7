//! Calls that a rank may finish before the others have come: it waits only for those whose data it needs.
//!
//! In a broadcast, a scatter, a gather or a reduce some ranks only send. What they send is in their slot, so they can go on at once, as MPI's
//! eager messages let them. Every rank posts each such call in the next slot of a ring, with its header, and reads those slots that it needs.
//!
//! All ranks still compare all calls, later: a rank posts call number n only when it has compared the posts of all others up to
//! n - [`AHEAD`] with its own, and at each meeting it compares the rest. So it is at most so many posts ahead. Twice as many slots
//! are enough. A rank that writes post n into the slot of post n - 2 * `AHEAD` has seen everybody's post n - `AHEAD`; whoever has
//! posted that has finished all calls before it, and has compared all posts up to n - 2 * `AHEAD`. A rank at a meeting after post n
//! has yet to compare those after n - `AHEAD`; the others, which have seen its header, may go on to post n + `AHEAD`, whose slot is
//! that of post n - `AHEAD`.
//!
//! Ranks that make different calls may wait for each other in different places, one at a meeting and the other for a post. Each
//! looks now and then whether the other is there ([`Difference`]).

use super::{
    Announcement, Call, ControlBlock, LINE, MemoryKind, NEVER, Ordering, SLOTS, Slots, Watch, copy, slot_of,
};
use crate::arena::Mapping;

/// The most bytes that a rank posts.
pub const POSTED: usize = if cfg!(loom) { 64 } else { 4 << 10 };
/// The posts that a rank may be ahead of what it has seen of any other.
pub(super) const AHEAD: u64 = if cfg!(loom) { 2 } else { 8 };
/// The slots of the ring.
pub(super) const POSTS: usize = 2 * AHEAD as usize;
/// A rank that has to wait before it posts waits until the others are so many posts further than they must be. Then it need not look at their
/// slots in each call: it takes the lines from those that are about to write them.
const FURTHER: u64 = AHEAD / 2;
/// So many posts before it writes a slot a rank fetches its lines, which are in the caches of those that have read it. That takes longer than a post.
const READY: u64 = AHEAD / 2;
const SLOT: usize = POSTED + LINE;
/// Where the ring is, behind the slots of meetings.
const POSTS_START: usize = SLOTS + 2 * super::SLOT;

/// The end of the ring.
pub(super) const POSTS_END: usize = POSTS_START + POSTS * SLOT;

/// For whose data a rank waits before it goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    /// Nobody's. The others are sent this rank's.
    Nobody,
    /// That of one member.
    Member(usize),
    /// That of all others.
    All,
}

impl Needs {
    #[inline]
    pub(super) fn includes(self, member: usize) -> bool {
        match self {
            Self::Nobody => false,
            Self::Member(needed) => needed == member,
            Self::All => true,
        }
    }
}

/// A member has made another call than this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Difference {
    /// This rank's call in its place, and the number under which it was posted. None if it is the call that this rank makes now.
    pub earlier: Option<(Call, u64)>,
    /// The member's call.
    pub theirs: Call,
}

/// What this rank has posted, and compared.
#[derive(Default)]
pub(super) struct Posts {
    /// How many calls it has posted.
    count: u64,
    /// The last ones, each with the number that the caller gave it, at their number modulo [`POSTS`].
    own: [(Call, u64); POSTS],
    /// Of each member, the last post that was compared with this rank's. Empty until the first one is.
    compared: Vec<u64>,
    /// The same of all members.
    all_compared: u64,
}

/// A call that this rank has posted.
#[must_use = "this rank has not waited for the data that it needs"]
pub struct PostedCall<'a> {
    control_block: &'a mut ControlBlock,
    needs: Needs,
    waits_for: Needs,
}

impl<'a> PostedCall<'a> {
    /// The slots that this rank needs, when they have been published.
    #[inline]
    pub fn slots<E>(self, watch: Watch<'_, E>) -> Result<Slots<'a>, E> {
        let Self { control_block, needs, waits_for } = self;
        control_block.wait_for(waits_for, &mut *watch)?;
        control_block.compare_needed(waits_for, watch)?;
        control_block.seen = control_block.sequence;
        control_block.ready_slot(slot(control_block.posts.count + READY), POSTED);
        Ok(Slots { control_block, needs })
    }
}

impl ControlBlock {
    /// Posts a call in which at least one rank needs the others' data, or all need one rank's: this rank goes on when it has what it `needs`. A rank
    /// that needs nobody's data posts `bytes`, at most [`POSTED`]; one that needs others' keeps its own, in the [slots](PostedCall::slots)
    /// that it reads. `number` comes back in a [`Difference`].
    ///
    /// If the others are too far behind, it waits for them first.
    #[inline]
    pub fn post<E>(
        &mut self,
        (call, number): (Call, u64),
        bytes: &[u8],
        needs: Needs,
        watch: Watch<'_, E>,
    ) -> Result<PostedCall<'_>, E> {
        if self.has_given_up() {
            self.give_up();
            return Ok(PostedCall { control_block: self, needs, waits_for: Needs::All });
        }
        self.make_room(watch)?;
        // Until it is known that every other rank is a member of this control block, nobody goes on.
        let waits_for = if self.is_joined { needs } else { Needs::All };
        self.sequence += 1;
        self.posts.count += 1;
        self.posts.own[self.posts.count as usize % POSTS] = (call, number);
        (self.slot, self.published) = (slot(self.posts.count), self.posts.count);
        self.publish_processor();
        self.note = 0;
        self.in_own_slot = bytes.len();
        if needs == Needs::Nobody {
            self.put(0, bytes);
        }
        let header = Announcement { call, division: 0, first: 0 };
        self.publish(header, MemoryKind::InSlot, 0, bytes.len());
        if needs != Needs::Nobody {
            copy(bytes, &mut self.own_data.0[..bytes.len()]);
        }
        Ok(PostedCall { control_block: self, needs, waits_for })
    }

    /// Whether this rank's latest call is a post.
    pub(super) fn is_post(&self) -> bool {
        self.slot >= POSTS_START
    }

    /// Waits until a slot of the ring is free.
    #[inline]
    fn make_room<E>(&mut self, watch: Watch<'_, E>) -> Result<(), E> {
        let next = self.posts.count + 1;
        if next <= self.posts.all_compared + AHEAD {
            return Ok(());
        }
        let wanted = next - AHEAD + FURTHER;
        let me = self.me;
        for index in (0..self.members.len()).filter(|index| *index != me) {
            let word = self.members[index].word(slot(wanted));
            self.await_member(index, || word.load(Ordering::Acquire) >= wanted, &mut *watch)?;
            self.compare(index, wanted, &mut *watch)?;
        }
        self.posts.all_compared = wanted;
        Ok(())
    }

    /// Compares the posts of those members that this rank needs, whose latest it has seen.
    #[inline]
    fn compare_needed<E>(&mut self, needs: Needs, watch: Watch<'_, E>) -> Result<(), E> {
        match needs {
            Needs::Nobody => Ok(()),
            Needs::Member(member) => self.compare(member, self.posts.count, watch),
            Needs::All => self.compare_all(watch),
        }
    }

    /// Looks whether all, whose headers this rank has seen, have posted as many calls as this rank before they met.
    pub(super) fn compare_meetings<E>(&self, watch: Watch<'_, E>) -> Result<(), E> {
        for (index, member) in self.others() {
            if member.word(self.slot).load(Ordering::Acquire) != self.sequence {
                // It has posted more.
                let theirs = call_in(member, slot(self.posts.count + 1));
                watch(index, Some(Difference { earlier: None, theirs }))?;
            }
        }
        Ok(())
    }

    /// Compares what has been posted before a meeting, of which this rank has seen all headers.
    #[inline]
    pub(super) fn compare_posts<E>(&mut self, watch: Watch<'_, E>) -> Result<(), E> {
        if self.posts.all_compared < self.posts.count { self.compare_all(watch) } else { Ok(()) }
    }

    fn compare_all<E>(&mut self, watch: Watch<'_, E>) -> Result<(), E> {
        let (me, count) = (self.me, self.posts.count);
        for index in (0..self.members.len()).filter(|index| *index != me) {
            self.compare(index, count, &mut *watch)?;
        }
        self.posts.all_compared = count;
        Ok(())
    }

    /// Compares a member's posts up to the one with this number, which it has published.
    fn compare<E>(&mut self, index: usize, last: u64, watch: Watch<'_, E>) -> Result<(), E> {
        self.posts.compared.resize(self.members.len(), 0);
        let first = self.posts.compared[index].max(self.posts.all_compared) + 1;
        for number in first..=last {
            let theirs = call_in(&self.members[index], slot(number));
            if self.own_post(number).0 != theirs {
                watch(index, Some(self.differs(number, theirs)))?;
            }
        }
        self.posts.compared[index] = last.max(first - 1);
        Ok(())
    }

    fn own_post(&self, number: u64) -> (Call, u64) {
        self.posts.own[number as usize % POSTS]
    }

    /// The difference between this rank's post with this number and their call.
    fn differs(&self, number: u64, theirs: Call) -> Difference {
        let is_latest = number == self.posts.count && self.is_post() && self.seen != self.sequence;
        Difference { earlier: (!is_latest).then(|| self.own_post(number)), theirs }
    }

    /// Looks where a member is for which this rank waits: it may have made another call.
    pub(super) fn other_call(&self, index: usize) -> Option<Difference> {
        if self.sequence == NEVER {
            return None;
        }
        let (member, is_post) = (&self.members[index], self.is_post());
        // They are to meet next, or meet now. Has it met, when it should have posted a call?
        let meeting = self.meetings + u64::from(is_post);
        let met_at = member.word(slot_of(meeting)).load(Ordering::Acquire);
        let before = self.met[(meeting % 2) as usize];
        let should_be = if is_post { self.sequence + 1 } else { self.sequence };
        if before < met_at && met_at < should_be {
            return Some(self.differs(met_at - (meeting - 1), call_in(member, slot_of(meeting))));
        }
        // Has it posted a call where it should meet this rank?
        let more = self.posts.count + 1;
        (!is_post && member.word(slot(more)).load(Ordering::Acquire) >= more)
            .then(|| Difference { earlier: None, theirs: call_in(member, slot(more)) })
    }
}

/// The call in the header of a member's slot.
fn call_in(member: &Mapping, slot: usize) -> Call {
    let half = |index: usize| u128::from(member.word(slot + 8 + 8 * index).load(Ordering::Relaxed));
    half(1) << 64 | half(0)
}

/// The offset of the slot of the post with this number.
pub(super) fn slot(number: u64) -> usize {
    POSTS_START + (number % POSTS as u64) as usize * SLOT
}
