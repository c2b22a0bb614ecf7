#!/usr/bin/env python3
"""Times what programs on GPUs send beside NCCL: small tensors on the CPU, objects, barriers and new groups, beside gloo's in the same processes.

    python python/bench_plane.py --ranks 2 --bind

The group is that of ``init_process_group("cpu:phalanx,cuda:nccl")``. The first table is a mixture such as inference servers send: in random
order, the same on every rank, calls of four kinds with messages of five sizes. The backends take turns after 500 calls: if they did after each, what
gloo's threads still do after a call would take a processor from the next one, which is ours. A barrier of its own backend is before each call, so
that the ranks begin together. Times are those of the slowest rank.

Objects are exchanged by the functions of phalanx_torch, beside PyTorch's over gloo. The rows "by PyTorch" are PyTorch's functions over both. Of
objects `--rounds` are made, and of groups a quarter of that.
"""

import argparse
import datetime
import os
import random
import statistics
import sys
import time

# The package that is installed, and not its sources, which lie beside this file without the native part.
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path = [place for place in sys.path if place != HERE] + [os.path.join(HERE, "tests")]

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from ports import free_port

import phalanx_torch

# Calls that a backend makes before it is the other one's turn.
BLOCK = 500
SIZES = [100, 1 << 10, 4 << 10, 16 << 10, 64 << 10]
CALLS = {
    "broadcast": lambda group, tensor, many: dist.broadcast(tensor, 0, group=group),
    "all_reduce": lambda group, tensor, many: dist.all_reduce(tensor, group=group),
    "all_gather": lambda group, tensor, many: dist.all_gather(many, tensor, group=group),
    "barrier": lambda group, tensor, many: dist.barrier(group),
}


def slowest(times):
    """Of each call the time of the slowest rank."""
    longest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.tolist()


def at(times, share):
    times = sorted(times)
    return 1e6 * times[min(len(times) - 1, int(share * len(times)))]


def alternating(groups, prepare, call, rounds):
    """Times of `call` on each group, in turn first."""
    times = {name: [] for name in groups}
    for round in range(rounds):
        for name in list(groups) if round % 2 else reversed(groups):
            prepared = prepare()
            dist.barrier(groups[name])
            begin = time.perf_counter()
            call(groups[name], prepared)
            times[name].append(time.perf_counter() - begin)
    return {name: slowest(each) for name, each in times.items()}


def mixture(groups, rank, ranks, calls):
    order = random.Random(1)
    tensors = {size: torch.ones(size // 4) for size in SIZES}
    many = {size: [torch.empty(size // 4) for _ in range(ranks)] for size in SIZES}
    plan = [(order.choice(list(CALLS)), order.choice(SIZES)) for _ in range(calls)]
    times = {name: [] for name in groups}
    for number, start in enumerate(range(0, calls, BLOCK)):
        for name in list(groups) if number % 2 else reversed(groups):
            # Threads that still have work from the block before do it now.
            time.sleep(0.01)
            for kind, size in plan[start : start + BLOCK]:
                tensors[size].fill_(1.0)
                dist.barrier(groups[name])
                begin = time.perf_counter()
                CALLS[kind](groups[name], tensors[size], many[size])
                times[name].append(time.perf_counter() - begin)
    times = {name: slowest(each) for name, each in times.items()}
    if rank != 0:
        return
    print(f"{calls - BLOCK} calls in random order, us\n{'call':>12} {'bytes':>7} {'phalanx p50':>12} {'p99':>9} {'gloo p50':>12} {'p99':>9} {'p50 ratio':>10}")
    for kind in CALLS:
        for size in SIZES if kind != "barrier" else [0]:
            # The first block of each is for what is made at first calls.
            chosen = [index for index, (its, bytes) in enumerate(plan) if index >= BLOCK and its == kind and size in (0, bytes)]
            ours, theirs = ([times[name][index] for index in chosen] for name in groups)
            print(
                f"{kind:>12} {size:7} {at(ours, 0.5):12.1f} {at(ours, 0.99):9.1f} {at(theirs, 0.5):12.1f} {at(theirs, 0.99):9.1f} "
                f"{at(theirs, 0.5) / at(ours, 0.5):9.1f}x"
            )


def objects(groups, rank, ranks, rounds):
    if rank == 0:
        print(f"objects and groups, medians of {rounds}, us\n{'':>45} {'phalanx':>10} {'gloo':>10} {'ratio':>8}")
    for size in (100, 4 << 10, 64 << 10):
        made = {"rank": rank, "text": "x" * size}

        def all_gather(module, group):
            found = [None] * ranks
            module.all_gather_object(found, made, group=group)
            assert [each["rank"] for each in found] == list(range(ranks))

        def broadcast(module, group):
            found = [made if rank == 0 else None]
            module.broadcast_object_list(found, 0, group=group)
            assert found[0]["rank"] == 0

        for call, name in ((all_gather, "all_gather_object"), (broadcast, "broadcast_object_list")):

            def own(group, _):
                # gloo's groups have PyTorch's functions alone.
                call(dist if group is groups["gloo"] else phalanx_torch, group)

            def by_pytorch(group, _):
                call(dist, group)

            show(f"{name}, {size} B", alternating(groups, lambda: None, own, rounds), rank)
            show(f"by PyTorch: {name}, {size} B", alternating(groups, lambda: None, by_pytorch, rounds), rank)
    for backend in ("phalanx", "gloo"):
        for _ in range(2):
            first = dist.new_group(backend=backend)
            dist.barrier()
            dist.destroy_process_group(first)
    for what, is_used in (("new_group", False), ("new_group and its first barrier", True)):
        times = {"phalanx": [], "gloo": []}
        for _ in range(max(5, rounds // 4)):
            for name in times:
                dist.barrier()
                begin = time.perf_counter()
                made = dist.new_group(backend=name, timeout=datetime.timedelta(seconds=60))
                if is_used:
                    dist.barrier(made)
                times[name].append(time.perf_counter() - begin)
                # A rank of gloo's fails if another one destroys the group while it still connects.
                dist.barrier()
                dist.destroy_process_group(made)
                # gloo's group ends its threads when it goes, which takes milliseconds: not in the time of the next one.
                del made
        show(what, {name: slowest(each) for name, each in times.items()}, rank)


def show(what, times, rank):
    if rank == 0:
        ours, theirs = (1e6 * statistics.median(times[name]) for name in ("phalanx", "gloo"))
        print(f"{what:>45} {ours:10.1f} {theirs:10.1f} {theirs / ours:7.1f}x", flush=True)


def rank_of_bench(rank, arguments, port):
    if arguments.bind:
        processors = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {processors[rank % len(processors)]})
    torch.set_num_threads(1)
    dist.init_process_group("cpu:phalanx,cuda:nccl", f"tcp://127.0.0.1:{port}", rank=rank, world_size=arguments.ranks)
    gloo = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=60))
    groups = {"phalanx": dist.group.WORLD, "gloo": gloo}
    if rank == 0:
        print(f"{arguments.ranks} ranks, PyTorch {torch.__version__}, CUDA devices: {torch.cuda.device_count()}, bound: {arguments.bind}")
    mixture(groups, rank, arguments.ranks, arguments.calls + BLOCK)
    objects(groups, rank, arguments.ranks, arguments.rounds)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--calls", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--bind", action="store_true", help="bind each rank to a processor")
    arguments = parser.parse_args()
    multiprocessing.spawn(rank_of_bench, (arguments, free_port()), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
