"""What PyTorch's ``DistributedDataParallel`` does in C++ with the calls of a group that is written in Python, and does wrong or cannot do."""

import functools
import itertools
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from phalanx_torch import _native

if TYPE_CHECKING:
    from phalanx_torch.process_group import ProcessGroup

# The number of the backward pass in which this thread is, or -1.
_backward: Any = torch._C._current_graph_task_id
# The function from which PyTorch's engine is called.
_ENGINE = torch.autograd.graph._engine_run_backward.__code__
_HERE = os.path.dirname(__file__)


class Callback:
    """What asks for a future in a hook of DDP's, and which callbacks of it may make calls."""

    def __init__(self, number: int, is_followed: bool) -> None:
        # The backward pass.
        self.number = number
        # Whether the hook of another bucket of this model follows in this step.
        self.is_followed = is_followed
        self.asked = next(_clock)
        # The group of a call that such a callback makes.
        self.group: ProcessGroup | None = None

    def has_order(self, group: "ProcessGroup") -> bool:
        """Whether all ranks make the next call of such a callback at the same place among the calls of the group."""
        return not self.is_followed and group._called < self.asked


class _Hook(threading.local):
    """Whether this thread is in a hook of DDP's, and that of another bucket follows in this step."""

    runs = False
    is_followed = False


_hook = _Hook()
# Numbers what threads do, in their order.
_clock = itertools.count(1)
# Whether there is a hook at all.
are_hooked = False
# The threads that run callbacks of futures that hooks have asked for.
calling_back: dict[int, Callback] = {}
os.register_at_fork(after_in_child=calling_back.clear)


def wait_in_backward(group: "ProcessGroup", call: _native.Work) -> None:
    """Lets a backward pass in which DDP, or a hook of it, has made ``call`` wait for that before DDP does: at its end, or at once if the hook makes
    calls in callbacks.

    DDP waits in C++, which answers no Ctrl-C, and makes a ``RuntimeError`` without kind and peer of every error. Calls that others make in backward are
    theirs: peers may make them only after something that this rank does later.
    """
    if _hook.runs and _calls_again():
        return _wait_for(group, [call])
    number = _backward()
    if number == -1 or not _is_by_ddp():
        return
    if group._in_backward[0] != number:
        group._in_backward = (number, [])
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(functools.partial(_wait_for, group, group._in_backward[1]))
    group._in_backward[1].append(call)


def _is_by_ddp() -> bool:
    """Whether this call comes from DDP's C++, or from its hook, and not within a pass inside of another: that has an end for each checkpoint."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    # An engine's own thread has no frame below.
    is_by_ddp = _hook.runs or frame is None or frame.f_code is _ENGINE
    passes = 0
    while is_by_ddp and frame is not None:
        passes += frame.f_code is _ENGINE
        frame = frame.f_back
    return is_by_ddp and passes <= 1


# PyTorch's hooks that make calls in a callback of an earlier one.
_HOOKS_OF_TORCH = "torch.distributed.algorithms.ddp_comm_hooks."
_CALLING_AGAIN = {
    "powerSGD_hook",
    "batched_powerSGD_hook",
    "quantization_pertensor_hook",
    "quantization_perchannel_hook",
    "hook_with_zero_interleaved_fn",
}


def _calls_again() -> bool:
    """Whether one of these hooks has made a call. Callbacks run on threads of their own: with several buckets, ranks would make the calls in
    different orders, in each other's place if they are of one length."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _ENGINE:
        if frame.f_code.co_name in _CALLING_AGAIN and frame.f_globals.get("__name__", "").startswith(_HOOKS_OF_TORCH):
            return True
        frame = frame.f_back
    return False


def as_callback(end: Callable[[], None]) -> Callable[[], None]:
    """``end``, which runs the callbacks of a future on another thread; with a note of that if a hook has asked for the future, or such a callback."""
    before = calling_back.get(threading.get_ident())
    if _hook.runs:
        callback = Callback(_backward(), _hook.is_followed)
    elif before is not None:
        callback = Callback(before.number, before.is_followed)
    else:
        return end

    def noted() -> None:
        thread = threading.get_ident()
        outer = calling_back.get(thread)
        calling_back[thread] = callback
        try:
            end()
        finally:
            del calling_back[thread]
            if outer is not None:
                calling_back[thread] = outer

    return noted


def note_call(group: "ProcessGroup") -> None:
    """Notes a call that no callback makes, before it is made."""
    group._called = next(_clock)


def check_order(group: "ProcessGroup", operation: str) -> None:
    """Fails the group if a callback makes a call that has no order among the others: the ranks' next calls may be in each other's place. The others
    are those of hooks, of models without hooks, of layers, and of other callbacks."""
    if group.size() == 1:
        return
    own = calling_back.get(threading.get_ident())
    if own is not None:
        # Before the look: a call that another thread makes meanwhile sees it.
        own.group = group
        if not own.has_order(group):
            _refuse(group, operation)
        note_call(group)
        own.asked = next(_clock)
        return
    note_call(group)
    number = _backward()
    if number != -1 and any(callback.group is group and callback.number == number for callback in list(calling_back.values())):
        _refuse(group, operation)


def _refuse(group: "ProcessGroup", operation: str) -> None:
    group._native.abort(
        f"{operation}: a communication hook of DistributedDataParallel makes a call in a callback on rank {group.rank()}, beside other calls of the same "
        "backward pass, and ranks make them in different orders (wait in the hook, by the work's wait(), and then make the call)"
    )


def _wait_for(group: "ProcessGroup", calls: list[_native.Work]) -> None:
    try:
        for call in calls:
            call.wait()
    except Exception:
        raise
    except BaseException as interrupt:
        # DDP cannot go on with this step, and the other ranks are to learn why.
        group._native.abort(f"the program of rank {group.rank()} was interrupted by {type(interrupt).__name__} in backward")
        raise
    finally:
        calls.clear()


_register_hook: Any = c10d._register_comm_hook


def _register_and_note(reducer: Any, state: Any, comm_hook: Any) -> None:
    """As PyTorch's; notes that the hook runs."""
    global are_hooked
    are_hooked = True

    @functools.wraps(comm_hook)
    def noted(state: Any, bucket: Any) -> Any:
        _hook.runs, _hook.is_followed = True, not bucket.is_last()
        try:
            return comm_hook(state, bucket)
        finally:
            _hook.runs = False

    _register_hook(reducer, state, noted)


setattr(dist, "_register_comm_hook", _register_and_note)


# The work that each of PyTorch's reducers has been given. DDP's, in `join(divide_by_initial_world_size=False)`, waits for it in backward.
_given: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()
_give: Any = c10d.Reducer._set_forward_pass_work_handle


def _give_and_keep(reducer: Any, work: Any, use_static_world_size: bool) -> None:
    """As PyTorch's. That keeps only the part of a work that is in C++, which waits for ever when the part in Python is gone."""
    _given[reducer] = work
    _give(reducer, work, use_static_world_size)


c10d.Reducer._set_forward_pass_work_handle = _give_and_keep  # type: ignore[method-assign,assignment]


# PyTorch's hooks in C++ take results of works in C++ alone. These are the same in Python, with the same bits.
_IN_PYTHON: dict[Any, Any] = {
    c10d.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
    c10d.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
}
_register_builtin: Any = DistributedDataParallel._register_builtin_comm_hook


def _register_builtin_or_same(self: DistributedDataParallel, comm_hook_type: Any) -> None:
    """As PyTorch's, and over this package's groups the hook of the same name in Python."""
    from phalanx_torch.device_backend import DeviceBackend, of_device
    from phalanx_torch.process_group import ProcessGroup

    group: Any = self.process_group
    of_cpu = of_device(group, "cpu") if self.device_type == "cpu" else None
    if isinstance(of_cpu, (DeviceBackend, ProcessGroup)) and comm_hook_type in _IN_PYTHON:
        self.register_comm_hook(self.process_group, _IN_PYTHON[comm_hook_type])
    else:
        _register_builtin(self, comm_hook_type)


DistributedDataParallel._register_builtin_comm_hook = _register_builtin_or_same  # type: ignore[method-assign]
