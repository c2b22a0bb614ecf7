#!/usr/bin/env bash
# From two hosts with Python and nothing of ours to a job that trains on both (docs/guide/launching.md), timed: the package with the command is
# installed on each, into an environment of its own, from a package index that is a folder; the program is the one that `phalanx init
# --python=numpy` writes. PHALANX_TEST_INDEX names the folder, with the wheels of our package and of NumPy (.ci/full makes it). The program's folder is on
# both hosts, as on a shared disk.
export PATH=$PATH:/usr/sbin:/sbin
source "$(dirname "$0")/common.sh"
needs python3
: "${PHALANX_TEST_INDEX:?names a folder with the wheels of our package and of NumPy}"
source tests/launchers/hosts.sh
export PHALANX_TEST_INDEX
ls "$PHALANX_TEST_INDEX"/phalanx_torch-*.whl "$PHALANX_TEST_INDEX"/numpy-*.whl > /dev/null

cd "$scratch"
seconds() { awk -v since="$1" -v now="$(date +%s.%N)" 'BEGIN { printf "%.1f", now - since }'; }
# installs N: what a user types on node N.
installs() {
    on "$1" python3 -m venv "$scratch/node$1"
    on "$1" "$scratch/node$1/bin/pip" install -q --no-index --find-links "$PHALANX_TEST_INDEX" 'phalanx-torch[numpy]'
}
since=$(date +%s.%N)
installs 2 > "$scratch/second" 2>&1 & second=$! started+=($second)
installs 1
wait $second || { cat "$scratch/second"; exit 1; }
installed=$(seconds "$since")

"$scratch/node1/bin/phalanx" init digits --python=numpy > made
cd digits
job=(run --job-key-file job.key --nnodes 2 --master-addr node1 --nproc-per-node 1)
starts=$(date +%s.%N)
on 1 "$scratch/node1/bin/phalanx" keygen job.key
on 2 timeout 240 "$scratch/node2/bin/phalanx" "${job[@]}" --node-rank 1 -- "$scratch/node2/bin/python3" train.py > "$scratch/second" 2>&1 & second=$! started+=($second)
code=0 other=0
on 1 timeout 240 "$scratch/node1/bin/phalanx" "${job[@]}" --node-rank 0 -- "$scratch/node1/bin/python3" train.py > "$scratch/first" 2>&1 || code=$?
wait $second || other=$?
trained=$(seconds "$starts") took=$(seconds "$since")
cat "$scratch/first" "$scratch/second"
[ $code = 0 ] && [ $other = 0 ] || { echo "FAILED with $code and $other" >&2; exit 1; }
# Rank 0 alone says it, once; a world of one would make more steps in an epoch.
last='epoch 4, step 60: loss 0.0000'
[ "$(cat "$scratch/first" "$scratch/second" | grep -cF "$last")" = 1 ] && grep -qF "$last" "$scratch/first" &&
    ! grep -q 'step 80' "$scratch/first" || { echo "FAILED: no world of two, or nothing learned" >&2; exit 1; }
# Not the warning of a job without a key either.
! grep -hi 'key' "$scratch/first" "$scratch/second" || { echo "FAILED: something is said of the key" >&2; exit 1; }
awk -v took="$took" 'BEGIN { exit !(took < 300) }' || { echo "FAILED: it took $took s" >&2; exit 1; }
echo "ok: trained on two hosts after $took s: installed in $installed s, and trained in $trained s"
