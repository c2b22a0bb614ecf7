#!/usr/bin/env bash
# Jobs that start on two hosts, joined by a network that is slow and lossy, and that end as they should. It needs root and iproute2.
set -euo pipefail
cd "$(dirname "$0")/../.."
cargo build --locked --bin phalanx --bin phalanx-bench
built=${CARGO_TARGET_DIR:-target}/debug
exec python3 tests/relay/network.py --phalanx "$built/phalanx" "$@" -- "$built/phalanx-bench" startup --worker
