"""What `soak.py --minutes` runs: rounds of everything at once, most of which end with a failure.

A round is a job of its own in the same processes: a group of all ranks, over shared memory or TCP, groups of some, and threads that call
random collectives, each on groups of its own. All ranks draw the same random numbers, so each knows what it must get. Then the round
ends: as it should, or a rank aborts a group, calls something else than the others, does not come, or is killed.
"""

import datetime
import faulthandler
import os
import random
import signal
import threading
import time

import torch
import torch.distributed as dist

import phalanx_torch

THREADS = 3
# A round that takes longer hangs: where is printed, and the process ends.
LONGEST = 300.0
# How the rounds end, again and again. An odd number of them, so that each meets both transports.
ENDS = ("destroyed", "aborted", "different calls", "destroyed", "late", "destroyed", "killed")
# These threads serve all groups of the process, and stay.
OF_THE_PROCESS = "phalanx-callbac"
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float32, torch.float64, torch.bfloat16)


class Ranks:
    """A group, and what one thread of this rank does with it."""

    def __init__(self, group, seed):
        self.group = group
        self.me, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.everyone = [dist.get_global_rank(group, rank) for rank in range(self.size)]
        self.random = random.Random(seed)
        self.tag = 1

    def length(self):
        return self.random.choice((0, 1, 2, 3)) + 2 ** self.random.randrange(17)

    def of(self, rank, count, dtype=torch.float32):
        """What `rank` has: small whole numbers, which sums of a few ranks keep exact."""
        return (torch.arange(count) % 5 + rank + 1).to(dtype)

    def done(self, work):
        """Ends a call in one of the ways in which programs wait. `None` has ended."""
        how = self.random.randrange(4)
        if work is not None and how == 0:
            work.get_future().wait()
        elif work is not None and how == 1:
            work.get_future().then(lambda done: None).wait()
        elif work is not None:
            work.wait()

    def calls(self):
        """Half of the calls return at once."""
        return {"group": self.group, "async_op": self.random.random() < 0.5}

    def combined(self, op, count, dtype):
        wide = [self.of(rank, count, torch.int64 if dtype in INTEGERS else torch.float64) for rank in range(self.size)]
        every = torch.stack(wide)
        if op == dist.ReduceOp.AVG:
            return every.sum(0).div(self.size, rounding_mode="trunc" if dtype in INTEGERS else None).to(dtype)
        if op == dist.ReduceOp.MAX:
            return every.amax(0).to(dtype)
        return (every.prod(0) if op == dist.ReduceOp.PRODUCT else every.sum(0)).to(dtype)

    def reduced(self):
        dtype = self.random.choice(INTEGERS + FLOATS)
        op = self.random.choice((dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT))
        return op, dtype, self.length()

    # The calls. Each checks its result.

    def all_reduce(self):
        op, dtype, count = self.reduced()
        tensor = self.of(self.me, count, dtype)
        if count % 2 == 0 and self.random.random() < 0.3:
            # Not contiguous: it goes through a copy.
            tensor = tensor.reshape(2, -1).t().contiguous().t()
        self.done(dist.all_reduce(tensor, op, **self.calls()))
        torch.testing.assert_close(tensor.flatten(), self.combined(op, count, dtype))

    def reduce(self):
        (op, dtype, count), root = self.reduced(), self.random.randrange(self.size)
        tensor = self.of(self.me, count, dtype)
        self.done(dist.reduce(tensor, self.everyone[root], op, **self.calls()))
        expected = self.combined(op, count, dtype) if self.me == root else self.of(self.me, count, dtype)
        torch.testing.assert_close(tensor, expected)

    def reduce_scatter(self):
        op, dtype, count = self.reduced()
        part, whole = torch.empty(count, dtype=dtype), self.of(self.me, count * self.size, dtype)
        if self.random.random() < 0.5:
            self.done(dist.reduce_scatter_tensor(part, whole, op, **self.calls()))
        else:
            self.done(dist.reduce_scatter(part, list(whole.chunk(self.size)), op, **self.calls()))
        expected = self.combined(op, count * self.size, dtype)
        torch.testing.assert_close(part, expected[count * self.me : count * (self.me + 1)])

    def broadcast(self):
        count, root = self.length(), self.random.randrange(self.size)
        tensor = self.of(self.me, count)
        self.done(dist.broadcast(tensor, self.everyone[root], **self.calls()))
        torch.testing.assert_close(tensor, self.of(root, count))

    def all_gather(self):
        count, even = self.length(), self.random.random() < 0.5
        counts = [count if even else count + rank for rank in range(self.size)]
        gathered = [torch.empty(count) for count in counts]
        self.done(dist.all_gather(gathered, self.of(self.me, counts[self.me]), **self.calls()))
        for rank, tensor in enumerate(gathered):
            torch.testing.assert_close(tensor, self.of(rank, counts[rank]))
        whole = torch.empty(count * self.size)
        self.done(dist.all_gather_into_tensor(whole, self.of(self.me, count), **self.calls()))
        torch.testing.assert_close(whole, torch.cat([self.of(rank, count) for rank in range(self.size)]))

    def gather_and_scatter(self):
        count, root = self.length(), self.random.randrange(self.size)
        gathered = [torch.empty(count) for _ in range(self.size)] if self.me == root else None
        self.done(dist.gather(self.of(self.me, count), gathered, self.everyone[root], **self.calls()))
        for rank, tensor in enumerate(gathered or []):
            torch.testing.assert_close(tensor, self.of(rank, count))
        part = torch.empty(count)
        self.done(dist.scatter(part, gathered, self.everyone[root], **self.calls()))
        torch.testing.assert_close(part, self.of(self.me, count))

    def all_to_all(self):
        # From rank a to rank b: b + 1 elements of a's.
        sent = [other + 1 for other in range(self.size)]
        received = [self.me + 1] * self.size
        output = torch.empty(sum(received))
        given = torch.cat([self.of(self.me, count) for count in sent])
        self.done(dist.all_to_all_single(output, given, received, sent, **self.calls()))
        torch.testing.assert_close(output, torch.cat([self.of(rank, self.me + 1) for rank in range(self.size)]))
        outputs = [torch.empty(self.me + 1) for _ in range(self.size)]
        self.done(dist.all_to_all(outputs, list(given.split(sent)), **self.calls()))
        torch.testing.assert_close(torch.cat(outputs), output)

    def messages(self):
        count, after, before = self.length(), (self.me + 1) % self.size, (self.me - 1) % self.size
        if self.size == 1:
            return
        received = torch.empty(count)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self.of(self.me, count), self.everyone[after], self.group),
                dist.P2POp(dist.irecv, received, self.everyone[before], self.group),
            ]
        )
        for work in works:
            work.wait()
        torch.testing.assert_close(received, self.of(before, count))
        # Another tag each time: nobody takes a message of the next call for one of this.
        root, tag, self.tag = self.random.randrange(self.size), self.tag, self.tag + 1
        if self.me != root:
            dist.send(self.of(self.me, 9), self.everyone[root], self.group, tag)
            return
        sources = []
        for _ in range(self.size - 1):
            received = torch.empty(9)
            source = dist.recv(received, None, self.group, tag)
            sources.append(self.everyone.index(source))
            torch.testing.assert_close(received, self.of(sources[-1], 9))
        if sorted(sources) != [rank for rank in range(self.size) if rank != root]:
            raise AssertionError(f"messages from {sources}")

    def objects(self):
        every = [None] * self.size
        dist.all_gather_object(every, {"rank": self.me}, self.group)
        if every != [{"rank": rank} for rank in range(self.size)]:
            raise AssertionError(f"all_gather_object: {every}")

    def sparse(self):
        place = torch.tensor([[self.me, self.size]])
        tensor = torch.sparse_coo_tensor(place, torch.ones(2), (self.size + 1,), check_invariants=True)
        self.done(dist.all_reduce(tensor, group=self.group))
        if tensor.to_dense().tolist() != [1.0] * self.size + [float(self.size)]:
            raise AssertionError(f"all_reduce of sparse tensors: {tensor}")

    def barrier(self):
        if self.random.random() < 0.5:
            self.group.monitored_barrier(datetime.timedelta(seconds=60))
        else:
            self.done(dist.barrier(**self.calls()))

    ALL = (
        all_reduce,
        all_reduce,
        reduce,
        reduce_scatter,
        broadcast,
        all_gather,
        gather_and_scatter,
        all_to_all,
        messages,
        objects,
        sparse,
        barrier,
    )

    def some(self, calls):
        for _ in range(calls):
            self.random.choice(self.ALL)(self)

    def until_it_fails(self, kind, blamed=None, first=None):
        """Goes on, after the call `first`, until the group fails: for this reason, and by the rank `blamed` of it, if that is known."""
        try:
            if first is not None:
                first()
            while True:
                dist.all_reduce(torch.ones(3), group=self.group)
        except phalanx_torch.Error as error:
            if error.kind != kind or blamed not in (None, error.peer):
                raise AssertionError(f"{kind}, by rank {blamed}, was expected") from error


def on_threads(calls):
    """Runs each on a thread of its own; raises the first error."""
    errors = []

    def guarded(call):
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def own_threads():
    """The names of this process's threads that belong to a group."""
    names = []
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/comm") as comm:
                names.append(comm.read().strip())
        except (FileNotFoundError, ProcessLookupError):
            continue  # It has ended meanwhile.
    return sorted(name for name in names if name.startswith("phalanx") and name != OF_THE_PROCESS)


def wait_until(what, look):
    """Returns when `look()` is false, which says what is still there."""
    deadline = time.monotonic() + LONGEST / 2
    while left := look():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: {left}")
        time.sleep(0.005)


def all_are_here(mark, rank, ranks):
    """A barrier without a group."""
    open(f"{mark}-{rank}", "w").close()
    wait_until("ranks do not come", lambda: [one for one in range(ranks) if not os.path.exists(f"{mark}-{one}")])


def one_round(number, rank, ranks, folder, seed):
    """Returns how many groups it has made."""
    end, shared = ENDS[number % len(ENDS)], random.Random(f"{seed} {number}")
    os.environ["PHALANX_TRANSPORT"] = ("shm", "tcp")[number % 2]
    dist.init_process_group("phalanx", f"file://{folder}/{number}", rank=rank, world_size=ranks)
    world = Ranks(dist.group.WORLD, f"{seed} {number} world")
    if dist.group.WORLD.transport != os.environ["PHALANX_TRANSPORT"]:
        raise AssertionError(f"the transport is {dist.group.WORLD.transport}")
    members = list(range(ranks))
    left_out = shared.randrange(ranks)
    lists = [members] * THREADS + [[one for one in members if one != left_out], shared.sample(members, ranks)]
    groups = [dist.new_group(list_of_ranks) for list_of_ranks in lists]
    mine = [Ranks(group, f"{seed} {number} {place}") for place, group in enumerate(groups) if dist.get_rank(group) >= 0]
    whole = mine[:THREADS]
    on_threads([lambda one=one: one.some(12) for one in [*mine, world]])
    # Nobody ends a group in which another rank still waits for a random call.
    all_are_here(f"{folder}/done-{number}", rank, ranks)
    culprit, chosen = shared.randrange(ranks), shared.randrange(THREADS)
    group = whole[chosen]
    if end == "aborted":
        group.group.abort() if rank == culprit else group.until_it_fails("aborted", culprit)
    elif end == "different calls":
        other = (lambda: dist.broadcast(torch.ones(4), 0, group.group)) if rank == culprit else None
        group.until_it_fails("mismatch", first=other)
    elif end == "late":
        group.group.set_timeout(datetime.timedelta(seconds=1))
        mark = f"{folder}/late-{number}"
        if rank == culprit:
            wait_until("nobody has waited in vain", lambda: not os.path.exists(mark))
        # Where one rank's patience ends just when the late one comes, others may still have that result.
        group.until_it_fails("timeout")
        open(mark, "w").close()
    elif end == "killed":
        # The last rank, which is not measured, and which soak.py starts again.
        if rank == ranks - 1:
            with open(f"{folder}/killed-{number}", "w"):
                os.kill(os.getpid(), signal.SIGKILL)
        on_threads([lambda one=one: one.until_it_fails("peer_failed", ranks - 1) for one in [*whole, world]])
    if end == "destroyed":
        # One group by itself, before the others.
        dist.destroy_process_group(group.group)
        world.some(2)
    dist.destroy_process_group()
    del mine, whole, group, groups, world
    wait_until("threads of groups that have been destroyed", own_threads)
    return 1 + len(lists)


def rounds(rank, ranks, minutes, folder, begin, start, seed, held, pipe):
    """Rounds from `start` on, until `minutes` have passed since `begin`, and what this process holds in between."""
    torch.set_num_threads(1)
    number, made, marks = start, 0, []
    # Once through all ends on both transports; then what a process holds has settled.
    settled = start + 2 * len(ENDS)
    while True:
        faulthandler.dump_traceback_later(LONGEST, exit=True)
        goes_on = f"{folder}/goes-on-{number}"
        if rank == 0:
            late = time.monotonic() - begin > 60 * minutes and number > settled + len(ENDS)
            with open(goes_on + ".new", "w") as file:
                file.write("" if late else "yes")
            os.rename(goes_on + ".new", goes_on)
        wait_until("rank 0 does not come", lambda: not os.path.exists(goes_on))
        with open(goes_on) as file:
            if not file.read():
                break
        made += one_round(number, rank, ranks, folder, seed)
        number += 1
        if number >= settled:
            marks.append((made, held()))
    faulthandler.cancel_dump_traceback_later()
    pipe.send((number, made, marks))
