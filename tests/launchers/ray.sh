#!/usr/bin/env bash
# Ray: a cluster of two nodes, TorchTrainer over Phalanx and launchers of our program on both; a node dies in each. PHALANX_TEST_PYTHON names a
# Python with torch, ray[train] and our package (.ci/full installs them). It needs root: the cluster has a network of its own, and ends with it.
export PATH=$PATH:/usr/sbin:/sbin
source "$(dirname "$0")/common.sh"
needs "${PHALANX_TEST_PYTHON:=python3}" ip unshare
[ "$(id -u)" = 0 ] || { echo "namespaces of networks need root" >&2; exit 1; }
# What is installed is tested: it has to be what lies here.
installed=$("$PHALANX_TEST_PYTHON" -c 'import importlib.util as of; print(of.find_spec("phalanx_torch").submodule_search_locations[0])')
cmp "$installed/ray.py" python/phalanx_torch/ray.py
# Ray's own files, which it puts there, go with the test, and so does the folder if it was not there.
[ -d /tmp/ray ] || { mkdir /tmp/ray; trap 'clean_up; rmdir --ignore-fail-on-non-empty /tmp/ray' EXIT; }
mkdir "$scratch/ray"
code=0
timeout -k 10 540 unshare --net --mount --pid --fork --kill-child --mount-proc bash -euc '
    mount --bind "$1/ray" /tmp/ray
    shift
    ip link set lo up
    ip link add eth0 type veth peer name other
    ip link set other up
    ip addr add 10.81.0.1/24 dev eth0
    ip link set eth0 up
    ip route add default via 10.81.0.254
    exec "$@"
' ray "$scratch" "$PHALANX_TEST_PYTHON" tests/launchers/ray_cluster.py "$phalanx" "$launched" "$scratch" || code=$?
exit $code
