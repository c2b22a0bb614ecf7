#!/usr/bin/env bash
# Our workers under Slurm: a cluster of one node, which this starts and ends: tasks that are ranks, a launcher in a task, a batch
# script, and a task that fails. It needs root, and touches nothing of a Slurm that is configured here.
source "$(dirname "$0")/common.sh"
export PATH=$PATH:/usr/sbin:/sbin
needs munged slurmctld slurmd srun sbatch scontrol sinfo python3
[ "$(id -u)" = 0 ] || { echo "Slurm's daemons need root" >&2; exit 1; }

# munged wants folders that nobody else writes to, and everybody may pass through.
chmod 755 "$scratch"
mkdir -m 700 "$scratch/key" "$scratch/state" "$scratch/spool"
mkdir -m 755 "$scratch/munge"
head -c 1024 /dev/urandom > "$scratch/key/munge.key"
chmod 600 "$scratch/key/munge.key"
munged --foreground --force --socket "$scratch/munge/socket" --key-file "$scratch/key/munge.key" \
    --pid-file "$scratch/munge/pid" --log-file "$scratch/munge/log" --seed-file "$scratch/key/seed" \
    2> "$scratch/munged.log" & started+=($!)

host=$(hostname -s)
cat > "$scratch/slurm.conf" << END
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$(free_port)
SlurmdPort=$(free_port)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$scratch/munge/socket
CredType=cred/munge
StateSaveLocation=$scratch/state
SlurmdSpoolDir=$scratch/spool
SlurmctldPidFile=$scratch/slurmctld.pid
SlurmdPidFile=$scratch/slurmd.pid
SlurmctldLogFile=$scratch/slurmctld.log
SlurmdLogFile=$scratch/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName=$host NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
END
export SLURM_CONF=$scratch/slurm.conf
slurmctld -D -f "$SLURM_CONF" > /dev/null 2>&1 & started+=($!)
slurmd -D -f "$SLURM_CONF" > /dev/null 2>&1 & started+=($!)
for _ in $(seq 300); do
    sinfo -h -o %T 2> /dev/null | grep -qx idle && break
    sleep 0.2
done
sinfo -h -o %T 2>&1 | grep -qx idle || {
    tail -n 20 "$scratch"/*.log "$scratch/munge/log"
    echo "FAILED: the node is not idle" >&2
    exit 1
}

export MASTER_ADDR=127.0.0.1 MASTER_PORT
MASTER_PORT=$(free_port)
succeeds "one group of 3, local ranks [0, 1, 2]" srun -n 3 "$launched" 3
MASTER_PORT=$(free_port)
succeeds "one group of 4, local ranks [0, 1, 2, 3]" \
    srun -n 1 bash -c "$phalanx run --nnodes \$SLURM_NNODES --node-rank \$SLURM_NODEID --master-addr 127.0.0.1 \
        --nproc-per-node 4 --rdzv-id \$SLURM_JOB_ID -- $launched 4"

# As docs/guide/launching.md has it. A host may know its own name at an address that nobody serves at; this one is at 127.0.0.1.
cat > "$scratch/job" << END
#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
export MASTER_ADDR=127.0.0.1
export MASTER_PORT=\$((20000 + SLURM_JOB_ID % 10000))
srun $launched 4
END
succeeds "one group of 4, local ranks [0, 1, 2, 3]" \
    bash -c "sbatch --wait --output $scratch/batch $scratch/job; code=\$?; cat $scratch/batch; exit \$code"

MASTER_PORT=$(free_port)
fails "task 1: Exited with exit code 7" srun -n 3 "$launched" 3 1
