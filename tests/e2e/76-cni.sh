#!/usr/bin/env bash
# Containers in a network of Slipway's by the CNI plugin: every operation and every version of CNI, two containers and
# the host reach each other and find their names, an IPAM plugin, published ports, the daemon killed, DEL without a
# daemon, errors; containerd with runc where it is installed.
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
need_root
for program in ip nft ping python3; do command -v "$program" >/dev/null || skip "$program"; done
[ -c /dev/net/tun ] || skip "/dev/net/tun"
if [ -z "${SLIPWAY_E2E_NAMESPACE:-}" ]; then
    rm -rf "$work"
    SLIPWAY_E2E_NAMESPACE=1 exec unshare --net -- "$0" "$@"
fi
cni=${SLIPWAY_CNI:-$(dirname "$slipway")/../x86_64-unknown-linux-gnu/agent/slipway-cni}
for program in "$slipway" "$cni"; do [ -x "$program" ] || fail "$program is not built; \`make build\` builds it"; done
ip link set lo up
stop_daemon
rm -f "$SLIPWAY_RUN_DIR"/{slipway,keeper}.sock
mine=slipway-cni-$$
files=$SLIPWAY_DATA_DIR/networks/attachments
containerd=''
end_all() {
    [ -n "$containerd" ] && kill "$containerd" 2>/dev/null && wait "$containerd" 2>/dev/null
    for name in a b c; do ip netns delete "$mine-$name" 2>/dev/null; done
    awk -v under="$work/" 'index($2, under) == 1 { print $2 }' /proc/mounts | xargs -r umount -l
}
there() { ip netns exec "$mine-$1" "${@:2}"; }

version=1.1.0 more=''
# call COMMAND NAME [CONFIGURATION…]: the plugin's answer in $work/out, and its status.
call() {
    local command=$1 name=$2 config=${3-}
    [ $# -gt 2 ] || config="{\"cniVersion\": \"$version\", \"name\": \"blue\", \"type\": \"slipway-cni\", \"network\": \"${network:-cni}\"$more}"
    CNI_COMMAND=$command CNI_CONTAINERID=$mine-$name CNI_NETNS=${netns-/run/netns/$mine-$name} CNI_IFNAME=eth0 \
        CNI_PATH=${CNI_PATH:-/usr/lib/cni:/opt/cni/bin} CNI_ARGS="IgnoreUnknown=1;K8S_POD_NAME=pod-$name" "$cni" <<<"$config" >"$work/out" 2>"$work/err"
}
does() { call "$@" || fail "$1 $2: $(cat "$work/out" "$work/err") $(explain)"; }
# said EXPRESSION: a value of the answer, `x`.
said() { python3 -c 'import json, sys; x = json.load(open(sys.argv[1])); print(eval(sys.argv[2]))' "$work/out" "$1"; }
# refuses CODE WORDS COMMAND NAME [CONFIGURATION]
refuses() {
    local code=$1 words=$2; shift 2
    call "$@" && fail "$* was not refused: $(cat "$work/out")"
    [ "$(wc -l <"$work/out")" = 1 ] && [ ! -s "$work/err" ] && [ "$(said 'x["code"]')" = "$code" ] && [ -n "$(said 'x["msg"]')" ] &&
        grep -qF -- "$words" "$work/out" || fail "$*: $(cat "$work/out" "$work/err")"
    ok "$1 $2 -> $(said '"%d %s" % (x["code"], x["msg"])')"
}
members() { "$slipway" network inspect cni | python3 -c 'import json, sys; print(len(json.load(sys.stdin)[0]["sandboxes"]))'; }
nothing_left() {
    [ "$(members)" = 0 ] && [ -z "$(ls "$files")" ] || fail "left: $("$slipway" network inspect cni) $(ls "$files")"
    for name in a b c; do ! there "$name" ip link show eth0 >/dev/null 2>&1 || fail "eth0 is left in $name"; done
}

for name in a b c; do ip netns add "$mine-$name" && ip -n "$mine-$name" link set lo up || fail "ip netns add"; done
does VERSION a '{"cniVersion": "1.1.0"}'
[ "$(said 'x["supportedVersions"]')" = "['0.3.1', '0.4.0', '1.0.0', '1.1.0']" ] || fail "VERSION: $(cat "$work/out")"
ok "VERSION: $(said 'x["supportedVersions"]')"
refuses 51 'no Slipway daemon serves' STATUS a
refuses 11 'no Slipway daemon serves' ADD a
refuses 11 'no Slipway daemon serves' CHECK a
does DEL a
start_daemon
# Of a run that was ended; what its containers had went with their namespaces.
"$slipway" network rm cni tiny >/dev/null 2>&1
"$slipway" network create cni --subnet 10.77.0.0/24 >/dev/null || fail "network create: $(explain)"
does STATUS a
network=none-such refuses 50 'there is no network' STATUS a
ok "STATUS follows the daemon and the network"

does ADD a; a4=$(said 'x["ips"][0]["address"]'); a6=$(said 'x["ips"][1]["address"]')
does ADD b; b4=$(said 'x["ips"][0]["address"]'); b6=$(said 'x["ips"][1]["address"]')
[ "$(said 'x["interfaces"][0]["mtu"]'):$(said 'x["dns"]["nameservers"][0]')" = 1500:10.77.0.1 ] || fail "ADD: $(cat "$work/out")"
[ "$(ls "$files" | wc -l):$(members)" = 2:2 ] || fail "after two ADDs: $(ls "$files")"
ok "ADD: $a4 $a6 and $b4 $b6"
# A kernel gives up to ask for a neighbour's address after three seconds, in which a busy machine may not answer.
pings() { "${@:2}" ping -q -c 1 -W 30 "$1" >"$work/ping"; }
reach() {
    for address in "${b4%/*}" "${b6%/*}" 10.77.0.1; do
        wait_until 60 pings "$address" there a || fail "a does not reach $address: $(cat "$work/ping") $(explain)"
    done
    wait_until 60 pings "${a4%/*}" there b || fail "b does not reach a: $(cat "$work/ping")"
    wait_until 60 pings "${a4%/*}" || fail "the host does not reach a: $(cat "$work/ping")"
}
reach
ok "containers reach each other, by IPv4 and IPv6, and the gateway; the host reaches them"
ask='
import socket, struct, sys
query = struct.pack(">6H", 7, 0x100, 1, 0, 0, 0) + b"".join(bytes([len(l)]) + l.encode() for l in sys.argv[1].split(".")) + b"\0\0\1\0\1"
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(10)
for _ in range(12):
    s.sendto(query, ("10.77.0.1", 53))
    try: told = s.recv(512)
    except TimeoutError: continue
    print(socket.inet_ntoa(told[-4:]))
    break'
[ "$(there a python3 -c "$ask" pod-b)" = "${b4%/*}" ] || fail "the name pod-b is not found"
ok "the name of the other pod is found"
does CHECK a
there a ip link set eth0 down
refuses 104 'is down' CHECK a
# Its IPv6 addresses and routes went with the link.
does DEL a; does ADD a
does CHECK a
refuses 101 'is there already' ADD a
"$slipway" network rm cni >"$work/out" 2>&1 && fail "the network of containers was removed"
grep -q pod-a "$work/out" || fail "network rm: $(cat "$work/out")"
ok "CHECK sees an interface that is down; $(tail -n 1 "$work/out")"

# The daemon is killed under live interfaces, and one container is removed while none serves.
shape() { there "$1" ip -o addr show dev eth0 | grep -v fe80; there "$1" ip route; }
there a ip addr add 192.0.2.9/32 dev eth0
shape a >"$work/before"
does ADD c
end_daemon KILL
refuses 51 'no Slipway daemon serves' STATUS a
does DEL c; does DEL c
[ -e "$files/blue,$mine-c,eth0.gone" ] || fail "no note: $(ls "$files")"
start_daemon
without_c() { ! there c ip link show eth0 && [ "$(ls "$files" | wc -l):$(members)" = 2:2 ]; }
wait_until 20 without_c >/dev/null || fail "after the restart: $(there c ip link) $(ls "$files") $(explain)"
cmp <(shape a) "$work/before" || fail "a's interface has changed: $(shape a)"
reach
does CHECK a; does CHECK b
ok "the daemon was killed and came back: interfaces as before, and what was removed meanwhile is gone"
end_daemon TERM
start_daemon
reach
ok "the daemon was ended and came back"

does DEL a; does DEL a
netns='' does DEL b
nothing_left
ok "DEL, twice, and without a namespace"
for version in 0.3.1 0.4.0 1.0.0; do
    does ADD a
    [ "$(said 'x["cniVersion"], x["ips"][0].get("version"), x["interfaces"][0].get("mtu")')" = "('$version', $([ "$version" = 1.0.0 ] && echo None || echo "'4'"), None)" ] ||
        fail "$version: $(cat "$work/out")"
    does DEL a
done
version=1.1.0
ok "results of 0.3.1, 0.4.0 and 1.0.0"
does ADD a; does ADD b; does ADD c
more=", \"cni.dev/valid-attachments\": [{\"containerID\": \"$mine-b\", \"ifname\": \"eth0\"}]" does GC a
[ "$(members):$(ls "$files")" = "1:blue,$mine-b,eth0.json" ] || fail "after GC: $(ls "$files")"
does GC a
nothing_left
ok "GC removes what is not valid, and all without a list"

# A namespace that goes without DEL: its address is free after DEL, without a daemon too.
does ADD c
ip netns delete "$mine-c"
does DEL c
ip netns add "$mine-c"
nothing_left
ok "DEL after the namespace has gone"
more=', "runtimeConfig": {"mac": "5a:11:00:00:00:77", "ips": ["10.77.0.77/24"], "portMappings": [{"hostPort": 8077, "containerPort": 80, "protocol": "tcp"}],
    "bandwidth": {"IngressRate": 800000000, "IngressBurst": 4294967295, "EgressRate": 1600000000, "EgressBurst": 80000000}}'
does ADD a
rates=$("$slipway" port inspect "tap:blue,$mine-a,eth0" | python3 -c 'import json, sys
x = json.load(sys.stdin)[0]; print(*[x[way + kind] for way in ("receive_", "max_") for kind in ("bytes_per_second", "byte_burst")])')
[ "$rates" = "100000000 None 200000000 10000000" ] || fail "bandwidth: $rates"
there a ip -o link show eth0 | grep -q 5a:11:00:00:00:77 && [ "$(said 'x["ips"][0]["address"]')" = 10.77.0.77/24 ] || fail "capabilities: $(cat "$work/out")"
# As the process itself, and not a shell that waits for it: that would leave it behind, with the test's output open.
(exec ip netns exec "$mine-a" timeout 600 python3 -c 'import socket
s = socket.create_server(("", 80))
while True:
    c = s.accept()[0]; c.sendall(b"published"); c.close()') & server=$!
got=$(timeout 60 python3 -c 'import socket, time
for _ in range(300):
    try:
        got = socket.create_connection(("127.0.0.1", 8077), 10).recv(99)
        if got: print(got.decode()); break
    except OSError: pass
    time.sleep(0.1)')
kill "$server" 2>/dev/null; wait "$server" 2>/dev/null
[ "$got" = published ] || fail "the published port: $got $(explain)"
does DEL a
more=''
nothing_left
ok "the runtime's MAC address, IP address, port mapping and bandwidth"
if [ -x /usr/lib/cni/host-local ] || [ -x /opt/cni/bin/host-local ]; then
    ipam="\"ipam\": {\"type\": \"host-local\", \"dataDir\": \"$work/ipam\", \"ranges\": [[{\"subnet\": \"10.77.0.0/24\", \"rangeStart\": \"10.77.0.100\"}]], \"routes\": [{\"dst\": \"0.0.0.0/0\"}]}"
    more=", $ipam" version=1.0.0
    does ADD a
    [ "$(said 'x["ips"][0]["address"]')" = 10.77.0.100/24 ] || fail "host-local: $(cat "$work/out")"
    wait_until 60 pings 10.77.0.1 there a || fail "a does not reach the gateway with an IPAM plugin's address"
    does CHECK a
    call ADD a && fail "a second ADD: $(cat "$work/out")"
    [ -n "$(find "$work/ipam" -name 10.77.0.100)" ] || fail "a second ADD, which failed, freed the address: $(cat "$work/out")"
    network=none-such refuses 7 'there is no network' ADD b
    [ "$(find "$work/ipam" -name '10.*' | wc -l)" = 1 ] || fail "an address is held: $(find "$work/ipam")"
    does DEL a
    [ -z "$(find "$work/ipam" -name '10.*')" ] || fail "an address is held: $(find "$work/ipam")"
    more='' version=1.1.0
    nothing_left
    ok "addresses of the IPAM plugin host-local; it gets them back after a failure and after DEL"
fi
more=', "ipam": {"type": "no-such"}' refuses 103 'not in CNI_PATH' ADD a

# An IPAM plugin that answers a second ADD with the same address, or refuses it: either way the ADD fails, and the address
# stays that of the first. The plugin writes down how it was called.
plugins=$work/plugins
mkdir -p "$plugins"
cat >"$plugins/same" <<'P'
#!/bin/sh
here=$(dirname "$0")
cat >/dev/null
echo "$CNI_COMMAND" >>"$here/calls"
[ "$CNI_COMMAND" = ADD ] || exit 0
if [ -e "$here/full" ]; then
    echo '{"code": 12, "msg": "full"}'
    exit 1
fi
echo '{"cniVersion": "1.1.0", "ips": [{"address": "10.77.0.120/24"}]}'
P
chmod 755 "$plugins/same"
# same WORDS: the plugin was called with these commands since the last look.
same() { [ "$(tr '\n' ' ' <"$plugins/calls")" = "$* " ] || fail "the IPAM plugin's calls: $(cat "$plugins/calls")"; rm "$plugins/calls"; }
more=', "ipam": {"type": "same"}'
CNI_PATH=$plugins does ADD a
CNI_PATH=$plugins refuses 101 'is there already' ADD a
same ADD ADD
touch "$plugins/full"
CNI_PATH=$plugins refuses 12 full ADD a
same ADD
rm "$plugins/full"
CNI_PATH=$plugins refuses 101 'taken' ADD b
same ADD DEL
CNI_PATH=$plugins does CHECK a
CNI_PATH=$plugins does DEL a
same CHECK DEL
more=''
nothing_left
ok "a second ADD fails, and the IPAM plugin's address stays the first one's"

# An ADD whose connection breaks while the daemon makes the attachment: the address is free once the daemon has removed that,
# and not before. The daemon is behind a relay.
cat >"$work/relay.py" <<'P'
# Serves one connection for each way: `ask` passes on what the client says until the file is there, and hangs up without an
# answer; `hang` hangs up at once; `pass` passes on both ways.
import os, socket, sys, threading, time
at, real, file, *ways = sys.argv[1:]
def copy(source, sink):
    try:
        while data := source.recv(65536): sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError: pass
listener = socket.socket(socket.AF_UNIX)
listener.bind(at + ".new")
listener.listen()
os.rename(at + ".new", at)
for way in ways:
    client = listener.accept()[0]
    daemon = socket.socket(socket.AF_UNIX)
    daemon.connect(real)
    if way == "ask":
        threading.Thread(target=copy, args=(client, daemon), daemon=True).start()
        while not os.path.exists(file): time.sleep(0.001)
        client.shutdown(socket.SHUT_RDWR)
    elif way == "pass":
        back = threading.Thread(target=copy, args=(daemon, client), daemon=True)
        back.start()
        copy(client, daemon)
        back.join()
    client.close()
P
# relayed WAY…: the connections of the next call about a go by the relay.
relayed() {
    rm -rf "$work/relay"
    mkdir -p "$work/relay"
    timeout 300 python3 "$work/relay.py" "$work/relay/slipway.sock" "$SLIPWAY_RUN_DIR/slipway.sock" "$files/blue,$mine-a,eth0.json" "$@" & relay=$!
    wait_until 20 test -S "$work/relay/slipway.sock" || fail "no relay"
    more=", \"ipam\": {\"type\": \"same\"}, \"runDir\": \"$work/relay\""
}
relayed ask pass
CNI_PATH=$plugins refuses 11 'nothing is left' ADD a
wait "$relay" || fail "the relay"
same ADD DEL
nothing_left
for command in DEL GC; do
    relayed ask hang
    CNI_PATH=$plugins refuses 11 'stay reserved' ADD a
    wait "$relay" || fail "the relay"
    same ADD
    more=', "ipam": {"type": "same"}'
    wait_until 20 there a ip link show eth0 >/dev/null 2>&1 || fail "the daemon has not completed the ADD: $(explain)"
    CNI_PATH=$plugins does "$command" a
    same "$command"
    nothing_left
done
more=''
ok "an ADD without an answer: its address is free when the daemon has removed the attachment, or after DEL or GC"

refuses 6 'cannot be understood' ADD a '{"cniVersion": "1.1.0", '
refuses 6 'more than' ADD a "$(printf '%2000000s' '{}')"
refuses 1 'not supported' ADD a '{"cniVersion": "2.0.0", "name": "blue"}'
refuses 7 'network configuration' ADD a '{"cniVersion": "1.1.0", "name": "../x"}'
network=none-such refuses 7 'there is no network' ADD a
more=', "runtimeConfig": {"bandwidth": {"ingressRate": 7}}' refuses 7 'ingressRate' ADD a
netns=/run/netns/none-such refuses 100 'cannot open' ADD a
netns=/dev/null refuses 100 'no network namespace' ADD a
netns=/proc/self/ns/net refuses 7 "the host's own" ADD a
netns=relative refuses 4 'CNI_NETNS' ADD a
refuses 4 'CNI_COMMAND' add a
refuses 3 'there is no' CHECK a
more=', "runtimeConfig": {"ips": ["192.0.2.1"]}' refuses 7 'outside of' ADD a
there a ip link add eth0 type veth peer name other
refuses 100 'eth0' ADD a
there a ip link show other >/dev/null || fail "somebody else's interface is gone"
there a ip link delete eth0
nothing_left
"$slipway" network create tiny --subnet 10.78.0.0/30 >/dev/null || fail "network create"
network=tiny does ADD a
network=tiny refuses 11 'is full' ADD b
does DEL a
nothing_left
ok "nothing is left of what was refused"

# Debian's containerd with runc: its CRI plugin is not needed, `ctr run --cni` calls the plugins itself.
program() { command -v "$1" >/dev/null; }
if program containerd && program ctr && program runc && program busybox; then
    mkdir -p "$work/opt" "$work/net.d" "$work/root/bin"
    cp "$cni" "$work/opt/slipway-cni"
    echo '{"cniVersion": "1.0.0", "name": "blue", "plugins": [{"type": "slipway-cni", "network": "cni", "runDir": "'"$SLIPWAY_RUN_DIR"'", "dataDir": "'"$SLIPWAY_DATA_DIR"'"}]}' >"$work/net.d/10-blue.conflist"
    # `ctr` knows one place of each.
    for dir in opt:/opt/cni/bin net.d:/etc/cni/net.d; do mkdir -p "${dir#*:}"; done
    unshare --mount --propagation slave -- bash -c '
        work=$1; shift
        mount --bind "$work/opt" /opt/cni/bin && mount --bind "$work/net.d" /etc/cni/net.d || exit 9
        printf "version = 2\nroot = \"%s/c-root\"\nstate = \"%s/c-state\"\ndisabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n[grpc]\n  address = \"%s/c.sock\"\n[ttrpc]\n  address = \"%s/c.sock.ttrpc\"\n" "$work" "$work" "$work" "$work" >"$work/c.toml"
        containerd --config "$work/c.toml" 2>"$work/c.log" & daemon=$!
        for _ in $(seq 3000); do ctr --address "$work/c.sock" version >/dev/null 2>&1 && break; sleep 0.1; done
        cp "$(command -v busybox)" "$work/root/bin/busybox"
        ctr --address "$work/c.sock" run --rm --cni --rootfs "$work/root" one /bin/busybox sh -c \
            "/bin/busybox ip -o addr show dev eth0 &&
            for try in 1 2 3 4 5 6 7 8 9 10; do /bin/busybox ping -q -c 1 -W 30 10.77.0.1 && exit; done; exit 1" >"$work/c.out" 2>&1
        status=$?
        kill "$daemon"; wait "$daemon" 2>/dev/null
        exit "$status"' - "$work"
    status=$?
    [ "$status" = 0 ] && grep -q '10\.77\.0\.' "$work/c.out" || fail "containerd: status $status, $(cat "$work/c.out") $(tail -n 5 "$work/c.log") $(explain)"
    nothing_left
    ok "containerd and runc: $(grep -o '10\.77\.0\.[0-9]*/24' "$work/c.out" | head -n 1), the gateway answers, and nothing is left"
else
    say "not tried: containerd with runc, which needs containerd, ctr, runc and busybox"
fi
"$slipway" network rm cni tiny >/dev/null || fail "network rm: $(explain)"
