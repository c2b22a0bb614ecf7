"""The error of a group."""

import functools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from phalanx_torch import _native

if TYPE_CHECKING:
    from typing_extensions import Self


class Error(RuntimeError):
    """A failure of a group: it names the rank that reports it, the call, the rank that caused it, and the remedy.

    ``kind`` is ``"timeout"``, ``"peer_failed"`` (a rank died, froze or lost its connection), ``"peer_left"`` (a rank
    destroyed the group or ended while this one still waited for it), ``"mismatch"`` (the ranks made different calls),
    ``"aborted"`` or ``"other"``. ``peer`` is the rank to blame in this group, if there is one.

    The group is unusable afterwards on every rank; destroy it and make another. One exception is the time-out of a work's ``wait``: the operation goes
    on, and ``failure()`` of the group is None. In a program that has imported PyTorch every such error is a ``torch.distributed.DistBackendError``, too.
    """

    kind: str
    peer: int | None

    def __new__(cls, *arguments: Any, **named: Any) -> "Self":
        kind: Any = _of_torch() if cls is Error and "torch.distributed" in sys.modules else cls
        error: Self = RuntimeError.__new__(kind, *arguments)
        return error

    def __init__(self, message: str, kind: str = "other", peer: int | None = None) -> None:
        # PyTorch's programs look for this text in the errors of every backend.
        super().__init__(f"phalanx: Timed out at {message}" if kind == "timeout" else message)
        self.kind = kind
        self.peer = peer

    def __reduce__(self) -> tuple[type["Error"], tuple[object, ...], dict[str, object]]:
        # The class that PyTorch's programs get has no place of its own: it is made where the error is read.
        is_of_torch = "torch.distributed" in sys.modules and type(self) is _of_torch()
        return (Error if is_of_torch else type(self), self.args, vars(self))


def described(error: BaseException) -> str:
    """The class and the text of an exception of the program's, for other ranks. The making of the text may fail, and the name of a file in it may be no
    UTF-8."""
    try:
        text = str(error)
    except Exception:
        text = "(its text cannot be made)"
    return f"{type(error).__name__}: {text}".encode(errors="backslashreplace").decode()


def listed(ranks: Sequence[int]) -> str:
    """The first of these ranks, for an error: a job may have thousands."""
    shown = ", ".join(str(rank) for rank in ranks[:16])
    return f"[{shown}, ..]" if len(ranks) > 16 else f"[{shown}]"


@functools.cache
def _of_torch() -> type[Error]:
    """The class of errors where PyTorch is there."""
    base = getattr(sys.modules["torch.distributed"], "DistBackendError", None)
    if base is None:
        return Error  # A PyTorch that is built without it.
    return type("Error", (Error, base), {"__module__": __name__, "__doc__": Error.__doc__})


_native.set_error_class(Error)
