"""Collectives of Phalanx for Python.

With PyTorch, importing this package registers the backend ``phalanx`` for tensors on the CPU::

    import torch.distributed as dist
    import phalanx_torch

    dist.init_process_group("phalanx")

Without PyTorch, :func:`init` gives a group that works on NumPy's arrays::

    import phalanx_torch

    group = phalanx_torch.init()
    group.all_reduce(array)
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING

from phalanx_torch import _registration

if TYPE_CHECKING:
    from phalanx_torch._errors import Error as Error
    from phalanx_torch._gloo import as_gloo as as_gloo
    from phalanx_torch._native import __version__ as __version__
    from phalanx_torch._object_functions import replace_object_functions as replace_object_functions
    from phalanx_torch.arrays import ArrayGroup as ArrayGroup
    from phalanx_torch.arrays import init as init
    from phalanx_torch.objects import all_gather_object as all_gather_object
    from phalanx_torch.objects import broadcast_object_list as broadcast_object_list
    from phalanx_torch.objects import gather_object as gather_object
    from phalanx_torch.objects import recv_object_list as recv_object_list
    from phalanx_torch.objects import scatter_object_list as scatter_object_list
    from phalanx_torch.objects import send_object_list as send_object_list
    from phalanx_torch.process_group import ProcessGroup as ProcessGroup

__all__ = ["ArrayGroup", "Error", "init"]

# Imported when they are asked for: where the package is installed, `import torch` imports it.
_HOMES = {"ArrayGroup": "arrays", "Error": "_errors", "__version__": "_native", "init": "arrays"}

# Programs with arrays alone do not wait for PyTorch, where it is installed.
if importlib.util.find_spec("torch") is not None:
    _HOMES |= {"ProcessGroup": "process_group", "as_gloo": "_gloo", "replace_object_functions": "_object_functions"}
    __all__ += ["ProcessGroup", "as_gloo", "replace_object_functions"]
    _HOMES |= {
        "all_gather_object": "objects",
        "broadcast_object_list": "objects",
        "gather_object": "objects",
        "recv_object_list": "objects",
        "scatter_object_list": "objects",
        "send_object_list": "objects",
    }
    __all__ += [
        "all_gather_object",
        "broadcast_object_list",
        "gather_object",
        "recv_object_list",
        "scatter_object_list",
        "send_object_list",
    ]
    _registration.register_with_torch()


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
