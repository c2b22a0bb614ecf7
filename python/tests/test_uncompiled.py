"""What keeps `torch.compile` out of this package."""

import warnings

import pytest
from torch._C._dynamo import eval_frame

from phalanx_torch import _uncompiled, work


def test_this_pytorch_can_be_told():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _uncompiled.skip(work)


def test_a_pytorch_that_cannot_be_told_is_warned_of(monkeypatch):
    # Another form of the mark, and then none.
    monkeypatch.setattr(eval_frame, "set_code_exec_strategy", lambda code: None)
    with pytest.warns(RuntimeWarning, match="compiled DistributedDataParallel may fail, and all else works .TypeError"):
        _uncompiled.skip(work)
    monkeypatch.delattr(eval_frame, "set_code_exec_strategy")
    with pytest.warns(RuntimeWarning, match="compiled DistributedDataParallel may fail, and all else works .ImportError"):
        _uncompiled.skip(work)
