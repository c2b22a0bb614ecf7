"""The versions of PyTorch that this package takes, and whether all ranks of a job have the same ones."""

import os
from typing import Any

import torch

from phalanx_torch import _native
from phalanx_torch._errors import Error
from phalanx_torch._gloo import TESTED

_FIRST = "2.9"
_KEY = "versions"


def check_torch(version: str = torch.__version__) -> None:
    """An error if this PyTorch is older than the first that works, or later than the last that was tested. Of those between not all were."""
    taken = f"Phalanx takes PyTorch {_FIRST} to {TESTED}"
    if _minor(version) < _minor(_FIRST):
        raise Error(f"phalanx: PyTorch {version} is too old: it lacks what this backend is made of. {taken}")
    if _minor(version) > _minor(TESTED) and os.environ.get("PHALANX_UNTESTED_TORCH", "0") != "1":
        raise Error(
            f"phalanx: PyTorch {version} is too new: this version of Phalanx does not know it. {taken}; install one of these, or a later Phalanx, "
            "or set PHALANX_UNTESTED_TORCH=1 to try it"
        )


def tell(store: Any, rank: int) -> None:
    """Leaves the versions of rank 0 for the other ranks. Call it before they meet."""
    if rank == 0:
        store.set(_KEY, _own())


def compare(store: Any, rank: int, group: _native.Group) -> None:
    """Ends the group on all ranks, which have met, if this one has other versions than rank 0."""
    if rank == 0:
        return
    try:
        first = bytes(store.get(_KEY)).decode(errors="replace") if store.check([_KEY]) else "another version of phalanx_torch"
    except RuntimeError:
        # Rank 0 has met this one, and is gone with its store: it has nothing left to do with this group, or the first call names it.
        return
    _refuse_others(group, rank, {0: first, rank: _own()})


def compare_all(group: _native.Group) -> None:
    """Ends the group on all ranks, which have met, if two have different versions. For processes that may have been started apart: they ask each other,
    and leave nothing in a store."""
    texts = group.all_gather_object(_own().encode(), 0)
    _refuse_others(group, group.rank, {rank: bytes(text).decode(errors="replace") for rank, text in enumerate(texts)})


def _refuse_others(group: _native.Group, rank: int, versions: dict[int, str]) -> None:
    for other, theirs in versions.items():
        if theirs != versions[rank]:
            cause = f"rank {rank} runs {versions[rank]}, and rank {other} {theirs}: run the same versions in all processes of a job"
            group.abort(cause)
            raise Error(cause, "mismatch", other)


def _own() -> str:
    return f"phalanx_torch {_native.__version__} and PyTorch {'.'.join(map(str, _minor(torch.__version__)))}"


def _minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
