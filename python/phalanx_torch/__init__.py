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

# Imported when they are asked for: where the package is installed, `import torch` imports it.
_HOMES = {"ArrayGroup": "arrays", "Error": "_errors", "init": "arrays"}

try:
    import torch.distributed as _distributed
except ImportError:
    _distributed = None

if _distributed is not None and _distributed.is_available():
    from phalanx_torch import _registration

    _HOMES |= {"ProcessGroup": "process_group", "as_gloo": "_gloo"}
    _registration.register()

__all__ = sorted(_HOMES)


def __getattr__(name):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})
