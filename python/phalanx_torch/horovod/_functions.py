"""Parameters, the state of optimizers, and Python's objects."""

import functools
import importlib
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch

from phalanx_torch._errors import described, listed
from phalanx_torch.horovod._job import ProcessSet, _handles, global_process_set
from phalanx_torch.horovod._operations import _dense, _refusing, _synchronized, allgather_async, broadcast_async_, synchronize

_T = TypeVar("_T")


# How many characters the other ranks get of why a rank has no object.
_CAUSE_CHARACTERS = 200


def _written(value: object) -> bytes:
    pickler: Any
    try:
        # As Horovod does: it takes functions and classes of the program, too.
        pickler = importlib.import_module("cloudpickle")
    except ImportError:
        pickler = pickle
    data: bytes = pickler.dumps(value)
    return data


class _Sent:
    """What a rank sends: what ``make`` returns, pickled, or in place of that why there is nothing. The length tells which, and is below 0 for the second:
    the other ranks would wait for a rank that raises before it has sent anything."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.value: Any = None
        self.error: Exception | None = None
        try:
            self.value = make()
            data = _written(self.value)
        except Exception as error:
            self.error = error
            data = described(error)[:_CAUSE_CHARACTERS].encode()
        self.bytes = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.length = len(data) if self.error is None else -len(data)


def _without_object(operation: str, rank: int, cause: torch.Tensor) -> ValueError:
    """The error of a rank that has sent, in place of an object, why it has none."""
    return ValueError(f"{operation}: rank {rank} has sent no object: {bytes(cause.tolist()).decode(errors='replace')}")


def _read(tensor: torch.Tensor) -> Any:
    return pickle.loads(tensor.numpy().tobytes() if _has_numpy() else bytes(tensor.tolist()))


def _has_numpy() -> bool:
    try:
        import numpy  # noqa: F401
    except ImportError:
        return False
    return True


class _Unread:
    """In place of an object that this rank cannot unpickle: why."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _read_or_why_not(tensor: torch.Tensor) -> Any:
    try:
        return _read(tensor)
    except Exception as error:
        return _Unread(error)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The root's object, on every rank. It is pickled: ranks must trust each other. If the root cannot pickle it, that is an error on all ranks."""
    return _broadcast_object(lambda: obj, _read, root_rank, name, process_set)


def _broadcast_object(
    make: Callable[[], Any], read: Callable[[torch.Tensor], Any], root_rank: int, name: str | None, process_set: ProcessSet
) -> Any:
    """As :func:`broadcast_object`: on the root what ``make`` returns, on others what ``read`` makes of the bytes that come."""
    native = process_set._here()
    name = process_set._numbered("broadcast_object") if name is None else f"broadcast_object.{name}"
    with _refusing(native, f"broadcast.{name}.length"):
        is_root = process_set._root(int(root_rank)) == process_set.rank()
    sent = _Sent(make) if is_root else None
    announced = torch.tensor([0 if sent is None else sent.length], device="cpu")
    _synchronized(broadcast_async_(announced, root_rank, f"{name}.length", process_set))
    length = int(announced)
    # There may be no memory for it.
    with _refusing(native, f"broadcast.{name}.data"):
        data = torch.empty(abs(length), dtype=torch.uint8, device="cpu") if sent is None else sent.bytes
    _synchronized(broadcast_async_(data, root_rank, f"{name}.data", process_set))
    if sent is None:
        if length < 0:
            raise _without_object("broadcast_object", int(root_rank), data)
        return read(data)
    if sent.error is not None:
        raise sent.error
    return sent.value


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """All ranks' objects, in the order of the ranks. They are pickled: ranks must trust each other. If a rank cannot pickle its own, or has joined, that is
    an error on all ranks that call it."""
    # Only the ranks of the set may submit anything.
    process_set._here()
    name = process_set._numbered("allgather_object") if name is None else f"allgather_object.{name}"
    sent = _Sent(lambda: obj)
    lengths = _synchronized(allgather_async(torch.tensor([sent.length], device="cpu"), f"{name}.length", process_set)).tolist()
    every = _synchronized(allgather_async(sent.bytes, f"{name}.data", process_set))
    if sent.error is not None:
        raise sent.error
    parts = every.split([abs(length) for length in lengths])
    if len(parts) < process_set.size():
        raise ValueError(
            f"allgather_object: {len(parts)} of {process_set.size()} ranks have sent an object: the others have joined, and nothing tells whose these are"
        )
    for rank, length, part in zip(process_set.ranks, lengths, parts):
        if length < 0:
            raise _without_object("allgather_object", rank, part)
    return [_read(part) for part in parts]


_PARAMETERS = "pass model.state_dict(), model.named_parameters() or list(model.parameters())"


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrites tensors with the root's: a ``state_dict()``, pairs of names and tensors such as ``named_parameters()``, or tensors alone such as
    ``parameters()``, which all ranks then have in the same order."""
    if isinstance(params, Mapping):
        pairs = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (torch.Tensor, str, bytes)):
        # As Horovod does, which gives those without a name a number.
        pairs = [one if isinstance(one, tuple) else (None, one) for one in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}: {_PARAMETERS}")
    known = {pair[0] for pair in pairs if len(pair) == 2 and isinstance(pair[0], str) and pair[1] is not None}
    with _refusing(process_set._here(), *(f"broadcast.parameters.{name}" for name in known)):
        for place, pair in enumerate(pairs):
            if len(pair) != 2 or isinstance(pair[0], torch.Tensor):
                kinds = ", ".join(type(part).__name__ for part in pair)
                raise ValueError(f"broadcast_parameters: element {place} is a tuple of {kinds}, and no pair of a name and a tensor: {_PARAMETERS}")
            name, tensor = pair
            # None is state that a module has not got, and what its get_extra_state returned.
            if not isinstance(tensor, torch.Tensor) and (tensor is not None or name is None):
                what = f"element {place}" if name is None else name
                raise ValueError(
                    f"broadcast_parameters: {what} is of type {type(tensor).__name__}, and no tensor: {_PARAMETERS}; hvd.broadcast_object takes all else"
                )
        names = [name for name, tensor in pairs if name is not None and tensor is not None]
        twice = sorted({str(name) for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        if twice:
            raise ValueError(f"broadcast_parameters: names must be unique, and several tensors have {', '.join(twice)}")
    # Only when all are known to be right: else the other ranks would wait for the rest.
    _wait_for(
        functools.partial(broadcast_async_, tensor, root_rank, None if name is None else f"parameters.{name}", process_set)
        for name, tensor in pairs
        if tensor is not None
    )


def _wait_for(starts: Iterable[Callable[[], int]]) -> None:
    """Starts all of these operations, and then waits for all of them, also after an error: what they write to is then the program's again. Where one cannot be
    started, the other ranks wait for the next ones all the same."""
    handles: list[int] = []
    failure: Exception | None = None
    try:
        for start in starts:
            try:
                handles.append(start())
            except Exception as error:
                failure = failure or error
        for handle in handles:
            try:
                synchronize(handle)
            except Exception as error:
                failure = failure or error
    finally:
        for handle in handles:
            _handles.pop(handle, None)
    if failure is not None:
        raise failure


class _Place:
    """Stands for a tensor of the root's state, which is sent by itself."""

    def __init__(self, index: int, tensor: torch.Tensor) -> None:
        self.index, self.shape, self.dtype = index, tensor.shape, tensor.dtype


def _replaced(value: Any, kind: type[_T], replace: Callable[[_T], Any]) -> Any:
    if isinstance(value, kind):
        return replace(value)
    if isinstance(value, dict):
        return {key: _replaced(part, kind, replace) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replaced(part, kind, replace) for part in value)
    return value


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: object = None) -> None:
    """Gives the optimizers of all ranks the root's state and options. ``model`` is ignored: it is for sharded optimizers of GPUs."""
    # The first that all ranks call below.
    with _refusing(global_process_set._here(), "broadcast.broadcast_object.optimizer.length"):
        if not hasattr(optimizer, "state_dict"):
            raise ValueError(f"broadcast_optimizer_state: a torch.optim.Optimizer is expected, and not {type(optimizer).__name__}")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("broadcast_optimizer_state: the state of torch.optim.LBFGS is not for broadcasting: begin it anew on all ranks")
    tensors: list[torch.Tensor] = []

    def place(tensor: torch.Tensor) -> _Place:
        # All ranks hear of one that cannot be sent: they would wait for it.
        own = _dense("broadcast_optimizer_state", tensor)
        if not own.is_cpu:
            raise TypeError(f"broadcast_optimizer_state: a tensor of the state is on {own.device}; move the model to the CPU before the optimizer is made")
        tensors.append(own)
        return _Place(len(tensors) - 1, own)

    def framed() -> Any:
        return _replaced(optimizer.state_dict(), torch.Tensor, place)

    frame = _broadcast_object(framed, _read_or_why_not, root_rank, "optimizer", global_process_set)
    # Before the tensors: a rank that cannot read what they belong to would let the others wait for it.
    own_rank = torch.tensor([global_process_set.rank() if isinstance(frame, _Unread) else -1], device="cpu")
    said = _synchronized(allgather_async(own_rank, "optimizer.unread")).tolist()
    ranks = [rank for rank in said if rank >= 0]
    if isinstance(frame, _Unread):
        raise frame.error
    if ranks:
        raise ValueError(f"broadcast_optimizer_state: the state of rank {int(root_rank)} cannot be unpickled on ranks {listed(ranks)}: its error says why")
    is_root = int(root_rank) == global_process_set.rank()
    # Those with the same number share a tensor.
    places: dict[int, _Place] = {}
    if not is_root:
        _replaced(frame, _Place, lambda one: places.setdefault(one.index, one))
    names = [f"optimizer.{index}" for index in range(len(tensors if is_root else places))]
    # There may be no memory for them.
    with _refusing(global_process_set._here(), *(f"broadcast.{name}" for name in names)):
        if not is_root:
            tensors = [torch.empty(places[index].shape, dtype=places[index].dtype, device="cpu") for index in sorted(places)]
        own = [tensor.detach().contiguous() for tensor in tensors]
    _wait_for(functools.partial(broadcast_async_, tensor, root_rank, name) for name, tensor in zip(names, own))
    if not is_root:
        received = _replaced(frame, _Place, lambda one: own[one.index])
        optimizer.load_state_dict(received)
        _put_as_received(optimizer, received)


def _put_as_received(optimizer: torch.optim.Optimizer, received: dict[str, Any]) -> None:
    """Gives the optimizer the state that has come. PyTorch's ``load_state_dict`` has cast its tensors to the types of the parameters, so that
    averages in float32 beside parameters in bfloat16, and counts in int64, have lost bits; it also breaks texts."""
    numbers = [number for group in received["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters):
        if number in received["state"] and parameter in optimizer.state:
            optimizer.state[parameter] = _as_received(optimizer.state[parameter], received["state"][number])


def _as_received(loaded: Any, received: Any) -> Any:
    """``received``, with what ``load_state_dict`` has made of it in other places and shapes, and on other devices."""
    if isinstance(loaded, torch.Tensor) and isinstance(received, torch.Tensor):
        return received.to(loaded.device) if loaded.shape == received.shape else loaded
    if isinstance(loaded, dict) and isinstance(received, dict):
        for key in loaded.keys() & received.keys():
            loaded[key] = _as_received(loaded[key], received[key])
        return loaded
    if type(loaded) in (list, tuple) and type(loaded) is type(received) and len(loaded) == len(received):
        return type(loaded)(_as_received(*pair) for pair in zip(loaded, received))
    return received if type(loaded) is type(received) else loaded
