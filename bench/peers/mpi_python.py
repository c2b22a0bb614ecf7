"""Times MPI_Allreduce on NumPy's arrays through mpi4py, and prints a line of JSON for each size.

    mpirun -n 2 python mpi_python.py 4 65536 1048576
"""

import sys

import numpy
from mpi4py import MPI

from clock import measure, tell


def main() -> None:
    world = MPI.COMM_WORLD
    rank, ranks = world.Get_rank(), world.Get_size()
    for size in map(int, sys.argv[1:]):
        base = numpy.arange(size // 4, dtype=numpy.float32) % 61
        data, total = base + rank, base * ranks + ranks * (ranks - 1) / 2
        world.Allreduce(MPI.IN_PLACE, data)
        wrong = world.allreduce(int((data != total).sum()))
        # Sums of zeros stay zeros, however often they are summed.
        data[:] = 0
        seconds = measure(
            lambda data=data: world.Allreduce(MPI.IN_PLACE, data), lambda seconds: world.allreduce(seconds, op=MPI.MAX)
        )
        if rank == 0:
            tell(size, seconds, wrong)


if __name__ == "__main__":
    main()
