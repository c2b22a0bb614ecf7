"""The API without PyTorch."""

import array
import contextlib
import math
import mmap
import os
import subprocess
import sys
import time
import types

import numpy
import pytest
import torch
from conftest import free_port, processes

import phalanx_torch


def rank_of_arrays(rank, world, port):
    with phalanx_torch.init(f"tcp://127.0.0.1:{port}", rank, world, timeout=60) as group:
        assert (group.rank, group.world_size, group.local_rank) == (rank, world, rank)
        for dtype in ("f2", "f4", "f8", "i1", "i4", "i8", "u1"):
            array = numpy.arange(5).astype(dtype) + numpy.dtype(dtype).type(rank)
            group.all_reduce(array)
            assert array.tolist() == (world * numpy.arange(5) + sum(range(world))).tolist(), dtype
        flags = numpy.array([rank == 0, True])
        group.all_reduce(flags, "min")
        assert flags.tolist() == [False, True]
        array = numpy.full((2, 3), float(rank))
        group.broadcast(array, root=1)
        assert array.tolist() == [[1.0] * 3] * 2
        gathered = numpy.zeros((world, 3))
        group.all_gather(gathered, numpy.full(3, float(rank)))
        assert gathered[:, 0].tolist() == list(range(world))
        part = numpy.zeros(2, dtype="i4")
        group.reduce_scatter(part, numpy.arange(2 * world, dtype="i4"))
        assert part.tolist() == [world * 2 * rank, world * (2 * rank + 1)]
        output = numpy.zeros(world)
        group.all_to_all(output, numpy.arange(world) + 10.0 * rank)
        assert output.tolist() == [10.0 * r + rank for r in range(world)]
        stacked = numpy.zeros((world, 2, 3))
        group.all_gather(stacked, numpy.full((2, 3), float(rank)))
        assert stacked[:, 1, 2].tolist() == list(range(world))
        beside, own = numpy.zeros((2, 3 * world)), numpy.zeros((2, 3))
        for call in (lambda: group.all_gather(beside, own), lambda: group.reduce_scatter(own, beside)):
            with pytest.raises(ValueError, match=r"in other places than this shape says. Give it one of those shapes by reshape\(\)"):
                call()
        with pytest.raises(ValueError, match=f"equal parts of the {world + 1} rows of the output"):
            group.all_to_all(numpy.zeros((world + 1, world)), numpy.zeros((world, world + 1)))
        # Their bytes could be shared, and the elements not.
        for dtype in ("i2", "c8", "f4"):
            odd = numpy.zeros(world + 1, dtype=dtype)
            with pytest.raises(ValueError, match="equal parts"):
                group.all_to_all(odd, odd.copy())
        with pytest.raises(TypeError, match="must have the same type"):
            group.all_gather(numpy.zeros(world, dtype="i2"), numpy.zeros(2, dtype="u1"))
        if rank == 0:
            group.send(numpy.arange(3), 1, tag=2)
        elif rank == 1:
            array = numpy.zeros(3, dtype="i8")
            assert group.recv(array, tag=2) == 0 and array.tolist() == [0, 1, 2]
        with pytest.raises(ValueError, match="not contiguous"):
            group.all_reduce(numpy.zeros((4, 4))[:, 0])
        fixed = numpy.zeros(3)
        fixed.flags.writeable = False
        with pytest.raises(ValueError, match="read-only: numpy.array makes a copy"):
            group.all_reduce(fixed)
        # Of a broadcast only the others' are written.
        fixed = numpy.full(3, 7.0 if rank == 0 else 0.0)
        fixed.flags.writeable = rank != 0
        group.broadcast(fixed, root=0)
        assert fixed.tolist() == [7.0] * 3
        fixed.flags.writeable = rank == 0
        if rank != 0:
            with pytest.raises(ValueError, match="read-only"):
                group.broadcast(fixed, root=0)
        with pytest.raises(TypeError, match="scalar of NumPy cannot be written"):
            group.all_reduce(numpy.zeros(3).mean())
        with pytest.raises(TypeError, match="cannot be exchanged"):
            group.all_reduce(numpy.zeros(3, dtype=">f4"))
        with pytest.raises(ValueError, match="is none of"):
            group.all_reduce(numpy.zeros(3), "mean")
        for kind in ("S3", "U2", "O", "V2", "g", "G", "M8[s]", "m8[s]", "f4,i4"):
            with pytest.raises(TypeError, match="cannot be exchanged"):
                group.all_reduce(numpy.zeros(4, dtype=kind))
        # Another's description must be written as NumPy's is.
        for typestr in ("|f4", ">f4", "<f04", "<f+4", "<u1", "|V2", "f4", "<", ""):
            described = {"version": 3, "shape": (3,), "typestr": typestr, "data": (numpy.zeros(3).ctypes.data, False)}
            with pytest.raises(TypeError, match="cannot be exchanged"):
                group.all_reduce(types.SimpleNamespace(__array_interface__=described))
        # A scalar of NumPy can be read.
        gathered = numpy.zeros(world)
        group.all_gather(gathered, numpy.float64(rank))
        assert gathered.tolist() == list(range(world))
        # Another's may have strides: those of elements one after the other, and any of a dimension of one element, or of no elements.
        for shape, strides, is_usual in (
            ((), (), True),
            ((3,), (8,), True),
            ((3,), (-8,), False),
            ((3,), (16,), False),
            ((3,), (), False),
            ((3, 2), (16, 8), True),
            ((3, 2), (8, 24), False),
            ((1, 3), (0, 8), True),
            ((3, 1), (8, 99), True),
            ((0, 3), (1, 1), True),
        ):
            memory = numpy.full(6, float(rank))
            described = {"version": 3, "shape": shape, "typestr": "<f8", "data": (memory.ctypes.data, False), "strides": strides}
            described = types.SimpleNamespace(__array_interface__=described)
            with contextlib.nullcontext() if is_usual else pytest.raises(ValueError, match="not contiguous"):
                group.all_reduce(described)
                reached = math.prod(shape)
                assert memory.tolist() == [world * (world - 1) / 2] * reached + [rank] * (6 - reached)
        # Without dimensions, without elements, by columns, views of others, of a subclass.
        scalar = numpy.array(rank + 1.0)
        group.all_reduce(scalar)
        assert scalar == world * (world + 1) / 2
        for empty in (numpy.zeros(0), numpy.zeros((3, 0)), numpy.zeros((0, 3))):
            group.all_reduce(empty)
        with pytest.raises(ValueError, match="not contiguous"):
            group.all_reduce(numpy.zeros((2, 3), order="F"))
        whole = numpy.zeros((4, 3))
        whole[1:3] = rank
        group.all_reduce(whole[1:3])
        assert whole.tolist() == [[0.0] * 3] + [[world * (world - 1) / 2] * 3] * 2 + [[0.0] * 3]
        with pytest.raises(ValueError, match=r"not aligned as f64 must be: exchange a copy, numpy.array\(array\)"):
            group.all_reduce(numpy.zeros(9, dtype="u1")[1:].view("f8"))
        derived = numpy.full(2, float(rank)).view(numpy.recarray)
        group.all_reduce(derived, "max")
        assert derived.tolist() == [world - 1.0] * 2
        pairs = numpy.full(2, rank + 1j)
        group.all_reduce(pairs)
        assert pairs.tolist() == [world * (world - 1) / 2 + 1j * world] * 2
        with pytest.raises(ValueError, match="summed and averaged"):
            group.all_reduce(pairs, "max")
        with pytest.raises(TypeError, match="only moved"):
            group.all_reduce(numpy.zeros(2, dtype="u4"))
        moved = numpy.full(2, rank, dtype="u4")
        group.broadcast(moved, root=1)
        assert moved.tolist() == [1, 1]
        group.barrier()


@pytest.mark.parametrize("world", [2, 3])
def test_arrays(world):
    processes(world, rank_of_arrays, world, free_port())


class ByDlpack:
    """An array of a library that has DLPack, and nothing else that NumPy or this package knows."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


class Elsewhere(ByDlpack):
    """On a device whose library does not lend its memory to the CPU."""

    def __dlpack__(self, **options):
        raise BufferError("this array is on a GPU")


def rank_of_memory(rank, port):
    with phalanx_torch.init(f"tcp://127.0.0.1:{port}", rank, 2, timeout=60) as group:
        # The buffer protocol.
        numbers = array.array("d", [1.0, rank])
        group.all_reduce(numbers)
        assert numbers.tolist() == [2.0, 1.0]
        text = bytearray(b"rank " + str(rank).encode())
        group.broadcast(text, root=1)
        assert text == b"rank 1"
        with mmap.mmap(-1, 4096) as pages:
            # What is sent may be read-only.
            group.all_gather(memoryview(pages)[:4], bytes([rank, 7]))
            assert pages[:4] == bytes([0, 7, 1, 7])
        with pytest.raises(ValueError, match="read-only"):
            group.all_reduce(bytes(3))
        with pytest.raises(ValueError, match="not contiguous"):
            group.all_reduce(memoryview(bytearray(8))[::2])
        # A tensor's sizes do not change with its storage.
        for tensor, length in ((torch.zeros(4), 4), (torch.zeros(8)[4:], 28), (torch.zeros(4), 0)):
            tensor.untyped_storage().resize_(length)
            with pytest.raises(ValueError, match="storage of .* bytes does not hold them"):
                group.all_reduce(tensor)
        part = torch.arange(8.0)[4:]
        group.all_reduce(part)
        assert part.tolist() == [8.0, 10.0, 12.0, 14.0]
        # DLPack.
        tensor = torch.full((2, 3), rank + 1.0)
        group.all_reduce(ByDlpack(tensor), "avg")
        assert (tensor == 1.5).all()
        with pytest.raises(TypeError, match="by DLPack: this array is on a GPU"):
            group.all_reduce(Elsewhere(tensor))
        # Tensors of PyTorch, whose memory has their elements.
        with pytest.raises(ValueError, match=r"resolve_conj\(\)"):
            group.all_reduce(torch.ones(2, dtype=torch.complex64).conj())
        with pytest.raises(ValueError, match=r"resolve_neg\(\)"):
            group.broadcast(torch.ones(2)._neg_view())
        with pytest.raises(ValueError, match="only when it is read"):
            group.send(torch.ones(2)._neg_view(), 1 - rank)
        group.all_reduce(tensor, "max")
        assert (tensor == 1.5).all()
        with pytest.raises(TypeError, match=r"quantized tensor.*dequantize\(\)"):
            group.all_reduce(torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8))
        with pytest.raises(TypeError, match=r"torch.sparse_coo.*to_dense\(\)"):
            group.broadcast(torch.eye(2).to_sparse())
        # What is masked is not in the memory.
        masked = numpy.ma.masked_array([1.0, 2.0], mask=[True, False])
        with pytest.raises(TypeError, match=r"without its mask: give filled\(value\)"):
            group.all_reduce(masked)
        with pytest.raises(TypeError, match="without its mask"):
            group.send(masked, 1 - rank)
        group.all_reduce(masked.filled(0.0))
        for call in (lambda: group.send(tensor, 1 - rank, tag=-1), lambda: group.recv(tensor, 1 - rank, tag=-1), lambda: group.recv(tensor, tag=-1)):
            with pytest.raises(ValueError, match="Tag must be nonnegative; it is -1"):
                call()
        for call in (lambda: group.broadcast(tensor, -1), lambda: group.send(tensor, -1), lambda: group.recv(tensor, -1)):
            with pytest.raises(ValueError, match="rank -1 is not a rank of this group: ranks begin with 0"):
                call()
        # Neither.
        with pytest.raises(TypeError, match="list has neither .* nor DLPack nor a buffer"):
            group.all_reduce([1.0, 2.0])
        group.barrier()


def test_other_memory_than_numpy_s():
    processes(2, rank_of_memory, free_port())


def rank_of_types(rank, port):
    with phalanx_torch.init(f"tcp://127.0.0.1:{port}", rank, 2, timeout=60) as group:
        for dtype in ("i2", "u2", "u4", "u8", "c8", "c16"):
            moved = numpy.arange(3, dtype=dtype) + numpy.dtype(dtype).type(5 * rank)
            group.broadcast(moved, root=1)
            assert moved.tolist() == [5, 6, 7], dtype
        for dtype in ("c8", "c16"):
            total = numpy.array([1 + 2j * rank, rank], dtype=dtype)
            group.all_reduce(total)
            assert total.tolist() == [2 + 2j, 1], dtype
        with pytest.raises(TypeError, match="uint16 cannot be reduced, only moved"):
            group.all_reduce(numpy.zeros(3, dtype="u2"))
        with pytest.raises(ValueError, match="complex64 can be summed"):
            group.all_reduce(numpy.zeros(3, dtype="c8"), "max")
        with pytest.raises(TypeError, match="datetime64.* cannot be exchanged"):
            group.broadcast(numpy.zeros(3, dtype="M8[s]"))
        group.barrier()


def test_types_that_are_only_moved_or_summed():
    processes(2, rank_of_types, free_port())


def test_a_world_of_one_and_no_pytorch():
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import numpy, phalanx_torch\n"
        "group = phalanx_torch.init(); array = numpy.ones(3); group.all_reduce(array, 'avg')\n"
        "assert array.tolist() == [1, 1, 1] and not hasattr(phalanx_torch, 'ProcessGroup')\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60)


LAST_CALL = """
import atexit, numpy, phalanx_torch.arrays

def last():
    array = numpy.ones(3)
    group.all_reduce(array)
    print("the last sum:", array.tolist())

atexit.register(last)
# What this calls at the end comes before the program's own.
import multiprocessing.util
group = phalanx_torch.init()
"""


def test_a_program_may_use_a_group_until_its_own_end():
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    ended = subprocess.run([sys.executable, "-c", LAST_CALL], env=environment, check=True, capture_output=True, text=True, timeout=60)
    assert "the last sum: [1.0, 1.0, 1.0]" in ended.stdout, ended.stderr


def exits_within(rank, port, code, left):
    with pytest.raises(SystemExit):
        with phalanx_torch.init(f"tcp://127.0.0.1:{port}", rank, 2, timeout=60) as group:
            group.all_reduce(numpy.ones(1))
            if rank == 1:
                while not left.exists():
                    time.sleep(0.01)
                with pytest.raises(phalanx_torch.Error) as caught:
                    group.all_reduce(numpy.ones(1))
                assert caught.value.kind == ("aborted" if code else "peer_left"), caught.value
            sys.exit(code)
    left.touch()


@pytest.mark.parametrize("code", [None, 0, 3])
def test_a_rank_that_exits_well_within_a_group_leaves_it(code, tmp_path):
    processes(2, exits_within, free_port(), code, tmp_path / "left")


def without_an_end(rank, port, timeout):
    # Longer than any clock goes.
    with phalanx_torch.init(f"tcp://127.0.0.1:{port}", rank, 2, timeout=timeout) as group:
        array = numpy.full(3, float(rank))
        if rank == 0:
            group.send(array, 1)
        else:
            assert group.recv(array, 0) == 0 and array.tolist() == [0.0] * 3
        group.all_reduce(array)
        assert array.tolist() == [0.0] * 3


@pytest.mark.parametrize("timeout", [1e19, math.inf])
def test_a_timeout_may_be_longer_than_the_clock(timeout):
    processes(2, without_an_end, free_port(), timeout)
