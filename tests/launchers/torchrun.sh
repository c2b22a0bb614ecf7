#!/usr/bin/env bash
# Our workers under PyTorch's launcher, whose store they use: on one node, on two hosts that meet by themselves or at a given one, with workers that
# fail and are started again, with nodes that join and leave; then the same with the Python package, and nodes that are killed or cut off.
# PHALANX_TEST_PYTHON names a Python with torch and our package (.ci/full installs them).
export PATH=$PATH:/usr/sbin:/sbin
source "$(dirname "$0")/common.sh"
needs "${PHALANX_TEST_PYTHON:=python3}" python3 pgrep
# What is installed is tested: it has to be what lies here.
installed=$("$PHALANX_TEST_PYTHON" -c 'import importlib.util as of; print(of.find_spec("phalanx_torch").submodule_search_locations[0])')
cmp "$installed/process_group.py" python/phalanx_torch/process_group.py
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
    timeout -k 5 120 nsenter --target "${holder[$1]}" --net --uts "${@:3}" > "$scratch/$2" 2>&1 & process=$!
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
# seconds SINCE: how many have passed, with a tenth.
seconds() { awk -v since="$1" -v now="$(date +%s.%N)" 'BEGIN { printf "%.1f", now - since }'; }
# within SECONDS FILE PATTERN: this file has such a line within so many seconds, and how soon.
within() {
    local since
    since=$(date +%s.%N)
    until grep -qE "$3" "$scratch/$2"; do
        awk -v took="$(seconds "$since")" -v limit="$1" 'BEGIN { exit !(took < limit) }' || { tail -n 20 "$scratch/$2"; failed "within $1 s no \"$3\""; }
        sleep 0.1
    done
    echo "   $3: after $(seconds "$since") s"
}
nodes=("${torchrun[@]}" --nproc-per-node 2 --max-restarts 3)

echo "== a rank that finds only an earlier start in its agent's store, and one whose store ends"
program=$PWD/tests/launchers/torchrun.py
# alone RANK PORT KIND: a worker as torchrun starts it, the only one of its node.
alone() {
    local worker=("$launched" 2)
    [ "$3" = rust ] || worker=("$PHALANX_TEST_PYTHON" "$program" "$scratch/alone")
    nsenter --target "${holder[$(($1 + 1))]}" --net --uts env RANK="$1" WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 GROUP_RANK="$1" GROUP_WORLD_SIZE=2 \
        MASTER_ADDR=node1 MASTER_PORT="$2" TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_RUN_ID=alone "${worker[@]}"
}
mkdir "$scratch/alone"
declare -A waits server
port=29480
for kind in rust python; do
    for end in earlier gone; do
        port=$((port + 1))
        nsenter --target "${holder[1]}" --net --uts "$PHALANX_TEST_PYTHON" -c "import time, torch.distributed as dist
store = dist.TCPStore('node1', $port, is_master=True, wait_for_workers=False)
time.sleep(600)" & server[$kind.$end]=$! started+=($!)
        for rank in 0 1; do
            alone $rank $port $kind > "$scratch/alone.$rank" 2>&1 & waits[$rank]=$! started+=($!)
        done
        for rank in 0 1; do wait "${waits[$rank]}" || { cat "$scratch"/alone.[01]; failed "$kind, $end: rank $rank"; }; done
        alone 1 $port $kind > "$scratch/$kind.$end" 2>&1 & waits[$kind.$end]=$! started+=($!)
        within 20 "$kind.$end" "warning: rank 1 waits for rank 0: the store has an earlier start only .*TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    done
    kill -9 "${server[$kind.gone]}"
    begun=$(date +%s.%N) code=0
    wait "${waits[$kind.gone]}" || code=$?
    [ $code = 1 ] || { cat "$scratch/$kind.gone"; failed "$kind: the end of the store ends a rank with $code"; }
    awk -v took="$(seconds "$begun")" 'BEGIN { exit !(took < 20) }' || failed "$kind: it took $(seconds "$begun") s"
    grep -q "store" <(tail -n 1 "$scratch/$kind.gone") || { cat "$scratch/$kind.gone"; failed "$kind: no cause"; }
    echo "ok: $kind, after $(seconds "$begun") s: $(tail -n 1 "$scratch/$kind.gone")"
done

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

echo "== the Python package: both agents restart their workers"
python=("$PHALANX_TEST_PYTHON" -m torch.distributed.run --nproc-per-node 2 --max-restarts 3)
# The two nodes have one memory, and are to lose each other's.
export PHALANX_TRANSPORT=tcp
# starts KIND HOW: the nodes' commands, in `one` and `two`; what the workers write is in a folder of the job's own.
jobs=0
starts() {
    jobs=$((jobs + 1))
    job=$scratch/job$jobs
    mkdir "$job"
    local at=$((29500 + jobs)) meets
    case $1 in
        static)
            meets=(--nnodes 2 --master-addr node1 --master-port "$at")
            one=("${python[@]}" "${meets[@]}" --node-rank 0 "$program" "$job" "$2")
            two=("${python[@]}" "${meets[@]}" --node-rank 1 "$program" "$job" "$2") ;;
        *)
            meets=(--nnodes "$1" --rdzv-backend c10d --rdzv-endpoint "node1:$at" --rdzv-id "job$jobs" --rdzv-conf last_call_timeout=2)
            one=("${python[@]}" "${meets[@]}" "$program" "$job" "$2")
            two=("${one[@]}") ;;
    esac
    : > "$scratch/one"
    : > "$scratch/two"
}
for how in fails slow; do
    for kind in static 2; do
        starts $kind $how
        begin 1 one "${one[@]}"
        first=$process
        begin 2 two "${two[@]}"
        wait "$first" || failed "$how, $kind: node1"
        wait "$process" || failed "$how, $kind: node2"
        [ "$(cat "$scratch/one" "$scratch/two" | grep -cF "one group of 4, local ranks [0, 1, 0, 1]")" = 2 ] ||
            failed "$how, $kind: not two groups of 4"
        echo "ok: $how, $kind"
    done
done

# ends_together: rank 0 of the two ranks that are left is told to end, and the node ends well.
ends_together() {
    kill -USR1 "$(cat "$job/rank0.2")"
    wait "$1" || failed "the node that stays does not end well"
    grep -qF "all 2 have ended together" "$scratch/one" || failed "the last group did not end together"
}
# kill_all_on NODE: as if its power were cut, but that its connections are reset.
kill_all_on() {
    local process link
    for link in /proc/[0-9]*/ns/net; do
        process=${link#/proc/}
        process=${process%%/*}
        if [ "$process" != "${holder[$1]}" ] && [ "$(readlink "$link" 2> /dev/null)" = "$(readlink "/proc/${holder[$1]}/ns/net")" ]; then
            kill -9 "$process" 2> /dev/null || true
        fi
    done
}
four="one group of 4, local ranks \[0, 1, 0, 1\]" pair="one group of 2, local ranks \[0, 1\]"

echo "== a node joins and leaves"
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
starts 1:2 stays
begin 1 one "${one[@]}"
first=$process
within 60 one "$pair"
begin 2 two "${two[@]}"
within 60 one "$four"
kill -TERM "$(pgrep -P "$process")"
wait "$process" || true
left=600
until [ "$(grep -cE "$pair" "$scratch/one")" -ge 2 ]; do
    left=$((left - 1))
    [ $left != 0 ] || failed "the node that stays has no group"
    sleep 0.1
done
ends_together "$first"
unset TORCH_DISABLE_SHARE_RDZV_TCP_STORE

echo "== a node is killed with its agent"
starts 1:2 stays
begin 1 one "${one[@]}"
first=$process
begin 2 two "${two[@]}"
within 60 one "$four"
kill_all_on 2
within 20 one 'a call failed: .*rank [23] \(node2\) was lost'
within 60 one "$pair"
ends_together "$first"
echo "ok: the other goes on"

echo "== a node is cut off"
starts 1:2 stays
begin 1 one "${one[@]}"
first=$process
begin 2 two "${two[@]}"
within 60 one "$four"
ip link set to2 down
within 20 one 'a call failed: .*rank [23] \(node2\)'
within 5 two 'a call failed: .*rank [01] \(node1\)'
within 90 one "$pair"
ends_together "$first"
# The agent there waits for its store, longer than this test; its workers have ended.
if grep -q "$four\|$pair" "$scratch/two"; then failed "the node that is cut off has a group of its own"; fi
kill_all_on 2
wait "$process" || true
ip link set to2 up
echo "ok: the other goes on"

echo "== the node of the store is killed"
starts 1:2 stays
begin 1 one "${one[@]}"
begin 2 two "${two[@]}"
within 60 one "$four"
kill_all_on 1
within 20 two 'a call failed: .*rank [01] \(node1\) was lost'
code=0
wait "$process" || code=$?
[ $code != 0 ] && [ $code -lt 124 ] || failed "the node without a store has ended with $code"
echo "ok: the other ends with $code"

echo "== a rank does not wait for its start without end"
for kind in rust python; do
    code=0
    wait "${waits[$kind.earlier]}" || code=$?
    [ $code = 1 ] || { cat "$scratch/$kind.earlier"; failed "$kind: a rank that finds only an earlier start ends with $code"; }
    grep -q 'TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1' <(tail -n 1 "$scratch/$kind.earlier") || { cat "$scratch/$kind.earlier"; failed "$kind: no cause"; }
    echo "ok: $kind: $(tail -n 1 "$scratch/$kind.earlier")"
done
