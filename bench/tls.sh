#!/usr/bin/env bash
# An all_reduce of two ranks of this host over TCP with TLS: three runs, a line of JSON for each size.
#
#     cargo build --release -p phalanx-cli -p phalanx-bench
#     bench/tls.sh target/release
set -euo pipefail
programs=$(realpath "$1")
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
"$programs/phalanx" certgen "$folder" here >&2
head -c 32 /dev/urandom | od -A n -t x1 | tr -d ' \n' > "$folder/job.key"
chmod 600 "$folder/job.key"
export PHALANX_TLS_CA=$folder/ca.pem PHALANX_TLS_CERT=$folder/here.pem PHALANX_TLS_KEY=$folder/here.key PHALANX_JOB_KEY_FILE=$folder/job.key
for _ in 1 2 3; do
    "$programs/phalanx-bench" all_reduce -b 1M -e 64M -f 4 --transport tcp --nproc-per-node 2 --json=-
done
