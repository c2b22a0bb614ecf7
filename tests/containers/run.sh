#!/usr/bin/env bash
# One part of check.sh, which has built the images and starts this in a network namespace without an interface that is up. Each container is one that
# podman has crun make, with a limit that a cluster sets.
set -euo pipefail
ip link set lo up
# conmon leaves a file where it is started, if memory runs out.
cd "$folder"
out=$folder/said
fail() {
    cat "$out" >&2
    echo "FAILED: $*" >&2
    exit 1
}
# What every container gets: a root that nobody can write, no capability, and no program that could get one.
closed=(--read-only --cap-drop all --security-opt no-new-privileges)
# And no network but a loopback, and /dev/shm as Docker has it.
strict=("${closed[@]}" --network none --shm-size 64m)
# Or no /dev/shm, no folder that can be written, and a /proc that shows no process of another user.
bare=("${closed[@]}" --network none --ipc none --read-only-tmpfs=false --security-opt proc-opts=hidepid=invisible)

# ends CODE SECONDS EXPECTED PODMAN-RUN..: the container ends with this code before its time is up, and says a line like this.
ends() {
    local code=$1 limit=$2 expected=$3 got=0 begun=$SECONDS
    shift 3
    timeout "$limit" podman run --rm "$@" > "$out" 2>&1 || got=$?
    [ $got = "$code" ] || fail "ended with $got, and not with $code, after $((SECONDS - begun)) s: podman run $*"
    grep -qE "$expected" "$out" || fail "does not say \"$expected\": podman run $*"
    ! grep -qE 'SIGBUS|panicked' "$out" || fail "died of it: podman run $*"
    echo "ok: $code, $expected"
}
# trained RANKS [COUNT]: the ranks of the last container, or COUNT of them, end with one model.
trained() {
    local count=${2:-$1}
    [ "$(grep -c 'done step 2000 hash' "$out")" = "$count" ] || fail "not $count ranks have trained"
    [ "$(sed -n 's/.*\(hash [0-9a-f]*\).*/\1/p' "$out" | sort -u | wc -l)" = 1 ] || fail "the ranks have different models"
    [ "$(grep -c "world $1\$" "$out")" -ge "$count" ] || fail "no world of $1"
}
train() { echo phalanx run --nproc-per-node "$1" -- elastic; }
bench() { echo phalanx bench all_reduce --nproc-per-node "$1" -b "$2" -e "$2" -n 3 -w 1; }

limits() {
    # That these containers have the limits that the checks below are for.
    ends 0 20 '^confined$' "${strict[@]}" quick sh -c '
        set -e
        set -- /proc/[0-9]*
        [ "$$" = 1 ]
        [ "$*" = /proc/1 ]
        [ "$(id -u):$(id -g)" = 65534:65534 ]
        [ "$(df -k /dev/shm | awk "NR == 2 { print \$2 }")" = 65536 ]
        [ "$(wc -l < /proc/net/route)" = 1 ]
        [ "$(grep -c : /proc/net/dev)" = 1 ]
        if touch /usr/local/bin/x 2> /dev/null; then exit 1; fi
        grep -q "^CapBnd:.0*$" /proc/self/status
        grep -q "^NoNewPrivs:.1$" /proc/self/status
        grep -q "^Seccomp:.2$" /proc/self/status
        echo confined'
    ends 0 20 '^bare$' "${bare[@]}" quick sh -c '
        set -e
        for folder in /tmp /run /var/tmp; do
            if touch $folder/x 2> /dev/null; then exit 1; fi
        done
        [ ! -e /dev/shm ]
        grep -q " /proc proc .*hidepid=invisible" /proc/mounts
        echo bare'
    for options in strict bare; do
        local -n these=$options
        for ranks in 2 4; do
            ends 0 120 "done step 2000" "${these[@]}" quick $(train $ranks)
            trained $ranks
        done
        ends 0 60 '^good  shared memory .*all_reduce of 2 processes' "${these[@]}" quick phalanx doctor
        grep -qE '^good  tcp ' "$out" && ! grep -q '^bad' "$out" || fail "doctor finds something bad"
        # Four times what /dev/shm has.
        for ranks in 2 4; do ends 0 120 '256 MiB .* 0$' "${these[@]}" quick $(bench $ranks 256M); done
        for transport in shm tcp; do
            ends 0 60 "^# Phalanx, $transport: all_reduce" "${these[@]}" --env PHALANX_TRANSPORT=$transport quick $(bench 2 1M)
        done
    done
    # Limits that are too low: what is missing is named.
    ends 1 60 'memory are left' "${strict[@]}" --memory 200m quick $(bench 2 256M)
    # A program that asks nobody how much there is: it keeps a line that does not end.
    ends 137 60 'killed by SIGKILL \(by a person, a scheduler or the kernel when memory runs out\)' "${strict[@]}" --memory 200m quick \
        phalanx run --nproc-per-node 1 -- tail /dev/zero
    ends 0 60 'the cgroup leaves 0\.. GiB' "${strict[@]}" --memory 200m quick phalanx doctor
    ends 1 60 'may start no more processes and threads: raise `ulimit -u`, or pids.max' "${strict[@]}" --pids-limit 5 quick $(bench 2 1M)
    ends 0 60 '1 MiB .* 0$' "${strict[@]}" --memory 60m --pids-limit 12 --cpus 0.5 quick $(bench 2 1M)
}

# until_steps NAME: until the ranks of this container train.
until_steps() {
    for _ in $(seq 300); do
        if podman logs "$1" 2> /dev/null | grep -q 'commit 20 '; then return; fi
        sleep 0.1
    done
    podman logs "$1" > "$out" 2>&1
    fail "the ranks of $1 make no steps"
}
# is_over NAME CODE EXPECTED: it has ended with this code and says this.
is_over() {
    podman wait "$1" > "$out"
    local code
    code=$(cat "$out")
    podman logs "$1" > "$out" 2>&1
    podman rm -f "$1" > /dev/null
    [ "$code" = "$2" ] || fail "$1 ended with $code, and not with $2"
    grep -qE "$3" "$out" || fail "$1 does not say \"$3\""
}
# within SECONDS COMMAND..
within() {
    local limit=$1 begun=$SECONDS
    shift
    timeout "$limit" "$@" > /dev/null || fail "not within $limit s: $*"
    echo "ok: after $((SECONDS - begun)) s: $*"
}
signals() {
    for options in strict bare; do
        local -n these=$options
        # `podman stop` sends SIGTERM to the first process, which is the launcher, and kills after 30 s.
        podman run -d --name stopped "${these[@]}" --env STEPS=1000000 quick $(train 4) > /dev/null
        until_steps stopped
        within 10 podman stop -t 30 stopped
        is_over stopped 143 '^phalanx: ended by SIGTERM'
        # A rank that is killed: the launcher names it, and so does every other.
        podman run -d --name killed "${these[@]}" --env STEPS=1000000 quick $(train 4) > /dev/null
        until_steps killed
        podman exec killed sh -c 'kill -9 $(for of in /proc/[0-9]*; do
            if grep -qz "^RANK=2$" $of/environ && grep -q "^Name:.elastic$" $of/status; then echo ${of#/proc/}; fi; done)' 2> "$out" || fail "no rank 2"
        within 10 podman wait killed
        is_over killed 137 '^│ rank +2 of 4'
        grep -qE '^│ ended +killed by SIGKILL' "$out" && grep -qE '^\[[013]\] .*rank 2 \(.*\) died' "$out" || fail "the rank is not named"
        # A program that is the first process itself, and starts nothing: see the page.
        podman run -d --name alone "${these[@]}" quick sh -c 'exec phalanx run --nproc-per-node 1 -- sleep 600' > /dev/null
        within 10 podman stop -t 30 alone
        is_over alone 143 'ended by SIGTERM'
    done
}

two() {
    # Two containers with a wire between them and nothing else, which have one name, and in which all processes have the same numbers.
    for n in 1 2; do
        unshare --net sleep 3600 & holder[n]=$!
        until [ "$(readlink "/proc/${holder[n]}/ns/net")" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.02; done
    done
    trap 'kill "${holder[@]}"' EXIT
    ip link add eth0 netns "${holder[1]}" type veth peer name eth0 netns "${holder[2]}"
    for n in 1 2; do
        nsenter --net="/proc/${holder[n]}/ns/net" sh -ec "ip link set lo up; ip addr add 10.77.0.$n/24 dev eth0; ip link set eth0 up"
    done
    rm -f job.key
    podman run --rm --user 0:0 --network none -v "$folder:/keys" quick phalanx keygen /keys/job.key > /dev/null
    chown 65534:65534 job.key
    pair() { # pair OPTIONS.. -- LAUNCHER'S..: in both containers; sets `codes`.
        local options=()
        while [ "$1" != -- ]; do options+=("$1"); shift; done
        shift
        codes=()
        for n in 1 2; do
            timeout 120 podman run --rm "${closed[@]}" --network "ns:/proc/${holder[n]}/ns/net" --hostname same \
                -v "$folder/job.key:/job.key:ro" "${options[@]}" quick phalanx run --job-key-file /job.key --nproc-per-node 2 \
                "${@//NODE/$((n - 1))}" -- elastic > "said$n" 2>&1 & pids[n]=$!
        done
        for n in 1 2; do wait "${pids[n]}" && codes[n]=0 || codes[n]=$?; done
        cat said1 said2 > "$out"
    }
    local fixed=(--nnodes 2 --node-rank NODE --master-addr 10.77.0.1)
    pair -- "${fixed[@]}"
    [ "${codes[*]}" = "0 0" ] || fail "ended with ${codes[*]}"
    trained 4
    echo "ok: two containers with one host name train by --node-rank"
    pair -- --nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint 10.77.0.1:29400 --rdzv-id job
    [ "${codes[*]}" = "0 0" ] || fail "ended with ${codes[*]}"
    trained 4
    echo "ok: .. by --rdzv-endpoint"
    # Memory goes no further than /proc does.
    pair --env PHALANX_TRANSPORT=shm -- "${fixed[@]}"
    [[ "${codes[*]}" = "1 1" ]] || fail "ended with ${codes[*]}"
    grep -q 'PHALANX_TRANSPORT' "$out" || fail "shared memory is not refused by name"
    echo "ok: .. refused over shared memory: $(grep -m1 -o 'rank [0-9].*' "$out" | cut -c 1-300)"
    # One sees the other's processes: they share memory.
    podman run -d --name first "${strict[@]}" quick sleep 600 > /dev/null
    pair --env PHALANX_TRANSPORT=shm --pid container:first -- "${fixed[@]}"
    podman rm -f -t 0 first > /dev/null
    [ "${codes[*]}" = "0 0" ] || fail "ended with ${codes[*]}"
    trained 4
    echo "ok: .. and trained over shared memory, with one process namespace"
}

programs() {
    # The image's own command trains with a program that this image lacks.
    ends 127 10 'cannot start mnist as rank 0: .* \(it is in no folder of PATH \(.*\) of this host, or of this container.s image: install it' "${strict[@]}" quick
    rm -rf given
    mkdir given
    podman run --rm --network none quick cat /usr/local/bin/elastic > given/train
    cp given/train given/foreign
    printf '\026\000' | dd of=given/foreign bs=1 seek=18 conv=notrunc status=none
    head -c 100000 given/train > given/short
    : > given/empty
    LC_ALL=C sed 's/libgcc_s\.so\.1/libgcc_x.so.1/g' given/train > given/unlinked
    printf '#!/usr/bin/python3\nprint(1)\n' > given/train.py
    chmod 755 given/*
    cp given/train given/private
    cp given/train given/data
    chmod 700 given/private
    chmod 644 given/data
    local image="this host, or (not )?in this container.s image"
    refused() { # refused CODE PROGRAM WORDS
        ends "$1" 10 "$3" "${bare[@]}" -v "$folder/given:/given:ro" quick phalanx run --nproc-per-node 2 -- "$2"
    }
    ends 0 60 'done step 2000' "${bare[@]}" -v "$folder/given:/given:ro" quick phalanx run --nproc-per-node 2 -- /given/train
    trained 2
    refused 127 /no/such/program "no such file on $image"
    refused 127 /given/train.py "is missing: /usr/bin/python3, which is not on $image"
    refused 127 /given/unlinked "^│ remedy +install the library libgcc_x.so.1 on $image"
    refused 126 /given/foreign 'it is built for s390x, and this processor is'
    refused 126 /given/short 'the binary is cut off or damaged'
    refused 126 /given/empty 'the file is empty'
    refused 126 /given/data 'is it executable\? `chmod \+x /given/data`'
    refused 126 /given/private 'its mode is 700 and its owner 0, so that this user \(65534\) may not execute it: `chmod a\+rx /given/private`'
    # A file system without programs: the tmpfs that `--read-only` gives.
    ends 126 10 'its file system is mounted with noexec' "${strict[@]}" --tmpfs /apart:noexec,mode=1777 quick sh -c \
        'cp /usr/local/bin/elastic /apart/train && exec phalanx run --nproc-per-node 2 -- /apart/train'
}

digits() {
    ends 0 300 'accuracy 9[78]\.[0-9]+ %  ranks 2' phalanx
    ends 0 60 '^good  shared memory' phalanx phalanx doctor
    ends 0 300 'accuracy 9[78]\.[0-9]+ %  ranks 4' "${bare[@]}" phalanx phalanx run --nproc-per-node 4 -- mnist --data /usr/local/share/mnist-10k
}

"$1"
