# Read by scripts beside it, after common.sh: two hosts, node1 and node2, and this one, login, each with a network of its own. All that a
# script starts is in one process namespace, and ends with it.
#
#     on N COMMAND..    runs a command on node N
#     $rsh              is called as ssh is
needs ip unshare nsenter
[ "$(id -u)" = 0 ] || { echo "network namespaces need root" >&2; exit 1; }
if [ "${1:-}" != inside ]; then
    code=0
    unshare --net --mount --uts --pid --fork --kill-child --mount-proc "$0" inside || code=$?
    exit $code
fi

declare -A holder
for node in 1 2; do
    unshare --net --uts sleep infinity & holder[$node]=$! started+=($!)
done
on() { nsenter --target "${holder[$1]}" --net --uts "${@:2}"; }
hostname login
printf '127.0.0.1 localhost\n10.77.0.254 login\n10.77.0.1 node1\n10.77.0.2 node2\n' > "$scratch/hosts"
mount --bind "$scratch/hosts" /etc/hosts
ip link set lo up
ip link add nodes type bridge
ip addr add 10.77.0.254/24 dev nodes
ip link set nodes up
for node in 1 2; do
    until [ "$(readlink "/proc/${holder[$node]}/ns/net")" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.02; done
    ip link add "to$node" type veth peer name eth0 netns "${holder[$node]}"
    ip link set "to$node" master nodes up
    on $node hostname "node$node"
    on $node ip link set lo up
    on $node ip addr add "10.77.0.$node/24" dev eth0
    on $node ip link set eth0 up
done
rsh=$scratch/rsh
cat > "$rsh" << END_OF_RSH
#!/bin/bash
while [ "\${1#-}" != "\$1" ]; do shift; done
case \$1 in
    node1 | 10.77.0.1) host=${holder[1]} ;;
    node2 | 10.77.0.2) host=${holder[2]} ;;
    *) echo "rsh: \$1: no such host" >&2; exit 255 ;;
esac
shift
exec nsenter --target "\$host" --net --uts sh -c "\$*"
END_OF_RSH
chmod 755 "$rsh"
