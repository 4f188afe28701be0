#!/usr/bin/env bash
# Sandboxes with the interfaces that others made in a network namespace: with veth and bridges by hand, and with
# the CNI plugins ptp alone, bridge and macvlan together. Addresses, routes, MTU, every byte both ways, forged addresses, several
# interfaces, the daemon killed, the interface gone, errors.
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
need_network_node "$@"
command -v ping >/dev/null || skip "ping"
stop_daemon
rm -f "$SLIPWAY_RUN_DIR"/{slipway,keeper}.sock
echo 'keeper = true' >>"$SLIPWAY_CONFIG"
start_collector
peer=$(cat "$here/peer.py")
keeper='' daemon='' background=()
mine=slipway-e2e-$$

# Names of namespaces are the machine's, although the interfaces of this test are not.
end_all() {
    [ ${#background[@]} = 0 ] || kill "${background[@]}" 2>/dev/null
    [ -n "$daemon" ] && runs "$daemon" && timeout 60 "$slipway" rm --force --all >/dev/null 2>&1
    [ -n "$daemon" ] && kill "$daemon" 2>/dev/null && wait "$daemon" 2>/dev/null
    [ -n "$keeper" ] && kill "$keeper" 2>/dev/null && wait "$keeper" 2>/dev/null
    local name
    for name in pod out router cni two many; do ip netns delete "$mine-$name" 2>/dev/null; done
}
start_daemon() {
    "$slipway" daemon 2>>"$work/daemon.log" & daemon=$!
    wait_until 60 test -S "$SLIPWAY_RUN_DIR/slipway.sock" || fail "no daemon: $(tail "$work/daemon.log")"
}
restart_daemon() {
    kill -9 "$daemon"; wait "$daemon" 2>/dev/null
    rm -f "$SLIPWAY_RUN_DIR/slipway.sock"
    start_daemon
}
in_guest() { "$slipway" exec --privileged "$@"; }
# run_in NAMESPACE WORDS…: a sandbox called as the namespace; a server of bytes runs in it.
run_in() {
    local name=$1; shift
    "$slipway" run --privileged --detach --name "$name" --network-namespace "/run/netns/$mine-$name" --wait-network \
        "$@" "$image" python3 -c "$peer" serve 7000 >/dev/null || fail "run $name: $(tail -3 "$work/daemon.log")"
    wait_until 60 sh -c "'$slipway' logs $name | grep -q serves" || fail "$name does not serve: $("$slipway" logs "$name")"
}
# On cores shared with others it may take several seconds to learn a neighbour's address.
pings='pings() { for try in $(seq 20); do ping -q -c 2 -i 0.2 -W 30 "$@" && return; sleep 1; done; return 1; }'

# The host's bridge with the pod; a router beside it, with a network behind it; the world beyond the host.
echo 1 >/proc/sys/net/ipv4/ip_forward
echo 1 >/proc/sys/net/ipv6/conf/all/forwarding
ip link add name br0 type bridge
# No duplicate address detection, which takes a second.
wired() { # NAMESPACE MASTER MTU: eth0 there, the other end in the bridge
    ip netns add "$mine-$1" || fail "ip netns add"
    ip link add "host-$1" mtu "$3" type veth peer name eth0 mtu "$3" netns "$mine-$1"
    [ -z "$2" ] || ip link set "host-$1" master "$2"
    ip link set "host-$1" up
    ip -n "$mine-$1" link set lo up
    ip -n "$mine-$1" link set eth0 up
}
wired pod br0 1400; wired router br0 1500; wired out '' 1500
ip link set br0 up
ip addr add 10.88.0.1/24 dev br0; ip addr add fd88::1/64 dev br0 nodad
ip addr add 192.0.2.1/24 dev host-out; ip addr add fd89::1/64 dev host-out nodad
there() { ip -n "$mine-$1" "${@:2}" || fail "ip $*"; }
there out addr add 192.0.2.2/24 dev eth0; there out addr add fd89::2/64 dev eth0 nodad
there out route add default via 192.0.2.1; there out -6 route add default via fd89::1
there router addr add 10.88.0.9/24 dev eth0; there router addr add 10.99.0.1/32 dev lo
there pod addr add 10.88.0.2/24 dev eth0; there pod addr add fd88::2/64 dev eth0 nodad
there pod route add default via 10.88.0.1; there pod -6 route add default via fd88::1
there pod route add 10.99.0.0/24 via 10.88.0.9
there pod neigh add 10.88.0.200 lladdr 02:00:00:00:00:c8 dev eth0
shape() { ip -n "$mine-pod" -o addr show dev eth0 scope global; ip -n "$mine-pod" route; ip -n "$mine-pod" -6 route; }
# Its link-local route comes when the kernel has noticed that the link is up.
is_wired() { case $(shape) in *linkdown*) false ;; *fe80::*) ;; *) false ;; esac; }
wait_until 20 is_wired || fail "the pod's link does not come up: $(shape)"
shape >"$work/made"

"$slipway" keeper 2>"$work/keeper.log" & keeper=$!
wait_until 20 listens "$SLIPWAY_RUN_DIR/keeper.sock" || fail "no keeper: $(cat "$work/keeper.log")"
start_daemon

refuses() { # WHY WORDS…
    local why=$1; shift
    "$slipway" run --rm "$@" "$image" true >"$work/out" 2>&1 && fail "not refused: $*"
    [ "$(grep -c . "$work/out")" = 1 ] && grep -qF -- "$why" "$work/out" || fail "refused with: $(cat "$work/out")"
}
refuses "cannot open the network namespace /run/netns/$mine-none" --netns "/run/netns/$mine-none"
refuses "is no network namespace" --netns /dev/null
refuses "is no network namespace" --netns /proc/self/ns/mnt
refuses "the host's own network namespace" --netns "/proc/$$/ns/net"
refuses "whose interface would it be" --netns "/run/netns/$mine-pod" --count 2
"$slipway" run --netns "/run/netns/$mine-pod" --publish 80:80 "$image" true 2>"$work/out" && fail "published"
grep -q "cannot be used with" "$work/out" || fail "$(cat "$work/out")"
ip netns add "$mine-cni"
refuses "no Ethernet interface" --netns "/run/netns/$mine-cni"
ip netns delete "$mine-cni"
wired many '' 1500
for number in 1 2 3 4; do
    there many link add "net$number" type veth peer name "far$number"; there many link set "net$number" up
done
refuses "at most 4 interfaces, and there are 5: eth0, net1, net2, net3, net4" --netns "/run/netns/$mine-many"
ip netns delete "$mine-many"
ok "what is no network namespace, has no interface, or too many, is refused in one line"

# An interface of a kind that no guest has, such as a bridge in the namespace, is left out: the daemon says so.
there pod link add net1 type bridge
there pod addr add 10.76.0.2/24 dev net1; there pod link set net1 up
run_in pod
grep -q 'interfaces="net1"' "$work/daemon.log" || fail "the daemon does not tell of net1: $(tail -3 "$work/daemon.log")"
there pod link delete net1
refuses "taken by sandbox pod" --netns "/run/netns/$mine-pod"
grep -q '10\.88\.0\.2' <<<"$("$slipway" ps)" || fail "ps: $("$slipway" ps)"
"$slipway" inspect pod | python3 -c 'import json, sys
network = json.load(sys.stdin)[0]["network"]
assert sorted(network["namespace"]["addresses"]) == [["10.88.0.2", 24], ["fd88::2", 64]], network
assert network["name"].startswith("/run/netns/") and len(network["namespace"]["routes"]) == 5, network' ||
    fail "inspect: $("$slipway" inspect pod)"
[ "$(in_guest pod cat /sys/class/net/eth0/address)" = "$(ip netns exec "$mine-pod" cat /sys/class/net/eth0/address)" ] ||
    fail "the MAC address"
grep -q '10.88.0.200.*02:00:00:00:00:c8' <<<"$(in_guest pod ip neigh show nud permanent)" || fail "neighbours: $(in_guest pod ip neigh)"
shape | diff "$work/made" - >"$work/out" || fail "the namespace is not as it was: $(cat "$work/out")"
ok "the guest has the interface's addresses, and the namespace still has them"

{ sh -c "$pings; "'for to in "$@"; do pings "$to" || exit 1; done' - 10.88.0.2 fd88::2 &&
    in_guest pod sh -c "$pings; "'for to in "$@"; do pings "$to" || exit 1; done' - \
        10.88.0.1 fd88::1 192.0.2.2 fd89::2 10.88.0.9 10.99.0.1; } >"$work/out" 2>&1 || fail "ping: $(cat "$work/out")"
in_guest pod sh -c "$pings; "'pings -M do -s 1372 10.88.0.1 && ! ping -q -c 1 -W 30 -M do -s 1373 10.88.0.1' \
    >"$work/out" 2>&1 || fail "the MTU of 1400: $(cat "$work/out")"
ok "ping both ways, IPv4 and IPv6, by the default route, by another gateway, up to the MTU"

python3 "$here/peer.py" serve 7000 >"$work/host" & background+=("$!")
ip netns exec "$mine-out" python3 "$here/peer.py" serve 7000 >"$work/far" & background+=("$!")
wait_until 20 grep -q serves "$work/host" && wait_until 20 grep -q serves "$work/far" || fail "no servers"
python3 "$here/peer.py" verify 7000 1000000 10.88.0.2 fd88::2 || fail "payloads of the host"
in_guest pod python3 -c "$peer" verify 7000 1000000 10.88.0.1 fd88::1 192.0.2.2 fd89::2 || fail "payloads of the guest"
in_guest pod python3 -c "$peer" toggle 7000 100000 10.88.0.1 fd89::2 >"$work/out" || fail "offloads: $(cat "$work/out")"
ok "every byte of TCP both ways and of each datagram is right, to the host and beyond, with each offload off and on"

# Nothing but the guest answers: no reset where the namespace's own kernel has nobody who listens.
in_guest pod ip link set eth0 down
ping -q -c 1 -W 3 10.88.0.2 >"$work/out" 2>&1 && fail "the namespace's kernel answers: $(cat "$work/out")"
in_guest pod sh -c 'ip link set eth0 up; ip route replace 10.88.0.0/24 dev eth0; ip route replace default via 10.88.0.1
    ip route replace 10.99.0.0/24 via 10.88.0.9
    ip address replace fd88::2/64 dev eth0 nodad; ip -6 route replace default via fd88::1'
sh -c "$pings; pings 10.88.0.2" >/dev/null || fail "after down and up"
in_guest pod ip address add 10.88.0.77/24 dev eth0
in_guest pod ping -q -c 2 -W 3 -I 10.88.0.77 10.88.0.1 >"$work/out" 2>&1 && fail "a forged address passes"
in_guest pod ip address del 10.88.0.77/24 dev eth0
"$slipway" port stats --json >"$work/out" || fail "port stats"
grep -q '"uplink:eth0"' "$work/out" || fail "port stats: $(cat "$work/out")"
ok "nobody answers beside the guest, and forged addresses are dropped"

# Two interfaces, each with a bridge of its own.
wired two br0 1500
ip link add name br1 type bridge; ip link set br1 up
ip addr add 10.77.0.1/24 dev br1; ip addr add fd77::1/64 dev br1 nodad; ip addr add 10.78.0.1/32 dev br1
ip link add host-two1 mtu 1300 type veth peer name net1 mtu 1300 netns "$mine-two"
ip link set host-two1 master br1; ip link set host-two1 up
there two link set net1 up
there two addr add 10.88.0.3/24 dev eth0; there two addr add fd88::3/64 dev eth0 nodad
there two addr add 10.77.0.2/24 dev net1; there two addr add fd77::2/64 dev net1 nodad
there two route add default via 10.88.0.1; there two route add 10.78.0.0/24 via 10.77.0.1
# Where the kernel has VLANs, one upon eth0 is left out: what keeps the namespace's kernel off eth0 would drop its frames.
ip -n "$mine-two" link add link eth0 name eth0.7 type vlan id 7 2>/dev/null && there two link set eth0.7 up
run_in two
for name in eth0 net1; do
    seen=$(in_guest two cat "/sys/class/net/$name/address" "/sys/class/net/$name/mtu")
    [ "$seen" = "$(ip netns exec "$mine-two" cat "/sys/class/net/$name/address" "/sys/class/net/$name/mtu")" ] ||
        fail "$name of the guest: $seen"
done
in_guest two sh -c 'ip -o address; ip route' >"$work/out" || fail "ip: $(cat "$work/out")"
for line in 'eth0.* 10\.88\.0\.3/24' 'eth0.* fd88::3/64' 'net1.* 10\.77\.0\.2/24' 'net1.* fd77::2/64' \
    '^default via 10\.88\.0\.1 dev eth0' '^10\.78\.0\.0/24 via 10\.77\.0\.1 dev net1'; do
    grep -q "$line" "$work/out" || fail "no $line: $(cat "$work/out")"
done
all_ping() {
    { sh -c "$pings; "'for to in "$@"; do pings "$to" || exit 1; done' - 10.88.0.3 fd88::3 10.77.0.2 fd77::2 &&
        in_guest two sh -c "$pings; "'for to in "$@"; do pings "$to" || exit 1; done' - \
            10.88.0.1 fd88::1 192.0.2.2 10.77.0.1 fd77::1 10.78.0.1; } >"$work/out" 2>&1 || fail "$1: $(cat "$work/out")"
}
all_ping "two interfaces"
python3 "$here/peer.py" verify 7000 500000 10.88.0.3 10.77.0.2 fd77::2 || fail "two interfaces: payloads of the host"
in_guest two python3 -c "$peer" verify 7000 500000 10.88.0.1 10.77.0.1 fd77::1 || fail "two interfaces: payloads of the guest"
grep -q '10\.88\.0\.3' <<<"$("$slipway" ps)" || fail "ps: $("$slipway" ps)"
"$slipway" inspect two | python3 -c 'import json, sys
further = json.load(sys.stdin)[0]["network"]["further"]
assert [one["settings"]["interface"] for one in further] == ["net1"], further
assert sorted(further[0]["settings"]["addresses"]) == [["10.77.0.2", 24], ["fd77::2", 64]], further' ||
    fail "inspect: $("$slipway" inspect two)"
"$slipway" port inspect two:net1 >"$work/out" || fail "port inspect: $(cat "$work/out")"
grep -q '10\.77\.0\.2' "$work/out" || fail "port inspect: $(cat "$work/out")"
restart_daemon
is_state two running || fail "the sandbox is $(state_of two)"
all_ping "two interfaces after a restart"
"$slipway" rm --force two >/dev/null || fail "rm"
[ -z "$(ip netns exec "$mine-two" nft list ruleset)" ] || fail "left: $(ip netns exec "$mine-two" nft list ruleset)"
grep -q net1 <<<"$("$slipway" port ls --json)" && fail "ports are left: $("$slipway" port ls)"
for to in 10.88.0.3 10.77.0.2; do
    sh -c "$pings; pings $to" >/dev/null || fail "the namespace's kernel does not answer again at $to"
done
ip netns delete "$mine-two"
ok "two interfaces of a namespace are the guest's, with names, MTU, addresses and routes, until it ends"

# One connection that lasts over three kills of the daemon.
rm -f "$work/stop"
python3 "$here/peer.py" flow 7000 "$work/stop" 10.88.0.2 fd88::2 >"$work/flow" 2>&1 & flow=$!
background+=("$flow")
for _ in 1 2 3; do sleep 2; restart_daemon; done
touch "$work/stop"
wait "$flow" || fail "a connection broke: $(cat "$work/flow") $(tail -3 "$work/daemon.log")"
is_state pod running || fail "the sandbox is $(state_of pod)"
ok "connections to a sandbox go on over three kills of the daemon"

# Only the name is gone; then the interface.
ip netns delete "$mine-pod"
sh -c "$pings; pings 10.88.0.2" >/dev/null || fail "after the name is gone"
ip link delete host-pod
in_guest pod true || fail "exec without a network"
spent() { awk '{ print $14 + $15 }' "/proc/$daemon/stat"; }
before=$(spent) began=$SECONDS; sleep 3; ticks=$(($(spent) - before)) time=$((SECONDS - began))
[ "$ticks" -lt $((20 * time)) ] || fail "the daemon is busy: $ticks ticks in $time s"
restart_daemon
in_guest pod true || fail "exec after a restart without a network"
grep -q "is not connected" "$work/daemon.log" || fail "the daemon does not tell: $(tail -3 "$work/daemon.log")"
"$slipway" rm --force pod >/dev/null || fail "rm"
grep -q uplink <<<"$("$slipway" port ls --json)" && fail "ports are left: $("$slipway" port ls)"
[ -z "$(ls "$SLIPWAY_DATA_DIR/networks/uplinks")" ] || fail "left: $(ls "$SLIPWAY_DATA_DIR/networks/uplinks")"
ok "a sandbox whose interface is gone goes on without a network, and leaves nothing; the daemon's CPU: $ticks ticks in $time s"

# Real plugins.
plugins=${CNI_PATH:-/usr/lib/cni:/opt/cni/bin}
bridge=$(PATH=$plugins type -P bridge) || { printf 'SKIPPED: e2e/%s: CNI needs containernetworking-plugins\n' "$test_name"; exit 0; }
plugins=${bridge%/*}
cni() { # COMMAND PLUGIN [RESULT]: for the namespace `cni`
    local config
    config=$(python3 -c 'import json, sys
one = {"cniVersion": "1.0.0", "name": "e2e", "type": sys.argv[1]}
routes = [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}] if sys.argv[5] == "eth0" else []
one["ipam"] = {"type": "host-local", "dataDir": sys.argv[2], "routes": routes,
    "ranges": [[{"subnet": "10.66.%s.0/24" % sys.argv[4]}], [{"subnet": "fd66:%s::/64" % sys.argv[4]}]]}
if one["type"] == "bridge": one.update(bridge="cni0", isGateway=True, hairpinMode=True)
if one["type"] == "macvlan": one.update(master="mac0", mtu=1500)
if sys.argv[3]: one["prevResult"] = json.loads(sys.argv[3])
print(json.dumps(one))' "$2" "$work/ipam" "${3:-}" "$number" "$interface") || fail "CNI configuration"
    CNI_COMMAND=$1 CNI_CONTAINERID=e2e CNI_NETNS=/run/netns/$mine-cni CNI_IFNAME=$interface CNI_PATH=$plugins \
        "$plugins/$2" <<<"$config"
}
as() { interface=$1 number=$2; } # the interface, and the number of the plugin's network
addresses_of() { python3 -c 'import json, sys
print(*(one["address"].split("/")[0] for one in json.load(sys.stdin)["ips"]))' <<<"$1"; }
as eth0 2
ip netns add "$mine-cni" || fail "ip netns add"
ip -n "$mine-cni" link set lo up
result=$(cni ADD ptp) || fail "ptp ADD: $result"
run_in cni
# shellcheck disable=SC2046 # addresses
python3 "$here/peer.py" verify 7000 500000 $(addresses_of "$result") || fail "ptp: payloads to the guest"
in_guest cni python3 -c "$peer" verify 7000 500000 10.66.2.1 fd66:2::1 || fail "ptp: payloads to the gateway"
cni CHECK ptp "$result" >"$work/out" 2>&1 || fail "ptp CHECK: $(cat "$work/out")"
"$slipway" rm --force cni >/dev/null || fail "rm"
cni CHECK ptp "$result" >"$work/out" 2>&1 || fail "ptp CHECK after: $(cat "$work/out")"
[ -z "$(ip netns exec "$mine-cni" nft list ruleset)" ] || fail "rules are left: $(ip netns exec "$mine-cni" nft list ruleset)"
cni DEL ptp >"$work/out" 2>&1 || fail "ptp DEL: $(cat "$work/out")"
ip netns delete "$mine-cni"
ok "the CNI plugin ptp: every byte both ways, CHECK while the sandbox runs and after"

# Two configurations in one namespace, as Multus has them. The other end of the wire of `macvlan` is a host of the same network.
ip link add mac0 type veth peer name eth1 netns "$mine-out"
ip link set mac0 up
there out link set eth1 up
there out addr add 10.66.3.1/24 dev eth1; there out addr add fd66:3::1/64 dev eth1 nodad
ip netns add "$mine-cni" || fail "ip netns add"
ip -n "$mine-cni" link set lo up
as eth0 1; first=$(cni ADD bridge) || fail "bridge ADD: $first"
as net1 3; second=$(cni ADD macvlan) || fail "macvlan ADD: $second"
run_in cni
# shellcheck disable=SC2046 # addresses
python3 "$here/peer.py" verify 7000 500000 $(addresses_of "$first") || fail "two configurations: payloads to eth0"
# shellcheck disable=SC2046 # addresses
ip netns exec "$mine-out" python3 "$here/peer.py" verify 7000 500000 $(addresses_of "$second") ||
    fail "two configurations: payloads to net1"
in_guest cni python3 -c "$peer" verify 7000 500000 10.66.1.1 fd66:1::1 10.66.3.1 fd66:3::1 || fail "two configurations: payloads of the guest"
both_check() {
    as eth0 1; cni CHECK bridge "$first" >"$work/out" 2>&1 || fail "bridge CHECK $1: $(cat "$work/out")"
    as net1 3; cni CHECK macvlan "$second" >"$work/out" 2>&1 || fail "macvlan CHECK $1: $(cat "$work/out")"
}
both_check "while the sandbox runs"
"$slipway" rm --force cni >/dev/null || fail "rm"
both_check after
[ -z "$(ip netns exec "$mine-cni" nft list ruleset)" ] || fail "rules are left: $(ip netns exec "$mine-cni" nft list ruleset)"
as net1 3; cni DEL macvlan >"$work/out" 2>&1 || fail "macvlan DEL: $(cat "$work/out")"
as eth0 1; cni DEL bridge >"$work/out" 2>&1 || fail "bridge DEL: $(cat "$work/out")"
ip netns delete "$mine-cni"
ok "two CNI configurations in one namespace, bridge and macvlan: every byte both ways, CHECK of both"

# The plugin of Slipway's own: its interface is a placeholder, and the sandbox has a port of the network's switch.
slipway_cni=${SLIPWAY_CNI:-$(dirname "$slipway")/../x86_64-unknown-linux-gnu/agent/slipway-cni}
[ -x "$slipway_cni" ] || fail "$slipway_cni is not built; \`make build\` builds it"
"$slipway" network rm cni >/dev/null 2>&1
"$slipway" network create cni --subnet 10.67.0.0/24 --ipv6-subnet fd67::/64 >/dev/null || fail "network create"
own() {
    CNI_COMMAND=$1 CNI_CONTAINERID=$mine CNI_NETNS=/run/netns/$mine-cni CNI_IFNAME=eth0 "$slipway_cni" \
        <<<'{"cniVersion": "1.1.0", "name": "e2e", "type": "slipway-cni", "network": "cni", "function": true}' >"$work/out" ||
        fail "slipway-cni $1: $(cat "$work/out") $(tail -n 3 "$work/daemon.log")"
}
ip netns add "$mine-cni" || fail "ip netns add"
TRACEPARENT=$traceparent own ADD
run_in cni
# The call that starts the sandbox says no trace: it is that of the plugin's caller, down to the guest.
below_caller() { awk -v at="$trace $caller $1" '$1 " " $3 " " $5 == at && $4 == "ok" { print $2 }' "$work/spans"; }
started() { [ -n "$(below_caller slipway.sandbox.v1.Sandboxes/Run)" ]; }
wait_until 20 started || fail "no span of the start: $(cat "$work/spans")"
[ -n "$(below_caller slipway.network.v1.Networks/Attach)" ] || fail "no span of ADD: $(cat "$work/spans")"
call=$(below_caller slipway.sandbox.v1.Sandboxes/Run)
for stage in vmm kernel agent container; do
    spans_of "$stage" | grep "^$trace [0-9a-f]* $call ok " >/dev/null || fail "the span of $stage: $(cat "$work/spans")"
done
ok "the trace of slipway-cni's caller goes on to the guest's stages"
python3 "$here/peer.py" verify 7000 500000 10.67.0.2 fd67::2 || fail "slipway-cni: payloads to the guest"
in_guest cni python3 -c "$peer" verify 7000 500000 10.67.0.1 fd67::1 || fail "slipway-cni: payloads to the gateway"
own CHECK
"$slipway" port ls --json | grep -q uplink && fail "it is at a packet socket: $("$slipway" port ls)"
restart_daemon
in_guest cni python3 -c "$peer" verify 7000 500000 10.67.0.1 || fail "slipway-cni: after a restart of the daemon"
"$slipway" rm --force cni >/dev/null || fail "rm"
own CHECK
own DEL
ip netns delete "$mine-cni"
"$slipway" network rm cni >/dev/null || fail "network rm"
ok "slipway-cni with a function: every byte both ways by the network's switch, and after a restart"
