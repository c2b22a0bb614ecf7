#!/usr/bin/env bash
# The Python package's wheel for 64-bit ARM: built on another processor, installed by an ARM Python's pip, and run under qemu-user.
#
#     apt install debootstrap
#     tests/aarch64/wheel.sh               the wheel, two ranks that reduce NumPy's arrays, over shared memory and over TCP, and PyTorch's
#                                          DistributedDataParallel over both, started by the wheel's own `phalanx run`
#     tests/aarch64/wheel.sh arrays check  some of it: arrays; ddp; check, which is tests/aarch64/check.sh without rustup
#     WHEEL=FILE tests/aarch64/wheel.sh    the same with a wheel that is there, such as the one of `.ci/wheels aarch64-unknown-linux-gnu`, and with the
#                                          host's qemu (apt install qemu-user-static)
#
# It needs root, a Debian that is not ARM itself, a kernel with binfmt_misc, and the network: Debian's packages, crates.io and PyPI. It makes
# two Debians in target/aarch64/debian, which stay there for the next time, 5 GB with what is built: one of the host's processor, which has
# Rust with the standard library for ARM and qemu (not with WHEEL), and one of ARM. Mirror, certificates and pip's settings are the host's. Nothing
# stays mounted. While it runs, the kernel starts the host's ARM programs with qemu.
#
# Of ARM's order of memory accesses it shows as little as check.sh.
set -euo pipefail
cd "$(dirname "$0")/../.."
parts=("$@")
[ $# != 0 ] || parts=(arrays ddp)
for part in "${parts[@]}"; do
    case $part in
        arrays | ddp | check) ;;
        *) echo "there is no part $part: arrays, ddp, check" >&2; exit 1 ;;
    esac
done
wanted() { case " ${parts[*]} " in *" $1 "*) ;; *) return 1 ;; esac }
[ -z "${WHEEL:-}" ] || ! wanted check || { echo "check builds what it tests, and takes no wheel" >&2; exit 1; }
export PATH=$PATH:/usr/sbin:/sbin
[ "$(id -u)" = 0 ] || { echo "this needs root: it makes two Debians and mounts in them" >&2; exit 1; }
for tool in debootstrap unshare; do
    command -v $tool > /dev/null || { echo "this needs $tool: apt install debootstrap util-linux" >&2; exit 1; }
done
[ "$(dpkg --print-architecture)" != arm64 ] || { echo "this is an ARM: .ci/full python tests the wheel there" >&2; exit 1; }
# In namespaces of its own, so that whatever it mounts is gone with it.
if [ -z "${IN_OWN_MOUNTS:-}" ]; then
    IN_OWN_MOUNTS=1 exec unshare --mount --propagation private tests/aarch64/wheel.sh "${parts[@]}"
fi

# The first Debian whose Rust is new enough. PyTorch's wheel for ARM on PyPI has 139 MB in this version; in later ones it has 400 and more, and
# in 2.15 needs libraries of CUDA.
debian=forky
torch=torch==2.10.0
triple=aarch64-unknown-linux-gnu
folder=$(realpath -m "${CARGO_TARGET_DIR:-target}")/aarch64/debian
build=$folder/build
arm=$folder/arm64

. .ci/debian
# As debootstrap takes a Debian that it does not know yet.
bootstrap() { debootstrap --variant=minbase "$@" "$mirror" /usr/share/debootstrap/scripts/sid; }
mounted() {
    with_system "$1"
    mkdir -p "$1/src" "$1/wheels"
    mount --bind . "$1/src"
    mount --bind "$folder/wheels" "$1/wheels"
}
step() { printf '\n== %s\n' "$*"; "$@"; }

mkdir -p "$folder/wheels"
if [ -n "${WHEEL:-}" ]; then
    # One without libraries, since there are none of the host's in a chroot.
    qemu=$(command -v qemu-aarch64-static) || { echo "this needs qemu-aarch64-static: apt install qemu-user-static" >&2; exit 1; }
    rm -f "$folder"/wheels/*.whl
    cp "$WHEEL" "$folder/wheels"
else
    qemu=$build/usr/bin/qemu-aarch64
    packages=(rustc cargo gcc libc6-dev libstd-rust-dev:arm64 gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user python3-venv python3-pip)
    if ! made "$build" $debian "${packages[@]}"; then
        rm -rf --one-file-system "$build"
        step bootstrap --include=ca-certificates $debian "$build"
        like_the_host "$build"
        mount -t proc proc "$build/proc"
        within "$build" dpkg --add-architecture arm64
        step within "$build" apt-get update -q
        step within "$build" apt-get install -q -y --no-install-recommends "${packages[@]}"
        umount "$build/proc"
        echo "$debian ${packages[*]}" > "$build/made"
    fi
    like_the_host "$build"
    mounted "$build"

    if wanted check; then
        step within "$build" CARGO_TARGET_DIR=/target /src/tests/aarch64/check.sh
    fi
    wanted arrays || wanted ddp || exit 0

    # Both builds for one target, as python/with_command.py passes it on. What lies in the checkout's python/target is left alone.
    rm -f "$folder"/wheels/*.whl
    mkdir -p python/target "$build/wheel-data"
    mount --bind "$build/wheel-data" "$build/src/python/target"
    step within "$build" CARGO_TARGET_DIR=/target CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
        python3 -m pip wheel -q --no-deps --wheel-dir /wheels /src/python --config-settings "build-args=--target $triple"
fi
wheel=$(basename "$folder"/wheels/phalanx_torch-*.whl)
case $wheel in *aarch64.whl) echo "$wheel" ;; *) echo "this is no wheel for ARM: $wheel" >&2; exit 1 ;; esac

packages=(ca-certificates python3-venv)
made "$arm" $debian "${packages[@]}" || {
    rm -rf --one-file-system "$arm"
    include=${packages[*]}
    step bootstrap --arch=arm64 --foreign --include="${include// /,}" $debian "$arm"
    # The second stage reads the list of all packages of Debian anew for each few that it installs, emulated: minutes each. These are all that it needs.
    for list in "$arm"/var/lib/apt/lists/*_Packages; do
        awk 'NR == FNR { wanted[$1]; next } { name = $0; sub(/\n.*/, "", name); sub(/^Package: /, "", name); if (name in wanted) print }' \
            "$arm/debootstrap/debpaths" RS= ORS='\n\n' "$list" > "$list.new"
        mv "$list.new" "$list"
    done
}
# The kernel starts ARM programs with qemu, which it keeps open: no chroot needs one.
if ! chroot "$arm" /bin/true 2> /dev/null; then
    binfmt=/proc/sys/fs/binfmt_misc
    [ -e $binfmt/register ] || mount -t binfmt_misc none $binfmt
    name=phalanx-aarch64-$$
    trap 'echo -1 > $binfmt/$name' EXIT
    zeros='\x00\x00\x00\x00\x00\x00\x00\x00' ones='\xff\xff\xff\xff\xff\xff\xff\xff'
    printf %s ":$name:M::\\x7fELF\\x02\\x01\\x01\\x00$zeros\\x02\\x00\\xb7\\x00:\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\x00$ones\\xfe\\xff\\xff\\xff:$qemu:PF" \
        > $binfmt/register
    chroot "$arm" /bin/true
fi
if [ -e "$arm/debootstrap" ]; then step chroot "$arm" /debootstrap/debootstrap --second-stage; fi
echo "$debian ${packages[*]}" > "$arm/made"
like_the_host "$arm"
mounted "$arm"

python=/python/bin/python3
[ -x "$arm$python" ] && within "$arm" $python -c 'import pip' 2> /dev/null || step within "$arm" python3 -m venv --clear /python
needed=(numpy)
if wanted ddp; then needed+=($torch); fi
# What is compiled in emulation takes longer than what is read once.
step within "$arm" $python -m pip install -q --no-compile "${needed[@]}"
step within "$arm" $python -m pip install -q --no-compile --no-deps --force-reinstall "/wheels/$wheel"
within "$arm" $python -c 'import platform; print("Python", platform.python_version(), platform.machine())'
within "$arm" /python/bin/phalanx --version

# succeeds EXPECTED COMMAND..: it ends well, and says this once.
succeeds() {
    local expected=$1 code=0
    shift
    within "$arm" timeout 900 "$@" > "$folder/out" 2>&1 || code=$?
    if [ $code != 0 ] || [ "$(grep -cF "$expected" "$folder/out")" != 1 ]; then
        cat "$folder/out"
        echo "FAILED with $code, or without one \"$expected\": $*" >&2
        exit 1
    fi
    echo "ok: $(grep -F "$expected" "$folder/out")"
}
for transport in shm tcp; do
    run=(env PHALANX_TRANSPORT=$transport OMP_NUM_THREADS=1 /python/bin/phalanx run --nproc-per-node 2 -- $python)
    if wanted arrays; then
        succeeds "arrays of 2 ranks over $transport" "${run[@]}" /src/tests/aarch64/arrays.py $transport
    fi
    if wanted ddp; then
        succeeds "2 replicas are as one process, restarts: 0" "${run[@]}" /src/tests/launchers/ddp.py phalanx
    fi
done
