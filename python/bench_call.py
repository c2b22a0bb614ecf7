#!/usr/bin/env python3
"""Times a small all_reduce in a world of one: over phalanx, and over backends that do nothing, which is PyTorch's own part.

    python bench_call.py
"""

import os
import sys
import time

# The package that is installed, and not its sources, which lie beside this file without the native part.
sys.path = [place for place in sys.path if place != os.path.dirname(os.path.abspath(__file__))]

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

import phalanx_torch  # noqa: F401

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
    return 1e6 * sorted(samples)[SAMPLES // 2]


def in_group(backend, store, measure):
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    measure(dist.group.WORLD)
    dist.destroy_process_group()


def main():
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
    in_group("fake", FakeStore(), lambda group: shown(f"{of}, in C++", lambda: dist.all_reduce(tensor)))


if __name__ == "__main__":
    main()
