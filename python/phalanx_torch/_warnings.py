"""Warnings that name the line of the program."""

import os
import sys
import threading
import types
import warnings

# What stands between the program and a warning: this package, imports, and the begin of a thread.
_BETWEEN = (os.path.join(os.path.dirname(__file__), ""), "<frozen importlib", threading.__file__)


def _between() -> tuple[str, ...]:
    """Those, and PyTorch, through whose functions a call may have come."""
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    return _BETWEEN if torch is None else (*_BETWEEN, os.path.join(os.path.dirname(torch), ""))


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns of the line that has called this package, perhaps through PyTorch. `warnings.warn` counts frames, whose number depends on the way."""
    between = _between()
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(between):
        frame = frame.f_back
    if frame is None:
        # Python ends, or this is a thread of ours: no line of the program has called.
        warnings.warn_explicit(message, category, "sys", 1, "sys", {})
        return
    module = frame.f_globals.get("__name__") or "<unknown>"
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, module, registry)
