#!/usr/bin/env bash
# Hosts that are reached by OpenSSH, with a server on each: from a login host beside them, and from one that reaches them only through it
# (ProxyJump). Hostfiles of other launchers; hosts that refuse, hang, die, or lack something: each is named, within the seconds that stand here, and no
# process of the job is left on any host. It needs root, and touches nothing of an ssh that is configured here.
export PATH=$PATH:/usr/sbin:/sbin
source "$(dirname "$0")/common.sh"
needs ssh sshd ssh-keygen python3 pgrep script
source "$(dirname "$0")/hosts.sh"

# A host that reaches login alone: nothing forwards its packets.
unshare --net --uts sleep infinity & holder[home]=$! started+=($!)
until [ "$(readlink "/proc/${holder[home]}/ns/net")" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.02; done
ip link add tohome type veth peer name eth0 netns "${holder[home]}"
ip addr add 10.78.0.254/24 dev tohome
ip link set tohome up
on home hostname home
on home ip link set lo up
on home ip addr add 10.78.0.1/24 dev eth0
on home ip link set eth0 up
echo 0 > /proc/sys/net/ipv4/ip_forward
# An address whose packets nobody takes.
ip neigh add 10.77.0.9 lladdr 02:00:00:00:00:09 dev nodes nud permanent
for node in 1 2; do on $node ip addr add "fd77::$node/64" dev eth0 nodad; done
ip addr add fd77::254/64 dev nodes nodad

chmod 755 "$scratch"
mkdir -p /run/sshd
mkdir "$scratch/keys" "$scratch/bin" "$scratch/empty"
for key in host user stranger; do ssh-keygen -q -t ed25519 -N '' -f "$scratch/keys/$key"; done
printf '* %s\n' "$(cut -d ' ' -f 1,2 "$scratch/keys/host.pub")" > "$scratch/keys/known"

# serve NODE PORT OPTION..: an ssh server in a file system of its own, of which the variable `hides` may hide a folder or file.
serve() {
    local node=$1 port=$2 enter=() file=$scratch/sshd.$1.$2 option
    [ "$node" = login ] || enter=(nsenter --target "${holder[$node]}" --net --uts)
    printf '%s\n' "Port $port" "HostKey $scratch/keys/host" "AuthorizedKeysFile $scratch/keys/user.pub" "PidFile none" "UsePAM no" \
        "PermitRootLogin yes" "PasswordAuthentication no" "KbdInteractiveAuthentication no" "StrictModes no" "SetEnv PATH=/usr/bin:/bin" \
        "PrintMotd no" "PrintLastLog no" > "$file"
    for option in "${@:3}"; do
        # The first of two settings counts.
        printf '%s\n' "$option" | cat - "$file" > "$file.new"
        mv "$file.new" "$file"
    done
    : > "$file.log"
    "${enter[@]}" unshare --mount bash -euc '
        [ -z "$2" ] || mount --bind "$3" "$2"
        exec "$(command -v sshd)" -D -e -f "$1"
    ' serve "$file" "${hides:-}" "$scratch/empty" 2> "$file.log" & server=$! started+=($!)
    for _ in $(seq 200); do
        grep -q listening "$file.log" && return
        sleep 0.05
    done
    cat "$file.log"
    echo "FAILED: no ssh server on $node" >&2
    exit 1
}
serve login 22
serve 1 22
serve 2 22
# Hosts that lack something are further servers of node2, under names of their own.
hides=$(dirname "$phalanx") serve 2 2201
hides=$(dirname "$launched") serve 2 2202
# An earlier release, and a command of the same name that is another.
mkdir "$scratch/other" "$scratch/foreign"
cat > "$scratch/other/phalanx" << 'END'
#!/bin/sh
printf '\nphalanx node 1\n\010\000\000\000\000\0050.1.9\000'
exec cat > /dev/null
END
printf '#!/bin/sh\necho "usage: phalanx [hop]" >&2\nexit 2\n' > "$scratch/foreign/phalanx"
chmod 755 "$scratch"/{other,foreign}/phalanx
hides=$(dirname "$phalanx") serve 2 2203 "SetEnv PATH=$scratch/other:/usr/bin:/bin"
hides=$(dirname "$phalanx") serve 2 2204 "SetEnv PATH=$scratch/foreign:/usr/bin:/bin"
# One whose login never comes to an end, and one whose server accepts connections and says nothing.
serve 2 2205 "ForceCommand sleep 600"
on 2 python3 -c 'import socket, time; s = socket.create_server(("", 2206)); time.sleep(3600)' & started+=($!)

for from in login home; do
    cat > "$scratch/config.$from" << END
IdentityFile $scratch/keys/user
IdentitiesOnly yes
IdentityAgent none
UserKnownHostsFile $scratch/keys/known
GlobalKnownHostsFile /dev/null
StrictHostKeyChecking yes
Host bare
    HostName node2
    Port 2201
Host without-program
    HostName node2
    Port 2202
Host older
    HostName node2
    Port 2203
Host foreign
    HostName node2
    Port 2204
Host hanging-login
    HostName node2
    Port 2205
Host mute
    HostName node2
    Port 2206
Host refusing
    HostName node2
    Port 2299
Host stranger
    HostName node2
    IdentityFile $scratch/keys/stranger
Host dark
    HostName 10.77.0.9
Host bastion
    HostName 10.78.0.254
END
done
# The first setting of each counts, but for the identity, of which all do.
sed -i "/^IdentityFile/d" "$scratch"/config.*
for from in login home; do
    printf 'Host !stranger *\n    IdentityFile %s\n' "$scratch/keys/user" >> "$scratch/config.$from"
done
printf 'Host !bastion *\n    ProxyJump bastion\n' >> "$scratch/config.home"

# phalanx_run FROM ARGUMENT..: \`phalanx run\` on the host login or home.
phalanx_run() {
    local enter=()
    [ "$1" = login ] || enter=(nsenter --target "${holder[$1]}" --net --uts)
    env PHALANX_RSH="ssh -F ${config:-$scratch/config.$1}" timeout 120 "${enter[@]}" "$phalanx" run "${@:2}"
}
# processes PATTERN: those of the job, on any host.
processes() { pgrep -af "$1" | grep -v -e 'pgrep' -e ' bash ' || true; }
of_the_job="phalanx node|$launched|phalanx-ssh-worker"
# nothing_is_left SECONDS: no process of the job runs anywhere, at the latest after so many seconds.
nothing_is_left() {
    local begun=$SECONDS
    while [ -n "$(processes "$of_the_job")" ]; do
        [ $((SECONDS - begun)) -lt "$1" ] || { processes "$of_the_job" >&2; echo "FAILED: they are left after $1 s" >&2; exit 1; }
        sleep 0.1
    done
}
# names SECONDS CODE PATTERN FROM ARGUMENT..: `phalanx run` ends with this code within so many seconds, and says this.
names() {
    local limit=$1 expected=$2 pattern=$3 code=0 begun took
    begun=$(date +%s.%N)
    phalanx_run "${@:4}" > "$scratch/out" 2>&1 || code=$?
    took=$(awk -v since="$begun" -v now="$(date +%s.%N)" 'BEGIN { printf "%.1f", now - since }')
    if [ $code != "$expected" ] || ! grep -qE "$pattern" "$scratch/out" || awk -v took="$took" -v limit="$limit" 'BEGIN { exit !(took > limit) }'
    then
        cat "$scratch/out"
        echo "FAILED with $code after $took s, not with $expected within $limit s and \"$pattern\": ${*:4}" >&2
        exit 1
    fi
    nothing_is_left 3
    echo "ok: $pattern ($4, $took s)"
}
trains() { succeeds "one group of 4, local ranks [0, 1, 0, 1]" phalanx_run "$@"; nothing_is_left 3; }
# `succeeds` starts its command by `timeout`, which finds no function.
timeout() {
    local limit=$1
    shift
    if [ "$1" = phalanx_run ]; then "$@"; else command timeout "$limit" "$@"; fi
}

echo "== a job trains, also through a jump host"
for from in login home; do
    trains $from -H node1:2,node2:2 "$launched" 4
    trains $from -H root@node1:2,node2:2 "$launched" 4
    trains $from -H '[fd77::1]:2,[fd77::2]:2' "$launched" 4
    # The hosts in another order than that in which they are listed first.
    trains $from -np 4 -H node2:2,node1:3 "$launched" 4
done
succeeds "one group of 3, local ranks [0, 1, 0]" phalanx_run login -H node1:2,login:1 "$launched" 3
succeeds "one group of 3, local ranks [0, 0, 1]" phalanx_run login -H login:1,node1:2 "$launched" 3
nothing_is_left 3

echo "== hostfiles of other launchers"
hostfile() {
    printf '%b' "$1" > "$scratch/hosts.of-test"
    trains login --hostfile "$scratch/hosts.of-test" "${@:2}" "$launched" 4
}
hostfile 'node1 slots=2\nnode2 slots=2\n'                                       # DeepSpeed, Horovod
hostfile '# the machines\n\nnode1 slots=2 max_slots=4 # the first\n   node2   slots=2 max-slots=4\n'  # Open MPI
hostfile 'node1:2\nnode2:2\n'                                                   # MPICH, Intel MPI, Horovod
hostfile 'node1\nnode1\nnode2\nnode2\n'                                         # a line for each slot, as PBS writes them
hostfile 'root@node1 slots=2\r\n[fd77::2]:2\r\n'                                # a user, IPv6, and ends of lines of another system
printf 'node1:2\nnode2 4\n' > "$scratch/hosts.of-test"
names 2 2 'hosts.of-test: line 2: "4" is not KEY=VALUE' login --hostfile "$scratch/hosts.of-test" "$launched" 4

echo "== hosts that cannot be used, beside one that can: each is named, with what to do"
for from in login home; do
    bad() { names "$1" "$2" "$3" $from -H "node1:2,$4:2" --start-timeout 5 "$launched" 4; }
    bad 3 1 'refusing: no ssh server listens there: .*[Cc]onnection refused.*--ssh-port' refusing
    bad 3 1 'stranger: it accepts none of the keys: .*Permission denied.*ssh-copy-id stranger' stranger
    # ssh may notice it in the same moment.
    for silent in dark mute; do
        bad 7 1 "$silent has not answered within 5 s.*can .ssh $silent true. be run|$silent: it does not answer: .*timed out.*Does a firewall drop" $silent
    done
    # ssh is given two seconds to end the login by itself.
    bad 9 1 'hanging-login has not answered within 5 s.*can .ssh hanging-login true. be run' hanging-login
    bad 3 1 'bare: there is no phalanx, neither at .* nor in its PATH.*install the same version there' bare
    bad 3 1 'older has Phalanx 0.1.9, this machine .*install the same version on all hosts' older
    bad 3 1 'foreign: ssh ended with exit code 2 before phalanx answered: usage.*phalanx --version' foreign
    # The program's own exit code, as a shell has it.
    bad 4 127 'without-program: cannot start .*launched as rank [23]: No such file.*is the path right' without-program
done
bad() { names "$1" 1 "$2" "$3" -H node1:2,nowhere:2 --start-timeout 5 "$launched" 4; }
bad 3 'nowhere: there is no host of this name: ssh: Could not resolve hostname nowhere' login
bad 3 'nowhere: its jump host (finds no address for|knows no host of) this name: channel 0: .*HostName in ~/.ssh/config' home
# Ranks cannot reach each other, though ssh reaches all.
on 2 ip neigh replace 10.77.0.1 lladdr 02:00:00:00:00:09 dev eth0 nud permanent
names 12 1 'node2: .*no store at 10.77.0.1:[0-9]* after .*firewall between the hosts' login -H node1:2,node2:2 --start-timeout 5 "$launched" 4
on 2 ip neigh del 10.77.0.1 dev eth0

echo "== jump hosts that cannot be used"
# jump SECONDS PATTERN SETTING: with another setting for the jump host, of which the first counts.
jump() {
    printf 'Host bastion\n    %b\nHost *\n' "$3" | cat - "$scratch/config.home" > "$scratch/config.jump"
    config=$scratch/config.jump names "$1" 1 "$2" home -H node1:2,node2:2 --start-timeout 5 "$launched" 4
}
serve login 2210 "AllowTcpForwarding no"
serve login 2211 "AuthorizedKeysFile $scratch/keys/stranger.pub"
python3 -c 'import socket, time; s = socket.create_server(("", 2206)); time.sleep(3600)' & started+=($!)
jump 3 'node[12]: its jump host \(ProxyJump\): no ssh server listens there: ssh: connect to host 10.78.0.254 port 2299: Connection refused' 'Port 2299'
jump 3 'node[12]: its jump host \(ProxyJump\): it accepts none of the keys: .*ssh-copy-id JUMP_HOST' 'Port 2211'
jump 3 'node[12]: its jump host \(ProxyJump\): its host key is not known.*ssh JUMP_HOST' "UserKnownHostsFile $scratch/keys/none"
jump 3 'node[12]: its jump host connects nobody to other hosts: .*AllowTcpForwarding yes' 'Port 2210'
jump 3 'node[12]: its jump host \(ProxyJump\): there is no host of this name: .*nowhere' 'HostName nowhere'
jump 7 'node1, node2 have not answered within 5 s' 'Port 2206'
# One that turns away who comes while another logs in is tried again.
serve login 2212 "MaxStartups 1:100:1"
printf 'Host bastion\n    Port 2212\nHost *\n' | cat - "$scratch/config.home" > "$scratch/config.jump"
config=$scratch/config.jump trains home -H node1:2,node2:2 "$launched" 4
# Nothing asks at the terminal, where the answer could not be read: the question of a jump host whose key is not known would come again and again.
printf 'Host bastion\n    %s\n    StrictHostKeyChecking ask\nHost *\n' "UserKnownHostsFile $scratch/keys/none" | cat - "$scratch/config.home" > "$scratch/config.asks"
export phalanx launched scratch home=${holder[home]}
asked() {
    PHALANX_RSH="ssh -F $scratch/config.asks" command timeout 60 script -qec \
        'nsenter --target $home --net --uts $phalanx run -H node1:2,node2:2 --start-timeout 5 $launched 4' /dev/null
}
code=0
asked > "$scratch/out" 2>&1 || code=$?
if [ $code != 1 ] || ! grep -q 'its jump host (ProxyJump): its host key is not known' "$scratch/out" || [ "$(grep -c 'continue connecting' "$scratch/out")" != 0 ]
then
    cat "$scratch/out"
    echo "FAILED with $code: a jump host's question at a terminal" >&2
    exit 1
fi
echo "ok: no question at a terminal"

echo "== the command's own machine behind a jump host"
names 14 1 'node1 sees this machine come from 10.77.0.254, which is none of its addresses.*--master-addr.*name another host first' \
    home -H localhost:2,node1:2 --start-timeout 5 "$launched" 4

echo "== hosts that die in the middle"
# begins FROM: a job runs on both hosts, four ranks in all.
begins() {
    phalanx_run "$1" -H node1:2,node2:2 --grace-period 3 -- bash -c 'echo it runs; exec -a phalanx-ssh-worker sleep 4321' > "$scratch/out" 2>&1 & job=$!
    started+=($job)
    for _ in $(seq 300); do
        [ "$(grep -c 'it runs' "$scratch/out")" != 4 ] || return 0
        sleep 0.1
    done
    cat "$scratch/out"
    echo "FAILED: the job has not begun" >&2
    exit 1
}
# ends SECONDS PATTERN SECONDS: it ends with 1, and says this; and later nothing is left.
ends() {
    local begun code=0 took
    begun=$(date +%s.%N)
    wait "$job" || code=$?
    took=$(awk -v since="$begun" -v now="$(date +%s.%N)" 'BEGIN { printf "%.1f", now - since }')
    if [ $code != 1 ] || ! grep -qE "$2" "$scratch/out" || awk -v took="$took" -v limit="$1" 'BEGIN { exit !(took > limit) }'; then
        cat "$scratch/out"
        echo "FAILED with $code after $took s, not with 1 within $1 s and \"$2\"" >&2
        exit 1
    fi
    nothing_is_left "$3"
    took=$(awk -v since="$begun" -v now="$(date +%s.%N)" 'BEGIN { printf "%.1f", now - since }')
    echo "ok: $2 (nothing left after $took s)"
}
# all_of NODE PATTERN: the processes of this pattern in the network of this host.
all_of() {
    local process
    for process in $(pgrep -f "$2"); do
        [ "$(readlink "/proc/$process/ns/net")" != "$(readlink "/proc/${holder[$1]}/ns/net")" ] || echo "$process"
    done
}
for from in login home; do
    begins $from
    kill -9 $(all_of 2 'phalanx node')
    ends 8 'node2: the connection to its launcher is lost .*is the host up' 8
    begins $from
    ip link set to2 down
    ends 25 'node2: the connection to its launcher is lost|host +node2$' 30
    ip link set to2 up
done
# The jump host alone is lost: the hosts hear nothing more of the command, which may come to know of it later than they.
begins home
ip link set tohome down
ends 25 'node[12]: the connection to its launcher is lost' 75
ip link set tohome up
# The command is killed.
for from in login home; do
    begins $from
    kill -9 $(pgrep -f "^$phalanx run")
    wait "$job" || true
    nothing_is_left 8
    echo "ok: nothing is left of a command that was killed ($from)"
done
