"""The API without PyTorch."""

import os
import subprocess
import sys

import numpy
import pytest
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
        if rank == 0:
            group.send(numpy.arange(3), 1, tag=2)
        elif rank == 1:
            array = numpy.zeros(3, dtype="i8")
            assert group.recv(array, tag=2) == 0 and array.tolist() == [0, 1, 2]
        with pytest.raises(ValueError, match="not contiguous"):
            group.all_reduce(numpy.zeros((4, 4))[:, 0])
        fixed = numpy.zeros(3)
        fixed.flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            group.all_reduce(fixed)
        with pytest.raises(TypeError, match="cannot be exchanged"):
            group.all_reduce(numpy.zeros(3, dtype=">f4"))
        with pytest.raises(ValueError, match="is none of"):
            group.all_reduce(numpy.zeros(3), "mean")
        group.barrier()


@pytest.mark.parametrize("world", [2, 3])
def test_arrays(world):
    processes(world, rank_of_arrays, world, free_port())


def test_a_world_of_one_and_no_pytorch():
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import numpy, phalanx_torch\n"
        "group = phalanx_torch.init(); array = numpy.ones(3); group.all_reduce(array, 'avg')\n"
        "assert array.tolist() == [1, 1, 1] and not hasattr(phalanx_torch, 'ProcessGroup')\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60)
