#!/usr/bin/env bash
# What can be checked of 64-bit ARM on another processor: the core and the Python package's library compile for it, and phalanx-sys's
# tests of shared memory, futexes and processes run under qemu-user.
#
#     apt install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user
#     rustup target add aarch64-unknown-linux-gnu
#     tests/aarch64/check.sh
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
cargo check -p phalanx --locked
# The Python package's library: one for every Python, so that none is needed for ARM.
(cd python && cargo check --release --locked)
