"""What makes the backend known to PyTorch: cheap, for ``import torch`` calls it where the package is installed.

The group itself, and the native library, are imported when the first group is made.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

from phalanx_torch import _traces


def register() -> None:
    """Registers the backend ``phalanx``, and with ``PHALANX_AS_GLOO=1`` takes gloo's place, with ``PHALANX_AS_HOROVOD=1`` Horovod's, with
    ``PHALANX_OBJECTS=1`` that of PyTorch's functions for objects."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    # Observers may start before there is a group.
    _traces.watch()
    taken = dist.Backend._plugins.get("PHALANX")
    if taken is not None:
        _check_ours(taken)
    else:
        dist.Backend.register_backend("phalanx", _create, extended_api=True, devices=["cpu"])
        # PyTorch's flight recorder sees groups of ours if a program asks for it, and they let it (`ProcessGroup.let_be_recorded`).
        recording: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
        recording.add("phalanx")
    if _is_wanted("PHALANX_AS_GLOO", "be taken for gloo"):
        from phalanx_torch._gloo import as_gloo

        as_gloo()
    if _is_wanted("PHALANX_OBJECTS", "replace PyTorch's functions for objects"):
        from phalanx_torch._object_functions import replace_object_functions

        replace_object_functions()
    if _is_wanted("PHALANX_AS_HOROVOD", "be taken for Horovod"):
        from phalanx_torch._horovod import install_later

        install_later()


def _check_ours(plugin: Any) -> None:
    """An error if another package's group would be made where ours is asked for."""
    home = getattr(plugin.creator_fn, "__module__", None) or repr(plugin.creator_fn)
    if home != __name__:
        raise RuntimeError(
            f"phalanx_torch: another package has registered a backend of the name phalanx: {home}. In one environment a name has one backend: "
            "uninstall one of the two; or set TORCH_DEVICE_BACKEND_AUTOLOAD=0, so that PyTorch imports neither, and import one of them"
        )


def _is_wanted(variable: str, effect: str) -> bool:
    wanted = os.environ.get(variable, "")
    if wanted not in ("", "0", "1"):
        raise ValueError(f"{variable} is {wanted!r}; give 1 to {effect}, or 0")
    return wanted == "1"


def register_with_torch() -> None:
    """Registers the backend now, or else when the program imports PyTorch, if it ever does: that takes seconds."""
    if "torch" in sys.modules:
        register()
    elif not any(map(_registers, sys.meta_path)):
        sys.meta_path.insert(0, _AtImport())


def _registers(finder: object) -> bool:
    registers: bool = getattr(finder, "registers_phalanx", False)
    return registers


class _AtImport(importlib.abc.MetaPathFinder):
    """Registers the backend at the end of ``import torch``, also where PyTorch does not look for backends itself."""

    registers_phalanx = True

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        spec: importlib.machinery.ModuleSpec | None = None
        for finder in list(sys.meta_path):
            find = None if _registers(finder) else getattr(finder, "find_spec", None)
            spec = None if find is None else find(name, path, target)
            if spec is not None:
                break
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        # Not before: programs ask whether there is a PyTorch, and do not import it, by the same way.
        def execute_and_register(module: types.ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            register()

        # The loader of this one import.
        setattr(spec.loader, "exec_module", execute_and_register)
        return spec


def _create(options: Any, backend_options: object) -> Any:
    from phalanx_torch import process_group

    return process_group.create(options, backend_options)
