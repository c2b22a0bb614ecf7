"""Groups: how they are made, of which ranks, in which stores, how often."""

import collections
import datetime
import os
import signal
import threading
import time

import numpy
import pytest
import torch
import torch.distributed as dist
from conftest import SINCE_2_15, environment, free_port, processes
from torch._C import _distributed_c10d as c10d

import phalanx_torch
from phalanx_torch import _exit, _native
from phalanx_torch.process_group import ProcessGroup


def total(group=None):
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    return tensor[0].item()


def started(rank, world, how, place):
    if how == "env":
        environment(rank, world, place)
        dist.init_process_group("phalanx")
    elif how == "tcp":
        dist.init_process_group("phalanx", f"tcp://127.0.0.1:{place}", rank=rank, world_size=world)
    elif how == "file":
        dist.init_process_group("cpu:phalanx", f"file://{place}", rank=rank, world_size=world)
    elif how == "FileStore":
        dist.init_process_group("phalanx", store=dist.FileStore(place, world), rank=rank, world_size=world)
    elif how == "TCPStore":
        store = dist.TCPStore("127.0.0.1", place, world, rank == 0)
        dist.init_process_group("phalanx", store=store, rank=rank, world_size=world)
    assert dist.get_backend() == "phalanx" or how == "file"
    assert dist.group.WORLD.name() == "phalanx"
    for _ in range(3):
        assert total() == world
        dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("how", ["env", "tcp", "file", "FileStore", "TCPStore"])
def test_stores(tmp_path, how):
    place = str(tmp_path / "store") if "ile" in how else free_port()
    processes(2, started, 2, how, place)


class Counting:
    """A store that counts the keys of each request."""

    def __init__(self, store):
        self.store, self.keys = store, collections.defaultdict(list)

    def __getattr__(self, name):
        method = getattr(self.store, name)

        def call(*arguments):
            self.keys[name].append(len(arguments[0]) if arguments and isinstance(arguments[0], list) else 1)
            return method(*arguments)

        return call


def counted(rank, port):
    store = Counting(dist.TCPStore("127.0.0.1", port, 2, rank == 0))
    group = _native.Group.in_store(store, rank, 2, 60.0)
    group.barrier((None, True))
    group.close()
    return store.keys["multi_get"]


def test_a_store_is_asked_for_the_keys_of_all_ranks_at_once():
    for counts in processes(2, counted, free_port()):
        assert counts and set(counts) == {2}, counts


def looks(rank):
    store = Counting(dist.HashStore())
    with pytest.raises(phalanx_torch.Error) as caught:
        _native.Group.in_store(store, rank, 300, 2.0)
    assert caught.value.kind == "timeout"
    return store.keys["check"]


def test_a_rank_that_waits_for_many_looks_at_one():
    (counts,) = processes(1, looks)
    assert sum(counts) < 60 * len(counts), (sum(counts), len(counts))


class Removing:
    """A store that removes nothing before it may."""

    def __init__(self, store):
        self.store, self.may, self.removed = store, threading.Event(), []

    def delete_key(self, key):
        assert self.may.wait(60.0)
        self.removed.append(key)
        return self.store.delete_key(key)

    def __getattr__(self, name):
        return getattr(self.store, name)


def clears(rank, port):
    store = Removing(dist.TCPStore("127.0.0.1", port, 2, rank == 0))
    meeting = Removing(dist.PrefixStore("meeting", store.store))
    store.set(f"of {rank}", "")
    group = _native.Group.in_store(meeting, rank, 2, 60.0)
    meeting.set(f"more of {rank}", "")
    _native.Group.clear_meeting(meeting, rank, [f"more of {rank}", "not there"])
    # The caller has not waited: it goes on, and another removal begins.
    assert meeting.removed == []
    _native.Group.clear_meeting(store, rank, [f"of {rank}"])
    group.barrier((None, True))
    group.close()
    # The end of the program waits for both.
    _exit.when_left.extend([meeting.may.set, store.may.set])
    _exit._leave()
    assert meeting.removed[-2:] == [f"more of {rank}", "not there"] and store.removed[-1] == f"of {rank}"
    for key in {*meeting.removed, *store.removed}:
        assert not meeting.check([key]) and not store.check([key]), key
    # Rank 0 serves the store.
    if rank == 0:
        store.wait(["done"])
    else:
        store.set("done", "")


def test_only_the_end_of_a_program_waits_until_a_meeting_is_removed():
    processes(2, clears, free_port())


class Slow:
    """A store whose removals take their time."""

    def __init__(self):
        self.begun, self.underway = threading.Event(), 0

    def delete_key(self, key):
        self.underway += 1
        self.begun.set()
        time.sleep(0.05)
        self.underway -= 1
        return True


def test_no_store_is_called_any_more_when_the_end_of_a_program_has_waited():
    store = Slow()
    _native.Group.clear_meeting(store, 0, [])
    assert store.begun.wait(60.0)
    # It gives up at once, and the call that has begun returns.
    _native.await_cleared(0.0)
    assert store.underway == 0


class Held:
    """A store that presses Ctrl-C when it is asked, and answers when it may: some time later, as over a slow network."""

    def __init__(self):
        self.store, self.may, self.has_answered = dist.HashStore(), threading.Event(), False

    def check(self, keys):
        if not self.has_answered:
            os.kill(os.getpid(), signal.SIGINT)
            assert self.may.wait(60.0)
            time.sleep(0.2)
            self.has_answered = True
        return self.store.check(keys)

    def __getattr__(self, name):
        return getattr(self.store, name)


def interrupted(rank):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    store = Held()
    with pytest.raises(KeyboardInterrupt):
        _native.Group.in_store(store, rank, 2, 60.0)
    _exit.when_left.append(store.may.set)
    _exit._leave()
    assert store.has_answered


def test_the_end_of_a_program_waits_for_the_last_call_of_a_start_that_was_interrupted():
    processes(1, interrupted)


def left_beside_errors(rank, port):
    dist.init_process_group("phalanx", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1))
    called = []

    def fails():
        raise RuntimeWarning("an error, by -W error")

    mine = [lambda: called.append("first"), fails, lambda: called.append("last")]
    _exit.before_leaving.extend(mine)
    try:
        with pytest.raises(RuntimeWarning, match="by -W error"):
            _exit._leave()
    finally:
        del _exit.before_leaving[-len(mine) :]
    assert sorted(called) == ["first", "last"] and not dist.group.WORLD._native.is_open()


def test_groups_are_left_at_the_end_of_a_program_also_if_a_call_before_fails():
    processes(2, left_beside_errors, free_port())


class Interrupted:
    """A group in whose leaving Ctrl-C is pressed."""

    rank = 0

    def is_open(self):
        return True

    def abort(self, cause):
        raise KeyboardInterrupt

    def close_within(self, timeout, cause):
        raise KeyboardInterrupt


def left_beside_interrupts(rank, error):
    dist.init_process_group("phalanx", store=dist.HashStore(), rank=rank, world_size=1)
    called, groups = [], _exit._open
    native = {name: getattr(_native, name) for name in ("await_cleared", "close_callbacks")}
    _native.await_cleared = lambda timeout: called.append("cleared")
    _native.close_callbacks = lambda timeout: called.append("closed")
    _exit.when_left.append(lambda: called.append("told"))
    _exit._open = [Interrupted(), *groups, Interrupted()]
    _exit._passing = error
    try:
        with pytest.raises(KeyboardInterrupt):
            _exit._leave()
    finally:
        _exit._open, _exit._passing = groups, None
        for name, function in native.items():
            setattr(_native, name, function)
    assert called == ["told", "cleared", "closed"] and not dist.group.WORLD._native.is_open()


@pytest.mark.parametrize("error", [None, KeyError("of the program")])
def test_all_groups_are_left_at_the_end_of_a_program_also_if_ctrl_c_is_pressed_again(error):
    processes(1, left_beside_interrupts, error)


class Growing:
    """A set to which another thread adds something while it is looked at for the first time."""

    def __init__(self):
        self.members = {1, 2}

    def __iter__(self):
        for member in self.members:
            if len(self.members) == 2:
                self.members.add(3)
            yield member


def test_groups_may_be_made_while_another_thread_looks_at_all_of_them():
    assert sorted(_exit.members(Growing())) == [1, 2, 3]


def left_though_interrupted(rank):
    dist.init_process_group("phalanx", store=dist.HashStore(), rank=rank, world_size=1)
    wait_for_threads = threading._shutdown

    def interrupted():
        raise KeyboardInterrupt

    threading._shutdown = interrupted
    try:
        with pytest.raises(KeyboardInterrupt):
            _exit._leave_process()
    finally:
        threading._shutdown = wait_for_threads
    assert not dist.group.WORLD._native.is_open()


def test_groups_of_a_process_of_multiprocessing_are_left_also_if_ctrl_c_ends_its_wait_for_threads():
    processes(1, left_though_interrupted)


def keys_of_groups(rank, port, is_local):
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    dist.init_process_group("phalanx", store=store, rank=rank, world_size=2)

    def keys_after(groups):
        for _ in range(groups):
            group = dist.new_group([0, 1], use_local_synchronization=is_local)
            dist.barrier(group)
            dist.destroy_process_group(group)
        # While all are here, nobody writes.
        dist.barrier()
        keys = store.num_keys()
        dist.barrier()
        return keys

    # What the last ones have written stays for a while.
    first = keys_after(20)
    assert keys_after(40) == first
    dist.destroy_process_group()


@pytest.mark.parametrize("is_local", [False, True])
def test_a_store_does_not_grow_with_the_number_of_groups(is_local):
    processes(2, keys_of_groups, free_port(), is_local)


def test_ranks_that_are_threads():
    store, world, sums = dist.HashStore(), 3, []

    def rank(number):
        group = ProcessGroup(store, number, world, datetime.timedelta(seconds=30))
        tensor = torch.full((5,), float(number))
        group.allreduce([tensor]).wait()
        sums.append(tensor.tolist())
        group.shutdown()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sums == [[3.0] * 5] * world


def sub_groups(rank, world):
    pair = dist.new_group([0, world - 1], timeout=datetime.timedelta(seconds=30))
    rest = dist.new_group([1])
    if rank in (0, world - 1):
        assert total(pair) == 2 and dist.get_rank(pair) == (rank != 0)
        tensor = torch.tensor([float(rank)])
        dist.broadcast(tensor, world - 1, group=pair)
        assert tensor.item() == world - 1
    if rank == 1:
        assert total(rest) == 1
    if SINCE_2_15:
        half = dist.split_group(split_ranks=[[0, 1], [2]])
        assert total(half) == (1 if rank == 2 else 2)
        assert half.group_name and dist.get_world_size(half) == (1 if rank == 2 else 2)
    # Each from a thread of its own, at the same time.
    groups = [dist.new_group() for _ in range(4)]
    sums = [None] * 4

    def use(index):
        sums[index] = [total(groups[index]) for _ in range(20)]

    threads = [threading.Thread(target=use, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == [[float(world)] * 20] * 4
    dist.destroy_process_group(groups[0])
    assert total(groups[1]) == world


def test_groups_of_some_ranks(ranks):
    ranks(3, sub_groups, 3)


def again(rank, world, folder):
    for number in range(3):
        dist.init_process_group("phalanx", f"file://{folder}/{number}", rank=rank, world_size=world)
        assert total() == world
        dist.destroy_process_group()
    files = len(os.listdir("/proc/self/fd"))
    threads = len(os.listdir("/proc/self/task"))
    for number in range(3, 13):
        dist.init_process_group("phalanx", f"file://{folder}/{number}", rank=rank, world_size=world)
        assert total() == world
        work = dist.all_reduce(torch.ones(3), async_op=True)
        work.get_future().wait()
        dist.destroy_process_group()
    assert len(os.listdir("/proc/self/fd")) <= files + 2
    assert len(os.listdir("/proc/self/task")) <= threads + 4


def test_again_and_again_without_leaks(tmp_path):
    processes(2, again, 2, tmp_path)


def twice_in_one_store(rank, world, port):
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0)
    for _ in range(3):
        dist.init_process_group("phalanx", store=store, rank=rank, world_size=world)
        assert total() == world
        dist.destroy_process_group()


def test_again_in_the_same_store():
    processes(2, twice_in_one_store, 2, free_port())


def numbered(rank):
    group = dist.group.WORLD
    before = group._get_sequence_number_for_group()
    dist.barrier()
    dist.all_reduce(torch.zeros(1))
    assert group._get_sequence_number_for_group() == before + 2


def test_sequence_numbers(ranks):
    ranks(2, numbered)


def test_options_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no pg_options"):
        dist.init_process_group(
            "phalanx",
            f"file://{tmp_path}/store",
            rank=0,
            world_size=1,
            pg_options=dist.ProcessGroupGloo._Options() if hasattr(dist.ProcessGroupGloo, "_Options") else object(),
        )


def by_keyword(rank):
    group, mine = dist.group.WORLD, torch.tensor([float(rank + 1)])
    tensor = mine.clone()
    group.broadcast(tensor, root=1).wait()
    assert tensor.tolist() == [2.0]
    tensor = mine.clone()
    group.reduce(tensor, root=1).wait()
    assert rank != 1 or tensor.tolist() == [3.0]
    lists = [torch.zeros(1), torch.zeros(1)] if rank == 1 else []
    group.gather(lists, mine, root=1).wait()
    assert [one.item() for one in lists] == ([1.0, 2.0] if rank == 1 else [])
    tensor = torch.zeros(1)
    group.scatter(tensor, [torch.tensor([5.0]), torch.tensor([6.0])] if rank == 1 else [], root=1).wait()
    assert tensor.tolist() == [5.0 + rank]
    output = torch.zeros(2)
    dist.all_to_all_single(output, torch.tensor([10.0, 11.0]) + 10 * rank, numpy.array([1, 1]), numpy.array([1, 1]))
    assert output.tolist() == [10.0 + rank, 20.0 + rank]
    for refused in (
        lambda: group.broadcast([tensor], c10d.BroadcastOptions(), root=1),
        lambda: group.reduce([tensor], c10d.ReduceOptions(), root=1),
        lambda: group.gather([[tensor, tensor]], [tensor], c10d.GatherOptions(), root=1),
        lambda: group.scatter([tensor], [[tensor, tensor]], c10d.ScatterOptions(), root=1),
    ):
        with pytest.raises(TypeError, match="root= is for a call with tensors and no options"):
            refused()
    with pytest.raises(TypeError, match="op= is for"):
        group.allreduce([tensor], c10d.AllreduceOptions(), op=dist.ReduceOp.MAX)
    with pytest.raises(TypeError, match="timeout= is for"):
        group.allgather([[tensor, tensor]], [tensor], c10d.AllgatherOptions(), datetime.timedelta(seconds=1))


def test_roots_by_keyword_and_split_sizes_of_numpy(ranks):
    ranks(2, by_keyword)


# They end a group, wait for other ranks, or are no queries. gloo's options are of a class of its own, and it gives a handle also to a group that
# was not made for it.
NO_QUERIES = {"abort", "barrier", "boxed", "get_reconfigure_handle", "monitored_barrier", "options", "shutdown", "unbox"}


def answers(asked, of):
    """What a group, or its backend, answers to each property and each call without arguments."""
    found = {}
    for name in set(dir(of)) - NO_QUERIES:
        if name.startswith("__") or isinstance(getattr(of, name, None), type):
            continue
        try:
            value = getattr(asked, name)
            found[name] = type(value() if callable(value) else value)
        except (AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
            found[name] = error
    return found


def as_gloo_answers(rank, folder):
    given = {}
    for backend in ("gloo", "phalanx"):
        dist.init_process_group(backend, f"file://{folder}/{backend}", rank=0, world_size=1)
        group = dist.group.WORLD
        given[backend] = (
            answers(group, dist.ProcessGroup),
            answers(group._get_backend(torch.device("cpu")), c10d.Backend),
        )
        dist.destroy_process_group()
    compared = 0
    for expected, found in zip(given["gloo"], given["phalanx"]):
        for name, kind in expected.items():
            if isinstance(kind, type):
                assert found[name] is kind, f"{name}: gloo {kind}, phalanx {found[name]!r}"
                compared += 1
    assert compared > 20


@pytest.mark.parametrize("recorded", ["0", "100"])
def test_what_gloo_answers_is_answered(tmp_path, monkeypatch, recorded):
    # With a flight recorder PyTorch's C++ knows a part of the group.
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", recorded)
    # In a process of its own: those that are forked later must not have gloo's threads.
    processes(1, as_gloo_answers, str(tmp_path))


def state(rank):
    group = dist.group.WORLD
    names = [name for name in dir(c10d.Backend) if name.lstrip("_").startswith("supports_")]
    # Not all versions ask for hooks.
    assert {name for name in names if getattr(group, name) is True} - {"supports_abort_hooks"} == {"supports_splitting"}
    for call in (group.get_reconfigure_handle, lambda: group.reconfigure(None)):
        with pytest.raises(RuntimeError, match="enable_reconfigure=True"):
            call()
    assert group.get_error() == c10d.ErrorType.SUCCESS and group.failure() is None
    # A group that is bound to a device is asked for this.
    group.eager_connect_single_device(torch.device("cpu:0"))
    group.perform_nocolor_split(torch.device("cpu:0"))
    assert group.options.backend == "phalanx" and group.options._timeout == datetime.timedelta(seconds=60)
    with pytest.raises(RuntimeError, match="merge_remote_group is not there"):
        group.merge_remote_group(None, 2)
    with pytest.raises(ValueError, match="split_group takes no pg_options"):
        group.split_group([0], opts=c10d.Backend.Options("phalanx"))
    group.abort()
    assert group.get_error() == c10d.ErrorType.COMM_ERROR and group.failure().kind == "aborted"


def test_what_backends_support_and_the_state_are_answered(ranks):
    ranks(1, state)
