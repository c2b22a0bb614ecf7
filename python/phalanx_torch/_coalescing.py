"""PyTorch's context for several calls as one, which does not end if it fails: it would only note all later calls of the group, and never make them."""

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

_c10d: Any = dist.distributed_c10d


def _end(group: Any) -> None:
    """Ends the context of a group of ours, without the calls that it has only noted."""
    from phalanx_torch.objects import part_of

    group = dist.group.WORLD if group is None else group
    part = part_of(group)
    if part is not None:
        _c10d._world.pg_coalesce_state.pop(group, None)
        part.forget_coalescing()


def _ending(theirs: Any) -> Any:
    @functools.wraps(theirs)
    @contextlib.contextmanager
    def managed(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
        has_begun = False
        try:
            with theirs(group, device, async_ops) as manager:
                has_begun = True
                yield manager
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
