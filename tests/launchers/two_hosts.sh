#!/usr/bin/env bash
# From two hosts with the command and a program to a job that trains on both, in three commands (docs/guide/launching.md), timed. The program is the one that
# `phalanx init --python=numpy` writes; PHALANX_TEST_PYTHON names a Python with our package and NumPy. The folder is on both, as on a shared disk.
export PATH=$PATH:/usr/sbin:/sbin
source "$(dirname "$0")/common.sh"
needs "${PHALANX_TEST_PYTHON:=python3}"
source tests/launchers/hosts.sh
export PHALANX_TEST_PYTHON

cd "$scratch"
"$phalanx" init digits --python=numpy > made
cd digits
python=$(command -v "$PHALANX_TEST_PYTHON")
job=(run --job-key-file job.key --nnodes 2 --master-addr node1 --nproc-per-node 1)
since=$(date +%s.%N)
on 1 "$phalanx" keygen job.key
on 2 timeout 240 "$phalanx" "${job[@]}" --node-rank 1 -- "$python" train.py > "$scratch/second" 2>&1 & second=$! started+=($second)
code=0 other=0
on 1 timeout 240 "$phalanx" "${job[@]}" --node-rank 0 -- "$python" train.py > "$scratch/first" 2>&1 || code=$?
wait $second || other=$?
took=$(awk -v since="$since" -v now="$(date +%s.%N)" 'BEGIN { printf "%.1f", now - since }')
cat "$scratch/first" "$scratch/second"
[ $code = 0 ] && [ $other = 0 ] || { echo "FAILED with $code and $other" >&2; exit 1; }
# Rank 0 alone says it, once; a world of one would make more steps in an epoch.
last='epoch 4, step 60: loss 0.0000'
[ "$(cat "$scratch/first" "$scratch/second" | grep -cF "$last")" = 1 ] && grep -qF "$last" "$scratch/first" &&
    ! grep -q 'step 80' "$scratch/first" || { echo "FAILED: no world of two, or nothing learned" >&2; exit 1; }
# Not the warning of a job without a key either.
! grep -hi 'key' "$scratch/first" "$scratch/second" || { echo "FAILED: something is said of the key" >&2; exit 1; }
awk -v took="$took" 'BEGIN { exit !(took < 300) }' || { echo "FAILED: it took $took s" >&2; exit 1; }
echo "ok: trained on two hosts after $took s"
