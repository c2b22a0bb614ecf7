"""Ways to start a program."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import free_port

PROGRAM = """
import torch, torch.distributed as dist, phalanx_torch
dist.init_process_group("phalanx")
tensor = torch.full((1000,), float(dist.get_rank()))
dist.all_reduce(tensor)
assert (tensor == 1).all()
print(f"rank {dist.get_rank()} of {dist.get_world_size()} over {dist.group.WORLD.transport}", flush=True)
dist.destroy_process_group()
"""

SPAWNED = """
import torch, torch.distributed as dist, torch.multiprocessing as mp, phalanx_torch

def main(rank):
    dist.init_process_group("phalanx", "tcp://127.0.0.1:PORT", rank=rank, world_size=2)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert (tensor == 2).all()
    print(f"rank {rank} of 2 over {dist.group.WORLD.transport}", flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(main, nprocs=2)
"""

ARRAYS = """
import numpy, phalanx_torch
group = phalanx_torch.init()
array = numpy.ones(3)
group.all_reduce(array)
assert (array == group.world_size).all()
print(f"rank {group.rank} of {group.world_size} over shm", flush=True)
"""


def phalanx():
    """The command; `.ci/full` names it."""
    built = Path(__file__).parents[2] / "target"
    found = [os.environ.get("PHALANX"), *(built / kind / "phalanx" for kind in ("debug", "release")), shutil.which("phalanx")]
    return next((str(path) for path in found if path and Path(path).exists()), None)


def succeeds(command, program, path):
    path.write_text(program)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, str(path)], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert f"rank {rank} of 2 over shm" in done.stdout, done.stdout + done.stderr


def test_torchrun(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    succeeds(command, PROGRAM, tmp_path / "program.py")


def test_spawn(tmp_path):
    succeeds([sys.executable], SPAWNED.replace("PORT", str(free_port())), tmp_path / "program.py")


@pytest.mark.skipif(not phalanx(), reason="the command phalanx has not been built: cargo build -p phalanx-cli")
@pytest.mark.parametrize("program", [PROGRAM, ARRAYS], ids=["torch", "numpy"])
def test_phalanx_run(tmp_path, program):
    succeeds([phalanx(), "run", "--nproc-per-node", "2", "--", sys.executable], program, tmp_path / "program.py")
