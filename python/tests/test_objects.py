"""The package's own functions for objects, and in the place of PyTorch's."""

import contextlib
import datetime
import inspect
import io
import os
import pickle
import re
import resource
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from conftest import environment, free_port, needs_dispatcher, processes
from torch.distributed import distributed_c10d as c10d

import phalanx_torch
from phalanx_torch import _object_functions, objects, observed, work
from phalanx_torch.device_backend import DeviceBackend, of_device

Error = phalanx_torch.Error
# What a block has room for on a few ranks, beside what is before the object (python/src/objects.rs).
ROOM = (8 << 10) - 16 - 24 - len(pickle.dumps(b"x" * 5000)) + 5000


def made(rank, length):
    return {"rank": rank, "bytes": bytes([rank]) * length, "nothing": None}


def lengths(rank):
    """Short objects, long ones, and long ones of some ranks; in each call another length on each rank."""
    each = [0, 3, ROOM - 100, ROOM + 100, 100_000, 1_000_003]
    return [(each[index], each[(index + step) % len(each)]) for step in (0, 1) for index in range(len(each))]


def gathers(rank, world):
    for even, odd in lengths(rank):
        whole = [made(each, odd if each % 2 else even) for each in range(world)]
        places = [None] * world
        phalanx_torch.all_gather_object(places, whole[rank])
        assert places == whole
        # A copy, as PyTorch has it.
        assert places[rank] is not whole[rank]
        for root in range(world):
            places = [None] * world if rank == root else None
            phalanx_torch.gather_object(whole[rank], places, dst=root)
            assert places == (whole if rank == root else None)
    for length in (ROOM - 1, ROOM, ROOM + 1):
        places = ["untouched"] * (world + 1)
        phalanx_torch.all_gather_object(places, b"x" * length)
        assert places == [b"x" * length] * world + ["untouched"]


def spreads(rank, world):
    for even, odd in lengths(rank):
        for root in range(world):
            whole = [made(root, even), "text", made(root, odd)]
            places = list(whole) if rank == root else [None, None, None]
            phalanx_torch.broadcast_object_list(places, root)
            assert places == whole
            given = [made(each, odd if each % 2 else even) for each in range(world)]
            place = [None, "untouched"]
            phalanx_torch.scatter_object_list(place, given if rank == root else None, src=root)
            assert place == [given[rank], "untouched"]
    nothing = []
    phalanx_torch.broadcast_object_list(nothing)
    assert nothing == []


def messages(rank, world):
    other = (rank + 1) % world, (rank - 1) % world
    for even, odd in lengths(rank):
        whole = [made(rank, even), made(rank, odd)]
        sending = threading.Thread(target=phalanx_torch.send_object_list, args=(whole, other[0]))
        sending.start()
        places = [None, None]
        assert phalanx_torch.recv_object_list(places, other[1]) == other[1]
        assert places == [made(other[1], even), made(other[1], odd)]
        sending.join()
    # Beside messages with tags of tensors.
    dist.barrier()
    if rank == 0:
        work = dist.isend(torch.ones(3), 1, tag=5)
        phalanx_torch.send_object_list([{"a": 1}], 1)
        work.wait()
    if rank == 1:
        places, tensor = [None], torch.zeros(3)
        assert phalanx_torch.recv_object_list(places) == 0 and places == [{"a": 1}]
        dist.recv(tensor, 0, tag=5)
        assert tensor.tolist() == [1.0] * 3


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("body", [gathers, spreads, messages])
def test_objects_of_all_lengths_come(ranks, body, world, transport, monkeypatch):
    monkeypatch.setenv("PHALANX_TRANSPORT", transport)
    ranks(world, body, world)


def alone(rank):
    places = [None]
    phalanx_torch.all_gather_object(places, {"a": 1})
    assert places == [{"a": 1}]
    phalanx_torch.gather_object("x" * 100_000, places)
    assert places == ["x" * 100_000]
    phalanx_torch.broadcast_object_list(places)
    phalanx_torch.scatter_object_list(places, [5])
    assert places == [5]


def test_a_world_of_one(ranks):
    ranks(1, alone)


def of_some(rank):
    pair = dist.new_group([0, 2], timeout=datetime.timedelta(seconds=30))
    if rank == 1:
        places = ["untouched"]
        with pytest.warns(UserWarning, match="all_gather_object on global rank 1 which does not belong"):
            phalanx_torch.all_gather_object(places, 1, group=pair)
        with pytest.warns(UserWarning, match="recv_object_list"):
            assert phalanx_torch.recv_object_list(places, 0, group=pair) == -1
        assert places == ["untouched"]
        return
    places = [None, None]
    phalanx_torch.all_gather_object(places, rank, group=pair)
    assert places == [0, 2]
    # Ranks of the default group, and of this one.
    for named in ({"dst": 2}, {"group_dst": 1}):
        places = [None, None] if rank == 2 else None
        phalanx_torch.gather_object(rank, places, group=pair, **named)
        assert places == ([0, 2] if rank == 2 else None)
    for named in ({"src": 2}, {"group_src": 1}):
        places = [rank]
        phalanx_torch.broadcast_object_list(places, group=pair, device=torch.device("cpu"), **named)
        assert places == [2]
        phalanx_torch.scatter_object_list(places, ["for 0", "for 2"] if rank == 2 else None, group=pair, **named)
        assert places == [f"for {rank}"]
    for named in ({"dst": 2}, {"group_dst": 1}):
        if rank == 0:
            phalanx_torch.send_object_list(["a"], group=pair, use_batch=True, **named)
        else:
            # In the default group.
            assert phalanx_torch.recv_object_list(places, 0, group=pair, device="cpu") == 0 and places == ["a"]
    with pytest.raises(ValueError, match="1 is not part of group"):
        phalanx_torch.broadcast_object_list(places, 1, group=pair)
    with pytest.raises(ValueError, match="both group_rank and global_rank"):
        phalanx_torch.broadcast_object_list(places, 0, group=pair, group_src=0)


def test_groups_of_some_ranks(ranks):
    ranks(3, of_some)


def wrong(rank):
    other = 1 - rank
    for call, why in [
        (lambda: phalanx_torch.gather_object(1, None, dst=rank), "must be given"),
        (lambda: phalanx_torch.gather_object(1, [None, None], dst=other), "must not be given"),
        (lambda: phalanx_torch.broadcast_object_list([1], 7), "rank 7 is not a rank of this group"),
        (lambda: phalanx_torch.send_object_list([1], rank), "the rank of this process"),
        (lambda: phalanx_torch.recv_object_list([1], rank), "the rank of this process"),
        (lambda: phalanx_torch.send_object_list([1]), "Must specify"),
    ]:
        with pytest.raises(ValueError, match=why):
            call()
    with pytest.raises((RuntimeError, TypeError)):
        phalanx_torch.broadcast_object_list([1], device="no device")
    # Nobody has been called.
    places = [None, None]
    phalanx_torch.all_gather_object(places, rank)
    assert places == [0, 1]


def test_wrong_arguments_leave_the_group_as_it_is(ranks):
    ranks(2, wrong)


def wrong_on_one_rank(rank):
    gathered = [None] if rank == 0 else None
    for call, why in [
        (lambda: phalanx_torch.all_gather_object([None] * (rank + 1), rank), "a list of 1, and the group has 2 ranks"),
        (lambda: phalanx_torch.gather_object(rank, gathered), "a list of 1, and the group has 2 ranks"),
        (lambda: phalanx_torch.gather_object(rank, None), "must be given"),
        (lambda: phalanx_torch.gather_object(rank, [None, None]), "must not be given"),
        (lambda: phalanx_torch.scatter_object_list([] if rank == 0 else [None], [1, 2] if rank == 0 else None), "at least one place"),
        (lambda: phalanx_torch.scatter_object_list([None], [1]), "1 given, and the source rank has one object for each of 2"),
        (lambda: phalanx_torch.scatter_object_list([None], None), "none given"),
    ]:
        with pytest.raises(ValueError, match=why):
            call()
    # The root has its own.
    place = [None] if rank == 0 else []
    with pytest.raises(ValueError, match="at least one place") if rank == 1 else contextlib.nullcontext():
        phalanx_torch.scatter_object_list(place, ["x" * 20_000] * 2 if rank == 0 else None)
    assert place == (["x" * 20_000] if rank == 0 else [])
    places = [None, None]
    phalanx_torch.all_gather_object(places, rank)
    assert places == [0, 1] and dist.group.WORLD.failure() is None


def test_what_one_rank_refuses_is_told_to_all(ranks):
    ranks(2, wrong_on_one_rank)


def unwritten(rank):
    lock, calls = threading.Lock(), 0
    own = lock if rank == 1 else "x" * 20_000
    for call in [
        lambda: phalanx_torch.all_gather_object([None, None], own),
        lambda: phalanx_torch.gather_object(own, [None, None] if rank == 0 else None),
        lambda: phalanx_torch.broadcast_object_list([own], 1),
        lambda: phalanx_torch.scatter_object_list([None], ["x" * 20_000, lock] if rank == 1 else None, src=1),
        lambda: phalanx_torch.send_object_list([own], 0) if rank == 1 else phalanx_torch.recv_object_list([None], 1),
    ]:
        # Who has the object gets the error of its pickling.
        with pytest.raises(TypeError if rank == 1 else ValueError, match="cannot pickle '_thread.lock' object") as caught:
            call()
        assert rank == 1 or "rank 1 has sent no objects: TypeError" in str(caught.value)
        calls += 1
    places = [None, None]
    phalanx_torch.all_gather_object(places, calls)
    assert places == [5, 5] and dist.group.WORLD.failure() is None


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_an_object_that_cannot_be_pickled_is_told_to_all(ranks, transport, monkeypatch):
    monkeypatch.setenv("PHALANX_TRANSPORT", transport)
    ranks(2, unwritten)


def scattered_with_room(rank, room):
    large, scatter = b"x" * (64 << 20), dist.group.WORLD._native.scatter_objects
    own, came = [b"", large] if rank == 0 else [], [[b""], [large]][rank]
    # Afterwards there is what a group keeps for long calls.
    assert scatter(own, 0, 0) == came
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if rank == 0:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + room, limits[1]))
    try:
        if room < len(large):
            with pytest.raises(ValueError, match="rank 0 has sent no objects: there is no memory for"):
                scatter(own, 0, 0)
        else:
            assert scatter(own, 0, 0) == came
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    places = [None, None]
    phalanx_torch.all_gather_object(places, rank)
    assert places == [0, 1] and dist.group.WORLD.failure() is None


@pytest.mark.parametrize("room", [16 << 20, 96 << 20], ids=["none", "once"])
def test_objects_to_scatter_have_room_once_or_all_ranks_are_told(ranks, room):
    ranks(2, scattered_with_room, room)


CALLS = {
    "all_gather_object": lambda module, rank: module.all_gather_object([None, None], rank),
    "gather_object": lambda module, rank: module.gather_object(rank, [None, None] if rank == 0 else None),
    "broadcast_object_list": lambda module, rank: module.broadcast_object_list([rank]),
    "scatter_object_list": lambda module, rank: module.scatter_object_list([None], [1, 2] if rank == 0 else None),
}


def of_two_kinds(rank, name, ours):
    with pytest.raises(Error) as caught:
        CALLS[name](phalanx_torch if rank == ours else dist, rank)
        # The root of a broadcast receives nothing in it.
        dist.barrier()
    text = str(caught.value)
    assert caught.value.kind == "mismatch" and f"phalanx_torch.{name} [" in text and "rank 0" in text and "rank 1" in text, text


@pytest.mark.parametrize("ours", [0, 1])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("name", CALLS)
def test_pytorchs_function_beside_ours_is_an_error(ranks, name, transport, ours, monkeypatch):
    monkeypatch.setenv("PHALANX_TRANSPORT", transport)
    ranks(2, of_two_kinds, name, ours)


def messages_of_two_kinds(rank, sender):
    if rank == 0:
        with pytest.raises(Error):
            (phalanx_torch if sender == "ours" else dist).send_object_list([1, 2], 1)
            dist.barrier()
        return
    with pytest.raises(Error, match="send_object_list and recv_object_list of phalanx_torch on both ranks") as caught:
        (dist if sender == "ours" else phalanx_torch).recv_object_list([None, None], 0)
    text = str(caught.value)
    said = "rank 0 has sent objects with tag 0 to rank 1, which receives 2 x int64"
    assert caught.value.kind == "mismatch"
    assert (said if sender == "ours" else "rank 0 has sent 2 x int64 with tag 0 to rank 1, which receives objects") in text, text


@pytest.mark.parametrize("sender", ["ours", "PyTorch's"])
def test_messages_of_pytorchs_function_and_of_ours_are_an_error(ranks, sender):
    ranks(2, messages_of_two_kinds, sender)


def of_other_arguments(rank, case):
    with pytest.raises(Error) as caught:
        if case == "weights_only":
            phalanx_torch.all_gather_object([None, None], 1, weights_only=rank == 1)
        elif case == "root":
            phalanx_torch.gather_object(1, [None, None], dst=rank)
        elif case == "form of a broadcast":
            phalanx_torch.broadcast_object_list([1], weights_only=rank == 1)
        elif case == "length":
            phalanx_torch.broadcast_object_list([1] * (2 + rank))
        elif case == "form of a scatter":
            phalanx_torch.scatter_object_list([None], [1, 2] if rank == 0 else None, weights_only=rank == 1)
        elif rank == 0:
            phalanx_torch.send_object_list([1, 2, 3], 1)
        else:
            phalanx_torch.recv_object_list([None, None], 0)
        dist.barrier()
    assert rank == 0 or caught.value.kind == "mismatch"
    return str(caught.value)


@pytest.mark.parametrize(
    "case, said",
    [
        ("weights_only", "weights_only=True"),
        # Either rank may be the first that sees it.
        ("root", r"of rank [01] the root is rank [01], of rank [01] rank [01]"),
        ("form of a broadcast", "rank 1 has weights_only=True, rank 0 has weights_only=False"),
        ("length", "rank 0 sends 2 objects, and rank 1 has a list of 3"),
        ("form of a scatter", "rank 1 has weights_only=True, rank 0 has weights_only=False"),
        ("list of a message", "rank 0 has sent 3 objects with weights_only=False, and rank 1 waits for 2"),
    ],
)
def test_other_arguments_on_another_rank_are_named(ranks, case, said):
    text = ranks(2, of_other_arguments, case)[1]
    assert re.search(said, text), text


class Unsafe:
    def __reduce__(self):
        return (os.getpid, ())


def only_weights(rank):
    places = [None, None]
    phalanx_torch.all_gather_object(places, {"weight": torch.full((2,), float(rank))}, weights_only=True)
    assert [place["weight"].tolist() for place in places] == [[0.0, 0.0], [1.0, 1.0]]
    places = ["untouched", "untouched"]
    with pytest.raises(pickle.UnpicklingError):
        phalanx_torch.all_gather_object(places, Unsafe(), weights_only=True)
    assert places == ["untouched"] * 2
    for call in (
        lambda: phalanx_torch.broadcast_object_list(places, weights_only=True),
        lambda: phalanx_torch.scatter_object_list(places, [1, 2] if rank == 0 else None, weights_only=True),
    ):
        call()
    assert places[0] == rank + 1
    if rank == 0:
        phalanx_torch.send_object_list([5], 1, weights_only=True)
    else:
        phalanx_torch.recv_object_list(places[:1], 0, weights_only=True)
    phalanx_torch.all_gather_object(places, rank)
    assert places == [0, 1]


def test_only_weights(ranks):
    ranks(2, only_weights)


class Refusing(pickle.Unpickler):
    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"{module}.{name} is refused")


def other_pickler(rank):
    seen = []

    class Counting(pickle.Pickler):
        def dump(self, obj):
            seen.append(obj)
            super().dump(obj)

    c10d._pickler, c10d._unpickler = Counting, Refusing
    places = [None, None]
    phalanx_torch.all_gather_object(places, [rank])
    assert places == [[0], [1]] and seen == [[rank]]
    with pytest.raises(pickle.UnpicklingError, match="is refused"):
        phalanx_torch.all_gather_object(places, io.BytesIO)


def test_pytorchs_place_for_another_pickler_counts(ranks):
    ranks(2, other_pickler)


def pickled(*objs):
    """How many bytes these objects are."""
    return sum(len(pickle.dumps(obj)) for obj in objs)


def every_call(rank):
    """Makes each call of objects once, and checks what comes. Returns, for each, its name, PyTorch's operation and kind of call, and the bytes that this rank sends."""
    places, other = [None, None], 1 - rank
    phalanx_torch.all_gather_object(places, "a" * (50 + rank))
    assert places == ["a" * 50, "a" * 51]
    gathered = [None, None] if rank == 1 else None
    phalanx_torch.gather_object("b" * rank, gathered, dst=1)
    assert gathered == (["", "b"] if rank == 1 else None)
    places = ["c", "d"] if rank == 0 else [None, None]
    phalanx_torch.broadcast_object_list(places)
    assert places == ["c", "d"]
    place = [None]
    phalanx_torch.scatter_object_list(place, ["e", "f" * 20_000] if rank == 0 else None)
    assert place == ["e" if rank == 0 else "f" * 20_000]
    calls = [
        ("all_gather_object", "_allgather_base_", "ALLGATHER_BASE", [pickled("a" * (50 + rank))]),
        ("gather_object", "gather_", "GATHER", [pickled("b" * rank)]),
        ("broadcast_object_list", "broadcast_", "BROADCAST", [pickled("c", "d") if rank == 0 else 0]),
        ("scatter_object_list", "scatter_", "SCATTER", [pickled("e"), pickled("f" * 20_000)] if rank == 0 else []),
    ]
    for sender, source in ((0, 0), (1, None)):
        if rank == sender:
            phalanx_torch.send_object_list(["g", 1], other)
            calls.append(("send_object_list", "send", "SEND", [pickled("g", 1)]))
        else:
            places = [None, None]
            assert phalanx_torch.recv_object_list(places, source) == other and places == ["g", 1]
            calls.append(("recv_object_list", "recv_" if source == 0 else "recv_any_source_", "RECV", [0]))
    return calls


def seen_by_the_profiler(rank):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        calls = every_call(rank)
    events = [event for event in profile.events() if event.name.startswith("phalanx:")]
    assert [event.name for event in events] == [f"phalanx:{name}" for name, *_ in calls]
    assert [event.input_shapes for event in events] == [[[length] for length in sent] for *_, sent in calls]
    operations = [event.name for event in profile.events() if event.name.startswith("c10d::")]
    assert operations == ([f"c10d::{operation}" for _, operation, *_ in calls] if observed.can_dispatch() else [])
    before, places = dist.group.WORLD._get_sequence_number_for_group(), [None, None]
    phalanx_torch.all_gather_object(places, rank)
    assert dist.group.WORLD._get_sequence_number_for_group() == before + 1


def test_the_profiler_sees_the_calls(ranks):
    ranks(2, seen_by_the_profiler)


def seen_by_modes(rank):
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        seen: list = []

        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            result = function(*arguments, **(options or {}))
            self.seen.append((function.name(), arguments))
            return result

    with CommDebugMode() as counting:
        calls = every_call(rank)
    counts = counting.get_comm_counts()
    assert counts[torch.ops.c10d._allgather_base_] == 1 and counts[torch.ops.c10d.broadcast_] == 1, counts
    with Mode() as mode:
        every_call(rank)
    # Nothing but the calls: no tensor that is made for them.
    assert [name for name, _ in mode.seen] == [f"c10d::{operation}" for _, operation, *_ in calls]
    # What has come is there for whoever looks after the call.
    output, sent = mode.seen[0][1][:2]
    assert bytes(sent.tolist()) == pickle.dumps("a" * (50 + rank))
    assert bytes(output.tolist()) == pickle.dumps("a" * 50) + pickle.dumps("a" * 51)
    if rank == 1:
        (outputs,), _ = mode.seen[1][1][:2]
        assert [bytes(one.tolist()) for one in outputs] == [pickle.dumps(""), pickle.dumps("b")]
        assert mode.seen[2][1][0][0].numel() == pickled("c", "d") and mode.seen[3][1][0][0].numel() == pickled("f" * 20_000)
    place = observed._place
    assert (place.group, place.options, place.work, place.error, place.objects) == (None,) * 5


@needs_dispatcher
def test_dispatch_modes_see_the_calls(ranks):
    ranks(2, seen_by_modes)


def seen_by_hooks(rank):
    group, before, after, ended = dist.group.WORLD, [], [], []
    group.register_pre_hook(1, lambda given: before.append((given.name.name, given.async_op, [tensor.numel() for tensor in given.input_tensors])))
    group.register_post_hook(1, lambda given: after.append(given.name.name))
    group._register_on_completion_hook(lambda info: ended.append((info.op_type.name, info.seq)))
    calls = every_call(rank)
    kinds = [kind for _, _, kind, _ in calls]
    assert [name for name, *_ in before] == after == kinds
    for (name, is_asynchronous, sent), (*_, expected) in zip(before, calls):
        assert name in ("BROADCAST", "SEND", "RECV") or not is_asynchronous
        assert name == "RECV" or sum(sent) == sum(expected), (name, sent, expected)
    types = {"ALLGATHER_BASE": "_ALLGATHER_BASE"}
    names = [types.get(kind, kind) for kind in kinds]
    if rank == 0:
        names[-1] = "RECVANYSOURCE"
    assert [name for name, _ in ended] == names
    first = ended[0][1]
    assert [number for _, number in ended] == list(range(first, first + len(calls)))
    group.unregister_pre_hook(1)
    # A hook that makes calls of the same kind itself gets its own results.
    totals = []

    def nested(given):
        if not totals:
            totals.append(None)
            found = torch.zeros(2)
            dist.all_gather_into_tensor(found, torch.full((1,), rank + 1.0))
            other, places = torch.zeros(2), [None, None]
            torch.ops.c10d._allgather_base_(other, torch.full((1,), rank + 3.0), group.boxed(), False, -1)[1].wait()
            phalanx_torch.all_gather_object(places, rank)
            totals[:] = [*found.tolist(), *other.tolist(), *places]

    group.register_pre_hook(2, nested)
    places = [None, None]
    phalanx_torch.all_gather_object(places, {"rank": rank})
    assert places == [{"rank": 0}, {"rank": 1}] and totals == [1.0, 2.0, 3.0, 4.0, 0, 1]


@needs_dispatcher
def test_hooks_see_the_calls(ranks):
    ranks(2, seen_by_hooks)


def fails_while_seen(rank):
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode():
        unwritten(rank)
        wrong_on_one_rank(rank)
    with CommDebugMode(), pytest.raises(Error) as caught:
        CALLS["all_gather_object"](phalanx_torch if rank == 0 else dist, rank)
    assert caught.value.kind == "mismatch"


def test_errors_are_the_same_while_a_tool_watches(ranks):
    ranks(2, fails_while_seen)


def kept_from_the_group(rank):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            return arguments[0], work.ended([], 0).boxed()

    places = ["untouched"]
    with Mode(), pytest.raises(RuntimeError, match="all_gather_object: a dispatch mode has kept PyTorch's operation c10d::_allgather_base_"):
        phalanx_torch.all_gather_object(places, rank)
    assert places == ["untouched"]
    phalanx_torch.all_gather_object(places, rank)
    assert places == [0]


@needs_dispatcher
def test_a_mode_that_makes_no_call_is_an_error(ranks):
    ranks(1, kept_from_the_group)


def without_tensors(rank):
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    with FakeTensorMode():
        every_call(rank)

    def traced(tensor):
        every_call(rank)
        return tensor + 1

    graph = make_fx(traced)(torch.ones(2)).graph
    assert not [node for node in graph.nodes if "c10d" in str(node.target)], graph


def test_objects_are_exchanged_where_tensors_are_only_traced(ranks):
    ranks(2, without_tensors)


@needs_dispatcher
def test_the_check_for_nan_lets_objects_pass(ranks, monkeypatch):
    monkeypatch.setenv("TORCH_DIST_NAN_CHECK", "1")
    ranks(2, every_call)


def replaced(rank, port):
    environment(rank, 2, port)
    theirs = dist.all_gather_object
    phalanx_torch.replace_object_functions()
    # Again: nothing.
    once = dist.all_gather_object
    phalanx_torch.replace_object_functions()
    assert once is dist.all_gather_object is c10d.all_gather_object is not theirs and once.__wrapped__ is theirs
    dist.init_process_group("phalanx")
    ours, called = objects.all_gather_object, []
    objects.all_gather_object = lambda *arguments, **named: (called.append(1), ours(*arguments, **named))[1]
    for call in (
        lambda places: dist.all_gather_object(places, rank),
        lambda places: dist.all_gather_object(places, rank, None),
        lambda places: dist.all_gather_object(places, obj=rank, group=dist.group.WORLD),
    ):
        places = [None, None]
        call(places)
        assert places == [0, 1]
    assert len(called) == 3
    places = [rank]
    dist.broadcast_object_list(places, src=1)
    dist.scatter_object_list(places, ["a", "b"] if rank == 0 else None)
    assert places == ["ab"[rank]]
    gathered = [None, None] if rank == 0 else None
    dist.gather_object(rank, gathered)
    assert gathered == ([0, 1] if rank == 0 else None)
    if rank == 0:
        dist.send_object_list([1], 1)
    else:
        assert dist.recv_object_list(places, 0) == 0 and places == [1]
    # Groups of others get PyTorch's.
    gloo = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=30))
    places = [None, None]
    dist.all_gather_object(places, rank, group=gloo)
    assert places == [0, 1] and len(called) == 3
    with pytest.raises(ValueError, match="no group of phalanx for the CPU, but one of .*gloo.*call torch.distributed.all_gather_object"):
        phalanx_torch.all_gather_object(places, rank, group=gloo)
    one = dist.new_group([1])
    if rank == 0:
        with pytest.warns(UserWarning, match="does not belong"):
            dist.all_gather_object(places, rank, group=one)
    # A rank of gloo's fails if another one leaves while it still uses the group.
    dist.barrier()
    dist.destroy_process_group()


def test_the_functions_take_the_place_of_pytorchs():
    processes(2, replaced, free_port())


def test_the_names_of_arguments_are_those_that_are_compared_with_pytorchs():
    for name, arguments in _object_functions.FUNCTIONS.items():
        assert tuple(inspect.signature(getattr(objects, name)).parameters) == arguments
        assert getattr(phalanx_torch, name) is getattr(objects, name)
        theirs = tuple(inspect.signature(getattr(c10d, name)).parameters)
        assert arguments[: len(theirs)] == theirs


def test_a_pytorch_made_otherwise_is_refused(monkeypatch):
    before = dist.all_gather_object
    monkeypatch.setattr(c10d, "gather_object", lambda obj, where, group=None: None)
    with pytest.raises(RuntimeError, match="in another form: gather_object. It has been"):
        phalanx_torch.replace_object_functions()
    monkeypatch.delattr(c10d, "gather_object")
    with pytest.raises(RuntimeError, match="in another form: gather_object. It has been"):
        phalanx_torch.replace_object_functions()
    assert dist.all_gather_object is before


def test_the_variable_replaces_them_too():
    program = """
import sys, torch.distributed as dist, phalanx_torch
assert hasattr(dist.all_gather_object, "__wrapped__") and "phalanx_torch._native" not in sys.modules
dist.init_process_group("phalanx", store=dist.HashStore(), rank=0, world_size=1)
places = [None]
dist.all_gather_object(places, 1)
assert places == [1] and "phalanx_torch.objects" in sys.modules
dist.destroy_process_group()
"""
    variables = {**os.environ, "PHALANX_OBJECTS": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", program], env=variables, check=True, timeout=120)
    variables["PHALANX_OBJECTS"] = "all"
    failed = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, timeout=120)
    assert failed.returncode != 0 and "PHALANX_OBJECTS is 'all'; give 1 to replace" in failed.stderr


def beside_another(rank, folder, detail):
    # As on a machine with a GPU; gloo's part needs none until it gets a tensor that is there.
    if detail:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    torch.accelerator.is_available = lambda: True
    dist.init_process_group(
        "cpu:phalanx,cuda:gloo", f"file://{folder}/store", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=30)
    )
    assert isinstance(of_device(dist.group.WORLD, "cpu"), DeviceBackend)
    phalanx_torch.replace_object_functions()
    pair = dist.new_group([0, 1])
    for group in (None, pair):
        for module in (phalanx_torch, dist):
            places = [None, None]
            module.all_gather_object(places, made(rank, 20_000), group=group)
            assert places == [made(0, 20_000), made(1, 20_000)]
            module.broadcast_object_list(places, 1, group=group)
    dist.destroy_process_group()


@pytest.mark.parametrize("detail", [False, True])
def test_beside_another_backend(tmp_path, detail):
    from phalanx_torch.device_backend import takes_backends_in_python

    if not takes_backends_in_python():
        pytest.skip("this PyTorch does not let Python write the part of a group for one device")
    processes(2, beside_another, tmp_path, detail)


def test_without_a_group():
    with pytest.raises(ValueError, match="has not been initialized"):
        phalanx_torch.all_gather_object([None], 1)
