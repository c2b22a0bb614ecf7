"""A worker of torchrun with our package: makes a group over ``phalanx`` and one of some ranks, and does as it is told.

    torchrun.py FOLDER [HOW]  says `one group of N, local ranks [..]` on rank 0; then
                              `fails`  rank 1 fails at its first start
                              `slow`   so it does, and the ranks of node2 take 3 s to end
                              `stays`  calls until a call fails, or SIGUSR1 comes to rank 0, and says which
"""

import os
import signal
import socket
import sys
import time

import torch
import torch.distributed as dist

import phalanx_torch  # noqa: F401

BEGUN = time.monotonic()


def say(text):
    # The time since the start, for a reader; one call a line, which no other rank's cuts in two.
    os.write(1, f"{socket.gethostname()} rank {os.environ['RANK']}: {text} ({time.monotonic() - BEGUN:.1f} s)\n".encode())


def main():
    folder, how = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    torch.set_num_threads(1)
    begun = os.path.join(folder, f"{os.environ['RANK']}.{how}.begun")
    is_first = not os.path.exists(begun)
    open(begun, "w").close()
    is_told = []
    signal.signal(signal.SIGUSR1, lambda *_: is_told.append(True))
    try:
        dist.init_process_group("phalanx")
    except Exception as error:
        say(f"no group: {type(error).__name__}: {error}")
        raise SystemExit(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    locals_ = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(locals_, torch.tensor([int(os.environ["LOCAL_RANK"])]))
    # A group of some ranks meets in the same store.
    first = dist.new_group([0])
    rest = dist.new_group(list(range(1, world)))
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=rest if rank else first)
    assert tensor.item() == (sum(range(1, world)) if rank else 0)
    if rank == 0:
        say(f"one group of {world}, local ranks {[int(local) for local in locals_]}")
        with open(os.path.join(folder, f"rank0.{world}"), "w") as file:
            file.write(str(os.getpid()))
    try:
        if how in ("fails", "slow") and is_first:
            if rank == 1:
                raise SystemExit(7)
            dist.all_reduce(torch.ones(3))
        while how == "stays":
            # All end in the same step.
            told = torch.tensor([float(bool(is_told))])
            dist.all_reduce(told)
            if told.item():
                break
            time.sleep(0.05)
    except RuntimeError as error:
        say(f"a call failed: {type(error).__name__}: {error}")
        if how == "slow" and socket.gethostname() == "node2":
            time.sleep(3)
        raise SystemExit(1)
    if rank == 0:
        say(f"all {world} have ended together")
    dist.destroy_process_group()


main()
