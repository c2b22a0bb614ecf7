#!/usr/bin/env bash
# Installs the libtorch that tch wants, builds phalanx-tch against it, and runs its tests: on processors, and on a stand-in for CUDA devices.
#
#     tch/check.sh               all of it
#     tch/check.sh cargo ...     one command with the same libtorch, in this folder: cargo test ddp::, ./compare.py mlp
#     tch/check.sh cuda cargo .. one command whose tests run on the stand-in: cuda cargo test ddp::
#
# libtorch comes with PyPI's torch, into target/python, unless PHALANX_TCH_PYTHON names a Python that has torch of that version.
set -euo pipefail
. "$(dirname "$0")/../.ci/libtorch"
python=$(named_python PHALANX_TCH_PYTHON)
cd "$(dirname "$0")"
target=${CARGO_TARGET_DIR:-target}
with_libtorch 2.13.0 "$target/python" "$python"

# Tests that cargo runs from here on get the stand-in (tests/stand_in) in place of libtorch_cuda.so. One runs after the other: in the thread that
# libtorch has for a device a rank of one must not wait for ranks of another.
on_stand_in() {
    local torch
    torch=$(python3 -c 'import torch; print(torch.__path__[0])')
    mkdir -p "$target/stand_in"
    folder=$(cd "$target/stand_in" && pwd)
    local sources=../crates/phalanx-nccl/tests/stand_in c=(-std=gnu11 -O1 -fPIC -shared -Wall -Wextra -Werror -pthread)
    local beside=(-L"$folder" -l:libcuda.so.1 "-Wl,-rpath,\$ORIGIN")
    "${CC:-cc}" "${c[@]}" -o "$folder/libcuda.so.1" "$sources/cuda.c"
    "${CC:-cc}" "${c[@]}" -o "$folder/libnccl.so.2" "$sources/nccl.c" "${beside[@]}"
    library=$folder/libtorch_cuda.so
    if [ ! "$library" -nt tests/stand_in/cuda.cpp ]; then
        "${CXX:-c++}" -std=c++20 -O1 -fPIC -shared -Wall -Wextra -Werror -isystem "$torch/include" \
            tests/stand_in/cuda.cpp -o "$library" -L"$torch/lib" -ltorch_cpu -lc10 "${beside[@]}"
    fi
    local host
    host=$(rustc -vV | sed -n 's/^host: //p' | tr 'a-z-' 'A-Z_')
    local libraries="PHALANX_CUDA_LIBRARY=$folder/libcuda.so.1 PHALANX_NCCL_LIBRARY=$folder/libnccl.so.2"
    export "CARGO_TARGET_${host}_RUNNER=env LD_PRELOAD=$library $libraries PHALANX_TEST_DEVICE=cuda RUST_TEST_THREADS=1"
}

if [ "${1:-}" = cuda ]; then
    shift
    on_stand_in
    "$@"
    exit
elif [ $# != 0 ]; then
    exec "$@"
fi
cargo fmt --check
cargo clippy --locked --all-targets -- -D warnings
cargo build --locked --tests --examples
cargo test --locked --doc
# One thread a rank: the ranks of a test share few processors.
OMP_NUM_THREADS=1 cargo test --locked --tests
# No list with &&, in which bash would go on after a stand-in that does not compile, with that of an earlier run.
(
    on_stand_in
    OMP_NUM_THREADS=1 cargo test --locked --test it --test jobs
    ../.ci/ran cargo test --locked --lib over_nccl_ -- --ignored
)
# The benchmark works; its figures are for those who ask for them.
./compare.py --steps 1 resnet
