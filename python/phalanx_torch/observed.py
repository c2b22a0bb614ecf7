"""Lets PyTorch's tools see the calls of a group: the profiler, execution traces, dispatch modes such as ``CommDebugMode``, hooks before and after
each call, the check for NaN, the flight recorder, and hooks on completion.

PyTorch tells most of these in its dispatcher, on the way to a backend, and a group that is written in Python is called past it. So while
anybody watches, a call takes that way: to PyTorch's operation, and from there to a backend (:class:`device_backend.Watched`), which brings it
back to the group. With PyTorch before 2.15, which has not all of that in Python, only the profiler and the hooks on completion see the calls.

An event of the profiler must not be called ``record_param_comms``: for that name it reads data that only C++ can leave, and crashes without.
"""

import datetime
import operator
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.autograd import profiler as profiler

from phalanx_torch import _traces, _warnings
from phalanx_torch import work as works
from phalanx_torch._errors import described
from phalanx_torch._functional import dense, is_awaited, stored

if TYPE_CHECKING:
    from phalanx_torch.process_group import ProcessGroup

_T = TypeVar("_T")
modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_autograd: Any = vars(torch._C)["_autograd"]
_enter: Any = _autograd._record_function_with_args_enter
_exit: Any = _autograd._record_function_with_args_exit
_exit_with: Any = torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction
_types: Any = vars(c10d)["OpType"]
# The name that a program has given to its calls with PyTorch's `record_comm`, which 2.15 is the first to have; empty without one.
_given_name: Callable[[], str] = getattr(c10d, "_get_comm_profiling_name", str)
_mode: Any = vars(torch._C)["_get_dispatch_mode"]
_keys: Any = vars(torch._C)["_TorchDispatchModeKey"]


class _Place(threading.local):
    """Where a watched call of this thread is: not yet in PyTorch's dispatcher, back from it, or recorded and to be carried out."""

    depth = 0
    # The group whose call is with PyTorch's dispatcher, and its options; what the call gave, when it has come back.
    group: "ProcessGroup | None" = None
    options: Any = None
    work: Any = None
    error: BaseException | None = None
    # The call of objects that is with the dispatcher, if it is one: what it is seen as, and what carries it out.
    objects: "tuple[_Kind, tuple[Any, ...], Callable[[], dist.Work]] | None" = None


_CALLED, _DISPATCHED, _RECORDED = 0, 1, 2
_place = _Place()


class WorkInfo(NamedTuple):
    """What a hook on completion gets; the names are those of PyTorch's own ``WorkInfo``, which Python cannot make."""

    op_type: Any
    seq: int
    time_started: datetime.datetime
    time_finished: datetime.datetime
    active_duration: datetime.timedelta


class _Kind(NamedTuple):
    """A call of a group: PyTorch's operation, and what it takes before and after the group; its name in the profiler; its ``OpType``;
    which of its arguments are sent."""

    operation: str
    before: Callable[..., tuple[Any, ...]]
    after: Callable[..., tuple[Any, ...]]
    title: str
    type: str
    sent: int


def _milliseconds(options: Any) -> int:
    timeout: datetime.timedelta = options.timeout
    return round(timeout / datetime.timedelta(milliseconds=1))


def _how(options: Any) -> tuple[bool, int]:
    return getattr(options, "asyncOp", True), _milliseconds(options)


def _of_one(tensors: Any, options: Any) -> tuple[Any, ...]:
    return (tensors,)


def _of_two(output: Any, input: Any, options: Any) -> tuple[Any, ...]:
    return output, input


def split_sizes(given: Any) -> list[int]:
    """The split sizes of a call as integers: those of arrays of NumPy and of tensors, too, which have no truth value."""
    if given is None:
        return []
    try:
        return [operator.index(size) for size in given]
    except TypeError as error:
        raise TypeError(f"all_to_all_single: split sizes are integers, one for each rank, and not {given!r}") from error


def _reduced(*arguments: Any) -> tuple[Any, ...]:
    return arguments[-1].reduceOp.boxed(), *_how(arguments[-1])


def _moved(*arguments: Any) -> tuple[Any, ...]:
    return _how(arguments[-1])


def _rooted(*arguments: Any) -> tuple[Any, ...]:
    return arguments[-1].rootRank, *_how(arguments[-1])


_KINDS = {
    "allreduce": _Kind(
        "allreduce_", _of_one, lambda _, opts: (opts.reduceOp.boxed(), None, *_how(opts)), "all_reduce", "ALLREDUCE", 0
    ),
    "allreduce_coalesced": _Kind("allreduce_coalesced_", _of_one, _reduced, "all_reduce", "ALLREDUCE_COALESCED", 0),
    "reduce": _Kind(
        "reduce_",
        _of_one,
        lambda _, opts: (opts.reduceOp.boxed(), opts.rootRank, opts.rootTensor, *_how(opts)),
        "reduce",
        "REDUCE",
        0,
    ),
    "broadcast": _Kind(
        "broadcast_", _of_one, lambda _, opts: (opts.rootRank, opts.rootTensor, *_how(opts)), "broadcast", "BROADCAST", 0
    ),
    "allgather": _Kind("allgather_", _of_two, _moved, "all_gather", "ALLGATHER", 1),
    "all_gather_single": _Kind("_allgather_base_", _of_two, _moved, "_allgather_base", "_ALLGATHER_BASE", 1),
    "allgather_coalesced": _Kind(
        "allgather_coalesced_", _of_two, lambda *given: _how(given[-1])[:1], "all_gather", "ALLGATHER_COALESCED", 1
    ),
    "gather": _Kind("gather_", _of_two, _rooted, "gather", "GATHER", 1),
    "scatter": _Kind("scatter_", _of_two, _rooted, "scatter", "SCATTER", 1),
    "reduce_scatter": _Kind("reduce_scatter_", _of_two, _reduced, "reduce_scatter", "REDUCE_SCATTER", 1),
    "reduce_scatter_single": _Kind("_reduce_scatter_base_", _of_two, _reduced, "_reduce_scatter_base", "_REDUCE_SCATTER_BASE", 1),
    "alltoall": _Kind("alltoall_", _of_two, _moved, "all_to_all", "ALLTOALL", 1),
    "all_to_all_single": _Kind(
        "alltoall_base_",
        lambda output, input, received, sent, opts: (output, input),
        lambda output, input, received, sent, opts: (split_sizes(received), split_sizes(sent), *_how(opts)),
        "all_to_all",
        "ALLTOALL_BASE",
        1,
    ),
    "barrier": _Kind(
        "barrier",
        lambda opts: (torch.empty(1, dtype=torch.uint8, device="cpu"),),
        lambda opts: (list(opts.device_ids), *_how(opts)),
        "barrier",
        "BARRIER",
        0,
    ),
    "send": _Kind("send", lambda tensors, *_: (tensors,), lambda _, peer, tag: (peer, tag), "send", "SEND", 0),
    "recv": _Kind("recv_", lambda tensors, *_: (tensors,), lambda _, peer, tag: (peer, tag), "recv", "RECV", 0),
    "recv_anysource": _Kind(
        "recv_any_source_", lambda tensors, *_: (tensors,), lambda _, tag: (tag,), "recvAnySource", "RECVANYSOURCE", 0
    ),
}


def can_dispatch() -> bool:
    """Whether a call can be made by PyTorch's operation: 2.15 is the first that lets Python write backends and hand over a ``ReduceOp``."""
    from phalanx_torch import device_backend

    return device_backend.takes_backends_in_python() and hasattr(dist.ReduceOp, "boxed")


def is_watched(group: "ProcessGroup") -> bool:
    """Whether a call goes to :func:`call` first: somebody watches, and has not been told of it yet."""
    return bool(group._is_observed or profiler._is_profiler_enabled or _traces.is_running or modes()) and _place.depth < _RECORDED


def is_of_graph(tensors: Sequence[Any]) -> bool:
    """Whether a call that writes into these tensors changes one that autograd follows: PyTorch's dispatcher, which has not been told of it yet, warns
    if the program then goes backward through it, for the gradients do not know of the call."""
    return _place.depth == _CALLED and any(map(_is_followed, tensors)) and torch.is_grad_enabled()


def _is_followed(tensor: Any) -> bool:
    """Whether autograd follows it, and it is one that a group takes: of others the group's own errors say more."""
    if not getattr(tensor, "requires_grad", False) or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_nested


def call(group: "ProcessGroup", name: str, *arguments: Any) -> dist.Work:
    """Makes the group's call ``name``, and lets those who watch see it."""
    kind = _KINDS[name]
    if _place.depth == _CALLED and takes_memory():
        _check_memory(kind, arguments)
    if _place.depth == _CALLED and group._watched_backend() is not None and not _is_marked(kind, arguments):
        return _dispatched(group, kind, arguments)
    return _recorded(group, kind, arguments, lambda: getattr(group, name)(*arguments))


def _check_memory(kind: _Kind, arguments: tuple[Any, ...]) -> None:
    """Refuses tensors without memory of their own, or in another layout, as the group does: PyTorch's dispatcher would speak of operations that the
    program has not called, or do nothing for a tensor without elements. Stand-ins are what ``FakeTensorMode`` and ``make_fx`` are for."""
    for tensor in _tensors_of(kind, arguments):
        if not is_awaited(tensor):
            stored(tensor)
            # Of sparse tensors there is a sum.
            if kind.type != "ALLREDUCE" or not tensor.is_sparse:
                dense(tensor)


def _tensors_of(kind: _Kind, arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """The tensors of a call; none if these are no tensors, as PyTorch says then."""
    try:
        return [tensor for part in kind.before(*arguments) for tensor in _tensors(part)]
    except TypeError:
        return []


def _is_marked(kind: _Kind, arguments: tuple[Any, ...]) -> bool:
    """Whether a tensor of the call is conjugated or negated only when it is read: of such a one PyTorch's dispatcher gives a backend a copy, and what
    the call writes there is lost."""
    return any(tensor.is_conj() or tensor.is_neg() for tensor in _tensors_of(kind, arguments))


class Objects(NamedTuple):
    """How a call of objects is seen: as the group's call ``name``, whose tensors have the bytes of the objects. Those in ``came`` are empty, and get
    the bytes that come: one gets all, or each gets those of an object."""

    name: str
    arguments: tuple[Any, ...]
    came: Sequence[torch.Tensor] = ()


def bytes_of(data: bytes = b"") -> torch.Tensor:
    """A tensor of these bytes, of which no tool is told."""
    with torch._C._DisableTorchDispatch():
        if not data:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        # PyTorch warns of memory that must not be written.
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def takes_memory() -> bool:
    """Whether the dispatch modes of this thread let a call with tensors that have memory be made, such as :func:`bytes_of`. ``FakeTensorMode`` takes none,
    and ``make_fx`` would write them into its graph; objects are exchanged all the same."""
    return _mode(_keys.FAKE) is None and _mode(_keys.PROXY) is None


def waiting(options: _T, root: int | None = None) -> _T:
    """The options of a call that waits, with its root."""
    given: Any = options
    if hasattr(given, "asyncOp"):
        given.asyncOp = False
    if root is not None:
        given.rootRank = root
    return options


def call_objects(
    group: "ProcessGroup", title: str, seen: Objects, run: Callable[[], Sequence[bytes]], whole: Any = None
) -> Sequence[bytes]:
    """What ``run`` returns, the objects that have come, and lets those who watch see the call: also those who watch ``whole``, PyTorch's group of which
    ``group`` is the part for the CPU."""
    kind = _KINDS[seen.name]._replace(title=title)
    found: list[Sequence[bytes]] = []

    def exchange() -> dist.Work:
        came = run()
        found.append(came)
        parts = [b"".join(came)] if len(seen.came) == 1 else came
        tensor: Any
        for tensor, part in zip(seen.came, parts):
            filled = bytes_of(part)
            with torch._C._DisableTorchDispatch():
                tensor.set_(filled)
        return works.ended(list(seen.came), group._sequence)

    if _place.depth == _CALLED and (whole is not None or group._watched_backend() is not None) and takes_memory():
        _dispatched(group, kind, seen.arguments, exchange, whole)
    else:
        _recorded(group, kind, seen.arguments, exchange)
    if not found:
        raise RuntimeError(
            f"phalanx: {title}: a dispatch mode has kept PyTorch's operation c10d::{kind.operation} from the group, so no objects have been "
            "exchanged: call it outside of that mode"
        )
    return found[-1]


def from_backend(group: "ProcessGroup", name: str, arguments: tuple[Any, ...]) -> Any:
    """The group's call ``name``, of which PyTorch's dispatcher has told already."""
    before, _place.depth = _place.depth, max(_place.depth, _DISPATCHED)
    # Else the call is PyTorch's own, and nobody asks for its work.
    is_awaited = _place.group is group
    if is_awaited and name == "allgather_coalesced":
        # PyTorch's operation takes no limit.
        arguments = (*arguments[:-1], _place.options)
    try:
        exchange = _objects_of(name, arguments) if is_awaited else None
        work = getattr(group, name)(*arguments) if exchange is None else exchange()
        if is_awaited:
            _place.work = work
        return work
    except BaseException as error:
        if is_awaited:
            _place.error = error
        raise
    finally:
        _place.depth = before


def _objects_of(name: str, arguments: tuple[Any, ...]) -> Callable[[], dist.Work] | None:
    """What carries out this call of a backend if it is the call of objects that is awaited, and none that a hook makes."""
    group, objects = _place.group, _place.objects
    if group is None or objects is None:
        return None
    kind, given, exchange = objects
    if kind.type != _KINDS[name].type:
        return None
    # By its tensors: a hook may make a call of the same kind.
    theirs, ours = (_tensors(kind.before(*each)[kind.sent]) for each in (arguments, given))
    if len(theirs) != len(ours) or any(one is not other for one, other in zip(theirs, ours)):
        return None
    return lambda: _recorded(group, kind, given, exchange)


def _dispatched(
    group: "ProcessGroup",
    kind: _Kind,
    arguments: tuple[Any, ...],
    exchange: Callable[[], dist.Work] | None = None,
    whole: Any = None,
) -> dist.Work:
    operation = getattr(torch.ops.c10d, kind.operation).default
    # A hook may call a group, too.
    outer = _place.group, _place.options, _place.work, _place.error, _place.objects
    _place.group, _place.options, _place.work, _place.error = group, arguments[-1], None, None
    _place.objects = None if exchange is None else (kind, arguments, exchange)
    try:
        made = operation(*kind.before(*arguments), (group if whole is None else whole).boxed(), *kind.after(*arguments))
        # PyTorch's work hides ours, which can do more; a mode may have made no call at all.
        work: dist.Work = _place.work or dist.Work.unbox(made[-1] if isinstance(made, (tuple, list)) else made)
        return work
    except RuntimeError:
        if _place.error is not None:
            raise _place.error from None
        raise
    finally:
        _place.group, _place.options, _place.work, _place.error, _place.objects = outer


def _recorded(group: "ProcessGroup", kind: _Kind, arguments: tuple[Any, ...], run: Callable[[], dist.Work]) -> dist.Work:
    before = _place.depth
    sent = kind.before(*arguments)
    record = None
    if profiler._is_profiler_enabled or _traces.is_running:
        record = _enter(_given_name() or f"{group.name()}:{kind.title}", *_tensors(sent[kind.sent]))
    started, clock = datetime.datetime.now(), time.perf_counter()
    _place.depth = _RECORDED
    work: dist.Work | None = None
    try:
        work = run()
    finally:
        _place.depth = before
        if record is not None:
            _end(record, work)
    hook = group._completion_hook
    if hook is not None:
        group._completions.expect(work, hook, (getattr(_types, kind.type), group._sequence, started, clock))
    assert work is not None
    return work


def _tensors(given: Any) -> list[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        return [given]
    return [tensor for part in given for tensor in _tensors(part)]


def _end(record: Any, work: Any) -> None:
    """Ends the profiler's record of a call when ``work`` ends."""
    last = _last(work)
    if last is None:
        _exit(record)
        return
    future: torch.futures.Future[None] = torch.futures.Future()
    # The profiler takes an end only with the state of this thread, which PyTorch's future keeps for the thread that completes it.
    with torch._C._DisableTorchDispatch():
        _exit_with(record, future)
    told = threading.Event()

    def end() -> None:
        # What was recorded is gone when the profiler has ended.
        if profiler._is_profiler_enabled or _traces.is_running:
            future.set_result(None)
        told.set()

    # Who has waited has seen the end, and may end the profiler.
    last._told = told
    # On another thread also if it has ended already: the profiler knows calls for which nobody waits, as those of gloo, by that.
    last._native.when_done(end, always=True)


def _last(work: Any) -> Any:
    """That of our works with which ``work`` ends, or None if it has ended."""
    while isinstance(work, works.Works):
        # In the order of the calls, so that the last one ends last.
        work = work._works[-1] if work._works else None
    return None if getattr(work, "_native", None) is None else work


def _when_done(work: Any, function: Callable[[], object]) -> bool:
    """Lets ``function`` be called on a thread at the end of ``work``; returns False if that has ended."""
    last = _last(work)
    return last is not None and last._native.when_done(function)


class Completions:
    """Calls that have not ended, of a group that has a hook on completion."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._awaited = 0

    def expect(self, work: Any, hook: Callable[[WorkInfo], object], begin: tuple[Any, int, datetime.datetime, float]) -> None:
        """Calls ``hook`` once if ``work`` ends well: now if it has ended, or on a thread."""
        type, sequence, started, clock = begin

        def tell() -> None:
            try:
                if work.exception() is None:
                    lasted = datetime.timedelta(seconds=time.perf_counter() - clock)
                    hook(WorkInfo(type, sequence, started, started + lasted, lasted))
            except Exception as error:
                _warnings.warn(f"phalanx: a hook on completion has failed: {described(error)}", RuntimeWarning)
            finally:
                with self._changed:
                    self._awaited -= 1
                    self._changed.notify_all()

        with self._changed:
            self._awaited += 1
        if not _when_done(work, tell):
            tell()

    def wait(self, timeout: float) -> None:
        """Waits until the hook has been called for each call that has ended, at most ``timeout`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._awaited == 0, min(timeout, threading.TIMEOUT_MAX))
