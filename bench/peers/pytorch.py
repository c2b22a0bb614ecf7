"""Times a collective on PyTorch's tensors, one process a rank, and prints a line of JSON for each size.

    python pytorch.py --by gloo --ranks 2 all_reduce 4 65536 1048576

By gloo, or by phalanx, as backends of `torch.distributed`; or by the operators that DeepSpeed and vLLM have for an all_reduce through shared memory, which are called
themselves, without the Python that wraps them. (A script named after either would hide the package from `import`.)
"""

import argparse
import functools
import importlib.util
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "python" / "tests"))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from clock import measure, tell
from ports import free_port

HOST = "127.0.0.1"
OPERATORS = ("deepspeed", "vllm")
# How the names of the segments begin that both leave behind; what follows is a rank.
DEEPSPEED = "deepspeed_allreduce_buffer_{uid}_{host}_{port}_"
VLLM = "phalanx-peers-{port}-"


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


def deepspeed(rank: int, ranks: int, port: int) -> Callable[[torch.Tensor], None]:
    """Builds the operator where that has not been done (a minute)."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_SIZE": str(ranks)}
    import deepspeed.comm

    deepspeed.comm.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    return torch.ops.deepspeed.inference_all_reduce_


def vllm(rank: int, ranks: int, port: int) -> Callable[[torch.Tensor], None]:
    package = Path(importlib.util.find_spec("vllm").origin).parent
    torch.ops.load_library(next(package.glob("_C_AVX512*.so")))
    operators, name = torch.ops._C, VLLM.format(port=port)
    handle = operators.init_shm_manager(name, ranks, rank, 1)
    dist.barrier()
    operators.join_shm_manager(handle, name)
    dist.barrier()
    return lambda tensor: operators.shm_allreduce(handle, tensor)


def bind(rank: int, ranks: int) -> None:
    """A processor for each rank, as far as there are enough: both operators spin."""
    processors = sorted(os.sched_getaffinity(0))
    if ranks <= len(processors):
        os.sched_setaffinity(0, {processors[rank]})


def worker(rank: int, by: str, ranks: int, port: int, collective: str, sizes: list[int]) -> None:
    os.environ.update(MASTER_ADDR=HOST, MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", DS_ACCELERATOR="cpu")
    torch.set_num_threads(1)
    if by == "phalanx":
        import phalanx_torch  # noqa: F401  It registers the backend.
    dist.init_process_group("phalanx" if by == "phalanx" else "gloo", rank=rank, world_size=ranks)
    reduce = None
    if by in OPERATORS:
        bind(rank, ranks)
        reduce = (deepspeed if by == "deepspeed" else vllm)(rank, ranks, port)
    trips = 2 if collective == "send_recv" else 1
    for size in sizes:
        call, result, expected = case(collective, rank, ranks, size // 4)
        if reduce:
            call = functools.partial(reduce, result)
        call()
        wrong = torch.tensor([0 if expected is None else int((result != expected).sum())])
        dist.all_reduce(wrong)
        # Sums of zeros stay zeros, however often they are summed.
        result.zero_()
        seconds = measure(call, longest)
        if rank == 0:
            tell(size, seconds / trips, wrong.item())
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--by", choices=["gloo", "phalanx", *OPERATORS], default="gloo")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("collective")
    parser.add_argument("sizes", type=int, nargs="+")
    arguments = parser.parse_args()
    if arguments.by in OPERATORS and arguments.collective != "all_reduce":
        parser.error(f"{arguments.by} is timed for all_reduce only")
    port = free_port()
    # The end that run.py sends must not skip what removes the segments.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    given = (arguments.by, arguments.ranks, port, arguments.collective, arguments.sizes)
    try:
        mp.spawn(worker, given, nprocs=arguments.ranks)
    finally:
        for pattern in (DEEPSPEED, VLLM):
            for segment in Path("/dev/shm").glob(pattern.format(uid=os.getuid(), host=HOST, port=port) + "*"):
                segment.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
