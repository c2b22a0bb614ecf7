"""The job: its start and end, its ranks, and sets of them."""

import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import torch  # noqa: F401  Its threads are known before the native ones start.

from phalanx_torch import _exit, _native
from phalanx_torch._errors import Error, described

_T = TypeVar("_T")
_Native: TypeAlias = _native.Horovod


class HorovodInternalError(Error):
    """A failure of the job, or of an operation that ranks have submitted in different forms."""


class ProcessSet:
    """Some of the ranks. ``add_process_set`` or ``init(process_sets=...)`` makes it usable; every rank calls that."""

    ranks: list[int]
    process_set_id: int | None
    _native: _Native | None
    _counts: dict[str, int]
    # Other objects of the same registered set.
    _same: "weakref.WeakSet[ProcessSet]"

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks = sorted(int(rank) for rank in ranks)
        if len(set(self.ranks)) != len(self.ranks) or not self.ranks or self.ranks[0] < 0:
            raise ValueError(f"a process set has at least one rank, and each once; these are {ranks}")
        self.process_set_id = None
        self._native = None
        self._counts = {}
        self._same = weakref.WeakSet()

    def included(self) -> bool:
        """Whether this process is one of its ranks."""
        return _job().rank() in self._members()

    def rank(self) -> int:
        """The place of this process in it."""
        return self._here().rank()

    def size(self) -> int:
        """The number of its ranks."""
        return len(self._members())

    def _members(self) -> list[int]:
        if self.process_set_id is None:
            raise ValueError(f"{self} is not registered: every rank calls hvd.add_process_set, or passes it to hvd.init")
        return self.ranks

    def _here(self) -> _Native:
        self._members()
        if self._native is None:
            raise ValueError(f"rank {_job().rank()} is not in {self}: only its ranks may submit operations in it")
        return self._native

    def _root(self, rank: int) -> int:
        """The place in it of the rank with this number among all."""
        if rank not in self._members():
            raise ValueError(f"root_rank {rank} is not in {self}")
        return self.ranks.index(rank)

    def _attach(self, registered: "ProcessSet") -> None:
        """Makes this object usable, too, if it is not: that one has the same ranks."""
        if self.process_set_id is None:
            self._native, self._counts, self.process_set_id = registered._native, registered._counts, registered.process_set_id
            registered._same.add(self)

    def _unregister(self) -> _Native | None:
        """Makes it, and the other objects of its set, unusable. Returns what carried out its operations."""
        native = self._native
        for one in (self, *self._same):
            one._native, one.process_set_id = None, None
        self._same.clear()
        return native

    def _numbered(self, operation: str) -> str:
        """A name for an operation that has none: all ranks make such calls in the same order."""
        number = self._counts[operation] = self._counts.get(operation, 0) + 1
        return f"{operation}.noname.{number}"

    def __deepcopy__(self, memo: object) -> "ProcessSet":
        # Of a model with it: both submit to the same ranks, and count their operations together.
        return self

    def __reduce__(self) -> Any:
        return _registered, (self.ranks,)

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _Global(ProcessSet):
    def __init__(self) -> None:
        self.process_set_id = 0
        self._counts = {}

    def __reduce__(self) -> Any:
        return "global_process_set"

    @property
    def ranks(self) -> list[int]:  # type: ignore[override]  # pyright: ignore[reportIncompatibleVariableOverride]
        return list(range(_job().size()))

    @property
    def _native(self) -> _Native:  # type: ignore[override]  # pyright: ignore[reportIncompatibleVariableOverride]
        return _job()

    def _root(self, rank: int) -> int:
        if not 0 <= rank < _job().size():
            raise ValueError(f"root_rank {rank}: there are {_job().size()} ranks")
        return rank


#: All ranks.
global_process_set = _Global()

# Of operations in flight, by their number.
_handles: dict[int, Any] = {}
_state: dict[str, Any] = {"ranks": None, "job": None, "sets": {}, "next": 1}


def _registered(ranks: list[int]) -> ProcessSet:
    """The process set of these ranks: the one that is registered here, or one that is not yet."""
    return next((one for one in _state["sets"].values() if one.ranks == ranks), None) or ProcessSet(ranks)


def _job() -> _Native:
    job = _state["job"]
    if job is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return job  # type: ignore[no-any-return]


def _internal(error: Error) -> HorovodInternalError:
    """The error of an operation as Horovod's users catch it."""
    internal = HorovodInternalError(str(error), peer=error.peer)
    # Its text says already if it is a time-out.
    internal.kind = error.kind
    return internal


def init(comm: object = None, process_sets: Sequence[ProcessSet | Sequence[int]] | Literal["dynamic"] | None = None) -> None:
    """Meets the other ranks, as the launcher says; alone, a world of one. A second call does nothing but make other objects of
    registered process sets usable: ``add_process_set`` adds process sets later."""
    if comm is not None:
        raise NotImplementedError(
            "hvd.init(comm=...): there are no communicators of MPI here; the launcher says who the ranks are, and "
            "hvd.add_process_set makes groups of some of them"
        )
    chosen = _chosen(process_sets)
    job = _state["job"]
    if job is not None and job.is_initialized():
        missing = [one for one in chosen if _registered(one.ranks).process_set_id is None]
        if missing:
            raise ValueError(f"hvd.init: Horovod has been initialized already, without {missing[0]}: every rank calls hvd.add_process_set")
        for one in chosen:
            one._attach(_registered(one.ranks))
        return
    # A forked process cannot shut down what its parent has begun.
    _exit.check_not_forked()
    if job is not None:
        shutdown()
    if _state["ranks"] is None or not _state["ranks"].can_begin():
        _leave_ranks()
        _state["ranks"] = _native.Ranks.meet()
        _exit.remember_ranks(_state["ranks"])
    _state.update(job=_native.Horovod.begin(_state["ranks"]), sets={}, next=1)
    global_process_set._counts = {}
    try:
        for process_set in chosen:
            add_process_set(process_set)
    except Exception:
        # A second call would do nothing, and return without these sets.
        shutdown()
        raise


def _chosen(process_sets: Any) -> list[ProcessSet]:
    """The process sets with which a job begins. It is not begun if they are none."""
    # "dynamic" asks for what is always allowed here.
    if process_sets is None or isinstance(process_sets, str) and process_sets.lower() == "dynamic":
        return []
    if isinstance(process_sets, (str, ProcessSet)) or not isinstance(process_sets, Iterable):
        raise ValueError(f'hvd.init: process_sets is {process_sets!r}: it is a list of hvd.ProcessSet, or "dynamic"')
    return [one if isinstance(one, ProcessSet) else ProcessSet(one) for one in process_sets]


def shutdown() -> None:
    """Leaves. Operations that other ranks still wait for fail there, and handles are used up. ``init`` may be called again."""
    job, sets = _state["job"], _state["sets"]
    _state.update(job=None, sets={})
    for process_set in sets.values():
        native = process_set._unregister()
        if native is not None:
            native.shutdown()
    if job is not None:
        job.shutdown()
    _handles.clear()


def _leave() -> None:
    job, error = _state["job"], _exit.cause_of_end()
    if job is not None and error is not None:
        cause = f"the program of rank {job.rank()} ended with {described(error)}"
        for part in [job, *(process_set._native for process_set in _state["sets"].values())]:
            if part is not None:
                part.abort(cause)
    shutdown()
    _leave_ranks()


_exit.before_leaving.append(_leave)


def _leave_ranks() -> None:
    ranks, _state["ranks"] = _state["ranks"], None
    if ranks is not None:
        ranks.leave()


def is_initialized() -> bool:
    """Whether operations can be submitted: not before ``init`` and after ``shutdown``, and not when the job has failed."""
    return _state["job"] is not None and _state["job"].is_initialized()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Registers a :class:`ProcessSet`, or a list of ranks. Every rank calls it, with the same ranks and in the same order."""
    job = _job()
    process_set = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if process_set.process_set_id is not None:
        raise ValueError(f"{process_set} is registered already")
    if process_set.ranks[-1] >= job.size():
        raise ValueError(f"{process_set}: there are {job.size()} ranks")
    if any(other.ranks == process_set.ranks for other in [global_process_set, *_state["sets"].values()]):
        raise ValueError(f"a process set of the ranks {process_set.ranks} is registered already")
    try:
        native = job.add_process_set(process_set.ranks)
    except Error as error:
        raise _internal(error) from error
    process_set._native, process_set._counts = native, {}
    process_set.process_set_id = _state["next"]
    _state["next"] += 1
    _state["sets"][process_set.process_set_id] = process_set
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Ends a process set. Every rank calls it. Returns whether it was registered."""
    # Another object may stand for it.
    registered = _state["sets"].pop(process_set.process_set_id, None)
    if registered is None:
        return False
    native = registered._unregister()
    if native is not None:
        try:
            native.leave_process_set()
        except Error as error:
            raise _internal(error) from error
    return True


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """The ranks of each registered process set, by its number."""
    return {0: global_process_set.ranks, **{number: one.ranks for number, one in _state["sets"].items()}}


def start_timeline(file_path: "str | os.PathLike[str]", mark_cycles: bool = False) -> None:
    """Begins a timeline in this file. Every rank calls it. Cycles are always in it."""
    _job().start_timeline(str(file_path))


def stop_timeline() -> None:
    """Ends the timeline; its file is complete when this returns."""
    _job().stop_timeline()


def rank() -> int:
    """This process's rank."""
    return _job().rank()


def size() -> int:
    """The number of ranks."""
    return _job().size()


def local_rank() -> int:
    """The place of this process among the ranks of its host."""
    return _job().local_rank()


def local_size() -> int:
    """The number of ranks on its host."""
    return _job().local_size()


def cross_rank() -> int:
    """The place of its host among those that have a rank with this local rank."""
    return _job().cross_rank()


def cross_size() -> int:
    """The number of hosts that have a rank with this local rank."""
    return _job().cross_size()


def is_homogeneous() -> bool:
    """Whether every host has the same number of ranks."""
    return _job().is_homogeneous()


def mpi_threads_supported() -> bool:
    """Whether MPI may be called from several threads: there is no MPI."""
    _job()
    return False


def _absent(name: str, value: _T) -> Callable[..., _T]:
    def answer(verbose: bool = False) -> _T:
        return value

    answer.__name__ = answer.__qualname__ = name
    answer.__doc__ = f"What a program asks of Horovod's build: always {value}, for this is Phalanx."
    return answer


mpi_enabled = _absent("mpi_enabled", False)
mpi_built = _absent("mpi_built", False)
# Programs take gloo for what works on CPUs and needs no MPI.
gloo_enabled = _absent("gloo_enabled", True)
gloo_built = _absent("gloo_built", True)
nccl_built = _absent("nccl_built", 0)
ddl_built = _absent("ddl_built", False)
ccl_built = _absent("ccl_built", False)
cuda_built = _absent("cuda_built", False)
rocm_built = _absent("rocm_built", False)
