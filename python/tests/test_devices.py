"""Groups that have another backend for the tensors of other devices."""

import datetime
import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from conftest import SINCE_2_15, processes
from ports import free_port

import phalanx_torch
import phalanx_torch.horovod as hvd
from phalanx_torch.device_backend import DeviceBackend, takes_backends_in_python

WITHOUT_ACCELERATOR = """
import sys, torch, torch.distributed as dist, phalanx_torch
assert not torch.accelerator.is_available(), torch.accelerator.current_accelerator()
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("cpu:phalanx,cuda:nccl", f"file://{folder}/store", rank=rank, world_size=2)
assert isinstance(dist.group.WORLD, phalanx_torch.ProcessGroup)
tensor = torch.full((3,), rank + 1.0)
dist.all_reduce(tensor)
assert tensor.tolist() == [3.0] * 3
dist.destroy_process_group()
"""


def test_without_a_gpu_the_group_is_ours_alone(tmp_path):
    # Programs of their own, from which a GPU that this machine may have is hidden.
    hidden = {name: "" for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WITHOUT_ACCELERATOR, str(rank), str(tmp_path)], env={**os.environ, **hidden}
        )
        for rank in range(2)
    ]
    try:
        assert [process.wait(240) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()


def test_this_pytorch_takes_backends_in_python_since_2_15():
    # What the next test needs: if a later PyTorch has it in another form, this one says so.
    # 2.14 has it already, 2.9 has not.
    assert takes_backends_in_python() or not SINCE_2_15


def trained():
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 3))
    model(torch.full((2, 5), dist.get_rank() + 1.0)).sum().backward()
    return [parameter.grad.tolist() for parameter in model.parameters()]


def beside_another(rank, folder):
    # As on a machine with a GPU; gloo's part needs none until it gets a tensor that is there.
    torch.accelerator.is_available = lambda: True
    dist.init_process_group(
        "cpu:phalanx,cuda:gloo", f"file://{folder}/store", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=30)
    )
    group, other = dist.group.WORLD, 1 - rank
    assert type(group) is dist.ProcessGroup
    assert isinstance(group._get_backend(torch.device("cpu")), DeviceBackend)
    assert isinstance(group._get_backend(torch.device("cuda")), dist.ProcessGroupGloo)

    tensor = torch.full((3,), rank + 1.0)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [3.0] * 3
    # Rounded towards zero, as gloo does not.
    whole = torch.tensor([rank], dtype=torch.int32)
    dist.all_reduce(whole, dist.ReduceOp.AVG)
    assert whole.item() == 0
    matrix = torch.full((2, 3), rank + 1.0).t()
    work = dist.all_reduce(matrix, async_op=True)
    assert work.get_future().then(lambda done: matrix.sum().item()).wait() == 18.0
    work = dist.broadcast(tensor.fill_(rank), 1, async_op=True)
    work.wait()
    assert tensor.tolist() == [1.0] * 3
    dist.reduce(tensor, 0)
    assert tensor.tolist() == [2.0 - rank] * 3
    lists = [torch.zeros(2), torch.zeros(2)]
    dist.all_gather(lists, torch.full((2,), float(rank)))
    assert [one.tolist() for one in lists] == [[0.0, 0.0], [1.0, 1.0]]
    output = torch.zeros(4)
    dist.all_gather_into_tensor(output, torch.full((2,), float(rank)))
    assert output.tolist() == [0.0, 0.0, 1.0, 1.0]
    part = torch.zeros(2)
    dist.reduce_scatter_tensor(part, torch.arange(4.0))
    assert part.tolist() == [4.0 * rank, 4.0 * rank + 2]
    dist.reduce_scatter(part, [torch.ones(2), torch.zeros(2)])
    assert part.tolist() == [2.0 - 2 * rank] * 2
    dist.all_to_all_single(part, torch.arange(2.0) + 10 * rank)
    assert part.tolist() == [rank, 10.0 + rank]
    dist.all_to_all(lists, [torch.full((2,), 10.0 * rank), torch.full((2,), 10.0 * rank + 1)])
    assert [one[0].item() for one in lists] == [rank, 10.0 + rank]
    dist.gather(torch.full((2,), rank + 5.0), lists if rank == 0 else None)
    if rank == 0:
        assert [one[0].item() for one in lists] == [5.0, 6.0]
    dist.scatter(part, [torch.full((2,), 7.0), torch.full((2,), 8.0)] if rank == 0 else None)
    assert part.tolist() == [7.0 + rank] * 2
    # PyTorch hides our work: it can be waited for, and says neither whether it is done nor from which rank it is.
    work = dist.irecv(part) if rank == 0 else dist.isend(torch.full((2,), 5.0), 0)
    work.wait()
    assert not work.is_completed()
    if rank == 0:
        assert part.tolist() == [5.0] * 2
        with pytest.raises(RuntimeError, match="source"):
            work._source_rank()
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, torch.full((2,), float(rank)), other), dist.P2POp(dist.irecv, part, other)]
    )
    for work in works:
        work.wait()
    assert part.tolist() == [other] * 2
    if rank == 0:
        dist.send(part, 1, tag=4)
    else:
        dist.recv(part, 0, tag=4)
        assert part.tolist() == [1.0] * 2
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]
    dist.barrier()
    group.monitored_barrier()
    assert group._get_backend(torch.device("cpu")).options._timeout == datetime.timedelta(seconds=30)
    half = dist.new_group([rank for rank in range(2)])
    assert type(half) is dist.ProcessGroup
    dist.all_reduce(tensor.fill_(1.0), group=half)
    assert tensor.tolist() == [2.0] * 3
    assert trained() == [[[3.0] * 5] * 3, [2.0] * 3]
    # An error comes through PyTorch's own code.
    with pytest.raises(phalanx_torch.Error, match="all_reduce") as caught:
        dist.all_reduce(torch.zeros(3 + rank))
    assert caught.value.kind == "mismatch"
    dist.destroy_process_group()


@pytest.mark.skipif(not SINCE_2_15, reason="before PyTorch 2.15 a group in Python is the whole group")
def test_each_device_has_its_backend(tmp_path):
    processes(2, beside_another, tmp_path)


def _several_objects(rank):
    """Each call of objects once, and the operations as which PyTorch's tools see them."""
    places = [None, None]
    phalanx_torch.all_gather_object(places, rank)
    assert places == [0, 1]
    phalanx_torch.gather_object("x" * rank, places if rank == 0 else None)
    assert rank == 1 or places == ["", "x"]
    phalanx_torch.broadcast_object_list(places, 1)
    assert places == [0, 1]
    phalanx_torch.scatter_object_list(places, ["a", "b"] if rank == 0 else None)
    assert places[0] == "ab"[rank]
    if rank == 0:
        phalanx_torch.send_object_list(places, 1)
        assert phalanx_torch.recv_object_list(places) == 1
    else:
        assert phalanx_torch.recv_object_list(places, 0) == 0
        phalanx_torch.send_object_list(places, 0)
    messages = ["send", "recv_any_source_"] if rank == 0 else ["recv_", "send"]
    return ["_allgather_base_", "gather_", "broadcast_", "scatter_", *messages]


def objects_seen(rank, folder):
    from torch._C import _distributed_c10d as c10d
    from torch.utils._python_dispatch import TorchDispatchMode

    torch.accelerator.is_available = lambda: True
    dist.init_process_group(
        "cpu:phalanx,cuda:gloo", f"file://{folder}/store", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=30)
    )
    group, seen, hooked = dist.group.WORLD, [], []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            seen.append(str(function))
            return function(*arguments, **(options or {}))

    group.register_pre_hook(1, lambda given: hooked.append(given.name.name))
    with Mode():
        operations = _several_objects(rank)
    # Those of PyTorch's own functions beside ours are none.
    assert [name for name in seen if name.startswith("c10d.")] == [f"c10d.{name}.default" for name in operations]
    assert hooked == [name.replace("any_source_", "").strip("_").upper() for name in operations], hooked
    group.unregister_pre_hook(1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        _several_objects(rank)
    names = [event.name for event in profiled.events() if event.name.startswith("phalanx:")]
    assert names[:2] == ["phalanx:all_gather_object", "phalanx:gather_object"] and len(names) == 6, names
    # Nobody watches but the recorder; and an error of ours is as it is.
    _several_objects(rank)
    with pytest.raises(ValueError, match="a list of 1, and the group has 2 ranks"):
        phalanx_torch.all_gather_object([None], rank)
    entries = json.loads(c10d._dump_fr_trace_json(backend="phalanx")).get("entries", [])
    gathered = [entry for entry in entries if "all_gather" in entry["profiling_name"]]
    assert len(gathered) == 3, [entry["profiling_name"] for entry in entries]
    dist.destroy_process_group()


@pytest.mark.skipif(not SINCE_2_15, reason="before PyTorch 2.15 a group in Python is the whole group")
def test_tools_see_objects_in_a_group_of_several_backends(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    processes(2, objects_seen, tmp_path)


def with_default_device(rank, folder):
    # What this package makes for itself is on the CPU, wherever the program's tensors are made.
    torch.set_default_device("meta")
    dist.init_process_group("phalanx", f"file://{folder}/store", rank=rank, world_size=2)
    cpu = torch.device("cpu")
    sparse = torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.int64, device=cpu), torch.ones(1, device=cpu), (3,), device=cpu)
    dist.all_reduce(sparse)
    assert sparse.to_dense().tolist() == [2.0, 0.0, 0.0]
    with torch.profiler.profile():
        dist.barrier()
    with pytest.raises(TypeError, match="is on meta; phalanx moves tensors on the CPU"):
        dist.all_reduce(torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1), (3,)))
    objects = [None, None]
    dist.all_gather_object(objects, rank)
    assert objects == [0, 1]
    dist.destroy_process_group()
    hvd.init()
    assert hvd.broadcast_object({"rank": hvd.rank()}, 1) == {"rank": 1}
    assert hvd.allgather_object("x" * hvd.rank()) == ["", "x"]
    splits = torch.ones(2, dtype=torch.int32, device=cpu)
    assert hvd.alltoall(torch.full((2,), float(rank), device=cpu), splits)[0].tolist() == [0.0, 1.0]
    weight = torch.nn.Parameter(torch.full((2, 2), float(rank), device=cpu))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    if rank == 0:
        weight.grad = torch.ones(2, 2, device=cpu)
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert optimizer.state[weight]["momentum_buffer"].tolist() == [[1.0] * 2] * 2
    hvd.shutdown()


def test_a_default_device_of_the_program_is_none_of_ours(tmp_path):
    port = free_port()

    def body(rank, folder):
        variables = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in variables.items()})
        with_default_device(rank, folder)

    processes(2, body, tmp_path)
