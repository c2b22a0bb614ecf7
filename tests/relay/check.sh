#!/usr/bin/env bash
# Jobs on two hosts, joined by a network that is slow, lossy and now and then silent: they start, survive, and end as they should. It
# needs root and iproute2. With arguments: those of network.py instead.
set -euo pipefail
cd "$(dirname "$0")/../.."
cargo build --locked --bin phalanx --bin phalanx-bench
built=${CARGO_TARGET_DIR:-target}/debug
network() {
    python3 tests/relay/network.py "$@" --phalanx "$built/phalanx" --program "$built/phalanx-bench" startup --worker
}
if [ $# != 0 ]; then
    network "$@"
    exit
fi
failed=0
network start || failed=1
network outage death --rtt 5 100 --loss 0 || failed=1
network live --rtt 80 --loss 5 --seconds 120 &
beside=$!
network live --rtt 200 --loss 2 --seconds 120 || failed=1
wait "$beside" || failed=1
exit $failed
