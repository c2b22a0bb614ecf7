"""Collectives by name."""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, overload

import torch

from phalanx_torch import _native
from phalanx_torch._errors import Error, described, listed
from phalanx_torch._functional import stored, waited
from phalanx_torch._integers import average_of, shares
from phalanx_torch.horovod._job import HorovodInternalError, ProcessSet, _handles, _internal, global_process_set
from phalanx_torch.horovod.compression import Compression, Compressor

# What makes the result of an operation of its native handle.
_Finish: TypeAlias = Callable[[_native.Handle], Any]
_Splits: TypeAlias = torch.Tensor | Sequence[int]


class Op:
    """How the elements of all ranks are combined."""

    def __init__(self, name: str, number: int) -> None:
        self._name, self._number = name, number

    def __repr__(self) -> str:
        return self._name

    def __reduce__(self) -> str:
        return self._name


Average, Sum, Adasum = Op("Average", 0), Op("Sum", 1), Op("Adasum", 2)
Min, Max, Product = Op("Min", 3), Op("Max", 4), Op("Product", 5)

# As `phalanx_torch.process_group` has them, which needs more of PyTorch than this does: the numbers by which the native part knows the types
# of tensors that are combined in a wider one, and averages of integers, so that ranks compare them.
_NARROW = {torch.int8: 1, torch.uint8: 2, torch.int16: 3, torch.uint16: 4, torch.int32: 5, torch.uint32: 6}
_NARROW_FACTOR, _INTEGER_AVERAGE = 256, 64
# Types that collectives do not combine, and those in which the result has the same bits.
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
# The sum that is to be divided does not overflow. There is no wider type than int64: see `shares`.
_WIDER_FOR_AVERAGE = {**_WIDER, torch.int8: torch.int32, torch.uint8: torch.int32, torch.int32: torch.int64}


class _InFlight:
    """An operation. ``finish`` makes its result of the native handle, once."""

    def __init__(self, native: _native.Handle, finish: _Finish) -> None:
        self._native, self._result = native, None
        self._finish: _Finish | None = finish
        # PyTorch refuses to write into tensors of inference mode outside of it, where the program may wait.
        self._is_inference = torch.is_inference_mode_enabled()
        # A signal's handler that interrupts the making of the result may ask for it.
        self._lock = threading.RLock()

    def poll(self) -> bool:
        return self._native.poll()

    def synchronize(self) -> Any:
        try:
            self._native.wait()
            # Threads may wait for one operation. Its result is made once.
            with self._lock:
                if self._finish is not None:
                    with torch.inference_mode(self._is_inference), torch.no_grad():
                        self._result, self._finish = self._finish(self._native), None
        except Error as error:
            raise _internal(error) from error
        return self._result


_numbers = itertools.count()


def _start(submit: Callable[[], _native.Handle], finish: _Finish) -> int:
    """The number of an operation in flight."""
    try:
        operation = _InFlight(submit(), finish)
    except Error as error:
        raise _internal(error) from error
    number = next(_numbers)
    _handles[number] = operation
    return number


def poll(handle: int) -> bool:
    """Whether the operation is done; then ``synchronize`` does not wait."""
    return _found(handle).poll()


def synchronize(handle: int) -> Any:
    """Waits for the operation, and returns its result. A handle is used up by that. One whose wait Ctrl-C has interrupted, or the making of its result, can be
    waited for again."""
    operation = _found(handle)
    try:
        result = operation.synchronize()
    except Exception:
        # A signal's handler may have raised it, and the operation goes on.
        if operation.poll():
            _handles.pop(handle, None)
        raise
    _handles.pop(handle, None)
    return result


def _synchronized(handle: int) -> Any:
    """As :func:`synchronize`, for a call whose caller never gets the handle."""
    try:
        return synchronize(handle)
    finally:
        _handles.pop(handle, None)


def _found(handle: int) -> _InFlight:
    operation: _InFlight | None = _handles.get(handle)
    if operation is None:
        raise ValueError(f"{handle!r} is no handle of an operation in flight: each is synchronized once, and before hvd.shutdown()")
    return operation


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype is torch.bool)


def _op(op: Op | None, average: bool | None, default: Op = Average) -> Op:
    if average is not None:
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        return Average if average else Sum
    op = default if op is None else op
    if not isinstance(op, Op):
        raise ValueError(f"op is {op!r}; it is one of hvd.Average, Sum, Adasum, Min, Max and Product")
    return op


def _dense(what: str, tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{what}: a torch.Tensor is expected, and not {type(tensor).__name__}")
    tensor = stored(waited(tensor))
    if tensor.layout is not torch.strided:
        raise ValueError(f"{what}: this tensor is sparse; hvd.sparse_allreduce_async takes it, or tensor.to_dense() makes it dense")
    return tensor.detach()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    # Memory that a program brings may begin elsewhere than at a multiple of an element's length.
    return plain.clone() if plain.is_cpu and plain.data_ptr() % plain.element_size() else plain


def _rowed(what: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as it is lent, if it has rows. Of types that are several elements of the native part, that would take these for rows of a scalar."""
    own = _dense(what, tensor)
    if own.dim() == 0:
        raise ValueError(f"{what}: a scalar has no rows; use tensor.reshape(1)")
    return _plain(own)


class _Reduced:
    """A tensor on its way through a reduction: what is lent, and how the result is made of what comes back."""

    def __init__(
        self, what: str, tensor: torch.Tensor, op: Op, before: float, after: float, ranks: int, into: torch.Tensor | None = None
    ) -> None:
        own = _dense(what, tensor)
        self.type, self.into, self.divisor, self.after, self.has_shares = own.dtype, into, 1, 1.0, False
        wider = (_WIDER_FOR_AVERAGE if op is Average else _WIDER).get(own.dtype)
        self.number = 0 if wider is None else _NARROW_FACTOR * _NARROW[own.dtype]
        if own.dtype is torch.uint64:
            raise ValueError(f"{what}: torch.uint64 cannot be combined; convert the tensor")
        lent = _plain(own)
        if _is_integer(own):
            # Factors of integers are applied here, in float64, and what comes of it is cut off. The native part only compares them.
            if before != 1.0:
                lent = lent.double().mul(before).to(own.dtype)
            self.after = after
            if op is Average:
                self.op, self.divisor = Sum, ranks
                self.number += _INTEGER_AVERAGE
                if own.dtype is torch.int64 and ranks > 1:
                    lent, self.has_shares = shares(lent, ranks), True
            else:
                self.op = op
            if wider is not None:
                lent = lent.to(wider)
        else:
            self.op = op
        # A result that is more than what comes back is made of that, perhaps twice: by a signal's handler, and by what that has interrupted.
        if into is None or lent.data_ptr() != own.data_ptr() or self.after != 1.0:
            self.in_place = False
            if lent.data_ptr() == own.data_ptr():
                lent = lent.clone()
        else:
            self.in_place = True
        self.lent = lent

    def result(self, reduced: torch.Tensor) -> torch.Tensor:
        if self.has_shares and self.after == 1.0:
            reduced = average_of(reduced, self.divisor)
        elif self.has_shares:
            reduced = (reduced[..., 0].double() + reduced[..., 1].double() / self.divisor) * self.after
        elif self.divisor != 1 and self.after == 1.0:
            reduced = reduced.div(self.divisor, rounding_mode="trunc")
        elif self.divisor != 1 or self.after != 1.0:
            reduced = reduced.double().mul(self.after / self.divisor)
        if self.into is None:
            return reduced.to(self.type)
        if not self.in_place or reduced is not self.lent:
            self.into.detach().copy_(reduced)
        return self.into


def _share_memory(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether two of these contiguous tensors have elements in one place."""
    places = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()) for tensor in tensors)
    return any(end > start for (_, end), (start, _) in zip(places, places[1:]))


def _ways(
    what: str, tensors: Sequence[torch.Tensor], op: Op, before: float, after: float, process_set: ProcessSet, in_place: bool = False
) -> tuple[list[_Reduced], Op]:
    """The tensors on their way, and the operation that all of them have."""
    ways = [
        _Reduced(what, tensor, op, before, after, process_set.size(), tensor if in_place else None)
        for tensor in tensors
    ]
    if in_place and _share_memory([way.lent for way in ways]):
        # Each is combined as it was: what is combined where it is would be combined again with the next.
        for way in ways:
            way.lent, way.in_place = way.lent.clone(), False
    ops = {way.op for way in ways}
    if len(ops) > 1:
        raise ValueError(f"{what}: a group of integers and floats cannot be averaged; make a group of each")
    return ways, next(iter(ops), op)


def _name(operation: str, name: str | None, process_set: ProcessSet) -> str:
    return process_set._numbered(operation) if name is None else f"{operation}.{name}"


@contextlib.contextmanager
def _refusing(native: _native.Horovod, *names: str) -> Iterator[None]:
    """Tells the other ranks of an error before the operations with these names are submitted: their calls end with it, and do not wait."""
    try:
        yield
    except Exception as error:
        for name in names:
            native.refuse(name, described(error))
        raise


@contextlib.contextmanager
def _refusing_call(operation: str, name: str | None, process_set: ProcessSet) -> Iterator[None]:
    """As :func:`_refusing`, before the call of an operation has got its name: it gets one if it is refused."""
    native = process_set._here()
    try:
        yield
    except Exception as error:
        native.refuse(_name(operation, name, process_set), described(error))
        raise


def _first(finish: _Finish) -> _Finish:
    return lambda native: finish(native)[0]


def _applied(function: Any, *arguments: Any) -> Any:
    """What the function returns, with a gradient."""
    # Not all versions of PyTorch have annotated it.
    return function.apply(*arguments)


# Allreduce.


def _allreduce_async(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    op: Op,
    before: float,
    after: float,
    process_set: ProcessSet,
    in_place: bool,
    grouped: bool,
) -> int:
    what = "grouped_allreduce" if grouped else "allreduce"
    native = process_set._here()
    name = _name(what, name, process_set)
    with _refusing(native, name):
        factors = float(before), float(after)
        ways, op = _ways(what, tensors, op, *factors, process_set, in_place)

    def finish(_: object) -> list[torch.Tensor]:
        return [way.result(way.lent) for way in ways]

    lent, types = [way.lent for way in ways], [way.number for way in ways]
    return _start(lambda: native.allreduce(name, lent, types, op._number, factors), finish if grouped else _first(finish))


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an :func:`allreduce`."""
    with _refusing_call("allreduce", name, process_set):
        op = _op(op, average)
    return _allreduce_async([tensor], name, op, prescale_factor, postscale_factor, process_set, False, False)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As :func:`allreduce_async`, into the tensor itself."""
    with _refusing_call("allreduce", name, process_set):
        op = _op(op, average)
    return _allreduce_async([tensor], name, op, prescale_factor, postscale_factor, process_set, True, False)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """As :func:`allreduce`, into the tensor itself."""
    return _synchronized(allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set))


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts a :func:`grouped_allreduce`."""
    with _refusing_call("grouped_allreduce", name, process_set):
        op = _op(op, average)
    return _allreduce_async(list(tensors), name, op, prescale_factor, postscale_factor, process_set, False, True)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As :func:`grouped_allreduce_async`, into the tensors themselves."""
    with _refusing_call("grouped_allreduce", name, process_set):
        op = _op(op, average)
    return _allreduce_async(list(tensors), name, op, prescale_factor, postscale_factor, process_set, True, True)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """As :func:`grouped_allreduce`, into the tensors themselves."""
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    return _synchronized(handle)


def _differentiable(op: Op) -> None:
    if op not in (Average, Sum):
        raise NotImplementedError(f"{op} has no gradient here: use hvd.Sum or hvd.Average, or a tensor that needs none")


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        grouped: bool,
        name: str | None,
        op: Op,
        before: float,
        after: float,
        process_set: ProcessSet,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.how = (op, before, after, process_set)
        reduced = _synchronized(_allreduce_async(tensors, name, op, before, after, process_set, False, grouped))
        return tuple(reduced) if grouped else (reduced,)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        op, before, after, process_set = ctx.how
        _differentiable(op)
        # Gradients may be differentiated again, here and below.
        reduced: tuple[torch.Tensor, ...] = _applied(_Allreduce, True, None, op, before, after, process_set, *gradients)
        return (None,) * 6 + reduced


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Combines the tensors of all ranks, element by element, and returns the result; the average, unless ``op`` says otherwise.

    Gradients go through it: that of a sum is the sum of all ranks' gradients, of an average their average.
    """
    with _refusing_call("allreduce", name, process_set):
        op = _op(op, average)
        compressed, context = compression.compress(tensor)
    reduced, = _applied(_Allreduce, False, name, op, prescale_factor, postscale_factor, process_set, compressed)
    return compression.decompress(reduced, context)


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """As :func:`allreduce` of each of the tensors, which is carried out when all ranks have all of them."""
    with _refusing_call("grouped_allreduce", name, process_set):
        op = _op(op, average)
        compressed, contexts = zip(*(compression.compress(tensor) for tensor in tensors)) if len(tensors) else ((), ())
    reduced = _applied(_Allreduce, True, name, op, prescale_factor, postscale_factor, process_set, *compressed)
    return [compression.decompress(tensor, context) for tensor, context in zip(reduced, contexts)]


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: Op | None, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Starts an allreduce of a sparse tensor. Returns a function that waits for it, and returns the result."""
    full = f"grouped_allgather.sparse.{name}"
    with _refusing(process_set._here(), full):
        op = _op(op, None)
    return _sparse_allreduce_async(tensor, full, op, process_set)


def _sparse_allreduce_async(tensor: torch.Tensor, name: str, op: Op, process_set: ProcessSet) -> Callable[[], torch.Tensor]:
    native = process_set._here()
    with _refusing(native, name):
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
            what = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise ValueError(f"sparse_allreduce_async: a tensor of layout torch.sparse_coo is expected, and not {what}: hvd.allreduce_async takes dense ones")
        if op not in (Average, Sum):
            raise NotImplementedError(f"{op} of sparse tensors: use hvd.Sum or hvd.Average, or make the tensor dense")
        own = tensor.detach().coalesce()
        # Gathers compare neither what is made of the rows, nor the whole shape.
        said = [op._number, *own.shape]
        # Rows are gathered.
        lent = [_plain(own.indices().t()), _plain(own.values()), torch.tensor([said], dtype=torch.int64, device="cpu")]
    handle = _start(lambda: native.allgather(name, lent), _gathered(lent))

    def result() -> torch.Tensor:
        indices, values, every = synchronize(handle)
        other = next((theirs for theirs in every.tolist() if theirs != said), None)
        if other is not None:
            mine, theirs = (f"{Average if number == Average._number else Sum} of sparse {shape}" for number, *shape in (said, other))
            raise HorovodInternalError(
                f'"{name}": rank {process_set.ranks[process_set.rank()]} submits {mine}, another rank {theirs} (every rank must submit the same under a '
                "name; see the shapes and the op of both)",
                "mismatch",
            )
        if op is Average:
            values = values / process_set.size()
        return torch.sparse_coo_tensor(indices.t(), values, own.shape, check_invariants=True).coalesce()

    return result


# Allgather.


def _rows(native: _native.Handle, index: int, template: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The result with this index, of the type of ``template``."""
    # The native part has a dimension more for elements that are several of those it knows.
    out = torch.empty(shape[: template.dim()], dtype=template.dtype, device="cpu")
    native.copy_to(index, out)
    return out


def _gathered(templates: Sequence[torch.Tensor]) -> _Finish:
    return lambda native: [
        _rows(native, index, template, shape) for index, (template, shape) in enumerate(zip(templates, native.shapes()))
    ]


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts a :func:`grouped_allgather`."""
    native = process_set._here()
    name = _name("grouped_allgather", name, process_set)
    with _refusing(native, name):
        lent = [_rowed("allgather", tensor) for tensor in tensors]
    return _start(lambda: native.allgather(name, lent), _gathered(lent))


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Starts an :func:`allgather`."""
    native = process_set._here()
    name = _name("allgather", name, process_set)
    with _refusing(native, name):
        lent = _rowed("allgather", tensor)
    return _start(lambda: native.allgather(name, [lent]), _first(_gathered([lent])))


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, grouped: bool, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        if grouped:
            gathered = _synchronized(grouped_allgather_async(tensors, name, process_set))
        else:
            gathered = [_synchronized(allgather_async(tensors[0], name, process_set))]
        ctx.rows, ctx.process_set = [tensor.shape[0] for tensor in tensors], process_set
        return tuple(gathered)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        process_set = ctx.process_set
        own_rank = process_set.rank()
        # Each with its rank: one that has joined brings none.
        counts = allgather_(torch.tensor([[own_rank, *ctx.rows]], device="cpu"), process_set)
        gathered, counted = [gradient.shape[0] for gradient in gradients], counts[:, 1:].sum(0).tolist()
        if counted != gathered:
            raise ValueError(
                f"allgather: {gathered} rows were gathered, and the ranks in its backward pass, {listed(counts[:, 0].tolist())}, brought {counted}: which are this "
                "rank's is not known. Call backward() on every rank whose rows were gathered, before it calls join()"
            )
        reduced = _applied(_Allreduce, True, None, Average, 1.0, 1.0, process_set, *gradients)
        before = counts[counts[:, 0] < own_rank, 1:].sum(0).tolist()
        own = [gradient[start : start + rows] for gradient, start, rows in zip(reduced, before, ctx.rows)]
        return (None, None, None, *own)


def allgather_(tensor: torch.Tensor, process_set: ProcessSet) -> Any:
    return _synchronized(allgather_async(tensor, process_set=process_set))


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> torch.Tensor:
    """The rows of all ranks below each other, in the order of the ranks, which may bring different numbers of them.

    Its gradient is the average of what all ranks have for this rank's rows, as Horovod defines it.
    """
    rows: torch.Tensor = _applied(_Allgather, False, name, process_set, tensor)[0]
    return rows


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """As :func:`allgather` of each of the tensors, which is carried out when all ranks have all of them."""
    return list(_applied(_Allgather, True, name, process_set, *tensors))


# Broadcast.


def _broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet, in_place: bool
) -> int:
    native = process_set._here()
    name = _name("broadcast", name, process_set)
    with _refusing(native, name):
        root = process_set._root(int(root_rank))
        own = _dense("broadcast", tensor)
        lent = _plain(own)
        if not in_place and lent.data_ptr() == own.data_ptr():
            lent = lent.clone()

    def finish(_: object) -> torch.Tensor:
        if not in_place:
            return lent
        if lent.data_ptr() != own.data_ptr():
            own.copy_(lent)
        return tensor

    return _start(lambda: native.broadcast(name, lent, root), finish)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts a :func:`broadcast`."""
    return _broadcast_async(tensor, root_rank, name, process_set, False)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As :func:`broadcast_async`, into the tensor itself."""
    return _broadcast_async(tensor, root_rank, name, process_set, True)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """As :func:`broadcast`, into the tensor itself."""
    return _synchronized(broadcast_async_(tensor, root_rank, name, process_set))


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
        # First: it tells the other ranks of a root that there is not.
        own = _synchronized(broadcast_async(tensor, root_rank, name, process_set))
        ctx.is_root, ctx.process_set = process_set._root(int(root_rank)) == process_set.rank(), process_set
        return own

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        reduced, = _applied(_Allreduce, False, None, Average, 1.0, 1.0, ctx.process_set, *gradients)
        # Zeros that are made of it: if it is differentiated again, all ranks take part.
        every = torch.ones((), dtype=torch.bool, device="cpu")
        return reduced if ctx.is_root else reduced.masked_fill(every, 0.0), None, None, None


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The root's tensor, on every rank; ``root_rank`` counts among all ranks, also in a process set.

    Its gradient is the average of all ranks' at the root, and zero elsewhere, as Horovod defines it.
    """
    return _applied(_Broadcast, tensor, root_rank, name, process_set)


# Alltoall.


def _split_sizes(splits: _Splits | None) -> list[int] | None:
    if splits is None:
        return None
    splits = splits if isinstance(splits, torch.Tensor) else torch.tensor(splits, device="cpu")
    if not _is_integer(splits) or splits.dim() != 1:
        raise ValueError(f"alltoall: splits are integers, one for each rank, and not {splits.dtype} of shape {tuple(splits.shape)}")
    if splits.numel() and splits.min() < 0:
        raise ValueError(f"alltoall: splits are {splits.tolist()}, and none may be below 0")
    return splits.tolist()


def _alltoall_async(tensor: torch.Tensor, splits: _Splits | None, name: str | None, process_set: ProcessSet) -> int:
    native = process_set._here()
    name = _name("alltoall", name, process_set)
    with _refusing(native, name):
        lent, sizes = _rowed("alltoall", tensor), _split_sizes(splits)

    def finish(done: _native.Handle) -> tuple[torch.Tensor, torch.Tensor]:
        received = _rows(done, 0, lent, done.shapes()[0])
        return received, torch.tensor(done.splits(), dtype=torch.int32, device="cpu")

    return _start(lambda: native.alltoall(name, lent, sizes), finish)


def alltoall_async(
    tensor: torch.Tensor, splits: _Splits | None = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts an :func:`alltoall`."""
    handle = _alltoall_async(tensor, splits, name, process_set)
    operation: _InFlight = _handles[handle]
    if splits is None and operation._finish is not None:
        operation._finish = _first(operation._finish)
    return handle


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: _Splits | None, name: str | None, process_set: ProcessSet
    ) -> tuple[torch.Tensor, torch.Tensor]:
        received, received_splits = _synchronized(_alltoall_async(tensor, splits, name, process_set))
        ctx.received_splits, ctx.process_set = received_splits, process_set
        ctx.mark_non_differentiable(received_splits)
        return received, received_splits

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        # The other is for the splits.
        return _applied(_Alltoall, gradients[0], ctx.received_splits, None, ctx.process_set)[0], None, None, None


@overload
def alltoall(
    tensor: torch.Tensor, splits: None = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor: ...
@overload
def alltoall(
    tensor: torch.Tensor, splits: _Splits, name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, torch.Tensor]: ...
def alltoall(
    tensor: torch.Tensor, splits: _Splits | None = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Sends the first ``splits[0]`` rows to rank 0, the next ``splits[1]`` to rank 1, and so on, and returns what came, in the order
    of the ranks. With ``splits`` it returns also how many rows came from each rank; without, as many go to each."""
    received, received_splits = _applied(_Alltoall, tensor, splits, name, process_set)
    return received if splits is None else (received, received_splits)


# Reducescatter.


def _scatter(
    tensors: Sequence[torch.Tensor], name: str | None, op: Op, before: float, after: float, process_set: ProcessSet, grouped: bool
) -> int:
    what = "grouped_reducescatter" if grouped else "reducescatter"
    native = process_set._here()
    name = _name(what, name, process_set)
    with _refusing(native, name):
        if op is Adasum:
            raise NotImplementedError("reducescatter cannot be an Adasum: use hvd.Sum or hvd.Average, or hvd.allreduce")
        # Before an average, for which integers get a dimension more.
        if any(isinstance(tensor, torch.Tensor) and tensor.dim() == 0 for tensor in tensors):
            raise ValueError(f"{what}: a scalar has no rows that could be divided among the ranks; use hvd.allreduce, or tensor.reshape(1)")
        factors = float(before), float(after)
        ways, op = _ways(what, tensors, op, *factors, process_set)
    lent, types = [way.lent for way in ways], [way.number for way in ways]

    def finish(done: _native.Handle) -> Any:
        shards = _gathered(lent)(done)
        shards = [way.result(shard) for way, shard in zip(ways, shards)]
        return shards if grouped else shards[0]

    return _start(lambda: native.reducescatter(name, lent, types, op._number, factors), finish)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts a :func:`reducescatter`."""
    with _refusing_call("reducescatter", name, process_set):
        op = _op(op, None)
    return _scatter([tensor], name, op, prescale_factor, postscale_factor, process_set, False)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts a :func:`grouped_reducescatter`."""
    with _refusing_call("grouped_reducescatter", name, process_set):
        op = _op(op, None)
    return _scatter(list(tensors), name, op, prescale_factor, postscale_factor, process_set, True)


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        grouped: bool,
        name: str | None,
        op: Op,
        before: float,
        after: float,
        process_set: ProcessSet,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.how = (op, before, after, process_set)
        shards = _synchronized(_scatter(tensors, name, op, before, after, process_set, grouped))
        return tuple(shards) if grouped else (shards,)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        op, before, after, process_set = ctx.how
        _differentiable(op)
        # What every rank's loss changes with these rows: Horovod counts a sum's for each rank, and an average's once.
        factor = before * after * (process_set.size() if op is Sum else 1)
        gathered = _applied(_Allgather, True, None, process_set, *gradients)
        return (None,) * 6 + tuple(gradient if factor == 1 else gradient * factor for gradient in gathered)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Combines the tensors of all ranks, and returns this rank's rows of the result: as many for each, and one more for each of the
    first ranks if they cannot be divided evenly."""
    with _refusing_call("reducescatter", name, process_set):
        op = _op(op, None)
        compressed, context = compression.compress(tensor)
    shard, = _applied(_Reducescatter, False, name, op, prescale_factor, postscale_factor, process_set, compressed)
    return compression.decompress(shard, context)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """As :func:`reducescatter` of each of the tensors, which is carried out when all ranks have all of them."""
    with _refusing_call("grouped_reducescatter", name, process_set):
        op = _op(op, None)
        compressed, contexts = zip(*(compression.compress(tensor) for tensor in tensors)) if len(tensors) else ((), ())
    shards = _applied(_Reducescatter, True, name, op, prescale_factor, postscale_factor, process_set, *compressed)
    return [compression.decompress(shard, context) for shard, context in zip(shards, contexts)]


# Others.


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank has called it."""
    native = process_set._here()
    _synchronized(_start(native.barrier, lambda _: None))


def join(device: int = -1) -> int:
    """Says that this rank has no more data, and waits until all ranks say so. Returns the rank that said it last.

    Meanwhile this rank takes part in the operations of the others, with zeros in a sum and without rows in an allgather. ``device`` is for
    GPUs, and ignored.
    """
    native = global_process_set._here()
    last: int = _synchronized(_start(native.join, lambda done: done.last()))
    # Ranks that had more data have made more calls without a name, and all of them have ended. The next ones have the same numbers everywhere.
    global_process_set._counts.clear()
    return last
