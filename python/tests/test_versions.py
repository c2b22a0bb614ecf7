"""Versions of PyTorch, and of this package, that do not go together."""

import datetime
import threading

import pytest
import torch
import torch.distributed as dist
from conftest import processes

from phalanx_torch import Error, _versions
from phalanx_torch.process_group import ProcessGroup


def test_a_pytorch_that_is_too_old_or_too_new_is_named(monkeypatch):
    with pytest.raises(Error, match=r"PyTorch 2\.8\.1 is too old.*2\.9 to 2\.\d+"):
        _versions.check_torch("2.8.1")
    for version in ("2.9.0", torch.__version__):
        _versions.check_torch(version)
    with pytest.raises(Error, match=r"PyTorch 3\.0\.0a0\+git1 is too new.*2\.9 to 2\.\d+.*PHALANX_UNTESTED_TORCH=1"):
        _versions.check_torch("3.0.0a0+git1")
    monkeypatch.setenv("PHALANX_UNTESTED_TORCH", "1")
    _versions.check_torch("3.0.0a0+git1")


class _Noting:
    """A store that notes the threads that call it."""

    def __init__(self, store):
        self.store, self.threads = store, set()

    def __getattr__(self, name):
        self.threads.add(threading.get_ident())
        return getattr(self.store, name)


def _asked(rank, path):
    store = _Noting(dist.FileStore(path, 2))
    group = ProcessGroup(store, rank, 2, datetime.timedelta(seconds=60))
    # PyTorch's stores answer no Ctrl-C, and only the main thread could.
    assert store.threads and threading.get_ident() not in store.threads
    group.shutdown()


def test_the_thread_of_the_program_does_not_wait_for_a_store(tmp_path):
    processes(2, _asked, f"{tmp_path}/store")


def _others(rank, url):
    if rank == 1:
        _versions._own = lambda: "phalanx_torch 9.9.9 and PyTorch 2.9"
    with pytest.raises(Error, match=r"rank [01] runs .*phalanx_torch 9\.9\.9 and PyTorch 2\.9.*: run the same versions"):
        dist.init_process_group("phalanx", url, rank=rank, world_size=2)
        dist.barrier()


def test_ranks_of_other_versions_are_named_on_all_ranks(tmp_path):
    processes(2, _others, f"file://{tmp_path}/store")
