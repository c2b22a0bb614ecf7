"""Tensors that are none of their own: results of PyTorch's functional collectives (``torch.distributed._functional_collectives``), and
wrappers. No import of PyTorch."""

import sys
from typing import Any, TypeVar

_T = TypeVar("_T")


def is_awaited(tensor: object) -> bool:
    """Whether it stands for the result of a functional collective."""
    module: Any = sys.modules.get("torch.distributed._functional_collectives")
    # Without the module there are none.
    return module is not None and isinstance(tensor, module.AsyncCollectiveTensor)


def waited(tensor: _T) -> _T:
    """The tensor itself; of one that stands for the result of a functional collective, that result, when it is there.

    PyTorch's dispatcher waits where a program first uses such a tensor. It does not see what reads a tensor's memory.
    """
    if is_awaited(tensor):
        result: _T = sys.modules["torch.distributed._functional_collectives"].wait_tensor(tensor)
        return result
    return tensor


def dense(tensor: _T) -> _T:
    """The tensor itself, if its elements lie in memory as strides say: an error names another layout."""
    any_tensor: Any = tensor
    if str(any_tensor.layout) == "torch.strided":
        return tensor
    known = "only all_reduce takes them: " if any_tensor.is_sparse else ""
    raise ValueError(f"phalanx: this tensor is of layout {any_tensor.layout}; {known}to_dense() makes one that can be exchanged")


def stored(tensor: _T) -> _T:
    """The tensor itself, if it has its elements in memory of its own: an error names what others are, and what to give instead.

    Collectives read and write memory, past PyTorch's dispatcher, which knows what such a tensor stands for.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not isinstance(tensor, torch.Tensor):
        return tensor
    kind: Any = type(tensor)
    any_tensor: Any = tensor
    if any_tensor.is_nested:
        # Rows of other lengths on other ranks would be added up, or cut, elsewhere.
        raise TypeError(
            f"phalanx: a nested tensor ({any_tensor.layout}) is several of lengths of their own: exchange what unbind() gives, or "
            "torch.nested.to_padded_tensor(tensor, 0.0)"
        )
    if any_tensor.is_quantized:
        raise TypeError(f"phalanx: a quantized tensor ({any_tensor.dtype}) has a scale beside its elements: exchange dequantize() of it")
    if any_tensor.is_meta:
        raise TypeError("phalanx: a tensor on meta has no elements: make it on the CPU, such as with torch.empty_like(tensor, device='cpu')")
    if any_tensor._is_zerotensor():
        raise TypeError("phalanx: this tensor is all zeros, and has no memory: exchange clone() of it")
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor) and not _has_address(tensor):
            raise TypeError("phalanx: a tensor within a transform of torch.func, such as vmap, has no memory of its own: make this call outside of it")
        return tensor
    name = f"{kind.__module__}.{kind.__qualname__}"
    if callable(getattr(tensor, "to_local", None)):
        raise TypeError(
            f"phalanx: a {name} has parts on several ranks, and no memory of its own: exchange to_local(), this rank's part, or "
            "full_tensor(), the whole"
        )
    if any_tensor.layout is not torch.strided:
        return tensor
    fake: Any = sys.modules.get("torch._subclasses.fake_tensor")
    if fake is not None and isinstance(tensor, fake.FakeTensor):
        raise TypeError(f"phalanx: a {name} has no elements, and stands for a tensor while a program is looked at: exchange outside of its mode")
    if not _has_address(tensor):
        raise TypeError(
            f"phalanx: a {name} has no memory of its own, only what it stands for: exchange the tensors that it is made of, as each rank "
            "needs them"
        )
    return tensor


def _has_address(tensor: Any) -> bool:
    """Whether its elements are at an address."""
    try:
        tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return False
    return True
