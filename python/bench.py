#!/usr/bin/env python3
"""Times all_reduce beside gloo's, in the same processes, one after the other, and prints medians.

    python python/bench.py --ranks 2

Each line is one size: the calls of the two backends alternate, so that what else the machine does meets both.
"""

import argparse
import datetime
import os
import statistics
import sys
import tempfile
import time

# The package that is installed, and not its sources, which lie beside this file without the native part.
sys.path = [place for place in sys.path if place != os.path.dirname(os.path.abspath(__file__))]

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

import phalanx_torch  # noqa: F401

SIZES = [4, 64, 1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]


def rank_of_bench(rank, ranks, folder, seconds):
    torch.set_num_threads(1)
    dist.init_process_group("phalanx", f"file://{folder}/store", rank=rank, world_size=ranks)
    gloo = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=60))
    groups = {"phalanx": dist.group.WORLD, "gloo": gloo}
    if rank == 0:
        print(f"all_reduce of f32, {ranks} ranks, transport {dist.group.WORLD.transport}, medians")
        print(f"{'bytes':>10} {'phalanx':>12} {'gloo':>12} {'ratio':>7}   rounds")
    for size in SIZES:
        tensor = torch.ones(size // 4)
        times = {name: [] for name in groups}
        for group in groups.values():
            for _ in range(3):
                dist.all_reduce(tensor, group=group)
        rounds = torch.zeros(1, dtype=torch.int64)
        begin = time.perf_counter()
        for group in groups.values():
            dist.all_reduce(tensor, group=group)
        rounds[0] = max(5, min(2000, int(seconds / (time.perf_counter() - begin))))
        dist.broadcast(rounds, 0)
        for _ in range(rounds.item()):
            for name, group in groups.items():
                tensor.fill_(1.0)
                dist.barrier()
                begin = time.perf_counter()
                dist.all_reduce(tensor, group=group)
                times[name].append(time.perf_counter() - begin)
        if rank == 0:
            ours, theirs = (1e6 * statistics.median(times[name]) for name in groups)
            print(f"{size:10} {ours:9.1f} us {theirs:9.1f} us {theirs / ours:6.1f}x   {rounds.item()}", flush=True)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3.0, help="about how long each size takes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(
            rank_of_bench, (arguments.ranks, folder, arguments.seconds), nprocs=arguments.ranks
        )


if __name__ == "__main__":
    main()
