"""torch.distributed's all_reduce over NCCL, timed as `phalanx bench all_reduce --device cuda` times ours: a call, until the device has
done it. `python3 torch_nccl.py RANKS`: a process for each device of this machine."""

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank, ranks):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    if rank == 0:
        print(f"torch {torch.__version__}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, {ranks} ranks: all_reduce, f32, sum")
    size = 4
    while size <= 1 << 30:
        data = torch.full((size // 4,), rank + 1.0, device="cuda")
        dist.all_reduce(data)
        if not bool((data == ranks * (ranks + 1) / 2).all()):
            sys.exit(f"rank {rank}: an all_reduce of {size} bytes has come out wrong")
        # Sums of zeros stay zeros, however often they are summed.
        data.zero_()
        times = []
        for call in range(60):
            begun = time.perf_counter()
            dist.all_reduce(data)
            torch.cuda.synchronize()
            if call >= 10:
                times.append((time.perf_counter() - begun) * 1e6)
        if rank == 0:
            print(f"{size:>11} bytes  median {statistics.median(times):10.2f} us  min {min(times):10.2f} us")
        size *= 16
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks = int(sys.argv[1])
    mp.spawn(work, args=(ranks,), nprocs=ranks)
