"""What the installed package says of itself, and what it imports."""

import copy
import importlib.metadata
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import phalanx_torch
import phalanx_torch.horovod as horovod

MANIFEST = Path(__file__).resolve().parent.parent / "Cargo.toml"
PROJECT = MANIFEST.with_name("pyproject.toml")


def run(program, **variables):
    """Runs `program` in an interpreter of its own, and returns its last line."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=90, env={**os.environ, **variables}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_the_version_is_the_crates():
    version = next(line for line in MANIFEST.read_text().splitlines() if line.startswith("version = "))
    assert f'version = "{phalanx_torch.__version__}"' == version
    assert importlib.metadata.version("phalanx-torch") == phalanx_torch.__version__


def test_the_metadata_is_that_of_a_release():
    metadata = importlib.metadata.metadata("phalanx-torch")
    classifiers = metadata.get_all("Classifier")
    assert "Operating System :: POSIX :: Linux" in classifiers and "Typing :: Typed" in classifiers
    assert metadata["Requires-Python"] == ">=3.10"
    # The Pythons that are named are those with which the page says that all tests have passed.
    named = set(re.findall(r":: Python :: (3\.\d+)", PROJECT.read_text()))
    page = PROJECT.parent.with_name("docs") / "python-package.md"
    rows = [row.split("|") for row in page.read_text().splitlines() if "| all of `python/tests` |" in row]
    assert named == {version for row in rows for version in re.findall(r"3\.\d+", row[2])}
    assert metadata["License-Expression"] == "MIT OR Apache-2.0"
    assert sorted(metadata.get_all("License-File")) == ["LICENSE-APACHE", "LICENSE-MIT"]
    # There are some once the project has an address.
    urls = {url.split(",")[0] for url in metadata.get_all("Project-URL") or ()}
    assert urls >= ({"Documentation", "Issues", "Repository"} if "[project.urls]" in PROJECT.read_text() else set())
    assert any(requirement.startswith("numpy") for requirement in metadata.get_all("Requires-Dist"))
    files = {str(file) for file in importlib.metadata.files("phalanx-torch")}
    assert {"phalanx_torch/py.typed", "phalanx_torch/_native.pyi"} <= files
    for licence in ("LICENSE-APACHE", "LICENSE-MIT"):
        assert any(file.endswith(f"dist-info/licenses/{licence}") for file in files), licence


WITHOUT_TORCH = """
import sys, pickle, phalanx_torch, phalanx_torch.arrays
with phalanx_torch.init(timeout=5.0) as group:
    group.all_reduce(bytearray(4))
    group._native.abort("a test")
    try:
        group.barrier()
    except phalanx_torch.Error as error:
        assert error.kind == "aborted" and type(error) is phalanx_torch.Error, error
        copy = pickle.loads(pickle.dumps(error))
        assert (copy.kind, str(copy)) == (error.kind, str(error)), copy
assert "ProcessGroup" in dir(phalanx_torch)
print([name for name in sys.modules if name.partition(".")[0] == "torch"])
"""


def test_arrays_import_no_torch():
    pytest.importorskip("numpy")
    assert run(WITHOUT_TORCH) == "[]"


# PyTorch looks for backends itself, or does not.
@pytest.mark.parametrize("autoload", ["0", "1"])
def test_the_backend_is_there_when_torch_comes_later(autoload):
    program = """
import sys, pickle, phalanx_torch
assert "torch" not in sys.modules
import torch, torch.distributed as dist
assert "phalanx" in dist.Backend.backend_list
dist.init_process_group("phalanx", store=dist.HashStore(), rank=0, world_size=1)
dist.group.WORLD.abort()
try:
    dist.barrier()
except phalanx_torch.Error as error:
    assert isinstance(error, dist.DistBackendError), type(error).__mro__
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, dist.DistBackendError) and copy.kind == "aborted", copy
print("done")
"""
    assert run(program, TORCH_DEVICE_BACKEND_AUTOLOAD=autoload) == "done"


def test_the_backend_is_there_when_a_program_asks_first_whether_there_is_a_torch():
    program = """
import importlib.util, sys, phalanx_torch
# As transformers and accelerate do it.
assert importlib.util.find_spec("torch") is not None and importlib.util.find_spec("torch") is not None
assert "torch" not in sys.modules
del sys.modules["phalanx_torch"]
import phalanx_torch
import torch.distributed as dist
assert "phalanx" in dist.Backend.backend_list
assert not [finder for finder in sys.meta_path if type(finder).__module__ == "phalanx_torch._registration"]
print("done")
"""
    assert run(program, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "done"


class OwnError(phalanx_torch.Error):
    pass


def test_errors_keep_their_class_on_the_way_to_another_process():
    for kind in (OwnError, horovod.HorovodInternalError):
        error = kind("the cause", "timeout", 3)
        for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
            assert type(other) is kind
            assert (other.kind, other.peer, str(other)) == ("timeout", 3, "phalanx: Timed out at the cause")
    error = phalanx_torch.Error("the cause", kind="mismatch", peer=3)
    assert (error.kind, error.peer, str(error)) == ("mismatch", 3, "the cause")


def test_errors_are_of_pytorchs_class():
    error = phalanx_torch.Error("the cause", "timeout", 3)
    assert isinstance(error, dist.DistBackendError) and isinstance(error, phalanx_torch.Error)
    assert (error.kind, error.peer, str(error)) == ("timeout", 3, "phalanx: Timed out at the cause")
