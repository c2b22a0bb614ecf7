#!/usr/bin/env python3
"""Times a training step of PyTorch's DistributedDataParallel over phalanx and over gloo, in the same processes, and prints medians.

    python python/bench_ddp.py                             the MLP, the encoder and ResNet-20 of bench/peers/ddp.py, 2 ranks
    python python/bench_ddp.py --steps 41 --view encoder   with gradient_as_bucket_view

Each round is one step over each of phalanx, gloo, DDP that averages nothing, and no DDP: replicas that train alone, at the same time on
every rank. Every second round goes the other way round. So what else the machine does meets all. DDP that averages nothing still copies
gradients into buckets and back, and broadcasts buffers: a bound for every backend, but for a Python call for each bucket. The last columns are medians of the rounds' own ratios, with their quartiles.
"""

import argparse
import datetime
import os
import statistics
import sys
import tempfile
import time

# The package that is installed, and not its sources, which lie beside this file without the native part.
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path = [place for place in sys.path if place != HERE] + [os.path.join(HERE, "..", "bench", "peers")]

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from ddp import LEARNING_RATE, MODELS
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import phalanx_torch  # noqa: F401

WARM_UP = 3
# What is compared with what.
RATIOS = (("gloo", "phalanx"), ("gloo", "nothing"), ("phalanx", "nothing"), ("phalanx", "alone"))


def averages_nothing(_, bucket):
    """A communication hook that takes the rank's own gradients for the average."""
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


class Replica:
    """A model, and what trains it: over a group, or alone."""

    def __init__(self, name, group, view, hook=None):
        torch.manual_seed(0)
        self.bare = MODELS[name]()
        self.model = self.bare
        if group is not None:
            self.model = DistributedDataParallel(self.bare, process_group=group, gradient_as_bucket_view=view)
            if hook is not None:
                self.model.register_comm_hook(None, hook)
        self.optimizer = torch.optim.AdamW(self.bare.parameters(), lr=LEARNING_RATE, fused=True)

    def step(self, sample, answers):
        """Trains one step; gives its seconds."""
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(sample), answers).backward()
        self.optimizer.step()
        return time.perf_counter() - begin


def rounds(name, groups, steps, view):
    """The seconds of each step, of this rank, by what it went over."""
    replicas = {over: Replica(name, group, view) for over, group in groups.items()}
    replicas["nothing"] = Replica(name, groups["phalanx"], view, averages_nothing)
    replicas["alone"] = Replica(name, None, view)
    model = replicas["phalanx"].bare
    times = {over: [] for over in replicas}
    for number in range(WARM_UP + steps):
        sample, answers = model.sample(), torch.randint(model.CLASSES, (model.BATCH,))
        for over in list(replicas)[:: 1 if number % 2 else -1]:
            dist.barrier()
            seconds = replicas[over].step(sample, answers)
            if number >= WARM_UP:
                times[over].append(seconds)
    # The same batches and the same first parameters: what both have averaged must be the same, but for the order of adding.
    for ours, theirs in zip(model.parameters(), replicas["gloo"].bare.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    return times


def ratios(times, over, under):
    each = sorted(one / other for one, other in zip(times[over], times[under]))
    low, middle, high = statistics.quantiles(each, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def rank_of_bench(rank, arguments, folder):
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    dist.init_process_group("phalanx", f"file://{folder}/store", rank=rank, world_size=arguments.ranks)
    gloo = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=120))
    groups = {"phalanx": dist.group.WORLD, "gloo": gloo}
    if rank == 0:
        load = os.getloadavg()[0]
        print(
            f"steps of DDP, {arguments.ranks} ranks, transport {dist.group.WORLD.transport}, medians of {arguments.steps} rounds; "
            f"load average {load:.1f}, {len(os.sched_getaffinity(0))} processors, PyTorch {torch.__version__}"
        )
        heads = " ".join(f"{over:>10}" for over in ("phalanx", "gloo", "nothing", "alone"))
        names = [f"{over}/{under}" for over, under in RATIOS]
        print(f"{'':8} {heads}   {'  '.join(f'{name:22}' for name in names).rstrip()}")
    for name in arguments.models or MODELS:
        times = rounds(name, groups, arguments.steps, arguments.view)
        gathered = [None] * arguments.ranks
        dist.all_gather_object(gathered, times)
        # A step has ended when it has on all ranks.
        times = {over: [max(step) for step in zip(*(one[over] for one in gathered))] for over in times}
        if rank == 0:
            medians = " ".join(f"{1e3 * statistics.median(of):7.1f} ms" for of in times.values())
            columns = [ratios(times, *pair) for pair in RATIOS]
            print(f"{name:8} {medians}   {'  '.join(f'{column:22}' for column in columns).rstrip()}", flush=True)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=21, help="rounds of each model, at least 2")
    parser.add_argument("--view", action="store_true", help="gradient_as_bucket_view")
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; all, if none is named")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.models if name not in MODELS]:
        parser.error(f"{', '.join(unknown)}: the models are {', '.join(MODELS)}")
    if arguments.steps < 2:
        parser.error("--steps: at least 2")
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(rank_of_bench, (arguments, folder), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
