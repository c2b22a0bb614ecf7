//! Blocking operations. They run on the caller's thread, on the caller's memory.

use std::time::Instant;

use super::ProcessGroup;
use crate::buffer::Buffer;
use crate::caller::Caller;
use crate::collective::Memory;
use crate::collective::ReduceOp;
use crate::dtype::{DType, Element};
use crate::error::Result;
use crate::rank::Rank;
use crate::trace::Track;
use crate::wire::frame::{Call, Operation};

impl ProcessGroup {
    /// Combines `data` with the other ranks' `data`, element by element; every rank gets the result in place.
    ///
    /// Ranks of one host combine their data in shared memory. Between hosts it uses recursive doubling for small buffers,
    /// recursive halving for medium ones and a ring for large ones, as [`Tuning`](crate::Tuning) says.
    /// docs/algorithms.md states steps and bytes.
    ///
    /// # Errors
    /// If a peer fails, leaves or calls something else, or the time-out passes. `data` is then unspecified. Also if
    /// `op` is not defined for the type ([`ReduceOp::supports`]), before anything is sent.
    #[doc(alias("allreduce", "MPI_Allreduce"))]
    pub fn all_reduce<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result<()> {
        let call = self.call_of::<T>(Operation::AllReduce, data.len()).reducing(op);
        call.prepare(op, bytemuck::cast_slice_mut(data))?;
        self.run(call, Memory::InPlace(bytemuck::cast_slice_mut(data)))
    }

    /// Copies the root's `data` to every rank.
    ///
    /// The root may return before the others have called it. [`barrier`](Self::barrier) waits for them.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce), and if `root` is not a rank of this group.
    #[doc(alias("bcast", "MPI_Bcast"))]
    pub fn broadcast<T: Element>(&self, data: &mut [T], root: Rank) -> Result<()> {
        let root = self.member(root)?;
        let call = self.call_of::<T>(Operation::Broadcast, data.len()).rooted_at(root);
        self.run(call, Memory::InPlace(bytemuck::cast_slice_mut(data)))
    }

    /// Gathers `input`, of the same length on every rank, from all ranks: rank r's elements are at r·len in `output`.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce), and if `output` is not `world_size` times as long as `input`.
    #[doc(alias("allgather", "all_gather_into_tensor"))]
    pub fn all_gather<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        self.check_length("all_gather", "output", output.len(), "input", input.len())?;
        self.run(self.call_of::<T>(Operation::AllGather, input.len()), out_of_place(input, output))
    }

    /// Combines `input` with the other ranks' `input`. Rank r gets the elements from r·len on, in `output`.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce), if `input` is not `world_size` times as long as `output`, and if there is too little memory for a copy of
    /// `input`.
    #[doc(alias("reducescatter", "reduce_scatter_tensor"))]
    pub fn reduce_scatter<T: Element>(&self, input: &[T], output: &mut [T], op: ReduceOp) -> Result<()> {
        self.check_length("reduce_scatter", "input", input.len(), "output", output.len())?;
        let call = self.call_of::<T>(Operation::ReduceScatter, input.len()).reducing(op);
        call.check(op)?;
        if op.factor().is_none() {
            return self.run(call, out_of_place(input, output));
        }
        let mut scaled = Buffer::try_from_slice(input)?;
        call.prepare(op, scaled.as_bytes_mut())?;
        let output = bytemuck::cast_slice_mut(output);
        self.run(call, Memory::OutOfPlace { input: scaled.as_bytes(), output })
    }

    /// Returns when every rank has called it.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn barrier(&self) -> Result<()> {
        self.run(self.call_of::<u8>(Operation::Barrier, 0), Memory::InPlace(&mut []))
    }

    /// Leaves the group together with all other ranks, once all have made the same calls.
    ///
    /// A rank does not wait in every call: the root of a [`broadcast`](Self::broadcast) or a [`scatter`](Self::scatter), and
    /// every other rank of a [`reduce`](Self::reduce) or a [`gather`](Self::gather), may only send. Its call
    /// may then return before it can know what the others have called. If they have called something else, such as the same
    /// with another root, the next collective returns the error on every rank. A program whose last collective is such a
    /// call learns it here, or from [`leave`](Self::leave), which does not wait for ranks that are still busy. The same holds
    /// if another rank leaves without that call. If it has left before, and this rank knows it, the call itself returns the error.
    ///
    /// This is a [`barrier`](Self::barrier), and then a drop of this handle. Other handles stay, and so does the group with
    /// them.
    ///
    /// ```
    /// use phalanx::{ProcessGroup, Rank};
    /// let group = ProcessGroup::alone()?;
    /// group.broadcast(&mut [1.0f32], Rank::MAIN)?;
    /// group.close()?;
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce), and if ranks have made different calls before.
    #[doc(alias("destroy_process_group", "MPI_Finalize"))]
    pub fn close(self) -> Result<()> {
        self.in_call(Caller::Close).barrier()
    }

    /// Leaves the group, if this is its last handle, as a drop does, and returns the error if ranks have made different calls and no
    /// call has returned that before.
    ///
    /// A rank that leaves tells its last call to the others, and waits a moment, at most for the time-out between hosts, for theirs. A
    /// rank that is still busy answers with its latest call. So at least one of two ranks that differ gets the error, and both if
    /// both have made the call; [`close`](Self::close) waits until all have. A rank that leaves without a call that others have
    /// made gets it too, and those who have made that call, [`is_peer_left`](crate::Error::is_peer_left).
    ///
    /// A drop writes this error to standard error, and leaves it to the launcher: `phalanx run`, `phalanx launch` and
    /// `phalanx::spawn` take exit code 0 of such a rank for a failure.
    ///
    /// Threads of one process ([`in_process`](Self::in_process)) have no connections to tell it on.
    ///
    /// ```
    /// use phalanx::{ProcessGroup, Rank};
    /// let group = ProcessGroup::alone()?;
    /// group.broadcast(&mut [1.0f32], Rank::MAIN)?;
    /// group.leave()?;
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    ///
    /// # Errors
    /// If ranks have made different calls, as above.
    pub fn leave(self) -> Result<()> {
        let health = self.inner.health.clone();
        health.ask(true);
        drop(self);
        // If there are other handles, the last of them is dropped.
        health.ask(false);
        health.parting().inspect(|_| health.note_returned()).map_or(Ok(()), Err)
    }

    /// The call of a collective on this handle, with the name of the user's call, if there is one.
    pub(super) fn call(&self, operation: Operation, dtype: DType, elements: usize) -> Call {
        Call { caller: self.caller, ..Call::new(operation, dtype, elements) }
    }

    pub(super) fn call_of<T: Element>(&self, operation: Operation, elements: usize) -> Call {
        self.call(operation, T::DTYPE, elements)
    }

    pub(super) fn run(&self, call: Call, memory: Memory<'_>) -> Result<()> {
        self.begin()?;
        let timeout = self.operation_timeout();
        let trace = &self.inner.trace;
        self.run_in_turn(&timeout, |engine| {
            let begin = trace.is_enabled().then(Instant::now);
            let outcome = engine.collective(call, memory, &timeout);
            if let Some(begin) = begin {
                trace.complete(Track::Communication, call.to_string(), begin, Instant::now(), &[]);
            }
            outcome
        })
    }
}

pub(super) fn out_of_place<'a, T: Element>(input: &'a [T], output: &'a mut [T]) -> Memory<'a> {
    Memory::OutOfPlace { input: bytemuck::cast_slice(input), output: bytemuck::cast_slice_mut(output) }
}

#[cfg(all(test, feature = "testing"))]
#[allow(clippy::unwrap_used, reason = "helpers of tests are tests")]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::testing::{Fabric, groups};

    const LIMIT: Duration = Duration::from_secs(20);

    /// Calls in which a rank waits for nobody: of rank 0, with another rank.
    const ONLY_SENDING: [fn(&ProcessGroup, Rank) -> Result<()>; 4] = [
        |group, _| group.broadcast(&mut [7u8], Rank::MAIN),
        |group, _| group.scatter(&[7u8; 2], &mut [0u8], Rank::MAIN),
        |group, other| group.reduce(&mut [7u8], other, ReduceOp::Sum),
        |group, other| group.gather(&[7u8], &mut [], other),
    ];

    /// The groups of two ranks, which have made a call if `called`.
    fn two(fabric: Fabric, called: bool) -> [ProcessGroup; 2] {
        let groups: [ProcessGroup; 2] = groups(2, fabric).unwrap().try_into().unwrap();
        let groups = groups.map(|group| group.with_timeout(LIMIT));
        std::thread::scope(|scope| {
            for group in groups.iter().filter(|_| called) {
                scope.spawn(move || group.barrier().unwrap());
            }
        });
        groups
    }

    /// Lets the other rank leave, and waits until this one knows it. Who has left.
    fn gone(group: &ProcessGroup, other: ProcessGroup) -> Rank {
        let rank = other.rank();
        drop(other);
        let start = Instant::now();
        while !group.health().has_left(rank) {
            assert!(start.elapsed() < LIMIT);
            std::thread::yield_now();
        }
        rank
    }

    #[test]
    fn a_call_in_which_a_rank_only_sends_is_an_error_if_another_has_left() {
        for fabric in Fabric::ALL {
            for (number, send) in ONLY_SENDING.iter().enumerate() {
                for called in [false, true] {
                    let [group, other] = two(fabric, called);
                    let to = gone(&group, other);
                    let what = format!("{number}, {called}, {fabric:?}");
                    let error = send(&group, to).unwrap_err();
                    assert!(error.is_peer_left() && error.peer() == Some(to), "{what}: {error}");
                    // It has been returned.
                    group.leave().unwrap();
                }
            }
        }
    }

    #[test]
    fn who_has_only_sent_hears_when_it_leaves_that_another_has_left_without_the_call() {
        // Threads have no connections.
        for fabric in [Fabric::Tcp, Fabric::TwoHosts, Fabric::SharedMemory] {
            for (number, send) in ONLY_SENDING.iter().enumerate() {
                for called in [false, true] {
                    // In their first call ranks that share memory wait for each other.
                    if fabric == Fabric::SharedMemory && !called {
                        continue;
                    }
                    let [group, other] = two(fabric, called);
                    let to = other.rank();
                    send(&group, to).unwrap();
                    drop(other);
                    let error = group.leave().unwrap_err();
                    let what = format!("{number}, {called}, {fabric:?}: {error}");
                    assert!(error.is_peer_left() && error.peer() == Some(to), "{what}");
                }
            }
        }
    }

    #[test]
    fn after_a_call_in_which_all_have_met_nobody_waits_at_the_end_for_what_others_say_of_the_one_before() {
        let groups = two(Fabric::SharedMemory, true);
        let last_after = |call: fn(&ProcessGroup) -> Result<()>| {
            std::thread::scope(|scope| {
                groups.iter().for_each(|group| drop(scope.spawn(move || call(group).unwrap())));
            });
            groups
                .each_ref()
                .map(|group| group.health().calls(|calls| calls.latest()).unwrap().call.operation)
        };
        let broadcast = |group: &ProcessGroup| group.broadcast(&mut [7u8], Rank::MAIN);
        assert_eq!(last_after(broadcast), [Operation::Broadcast; 2]);
        assert_eq!(last_after(ProcessGroup::barrier), [Operation::Barrier; 2]);
        // What comes then has nothing to add.
        assert_eq!(last_after(|group| group.all_reduce(&mut [7u8], ReduceOp::Sum)), [Operation::Barrier; 2]);
    }

    #[test]
    fn memory_that_is_not_there_is_an_error_and_ends_neither_the_process_nor_the_group() {
        for fabric in [Fabric::InProcess, Fabric::Tcp, Fabric::SharedMemory] {
            let [group, other] = two(fabric, false);
            // More bytes than processors can address.
            let much = 1 << 58;
            let none = || Buffer::zeroed(DType::F64, 0);
            for error in [
                group.alloc(DType::F64, much).map(drop),
                group.all_gather_v_async(none(), &[0, much]).map(drop),
                group.all_to_all_v_async(none(), &[0, 0], &[0, much]).map(drop),
            ] {
                let error = error.unwrap_err();
                assert!(error.is_out_of_memory() && error.remedy().is_some(), "{fabric:?}: {error}");
            }
            std::thread::scope(|scope| {
                scope.spawn(|| other.barrier().unwrap());
                group.barrier().unwrap();
            });
        }
    }

    #[test]
    fn an_error_that_no_call_has_returned_is_that_of_leaving() {
        for fabric in [Fabric::Tcp, Fabric::TwoHosts, Fabric::SharedMemory] {
            for waits in [false, true] {
                let [group, other] = two(fabric, false);
                let to = gone(&group, other);
                let buffer = Buffer::from_slice(&[7u8]);
                drop(match waits {
                    false => group.broadcast_async(buffer, Rank::MAIN).unwrap(),
                    true => group.all_reduce_async(buffer, ReduceOp::Sum).unwrap(),
                });
                let error = group.leave().unwrap_err();
                let what = format!("{waits}, {fabric:?}: {error}");
                assert!(error.is_peer_left() && error.peer() == Some(to), "{what}");
            }
        }
    }
}
