"""Times all_reduce on NumPy's arrays, in place, through mpi4py or phalanx_torch, and prints a line of JSON for each size.

    mpirun -n 2 python arrays.py mpi4py 4 65536 1048576
    python arrays.py phalanx --ranks 2 4 65536 1048576
"""

import argparse
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "python" / "tests"))

import numpy

from clock import measure, tell
from ports import free_port


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
    def __init__(self, rank: int, ranks: int, port: int) -> None:
        import phalanx_torch

        self._group = phalanx_torch.init(f"tcp://127.0.0.1:{port}", rank, ranks)
        self.rank, self.ranks = rank, ranks

    def call(self, data: numpy.ndarray) -> Callable[[], None]:
        group = self._group
        return lambda: group.all_reduce(data)

    def longest(self, seconds: float) -> float:
        most = numpy.array([seconds])
        self._group.all_reduce(most, "max")
        return float(most[0])


def timed(world: Mpi | Phalanx, sizes: list[int]) -> None:
    for size in sizes:
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


def rank_of_phalanx(rank: int, ranks: int, port: int, sizes: list[int]) -> None:
    timed(Phalanx(rank, ranks, port), sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("by", choices=["mpi4py", "phalanx"])
    parser.add_argument("--ranks", type=int, help="for phalanx")
    parser.add_argument("sizes", type=int, nargs="+", metavar="BYTES")
    arguments = parser.parse_args()
    if arguments.by == "mpi4py":
        timed(Mpi(), arguments.sizes)
        return
    if not arguments.ranks:
        parser.error("phalanx needs --ranks")
    port = free_port()
    fresh = multiprocessing.get_context("spawn")
    each = [(rank, arguments.ranks, port, arguments.sizes) for rank in range(arguments.ranks)]
    ranks = [fresh.Process(target=rank_of_phalanx, args=arguments) for arguments in each]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(any(process.exitcode for process in ranks))


if __name__ == "__main__":
    main()
