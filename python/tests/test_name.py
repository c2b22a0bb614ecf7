"""What a program is told that has two packages with a backend of our name."""

import os
import subprocess
import sys

PROGRAM = """
import torch.distributed as dist
dist.Backend.register_backend("phalanx", lambda *_: None, devices=["cpu"])
import phalanx_torch
"""


def test_a_name_that_another_package_has_is_refused():
    environment = dict(os.environ, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=90, env=environment)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "RuntimeError: phalanx_torch: another package has registered a backend of the name phalanx: __main__" in last, done.stderr
    assert "uninstall one of the two" in last and "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in last, done.stderr


def test_ours_may_be_imported_twice():
    program = "import sys, phalanx_torch, torch\ndel sys.modules['phalanx_torch']\nimport phalanx_torch\nprint('twice')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=90)
    assert done.stdout == "twice\n", done.stderr
