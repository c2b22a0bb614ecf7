#!/usr/bin/env bash
# The tests of phalanx-burn on Burn's devices besides Flex.
#
#     tests/devices/check.sh               on wgpu, which is Vulkan in software where there is no GPU
#     tests/devices/check.sh cuda          on these kinds of devices: cuda, wgpu
#
# Without Burn's fusion and autotuning: ranks are threads here, which fusion does not support, and tuning compiles each kernel many times.
set -euo pipefail
cd "$(dirname "$0")/../.."
devices=("$@")
[ $# != 0 ] || devices=(wgpu)

# That a tensor is changed where it lies is true only of devices that have the process's memory.
skipped=(--skip fused::parameters_are_updated_in_place)

# cuda links LLVM, which a build script downloads from GitHub. Where GitHub cannot be reached, PyPI's static libraries of the same
# version take its place; the script looks for them in the user's folder of data.
case " ${devices[*]} " in *" cuda "*)
    python=${PHALANX_TEST_PYTHON:-python3}
    bundle=tracel/tracel-llvm-23.1.0-4
    installed=$bundle/.tracel-llvm-installed
    if [ ! -e "${XDG_DATA_HOME:-$HOME/.local/share}/$installed" ] &&
        ! "$python" -c 'import urllib.request as web; web.urlopen("https://github.com", timeout=20)' 2> /dev/null; then
        export XDG_DATA_HOME=$PWD/${CARGO_TARGET_DIR:-target}/full/data
        if [ ! -e "$XDG_DATA_HOME/$installed" ]; then
            wheels=mlc-llvm-static
            mkdir -p "$XDG_DATA_HOME/$bundle"
            "$python" -m pip install -q --no-deps --target "$XDG_DATA_HOME/llvm" $wheels==23.1.1.post0 $wheels-extra-targets==23.1.1.post0
            cp -r "$XDG_DATA_HOME/llvm/mlc_llvm_static/static/." "$XDG_DATA_HOME/$bundle"
            chmod +x "$XDG_DATA_HOME/$bundle"/bin/*
            touch "$XDG_DATA_HOME/$installed"
        fi
    fi ;;
esac

# A folder of its own: Burn is built with other features than for all other tests.
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/devices
for device in "${devices[@]}"; do
    printf '\n== the tests of phalanx-burn on %s\n' "$device"
    PHALANX_TEST_DEVICE=$device cargo test --locked -p phalanx-burn --features "$(IFS=,; echo "${devices[*]}")" --test it -- \
        --test-threads 2 "${skipped[@]}"
done
