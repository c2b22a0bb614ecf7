"""Times all_reduce over PyTorch's gloo, one process a rank, and prints a line of JSON for each size."""

import argparse
import json
import os
import socket
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# The same as `phalanx bench`: calls before the clock starts, and how often each size is timed.
WARM_UP = 3
BUDGET = 400 << 20
FEWEST, MOST = 8, 1000


def worker(rank: int, ranks: int, port: int, sizes: list[int]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    for size in sizes:
        check = torch.ones(size // 4)
        dist.all_reduce(check)
        wrong = int((check != ranks).sum())
        data = torch.zeros(size // 4)
        for _ in range(WARM_UP):
            dist.all_reduce(data)
        times = []
        dist.barrier()
        for _ in range(min(MOST, max(FEWEST, BUDGET // (size + BUDGET // MOST)))):
            start = time.perf_counter()
            dist.all_reduce(data)
            times.append(time.perf_counter() - start)
        median = torch.tensor([sorted(times)[len(times) // 2]], dtype=torch.float64)
        dist.all_reduce(median, dist.ReduceOp.MAX)
        if rank == 0:
            print(json.dumps({"bytes": size, "time_us": median.item() * 1e6, "wrong": wrong}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("sizes", type=int, nargs="+")
    arguments = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(worker, (arguments.ranks, port, arguments.sizes), nprocs=arguments.ranks)
