"""Odd calls, made over gloo and over a group of ours, which refuses what gloo refuses, in the same words."""

import contextlib
import datetime
import re
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from conftest import SINCE_2_15, processes
from torch._C import _distributed_c10d as c10d
from torch.distributed.tensor.debug import CommDebugMode

import phalanx_torch
from phalanx_torch import _warnings
from phalanx_torch import work as works

WORLD = 2


def ones(*shape):
    return torch.ones(shape)


def several(*shapes):
    return [torch.zeros(shape) for shape in shapes]


# Calls that each rank refuses by itself, so that the group goes on.
REFUSED = {
    "all_gather of another shape": lambda rank, how: dist.all_gather(several(4, 4), ones(2, 2), **how),
    "all_gather into another shape": lambda rank, how: dist.all_gather(several((2, 2), (2, 2)), ones(4), **how),
    "all_gather with one of another shape": lambda rank, how: dist.all_gather(several((2, 2), 4), ones(2, 2), **how),
    "all_gather of a scalar": lambda rank, how: dist.all_gather(several(1, 1), torch.tensor(1.0), **how),
    "all_gather of nothing": lambda rank, how: dist.all_gather(several(0, (0, 3)), ones(0), **how),
    "all_to_all of another shape": lambda rank, how: dist.all_to_all(several(4, 4), [ones(2, 2), ones(2, 2)], **how),
    "gather of another shape": lambda rank, how: rooted(rank, lambda: dist.gather(ones(2, 2), several(4, 4), **how)),
    "gather with one of another shape": lambda rank, how: rooted(rank, lambda: dist.gather(ones(4), several(4, (2, 2)), **how)),
    "scatter of another shape": lambda rank, how: rooted(rank, lambda: dist.scatter(ones(4), several((2, 2), (2, 2)), **how)),
    "scatter of several shapes": lambda rank, how: rooted(rank, lambda: dist.scatter(ones(4), several(4, (2, 2)), **how)),
    "all_gather_coalesced of another shape": lambda rank, how: dist.all_gather_coalesced(
        [several(4, 3), several(4, 3)], [ones(2, 2), ones(3)], **how
    ),
    "all_gather_coalesced with one of another size": lambda rank, how: dist.all_gather_coalesced(
        [several(2, 4), several(2, 4)], [ones(2), ones(3)], **how
    ),
    "all_gather_coalesced with lists that are too short": lambda rank, how: dist.all_gather_coalesced(
        [several(2), several(2)], [ones(2), ones(3)], **how
    ),
}
# gloo names a line of its own there, with a time.
REFUSED_IN_OTHER_WORDS = {
    "reduce_scatter of another shape": lambda rank, how: dist.reduce_scatter(torch.zeros(4), [ones(2, 2), ones(2, 2)], **how),
    "reduce_scatter with one of another shape": lambda rank, how: dist.reduce_scatter(torch.zeros(4), several(4, (2, 2)), **how)
    if rank == 1
    else dist.reduce_scatter(torch.zeros(4), several((2, 2), 4), **how),
    "all_gather_coalesced with too few lists": lambda rank, how: dist.all_gather_coalesced([several(2)], [ones(2)], **how),
}


def rooted(rank, call):
    """Only the root has lists to refuse; the other rank would wait for it."""
    if rank == 0:
        call()
    else:
        raise RuntimeError("not called")


def words(error):
    """What an error says, without who says it."""
    return re.sub(r"^\w+(::\w+)?: ", "", str(error))


def refused(rank, backend, folder, is_async, is_watched):
    dist.init_process_group(
        backend, f"file://{folder}/{backend}{is_async}{is_watched}", rank=rank, world_size=WORLD, timeout=datetime.timedelta(seconds=60)
    )
    how, said = {"async_op": is_async}, {}
    with CommDebugMode() if is_watched else contextlib.nullcontext():
        for name, call in (REFUSED | REFUSED_IN_OTHER_WORDS).items():
            with pytest.raises((RuntimeError, ValueError)) as caught:
                call(rank, how)
            if name in REFUSED:
                said[name] = words(caught.value)
        # The group is as it was.
        tensor = ones(3)
        dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 3
    dist.destroy_process_group()
    return said


@pytest.mark.skipif(not SINCE_2_15, reason="gloo says other words")
@pytest.mark.parametrize("is_async, is_watched", [(False, False), (True, False), (False, True)])
@pytest.mark.filterwarnings("ignore:.*will be deprecated")
def test_lists_of_other_shapes_are_refused_as_by_gloo(tmp_path, is_async, is_watched):
    gloo = processes(WORLD, refused, "gloo", tmp_path, is_async, is_watched)
    ours = processes(WORLD, refused, "phalanx", tmp_path, is_async, is_watched)
    assert ours == gloo
    assert gloo[0]["all_gather of another shape"] == "invalid tensor size at index 0 (expected (2, 2), got (4))"
    assert gloo[0]["all_gather of a scalar"] == "invalid tensor size at index 0 (expected (), got (1))"


def uneven(rank):
    # Lists of different lengths, which gloo does not take: this rank knows its own place.
    outputs = several((1, 2), (2, 2))
    dist.all_gather(outputs, torch.full((rank + 1, 2), rank + 1.0))
    assert [output.mean().item() for output in outputs] == [1.0, 2.0]
    outputs = several((rank + 1, 2), (rank + 1, 2))
    dist.all_to_all(outputs, [torch.full((1, 2), rank + 1.0), torch.full((2, 2), rank + 1.0)])
    assert [output.mean().item() for output in outputs] == [1.0, 2.0]
    output = torch.zeros(rank + 1, 2)
    dist.reduce_scatter(output, [ones(1, 2), ones(2, 2)])
    assert output.tolist() == [[2.0, 2.0]] * (rank + 1)
    wrong = torch.zeros((rank + 1) * 2)
    for call in (
        lambda: dist.all_gather([wrong if place == rank else torch.zeros(place + 1, 2) for place in range(WORLD)], ones(rank + 1, 2)),
        lambda: dist.reduce_scatter(wrong, [ones(1, 2), ones(2, 2)]),
        lambda: dist.all_to_all(
            [wrong if place == rank else torch.zeros(rank + 1, 2) for place in range(WORLD)], [ones(1, 2), ones(2, 2)]
        ),
    ):
        with pytest.raises(ValueError, match=rf"invalid tensor size at index {rank} \(expected "):
            call()
    dist.barrier()


def test_lists_of_different_lengths_are_compared_at_the_place_of_the_rank(ranks):
    ranks(WORLD, uneven)


def halves(rank):
    group, before = dist.group.WORLD, dist.group.WORLD._get_sequence_number_for_group()
    pairs = [torch.zeros(4), torch.zeros(6)], [ones(2), ones(3)]
    zeros = torch._efficientzerotensor(3)
    for call, kind, match in (
        (lambda: group.all_gather_single_coalesced(pairs[0], pairs[1][:1]), ValueError, "2 outputs and 1 inputs"),
        (lambda: group.reduce_scatter_single_coalesced(pairs[1][:1], pairs[0]), ValueError, "1 outputs and 2 inputs"),
        (lambda: group.all_gather_single_coalesced([torch.zeros(4), torch.zeros(5)], pairs[1]), ValueError, "the output at index 1 must be 2 times"),
        (lambda: group.reduce_scatter_single_coalesced([ones(2), ones(2)], pairs[0]), ValueError, "the input at index 1 must be 2 times"),
        (lambda: group.all_gather_single_coalesced([torch.zeros(4), torch.zeros(6).int()], pairs[1]), TypeError, "at index 1 is of torch.int32"),
        (lambda: group.reduce_scatter_single_coalesced([ones(2), ones(3).int()], pairs[0]), TypeError, "at index 1 is of torch.int32"),
        (lambda: group.all_gather_single_coalesced([torch.zeros(4), torch.zeros(6)], [ones(2), ones(3).to_sparse()]), ValueError, "at index 1 is of layout"),
        (lambda: group.all_gather_single_coalesced(pairs[0], [ones(2), zeros]), TypeError, "is all zeros, and has no memory"),
        (lambda: group.reduce_scatter_single_coalesced([ones(2), zeros], pairs[0]), TypeError, "is all zeros, and has no memory"),
        (lambda: group.allgather_coalesced([several(2, 3)] * WORLD, [ones(2), zeros]), TypeError, "is all zeros, and has no memory"),
        (lambda: group.allgather_coalesced([[]] * WORLD, []), ValueError, "requires non-empty input tensor list"),
        (lambda: group.allgather_coalesced([several(2, 3)] * WORLD, [ones(2), ones(3).int()]), TypeError, "at index 1 is of torch.float32"),
    ):
        with pytest.raises(kind, match=match):
            call()
    # Nothing of them has been sent.
    assert group._get_sequence_number_for_group() == before
    group.all_gather_single_coalesced(*pairs).wait()
    assert pairs[0][1].tolist() == [1.0] * 6
    outputs = [torch.zeros(2), torch.zeros(3)]
    group.reduce_scatter_single_coalesced(outputs, pairs[0]).wait()
    assert outputs[1].tolist() == [2.0] * 3


def test_several_calls_as_one_are_all_made_or_none(ranks):
    ranks(WORLD, halves)


def left(rank, device):
    coalescing, group = dist.distributed_c10d._coalescing_manager, dist.group.WORLD

    def totals():
        tensors = [ones(2), ones(2)]
        dist.all_reduce(tensors[0])
        dist.all_reduce(tensors[1], async_op=True).wait()
        assert group._coalesced is None
        return [tensor.tolist() for tensor in tensors]

    with pytest.raises(KeyError, match="of the program"):
        with coalescing(device=device):
            dist.all_reduce(ones(3))
            raise KeyError("of the program")
    # The calls that follow are made, and not only noted.
    assert totals() == [[2.0, 2.0]] * 2
    with pytest.raises(RuntimeError, match="all collectives to be the same type"):
        with coalescing(device=device):
            dist.all_reduce(ones(3))
            dist.all_gather_into_tensor(torch.zeros(4), ones(2))
    assert totals() == [[2.0, 2.0]] * 2
    tensors = [ones(3), ones(4)]
    with coalescing(device=device, async_ops=True) as manager:
        with pytest.raises(ValueError, match="non-empty op list"):
            dist.all_reduce(tensors[0])
            with coalescing(device=device):
                pass
        # The outer one is as it was.
        dist.all_reduce(tensors[1])
    manager.wait()
    assert [tensor.tolist() for tensor in tensors] == [[2.0] * 3, [2.0] * 4]
    assert totals() == [[2.0, 2.0]] * 2


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_a_failure_within_several_calls_as_one_ends_them(ranks, device):
    ranks(WORLD, left, device)


def of_two_operations(rank, device):
    coalescing, ops = dist.distributed_c10d._coalescing_manager, dist.ReduceOp
    for call in (
        lambda op: dist.all_reduce(ones(3), op),
        lambda op: dist.reduce_scatter_tensor(torch.zeros(2), ones(4), op),
    ):
        for first, second in ((ops.SUM, ops.MAX), (ops.AVG, ops.SUM)):
            with pytest.raises(ValueError, match="several calls as one have one operation, and these have .*make all of them with the first"):
                with coalescing(device=device):
                    call(first)
                    call(second)
    # Nothing of them has been sent.
    tensors = [torch.full((3,), rank + 1.0), torch.full((2,), rank + 1.0)]
    with coalescing(device=device):
        for tensor in tensors:
            dist.all_reduce(tensor, ops.MAX)
    assert [tensor.tolist() for tensor in tensors] == [[2.0] * 3, [2.0] * 2]


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_several_calls_as_one_with_different_operations_are_refused(ranks, device):
    ranks(WORLD, of_two_operations, device)


# The shapes of the tensor for all of 2 ranks, and of one rank's: as the elements lie.
LAYOUTS = [((4, 3), (2, 3)), ((2, 2, 3), (2, 3)), ((12,), (2, 3)), ((2,), ()), ((2, 3), (3,)), ((6,), (3,)), ((1, 4, 3), (1, 2, 3)), ((0, 3), (0, 3))]
# The same, with another shape of one rank's elements: all in a row, or in a row for each rank. And none at all.
LAYOUTS += [((4, 3), (6,)), ((2, 2, 3), (6,)), ((2, 2, 3), (1, 6)), ((2, 6), (3, 2)), ((2, 12), (2, 2, 3)), ((2, 3, 4), (2, 6)), ((0, 6), (0, 3))]
# And not so: a concatenation or a stack along another dimension, or rows of another length.
OTHER_LAYOUTS = [((2, 6), (2, 3)), ((3, 4), (2, 3)), ((3, 2), (3,)), ((3, 2), (3, 1)), ((3, 2), (1, 3)), ((2, 2, 3), (2, 1, 3)), ((2, 3, 2), (2, 3)), ((2, 1, 6), (2, 3))]


def shaped(rank):
    group = dist.group.WORLD
    for whole, part in LAYOUTS:
        own = torch.arange(float(torch.Size(part).numel())).reshape(part) + 100 * rank
        both = torch.cat([own.flatten() - 100 * rank, own.flatten() - 100 * rank + 100])
        output = torch.zeros(whole)
        dist.all_gather_into_tensor(output, own)
        assert torch.equal(output.flatten(), both), (whole, part)
        output = torch.zeros(whole, dtype=torch.complex64)
        dist.all_gather_into_tensor(output, own.to(torch.complex64))
        assert torch.equal(output.flatten(), both.to(torch.complex64)), (whole, part)
        output = torch.zeros(part)
        dist.reduce_scatter_tensor(output, both.reshape(whole))
        assert torch.equal(output, 2 * own), (whole, part)
    complex_rows = torch.full((2, 3), rank + 1j)
    output = torch.zeros(12, dtype=torch.complex64)
    dist.all_gather_into_tensor(output, complex_rows)
    assert output.tolist() == [1j] * 6 + [1 + 1j] * 6
    before = group._get_sequence_number_for_group()
    for whole, part in OTHER_LAYOUTS:
        for call in (
            lambda: dist.all_gather_into_tensor(torch.zeros(whole), torch.zeros(part)),
            lambda: dist.all_gather_into_tensor(torch.zeros(whole), torch.zeros(part), async_op=True),
            lambda: dist.all_gather_into_tensor(torch.zeros(whole, dtype=torch.complex64), torch.zeros(part, dtype=torch.complex64)),
            lambda: dist.reduce_scatter_tensor(torch.zeros(part), torch.zeros(whole)),
            lambda: dist.reduce_scatter_tensor(torch.zeros(part).int(), torch.zeros(whole).int(), dist.ReduceOp.AVG),
            lambda: group.all_gather_single_coalesced([torch.zeros(4), torch.zeros(whole)], [ones(2), torch.zeros(part)]),
            lambda: group.reduce_scatter_single_coalesced([ones(2), torch.zeros(part)], [torch.zeros(4), torch.zeros(whole)]),
        ):
            with pytest.raises(ValueError, match="its elements would be in other places than this shape says"):
                call()
    with pytest.raises(ValueError, match=r"the input \(2, 3\) the output has the shape \(4, 3\), \(2, 2, 3\) or \(12\), and not \(2, 6\)"):
        dist.all_gather_into_tensor(torch.zeros(2, 6), torch.zeros(2, 3))
    # Nothing of them has been sent.
    assert group._get_sequence_number_for_group() == before


def test_tensors_for_all_ranks_have_a_shape_that_says_what_lies_in_them(ranks):
    ranks(WORLD, shaped)


def limited(rank):
    group, tensor = dist.group.WORLD, torch.zeros(1)
    # Nothing has come yet.
    work = dist.irecv(tensor, 1 - rank)
    for odd in (datetime.timedelta(seconds=-1), -1.0, float("-inf"), -(10**400)):
        with pytest.raises(phalanx_torch.Error, match="not done after 0.0 s"):
            work.wait(odd)
    with pytest.raises(ValueError, match="NaN"):
        work.wait(float("nan"))
    with pytest.raises(TypeError, match="and not a str"):
        work.wait("1")
    both = works.Works([work, work], [tensor])
    with pytest.raises(phalanx_torch.Error, match="not done after") as caught:
        both.wait(datetime.timedelta(microseconds=1))
    assert caught.value.kind == "timeout"
    # As over gloo, a barrier does not wait for messages.
    dist.barrier()
    dist.send(ones(1), 1 - rank)
    # These are no limits.
    for odd in (float("inf"), 1e300, 10**400, datetime.timedelta.max, datetime.timedelta(0), 0, None):
        assert work.wait(odd) and both.wait(odd)
    # And of what has ended nothing is waited.
    assert work.wait(datetime.timedelta(seconds=-1)) and both.wait(datetime.timedelta(seconds=-1))
    assert tensor.item() == 1.0
    for odd in (1, 1.0, "1"):
        for call in (
            lambda: group.barrier(timeout=odd),
            lambda: group.broadcast(tensor, 0, odd),
            lambda: group.monitored_barrier(odd),
            lambda: group.set_timeout(odd),
        ):
            with pytest.raises(TypeError, match="timedelta"):
                call()
    with pytest.raises(phalanx_torch.Error, match="timed out in monitoredBarrier: its time-out is 0.0 s") as caught:
        group.monitored_barrier(datetime.timedelta(0))
    assert caught.value.kind == "timeout"
    with pytest.raises(ValueError, match="a time-out of -1.0 s is below 0"):
        group.set_timeout(datetime.timedelta(seconds=-1))
    with pytest.raises(ValueError, match="a time-out of .* s is below 0"):
        dist.new_group(timeout=datetime.timedelta(seconds=-1))
    # What was refused has changed nothing.
    assert group._timeout == datetime.timedelta(seconds=60)
    for odd in (datetime.timedelta.max, datetime.timedelta(days=100_000)):
        group.set_timeout(odd)
        dist.all_reduce(tensor)
        group.monitored_barrier()
    group._wait_for_pending_works()
    options = c10d.AllreduceOptions()
    for odd in (datetime.timedelta.max, datetime.timedelta.min, datetime.timedelta(0), datetime.timedelta(seconds=-1)):
        options.timeout = odd
        assert group.allreduce([tensor], options).wait()


def test_odd_time_outs(ranks):
    ranks(WORLD, limited)


def test_a_line_that_is_in_no_file_is_warned_of_too():
    # Of code that a program makes, the line is none of the module in whose name it runs.
    made = compile("\n" * 10_000 + "warn('made')", "made", "exec")
    with pytest.warns(UserWarning, match="made") as caught:
        exec(made, {**globals(), "warn": _warnings.warn})
    assert (caught[0].filename, caught[0].lineno) == ("made", 10_001)


def warned(rank):
    follows = torch.ones(2, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.all_gather([follows * 1, torch.ones(2)], torch.ones(2))
        dist.group.WORLD.allgather([[follows * 1, torch.ones(2)]], [torch.ones(2)]).wait()
        with CommDebugMode():
            dist.all_gather([follows * 1, torch.ones(2)], torch.ones(2))
        phalanx_torch.all_gather_object([None] * WORLD, 1, dist.GroupMember.NON_GROUP_MEMBER)
        dist.group.WORLD.register_abort_hook(1, lambda: 1 / 0)
        dist.group.WORLD.abort()
        deadline = time.monotonic() + 60.0
        while not any("abort hook" in str(one.message) for one in caught) and time.monotonic() < deadline:
            time.sleep(0.01)
    ours = [one for one in caught if "phalanx" in str(one.message) or "does not belong" in str(one.message)]
    assert len(ours) == 5, [str(one.message) for one in caught]
    # A hook may be called on a thread of ours, where there is no line of the program.
    assert {one.filename for one in ours[:-1]} == {__file__}, [(one.filename, one.lineno) for one in ours]
    assert ours[-1].filename in (__file__, "sys")
    assert len({one.lineno for one in ours[:-1]}) == 4


def test_warnings_name_the_line_of_the_program(ranks):
    ranks(WORLD, warned)
