#!/usr/bin/env bash
# Our workers under Slurm: a cluster of two nodes, each in a network of its own, with a controller and a login host, which this starts and
# ends. Tasks that are ranks, `phalanx run` in a batch script, in an array, from a login host; nodes that are down or die; scancel, time
# limit and requeue. It needs root, and touches nothing of a Slurm that is configured here.
export PATH=$PATH:/usr/sbin:/sbin
source "$(dirname "$0")/common.sh"
needs munged slurmctld slurmd srun sbatch salloc scancel scontrol sinfo squeue pgrep
source "$(dirname "$0")/hosts.sh"

# munged wants folders that nobody else writes to, and everybody may pass through.
chmod 755 "$scratch"
mkdir -m 700 "$scratch/key" "$scratch/state"
mkdir -m 755 "$scratch/munge"
head -c 1024 /dev/urandom > "$scratch/key/munge.key"
chmod 600 "$scratch/key/munge.key"
munged --foreground --force --socket "$scratch/munge/socket" --key-file "$scratch/key/munge.key" \
    --pid-file "$scratch/munge/pid" --log-file "$scratch/munge/log" --seed-file "$scratch/key/seed" \
    2> "$scratch/munged.log" & started+=($!)

# A requeued job may start when its credentials have expired.
cat > "$scratch/slurm.conf" << END
ClusterName=test
SlurmctldHost=login
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$scratch/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation=$scratch/state
SlurmdSpoolDir=$scratch/spool.%n
SlurmctldPidFile=$scratch/slurmctld.pid
SlurmdPidFile=$scratch/slurmd.%n.pid
SlurmctldLogFile=$scratch/slurmctld.log
SlurmdLogFile=$scratch/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
KillWait=5
NodeName=node[1-2] CPUs=4 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
END
export SLURM_CONF=$scratch/slurm.conf
slurmctld -D -f "$SLURM_CONF" > /dev/null 2>&1 & started+=($!)
declare -A daemon
# A folder of one name that each node has for itself, as a disk of its own, or an image.
own=$scratch/own
mkdir -m 755 "$own" "$own.1" "$own.2"
cp "$phalanx" "$own.1/phalanx"
cp "$launched" "$own.1/launched"
start_daemon() {
    nsenter --target "${holder[$1]}" --net --uts unshare --mount bash -euc 'mount --bind "$1.$2" "$1"; exec slurmd -D -N "node$2" -f "$3"' \
        daemon "$own" "$1" "$SLURM_CONF" > /dev/null 2>&1 &
    daemon[$1]=$! started+=($!)
}
start_daemon 1
start_daemon 2
# all_are STATE: both nodes, within a minute.
all_are() {
    for _ in $(seq 300); do
        [ "$(sinfo -h -N -o %T 2> /dev/null | grep -cx "$1")" = 2 ] && return
        sleep 0.2
    done
    sinfo -N >&2
    tail -n 20 "$scratch"/*.log "$scratch/munge/log" >&2
    echo "FAILED: the nodes are not $1" >&2
    exit 1
}
all_are idle

# batch OPTIONS.. -- SCRIPT: submits the script, waits for its end, and shows what it has written.
batch() {
    local options=() code=0
    while [ "$1" != -- ]; do options+=("$1"); shift; done
    printf '#!/bin/bash\n%s\n' "$2" > "$scratch/job"
    rm -f "$scratch"/batch*
    sbatch --wait --quiet --output "$scratch/batch.%a" "${options[@]}" "$scratch/job" || code=$?
    cat "$scratch"/batch*
    return $code
}
export -f batch
export scratch
# As `succeeds` and `fails`, for a batch script.
script_succeeds() { local expected=$1; shift; succeeds "$expected" bash -c 'batch "$@"' batch "$@"; }
script_fails() { local expected=$1; shift; fails "$expected" bash -c 'batch "$@"' batch "$@"; }
# ends_within SECONDS WHAT COMMAND..: the command succeeds within so many seconds.
ends_within() {
    local limit=$1 what=$2 begun=$SECONDS
    shift 2
    until "$@"; do
        [ $((SECONDS - begun)) -lt "$limit" ] || { ps -ef >&2; echo "FAILED: $what, within $limit s" >&2; exit 1; }
        sleep 0.2
    done
    echo "ok: $what ($((SECONDS - begun)) s)"
}
says() { grep -qE "$1" "$scratch/batch" 2> /dev/null; }
nothing_runs() { ! pgrep -f "$1" > /dev/null; }
is_over() { [ -z "$(squeue -h)" ]; }

# Without a launcher: no variable is set by hand.
succeeds "one group of 3, local ranks [0, 1, 2]" srun -N 1 -n 3 "$launched" 3
succeeds "one group of 4, local ranks [0, 1, 0, 1]" srun -N 2 --ntasks-per-node 2 "$launched" 4
script_succeeds "one group of 3, local ranks [0, 1, 0]" -N 2 -n 3 -- "srun $launched 3"
succeeds "one group of 2, local ranks [0, 0]" env MASTER_ADDR=node1 MASTER_PORT=23456 srun -N 2 "$launched" 2
fails "task 1: Exited with exit code 7" srun -N 1 -n 3 "$launched" 3 1

# A launcher on each node, without options.
script_succeeds "one group of 4, local ranks [0, 1, 0, 1]" -N 2 --ntasks-per-node 2 -- "$phalanx run $launched 4"
script_succeeds "4 workers on 2 nodes, 2 on each (SLURM_TASKS_PER_NODE), started by srun" \
    -N 2 --ntasks-per-node 2 -- "$phalanx run $launched 4"
script_succeeds "one group of 3, local ranks [0, 1, 0]" -N 2 -n 3 -- "$phalanx run $launched 3"
script_succeeds "one group of 2, local ranks [0, 0]" -N 2 --exclusive -- "$phalanx run $launched 2"
script_succeeds "one group of 4, local ranks [0, 1, 0, 1]" -N 2 -- "$phalanx run --nproc-per-node 2 $launched 4"
script_succeeds "one group of 3, local ranks [0, 1, 0]" -N 2 --ntasks-per-node 2 -- "$phalanx run -np 3 $launched 3"
script_succeeds "one group of 4, local ranks [0, 1, 0, 1]" \
    -N 2 --ntasks-per-node 2 --cpus-per-task 2 --mem-per-cpu 100 -- "$phalanx launch --use-env $launched 4"
# What the job asks for does not bind the step of a launcher.
script_succeeds "[1] 4 processors, 2 for each task" -N 2 -n 2 --cpus-per-task 2 --exclusive -- \
    "SLURM_LABELIO=1 SRUN_CPUS_PER_TASK=2 $phalanx run -- bash -c 'echo \$SLURM_CPUS_ON_NODE processors, \$SLURM_CPUS_PER_TASK for each task'"
# The jobs of an array are jobs of their own, and run at the same time.
succeeds "2 jobs were one group of 2 each" bash -c \
    "batch -N 2 --array 0-1 -- '$phalanx run $launched 2' > /dev/null
     echo \"\$(cat $scratch/batch.* | grep -c 'one group of 2, local ranks \[0, 0\]') jobs were one group of 2 each\""
# One node needs no srun.
script_succeeds "one group of 3, local ranks [0, 1, 2]" -N 1 -n 3 -- "PATH=/usr/bin/none exec $phalanx run $launched 3"
script_succeeds "3 workers on this node (SLURM_TASKS_PER_NODE)" -N 1 -n 3 -- "$phalanx run $launched 3"
# A shell of salloc is on the login host, which is no node of the job.
succeeds "[0] node1" salloc --quiet -N 1 -n 1 "$phalanx" run hostname
succeeds "one group of 4, local ranks [0, 1, 0, 1]" salloc --quiet -N 2 --ntasks-per-node 2 "$phalanx" run "$launched" 4
# What is said goes before the job's nodes; a task of srun starts nothing elsewhere.
script_succeeds "one group of 2, local ranks [0, 1]" -N 2 -- "$phalanx run --standalone --nproc-per-node 2 $launched 2"
script_succeeds "one group of 2, local ranks [0, 1]" -N 2 -n 4 -- "srun -N 1 -n 1 $phalanx run --nproc-per-node 2 $launched 2"
script_succeeds "one group of 4, local ranks [0, 1, 0, 1]" -N 2 -- \
    "srun bash -c '$phalanx run --nnodes \$SLURM_NNODES --node-rank \$SLURM_NODEID --master-addr node1 --nproc-per-node 2 $launched 4'"
# An elastic job, whose store the command serves.
script_succeeds "[1] one of 1:2" -N 2 -- "$phalanx run --min-np 1 -- bash -c 'echo one of \$PHALANX_ELASTIC'"
script_succeeds "[0] one of 1:2" -N 2 -- "$phalanx run --min-np 1 -- bash -c 'echo one of \$PHALANX_ELASTIC'"

# What goes wrong is named, with what to do, and is the batch script's exit code.
script_fails "host    node2" -N 2 --ntasks-per-node 2 -- "$phalanx run $launched 4 3; code=\$?; [ \$code != 7 ] || exit 7"
script_fails "SLURM_NTASKS=3 contradicts .*--nproc-per-node" -N 2 -n 4 -- "SLURM_NTASKS=9 SLURM_NTASKS=3 SLURM_TASKS_PER_NODE='1(x2)' $phalanx run $launched"
script_fails "SLURM_HET_SIZE=2 .*heterogeneous.*--het-group" -N 1 -- "SLURM_HET_SIZE=2 $phalanx run $launched 1"
script_fails "ssh-port has no meaning" -N 2 -- "$phalanx run --ssh-port 22 $launched 2"
script_fails "4 workers, but the hosts have 2 slots. Submit it with --ntasks-per-node" -N 2 -- "$phalanx run -np 4 $launched 4"
script_fails "cannot start srun.*--standalone" -N 2 -- "PATH=/usr/bin/none $phalanx run $launched 2"
# Either node may be the first to say so.
SLURM_JOB_ID=4711 SLURM_JOB_NODELIST=node[1-2] fails "node[12]: the Slurm job has ended.*unset SLURM_JOB_ID" "$phalanx" run "$launched" 2
SECONDS=0
script_fails "node2: the Slurm job does not have this node any more, which is down.*--exclude=node2" -N 2 --no-kill -- \
    "scontrol update nodename=node2 state=down reason=test; sleep 1; $phalanx run $launched 2"
[ $SECONDS -lt 20 ] || { echo "FAILED: it took $SECONDS s" >&2; exit 1; }
scontrol update nodename=node2 state=resume
all_are idle

# named SECONDS PATTERN OPTIONS.. -- SCRIPT: so it ends within so many seconds, and leaves nothing on any node. `sbatch --wait` looks seldom, so the
# script itself counts.
named() {
    local took
    script_fails "${@:2:$#-2}" "SECONDS=0; (${*: -1}); code=\$?; echo \"it took \$SECONDS s\"; exit \$code"
    took=$(sed -n 's/^it took \([0-9]*\) s$/\1/p' "$scratch/out")
    [ "$took" -le "$1" ] || { echo "FAILED: it took $took s, not $1" >&2; exit 1; }
    ends_within 5 "after $took s, and no process is left" nothing_runs "phalanx node|$launched|$own/launched"
    all_are idle
}
# A node whose disk or image lacks something, or has another version of it.
named 5 "node2: there is no phalanx, neither at $own/phalanx nor in its PATH.*install the same version" -N 2 -- "$own/phalanx run $launched 2"
printf '#!/bin/sh\nprintf "\\nphalanx node 1\\n\\010\\000\\000\\000\\000\\0050.1.9\\000"\nexec cat > /dev/null\n' > "$own.2/phalanx"
chmod 755 "$own.2/phalanx"
named 5 "node2 has Phalanx 0.1.9, this machine .*install the same version on all hosts" -N 2 -- "$own/phalanx run $launched 2"
cp "$phalanx" "$own.2/phalanx.new"
mv "$own.2/phalanx.new" "$own.2/phalanx"
named 5 "cannot start $own/launched as rank 1: No such file.*is the path right" -N 2 -- "$own/phalanx run $own/launched 2"
named 5 "ended with 127" -N 2 -- "$own/phalanx run $own/launched 2; echo ended with \$?; exit 1"
# srun says so itself, and leaves the other tasks waiting unless it is told to end them.
named 15 "node2: task 1: Exited with exit code 2|$own/launched: No such file" -N 2 -- "srun --kill-on-bad-exit $own/launched 2"
cp "$launched" "$own.2/launched"
script_succeeds "one group of 2, local ranks [0, 0]" -N 2 -- "$own/phalanx run $own/launched 2"
# One node where two were meant: by the number of workers, and in the program itself.
script_succeeds "4 workers on its only node, for which it has 2 tasks (SLURM_TASKS_PER_NODE); if more nodes were meant" \
    -N 1 -n 2 -- "$phalanx run -np 4 $launched 4"
named 5 "this is a world of 2, and not of 4" -N 1 --ntasks-per-node 2 -- "$phalanx run $launched 4"
named 5 "this is a world of 1, and not of 2" -N 1 -- "srun $launched 2"
# A node that is drained works on for the jobs that have it, and takes no others.
script_succeeds "one group of 2, local ranks [0, 0]" -N 2 -- "scontrol update nodename=node2 state=drain reason=test; sleep 1; $phalanx run $launched 2"
fails "drained|DRAIN|not available|unavailable|Unable to allocate resources" salloc --immediate=3 -N 2 "$phalanx" run "$launched" 2
scontrol update nodename=node2 state=resume
all_are idle

# The end of a node is the end of the job, and named; so is that of its launcher.
printf '#!/bin/bash\n%s\n' "$phalanx run -- bash -c 'echo it runs; exec sleep 4321'; code=\$?; echo \"ended with \$code\"; exit \$code" > "$scratch/job"
start() {
    rm -f "$scratch"/batch*
    sbatch --parsable --output "$scratch/batch" "$@" "$scratch/job" > "$scratch/id"
    ends_within 60 "the workers run ($*)" says '\[0\] it runs'
    ends_within 60 "the workers run on both nodes" says '\[1\] it runs'
}
start -N 2 --no-kill
# As if the power were cut: no daemon, no step, no launcher, no worker.
for link in /proc/[0-9]*/ns/net; do
    process=${link#/proc/}; process=${process%%/*}
    if [ "$process" != "${holder[2]}" ] && [ "$(readlink "$link" 2> /dev/null)" = "$(readlink "/proc/${holder[2]}/ns/net")" ]; then
        kill -9 "$process" 2> /dev/null || true
    fi
done
ends_within 40 "the loss of node2 ends the job" says 'ended with [1-9]'
says 'host +node2' || { cat "$scratch/batch"; echo "FAILED: node2 is not named" >&2; exit 1; }
ends_within 60 "no process is left" nothing_runs 'sleep 4321'
scancel "$(cat "$scratch/id")" 2> /dev/null || true
start_daemon 2
scontrol update nodename=node2 state=resume 2> /dev/null || true
all_are idle

# A node that is cut off is named as well. Slurm itself waits for its daemon, five minutes by default.
start -N 2 --no-kill
ip link set to2 down
ends_within 60 "the cut to node2 ends the job" says 'ended with [1-9]'
says 'host +node2' || { cat "$scratch/batch"; echo "FAILED: node2 is not named" >&2; exit 1; }
ends_within 100 "no process is left" nothing_runs 'sleep 4321'
ip link set to2 up
scancel "$(cat "$scratch/id")" 2> /dev/null || true
all_are idle

# The end of the Slurm job is the end of all.
start -N 2
scancel "$(cat "$scratch/id")"
ends_within 15 "scancel leaves no process" nothing_runs 'sleep 4321'
ends_within 30 "the job is over" is_over
all_are idle
start -N 2
kill -9 "$(pgrep -f "^$phalanx run")"
ends_within 15 "the end of phalanx run leaves no process" nothing_runs 'sleep 4321'
ends_within 30 "the job is over" is_over
all_are idle

# The notice of the time limit, as docs/guide/launching.md has it: the program ends in the same step on all ranks, and the job is queued
# again. Slurm signals the steps, of which the launchers are.
cat > "$scratch/job" << END
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --time=2 --signal=USR1@115 --requeue --open-mode=append
echo "start \${SLURM_RESTART_COUNT:-0}"
if [ "\${SLURM_RESTART_COUNT:-0}" = 0 ]; then
    $phalanx run $launched 4 notice && scontrol requeue "\$SLURM_JOB_ID"
    sleep 60
else
    $phalanx run $launched 4
fi
END
rm -f "$scratch"/batch*
sbatch --parsable --output "$scratch/batch" "$scratch/job" > "$scratch/id"
ends_within 120 "SIGUSR1 comes to all ranks" says 'noticed, all 4 in the same step: true'
ends_within 120 "the job goes on" says 'start 1'
ends_within 60 "it ends" says 'one group of 4'
ends_within 30 "the job is over" is_over
[ "$(grep -c 'one group of 4, local ranks \[0, 1, 0, 1\]' "$scratch/batch")" = 2 ] || {
    cat "$scratch/batch"
    echo "FAILED: not both starts were one group" >&2
    exit 1
}
# Sent to the batch script alone, which has become \`phalanx run\`.
printf '#!/bin/bash\nexec %s\n' "$phalanx run $launched 2 notice" > "$scratch/job"
rm -f "$scratch"/batch*
sbatch --parsable --output "$scratch/batch" -N 2 "$scratch/job" > "$scratch/id"
ends_within 60 "the workers have met" says 'one group of 2'
scancel --batch --signal=USR1 "$(cat "$scratch/id")"
ends_within 30 "SIGUSR1 to phalanx run comes to all ranks" says 'noticed, all 2 in the same step: true'
ends_within 30 "the job is over" is_over
