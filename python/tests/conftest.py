"""All ranks of a test as processes, forked from this one, so that PyTorch is imported once."""

import datetime
import dis
import linecache
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import traceback

import pytest
import torch
import torch.distributed as dist
from ports import free_port  # noqa: F401
from torch._C import _distributed_c10d as c10d

import phalanx_torch
from phalanx_torch import observed, process_group

LIMIT = 90.0
_torch = tuple(int(part) for part in torch.__version__.split(".")[:2])
SINCE_2_14 = _torch >= (2, 14)
# Older versions give `monitored_barrier` and `split_group` to PyTorch's own backends alone.
SINCE_2_15 = _torch >= (2, 15)
FORK = multiprocessing.get_context("fork")
# Older versions do not tell a group whether its caller waits.
needs_async_op = pytest.mark.skipif(
    not hasattr(c10d.AllreduceOptions(), "asyncOp"), reason="this PyTorch's options do not say whether the caller waits"
)

needs_dispatcher = pytest.mark.skipif(
    not observed.can_dispatch(), reason="this PyTorch's dispatcher cannot pass calls to groups in Python"
)


def _child(rank, body, arguments, pipe):
    torch.set_num_threads(1)
    try:
        pipe.send(("done", body(rank, *arguments)))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
    finally:
        pipe.close()


def processes(world, body, *arguments, dies=()):
    """Runs `body(rank, *arguments)` in `world` processes, and returns what they return. Those in `dies` end without an answer."""
    started = []
    for rank in range(world):
        mine, theirs = FORK.Pipe(duplex=False)
        process = FORK.Process(target=_child, args=(rank, body, arguments, theirs))
        process.start()
        theirs.close()
        started.append((process, mine))
    deadline, results, errors = time.monotonic() + LIMIT, [], []
    for rank, (process, pipe) in enumerate(started):
        outcome = None
        try:
            if pipe.poll(max(0.0, deadline - time.monotonic())):
                outcome = pipe.recv()
        except EOFError:
            pass
        if rank in dies:
            results.append(None)
            if outcome is not None:
                errors.append(f"rank {rank} has not died: {outcome[1]}")
        elif outcome is None:
            errors.append(f"rank {rank} has not answered")
        elif outcome[0] == "failed":
            errors.append(f"rank {rank}: {outcome[1]}")
        else:
            results.append(outcome[1])
    for process, _ in started:
        process.join(max(1.0, deadline - time.monotonic()))
        if process.is_alive():
            errors.append(f"process {process.pid} does not end")
            process.kill()
            process.join()
    assert not errors, "\n".join(errors)
    return results


def _in_group(rank, world, url, timeout, body, arguments):
    dist.init_process_group(
        "phalanx", init_method=url, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=timeout)
    )
    result = body(rank, *arguments)
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


@pytest.fixture
def ranks(tmp_path):
    """`ranks(world, body, ...)` runs `body(rank, ...)` in the ranks of a group, and returns what they return."""

    def run(world, body, *arguments, timeout=60.0, dies=()):
        url = f"file://{tmp_path}/store-{time.monotonic_ns()}"
        return processes(world, _in_group, world, url, timeout, body, arguments, dies=dies)

    return run


def waiting(op=dist.ReduceOp.SUM, timeout=None):
    """The options with which `dist.all_reduce` calls a group."""
    options = c10d.AllreduceOptions()
    options.reduceOp, options.asyncOp = op, False
    if timeout is not None:
        options.timeout = datetime.timedelta(seconds=timeout)
    return options


def blind_watcher(group):
    """Lets the thread that calls the group's hooks look at it once, and then not before the test has ended."""
    process_group._WATCH_INTERVAL = 3600.0
    group.register_abort_hook(-1, lambda: None)
    while True:
        frame = sys._current_frames().get(group._watcher.ident)
        if frame is not None and "time.sleep" in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
            return
        time.sleep(0.01)


def environment(rank, world, port):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


# Lines of the package that call its native part.
_CALL = re.compile(r"_native\b|run\(how\)|call\(\*arguments\)|call\.wait\(\)")


def _native_call(thread):
    """Which call of the native part a thread is in, or None."""
    frame = sys._current_frames()[thread]
    code, place = frame.f_code, frame.f_lasti
    if not code.co_filename.startswith(os.path.dirname(phalanx_torch.__file__)) or "CALL" not in dis.opname[code.co_code[place]]:
        return None
    is_native = _CALL.search(linecache.getline(code.co_filename, frame.f_lineno))
    return (id(frame), place) if is_native else None


def press(number=signal.SIGINT):
    """Sends this process a signal as soon as this thread waits in a call of the package. Returns a list that gets the time of that."""
    thread, pressed = threading.get_ident(), []

    def watch():
        # Other calls return at once: one in which the thread is found again and again is the one that waits.
        last, times = None, 0
        while times < 5:
            time.sleep(0.01)
            call = _native_call(thread)
            last, times = call, times + 1 if call is not None and call == last else 0
        pressed.append(time.monotonic())
        os.kill(os.getpid(), number)

    threading.Thread(target=watch, daemon=True).start()
    return pressed
