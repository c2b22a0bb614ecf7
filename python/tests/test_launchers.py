"""Ways to start a program."""

import importlib.metadata
import os
import re
import subprocess
import sys

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
print(f"rank {group.rank} of {group.world_size} over {group.transport}", flush=True)
"""


def phalanx():
    """The command that the installed package brings."""
    files = importlib.metadata.files("phalanx-torch") or []
    found = [file.locate().resolve() for file in files if file.name == "phalanx" and file.parent.name == "bin"]
    assert found and os.access(found[0], os.X_OK), "the package has been installed without the command phalanx"
    return str(found[0])


def succeeds(command, program, path, transport="shm"):
    path.write_text(program)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, str(path)], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert f"rank {rank} of 2 over {transport}" in done.stdout, done.stdout + done.stderr


def test_torchrun(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    succeeds(command, PROGRAM, tmp_path / "program.py")


RESTARTED = """
import os, sys, torch, torch.distributed as dist, phalanx_torch
dist.init_process_group("phalanx")
group = dist.new_group()
tensor = torch.ones(3)
dist.all_reduce(tensor, group=group)
assert (tensor == 2).all()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(3)
print(f"rank {dist.get_rank()} of 2 over {dist.group.WORLD.transport}", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("how", ["static", "c10d"])
def test_torchrun_restarts(tmp_path, how):
    place = ["--master-port", str(free_port())] if how == "static" else ["--standalone"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1", *place]
    succeeds(command, RESTARTED, tmp_path / "program.py")


def test_spawn(tmp_path):
    succeeds([sys.executable], SPAWNED.replace("PORT", str(free_port())), tmp_path / "program.py")


ENDED = """
import torch, torch.distributed as dist, torch.multiprocessing as mp, phalanx_torch

def main(rank, how, path):
    store = dist.FileStore(path, 4)
    dist.init_process_group("phalanx", store=store, rank=rank, world_size=3)
    tensor = torch.full((3,), float(rank))
    dist.all_reduce(tensor)
    if rank == 0:
        # Without a word to the group.
        if how == "raises":
            raise KeyError("of rank zero")
        dist.isend(tensor, 1)
        return
    store.wait(["ended"])
    if how == "returns":
        # The others go on without it.
        if rank == 1:
            dist.send(tensor * 2, 2)
            dist.recv(tensor, 0)
        else:
            dist.recv(tensor, 1)
        assert tensor.tolist() == [3.0 * rank] * 3, tensor
        store.set(f"exchanged {rank}", "")
        store.wait(["exchanged 1", "exchanged 2"])
    try:
        dist.barrier()
    except phalanx_torch.Error as error:
        expected = "aborted" if how == "raises" else "peer_left"
        assert error.kind == expected and ("KeyError: 'of rank zero'" in str(error)) == (how == "raises"), error
        print(f"rank {rank - 1} of 2 over {dist.group.WORLD.transport}", flush=True)

if __name__ == "__main__":
    how, method, path = "HOW", "METHOD", "STORE"
    context = mp.get_context(method)
    ranks = [context.Process(target=main, args=(rank, how, path)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    ranks[0].join()
    dist.FileStore(path, 4).set("ended", "")
    for rank in ranks[1:]:
        rank.join()
    codes = [rank.exitcode for rank in ranks]
    assert codes == [int(how == "raises"), 0, 0], codes
"""


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("how", ["returns", "raises"])
def test_a_process_of_multiprocessing_says_how_it_has_ended(how, method, tmp_path):
    program = ENDED.replace("HOW", how).replace("METHOD", method).replace("STORE", str(tmp_path / "store"))
    succeeds([sys.executable], program, tmp_path / "program.py")


@pytest.mark.parametrize("program", [PROGRAM, ARRAYS], ids=["torch", "numpy"])
def test_phalanx_run(tmp_path, program):
    succeeds([phalanx(), "run", "--nproc-per-node", "2", "--", sys.executable], program, tmp_path / "program.py")


def test_the_command_is_of_the_same_version():
    shown = subprocess.run([phalanx(), "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout.split()[-1] == importlib.metadata.version("phalanx-torch")


STRANGER = """
import os, sys, torch, torch.distributed as dist, phalanx_torch
key = os.environ["PHALANX_JOB_KEY_FILE"]
if os.environ["RANK"] == "1":
    os.environ["PHALANX_JOB_KEY_FILE"] = sys.argv[1]
dist.init_process_group("phalanx")
tensor = torch.ones(3)
dist.all_reduce(tensor)
print("joined with another key", flush=True)
"""


def test_a_rank_without_the_job_s_key_does_not_join(tmp_path):
    key, program = tmp_path / "other.key", tmp_path / "program.py"
    subprocess.run([phalanx(), "keygen", str(key)], check=True, timeout=60)
    program.write_text(STRANGER)
    command = [phalanx(), "run", "-np", "2", sys.executable, str(program), str(key)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "joined with another key" not in done.stdout, done.stdout + done.stderr
    assert re.search("job'?s? key", done.stdout + done.stderr), done.stdout + done.stderr


def certificates(folder):
    subprocess.run([phalanx(), "certgen", str(folder), "localhost"], check=True, capture_output=True, timeout=60)
    return {"ca": folder / "ca.pem", "cert": folder / "localhost.pem", "key": folder / "localhost.key"}


@pytest.mark.parametrize("program", [PROGRAM, ARRAYS], ids=["torch", "numpy"])
def test_phalanx_run_with_certificates(tmp_path, monkeypatch, program):
    monkeypatch.setenv("PHALANX_TRANSPORT", "tcp")
    options = [f"--tls-{name}={path}" for name, path in certificates(tmp_path / "tls").items()]
    command = [phalanx(), "run", "--nproc-per-node", "2", *options, "--", sys.executable]
    succeeds(command, program, tmp_path / "program.py", "tcp")


UNCERTIFIED = """
import os, sys, torch.distributed as dist, phalanx_torch
if os.environ["RANK"] == "1":
    for name, path in zip(("CA", "CERT", "KEY"), sys.argv[1:]):
        os.environ["PHALANX_TLS_" + name] = path
dist.init_process_group("phalanx")
print("joined with a certificate of another CA", flush=True)
"""


def test_a_rank_with_a_certificate_of_another_ca_does_not_join(tmp_path):
    program, others = tmp_path / "program.py", certificates(tmp_path / "others").values()
    options = [f"--tls-{name}={path}" for name, path in certificates(tmp_path / "tls").items()]
    program.write_text(UNCERTIFIED)
    command = [phalanx(), "run", "-np", "2", *options, sys.executable, str(program), *map(str, others)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "joined with a certificate" not in done.stdout, done.stdout + done.stderr
    assert "a certificate of the same CA" in done.stdout + done.stderr, done.stdout + done.stderr
