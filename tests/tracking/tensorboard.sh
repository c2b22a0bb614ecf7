#!/usr/bin/env bash
# Does TensorBoard read what we record? Two ranks record a run, a second start goes on in it, and TensorBoard's own Python reader
# and its web server say what they find. `.ci/full tracking` runs it; PHALANX_TEST_PYTHON has TensorBoard.
set -euo pipefail
cd "$(dirname "$0")/../.."

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
record() { cargo run -q --locked -p phalanx-tracking --example record -- "$folder/runs/line" --ranks 2 "$@"; }
record --steps 150
record --steps 200 --from 120
"$PHALANX_TEST_PYTHON" tests/tracking/read_back.py "$folder/runs"
