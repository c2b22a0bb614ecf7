#!/usr/bin/env bash
# Builds the adapter for candle, runs its tests, and trains its example on two processes, which then go on from their checkpoint.
set -euo pipefail
cd "$(dirname "$0")"
cargo fmt --check
cargo clippy --locked --all-targets -- -D warnings
cargo test --locked --lib --tests --examples
cargo test --locked --doc
cargo build --locked --example train
cargo build --locked --manifest-path ../../Cargo.toml -p phalanx-cli

target() { cargo metadata --locked --no-deps --format-version 1 "$@" | sed 's/.*"target_directory":"\([^"]*\)".*/\1/'; }
phalanx=$(target --manifest-path ../../Cargo.toml)/debug/phalanx
train=$(target)/debug/examples/train
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
first=$("$phalanx" run --nproc-per-node 2 -- "$train" "$folder")
echo "$first"
case $first in *"ranks 2"*) ;; *) exit 1 ;; esac
# It goes on from its last checkpoint, after which there is nothing to train: the model is the one that was saved.
resumed=$("$phalanx" run --nproc-per-node 2 -- "$train" "$folder")
[ "$resumed" = "$first" ] || { echo "a resumed run ends with: $resumed" >&2; exit 1; }
