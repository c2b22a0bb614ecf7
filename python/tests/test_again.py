"""Jobs that the same processes join one after the other, at one address."""

import datetime
import os
import socket
import time

import pytest
import torch
import torch.distributed as dist
from conftest import environment, free_port, processes
from torch._C import _distributed_c10d as c10d

import phalanx_torch

TIMEOUT = datetime.timedelta(seconds=60)


def _sum(group=None):
    tensor = torch.tensor([2.0**dist.get_rank()])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def _again(rank, world, port, is_late, when):
    environment(rank, world, port)
    for life in range(4):
        dist.init_process_group("phalanx", timeout=TIMEOUT)
        assert _sum() == 2.0**world - 1
        # Other ranks, in a group of the same name.
        part = dist.new_group([0, 1 + life % (world - 1)])
        if rank in (0, 1 + life % (world - 1)):
            assert _sum(part) == 1.0 + 2.0 ** (1 + life % (world - 1))
        if is_late(rank) and when == "before":
            time.sleep(0.4)
        dist.destroy_process_group()
        if is_late(rank) and when == "after":
            time.sleep(0.4)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("late", [(), (0,), (1, 2)])
def test_ranks_meet_again_whoever_is_late(late, when):
    processes(3, _again, 3, free_port(), late.__contains__, when)


def _is_served(port):
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=30.0):
            return True
    except ConnectionRefusedError:
        return False


def _job(backend, rank, name, ended):
    dist.init_process_group(backend, timeout=TIMEOUT)
    assert _sum() == 3.0
    dist.barrier()
    if rank == 0:
        dist.destroy_process_group()
        assert _is_served(int(os.environ["MASTER_PORT"])) == (backend == "phalanx")
        (ended / name).touch()
    else:
        # gloo's ranks do not find each other if one comes to the next job while rank 0 is in the last one.
        while not (ended / name).exists():
            time.sleep(0.01)
        dist.destroy_process_group()


def _other_backends(rank, world, port, ended):
    environment(rank, world, port)
    _job("phalanx", rank, "first", ended)
    for name in ("second", "third"):
        _job("gloo", rank, name, ended)
    assert dist.distributed_c10d._update_default_pg.__module__ == "torch.distributed.distributed_c10d"


def test_the_store_that_is_kept_ends_with_the_next_job_of_another_backend(tmp_path):
    processes(2, _other_backends, 2, free_port(), tmp_path)


def _other_port(rank, world, ports, ended):
    environment(rank, world, ports[0])
    _job("phalanx", rank, "first", ended)
    environment(rank, world, ports[1])
    dist.init_process_group("phalanx", timeout=TIMEOUT)
    dist.barrier()
    assert (_is_served(ports[0]), _is_served(ports[1])) == (False, True)
    dist.barrier()
    dist.group.WORLD.abort()
    dist.destroy_process_group()
    if rank == 0:
        # One that has failed is not kept.
        assert not _is_served(ports[1])


def test_the_store_that_is_kept_ends_with_the_next_job_at_another_port(tmp_path):
    processes(2, _other_port, 2, [free_port(), free_port()], tmp_path)


def _under_an_agent(rank, world, port):
    environment(rank, world, port)
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0", GROUP_WORLD_SIZE="1")
    _again_of(rank, world)


def _again_of(rank, world):
    for life in range(3):
        dist.init_process_group("phalanx", timeout=TIMEOUT)
        other = 1 + life % (world - 1)
        part = dist.new_group([0, other])
        if rank in (0, other):
            assert _sum(part) == 1.0 + 2.0**other
        dist.destroy_process_group()


def test_groups_of_one_name_may_have_other_ranks_in_the_next_job():
    # As torchrun serves it.
    store = c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes(3, _under_an_agent, 3, store.port)


def _arrays(rank, world, port):
    environment(rank, world, port)
    for life in range(3):
        group = phalanx_torch.init()
        tensor = torch.tensor([rank + 1.0])
        group.all_reduce(tensor)
        assert tensor.item() == 3.0
        if rank == 0:
            time.sleep(0.3)
        group.close()


def test_groups_of_arrays_meet_again():
    processes(2, _arrays, 2, free_port())


def _both(rank, world, port):
    environment(rank, world, port)
    with phalanx_torch.init(timeout=60.0):
        with pytest.raises(ValueError, match="rank 0 of another group already.*new_group"):
            phalanx_torch.init(timeout=60.0)


def test_a_second_group_of_arrays_beside_the_first_is_refused_at_once():
    processes(2, _both, 2, free_port())
