"""Times a collective over PyTorch's gloo, one process a rank, and prints a line of JSON for each size."""

import argparse
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from clock import measure, tell


def case(collective: str, rank: int, ranks: int, count: int):
    """What to call, and the tensor with the result beside what it must be (None where nothing ends)."""
    share, root = count // ranks, rank == 0
    base = torch.arange(count, dtype=torch.float32) % 61
    data, total = base + rank, base * ranks + ranks * (ranks - 1) / 2
    mine = slice(rank * share, (rank + 1) * share)
    part, whole = base[:share] + rank, torch.full((count,), -1.0)
    gathered = torch.cat([base[:share] + other for other in range(ranks)])
    lists = [list(tensor.chunk(ranks)) if count and root else None for tensor in (whole, data)]
    partner = rank ^ 1

    def send_recv() -> None:
        if partner < ranks:
            order = (dist.send, dist.recv) if rank < partner else (dist.recv, dist.send)
            for step in order:
                step(data if step is dist.send else whole, partner)

    match collective:
        case "all_reduce":
            return lambda: dist.all_reduce(data), data, total
        case "reduce":
            return lambda: dist.reduce(data, 0), data, total if root else None
        case "broadcast":
            return lambda: dist.broadcast(data, 0), data, base
        case "all_gather":
            return lambda: dist.all_gather_into_tensor(whole, part), whole, gathered
        case "gather":
            return lambda: dist.gather(part, lists[0], 0), whole, gathered if root else None
        case "scatter":
            return lambda: dist.scatter(part, lists[1], 0), part, base[mine]
        case "reduce_scatter":
            return lambda: dist.reduce_scatter_tensor(part, data), part, total[mine]
        case "all_to_all":
            expected = torch.cat([base[mine] + other for other in range(ranks)])
            return lambda: dist.all_to_all_single(whole, data), whole, expected
        case "send_recv":
            return send_recv, whole, base + partner if partner < ranks else None
        case _:
            return dist.barrier, data, None


def longest(seconds: float) -> float:
    slowest = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def worker(rank: int, ranks: int, port: int, collective: str, sizes: list[int]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    trips = 2 if collective == "send_recv" else 1
    for size in sizes:
        call, result, expected = case(collective, rank, ranks, size // 4)
        call()
        wrong = torch.tensor([0 if expected is None else int((result != expected).sum())])
        dist.all_reduce(wrong)
        # Sums of zeros stay zeros, however often they are summed.
        result.zero_()
        seconds = measure(call, longest)
        if rank == 0:
            tell(size, seconds / trips, wrong.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("collective")
    parser.add_argument("sizes", type=int, nargs="+")
    arguments = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(worker, (arguments.ranks, port, arguments.collective, arguments.sizes), nprocs=arguments.ranks)
