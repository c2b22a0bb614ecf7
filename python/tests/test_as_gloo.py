"""Groups that are asked for as gloo's, and are ours."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from conftest import environment, free_port, processes
from torch.distributed import distributed_c10d as c10d

import phalanx_torch

WORLD = 2


def average():
    """The gradient that a rank has after a step of DDP; that of each alone is its rank + 1."""
    model = torch.nn.Linear(1, 1, bias=False)
    replica = torch.nn.parallel.DistributedDataParallel(model)
    replica(torch.full((1, 1), dist.get_rank() + 1.0)).sum().backward()
    return model.weight.grad.item()


def taken(rank, port, how):
    environment(rank, WORLD, port)
    phalanx_torch.as_gloo()
    # Again: nothing.
    phalanx_torch.as_gloo()
    assert dist.is_gloo_available() and dist.is_backend_available("gloo")
    dist.init_process_group(**how)
    world = dist.group.WORLD
    asked = how.get("backend", "undefined")
    assert isinstance(world, phalanx_torch.ProcessGroup)
    assert dist.get_backend() == asked.lower()
    # As functions of PyTorch ask.
    assert asked != "gloo" or dist.get_backend() is dist.Backend.GLOO
    assert world.name() == world._get_backend_name() == world._get_backend(torch.device("cpu")).name() == "gloo"
    assert dist.get_backend_config() == str(c10d.BackendConfig(c10d.Backend(asked)))
    assert average() == 1.5
    assert world._get_sequence_number_for_group() > 0
    pair = dist.new_group()
    alone = dist.new_group([1], backend="gloo")
    named = dist.new_group(backend="phalanx")
    assert isinstance(pair, phalanx_torch.ProcessGroup) and pair.name() == "gloo"
    assert dist.get_backend(pair) == asked.lower()
    assert dist.get_backend(named) == named.name() == "phalanx"
    if rank == 1:
        assert isinstance(alone, phalanx_torch.ProcessGroup) and dist.get_backend(alone) == "gloo"
    else:
        assert alone is dist.GroupMember.NON_GROUP_MEMBER
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=pair)
    assert tensor.tolist() == [2.0, 2.0]
    # PyTorch gives this to gloo alone.
    if asked == "gloo":
        dist.monitored_barrier()
    half = world.split_group([0, 1], group_name="half")
    assert half.name() == "gloo"
    half.shutdown()
    with pytest.raises(ValueError, match="asks for gloo on cuda"):
        dist.new_group(backend="cpu:gloo,cuda:gloo")
    dist.destroy_process_group()


@pytest.mark.parametrize("asked", ["gloo", "cpu:gloo", "cpu:gloo,cuda:nccl", None])
def test_ddp_trains_over_phalanx_as_gloo(asked):
    if torch.accelerator.is_available() and asked in (None, "cpu:gloo,cuda:nccl"):
        pytest.skip("with an accelerator there is a backend of its own")
    how = {"backend": asked} if asked else {}
    processes(WORLD, taken, free_port(), how)


def meshed(rank, port):
    from torch.distributed.device_mesh import init_device_mesh

    environment(rank, WORLD, port)
    phalanx_torch.as_gloo()
    # The mesh makes the group.
    mesh = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("one", "all"))
    assert isinstance(dist.group.WORLD, phalanx_torch.ProcessGroup)
    for name in ("one", "all"):
        assert isinstance(mesh[name].get_group(), phalanx_torch.ProcessGroup)
        assert mesh[name].get_group().name() == "gloo"
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=mesh["all"].get_group())
    assert tensor.item() == WORLD
    dist.destroy_process_group()


def test_a_mesh_is_of_phalanx_as_gloo():
    processes(WORLD, meshed, free_port())


def not_taken(rank, port):
    environment(rank, WORLD, port)
    dist.init_process_group("gloo")
    assert dist.get_backend() == dist.group.WORLD.name() == "gloo"
    assert not isinstance(dist.group.WORLD, phalanx_torch.ProcessGroup)
    assert isinstance(dist.group.WORLD._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
    assert average() == 1.5
    # Too late.
    with pytest.raises(RuntimeError, match="call it before init_process_group"):
        phalanx_torch.as_gloo()
    assert dist.new_group().name() == "gloo" and not hasattr(c10d._new_process_group_helper, "_phalanx_as_gloo")
    # gloo's group fails on a rank that still connects when another one leaves it.
    dist.barrier()
    dist.destroy_process_group()


def test_gloo_stays_gloo_without_it():
    processes(WORLD, not_taken, free_port())


def test_a_pytorch_made_otherwise_is_refused(monkeypatch):
    monkeypatch.setattr(c10d, "_new_process_group_helper", lambda world_size, backend: None)
    with pytest.raises(RuntimeError, match=r"has not, or has in another form: .*group_name.* It has been tested with"):
        phalanx_torch.as_gloo()
    monkeypatch.delattr(c10d, "_new_process_group_helper")
    with pytest.raises(RuntimeError, match="in another form: _new_process_group_helper"):
        phalanx_torch.as_gloo()
    monkeypatch.undo()
    monkeypatch.setattr(c10d, "is_gloo_available", lambda: False)
    with pytest.raises(RuntimeError, match="built without gloo"):
        phalanx_torch.as_gloo()


def made_otherwise(rank, port):
    environment(rank, 1, port)
    phalanx_torch.as_gloo()
    # As if PyTorch made gloo's group after all.
    dist.Backend.register_backend("other", lambda *arguments: dist.ProcessGroupGloo(*arguments), devices=["cpu"])
    dist.Backend._plugins["PHALANX"] = dist.Backend._plugins["OTHER"]
    with pytest.raises(RuntimeError, match="has made a ProcessGroupGloo where Phalanx's group was asked for"):
        dist.init_process_group("gloo")


def test_a_group_that_is_not_ours_does_not_pass():
    processes(1, made_otherwise, free_port())


PROGRAM = """
import sys
import torch
import torch.distributed as dist
loaded = [name for name in sys.modules if name.startswith("phalanx_torch")]
assert "phalanx_torch._registration" in loaded, "the entry point has not been loaded"
heavy = {"phalanx_torch._native", "phalanx_torch.process_group", "phalanx_torch.arrays"} & set(loaded)
assert not heavy, heavy
backend = sys.argv[1]
dist.init_process_group(backend, f"file://{sys.argv[2]}/store", rank=int(sys.argv[3]), world_size=2)
assert dist.get_backend() == backend
tensor = torch.ones(3)
dist.all_reduce(tensor)
assert tensor.tolist() == [2.0] * 3
import phalanx_torch
assert isinstance(dist.group.WORLD, phalanx_torch.ProcessGroup)
dist.destroy_process_group()
"""


def installed(folder):
    """A folder with the entry point as the installed package has it."""
    tomllib = pytest.importorskip("tomllib", reason="Python reads TOML since 3.11")
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["torch.backends"]
    metadata = folder / "installed" / "phalanx_torch_entry-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: phalanx-torch-entry\nVersion: 0\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[torch.backends]", *lines, ""]))
    return f"{metadata.parent}{os.pathsep}{Path(phalanx_torch.__file__).parents[1]}"


@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
def test_no_import_line_is_needed(tmp_path, backend):
    variables = {**os.environ, "PYTHONPATH": installed(tmp_path), "OMP_NUM_THREADS": "1", "PHALANX_AS_GLOO": str(int(backend == "gloo"))}
    started = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, backend, str(tmp_path), str(rank)], env=variables) for rank in range(WORLD)
    ]
    try:
        assert [process.wait(120) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()


def test_another_value_of_the_variable_is_refused(monkeypatch):
    from phalanx_torch import _registration

    monkeypatch.setenv("PHALANX_AS_GLOO", "yes")
    with pytest.raises(ValueError, match="PHALANX_AS_GLOO is 'yes'; give 1"):
        _registration.register()


def with_ignite(rank, port):
    import ignite.distributed as idist

    environment(rank, WORLD, port)
    os.environ["LOCAL_RANK"] = str(rank)
    phalanx_torch.as_gloo()
    idist.initialize("gloo")
    model = idist.auto_model(torch.nn.Linear(1, 1, bias=False))
    assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
    model(torch.full((1, 1), rank + 1.0)).sum().backward()
    assert model.module.weight.grad.item() == 1.5
    assert idist.backend() == "gloo" and isinstance(dist.group.WORLD, phalanx_torch.ProcessGroup)
    idist.finalize()


def test_ignite_averages():
    pytest.importorskip("ignite", reason="pytorch-ignite is not installed")
    processes(WORLD, with_ignite, free_port())


def with_accelerate(rank, port):
    environment(rank, WORLD, port)
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(WORLD))
    phalanx_torch.as_gloo()
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == WORLD and isinstance(dist.group.WORLD, phalanx_torch.ProcessGroup)
    model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
    accelerator.backward(model(torch.full((1, 1), rank + 1.0)).sum())
    assert model.module.weight.grad.item() == 1.5
    assert accelerator.gather(torch.tensor([float(rank)])).tolist() == [0.0, 1.0]
    dist.destroy_process_group()


def test_accelerate_makes_the_group():
    pytest.importorskip("accelerate")
    processes(WORLD, with_accelerate, free_port())


UNUSED = """
import sys, torch, torch.distributed as dist, phalanx_torch
case, folder, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
dist.init_process_group("phalanx", f"file://{folder}/store", rank=rank, world_size=2)
dist.barrier()
# Such groups are common, and no sign of anything.
other = dist.new_group()
if case == "used":
    dist.all_reduce(torch.ones(1))
if case == "other used":
    dist.all_reduce(torch.ones(1), group=other)
if case == "aborted":
    dist.group.WORLD.abort()
if case != "exit":
    dist.destroy_process_group(other)
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("case", ["destroyed", "exit", "used", "other used", "aborted"])
def test_a_job_that_has_exchanged_nothing_is_warned_once(tmp_path, case):
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", UNUSED, case, str(tmp_path), str(rank)], env=variables, stderr=subprocess.PIPE, text=True
        )
        for rank in range(WORLD)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    warned = [error.count("the 2 ranks of this job end without having exchanged any data") for error in errors]
    assert warned == ([1, 0] if case in ("destroyed", "exit") else [0, 0]), errors
    assert case == "aborted" or [process.returncode for process in started] == [0, 0], errors
    if sum(warned):
        assert "phalanx_torch.as_gloo()" in errors[0]
