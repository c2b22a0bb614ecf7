#!/bin/bash
# The first process of the machine that check.sh boots. It runs jobs as a user without capabilities, and counts their calls of `process_vm_readv`.
export PATH=/bin HOME=/tmp
cd /tmp || exit
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
ip link set lo up
failed=0
complain() {
    echo "FAILED: $*"
    failed=1
}

user=(setpriv --reuid 1000 --regid 1000 --clear-groups --inh-caps -all --bounding-set -all)
bench=(phalanx-bench all_gather -b 1M -e 1M -w 2 -n 5 -c)
# expect COPIES NAME COMMAND..: the two ranks of this job copy out of each other (all), or are refused (none).
expect() {
    local expected=$1 name=$2 copied refused
    shift 2
    # In a session of its own, as whatever a terminal or a service starts. strace is not the parent of the ranks.
    strace -f -q --seccomp-bpf -e trace=process_vm_readv -o calls setsid -w "${user[@]}" "$@" > said 2>&1 || {
        cat said
        complain "$name: it ended with an error"
    }
    copied=$(grep -cE '= [1-9][0-9]*$' calls)
    refused=$(grep -c EPERM calls)
    echo "$name: $copied copies, $refused refused"
    case $expected in
        all) [ "$copied" -gt 0 ] && [ "$refused" = 0 ] ;;
        none) [ "$copied" = 0 ] && [ "$refused" -gt 0 ] ;;
    esac || complain "$name: expected $expected"
}
# stranger EXPECTED: whether a process of the user that the launcher has not started may open a rank's memory: may, may not.
stranger() {
    local job rank= status result="may not"
    "${user[@]}" "${launched[@]}" -- phalanx-bench all_gather -b 1M -e 64M -f 2 -w 2 -n 20 > said 2>&1 &
    job=$!
    # The first of the sizes is done.
    for _ in $(seq 60); do
        grep -q ' MiB ' said && break
        sleep 1
    done
    for status in /proc/[0-9]*/status; do
        grep -qs '^Name:.phalanx-bench' "$status" && rank=${status//[^0-9]/}
    done
    "${user[@]}" bash -c ": < /proc/$rank/mem" 2> /dev/null && result=may
    echo "a process that the launcher has not started: $result"
    [ "$result" = "$1" ] || complain "a process that the launcher has not started: expected $1"
    bash -c ": < /proc/$rank/mem" || {
        cat said
        complain "no rank has run meanwhile"
    }
    kill -9 $job
    wait $job 2> /dev/null
}
scope() {
    echo "$1" > /proc/sys/kernel/yama/ptrace_scope
    echo "== ptrace_scope $1"
}
launched=(phalanx run --nproc-per-node 2)
by_hand='ranks=(); for RANK in 0 1; do RANK=$RANK WORLD_SIZE=2 PHALANX_RENDEZVOUS=file:///tmp/store-$$ '"${bench[*]}"' & ranks+=($!); done
    for rank in "${ranks[@]}"; do wait "$rank" || exit; done'

scope 0
expect all "phalanx run" "${launched[@]}" -- "${bench[@]}"
expect all "ranks of two parents" "${launched[@]}" -- bash -c "${bench[*]}; exit \$?"
stranger may

scope 1
expect all "phalanx run" "${launched[@]}" -- "${bench[@]}"
expect none "ranks of two parents" "${launched[@]}" -- bash -c "${bench[*]}; exit \$?"
expect all "a script" bash -c "$by_hand"
expect none "a shell with job control" bash -c "set -m; $by_hand"
stranger "may not"
# The namespace is root's, and the job in it the user's.
user=(unshare --pid --fork --mount-proc setsid -w "${user[@]}")
expect all "the first process of a container" "${launched[@]}" -- "${bench[@]}"
user=("${user[@]:6}")

scope 2
expect none "phalanx run" "${launched[@]}" -- "${bench[@]}"

[ $failed = 0 ] && echo "all as expected, after $SECONDS s"
echo o > /proc/sysrq-trigger
sleep 60
