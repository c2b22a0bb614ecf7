"""The same calls as `phalanx bench rpc`, on PyTorch's RPC (tensorpipe): a function that returns its argument.

    python rpc.py [--min-bytes 4] [--max-bytes 16777216] [--factor 16] [-n CALLS] [--in-flight 16]
                  [--transport tcp]

Prints a line of JSON for each size, with the columns of `phalanx bench rpc --json`.
"""

import argparse
import collections
import json
import os
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "python" / "tests"))

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from ports import free_port

MOVED = 256 << 20
# What warms up before the first size, in seconds.
WARM_UP = 1.0


def echo(argument):
    return argument


def warm_up(size):
    begin = time.perf_counter()
    argument = torch.ones(size, dtype=torch.uint8)
    while time.perf_counter() - begin < WARM_UP:
        rpc.rpc_sync("rank1", echo, args=(argument,))


def measure(size, count, in_flight, transport):
    count = count or min(max(MOVED // size, 20), 5000)
    argument = torch.ones(size, dtype=torch.uint8)
    times = []
    for call in range(count + count // 10 + 1):
        begin = time.perf_counter()
        back = rpc.rpc_sync("rank1", echo, args=(argument,))
        if call > count // 10:
            times.append((time.perf_counter() - begin) * 1e6)
        assert back.numel() == size
    times.sort()
    waiting = collections.deque()
    begin = time.perf_counter()
    for _ in range(count):
        if len(waiting) == in_flight:
            waiting.popleft().wait()
        waiting.append(rpc.rpc_async("rank1", echo, args=(argument,)))
    for call in waiting:
        call.wait()
    calls = count / (time.perf_counter() - begin)
    row = dict(benchmark="rpc", library="pytorch", transport=transport, bytes=size)
    row.update(time_us=times[len(times) // 2], p99_us=times[min(len(times) * 99 // 100, len(times) - 1)])
    row.update(calls_per_s=calls, mb_per_s=calls * 2 * size / 1e6)
    print(json.dumps(row), flush=True)


def work(rank, port, options):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    # Within a host tensorpipe takes shared memory (and process_vm_readv) unless it is told otherwise.
    only = dict(_transports=["uv"], _channels=["basic"]) if options.transport == "tcp" else {}
    backend = rpc.TensorPipeRpcBackendOptions(num_worker_threads=16, **only)
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2, rpc_backend_options=backend)
    size = options.min_bytes
    if rank == 0:
        warm_up(size)
    while rank == 0 and size <= options.max_bytes:
        measure(size, options.iterations, options.in_flight, options.transport)
        size *= options.factor
    rpc.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--min-bytes", type=int, default=4)
    parser.add_argument("--max-bytes", type=int, default=16 << 20)
    parser.add_argument("--factor", type=int, default=16)
    parser.add_argument("-n", "--iterations", type=int, help="calls of each size [default: 256 MiB, from 20 to 5000]")
    parser.add_argument("--in-flight", type=int, default=16)
    parser.add_argument("--transport", choices=["shm", "tcp"], default="shm")
    options = parser.parse_args()
    mp.spawn(work, (free_port(), options), nprocs=2)
