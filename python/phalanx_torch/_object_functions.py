"""Lets PyTorch's functions for objects be ours for groups of ours, in programs that know only PyTorch's."""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

from phalanx_torch import _uncompiled

# The last PyTorch that was tested.
TESTED = "2.15"
# The functions, and the names of their arguments in their order. Earlier versions of PyTorch have fewer at the end.
FUNCTIONS = {
    "all_gather_object": ("object_list", "obj", "group", "weights_only"),
    "broadcast_object_list": ("object_list", "src", "group", "device", "group_src", "weights_only"),
    "gather_object": ("obj", "object_gather_list", "dst", "group", "group_dst", "weights_only"),
    "recv_object_list": ("object_list", "src", "group", "device", "group_src", "use_batch", "weights_only"),
    "scatter_object_list": (
        "scatter_object_output_list",
        "scatter_object_input_list",
        "src",
        "group",
        "group_src",
        "weights_only",
    ),
    "send_object_list": ("object_list", "dst", "group", "device", "group_dst", "use_batch", "weights_only"),
}
_MARK = "_phalanx_objects"


def replace_object_functions() -> None:
    """Puts the functions of :mod:`phalanx_torch.objects` in the place of PyTorch's in ``torch.distributed``, for groups of Phalanx from now on.

    Call it on every rank, before a module takes a function's name with ``from torch.distributed import all_gather_object``. ``PHALANX_OBJECTS=1`` does
    the same when the package is imported. Groups of other backends still get PyTorch's functions. It raises ``RuntimeError`` if this PyTorch is not made
    as it expects; nothing is changed then.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    found = {name: getattr(c10d, name, None) for name in FUNCTIONS}
    others = [name for name, function in found.items() if not _is_known(function, FUNCTIONS[name])]
    if others:
        raise RuntimeError(
            f"phalanx_torch.replace_object_functions: PyTorch {torch.__version__} has not, or has in another form: {', '.join(others)}. It has been "
            f"tested with {TESTED}; use that, or call the functions of phalanx_torch by their names, such as phalanx_torch.all_gather_object"
        )
    for name, theirs in found.items():
        if theirs is not None and not hasattr(theirs, _MARK):
            chosen = _chosen(theirs, name, FUNCTIONS[name].index("group"))
            setattr(c10d, name, chosen)
            setattr(dist, name, chosen)
    _uncompiled.skip(sys.modules[__name__])


def _is_known(function: Any, names: tuple[str, ...]) -> bool:
    if not callable(function):
        return False
    known = tuple(inspect.signature(function).parameters)
    return "group" in known and known == names[: len(known)]


def _chosen(theirs: Callable[..., Any], name: str, place: int) -> Callable[..., Any]:
    """Our function `name`, or PyTorch's, by the group, which may be the argument at `place`."""

    @functools.wraps(theirs)
    def chosen(*arguments: Any, **named: Any) -> Any:
        # As long as that is not imported, there is no group of ours; and it brings the native library.
        if "phalanx_torch.process_group" in sys.modules:
            from phalanx_torch import objects

            group = named["group"] if "group" in named else arguments[place] if len(arguments) > place else None
            if objects.part_of(group) is not None:
                return getattr(objects, name)(*arguments, **named)
        return theirs(*arguments, **named)

    setattr(chosen, _MARK, True)
    return chosen
