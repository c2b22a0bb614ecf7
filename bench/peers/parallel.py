"""One training step of an encoder in PyTorch's ways to spread a model over ranks, over gloo.

The model, batch and optimizer of the example `scaling -- --parallel`, which calls this and prints the figures beside its own.
A line of JSON for each way."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "python" / "tests"))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ports import free_port
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

# As in examples/scaling/src/parallel.rs.
WIDTH, HEADS, LAYERS, LENGTH, CLASSES = 512, 8, 4, 64, 32
ROWS, MICROBATCHES = 8, 4
WARM_UP = 2
LEARNING_RATE = 1e-6

Step = Callable[[], float]


class Layer(nn.Module):
    """A layer of a transformer's encoder, post-norm, whose attention is of linear layers that can be divided."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm_attention, self.norm_output = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def heads(projected: torch.Tensor) -> torch.Tensor:
            return projected.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)

        attended = F.scaled_dot_product_attention(heads(self.query(x)), heads(self.key(x)), heads(self.value(x)))
        x = self.norm_attention(x + self.out(attended.transpose(1, 2).flatten(2)))
        return self.norm_output(x + self.down(F.gelu(self.up(x))))


def encoder(first: int, last: int) -> nn.Sequential:
    """Layers from `first` to before `last`; with the last of them the head."""
    layers: list[nn.Module] = [Layer() for _ in range(first, last)]
    return nn.Sequential(*layers, *([nn.Linear(WIDTH, CLASSES)] if last == LAYERS else []))


def whole() -> nn.Sequential:
    return encoder(0, LAYERS)


def loss_of(output: torch.Tensor, _target: torch.Tensor | None = None) -> torch.Tensor:
    return (output - 1.0).square().mean()


def adamw(model: nn.Module, fused: bool = True) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=fused)


def trained(model: nn.Module, rows: int, fused: bool = True) -> Step:
    optimizer = adamw(model, fused)

    def step() -> float:
        start = time.perf_counter()
        loss_of(model(torch.randn(rows, LENGTH, WIDTH))).backward()
        optimizer.step()
        optimizer.zero_grad()
        return 1e3 * (time.perf_counter() - start)

    return step


def tensor_parallel(mesh: dist.DeviceMesh) -> nn.Module:
    model = whole()
    plan = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
    plan |= {name: RowwiseParallel() for name in ("out", "down")}
    for layer in model[:LAYERS]:
        parallelize_module(layer, mesh, plan)
    return model


def fully_sharded(mesh: dist.DeviceMesh, reshard: bool) -> nn.Module:
    model = whole()
    for layer in model[:LAYERS]:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


def pipeline(rank: int, ranks: int, schedule: type, stages_per_rank: int) -> tuple[nn.Module, Step]:
    stages = ranks * stages_per_rank
    each = LAYERS // stages
    own = list(range(rank, stages, ranks))
    parts = nn.ModuleList(encoder(stage * each, (stage + 1) * each) for stage in own)
    placed = [PipelineStage(part, stage, stages, torch.device("cpu")) for part, stage in zip(parts, own)]
    plan = schedule(placed if stages_per_rank > 1 else placed[0], MICROBATCHES, loss_fn=loss_of)
    optimizer = adamw(parts)

    def step() -> float:
        start = time.perf_counter()
        inputs = [torch.randn(ROWS, LENGTH, WIDTH)] if 0 in own else []
        target = torch.zeros(ROWS, 1) if stages - 1 in own else None
        plan.step(*inputs, target=target)
        optimizer.step()
        optimizer.zero_grad()
        return 1e3 * (time.perf_counter() - start)

    return parts, step


def worker(rank: int, ranks: int, port: int, steps: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))

    def trains(model: nn.Module, rows: int, fused: bool = True) -> tuple[nn.Module, Step]:
        return model, trained(model, rows, fused)

    ways = {
        "one process": trains(whole(), ROWS),
        "DDP": trains(DistributedDataParallel(whole(), gradient_as_bucket_view=True), ROWS // ranks),
        "FSDP2, reshard_after_forward=False": trains(fully_sharded(mesh, False), ROWS // ranks),
        "FSDP2": trains(fully_sharded(mesh, True), ROWS // ranks),
        # Some of its parameters are divided and some are not: no fused optimizer takes both.
        "tensor": trains(tensor_parallel(mesh), ROWS, fused=False),
        "GPipe": pipeline(rank, ranks, ScheduleGPipe, 1),
        "1F1B": pipeline(rank, ranks, Schedule1F1B, 1),
    }
    if LAYERS % (2 * ranks) == 0:
        ways["interleaved"] = pipeline(rank, ranks, ScheduleInterleaved1F1B, 2)
    times: dict[str, list[float]] = {name: [] for name in ways}
    # They take turns, so that what slows the machine for a while slows all.
    for _ in range(WARM_UP + steps):
        for name, (_, step) in ways.items():
            dist.barrier()
            if rank == 0 or name != "one process":
                times[name].append(step())
    dist.barrier()
    if rank == 0:
        for name, (model, _) in ways.items():
            own = sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in model.parameters())
            step_ms = sorted(times[name][WARM_UP:])[steps // 2]
            print(json.dumps({"way": name, "parameters": own, "step_ms": step_ms}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=11)
    arguments = parser.parse_args()
    mp.spawn(worker, (arguments.ranks, free_port(), arguments.steps), nprocs=arguments.ranks)
