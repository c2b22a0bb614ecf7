# Read by the scripts beside it: each starts the real thing, checks what comes of it, and fails if a tool is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

needs() {
    for tool in "$@"; do
        command -v "$tool" > /dev/null || { echo "this needs $tool: .ci/full installs it" >&2; exit 1; }
    done
}

cargo build --quiet --locked -p phalanx --example launched -p phalanx-cli --bin phalanx
launched=$(realpath -m "${CARGO_TARGET_DIR:-target}")/debug/examples/launched
phalanx=$(realpath -m "${CARGO_TARGET_DIR:-target}")/debug/phalanx

scratch=$(mktemp -d)
started=()
clean_up() {
    for process in "${started[@]}"; do kill "$process" 2> /dev/null || true; done
    for process in "${started[@]}"; do wait "$process" 2> /dev/null || true; done
    rm -rf "$scratch"
}
trap clean_up EXIT

# succeeds EXPECTED COMMAND..: it ends well, and says this line once.
succeeds() {
    local expected=$1 code=0
    shift
    timeout 120 "$@" > "$scratch/out" 2>&1 || code=$?
    if [ $code != 0 ] || [ "$(grep -cF "$expected" "$scratch/out")" != 1 ]; then
        cat "$scratch/out"
        echo "FAILED with $code, or without one \"$expected\": $*" >&2
        exit 1
    fi
    echo "ok: $expected ($1)"
}

# fails EXPECTED COMMAND..: it ends with an error before the time is up, and says something like this.
fails() {
    local expected=$1 code=0
    shift
    timeout 120 "$@" > "$scratch/out" 2>&1 || code=$?
    if [ $code = 0 ] || [ $code = 124 ] || ! grep -qE "$expected" "$scratch/out"; then
        cat "$scratch/out"
        echo "FAILED with $code, or without \"$expected\": $*" >&2
        exit 1
    fi
    echo "ok: ended with $code, $expected ($1)"
}

# A port that was free a moment ago, and that the system gives to no connection.
free_port() { python3 python/tests/ports.py; }
