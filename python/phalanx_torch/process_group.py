"""The backend ``phalanx`` of ``torch.distributed``."""

# PyTorch's stubs describe overloads in C++, which have other names for the same arguments in each version.
# mypy: disable-error-code="override,assignment,misc"
# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false, reportAssignmentType=false

import contextlib
import datetime
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
# Not all versions have the options of calls in `torch.distributed`.
from torch._C import _distributed_c10d as c10d

from phalanx_torch import _coalescing, _ddp, _exit, _layout, _native, _traces, _uncompiled, _versions, _warnings, device_backend, observed, sparse
from phalanx_torch import work as works
from phalanx_torch._ddp import calling_back
from phalanx_torch._errors import Error, described
from phalanx_torch._functional import dense, is_awaited, stored, waited
from phalanx_torch._integers import average_of, shares
from phalanx_torch.observed import is_of_graph, is_watched, modes, profiler, split_sizes
from phalanx_torch.sparse import all_reduce_sparse
from phalanx_torch.work import Ended, Work, Works, ended

# The limit of a call in seconds, if not the group's, and whether the caller waits for it.
How: TypeAlias = tuple[float | None, bool]
# The number of an operation, and its factor.
Op: TypeAlias = tuple[int, float]

_AVG, _MIN, _MAX, _PREMUL_SUM = 1, 3, 4, 8
# A sum for the native part, which tells the other ranks that it is half of an average.
_INTEGER_AVERAGE = 64
# Types that collectives do not combine, and those in which the result has the same bits.
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
# The numbers by which the native part knows the types of tensors that are combined in a wider one, so that ranks compare them.
_NARROW = {torch.int8: 1, torch.uint8: 2, torch.int16: 3, torch.uint16: 4, torch.int32: 5, torch.uint32: 6, torch.uint64: 7}
_NARROW_FACTOR = 256
# The sum that is to be divided does not overflow, with fewer than 2^24 ranks. There is no wider type than int64: see `shares`.
_WIDER_FOR_AVG = {torch.int8: torch.int32, torch.uint8: torch.int32, torch.int32: torch.int64, **_WIDER}


def create(options: Any, backend_options: object) -> Any:
    """Makes the group that PyTorch asks for."""
    _versions.check_torch()
    if backend_options is not None:
        raise ValueError(f"phalanx takes no pg_options; these are {type(backend_options).__name__}")
    if getattr(options, "enable_reconfigure", False):
        if device_backend.has_other_backends(options):
            raise ValueError("phalanx: enable_reconfigure=True is for a group of one backend; leave out the other devices'")
        from phalanx_torch.reconfigure import ReconfigurableGroup

        store = _of_this_attempt(options.store, os.environ)
        reconfigurable = ReconfigurableGroup(store, options.group_rank, options.group_size, options.timeout, options.group_id)
        reconfigurable.let_be_recorded()
        return reconfigurable
    global _default
    ranks = list(options.global_ranks_in_group)
    source = _default() if ranks else None
    parent = None if source is None else (source, ranks)
    group = ProcessGroup(options.store, options.group_rank, options.group_size, options.timeout, options.group_id, parent)
    if not ranks:
        _default = weakref.ref(group)
    # PyTorch takes a `ProcessGroup` for all devices.
    if device_backend.has_other_backends(options):
        # It asks the dispatcher, which sees the calls of each device.
        _let_be_attached(_is_recorder_asked_for())
        return device_backend.DeviceBackend(group)
    group.let_be_recorded()
    return group


def _of_this_attempt(store: c10d.Store, variables: Mapping[str, str]) -> c10d.Store:
    """``store``, and when torchrun has restarted the workers, a part of it without the keys of those before, whom it served, too.

    Only torchrun on one node counts the same for all workers: of several, each counts its own failures. Other groups let rank 0 name the start.
    """
    attempt = variables.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or variables.get("GROUP_WORLD_SIZE") != "1" or not _is_an_agents(store, variables):
        return store
    return c10d.PrefixStore(f"attempt_{attempt}", store)


def _is_an_agents(store: c10d.Store, variables: Mapping[str, str]) -> bool:
    """Whether torchrun's agent serves ``store``, and keeps it with its keys when it starts the workers again."""
    server = _underlying(store)
    is_given = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return is_given and isinstance(server, c10d.TCPStore) and str(server.port) == variables.get("MASTER_PORT")


def _current_meeting() -> str | None:
    """The name that the default group has of its own, if it is ours.

    A group of some ranks meets under it, and so without the keys of groups of the same name, and perhaps of other ranks, that these processes, or
    those of an earlier start, had before. PyTorch counts from the beginning with each job.
    """
    return dist.group.WORLD._native.meeting if isinstance(dist.group.WORLD, ProcessGroup) else None


# The default group, also where PyTorch has it as the part of another one: from it those of some ranks are made.
_default: "Callable[[], ProcessGroup | None]" = lambda: None


def _address(store: c10d.Store) -> str | None:
    """Where the server of a ``TCPStore`` listens."""
    if not isinstance(store, c10d.TCPStore):
        return None
    host = f"[{store.host}]" if ":" in store.host else store.host
    return f"{host}:{store.port}"


def _underlying(store: c10d.Store) -> c10d.Store:
    """The store without its prefixes."""
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    return store


def _how(options: Any) -> How:
    """The limit of one call in seconds, or None, and whether the caller waits for it."""
    timeout = options.timeout.total_seconds()
    # Versions without `asyncOp` do not say it.
    return (timeout if timeout > 0 else None, not getattr(options, "asyncOp", True))


def _op(options: Any) -> Op:
    number = hash(options.reduceOp)
    if number != _PREMUL_SUM:
        return (number, 1.0)
    factor = options.reduceOp.__getstate__()[1]
    return (number, float(factor))


def _shape(tensor: torch.Tensor) -> str:
    """The shape of ``tensor`` as gloo's errors show it."""
    return _layout.named(tensor.shape)


def _have_shapes(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all have one. Nested tensors have none, and the native part says what to give instead."""
    return not any(tensor.is_nested for tensor in tensors)


def _same_shape(what: str, expected: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Refuses a list of which a tensor has another shape than ``expected``, in gloo's words: its elements would come to other places."""
    if not _have_shapes((expected, *tensors)):
        return
    for index, tensor in enumerate(tensors):
        if tensor.shape != expected.shape:
            raise ValueError(f"{what}: invalid tensor size at index {index} (expected {_shape(expected)}, got {_shape(tensor)})")


def _same_shape_if_even(what: str, expected: torch.Tensor, tensors: Sequence[torch.Tensor], rank: int) -> None:
    """As :func:`_same_shape`. Of tensors of different lengths, which gloo does not take, this rank knows only the shape of its own."""
    if not _have_shapes((expected, *tensors)):
        return
    if all(tensor.numel() == expected.numel() for tensor in tensors):
        _same_shape(what, expected, tensors)
    elif rank < len(tensors) and tensors[rank].numel() == expected.numel() and tensors[rank].shape != expected.shape:
        raise ValueError(f"{what}: invalid tensor size at index {rank} (expected {_shape(expected)}, got {_shape(tensors[rank])})")


def _same_shape_for_each_other(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], rank: int) -> None:
    """As :func:`_same_shape_if_even`, of what ranks send and receive."""
    own, every = outputs[rank], (*inputs, *outputs)
    if _have_shapes(every) and all(tensor.numel() == own.numel() for tensor in every):
        if any(tensor.shape != own.shape for tensor in every):
            raise ValueError("all_to_all: input and output tensors must have the same size")
    else:
        _same_shape_if_even("all_to_all", inputs[rank], outputs, rank)


def _same_length(what: str, expected: torch.Tensor, tensors: Sequence[torch.Tensor], rank: int) -> None:
    """Refuses a list in which this rank's tensor is of another length, where the call is made: of a work for which nobody waits, nobody would hear it.

    After the tensors have been lent, which refuses some kinds. Another type is the native part's error.
    """
    own = tensors[rank]
    if own.dtype is expected.dtype and own.numel() != expected.numel():
        raise ValueError(f"{what}: invalid tensor size at index {rank} (expected {_shape(expected)}, got {_shape(own)})")


def _as_many(what: str, expected: int, tensors: Sequence[object]) -> None:
    """Refuses a list without a tensor for each rank."""
    if len(tensors) != expected:
        raise ValueError(f"{what}: a list of {len(tensors)}, and the group has {expected} ranks")


def _check_layout(what: str, whole: tuple[str, torch.Tensor], part: tuple[str, torch.Tensor], ranks: int) -> None:
    """Refuses a tensor for all ranks of another length, or whose shape says something else than what lies in it."""
    (name, all_ranks), (name_of_part, one_rank) = whole, part
    if _have_shapes((all_ranks, one_rank)):
        if all_ranks.dtype is one_rank.dtype and all_ranks.numel() != ranks * one_rank.numel():
            raise ValueError(
                f"{what}: with {ranks} ranks the {name} must be {ranks} times as long as the {name_of_part}; it has {all_ranks.numel()} elements, the "
                f"{name_of_part} {one_rank.numel()}"
            )
        _layout.check(what, (name, all_ranks.shape), (name_of_part, one_rank.shape), ranks, "view()")


def _check_pair(what: str, index: int, output: torch.Tensor, input: torch.Tensor) -> None:
    """Refuses what the call of this pair, one of several, would refuse."""
    if output.dtype is not input.dtype:
        raise TypeError(f"{what}: the output at index {index} is of {output.dtype}, and the input of {input.dtype}: convert one of them")
    for tensor in (output, input):
        if tensor.is_nested:
            raise TypeError(f"{what}: the tensor at index {index} is nested: exchange what unbind() gives")
        if tensor.layout is not torch.strided:
            raise ValueError(f"{what}: the tensor at index {index} is of layout {tensor.layout}; to_dense() makes one that can be exchanged")
        if tensor.device.type != "cpu":
            raise TypeError(f"{what}: the tensor at index {index} is on {tensor.device}; phalanx moves tensors on the CPU")
        if observed.takes_memory() and not is_awaited(tensor):
            stored(tensor)


def _check_pairs(
    what: str, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], ranks: int, *, is_gathered: bool
) -> None:
    """Refuses several calls as one before the first is made: else the other ranks would wait in the rest."""
    if len(outputs) != len(inputs):
        raise ValueError(f"{what}: {len(outputs)} outputs and {len(inputs)} inputs: give as many of both")
    for index, (output, input) in enumerate(zip(outputs, inputs)):
        whole, part = (output, input) if is_gathered else (input, output)
        names = ("output", "input") if is_gathered else ("input", "output")
        _check_pair(what, index, output, input)
        _check_layout(what, (f"{names[0]} at index {index}", whole), (names[1], part), ranks)


def _is_one_row(tensor: torch.Tensor) -> bool:
    """Whether the elements lie one after the other, each at a multiple of its length. Memory that a program brings may begin elsewhere."""
    return tensor.is_contiguous() and not (tensor.is_cpu and tensor.data_ptr() % tensor.element_size())


class _Staged:
    """Tensors as the native part takes them, contiguous and of a type that it knows, and what to do with the results."""

    __slots__ = ("back", "divided", "sharers")

    def __init__(self, sharers: int = 1) -> None:
        # The number of ranks, if what is lent are `shares` of an average.
        self.sharers = sharers
        self.back: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.divided: list[tuple[torch.Tensor, int]] = []

    def lend(self, tensor: torch.Tensor, written: bool = True, type: torch.dtype | None = None) -> torch.Tensor:
        lent = tensor = dense(stored(waited(tensor)))
        if tensor.is_conj() or tensor.is_neg():
            lent = tensor.detach().resolve_conj().resolve_neg()
        if type is not None:
            lent = lent.detach().to(type)
        if not _is_one_row(lent):
            lent = lent.detach().clone(memory_format=torch.contiguous_format)
        if self.sharers > 1:
            lent = shares(lent.detach(), self.sharers)
        if written and lent is not tensor:
            self.back.append((tensor, lent))
        return lent

    def each(
        self, tensors: Iterable[torch.Tensor], written: bool = True, type: torch.dtype | None = None
    ) -> list[torch.Tensor]:
        return [self.lend(tensor, written, type) for tensor in tensors]

    def averaged(self, op: Op, lent: list[torch.Tensor], ranks: int, written: bool = True) -> Op:
        """The operation to call for `op`. Averages of integers are sums, which are divided at the end, towards zero."""
        if op[0] != _AVG or not _is_integer(lent[0].dtype):
            return op
        self.divided = [(tensor, ranks) for tensor in lent if written and self.sharers == 1]
        return (_INTEGER_AVERAGE, 1.0)

    def finish(self) -> Callable[[], None] | None:
        """What divides results and copies them back; None if there is nothing to do."""
        if not self.back and not self.divided:
            return None

        def settle() -> None:
            # All before any is written: tensors of one call may share memory, and what they share is divided once.
            quotients = [lent.detach().div(ranks, rounding_mode="trunc") for lent, ranks in self.divided]
            for (lent, _), quotient in zip(self.divided, quotients):
                lent.detach().copy_(quotient)
            for tensor, lent in self.back:
                tensor.detach().copy_(lent if self.sharers == 1 else average_of(lent.detach(), self.sharers))

        return settle


class _Earlier:
    """Works that were called before a barrier, and whose results are not copied back yet: threads do that when they get to it."""

    __slots__ = ("works",)

    def __init__(self, works: list[Work]) -> None:
        self.works = works

    def finish(self) -> Callable[[], None] | None:
        """What copies the results of works that have ended; None if there are none."""
        return self.copy if self.works else None

    def copy(self) -> None:
        for work in self.works:
            # Its error is for whoever waits for it.
            work.exception()


def _has_copied(work: Work | None) -> bool:
    """Whether there is nothing left to do of a work; one that has done it may be gone."""
    return work is None or work.has_copied


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def _sharers(dtype: torch.dtype, op: Op, ranks: int) -> int:
    """The number of ranks, if tensors of this type travel as `shares`; else 1."""
    return ranks if op[0] == _AVG and dtype is torch.int64 else 1


def _widened(tensor: torch.Tensor, op: Op, inputs: Sequence[torch.Tensor] = ()) -> torch.dtype | None:
    """The type in which `tensor` is reduced from `inputs`, if not its own."""
    dtype = tensor.dtype
    for input in inputs:
        if input.dtype is not dtype:
            raise TypeError(f"phalanx: an input of {input.dtype} is not reduced into an output of {dtype}; convert one of them")
    if dtype is torch.uint64:
        if op[0] in (_AVG, _MIN, _MAX):
            raise TypeError("phalanx: torch.uint64 has no average, minimum and maximum; convert the tensor")
        return torch.int64
    return (_WIDER_FOR_AVG if op[0] == _AVG else _WIDER).get(dtype)


def _told(op: Op, dtype: torch.dtype, wider: torch.dtype | None) -> Op:
    """The operation to call, with the type that the tensors have if they are combined in a wider one."""
    return op if wider is None else (op[0] + _NARROW_FACTOR * _NARROW[dtype], op[1])


_NOT_RECONFIGURABLE = (
    "phalanx: this group cannot change in place: make it with init_process_group(.., enable_reconfigure=True), which PyTorch has since 2.15"
)

# The groups of this process.
_groups: "weakref.WeakSet[ProcessGroup]" = weakref.WeakSet()
_have_groups_moved_data = False


def _warn_if_unused(group: "ProcessGroup") -> None:
    """Says once, on rank 0, that the ranks of a job have done nothing together. Other groups than the job's are often unused."""
    global _have_groups_moved_data
    _have_groups_moved_data |= any(other.has_moved_data() for other in _exit.members(_groups))
    if _have_groups_moved_data or group is not dist.group.WORLD or group.rank() != 0 or group.size() == 1:
        return
    # A group that has failed has another reason.
    if group._native.is_open() and group.failure() is None:
        _have_groups_moved_data = True
        _warnings.warn(
            f"phalanx: the {group.size()} ranks of this job end without having exchanged any data: if they trained, then each alone; for "
            "a library that averages only over backends whose names it knows, as pytorch-ignite does, call phalanx_torch.as_gloo() or "
            'set PHALANX_AS_GLOO=1, and ask for "gloo"',
            RuntimeWarning,
        )


def _is_to_find_nan() -> bool:
    """Whether PyTorch checks each call for NaN, in its dispatcher."""
    if os.environ.get("TORCH_DIST_NAN_CHECK", "0") != "1":
        return False
    if not observed.can_dispatch():
        _warnings.warn(
            f"phalanx: TORCH_DIST_NAN_CHECK=1 checks nothing here: PyTorch {torch.__version__} does not see the calls of a group in Python; "
            "2.15 is the first that does",
            RuntimeWarning,
        )
        return False
    return True


def _is_recorder_asked_for() -> bool:
    """Whether the program has set the size of PyTorch's flight recorder. It has one by default, too, but a call that goes to it takes several times as
    long."""
    size = os.environ.get("TORCH_FR_BUFFER_SIZE", "").strip()
    # What is no number PyTorch refuses itself.
    return size.isdecimal() and int(size) > 0


def _let_be_attached(is_asked_for: bool) -> None:
    """Lets PyTorch attach its flight recorder to the group that is being made. It does so if it does not think that groups of this name record
    themselves."""
    themselves: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    if is_asked_for:
        themselves.discard("phalanx")
    else:
        themselves.add("phalanx")


# A signal's handler that interrupts whoever has it may end the group.
_watch_lock = threading.RLock()
# How often a group that has hooks is looked at, in seconds.
_WATCH_INTERVAL = 0.02


def _watch(reference: "weakref.ref[ProcessGroup]") -> None:
    """Calls the hooks of a group once for each time that it fails, until it has none any more."""
    while True:
        group = reference()
        if group is None:
            return
        with _watch_lock:
            if not group._abort_hooks or group.has_ended():
                group._watcher = None
                return
        _call_hooks(group)
        del group
        time.sleep(_WATCH_INTERVAL)


def _call_hooks(group: "ProcessGroup") -> None:
    """Calls the hooks of a group that has failed, if they have not been called for that."""
    with _watch_lock:
        native, hooks = group._native, list(group._abort_hooks.values())
        # Last whether they know: a handler may have told them meanwhile.
        if not hooks or native.failure() is None or native is group._told:
            return
        group._told = native
    for hook in hooks:
        try:
            hook()
        except Exception as error:
            _warnings.warn(f"phalanx: an abort hook has failed: {described(error)}", RuntimeWarning)


# The store of the last job that this process has left as rank 0, until it has another default group.
_last_store: c10d.Store | None = None


def _keep_store(group: "ProcessGroup") -> None:
    """Lets the ranks of a job, which leave it, meet again at the same address.

    PyTorch serves the store in the process of rank 0 while that holds it, and serves it on if that makes another at the same port meanwhile.
    Other ranks may come to the next meeting before rank 0 does, or before it has left: what they find would end, and rank 0 would wait for
    them in a new one. Groups of other backends cannot meet twice in one store, whose keys they use anew.
    """
    global _last_store
    if group is not dist.group.WORLD:
        return
    _last_store = None
    if group.rank() != 0 or group.size() == 1 or group.failure() is not None:
        return
    store = _underlying(group._store)
    if isinstance(store, c10d.TCPStore) and all(isinstance(other, ProcessGroup) for other in dist.distributed_c10d._world.pg_map):
        _last_store = store
        _release_store_with_the_next()


def _release_store_with_the_next() -> None:
    """Lets go of the store when there is another default group. That holds it itself if it is at the same port, and ends it with its job."""
    module: Any = dist.distributed_c10d
    update: Any = getattr(module, "_update_default_pg", None)
    # Without that the next job over phalanx does it, and one of another backend does not.
    if update is None or getattr(update, "_phalanx_releases", False):
        return

    def updated(group: Any) -> None:
        global _last_store
        update(group)
        if group is not None:
            _last_store = None
            if module._update_default_pg is updated:
                module._update_default_pg = update

    setattr(updated, "_phalanx_releases", True)
    module._update_default_pg = updated


def _call_hooks_of_all() -> None:
    for group in _exit.members(_groups):
        _call_hooks(group)


_exit.when_left.append(_call_hooks_of_all)


def _begin_without_groups() -> None:
    """Lets a forked process have no part in the groups of its parent, one of whose threads may have had the lock."""
    global _watch_lock
    _watch_lock = threading.RLock()
    _groups.clear()


os.register_at_fork(after_in_child=_begin_without_groups)


def _warn_at_exit() -> None:
    if _exit.cause_of_end() is None:
        for group in _exit.members(_groups):
            _warn_if_unused(group)


_exit.before_leaving.append(_warn_at_exit)


class ProcessGroup(dist.ProcessGroup):
    """The ranks of a group; ``torch.distributed`` makes it and calls it."""

    def __init__(
        self,
        store: c10d.Store,
        rank: int,
        size: int,
        timeout: datetime.timedelta,
        name: object = "",
        parent: "tuple[ProcessGroup, list[int]] | None" = None,
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg, unused-ignore]  # pyright: ignore[reportCallIssue]
        self._store = store
        self._name = str(name)
        self._description = "undefined"
        self._backend_name = "phalanx"
        self._sequence = 0
        self._barriers = 0
        self._has_moved_data = False
        self._coalesced: list[Ended | Work] | None = None
        # Works whose results may still be to be copied back.
        self._copies: list[weakref.ref[Work]] = []
        self._timeout = timeout
        self._abort_hooks: dict[int, Callable[[], object]] = {}
        self._watcher: threading.Thread | None = None
        # The native part of whose failure the hooks know.
        self._told: object = None
        # Whether hooks or the check for NaN see each call; whether it is the part of another group for one device.
        self._finds_nan = _is_to_find_nan()
        self._is_observed = self._finds_nan
        self._is_recorded = False
        self._is_part = False
        self._backend: Any = None
        self._hooks_of_calls: set[tuple[str, int]] = set()
        self._completion_hook: Callable[[Any], object] | None = None
        self._completions = observed.Completions()
        # The last backward pass in which there were calls, and these.
        self._in_backward: tuple[int, list[_native.Work]] = (-1, [])
        # When the last call was made, if DDP has hooks.
        self._called = 0
        native = None if parent is None else self._from(*parent)
        self._native = self._first(store, rank, size) if native is None else native
        _groups.add(self)

    def _from(self, parent: "ProcessGroup", ranks: list[int]) -> Any:
        """The native part of a group of these ranks of another, which know each other; None if it is made as any."""
        if len(ranks) == 1 or parent.size() == 1 or not parent._native.is_open():
            return None
        _exit.check_not_forked()
        # Its keys have names of their own, and no others' are asked for.
        store = _underlying(self._store)
        group = parent._native.part(store, _address(store), self._name, ranks, _limit("the group", self._timeout))
        if group is not None:
            _exit.remember(group)
        return group

    def _first(self, store: c10d.Store, rank: int, size: int) -> Any:
        meeting = _current_meeting()
        if meeting is not None:
            return self._met(c10d.PrefixStore(f"meeting_{meeting}", store), rank, size, self._timeout)
        native = self._met(store, rank, size, self._timeout, _is_an_agents(store, os.environ))
        _versions.compare(native)
        return native

    def _met(
        self, store: c10d.Store, rank: int, size: int, timeout: datetime.timedelta, is_kept: bool = False
    ) -> _native.Group:
        """The native part, when all ranks have met in ``store``, which may have the keys of earlier starts if it ``is_kept``."""
        _exit.check_not_forked()
        group = _native.Group.in_store(store, rank, size, _limit("the group", timeout), is_kept)
        _exit.remember(group)
        return group

    # What it is.

    def getBackendName(self) -> str:
        # PyTorch's C++ asks for this, and uses what answers "gloo" as its own class of that name.
        return "phalanx"

    def name(self) -> str:
        return self._backend_name

    _get_backend_name = name

    def take_name(self, name: str) -> None:
        """Lets the group, and groups split from it, answer in Python that their backend is ``name``."""
        self._backend_name = name

    @property
    def transport(self) -> str | None:
        """``"shm"``, ``"tcp"``, or None in a world of one."""
        transport: str | None = self._native.transport
        return transport

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: Any) -> Any:
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"No backend type associated with device type {torch.device(device).type}")
        return self

    get_backend = _get_backend
    # What else PyTorch asks of the form `supports_...` is answered below the class.
    supports_splitting = True
    use_pg_for_symm_mem_rendezvous = False

    @property
    def options(self) -> Any:
        """What PyTorch asks of the options of a backend: its name, and the limit of a call."""
        options = c10d.Backend.Options("phalanx")
        options._timeout = self._timeout
        return options

    def eager_connect_single_device(self, device: Any = None) -> None:
        """Nothing: the ranks are connected when the group has been made. PyTorch calls it if the group is bound to a device."""

    def perform_nocolor_split(self, device: Any = None) -> None:
        """Nothing: ranks that are not in a new group have no part in making it."""

    def _enable_collectives_timing(self) -> None:
        """Nothing: there are no events of a device to measure. PyTorch would ask the backend that a watched group has, which is none for it."""

    def _watched_backend(self) -> Any:
        """What PyTorch's dispatcher passes calls to, if it can, and has not told of them already."""
        if self._is_part:
            return None
        if self._backend is None:
            if not observed.can_dispatch():
                return None
            self._backend = device_backend.Watched(self)
            self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, self._backend)
        return self._backend

    def register_pre_hook(self, hook_id: int, hook: Callable[[Any], object]) -> None:
        """Calls ``hook`` with PyTorch's ``PreHookArgs`` before each call of the group."""
        self._refuse_hooks_without_dispatcher("register_pre_hook")
        register: Any = super().register_pre_hook
        register(hook_id, hook)
        self._hooks_of_calls.add(("pre", hook_id))
        self._look_for_hooks()

    def unregister_pre_hook(self, hook_id: int) -> None:
        """Forgets the hook."""
        self._refuse_hooks_without_dispatcher("unregister_pre_hook")
        unregister: Any = super().unregister_pre_hook
        unregister(hook_id)
        self._hooks_of_calls.discard(("pre", hook_id))
        self._look_for_hooks()

    def register_post_hook(self, hook_id: int, hook: Callable[[Any], object]) -> None:
        """Calls ``hook`` with PyTorch's ``PostHookArgs`` when a call of the group has been made."""
        self._refuse_hooks_without_dispatcher("register_post_hook")
        register: Any = super().register_post_hook
        register(hook_id, hook)
        self._hooks_of_calls.add(("post", hook_id))
        self._look_for_hooks()

    def unregister_post_hook(self, hook_id: int) -> None:
        """Forgets the hook."""
        self._refuse_hooks_without_dispatcher("unregister_post_hook")
        unregister: Any = super().unregister_post_hook
        unregister(hook_id)
        self._hooks_of_calls.discard(("post", hook_id))
        self._look_for_hooks()

    def _look_for_hooks(self) -> None:
        """Lets calls go past PyTorch's dispatcher again when the last hook is gone."""
        self._is_observed = self._finds_nan or self._is_recorded or bool(self._hooks_of_calls) or self._completion_hook is not None

    def let_be_recorded(self) -> None:
        """Lets PyTorch's flight recorder see each call, if the program has asked for it."""
        if not _is_recorder_asked_for() or not hasattr(c10d, "FlightRecorderHook") or self._watched_backend() is None:
            _let_be_attached(False)
            return
        _let_be_attached(True)
        # The recorder is in C++, and asks the part of the group that is there.
        base: Any = super()
        base._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        base._set_group_name(self._name)
        base._set_group_desc(self._description)
        self._is_recorded = True
        self._look_for_hooks()

    @staticmethod
    def _refuse_hooks_without_dispatcher(name: str) -> None:
        if not observed.can_dispatch():
            raise Error(
                f"phalanx: {name}: PyTorch {torch.__version__} would not call the hooks of a group in Python; 2.15 is the first that does"
            )

    def _register_on_completion_hook(self, hook: Callable[[Any], object]) -> None:
        """Calls ``hook`` with a :class:`phalanx_torch.observed.WorkInfo` when a call of the group has ended well."""
        if self._completion_hook is not None:
            raise Error("phalanx: this group has a hook on completion already; a group has one")
        self._completion_hook = hook
        self._look_for_hooks()

    def _has_hooks(self) -> bool:
        return self._completion_hook is not None

    def _wait_for_pending_works(self) -> None:
        self._completions.wait(self._timeout.total_seconds())

    def get_group_store(self) -> c10d.Store:
        return self._store

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name
        if self._is_recorded:
            base: Any = super()
            base._set_group_name(name)

    _set_group_name = setGroupName

    @property
    def group_name(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description
        if self._is_recorded:
            base: Any = super()
            base._set_group_desc(description)

    _set_group_desc = setGroupDesc

    @property
    def group_desc(self) -> str:
        return self._description

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        self._has_moved_data = self.has_moved_data()
        self._sequence = self._barriers = 0

    def has_ended(self) -> bool:
        """Whether the group has been left."""
        return not self._native.is_open()

    def has_moved_data(self) -> bool:
        """Whether there has been any call but barriers."""
        return self._has_moved_data or self._sequence > self._barriers

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._native.set_timeout(_limit("set_timeout", timeout))
        self._timeout = timeout

    _set_default_timeout = set_timeout

    # How it ends.

    def shutdown(self) -> None:
        """Waits for what has been called, and leaves the group."""
        _warn_if_unused(self)
        _keep_store(self)
        # The watcher may not have looked since it failed, and cannot when it is closed.
        _call_hooks(self)
        earlier = self._earlier()
        try:
            self._native.close()
            earlier.copy()
        finally:
            # What had not ended may have failed, and so may the leaving.
            _call_hooks(self)
            self._completions.wait(_exit.GRACE)

    def abort(self) -> None:
        """Ends the group on every rank: what waits fails, and names this rank."""
        self._native.abort(f"rank {self.rank()} called abort")
        _call_hooks(self)

    def get_error(self) -> Any:
        """The state of the group as PyTorch's ``ErrorType``; :meth:`failure` has the cause."""
        failure = self.failure()
        if failure is None:
            return c10d.ErrorType.SUCCESS
        if failure.kind == "timeout":
            return c10d.ErrorType.TIMEOUT
        is_of_a_peer = failure.peer is not None and failure.peer != self.rank()
        return c10d.ErrorType.REMOTE_ERROR if is_of_a_peer else c10d.ErrorType.COMM_ERROR

    def failure(self) -> Error | None:
        """The :class:`phalanx_torch.Error` for which the group refuses work, or None."""
        failure: Error | None = self._native.failure()
        return failure

    supports_abort_hooks = True

    def register_abort_hook(self, hook_id: int, hook: Callable[[], object]) -> None:
        """Calls ``hook`` once when the group has failed, or a rank has aborted it, whatever this rank does then: on a thread, or on the one
        that aborts, shuts down or reconfigures the group before that."""
        with _watch_lock:
            self._abort_hooks[hook_id] = hook
            if self._watcher is None:
                self._watcher = threading.Thread(target=_watch, args=(weakref.ref(self),), name="phalanx-hooks", daemon=True)
                self._watcher.start()

    def unregister_abort_hook(self, hook_id: int) -> None:
        """Forgets the hook; no error if there is none."""
        with _watch_lock:
            self._abort_hooks.pop(hook_id, None)

    def get_reconfigure_handle(self) -> str:
        raise RuntimeError(_NOT_RECONFIGURABLE)

    def reconfigure(self, opts: Any) -> Ended:
        raise RuntimeError(_NOT_RECONFIGURABLE)

    # The collectives.

    def _call(
        self,
        operation: str,
        how: How,
        tensors: Any,
        run: Callable[[How], _native.Work | None],
        staged: _Staged | _Earlier | None = None,
    ) -> Ended | Work:
        if calling_back or _ddp.are_hooked:
            _ddp.check_order(self, operation)
        self._sequence += 1
        if self._coalesced is not None:
            how = (how[0], False)
        sequence = self._sequence
        native = run(how)
        finish = None if staged is None else staged.finish()
        if native is None and finish is None:
            return ended(tensors, sequence)
        work = Work(native, tensors, finish, sequence, operation)
        if native is not None:
            if finish is not None:
                self._expect_copy(work)
            _ddp.wait_in_backward(self, native)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _expect_copy(self, work: Work) -> None:
        # Without a lock: a signal's handler may interrupt this, and make calls.
        for other in list(self._copies):
            if _has_copied(other()):
                with contextlib.suppress(ValueError):
                    self._copies.remove(other)
        self._copies.append(weakref.ref(work))

    def _earlier(self) -> _Earlier:
        """The works before this call whose results are not copied back yet."""
        known = [reference() for reference in list(self._copies)]
        return _Earlier([work for work in known if work is not None and not work.has_copied])

    def _several(
        self, what: str, call: Callable[..., dist.Work], pairs: Iterable[tuple[Any, Any]], opts: Any
    ) -> list[dist.Work]:
        """The works of several calls as one. The group fails if this rank makes only some of them: the other ranks would wait in the rest."""
        works: list[dist.Work] = []
        before = self._sequence
        try:
            for output, input in pairs:
                works.append(call(output, input, opts))
        except BaseException as error:
            # Of a first call that is refused nothing has been sent.
            is_refused = isinstance(error, (Error, TypeError, ValueError))
            has_begun = bool(works) or self._sequence != before and not is_refused
            if has_begun and self._native.failure() is None:
                self._native.abort(f"{what}: rank {self.rank()} could not make all of its calls: {described(error)}")
            raise
        return works

    def _all(self, works: Sequence[dist.Work], tensors: Any) -> dist.Work:
        return works[0] if len(works) == 1 else Works(works, tensors)

    @staticmethod
    def _one(what: str, tensors: Sequence[Any]) -> Any:
        if len(tensors) != 1:
            raise ValueError(f"{what}: one tensor for each rank, and not {len(tensors)}")
        return tensors[0]

    def _at_once(self, call: Callable[..., bool], *arguments: Any) -> int | None:
        """The number of this call, if its caller waits and nothing is to be done for it but what ``call`` has done now; else None.

        For the most frequent calls: their preparation costs more than the native part takes for a few bytes.
        """
        if _ddp.are_hooked and not calling_back:
            # Before the look whether there is a callback now: if there is, it may have looked before.
            _ddp.note_call(self)
        if self._coalesced is not None or self._is_observed or profiler._is_profiler_enabled or _traces.is_running or calling_back or modes():
            return None
        self._sequence += 1
        sequence = self._sequence
        if call(*arguments):
            return sequence
        # Nothing was done yet; no other thread can have run.
        self._sequence -= 1
        return None

    def allreduce(
        self, tensors: Any, opts: Any = None, timeout: datetime.timedelta | None = None, *, op: Any = None
    ) -> dist.Work:
        if timeout is None and op is None and (sequence := self._at_once(self._native.all_reduce_as_it_is, tensors, opts)) is not None:
            return ended(tensors, sequence)
        tensors, opts = _overload(tensors, opts, timeout, op, c10d.AllreduceOptions)
        if is_watched(self) or is_of_graph(tensors):
            return observed.call(self, "allreduce", tensors, opts)
        tensor = self._one("all_reduce", tensors)
        if tensor.layout is torch.sparse_coo:
            return all_reduce_sparse(self, tensor, _op(opts), _how(opts))
        return self._reduce_in_place("all_reduce", tensors, tensor, _op(opts), _how(opts))

    def _reduce_in_place(
        self, operation: str, tensors: Any, tensor: torch.Tensor, op: Op, how: How, root: int | None = None
    ) -> Ended | Work:
        staged, wider = _Staged(_sharers(tensor.dtype, op, self.size())), _widened(tensor, op)
        is_written = root is None or root == self.rank()
        lent = staged.lend(tensor, is_written, wider)
        op = _told(staged.averaged(op, [lent], self.size(), is_written), tensor.dtype, wider)
        if root is None:
            return self._call(
                operation, how, tensors, lambda how: self._native.all_reduce(lent, op, how), staged
            )
        return self._call(
            operation, how, tensors, lambda how: self._native.reduce(lent, root, op, how), staged
        )

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        opts = opts or c10d.AllreduceCoalescedOptions()
        if is_watched(self) or is_of_graph(tensors):
            return observed.call(self, "allreduce_coalesced", tensors, opts)
        op, how = _op(opts), _how(opts)
        if not tensors:
            raise ValueError("all_reduce_coalesced: there is no tensor; give at least one")
        if len({tensor.dtype for tensor in tensors}) != 1 or any(
            tensor.layout is not torch.strided for tensor in tensors
        ):
            raise ValueError("all_reduce_coalesced: all tensors must be dense and have the same type")
        staged, wider = _Staged(_sharers(tensors[0].dtype, op, self.size())), _widened(tensors[0], op)
        lent = staged.each(tensors, type=wider)
        op = _told(staged.averaged(op, lent, self.size()), tensors[0].dtype, wider)
        return self._call(
            "all_reduce_coalesced",
            how,
            list(tensors),
            lambda how: self._native.all_reduce_coalesced(lent, op, how),
            staged,
        )

    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: datetime.timedelta | None = None, *, root: int | None = None
    ) -> dist.Work:
        if isinstance(tensors, torch.Tensor):
            root, tensors, opts = opts if root is None else root, [tensors], c10d.ReduceOptions()
            opts.rootRank = root
            _set(opts, op, timeout)
        else:
            _only_options("reduce", root=root, op=op, timeout=timeout)
        opts = opts or c10d.ReduceOptions()
        if is_watched(self):
            return observed.call(self, "reduce", tensors, opts)
        tensor, root = self._one("reduce", tensors), _root("reduce", opts, self.size())
        if root == self.rank():
            _warn_of_graph("reduce", tensors)
        return self._reduce_in_place("reduce", tensors, tensor, _op(opts), _how(opts), root)

    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: datetime.timedelta | None = None, *, root: int | None = None
    ) -> dist.Work:
        if timeout is None and root is None and (sequence := self._at_once(self._native.broadcast_as_it_is, tensors, opts)) is not None:
            return ended(tensors, sequence)
        if isinstance(tensors, torch.Tensor):
            root, tensors, opts = opts if root is None else root, [tensors], c10d.BroadcastOptions()
            opts.rootRank = root
            _set(opts, None, timeout)
        else:
            _only_options("broadcast", root=root, timeout=timeout)
        opts = opts or c10d.BroadcastOptions()
        if is_watched(self) or is_of_graph(tensors):
            return observed.call(self, "broadcast", tensors, opts)
        tensor, root = self._one("broadcast", tensors), _root("broadcast", opts, self.size())
        staged = _Staged()
        lent = staged.lend(tensor, written=root != self.rank())
        return self._call(
            "broadcast", _how(opts), tensors, lambda how: self._native.broadcast(lent, root, how), staged
        )

    def allgather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: datetime.timedelta | None = None
    ) -> dist.Work:
        if timeout is None and (sequence := self._at_once(self._native.all_gather_as_it_is, output_tensors, input_tensors, opts)) is not None:
            return ended(list(output_tensors[0]), sequence)
        if isinstance(input_tensors, torch.Tensor):
            output_tensors, input_tensors = [output_tensors], [input_tensors]
            opts = _timeout(c10d.AllgatherOptions(), timeout or opts)
        else:
            _only_options("all_gather", timeout=timeout)
        opts = opts or c10d.AllgatherOptions()
        if is_watched(self):
            return observed.call(self, "allgather", output_tensors, input_tensors, opts)
        outputs, input = self._one("all_gather", output_tensors), self._one("all_gather", input_tensors)
        _as_many("all_gather: outputs", self.size(), outputs)
        _same_shape_if_even("all_gather", input, outputs, self.rank())
        _warn_of_graph("all_gather", outputs)
        staged = _Staged()
        lent, own = staged.each(outputs), staged.lend(input, written=False)
        _same_length("all_gather", input, outputs, self.rank())
        return self._call(
            "all_gather",
            _how(opts),
            list(outputs),
            lambda how: self._native.all_gather(lent, own, how),
            staged,
        )

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        opts = opts or c10d.AllgatherOptions()
        if is_watched(self) or is_of_graph([output]):
            return observed.call(self, "all_gather_single", output, input, opts)
        staged = _Staged()
        lent, own = staged.lend(output), staged.lend(input, written=False)
        _check_layout("all_gather_single", ("output", lent), ("input", own), self.size())
        return self._call(
            "all_gather_single",
            _how(opts),
            [output],
            lambda how: self._native.all_gather_single(lent, own, how),
            staged,
        )

    _allgather_base = all_gather_single
    all_gather_into_tensor = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        _check_pairs("all_gather_single_coalesced", outputs, inputs, self.size(), is_gathered=True)
        works = self._several("all_gather_single_coalesced", self.all_gather_single, zip(outputs, inputs), opts)
        return self._all(works, list(outputs))

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> dist.Work:
        opts = opts or c10d.AllgatherOptions()
        if is_watched(self):
            return observed.call(self, "allgather_coalesced", output_lists, input_list, opts)
        # All before the first is called: else the other ranks would wait in the rest.
        if not input_list:
            raise ValueError("all_gather_coalesced: requires non-empty input tensor list")
        _as_many("all_gather_coalesced: outputs", self.size(), output_lists)
        for outputs in output_lists:
            if len(outputs) != len(input_list):
                raise ValueError(f"all_gather_coalesced: invalid output size: (expected length {len(input_list)}, got {len(outputs)})")
            for index, (output, input) in enumerate(zip(outputs, input_list)):
                if _have_shapes((output, input)) and output.shape != input.shape:
                    raise ValueError(
                        f"all_gather_coalesced: invalid size of output tensor at index {index} (expected length {_shape(input)}, got {_shape(output)})"
                    )
                _check_pair("all_gather_coalesced", index, output, input)
        columns = [[outputs[index] for outputs in output_lists] for index in range(len(input_list))]
        pairs = (([column], [input]) for column, input in zip(columns, input_list))
        return Works(self._several("all_gather_coalesced", self.allgather, pairs, opts), output_lists)

    def gather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: datetime.timedelta | None = None, *, root: int | None = None
    ) -> dist.Work:
        if isinstance(input_tensors, torch.Tensor):
            root, opts = opts if root is None else root, c10d.GatherOptions()
            opts.rootRank = root
            _timeout(opts, timeout)
            output_tensors, input_tensors = [output_tensors] if output_tensors else [], [input_tensors]
        else:
            _only_options("gather", root=root, timeout=timeout)
        opts = opts or c10d.GatherOptions()
        if is_watched(self):
            return observed.call(self, "gather", output_tensors, input_tensors, opts)
        input, root = self._one("gather", input_tensors), _root("gather", opts, self.size())
        is_root = self.rank() == root
        if len(output_tensors) != int(is_root):
            raise ValueError("gather: the root has one list of outputs, every other rank none")
        staged = _Staged()
        outputs = self._one("gather", output_tensors) if is_root else []
        if is_root:
            _as_many("gather: outputs", self.size(), outputs)
        _same_shape("gather", input, outputs)
        _warn_of_graph("gather", outputs)
        lent, own = staged.each(outputs), staged.lend(input, written=False)
        return self._call(
            "gather",
            _how(opts),
            list(outputs),
            lambda how: self._native.gather(lent, own, root, how),
            staged,
        )

    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        opts, size = opts or c10d.GatherOptions(), self.size()
        if self.rank() != opts.rootRank:
            return self.gather([], [input], opts)
        if not _have_shapes((output, input)):
            return self.gather([[output] * size], [input], opts)
        if output.numel() != size * input.numel():
            raise ValueError(
                f"gather_single: with {size} ranks the output must be {size} times as long as the input; it has {output.numel()} elements, the input "
                f"{input.numel()}"
            )
        _check_layout("gather_single", ("output", output), ("input", input), size)
        # Rows of all ranks below each other, and a dimension more, the first, are the same elements.
        return self.gather([list(output.view(size, *input.shape).unbind())], [input], opts)

    gather_into_tensor = gather_single

    def scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: datetime.timedelta | None = None, *, root: int | None = None
    ) -> dist.Work:
        if isinstance(output_tensors, torch.Tensor):
            root, opts = opts if root is None else root, c10d.ScatterOptions()
            opts.rootRank = root
            _timeout(opts, timeout)
            output_tensors, input_tensors = [output_tensors], [input_tensors] if input_tensors else []
        else:
            _only_options("scatter", root=root, timeout=timeout)
        opts = opts or c10d.ScatterOptions()
        if is_watched(self) or is_of_graph(output_tensors):
            return observed.call(self, "scatter", output_tensors, input_tensors, opts)
        output, root = self._one("scatter", output_tensors), _root("scatter", opts, self.size())
        is_root = self.rank() == root
        if len(input_tensors) != int(is_root):
            raise ValueError("scatter: the root has one list of inputs, every other rank none")
        staged = _Staged()
        inputs = self._one("scatter", input_tensors) if is_root else []
        if is_root:
            _as_many("scatter: inputs", self.size(), inputs)
        _same_shape("scatter", output, inputs)
        lent, into = staged.each(inputs, written=False), staged.lend(output)
        return self._call(
            "scatter",
            _how(opts),
            output_tensors,
            lambda how: self._native.scatter(into, lent, root, how),
            staged,
        )

    def reduce_scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: datetime.timedelta | None = None, *, op: Any = None
    ) -> dist.Work:
        if isinstance(output_tensors, torch.Tensor):
            output_tensors, input_tensors = [output_tensors], [input_tensors]
            opts = _set(c10d.ReduceScatterOptions(), opts if op is None else op, timeout)
        else:
            _only_options("reduce_scatter", op=op, timeout=timeout)
        opts = opts or c10d.ReduceScatterOptions()
        if is_watched(self):
            return observed.call(self, "reduce_scatter", output_tensors, input_tensors, opts)
        output = self._one("reduce_scatter", output_tensors)
        inputs = self._one("reduce_scatter", input_tensors)
        _as_many("reduce_scatter: inputs", self.size(), inputs)
        _same_shape_if_even("reduce_scatter", output, inputs, self.rank())
        _warn_of_graph("reduce_scatter", [output])
        op = _op(opts)
        staged = _Staged(_sharers(output.dtype, op, self.size()))
        wider = _widened(output, op, inputs)
        lent, into = staged.each(inputs, written=False, type=wider), staged.lend(output, type=wider)
        _same_length("reduce_scatter", output, inputs, self.rank())
        op = _told(staged.averaged(op, [into], self.size()), output.dtype, wider)
        return self._call(
            "reduce_scatter",
            _how(opts),
            output_tensors,
            lambda how: self._native.reduce_scatter(into, lent, op, how),
            staged,
        )

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        opts = opts or c10d.ReduceScatterOptions()
        if is_watched(self) or is_of_graph([output]):
            return observed.call(self, "reduce_scatter_single", output, input, opts)
        op = _op(opts)
        staged = _Staged(_sharers(output.dtype, op, self.size()))
        wider = _widened(output, op, [input])
        own, into = staged.lend(input, written=False, type=wider), staged.lend(output, type=wider)
        # Not of what is lent, which may have a dimension more.
        _check_layout("reduce_scatter_single", ("input", input), ("output", output), self.size())
        op = _told(staged.averaged(op, [into], self.size()), output.dtype, wider)
        return self._call(
            "reduce_scatter_single",
            _how(opts),
            [output],
            lambda how: self._native.reduce_scatter_single(into, own, op, how),
            staged,
        )

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        _check_pairs("reduce_scatter_single_coalesced", outputs, inputs, self.size(), is_gathered=False)
        works = self._several("reduce_scatter_single_coalesced", self.reduce_scatter_single, zip(outputs, inputs), opts)
        return self._all(works, list(outputs))

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, output_split_sizes: Any = (), input_split_sizes: Any = (), opts: Any = None, timeout: datetime.timedelta | None = None
    ) -> dist.Work:
        opts = _timeout(c10d.AllToAllOptions(), timeout or opts) if _is_time(timeout or opts) else opts
        opts = opts or c10d.AllToAllOptions()
        if is_watched(self):
            return observed.call(self, "all_to_all_single", output, input, output_split_sizes, input_split_sizes, opts)
        _warn_of_graph("all_to_all_single", [output])
        staged = _Staged()
        received = _counts("output", output, output_split_sizes, self.size())
        sent = _counts("input", input, input_split_sizes, self.size())
        if received and not sent:
            sent = [input.numel() // self.size()] * self.size()
        if sent and not received:
            received = [output.numel() // self.size()] * self.size()
        own, into = staged.lend(input, written=False), staged.lend(output)
        is_of_one_type, rank = output.dtype is input.dtype, self.rank()
        if is_of_one_type and not sent and output.numel() != input.numel():
            raise ValueError(f"all_to_all_single: the output has {output.numel()} elements, the input {input.numel()}")
        if is_of_one_type and sent and sent[rank] != received[rank]:
            raise ValueError(f"all_to_all_single: this rank sends itself {sent[rank]} elements, and has a part of {received[rank]} for them")
        return self._call(
            "all_to_all_single",
            _how(opts),
            [output],
            lambda how: self._native.all_to_all_single(into, own, received, sent, how),
            staged,
        )

    alltoall_base = all_to_all_single

    def alltoall(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: datetime.timedelta | None = None
    ) -> dist.Work:
        opts = _timeout(c10d.AllToAllOptions(), timeout or opts) if _is_time(timeout or opts) else opts
        opts = opts or c10d.AllToAllOptions()
        if is_watched(self):
            return observed.call(self, "alltoall", output_tensors, input_tensors, opts)
        _as_many("all_to_all: outputs", self.size(), output_tensors)
        _as_many("all_to_all: inputs", self.size(), input_tensors)
        _same_shape_for_each_other(input_tensors, output_tensors, self.rank())
        _warn_of_graph("all_to_all", output_tensors)
        staged = _Staged()
        lent, into = staged.each(input_tensors, written=False), staged.each(output_tensors)
        _same_length("all_to_all", input_tensors[self.rank()], output_tensors, self.rank())
        return self._call(
            "all_to_all",
            _how(opts),
            output_tensors,
            lambda how: self._native.all_to_all(into, lent, how),
            staged,
        )

    def barrier(self, opts: Any = None, timeout: datetime.timedelta | None = None) -> dist.Work:
        if _is_time(opts):
            opts, timeout = None, opts
        opts = _timeout(opts or c10d.BarrierOptions(), timeout)
        if is_watched(self):
            return observed.call(self, "barrier", opts)
        self._barriers += 1
        # As over gloo, all that was called before has ended when a barrier has, and its results are there.
        return self._call("barrier", _how(opts), [], self._native.barrier, self._earlier())

    def monitored_barrier(self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error names the ranks that have not come, on all ranks, and begins as gloo's does."""
        timeout = self._timeout if timeout is None else timeout
        if not _is_time(timeout):
            raise TypeError(f"monitored_barrier: Expected timeout argument to be of type datetime.timedelta, got {timeout!r}")
        seconds, rank = timeout.total_seconds(), self.rank()
        if seconds <= 0:
            raise Error(f"Rank {rank} timed out in monitoredBarrier: its time-out is {seconds} s", "timeout")
        _ddp.check_order(self, "monitored_barrier")
        self._sequence += 1
        self._barriers += 1
        earlier = self._earlier()
        try:
            self._native.monitored_barrier(seconds)
        except Error as error:
            named = re.search(r"ranks? ([0-9, ]+)(?: and more)? of ", str(error))
            if error.kind == "mismatch" or named is None and error.peer is None:
                # It has not failed for want of a rank, such as in a signal's handler, or in another call on another rank.
                raise
            missing = named[1].split(", ") if named else [str(error.peer)]
            if rank != 0:
                begin = (
                    f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for "
                    "send/recv from rank 0"
                )
            elif wait_all_ranks:
                begin = f"Ranks {', '.join(missing)} failed to pass monitoredBarrier in {round(seconds * 1000)} ms"
            else:
                begin = f"Rank {missing[0]} failed to pass monitoredBarrier in {round(seconds * 1000)} ms"
            named_error = Error(f"{begin}: {error}", peer=error.peer)
            named_error.kind = error.kind
            raise named_error from None
        earlier.copy()

    # Messages.

    def _message(self, tensors: Any, written: bool, start: Callable[[torch.Tensor], _native.Work]) -> Work:
        tensor, staged = self._one("send and recv", tensors), _Staged()
        if written:
            # Pipelines receive into leaves, whose gradients they send back.
            _warn_of_graph("recv", [tensor for tensor in tensors if not getattr(tensor, "is_leaf", True)])
        # Beside collectives messages have any order.
        if threading.get_ident() in calling_back:
            _ddp.check_order(self, "message")
        self._sequence += 1
        work = Work(start(staged.lend(tensor, written)), tensors, staged.finish(), self._sequence, "message")
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _check_peer(self, what: str, rank: int) -> None:
        # At once: of a work for which nobody waits, nobody would hear it.
        if not 0 <= rank < self.size():
            begin = ": ranks begin with 0" if rank < 0 else f", which has {self.size()}"
            raise ValueError(f"{what}: rank {rank} is not a rank of this group{begin}")
        if rank == self.rank():
            raise ValueError(f"{what}: rank {rank} cannot send to or receive from itself (name another rank, or copy the data)")

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> dist.Work:
        if is_watched(self):
            return observed.call(self, "send", tensors, dstRank, tag)
        self._check_peer("send", dstRank)
        return self._message(
            tensors, False, lambda tensor: self._native.send(tensor, dstRank, tag, (None, False))
        )

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> dist.Work:
        if is_watched(self):
            return observed.call(self, "recv", tensors, srcRank, tag)
        self._check_peer("recv", srcRank)
        return self._message(
            tensors, True, lambda tensor: self._native.recv(tensor, srcRank, tag, (None, False))
        )

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        if is_watched(self):
            return observed.call(self, "recv_anysource", tensors, tag)
        return self._message(
            tensors, True, lambda tensor: self._native.recv(tensor, None, tag, (None, False))
        )

    recvAnysource = recv_anysource

    # Several calls as one.

    def start_coalescing(self, device: Any = None) -> None:
        self._coalesced = []

    def end_coalescing(self, device: Any = None) -> Works:
        works, self._coalesced = self._coalesced or [], None
        return Works(works, [tensor for work in works for tensor in work._tensors])

    def forget_coalescing(self) -> None:
        """Makes calls as usual again; those that have been made go on."""
        self._coalesced = None

    _start_coalescing = start_coalescing
    _end_coalescing = end_coalescing

    # Groups of some of the ranks.

    def split_group(
        self,
        new_ranks: list[int],
        timeout: datetime.timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> "ProcessGroup | None":
        if opts is not None:
            raise ValueError(f"phalanx: split_group takes no pg_options; these are {type(opts).__name__}")
        if self.rank() not in new_ranks:
            return None
        store = c10d.PrefixStore(f"{group_name}/", self._store)
        group = self._part(store, new_ranks, timeout or self._timeout, group_name)
        group.take_name(self._backend_name)
        group.let_be_recorded()
        if group_desc is not None:
            group.setGroupDesc(group_desc)
        return group

    splitGroup = split_group

    def merge_remote_group(self, *arguments: Any, **named: Any) -> Any:
        raise RuntimeError(
            "phalanx: merge_remote_group is not there; make the group with enable_reconfigure=True, and take reconfigure to merge groups"
        )

    def _part(self, store: c10d.Store, ranks: list[int], timeout: datetime.timedelta, name: object) -> "ProcessGroup":
        """A group of some of the ranks."""
        return ProcessGroup(store, ranks.index(self.rank()), len(ranks), timeout, name, (self, list(ranks)))


# This group is its own backend. What PyTorch asks of backends, and this one has not, it does not support, in later versions, too.
for _name in dir(c10d.Backend):
    if _name.lstrip("_").startswith("supports_") and _name not in vars(ProcessGroup):
        _is_call = callable(getattr(c10d.Backend, _name))
        setattr(ProcessGroup, _name, (lambda self, *arguments: False) if _is_call else False)


def _root(what: str, options: Any, size: int) -> int:
    """The root that the options name. The native part would refuse a rank beyond the last one where somebody waits for the call."""
    root: int = options.rootRank
    if root < 0:
        raise ValueError(f"{what}: the root is rank {root}, and ranks begin with 0")
    if root >= size:
        raise ValueError(f"{what}: rank {root} is outside a world of {size}: ranks run from 0 to {size - 1}")
    # Of gathers and scatters there is none.
    tensor = getattr(options, "rootTensor", 0)
    if tensor != 0:
        raise ValueError(f"{what}: rootTensor is {tensor}, and each rank has one tensor: leave it out")
    return root


def _warn_of_graph(what: str, tensors: Sequence[torch.Tensor]) -> None:
    """Warns of a call that writes into a tensor that autograd follows, and of which PyTorch's dispatcher does not warn."""
    if any(getattr(tensor, "requires_grad", False) for tensor in tensors) and torch.is_grad_enabled():
        _warnings.warn(
            f"phalanx: {what} writes into a tensor that requires gradients, and autograd does not see that: gradients through it would be those of what "
            "it was before. Give a tensor without gradients, such as detach() of it, or call it under torch.no_grad()",
            UserWarning,
        )


def _is_time(value: object) -> bool:
    return isinstance(value, datetime.timedelta)


def _only_options(operation: str, **given: object) -> None:
    """Refuses what would be ignored beside lists of tensors, or beside options."""
    for name, value in given.items():
        if value is not None:
            raise TypeError(f"{operation}: {name}= is for a call with tensors and no options; set it in the options of the call")


def _timeout(options: Any, timeout: object) -> Any:
    if timeout is not None:
        if not _is_time(timeout):
            raise TypeError(f"phalanx: the time-out of a call is a timedelta, and not a {type(timeout).__name__}")
        options.timeout = timeout
    return options


def _limit(what: str, timeout: object) -> float:
    """The seconds of a group's time-out."""
    if not isinstance(timeout, datetime.timedelta):
        raise TypeError(f"phalanx: {what}: Expected timeout argument to be of type datetime.timedelta, got {timeout!r}")
    seconds = timeout.total_seconds()
    if seconds < 0:
        raise ValueError(
            f"phalanx: {what}: a time-out of {seconds} s is below 0. One of more than 292 years overflows in PyTorch, and may be negative then: give a "
            "shorter one"
        )
    return seconds


def _set(options: Any, op: Any, timeout: object) -> Any:
    if op is not None:
        options.reduceOp = op
    return _timeout(options, timeout)


def _overload(tensors: Any, opts: Any, timeout: object, op: Any, options: type[Any]) -> tuple[Any, Any]:
    """`(tensors, options)` of a call with options, or with a tensor or tensors, an operation and a time-out."""
    if isinstance(tensors, torch.Tensor):
        tensors = [tensors]
    if isinstance(opts, options):
        _only_options("all_reduce", op=op, timeout=timeout)
        return tensors, opts
    return tensors, _set(options(), op if op is not None else opts, timeout)


def _counts(what: str, tensor: torch.Tensor, splits: Any, size: int) -> list[int]:
    """The numbers of elements that belong to each rank; empty if all have the same."""
    splits = split_sizes(splits)
    if not splits:
        rows = tensor.size(0) if tensor.dim() else 1
        if tensor.numel() and rows % size:
            raise ValueError(f"all_to_all_single: {size} ranks cannot have equal parts of the {rows} rows of the {what}: give split sizes")
        return []
    if any(split < 0 for split in splits):
        raise ValueError(f"all_to_all_single: the {what} split sizes are {splits}, and none may be below 0")
    if len(splits) != size:
        raise ValueError(f"all_to_all_single: {len(splits)} {what} split sizes for {size} ranks")
    if sum(splits) != tensor.size(0):
        raise ValueError(
            f"all_to_all_single: the {what} split sizes add up to {sum(splits)}, and the tensor has {tensor.size(0)} rows"
        )
    row = tensor.numel() // tensor.size(0) if tensor.size(0) else 0
    return [split * row for split in splits]


# Also the functions of this module, now that they are all there.
_uncompiled.skip(_coalescing, _layout, device_backend, sys.modules[__name__], sparse, works)
