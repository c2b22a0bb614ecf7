#!/usr/bin/env bash
# Builds the wheel and installs it into a virtual environment, and runs our tests, PyTorch's own and what is built on torch.distributed with it.
# PHALANX_TEST_PYTHON names a Python with torch, numpy, pytest, expecttest, accelerate, transformers, lightning, deepspeed, torchft and
# pytorch-ignite; pip brings maturin. A test that is skipped is shown with its reason.
set -euo pipefail
cd "$(dirname "$0")"
python=${PHALANX_TEST_PYTHON:-python3}

cargo fmt --check
cargo clippy --release --locked --all-targets -- -D warnings
# As `pip install ./python` does it.
rm -rf target/wheels
"$python" -m pip wheel -q --no-deps --wheel-dir target/wheels .
# What is installed is tested, and not what lies here: in an environment that has all else from the given Python.
environment=$PWD/target/environment
"$python" -m venv --clear "$environment"
folders=$("$environment/bin/python3" -c 'import site; print(site.getsitepackages()[0])')
"$python" -c 'import site; [print(f"import site; site.addsitedir({folder!r})") for folder in site.getsitepackages()]' > "$folders/given.pth"
python=$environment/bin/python3
"$python" -m pip install -q --no-deps target/wheels/phalanx_torch-*.whl
cd target
"$python" -c 'import phalanx_torch; print("phalanx_torch from", phalanx_torch.__path__[0])'
# The installed package needs no import line.
PHALANX_AS_GLOO=1 "$python" -c 'import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print("gloo is", type(dist.group.WORLD).__module__)
assert type(dist.group.WORLD).__module__.startswith("phalanx_torch")'
"$python" -m pytest -q -rs -p no:cacheprovider ../tests
"$python" ../run_torch_tests.py
"$python" ../tests/frameworks.py
"$python" ../tests/trainers.py
"$python" ../soak.py --cycles 200
"$python" ../soak.py --minutes 2 --ranks 3
