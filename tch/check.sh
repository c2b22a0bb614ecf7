#!/usr/bin/env bash
# Installs the libtorch that tch wants, builds phalanx-tch against it, and runs its tests.
#
#     tch/check.sh               all of it
#     tch/check.sh cargo ...     one command with the same libtorch, in this folder: cargo test ddp::, ./compare.py mlp
#
# libtorch comes with PyPI's torch, into target/python, unless PHALANX_TCH_PYTHON names a Python that has torch of that version.
set -euo pipefail
# Named from where the caller stands.
python=${PHALANX_TCH_PYTHON:-}
case $python in
    '' | /*) ;;
    */*) python=$PWD/$python ;;
    *) python=$(command -v "$python") || { echo "PHALANX_TCH_PYTHON=$PHALANX_TCH_PYTHON is not in PATH" >&2; exit 1; } ;;
esac
cd "$(dirname "$0")"
torch=2.13.0

target=${CARGO_TARGET_DIR:-target}
[ "${target#/}" != "$target" ] || target=$PWD/$target
if [ -z "$python" ]; then
    python=$target/python/bin/python3
    # An installation that was interrupted is done again.
    if ! "$python" -c 'import torch, numpy, setuptools' 2>/dev/null; then
        python3 -m venv --clear "$target/python"
        # tch asks torch.utils.cpp_extension where the headers are, which needs setuptools.
        "$python" -m pip install -q "torch==$torch" numpy setuptools
    fi
fi
"$python" -c "import torch; found = torch.__version__; assert found.split('+')[0] == '$torch', f'torch is {found}, tch wants $torch'"
# torch-sys asks the first python3 of the path.
export LIBTORCH_USE_PYTORCH=1 PATH=$(dirname "$python"):$PATH
LD_LIBRARY_PATH=$("$python" -c 'import torch; print(torch.__path__[0])')/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export LD_LIBRARY_PATH
unset VIRTUAL_ENV

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
