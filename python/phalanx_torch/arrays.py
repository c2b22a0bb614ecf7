"""Groups for programs without PyTorch, on NumPy's arrays, and on other memory through NumPy."""

import sys
import types
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from phalanx_torch import _exit, _layout, _native
from phalanx_torch._errors import described
from phalanx_torch._functional import stored, waited

if TYPE_CHECKING:
    from typing_extensions import Buffer, Self


class _Interface(Protocol):
    """What has NumPy's array interface: its arrays."""

    @property
    def __array_interface__(self) -> dict[str, Any]: ...


class _Dlpack(Protocol):
    """What has DLPack: tensors of PyTorch, arrays of JAX."""

    def __dlpack__(self) -> object: ...


Array: TypeAlias = "_Interface | _Dlpack | Buffer"

_OPS = {
    "sum": 0,
    "avg": 1,
    "product": 2,
    "min": 3,
    "max": 4,
    "band": 5,
    "bor": 6,
    "bxor": 7,
}
_NOW = (None, True)


def init(
    url: str = "env://", rank: int | None = None, world_size: int | None = None, timeout: float = 1800.0
) -> "ArrayGroup":
    """Joins the other ranks, and returns an :class:`ArrayGroup`.

    Under a launcher (``phalanx run``, ``torchrun``, ``mpirun``, ``srun``) no argument is needed. Without a launcher this
    is a world of one. ``url`` may be ``tcp://host:port`` or ``file:///path``, with ``rank`` and ``world_size``. If only
    ``rank`` and ``world_size`` are given, ranks meet at ``MASTER_ADDR`` and ``MASTER_PORT``.
    ``timeout``, in seconds, limits the start and each operation.
    """
    _exit.check_not_forked()
    group = _native.Group.at(url, rank, world_size, float(timeout))
    _exit.remember(group)
    return ArrayGroup(group)


def _lent(array: Any) -> object:
    """``array`` as the native part takes it: with NumPy's interface, through NumPy if it has none. Nothing is copied."""
    # NumPy's own first: an array makes its interface anew whenever it is asked for it.
    loaded = sys.modules.get("numpy")
    if loaded is not None and type(array) is loaded.ndarray:
        return array
    # Tensors of PyTorch have `is_cpu`.
    if hasattr(array, "is_cpu"):
        tensor = stored(waited(array))
        if hasattr(tensor, "to_dense") and str(getattr(tensor, "layout", "torch.strided")) != "torch.strided":
            raise TypeError(f"a tensor of layout {tensor.layout} is not one row of elements: to_dense() makes one that is")
        return tensor
    if hasattr(array, "__array_interface__"):
        masked: Any = sys.modules.get("numpy.ma")
        if masked is not None and isinstance(array, masked.MaskedArray):
            raise TypeError(
                "a masked array of NumPy would be exchanged without its mask: give filled(value), or its data and its mask, one by one"
            )
        return array
    what = type(array).__name__
    try:
        import numpy
    except ImportError:
        raise TypeError(f"{what} is no array of NumPy, and NumPy, which could look at its memory, is not installed") from None
    if hasattr(array, "__dlpack__"):
        try:
            return _without_copy(numpy, array)
        except (BufferError, RuntimeError, TypeError) as error:
            raise TypeError(f"{what}: NumPy does not take its memory by DLPack: {error}") from error
    try:
        # What has no buffer raises TypeError.
        return numpy.asarray(memoryview(array))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what} has neither NumPy's array interface nor DLPack nor a buffer: {error}") from error


def _without_copy(numpy: Any, array: object) -> object:
    if numpy.lib.NumpyVersion(numpy.__version__) < "2.1.0":
        return numpy.from_dlpack(array)  # Earlier versions take no copies at all.
    return numpy.from_dlpack(array, copy=False)


def _rank(what: str, rank: int) -> int:
    if rank < 0:
        raise ValueError(f"{what}: rank {rank} is not a rank of this group: ranks begin with 0")
    return rank


def _shape(array: object) -> tuple[int, ...]:
    """The shape of an array as the native part takes it; of what only describes its memory, that of one row."""
    shape: Any = getattr(array, "shape", None)
    return shape if isinstance(shape, tuple) else ()


class ArrayGroup:
    """The ranks of a job.

    Arrays are NumPy's, tensors of PyTorch on the CPU, whatever else has NumPy's array interface, and with NumPy installed
    whatever has DLPack (arrays of JAX and others on the CPU) or the buffer protocol (``bytearray``, ``memoryview``,
    ``array.array``, ``mmap``). They must be contiguous. Results are written into them, so what receives must be writable.
    A failure raises ``Error``.
    """

    def __init__(self, native: _native.Group) -> None:
        self._native = native

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._native.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._native.world_size

    @property
    def transport(self) -> str | None:
        """``shm`` if all ranks share memory, else ``tcp``, also if the ranks of each host do; None in a world of one."""
        return self._native.transport

    @property
    def local_rank(self) -> int:
        """This process's index among the ranks of its host."""
        return self._native.local_rank

    def all_reduce(self, array: Array, op: str = "sum") -> None:
        """Combines the ranks' arrays element by element, in place. ``op``: sum, avg, product, min, max, band, bor, bxor."""
        if op not in _OPS:
            raise ValueError(f"all_reduce: {op!r} is none of {', '.join(_OPS)}")
        if not self._native.all_reduce_array_as_it_is(array, _OPS[op]):
            self._native.all_reduce(_lent(array), (_OPS[op], 1.0), _NOW)

    def broadcast(self, array: Array, root: int = 0) -> None:
        """Copies the root's array to every rank. The root's may be read-only, and is copied once more then."""
        self._native.broadcast(_lent(array), _rank("broadcast", root), _NOW)

    def all_gather(self, output: Array, input: Array) -> None:
        """Gathers the ranks' ``input``, of the same length on all, into ``output``: rank 0's rows first, then rank 1's."""
        into, own = _lent(output), _lent(input)
        _layout.check("all_gather", ("output", _shape(into)), ("input", _shape(own)), self.world_size, "reshape()")
        self._native.all_gather_single(into, own, _NOW)

    def reduce_scatter(self, output: Array, input: Array, op: str = "sum") -> None:
        """Combines the ranks' ``input``; each rank gets its part of the result in ``output``."""
        if op not in _OPS:
            raise ValueError(f"reduce_scatter: {op!r} is none of {', '.join(_OPS)}")
        into, own = _lent(output), _lent(input)
        _layout.check("reduce_scatter", ("input", _shape(own)), ("output", _shape(into)), self.world_size, "reshape()")
        self._native.reduce_scatter_single(into, own, (_OPS[op], 1.0), _NOW)

    def all_to_all(self, output: Array, input: Array) -> None:
        """Sends the r-th part of the rows of ``input`` to rank r, and receives the parts for this rank into ``output``."""
        into, own = _lent(output), _lent(input)
        for what, shape in (("output", _shape(into)), ("input", _shape(own))):
            # Of one dimension the native part has the error.
            if len(shape) > 1 and all(shape) and shape[0] % self.world_size:
                raise ValueError(f"all_to_all: {self.world_size} ranks cannot have equal parts of the {shape[0]} rows of the {what}")
        self._native.all_to_all_single(into, own, [], [], _NOW)

    def send(self, array: Array, to: int, tag: int = 0) -> None:
        """Sends to the rank ``to``, which receives an array of the same type and length."""
        self._native.send(_lent(array), _rank("send", to), tag, _NOW).wait()

    def recv(self, array: Array, source: int | None = None, tag: int = 0) -> int:
        """Receives from the rank ``source``, or from any, and returns from which."""
        work = self._native.recv(_lent(array), None if source is None else _rank("recv", source), tag, _NOW)
        work.wait()
        source = work.source()
        assert source is not None  # It has received.
        return source

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self._native.barrier(_NOW)

    def close(self) -> None:
        """Leaves the group."""
        self._native.close()

    def __enter__(self) -> "Self":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        # What `sys.exit()` and `sys.exit(0)` raise is no failure.
        if error is not None and not (isinstance(error, SystemExit) and not error.code):
            self._native.abort(f"the program of rank {self.rank} raised {described(error)}")
        self.close()
