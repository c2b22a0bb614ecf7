"""Times a collective over MPI through mpi4py, where there is no mpicc for openmpi.c: that costs a microsecond a call."""

import sys

import numpy
from mpi4py import MPI

from clock import measure, tell

WORLD = MPI.COMM_WORLD
RANK, RANKS = WORLD.rank, WORLD.size


def case(collective: str, count: int):
    """What to call, and the array with the result beside what it must be (None where nothing ends)."""
    share, root = count // RANKS, RANK == 0
    base = numpy.arange(count, dtype=numpy.float32) % 61
    data, total = base + numpy.float32(RANK), base * RANKS + RANKS * (RANKS - 1) / 2
    mine = slice(RANK * share, (RANK + 1) * share)
    part, whole = data[:share].copy(), numpy.full(count, -1, numpy.float32)
    gathered = numpy.concatenate([base[:share] + other for other in range(RANKS)])
    partner = RANK ^ 1

    def send_recv() -> None:
        if RANK < partner < RANKS:
            WORLD.Send(data, partner)
        if partner < RANKS:
            WORLD.Recv(whole, partner)
        if partner < RANK:
            WORLD.Send(data, partner)

    match collective:
        case "all_reduce":
            return lambda: WORLD.Allreduce(MPI.IN_PLACE, data), data, total
        case "reduce":
            return lambda: WORLD.Reduce(MPI.IN_PLACE if root else data, data), data, total if root else None
        case "broadcast":
            return lambda: WORLD.Bcast(data), data, base
        case "all_gather":
            return lambda: WORLD.Allgather(part, whole), whole, gathered
        case "gather":
            return lambda: WORLD.Gather(part, whole), whole, gathered if root else None
        case "scatter":
            return lambda: WORLD.Scatter(data, part), part, base[mine]
        case "reduce_scatter":
            return lambda: WORLD.Reduce_scatter_block(data, part), part, total[mine]
        case "all_to_all":
            expected = numpy.concatenate([base[mine] + other for other in range(RANKS)])
            return lambda: WORLD.Alltoall(data, whole), whole, expected
        case "send_recv":
            return send_recv, whole, base + partner if partner < RANKS else None
        case _:
            return WORLD.Barrier, data, None


for size in map(int, sys.argv[2:]):
    call, result, expected = case(sys.argv[1], size // 4)
    call()
    wrong = WORLD.allreduce(0 if expected is None else int((result != expected).sum()))
    # Sums of zeros stay zeros, however often they are summed.
    result[:] = 0
    seconds = measure(call, lambda seconds: WORLD.allreduce(seconds, MPI.MAX))
    if RANK == 0:
        tell(size, seconds / (2 if sys.argv[1] == "send_recv" else 1), wrong)
