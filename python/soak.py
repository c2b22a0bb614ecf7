#!/usr/bin/env python3
"""Makes and destroys groups again and again, with operations of every kind between, and watches what the processes hold.

    python soak.py --cycles 10000
    python soak.py --cycles 200 --seconds 60        ends after 60 seconds, however far it has come
    python soak.py --cycles 500 --backend gloo      PyTorch's own, to compare

Each cycle is `init_process_group`, collectives, messages, futures, a group of all ranks and one of some, and
`destroy_process_group`; in every tenth the last rank aborts the group instead. Every result is checked. After the first
tenth of the cycles, and at the end, each rank counts its memory, descriptors, threads and mappings. The exit status is 0 if all
cycles have been right, descriptors, threads and mappings have not grown, and memory by at most 2 KiB a cycle and 8 MiB.
"""

import argparse
import gc
import multiprocessing
import os
import sys
import tempfile
import time

# The package that is installed, and not its sources, which lie beside this file without the native part.
sys.path = [place for place in sys.path if place != os.path.dirname(os.path.abspath(__file__))]

import torch
import torch.distributed as dist

import phalanx_torch  # noqa: F401

MOST_MEMORY = (8 << 20, 2 << 10)
# Threads for callbacks come as needed, and stay; mappings are also the allocator's.
MORE = {"descriptors": 2, "threads": 4, "mappings": 40}


def held():
    gc.collect()
    with open("/proc/self/statm") as statm, open("/proc/self/maps") as maps:
        resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")
        return {
            "memory": resident,
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "mappings": sum(1 for _ in maps),
        }


def expect(found, expected, what):
    if found != expected:
        raise AssertionError(f"{what}: {found}, and not {expected}")


def operations(rank, ranks, elements, lists):
    total = ranks * (ranks + 1) / 2
    tensor = torch.full((elements,), rank + 1.0)
    dist.all_reduce(tensor)
    expect((tensor[0].item(), tensor[-1].item()), (total, total), "all_reduce")
    # A copy goes there and back.
    matrix = torch.full((4, 6), rank + 1.0).t()
    work = dist.all_reduce(matrix, async_op=True)
    chained = work.get_future().then(lambda done: matrix.sum().item())
    expect(chained.wait(), 24 * total, "the future of an all_reduce")
    dist.broadcast(tensor.fill_(rank), ranks - 1)
    expect(tensor[0].item(), ranks - 1, "broadcast")
    gathered = [torch.zeros(3, dtype=torch.int64) for _ in range(ranks)]
    dist.all_gather(gathered, torch.full((3,), rank))
    expect([one[0].item() for one in gathered], list(range(ranks)), "all_gather")
    if lists:
        output = torch.zeros(ranks)
        dist.all_to_all_single(output, torch.arange(ranks) + 10.0 * rank)
        expect(output.tolist(), [10.0 * other + rank for other in range(ranks)], "all_to_all_single")
        part = torch.zeros(2)
        dist.reduce_scatter_tensor(part, torch.ones(2 * ranks))
        expect(part.tolist(), [ranks, ranks], "reduce_scatter_tensor")
    received = torch.zeros(5)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.full((5,), float(rank)), (rank + 1) % ranks),
            dist.P2POp(dist.irecv, received, (rank - 1) % ranks),
        ]
    )
    for work in works:
        work.wait()
    expect(received[0].item(), (rank - 1) % ranks, "messages")
    objects = [None] * ranks
    dist.all_gather_object(objects, {"rank": rank})
    expect([one["rank"] for one in objects], list(range(ranks)), "all_gather_object")
    dist.barrier()


def cycle(number, rank, ranks, backend, folder):
    dist.init_process_group(backend, f"file://{folder}/{number}", rank=rank, world_size=ranks)
    # From a few bytes to what passes through several windows of shared memory.
    operations(rank, ranks, 1 << number % 20, backend != "gloo")
    aborts = number % 10 == 9 and backend == "phalanx"
    if number % 5 == 0:
        some, every = dist.new_group([0, 1]), dist.new_group()
        tensor = torch.ones(7)
        for group, size in ((some, 2), (every, ranks)):
            if dist.get_rank(group) >= 0:
                dist.all_reduce(tensor.fill_(1.0), group=group)
                expect(tensor[0].item(), size, "all_reduce of a group")
        dist.destroy_process_group(every)
    if aborts and rank == ranks - 1:
        dist.group.WORLD.abort()
    elif aborts:
        try:
            while True:
                dist.all_reduce(torch.ones(3))
        except phalanx_torch.Error as error:
            expect((error.kind, error.peer), ("aborted", ranks - 1), "the error of an abort")
    # The store's file goes with the last of its processes.
    dist.destroy_process_group()


def soak(rank, ranks, backend, cycles, seconds, folder, pipe):
    torch.set_num_threads(1)
    begin, first, done = time.monotonic(), None, 0
    # Rank 0 decides how far to go, a few cycles ahead.
    last = cycles
    for number in range(cycles):
        if number == max(10, cycles // 10):
            first = (number, held())
        if number % 10 == 0 and seconds:
            mark = f"{folder}/until-{number}"
            if rank == 0:
                late = time.monotonic() - begin > seconds and first is not None
                with open(mark + ".new", "w") as file:
                    file.write(str(number if late else cycles))
                os.rename(mark + ".new", mark)
            waited = time.monotonic()
            while not os.path.exists(mark):
                if time.monotonic() - waited > 60:
                    raise AssertionError("rank 0 does not come")
                time.sleep(0.001)
            with open(mark) as file:
                last = int(file.read())
        if number >= last:
            break
        cycle(number, rank, ranks, backend, folder)
        done = number + 1
    pipe.send((done, time.monotonic() - begin, first, held()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=10000, help="at least 20")
    parser.add_argument("--seconds", type=float, default=0.0, help="end after that time, if it is not 0")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="phalanx")
    arguments = parser.parse_args()
    if arguments.cycles < 20:
        parser.error("--cycles: at least 20, of which the first ten settle what a process holds")
    fork, started, failed = multiprocessing.get_context("fork"), [], False
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(arguments.ranks):
            mine, theirs = fork.Pipe(duplex=False)
            options = (rank, arguments.ranks, arguments.backend, arguments.cycles, arguments.seconds, folder, theirs)
            process = fork.Process(target=soak, args=options)
            process.start()
            theirs.close()
            started.append((process, mine))
        for rank, (process, pipe) in enumerate(started):
            try:
                done, seconds, (after, first), last = pipe.recv()
            except EOFError:
                process.join()
                print(f"rank {rank} ended early, with exit status {process.exitcode}", flush=True)
                for other, _ in started:
                    other.kill()
                sys.exit(1)
            process.join()
            cycles = done - after
            growth = {what: last[what] - first[what] for what in first}
            allowed = {"memory": MOST_MEMORY[0] + MOST_MEMORY[1] * cycles, **MORE}
            grown = [what for what in growth if growth[what] > allowed[what]]
            print(
                f"{arguments.backend}, rank {rank}: {done} cycles in {seconds:.0f} s, in the last {cycles} of them: memory "
                f"{growth['memory'] / 1024:+.0f} KiB ({growth['memory'] / max(cycles, 1):+.0f} bytes a cycle) to "
                f"{last['memory'] / (1 << 20):.0f} MiB, "
                + ", ".join(f"{what} {growth[what]:+d} to {last[what]}" for what in MORE)
                + (f": TOO MUCH {', '.join(grown)}" if grown else "")
            )
            failed |= bool(grown)
    sys.exit(failed)


if __name__ == "__main__":
    main()
