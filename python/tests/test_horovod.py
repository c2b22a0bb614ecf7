"""Horovod's functions, against values known otherwise."""

import copy
import datetime
import importlib
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import types

import pytest
import torch
import torch.distributed as dist
from conftest import environment, free_port, press, processes

import phalanx_torch
import phalanx_torch.horovod as hvd
from phalanx_torch import process_group
from phalanx_torch.horovod import _operations


def _job(rank, world, port, body, arguments):
    environment(rank, world, port)
    hvd.init()
    result = body(rank, *arguments)
    hvd.shutdown()
    return result


def run(world, body, *arguments):
    """`body(rank, ...)` in each rank of a job."""
    return processes(world, _job, world, free_port(), body, arguments)


def _topology(rank):
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (rank, 2, rank, 2)
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous(), hvd.is_initialized()) == (0, 1, True, True)
    # The shutdown of one rank ends the job of both.
    hvd.barrier()
    hvd.shutdown()
    assert not hvd.is_initialized()
    with pytest.raises(ValueError, match="hvd.init"):
        hvd.rank()
    # Once more.
    hvd.init()
    assert hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Sum).item() == 1.0


def test_ranks_and_sizes_and_a_second_start():
    run(2, _topology)


def _collectives(rank):
    own = torch.tensor([1.0, 2.0, 3.0]) * (rank + 1)
    assert hvd.allreduce(own).tolist() == [2.0, 4.0, 6.0]
    assert hvd.allreduce(own, average=False).tolist() == [6.0, 12.0, 18.0]
    assert hvd.allreduce(own, op=hvd.Min).tolist() == [1.0, 2.0, 3.0]
    assert hvd.allreduce(own, op=hvd.Max).tolist() == [3.0, 6.0, 9.0]
    assert hvd.allreduce(own, op=hvd.Product).tolist() == [6.0, 48.0, 162.0]
    assert hvd.allreduce(own, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0).tolist() == [12.0, 24.0, 36.0]
    assert hvd.allreduce(own, compression=hvd.Compression.fp16).dtype is torch.float32
    # Nothing of it has been written to.
    assert own.tolist() == [rank + 1.0, 2 * rank + 2.0, 3 * rank + 3.0]
    # 7 / 3 and -7 / 3, cut off; and types that collectives do not combine.
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        assert hvd.allreduce(torch.tensor([7, -7, 0], dtype=dtype) * (rank == 1)).tolist() == [2, -2, 0]
        assert hvd.allreduce(torch.tensor([7, -7], dtype=dtype), op=hvd.Sum).tolist() == [21, -21]
    assert hvd.allreduce(torch.full((2,), 100, dtype=torch.int8)).tolist() == [100, 100]
    # 0.5 x 3 is 1.5, of which 1 is left.
    assert hvd.allreduce(torch.tensor([3]), op=hvd.Sum, prescale_factor=0.5).tolist() == [3]
    assert hvd.allreduce(torch.tensor([3]), op=hvd.Sum, postscale_factor=0.5).tolist() == [4]
    assert hvd.allreduce(torch.tensor([1 + 2j]), op=hvd.Sum).tolist() == [3 + 6j]

    into = own.clone()
    assert hvd.allreduce_(into, op=hvd.Sum) is into and into.tolist() == [6.0, 12.0, 18.0]
    # Of every second element.
    table = torch.arange(6.0).reshape(3, 2)
    hvd.allreduce_(table[:, 1], op=hvd.Sum)
    assert table.tolist() == [[0.0, 3.0], [2.0, 9.0], [4.0, 15.0]]
    with torch.inference_mode():
        inferred = torch.full((2, 3), rank + 1.0).t()
        handle = hvd.allreduce_async_(inferred, op=hvd.Sum)
    # Here PyTorch does not let the program itself write into it.
    hvd.synchronize(handle)
    assert inferred.tolist() == [[6.0, 6.0]] * 3
    pair = [torch.ones(2), torch.ones(3, dtype=torch.float64)]
    assert [one.tolist() for one in hvd.grouped_allreduce(pair, op=hvd.Sum)] == [[3.0] * 2, [3.0] * 3]
    hvd.grouped_allreduce_(pair, op=hvd.Sum)
    assert [one.tolist() for one in pair] == [[3.0] * 2, [3.0] * 3]

    # Tensors that share memory are combined as they were: small ones, and those that are large enough to be combined where they are.
    for length in (3, 1 << 19):
        shared = torch.full((length,), float(rank + 1))
        hvd.grouped_allreduce_([shared, shared[1:], shared], op=hvd.Sum)
        assert (shared == 6.0).all()
    rows = torch.full((rank + 1, 2), rank, dtype=torch.int16)
    assert hvd.allgather(rows).tolist() == [[0, 0], [1, 1], [1, 1], [2, 2], [2, 2], [2, 2]]
    one, two = hvd.grouped_allgather([torch.tensor([rank]), torch.tensor([[rank + 0.5]])])
    assert one.tolist() == [0, 1, 2] and two.tolist() == [[0.5], [1.5], [2.5]]

    assert hvd.broadcast(own, 1).tolist() == [2.0, 4.0, 6.0]
    hvd.broadcast_(into.copy_(own), 2)
    assert into.tolist() == [3.0, 6.0, 9.0]

    # Rank r sends r + 1 rows to rank 0, none to rank 1 and one to rank 2.
    sent = torch.arange(rank + 2) + 10 * rank
    received, splits = hvd.alltoall(sent, splits=torch.tensor([rank + 1, 0, 1]))
    expected = {0: ([0, 10, 11, 20, 21, 22], [1, 2, 3]), 1: ([], [0, 0, 0]), 2: ([1, 12, 23], [1, 1, 1])}
    assert (received.tolist(), splits.tolist()) == expected[rank]
    assert hvd.alltoall(torch.arange(3) + 10 * rank).tolist() == [rank, 10 + rank, 20 + rank]

    # Four rows: two for the first rank.
    shards = {0: [0.0, 6.0], 1: [12.0], 2: [18.0]}
    assert hvd.reducescatter(torch.arange(4.0) * (rank + 1), op=hvd.Sum).tolist() == shards[rank]
    assert hvd.reducescatter(torch.arange(4) * (rank + 1)).tolist() == [int(shard) // 3 for shard in shards[rank]]
    one, two = hvd.grouped_reducescatter([torch.ones(3), torch.ones(3, 2)], op=hvd.Sum)
    assert one.tolist() == [3.0] and two.tolist() == [[3.0, 3.0]]

    # In another order on each rank.
    names = ["a", "b", "c"][rank:] + ["a", "b", "c"][:rank]
    handles = {name: hvd.allreduce_async(torch.tensor([float(ord(name))]), name=name, op=hvd.Sum) for name in names}
    assert {name: hvd.synchronize(handles[name]).item() for name in "abc"} == {name: 3.0 * ord(name) for name in "abc"}
    with pytest.raises(ValueError, match="synchronized once"):
        hvd.poll(handles["a"])
    # A name is the same whether one waits or not.
    if rank == 0:
        mixed = [hvd.allreduce(torch.ones(1), name="m"), hvd.allgather(torch.ones(1), name="m"), hvd.reducescatter(torch.ones(3), name="m")]
        mixed += [hvd.broadcast(torch.ones(1), 0, name="m"), hvd.alltoall(torch.ones(3), name="m")]
    else:
        calls = [hvd.allreduce_async(torch.ones(1), name="m"), hvd.allgather_async(torch.ones(1), name="m")]
        calls += [hvd.reducescatter_async(torch.ones(3), name="m"), hvd.broadcast_async(torch.ones(1), 0, name="m")]
        mixed = [hvd.synchronize(handle) for handle in [*calls, hvd.alltoall_async(torch.ones(3), name="m")]]
    assert [one.tolist() for one in mixed] == [[1.0], [1.0] * 3, [1.0], [1.0], [1.0] * 3]
    assert hvd.allgather_object({"rank": rank}) == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    assert hvd.broadcast_object([rank, "x"], root_rank=2) == [2, "x"]


def test_collectives():
    run(3, _collectives)


def _unaligned(rank):
    def odd(value, dtype):
        """Elements that do not lie at multiples of their length."""
        tensor = torch.frombuffer(bytearray(3 * dtype.itemsize + 1), dtype=dtype, offset=1).fill_(value)
        assert tensor.data_ptr() % dtype.itemsize
        return tensor

    for dtype in (torch.float32, torch.int64, torch.int16):
        own = odd(rank + 1, dtype)
        assert hvd.allreduce(own, op=hvd.Sum).tolist() == [3] * 3 and own.tolist() == [rank + 1] * 3
        hvd.allreduce_(own, op=hvd.Sum)
        assert own.tolist() == [3] * 3
        # Such as those of a file that is mapped into memory.
        hvd.broadcast_parameters({"own": own.fill_(rank)}, root_rank=1)
        assert own.tolist() == [1] * 3
        assert hvd.allgather(odd(rank, dtype)).tolist() == [0] * 3 + [1] * 3
        assert hvd.alltoall(odd(rank, dtype), splits=[1, 2])[0].tolist() == [[0, 1], [0, 0, 1, 1]][rank]
        assert hvd.reducescatter(odd(rank + 1, dtype), op=hvd.Sum).tolist() == [[3, 3], [3]][rank]


def test_elements_need_not_lie_at_multiples_of_their_length():
    run(2, _unaligned)


def _large_averages(rank):
    most, least = 2**63 - 1, -(2**63)
    columns = [
        [2**62, 2**62, 2**62], [most, most, most], [least, least, least], [most, most, most - 1], [least, least, least + 1],
        [most, least, 0], [least, most, 2], [5, -1, 0], [-5, 1, 0], [-7, 0, 0], [7, 0, 0], [0, -1, 0],
    ]
    # Python's integers know no bounds.
    expected = [abs(sum(column)) // 3 * (1 if sum(column) > 0 else -1) for column in columns]
    own = torch.tensor([column[rank] for column in columns])
    assert hvd.allreduce(own).tolist() == expected
    assert hvd.allreduce_(own.clone()).tolist() == expected
    assert hvd.allreduce(own[0]).item() == 2**62
    both = hvd.grouped_allreduce([own, own.reshape(3, 4)])
    assert both[0].tolist() == expected and both[1].flatten().tolist() == expected
    assert hvd.reducescatter(own).tolist() == expected[4 * rank : 4 * rank + 4]
    assert hvd.reducescatter(own.reshape(6, 2)).flatten().tolist() == expected[4 * rank : 4 * rank + 4]
    assert hvd.allreduce(torch.tensor([2**62, 6]), postscale_factor=0.5).tolist() == [2**61, 3]


def test_averages_of_large_integers_do_not_overflow():
    run(3, _large_averages)


def _gradients(rank):
    def of(function, shape, weights):
        tensor = torch.ones(shape, requires_grad=True)
        (function(tensor) * weights).sum().backward()
        return tensor.grad.tolist()

    weight = float(rank + 1)
    assert of(lambda t: hvd.allreduce(t, op=hvd.Sum), 2, weight) == [3.0, 3.0]
    assert of(lambda t: hvd.allreduce(t), 2, weight) == [1.5, 1.5]
    # As Horovod has it: averages of what the ranks have for it.
    assert of(lambda t: hvd.allgather(t), 1, torch.tensor([10.0, 20.0]) * weight) == [[15.0], [30.0]][rank]
    assert of(lambda t: hvd.broadcast(t, 1), 1, weight) == [[0.0], [1.5]][rank]
    # Rank 0 weighs what it has received from rank 0 with 1, from rank 1 with 2; rank 1 with 3 and 4.
    weights = torch.tensor([[1.0, 2.0], [3.0, 4.0]])[rank]
    assert of(lambda t: hvd.alltoall(t, splits=[1, 1])[0], 2, weights) == [[1.0, 3.0], [2.0, 4.0]][rank]
    assert of(lambda t: hvd.reducescatter(t, op=hvd.Average), 2, weight) == [1.0, 2.0]
    assert of(lambda t: hvd.reducescatter(t, op=hvd.Sum), 2, weight) == [2.0, 4.0]
    with pytest.raises(NotImplementedError, match="Max has no gradient"):
        of(lambda t: hvd.allreduce(t, op=hvd.Max), 2, weight)


def test_gradients():
    run(2, _gradients)


def _second_gradients(rank):
    def of(function, rows):
        tensor = torch.ones(rows, requires_grad=True)
        first, = torch.autograd.grad(function(tensor).square().sum(), tensor, create_graph=True)
        # Beside something else: what is missing would be no error.
        second, = torch.autograd.grad((first + tensor).sum(), tensor)
        return (second - 1.0).tolist()

    assert of(lambda t: hvd.allreduce(t, op=hvd.Sum), 2) == [8.0, 8.0]
    assert of(hvd.allreduce, 2) == [2.0, 2.0]
    assert of(lambda t: hvd.grouped_allreduce([t, t], op=hvd.Sum)[1], 1) == [8.0]
    # As the first ones: Horovod takes averages there.
    assert of(hvd.allgather, 2) == [1.0, 1.0]
    assert of(lambda t: hvd.broadcast(t, 1), 1) == [1.0 if rank == 1 else 0.0]
    assert of(hvd.alltoall, 4) == [2.0] * 4
    assert of(lambda t: hvd.reducescatter(t, op=hvd.Sum), 2) == [8.0, 8.0]
    # A penalty for large gradients, with the statistics of all ranks.
    every, factors = torch.randn(6, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64), torch.arange(18.0).reshape(6, 3).sin().double()

    def penalty(norm, rows, factors):
        rows = rows.clone().requires_grad_()
        gradient, = torch.autograd.grad((norm(rows) * factors).square().sum(), rows, create_graph=True)
        gradient.square().sum().backward()
        return rows.grad

    mine = slice(2 * rank, 2 + 4 * rank)
    expected = penalty(torch.nn.BatchNorm1d(3).double(), every, factors)[mine]
    assert torch.allclose(penalty(hvd.SyncBatchNorm(3).double(), every[mine], factors[mine]), expected)


def test_gradients_are_differentiated_again():
    run(2, _second_gradients)


def _errors(rank):
    # A mismatch is of this name alone: all else goes on.
    with pytest.raises(hvd.HorovodInternalError, match="rank 1") as caught:
        hvd.allreduce(torch.ones(rank + 1), name="wrong")
    assert caught.value.kind == "mismatch" and isinstance(caught.value, RuntimeError)
    # Types that travel as one.
    for call, types, said in [
        (lambda own, name: hvd.broadcast(own, 0, name=name), (torch.int16, torch.uint16), r"tensors of int16 \(u8 \[4, 2\]\), rank 1 .*tensors of uint16"),
        (lambda own, name: hvd.allgather(own, name=name), (torch.complex64, torch.float32), "tensors of complex64"),
        (lambda own, name: hvd.alltoall(own, name=name), (torch.int16, torch.uint16), "tensors of uint16"),
        (lambda own, name: hvd.allreduce(own, name=name, op=hvd.Sum), (torch.int16, torch.int32), "tensors of int16"),
        (lambda own, name: hvd.allreduce(own, name=name), (torch.int8, torch.uint8), "ReduceOp.AVG of int8"),
        (lambda own, name: hvd.reducescatter(own, name=name, op=hvd.Sum), (torch.uint16, torch.int32), "tensors of uint16"),
    ]:
        own = torch.ones((4, 2) if types[rank] is torch.float32 else 4, dtype=types[rank])
        with pytest.raises(hvd.HorovodInternalError, match=said) as caught:
            call(own, said)
        assert caught.value.kind == "mismatch"
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0
    handle = hvd.allreduce_async(torch.ones(1), name="twice") if rank == 0 else None
    if rank == 0:
        with pytest.raises(ValueError, match="in flight already"):
            hvd.allreduce_async(torch.ones(1), name="twice")
    # Before this rank 1 does not take part: what is done is in flight no longer.
    hvd.allreduce(torch.ones(1), name="refused")
    hvd.synchronize(hvd.allreduce_async(torch.ones(1), name="twice") if rank == 1 else handle)
    for wrong, text in [
        (lambda: hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum), "supersedes"),
        (lambda: hvd.allreduce(torch.ones(1), op="sum"), "one of hvd.Average"),
        (lambda: hvd.allreduce(torch.ones(1).to_sparse()), "sparse_allreduce_async"),
        (lambda: hvd.broadcast(torch.ones(1), 2), "root_rank 2"),
        (lambda: hvd.alltoall(torch.ones(3)), "3 rows cannot be divided by 2"),
        (lambda: hvd.alltoall(torch.ones(3), splits=[1, 1]), "do not divide 3 rows"),
        (lambda: hvd.alltoall(torch.ones(2), splits=[0.5, 1.5]), "integers"),
        *[
            (lambda c=call, d=dtype: c(torch.tensor(1, dtype=d)), "a scalar has no rows")
            for call in (hvd.allgather, hvd.alltoall)
            for dtype in (torch.float32, torch.int16, torch.complex64)
        ],
        *[(lambda d=dtype: hvd.reducescatter(torch.tensor(1, dtype=d)), "a scalar has no rows") for dtype in (torch.int64, torch.float32)],
        (lambda: hvd.grouped_reducescatter([torch.ones(2), torch.tensor(1.0)]), "a scalar has no rows"),
        (lambda: hvd.add_process_set([0, 2]), "2 ranks"),
        (lambda: hvd.init(comm=[0]), "no communicators of MPI"),
        (lambda: hvd.synchronize(-1), "-1 is no handle"),
        (lambda: hvd.allreduce([1.0]), "a torch.Tensor is expected, and not list"),
        (lambda: hvd.allreduce(torch.ones(1, dtype=torch.uint64)), "torch.uint64 cannot be combined"),
        (lambda: hvd.grouped_allreduce([torch.ones(1), torch.ones(1, dtype=torch.int64)]), "a group of integers and floats"),
        (lambda: hvd.alltoall(torch.ones(2), splits=[3, -1]), r"splits are \[3, -1\], and none may be below 0"),
        (lambda: hvd.sparse_allreduce_async(torch.eye(2).to_sparse(), "s", hvd.Max), "use hvd.Sum or hvd.Average"),
    ]:
        with pytest.raises((ValueError, NotImplementedError), match=text):
            wrong()
    with pytest.raises(NotImplementedError, match="reducescatter cannot be an Adasum"):
        hvd.reducescatter(torch.ones(2), op=hvd.Adasum)
    hvd.barrier()


def test_errors():
    run(2, _errors)


def test_a_time_out_says_so_once():
    error = _operations._internal(phalanx_torch.Error("allreduce: rank 1 has not come", "timeout", 1))
    assert str(error) == "phalanx: Timed out at allreduce: rank 1 has not come"
    assert isinstance(error, hvd.HorovodInternalError) and (error.kind, error.peer) == ("timeout", 1)


def _sets(rank):
    even, odd = hvd.add_process_set([0, 2]), hvd.add_process_set(hvd.ProcessSet([1]))
    assert (even.included(), odd.included(), even.size()) == (rank != 1, rank == 1, 2)
    for again in ([2, 0], even, [0, 1, 2]):
        with pytest.raises(ValueError, match="registered already"):
            hvd.add_process_set(again)
    if rank == 1:
        with pytest.raises(ValueError, match="rank 1 is not in"):
            hvd.allreduce(torch.ones(1), process_set=even)
        assert hvd.allreduce(torch.tensor([5.0]), name="x", process_set=odd).item() == 5.0
    else:
        assert even.rank() == rank // 2
        assert hvd.allreduce(torch.tensor([float(rank)]), name="x", process_set=even).item() == 1.0
        with pytest.raises(ValueError, match="root_rank 1 is not in"):
            hvd.broadcast(torch.ones(1), 1, process_set=even)
        # The root counts among all ranks.
        assert hvd.broadcast(torch.tensor([rank]), 2, process_set=even).item() == 2
        assert hvd.allgather_object(rank, process_set=even) == [0, 2]
        hvd.barrier(even)
    assert hvd.get_process_set_ids_and_ranks() == {0: [0, 1, 2], 1: [0, 2], 2: [1]}
    assert hvd.remove_process_set(even) and not hvd.remove_process_set(even)
    with pytest.raises(ValueError, match="not registered"):
        hvd.allreduce(torch.ones(1), process_set=even)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3.0


def test_process_sets():
    run(3, _sets)


def _joins(rank):
    sums = [hvd.allreduce(torch.tensor([1.0]), name=f"step {step}", op=hvd.Sum).item() for step in range(2 * (rank + 1))]
    last = hvd.join()
    assert sums == [2.0, 2.0, 1.0, 1.0][: len(sums)] and last == 1
    return last


def test_join():
    assert run(2, _joins) == [1, 1]


def _gathers_beside_joined_ranks(rank):
    if rank > 0:
        rows = torch.zeros(rank, requires_grad=True)
        every = hvd.allgather(rows)
        (every * torch.tensor([3.0, 30.0, 300.0])).sum().backward()
        # Averages over all ranks, of which the one that has joined brings zeros.
        assert rows.grad.tolist() == [[2.0], [20.0, 200.0]][rank - 1]
    hvd.join()


def test_the_gradient_of_gathered_rows_is_of_the_rank_s_own_also_beside_ranks_that_have_joined():
    run(3, _gathers_beside_joined_ranks)


def _gathers_and_joins_without_a_backward_pass(rank):
    every = hvd.allgather(torch.zeros(rank + 1, requires_grad=rank > 0))
    if rank > 0:
        with pytest.raises(ValueError, match=r"\[6\] rows were gathered, and the ranks in its backward pass, \[1, 2\], brought \[5\]"):
            every.sum().backward()
    hvd.join()


def test_gathered_rows_of_a_rank_that_has_joined_without_a_backward_pass_are_an_error():
    run(3, _gathers_and_joins_without_a_backward_pass)


def _unnamed_around_a_join(rank):
    own = hvd.SyncBatchNorm(2)
    for step in range(rank + 1):
        hvd.allreduce(torch.ones(1), op=hvd.Sum)
        own(torch.randn(4, 2, requires_grad=True)).sum().backward()
    hvd.join()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0
    own(torch.randn(4, 2, requires_grad=True)).sum().backward()
    assert hvd.allgather(torch.tensor([rank])).tolist() == hvd.allgather_object(rank) == [0, 1]


def test_calls_without_a_name_find_each_other_after_a_join():
    run(2, _unnamed_around_a_join)


def _joined_before(rank):
    if rank == 0:
        # The list would have one object, and not say whose it is.
        with pytest.raises(ValueError, match="1 of 2 ranks have sent an object: the others have joined"):
            hvd.allgather_object({"rank": rank})
    return hvd.join()


def test_objects_are_not_gathered_from_ranks_that_have_joined():
    assert run(2, _joined_before) == [0, 0]


def _refuse_on(rank):
    if hvd.rank() == rank:
        raise pickle.UnpicklingError("refused here")


class _Unreadable:
    """What the first rank cannot unpickle."""

    def __reduce__(self):
        return _refuse_on, (0,)


def _optimizer_with(**options):
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9)
    optimizer.param_groups[0].update(options)
    return optimizer


def _unwritten(rank):
    lock = threading.Lock()
    own, calls = lock if rank == 1 else "x" * 20_000, 0
    stateful = _optimizer_with(own=own)
    for call in (
        lambda: hvd.allgather_object(own),
        lambda: hvd.allgather_object(own, name="named"),
        lambda: hvd.broadcast_object(own, root_rank=1),
        lambda: hvd.broadcast_optimizer_state(stateful, root_rank=1),
    ):
        # Who has the object gets the error of its pickling.
        with pytest.raises(TypeError if rank == 1 else ValueError, match="cannot pickle '_thread.lock' object") as caught:
            call()
        assert rank == 1 or "rank 1 has sent no object: TypeError" in str(caught.value)
        calls += 1
    # The names are free again, and all ranks are where the others are.
    assert hvd.allgather_object(calls) == [4, 4, 4] and hvd.broadcast_object(rank, root_rank=1) == 1
    assert hvd.allgather_object(calls, name="named") == [4, 4, 4]


def test_an_object_that_cannot_be_pickled_is_told_to_all():
    run(3, _unwritten)


def _unread(rank):
    for call in (lambda: hvd.allgather_object(_Unreadable()), lambda: hvd.broadcast_object(_Unreadable(), root_rank=1)):
        if rank == 0:
            with pytest.raises(pickle.UnpicklingError, match="refused here"):
                call()
        else:
            call()
    optimizer = _optimizer_with(own=_Unreadable(), lr=float(rank))
    # The tensors of the state would be waited for.
    with pytest.raises(pickle.UnpicklingError if rank == 0 else ValueError, match="refused here" if rank == 0 else r"of rank 1 cannot be unpickled on ranks \[0\]"):
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    assert optimizer.param_groups[0]["lr"] == rank
    optimizer.param_groups[0]["own"] = rank
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["own"]) == (1.0, 1)


def test_an_object_that_one_rank_cannot_unpickle_lets_nobody_wait():
    run(3, _unread)


def _unsendable(rank):
    optimizer = _optimizer_with()
    if rank == 1:
        weight = optimizer.param_groups[0]["params"][0]
        optimizer.state[weight] = {"momentum_buffer": torch.eye(2).to_sparse()}
    with pytest.raises(ValueError, match="" if rank == 1 else "rank 1 has sent no object: ") as caught:
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    assert "broadcast_optimizer_state: this tensor is sparse" in str(caught.value), caught.value
    assert hvd.allgather_object(rank) == [0, 1]


def test_a_state_that_cannot_be_sent_lets_nobody_wait():
    run(2, _unsendable)


def _model():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()


def _batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 4, generator=generator, dtype=torch.float64)


STEPS = 4


def _loss(model, rank, step):
    return model(_batch(rank, step)).square().mean()


def _train(rank, world, options, passes, clips):
    model = _model()
    if rank > 0:
        # Other ranks begin elsewhere, and are given rank 0's.
        for p in model.parameters():
            p.data.add_(rank)
    base = torch.optim.SGD(model.parameters(), lr=0.1 if rank == 0 else 0.7, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(base, model.named_parameters(), backward_passes_per_step=passes, **options(model))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.1 and isinstance(optimizer, torch.optim.SGD)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(passes):
            _loss(model, rank, step * passes + part).backward()
        if clips:
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
    return [p.tolist() for p in model.parameters()]


def _alone(world, passes, clips, factor):
    """One process with all ranks' batches, without anything of ours."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [_loss(model, rank, step * passes + part) for rank in range(world) for part in range(passes)]
        (sum(losses) * factor).backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


OPTIONS = {
    "plain": lambda model: {},
    "sum": lambda model: {"op": hvd.Sum},
    "predivided": lambda model: {"gradient_predivide_factor": 4.0},
    "two groups": lambda model: {"num_groups": 2},
    "listed groups": lambda model: {"groups": [list(model[0].parameters())]},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("passes, clips", [(1, False), (2, False), (1, True)])
def test_training_is_that_of_one_process_with_all_batches(options, passes, clips):
    ranks = run(2, _train, 2, OPTIONS[options], passes, clips)
    expected = _alone(2, passes, clips, 1.0 if options == "sum" else 0.5)
    assert ranks[0] == ranks[1]
    for own, right in zip(ranks[0], expected):
        torch.testing.assert_close(torch.tensor(own, dtype=torch.float64), right, rtol=1e-12, atol=1e-12)


def _later(rank, world, later, passes):
    """As `_train`, with parameters that are trained from the second step on."""
    model = _model()
    first, last = model[0], model[2]
    if later == "group":
        base = torch.optim.SGD(first.parameters(), lr=0.1)
    else:
        [p.requires_grad_(False) for p in (model if later == "all frozen" else last).parameters()]
        base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = base
    if world > 1:
        named = model.named_parameters() if later != "unnamed" else None
        optimizer = hvd.DistributedOptimizer(base, named, backward_passes_per_step=passes)
    for step in range(STEPS):
        if step == 1 and later == "group":
            optimizer.add_param_group({"params": list(last.parameters()), "lr": 0.05})
        elif step == 1:
            [p.requires_grad_(True) for p in model.parameters()]
        optimizer.zero_grad()
        ranks = [rank] if world > 1 else [0, 1]
        # All frozen: nothing has a gradient yet.
        if step > 0 or later != "all frozen":
            for part in range(passes):
                (sum(_loss(model, one, step * passes + part) for one in ranks) / len(ranks)).backward()
        optimizer.step()
    return [p.tolist() for p in model.parameters()]


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("later", ["frozen", "all frozen", "unnamed", "group"])
def test_parameters_that_come_later_are_averaged(later, passes):
    ranks = run(2, _later, 2, later, passes)
    assert ranks[0] == ranks[1]
    for own, right in zip(ranks[0], _later(0, 1, later, passes)):
        torch.testing.assert_close(torch.tensor(own, dtype=torch.float64), torch.tensor(right, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def _optimizer(rank):
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)

    def wrap(**options):
        return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), **options)

    for wrong, text in [
        (lambda: wrap(op=hvd.Min), "op is Min"),
        (lambda: wrap(op=hvd.Max), "combined with"),
        (lambda: wrap(op=hvd.Sum, gradient_predivide_factor=2.0), "gradient_predivide_factor"),
        (lambda: wrap(backward_passes_per_step=0), "backward_passes_per_step"),
        (lambda: wrap(groups=[[torch.nn.Parameter(torch.ones(1))]]), "parameters are expected"),
        (lambda: hvd.DistributedOptimizer(wrap()), "one already"),
        (lambda: hvd.DistributedOptimizer(base, [("w", model.weight)] * 2), "must be unique. Found duplicates: w"),
        (lambda: hvd.DistributedOptimizer(base, [model.weight]), "a sequence of tuples"),
        (lambda: hvd.DistributedOptimizer(base, []), "1 of the optimizer's 1 parameters were not named"),
    ]:
        base = torch.optim.SGD(model.parameters(), lr=1.0)
        with pytest.raises((ValueError, NotImplementedError), match=text):
            wrong()
    model.weight._post_accumulate_grad_hooks.clear()
    # Schedules may know the optimizer from before.
    base = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(base, 1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(base, model.named_parameters(), compression=hvd.Compression.fp16)
    optimizer.zero_grad()
    (model(torch.ones(1, 2)) * (rank + 1)).sum().backward()
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    with pytest.raises(AssertionError, match="changes between steps"):
        optimizer.set_backward_passes_per_step(2)
    with pytest.raises(AssertionError, match="more than backward_passes_per_step times"):
        model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    # What a second pass has added on the way is gone with the average: both ranks have the same.
    assert len(set(map(tuple, hvd.allgather_object(model.weight.flatten().tolist())))) == 1
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="without optimizer.skip_synchronize"):
        optimizer.step()
    # A closure's gradients are averaged, too: 1 - 0.5 x 1.5.
    torch.nn.init.ones_(model.weight)

    def closure():
        optimizer.zero_grad()
        loss = (model(torch.ones(1, 2)) * (rank + 1)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert model.weight.tolist() == [[0.25, 0.25]]
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(model.parameters()), 0)


def test_the_optimizer_and_what_it_refuses():
    run(2, _optimizer)


def _changed_on_the_way(rank):
    def begun(scaler=None, **options):
        model = torch.nn.Linear(2, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), **options)
        loss = (model(torch.ones(1, 2)) * (rank + 1)).sum()
        (loss if scaler is None else scaler.scale(loss)).backward()
        return model, optimizer

    def replaced(model):
        model.weight.grad = model.weight.grad.clamp(max=0.5)

    for change in (lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1), lambda model: model.bias.grad.mul_(2.0), replaced):
        for options in ({}, {"num_groups": 1}, {"compression": hvd.Compression.fp16}):
            model, optimizer = begun(**options)
            before = model.weight.tolist()
            change(model)
            with pytest.raises(AssertionError, match=r"was changed after loss.backward\(\) but before optimizer.synchronize"):
                optimizer.step()
            assert model.weight.tolist() == before
            # The next step is as ever.
            optimizer.zero_grad()
            (model(torch.ones(1, 2)) * (rank + 1)).sum().backward()
            optimizer.step()
            assert model.weight.grad.tolist() == [[1.5, 1.5]]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    _, optimizer = begun(scaler)
    with pytest.raises(AssertionError, match="GradScaler has divided the gradients by its scale before optimizer.synchronize"):
        scaler.step(optimizer)
    # As Horovod's documentation has it, and one that does nothing.
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model, optimizer = begun(scaler)
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    assert model.bias.grad.tolist() == [1.5]
    model, optimizer = begun()
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
    assert model.bias.grad.tolist() == [1.5]
    # Averages that were divided, and are averaged once more.
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model, optimizer = begun(scaler)
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="without optimizer.skip_synchronize"):
        scaler.step(optimizer)
    assert model.bias.grad.tolist() == [1.5]
    # Another pass has added to the averages.
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model, optimizer = begun(scaler)
    optimizer.synchronize()
    scaler.scale((model(torch.ones(1, 2)) * (rank + 1)).sum()).backward()
    with pytest.raises(AssertionError, match="GradScaler has divided the gradients by its scale before optimizer.synchronize"):
        scaler.step(optimizer)


def test_a_gradient_that_is_changed_while_its_average_is_on_its_way_is_refused():
    run(2, _changed_on_the_way)


def _concatenated(rank):
    parts = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parts, lr=1.0), backward_passes_per_step=2)
    for _ in range(2):
        # Their gradients are parts of one tensor, to which the second pass adds.
        (torch.cat(parts) * (rank + 1)).sum().backward()
    optimizer.step()
    assert [part.grad.tolist() for part in parts] == [[3.0, 3.0]] * 2


def test_gradients_of_concatenated_parameters_are_not_taken_for_changed():
    run(2, _concatenated)


def _changes(rank, passes, compression, by_closure):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    # One that no pass uses.
    model.register_parameter("unused", torch.nn.Parameter(torch.ones(2)))
    twin = copy.deepcopy(model)
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        base, model.named_parameters(), compression=compression, backward_passes_per_step=passes, op=hvd.Adasum
    )
    plain = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)

    def evaluated(one, made, step):
        made.zero_grad()
        for place in range(passes):
            torch.manual_seed(100 * step + 10 * place + rank)
            one(torch.randn(5, 3)).square().mean().backward()
        return step

    for step in range(3):
        if by_closure:
            assert optimizer.step(lambda: evaluated(model, optimizer, step)) == step
        else:
            evaluated(model, optimizer, step)
            # Of gradients there is nothing to wait for.
            optimizer.synchronize()
            optimizer.step()
        begins = [p.detach().clone() for p in twin.parameters()]
        evaluated(twin, plain, step)
        plain.step()
        for p, begin in zip(twin.parameters(), begins):
            p.detach().copy_(begin + hvd.allreduce(p.detach() - begin, op=hvd.Adasum, compression=compression))
        for one, other in zip(model.parameters(), twin.parameters()):
            assert torch.equal(one, other)
    assert model.unused.tolist() == [1.0, 1.0]
    with pytest.raises(AssertionError, match="not supported when using Adasum"), optimizer.skip_synchronize():
        pass
    evaluated(model, optimizer, 9)
    with pytest.raises(AssertionError, match="the gradients of this step's passes would be lost"):
        optimizer.zero_grad()
    with pytest.raises(AssertionError, match="more than backward_passes_per_step times"):
        evaluated(model, model, 9)
    with pytest.raises(ValueError, match="gradient_predivide_factor not supported"):
        hvd.DistributedOptimizer(base, op=hvd.Adasum, gradient_predivide_factor=2.0)
    return [p.tolist() for p in model.parameters()]


@pytest.mark.parametrize(
    "passes, compression, by_closure", [(1, hvd.Compression.none, False), (2, hvd.Compression.fp16, False), (1, hvd.Compression.none, True)]
)
def test_an_optimizer_takes_the_adasum_of_all_ranks_changes(passes, compression, by_closure):
    first, second = run(2, _changes, passes, compression, by_closure)
    assert first == second


def _changes_of_other_shapes(rank):
    weight, bias = torch.nn.Parameter(torch.ones(2 + rank)), torch.nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight, bias], lr=0.5), op=hvd.Adasum)
    (weight.sum() + bias.sum()).backward()
    with pytest.raises(hvd.HorovodInternalError, match="rank 1"):
        optimizer.step()
    # What could not be combined is as it was, and the next pass begins a step.
    assert weight.tolist() == [1.0] * (2 + rank) and bias.tolist() == [0.5, 0.5]
    (weight.sum() + bias.sum()).backward()


def test_changes_that_cannot_be_combined_are_not_made():
    run(2, _changes_of_other_shapes)


def _odd_arguments(rank):
    model = torch.nn.Linear(2, 2)
    scalar = torch.nn.Parameter(torch.ones(()))
    parameters = [*model.parameters(), scalar]

    def made(**options):
        return hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), **options)

    for options, match in (
        *(({"groups": groups}, "groups should be a non-negative integer or a list of list") for groups in (torch.ones(2), [scalar], 1.5, "abc", ["a"], {1: 2})),
        ({"groups": [[model.weight], [model.weight]]}, "each in one group at most"),
        ({"num_groups": 1.5}, "num_groups is 1.5"),
        ({"num_groups": "1"}, "num_groups is '1'"),
        ({"num_groups": -1}, "there cannot be fewer than none"),
        *(({"gradient_predivide_factor": factor}, "more than 0, and finite") for factor in (0.0, -1.0, math.inf, math.nan)),
        *(({"compression": compression}, "pass hvd.Compression.none or") for compression in (None, "fp16", hvd.Compression)),
        *(({"process_set": process_set}, "hvd.add_process_set makes one") for process_set in (None, [0])),
    ):
        with pytest.raises(ValueError, match=match):
            made(**options)
    for groups in ([[model.weight]], ((model.weight,),), iter([[model.weight]]), [model.parameters()], [[]], [], 0, 2, None):
        made(groups=groups)
    for call, match in (
        (lambda: hvd.DistributedOptimizer(model), "a torch.optim.Optimizer is expected, and not Linear"),
        (lambda: hvd.broadcast_optimizer_state(3, 0), "a torch.optim.Optimizer is expected, and not int"),
        (lambda: hvd.broadcast_parameters([("a", torch.ones(1)), ("b", torch.ones(1)), ("a", torch.ones(2))], 0), "several tensors have a"),
        (lambda: hvd.sparse_allreduce_async(torch.ones(2), "s", hvd.Sum), "torch.sparse_coo is expected, and not torch.strided"),
    ):
        with pytest.raises(ValueError, match=match):
            call()
    # Nothing of them is in flight.
    hvd.broadcast_parameters([("a", torch.ones(1)), ("b", torch.ones(1))], 0)
    hvd.shutdown()
    for process_sets in (hvd.ProcessSet([0]), 5, "static", [[0, 0]], [[0, 2]], [[0], [0]]):
        with pytest.raises((ValueError, TypeError)):
            hvd.init(process_sets=process_sets)
        # No job has begun without the sets that were asked for.
        assert not hvd.is_initialized()
    hvd.init(process_sets=[[0], hvd.ProcessSet([1])])
    assert hvd.get_process_set_ids_and_ranks() == {0: [0, 1], 1: [0], 2: [1]}
    # A second call does nothing, and says so of a set that is not there.
    hvd.init(process_sets=[[1]])
    # Another object of a set that is there is as good as the first.
    both = [hvd.ProcessSet([0]), hvd.ProcessSet([1])]
    hvd.init(process_sets=both)
    assert [one.process_set_id for one in both] == [1, 2]
    assert hvd.allreduce(torch.tensor([5.0]), process_set=both[rank]).item() == 5.0
    assert hvd.remove_process_set(both[0]) and not hvd.remove_process_set(both[0]) and both[1].included() == (rank == 1)
    hvd.add_process_set(both[0])
    with pytest.raises(ValueError, match=r"initialized already, without .*ranks=\[0, 1\].*hvd.add_process_set"):
        hvd.init(process_sets=[[0], [0, 1]])
    assert hvd.is_initialized()


def test_odd_arguments_are_refused_before_anything_begins():
    run(2, _odd_arguments)


def _loaded(rank, how):
    p = torch.nn.Parameter(torch.ones(1))
    base = torch.optim.SGD([p], lr=[1.0, 64.0][rank], momentum=0.5)
    # Before the wrapper: it knows only the optimizer that is wrapped.
    schedule = torch.optim.lr_scheduler.StepLR(base, 1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(base)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    if how == "broadcast":
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    else:
        # A rank that goes on from a checkpoint, and all have the same one.
        optimizer.load_state_dict(hvd.broadcast_object(optimizer.state_dict(), 0))
    rates = []
    for _ in range(3):
        optimizer.zero_grad()
        (p * 2).sum().backward()
        optimizer.step()
        rates.append(optimizer.param_groups[0]["lr"])
        schedule.step()
    # A checkpoint of either has the same.
    momenta = [one.state_dict()["state"].get(0, {}).get("momentum_buffer", p.new_zeros(1)).item() for one in (base, optimizer)]
    return rates, calls, p.item(), momenta


@pytest.mark.parametrize("how", ["broadcast", "load"])
def test_what_the_optimizer_is_given_reaches_its_schedule_and_its_hooks(how):
    # The momentum is 2, 3 and 3.5, the rate 1, 1/2 and 1/4.
    assert run(2, _loaded, how) == [([1.0, 0.5, 0.25], ["before", "after"] * 3, 1 - 2 - 1.5 - 0.875, [3.5, 3.5])] * 2


def _loaded_between_passes(rank):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), backward_passes_per_step=2)
    (weight * 5.0).sum().backward()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    for _ in range(2):
        (weight * (rank + 1.0)).sum().backward()
    optimizer.step()
    # The average of 2 and 4.
    assert weight.item() == -3.0


def test_a_state_that_is_loaded_between_passes_begins_the_step_anew():
    run(2, _loaded_between_passes)


def _lost_passes(rank):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), backward_passes_per_step=2)
    for step in range(2):
        optimizer.zero_grad()
        (weight * (rank + 1.0)).sum().backward()
        with pytest.raises(AssertionError, match="the gradients of this step's passes would be lost"):
            optimizer.zero_grad()
        (weight * (rank + 1.0)).sum().backward()
        optimizer.step()
        # The average of 2 and 4.
        assert weight.item() == -3.0 * (step + 1)


def test_gradients_are_not_forgotten_between_the_passes_of_a_step():
    run(2, _lost_passes)


def _skipped_too_early(rank):
    for passes in (1, 2):
        weight = torch.nn.Parameter(torch.zeros(1))
        named = [(f"weight {passes}", weight)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), named, backward_passes_per_step=passes)

        def closure(weight=weight, optimizer=optimizer):
            optimizer.zero_grad()
            loss = (weight * (rank + 1.0)).sum()
            loss.backward()
            return loss

        closure()
        with optimizer.skip_synchronize():
            with pytest.raises(AssertionError, match=r"in optimizer\.skip_synchronize\(\).* Call optimizer\.synchronize\(\) first"):
                optimizer.step()
            assert weight.item() == 0.0
            optimizer.synchronize()
            optimizer.step()
        assert weight.item() == -1.5
        with pytest.raises(AssertionError, match="gradients of this rank alone"), optimizer.skip_synchronize():
            optimizer.step(closure)
        assert weight.item() == -1.5
        optimizer.step()
        assert weight.item() == -3.0


def test_a_step_that_skips_the_wait_for_averages_comes_after_it():
    run(2, _skipped_too_early)


def _summed_once(rank):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Sum)
    for step in range(2):
        (weight * (rank + 1.0)).sum().backward()
        optimizer.synchronize()
        with pytest.raises(AssertionError, match=r"once more\. Call it in `with optimizer\.skip_synchronize"):
            optimizer.step()
        with optimizer.skip_synchronize():
            optimizer.step()
        assert weight.item() == -3.0 * (step + 1)
        optimizer.zero_grad()
    # Gradients that the program has given up are no sums that a step would add up.
    (weight * 5.0).sum().backward()
    optimizer.synchronize()
    optimizer.zero_grad()
    if rank == 0:
        weight.sum().backward()
    optimizer.step()
    assert weight.item() == -7.0

    def closure():
        optimizer.zero_grad()
        loss = (weight * (rank + 1.0)).sum()
        loss.backward()
        optimizer.synchronize()
        return loss

    with pytest.raises(AssertionError, match="once more"):
        optimizer.step(closure)
    assert weight.item() == -7.0
    with optimizer.skip_synchronize():
        optimizer.step(closure)
    assert weight.item() == -10.0


def test_sums_of_all_ranks_are_not_added_up_once_more():
    run(2, _summed_once)


def _parameters(rank):
    model = torch.nn.Linear(2, 1)

    def own(value):
        with torch.no_grad():
            [p.fill_(value + 10 * rank) for p in model.parameters()]

    for value, params in enumerate([
        model.state_dict(), model.named_parameters(), list(model.named_parameters()), list(model.parameters()), model.parameters(),
        [model.weight, ("bias", model.bias)], [("nothing", None), (0, model.weight), (None, model.bias)],
    ]):
        own(value)
        hvd.broadcast_parameters(params, root_rank=1)
        assert all((p == value + 10).all() for p in model.parameters()), value
    own(0)
    for wrong, text in [
        (model, "invalid params of type: <class 'torch.nn.modules.linear.Linear'>: pass model.state_dict"),
        (model.weight, "invalid params of type: <class 'torch.nn.parameter.Parameter'>"),
        ("weight", "invalid params of type: <class 'str'>"),
        ([model.weight, [1.0]], "element 1 is of type list, and no tensor: pass model.state_dict"),
        ([None], "element 0 is of type NoneType"),
        ([(model.weight, model.bias)], "element 0 is a tuple of Parameter, Parameter, and no pair of a name and a tensor"),
        ([("weight", model.weight, 1)], "element 0 is a tuple of str, Parameter, int"),
        ({"weight": model.weight, "steps": 3}, "steps is of type int, and no tensor.*hvd.broadcast_object"),
    ]:
        with pytest.raises(ValueError, match=text):
            hvd.broadcast_parameters(wrong, root_rank=1)
    # Nothing of these was sent.
    assert all((p == 10 * rank).all() for p in model.parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    assert all((p == 0).all() for p in model.parameters())


def test_parameters_with_and_without_names_are_broadcast_and_all_else_is_refused():
    run(2, _parameters)


def _parameters_of_other_shapes(rank):
    with pytest.raises(hvd.HorovodInternalError, match="parameters.a.*rank 1") as caught:
        hvd.broadcast_parameters([("a", torch.ones(2 + rank)), ("b", torch.ones(2)), ("c", torch.ones(2))], root_rank=0)
    assert caught.value.kind == "mismatch" and not _operations._handles
    hvd.barrier()


def test_parameters_that_cannot_be_broadcast_leave_no_handles():
    run(2, _parameters_of_other_shapes)


def _parameters_behind_one_that_differs(rank):
    first, second = torch.full((2 + rank,), float(rank)), torch.full((2,), float(rank))
    with pytest.raises(hvd.HorovodInternalError, match="parameters.first.*rank 1"):
        if rank == 0:
            hvd.broadcast_parameters([("first", first), ("second", second)], root_rank=1)
        else:
            hvd.broadcast_(first, 1, name="parameters.first")
    if rank == 1:
        # When rank 0 has the error of the first one.
        time.sleep(0.5)
        hvd.broadcast_(second, 1, name="parameters.second")
    # Nothing is written to it any more.
    assert second.tolist() == [1.0, 1.0]
    hvd.barrier()


def test_parameters_behind_one_that_differs_are_waited_for():
    run(2, _parameters_behind_one_that_differs)


def _state_of_other_types(rank, wrapped):
    p = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    base = torch.optim.SGD([p], lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(base) if wrapped else base
    # What bfloat16 does not hold: 24 bits, the smallest float32, 52 bits, and 1001.
    average, count = torch.tensor([1 + 2.0**-23, -(2.0**-149)]), torch.tensor([1001, -1001])
    if rank == 0:
        base.state[p] = {
            "step": torch.tensor(16777215.0), "momentum_buffer": average, "squares": average.double() * (1 + 2.0**-50),
            "count": count, "nested": {"list": [average * 3, "text"], "pair": (count * 7, 5)}, "name": "text",
        }
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    state = optimizer.state[p]
    assert state is base.state[p] and state["momentum_buffer"].dtype is torch.float32 and state["count"].dtype is torch.int64
    assert state["count"].tolist() == [1001, -1001] and state["momentum_buffer"].tolist() == average.tolist()
    before = repr(state)
    optimizer.zero_grad()
    (p.float() * 3).sum().backward()
    optimizer.step()
    return before, p.tolist(), repr(optimizer.state[p])


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_state_of_an_optimizer_keeps_its_types_and_bits(wrapped):
    torch.set_printoptions(precision=20)
    try:
        first, second = run(2, _state_of_other_types, wrapped)
    finally:
        torch.set_printoptions(profile="default")
    assert first == second


def _refused_by_one(rank):
    is_wrong = rank == 1
    for call, cause in (
        (lambda wrong: hvd.broadcast(torch.ones(1), 7 if wrong else 0), "root_rank 7: there are 2 ranks"),
        (lambda wrong: hvd.broadcast_object("own", 7 if wrong else 0), "root_rank 7: there are 2 ranks"),
        (lambda wrong: hvd.broadcast_parameters([("a", torch.ones(1)), ("b", torch.ones(1))], 7 if wrong else 0), "root_rank 7: there are 2 ranks"),
        (lambda wrong: hvd.broadcast_parameters([("a", torch.ones(1)), ("b", 1 if wrong else torch.ones(1))], 0), "b is of type int"),
        (lambda wrong: hvd.allgather(torch.tensor(1.0) if wrong else torch.ones(1)), "a scalar has no rows"),
        (lambda wrong: hvd.alltoall(torch.ones(2), splits=[3, -1] if wrong else [1, 1]), "none may be below 0"),
        (lambda wrong: hvd.alltoall(torch.ones(2), splits=[1, 0] if wrong else [1, 1]), "do not divide 2 rows"),
        (lambda wrong: hvd.allreduce(torch.ones(1).to_sparse() if wrong else torch.ones(1)), "this tensor is sparse"),
        (lambda wrong: hvd.reducescatter(torch.ones(2, dtype=torch.uint64) if wrong else torch.ones(2)), "torch.uint64 cannot be combined"),
        (lambda wrong: hvd.allreduce(torch.ones(1), op="sum" if wrong else hvd.Sum), "one of hvd.Average"),
        (lambda wrong: hvd.grouped_allreduce([torch.ones(1)], average=True, op=hvd.Average if wrong else None), "supersedes"),
        (lambda wrong: hvd.synchronize(hvd.allreduce_async(torch.ones(1), op="sum" if wrong else hvd.Sum)), "one of hvd.Average"),
        (lambda wrong: hvd.reducescatter(torch.ones(2), op="sum" if wrong else hvd.Sum), "one of hvd.Average"),
        (lambda wrong: hvd.sparse_allreduce_async(torch.ones(1).to_sparse(), "rows", "sum" if wrong else hvd.Sum)(), "one of hvd.Average"),
        (lambda wrong: hvd.broadcast_optimizer_state((torch.optim.LBFGS if wrong else torch.optim.SGD)([torch.ones(1)], lr=0.1), 0), "LBFGS"),
    ):
        with pytest.raises(ValueError if is_wrong else hvd.HorovodInternalError, match=cause) as caught:
            call(is_wrong)
        assert is_wrong or "rank 1 cannot take part" in str(caught.value) and caught.value.peer == 1
        call(False)
    # Calls without a name have the same numbers on all ranks.
    assert hvd.allreduce(torch.tensor([float(rank)])).item() == 0.5


def test_a_call_that_one_rank_refuses_is_an_error_on_every_rank():
    run(2, _refused_by_one)


def _gradients_refused_by_one(rank, groups):
    is_full = rank == 1

    class Compressor(hvd.Compression.none):
        @staticmethod
        def compress(tensor):
            if is_full:
                raise ValueError("there is no room")
            return tensor, None

    first, second = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    named = [("first", first), ("second", second)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first, second], lr=1.0), named, compression=Compressor, num_groups=groups)
    if is_full:
        with pytest.raises(ValueError, match="there is no room"):
            (first.sum() + second.sum()).backward()
    else:
        (first.sum() + second.sum()).backward()
    # What was refused once is refused again, and the other rank is told once.
    with pytest.raises(ValueError if is_full else hvd.HorovodInternalError, match="there is no room"):
        optimizer.step()
    assert first.tolist() == second.tolist() == [0.0, 0.0]
    is_full = False
    optimizer.zero_grad()
    (first.sum() + second.sum()).mul(rank + 1.0).backward()
    optimizer.step()
    assert first.tolist() == second.tolist() == [-1.5, -1.5]


@pytest.mark.parametrize("groups", [0, 1])
def test_gradients_that_one_rank_refuses_fail_on_every_rank_once(groups):
    run(2, _gradients_refused_by_one, groups)


def _changes_refused_by_one(rank):
    is_full = rank == 1

    class Compressor(hvd.Compression.none):
        @staticmethod
        def compress(tensor):
            if is_full and tensor.numel() == 2:
                raise ValueError("there is no room")
            return tensor, None

    first, second = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3))
    named = [("first", first), ("second", second)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first, second], lr=1.0), named, compression=Compressor, op=hvd.Adasum)
    (first.sum() + second.sum()).backward()
    with pytest.raises(ValueError if is_full else hvd.HorovodInternalError, match="there is no room"):
        optimizer.step()
    # The other parameter has moved on both ranks.
    assert first.tolist() == [0.0, 0.0] and second.tolist() == pytest.approx([-1.0] * 3)
    is_full = False
    optimizer.zero_grad()
    (first.sum() + second.sum()).backward()
    optimizer.step()
    assert first.tolist() == pytest.approx([-1.0] * 2) and second.tolist() == pytest.approx([-2.0] * 3)


def test_a_change_that_one_rank_refuses_fails_on_every_rank_and_the_others_are_made():
    run(2, _changes_refused_by_one)


def _goes_on(rank, groups):
    first, third = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    # In another form on each rank: a mismatch of it alone.
    odd = torch.nn.Parameter(torch.zeros(2 + rank))
    named = [("first", first), ("odd", odd), ("third", third)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first, odd, third], lr=1.0), named, num_groups=groups)
    if rank == 1:
        # When rank 0 has submitted its own.
        hvd.barrier()
    (first.sum() + odd.sum() + third.sum()).mul(rank + 1.0).backward()
    if rank == 0:
        hvd.barrier()
    with pytest.raises(hvd.HorovodInternalError, match="rank 1") as caught:
        optimizer.step()
    assert caught.value.kind == "mismatch" and first.tolist() == [0.0, 0.0]
    # Nothing is written any more, and nothing is left.
    assert not _operations._handles
    assert third.grad.tolist() == [1.5, 1.5]
    optimizer.zero_grad()
    odd.requires_grad_(False)
    (first.sum() + third.sum()).mul(rank + 1.0).backward()
    optimizer.step()
    assert first.tolist() == third.tolist() == [-1.5, -1.5]


@pytest.mark.parametrize("groups", [0, 3])
def test_an_optimizer_goes_on_after_a_step_that_has_failed(groups):
    run(2, _goes_on, groups)


def _frozen_in_a_group(rank):
    frozen, trained = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    base = torch.optim.SGD([frozen, trained], lr=1.0, momentum=0.5, weight_decay=0.5)
    optimizer = hvd.DistributedOptimizer(base, [("frozen", frozen), ("trained", trained)], num_groups=1)
    frozen.requires_grad_(False)
    for _ in range(2):
        optimizer.zero_grad()
        trained.sum().mul(rank + 1.0).backward()
        optimizer.step()
    # A gradient of zeros would have moved it by the decay.
    assert frozen.grad is None and frozen.tolist() == [1.0, 1.0]
    assert trained.tolist() == [-3.0, -3.0]


def test_a_frozen_parameter_of_a_group_gets_no_gradient():
    run(2, _frozen_in_a_group)


def _taken_away(rank):
    p = torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("p", p)])
    p.sum().backward()
    # Unlike the optimizer's own it does not know that the gradient is on its way.
    torch.nn.ParameterList([p]).zero_grad()
    with pytest.raises(AssertionError, match=r"taken away after loss\.backward\(\)"):
        optimizer.step()
    assert p.tolist() == [0.0, 0.0] and not _operations._handles
    p.sum().mul(rank + 1.0).backward()
    optimizer.step()
    assert p.tolist() == [-1.5, -1.5]


def test_a_gradient_that_is_taken_away_on_its_way_is_told():
    run(2, _taken_away)


def _pressed_in_a_step(rank):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    wrong, late = torch.nn.Parameter(torch.zeros(2 + rank)), torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([wrong, late], lr=1.0), [("wrong", wrong), ("late", late)])
    wrong.sum().backward()
    if rank == 0:
        late.sum().backward()
        press()
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        hvd.allreduce(torch.ones(1), name="pressed")
    else:
        hvd.allreduce(torch.ones(1), name="pressed")
        late.sum().backward()
    # Of the gradient that the interrupted call has waited for.
    with pytest.raises(hvd.HorovodInternalError, match="allreduce.wrong"):
        optimizer.step()
    assert late.tolist() == [0.0, 0.0] and late.grad.tolist() == [1.0, 1.0] and not _operations._handles


def test_what_has_failed_before_ctrl_c_is_not_forgotten():
    run(2, _pressed_in_a_step)


def _handles_end(rank):
    handle = hvd.allreduce_async(torch.ones(1), name=f"only on rank {rank}")
    # The shutdown of one rank ends the job, to which the other may still submit.
    hvd.barrier()
    hvd.shutdown()
    assert not _operations._handles
    with pytest.raises(ValueError, match="before hvd.shutdown"):
        hvd.synchronize(handle)


def test_handles_end_with_the_job():
    run(2, _handles_end)


def _sparse(rank, sparse_as_dense):
    table = torch.nn.Embedding(6, 2, sparse=True)
    torch.nn.init.zeros_(table.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), sparse_as_dense=sparse_as_dense)
    optimizer.zero_grad()
    # Rows 1 and 2 on rank 0; row 2 twice on rank 1.
    table(torch.tensor([[1, 2], [2, 2]][rank])).sum().backward()
    optimizer.step()
    assert table.weight.grad.is_sparse
    assert table.weight[:, 0].tolist() == [0.0, -0.5, -1.5, 0.0, 0.0, 0.0]


def _sparse_with_options_of_dense_ones(rank):
    for options in ({"compression": hvd.Compression.fp16}, {"gradient_predivide_factor": 2.0}):
        table = torch.nn.Embedding(6, 2, sparse=True)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), table.named_parameters(), **options)
        optimizer.zero_grad()
        with pytest.raises(NotImplementedError, match="the gradient of weight is sparse.*sparse_as_dense=True"):
            table(torch.tensor([rank])).sum().backward()
            optimizer.step()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0


def test_sparse_gradients_are_refused_with_options_of_dense_ones():
    run(2, _sparse_with_options_of_dense_ones)


def _refused_group(rank):
    table, weight = torch.nn.Embedding(6, 2, sparse=True), torch.nn.Parameter(torch.ones(2))
    torch.nn.init.ones_(table.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([table.weight, weight], lr=1.0), num_groups=1)
    with pytest.raises(NotImplementedError, match="groups are for dense ones"):
        (table(torch.tensor([rank])).sum() + weight.sum()).backward()
    # A program may have caught that.
    with pytest.raises(NotImplementedError, match="groups are for dense ones"):
        optimizer.step()
    assert (table.weight == 1.0).all() and (weight == 1.0).all()
    optimizer.zero_grad()
    table.weight.requires_grad_(False)
    weight.sum().mul(rank + 1.0).backward()
    optimizer.step()
    assert weight.tolist() == [-0.5, -0.5]


def test_a_group_that_was_refused_in_a_backward_pass_is_refused_in_the_step():
    run(2, _refused_group)


def _other_factors_of_integers(rank):
    # They are compared as those of floats are.
    for dtype in (torch.int16, torch.int64, torch.float32):
        own = torch.tensor([4, 6], dtype=dtype)
        for op in (hvd.Sum, hvd.Average):
            for factors in ({"postscale_factor": [0.5, 1.0][rank]}, {"prescale_factor": [1.0, 0.5][rank]}, {"postscale_factor": [2.0, 0.5][rank]}):
                for function in (hvd.allreduce, hvd.reducescatter):
                    with pytest.raises(hvd.HorovodInternalError, match="rank 0 submits .*scale 0.5") as caught:
                        function(own, op=op, name="differ", **factors)
                    assert caught.value.kind == "mismatch"
        # The same ones, as before.
        assert hvd.allreduce(own, op=hvd.Sum, prescale_factor=0.5, postscale_factor=2.0, name="agree").tolist() == [8, 12]
        assert hvd.reducescatter(own, op=hvd.Sum, postscale_factor=0.5, name="agree").tolist() == [[4], [6]][rank]
        with pytest.raises(ValueError, match="postscale is NaN"):
            hvd.allreduce(own, op=hvd.Sum, postscale_factor=math.nan)
    pair = hvd.grouped_allreduce([torch.ones(1), torch.tensor([3])], op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)
    assert [one.tolist() for one in pair] == [[2.0], [6]]


def test_factors_of_integers_that_ranks_do_not_share_are_an_error_of_both():
    run(2, _other_factors_of_integers)


@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_sparse_gradients(sparse_as_dense):
    run(2, _sparse, sparse_as_dense)


def _first_gradients(rank):
    table, frozen = torch.nn.Embedding(6, 2, sparse=True), torch.nn.Parameter(torch.ones(2))
    torch.nn.init.zeros_(table.weight)
    groups = [{"params": [table.weight]}, {"params": [frozen], "weight_decay": 0.5}]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=1.0))
    frozen.requires_grad_(False)
    # The program calls no zero_grad before its first pass.
    table(torch.tensor([rank])).sum().backward()
    optimizer.step()
    assert table.weight.grad.is_sparse and table.weight[:, 0].tolist() == [-0.5, -0.5, 0.0, 0.0, 0.0, 0.0]
    # A gradient of zeros would have let the decay change it.
    assert frozen.grad is None and frozen.tolist() == [1.0, 1.0]


def test_an_optimizer_makes_no_gradients_before_the_first_pass():
    run(2, _first_gradients)


def _sparse_on_one_rank(rank, sparse_as_dense):
    table = torch.nn.Embedding(6, 2, sparse=True)
    torch.nn.init.zeros_(table.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), sparse_as_dense=sparse_as_dense)
    for step in range(3):
        optimizer.zero_grad()
        # Both use it first; then one of them at a time.
        if step in (0, 1 + rank):
            table(torch.tensor([rank, step])).sum().backward()
        optimizer.step()
        assert table.weight.grad.is_sparse
    return table.weight.tolist()


@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_a_sparse_gradient_that_one_rank_lacks_counts_as_zeros(sparse_as_dense):
    ranks = run(2, _sparse_on_one_rank, sparse_as_dense)
    # Rows 0 and 0, 1 and 0; 0 and 1 on rank 0; 1 and 2 on rank 1: halves of what was used.
    assert ranks[0] == ranks[1] == [[-2.0, -2.0], [-1.5, -1.5], [-0.5, -0.5], *[[0.0, 0.0]] * 3]


def _sparse_at_first_on_one_rank(rank):
    table = torch.nn.Embedding(6, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), [("table", table.weight)])
    optimizer.zero_grad()
    if rank == 0:
        table(torch.tensor([1])).sum().backward()
    with pytest.raises(hvd.HorovodInternalError, match="allreduce.table.*sparse on some ranks only.*sparse_as_dense=True") as caught:
        optimizer.step()
    assert caught.value.kind == "mismatch"
    # All else goes on.
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0


def test_a_gradient_that_is_sparse_at_first_on_one_rank_is_an_error_of_both():
    run(2, _sparse_at_first_on_one_rank)


def _sparse_of_other_kinds(rank):
    def sparse(rows, columns=2):
        return torch.sparse_coo_tensor([[0, 1]], torch.ones(2, columns), (rows, columns), check_invariants=True)

    for name, tensor, op, said in [
        ("rows", sparse(4 + rank), hvd.Sum, rf"rank {rank} submits Sum of sparse \[{4 + rank}, 2\], another rank Sum of sparse \[{5 - rank}, 2\]"),
        ("op", sparse(4), (hvd.Average, hvd.Sum)[rank], r"submits .* of sparse \[4, 2\], another rank .* of sparse \[4, 2\]"),
        ("columns", sparse(4, 2 + rank), hvd.Sum, "rank 0 submits .*, rank 1 "),
        ("no elements", torch.sparse_coo_tensor(size=(4 + rank, 2)), hvd.Sum, "another rank Sum of sparse"),
    ]:
        with pytest.raises(hvd.HorovodInternalError, match=said) as caught:
            hvd.sparse_allreduce_async(tensor, name, op)()
        assert caught.value.kind == "mismatch", name
    # Through an optimizer, and all else goes on.
    table = torch.nn.Embedding(6 + rank, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), table.named_parameters())
    optimizer.zero_grad()
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(hvd.HorovodInternalError, match=r"allreduce.weight.*another rank Average of sparse"):
        optimizer.step()
    assert hvd.sparse_allreduce_async(sparse(4), "same", hvd.Sum)().to_dense().tolist() == [[2.0] * 2] * 2 + [[0.0] * 2] * 2


def test_sparse_tensors_of_other_shapes_or_for_another_op_are_not_added_up():
    run(2, _sparse_of_other_kinds)


def _batch_norm(rank):
    generator = torch.Generator().manual_seed(5)
    every = torch.randn(7, 3, 4, generator=generator, dtype=torch.float64) * 3 + 100
    weights = torch.randn(7, 3, 4, generator=generator, dtype=torch.float64)
    mine = slice(0, 2) if rank == 0 else slice(2, 7)
    own, right = every[mine].clone().requires_grad_(), every.clone().requires_grad_()
    synced, plain = hvd.SyncBatchNorm(3).double(), torch.nn.BatchNorm1d(3).double()
    output, expected = synced(own), plain(right)
    (output * weights[mine]).sum().backward()
    (expected * weights).sum().backward()
    for got, wanted in [
        (output, expected[mine]),
        (synced.running_mean, plain.running_mean),
        (synced.running_var, plain.running_var),
        (own.grad, right.grad[mine]),
        (hvd.allreduce(synced.weight.grad, op=hvd.Sum), plain.weight.grad),
        (hvd.allreduce(synced.bias.grad, op=hvd.Sum), plain.bias.grad),
    ]:
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
    # All ranks together have one value of each channel, and then no batch.
    with pytest.raises(ValueError, match="more than 1 value per channel over all ranks"):
        synced(own[: 1 - rank].mean(2))
    with pytest.raises(ValueError, match="at least two dimensions, and not 1"):
        synced(own[0, 0])
    synced.eval(), plain.eval()
    torch.testing.assert_close(synced(own), plain(right)[mine])


def test_batches_of_different_sizes_are_normalized_as_one():
    run(2, _batch_norm)


def _norms_with_other_settings(rank):
    for options in ({"eps": 1e-3}, {"momentum": None}, {"momentum": 0.5}):
        own = hvd.SyncBatchNorm(2, **(options if rank == 1 else {}))
        with pytest.raises(ValueError, match="different settings; this rank's has eps="):
            own(torch.randn(4, 2))
        assert own.running_mean.tolist() == [0.0, 0.0]
    # An error of this layer alone.
    hvd.SyncBatchNorm(2)(torch.randn(4, 2))
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3.0


def test_norms_with_other_settings_are_an_error_on_every_rank():
    run(3, _norms_with_other_settings)


def _copies(rank, path):
    even = hvd.add_process_set([0, 2])
    for process_set in (even, hvd.global_process_set):
        model = hvd.SyncBatchNorm(2, process_set=process_set)
        torch.save(model, path / f"{rank}")
        for other in (copy.deepcopy(model), copy.copy(model), torch.load(path / f"{rank}", weights_only=False)):
            assert other._process_set is process_set
            if rank != 1 or process_set is not even:
                # The ranks' batches have the means 0, 1 and 2.
                other(torch.tensor([[rank - 1.0] * 2, [rank + 1.0] * 2]))
                torch.testing.assert_close(other.running_mean, torch.full((2,), 0.1))
    saved = pickle.dumps(even)
    hvd.remove_process_set(even)
    # For whoever registers it again.
    again = pickle.loads(saved)
    assert again.ranks == [0, 2] and again.process_set_id is None
    hvd.add_process_set(again)


def test_models_with_process_sets_are_copied_and_saved(tmp_path):
    run(3, _copies, tmp_path)


def _timeline(rank, path):
    hvd.start_timeline(path)
    hvd.allreduce(torch.ones(1), name="traced")
    hvd.stop_timeline()
    # The shutdown of one rank ends the job, whose timeline the other may still have to stop.
    hvd.barrier()


def test_the_timeline_has_the_names(tmp_path):
    run(2, _timeline, str(tmp_path / "timeline.json"))
    assert "allreduce.traced" in json.dumps(json.loads((tmp_path / "timeline.json").read_text()))


def _interrupt(rank):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if rank == 0:
        handle = hvd.allreduce_async(torch.ones(1), name="late", op=hvd.Sum)
        pressed = press()
        with pytest.raises(KeyboardInterrupt):
            hvd.synchronize(handle)
        assert time.monotonic() - pressed[0] < 20.0
        hvd.allreduce(torch.ones(1), name="pressed")
        # It goes on.
        assert hvd.synchronize(handle).item() == 2.0
    else:
        hvd.allreduce(torch.ones(1), name="pressed")
        hvd.allreduce(torch.ones(1), name="late", op=hvd.Sum)
    # Also without a handle.
    if rank == 0:
        press()
        with pytest.raises(KeyboardInterrupt):
            hvd.allreduce(torch.ones(1), name="lost", op=hvd.Sum)
        assert not _operations._handles
        with pytest.raises(ValueError, match="in flight already"):
            hvd.allreduce(torch.ones(1), name="lost", op=hvd.Sum)
        hvd.allreduce(torch.ones(1), name="pressed")
    else:
        hvd.allreduce(torch.ones(1), name="pressed")
        assert hvd.allreduce(torch.ones(1), name="lost", op=hvd.Sum).item() == 2.0
    hvd.barrier()
    assert hvd.allreduce(torch.ones(1), name="lost", op=hvd.Sum).item() == 2.0


def test_ctrl_c_ends_a_wait_and_the_operation_goes_on():
    run(2, _interrupt)


def _threads(rank):
    for number in range(20):
        if rank == 1:
            # When rank 0's threads wait.
            hvd.allreduce(torch.ones(1), name=f"wait {number}")
            hvd.allreduce(torch.ones(3), name=f"waited {number}", op=hvd.Sum)
            continue
        handle = hvd.allreduce_async(torch.full((3,), 2.0), name=f"waited {number}", op=hvd.Sum)
        start, results = threading.Barrier(5), []

        def wait():
            start.wait()
            try:
                results.append(hvd.synchronize(handle).tolist())
            except ValueError as error:
                # It came when others had the result.
                assert "synchronized once" in str(error)

        threads = [threading.Thread(target=wait) for _ in range(4)]
        for thread in threads:
            thread.start()
        start.wait()
        assert not hvd.poll(handle)
        hvd.allreduce(torch.ones(1), name=f"wait {number}")
        for thread in threads:
            thread.join()
        assert results and all(result == [3.0] * 3 for result in results), results
        # The last one that has it has used up the handle, though others waited for it too.
        with pytest.raises(ValueError, match="synchronized once"):
            hvd.poll(handle)


def test_threads_may_wait_for_one_operation():
    run(2, _threads)


def _asked_by_a_handler(rank):
    _ask_by_a_handler(hvd.allreduce_async(torch.tensor([rank + 1.0]), op=hvd.Sum), 3.0)
    # Of some the result is made of what has come to the tensor itself: once, whoever asks.
    for dtype in (torch.int32, torch.int64):
        tensor = torch.tensor([rank + 1], dtype=dtype)
        _ask_by_a_handler(hvd.allreduce_async_(tensor, op=hvd.Sum, postscale_factor=2.0), 6)
        assert tensor.item() == 6
        _ask_by_a_handler(hvd.allreduce_async_(tensor, op=hvd.Average), 6)
        assert tensor.item() == 6


def _ask_by_a_handler(handle, expected):
    results = []
    operation = _operations._found(handle)
    finish = operation._finish

    def interrupted(native):
        if not results:
            results.append("interrupted")
            signal.raise_signal(signal.SIGUSR1)
        return finish(native)

    operation._finish = interrupted
    signal.signal(signal.SIGUSR1, lambda *_: results.append(hvd.synchronize(handle).item()))
    assert hvd.synchronize(handle).item() == expected and results == ["interrupted", expected]


def test_a_handler_may_ask_for_a_result_that_is_being_made():
    run(2, _asked_by_a_handler)


def _interrupted_in_the_making(rank):
    handle = hvd.allreduce_async_(torch.tensor([rank + 1]), op=hvd.Sum, postscale_factor=2.0)
    operation = _operations._found(handle)
    finish = operation._finish

    def interrupted(native):
        operation._finish = finish
        raise KeyboardInterrupt

    operation._finish = interrupted
    with pytest.raises(KeyboardInterrupt):
        hvd.synchronize(handle)
    assert hvd.synchronize(handle).item() == 6
    with pytest.raises(ValueError, match="synchronized once"):
        hvd.synchronize(handle)


def test_a_result_whose_making_ctrl_c_has_interrupted_can_be_had_again():
    run(2, _interrupted_in_the_making)


def _polled(rank):
    handle = hvd.allgather_async(torch.zeros(1 << 21), name="large")
    native = importlib.import_module("phalanx_torch.horovod._operations")._handles[handle]._native
    native.wait()
    into = torch.empty(2 << 21)
    thread = threading.Thread(target=lambda: [native.copy_to(0, into) for _ in range(50)])
    thread.start()
    while thread.is_alive():
        assert hvd.poll(handle)
    assert len(hvd.synchronize(handle)) == 2 << 21


def test_an_operation_that_has_ended_is_done_whatever_others_do_with_it():
    run(2, _polled)


def _forked(rank):
    if rank == 0:
        handle = hvd.allreduce_async(torch.ones(1), name="in flight", op=hvd.Sum)
        child = os.fork()
        if child == 0:
            code = 0
            for call in (hvd.poll, hvd.synchronize):
                try:
                    call(handle)
                except ValueError as error:
                    code += "from which this one was forked" in str(error)
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
        hvd.allreduce(torch.ones(1), name="forked")
        assert hvd.synchronize(handle).item() == 2.0
    else:
        hvd.allreduce(torch.ones(1), name="forked")
        hvd.allreduce(torch.ones(1), name="in flight", op=hvd.Sum)


def test_a_forked_process_does_not_wait_for_its_parents_operations():
    run(2, _forked)


def _refused_in_a_fork(calls):
    """Whether each of the calls is refused at once in a forked process, for that reason."""
    child = os.fork()
    if child == 0:
        code = 0
        for number, call in enumerate(calls, 1):
            try:
                call()
                code = code or 100 + number
            except ValueError as error:
                code = code or (0 if "forked" in str(error) and "spawn" in str(error) else number)
            except BaseException:
                code = code or 200 + number
        os._exit(code)
    end = time.monotonic() + 30.0
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the forked process waits")


def _calls_in_a_fork(rank, folder):
    alone = [hvd.add_process_set([0]), hvd.add_process_set([1])][rank]
    joins = [
        hvd.init, hvd.init, lambda: phalanx_torch.init(f"file://{folder}/array", rank=0, world_size=1),
        lambda: process_group.ProcessGroup(dist.HashStore(), 0, 1, datetime.timedelta(seconds=30)),
    ]
    own = torch.ones(2)
    calls = [
        lambda: hvd.allreduce(own), lambda: hvd.allgather(own), lambda: hvd.broadcast(own, 0), lambda: hvd.alltoall(own),
        lambda: hvd.reducescatter(own), hvd.barrier, hvd.join, lambda: hvd.remove_process_set(alone), lambda: hvd.add_process_set([rank]),
        lambda: hvd.start_timeline(f"{folder}/timeline"), hvd.stop_timeline, lambda: hvd.broadcast_object(1, 0),
    ]
    _refused_in_a_fork([*calls, *joins])
    # What the parent has begun is not the child's to end.
    _refused_in_a_fork([lambda: hvd.shutdown() or hvd.init()])
    assert hvd.allreduce(own, op=hvd.Sum).tolist() == [2.0, 2.0]
    hvd.barrier()
    hvd.shutdown()
    # The ranks are kept for the next job.
    _refused_in_a_fork(joins)
    hvd.init()
    assert hvd.allreduce(own, op=hvd.Sum).tolist() == [2.0, 2.0]


def test_a_forked_process_meets_nobody_and_is_told_at_once(tmp_path):
    run(2, _calls_in_a_fork, tmp_path)


PROGRAM = """
import torch
import horovod.torch as hvd
from horovod.torch.mpi_ops import allreduce
from horovod.common.exceptions import HorovodInternalError
hvd.init()
assert hvd.HorovodInternalError is HorovodInternalError
if hvd.size() == 2 and {fails} == hvd.rank():
    raise KeyError("lost")
print(hvd.rank(), allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item())
"""


def _programs(path, start, fails=-1, **variables):
    path.write_text(PROGRAM.format(fails=fails))
    port, started = free_port(), []
    for rank in range(2):
        # As horovodrun tells it.
        place = {"HOROVOD_RANK": rank, "HOROVOD_SIZE": 2, "HOROVOD_LOCAL_RANK": rank, "HOROVOD_LOCAL_SIZE": 2}
        place |= {"HOROVOD_CROSS_RANK": 0, "HOROVOD_CROSS_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **variables}
        started.append(
            subprocess.Popen(
                [sys.executable, *start, str(path)], env=os.environ | {name: str(value) for name, value in place.items()},
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
        )
    return [(process.communicate(timeout=120), process.returncode) for process in started]


def test_a_program_of_horovods_runs_as_it_is(tmp_path):
    for start, variables in [(["-m", "phalanx_torch.horovod"], {}), (["-c", REGISTERS], {"PHALANX_AS_HOROVOD": 1})]:
        for rank, ((out, error), code) in enumerate(_programs(tmp_path / "program.py", start, **variables)):
            assert (out, code) == (f"{rank} 3.0\n", 0), error


# What `import torch` does where the package is installed.
REGISTERS = """
import runpy, sys
import torch
from phalanx_torch import _registration
_registration.register()
runpy.run_path(sys.argv[1], run_name="__main__")
"""


SPAWNS = """
import torch
from phalanx_torch import _registration
_registration.register()  # What `import torch` does where the package is installed.
import horovod.torch as hvd

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index

if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(Data(), num_workers=1, batch_size=4, multiprocessing_context="{method}")
    print([batch.tolist() for batch in loader])
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_processes_that_run_the_file_again_find_horovod(method, tmp_path):
    (tmp_path / "program.py").write_text(SPAWNS.format(method=method))
    start = [sys.executable, "-m", "phalanx_torch.horovod", str(tmp_path / "program.py")]
    variables = {name: value for name, value in os.environ.items() if name != "PHALANX_AS_HOROVOD"}
    ended = subprocess.run(start, env=variables, capture_output=True, text=True, timeout=120)
    assert (ended.stdout, ended.returncode) == ("[[0, 1, 2, 3]]\n", 0), ended.stderr


@pytest.mark.parametrize("safe", [False, True])
def test_a_linked_program_imports_what_lies_beside_its_file(safe, tmp_path):
    if safe and sys.version_info < (3, 11):
        pytest.skip("PYTHONSAFEPATH is ignored")
    (files := tmp_path / "files").mkdir()
    (links := tmp_path / "links").mkdir()
    (files / "beside.py").write_text("PLACE = 'files'\n")
    (links / "beside.py").write_text("PLACE = 'links'\n")
    (files / "program.py").write_text("import horovod.torch\nimport beside\nprint(beside.PLACE)\n")
    (links / "program.py").symlink_to(files / "program.py")
    package = os.path.dirname(os.path.dirname(hvd.__file__))
    variables = os.environ | {"PYTHONPATH": os.path.dirname(package)} | ({"PYTHONSAFEPATH": "1"} if safe else {})
    start = [sys.executable, "-m", "phalanx_torch.horovod", str(links / "program.py")]
    ended = subprocess.run(start, env=variables, capture_output=True, text=True, timeout=120)
    if safe:
        assert "No module named 'beside'" in ended.stderr, ended.stderr
    else:
        assert (ended.stdout, ended.returncode) == ("files\n", 0), ended.stderr


def test_a_program_that_fails_tells_the_others_why(tmp_path):
    ended = _programs(tmp_path / "program.py", ["-m", "phalanx_torch.horovod"], fails=1)
    assert all(code != 0 for _, code in ended)
    assert "the program of rank 1 ended with KeyError: 'lost'" in ended[0][0][1], ended[0][0][1]


def test_what_is_not_there_is_refused_by_name():
    hvd.install()
    hvd.install()
    assert importlib.import_module("horovod.torch") is hvd
    for part, instead in [("elastic", "--max-restarts"), ("run", "phalanx run")]:
        with pytest.raises(NotImplementedError, match=f"hvd.{part} is not part of phalanx_torch.horovod.*{instead}"):
            getattr(hvd, part)
        # A program that goes on without it asks for it so.
        assert not hasattr(hvd, part)
        with pytest.raises(ImportError, match=f"{part} is not part of phalanx_torch.horovod.*{instead}"):
            exec(f"from horovod.torch import {part}")
    with pytest.raises(NotImplementedError, match="horovod.torch.elastic"):
        importlib.import_module("horovod.torch.elastic")
    with pytest.raises(NotImplementedError, match="horovod.spark"):
        importlib.import_module("horovod.spark")


def test_horovod_itself_is_not_replaced(monkeypatch):
    itself = types.ModuleType("horovod")
    monkeypatch.setitem(sys.modules, "horovod", itself)
    with pytest.raises(RuntimeError, match="Horovod itself has been imported already"):
        hvd.install()
    assert sys.modules["horovod"] is itself


def test_modules_of_horovods_are_attributes_of_their_packages():
    hvd.install()
    import horovod.torch.mpi_ops as operations
    from horovod.torch import functions, mpi_ops, optimizer, sync_batch_norm

    assert operations.allreduce is mpi_ops.allreduce is hvd.mpi_ops.allreduce is hvd.allreduce
    assert hvd.functions.broadcast_object is functions.broadcast_object is hvd.broadcast_object
    assert hvd.optimizer.DistributedOptimizer is optimizer.DistributedOptimizer is hvd.DistributedOptimizer
    assert hvd.sync_batch_norm.SyncBatchNorm is sync_batch_norm.SyncBatchNorm is hvd.SyncBatchNorm
    assert hvd.compression.Compression is hvd.Compression
