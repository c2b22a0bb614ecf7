#!/usr/bin/env bash
# The Containerfile, built as it stands and run: podman, buildah and crun are Debian's, and debootstrap makes the images from which it begins (images.sh),
# so that no registry of images is asked. Crates come from crates.io.
#
#     apt install podman buildah crun debootstrap iproute2 util-linux
#     tests/containers/check.sh                all of it: build, and the parts of run.sh
#     tests/containers/check.sh limits two     some of it, with the images that are there, if they are of these sources
#     tests/containers/check.sh shell COMMAND..   a command where podman has these images
#
# Two images are built: the one of the docs, whose program trains with Burn (some 20 minutes of processor time), and a small one, `quick`, for all that
# looks at containers and not at models. What run.sh does has no network but its own loopback.
#
# It needs root. All is in target/containers: the bases stay there for the next time, and are gone with that folder. podman's processes and mounts end
# with the script, because they are in namespaces of its own.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PATH=$PATH:/usr/sbin:/sbin
[ "$(id -u)" = 0 ] || { echo "this needs root: it makes a Debian and mounts in it" >&2; exit 1; }
for tool in podman buildah crun debootstrap ip unshare; do
    command -v $tool > /dev/null || { echo "this needs $tool: apt install podman buildah crun debootstrap iproute2 util-linux" >&2; exit 1; }
done
if [ -z "${IN_OWN_MOUNTS:-}" ]; then
    IN_OWN_MOUNTS=1 exec unshare --mount --propagation private --pid --fork --kill-child --mount-proc "$0" "$@"
fi
# The first process of a namespace has no other way to end at a signal.
trap 'exit 130' INT
trap 'exit 143' TERM
step() { printf '\n== %s\n' "$*"; "$@"; }

folder=$(realpath -m "${CARGO_TARGET_DIR:-target}")/containers
mkdir -p "$folder"
export folder
# crun refuses controllers in both of cgroup's versions at once, and podman's locks are here.
if mountpoint -q /sys/fs/cgroup/unified; then umount /sys/fs/cgroup/unified; fi
mount -t tmpfs tmpfs /dev/shm
cat > "$folder/storage.conf" << END
[storage]
driver = "overlay"
graphroot = "$folder/storage"
runroot = "$folder/run"
END
# Without limits of its own: podman would raise them, and may not everywhere.
cat > "$folder/containers.conf" << END
[containers]
default_ulimits = ["nofile=$(ulimit -Hn):$(ulimit -Hn)", "nproc=$(ulimit -Hu):$(ulimit -Hu)"]
[engine]
runtime = "crun"
cgroup_manager = "cgroupfs"
events_logger = "none"
tmp_dir = "$folder/libpod"
END
export CONTAINERS_STORAGE_CONF=$folder/storage.conf CONTAINERS_CONF=$folder/containers.conf
# A build's commands get mounts of their own, and the network of this machine.
export BUILDAH_ISOLATION=chroot
# What was cut off.
rm -rf "$folder/run" "$folder/libpod"

if [ "${1:-}" = shell ]; then
    shift
    exec "$@"
fi
parts=("$@")
[ $# != 0 ] || parts=(build cuda limits signals two programs digits)
for part in "${parts[@]}"; do
    case $part in
        build | cuda | limits | signals | two | programs | digits) ;;
        *) echo "there is no part $part: build, cuda, limits, signals, two, programs, digits" >&2; exit 1 ;;
    esac
done
wanted() { case " ${parts[*]} " in *" $1 "*) ;; *) return 1 ;; esac }

. .ci/debian
. tests/containers/images.sh
built=()
if wanted build || wanted limits || wanted signals || wanted two || wanted programs; then built=(quick); fi
if wanted build || wanted digits; then built+=(phalanx); fi
sources=$(sources_of)
if wanted build; then
    # What is sent to a build: neither what Cargo has made here nor the history.
    for base in $(bases_of Containerfile); do base "$base"; done
    printf '%s\n' "FROM $(bases_of Containerfile | grep /debian:)" 'COPY . /sent' \
        'RUN test -e /sent/Cargo.lock && test -z "$(find /sent -name .git -o -name target -o -name "*.trace.json")" && du -sm /sent' > "$folder/Sent"
    step podman build -t sent -f "$folder/Sent" . > "$folder/sent.log" 2>&1 || { cat "$folder/sent.log" >&2; echo "FAILED: see .dockerignore" >&2; exit 1; }
    echo "ok: sent to the build are MiB: $(grep -m1 -P '\t/sent' "$folder/sent.log")"
    podman rmi -f sent > /dev/null
fi
for name in "${built[@]}"; do
    if ! wanted build && [ "$(label_of "$name")" = "$sources" ]; then continue; fi
    for base in $(bases_of Containerfile); do base "$base"; done
    arguments=()
    [ "$name" = phalanx ] || arguments=(--build-arg "PACKAGES=elastic phalanx-bench")
    begun=$SECONDS
    # As the page says, but for what the label needs.
    step podman build -t "$name" "${arguments[@]}" --label "sources=$sources" . > "$folder/$name.log" 2>&1 ||
        { tail -n 40 "$folder/$name.log" >&2; echo "FAILED: the build of $name" >&2; exit 1; }
    echo "ok: built $name in $((SECONDS - begun)) s; $(tail -n 1 "$folder/$name.log")"
    # The first stage, with what Cargo has made in it.
    podman image prune -f > /dev/null
done
if wanted cuda; then
    # Of the image for GPUs what can be made here: nothing stands for NVIDIA's image, and the program's LLVM comes from GitHub.
    cuda=deploy/containers/Containerfile.cuda
    base "$(bases_of $cuda | grep /rust:)"
    step podman build -t nvidia --target nvidia -f $cuda . > "$folder/nvidia.log" 2>&1 ||
        { tail -n 40 "$folder/nvidia.log" >&2; echo "FAILED: the stage nvidia of $cuda" >&2; exit 1; }
    # Bitcode of LLVM, and a library that the loader takes, at the places that the last stage names.
    podman run --rm --network none nvidia sh -ec 'cd /image
        test "$(head -c 2 opt/cuda/nvvm/libdevice/libdevice.10.bc)" = BC
        python3 -c "import ctypes; v = ctypes.c_int(); ctypes.CDLL(\"usr/local/lib/libnccl.so.2\").ncclGetVersion(ctypes.byref(v)); assert v.value >= 22700, v"
        du -sm /image'
    podman rmi -f nvidia > /dev/null
    echo "ok: the stage nvidia; the other stages of $cuda are not built"
fi
podman images --filter reference="localhost/*"
# In a network of its own: podman's default one is a bridge, which it leaves behind.
for part in "${parts[@]}"; do
    case $part in build | cuda) continue ;; esac
    step unshare --net tests/containers/run.sh "$part"
done
