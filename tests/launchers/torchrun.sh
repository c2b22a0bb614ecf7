#!/usr/bin/env bash
# Our workers under PyTorch's launcher, whose store they use: on one node, on two hosts that meet by themselves or at a given one, with workers that
# fail and are started again, with nodes that join and leave. PHALANX_TEST_PYTHON names a Python with torch.
source "$(dirname "$0")/common.sh"
needs "${PHALANX_TEST_PYTHON:=python3}" python3
source "$(dirname "$0")/hosts.sh"
torchrun=("$PHALANX_TEST_PYTHON" -m torch.distributed.run --no-python)

succeeds "one group of 3, local ranks [0, 1, 2]" "${torchrun[@]}" --standalone --nproc-per-node 3 "$launched" 3
fails "exitcode *: 7" "${torchrun[@]}" --standalone --nproc-per-node 3 "$launched" 3 1

# worker HOW: rank 1 fails at the first start (`fails`); so it does, and workers of node2 see that they are told of it, and take 3 s to end (`slow`);
# or the workers stay until they get SIGUSR1 (`stays`).
worker=$scratch/worker
cat > "$worker" << END_OF_WORKER
#!/bin/sh
case \$1 in
    stays)
        echo \$\$ > "$scratch/process.\$RANK.\$WORLD_SIZE"
        exec "$launched" \$WORLD_SIZE notice ;;
esac
first=$scratch/has-begun.\$2.\$RANK
[ ! -e "\$first" ] || exec "$launched" \$WORLD_SIZE
touch "\$first"
[ \$1 = slow ] && [ "\$(hostname)" = node2 ] || exec "$launched" \$WORLD_SIZE 1
"$launched" \$WORLD_SIZE 1
code=\$?
sleep 3
exit \$code
END_OF_WORKER
chmod 755 "$worker"

# begin N NAME COMMAND..: starts a command on node N, whose output is in the file NAME.
begin() {
    timeout 120 nsenter --target "${holder[$1]}" --net --uts "${@:3}" > "$scratch/$2" 2>&1 & process=$!
    started+=("$process")
}
failed() {
    tail -n 60 "$scratch/one" "$scratch/two"
    echo "FAILED: $*" >&2
    exit 1
}
# says LINE: the two nodes say this once, within a minute.
says() {
    local left=600
    until [ "$(cat "$scratch/one" "$scratch/two" | grep -cF "$1")" = 1 ]; do
        left=$((left - 1))
        [ $left != 0 ] || failed "no \"$1\""
        sleep 0.1
    done
}
nodes=("${torchrun[@]}" --nproc-per-node 2 --max-restarts 3)

echo "== both agents restart their workers"
static=(--nnodes 2 --master-addr node1 --master-port 29500)
dynamic=(--nnodes 2 --rdzv-backend c10d --rdzv-endpoint node1:29400 --rdzv-id job)
for how in fails slow; do
    for kind in static dynamic; do
        case $kind in
            static) one=("${nodes[@]}" "${static[@]}" --node-rank 0) two=("${nodes[@]}" "${static[@]}" --node-rank 1) ;;
            dynamic) one=("${nodes[@]}" "${dynamic[@]}") two=("${nodes[@]}" "${dynamic[@]}") ;;
        esac
        begin 1 one "${one[@]}" "$worker" $how $how-$kind
        first=$process
        begin 2 two "${two[@]}" "$worker" $how $how-$kind
        wait "$first" || failed "$how, $kind: node1"
        # A static agent of torch ends with a complaint of its store, which has ended with the other's, and with 0.
        wait "$process" || failed "$how, $kind: node2"
        [ "$(cat "$scratch/one" "$scratch/two" | grep -cF "one group of 4, local ranks [0, 1, 0, 1]")" = 2 ] ||
            failed "$how, $kind: not two groups of 4"
        if grep -qF "two processes have rank" "$scratch/one" "$scratch/two"; then failed "$how, $kind: an earlier start was met"; fi
        echo "ok: $how, $kind"
    done
done

echo "== one agent with a static rendezvous keeps its store"
begin 1 one "${nodes[@]}" --nnodes 1 --node-rank 0 --master-addr node1 --master-port 29501 "$worker" fails alone
: > "$scratch/two"
wait "$process" || failed "one node"
[ "$(grep -cF "one group of 2, local ranks [0, 1]" "$scratch/one")" = 2 ] || failed "not two groups of 2"
echo "ok: one node"

echo "== nodes join and leave"
# An agent of torch 2.15 that joins is given no store, or another than the others, unless they share none.
elastic=(env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 "${nodes[@]}" --nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint node1:29402 --rdzv-id elastic
    --rdzv-conf last_call_timeout=2)
: > "$scratch/two"
begin 1 one "${elastic[@]}" "$worker" stays
first=$process
says "one group of 2, local ranks [0, 1]"
begin 2 two "${elastic[@]}" "$worker" stays
says "one group of 4, local ranks [0, 1, 0, 1]"
echo "ok: a node joins"
# The agent itself, not the `timeout` above it.
kill -TERM "$(pgrep -P "$process")"
wait "$process" || true
left=600
until [ "$(grep -cF "one group of 2, local ranks [0, 1]" "$scratch/one")" = 2 ]; do
    left=$((left - 1))
    [ $left != 0 ] || failed "the node that stays has no group"
    sleep 0.1
done
kill -USR1 "$(cat "$scratch/process.0.2")"
wait "$first" || failed "the node that stays"
grep -qF "noticed, all 2 in the same step: true" "$scratch/one" || failed "the last group did not end together"
echo "ok: a node leaves"
