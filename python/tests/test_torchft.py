"""Groups for torchft's manager, which replicas of their own jobs make."""

import datetime

import pytest
import torch
import torch.distributed as dist
from conftest import free_port, processes

from phalanx_torch import _native, _versions

pytest.importorskip("torchft", reason="torchft is not here")

TIMEOUT = datetime.timedelta(seconds=20)


def _configured(rank, address, quorum=1):
    from phalanx_torch.torchft import ProcessGroupPhalanx

    group = ProcessGroupPhalanx(TIMEOUT)
    group.configure(f"{address}/torchft/{quorum}", f"replica-{rank}", rank, 2, quorum_id=quorum)
    return group


def _sum(group, value):
    tensor = torch.full((2,), value)
    group.allreduce([tensor], dist.AllreduceOptions()).wait()
    return tensor.tolist()


def _in_a_job_of_its_own(process, address):
    # Two replicas of two ranks. Each is a job, with a number with which its other groups meet.
    rank, local = divmod(process, 2)
    host, port = address.split(":")
    store = dist.PrefixStore(f"job/{rank}", dist.TCPStore(host, int(port), is_master=False))
    dist.init_process_group("phalanx", store=store, rank=local, world_size=2)
    assert dist.group.WORLD._native.meeting is not None
    group = _configured(rank, f"{address}/{local}")
    assert _sum(group, rank + 1.0) == [3, 3]
    part = group.parent.split_group([0, 1], group_name="both")
    tensor = torch.ones(1)
    part.allreduce([tensor]).wait()
    assert tensor.item() == 2
    part.shutdown()
    group.parent.shutdown()
    dist.destroy_process_group()


@pytest.fixture
def address():
    """That of a store which outlives the replicas."""
    store = dist.TCPStore("localhost", free_port(), is_master=True, wait_for_workers=False)
    yield f"localhost:{store.port}"
    del store


def test_replicas_that_are_jobs_of_their_own_meet(address):
    processes(4, _in_a_job_of_its_own, address)


def _leaves_no_keys(rank, address):
    host, port = address.split(":")
    store, counts = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False), []
    for quorum in (1, 2, 3):
        group = _configured(rank, address, quorum)
        _native.await_cleared(60.0)
        # While both are here, neither writes.
        assert _sum(group, 1.0) == [2, 2]
        counts.append(store.num_keys())
        assert _sum(group, 1.0) == [2, 2]
        group.parent.shutdown()
    assert len(set(counts)) == 1, counts


def test_a_store_does_not_grow_with_the_number_of_quorums(address):
    processes(2, _leaves_no_keys, address)


def _with_other_versions(rank, address):
    own = _versions._own
    if rank == 1:
        _versions._own = lambda: "phalanx_torch 9.9.9 and PyTorch 2.9"
    with pytest.raises(RuntimeError, match=r"rank [01] runs .*phalanx_torch 9\.9\.9 and PyTorch 2\.9.*: run the same versions"):
        _configured(rank, address)
    _versions._own = own
    group = _configured(rank, address, 2)
    assert _sum(group, 1.0) == [2, 2]
    group.parent.shutdown()


def test_replicas_of_other_versions_are_named_on_all_ranks(address):
    processes(2, _with_other_versions, address)


def _aborts(rank, address):
    group = _configured(rank, address)
    assert _sum(group, 1.0) == [2, 2]
    if rank == 0:
        assert group.errored() is None
        group.abort()
        failure = group.errored()
        assert failure is not None and "rank 0 called abort" in str(failure)
        group.abort()
        assert group.errored() is failure
    else:
        with pytest.raises(RuntimeError):
            _sum(group, 1.0)
        assert group.errored() is not None
    group.configure(f"{address}/torchft/2", f"replica-{rank}", rank, 2, quorum_id=2)
    assert group.errored() is None
    assert _sum(group, 1.0) == [2, 2]
    group.parent.shutdown()


def test_an_aborted_group_says_why_until_it_is_configured_again(address):
    processes(2, _aborts, address)
