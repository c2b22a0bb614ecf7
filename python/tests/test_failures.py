"""What every survivor learns when something goes wrong, and how programs end."""

import contextlib
import datetime
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from conftest import SINCE_2_15, blind_watcher, free_port, needs_async_op, processes, waiting

import phalanx_torch
from phalanx_torch import process_group
from phalanx_torch._errors import described, listed
from phalanx_torch.process_group import ProcessGroup

Error = phalanx_torch.Error


def differ(rank):
    with pytest.raises(Error) as caught:
        if rank == 0:
            dist.all_reduce(torch.zeros(3))
        else:
            dist.broadcast(torch.zeros(4, dtype=torch.float64), 0)
        dist.barrier()
    text = str(caught.value)
    assert caught.value.kind == "mismatch", text
    assert "all_reduce(sum, 3 x f32)" in text and "broadcast(4 x f64" in text, text
    assert "rank 0" in text and "rank 1" in text, text
    assert dist.group.WORLD.get_error() != c10d.ErrorType.SUCCESS
    assert dist.group.WORLD.failure().kind == "mismatch"
    dist.group.WORLD.abort()


def test_different_calls_are_both_named(ranks):
    ranks(2, differ)


def without_memory(rank, call):
    elements = 8 << 20
    own, several = torch.ones(elements), [torch.empty(elements), torch.empty(elements)]
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if rank == 1:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        # Less than the list takes as one buffer.
        resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20), limits[1]))
    try:
        with pytest.raises(Error, match="no memory for") as caught:
            call(own, several)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    # Rank 0 had begun the call that rank 1 could not make: the next one would be taken for it.
    with pytest.raises(Error, match="no memory for"):
        call(own, several)
    assert dist.group.WORLD.failure().kind == caught.value.kind == "other"


@pytest.mark.parametrize(
    "call",
    [
        lambda own, several: dist.all_gather(several, own),
        lambda own, several: dist.reduce_scatter(own, several),
        lambda own, several: dist.all_to_all(several, [own, own]),
    ],
    ids=["all_gather", "reduce_scatter", "all_to_all"],
)
def test_a_rank_that_has_no_memory_for_a_call_tells_the_others(ranks, call):
    ranks(2, without_memory, call)


def sparse_beside_a_gather(rank):
    with pytest.raises(Error) as caught:
        if rank == 0:
            dist.all_reduce(torch.eye(2).to_sparse())
        else:
            # As long as what a rank tells the others of its sparse tensor.
            dist.all_gather_into_tensor(torch.zeros(6, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
    text = str(caught.value)
    assert caught.value.kind == "mismatch" and "sum of sparse tensors" in text, text


def test_a_sum_of_sparse_tensors_is_no_gather(ranks):
    ranks(2, sparse_beside_a_gather)


def hooks_at_the_end(rank, end):
    group, calls = dist.group.WORLD, []
    blind_watcher(group)
    group.register_abort_hook(1, lambda: calls.append(1))
    dist.barrier()
    if end == "well":
        dist.destroy_process_group()
        assert calls == []
        return
    if rank == 0:
        with pytest.raises(Error):
            dist.all_reduce(torch.zeros(3))
            dist.barrier()
    else:
        with pytest.raises(Error):
            dist.broadcast(torch.zeros(4), 0)
            dist.barrier()
    if end == "abort":
        group.abort()
        assert calls == [1]
    dist.destroy_process_group()
    # Once, whatever else it does.
    assert calls == [1]


@pytest.mark.parametrize("end", ["abort", "destroy", "well"])
def test_hooks_are_called_when_the_group_is_left_at_once(ranks, end):
    ranks(2, hooks_at_the_end, end)


def hooks_while_closing(rank, path):
    group = dist.group.WORLD
    blind_watcher(group)
    group.register_abort_hook(1, lambda: open(f"{path}/{rank}", "a").write(f"{group.failure().kind}\n"))
    dist.barrier()
    if rank == 1:
        os._exit(0)
    # Nobody waits for this call but the end of the group.
    dist.all_reduce(torch.ones(2), async_op=True)
    dist.destroy_process_group()
    assert group.failure().kind == "peer_failed" and group.get_error() == c10d.ErrorType.REMOTE_ERROR


def test_hooks_are_called_for_what_is_found_while_the_group_closes(ranks, tmp_path):
    ranks(2, hooks_while_closing, tmp_path, dies=(1,))
    assert (tmp_path / "0").read_text() == "peer_failed\n"


def hooks_while_leaving(rank):
    group, told = dist.group.WORLD, []
    blind_watcher(group)
    group.register_abort_hook(1, lambda: told.append(group.failure().kind))
    dist.barrier()
    if rank == 0:
        dist.all_reduce(torch.ones(2), async_op=True)
    try:
        dist.destroy_process_group()
    except Error as error:
        # Who has left without the call learns of it if the other rank was quicker.
        assert rank == 1 and told == [error.kind] == ["mismatch"]
    return told


def test_hooks_are_called_for_calls_that_a_rank_has_not_made(ranks):
    first, second = ranks(2, hooks_while_leaving)
    assert first == ["peer_left"] and second in ([], ["mismatch"])


@pytest.mark.parametrize("how", ["pending", "exception"])
def test_hooks_are_called_at_exit(tmp_path, how):
    program = f"""
        import os, sys
        import torch, torch.distributed as dist
        import phalanx_torch
        from phalanx_torch import process_group
        process_group._WATCH_INTERVAL = 3600.0
        rank = int(sys.argv[1])
        dist.init_process_group("phalanx", init_method="file://{tmp_path}/store", rank=rank, world_size=2)
        group = dist.group.WORLD
        group.register_abort_hook(1, lambda: print("hook", group.failure().kind))
        dist.barrier()
        if rank == 1:
            os._exit(3)
        if "{how}" == "exception":
            raise ValueError("of the program")
        dist.all_reduce(torch.ones(2), async_op=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    started = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    said = [process.communicate(timeout=90)[0] for process in started]
    # In the second case the other rank's end may be known already.
    assert said[0] in (["hook peer_failed\n"] if how == "pending" else ["hook peer_failed\n", "hook aborted\n"])


def averages_and_sums(rank, dtype, call):
    with pytest.raises(Error) as caught:
        call(torch.ones(4, dtype=dtype), dist.ReduceOp.SUM if rank == 0 else dist.ReduceOp.AVG)
        dist.barrier()
    text = str(caught.value)
    assert caught.value.kind == "mismatch", text
    assert f"ReduceOp.AVG of {'integers' if dtype is torch.int64 else 'int16'} [" in text and "rank 0" in text and "rank 1" in text, text


CALLS = {
    "all_reduce": lambda tensor, op: dist.all_reduce(tensor, op),
    "async": lambda tensor, op: dist.all_reduce(tensor, op, async_op=True).wait(),
    "coalesced": lambda tensor, op: dist.group.WORLD.allreduce_coalesced([tensor], coalesced(op)).wait(),
    "reduce": lambda tensor, op: dist.reduce(tensor, 0, op),
    "reduce_scatter": lambda tensor, op: dist.reduce_scatter_tensor(tensor[:2].clone(), tensor, op),
    "lists": lambda tensor, op: dist.reduce_scatter(tensor[:2].clone(), [tensor[:2], tensor[2:]], op),
}


def coalesced(op):
    options = c10d.AllreduceCoalescedOptions()
    options.reduceOp = op
    return options


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("call", list(CALLS))
def test_an_average_of_integers_is_no_sum(ranks, monkeypatch, call, transport):
    monkeypatch.setenv("PHALANX_TRANSPORT", transport)
    # int16 is summed as int32 in both; int64 as it is, and averaged as pairs.
    for dtype in (torch.int16, torch.int64):
        ranks(2, averages_and_sums, dtype, CALLS[call])


def combined_at_the_end(tensors):
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)


SLICES = "combine slices of different lengths"
PARTED = {
    "coalesced": (lambda rank, tensors: dist.group.WORLD.allreduce_coalesced(tensors, coalesced(dist.ReduceOp.SUM)).wait(), SLICES),
    "manager": (lambda rank, tensors: combined_at_the_end(tensors), SLICES),
    "lists": (lambda rank, tensors: dist.reduce_scatter(torch.zeros_like(tensors[rank]), tensors), "have different counts"),
}


def parts_differ(rank, call, cause):
    with pytest.raises(Error, match=cause) as caught:
        # As many elements in all.
        call(rank, [torch.ones(length) for length in ((2, 3) if rank == 0 else (3, 2))])
        dist.barrier()
    assert caught.value.kind == "mismatch", str(caught.value)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("call", list(PARTED))
def test_tensors_of_other_lengths_with_the_same_sum_are_not_combined(ranks, monkeypatch, call, transport):
    monkeypatch.setenv("PHALANX_TRANSPORT", transport)
    ranks(2, parts_differ, *PARTED[call])


class Lacking:
    """A native part that has no memory for a call after so many of the same name."""

    def __init__(self, native, name, made):
        self._native, self._name, self._left = native, name, made

    def __getattr__(self, name):
        if name == self._name:
            self._left -= 1
            if self._left < 0:
                raise MemoryError("of a later call")
        return getattr(self._native, name)


def of_lengths(*lengths):
    return [torch.ones(length) for length in lengths]


# What the native part is called for, and how often that succeeds before it fails.
HALF_MADE = {
    "sparse": ("all_gather", 0, lambda group: group.allreduce([torch.eye(2).to_sparse()])),
    "all_gather": ("all_gather", 1, lambda group: group.allgather_coalesced([of_lengths(2, 3), of_lengths(2, 3)], of_lengths(2, 3))),
    "all_gather_single": ("all_gather_single", 1, lambda group: group.all_gather_single_coalesced(of_lengths(4, 6), of_lengths(2, 3))),
    "reduce_scatter": ("reduce_scatter_single", 1, lambda group: group.reduce_scatter_single_coalesced(of_lengths(2, 3), of_lengths(4, 6))),
}


def half_made(rank, name, made, call):
    group = dist.group.WORLD
    if rank == 1:
        group._native = Lacking(group._native, name, made)
    with pytest.raises(MemoryError if rank == 1 else Error, match="of a later call"):
        call(group).wait()
    assert group.failure().kind == "aborted" and "rank 1 could not" in str(group.failure())


@pytest.mark.parametrize("call", list(HALF_MADE))
def test_a_rank_that_makes_a_part_of_a_call_tells_the_others(ranks, call):
    ranks(2, half_made, *HALF_MADE[call])


def dies(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(Error, match="rank 1 .* died") as caught:
        while True:
            dist.all_reduce(torch.zeros(1))
    assert caught.value.kind == "peer_failed" and caught.value.peer == 1
    with pytest.raises(Error, match="rank 1"):
        dist.all_reduce(torch.zeros(1), async_op=True).wait()
    assert time.monotonic() - begin < 30


def test_the_dead_is_named_in_all_survivors(ranks):
    ranks(3, dies, dies=(1,))


def dies_in_ddp(rank, how):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    ddp = torch.nn.parallel.DistributedDataParallel(model, **({how: True} if how and "hook" not in how else {}))
    if how == "hook":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif how == "hook that calls again":
        ddp.register_comm_hook(powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook)
    # From the third backward pass on, DDP makes no calls but those of its buckets.
    for _ in range(4):
        ddp(torch.ones(2, 8)).sum().backward()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(Error, match="rank 1 .* died") as caught:
        ddp(torch.ones(2, 8)).sum().backward()
    assert caught.value.kind == "peer_failed" and caught.value.peer == 1 and isinstance(caught.value, dist.DistBackendError)


@pytest.mark.parametrize("how", [None, "hook", "hook that calls again", "static_graph", "find_unused_parameters", "gradient_as_bucket_view"])
def test_the_dead_is_named_in_the_backward_of_ddp(ranks, how):
    ranks(2, dies_in_ddp, how, dies=(1,))


def ends(rank):
    if rank == 1:
        dist.destroy_process_group()
        return
    with pytest.raises(Error, match="rank 1 .*has left") as caught:
        dist.all_reduce(torch.zeros(1))
    assert caught.value.kind == "peer_left"


def test_who_leaves_is_named(ranks):
    ranks(2, ends)


def late(rank):
    store = dist.group.WORLD.get_group_store()
    if rank == 1:
        store.wait(["timed out"], datetime.timedelta(seconds=60))
        # What the other has brought to the first one is there: it may end well before this rank hears of the failure.
        with pytest.raises(Error):
            for _ in range(2):
                dist.all_reduce(torch.zeros(1))
        return
    begin = time.monotonic()
    with pytest.raises(Error, match=" Timed out .*rank 1 ") as caught:
        dist.all_reduce(torch.zeros(1))
    assert caught.value.kind == "timeout" and time.monotonic() - begin < 30
    store.set("timed out", "")


def test_time_outs(ranks):
    # Enough for both to come on a busy machine: it is also the limit of the start.
    ranks(2, late, timeout=5.0)


def limited(rank):
    group, tensor = dist.group.WORLD, torch.ones(1)
    store = group.get_group_store()
    if rank == 1:
        store.wait(["another thread has run"])
        dist.all_reduce(tensor)
        store.wait(["timed out"])
        return
    # A call that waits for the other rank lets this rank's other threads run.
    other = threading.Thread(target=lambda: (time.sleep(0.2), store.set("another thread has run", "")))
    other.start()
    dist.all_reduce(tensor)
    other.join()
    assert tensor.item() == 2
    begin, before = time.monotonic(), group._get_sequence_number_for_group()
    with pytest.raises(Error, match=" Timed out .*rank 1 ") as caught:
        group.allreduce([tensor], waiting(timeout=1.0))
    assert caught.value.kind == "timeout" and time.monotonic() - begin < 30
    assert group._get_sequence_number_for_group() == before + 1
    store.set("timed out", "")


@needs_async_op
def test_a_call_that_waits_has_its_own_limit_and_lets_other_threads_run(ranks):
    ranks(2, limited)


def aborted(rank):
    work = dist.all_reduce(torch.zeros(1), async_op=True) if rank == 0 else None
    if rank == 1:
        dist.group.WORLD.abort()
        work = dist.all_reduce(torch.zeros(1), async_op=True)
    with pytest.raises(Error, match="rank 1 called abort"):
        work.wait()
    assert work.is_completed() and not work.is_success() and isinstance(work.exception(), Error)
    with pytest.raises(RuntimeError, match="rank 1 called abort"):
        work.get_future().wait()


def test_abort_ends_what_waits(ranks):
    ranks(2, aborted)


def aborted_by_a_handler(rank):
    group, called = dist.group.WORLD, []
    blind_watcher(group)

    class Interrupted:
        """The native part, on which a signal comes while it is asked for its failure."""

        def __init__(self, native):
            self.native = native

        def __getattr__(self, name):
            return getattr(self.native, name)

        def failure(self):
            if not called:
                called.append("asked")
                signal.raise_signal(signal.SIGUSR1)
            return self.native.failure()

    def handler(*_):
        called.append("handled")
        group.abort()

    signal.signal(signal.SIGUSR1, handler)
    group.register_abort_hook(1, lambda: called.append("told"))
    group._native = Interrupted(group._native)
    group.abort()
    assert called == ["asked", "handled", "told"], called


def test_a_handler_may_abort_a_group_whose_hooks_are_being_called(ranks):
    ranks(2, aborted_by_a_handler)


def monitored(rank):
    store = dist.group.WORLD.get_group_store()
    monitored_barrier = dist.monitored_barrier if SINCE_2_15 else dist.group.WORLD.monitored_barrier
    monitored_barrier(timeout=datetime.timedelta(seconds=20))
    begins = {0: "^Ranks 1 failed to pass monitoredBarrier in 5000 ms: ", 2: "^Rank 2 successfully reached monitoredBarrier, "}
    if rank in begins:
        with pytest.raises(Error, match=begins[rank]) as caught:
            monitored_barrier(timeout=datetime.timedelta(seconds=5), wait_all_ranks=True)
        assert " Timed out at " in str(caught.value) and "rank 1 of 3 has not reached the barrier" in str(caught.value) and caught.value.kind == "timeout"
        store.set(f"rank {rank} has seen it", "")
    else:
        store.wait(["rank 0 has seen it", "rank 2 has seen it"])


def test_a_monitored_barrier_names_who_is_missing(ranks):
    ranks(3, monitored)


def monitored_beside_another_call(rank):
    monitored_barrier = dist.monitored_barrier if SINCE_2_15 else dist.group.WORLD.monitored_barrier
    with pytest.raises(Error, match="the ranks disagree: rank") as caught:
        (monitored_barrier, dist.barrier)[rank]()
    assert caught.value.kind == "mismatch" and "failed to pass" not in str(caught.value), caught.value
    dist.group.WORLD.abort()


def test_another_call_than_a_monitored_barrier_is_named_and_is_no_time_out(ranks):
    ranks(2, monitored_beside_another_call)


def destroyed(rank):
    group = dist.group.WORLD
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="destroyed"):
        group.barrier()


def test_a_group_that_was_destroyed_says_so(ranks):
    ranks(2, destroyed)


def forks(rank):
    child = os.fork()
    if child == 0:
        # Nothing but our own part: this process is a copy of pytest's.
        try:
            dist.all_reduce(torch.zeros(1))
        except ValueError as error:
            os._exit(7 if "forked" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    child = os.fork()
    if child == 0:
        group = dist.group.WORLD
        group.shutdown()
        dist.distributed_c10d._update_default_pg(None)
        dist.distributed_c10d._world.pg_map.clear()
        del group
        phalanx_torch._exit._leave()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    dist.all_reduce(torch.zeros(1))


def test_a_forked_process_is_told_and_can_end(ranks):
    ranks(2, forks)


def forks_with_works(rank):
    store = dist.group.WORLD.get_group_store()
    if rank == 1:
        dist.all_reduce(torch.ones(1))
        store.wait(["forked"])
        dist.send(torch.ones(1), 0)
        return
    received = torch.zeros(1)
    pending, ended = dist.irecv(received, 1), dist.all_reduce(torch.ones(1), async_op=True)
    ended.wait()
    child = os.fork()
    if child == 0:
        code = 0
        try:
            # If it waits after all.
            signal.alarm(30)
            code += ended.wait()
            for call in (pending.wait, pending.get_future):
                try:
                    call()
                except ValueError as error:
                    code += "from which this one was forked" in str(error)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    store.set("forked", "")
    pending.wait()
    assert received.item() == 1.0


def test_a_forked_process_does_not_wait_for_its_parents_operations(ranks):
    ranks(2, forks_with_works)


def forks_while_hooks_are_called(rank):
    calls, held, go_on = [], threading.Event(), threading.Event()
    dist.group.WORLD.register_abort_hook(1, lambda: calls.append(1))

    def hold():
        with process_group._watch_lock:
            held.set()
            go_on.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        code = 9
        try:
            phalanx_torch._exit._leave()
            code = len(calls)
        finally:
            os._exit(code)
    deadline, ended = time.monotonic() + 30, (0, 0)
    while ended[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
        ended = os.waitpid(child, os.WNOHANG)
    go_on.set()
    thread.join()
    if ended[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended == (child, 0)


def test_a_process_that_is_forked_while_a_thread_calls_hooks_can_end(ranks):
    ranks(2, forks_while_hooks_are_called)


def called_back(recv, send, barrier):
    """Receives from the other rank, and lets a future say so. It cannot have come before the future was asked for."""
    work = recv(torch.zeros(1))
    future = work.get_future()
    barrier()
    sent = send(torch.ones(1))
    deadline = time.monotonic() + 20
    while not future.done() and time.monotonic() < deadline:
        time.sleep(0.01)
    sent.wait()
    return future.done()


def leaves_before_its_child(rank, transport):
    assert dist.group.WORLD.transport == transport
    dist.all_reduce(torch.ones(1))
    parent, child = os.getpid(), os.fork()
    if child == 0:
        # As a loader's worker, which has the descriptors of its parent.
        while os.getppid() == parent:
            time.sleep(0.05)
        os._exit(0)
    try:
        dist.destroy_process_group()
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_group_is_left_while_a_forked_process_lives(ranks, transport, monkeypatch):
    monkeypatch.setenv("PHALANX_TRANSPORT", transport)
    ranks(2, leaves_before_its_child, transport)


def dies_before_its_child(rank, seen):
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        parent, limit = os.getpid(), time.monotonic() + 60
        if os.fork() == 0:
            # As a loader's worker, which has the descriptors of its parent: these are not closed when that dies.
            while (os.getppid() == parent or not os.path.exists(seen)) and time.monotonic() < limit:
                time.sleep(0.05)
            os._exit(0)
        os.kill(parent, signal.SIGKILL)
    try:
        with pytest.raises(phalanx_torch.Error, match="rank 1 .*died: its process has ended, and a process that it has forked") as caught:
            dist.barrier()
        assert (caught.value.kind, caught.value.peer) == ("peer_failed", 1)
    finally:
        with open(seen, "w"):
            pass


def test_a_rank_that_has_died_is_named_so_while_a_forked_process_lives(ranks, tmp_path):
    ranks(2, dies_before_its_child, tmp_path / "seen", dies=(1,))


def forks_and_joins(rank, folder):
    other = 1 - rank
    assert called_back(lambda tensor: dist.irecv(tensor, other), lambda tensor: dist.isend(tensor, other), dist.barrier)
    child = os.fork()
    if child == 0:
        try:
            ProcessGroup(dist.HashStore(), 0, 1, datetime.timedelta(seconds=30))
        except ValueError as error:
            os._exit(0 if "forked" in str(error) and "spawn" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    dist.barrier()
    dist.destroy_process_group()
    # The thread for callbacks is still there, and waits.
    child = os.fork()
    if child == 0:
        code = 9
        try:
            group = ProcessGroup(dist.FileStore(f"{folder}/of-children", 2), rank, 2, datetime.timedelta(seconds=30))
            done = called_back(
                lambda tensor: group.recv([tensor], other),
                lambda tensor: group.send([tensor], other),
                lambda: group.barrier().wait(),
            )
            phalanx_torch._exit._leave()
            code = 7 if not done else 8 if group._native.is_open() else 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_forked_process_joins_when_its_parent_has_left(ranks, tmp_path):
    ranks(2, forks_and_joins, tmp_path)


PROGRAM = """
import os, sys, time, torch, torch.distributed as dist, phalanx_torch
dist.init_process_group("phalanx")
rank, how = dist.get_rank(), sys.argv[1]
tensor = torch.zeros(10)
dist.all_reduce(tensor)
if rank == 1 and how == "raises":
    work = dist.irecv(tensor, 0)
    raise KeyError("of rank one")
if rank == 1 and how == "raises the name of a file":
    raise OSError("of rank one: \\udce9")
if rank == 1 and how == "exits":
    dist.irecv(tensor, 0)
    sys.exit(3)
if rank == 1 and how == "killed":
    os.kill(os.getpid(), 9)
if how == "forgets":
    dist.all_reduce(tensor, async_op=True)
    sys.exit(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4)) if how == "ddp" else None
if how == "ddp":
    for step in range(1000000):
        if rank == 1 and step == 20:
            os.kill(os.getpid(), 9)
        model(torch.ones(2, 4)).sum().backward()
while True:
    dist.all_reduce(tensor)
"""

ENDS = {
    "raises": "KeyError: .*of rank one",
    # It is no UTF-8.
    "raises the name of a file": "ended with OSError: of rank one: .udce9",
    "exits": "rank 1 .*(ended before|has left)",
    "killed": "rank 1 .*died",
    "ddp": "rank 1 .*died",
    "forgets": None,
}


@pytest.mark.parametrize("how", list(ENDS))
def test_programs_end_without_a_hang(how):
    port = free_port()
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, how],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    # On a busy machine two imports of PyTorch are most of it.
    output = [process.communicate(timeout=240)[0] for process in started]
    codes = [process.returncode for process in started]
    if ENDS[how] is None:
        assert codes == [0, 0], output
    else:
        assert codes[0] not in (0, None) and codes[1] not in (0, None), (codes, output)
        assert re.search(ENDS[how], output[0], re.DOTALL), output[0]
    assert not any("panicked" in text or "Fatal Python" in text for text in output), output


class WithoutText(Exception):
    def __str__(self):
        raise AttributeError("of the program's class")


def test_an_exception_is_told_to_others_whatever_its_text_is():
    for error, text in (
        (KeyError("a"), "KeyError: 'a'"),
        (OSError("caf\udce9"), r"OSError: caf\udce9"),
        (WithoutText(), "WithoutText: (its text cannot be made)"),
    ):
        assert described(error) == text


def test_an_error_about_thousands_of_ranks_names_the_first():
    assert listed([]) == "[]"
    assert listed([3, 7]) == "[3, 7]"
    assert listed(range(4000)) == listed(range(16))[:-1] + ", ..]"


RAISES = """
import atexit, sys
from phalanx_torch import _exit
atexit.register(lambda: print("ended by", type(_exit.cause_of_end()).__name__))
def deep():
    raise KeyError("raised")
{rest}
"""
# In the program's own process, as Python's and IPython's consoles do it: the exception is printed and kept, and the program goes on.
CONSOLE = "import code; code.InteractiveConsole({'deep': deep}).push('deep()')"
RUNPY = "import runpy, pathlib; pathlib.Path(sys.argv[1]).write_text('raise KeyError'); runpy.run_path(sys.argv[1])"
THREAD = "import threading; thread = threading.Thread(target=deep); thread.start(); thread.join()"


@pytest.mark.parametrize(
    ("started", "rest", "ended_by"),
    [
        ("file", "deep()", "KeyError"),
        ("-m", "deep()", "KeyError"),
        ("-c", "deep()", "KeyError"),
        ("stdin", "deep()", "KeyError"),
        ("file", RUNPY, "KeyError"),
        ("file", "raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("file", "", "NoneType"),
        ("file", THREAD, "NoneType"),
        # Not by what they have printed.
        ("file", CONSOLE, "NoneType"),
        ("-i", "deep()", "NoneType"),
        ("-i", "\ndeep()", "NoneType"),
        ("console", "\ndeep()", "NoneType"),
    ],
)
def test_the_end_of_a_program_has_a_cause_only_if_that_ended_it(tmp_path, started, rest, ended_by):
    text, file = RAISES.format(rest=rest), tmp_path / "program.py"
    file.write_text(text)
    arguments, given = {
        "file": ([str(file), str(tmp_path / "other.py")], ""),
        "-m": (["-m", "program"], ""),
        "-c": (["-c", text], ""),
        "stdin": (["-"], text),
        "-i": (["-i", str(file)], "1 + 1\n"),
        "console": (["-i", "-"], text),
    }[started]
    ended = subprocess.run([sys.executable, *arguments], input=given, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert f"ended by {ended_by}\n" in ended.stdout, (ended.stdout, ended.stderr)


CONSOLE_OF_A_RANK = """
import os, torch, torch.distributed as dist, phalanx_torch
dist.init_process_group("phalanx")
dist.all_reduce(torch.ones(1))
1 / 0
dist.all_reduce(torch.ones(1))
"""


def test_a_console_that_has_printed_an_exception_ends_without_an_abort():
    port, started = free_port(), []
    for rank in range(2):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        started.append(
            subprocess.Popen(
                [sys.executable, "-i"], env={**os.environ, **place}, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
        )
    # Rank 0 still calls when rank 1 has ended.
    texts = [CONSOLE_OF_A_RANK + "dist.all_reduce(torch.ones(1))\n", CONSOLE_OF_A_RANK]
    for process, text in zip(started, texts):
        process.stdin.write(text)
        process.stdin.close()
        process.stdin = None
    outputs = [process.communicate(timeout=120)[1] for process in started]
    assert "rank 1" in outputs[0] and "has left" in outputs[0], outputs
    assert all("ZeroDivisionError" in output for output in outputs), outputs
    assert not any("the program of rank" in output for output in outputs), outputs


def in_detail(rank):
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    # The group that DDP and this have is made in this mode.
    group = dist.new_group()
    dist.all_reduce(torch.ones(2), group=group)
    with pytest.raises(Error) as caught:
        dist.all_reduce(torch.ones(3), group=group) if rank == 0 else dist.broadcast(torch.ones(3), 0, group=group)
        dist.barrier(group)
    text = str(caught.value)
    assert caught.value.kind == "mismatch" and "calls all_reduce(sum, 3 x f32)" in text and "calls broadcast(3 x f32" in text, text


@pytest.mark.parametrize("backend", ["phalanx", "cpu:phalanx,cuda:nccl"])
def test_ddp_and_different_calls_with_torch_distributed_debug_detail(backend, tmp_path):
    def run(rank):
        dist.init_process_group(backend, f"file://{tmp_path}/store", rank=rank, world_size=2)
        in_detail(rank)
        dist.destroy_process_group()

    processes(2, run)


def of_two_types(rank, call, types, shapes):
    """Each rank has tensors of another type, of as many bytes."""
    own = torch.ones(shapes[rank], dtype=types[rank])
    with pytest.raises(Error) as caught:
        call(own)
        # The root of a broadcast receives nothing in it.
        dist.barrier()
    text = str(caught.value)
    assert caught.value.kind == "mismatch", text
    return text


@pytest.mark.parametrize(
    "types, shapes, said",
    [
        ((torch.int16, torch.uint8), (4, 8), "tensors of int16 ["),
        ((torch.int16, torch.uint16), (4, 4), "tensors of uint16 ["),
        ((torch.float8_e5m2, torch.float8_e4m3fn), (4, 4), "tensors of float8_e4m3fn ["),
    ],
)
@pytest.mark.parametrize(
    "call",
    [
        lambda own: dist.broadcast(own, 0),
        lambda own: dist.all_gather_into_tensor(torch.empty(2 * own.numel(), dtype=own.dtype), own),
        lambda own: dist.all_gather([torch.empty_like(own) for _ in range(2)], own),
        lambda own: dist.all_to_all_single(torch.empty_like(own), own),
    ],
    ids=["broadcast", "all_gather_into_tensor", "all_gather", "all_to_all_single"],
)
def test_types_that_travel_as_one_are_told_apart(ranks, call, types, shapes, said):
    texts = ranks(2, of_two_types, call, types, shapes)
    # Of each rank's own call, and of the other's.
    assert all(said in text for text in texts), texts


@pytest.mark.parametrize(
    "op, types, said",
    [
        (dist.ReduceOp.SUM, (torch.int16, torch.int32), "tensors of int16 ["),
        (dist.ReduceOp.MAX, (torch.int16, torch.uint16), "tensors of uint16 ["),
        (dist.ReduceOp.SUM, (torch.uint64, torch.int64), "tensors of uint64 ["),
        (dist.ReduceOp.AVG, (torch.int8, torch.uint8), "ReduceOp.AVG of int8 ["),
        (dist.ReduceOp.AVG, (torch.int32, torch.int64), "ReduceOp.AVG of int32 ["),
    ],
)
def test_types_that_are_combined_in_one_are_told_apart(ranks, op, types, said):
    texts = ranks(2, of_two_types, lambda own: dist.all_reduce(own, op), types, (4, 4))
    assert all(said in text for text in texts), texts
