"""Trains a model in as many processes as the launcher starts, each on its own part of the data."""

import os
import sys

import phalanx_torch  # noqa: F401, the backend "phalanx" of torch.distributed
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SAMPLES = 10_000
# Of one rank.
BATCH_SIZE = 64
EPOCHS = 5
LEARNING_RATE = 1e-2


def train() -> None:
    """What each rank does."""
    torch.manual_seed(1)  # every rank makes the same data
    xs = torch.randn(SAMPLES, 4)
    data = TensorDataset(xs, xs.sum(1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, BATCH_SIZE, sampler=sampler)

    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # another order in each
        for step, (x, y) in enumerate(loader):
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()  # the gradients are the average over all ranks
            optimizer.step()

            if step % 20 == 0 and dist.get_rank() == 0:
                print(f"epoch {epoch}, step {step}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit("this is a worker of a job: start it by `phalanx run --nproc-per-node 2 -- python3 train.py`, or by torchrun")
    dist.init_process_group("phalanx")
    train()
    dist.destroy_process_group()
