"""The part of a group that has another backend for other devices: ``"cpu:phalanx,cuda:nccl"``."""

import datetime
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend as C10DBackend
from torch._C._distributed_c10d import DebugLevel, _DistributedBackendOptions, get_debug_level

from phalanx_torch import observed

if TYPE_CHECKING:
    from phalanx_torch.process_group import ProcessGroup

_SAME = (
    "abort",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "barrier",
    "broadcast",
    "end_coalescing",
    "gather",
    "get_error",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "scatter",
    "send",
    "set_timeout",
    "shutdown",
    "start_coalescing",
    "_get_sequence_number_for_group",
    "_set_sequence_number_for_group",
)


def of_device(group: Any, device: str) -> Any:
    """The backend of PyTorch's `group` for `device`. With TORCH_DISTRIBUTED_DEBUG=DETAIL PyTorch wraps those of Python."""
    part = group._get_backend(torch.device(device))
    wrapper = getattr(dist.distributed_c10d, "_ProcessGroupWrapper", ())
    while isinstance(part, wrapper):
        part = part.wrapped_pg
    return part


# With TORCH_DISTRIBUTED_DEBUG=DETAIL PyTorch wraps a backend, and forgets what Python has of it, without which it can do nothing. They are kept here
# until they are shut down.
_kept: "set[DeviceBackend]" = set()


class DeviceBackend(C10DBackend):
    """Passes PyTorch's calls with tensors on the CPU to the group ``group``, which nobody else has.

    PyTorch hides our works here behind its own, which have ``wait`` and futures, and no more: ``is_completed`` stays false, and
    a receive from any rank does not tell from which.
    """

    def __init__(self, group: "ProcessGroup") -> None:
        super().__init__(group.rank(), group.size())
        self._group = group
        # PyTorch's dispatcher tells of each call before it comes here.
        group._is_part = True
        if get_debug_level() == DebugLevel.DETAIL:
            _kept.add(self)

    def getBackendName(self) -> str:
        return "phalanx"

    def name(self) -> str:
        return self._group.name()

    # PyTorch's stubs have them as properties of other types in each version.
    supports_coalescing = property(lambda self: False)  # pyright: ignore[reportIncompatibleMethodOverride]
    supports_splitting = property(lambda self: False)  # pyright: ignore[reportIncompatibleMethodOverride]

    @property
    def options(self) -> Any:
        """As of the group alone. PyTorch's own property asks for this one, and would find itself."""
        return self._group.options

    def take_name(self, name: str) -> None:
        """Lets the part, and what is split from its group, answer that its backend is ``name``."""
        self._group.take_name(name)

    def allreduce_sparse(self, tensors: Any, opts: Any) -> dist.Work:
        return self._group.allreduce(tensors, opts)

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        # Of a call that names none it is below 0.
        timeout = opts.timeout if opts.timeout >= datetime.timedelta(0) else None
        self._group.monitored_barrier(timeout, wait_all_ranks)


def _passed_on(name: str) -> Callable[..., Any]:
    def call(self: DeviceBackend, *arguments: Any) -> Any:
        if name in ("abort", "shutdown"):
            _kept.discard(self)
        return observed.from_backend(self._group, name, arguments)

    call.__name__ = name
    return call


for _name in _SAME:
    setattr(DeviceBackend, _name, _passed_on(_name))


class Watched(DeviceBackend):
    """Brings the calls of a group back to it when PyTorch's dispatcher has told of them (:mod:`phalanx_torch.observed`)."""

    def __init__(self, group: "ProcessGroup") -> None:
        C10DBackend.__init__(self, group.rank(), group.size())
        # The group has this backend, and would have itself.
        self._reference = weakref.ref(group)

    @property
    def _group(self) -> "ProcessGroup":  # type: ignore[override]  # pyright: ignore[reportIncompatibleVariableOverride]
        group = self._reference()
        if group is None:
            raise RuntimeError("phalanx: this process group is gone")
        return group


def takes_backends_in_python() -> bool:
    """Does this PyTorch let Python write the part of a group that is for one device? 2.14 does, 2.9 does not."""
    try:
        C10DBackend(0, 1)
    except TypeError:
        return False
    return hasattr(_DistributedBackendOptions, "process_group")


def has_other_backends(options: Any) -> bool:
    """Is the group that these options are for to have other backends for other devices of this machine?

    Its default backend is then the one of the accelerator, and not ours, of whose kind PyTorch knows no more than "custom".
    """
    if not takes_backends_in_python() or options.process_group is None or options.process_group.name() == "custom":
        return False
    if torch.accelerator.is_available():
        return True
    # Without the devices there are no backends for them, and the group is ours alone. PyTorch 2.15 would ask such a group for
    # backends, to record what they do; those of the accelerators cannot have anything to record here.
    recorded: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recorded.update(name for name, devices in dist.Backend.backend_capability.items() if "cpu" not in devices)
    return False
