"""MPI and our group in one process: mpi_beside.py first|last RANKS, where MPI is initialized before the group is made, or after it."""

import sys

import numpy

import phalanx_torch


def main():
    order, ranks = sys.argv[1], int(sys.argv[2])
    # The import calls MPI_Init.
    if order == "first":
        from mpi4py import MPI
    group = phalanx_torch.init()
    if order == "last":
        from mpi4py import MPI
    world = MPI.COMM_WORLD
    assert world.Get_size() == group.world_size == ranks, (world.Get_size(), group.world_size)
    assert world.Get_rank() == group.rank, (world.Get_rank(), group.rank)
    # In turn, so that each waits while the other's calls are under way on other ranks.
    for step in range(50):
        array = numpy.full(1000, float(group.rank + step))
        group.all_reduce(array)
        found = numpy.empty_like(array)
        world.Allreduce(numpy.full(1000, float(world.Get_rank() + step)), found)
        assert (array == found).all(), step
    if group.rank == 0:
        library = MPI.Get_library_version().split(",")[0].splitlines()[0]
        print(f"{ranks} ranks of MPI ({order}) and of one group agree, under {' '.join(library.split())}", flush=True)


main()
