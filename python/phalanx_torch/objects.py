"""PyTorch's functions for objects, for groups of Phalanx: one exchange if the objects are short, where PyTorch's make two or three.

They have the arguments of ``torch.distributed``'s functions of the same names, and do the same. Objects that come are unpickled, as PyTorch does it:
only exchange objects with ranks that you trust, or set ``weights_only=True``. All ranks of a call take these functions, or all take PyTorch's; a mixture
is an error on every rank. :func:`phalanx_torch.replace_object_functions` puts these in the place of PyTorch's.

``device`` and ``use_batch`` are taken and change nothing: objects go through the memory of the CPU.
"""

import io
import pickle
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from phalanx_torch import _ddp, _uncompiled, _warnings, device_backend, observed
from phalanx_torch._errors import Error, described
from phalanx_torch.observed import Objects, bytes_of, waiting
from phalanx_torch.process_group import ProcessGroup

# How objects are written, by the native part's numbers: by `pickle`, by `torch.save`; and why there are none.
_PICKLED, _SAVED, _FAILED = 0, 1, 2
_c10d: Any = dist.distributed_c10d


def part_of(group: Any) -> ProcessGroup | None:
    """What of ``group``, or of the default group, exchanges tensors on the CPU, if that is ours."""
    if group is None:
        group = dist.group.WORLD
    if isinstance(group, ProcessGroup):
        return group
    # Of a rank that is not in the group there is no more than a mark.
    if not isinstance(group, dist.ProcessGroup):
        return None
    try:
        part = device_backend.of_device(group, "cpu")
    except RuntimeError:
        # It has no backend for the CPU.
        return None
    if isinstance(part, device_backend.DeviceBackend):
        return part._group
    return part if isinstance(part, ProcessGroup) else None


def all_gather_object(object_list: list[Any], obj: Any, group: Any = None, weights_only: bool = False) -> None:
    """Puts the ``obj`` of every rank into every rank's ``object_list``, by rank."""
    part = _member("all_gather_object", group)
    if part is None:
        return

    def seen(sent: list[bytes]) -> Objects:
        came = bytes_of()
        return Objects("all_gather_single", (came, bytes_of(sent[0]), waiting(c10d.AllgatherOptions())), [came])

    found = _exchanged(
        part,
        group,
        "all_gather_object",
        [obj],
        weights_only,
        lambda group, sent, form: group._native.all_gather_object(sent[0], form),
        seen,
        _without_places("all_gather_object", object_list, part.size()),
    )
    _fill(object_list, found, part.size(), weights_only)


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Any = None,
    group_dst: int | None = None,
    weights_only: bool = False,
) -> None:
    """Puts the ``obj`` of every rank into ``object_gather_list`` on the rank ``dst``, by rank; the others give no list."""
    part = _member("gather_object", group)
    if part is None:
        return
    root = _group_rank(part, group, dst, group_dst, default=0)
    is_root = part.rank() == root
    refused = None
    if is_root and not object_gather_list:
        refused = ValueError("gather_object: object_gather_list must be given on the destination rank")
    elif is_root:
        refused = _without_places("gather_object", object_gather_list or (), part.size())
    elif object_gather_list:
        refused = ValueError("gather_object: object_gather_list must not be given on other ranks than the destination")
    places = part.size() if is_root else 0

    def seen(sent: list[bytes]) -> Objects:
        came = [bytes_of() for _ in range(places)]
        return Objects("gather", ([came] if is_root else [], [bytes_of(sent[0])], waiting(c10d.GatherOptions(), root)), came)

    found = _exchanged(
        part,
        group,
        "gather_object",
        [obj],
        weights_only,
        lambda group, sent, form: group._native.gather_object(sent[0], form, root),
        seen,
        refused,
    )
    if is_root and object_gather_list is not None:
        _fill(object_gather_list, found, part.size(), weights_only)


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: Any = None,
    group_src: int | None = None,
    weights_only: bool = False,
) -> None:
    """Puts the objects in ``object_list`` of the rank ``src`` into those of the others, which are as long."""
    part = _member("broadcast_object_list", group)
    if part is None:
        return
    root = _group_rank(part, group, src, group_src, default=0)
    _check_device(device)
    expected, is_root = len(object_list), part.rank() == root

    def seen(sent: list[bytes]) -> Objects:
        whole = bytes_of(b"".join(sent))
        return Objects("broadcast", ([whole], waiting(c10d.BroadcastOptions(), root)), [] if is_root else [whole])

    found = _exchanged(
        part,
        group,
        "broadcast_object_list",
        object_list if is_root else [],
        weights_only,
        lambda group, sent, form: group._native.broadcast_objects(sent, expected, form, root),
        seen,
    )
    if not is_root:
        _fill(object_list, found, expected, weights_only)


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: Sequence[Any] | None = None,
    src: int | None = None,
    group: Any = None,
    group_src: int | None = None,
    weights_only: bool = False,
) -> None:
    """Puts the r-th object of ``scatter_object_input_list`` of the rank ``src`` into the first place of rank r's ``scatter_object_output_list``."""
    part = _member("scatter_object_list", group)
    if part is None:
        return
    root = _group_rank(part, group, src, group_src, default=0)
    objects: Sequence[Any] = ()
    refused = None
    if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
        refused = ValueError("scatter_object_list: scatter_object_output_list must be a list of at least one place")
    elif part.rank() == root:
        objects = scatter_object_input_list or ()
        if len(objects) != part.size():
            given = "none" if scatter_object_input_list is None else str(len(objects))
            refused = ValueError(f"scatter_object_list: {given} given, and the source rank has one object for each of {part.size()} ranks")

    def seen(sent: list[bytes]) -> Objects:
        came = bytes_of()
        return Objects("scatter", ([came], [[bytes_of(data) for data in sent]] if sent else [], waiting(c10d.ScatterOptions(), root)), [came])

    found = _exchanged(
        part,
        group,
        "scatter_object_list",
        objects,
        weights_only,
        lambda group, sent, form: group._native.scatter_objects(sent, form, root),
        seen,
        refused,
    )
    _fill(scatter_object_output_list, found, 1, weights_only)


def send_object_list(
    object_list: Sequence[Any],
    dst: int | None = None,
    group: Any = None,
    device: Any = None,
    group_dst: int | None = None,
    use_batch: bool = False,
    weights_only: bool = False,
) -> None:
    """Sends the objects to the rank ``dst``, which receives a list as long."""
    part = _member("send_object_list", group)
    if part is None:
        return
    to = _group_rank(part, group, dst, group_dst)
    _check_device(device)
    if to == part.rank():
        raise ValueError("send_object_list: the destination rank is the rank of this process; send to another one")

    def send(group: ProcessGroup, sent: list[bytes], form: int) -> list[bytes]:
        group._native.send_objects(sent, form, to)
        return []

    _exchanged(part, group, "send_object_list", object_list, weights_only, send, lambda sent: Objects("send", ([bytes_of(b"".join(sent))], to, 0)))


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: Any = None,
    group_src: int | None = None,
    use_batch: bool = False,
    weights_only: bool = False,
) -> int:
    """Receives as many objects as ``object_list`` has places, from the rank ``src``, or from any if none is given. Returns the rank in the default
    group from which they are, or -1 on a rank that is not in ``group``."""
    part = _member("recv_object_list", group)
    if part is None:
        return -1
    source = None if src is None and group_src is None else _group_rank(part, group, src, group_src)
    _check_device(device)
    if source == part.rank():
        raise ValueError("recv_object_list: the source rank is the rank of this process; receive from another one")
    expected, form = len(object_list), _form(weights_only)

    senders: list[int] = []

    def receive() -> list[bytes]:
        objects: list[bytes]
        sender, objects = part._native.recv_objects(source, expected, form)
        senders.append(sender)
        return objects

    def seen() -> Objects:
        came = bytes_of()
        if source is None:
            return Objects("recv_anysource", ([came], 0), [came])
        return Objects("recv", ([came], source, 0), [came])

    found = _called(part, group, "recv_object_list", seen, receive)
    _fill(object_list, found, expected, weights_only)
    return dist.get_global_rank(_registered(group), senders[-1])


def _registered(group: Any) -> Any:
    return dist.group.WORLD if group is None else group


def _member(name: str, group: Any) -> ProcessGroup | None:
    """Our part of the group; None if this rank is not in the group, after PyTorch's warning. An error if it is a group of others."""
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        _warnings.warn(f"Running {name} on global rank {dist.get_rank()} which does not belong to the given group.")
        return None
    part = part_of(group)
    if part is not None:
        _ddp.check_order(part, name)
        return part
    if group is None and not dist.is_initialized():
        raise ValueError("Default process group has not been initialized, please make sure to call init_process_group.")
    raise ValueError(
        f"phalanx_torch.{name}: this is no group of phalanx for the CPU, but {_described(group)}; call torch.distributed.{name} for it"
    )


def _described(group: Any) -> str:
    try:
        return f"one of {dist.get_backend_config(group)}"
    except (AssertionError, RuntimeError, ValueError):
        # It is none of PyTorch's.
        return f"a {type(group).__name__}"


def _group_rank(part: ProcessGroup, group: Any, rank: int | None, group_rank: int | None, default: int | None = None) -> int:
    """The rank in the group of a rank that is given in the default group, or in the group."""
    if rank is not None and group_rank is not None:
        raise ValueError("Can't specify both group_rank and global_rank")
    if group_rank is None:
        rank = default if rank is None else rank
        if rank is None:
            raise ValueError("Must specify global_rank or group_rank")
        group_rank = dist.get_group_rank(_registered(group), rank)
    if not 0 <= group_rank < part.size():
        raise ValueError(f"rank {group_rank} is not a rank of this group, which has {part.size()}")
    return group_rank


def _without_places(name: str, objects: Sequence[Any], size: int) -> ValueError | None:
    """The error of a list that is too short."""
    if len(objects) < size:
        return ValueError(f"{name}: a list of {len(objects)}, and the group has {size} ranks")
    return None


def _check_device(device: Any) -> None:
    """An error if it is none."""
    if device is not None:
        torch.device(device)


def _form(weights_only: bool) -> int:
    return _SAVED if weights_only else _PICKLED


def _written(obj: Any, weights_only: bool) -> bytes:
    pickler = getattr(_c10d, "_pickler", pickle.Pickler)
    if not weights_only and pickler is pickle.Pickler:
        return pickle.dumps(obj)
    buffer = io.BytesIO()
    if weights_only:
        torch.save(obj, buffer)
    else:
        # What a program has put in its place, for PyTorch's functions.
        pickler(buffer).dump(obj)
    return buffer.getvalue()


def _read(data: bytes, weights_only: bool) -> Any:
    if weights_only:
        return torch.load(io.BytesIO(data), weights_only=True)
    unpickler = getattr(_c10d, "_unpickler", pickle.Unpickler)
    return pickle.loads(data) if unpickler is pickle.Unpickler else unpickler(io.BytesIO(data)).load()


def _exchanged(
    part: ProcessGroup,
    group: Any,
    name: str,
    objects: Iterable[Any],
    weights_only: bool,
    exchange: Callable[[ProcessGroup, list[bytes], int], list[bytes]],
    seen: Callable[[list[bytes]], Objects],
    refused: ValueError | None = None,
) -> Sequence[bytes]:
    """What ``exchange`` returns for the objects, a call that PyTorch's tools see as ``seen`` says. If this rank cannot write them, or refuses the call,
    the others are told so, and do not wait for it."""
    try:
        if refused is not None:
            raise refused
        written = [_written(obj, weights_only) for obj in objects]
    except Exception as error:
        cause = described(error).encode()
        part._sequence += 1
        try:
            exchange(part, [cause], _FAILED)
        except ValueError:
            # What this rank has told all, itself included.
            pass
        except Error as failed:
            # The group has this error for whoever asks; the program gets its own mistake.
            if hasattr(error, "add_note"):
                error.add_note(f"the other ranks could not be told: {failed}")
        raise
    return _called(
        part,
        group,
        name,
        lambda: seen(written),
        lambda: exchange(part, written, _form(weights_only)),
    )


def _called(part: ProcessGroup, group: Any, name: str, seen: Callable[[], Objects], run: Callable[[], list[bytes]]) -> Sequence[bytes]:
    """What ``run`` returns. Only if a tool watches are there tensors, or if that is not known."""
    part._sequence += 1
    whole = _whole(part, group)
    is_seen = whole is not None or observed.is_watched(part)
    return observed.call_objects(part, name, seen(), run, whole) if is_seen else run()


def _whole(part: ProcessGroup, group: Any) -> Any:
    """PyTorch's group of several backends of which ``part`` is one, or None. It does not say whether it has hooks, and has the flight recorder's if
    no variable says otherwise: its calls always go through PyTorch's dispatcher, as PyTorch's own functions do."""
    if not part._is_part or not observed.can_dispatch():
        return None
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL PyTorch would compare the lengths of the objects, which ranks have of their own.
    return None if c10d.get_debug_level() == c10d.DebugLevel.DETAIL else _registered(group)


def _fill(places: Any, found: Sequence[bytes], expected: int, weights_only: bool) -> None:
    if len(found) != expected:
        raise RuntimeError(f"phalanx: {len(found)} objects have come, and {expected} were expected")
    # All before any has its place.
    for index, obj in enumerate([_read(data, weights_only) for data in found]):
        places[index] = obj


_uncompiled.skip(sys.modules[__name__])
