#!/usr/bin/env python3
"""Makes and destroys groups again and again, with operations of every kind between, and watches what the processes hold.

    python python/soak.py --cycles 10000
    python python/soak.py --cycles 200 --seconds 60        ends after 60 seconds, however far it has come
    python python/soak.py --cycles 500 --backend gloo      PyTorch's own, to compare
    python python/soak.py --minutes 60 --ranks 3           everything at once, until an hour has passed

Each cycle is `init_process_group`, collectives, messages, futures, a group of all ranks and one of some, and
`destroy_process_group`; in every tenth the last rank aborts the group instead. Every result is checked. After the first
tenth of the cycles, and at the end, each rank counts its memory, descriptors, threads and mappings. The exit status is 0 if all
cycles have been right, descriptors, threads and mappings have not grown, and memory by at most 2 KiB a group and 8 MiB.

With `--minutes`, each round is a job of its own with groups of some ranks and threads that call random collectives, over shared memory
and TCP in turn. Most rounds end with a failure: an abort, different calls, a rank that is late, one that is killed and replaced. Every
result and every error is checked, and after each round, that no thread of a group is left.
"""

import argparse
import ctypes
import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import time

# The package that is installed, and not its sources, which lie beside this file without the native part.
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path = [place for place in sys.path if place != HERE]

import torch
import torch.distributed as dist

import phalanx_torch  # noqa: F401

sys.path.append(HERE)
import soak_mixed

# Bytes in all, and for each cycle or group. What a group could leave behind is a thread's stack, a mapping, or a connection's buffers, each
# of which is a page of 4 KiB at least: half of that shows it. 0.75 kB a cycle is usual in 10,000, PyTorch's own part included. In all: freed
# memory that the allocator keeps since something in use lies above it. It does not grow with the cycles, so it is no leak, and
# hides none from 4,000 cycles on.
MOST_MEMORY = (8 << 20, 2 << 10)
# As glibc's <malloc.h> has it.
M_ARENA_MAX = -8
# Threads for callbacks come as needed, and stay; mappings are also the allocator's.
MORE = {"descriptors": 2, "threads": 4, "mappings": 40}


def held():
    gc.collect()
    # What has been freed is not held.
    ctypes.CDLL(None).malloc_trim(0)
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


def mixed(arguments):
    """The rounds of `soak_mixed`; replaces the last rank whenever it is killed. Returns the exit status."""
    fork, begin = multiprocessing.get_context("fork"), time.monotonic()
    seed = int.from_bytes(os.urandom(4), "little") if arguments.seed is None else arguments.seed
    print(f"--seed {seed}", flush=True)
    ranks, last = arguments.ranks, arguments.ranks - 1
    with tempfile.TemporaryDirectory() as folder:

        def start(rank, number):
            mine, theirs = fork.Pipe(duplex=False)
            options = (rank, ranks, arguments.minutes, folder, begin, number, seed, held, theirs)
            process = fork.Process(target=soak_mixed.rounds, args=options)
            process.start()
            theirs.close()
            return process, mine

        started, killed, results = {rank: start(rank, 0) for rank in range(ranks)}, 0, {}
        while started:
            multiprocessing.connection.wait([pipe for _, pipe in started.values()])
            for rank, (process, pipe) in list(started.items()):
                if not pipe.poll():
                    continue
                try:
                    results[rank] = pipe.recv()
                    process.join()
                    del started[rank]
                    continue
                except EOFError:
                    process.join()
                due = [name for name in os.listdir(folder) if name.startswith("killed-")]
                if rank == last and process.exitcode == -signal.SIGKILL and len(due) == 1:
                    os.unlink(f"{folder}/{due[0]}")
                    started[rank], killed = start(rank, int(due[0].removeprefix("killed-")) + 1), killed + 1
                    continue
                print(f"rank {rank} ended early, with exit status {process.exitcode}", flush=True)
                for other, _ in started.values():
                    other.kill()
                return 1
    failed = False
    for rank in range(last):
        rounds, _, marks = results[rank]
        (before, first), (after, final) = marks[0], marks[-1]
        what = f"{rounds} rounds in {time.monotonic() - begin:.0f} s, {killed} of rank {last} killed; in the last {after - before} groups"
        failed |= report(f"phalanx, rank {rank}: {what}", after - before, "group", first, final)
    return int(failed)


def report(what, count, each, first, last):
    """Prints what a process holds more than at `first`. Returns whether it is too much."""
    growth = {kind: last[kind] - first[kind] for kind in first}
    allowed = {"memory": MOST_MEMORY[0] + MOST_MEMORY[1] * count, **MORE}
    grown = [kind for kind in growth if growth[kind] > allowed[kind]]
    print(
        f"{what}: memory {growth['memory'] / 1024:+.0f} KiB ({growth['memory'] / max(count, 1):+.0f} bytes a {each}) to "
        f"{last['memory'] / (1 << 20):.0f} MiB, "
        + ", ".join(f"{kind} {growth[kind]:+d} to {last[kind]}" for kind in MORE)
        + (f": TOO MUCH {', '.join(grown)}" if grown else "")
    )
    return bool(grown)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=10000, help="at least 20")
    parser.add_argument("--seconds", type=float, default=0.0, help="end after that time, if it is not 0")
    parser.add_argument("--minutes", type=float, help="everything at once, for so long, instead of cycles")
    parser.add_argument("--seed", type=int, help="of the random calls of --minutes; another in each run if not given")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="phalanx")
    arguments = parser.parse_args()
    # glibc gives threads heaps of their own, which fill up slowly: from one for all, only what is held grows.
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    if arguments.minutes is not None:
        if arguments.ranks < 3 or arguments.backend != "phalanx":
            parser.error("--minutes: of phalanx, with --ranks 3 or more, one of which is killed again and again")
        sys.exit(mixed(arguments))
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
            what = f"{arguments.backend}, rank {rank}: {done} cycles in {seconds:.0f} s, in the last {cycles} of them"
            failed |= report(what, cycles, "cycle", first, last)
    sys.exit(failed)


if __name__ == "__main__":
    main()
