"""PyTorch's context for several calls as one, which does not end if it fails: it would only note all later calls of the group, and never make them. Nor
does it look whether all reductions have the same operation."""

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

# Not all versions have it in `torch.distributed`.
from torch._C._distributed_c10d import AllreduceOptions

_c10d: Any = dist.distributed_c10d


def _end(group: Any) -> None:
    """Ends the context of a group of ours, without the calls that it has only noted."""
    from phalanx_torch.objects import part_of

    group = dist.group.WORLD if group is None else group
    part = part_of(group)
    if part is not None:
        _c10d._world.pg_coalesce_state.pop(group, None)
        part.forget_coalescing()


def _check_operations(group: Any) -> None:
    """Refuses reductions of several operations as one call of a group of ours: PyTorch would make all of them with that of the first."""
    from phalanx_torch.objects import part_of
    from phalanx_torch.process_group import _op

    group = dist.group.WORLD if group is None else group
    operations = [call.redop for call in _c10d._world.pg_coalesce_state.get(group, ()) if call.redop is not None]
    if len(operations) < 2 or part_of(group) is None:
        return
    first, *others = operations
    options: Any = AllreduceOptions()

    def number_and_factor(operation: Any) -> Any:
        options.reduceOp = operation
        return _op(options)

    expected = number_and_factor(first)
    for other in others:
        if number_and_factor(other) != expected:
            raise ValueError(
                f"phalanx: several calls as one have one operation, and these have {first} and {other}: PyTorch would make all of them with the first. "
                "Make a context for the calls of each operation"
            )


def _ending(theirs: Any) -> Any:
    @functools.wraps(theirs)
    @contextlib.contextmanager
    def managed(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
        has_begun = False
        try:
            with theirs(group, device, async_ops) as manager:
                has_begun = True
                yield manager
                _check_operations(group)
        except BaseException:
            # One that has not begun is within another of the same group.
            if has_begun:
                _end(group)
            raise

    return managed


_theirs: Any = getattr(_c10d, "_coalescing_manager", None)
if callable(_theirs) and tuple(inspect.signature(_theirs).parameters) == ("group", "device", "async_ops"):
    for _home in (_c10d, dist):
        setattr(_home, "_coalescing_manager", _ending(_theirs))
