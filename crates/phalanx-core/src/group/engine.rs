//! Executes plans: passes each step of a collective to the transport, on the memory of the operation.

// A forgotten operation must not compile.
#![deny(clippy::wildcard_enum_match_arm)]

mod gather;
mod hosts;
mod monitored_barrier;

use std::ops::Range;
use std::sync::Arc;

use self::hosts::Hierarchical;
use crate::buffer::AlignedBytes;
use crate::collective::kernel::Kernel;
use crate::collective::{self, Choice, Counts, Hierarchy, Memory, Plan, ReduceOp, Step, Tuning, TuningRow};
use crate::deadline::{Deadline, Timeout};
use crate::domain::{Domain, Partition};
use crate::error::{Error, Result};
use crate::health::Health;
use crate::rank::{Generation, Rank, Sequence};
use crate::transport::{Incoming, Outgoing, Transport};
use crate::wire::frame::{Call, Copying, Header, History, Operation};
use crate::world_size::WorldSize;

/// How many of its own calls a rank remembers, for an error that shows where its calls and another rank's begin to
/// differ.
const REMEMBERED: usize = 64;

/// After so many collectives that have not needed it, scratch memory is freed.
const IDLE_CALLS: u64 = 1_000;

/// The memory to which a plan's ranges refer.
enum Space<'a> {
    /// Sent and received elements are in one buffer.
    One(&'a mut [u8]),
    /// Sent elements are in the first, received ones in the second.
    Two(&'a [u8], &'a mut [u8]),
}

/// A group's connections, with the scratch memory of plans.
pub(super) struct Engine {
    rank: Rank,
    world: WorldSize,
    generation: Generation,
    choice: Choice,
    transport: Box<dyn Transport>,
    /// Set if there are several hosts, some of them with several ranks.
    hierarchy: Option<Arc<Hierarchy>>,
    /// The domain of the ranks that share memory with this one.
    domain: Option<Domain>,
    health: Arc<Health>,
    /// The elements being sent, if the same elements are received and combined in that step.
    snapshot: AlignedBytes,
    /// Scratch memory: a copy of the whole input of a `reduce_scatter`, or the blocks of a tree. What none of the last [`IDLE_CALLS`] collectives
    /// has needed half of is freed: one large call would keep it for the rest of a job.
    workspace: AlignedBytes,
    /// The last collective that has needed half of it and more.
    workspace_used: Sequence,
    collectives: Sequence,
    /// Of the collectives before the one that runs, as far as their data goes in frames.
    history: History,
    /// Where all ranks share memory: whether the call before had a root. In such a call some ranks may have waited for nobody.
    had_root: bool,
    /// This rank's latest calls, by their numbers modulo [`REMEMBERED`].
    called: Vec<Option<(Call, Sequence)>>,
    /// The call of the last frame from each peer.
    heard: Vec<Option<(Call, Sequence)>>,
}

impl Engine {
    pub(super) fn new(
        rank: Rank,
        world: WorldSize,
        generation: Generation,
        transport: Box<dyn Transport>,
        (partition, domain): (Partition, Option<Domain>),
        health: Arc<Health>,
    ) -> Self {
        Self {
            rank,
            world,
            generation,
            choice: Tuning::default().choice(world),
            transport,
            hierarchy: Hierarchy::new(partition.domains(), rank).map(Arc::new),
            domain,
            health,
            snapshot: AlignedBytes::default(),
            workspace: AlignedBytes::default(),
            workspace_used: Sequence::default(),
            collectives: Sequence::default(),
            history: History::default(),
            had_root: false,
            called: vec![None; REMEMBERED],
            heard: vec![None; world.count()],
        }
    }

    pub(super) fn health(&self) -> Arc<Health> {
        self.health.clone()
    }

    /// Chooses algorithms by `tuning` from now on. Ranks with different tables could wait for each other for ever, so
    /// the tables are compared at once: in the barrier `call` each rank gets a frame from its neighbour, whatever the
    /// table.
    pub(super) fn tune(&mut self, tuning: &Tuning, call: Call, deadline: Deadline) -> Result<()> {
        self.choice = tuning.choice(self.world);
        let call = Call { tuning: self.choice.fingerprint, ..call };
        let plan = collective::dissemination(self.rank, self.world);
        self.execute(call, Sequence::default(), &plan, Space::One(&mut []), deadline)
    }

    /// Chooses algorithms by `tuning` from now on, as the ranks have agreed before.
    pub(super) fn choose(&mut self, tuning: &Tuning) {
        self.choice = tuning.choice(self.world);
    }

    /// The sizes by which algorithms are chosen.
    pub(super) fn row(&self) -> &TuningRow {
        &self.choice.row
    }

    /// A collective of all ranks, on this rank's memory.
    pub(super) fn collective(&mut self, call: Call, memory: Memory<'_>, timeout: &Timeout) -> Result<()> {
        let sequence = self.collectives.advance();
        self.health.waits.begin(sequence);
        let call = Call { tuning: self.choice.fingerprint, ..call };
        self.called[sequence.0 as usize % REMEMBERED] = Some((call, sequence));
        if let Some(domain) = self.domain.as_mut().filter(|domain| domain.is_world()) {
            self.health.cause().map_or(Ok(()), Err)?;
            // A rank that waits for nobody would not notice that another one has left without this call. If it leaves later, the next call notices it, or the
            // end. In the call after it all meet: with that one as the last, nobody waits at the end for what others say of the one before.
            if std::mem::replace(&mut self.had_root, call.root.is_some()) || call.root.is_some() {
                let header =
                    Header { call, sequence, generation: self.generation, history: self.history, payload: 0 };
                let absent = self.health.calls(|calls| {
                    calls.note(header);
                    calls.absent(sequence)
                });
                if let Some(peer) = absent {
                    let error = self.health.fail_without(peer, call, sequence);
                    self.health.note_failed_call(&error);
                    return Err(error);
                }
            }
            let done = domain.collective(&call, sequence, memory, timeout);
            let done = done.map_err(|error| self.health.fail_operation(error, call, sequence));
            return done.inspect_err(|error| self.health.note_failed_call(error));
        }
        self.health.calls(|calls| calls.begin(self.header(call, sequence)));
        let outcome = self.between_hosts(call, sequence, memory, timeout);
        let absent = self.health.calls(|calls| {
            calls.end();
            calls.absent(sequence)
        });
        self.history = self.history.with(&self.header(call, sequence));
        // After the exchange, in which ranks compare their calls. A rank that waits for nobody would not notice: the system takes what it
        // sends. If the other leaves later, the next call notices it, or the end.
        let outcome = match absent.filter(|_| outcome.is_ok()) {
            Some(peer) => Err(self.health.fail_without(peer, call, sequence)),
            None => outcome,
        };
        outcome.inspect_err(|error| self.health.note_failed_call(error))
    }

    /// What goes before each payload of this call.
    fn header(&self, call: Call, sequence: Sequence) -> Header {
        Header { call, sequence, generation: self.generation, history: self.history, payload: 0 }
    }

    /// A collective of ranks that do not all share memory.
    fn between_hosts(
        &mut self,
        call: Call,
        sequence: Sequence,
        memory: Memory<'_>,
        timeout: &Timeout,
    ) -> Result<()> {
        if sequence.0.saturating_sub(self.workspace_used.0) > IDLE_CALLS {
            self.workspace = AlignedBytes::default();
        }
        // What is gathered by all goes on in place: each rank's elements to their own place first. In rounds a message has the elements of
        // several ranks, so its length alone does not show that the ranks' counts differ.
        let even;
        let (call, mut memory) = match (call.operation, memory) {
            (Operation::AllGather, Memory::OutOfPlace { input, output }) => {
                even = Counts::even(input.len() / call.dtype.size(), self.world);
                (call, self.at_own_place(call, input, output, &even))
            }
            (Operation::AllGather, Memory::InPlace(data)) => {
                even = Counts::even(data.len() / call.dtype.size() / self.world.count(), self.world);
                (call, Memory::InPlaceV { data, counts: &even })
            }
            (Operation::AllGatherV, Memory::OutOfPlaceV { input, output, received, sent: _ }) => {
                (call.in_parts(received.lengths()), self.at_own_place(call, input, output, received))
            }
            (_, memory) => (call, memory),
        };
        if let Some(hierarchy) = self.hierarchy.clone() {
            memory = match (memory, Hierarchical::of(call.operation)) {
                (Memory::InPlace(data), Some(kind)) => {
                    return self.by_hosts(&hierarchy, kind, (call, sequence), data, timeout);
                }
                (Memory::InPlaceV { data, counts }, _) => {
                    return self.in_place_v_by_hosts(&hierarchy, (call, sequence), data, counts, timeout);
                }
                // An asynchronous call is in place, and a blocking one is not: ranks may make one call in both ways.
                (Memory::InPlace(data), None) if self.scatters_by_hosts(&hierarchy, call, data.len()) => {
                    let counts =
                        Counts::even(data.len() / call.dtype.size() / self.world.count(), self.world);
                    let call = (call, sequence);
                    return self.reduce_scatter_by_hosts(&hierarchy, call, data, &counts, timeout);
                }
                (Memory::OutOfPlace { input, output }, None)
                    if self.scatters_by_hosts(&hierarchy, call, input.len()) =>
                {
                    let counts = Counts::even(output.len() / call.dtype.size(), self.world);
                    return self.through_copy((call, sequence), input, output, |engine, data| {
                        engine.reduce_scatter_by_hosts(&hierarchy, (call, sequence), data, &counts, timeout)
                    });
                }
                (from_rank_to_rank, _) => {
                    self.agree_on_host(call, sequence, timeout)?;
                    from_rank_to_rank
                }
            };
        }
        let deadline = timeout.deadline();
        match memory {
            Memory::InPlace(data) => self.in_place(call, sequence, data, deadline),
            Memory::InPlaceV { data, counts } => self.in_place_v(call, sequence, data, counts, deadline),
            Memory::OutOfPlaceV { input, output, sent, received } => {
                self.all_to_all(call, sequence, (input, sent), (output, received), deadline)
            }
            Memory::OutOfPlace { input, output } if call.operation == Operation::ReduceScatter => self
                .through_copy((call, sequence), input, output, |engine, data| {
                    engine.in_place(call, sequence, data, deadline)
                }),
            Memory::OutOfPlace { input, output } => match Copying::of(call.operation)? {
                Copying::AllToAll => {
                    let elements = input.len() / call.dtype.size() / self.world.count();
                    let counts = Counts::even(elements, self.world);
                    self.all_to_all(call, sequence, (input, &counts), (output, &counts), deadline)
                }
                Copying::Gather => self.gather(call, sequence, input, output, deadline),
                Copying::Scatter => self.scatter(call, sequence, input, output, deadline),
                Copying::AllGather => Err(Error::protocol("an all_gather has gone on out of place")),
            },
        }
    }

    fn in_place(
        &mut self,
        call: Call,
        sequence: Sequence,
        data: &mut [u8],
        deadline: Deadline,
    ) -> Result<()> {
        let plan = self.plan(&call, data.len() / call.dtype.size())?;
        self.execute(call, sequence, &plan, Space::One(data), deadline)
    }

    /// A reduce-scatter in a copy of its input, which `work` combines: `output` gets this rank's chunk of the result.
    fn through_copy(
        &mut self,
        call: (Call, Sequence),
        input: &[u8],
        output: &mut [u8],
        work: impl FnOnce(&mut Self, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        self.with_workspace(call, input.len(), |engine, data| {
            data.copy_from_slice(input);
            work(engine, data)?;
            let start = engine.rank.index() * output.len();
            output.copy_from_slice(&data[start..start + output.len()]);
            Ok(())
        })
    }

    /// Whether a reduce-scatter of `bytes` bytes is an all-reduce of which each rank keeps its own part.
    fn reduces_whole(&self, bytes: usize) -> bool {
        collective::reduces_whole(&self.choice.row, self.world, bytes)
    }

    /// Whether `call` is a `reduce_scatter`, and one of `bytes` bytes goes by hosts.
    fn scatters_by_hosts(&self, hierarchy: &Hierarchy, call: Call, bytes: usize) -> bool {
        call.operation == Operation::ReduceScatter
            && (hierarchy.scatters_in_few_rounds() || self.reduces_whole(bytes))
    }

    /// Lends `bytes` bytes of scratch memory. If there are none, the group fails: the other ranks would wait for this one.
    fn with_workspace(
        &mut self,
        (call, sequence): (Call, Sequence),
        bytes: usize,
        work: impl FnOnce(&mut Self, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let mut workspace = std::mem::take(&mut self.workspace);
        if bytes > workspace.as_slice().len() / 2 {
            self.workspace_used = sequence;
        }
        let outcome = match workspace.reserve_len(bytes) {
            Ok(()) => work(self, &mut workspace.as_mut_slice()[..bytes]),
            Err(error) => Err(self.health.fail_operation(error, call, sequence)),
        };
        self.workspace = workspace;
        outcome
    }

    /// The plan of a collective in place whose buffer holds `elements` on this rank.
    fn plan(&self, call: &Call, elements: usize) -> Result<Plan> {
        let (rank, world, dtype) = (self.rank, self.world, call.dtype);
        let (root, row) = (call.root.unwrap_or(Rank::MAIN), &self.choice.row);
        Ok(match call.operation {
            Operation::AllReduce | Operation::AllReduceCoalesced => {
                collective::all_reduce(row, rank, world, dtype, elements)
            }
            Operation::Broadcast => collective::broadcast(row, rank, world, root, dtype, elements),
            Operation::Reduce => collective::reduce(row, rank, world, root, dtype, elements),
            Operation::ReduceScatter if self.reduces_whole(elements * dtype.size()) => {
                collective::all_reduce(row, rank, world, dtype, elements)
            }
            Operation::ReduceScatter => collective::reduce_scatter(rank, world, elements),
            Operation::Barrier => collective::dissemination(rank, world),
            // They are never in place, have connections of their own, or a plan that is made from the counts.
            Operation::PointToPoint
            | Operation::Gather
            | Operation::Scatter
            | Operation::AllToAll
            | Operation::AllToAllV
            | Operation::MonitoredBarrier
            | Operation::ReduceScatterV
            | Operation::AllGather
            | Operation::AllGatherV
            | Operation::AllGatherVInPlace => {
                return Err(Error::protocol(format!("{} has no plan in place", call.operation.name())));
            }
        })
    }

    /// Any error in here leaves the connections in an unknown state, so it fails the whole group.
    fn execute(
        &mut self,
        call: Call,
        sequence: Sequence,
        plan: &Plan,
        space: Space<'_>,
        deadline: Deadline,
    ) -> Result<()> {
        self.execute_as(call.reduce, call, sequence, plan, space, deadline)
    }

    /// As [`execute`](Self::execute), but elements are combined by another operation than the call's.
    fn execute_as(
        &mut self,
        reduce: Option<ReduceOp>,
        call: Call,
        sequence: Sequence,
        plan: &Plan,
        mut space: Space<'_>,
        deadline: Deadline,
    ) -> Result<()> {
        self.check_health()?;
        let header = self.header(call, sequence);
        for step in plan {
            let done = self.step(header, reduce, step, &mut space, deadline);
            let done = done.inspect_err(|error| {
                if error.is_of_history() {
                    self.health.await_difference(sequence);
                }
            });
            let done = done.map_err(|error| self.last_heard(error, sequence));
            let done = done.map_err(|error| self.own_call_at(error, sequence));
            done.map_err(|error| self.health.fail_operation(error, call, sequence))?;
        }
        Ok(())
    }

    /// A peer that is late may itself wait for another: the call in which it was last heard of shows which rank is
    /// behind.
    fn last_heard(&self, error: Error, sequence: Sequence) -> Error {
        let Some(peer) = error.peer().filter(|_| error.is_timeout()) else { return error };
        match self.heard.get(peer.index()).copied().flatten() {
            None => error.adding(format!("; rank {peer} has not been heard of in any call")),
            Some((_, last)) if last == sequence => {
                error.adding(format!("; rank {peer} has begun this call, so it may wait for another rank"))
            }
            Some((call, last)) => error.adding(format!("; rank {peer} was last heard of in {call} {last}")),
        }
    }

    /// If a peer's call differs, adds this rank's own call of the same number: a root does not wait for the others, and may have
    /// made later calls before it receives the peer's.
    fn own_call_at(&self, error: Error, sequence: Sequence) -> Error {
        let theirs = error.sequence().filter(|theirs| error.is_mismatch() && *theirs < sequence);
        let Some(theirs) = theirs else { return error };
        match self.called[theirs.0 as usize % REMEMBERED] {
            Some((call, own)) if own == theirs => {
                error.adding(format!("; rank {} called {call} {own} before", self.rank))
            }
            _ => error,
        }
    }

    /// The group may have failed while the operation waited for its turn.
    fn check_health(&self) -> Result<()> {
        self.health.cause().map_or(Ok(()), Err)
    }

    fn step(
        &mut self,
        header: Header,
        reduce: Option<ReduceOp>,
        step: &Step,
        space: &mut Space<'_>,
        deadline: Deadline,
    ) -> Result<()> {
        let dtype = header.call.dtype;
        let bytes = |range: &Range<usize>| bytes_of(range, dtype.size());
        let send = step.send.as_ref().map(|send| (send.to, bytes(&send.range)));
        let recv = step.recv.as_ref().map(|recv| (recv, bytes(&recv.range)));
        let snapshot = &mut self.snapshot;
        let (from, to) = (send.as_ref().map(|send| &send.1), recv.as_ref().map(|recv| &recv.1));
        let (payload, into) = match space {
            Space::One(data) => borrow(data, from, to, snapshot)?,
            Space::Two(input, output) => (
                from.map_or(&[][..], |range| &input[range.clone()]),
                to.map_or(&mut [][..], |range| &mut output[range.clone()]),
            ),
        };
        let send = send.map(|(to, range)| {
            let header = Header { payload: range.len() as u64, ..header };
            Outgoing { to, header, payload }
        });
        let recv = recv.map(|(recv, range)| {
            let expect = Header { payload: range.len() as u64, ..header };
            let kernel = match reduce {
                Some(op) => Kernel { dtype, op, combine: recv.combine, parts: recv.parts },
                None => Kernel::replacing(dtype),
            };
            Incoming { from: recv.from, expect, into, kernel }
        });
        let from = recv.as_ref().map(|recv| recv.from);
        self.transport.exchange(send, recv, deadline)?;
        if let Some(heard) = from.and_then(|from| self.heard.get_mut(from.index())) {
            *heard = Some((header.call, header.sequence));
        }
        Ok(())
    }
}

fn bytes_of(range: &Range<usize>, size: usize) -> Range<usize> {
    range.start * size..range.end * size
}

/// Borrows what is sent and where to receive from the same memory. If they overlap, what is sent is copied first.
fn borrow<'a>(
    data: &'a mut [u8],
    send: Option<&Range<usize>>,
    recv: Option<&Range<usize>>,
    snapshot: &'a mut AlignedBytes,
) -> Result<(&'a [u8], &'a mut [u8])> {
    Ok(match (send, recv) {
        (None, None) => (&[], &mut []),
        (Some(send), None) => (&data[send.clone()], &mut []),
        (None, Some(recv)) => (&[], &mut data[recv.clone()]),
        (Some(send), Some(recv)) if send.end <= recv.start => {
            let (low, high) = data.split_at_mut(recv.start);
            (&low[send.clone()], &mut high[..recv.len()])
        }
        (Some(send), Some(recv)) if recv.end <= send.start => {
            let (low, high) = data.split_at_mut(send.start);
            (&high[..send.len()], &mut low[recv.clone()])
        }
        (Some(send), Some(recv)) => {
            snapshot.reserve_len(send.len())?;
            let copy = &mut snapshot.as_mut_slice()[..send.len()];
            copy.copy_from_slice(&data[send.clone()]);
            (copy, &mut data[recv.clone()])
        }
    })
}

#[cfg(all(test, feature = "testing"))]
#[allow(clippy::unwrap_used, reason = "helpers of tests are tests")]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::testing::{Fabric, run};

    #[test]
    fn scratch_memory_of_one_large_call_is_not_kept_for_ever_and_that_of_every_step_is() {
        run(2, Fabric::Tcp, |group| {
            let held = || {
                let held = |engine: &mut Engine| Ok(engine.workspace.as_slice().len());
                group.run_in_turn(&group.operation_timeout(), held).unwrap()
            };
            let scatter = |elements: usize| {
                let input = vec![1u8; 2 * elements];
                group.reduce_scatter(&input, &mut vec![0u8; elements], ReduceOp::Sum).unwrap();
            };
            scatter(10_000);
            assert_eq!(held(), 20_000);
            // One that needs less than half of it does not keep it, and one that needs more does.
            for (length, left) in [(10_000, 20_000), (10, 20)] {
                for _ in 0..=IDLE_CALLS {
                    group.barrier().unwrap();
                    scatter(length);
                }
                assert_eq!(held(), left);
            }
        });
    }

    #[test]
    fn a_rank_without_scratch_memory_fails_the_group_and_nobody_waits_for_it() {
        for fabric in [Fabric::InProcess, Fabric::Tcp] {
            let errors = run(2, fabric, |group| {
                if group.rank().is_main() {
                    return group.barrier().unwrap_err();
                }
                let call = Call::new(Operation::ReduceScatter, DType::U8, 0);
                // More bytes than processors can address.
                let lacking = |engine: &mut Engine| {
                    engine.with_workspace((call, Sequence::default()), 1 << 60, |_, _| Ok(()))
                };
                group.run_in_turn(&group.operation_timeout(), lacking).unwrap_err()
            });
            assert!(errors.iter().all(Error::is_out_of_memory), "{fabric:?}: {errors:?}");
            assert!(
                errors[1].operation().is_some_and(|call| call.starts_with("reduce_scatter")),
                "{errors:?}"
            );
        }
    }
}
