"""Leaves groups before the interpreter ends.

The native threads must not call Python while it ends, and peers are to get a goodbye, or the reason why there is none.
"""

import atexit
import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from phalanx_torch import _native
from phalanx_torch._errors import described

_T = TypeVar("_T")

# How long operations in flight may take at exit, in seconds; afterwards the group is aborted on all ranks.
GRACE = 5.0

# What is called at exit before groups are left, and when they have been.
before_leaving: list[Callable[[], object]] = []
when_left: list[Callable[[], object]] = []

_open: weakref.WeakSet[_native.Group] = weakref.WeakSet()
# Horovod's, which `hvd.shutdown()` keeps for the next `hvd.init()`.
_ranks: weakref.WeakSet[_native.Ranks] = weakref.WeakSet()


def members(those: "weakref.WeakSet[_T]") -> list[_T]:
    """What is in the set. Another thread may add to it meanwhile, which is an error of the loop over it."""
    while True:
        try:
            return list(those)
        except RuntimeError:
            continue


def remember(group: _native.Group) -> None:
    """Lets the native ``group`` be left at exit."""
    _open.add(group)
    _leave_with_process()


def remember_ranks(ranks: _native.Ranks) -> None:
    """Lets processes that are forked from this one be told that they have not met these ``ranks``."""
    _ranks.add(ranks)
    _leave_with_process()


# The process that leaves its groups when multiprocessing ends it.
_process: int | None = None
# What has ended that process, if it was an exception.
_passing: BaseException | None = None


def _leave_with_process() -> None:
    """Lets groups be left at the end of a process that multiprocessing has started, too. It ends forked ones without Python's own end, and catches what
    they raise."""
    global _process
    multiprocessing: Any = sys.modules.get("multiprocessing")
    # What a process has forked begins without.
    if multiprocessing is not None and multiprocessing.parent_process() is not None and _process != os.getpid():
        _process = os.getpid()
        # After all else, when it has ended its own children.
        multiprocessing.util.Finalize(None, _leave_process, exitpriority=-1000)


def _leave_process() -> None:
    global _passing
    error = sys.exc_info()[1]
    # torch.multiprocessing has caught what a process has raised, and ends it so.
    _passing = (error.__context__ if error.code else None) if isinstance(error, SystemExit) else error
    # Threads of the program may use groups: they are waited for first, as at Python's own end, and as multiprocessing does next.
    wait_for_threads: Any = vars(threading)["_shutdown"]
    try:
        wait_for_threads()
    finally:
        # Also if Ctrl-C has ended that wait.
        _leave()


def check_not_forked() -> None:
    """A forked process whose parent had threads and locks in use has copies of the locks, and could wait for ever."""
    if any(group.is_inherited() for group in members(_open)):
        raise ValueError(
            "this process was forked from one that has a process group, and cannot join another: start it with the "
            'multiprocessing method "spawn", or destroy the group before'
        )
    if any(ranks.is_inherited() for ranks in members(_ranks)):
        raise ValueError(
            "this process was forked from one that has called hvd.init(), and cannot meet other ranks: start it with the multiprocessing "
            'method "spawn"'
        )


def cause_of_end() -> BaseException | None:
    """The exception that ends the program, if one does.

    Python keeps an exception that it has printed in ``sys.last_exc``. So do consoles, notebooks and pytest, which go on afterwards. An
    exception that ends the program has passed through the outermost frame, which nothing called, and theirs have not. Python's own
    console, and IPython, whose frames may look outermost, say by ``sys.ps1`` that they are there.
    """
    if _passing is not None:
        return _passing
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    trace = getattr(error, "__traceback__", None)
    if hasattr(sys, "ps1") or trace is None or trace.tb_frame.f_back is not None:
        return None
    return error


def _leave() -> None:
    # An error of one call, such as a warning that `-W error` makes one, keeps neither the others nor the groups from it.
    with contextlib.ExitStack() as calls:
        calls.callback(_leave_groups)
        for call in before_leaving:
            calls.callback(call)


def _leave_groups() -> None:
    error = cause_of_end()
    # A forked process has the memory of its parent's groups, which are not open there, and none of their threads.
    groups = [group for group in members(_open) if group.is_open()]
    # In the reverse order. A second Ctrl-C ends one of these steps, and keeps no other group, and no thread, from its end.
    with contextlib.ExitStack() as steps:
        steps.callback(_native.close_callbacks, GRACE)
        steps.callback(_native.await_cleared, GRACE)
        for tell in reversed(when_left):
            steps.callback(tell)
        for group in groups:
            steps.callback(group.close_within, GRACE, f"the program of rank {group.rank} ended before its operations did")
        if error is not None:
            for group in groups:
                steps.callback(group.abort, f"the program of rank {group.rank} ended with {described(error)}")


atexit.register(_leave)
