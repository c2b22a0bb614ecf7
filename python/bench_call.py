#!/usr/bin/env python3
"""Times a small all_reduce in a world of one: over phalanx, over backends that do nothing, so that PyTorch's own part is left, and with
ArrayGroup, which does not pass through torch.distributed.

    python python/bench_call.py

With two ranks or more, over phalanx, it also tells how much of the time the first two ranks were on one processor:

    python python/bench_call.py --ranks 2 --seconds 5
"""

import argparse
import ctypes
import os
import sys
import time

# The package that is installed, and not its sources, which lie beside this file without the native part.
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path = [place for place in sys.path if place != HERE] + [os.path.join(HERE, "tests")]

import numpy
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ports import free_port
from torch._C import _distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

import phalanx_torch

CALLS, SAMPLES = 50, 400


class Done(dist.Work):
    def wait(self, timeout=None):
        return True


class Nothing(dist.ProcessGroup):
    """A backend written in Python that does nothing."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.work = Done()

    def getBackendName(self):
        return "nothing"

    def allreduce(self, tensors, opts):
        return self.work


def microseconds(call):
    samples = []
    for _ in range(SAMPLES):
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        samples.append((time.perf_counter() - begin) / CALLS)
    return 1e6 * median(samples)


def in_group(backend, store, measure):
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    measure(dist.group.WORLD)
    dist.destroy_process_group()


def rank_of_many(rank, ranks, port, seconds):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("phalanx", rank=rank, world_size=ranks)
    processor = ctypes.CDLL(None).sched_getcpu
    tensor, goes_on = torch.zeros(1), torch.ones(1)
    rows, end = [], time.perf_counter() + seconds
    while goes_on[0] > 0:
        begin = time.perf_counter()
        for _ in range(CALLS):
            dist.all_reduce(tensor)
        rows.append((1e6 * (time.perf_counter() - begin) / CALLS, processor()))
        goes_on[0] = float(time.perf_counter() < end)
        dist.all_reduce(goes_on, dist.ReduceOp.MIN)
    every = [None] * ranks
    dist.all_gather_object(every, rows)
    dist.destroy_process_group()
    if rank > 0:
        return
    times = [time for time, _ in rows]
    print(f"{ranks} ranks, 4 bytes: median {median(times):.1f} µs, mean {sum(times) / len(times):.1f} µs")
    shared = [first[1] == second[1] for first, second in zip(every[0], every[1])]
    for on_one, where in ((True, "on one processor"), (False, "on two processors")):
        these = [time for time, shares in zip(times, shared) if shares == on_one]
        if these:
            print(f"  ranks 0 and 1 {where}: {100 * sum(these) / sum(times):.0f}% of the time, median {median(these):.1f} µs")


def median(values):
    return sorted(values)[len(values) // 2]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5)
    arguments = parser.parse_args()
    if arguments.ranks > 1:
        mp.spawn(rank_of_many, (arguments.ranks, free_port(), arguments.seconds), nprocs=arguments.ranks)
        return
    torch.set_num_threads(1)
    tensor, options = torch.ones(1), c10d.AllreduceOptions()
    options.asyncOp = False

    def shown(what, call):
        print(f"{what:58} {microseconds(call):6.2f}", flush=True)

    def phalanx(group):
        shown("dist.all_reduce over phalanx", lambda: dist.all_reduce(tensor))
        shown("  of it the group's own allreduce", lambda: group.allreduce([tensor], options))
        native = group._native
        shown("  of it the native part", lambda: native.all_reduce_as_it_is([tensor], options))

    dist.Backend.register_backend("nothing", Nothing, devices=["cpu"])
    in_group("phalanx", dist.HashStore(), phalanx)
    of = "dist.all_reduce over a backend that does nothing"
    in_group("nothing", dist.HashStore(), lambda group: shown(f"{of}, in Python", lambda: dist.all_reduce(tensor)))
    with phalanx_torch.init(rank=0, world_size=1) as group:
        array = numpy.ones(1, dtype=numpy.float32)
        shown("ArrayGroup.all_reduce of a NumPy array", lambda: group.all_reduce(array))
        shown("ArrayGroup.all_reduce of a tensor", lambda: group.all_reduce(tensor))
    in_group("fake", FakeStore(), lambda group: shown(f"{of}, in C++", lambda: dist.all_reduce(tensor)))


if __name__ == "__main__":
    main()
