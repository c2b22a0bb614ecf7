"""Groups that change in place: PyTorch's `enable_reconfigure`."""

import datetime
import os
import signal
import threading
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from conftest import SINCE_2_15, blind_watcher, processes
from torch._C import _distributed_c10d as c10d

import phalanx_torch
from phalanx_torch import _native, _versions, reconfigure

pytestmark = pytest.mark.skipif(not SINCE_2_15, reason="this PyTorch has no enable_reconfigure")
TIMEOUT = datetime.timedelta(seconds=60)


def _begin(path, rank, world):
    """A store, and the job's group, which has no ranks yet."""
    store = dist.FileStore(path, 16)
    dist.init_process_group("phalanx", store=store, rank=rank, world_size=world, timeout=TIMEOUT, enable_reconfigure=True)
    assert dist._supports_reconfigure()
    return store


def _handles(store, name, numbers, own):
    """The handles of the processes with these numbers, of which this is `own`."""
    store.set(f"{name}/{own}", dist._get_reconfigure_handle())
    return [store.get(f"{name}/{number}").decode() for number in numbers]


def _sum():
    tensor = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(tensor)
    return tensor.item()


def _is_averaged(world):
    """A reducer divides by the size that C++ has from the group: with another the gradient is another."""
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    ddp(torch.full((1, 1), dist.get_rank() + 1.0)).sum().backward()
    # Of 1, 2, .. world.
    return ddp.module.weight.grad.item() == (world + 1) / 2


def _replaced(number, path):
    """Processes 0 to 2 begin, 2 is killed, 0 and 1 go on, and 3 takes its place."""
    store = _begin(path, min(number, 2), 3)
    if number < 3:
        with pytest.raises(RuntimeError, match="has no ranks yet"):
            dist.all_reduce(torch.ones(1))
        dist._reconfigure(1, _handles(store, "first", [0, 1, 2], number)).wait()
        assert (dist.get_rank(), dist.get_world_size(), _sum()) == (number, 3, 6.0)
        assert _is_averaged(3)
        if number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(phalanx_torch.Error) as caught:
            while True:
                dist.all_reduce(torch.ones(1))
        assert (caught.value.kind, caught.value.peer) == ("peer_failed", 2)
        assert dist.group.WORLD.get_error() == c10d.ErrorType.REMOTE_ERROR
        began = time.monotonic()
        # In another order, by a set.
        dist._reconfigure(2, set(_handles(store, "second", [0, 1], number))).wait()
        assert time.monotonic() - began < 30.0
        assert (dist.get_world_size(), _sum(), _is_averaged(2)) == (2, 3.0, True)
        assert dist.group.WORLD.get_error() == c10d.ErrorType.SUCCESS
    dist._reconfigure(3, _handles(store, "third", [3, 0, 1], number)).wait()
    rank = {3: 0, 0: 1, 1: 2}[number]
    assert (dist.get_rank(), dist.get_world_size(), _sum()) == (rank, 3, 6.0)
    sent = torch.tensor([float(rank)])
    dist.broadcast(sent, 2)
    assert sent.item() == 2.0
    assert _is_averaged(3)
    part = dist.new_group([1, 2])
    if rank > 0:
        dist.all_reduce(sent, group=part)
        assert sent.item() == 4.0
    dist.destroy_process_group()


def test_a_rank_that_dies_is_replaced(tmp_path):
    processes(4, _replaced, f"{tmp_path}/store", dies=(2,))


def _merged(number, path):
    """Two groups of two become one of four, and that four of one."""
    store = _begin(path, number, 4)
    pair = [0, 1] if number < 2 else [2, 3]
    dist._reconfigure(number // 2, _handles(store, "pair", pair, number)).wait()
    assert (dist.get_rank(), _sum(), _is_averaged(2)) == (number % 2, 3.0, True)
    dist._reconfigure(2, _handles(store, "all", range(4), number)).wait()
    assert (dist.get_rank(), _sum()) == (number, 10.0)
    dist._reconfigure(3 + number, [dist._get_reconfigure_handle()]).wait()
    assert (dist.get_rank(), dist.get_world_size(), _sum()) == (0, 1, 1.0)
    dist.destroy_process_group()


def _often(number, path):
    store = _begin(path, number, 2)
    handles, counts = _handles(store, "handle", [0, 1], number), []
    for uuid in range(reconfigure._KEPT + 4):
        dist._reconfigure(uuid, handles).wait()
        _native.await_cleared(60.0)
        # While both are here, neither writes.
        assert _sum() == 3.0
        counts.append(store.num_keys())
        assert _sum() == 3.0
    assert counts[0] < counts[1] < counts[-4] == counts[-1], counts
    dist.destroy_process_group()


def test_a_store_does_not_grow_with_the_number_of_calls(tmp_path):
    processes(2, _often, f"{tmp_path}/store")


def test_groups_merge_and_part(tmp_path):
    processes(4, _merged, f"{tmp_path}/store")


def _without_more_data(number, path):
    store = _begin(path, number, 2)
    handles = _handles(store, "all", [0, 1], number)
    dist._reconfigure(1, handles).wait()
    assert _sum() == 3.0
    dist._reconfigure(2, handles).wait()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*without having exchanged any data")
        dist.destroy_process_group()


def test_a_job_that_ends_after_a_change_of_its_ranks_is_not_said_to_have_exchanged_nothing(tmp_path):
    processes(2, _without_more_data, f"{tmp_path}/store")


def _refused(number, path):
    store = _begin(path, number, 2)
    own = dist._get_reconfigure_handle()
    dist._reconfigure(10 + number, [own]).wait()
    with pytest.raises(RuntimeError, match="already used"):
        dist._reconfigure(10 + number, [own])
    with pytest.raises(ValueError, match="takes no hints, and these are fast, one"):
        dist._reconfigure(20, [own], hints={"one": "1", "fast": "1"})
    with pytest.raises(ValueError, match="reconfigure: a time-out of -1.0 s is below 0"):
        dist._reconfigure(20, [own], timeout=datetime.timedelta(seconds=-1))
    with pytest.raises(ValueError, match="the group: a time-out of -1.0 s is below 0"):
        reconfigure.ReconfigurableGroup(store, number, 2, datetime.timedelta(seconds=-1))
    for handles in ([], [own, own], ["another"]):
        with pytest.raises(ValueError, match="each process once, and this one"):
            dist._reconfigure(20, handles)
    # Each names itself first.
    other = _handles(store, "given", [0, 1], number)[1 - number]
    errors = 0
    try:
        dist._reconfigure(30, [own, other], timeout=datetime.timedelta(seconds=4))
    except phalanx_torch.Error as error:
        # Both learn of it, whoever comes first.
        assert error.kind == "mismatch", error
        errors = 1
    with pytest.raises(RuntimeError, match="has no ranks yet"):
        dist.all_reduce(torch.ones(1))
    # The other comes with another uuid.
    with pytest.raises(phalanx_torch.Error, match=r"of 2 ranks \[1\] have not come with this uuid within 0\.5 s") as caught:
        dist._reconfigure(35 + number, [own, other], timeout=datetime.timedelta(seconds=0.5))
    assert (caught.value.kind, caught.value.peer) == ("timeout", 1)
    dist._reconfigure(40, _handles(store, "again", [0, 1], number)).wait()
    assert _sum() == 3.0
    dist.destroy_process_group()
    return errors


def test_what_cannot_be_meant_is_refused(tmp_path):
    assert processes(2, _refused, f"{tmp_path}/store") == [1, 1]


def _given_up(number, path, how):
    store = _begin(path, number, 2)
    handles = _handles(store, "all", [0, 1], number)
    if number == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        store.set("process", str(os.getpid()))
        if how == "interrupted":
            with pytest.raises(KeyboardInterrupt):
                dist._reconfigure(1, handles)
        else:
            with pytest.raises(phalanx_torch.Error, match=r"of 2 ranks \[1\] have not come"):
                dist._reconfigure(1, handles, timeout=datetime.timedelta(seconds=0.5))
        store.set("ended", "")
    else:
        process = int(store.get("process"))
        if how == "interrupted":
            # Rank 0 waits for this one.
            dist.PrefixStore("reconfigure/1", dist.group.WORLD._store).get("came/0")
            os.kill(process, signal.SIGINT)
        store.wait(["ended"], datetime.timedelta(seconds=30))
        with pytest.raises(phalanx_torch.Error, match="rank 0 waits no longer for the ranks with this uuid.*another uuid") as caught:
            dist._reconfigure(1, handles)
        assert (caught.value.kind, caught.value.peer) == ("aborted", 0)
    dist._reconfigure(2, handles).wait()
    assert _sum() == 3.0
    dist.destroy_process_group()


@pytest.mark.parametrize("how", ["interrupted", "timed out"])
def test_a_rank_that_comes_too_late_is_told_who_has_given_up(how, tmp_path):
    processes(2, _given_up, f"{tmp_path}/store", how)


class Gone:
    """A store whose server ends, with Ctrl-C, when this process has come."""

    def compare_set(self, key, expected, desired):
        if key == "verdict":
            raise dist.DistNetworkError("the server has gone")
        return desired.encode()

    def set(self, key, value):
        raise KeyboardInterrupt


def test_ctrl_c_is_not_replaced_by_the_error_of_a_store_that_has_gone():
    group = reconfigure.ReconfigurableGroup
    with pytest.raises(KeyboardInterrupt):
        group._agree(group, Gone(), 0, ["this one", "another"], TIMEOUT)


def _with_other_versions(number, path):
    store = _begin(path, number, 2)
    handles = _handles(store, "all", [0, 1], number)
    own = _versions._own
    if number == 1:
        _versions._own = lambda: "phalanx_torch 9.9.9 and PyTorch 2.9"
    with pytest.raises(phalanx_torch.Error, match=r"rank [01] runs .*phalanx_torch 9\.9\.9 and PyTorch 2\.9.*: run the same versions"):
        dist._reconfigure(1, handles)
    with pytest.raises(RuntimeError, match="has no ranks yet"):
        dist.all_reduce(torch.ones(1))
    _versions._own = own
    dist._reconfigure(2, handles).wait()
    assert _sum() == 3.0
    dist.destroy_process_group()


def test_processes_of_other_versions_are_named_on_all_ranks(tmp_path):
    processes(2, _with_other_versions, f"{tmp_path}/store")


def _hooked(number, path):
    store = _begin(path, number, 2)
    dist._reconfigure(1, _handles(store, "first", [0, 1], number)).wait()
    group, called = dist.group.WORLD, threading.Event()
    assert group.supports_abort_hooks
    group.register_abort_hook(7, called.set)
    if number == 0:
        group.abort()
    # Also on a rank that waits for nothing.
    assert called.wait(60.0)
    expected = c10d.ErrorType.COMM_ERROR if number == 0 else c10d.ErrorType.REMOTE_ERROR
    assert group.get_error() == expected
    # Also of a call that nobody waits for.
    with pytest.raises(phalanx_torch.Error, match="has failed, and reconfigure"):
        dist.all_reduce(torch.ones(1), async_op=True)
    for message in (dist.isend, dist.irecv):
        with pytest.raises(phalanx_torch.Error, match="send or recv: the group has failed, and reconfigure"):
            message(torch.ones(1), 1 - number)
    called.clear()
    dist._reconfigure(2, _handles(store, "second", [0, 1], number)).wait()
    assert _sum() == 3.0 and group.get_error() == c10d.ErrorType.SUCCESS and not called.is_set()
    group.unregister_abort_hook(7)
    group.unregister_abort_hook(7)
    dist.barrier()
    if number == 1:
        group.abort()
    while group.failure() is None:
        time.sleep(0.01)
    assert not called.wait(0.2)
    dist.destroy_process_group()


def test_abort_hooks_are_called_on_every_rank(tmp_path):
    processes(2, _hooked, f"{tmp_path}/store")


def _hooked_and_reconfigured(number, path):
    store = _begin(path, number, 2)
    handles = _handles(store, "given", [0, 1], number)
    dist._reconfigure(1, handles).wait()
    group, calls = dist.group.WORLD, []
    blind_watcher(group)
    group.register_abort_hook(7, lambda: calls.append(group.get_error()))
    if number == 0:
        _sum()
        with pytest.raises(phalanx_torch.Error):
            while True:
                _sum()
        dist._reconfigure(2, handles).wait()
    else:
        _sum()
        # Leaves a group that has not failed: its hooks have nothing to do.
        dist._reconfigure(2, handles).wait()
    assert _sum() == 3.0
    dist.destroy_process_group()
    return calls


def test_hooks_are_called_before_the_group_is_another(tmp_path):
    assert processes(2, _hooked_and_reconfigured, f"{tmp_path}/store") == [[c10d.ErrorType.REMOTE_ERROR], []]
