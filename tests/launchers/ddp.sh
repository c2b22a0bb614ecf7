#!/usr/bin/env bash
# PyTorch's DistributedDataParallel under `phalanx run`, which takes the place of torchrun.
# PHALANX_TEST_PYTHON names a Python with torch.
source "$(dirname "$0")/common.sh"
needs "${PHALANX_TEST_PYTHON:=python3}" python3

script=$PWD/tests/launchers/ddp.py
for ranks in 2 3; do
    succeeds "$ranks replicas are as one process, restarts: 0" \
        "$phalanx" run --nproc-per-node $ranks -- "$PHALANX_TEST_PYTHON" "$script"
done
# Two nodes, each with a launcher.
port=$(free_port)
node=("$phalanx" run --nnodes 2 --nproc-per-node 2 --master-addr 127.0.0.1 --master-port "$port")
timeout 120 "${node[@]}" --node-rank 1 -- "$PHALANX_TEST_PYTHON" "$script" > "$scratch/other" 2>&1 & started+=($!)
succeeds "4 replicas are as one process, restarts: 0" "${node[@]}" --node-rank 0 -- "$PHALANX_TEST_PYTHON" "$script"
wait "${started[0]}" || { cat "$scratch/other"; exit 1; }
# A rank that fails once, and starts again with the others.
succeeds "2 replicas are as one process, restarts: 1" \
    env FAILS_ONCE=1 "$phalanx" run --nproc-per-node 2 --max-restarts 1 -- "$PHALANX_TEST_PYTHON" "$script"
