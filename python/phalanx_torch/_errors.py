"""The error of a group."""

from phalanx_torch import _native

try:
    from torch.distributed import DistBackendError as _Base
except ImportError:
    _Base = RuntimeError


class Error(_Base):
    """A failure of a group: it names the rank that reports it, the call, the rank that caused it, and the remedy.

    ``kind`` is ``"timeout"``, ``"peer_failed"`` (a rank died, froze or lost its connection), ``"peer_left"`` (a rank
    destroyed the group or ended while this one still waited for it), ``"mismatch"`` (the ranks made different calls),
    ``"aborted"`` or ``"other"``. ``peer`` is the rank to blame in this group, if there is one.

    The group is unusable afterwards on every rank; destroy it and make another. With PyTorch this is a
    ``torch.distributed.DistBackendError``, otherwise a ``RuntimeError``.
    """

    def __init__(self, message, kind="other", peer=None):
        # PyTorch's programs look for this text in the errors of every backend.
        super().__init__(f"phalanx: Timed out at {message}" if kind == "timeout" else message)
        self.kind = kind
        self.peer = peer


_native.set_error_class(Error)
