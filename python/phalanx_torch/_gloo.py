"""Lets Phalanx be taken for gloo, by programs and libraries that know no other name."""

import functools
import inspect
from typing import Any

import torch

_NAME = "phalanx"
# The last PyTorch that was tested.
TESTED = "2.15"
# What this reads and writes of PyTorch's own parts.
_ARGUMENTS = {"group_size", "group_rank", "global_ranks_in_group", "backend", "store", "group_name"}
_TABLES = ("pg_map", "pg_backend_config")


def as_gloo() -> None:
    """Makes every group that is asked for as ``"gloo"`` from now on one of Phalanx, which answers that its backend is ``"gloo"``.

    Call it before ``init_process_group``, on every rank. ``PHALANX_AS_GLOO=1`` does the same when the package is imported.
    It raises ``RuntimeError`` if this PyTorch is not made as it expects; nothing is changed then.
    """
    from torch.distributed import distributed_c10d as c10d

    make: Any = getattr(c10d, "_new_process_group_helper", None)
    if getattr(make, "_phalanx_as_gloo", False):
        return
    _check(make, c10d)
    if any("gloo" in _backends(c10d, c10d._world.pg_map[group][0]).values() for group in c10d._world.pg_map):
        raise RuntimeError("phalanx_torch.as_gloo: there is a group of gloo already; call it before init_process_group")
    signature = inspect.signature(make)

    @functools.wraps(make)
    def as_asked(*arguments: Any, **named: Any) -> Any:
        call = signature.bind(*arguments, **named)
        asked = call.arguments["backend"]
        ours = _ours(c10d, asked)
        if ours is None:
            return make(*arguments, **named)
        call.arguments["backend"] = ours
        made = make(*call.args, **call.kwargs)
        if made[0] is not c10d.GroupMember.NON_GROUP_MEMBER:
            _rename(c10d, made[0], asked)
        return made

    setattr(as_asked, "_phalanx_as_gloo", True)
    c10d._new_process_group_helper = as_asked


def _check(make: Any, c10d: Any) -> None:
    world = getattr(c10d, "_world", None)
    missing = [f"_world.{name}" for name in _TABLES if not isinstance(getattr(world, name, None), dict)]
    if not callable(make):
        missing.append("_new_process_group_helper")
    else:
        missing += sorted(_ARGUMENTS - set(inspect.signature(make).parameters))
    missing += [name for name in ("Backend", "BackendConfig") if not hasattr(c10d, name)]
    if missing:
        raise RuntimeError(
            f"phalanx_torch.as_gloo: PyTorch {torch.__version__} has not, or has in another form: {', '.join(missing)}. It has been "
            f'tested with {TESTED}; use that, or init_process_group("{_NAME}"), which needs none of this'
        )
    if not c10d.is_gloo_available():
        raise RuntimeError(
            "phalanx_torch.as_gloo: this PyTorch has been built without gloo, and says so to whoever asks; use "
            f'init_process_group("{_NAME}")'
        )


def _backends(c10d: Any, backend: object) -> dict[str, str]:
    """The backend of each device, as PyTorch understands `backend`."""
    return dict(c10d.BackendConfig(c10d.Backend(str(backend))).get_device_backend_map())


def _ours(c10d: Any, asked: object) -> Any:
    """What to ask for instead of `asked`; None if no part of it is gloo's."""
    asked = str(asked).lower()
    if "gloo" not in asked and asked != c10d.Backend.UNDEFINED:
        return None
    # With the native library, which `import torch` shall not load.
    from phalanx_torch import device_backend

    backends = _backends(c10d, asked)
    if "gloo" not in backends.values():
        return None
    if ":" in asked:
        elsewhere = [device for device, name in backends.items() if name == "gloo" and device != "cpu"]
        if elsewhere:
            raise ValueError(
                f'phalanx_torch.as_gloo: "{asked}" asks for gloo on {", ".join(elsewhere)}, and Phalanx has only tensors on the '
                "CPU: name another backend there, such as nccl"
            )
    if set(backends.values()) == {"gloo"}:
        return c10d.Backend(_NAME)
    if torch.accelerator.is_available() and not device_backend.takes_backends_in_python():
        raise RuntimeError(
            f'phalanx_torch.as_gloo: PyTorch {torch.__version__} does not let "{asked}" be of Phalanx and of others; make two groups, '
            "init_process_group with the other backend and new_group for gloo, or take PyTorch 2.15"
        )
    return c10d.Backend(",".join(f"{device}:{_NAME if name == 'gloo' else name}" for device, name in backends.items()))


def _rename(c10d: Any, group: Any, asked: object) -> None:
    """Lets `group` and PyTorch's tables answer what was asked for. The group must be ours: nothing else may pass for gloo here."""
    from phalanx_torch import device_backend, process_group

    part = device_backend.of_device(group, "cpu")
    if not isinstance(part, (device_backend.DeviceBackend, process_group.ProcessGroup)):
        raise RuntimeError(
            f"phalanx_torch.as_gloo: PyTorch {torch.__version__} has made a {type(part).__name__} where Phalanx's group was asked "
            f'for. It has been tested with {TESTED}; use that, or init_process_group("{_NAME}")'
        )
    part.take_name("gloo")
    world = c10d._world
    _, store = world.pg_map[group]
    backend = c10d.Backend(str(asked))
    world.pg_map[group] = (backend, store)
    world.pg_backend_config[group] = str(c10d.BackendConfig(backend))
