"""Results of PyTorch's functional collectives (``torch.distributed._functional_collectives``). No import of PyTorch."""

import sys
from typing import Any, TypeVar

_T = TypeVar("_T")


def waited(tensor: _T) -> _T:
    """The tensor itself; of one that stands for the result of a functional collective, that result, when it is there.

    PyTorch's dispatcher waits where a program first uses such a tensor. It does not see what reads a tensor's memory.
    """
    module: Any = sys.modules.get("torch.distributed._functional_collectives")
    # Without the module there are none.
    if module is not None and isinstance(tensor, module.AsyncCollectiveTensor):
        result: _T = module.wait_tensor(tensor)
        return result
    return tensor
