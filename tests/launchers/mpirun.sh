#!/usr/bin/env bash
# Our workers under Open MPI's mpirun: with nothing else, at an address, in a file, and with one that fails.
source "$(dirname "$0")/common.sh"
needs mpirun python3
# More processes than processors; as root, if it is root who runs this.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
mpirun=(mpirun --oversubscribe)

succeeds "one group of 3, local ranks [0, 1, 2]" "${mpirun[@]}" -n 3 "$launched" 3
succeeds "one group of 2, local ranks [0, 1]" \
    "${mpirun[@]}" -n 2 -x MASTER_ADDR=127.0.0.1 -x MASTER_PORT="$(free_port)" "$launched" 2
for job in first second; do
    succeeds "one group of 4, local ranks [0, 1, 2, 3]" \
        "${mpirun[@]}" -n 4 -x PHALANX_RENDEZVOUS="file://$scratch/meet" "$launched" 4
done
fails "Exit code: +7" "${mpirun[@]}" -n 3 "$launched" 3 1
