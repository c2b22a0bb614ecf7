"""Whether PyTorch's ``ExecutionTraceObserver`` runs. PyTorch has no question for that in Python, and the calls of a group are made known only to
those who watch."""

import functools
import sys
from collections.abc import Callable
from typing import Any

# Read at each call of a group.
is_running = False
_MARK = "_phalanx_traces"


def watch() -> None:
    """Keeps ``is_running`` true from the start of an observer to its end. Nothing is done again, and nothing if this PyTorch has no such observer."""
    module: Any = sys.modules.get("torch.profiler.profiler")
    names = ("_enable_execution_trace_observer", "_disable_execution_trace_observer")
    if module is None or not all(callable(getattr(module, name, None)) for name in names):
        return
    for name, runs in zip(names, (True, False)):
        change = getattr(module, name)
        if not hasattr(change, _MARK):
            setattr(module, name, _noted(change, runs))


def _noted(change: Callable[[], None], runs: bool) -> Callable[[], None]:
    @functools.wraps(change)
    def noted() -> None:
        global is_running
        change()
        is_running = runs

    setattr(noted, _MARK, True)
    return noted
