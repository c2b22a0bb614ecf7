"""What PyTorch's ``DistributedDataParallel`` does in C++ with the calls of a group that is written in Python, and does wrong or cannot do."""

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _distributed_c10d as c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from phalanx_torch import _native

if TYPE_CHECKING:
    from phalanx_torch.process_group import ProcessGroup

# The calls of DDP and of its hooks.
_CALLS = {"all_reduce", "all_gather"}
# The number of the backward pass in which this thread is, or -1.
_backward: Any = torch._C._current_graph_task_id


def wait_at_the_end_of_backward(group: "ProcessGroup", operation: str, call: _native.Work) -> None:
    """Lets a backward pass in which DDP has made ``call`` wait for that before DDP does.

    DDP waits in C++, which answers no Ctrl-C, and makes a ``RuntimeError`` without kind and peer of every error.
    """
    number = _backward() if operation in _CALLS else -1
    if number == -1:
        return
    if group._in_backward[0] != number:
        group._in_backward = (number, [])
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(functools.partial(_wait_for, group._in_backward[1]))
    group._in_backward[1].append(call)


def _wait_for(calls: list[_native.Work]) -> None:
    try:
        for call in calls:
            call.wait()
    finally:
        calls.clear()


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
    from phalanx_torch.process_group import ProcessGroup

    if isinstance(self.process_group, ProcessGroup) and comm_hook_type in _IN_PYTHON:
        self.register_comm_hook(self.process_group, _IN_PYTHON[comm_hook_type])
    else:
        _register_builtin(self, comm_hook_type)


DistributedDataParallel._register_builtin_comm_hook = _register_builtin_or_same  # type: ignore[method-assign]
