"""One training step of PyTorch's DistributedDataParallel over gloo, beside independent processes that never speak.

The models, batches and optimizer of the example `scaling`, which calls this and prints the figures beside its own.
A line of JSON for each model."""

import argparse
import json
import os
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "python" / "tests"))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ports import free_port
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

# As in examples/scaling.
WARM_UP = 2
LEARNING_RATE = 1e-6


class Mlp(nn.Module):
    """Four dense layers: 10.5 M parameters."""

    BATCH, CLASSES = 128, 10

    def __init__(self) -> None:
        super().__init__()
        widths = [1024, 2048, 2048, 2048]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:]))
        self.head = nn.Linear(2048, self.CLASSES)

    def sample(self) -> torch.Tensor:
        return torch.randn(self.BATCH, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.head(x)


class Encoder(nn.Module):
    """Six layers of a transformer's encoder over embedded tokens: 22.7 M parameters."""

    BATCH, CLASSES, LENGTH, VOCABULARY, WIDTH = 8, 32, 64, 7300, 512

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(self.VOCABULARY, self.WIDTH)
        self.positions = nn.Embedding(self.LENGTH, self.WIDTH)
        layer = nn.TransformerEncoderLayer(
            self.WIDTH, 8, 4 * self.WIDTH, dropout=0.0, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(self.WIDTH, self.CLASSES)

    def sample(self) -> torch.Tensor:
        return torch.randint(self.VOCABULARY, (self.BATCH, self.LENGTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        embedded = self.tokens(x) + self.positions(torch.arange(self.LENGTH))
        return self.head(self.encoder(embedded).mean(1))


def normed(before: int, after: int, kernel: int, stride: int) -> nn.Module:
    conv = nn.Conv2d(before, after, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(after))


class Block(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = normed(before, after, 3, stride), normed(after, after, 3, 1)
        self.shortcut = normed(before, after, 1, stride) if before != after else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))


class ResNet(nn.Module):
    """A residual network of 20 layers for 32 x 32 pixels, with batch norm: 0.27 M parameters."""

    BATCH, CLASSES = 64, 10

    def __init__(self) -> None:
        super().__init__()
        self.stem = normed(3, 16, 3, 1)
        stages = [(16, 16, 1), (16, 32, 2), (32, 64, 2)]
        blocks = (
            block
            for before, after, stride in stages
            for block in (Block(before, after, stride), Block(after, after, 1), Block(after, after, 1))
        )
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(64, self.CLASSES)

    def sample(self) -> torch.Tensor:
        return torch.randn(self.BATCH, 3, 32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(F.relu(self.stem(x))).mean((2, 3)))


MODELS = {"mlp": Mlp, "encoder": Encoder, "resnet": ResNet}


def synchronize() -> None:
    """Waits for the device that tensors are made on, if it is a GPU."""
    if torch.get_default_device().type == "cuda":
        torch.cuda.synchronize()


class Trainer:
    """A replica, and what trains it."""

    def __init__(self, model: nn.Module, together: bool, view: bool = False) -> None:
        self.bare = model
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=view) if together else model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step(self) -> float:
        """Trains one step; gives its milliseconds."""
        sample = self.bare.sample()
        synchronize()
        start = time.perf_counter()
        answers = torch.randint(self.bare.CLASSES, (self.bare.BATCH,))
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(sample), answers).backward()
        self.optimizer.step()
        synchronize()
        return 1e3 * (time.perf_counter() - start)


def median(values: list[float]) -> float:
    return sorted(values[WARM_UP:])[(len(values) - WARM_UP) // 2]


def slower(times: list[float]) -> list[float]:
    """Of the ranks, in each step."""
    longest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.tolist()


def mean(value: float) -> float:
    """Over the ranks."""
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def worker(rank: int, ranks: int, port: int, models: list[str], steps: int, view: bool) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    for name in models:
        together, apart = Trainer(MODELS[name](), True, view), Trainer(MODELS[name](), False)
        step, independent, alone = [], [], []
        # They take turns, so that what slows the machine for a while slows all.
        for turn in range(WARM_UP + steps):
            turns = [(step, together), (independent, apart)]
            for times, trainer in turns if turn % 2 == 0 else reversed(turns):
                dist.barrier()
                times.append(trainer.step())
            dist.barrier()
            if rank == 0:
                alone.append(apart.step())
        dist.barrier()
        step_ms, independent_ms, slower_ms = mean(median(step)), mean(median(independent)), median(slower(independent))
        if rank == 0:
            figures = {
                "model": name,
                "parameters": sum(parameter.numel() for parameter in apart.bare.parameters()),
                "alone_ms": median(alone),
                "independent_ms": independent_ms,
                "slower_ms": slower_ms,
                "step_ms": step_ms,
                "ratio": step_ms / independent_ms,
                "samples_per_s": 1e3 * ranks * apart.bare.BATCH / step_ms,
            }
            print(json.dumps(figures), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=11)
    parser.add_argument("--view", action="store_true", help="gradient_as_bucket_view")
    parser.add_argument("models", nargs="+", choices=MODELS)
    arguments = parser.parse_args()
    work = (arguments.ranks, free_port(), arguments.models, arguments.steps, arguments.view)
    mp.spawn(worker, work, nprocs=arguments.ranks)
