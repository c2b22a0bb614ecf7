#!/usr/bin/env bash
# Do NumPy, pandas, Pillow, OpenCV, LMDB and safetensors read in the files here what the tests expect, and do our readers read what these
# programs write today? `.ci/full files` runs it; PHALANX_TEST_PYTHON has them.
set -euo pipefail
cd "$(dirname "$0")"

python=${PHALANX_TEST_PYTHON:-python3}
"$python" make.py --check .
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" make.py "$folder"
PHALANX_TEST_FILES=$folder ../../../../.ci/ran cargo test -q --locked -p phalanx-data --all-features --test it -- files::
