#!/usr/bin/env bash
# What can be checked of 64-bit ARM on another processor: the core and the Python package's library compile for it; phalanx-sys's tests of
# shared memory, futexes and processes, and two ranks over shared memory and over TCP, run under qemu-user.
#
#     apt install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user
#     rustup target add aarch64-unknown-linux-gnu
#     tests/aarch64/check.sh
#
# `tests/aarch64/wheel.sh check` runs it in a Debian of its own, without rustup.
#
# qemu translates ARM's instructions into the host's. On x86 its memory stays as strongly ordered as the host's: that our orderings are
# enough for ARM's is what loom's models show, and not this.
set -euo pipefail
cd "$(dirname "$0")/../.."

triple=aarch64-unknown-linux-gnu
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")/aarch64
export CARGO_TARGET_DIR=$target CARGO_BUILD_TARGET=$triple
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu"

cargo test -p phalanx-sys --locked
cargo build -p phalanx --example launched --locked
# Two processes that meet as under any launcher.
pids=() folder=
clean() {
    for pid in "${pids[@]}"; do kill "$pid" 2> /dev/null || true; done
    [ -z "$folder" ] || rm -rf "$folder"
}
trap clean EXIT
launched=("$target/$triple/debug/examples/launched" 2)
for transport in shm tcp; do
    folder=$(mktemp -d)
    pids=()
    for rank in 0 1; do
        PHALANX_TRANSPORT=$transport PHALANX_RENDEZVOUS=file://$folder/store RANK=$rank WORLD_SIZE=2 \
            timeout 120 qemu-aarch64 -L /usr/aarch64-linux-gnu "${launched[@]}" &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid"; done
    pids=()
    rm -r "$folder"
    echo "two ranks over $transport"
done
# The Python package's library: one for every Python, so that none is needed for ARM.
(cd python && cargo check --locked)
