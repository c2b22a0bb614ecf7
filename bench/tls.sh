#!/usr/bin/env bash
# An all_reduce of two ranks of this host over TCP with TLS: three runs, a line of JSON for each size.
#
#     cargo build --release -p phalanx-cli -p phalanx-bench
#     bench/tls.sh target/release
#     bench/tls.sh target/release plain      each run behind one without TLS, to compare
set -euo pipefail
programs=$(realpath "$1")
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
"$programs/phalanx" certgen "$folder" here >&2
head -c 32 /dev/urandom | od -A n -t x1 | tr -d ' \n' > "$folder/job.key"
chmod 600 "$folder/job.key"
export PHALANX_TLS_CA=$folder/ca.pem PHALANX_TLS_CERT=$folder/here.pem PHALANX_TLS_KEY=$folder/here.key PHALANX_JOB_KEY_FILE=$folder/job.key
first=1M
[ "${2:-}" != plain ] || first=64K
run() { "$@" "$programs/phalanx-bench" all_reduce -b $first -e 64M -f 4 --transport tcp --nproc-per-node 2 --json=-; }
for _ in 1 2 3; do
    if [ "${2:-}" = plain ]; then
        echo '# without TLS'
        run env -u PHALANX_TLS_CA -u PHALANX_TLS_CERT -u PHALANX_TLS_KEY
        echo '# with TLS'
    fi
    run env
done
