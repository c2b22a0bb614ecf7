#!/usr/bin/env python3
"""What of PyTorch's distributed training works over this backend on the CPU: runs each, and prints a table.

    python tests/frameworks.py            all, with 2 ranks
    python tests/frameworks.py --only fsdp

Each case compares its result with that of one process, or of all ranks. The exit status is 0 if all work but those
in KNOWN.
"""

import argparse
import contextlib
import sys
import tempfile
import time
import traceback

import torch
import torch.distributed as dist
from conftest import processes
from torch import nn

import phalanx_torch  # noqa: F401

WORLD = 2
STEPS = 4


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 8, generator=generator)


def alone(make=lambda parameters: torch.optim.SGD(parameters, lr=0.1)):
    """The parameters that one process gets with the batches of all ranks."""
    model = network()
    optimizer = make(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.cat([batch(rank, step) for rank in range(WORLD)])).square().mean().backward()
        optimizer.step()
    return model.state_dict()


def train(rank, model, optimizer):
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()


def equals(found, expected, tolerance=1e-5):
    for name, tensor in expected.items():
        other = found[name]
        torch.testing.assert_close(getattr(other, "full_tensor", lambda: other)(), tensor, atol=tolerance, rtol=tolerance)


def ddp(rank, **options):
    model = network()
    replica = nn.parallel.DistributedDataParallel(model, **options)
    train(rank, replica, torch.optim.SGD(replica.parameters(), lr=0.1))
    equals(model.state_dict(), alone())


def ddp_no_sync(rank):
    model = network()
    replica = nn.parallel.DistributedDataParallel(model)
    with replica.no_sync():
        replica(batch(rank, 0)).square().mean().backward()
    replica(batch(rank, 1)).square().mean().backward()
    mine = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    both = [torch.empty_like(mine) for _ in range(WORLD)]
    dist.all_gather(both, mine)
    torch.testing.assert_close(both[0], both[1])


def ddp_hook(rank, name):
    from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType

    model = network()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    replica = nn.parallel.DistributedDataParallel(model)
    # PowerSGD begins after 1,000 steps unless it is told otherwise, and is all_reduce until then.
    options = {"start_powerSGD_iter": 2} if "POWER_SGD" in name else {}
    DDPCommHookType[name].value(model=replica, state=None, **options)
    train(rank, replica, torch.optim.SGD(replica.parameters(), lr=0.1))
    mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    both = [torch.empty_like(mine) for _ in range(WORLD)]
    dist.all_gather(both, mine)
    assert torch.equal(both[0], both[1])
    assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)), "nothing was learned"
    exact, found = alone(), model.state_dict()
    if options:
        # The gradients of weights are products of a few columns, and not the averages themselves.
        assert not torch.allclose(found["0.weight"], exact["0.weight"], atol=1e-6), "PowerSGD has not begun"
        equals(found, exact, 0.02)
    else:
        equals(found, exact, {"ALLREDUCE": 1e-6, "FP16_COMPRESS": 2e-4, "BF16_COMPRESS": 2e-3}[name])


def join(rank):
    from torch.distributed.algorithms.join import Join

    model = nn.parallel.DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):
        for step in range(2 + 3 * rank):
            optimizer.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            optimizer.step()
    mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    both = [torch.empty_like(mine) for _ in range(WORLD)]
    dist.all_gather(both, mine)
    assert torch.equal(both[0], both[1])


def zero(rank):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = network()
    replica = nn.parallel.DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(replica.parameters(), torch.optim.AdamW, lr=0.01)
    train(rank, replica, optimizer)
    equals(model.state_dict(), alone(lambda parameters: torch.optim.AdamW(parameters, lr=0.01)))
    optimizer.consolidate_state_dict(0)


def fsdp2(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(rank, model, torch.optim.SGD(model.parameters(), lr=0.1))
    equals(model.state_dict(), alone())


def dtensor(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (WORLD,))
    torch.manual_seed(0)
    one, other = torch.randn(6, 8), torch.randn(8, 5)
    left, right = distribute_tensor(one, mesh, [Shard(1)]), distribute_tensor(other, mesh, [Shard(0)])
    product = left @ right
    assert product.placements == (Partial(),)
    torch.testing.assert_close(product.redistribute(mesh, [Replicate()]).to_local(), one @ other)
    torch.testing.assert_close(product.redistribute(mesh, [Shard(0)]).full_tensor(), one @ other)
    moved = distribute_tensor(one, mesh, [Shard(0)]).redistribute(mesh, [Shard(1)])
    torch.testing.assert_close(moved.full_tensor(), one)


def tensor_parallel(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (WORLD,))
    model, single = network(), network()
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    given = batch(0, 0)
    torch.testing.assert_close(model(given), single(given))
    model(given).square().mean().backward()
    single(given).square().mean().backward()
    torch.testing.assert_close(model[0].weight.grad.full_tensor(), single[0].weight.grad)


def pipelining(rank):
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    model = network()
    part = model[:2] if rank == 0 else model[2:]
    stage = PipelineStage(part, rank, WORLD, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=3, loss_fn=lambda output, target: output.square().mean())
    given = batch(0, 0)
    if rank == 0:
        schedule.step(given)
    else:
        torch.testing.assert_close(schedule.step(target=torch.zeros(6, 4)), network()(given))
    single = network()
    single(given).square().mean().backward()
    expected = single[0] if rank == 0 else single[2]
    torch.testing.assert_close(part[0].weight.grad, expected.weight.grad)


def checkpoint(rank, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))
    model = fully_shard(network(), mesh=mesh)
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/sharded")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=f"{folder}/sharded")
    equals(state["model"], network().state_dict())


def functional(rank):
    import torch.distributed._functional_collectives as funcol

    given = torch.full((2, 3), rank + 1.0)
    assert (funcol.all_reduce(given, "sum", dist.group.WORLD) == 3).all()
    assert funcol.all_gather_tensor(given, 0, dist.group.WORLD).shape == (4, 3)
    assert (funcol.reduce_scatter_tensor(given, "sum", 0, dist.group.WORLD) == 3).all()


@contextlib.contextmanager
def compiles():
    """Fails if nothing has been compiled meanwhile: what Dynamo cannot compile it runs as it is, and that works, too."""
    from torch._dynamo.utils import counters

    counters.clear()
    yield
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0, f"{graphs} graphs have been compiled; {dict(counters)}"


def compiled(rank):
    import torch.distributed._functional_collectives as funcol

    def step(tensor):
        total = funcol.all_reduce(tensor * 2, "sum", dist.group.WORLD)
        return funcol.all_gather_tensor(total + 1, 0, dist.group.WORLD)

    given = torch.full((2, 3), rank + 1.0)
    with compiles():
        result = torch.compile(step, fullgraph=True)(given)
    torch.testing.assert_close(result, step(given))


class Written(nn.Module):
    """A module whose forward is the program's. Of PyTorch's own ones alone Dynamo compiles nothing under DDP, over any backend."""

    def __init__(self):
        super().__init__()
        self.layers = network()

    def forward(self, given):
        return self.layers(given) * 1.0


def compiled_ddp(rank):
    written = Written()
    model = written.layers
    replica = nn.parallel.DistributedDataParallel(written)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
    with compiles():
        train(rank, torch.compile(replica), optimizer)
    equals(model.state_dict(), alone())


CASES = {
    "DDP": ddp,
    "DDP(static_graph=True)": lambda rank: ddp(rank, static_graph=True),
    "DDP(find_unused_parameters=True)": lambda rank: ddp(rank, find_unused_parameters=True),
    "DDP(gradient_as_bucket_view=True)": lambda rank: ddp(rank, gradient_as_bucket_view=True),
    "DDP(bucket_cap_mb=small)": lambda rank: ddp(rank, bucket_cap_mb=0.0001),
    "DDP.no_sync": ddp_no_sync,
    **{
        f"DDP hook {name}": (lambda name: lambda rank: ddp_hook(rank, name))(name)
        for name in ("ALLREDUCE", "FP16_COMPRESS", "BF16_COMPRESS", "POWER_SGD", "POWER_SGD_RANK2")
    },
    "Join (uneven inputs)": join,
    "ZeroRedundancyOptimizer": zero,
    "FSDP2 (fully_shard)": fsdp2,
    "DTensor": dtensor,
    "tensor parallel": tensor_parallel,
    "pipelining (GPipe)": pipelining,
    "distributed checkpoint": checkpoint,
    "functional collectives": functional,
    "torch.compile, functional collectives": compiled,
    "torch.compile, DDP": compiled_ddp,
}

# What does not work, and why.
KNOWN = {}


def one(rank, name, folder):
    dist.init_process_group("phalanx", f"file://{folder}/store", rank=rank, world_size=WORLD)
    case = CASES[name]
    case(rank, folder) if case is checkpoint else case(rank)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    arguments = parser.parse_args()
    names = [name for name in CASES if arguments.only.lower() in name.lower()]
    if not names:
        sys.exit(f"no case has {arguments.only!r} in its name: {', '.join(CASES)}")
    failed = 0
    for name in names:
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                processes(WORLD, one, name, folder)
                outcome = "works"
                if name in KNOWN:
                    failed += 1
                    outcome = "works, and KNOWN says that it does not"
            except AssertionError:
                outcome = f"does not work: {KNOWN[name]}" if name in KNOWN else "FAILS"
                if name not in KNOWN:
                    failed += 1
                    print(traceback.format_exc(), file=sys.stderr)
        print(f"| {name:40} | {outcome} | {time.monotonic() - begin:.1f} s |", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
