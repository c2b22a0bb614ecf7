#!/usr/bin/env bash
# Our manifests (deploy/kubernetes) without Kubernetes: kubernetes.py reads each, and starts its command in pods of its own making, which have what
# the engine gives them: variables, names, addresses of their own that change at each start, a DNS server that knows a name late, process 1.
# It needs root, and a Python with PyYAML, which PHALANX_TEST_PYTHON names.
export PATH=$PATH:/usr/sbin:/sbin
source "$(dirname "$0")/common.sh"
needs "${PHALANX_TEST_PYTHON:=python3}" ip unshare nsenter
[ "$(id -u)" = 0 ] || { echo "namespaces of networks need root" >&2; exit 1; }
code=0
timeout 900 unshare --net --mount --uts --pid --fork --kill-child --mount-proc \
    "$PHALANX_TEST_PYTHON" tests/launchers/kubernetes.py "$phalanx" "$launched" "$scratch" || code=$?
exit $code
