"""Keeps ``torch.compile`` out of this package.

Dynamo traces whatever Python code runs below a compiled model, also what PyTorch's reducer calls from C++. What a group does with
other ranks is no part of a graph.
"""

import types
from collections.abc import Iterator
from typing import Any

from phalanx_torch import _warnings


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """``code`` and what is written inside of it: functions and lambdas."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _functions(owner: object, module: str) -> Iterator[types.FunctionType]:
    value: Any
    for value in vars(owner).values():
        value = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if isinstance(value, types.FunctionType) and value.__module__ == module:
            yield value
        elif isinstance(value, type) and value.__module__ == module and value is not owner:
            yield from _functions(value, module)


def skip(*modules: types.ModuleType) -> None:
    """Lets Dynamo run the functions of ``modules``, and what they call, as they are."""
    try:
        # `torch._dynamo` has this as `skip_code`; to import that takes seconds.
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

        as_it_is = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
        for module in modules:
            for function in _functions(module, module.__name__):
                for code in _codes(function.__code__):
                    set_code_exec_strategy(code, as_it_is)
    except (ImportError, AttributeError, TypeError) as error:
        # These are PyTorch's own parts, which another version may have in another form, or not at all.
        _warnings.warn(
            "phalanx_torch: this PyTorch cannot be told to leave this package as it is when it compiles: a compiled "
            f"DistributedDataParallel may fail, and all else works ({type(error).__name__}: {error})",
            RuntimeWarning,
        )
