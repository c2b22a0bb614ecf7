#!/usr/bin/env bash
# Installs the libtorch that tch wants, builds phalanx-tch against it, and runs its tests.
#
#     tch/check.sh               all of it
#     tch/check.sh cargo ...     one command with the same libtorch, in this folder: cargo test ddp::, ./compare.py mlp
#
# libtorch comes with PyPI's torch, into target/python, unless PHALANX_TCH_PYTHON names a Python that has torch of that version.
set -euo pipefail
. "$(dirname "$0")/../.ci/libtorch"
python=$(named_python PHALANX_TCH_PYTHON)
cd "$(dirname "$0")"
with_libtorch 2.13.0 "${CARGO_TARGET_DIR:-target}/python" "$python"

if [ $# != 0 ]; then
    exec "$@"
fi
cargo fmt --check
cargo clippy --locked --all-targets -- -D warnings
cargo build --locked --tests --examples
cargo test --locked --doc
# One thread a rank: the ranks of a test share few processors.
OMP_NUM_THREADS=1 cargo test --locked --tests
# The benchmark works; its figures are for those who ask for them.
./compare.py --steps 1 resnet
