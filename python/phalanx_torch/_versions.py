"""The versions of PyTorch that this package takes, and whether all ranks of a job have the same ones."""

import os

import torch

from phalanx_torch import _native
from phalanx_torch._errors import Error
from phalanx_torch._gloo import TESTED

_FIRST = "2.9"


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


def compare(group: _native.Group) -> None:
    """Ends the group on all ranks, which have met, if two have different versions. They ask each other: a wait for PyTorch's store answers no Ctrl-C."""
    own, rank = _own(), group.rank
    for other, text in enumerate(group.all_gather_object(own.encode(), 0)):
        theirs = bytes(text).decode(errors="replace")
        if theirs != own:
            cause = f"rank {rank} runs {own}, and rank {other} {theirs}: run the same versions in all processes of a job"
            group.abort(cause)
            raise Error(cause, "mismatch", other)


def _own() -> str:
    return f"phalanx_torch {_native.__version__} and PyTorch {'.'.join(map(str, _minor(torch.__version__)))}"


def _minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
