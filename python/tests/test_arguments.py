"""Arguments that gloo refuses, or takes, and of which it warns."""

import datetime
import warnings

import pytest
import torch
import torch.distributed as dist
from conftest import needs_dispatcher
from torch._C import _distributed_c10d as c10d

import phalanx_torch


def ranks_below_zero(rank):
    group, one = dist.group.WORLD, torch.ones(2)
    second = c10d.BroadcastOptions()
    second.rootTensor = 1
    second_of_reduce = c10d.ReduceOptions()
    second_of_reduce.rootTensor = 1
    # Each rank is the root, and brings no list.
    root_of_gather, root_of_scatter = c10d.GatherOptions(), c10d.ScatterOptions()
    root_of_gather.rootRank = root_of_scatter.rootRank = rank
    for call, said in (
        (lambda: dist.broadcast(one, -1), "broadcast: the root is rank -1"),
        (lambda: dist.reduce(one, -1), "reduce: the root is rank -1"),
        (lambda: dist.gather(one, None, -1), "gather: the root is rank -1"),
        (lambda: dist.scatter(one, None, -1), "scatter: the root is rank -1"),
        (lambda: group.send([one], -1, 0), "send: rank -1 is not a rank of this group"),
        (lambda: group.recv([one], -1, 0), "recv: rank -1 is not a rank of this group"),
        (lambda: dist.send(one, 1 - rank, tag=-1), "send: Tag must be nonnegative; it is -1"),
        (lambda: dist.irecv(one, 1 - rank, tag=-1), "recv: Tag must be nonnegative; it is -1"),
        (lambda: dist.recv(one, tag=-7), "recv: Tag must be nonnegative; it is -7"),
        (lambda: group.broadcast([one], second), "broadcast: rootTensor is 1, and each rank has one tensor"),
        (lambda: group.reduce([one], second_of_reduce), "reduce: rootTensor is 1, and each rank has one tensor"),
        (lambda: dist.broadcast(one, 5), "rank 5 is outside a world of 2"),
        (
            lambda: dist.all_to_all_single(torch.zeros(4), torch.ones(4), [-1, 5], [2, 2]),
            r"the output split sizes are \[-1, 5\], and none may be below 0",
        ),
        (
            lambda: dist.all_to_all_single(torch.zeros(4), torch.ones(4), [4], [2, 2]),
            "1 output split sizes for 2 ranks",
        ),
        (lambda: group.gather([], [one], root_of_gather), "the root has one list of outputs, every other rank none"),
        (lambda: group.scatter([one], [], root_of_scatter), "the root has one list of inputs, every other rank none"),
        (lambda: dist.broadcast(torch.eye(2).to_sparse_csr(), 0), "to_dense.. makes one that can be exchanged"),
        (lambda: group.allreduce_coalesced([one, one.double()], c10d.AllreduceCoalescedOptions()), "dense and have the same type"),
        (lambda: group.allreduce_coalesced([], c10d.AllreduceCoalescedOptions()), "all_reduce_coalesced: there is no tensor"),
        (lambda: group.allreduce([]), "one tensor for each rank, and not 0"),
    ):
        with pytest.raises(ValueError, match=said):
            call()
    # No part of a row is cut off without a word.
    for odd in ([1.5, 2.5], torch.tensor([2.0, 2.0]), ["2", "2"], 2):
        with pytest.raises(TypeError, match="all_to_all_single: split sizes are integers, one for each rank, and not "):
            dist.all_to_all_single(torch.zeros(3), torch.ones(3), odd, [1, 2])
    # Nobody has been called.
    dist.all_reduce(one)
    assert one.tolist() == [2.0, 2.0]


def test_ranks_and_sizes_below_zero_are_named(ranks):
    ranks(2, ranks_below_zero)


def refused_without_a_wait(rank):
    two, four, how = torch.ones(2), torch.ones(4), {"async_op": True}
    for call, said in (
        (lambda: dist.broadcast(two, group_src=7, **how), "broadcast: rank 7 is outside a world of 2"),
        (lambda: dist.reduce(two, group_dst=7, **how), "reduce: rank 7 is outside a world of 2"),
        (lambda: dist.gather(two, group_dst=7, **how), "gather: rank 7 is outside a world of 2"),
        (lambda: dist.scatter(two, group_src=7, **how), "scatter: rank 7 is outside a world of 2"),
        (lambda: dist.all_gather_into_tensor(torch.ones(5), two, **how), "the output must be 2 times as long as the input; it has 5 elements"),
        (lambda: dist.reduce_scatter_tensor(torch.ones(3), four, **how), "the input must be 2 times as long as the output; it has 4 elements"),
        (lambda: dist.all_gather([torch.ones(3), torch.ones(3)], two, **how), rf"all_gather: invalid tensor size at index {rank} "),
        (lambda: dist.all_gather([torch.ones(3), torch.ones(4)], two, **how), rf"all_gather: invalid tensor size at index {rank} "),
        (lambda: dist.reduce_scatter(torch.ones(3), [two, two], **how), rf"reduce_scatter: invalid tensor size at index {rank} "),
        (lambda: dist.all_to_all([torch.ones(3), torch.ones(3)], [two, two], **how), rf"all_to_all: invalid tensor size at index {rank} "),
        (lambda: dist.all_to_all_single(torch.ones(6), four, **how), "the output has 6 elements, the input 4"),
        (
            lambda: dist.all_to_all_single(torch.ones(4), four, [3, 1] if rank == 0 else [1, 3], [2, 2], **how),
            "this rank sends itself 2 elements, and has a part of 3 for them",
        ),
    ):
        # The work would be dropped here, and its error with it.
        with pytest.raises(ValueError, match=said):
            call()
    dist.all_reduce(two)
    assert two.tolist() == [2.0, 2.0]


def test_wrong_arguments_are_refused_at_the_call_and_not_only_by_a_wait(ranks):
    ranks(2, refused_without_a_wait)


def waits(rank):
    # PyTorch's works take a number for seconds.
    for limit in (5.0, 5, 0, datetime.timedelta(seconds=5), datetime.timedelta(0), None):
        assert dist.all_reduce(torch.ones(1), async_op=True).wait(limit)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["waited"])
        dist.all_reduce(torch.ones(1))
        return
    work = dist.all_reduce(torch.ones(1), async_op=True)
    with pytest.raises(phalanx_torch.Error, match="Timed out at all_reduce: not done after 0.1 s") as caught:
        work.wait(0.1)
    # Only the wait has ended.
    assert (caught.value.kind, caught.value.peer) == ("timeout", None) and dist.group.WORLD.failure() is None
    with pytest.raises(TypeError, match="wait: the time-out is a timedelta or a number of seconds, and not a str"):
        work.wait("5")
    store.set("waited", "1")
    work.wait()


def test_a_wait_takes_numbers_as_pytorchs(ranks):
    ranks(2, waits)


def followed(shape=(2,)):
    """A tensor that autograd follows, and that is no parameter."""
    return torch.ones(shape, requires_grad=True) * 2


def said_of(call, tensor):
    """What is said of a call that writes into a tensor, and of the way backward through it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(tensor)
        if tensor.requires_grad:
            tensor.sum().backward()
    return [str(warning.message) for warning in caught]


def warned_of(rank, world, backend):
    group = dist.group.WORLD if backend == "phalanx" else dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=60))
    inputs = [torch.ones(2), torch.ones(2)]
    for operation, call in {
        "allreduce_": lambda tensor: dist.all_reduce(tensor, group=group),
        "broadcast_": lambda tensor: dist.broadcast(tensor, 1, group=group),
        "scatter_": lambda tensor: dist.scatter(tensor, inputs if rank == 0 else None, group=group),
        "_reduce_scatter_base_": lambda tensor: dist.reduce_scatter_tensor(tensor, torch.ones(4), group=group),
    }.items():
        said = said_of(call, followed())
        assert len(said) == 1 and said[0].startswith(f"c10d::{operation}: an autograd kernel was not registered"), (operation, said)
        # Nobody follows these.
        assert said_of(call, torch.ones(2)) == []
        with torch.no_grad():
            leaf = torch.ones(2, requires_grad=True)
            call(leaf)
        assert said_of(lambda tensor: None, leaf * 1) == []
    dist.barrier(group)


@needs_dispatcher
@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_pytorch_warns_of_gradients_through_a_call_as_over_gloo(ranks, backend):
    ranks(2, warned_of, 2, backend)


def wrapped(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.ones(4), mesh, [Shard(0)]).requires_grad_()
    for call in (lambda: dist.group.WORLD.allreduce([tensor]), lambda: dist.group.WORLD.broadcast([tensor])):
        with pytest.raises(TypeError, match=r"DTensor has parts on several ranks.*to_local\(\)"):
            call()
    with pytest.raises(TypeError, match="on meta has no elements"):
        dist.all_reduce(torch.ones(4, device="meta", requires_grad=True))


def test_a_tensor_that_is_not_taken_has_our_error_also_if_autograd_follows_it(ranks):
    ranks(2, wrapped)


def transformed(rank):
    def call(tensor):
        dist.all_reduce(tensor)
        return tensor

    for transform in (
        lambda: torch.func.vmap(call)(torch.ones(2, 3)),
        lambda: torch.func.jvp(call, (torch.ones(2),), (torch.ones(2),)),
    ):
        with pytest.raises(TypeError, match="a transform of torch.func, such as vmap, has no memory of its own: make this call outside of it"):
            transform()
    # Nothing has been sent.
    assert call(torch.ones(1)).item() == 2.0


def test_a_call_within_a_transform_of_functions_is_refused_by_its_name(ranks):
    ranks(2, transformed)


def warned_of_by_us(rank):
    other = 1 - rank
    for name, call in {
        "all_gather": lambda tensor: dist.all_gather([tensor, torch.zeros(2)], torch.ones(2)),
        "reduce_scatter": lambda tensor: dist.reduce_scatter(tensor, [torch.ones(2), torch.ones(2)]),
        "all_to_all_single": lambda tensor: dist.all_to_all_single(tensor, torch.ones(2)),
        "all_to_all": lambda tensor: dist.all_to_all([tensor, torch.zeros(2)], [torch.ones(2), torch.ones(2)]),
        "gather": lambda tensor: dist.gather(torch.ones(2), [tensor, torch.zeros(2)] if rank == 0 else None),
        "reduce": lambda tensor: dist.reduce(tensor, 0),
        "recv": lambda tensor: (dist.isend(torch.ones(2), other), dist.recv(tensor, other))[0].wait(),
    }.items():
        said = said_of(call, followed())
        is_written = rank == 0 or name not in ("gather", "reduce")
        assert len(said) == is_written, (name, said)
        assert not is_written or said[0].startswith(f"phalanx: {name} writes into a tensor that requires gradients"), said
        assert said_of(call, torch.ones(2)) == []
        with torch.no_grad():
            assert said_of(call, followed()) == []
    # Pipelines receive into leaves, and send their gradients back.
    leaf = torch.zeros(2, requires_grad=True)
    assert said_of(lambda tensor: (dist.isend(torch.full((2,), 3.0), other), dist.recv(tensor, other))[0].wait(), leaf) == []
    assert leaf.tolist() == [3.0, 3.0] and leaf.grad.tolist() == [1.0, 1.0]
    # Of what is only sent there is nothing to say.
    assert said_of(lambda tensor: dist.all_gather([torch.zeros(2), torch.zeros(2)], tensor), followed()) == []


def test_a_result_in_a_tensor_that_autograd_follows_is_warned_of(ranks):
    ranks(2, warned_of_by_us)
