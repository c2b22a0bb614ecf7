#!/usr/bin/env bash
# Our workers under PyTorch's launcher, whose store they use: on one node, on two that meet by themselves, and with one that fails.
# PHALANX_TEST_PYTHON names a Python with torch.
source "$(dirname "$0")/common.sh"
needs "${PHALANX_TEST_PYTHON:=python3}" python3
torchrun=("$PHALANX_TEST_PYTHON" -m torch.distributed.run --no-python)

succeeds "one group of 3, local ranks [0, 1, 2]" "${torchrun[@]}" --standalone --nproc-per-node 3 "$launched" 3

endpoint=127.0.0.1:$(free_port)
node=("${torchrun[@]}" --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint "$endpoint" --rdzv-id job
    --local-addr 127.0.0.1)
timeout 120 "${node[@]}" "$launched" 4 > "$scratch/other" 2>&1 & started+=($!)
timeout 120 "${node[@]}" "$launched" 4 > "$scratch/out" 2>&1 || { cat "$scratch/out"; exit 1; }
wait "${started[0]}" || { cat "$scratch/other"; exit 1; }
[ "$(cat "$scratch/out" "$scratch/other" | grep -cF "one group of 4, local ranks [0, 1, 0, 1]")" = 1 ]
echo "ok: two nodes that meet with c10d"

fails "exitcode *: 7" "${torchrun[@]}" --standalone --nproc-per-node 3 "$launched" 3 1
