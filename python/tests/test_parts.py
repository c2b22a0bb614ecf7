"""Groups of some ranks of a group, which know each other from it."""

import datetime
import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
from conftest import SINCE_2_14, SINCE_2_15, free_port, processes

from phalanx_torch import Error, process_group

SOON = datetime.timedelta(seconds=2)
LATE = datetime.timedelta(seconds=60)


def total(group):
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    return tensor[0].item()


def start(rank, world, how, place):
    """A job whose groups meet in PyTorch's server, or in a file."""
    url = f"tcp://127.0.0.1:{place}" if how == "tcp" else f"file://{place}"
    backend = "cpu:phalanx,cuda:nccl" if how == "device" else "phalanx"
    dist.init_process_group(backend, url, rank=rank, world_size=world, timeout=LATE)


@pytest.fixture(params=["tcp", "file", "device"])
def job(request, tmp_path):
    def run(world, body, *arguments, dies=()):
        place = free_port() if request.param == "tcp" else str(tmp_path / "store")
        return processes(world, in_job, world, request.param, place, body, arguments, dies=dies)

    return run


def in_job(rank, world, how, place, body, arguments):
    start(rank, world, how, place)
    result = body(rank, world, *arguments)
    if result != "broken":
        dist.barrier()
        dist.destroy_process_group()
    return result


def parts_by_themselves(rank, world):
    for _ in range(3):
        if rank > 0:
            part = dist.new_group(list(range(1, world)), use_local_synchronization=True)
            assert total(part) == world - 1
            dist.destroy_process_group(part)


def of_all_kinds(rank, world):
    if SINCE_2_15:
        turned = dist.new_group(list(reversed(range(world))), sort_ranks=False)
        tensor = torch.tensor([float(rank)])
        dist.broadcast(tensor, group=turned, group_src=0)
        assert tensor.item() == world - 1 and dist.get_rank(turned) == world - 1 - rank
        received = torch.zeros(1)
        if rank == 0:
            dist.send(torch.ones(1), group=turned, group_dst=0)
        elif rank == world - 1:
            dist.recv(received, group=turned, group_src=world - 1)
            assert received.item() == 1
    # PyTorch's names of groups count those that a rank knows. Before 2.14 it knows those alone of which it is a member, and those that some
    # ranks make by themselves come first; since then they come last. In another order ranks wait for each other, over gloo, too.
    if not SINCE_2_14:
        parts_by_themselves(rank, world)
    pair = dist.new_group([0, world - 1])
    if rank in (0, world - 1):
        assert total(pair) == 2
    if SINCE_2_14:
        parts_by_themselves(rank, world)


def test_parts_of_all_kinds(job):
    job(3, of_all_kinds)


def test_parts_over_tcp(job, monkeypatch):
    monkeypatch.setenv("PHALANX_TRANSPORT", "tcp")
    job(3, of_all_kinds)


def waits_for_one_that_dies(rank, world):
    if rank == 1:
        # As long as the others may take to wait for it; one that comes later is told at once, too.
        time.sleep(0.5)
        os._exit(3)
    begin = time.monotonic()
    with pytest.raises(Error) as caught:
        dist.new_group([1, 2, 0], timeout=LATE)
    text = str(caught.value)
    assert caught.value.kind == "peer_failed" and caught.value.peer == 1, text
    assert "rank 1 of the new group was lost before it came" in text, text
    assert time.monotonic() - begin < 20
    return "broken"


def test_a_member_that_dies_before_it_comes_is_named_at_once(job):
    job(3, waits_for_one_that_dies, dies=(1,))


def waits_for_one_that_does_not_come(rank, world):
    if rank == 0:
        with pytest.raises(Error) as caught:
            dist.new_group([0, 1], timeout=SOON, use_local_synchronization=True)
        text = str(caught.value)
        assert caught.value.kind == "timeout" and caught.value.peer == 1 and "rank 1 did not publish" in text, text


def test_a_member_that_never_comes_is_named_at_the_deadline(job):
    job(2, waits_for_one_that_does_not_come)


def names_others(rank, world):
    mine = [0, 1] if rank < 2 else [0, 2]
    if rank == 1:
        # Rank 0 waits for it; and rank 2 comes as that, within this time.
        time.sleep(4.0)
    with pytest.raises(Error) as caught:
        dist.new_group(mine, timeout=LATE)
    text = str(caught.value)
    assert caught.value.kind == "mismatch", text
    assert "another process has come as rank 1" in text or "disagree on the new group: rank" in text, text


def test_members_that_name_others_are_told_at_once(job):
    begin = time.monotonic()
    job(3, names_others)
    assert time.monotonic() - begin < 45


def aborted_meanwhile(rank, world):
    if rank == 1:
        # By then rank 0 waits.
        time.sleep(4.0)
        dist.group.WORLD._get_backend(torch.device("cpu")).abort()
        return "broken"
    begin = time.monotonic()
    with pytest.raises(Error) as caught:
        dist.new_group([0, 1], timeout=LATE)
    text = str(caught.value)
    assert caught.value.kind == "aborted" and "rank 1 called abort" in text, text
    assert time.monotonic() - begin < 20
    return "broken"


def test_an_abort_of_the_whole_answers_whoever_waits_for_a_part(job):
    job(2, aborted_meanwhile)


def several_at_a_time(rank, world):
    """Groups that one rank makes in other threads, one after the other, as PyTorch counts groups."""
    made = [None] * 4
    def make(index):
        made[index] = dist.new_group(timeout=LATE)

    if rank == 0:
        for index in range(4):
            thread = threading.Thread(target=make, args=(index,))
            thread.start()
            thread.join()
    else:
        for index in range(4):
            make(index)
    assert [total(group) for group in made] == [world] * 4


def test_parts_made_by_other_threads(job):
    job(2, several_at_a_time)


def without_own_connections(rank, url, body, those):
    """Some ranks ask PyTorch's client for all, as those do whose connection to its server fails."""
    if rank in those:
        process_group._address = lambda store: None
    dist.init_process_group("phalanx", url, rank=rank, world_size=3, timeout=LATE)
    result = body(rank, 3)
    if result != "broken":
        dist.barrier()
        dist.destroy_process_group()


# Rank 0 serves the store; the other server is PyTorch's older one, which wakes nobody for what is written once.
@pytest.mark.parametrize("those", [(0,), (1, 2)])
@pytest.mark.parametrize("server", ["", "?use_libuv=0"])
def test_ranks_with_and_without_a_connection_of_their_own_meet(server, those):
    processes(3, without_own_connections, f"tcp://127.0.0.1:{free_port()}{server}", of_all_kinds, those)


@pytest.mark.parametrize("those", [(0,), (1, 2)])
def test_ranks_with_and_without_a_connection_of_their_own_are_told_of_others(those):
    begin = time.monotonic()
    processes(3, without_own_connections, f"tcp://127.0.0.1:{free_port()}", names_others, those)
    assert time.monotonic() - begin < 45


def two_at_a_time(rank, world, rounds):
    """Two threads make a group each. No rank goes on before both have been called, and ranks begin with different ones."""
    whole = process_group._default()
    store = process_group._underlying(whole._store)
    address, found = process_group._address(store), {}

    def make(name, order):
        try:
            found[name] = whole._native.part(store, address, name, order, LATE.total_seconds())
        except Exception as error:
            found[name] = error

    for number in range(rounds):
        orders = [(f"up {number}", list(range(world))), (f"down {number}", list(range(world))[::-1])]
        threads = [threading.Thread(target=make, args=order) for order in orders[:: 1 if (rank + number) % 2 else -1]]
        for thread in threads:
            thread.start()
            # The first waits for the other ranks, which are busy with the other group.
            thread.join(0.05)
        for thread in threads:
            thread.join()
        for name, order in orders:
            part = found.pop(name)
            assert not isinstance(part, Exception), part
            assert part.rank == order.index(rank)
            tensor = torch.tensor([float(10**part.rank * rank)])
            part.all_reduce(tensor, (0, 1.0), (None, True))
            assert tensor.item() == sum(10**index * other for index, other in enumerate(order)), name
            part.close()


def test_two_parts_at_the_same_time(job):
    job(3, two_at_a_time, 5)
