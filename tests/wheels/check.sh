#!/usr/bin/env bash
# What a release publishes of the Python package: it is built (.ci/wheels), its types are checked, and the wheel is installed from an index on
# loopback into an old Debian, where two ranks under its `phalanx run` reduce NumPy's arrays, over shared memory and over TCP.
#
#     apt install debootstrap python3-venv unzip binutils
#     tests/wheels/check.sh            all of it
#     tests/wheels/check.sh types      some of it: wheel, types, old
#
# `types` has mypy and pyright read the package, and the Python programs of our pages, with the PyTorch and NumPy of PHALANX_TEST_PYTHON; without
# PyTorch there they fail.
# `old` needs root. The wheel is for glibc 2.17; bullseye, whose glibc is 2.31, is the oldest Debian that mirrors still have. Its own Python is older
# than ours may be, so that a Python is built there, once, from the sources of a later Debian, in target/wheels/debian.
set -euo pipefail
cd "$(dirname "$0")/../.."
parts=("$@")
[ $# != 0 ] || parts=(wheel types old)
for part in "${parts[@]}"; do
    case $part in
        wheel | types | old) ;;
        *) echo "there is no part $part: wheel, types, old" >&2; exit 1 ;;
    esac
done
wanted() { case " ${parts[*]} " in *" $1 "*) ;; *) return 1 ;; esac }
if wanted old && [ -z "${IN_OWN_MOUNTS:-}" ]; then
    [ "$(id -u)" = 0 ] || { echo "this needs root: it makes a Debian and mounts in it" >&2; exit 1; }
    # In namespaces of its own, so that whatever it mounts is gone with it.
    IN_OWN_MOUNTS=1 exec unshare --mount --propagation private tests/wheels/check.sh "${parts[@]}"
fi
step() { printf '\n== %s\n' "$*"; "$@"; }

folder=$(realpath -m "${CARGO_TARGET_DIR:-target}")/wheels
mkdir -p "$folder"
tools=$folder/tools
packages=(ziglang cargo-zigbuild build auditwheel twine mypy pyright)
if [ "$(cat "$tools/made" 2> /dev/null)" != "${packages[*]}" ]; then
    step python3 -m venv --clear "$tools"
    step "$tools/bin/python3" -m pip install -q "${packages[@]}"
    echo "${packages[*]}" > "$tools/made"
fi
export PATH=$tools/bin:$PATH:/usr/sbin:/sbin

if wanted wheel; then step .ci/wheels; fi

if wanted types; then
    python=$(command -v "${PHALANX_TEST_PYTHON:-python3}")
    "$python" -c 'import numpy, torch'
    rm -rf "$folder/programs"
    mapfile -t pages < <(git ls-files 'docs/*.md' python/README.md README.md)
    python3 tests/wheels/programs.py "$folder/programs" "${pages[@]}"
    checked=(python/phalanx_torch "$folder"/programs/*.py)
    MYPYPATH=python step mypy --strict --cache-dir "$folder/mypy" --python-executable "$python" "${checked[@]}"
    # From `python`, so that it finds the package.
    (cd python && step pyright --pythonpath "$python" phalanx_torch "$folder/programs")
fi

wanted old || exit 0
. .ci/debian
old=$folder/debian
python=/python/bin/python3
needed=(gcc make libc6-dev zlib1g-dev libffi-dev libssl-dev dpkg-dev)
if ! made "$old" "${needed[@]}"; then
    rm -rf --one-file-system "$old"
    step debootstrap --variant=minbase --include=ca-certificates bullseye "$old" "$mirror"
    like_the_host "$old"
    echo "deb-src $mirror bookworm main" >> "$old/etc/apt/sources.list"
    step within "$old" apt-get update -q
    step within "$old" apt-get install -q -y --no-install-recommends "${needed[@]}"
    step within "$old" sh -ec "mkdir -p /usr/src/python && cd /usr/src/python && apt-get source -q --download-only python3.11 &&
        tar -xf python3.11_*.orig.tar.* --strip-components 1 && ./configure -q --prefix=/python && make -s -j$(nproc) > log 2>&1 && make -s install >> log 2>&1"
    echo "${needed[*]}" > "$old/made"
fi
like_the_host "$old"
with_system "$old"
mkdir -p "$old/src"
mount --bind . "$old/src"

# An index as pip reads it: a folder for each package. NumPy's wheel comes from PyPI.
served=$folder/index
rm -rf "$served"
mkdir -p "$served/phalanx-torch" "$served/numpy" "$old/index"
cp "$folder"/dist/phalanx_torch-*manylinux_*_x86_64.whl "$served/phalanx-torch"
step within "$old" $python -m pip download -q --no-deps --only-binary :all: --dest /index numpy
mv "$old"/index/numpy-*.whl "$served/numpy"
serve_index "$served"

within "$old" $python -m venv --clear /empty
begun=$(date +%s%N)
step within "$old" /empty/bin/python3 -m pip install -q --isolated --disable-pip-version-check --index-url "$index" --only-binary :all: 'phalanx-torch[numpy]'
echo "installed in $((($(date +%s%N) - begun) / 1000000)) ms"
within "$old" /empty/bin/python3 -c 'import platform, sys, phalanx_torch
print("phalanx_torch", phalanx_torch.__version__, "on glibc", platform.libc_ver()[1], "and Python", platform.python_version())'
within "$old" /empty/bin/phalanx --version
for transport in shm tcp; do
    step within "$old" timeout 120 env PHALANX_TRANSPORT=$transport /empty/bin/phalanx run --nproc-per-node 2 -- \
        /empty/bin/python3 /src/tests/aarch64/arrays.py $transport x86_64
done
