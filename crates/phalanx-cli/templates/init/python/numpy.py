"""Trains a model in as many processes as the launcher starts, each on its own part of the data."""

import numpy
import phalanx_torch

SAMPLES = 10_000
# Of one rank.
BATCH_SIZE = 64
EPOCHS = 5
LEARNING_RATE = 1e-1


def train(group: phalanx_torch.ArrayGroup) -> None:
    """What each rank does."""
    xs = numpy.random.default_rng(1).standard_normal((SAMPLES, 4))  # every rank makes the same data
    ys = xs.sum(1)

    weights = numpy.random.default_rng().uniform(-0.5, 0.5, 4)
    group.broadcast(weights, root=0)  # every rank begins with rank 0's

    for epoch in range(EPOCHS):
        order = numpy.random.default_rng(epoch).permutation(SAMPLES)  # another order in each, the same on every rank
        mine = order[group.rank :: group.world_size][: SAMPLES // group.world_size]  # equally many on each rank
        for step, start in enumerate(range(0, len(mine), BATCH_SIZE)):
            indices = mine[start : start + BATCH_SIZE]
            errors = xs[indices] @ weights - ys[indices]
            loss = numpy.mean(errors**2)
            gradient = 2 * errors @ xs[indices] / len(indices)
            group.all_reduce(gradient, "avg")  # the average over all ranks
            weights -= LEARNING_RATE * gradient

            if step % 20 == 0 and group.rank == 0:
                print(f"epoch {epoch}, step {step}: loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    with phalanx_torch.init() as group:  # as the launcher says; alone, a world of one
        train(group)
