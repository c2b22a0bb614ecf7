"""Trains a small model with PyTorch's DistributedDataParallel, and the same in one process: both must come to the same.

    ddp.py [BACKEND]    over gloo, or over the backend of this name
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS, SAMPLES = 20, 24  # Each of 2, 3 and 4 ranks gets as many.


def model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))


def train(model, rank, world):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(2)
    for _ in range(STEPS):
        inputs = torch.randn(SAMPLES, 8, generator=data)
        targets = inputs.sum(dim=1, keepdim=True)
        optimizer.zero_grad()
        own = slice(rank, None, world)
        torch.nn.functional.mse_loss(model(inputs[own]), targets[own]).backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def main():
    torch.set_num_threads(1)
    backend = sys.argv[1] if len(sys.argv) > 1 else "gloo"
    if backend == "phalanx":
        import phalanx_torch  # noqa: F401

    dist.init_process_group(backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if os.environ.get("FAILS_ONCE") and rank == 1 and restarts == "0":
        sys.exit(3)
    found = train(DistributedDataParallel(model()), rank, world)
    everybody = [torch.empty_like(found) for _ in range(world)]
    dist.all_gather(everybody, found)
    assert all(torch.equal(other, found) for other in everybody), "the replicas differ"
    torch.testing.assert_close(found, train(model(), 0, 1))
    if rank == 0:
        print(f"{world} replicas are as one process, restarts: {restarts}", flush=True)
    dist.destroy_process_group()


main()
