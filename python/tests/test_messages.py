"""Messages: tags, any source, batches, and what goes wrong."""

import datetime
import threading
import time

import pytest
import torch
import torch.distributed as dist
from conftest import processes

import phalanx_torch
from phalanx_torch import process_group


def overtakes(rank):
    if rank == 0:
        works = [dist.isend(torch.full((5,), tag), 1, tag=tag) for tag in (1, 2, 3)]
        dist.all_reduce(torch.zeros(1))
        for work in works:
            work.wait()
    else:
        late, early = torch.zeros(5, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)
        posted = dist.irecv(late, 0, tag=3)
        dist.all_reduce(torch.zeros(1))
        dist.recv(early, 0, tag=2)
        posted.wait()
        assert posted.is_completed() and (late == 3).all() and (early == 2).all()
        dist.recv(early, 0, tag=1)
        assert (early == 1).all()


def test_tags_are_matched_in_any_order(ranks):
    ranks(2, overtakes)


def from_any(rank, world):
    if rank == 0:
        got = []
        for _ in range(2 * (world - 1)):
            tensor = torch.zeros(3)
            got.append((dist.recv(tensor), tensor[0].item()))
        assert sorted(got) == [(r, float(r)) for r in range(1, world) for _ in range(2)]
        work, tensor = dist.irecv(torch.zeros(1), tag=9), torch.zeros(1)
        dist.recv(tensor, 1, tag=8)
        work.wait()
        assert work.source_rank() == world - 1 and tensor.item() == 8.0
    else:
        for _ in range(2):
            dist.send(torch.full((3,), float(rank)), 0)
        if rank == 1:
            dist.send(torch.tensor([8.0]), 0, tag=8)
        if rank == world - 1:
            dist.send(torch.tensor([9.0]), 0, tag=9)


@pytest.mark.parametrize("world", [2, 3])
def test_from_whoever_sends(ranks, world):
    ranks(world, from_any, world)


def ring(rank, world):
    for elements in (1, 1_000_000):
        mine, theirs = torch.full((elements,), float(rank)), torch.empty(elements)
        ops = [
            dist.P2POp(dist.isend, mine, (rank + 1) % world),
            dist.P2POp(dist.irecv, theirs, (rank - 1) % world),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert (theirs == (rank - 1) % world).all()


@pytest.mark.parametrize("world", [2, 3])
def test_a_batch_does_not_wait_for_itself(ranks, world):
    ranks(world, ring, world)


def to_nobody(rank):
    tensor = torch.ones(1)
    calls = {f"rank {rank} cannot send to or receive from itself": rank, "rank 7 is not a rank of this group, which has 2": 7}
    for match, peer in calls.items():
        # Also if nobody waits for the work.
        for call in (dist.isend, dist.irecv):
            with pytest.raises(ValueError, match=match):
                call(tensor, peer)
            with pytest.raises(ValueError, match=match):
                dist.batch_isend_irecv([dist.P2POp(call, tensor, peer)])
    other = torch.zeros(1)
    works = [dist.isend(tensor, 1 - rank), dist.irecv(other, 1 - rank)]
    for work in works:
        work.wait()
    assert other.item() == 1.0


def test_a_message_to_no_other_rank_is_refused_at_the_call(ranks):
    ranks(2, to_nobody)


def to_one_that_has_left(rank):
    if rank == 1:
        return dist.destroy_process_group()
    # So many have room in the memory that the ranks share.
    for sent in range(1000):
        try:
            dist.send(torch.ones(1), 1)
        except phalanx_torch.Error as error:
            assert "rank 1" in str(error) and "has left the group" in str(error), error
            assert (error.kind, error.peer) == ("peer_left", 1)
            return sent
        # Until this rank knows it.
        time.sleep(0.05)
    return None


def test_a_message_to_a_rank_that_has_left_is_refused(ranks):
    assert ranks(2, to_one_that_has_left)[0] is not None


def from_nobody(rank):
    if rank != 0:
        if rank == 1:
            dist.send(torch.ones(1), 0)
        return dist.destroy_process_group()
    got = torch.zeros(1)
    assert dist.recv(got) == 1 and got.item() == 1.0
    with pytest.raises(phalanx_torch.Error, match="recv from any source: all other ranks have left the group: rank 1 .*, rank 2 ") as caught:
        dist.recv(got)
    assert caught.value.kind == "peer_left" and caught.value.peer == 1


def test_a_receive_from_any_rank_ends_when_all_others_have_left(ranks):
    ranks(3, from_nobody)


def objects_from_nobody(rank):
    if rank == 1:
        return dist.destroy_process_group()
    with pytest.raises(phalanx_torch.Error, match="all other ranks have left the group: rank 1 ") as caught:
        phalanx_torch.recv_object_list([None])
    assert caught.value.kind == "peer_left"


def test_a_receive_of_objects_from_any_rank_ends_when_all_others_have_left(ranks):
    ranks(2, objects_from_nobody)


def alone(rank):
    match = "this group has one rank"
    for call in (dist.recv, dist.irecv, lambda tensor: phalanx_torch.recv_object_list([None])):
        with pytest.raises(ValueError, match=match):
            call(torch.zeros(1))
    assert dist.group.WORLD.failure() is None


def test_a_receive_from_any_of_one_rank_is_refused(ranks):
    ranks(1, alone)


def objects_before_an_earlier_receive(rank, source):
    store = dist.group.WORLD.get_group_store()
    if rank == 0:
        found, last = [None], torch.zeros(1)
        work = dist.irecv(last, source, tag=5)
        assert phalanx_torch.recv_object_list(found, source) == 1 and found == ["x"]
        store.set("found", "")
        work.wait()
        assert last.item() == 5.0
    else:
        phalanx_torch.send_object_list(["x"], 0)
        store.wait(["found"])
        dist.send(torch.full((1,), 5.0), 0, tag=5)


@pytest.mark.parametrize("source", [1, None])
def test_objects_do_not_wait_for_what_an_earlier_receive_waits_for(ranks, source):
    ranks(2, objects_before_an_earlier_receive, source)


def unlike(rank):
    if rank == 0:
        with pytest.raises(phalanx_torch.Error):
            # The other may refuse the message before all of it has been sent.
            dist.send(torch.zeros(3), 1, tag=4)
            while True:
                dist.all_reduce(torch.zeros(1))
    else:
        with pytest.raises(phalanx_torch.Error, match="rank 0 has sent 3 x float32 with tag 4 to rank 1, which receives 5 x float32"):
            dist.recv(torch.zeros(5), 0, tag=4)


def test_other_lengths_are_named(ranks):
    ranks(2, unlike)


OTHER_TYPES = [
    # As many bytes; the first is what is sent. PyTorch gives complex tensors to a backend as pairs of floats.
    (torch.int16, 3, torch.uint8, 6),
    (torch.int16, 3, torch.uint16, 3),
    (torch.uint8, 4, torch.float8_e4m3fn, 4),
    (torch.float8_e5m2, 4, torch.float8_e4m3fn, 4),
    (torch.float64, 3, torch.float32, 6),
    (torch.int32, 3, torch.float32, 3),
    (torch.int8, 3, torch.bool, 3),
]


def of_other_types(rank, sent, received, is_kept, from_any):
    (sent_type, sent_elements), (received_type, elements) = sent, received
    if rank == 0:
        with pytest.raises(phalanx_torch.Error):
            works = [dist.isend(torch.zeros(sent_elements, dtype=sent_type), 1, tag=4), dist.isend(torch.zeros(1), 1, tag=5)]
            works[0].wait()
            while True:
                dist.all_reduce(torch.zeros(1))
    else:
        if is_kept:
            # The message is there before its receive: it comes before this one.
            dist.recv(torch.zeros(1), 0, tag=5)
        names = [str(dtype).removeprefix("torch.") for dtype in (sent_type, received_type)]
        why = f"rank 0 has sent {sent_elements} x {names[0]} with tag 4 to rank 1, which receives {elements} x {names[1]}"
        with pytest.raises(phalanx_torch.Error, match=why) as caught:
            dist.recv(torch.zeros(elements, dtype=received_type), None if from_any else 0, tag=4)
        assert caught.value.kind == "mismatch"


@pytest.mark.parametrize("case", OTHER_TYPES, ids=lambda case: f"{case[0]} as {case[2]}")
def test_other_types_of_as_many_bytes_are_named(ranks, case):
    sent, elements, received, room = case
    for is_kept, from_any in [(False, False), (True, False), (False, True)]:
        ranks(2, of_other_types, (sent, elements), (received, room), is_kept, from_any)


def of_each_type(rank):
    """What is sent comes as it is, in every type that is only moved."""
    names = ["int16", "uint16", "uint32", "uint64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "bool", "bfloat16"]
    for tag, name in enumerate(names):
        given = (torch.arange(16, dtype=torch.uint8) % 2).view(getattr(torch, name))
        if rank == 0:
            dist.send(given, 1, tag=tag)
        else:
            received = torch.zeros_like(given)
            dist.recv(received, 0, tag=tag)
            assert (received.view(torch.uint8) == given.view(torch.uint8)).all(), name


def test_messages_of_each_type(ranks):
    ranks(2, of_each_type)


def object_lists(rank):
    if rank == 0:
        dist.send_object_list([{"a": 1}, "b"], 1)
    else:
        got = [None, None]
        assert dist.recv_object_list(got, 0) == 0 and got == [{"a": 1}, "b"]


def test_lists_of_objects(ranks):
    ranks(2, object_lists)


def forgotten(rank):
    if rank == 0:
        work = dist.irecv(torch.zeros(1), 1, tag=3)
        dist.destroy_process_group()
        with pytest.raises(phalanx_torch.Error, match="rank 0 has left the group while it waited for a message from rank 1"):
            work.wait()
    else:
        with pytest.raises(phalanx_torch.Error, match="rank 0"):
            dist.barrier()


def test_a_receive_that_nobody_answers_does_not_keep_a_group(ranks):
    ranks(2, forgotten)


def too_many(rank):
    if rank == 0:
        works = [dist.isend(torch.zeros(1000), 1, tag=tag) for tag in (7, 5, 9)]
        with pytest.raises(phalanx_torch.Error, match="PHALANX_UNEXPECTED_BYTES"):
            while True:
                dist.all_reduce(torch.zeros(1))
        del works
    else:
        why = r"3 messages .* tag 9 from rank 0, need \d+ bytes, and at most 10000 are kept; their tags: 5, 7, 9"
        with pytest.raises(phalanx_torch.Error, match=why):
            dist.recv(torch.zeros(1000), 0, tag=1)


def test_what_is_kept_for_later_is_limited(ranks, monkeypatch):
    monkeypatch.setenv("PHALANX_UNEXPECTED_BYTES", "10000")
    ranks(2, too_many)


def without_limit(rank):
    with pytest.raises(ValueError, match='PHALANX_UNEXPECTED_BYTES is "much"'):
        phalanx_torch.init(rank=0, world_size=1)


def test_a_limit_must_be_a_number(monkeypatch):
    monkeypatch.setenv("PHALANX_UNEXPECTED_BYTES", "much")
    processes(1, without_limit)


def nothing(rank):
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        dist.group.WORLD.set_timeout(datetime.timedelta(seconds=1))
        with pytest.raises(phalanx_torch.Error, match="Timed out .*from any source") as caught:
            dist.recv(torch.zeros(1))
        assert caught.value.kind == "timeout"
        store.set("timed out", "1")
    else:
        # A call of its own could be the one that ends first.
        store.wait(["timed out"])


def test_a_time_out_of_a_receive_from_any_rank_is_one(ranks):
    ranks(2, nothing)


def too_late(rank):
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["tried"])
        dist.send(torch.ones(1), 0, tag=1)
        return
    awaited = torch.zeros(1)
    posted = dist.irecv(awaited, 1, tag=1)
    leaving = threading.Thread(target=dist.group.WORLD.shutdown)
    leaving.start()
    # The lanes to the others are closed first.
    sent = dist.isend(torch.zeros(1), 1, tag=9)
    while sent.exception() is None:
        time.sleep(0.01)
        sent = dist.isend(torch.zeros(1), 1, tag=9) if sent.is_completed() else sent
    time.sleep(0.1)
    with pytest.raises(phalanx_torch.Error, match="has been destroyed"):
        dist.irecv(torch.zeros(1), 1, tag=2).wait(datetime.timedelta(seconds=20))
    store.set("tried", "1")
    posted.wait()
    leaving.join()
    assert awaited.item() == 1.0


def test_a_receive_that_cannot_start_ends(ranks):
    ranks(2, too_late)


def drops_its_works(rank):
    """A result comes back also if nobody waits for the work, however the tensor lies."""
    for make in (lambda: torch.ones(4, 3).t(), lambda: torch.ones(3, 4, dtype=torch.int16)):
        tensor = make()
        dist.all_reduce(tensor, async_op=True)
        end = time.monotonic() + 60
        while (tensor != 2).any():
            assert time.monotonic() < end
            time.sleep(0.01)
    with torch.inference_mode():
        for asynchronous in [False] * 20 + [True] * 50:
            tensor = torch.full((4, 3), float(rank)).t()
            work = dist.all_reduce(tensor, async_op=asynchronous)
            if asynchronous:
                time.sleep(0.001)
                work.wait()
            assert (tensor == 1).all()


def copies_before_a_barrier(rank, how):
    """The copies take long: a barrier that did not wait for them would return before."""
    finish = process_group._Staged.finish

    def slow(staged):
        settle = finish(staged)
        return settle and (lambda: (time.sleep(0.5), settle()))

    process_group._Staged.finish = slow
    tensors = [torch.ones(4, 3).t(), torch.ones(3, 4, dtype=torch.int16), torch.full((2, 2), rank * 2 + 3, dtype=torch.int32)]
    for tensor in tensors[:2]:
        dist.all_reduce(tensor, async_op=True)
    dist.all_reduce(tensors[2], dist.ReduceOp.AVG, async_op=True)
    gathered = [torch.zeros(3, 4).t(), torch.zeros(3, 4).t()]
    dist.all_gather(gathered, torch.full((4, 3), rank + 1.0), async_op=True)
    if how == "barrier":
        dist.barrier()
    elif how == "async":
        dist.barrier(async_op=True).wait()
    elif how == "monitored":
        dist.group.WORLD.monitored_barrier()
    elif how == "destroy":
        dist.destroy_process_group()
    assert all((tensor == 2).all() for tensor in tensors[:2]) and (tensors[2] == 4).all()
    assert (gathered[0] == 1).all() and (gathered[1] == 2).all()
    # What has been copied is not kept.
    if how == "barrier":
        dist.all_reduce(tensors[0], async_op=True).wait()
        assert len(dist.group.WORLD._copies) <= 2


@pytest.mark.parametrize("how", ["barrier", "async", "monitored", "destroy"])
def test_results_of_earlier_calls_are_there_after_a_barrier(ranks, how):
    ranks(2, copies_before_a_barrier, how)


def test_results_come_back_without_a_wait(ranks):
    ranks(2, drops_its_works)
