#!/usr/bin/env python3
"""A training step of phalanx-tch beside PyTorch's DistributedDataParallel over gloo, or on GPUs over NCCL: the same libtorch, one thread a rank.

Two processes of each take turns, step by step, so that what slows the machine for a while slows all:

  together   two ranks that average gradients
  apart      two processes side by side that never speak
  slower     the slower of these two in each step: ranks that train together wait for it
  alone      one process

    tch/check.sh ./compare.py mlp encoder resnet
    tch/check.sh ./compare.py --keep-memory mlp encoder resnet
    ./compare.py --device cuda mlp encoder resnet           with libtorch_cuda.so in LD_PRELOAD; ranks share a GPU where there are too few

It builds nothing: run tch/check.sh first. PyTorch runs with gradient_as_bucket_view, as phalanx-tch always does. Times are
medians, but for `slower` of both ranks' means."""

import argparse
import os
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.append(os.path.join(HERE, "..", "python", "tests"))

from ports import free_port

PEERS = os.path.join(HERE, "..", "bench", "peers")
WARM_UP = 3
KINDS = ("together", "apart", "alone")


def peer(model: str, backend: str, device: str) -> None:
    """A rank of PyTorch's: as examples/compare.rs."""
    sys.path.insert(0, PEERS)
    import ddp
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if device == "cuda":
        number = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
        torch.cuda.set_device(number)
        torch.set_default_device(f"cuda:{number}")
    dist.init_process_group(backend)
    # Gradients lie in their buckets, as ours do.
    together = ddp.Trainer(ddp.MODELS[model](), True, view=True)
    apart = ddp.Trainer(ddp.MODELS[model](), False)
    print(sum(parameter.numel() for parameter in apart.bare.parameters()), flush=True)
    for line in sys.stdin:
        print({"together": together, "apart": apart}[line.strip()].step(), flush=True)
    dist.destroy_process_group()


class Pair:
    """Two ranks that wait for lines."""

    def __init__(self, command: list[str], keep_memory: bool, is_shared: bool) -> None:
        port = free_port()
        self.ranks = []
        for rank in range(2):
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
            variables |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": 1}
            if is_shared:
                # NCCL refuses two ranks of one host on one device, and tells hosts apart by this.
                variables |= {"NCCL_HOSTID": f"host-of-rank-{rank}", "NCCL_SOCKET_IFNAME": "lo"}
                variables |= {"NCCL_IB_DISABLE": 1, "NCCL_P2P_DISABLE": 1, "NCCL_SHM_DISABLE": 1}
            if keep_memory:
                variables |= {"MALLOC_MMAP_THRESHOLD_": 1 << 30, "MALLOC_TRIM_THRESHOLD_": 1 << 32}
            environment = os.environ | {name: str(value) for name, value in variables.items()}
            pipe = subprocess.PIPE
            self.ranks.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment))

    def parameters(self) -> int:
        counts = {int(rank.stdout.readline()) for rank in self.ranks}
        assert len(counts) == 1
        return counts.pop()

    def step(self, kind: str) -> list[float]:
        """Trains one step; gives the milliseconds of each rank that does."""
        ranks = self.ranks[:1] if kind == "alone" else self.ranks
        for rank in ranks:
            rank.stdin.write("apart\n" if kind == "alone" else f"{kind}\n")
            rank.stdin.flush()
        return [float(rank.stdout.readline()) for rank in ranks]

    def end(self) -> None:
        for rank in self.ranks:
            rank.stdin.close()
        assert all(rank.wait(30) == 0 for rank in self.ranks)


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def gpus() -> int:
    """How many a process sees, as CUDA_VISIBLE_DEVICES says."""
    ask = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    return int(subprocess.run(ask, stdout=subprocess.PIPE, text=True, check=True).stdout)


def compare(model: str, steps: int, ours: str, keep_memory: bool, device: str) -> None:
    theirs = [sys.executable, __file__, "--device", device, "--peer", model]
    commands = {"phalanx-tch": [ours, model], "PyTorch": theirs}
    if device == "cuda":
        commands = {
            "phalanx-tch, NCCL": [ours, model, "nccl"],
            "phalanx-tch, the host's memory": [ours, model, "cuda"],
            "PyTorch": [*theirs, "--backend", "nccl"],
            "PyTorch, gloo": theirs,
        }
    is_shared = device == "cuda" and gpus() < 2
    pairs = {name: Pair(command, keep_memory, is_shared) for name, command in commands.items()}
    counts = {pair.parameters() for pair in pairs.values()}
    assert len(counts) == 1, f"the models differ: {counts}"
    times = {(name, kind): [] for name in pairs for kind in ("together", "apart", "slower", "alone")}
    for step in range(WARM_UP + steps):
        for name, pair in pairs.items():
            # In another order in each step: the first one after a pause is the slowest.
            for kind in (KINDS * 2)[step % 3 :][:3]:
                milliseconds = pair.step(kind)
                if step < WARM_UP:
                    continue
                times[name, kind].append(sum(milliseconds) / len(milliseconds))
                if kind == "apart":
                    times[name, "slower"].append(max(milliseconds))
    for pair in pairs.values():
        pair.end()
    of = {key: median(values) for key, values in times.items()}
    for name in pairs:
        alone, apart, slower, together = (of[name, kind] for kind in ("alone", "apart", "slower", "together"))
        scaling, limit = (f"{time / together:.1%}" for time in (apart, slower))
        faster = f"{of['PyTorch', 'together'] / together:.2f}"
        columns = [f"{time:.1f}" for time in (alone, apart, slower, together)] + [scaling, limit, faster]
        print(f"| {model} | {name} | {' | '.join(columns)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="a multiple of 3 gives each kind each place equally often")
    parser.add_argument("--ours", default=os.path.join(HERE, os.environ.get("CARGO_TARGET_DIR", "target"), "debug/examples/compare"))
    parser.add_argument("--keep-memory", action="store_true", help="on both sides, glibc keeps memory that is freed")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--backend", default="gloo", help=argparse.SUPPRESS)
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    parser.add_argument("models", nargs="*", choices=["mlp", "encoder", "resnet", []])
    arguments = parser.parse_args()
    if arguments.peer:
        return peer(arguments.peer, arguments.backend, arguments.device)
    if not os.access(arguments.ours, os.X_OK):
        sys.exit(f"{arguments.ours} is not there: run tch/check.sh first, which builds it")
    print("| model | | alone, ms | apart, ms | slower, ms | two ranks, ms | apart / two ranks | slower / two ranks | PyTorch's two ranks / these |")
    print("|---|---|---|---|---|---|---|---|---|")
    for model in arguments.models or ["mlp", "encoder", "resnet"]:
        compare(model, arguments.steps, arguments.ours, arguments.keep_memory, arguments.device)


if __name__ == "__main__":
    main()
