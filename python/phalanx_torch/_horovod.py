"""Lets ``import horovod.torch`` find this package."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import TypeVar

_E = TypeVar("_E", bound=Exception)

# What Horovod's modules are called, and what answers for them. None: a package with nothing in it.
_MODULES: dict[str, str | None] = {
    "horovod": None,
    "horovod.common": None,
    "horovod.common.exceptions": "_job",
    "horovod.common.process_sets": "_job",
    "horovod.common.util": "_job",
    "horovod.torch": "",
    "horovod.torch.compression": "compression",
    "horovod.torch.functions": "_functions",
    "horovod.torch.mpi_ops": "",
    "horovod.torch.optimizer": "_optimizer",
    "horovod.torch.sync_batch_norm": "_sync_batch_norm",
}
_INSTEAD = {
    "run": "start ranks with `phalanx run --nproc-per-node 2 -- python PROGRAM`, or with `phalanx horovodrun`",
    "runner": "start ranks with `phalanx run --nproc-per-node 2 -- python PROGRAM`, or with `phalanx horovodrun`",
    "elastic": "restart the job from a checkpoint; `phalanx run --max-restarts` does so by itself",
}
_HERE = "phalanx_torch.horovod"


class _NoModule(ModuleNotFoundError, NotImplementedError):
    """A program that goes on without the module catches it as ``ImportError``."""


class NoAttribute(AttributeError, NotImplementedError):
    """``hasattr`` is false."""


def refused(name: str, kind: type[_E]) -> _E:
    """The error for a part of Horovod that is not there."""
    part = name.split(".")[-1]
    instead = _INSTEAD.get(part, "phalanx_torch.horovod is horovod.torch, and nothing else of Horovod's")
    return kind(f"{name} is not part of phalanx_torch.horovod: {instead}")


class _Finder(importlib.abc.MetaPathFinder):
    """Says by name what is not there."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        # `from horovod.torch import elastic` asks for the package by its own name.
        if name.startswith("horovod.") or name in [f"{_HERE}.{part}" for part in _INSTEAD]:
            raise refused(name, _NoModule)
        return None


class _Later(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Installs when the program imports Horovod, and not before: `import torch` shall not load the native library."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "horovod":
            return None
        sys.meta_path.remove(self)
        install()
        return importlib.util.spec_from_loader(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install_later() -> None:
    """As :func:`install`, when Horovod is imported first."""
    if "horovod" not in sys.modules and not any(isinstance(finder, _Later) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Later())


def install() -> None:
    """Makes ``import horovod.torch as hvd`` import ``phalanx_torch.horovod``, in this process. Call it before that import.

    Raises ``RuntimeError`` if Horovod itself has been imported.
    """
    known = sys.modules.get("horovod")
    if getattr(known, "_is_phalanx", False):
        return
    if known is not None:
        raise RuntimeError("phalanx_torch.horovod.install: Horovod itself has been imported already; call install() before that")
    package = importlib.import_module(_HERE)
    made: dict[str, types.ModuleType] = {}
    for name, part in _MODULES.items():
        if part is None:
            module = types.ModuleType(name, "Phalanx answers for Horovod: see phalanx_torch.horovod.")
            module.__path__ = []
            # `importlib.util.find_spec` asks for it.
            module.__spec__ = importlib.util.spec_from_loader(name, None, is_package=True)
            vars(module)["_is_phalanx"] = True
        else:
            module = importlib.import_module(f"{_HERE}.{part}") if part else package
        made[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            # The package's own names stay.
            vars(made[parent]).setdefault(child, module)
    # The release whose functions these are.
    vars(made["horovod"]).update(__version__="0.28.1", __getattr__=_missing)
    sys.modules.update(made)
    sys.meta_path.insert(0, _Finder())


def _missing(name: str) -> object:
    if name in _INSTEAD:
        raise refused(f"horovod.{name}", NoAttribute)
    raise AttributeError(f"module 'horovod' has no attribute {name!r}")
