"""Times all_reduce on NumPy's arrays, in place, through mpi4py or phalanx_torch, and prints a line of JSON for each size.

    mpirun -n 2 python arrays.py mpi4py 4 65536 1048576
    phalanx run -np 2 python arrays.py phalanx 4 65536 1048576
"""

import sys
from collections.abc import Callable

import numpy

from clock import measure, tell


class Mpi:
    def __init__(self) -> None:
        from mpi4py import MPI

        self._world, self._in_place, self._max = MPI.COMM_WORLD, MPI.IN_PLACE, MPI.MAX
        self.rank, self.ranks = self._world.Get_rank(), self._world.Get_size()

    def call(self, data: numpy.ndarray) -> Callable[[], None]:
        world, in_place = self._world, self._in_place
        return lambda: world.Allreduce(in_place, data)

    def longest(self, seconds: float) -> float:
        return self._world.allreduce(seconds, op=self._max)


class Phalanx:
    def __init__(self) -> None:
        import phalanx_torch

        self._group = phalanx_torch.init()
        self.rank, self.ranks = self._group.rank, self._group.world_size

    def call(self, data: numpy.ndarray) -> Callable[[], None]:
        group = self._group
        return lambda: group.all_reduce(data)

    def longest(self, seconds: float) -> float:
        most = numpy.array([seconds])
        self._group.all_reduce(most, "max")
        return float(most[0])


def main() -> None:
    world = {"mpi4py": Mpi, "phalanx": Phalanx}[sys.argv[1]]()
    for size in map(int, sys.argv[2:]):
        base = numpy.arange(size // 4, dtype=numpy.float32) % 61
        data, total = base + world.rank, base * world.ranks + world.ranks * (world.ranks - 1) / 2
        call = world.call(data)
        call()
        # The largest number of wrong elements on any rank.
        wrong = int(world.longest(float((data != total).sum())))
        # Sums of zeros stay zeros, however often they are summed.
        data[:] = 0
        seconds = measure(call, world.longest)
        if world.rank == 0:
            tell(size, seconds, wrong)


if __name__ == "__main__":
    main()
