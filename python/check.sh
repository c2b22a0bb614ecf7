#!/usr/bin/env bash
# Builds the wheel and installs it into a virtual environment, and runs our tests, PyTorch's own and what is built on torch.distributed with it.
# PHALANX_TEST_PYTHON names a Python with torch, numpy, pytest, expecttest and maturin.
set -euo pipefail
cd "$(dirname "$0")"
python=${PHALANX_TEST_PYTHON:-python3}

cargo fmt --check
cargo clippy --release --locked --all-targets -- -D warnings
cargo build --locked --manifest-path ../Cargo.toml -p phalanx-cli
export PHALANX=$PWD/../${CARGO_TARGET_DIR:-target}/debug/phalanx

"$python" -m maturin build --release --locked --interpreter "$python" --out target/wheels
# What is installed is tested, and not what lies here.
installed=$PWD/target/installed
rm -rf "$installed"
"$python" -m pip install -q --no-deps --target "$installed" target/wheels/phalanx_torch-*.whl
export PYTHONPATH=$installed
cd target
"$python" -c 'import phalanx_torch; print("phalanx_torch from", phalanx_torch.__path__[0])'
"$python" -m pytest -q -p no:cacheprovider ../tests
"$python" ../run_torch_tests.py
"$python" ../tests/frameworks.py
