"""Each collective, with each type and kind of tensor, against what it must give."""

import gc
import time
import weakref

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from conftest import environment, free_port, needs_async_op, processes, waiting
from torch._C import _distributed_c10d as c10d

import phalanx_torch
import phalanx_torch.horovod as hvd

REDUCED = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
MOVED = [*REDUCED, *COMPLEX, *FLOAT8, torch.bool]


def filled(rank, dtype, shape=(3, 5)):
    """Small whole numbers, others on each rank."""
    return (torch.arange(torch.Size(shape).numel()).reshape(shape) % 4 + rank + 1).to(dtype)


def same(one, other):
    """Bit by bit."""
    assert one.dtype == other.dtype and one.shape == other.shape
    return bool((one.contiguous().view(torch.uint8) == other.contiguous().view(torch.uint8)).all()) if one.numel() else True


def reduces(rank, world):
    for dtype in REDUCED + COMPLEX:
        tensor = filled(rank, dtype)
        dist.all_reduce(tensor)
        assert same(tensor, sum((filled(r, torch.complex128) for r in range(world))).real.to(dtype)) or same(
            tensor, sum(filled(r, torch.complex128) for r in range(world)).to(dtype)
        ), dtype
    for op, expected in ((dist.ReduceOp.MIN, 0), (dist.ReduceOp.MAX, world - 1)):
        for dtype in (torch.float32, torch.int16, torch.uint16, torch.uint32, torch.int64, torch.bfloat16):
            tensor = filled(rank, dtype)
            dist.all_reduce(tensor, op)
            assert same(tensor, filled(expected, dtype)), (op, dtype)
    bits = torch.tensor([1 << rank, 0b1010], dtype=torch.int16)
    dist.all_reduce(bits, dist.ReduceOp.BOR)
    assert bits.tolist() == [(1 << world) - 1, 0b1010]
    average = torch.full((7,), float(rank), dtype=torch.float16)
    dist.all_reduce(average, dist.ReduceOp.AVG)
    assert average.tolist() == [(world - 1) / 2] * 7
    truth = torch.tensor([True, rank == 0, False])
    dist.all_reduce(truth, dist.ReduceOp.MAX)
    assert truth.tolist() == [True, True, False]
    for dtype in FLOAT8:
        with pytest.raises(TypeError, match="cannot be reduced"):
            dist.all_reduce(filled(rank, dtype))
    with pytest.raises(ValueError, match="complex|summed and averaged"):
        dist.all_reduce(torch.ones(1, dtype=torch.complex64), dist.ReduceOp.MAX)
    with pytest.raises(TypeError, match="minimum"):
        dist.all_reduce(torch.ones(1, dtype=torch.uint64), dist.ReduceOp.MAX)
    with pytest.raises(ValueError, match="avg is not defined"):
        dist.all_reduce(torch.ones(1, dtype=torch.bool), dist.ReduceOp.AVG)
    with pytest.raises(TypeError, match="average"):
        dist.all_reduce(torch.ones(1, dtype=torch.uint64), dist.ReduceOp.AVG)
    # What was refused has not ended the group.
    root = filled(rank, torch.float32)
    dist.reduce(root, world - 1)
    mine = sum(filled(r, torch.float32) for r in range(world)) if rank == world - 1 else filled(rank, torch.float32)
    assert same(root, mine)


def as_they_are(rank):
    group = dist.group.WORLD
    at_once = group._native.all_reduce_as_it_is
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64):
        tensor = filled(rank, dtype)
        assert at_once([tensor], waiting()) and same(tensor, filled(0, dtype) + filled(1, dtype)), dtype
    empty = torch.ones(0)
    assert at_once([empty], waiting()) and empty.numel() == 0
    mean = torch.full((2,), float(rank))
    assert at_once([mean], waiting(dist.ReduceOp.AVG)) and mean.tolist() == [0.5, 0.5]
    # All else is left to the part in Python, with nothing done.
    asynchronous, premultiplied = waiting(), waiting(dist._make_nccl_premul_sum(2.0))
    asynchronous.asyncOp = True
    plain = filled(rank, torch.float32)
    for tensors, options in (
        ([plain.t()], waiting()),
        ([filled(rank, torch.int16)], waiting()),
        ([torch.ones(2, requires_grad=True)], waiting()),
        ([filled(rank, torch.uint64)], waiting()),
        ([filled(rank, torch.int32)], waiting(dist.ReduceOp.AVG)),
        ([filled(rank, torch.complex64)], waiting(dist.ReduceOp.MAX)),
        ([filled(rank, torch.complex64).conj()], waiting()),
        ([torch.complex(plain, plain).conj().imag], waiting()),
        ([torch.eye(3).to_sparse()], waiting()),
        ([torch.ones(2, device="meta")], waiting()),
        ([numpy.ones(2)], waiting()),
        ([plain], premultiplied),
        ([plain], asynchronous),
        ([plain], None),
        ([plain, plain], waiting()),
        ([], waiting()),
        (plain, waiting()),
    ):
        assert at_once(tensors, options) is False, tensors
    assert same(plain, filled(rank, torch.float32))
    assert at_once([plain], waiting()) and same(plain, filled(0, torch.float32) + filled(1, torch.float32))


@needs_async_op
def test_tensors_that_need_no_preparation_are_reduced_at_once(ranks):
    ranks(2, as_they_are)


def waiting_for_a_root(root):
    options = dist.BroadcastOptions()
    options.rootRank, options.asyncOp = root, False
    return options


def waiting_for_all():
    options = c10d.AllgatherOptions()
    options.asyncOp = False
    return options


def moved_as_they_are(rank):
    group = dist.group.WORLD
    broadcast, all_gather = group._native.broadcast_as_it_is, group._native.all_gather_as_it_is
    plain = filled(rank, torch.float32)
    for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.uint64, torch.bool, torch.complex64, torch.float8_e5m2):
        tensor = filled(rank, torch.float32).to(dtype)
        expected = [filled(r, torch.float32).to(dtype) for r in range(2)]
        gathered = [torch.empty_like(tensor) for _ in range(2)]
        assert all_gather([gathered], [tensor], waiting_for_all()), dtype
        assert broadcast([tensor], waiting_for_a_root(1)), dtype
        for found, meant in zip([*gathered, tensor], [*expected, expected[1]]):
            assert found.view(torch.uint8).equal(meant.view(torch.uint8)), dtype
    empty = torch.ones(0)
    assert broadcast([empty], waiting_for_a_root(0)) and all_gather([[empty, torch.ones(0)]], [empty], waiting_for_all())
    # An input that lies where an output does.
    whole = torch.tensor([float(rank)] * 2)
    assert all_gather([[whole[:1], whole[1:]]], [whole[1:] if rank else whole[:1]], waiting_for_all())
    assert whole.tolist() == [0.0, 1.0]
    # All else is left to the part in Python, with nothing done.
    of_another_tensor = waiting_for_a_root(0)
    of_another_tensor.rootTensor = 1
    asynchronous_root, asynchronous, into = waiting_for_a_root(0), waiting_for_all(), [plain.clone(), plain.clone()]
    asynchronous_root.asyncOp = asynchronous.asyncOp = True
    for tensors, options in (
        ([plain.t()], waiting_for_a_root(0)),
        ([filled(rank, torch.complex64).conj()], waiting_for_a_root(0)),
        ([torch.eye(3).to_sparse()], waiting_for_a_root(0)),
        ([numpy.ones(2)], waiting_for_a_root(0)),
        ([plain], asynchronous_root),
        ([plain], waiting_for_a_root(-1)),
        ([plain], of_another_tensor),
        ([torch.ones(2, requires_grad=True)], waiting_for_a_root(0)),
        ([plain], None),
        ([plain, plain], waiting_for_a_root(0)),
        (plain, waiting_for_a_root(0)),
    ):
        assert broadcast(tensors, options) is False, tensors
    for outputs, inputs, options in (
        ([into], [plain.t()], waiting_for_all()),
        ([[into[0].t(), into[1]]], [plain], waiting_for_all()),
        ([[into[0], into[1].clone().requires_grad_()]], [plain], waiting_for_all()),
        ([[into[0], into[1].flatten()]], [plain], waiting_for_all()),
        ([into], [plain], asynchronous),
        ([into], [plain], None),
        ([into, into], [plain], waiting_for_all()),
        ([tuple(into)], [plain], waiting_for_all()),
        (into, plain, waiting_for_all()),
    ):
        assert all_gather(outputs, inputs, options) is False, (outputs, inputs)
    # An option beside the options is an error, and is not left out.
    for call in (lambda: group.broadcast([plain], waiting_for_a_root(0), root=1), lambda: group.allreduce([plain], waiting(), op=dist.ReduceOp.MAX)):
        with pytest.raises(TypeError):
            call()
    assert same(plain, filled(rank, torch.float32))
    with pytest.raises(ValueError, match="a list of 3, and the group has 2 ranks"):
        dist.all_gather([torch.empty_like(plain)] * 3, plain)


@needs_async_op
def test_tensors_that_need_no_preparation_are_moved_at_once(ranks):
    ranks(2, moved_as_they_are)


def averages_of_integers(rank, world):
    """The quotients of sums, towards zero, as NCCL has them; no sum overflows, as NCCL's of int64 may."""
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64):
        most = torch.iinfo(dtype).max
        least = -7 if dtype.is_signed else 0
        values = torch.tensor([[most, least], [rank, 10 + rank]], dtype=torch.int64).to(dtype)
        ranks = range(world)
        expected = [[most, least], [int(sum(ranks) / world), int(sum(10 + r for r in ranks) / world)]]
        tensor = values.clone()
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        assert tensor.tolist() == expected, dtype
        turned = values.clone().t()
        dist.all_reduce(turned, dist.ReduceOp.AVG, async_op=True).get_future().wait()
        assert turned.t().tolist() == expected, dtype
        root = values.clone()
        dist.reduce(root, 1, dist.ReduceOp.AVG)
        assert root.tolist() == (expected if rank == 1 else values.tolist()), dtype
        part = torch.zeros(2, dtype=dtype)
        with pytest.raises(TypeError, match="not reduced into an output"):
            dist.reduce_scatter_tensor(part, values[1].repeat(world, 1).double(), dist.ReduceOp.AVG)
        dist.reduce_scatter_tensor(part, values[1].repeat(world, 1), dist.ReduceOp.AVG)
        assert part.tolist() == expected[1], dtype
        dist.reduce_scatter(part.zero_(), [values[1]] * world, dist.ReduceOp.AVG)
        assert part.tolist() == expected[1], dtype
    # The shapes in errors are the program's.
    with pytest.raises(ValueError, match=rf"and not \(3, {2 * world}\): its elements"):
        dist.reduce_scatter_tensor(torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2 * world, dtype=torch.int64), dist.ReduceOp.AVG)
    # Of one sign only, so that rounding shows.
    tensor = torch.tensor([-1 if rank == 0 else 0])
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    assert tensor.item() == 0


def marked(rank, world):
    """Tensors that are conjugated or negated only when they are read, in every place where a call takes one."""
    group, ranks = dist.group.WORLD, range(world)
    for mark, type in ((torch.Tensor.conj, torch.complex64), (torch.Tensor._neg_view, torch.float32)):
        shown = lambda *numbers: mark(torch.tensor(numbers).to(type) * (1j if type.is_complex else 1))  # noqa: E731

        def holds(tensor, *numbers):
            assert (tensor.is_conj() or tensor.is_neg()) and torch.equal(tensor.resolve_conj().resolve_neg(), shown(*numbers).clone()), (
                tensor,
                numbers,
            )

        total = shown(rank, 1)
        group.allreduce([total]).wait()
        holds(total, sum(ranks), world)
        one = shown(rank, 2)
        group.broadcast(one, 1).wait()
        holds(one, 1, 2)
        # What is sent is what the tensor shows, also to one without a mark.
        plain = torch.full((2,), float(rank)).to(type)
        group.broadcast(shown(1, 2) if rank == 0 else plain, 0).wait()
        assert rank == 0 or torch.equal(plain, shown(1, 2).clone())
        gathered = [shown(7) for _ in ranks]
        group.allgather([gathered], [shown(rank)]).wait()
        for r in ranks:
            holds(gathered[r], r)
        into = shown(*[7] * world)
        group.all_gather_into_tensor(into, shown(rank)).wait()
        holds(into, *ranks)
        part = shown(7)
        group.reduce_scatter_tensor(part, shown(*ranks)).wait()
        holds(part, rank * world)
        group.alltoall_base(into, shown(*[rank] * world)).wait()
        holds(into, *ranks)
        group.alltoall([mark(one) for one in gathered], [shown(10 * rank + r) for r in ranks]).wait()
        assert all(torch.equal(mark(gathered[r]).clone(), shown(10 * r + rank).clone()) for r in ranks)
        received = shown(7, 7)
        works = [group.send([shown(rank, 3)], (rank + 1) % world, 0), group.recv([received], (rank - 1) % world, 0)]
        for work in works:
            work.wait()
        holds(received, (rank - 1) % world, 3)


def moves(rank, world):
    for dtype in MOVED:
        tensor = filled(rank, dtype)
        dist.broadcast(tensor, 1)
        assert same(tensor, filled(1, dtype)), dtype

        gathered = [torch.empty(3, 5, dtype=dtype) for _ in range(world)]
        dist.all_gather(gathered, filled(rank, dtype))
        assert all(same(tensor, filled(r, dtype)) for r, tensor in enumerate(gathered)), dtype

        whole = torch.empty(3 * world, 5, dtype=dtype)
        dist.all_gather_into_tensor(whole, filled(rank, dtype))
        assert same(whole, torch.cat([filled(r, dtype).view(torch.uint8) for r in range(world)]).view(dtype))

        outputs = [torch.empty(3, 5, dtype=dtype) for _ in range(world)] if rank == 0 else None
        dist.gather(filled(rank, dtype), outputs, 0)
        assert rank or all(same(tensor, filled(r, dtype)) for r, tensor in enumerate(outputs))

        inputs = [filled(10 + r, dtype) for r in range(world)] if rank == 1 else None
        output = torch.empty(3, 5, dtype=dtype)
        dist.scatter(output, inputs, 1)
        assert same(output, filled(10 + rank, dtype))

        output = [torch.empty(3, 5, dtype=dtype) for _ in range(world)]
        dist.all_to_all(output, [filled(10 * rank + r, dtype) for r in range(world)])
        assert all(same(tensor, filled(10 * r + rank, dtype)) for r, tensor in enumerate(output))

        if rank == 0:
            dist.send(filled(7, dtype), 1)
        elif rank == 1:
            received = torch.empty(3, 5, dtype=dtype)
            dist.recv(received, 0)
            assert same(received, filled(7, dtype))


def scatters(rank, world):
    inputs = [filled(r + rank, torch.float64) for r in range(world)]
    expected = sum(filled(rank + r, torch.float64) for r in range(world))
    output = torch.empty(3, 5, dtype=torch.float64)
    dist.reduce_scatter(output, inputs)
    assert same(output, expected)
    output = torch.empty(3, 5, dtype=torch.float64)
    dist.reduce_scatter_tensor(output, torch.cat(inputs))
    assert same(output, expected)
    # A length of its own for each rank.
    uneven = [torch.full((r + 1,), float(rank)) for r in range(world)]
    output = torch.empty(rank + 1)
    dist.reduce_scatter(output, uneven)
    assert output.tolist() == [sum(range(world))] * (rank + 1)
    gathered = [torch.empty(r + 1) for r in range(world)]
    dist.all_gather(gathered, torch.full((rank + 1,), float(rank)))
    assert [tensor.tolist() for tensor in gathered] == [[float(r)] * (r + 1) for r in range(world)]


def exchanges(rank, world):
    for dtype in (torch.float32, torch.int16, torch.complex64):
        # Rank r sends r + s + 1 rows to rank s.
        sent = [rank + r + 1 for r in range(world)]
        given = torch.cat([torch.full((rank + r + 1, 2), 10 * rank + r) for r in range(world)]).to(dtype)
        output = torch.empty(sum(sent), 2, dtype=dtype)
        dist.all_to_all_single(output, given, sent, sent)
        assert same(output, torch.cat([torch.full((rank + r + 1, 2), 10 * r + rank) for r in range(world)]).to(dtype))
    output = torch.empty(world)
    dist.all_to_all_single(output, torch.arange(world) + 10.0 * rank)
    assert output.tolist() == [10.0 * r + rank for r in range(world)]
    with pytest.raises(ValueError, match="add up to"):
        dist.all_to_all_single(torch.empty(4), torch.empty(4), [1] * world, [4] + [0] * (world - 1))
    # An int16 is two bytes: they could be shared, and the element not.
    for shape, dtype in (((world + 1,), torch.int16), ((world + 1,), torch.complex64), ((world + 1, world), torch.float32)):
        with pytest.raises(ValueError, match=f"{world} ranks cannot have equal parts of the {world + 1} rows"):
            dist.all_to_all_single(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))
    # To collectives these are bytes, and as many on both sides.
    for output, given in (
        (torch.zeros(4 * world, dtype=torch.int16), torch.zeros(8, dtype=torch.uint8)),
        (torch.zeros(4 * world, dtype=torch.float8_e4m3fn), torch.zeros(4, dtype=torch.uint8)),
    ):
        with pytest.raises(TypeError, match="must have the same type"):
            dist.all_gather_into_tensor(output, given)


def kinds(rank, world):
    matrix = filled(rank, torch.float32, (4, 6))
    total = sum(filled(r, torch.float32, (4, 6)) for r in range(world))
    transposed = matrix.clone().t()
    dist.all_reduce(transposed)
    assert same(transposed, total.t()) and not transposed.is_contiguous()
    column = matrix.clone()
    dist.all_reduce(column[:, 1])
    assert same(column[:, 1], total[:, 1]) and same(column[:, 0], matrix[:, 0])
    work = dist.all_reduce(column[:, 2], async_op=True)
    work.wait()
    assert same(column[:, 2], total[:, 2])
    image = filled(rank, torch.float32, (2, 3, 4, 4)).to(memory_format=torch.channels_last)
    dist.broadcast(image, 0)
    assert same(image, filled(0, torch.float32, (2, 3, 4, 4)))
    for empty in (torch.empty(0), torch.empty(3, 0)):
        dist.all_reduce(empty)
        dist.broadcast(empty, 0)
        dist.all_gather([torch.empty_like(empty) for _ in range(world)], empty)
        dist.all_to_all_single(torch.empty_like(empty), empty)
    number = torch.tensor(float(rank))
    dist.all_reduce(number)
    assert number.item() == sum(range(world))
    leaf = torch.full((3,), float(rank), requires_grad=True)
    dist.all_reduce(leaf)
    assert leaf.tolist() == [float(sum(range(world)))] * 3 and leaf.requires_grad
    conjugated = torch.full((2,), complex(rank, 1.0)).conj()
    # `dist.all_reduce` itself refuses such a tensor.
    dist.group.WORLD.allreduce([conjugated]).wait()
    assert conjugated.tolist() == [complex(sum(range(world)), -world)] * 2
    marked(rank, world)
    # The input is a part of the output.
    whole = torch.zeros(world, 3)
    whole[rank] = rank + 1.0
    dist.all_gather_into_tensor(whole, whole[rank])
    assert whole.tolist() == [[r + 1.0] * 3 for r in range(world)]
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank, "text": "é" * rank})
    assert objects == [{"rank": r, "text": "é" * r} for r in range(world)]
    several = [None, None] if rank else ["a", {"b": 2}]
    dist.broadcast_object_list(several, 0)
    assert several == ["a", {"b": 2}]
    if torch.cuda.is_available():
        with pytest.raises(TypeError, match="on the CPU"):
            dist.all_reduce(torch.ones(1, device="cuda"))


def unaligned(rank):
    def odd(value, dtype):
        """Elements that do not lie at multiples of their length."""
        tensor = torch.frombuffer(bytearray(3 * dtype.itemsize + 1), dtype=dtype, offset=1).fill_(value)
        assert tensor.data_ptr() % dtype.itemsize
        return tensor

    for dtype in (torch.float32, torch.int64, torch.int16):
        tensor = odd(rank + 1, dtype)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [3] * 3
        dist.all_reduce(tensor, async_op=True).wait()
        assert tensor.tolist() == [6] * 3
        gathered = [odd(0, dtype), odd(0, dtype)]
        dist.all_gather(gathered, odd(rank, dtype))
        assert [each.tolist() for each in gathered] == [[0] * 3, [1] * 3]
        if rank == 0:
            dist.send(odd(7, dtype), 1)
        else:
            dist.recv(tensor, 0)
            assert tensor.tolist() == [7] * 3


def test_elements_need_not_lie_at_multiples_of_their_length(ranks):
    ranks(2, unaligned)


class Hidden(torch.Tensor):
    """A tensor that only PyTorch's dispatcher can read."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), named=None):
        raise NotImplementedError(str(function))


def strange():
    """Tensors that have not their elements in memory of their own, by what an error says of each."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from torch.distributed.tensor import Shard, distribute_tensor
    except ImportError:
        from torch.distributed._tensor import Shard, distribute_tensor
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with FakeTensorMode():
        fake = torch.ones(4)
    return {
        r"DTensor has parts on several ranks.*to_local\(\).*full_tensor\(\)": distribute_tensor(torch.ones(4 * dist.get_world_size()), mesh, [Shard(0)]),
        r"Hidden has no memory of its own": Hidden(torch.ones(4)),
        r"FakeTensor has no elements": fake,
        r"nested tensor.*unbind\(\)": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        r"quantized tensor.*dequantize\(\)": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8),
        r"on meta has no elements": torch.ones(4, device="meta"),
        r"is all zeros, and has no memory: .*clone\(\)": torch._efficientzerotensor(4),
    }


def wrappers(rank, world):
    """In every place where a call takes a tensor; PyTorch's own error names neither what it is nor a remedy."""
    group = dist.group.WORLD
    for said, tensor in strange().items():
        many = [torch.empty(4) for _ in range(world)]
        for call in (
            lambda: dist.all_reduce(tensor),
            lambda: group.allreduce([tensor]),
            lambda: group.reduce([tensor], 0),
            lambda: group.broadcast([tensor], 0),
            lambda: group.allgather([many], [tensor]),
            lambda: group.allgather([[tensor] * world], [many[0]]),
            lambda: group.all_gather_single(torch.empty(4 * world), tensor),
            lambda: group.alltoall([tensor] * world, many),
            lambda: group.send([tensor], (rank + 1) % world, 0),
            lambda: group.recv([tensor], (rank + 1) % world, 0),
        ):
            with pytest.raises(TypeError, match=said):
                call()
    # Nothing has been sent, and the group goes on.
    number = torch.ones(1)
    dist.all_reduce(number)
    assert number.item() == world


def sparse(rank, world):
    indices = torch.tensor([[0, rank + 1], [1, 0]])
    tensor = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0]), (world + 1, 2))
    dist.all_reduce(tensor)
    expected = torch.zeros(world + 1, 2)
    expected[0, 1] = world
    expected[1:, 0] = 2.0
    assert torch.equal(tensor.to_dense(), expected)
    with pytest.raises(ValueError, match="sparse tensors can only be summed"):
        dist.all_reduce(torch.eye(2).to_sparse(), dist.ReduceOp.MAX)
    with pytest.raises(ValueError, match=r"the sparse tensors have different shapes: \[\[2, 2\], \[3, 3\]"):
        dist.all_reduce(torch.eye(2 + rank).to_sparse())


def coalesced(rank, world):
    tensors = [filled(rank, torch.float32), filled(rank, torch.float32, (2,)).t(), torch.empty(0)]
    opts = dist.AllreduceCoalescedOptions()
    dist.group.WORLD.allreduce_coalesced(tensors, opts).wait()
    assert same(tensors[0], sum(filled(r, torch.float32) for r in range(world)))
    with dist._coalescing_manager():
        for tensor in tensors[:2]:
            dist.all_reduce(tensor)
    assert same(tensors[0], world * sum(filled(r, torch.float32) for r in range(world)))
    outputs = [torch.empty(world, 2), torch.empty(world, 3)]
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_gather_into_tensor(outputs[0], torch.full((1, 2), float(rank)))
        dist.all_gather_into_tensor(outputs[1], torch.full((1, 3), float(rank)))
    manager.wait()
    assert outputs[1].tolist() == [[float(r)] * 3 for r in range(world)]


def overlapping(rank, world):
    """Tensors of one call that share memory: each is combined as it was, and written back in their order."""
    tensor = torch.arange(6.0)
    dist.group.WORLD.allreduce_coalesced([tensor, tensor[1:4], tensor], dist.AllreduceCoalescedOptions()).wait()
    assert tensor.tolist() == [world * number for number in range(6)]
    # Averages of integers are sums that are divided: once.
    average = dist.AllreduceCoalescedOptions()
    average.reduceOp = dist.ReduceOp.AVG
    for dtype in (torch.int64, torch.int32):
        tensor = torch.arange(6, dtype=dtype) * 12
        dist.group.WORLD.allreduce_coalesced([tensor, tensor[1:4], tensor], average).wait()
        assert tensor.tolist() == [12 * number for number in range(6)], dtype


def swapped(rank, world):
    """A tensor that is given other memory while an operation on it is in flight."""
    store = dist.distributed_c10d._get_default_store()
    if rank > 0:
        store.wait(["swapped"])
        dist.all_reduce(torch.ones(1000))
        return
    array = numpy.ones(1000, dtype="f4")
    tensor, memory = torch.from_numpy(array), weakref.ref(array)
    work = dist.all_reduce(tensor, async_op=True)
    del array
    tensor.data = torch.zeros(1)
    gc.collect()
    result = memory()
    store.set("swapped", "1")
    work.wait()
    assert result is not None and (result == world).all() and tensor.tolist() == [0.0]


def weighted(rank, world):
    from torch.distributed import _make_nccl_premul_sum

    tensor = torch.ones(4)
    dist.all_reduce(tensor, _make_nccl_premul_sum(float(rank + 1)))
    assert tensor.tolist() == [world * (world + 1) / 2] * 4


def into_one(rank, world):
    """A gather into one tensor has the ranks' rows below each other, or a dimension more, the first, or all elements in one row."""
    group, options = dist.group.WORLD, c10d.GatherOptions()
    options.rootRank = 1
    for shape in ((2, 3), (3,), (), (0, 2)):
        stacked = torch.stack([torch.full(shape, float(r)) for r in range(world)])
        below = [(world * shape[0], *shape[1:])] if shape else []
        for whole in [tuple(stacked.shape), (stacked.numel(),), *below]:
            output = torch.full(whole, -1.0) if rank == 1 else torch.empty(0)
            group.gather_single(output, stacked[rank], options).wait()
            assert rank != 1 or torch.equal(output, stacked.reshape(whole)), (whole, shape)
    turned = torch.zeros(3, 2 * world).t()
    group.gather_single(turned, torch.full((2, 3), float(rank)), options).wait()
    assert rank != 1 or turned[:, 0].tolist() == [float(r) for r in range(world) for _ in range(2)]
    if rank == 1:
        # The root refuses these by itself: nothing is sent.
        for whole, match in (((5,), f"must be {world} times as long"), ((2, 3 * world), "its elements would be in other places")):
            with pytest.raises(ValueError, match=match):
                group.gather_single(torch.zeros(whole), torch.zeros(2, 3), options)
    if hasattr(dist, "gather_single"):
        output = torch.zeros(world, 2, 3) if rank == 0 else None
        dist.gather_single(torch.full((2, 3), float(rank)), output)
        assert rank or output.mean(dim=(1, 2)).tolist() == [float(r) for r in range(world)]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "body", [reduces, averages_of_integers, moves, scatters, exchanges, kinds, wrappers, sparse, coalesced, overlapping, swapped, into_one]
)
def test_results(ranks, world, body):
    ranks(world, body, world)


def roots_read(rank):
    """What is only read is left as it is: autograd would refuse what it has saved, and a tensor may not be writable at all."""
    turned, expanded = torch.ones(2, 3).t(), torch.ones(1).expand(4)
    versions = turned._version, expanded._version
    if rank == 0:
        dist.broadcast(turned, 0)
        dist.broadcast(expanded, 0)
    else:
        tensors = torch.zeros(3, 2), torch.zeros(4)
        for tensor in tensors:
            dist.broadcast(tensor, 0)
        assert all(bool((tensor == 1).all()) for tensor in tensors)
        dist.reduce(turned, 0)
        dist.reduce(expanded, 0)
        whole = torch.tensor([3], dtype=torch.int64)
        dist.reduce(whole, 0, dist.ReduceOp.AVG)
        assert whole._version == 0
    assert (turned._version, expanded._version) == versions
    if rank == 0:
        for shape in ((3, 2), (4,)):
            total = torch.ones(shape)
            dist.reduce(total, 0)
            assert bool((total == 2).all())
        whole = torch.tensor([2], dtype=torch.int64)
        dist.reduce(whole, 0, dist.ReduceOp.AVG)
        assert whole.tolist() == [2]


def test_what_is_only_read_is_not_written(ranks):
    ranks(2, roots_read)


@pytest.mark.skipif(
    not hasattr(dist, "_make_nccl_premul_sum"), reason="only a PyTorch built with NCCL can make a premultiplied sum"
)
def test_premultiplied_sum(ranks):
    ranks(2, weighted, 2)


def big(rank, world):
    for elements in (1, 1000, 100_000, 3_000_001):
        tensor = torch.full((elements,), float(rank + 1))
        works = [dist.all_reduce(tensor, async_op=True), dist.barrier(async_op=True)]
        other = torch.full((elements,), rank, dtype=torch.int64)
        dist.all_reduce(other)
        for work in works:
            work.wait()
        assert (tensor == world * (world + 1) / 2).all() and (other == sum(range(world))).all()


def test_sizes_and_an_order_of_waiting_and_other_calls(ranks):
    ranks(2, big, 2)


def unfinished(rank):
    """Results of functional collectives, for which nobody has waited."""

    def result(shape=(2, 2)):
        # The other rank comes late: without a wait there would be no result yet.
        if rank == 1:
            time.sleep(0.05)
        made = functional.all_reduce(torch.full(shape, rank + 1.0), "sum", dist.group.WORLD)
        assert isinstance(made, functional.AsyncCollectiveTensor)
        return made

    def check(name, tensor, expected):
        assert tensor.tolist() == torch.full(tensor.shape, expected).tolist(), (name, tensor)

    into = torch.zeros(2, 2)
    for name, call in {
        "all_reduce": dist.all_reduce, "broadcast": lambda tensor: dist.broadcast(tensor, 0),
        "reduce": lambda tensor: dist.reduce(tensor, 0),
        "async": lambda tensor: dist.all_reduce(tensor, async_op=True).wait(),
    }.items():
        tensor = result()
        call(tensor)
        check(name, tensor, 3.0 if name == "broadcast" or name == "reduce" and rank == 1 else 6.0)
    # A view, and one that is not contiguous, whose result is copied back.
    tensor = result((4, 2))
    dist.all_reduce(tensor[1:3])
    dist.all_reduce(tensor.t())
    assert tensor.tolist() == [[6.0] * 2, [12.0] * 2, [12.0] * 2, [6.0] * 2]
    for name, call in {
        "all_gather": lambda tensor: dist.all_gather([torch.zeros(2, 2), into], tensor),
        "all_gather_into_tensor": lambda tensor: dist.all_gather_into_tensor(torch.cat([into, into]), tensor),
        "all_to_all_single": lambda tensor: dist.all_to_all_single(into, tensor),
        "gather": lambda tensor: dist.gather(tensor, [torch.zeros(2, 2), into] if rank == 0 else None),
        "scatter": lambda tensor: dist.scatter(into, [tensor, tensor] if rank == 0 else None),
    }.items():
        into.fill_(3.0 if name == "all_gather_into_tensor" or name == "gather" and rank == 1 else 0.0)
        call(result())
        check(name, into, 3.0)
    # Where something is received.
    tensors = [result(), result()]
    dist.all_gather(tensors, into.fill_(rank + 7.0))
    check("to", tensors[0], 7.0)
    check("to", tensors[1], 8.0)
    tensor = result()
    if rank == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)
    check("message", tensor, 3.0)
    tensor, own = result(), into.fill_(5.0)
    if rank == 0:
        dist.recv(tensor, 1)
        check("recv", tensor, 5.0)
    else:
        dist.send(own, 0)


def test_results_of_functional_collectives_are_waited_for(ranks):
    ranks(2, unfinished)


def unfinished_elsewhere(rank, path, port):
    dist.init_process_group("phalanx", init_method=f"file://{path}/store", rank=rank, world_size=2)
    arrays = phalanx_torch.init(f"file://{path}/arrays", rank=rank, world_size=2)
    tensor = functional.all_reduce(torch.full((3,), rank + 1.0), "sum", dist.group.WORLD)
    arrays.all_reduce(tensor)
    assert tensor.tolist() == [6.0] * 3
    arrays.close()
    environment(rank, 2, port)
    hvd.init()
    for call in (hvd.allreduce, hvd.allreduce_):
        tensor = functional.all_reduce(torch.full((3,), rank + 1.0), "sum", dist.group.WORLD)
        assert call(tensor, op=hvd.Sum).tolist() == [6.0] * 3
        assert tensor.tolist() == [6.0 if call is hvd.allreduce_ else 3.0] * 3
    tensor = functional.all_reduce(torch.full((3,), rank + 1.0), "sum", dist.group.WORLD)
    tensor.mul_(rank + 1)
    hvd.broadcast_(tensor, 1)
    assert tensor.tolist() == [6.0] * 3
    for said, tensor in strange().items():
        for call in (hvd.allreduce, hvd.allreduce_, hvd.broadcast, hvd.alltoall):
            with pytest.raises(TypeError, match=said):
                call(tensor, root_rank=0) if call is hvd.broadcast else call(tensor)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0
    hvd.shutdown()
    dist.destroy_process_group()


def test_results_of_functional_collectives_are_waited_for_in_arrays_and_horovods_operations(tmp_path):
    processes(2, unfinished_elsewhere, tmp_path, free_port())
