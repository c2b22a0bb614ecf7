"""Ctrl-C: a real SIGINT to a rank that waits."""

import datetime
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from conftest import free_port, press, processes
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

import phalanx_torch

# A page says 0.06 s, and `pytest -rP` prints how long it took. On a machine that does other work, too, this is far less than the waits take.
PATIENCE = 20.0


def _interrupted(wait):
    """Presses Ctrl-C while `wait` waits, and sees it answered by a KeyboardInterrupt."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    pressed = press()
    try:
        result = wait()
    except KeyboardInterrupt:
        late = time.monotonic() - pressed[0]
        # For `pytest -rP`.
        print(f"answered after {late:.3f} s")
        assert late < PATIENCE
        return
    raise AssertionError(f"no KeyboardInterrupt, but {result}")


COLLECTIVES = {
    "barrier": lambda: dist.barrier(),
    "all_reduce": lambda: dist.all_reduce(torch.ones(3)),
    "large all_reduce": lambda: dist.all_reduce(torch.ones(1 << 20)),
    "all_gather_object": lambda: dist.all_gather_object([None, None], "x"),
    "broadcast_object_list": lambda: dist.broadcast_object_list([None], src=1),
    "our all_gather_object": lambda: phalanx_torch.all_gather_object([None, None], "x"),
    "our broadcast_object_list": lambda: phalanx_torch.broadcast_object_list([None], src=1),
    "our recv_object_list": lambda: phalanx_torch.recv_object_list([None], src=1),
    "new_group": lambda: dist.new_group([0, 1]),
}


def _collective(rank, name):
    if rank == 0:
        _interrupted(COLLECTIVES[name])
        failure = dist.group.WORLD.failure()
    else:
        while (failure := dist.group.WORLD.failure()) is None:
            time.sleep(0.01)
    # Both know why, and who.
    assert failure.kind == "aborted" and "rank 0" in str(failure) and "interrupted by KeyboardInterrupt" in str(failure)
    with pytest.raises(phalanx_torch.Error, match="interrupted by KeyboardInterrupt"):
        dist.barrier()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("name", [name for name in COLLECTIVES if name != "new_group"])
def test_a_call_that_waits_raises_and_the_group_fails_with_the_cause(ranks, name, transport, monkeypatch):
    monkeypatch.setenv("PHALANX_TRANSPORT", transport)
    ranks(2, _collective, name)


def _work(rank, wait):
    other = torch.full((4,), 7.0)
    if rank == 0:
        if wait == "all_reduce":
            tensor = torch.ones(4)
            work = dist.all_reduce(tensor, async_op=True)
        else:
            tensor = torch.zeros(4)
            work = dist.irecv(tensor, 1)
        _interrupted(work.wait)
        dist.group.WORLD._store.set("pressed", "")
        # It goes on, and can be waited for again.
        work.wait()
        assert tensor.tolist() == ([8.0] * 4 if wait == "all_reduce" else [7.0] * 4)
    else:
        dist.group.WORLD._store.get("pressed")
        dist.all_reduce(other) if wait == "all_reduce" else dist.send(other, 0)
    dist.barrier()


@pytest.mark.parametrize("wait", ["all_reduce", "recv"])
def test_work_goes_on_when_its_wait_is_interrupted(ranks, wait):
    ranks(2, _work, wait)


def _backward_of_ddp(rank, with_hook):
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    if with_hook:
        # It makes calls in callbacks, and waits in itself.
        ddp.register_comm_hook(powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook)
    for _ in range(4):
        ddp(torch.ones(1, 2)).sum().backward()
    if rank == 0:
        _interrupted(lambda: ddp(torch.ones(1, 2)).sum().backward())
    else:
        while dist.group.WORLD.failure() is None:
            time.sleep(0.01)
    # DDP cannot go on with a step that was cut off, and both know why.
    with pytest.raises(phalanx_torch.Error, match="rank 0 was interrupted by KeyboardInterrupt in backward"):
        dist.barrier()


@pytest.mark.parametrize("with_hook", [False, True])
def test_the_backward_of_ddp_is_interrupted_and_the_group_fails_with_the_cause(ranks, with_hook):
    ranks(2, _backward_of_ddp, with_hook)


def _recv(rank):
    tensor = torch.full((4,), float(rank))
    if rank == 0:
        _interrupted(lambda: dist.recv(tensor, 1))
        dist.group.WORLD._store.set("pressed", "")
    else:
        dist.group.WORLD._store.get("pressed")
        dist.send(tensor, 0)
    dist.barrier()
    # What was sent to the recv that was given up is not taken for another's.
    if rank == 1:
        dist.send(tensor + 1, 0)
    else:
        dist.recv(tensor, 1)
        assert tensor.tolist() == [2.0] * 4


def test_a_recv_is_interrupted_as_the_work_that_it_waits_for(ranks):
    ranks(2, _recv)


def _destroy(rank):
    if rank == 0:
        dist.all_reduce(torch.ones(4), async_op=True)
        _interrupted(dist.destroy_process_group)
    else:
        while dist.group.WORLD.failure() is None:
            time.sleep(0.01)


def test_destroy_process_group_is_interrupted_and_what_it_waited_for_fails(ranks):
    ranks(2, _destroy)


def _join_store(rank, path):
    _interrupted(
        lambda: dist.init_process_group(
            "phalanx", store=dist.FileStore(path, 2), rank=0, world_size=2, timeout=datetime.timedelta(seconds=60)
        )
    )


def _join_url(rank, path):
    _interrupted(lambda: phalanx_torch.init(f"file://{path}", rank=0, world_size=2, timeout=60.0))


@pytest.mark.parametrize("join", [_join_store, _join_url])
def test_a_start_that_waits_for_other_ranks_is_interrupted(join, tmp_path):
    processes(1, join, str(tmp_path / "store"))


def _later_part(rank, port):
    dist.init_process_group("phalanx", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))
    # It makes the connection to the store. The next one is made by the thread that calls.
    dist.new_group([0, 1])
    if rank == 0:
        _interrupted(lambda: dist.new_group([0, 1]))
        dist.group.WORLD._store.set("pressed", "")
    else:
        dist.group.WORLD._store.get("pressed")
        with pytest.raises(phalanx_torch.Error, match="interrupted by KeyboardInterrupt"):
            dist.new_group([0, 1])
    # The group of which it was to be a part goes on.
    total = torch.ones(2)
    dist.all_reduce(total, group=dist.new_group([0, 1]))
    assert total.tolist() == [2.0, 2.0]
    dist.destroy_process_group()


def test_who_waits_for_the_others_of_a_new_group_is_interrupted_and_they_are_told():
    processes(2, _later_part, free_port())


def _array(rank, path, call):
    group = phalanx_torch.init(f"file://{path}", rank=rank, world_size=2, timeout=60.0)
    tensor = torch.zeros(4)
    if rank == 0:
        _interrupted({"recv": lambda: group.recv(tensor, 1), "all_reduce": lambda: group.all_reduce(tensor)}[call])
    with pytest.raises(phalanx_torch.Error, match="interrupted by KeyboardInterrupt"):
        while True:
            time.sleep(0.01) if group._native.failure() is None else group.barrier()


@pytest.mark.parametrize("call", ["recv", "all_reduce"])
def test_array_groups_are_interrupted(call, tmp_path):
    processes(2, _array, str(tmp_path / "store"), call)


def _handler_that_returns(rank):
    if rank == 0:
        # The handler runs while the call waits: it lets the other rank go on.
        signal.signal(signal.SIGUSR1, lambda number, frame: dist.group.WORLD._store.set("handled", ""))
        press(signal.SIGUSR1)
    else:
        dist.group.WORLD._store.get("handled")
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0, 2.0]


def test_a_handler_that_returns_runs_while_a_call_waits_and_disturbs_nothing(ranks):
    ranks(2, _handler_that_returns)


PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
import torch, torch.distributed as dist, phalanx_torch
from conftest import press
dist.init_process_group("phalanx", init_method="file://{path}", rank={rank}, world_size=2)
dist.barrier()
press() if {rank} == 0 else input()
dist.barrier()
"""


def _two_programs(program, tmp_path):
    """The ends of rank 0, and of rank 1, which goes on afterwards. What they have written to standard error is their `errors`."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program.format(tests=os.path.dirname(__file__), path=tmp_path / "store", rank=rank)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            # As from a terminal: what a script has put into the background ignores Ctrl-C, and so do its children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        for rank in range(2)
    ]
    try:
        for process, goes_on in zip(started, (None, "go on\n")):
            _, process.errors = process.communicate(goes_on, timeout=120)
    finally:
        for process in started:
            process.kill()
    return started


def test_a_program_ends_with_ctrl_c_and_the_other_rank_learns_why(tmp_path):
    first, second = _two_programs(PROGRAM, tmp_path)
    assert "KeyboardInterrupt" in first.errors and first.returncode != 0
    assert "rank 0" in second.errors and "interrupted by KeyboardInterrupt" in second.errors, second.errors


def _handler(rank, transport):
    refusals = []

    def collective(number, frame):
        try:
            dist.barrier()
        except phalanx_torch.Error as error:
            refusals.append(str(error))
        dist.group.WORLD._store.set("handled", "")

    if rank == 0:
        signal.signal(signal.SIGINT, collective)
        press()
        total = torch.ones(3)
        dist.all_reduce(total)
        assert total.tolist() == [2.0] * 3
        assert len(refusals) == 1 and "let the handler set a flag" in refusals[0], refusals
    else:
        dist.group.WORLD._store.get("handled")
        dist.all_reduce(torch.ones(3))
    dist.barrier()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_collective_of_a_handler_is_refused_while_a_call_waits(ranks, transport, monkeypatch):
    monkeypatch.setenv("PHALANX_TRANSPORT", transport)
    ranks(2, _handler, transport)


# What a handler calls, and the call that it interrupts; the other rank makes as many of them.
IN_HANDLER = {
    "barrier": lambda: dist.barrier(),
    "all_reduce": lambda: dist.all_reduce(torch.ones(3)),
    "work": lambda: dist.all_reduce(torch.ones(3), async_op=True).wait(),
    "monitored_barrier": lambda: dist.group.WORLD.monitored_barrier(),
}


def _handler_behind_a_work(rank, called, waits):
    refusals, store = [], dist.group.WORLD._store

    def collective(number, frame):
        try:
            IN_HANDLER[called]()
        except phalanx_torch.Error as error:
            refusals.append(error)
        store.set("handled", "")

    totals = [torch.full((4,), float(rank)), torch.full((2,), float(rank))]
    if rank == 0:
        signal.signal(signal.SIGUSR1, collective)
        # The worker has this one, and the next one waits behind it.
        work = dist.all_reduce(totals[0], async_op=True)
        press(signal.SIGUSR1)
        if waits == "work":
            work.wait()
        dist.all_reduce(totals[1])
        work.wait()
        assert [error.kind for error in refusals] == ["aborted"] and "let the handler set a flag" in str(refusals[0]), refusals
    else:
        store.get("handled")
        [dist.all_reduce(total) for total in totals]
    assert [total.tolist() for total in totals] == [[1.0] * 4, [1.0] * 2]
    dist.barrier()


@pytest.mark.parametrize("waits", ["work", "call behind it"])
@pytest.mark.parametrize("called", IN_HANDLER)
def test_a_collective_of_a_handler_is_refused_behind_calls_that_have_not_ended(ranks, called, waits):
    ranks(2, _handler_behind_a_work, called, waits)


def _handler_in_a_recv(rank):
    total, tensor = torch.full((3,), rank + 1.0), torch.full((2,), float(rank))
    if rank == 0:
        # No collective is in flight: that of the handler runs as any.
        signal.signal(signal.SIGUSR1, lambda number, frame: dist.all_reduce(total))
        press(signal.SIGUSR1)
        dist.recv(tensor, 1)
        assert tensor.tolist() == [1.0] * 2
    else:
        dist.all_reduce(total)
        dist.send(tensor, 0)
    assert total.tolist() == [3.0] * 3
    dist.barrier()


def test_a_collective_of_a_handler_runs_while_none_is_in_flight(ranks):
    ranks(2, _handler_in_a_recv)


def _large():
    """More than a connection takes before the other rank receives."""
    return torch.zeros(1 << 23)


def _after_another(wait):
    dist.all_reduce(torch.ones(4), async_op=True)
    return wait


# Each makes the calls before, and returns the one that waits.
WAITS = {
    "barrier": lambda: dist.barrier,
    "all_reduce": lambda: lambda: dist.all_reduce(torch.ones(3)),
    "barrier behind another": lambda: _after_another(dist.barrier),
    "work": lambda: dist.all_reduce(torch.ones(3), async_op=True).wait,
    "recv": lambda: dist.irecv(torch.zeros(4), 1).wait,
    "recv from any": lambda: dist.irecv(torch.zeros(4)).wait,
    "send": lambda: dist.isend(_large(), 1).wait,
    "destroy_process_group": lambda: _after_another(dist.destroy_process_group),
}
CLOSED = "closed the group in a signal's handler"


def _group_closed_in_handler(rank, name, leaves):
    if rank == 0:
        def end(number, frame):
            dist.destroy_process_group()
            if leaves:
                sys.exit(7)

        group, wait = dist.group.WORLD, WAITS[name]()
        signal.signal(signal.SIGTERM, end)
        press(signal.SIGTERM)
        # The wait ends with what the handler raises, or with the cause.
        with pytest.raises(SystemExit if leaves else phalanx_torch.Error, match="7" if leaves else CLOSED):
            wait()
        assert not dist.is_initialized()
        # As at the end of the program.
        group._native.close_within(60.0, "late")
        assert not group._native.is_open()
    else:
        while (failure := dist.group.WORLD.failure()) is None:
            time.sleep(0.01)
        assert failure.kind == "aborted" and "rank 0" in str(failure) and CLOSED in str(failure), failure


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("name", WAITS)
def test_a_handler_that_destroys_the_group_ends_the_wait(ranks, name, transport, monkeypatch):
    monkeypatch.setenv("PHALANX_TRANSPORT", transport)
    ranks(2, _group_closed_in_handler, name, True)


@pytest.mark.parametrize("name", ["barrier", "recv"])
def test_a_handler_that_destroys_the_group_and_returns_lets_the_call_fail(ranks, name):
    ranks(2, _group_closed_in_handler, name, False)


def _array_group_closed_in_handler(rank, path, call):
    group = phalanx_torch.init(f"file://{path}", rank=rank, world_size=2, timeout=60.0)
    tensor = torch.zeros(4)
    if rank == 0:
        signal.signal(signal.SIGTERM, lambda number, frame: (group.close(), sys.exit(7)))
        press(signal.SIGTERM)
        calls = {
            "recv": lambda: group.recv(tensor, 1),
            "recv from any": lambda: group.recv(tensor),
            "send": lambda: group.send(_large(), 1),
            "all_reduce": lambda: group.all_reduce(tensor),
        }
        with pytest.raises(SystemExit):
            calls[call]()
        group.close()
        assert not group._native.is_open()
    else:
        while (failure := group._native.failure()) is None:
            time.sleep(0.01)
        assert "rank 0" in str(failure) and CLOSED in str(failure), failure


@pytest.mark.parametrize("call", ["recv", "recv from any", "send", "all_reduce"])
def test_a_handler_that_closes_an_array_group_ends_the_wait(call, tmp_path):
    processes(2, _array_group_closed_in_handler, str(tmp_path / "store"), call)


def _other_group_closed_in_handler(rank):
    other = dist.new_group([0, 1])
    total = torch.ones(2)
    if rank == 0:
        store = dist.group.WORLD._store
        signal.signal(signal.SIGTERM, lambda number, frame: (dist.destroy_process_group(other), store.set("closed", "")))
        press(signal.SIGTERM)
    else:
        dist.group.WORLD._store.get("closed")
        # It has been left, and not failed.
        assert other.failure() is None or other.failure().kind == "peer_left"
    dist.all_reduce(total)
    assert total.tolist() == [2.0, 2.0]


def test_a_handler_may_destroy_a_group_in_which_nothing_waits(ranks):
    ranks(2, _other_group_closed_in_handler)


ENDS = """
import sys
sys.path.insert(0, {tests!r})
import signal, torch, torch.distributed as dist, phalanx_torch
from conftest import press
dist.init_process_group("phalanx", init_method="file://{path}", rank={rank}, world_size=2)
dist.barrier()
if {rank} == 0:
    def end(number, frame):
        dist.destroy_process_group()
        sys.exit(7)
    signal.signal(signal.SIGTERM, end)
    press(signal.SIGTERM)
else:
    input()
dist.barrier()
"""


def test_a_program_that_destroys_the_group_in_a_handler_ends(tmp_path):
    ended = _two_programs(ENDS, tmp_path)
    assert ended[0].returncode == 7, ended[0].errors
    assert ended[1].returncode not in (0, None) and "rank 0" in ended[1].errors and CLOSED in ended[1].errors, ended[1].errors
