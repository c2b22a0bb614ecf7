//! Memory domains: ranks of one host that reach each other's memory, and their collectives.
//!
//! All ranks of a domain synchronise their collectives on a control block. A call uses one of five protocols:
//!
//! - `eager`: little data that goes to one rank, or comes from one, is posted: a rank that only sends goes on before the others have come.
//! - `direct`: if all ranks' memory is registered, each rank combines its chunk in place, for all ranks.
//! - `small`: little data is in the slots, behind the headers that announce the call. Every rank combines everything.
//!   The smallest calls always use it.
//! - `copied`: if much ordinary memory is only copied, each rank copies it out of the others' processes.
//! - `staged`: otherwise the data passes through staging buffers that all ranks reach, one window at a time.
//!
//! All protocols combine the elements in the order of the ranks, so that all give the same bits.
//!
//! If the domain is the whole world, collectives need no plan. With several hosts, what is combined or broadcast goes
//! through memory within each host, and only what must cross between them goes over TCP (`group::engine::hosts`).

// A forgotten operation must not compile.
#![deny(clippy::wildcard_enum_match_arm)]

mod connect;
mod copied;
mod direct;
mod eager;
mod in_place_v;
mod monitored_barrier;
mod reduce_scatter;
mod routes;
mod small;
mod staged;

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;

use phalanx_proto::domain::{encoded_call, partition, reach};
use phalanx_sys::arena::Arena;
use phalanx_sys::control_block::{
    Brought, ControlBlock, Difference, Protocol, SharedOperation, Unregistered,
};

#[cfg(any(test, fuzzing, feature = "fuzzing"))]
pub use self::connect::fuzz;
pub(crate) use self::connect::{Joined, Lending, Lent, Mapped, decline, join, keys_of, refused};
use self::encoded_call::EncodedCall;
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
pub use self::encoded_call::fuzz as fuzz_encoded_call;
pub(crate) use self::monitored_barrier::absent;
pub(crate) use self::partition::Partition;
pub(crate) use self::reach::Reach;
use self::routes::{Routes, Uneven};
use crate::collective::Memory;
use crate::collective::ReduceOp;
use crate::collective::kernel::Fold;
use crate::deadline::Timeout;
use crate::error::{Error, Result};
use crate::health::Health;
use crate::interrupt;
use crate::notice::warn;
use crate::rank::{Generation, Rank, Sequence};
use crate::transport::late;
use crate::wire::frame::{Call, Copying, Header, History, Operation};

/// A wait counts as long after this many checks, which are at most 10 ms apart once the rank sleeps.
const LONG_WAIT_CHECKS: u32 = 100;
/// Shares end at cache lines, so that no two ranks write the same line.
const LINE: usize = 64;

/// A rank's membership in its domain: the ranks with which it shares memory.
pub(crate) struct Domain {
    peers: Peers,
    is_world: bool,
    /// Whether ranks copy out of each other's processes, if the kernel allows it. If one does not, it offers no memory, and all stage.
    copies: bool,
    arena: Arc<Arena>,
    control_block: ControlBlock,
}

/// The ranks of a domain, as one of them sees them.
struct Peers {
    rank: Rank,
    /// In order. A rank's index here is its index in the control block.
    members: Vec<Rank>,
    health: Arc<Health>,
}

/// A call of the ranks of a domain.
struct DomainCall<'a> {
    peers: &'a Peers,
    call: &'a Call,
    sequence: Sequence,
    encoded: EncodedCall,
    timeout: &'a Timeout,
    /// How often it has checked whether to wait on.
    checks: Cell<u32>,
    /// Whether it is noted as a long wait.
    is_noted: Cell<bool>,
}

/// A collective in place whose counts are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InPlace {
    AllReduce,
    Reduce,
    ReduceScatter,
    Broadcast,
    AllGather,
    Barrier,
}

impl InPlace {
    /// An error for operations that the engine does in another way.
    fn of(operation: Operation) -> Result<Self> {
        match operation {
            Operation::AllReduce | Operation::AllReduceCoalesced => Ok(Self::AllReduce),
            Operation::Reduce => Ok(Self::Reduce),
            Operation::ReduceScatter => Ok(Self::ReduceScatter),
            Operation::Broadcast => Ok(Self::Broadcast),
            Operation::AllGather => Ok(Self::AllGather),
            Operation::Barrier => Ok(Self::Barrier),
            Operation::Gather
            | Operation::Scatter
            | Operation::AllToAll
            | Operation::AllToAllV
            | Operation::AllGatherV
            | Operation::AllGatherVInPlace
            | Operation::ReduceScatterV
            | Operation::MonitoredBarrier
            | Operation::PointToPoint => {
                Err(Error::protocol(format!("{} has no form in place with equal counts", operation.name())))
            }
        }
    }
}

/// A call, as seen by the rank at index `me` of `ranks`.
#[derive(Clone, Copy)]
struct Job<'a> {
    /// A reference: a copy made just after its fields were stored stalls the processor (store forwarding).
    call: &'a Call,
    me: usize,
    ranks: usize,
    /// The index of the root, if the call has one.
    root: usize,
}

impl Domain {
    /// The memory of this rank that the others of its domain reach.
    pub(crate) fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// Whether all ranks of the group are in this domain.
    pub(crate) fn is_world(&self) -> bool {
        self.is_world
    }

    /// A collective of all ranks of the domain.
    pub(crate) fn collective(
        &mut self,
        call: &Call,
        sequence: Sequence,
        memory: Memory<'_>,
        timeout: &Timeout,
    ) -> Result<()> {
        let members = &*self.peers.members;
        let root = call.root.and_then(|root| members.iter().position(|member| *member == root));
        let job = Job { call, me: self.control_block.me(), ranks: members.len(), root: root.unwrap_or(0) };
        let outcome = match memory {
            Memory::InPlace(data) => self.in_place(job, sequence, data, timeout),
            Memory::InPlaceV { data, counts } => self.in_place_v((*call, sequence), data, counts, timeout),
            Memory::OutOfPlace { input, output } => {
                self.out_of_place(job, sequence, (input, output), None, timeout)
            }
            Memory::OutOfPlaceV { input, output, sent, received } => {
                self.out_of_place(job, sequence, (input, output), Some((sent, received)), timeout)
            }
        };
        if let Some(reason) = self.control_block.still_shared() {
            // The group's failure has another cause, which stays. This is rare: there is no page, or no address, left.
            warn(format_args!(
                "{call} {sequence}: a rank that is late can still write into this call's memory: do not use it for \
                 anything else ({reason})"
            ));
        }
        outcome
    }

    /// Whether ranks copy out of each other's processes. The same on all.
    fn may_copy(&self) -> bool {
        self.copies && self.control_block.copies()
    }

    /// Takes memory for what is staged, at the first call that may stage something.
    fn take_windows(&self) -> Result<()> {
        self.arena.fill().map_err(|error| {
            Error::io("there is no shared memory for the first large collective of this group", error)
                .with_remedy("give the job more memory, or unset what limits it")
        })
    }

    fn in_place(
        &mut self,
        job: Job<'_>,
        sequence: Sequence,
        data: &mut [u8],
        timeout: &Timeout,
    ) -> Result<()> {
        let kind = InPlace::of(job.call.operation)?;
        let call = self.peers.call(job.call, sequence, timeout);
        let mut watch = |missing, difference| call.watch(missing, difference);
        if let Some(needs) = eager::needs(job) {
            return eager::in_place(&mut self.control_block, &call, (job, kind), needs, data);
        }
        let small = small::part(job, data.len(), 0);
        if let Some(own) = small.clone().filter(|_| small::always(job)) {
            let slots = self.control_block.small(call.encoded, &data[own]).slots(&mut watch)?;
            call.check(|index| slots.call(index))?;
            return small::in_place(job, kind, &slots, data);
        }
        self.take_windows()?;
        let division = staged::division(job, kind);
        let work = |operation: &mut SharedOperation<'_, '_, Error>| {
            call.check(|index| operation.call(index))?;
            match operation.protocol() {
                Protocol::Direct => direct::in_place(operation, job, kind),
                Protocol::Small => operation.slots(|slots, data| small::in_place(job, kind, slots, data)),
                Protocol::Copied => copied::in_place(operation, job, kind),
                Protocol::Staged => staged::in_place(operation, job, kind),
            }
        };
        if small.is_none() && self.may_copy() && copied::is_sooner(job, kind) {
            let outcome =
                self.control_block.offered_in_place(call.encoded, data, division, &mut watch, work)?;
            if outcome.is_some() {
                return Ok(());
            }
            say_that_copies_are_refused();
        }
        let ahead = |memory: &[u8], window: &mut [u8]| {
            staged::ahead(job, kind, memory, window);
            Ok(())
        };
        let unregistered = small.map_or(Unregistered::InWindow(&ahead), Unregistered::InSlot);
        self.control_block.in_place(call.encoded, data, (division, unregistered), &mut watch, work)
    }

    fn out_of_place(
        &mut self,
        job: Job<'_>,
        sequence: Sequence,
        (input, output): (&[u8], &mut [u8]),
        uneven: Uneven<'_>,
        timeout: &Timeout,
    ) -> Result<()> {
        let (members, call) = (&*self.peers.members, self.peers.call(job.call, sequence, timeout));
        let mut watch = |missing, difference| call.watch(missing, difference);
        // A reduce_scatter combines; the others copy.
        let combines = job.call.operation == Operation::ReduceScatter;
        let copying = if combines { None } else { Some(Copying::of(job.call.operation)?) };
        // An input that no other rank reads is not shared.
        let brought = match copying {
            Some(Copying::Scatter) if job.me != job.root => &[],
            Some(Copying::Gather) if job.me == job.root => &[],
            Some(_) | None => input,
        };
        let note = copying.map_or_else(Vec::new, |copying| routes::note(job, copying, uneven));
        let small = small::part(job, brought.len(), note.len());
        let routes = copying.map(|copying| Routes::new((job, copying), uneven));
        // While the others come: it needs none of them.
        let keep = |output: &mut [u8]| routes.iter().for_each(|routes| routes.keep(input, output));
        if let (Some(needs), Some(routes)) = (eager::needs(job), &routes) {
            return eager::out_of_place(
                &mut self.control_block,
                &call,
                routes,
                needs,
                (input, brought, output),
            );
        }
        if small::always(job) {
            let begun = self.control_block.small(call.encoded, brought);
            keep(output);
            let slots = begun.slots(&mut watch)?;
            call.check(|index| slots.call(index))?;
            return match routes {
                Some(routes) => routes.copy(|from| slots.bytes(from), output),
                None => small::fold(job, &slots, job.chunk(job.me), input.len(), output),
            };
        }
        self.take_windows()?;
        let copied_from = copying.filter(|_| self.may_copy());
        let copied_from = copied_from.and_then(|copying| copied::least(job, copying, uneven.is_some()));
        let mut once = |copied_from| {
            let brought = Brought { note: &note, memory: brought, small: small.clone(), copied_from };
            let begun = self.control_block.out_of_place(call.encoded, brought);
            keep(output);
            begun.finish(&mut watch, |operation| {
                call.check(|index| operation.call(index))?;
                let Some(routes) = &routes else {
                    return match operation.protocol() {
                        Protocol::Direct => direct::reduce_out_of_place(operation, job, output),
                        Protocol::Small => operation.slots(|slots, _| {
                            small::fold(job, slots, job.chunk(job.me), input.len(), output)
                        }),
                        Protocol::Copied | Protocol::Staged => {
                            staged::reduce_out_of_place(operation, job, input, output)
                        }
                    };
                };
                let routes = routes.among(members, |index| operation.note(index))?;
                match operation.protocol() {
                    Protocol::Direct => operation.read(|inputs| routes.copy(|from| inputs[from], output)),
                    Protocol::Small => {
                        operation.slots(|slots, _| routes.copy(|from| slots.bytes(from), output))
                    }
                    Protocol::Copied => copied::out_of_place(operation, &routes, output),
                    Protocol::Staged => staged::copy(operation, job, &routes, output),
                }
            })
        };
        if once(copied_from)?.is_none() {
            say_that_copies_are_refused();
            once(None)?;
        }
        Ok(())
    }
}

impl Peers {
    fn call<'a>(&'a self, call: &'a Call, sequence: Sequence, timeout: &'a Timeout) -> DomainCall<'a> {
        DomainCall {
            peers: self,
            call,
            sequence,
            encoded: encoded_call::encode(call),
            timeout,
            checks: Cell::new(0),
            is_noted: Cell::new(false),
        }
    }
}

impl DomainCall<'_> {
    /// The call as the others see it, with its number.
    fn posted(&self) -> (EncodedCall, u64) {
        (self.encoded, self.sequence.0)
    }

    /// An error if waiting for the rank with the index `missing` is useless, or if that rank makes another call.
    fn watch(&self, missing: usize, difference: Option<Difference>) -> Result<()> {
        let (health, peer) = (&*self.peers.health, self.peers.members[missing]);
        if let Some(Difference { earlier, theirs }) = difference {
            let (own, sequence) = match earlier {
                Some((own, number)) => (encoded_call::decode(own)?, Sequence(number)),
                None => (*self.call, self.sequence),
            };
            self.compare((own, sequence), theirs, peer)?;
        }
        if health.has_failed() || health.has_left(peer) {
            return Err(health.peer_failed(peer, "it has dropped out of the group"));
        }
        if self.timeout.deadline().has_passed() {
            return Err(late(peer, health.host(peer)));
        }
        interrupt::check()?;
        self.checks.set(self.checks.get().saturating_add(1));
        if self.checks.get() >= LONG_WAIT_CHECKS
            && health.waits.waits_in_memory(header(*self.call, self.sequence), peer)
        {
            self.is_noted.set(true);
        }
        Ok(())
    }

    /// An error with both calls, if a rank makes another one. `theirs` is what the rank with an index calls.
    fn check(&self, theirs: impl Fn(usize) -> EncodedCall) -> Result<()> {
        for (index, peer) in self.peers.members.iter().enumerate() {
            let theirs = theirs(index);
            if theirs != self.encoded {
                self.compare((*self.call, self.sequence), theirs, *peer)?;
            }
        }
        Ok(())
    }

    /// An error with both calls: this rank's with its number, and `theirs` in its place.
    fn compare(&self, (own, sequence): (Call, Sequence), theirs: EncodedCall, peer: Rank) -> Result<()> {
        // The memory is of this job and generation, and both ranks have made the same number of calls before. The encoded call
        // has no field for the tuning; only frames compare that.
        let own = header(Call { tuning: 0, ..own }, sequence);
        own.check(&header(encoded_call::decode(theirs)?, sequence), self.peers.rank, peer)
    }
}

impl Drop for DomainCall<'_> {
    fn drop(&mut self) {
        if self.is_noted.get() {
            self.peers.health.waits.ends_in_memory();
        }
    }
}

/// A buffer for a result that replaces one of its operands; it stays in the L1 cache.
#[repr(align(64))]
struct Block([u8; 8 << 10]);

impl Default for Block {
    fn default() -> Self {
        Self([0; 8 << 10])
    }
}

impl Job<'_> {
    /// Bytes of the call's buffer, as the call counts them.
    fn bytes(&self) -> usize {
        self.call.elements as usize * self.call.dtype.size()
    }

    /// The range that the rank with this `index` contributes to an `all_gather`, or receives from a `reduce_scatter`.
    fn chunk(&self, index: usize) -> Range<usize> {
        let scatters = self.call.operation == Operation::ReduceScatter;
        let bytes = if scatters { self.bytes() / self.ranks } else { self.bytes() };
        index * bytes..(index + 1) * bytes
    }

    /// The other ranks. Each rank begins with another one.
    fn others(&self) -> impl Iterator<Item = usize> {
        (self.me + 1..self.ranks).chain(0..self.me)
    }

    fn fold(&self) -> Fold {
        // Without a reduction nothing is combined.
        let op = self.call.reduce.unwrap_or(ReduceOp::Sum);
        Fold::of_all(self.call.dtype, op, self.ranks as u32)
    }
}

fn header(call: Call, sequence: Sequence) -> Header {
    let (generation, history) = (Generation::default(), History::default());
    Header { call, sequence, generation, history, payload: 0 }
}

fn say_that_copies_are_refused() {
    tracing::debug!(
        "a rank of this host cannot copy out of another one's process: long data is staged from now on"
    );
}

fn short() -> Error {
    Error::malformed("a rank of this host gave data of another length than its call says")
}

#[cfg(test)]
mod tests;
