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

from phalanx_torch._errors import Error
from phalanx_torch.arrays import ArrayGroup, init

__all__ = ["ArrayGroup", "Error", "init"]

try:
    import torch.distributed as _distributed
except ImportError:
    _distributed = None

if _distributed is not None and _distributed.is_available():
    from phalanx_torch import _uncompiled, device_backend, process_group, sparse, work
    from phalanx_torch.process_group import ProcessGroup, register

    __all__ += ["ProcessGroup"]
    register()
    _uncompiled.skip(device_backend, process_group, sparse, work)
