"""Versions of PyTorch, and of this package, that do not go together."""

import pytest
import torch
import torch.distributed as dist
from conftest import processes

from phalanx_torch import Error, _versions


def test_a_pytorch_that_is_too_old_or_too_new_is_named(monkeypatch):
    with pytest.raises(Error, match=r"PyTorch 2\.8\.1 is too old.*2\.9 to 2\.\d+"):
        _versions.check_torch("2.8.1")
    for version in ("2.9.0", torch.__version__):
        _versions.check_torch(version)
    with pytest.raises(Error, match=r"PyTorch 3\.0\.0a0\+git1 is too new.*2\.9 to 2\.\d+.*PHALANX_UNTESTED_TORCH=1"):
        _versions.check_torch("3.0.0a0+git1")
    monkeypatch.setenv("PHALANX_UNTESTED_TORCH", "1")
    _versions.check_torch("3.0.0a0+git1")


class _Gone:
    """The store of a rank 0 that has ended."""

    def check(self, keys):
        raise dist.DistNetworkError("connection reset")


def test_a_rank_0_that_has_ended_with_its_store_is_no_error():
    assert _versions.compare(_Gone(), 1, None) is None


def _others(rank, url):
    if rank == 1:
        _versions._own = lambda: "phalanx_torch 9.9.9 and PyTorch 2.9"
    with pytest.raises(Error, match="rank 1 runs phalanx_torch 9.9.9 and PyTorch 2.9, and rank 0 phalanx_torch .*: run the same versions"):
        dist.init_process_group("phalanx", url, rank=rank, world_size=2)
        dist.barrier()


def test_ranks_of_other_versions_are_named_on_all_ranks(tmp_path):
    processes(2, _others, f"file://{tmp_path}/store")
