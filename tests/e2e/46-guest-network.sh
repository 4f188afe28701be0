#!/usr/bin/env bash
# What Linux does in a guest with its interface: every byte of its traffic is checked, by TCP and UDP, IPv4
# and IPv6, between guests and with the host, in jumbo frames and VLANs, with each of its offloads on and
# off, while the interface goes down and up, changes its MTU and its queues, and loses its link. Its queues follow the CPUs.
#   SLIPWAY_DRIVER_ROUNDS  how often the interface goes down and up, 20 times unless told otherwise
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
need_network_node "$@"
for program in iperf3 ping; do command -v "$program" >/dev/null || skip "$program"; done

rounds=${SLIPWAY_DRIVER_ROUNDS:-20}
peer=$(cat "$here/peer.py")
background=()
end_all() { [ ${#background[@]} = 0 ] || kill "${background[@]}" 2>/dev/null; }
in_guest() { "$slipway" exec --privileged "$@"; }
addresses() { "$slipway" network inspect wide | python3 -c 'import json, sys
one = next(s for s in json.load(sys.stdin)[0]["sandboxes"] if s["name"] == sys.argv[1])
print(one["ipv4"], one["ipv6"])' "$1"; }

"$slipway" network rm wide >/dev/null 2>&1  # Of a run that was killed.
"$slipway" network create wide --mtu 9000 >/dev/null || fail "network create"
serve='iperf3 -s -D >/dev/null; exec python3 -c "$0" serve 7000'
boots() {
    "$slipway" run --privileged --detach --name "$1" --network wide --wait-network "${@:2}" "$image" \
        sh -c "$serve" "$peer" >/dev/null || fail "run $1"
}
boots a --queues 4
boots b --cpus 1 --max-cpus 2 --queues 2
read -r a4 a6 < <(addresses a)
read -r b4 b6 < <(addresses b)
read -r host4 host6 < <("$slipway" network inspect wide | python3 -c 'import json, sys
one = json.load(sys.stdin)[0]
print(one["gateway"], one["ipv6_gateway"])')
python3 "$here/peer.py" serve 7000 >"$work/host" & background+=("$!")
iperf3 -s >/dev/null & background+=("$!")
for name in a b; do
    wait_until 60 sh -c "'$slipway' logs $name | grep -q serves" || fail "$name does not serve: $("$slipway" logs "$name")"
done

# On cores shared with others it may take several seconds to learn a neighbour's address.
pings='pings() { for try in $(seq 20); do ping -q -c 2 -i 0.2 -W 30 "$@" && return; sleep 1; done; return 1; }'
in_guest a sh -c "$pings; "'for to in "$@"; do pings "$to" || exit 1; done' - "$b4" "$b6" "$host4" "$host6" \
    >"$work/out" 2>&1 || fail "ping: $(cat "$work/out")"
in_guest a sh -c "$pings; "'pings -M do -s 8972 "$0" && pings -M do -s 8952 "$1" &&
    ! ping -q -c 1 -W 30 -M do -s 8973 "$0"' "$b4" "$b6" >"$work/out" 2>&1 || fail "jumbo ping: $(cat "$work/out")"
ok "ping, IPv4 and IPv6, to a neighbour and to the host, up to 9,000 bytes and no further"

# Both ways at once; a datagram that is lost at the beginning ends iperf3, and a receiver may wait for a processor all that second,
# so it may try again.
measure='arrives() { grep -q "receiver" /tmp/iperf && ! grep "receiver" /tmp/iperf | grep -q " 0.00 Bytes "; }
for to in "$@"; do for kind in "" "-u -b 30M -l 1200"; do for try in 1 2 3 4 5; do
    iperf3 $kind --bidir -t 1 -c "$to" >/tmp/iperf 2>&1 && arrives && break; sleep 1
done; arrives || { echo "$to $kind"; cat /tmp/iperf; exit 1; }; done; done'
in_guest a sh -c "$measure" - "$b4" "$b6" "$host4" "$host6" >"$work/out" || fail "iperf3 in a guest: $(cat "$work/out")"
sh -c "${measure//\/tmp\/iperf/$work/iperf}" - "$a4" "$a6" >"$work/out" || fail "iperf3 on the host: $(cat "$work/out")"
ok "iperf3 both ways, TCP and UDP, IPv4 and IPv6, between guests and with the host"

in_guest a python3 -c "$peer" verify 7000 1000000 "$b4" "$b6" "$host4" "$host6" || fail "payloads of a guest"
python3 "$here/peer.py" verify 7000 1000000 "$a4" "$a6" || fail "payloads of the host"
ok "every byte of TCP both ways and of each datagram is right, IPv4 and IPv6, between guests and with the host, MTU 9000"

# A guest's own VLAN, with the addresses that it has been given: others it may not use.
vlan='ip link add link eth0 name eth0.7 type vlan id 7 && ip link set eth0.7 up &&
    ip address add "$0/32" dev eth0.7 && ip address add "$1/128" dev eth0.7 nodad &&
    ip route add "$2/32" dev eth0.7 && ip -6 route add "$3/128" dev eth0.7 metric 1'
in_guest a sh -c "$vlan" "$a4" "$a6" "$b4" "$b6" && in_guest b sh -c "$vlan" "$b4" "$b6" "$a4" "$a6" ||
    fail "no VLAN interface"
in_guest a sh -c 'cat /sys/class/net/eth0.7/statistics/rx_bytes; python3 -c "$@" || exit 1
    cat /sys/class/net/eth0.7/statistics/rx_bytes' - "$peer" verify 7000 1000000 "$b4" "$b6" >"$work/out" || fail "payloads in a VLAN"
[ "$(($(tail -1 "$work/out") - $(head -1 "$work/out")))" -gt 2000000 ] || fail "they did not pass the VLAN: $(cat "$work/out")"
for name in a b; do in_guest "$name" ip link delete eth0.7 || fail "VLAN interface"; done
ok "the same in a VLAN, with frames of 9,000 bytes and a tag"

changed=$(in_guest a python3 -c "$peer" toggle 7000 100000 "$b6" "$host4") || fail "offloads"
case $changed in *tx-tcp-segmentation*tx) ;; *) fail "which offloads are there to change? $changed" ;; esac
ok "the same after each change of an offload by ethtool: $changed"

# Traffic of three flows to `a`, from its neighbour and from the host, while COMMANDS run in `a`; then the
# same connections go on.
under_traffic() {
    local flow host
    in_guest b rm -f /tmp/stop; rm -f "$work/stop"
    in_guest b python3 -c "$peer" flow 7000 /tmp/stop "$a4" "$a6" >"$work/flow" 2>&1 & flow=$!
    python3 "$here/peer.py" flow 7000 "$work/stop" "$a4" "$a6" >"$work/flow-host" 2>&1 & host=$!
    background+=("$flow" "$host")
    in_guest a sh -c "$1" >"$work/out" 2>&1 || fail "$2: $(cat "$work/out")"
    touch "$work/stop"; in_guest b touch /tmp/stop
    wait "$flow" || fail "$2: $(cat "$work/flow")"
    wait "$host" || fail "$2, host: $(cat "$work/flow-host")"
    ok "$2: the same connections go on, $(cat "$work/flow") from the neighbour, $(cat "$work/flow-host") from the host"
}
under_traffic 'for mtu in 1500 1280 4000 9000 1300 9000; do ip link set eth0 mtu $mtu || exit 1; sleep 0.3; done' \
    "the MTU changes under traffic"
under_traffic 'for queues in 4 1 3 2 4 1 2; do ethtool -L eth0 combined $queues || exit 1
    ethtool -l eth0 | tail -2 | grep -q "Combined:.*$queues" || exit 1; sleep 0.3; done' \
    "the number of queues changes under traffic"
under_traffic 'sysctl -q net.ipv6.conf.eth0.keep_addr_on_down=1 || exit 1
    gateway=$(ip route show default); gateway6=$(ip -6 route show default)
    for round in $(seq '"$rounds"'); do ip link set eth0 down && ip link set eth0 up || exit 1; done
    ip route replace $gateway; ip -6 route replace $gateway6' \
    "the interface goes down and up $rounds times under traffic"

# Settings of ports, as SR-IOV users know them.
carrier_is() { [ "$(in_guest a cat /sys/class/net/eth0/carrier)" = "$1" ]; }
port() { "$slipway" port inspect "$1" | python3 -c 'import json, sys
print(json.load(sys.stdin)[0][sys.argv[1]])' "$2"; }
set_port() { "$slipway" port set "$@" >/dev/null || fail "port set $*"; }
small() { in_guest a python3 -c "$peer" verify 7000 20000 "$b4" "$b6" || fail "payloads: $1"; }
set_port a --link off
wait_until 30 carrier_is 0 || fail "the guest still has a carrier"
ping -q -c 1 -W 2 "$a4" >/dev/null && fail "a link that is down lets something pass"
[ "$(port a up) $(port a link)" = "False off" ] || fail "port inspect: $("$slipway" port inspect a)"
"$slipway" port ls wide | grep -q " a .*link off" || fail "port ls: $("$slipway" port ls)"
set_port a --link auto
wait_until 30 carrier_is 1 || fail "the guest has no carrier"
small "after the link came back"
device=$(ip -o link | sed -n 's/.*: \(slip[0-9]*\):.*/\1/p')
no_carrier() { ip -o link show "$device" | grep -q NO-CARRIER; }
set_port "tap:$device" --link off
wait_until 20 no_carrier || fail "the host's end still has a carrier"
set_port "tap:$device" --link on
has_carrier() { ! no_carrier; }
wait_until 20 has_carrier || fail "the host's end has no carrier"
ok "a port's link: the guest sees its carrier go and come, and so does the host on its own end"

for name in a b; do set_port "$name" --vlan 5; done
small "in a VLAN of the ports"
ping -q -c 1 -W 2 "$a4" >/dev/null && fail "a VLAN lets something out"
for name in a b; do set_port "$name" --vlan none; done
# At a byte in a second, a frame passes and is paid for in a minute or more: the first ping, or the question for its address.
set_port a --receive-rate 8bit
ping -q -c 1 -s 1000 -W 1 "$a4" >/dev/null
ping -q -c 4 -i 0.2 -W 1 "$a4" >/dev/null && fail "a byte in a second lets four pings pass"
dropped() { case $(port a dropped_out) in *"'rate'"*) ;; *) false ;; esac; }
wait_until 20 dropped || fail "nothing was dropped: $("$slipway" port inspect a)"
set_port a --max-rate 80Mbit --receive-rate 160Mbit
[ "$(port a max_bytes_per_second) $(port a receive_bytes_per_second)" = "10000000 20000000" ] ||
    fail "port inspect: $("$slipway" port inspect a)"
"$slipway" port ls wide | grep -q " a .*sends 80 Mbit/s, receives 160 Mbit/s" || fail "port ls: $("$slipway" port ls)"
small "with rates"
set_port a --max-rate none --receive-rate none
[ "$(port a receive_bytes_per_second)" = None ] || fail "port inspect: $("$slipway" port inspect a)"
other=${a4%.*}.77
in_guest a ip address add "$other/32" dev eth0 || fail "ip address"
in_guest a ping -q -c 1 -W 2 -I "$other" "$b4" >/dev/null && fail "a foreign address passes"
set_port a --mac-spoof-check off --trust on
in_guest a sh -c "$pings; "'pings -I "$0" "$1"' "$other" "$b4" >"$work/out" 2>&1 || fail "without a check: $(cat "$work/out")"
set_port a --mac-spoof-check on --trust off
[ "$(port a spoof_check) $(port a trust)" = "True False" ] || fail "port inspect: $("$slipway" port inspect a)"
ok "a port's VLAN, rates, spoof check and trust"

# refused WORDS COMMAND…: one line.
refused() {
    local words=$1 said; shift
    said=$("$slipway" "$@" 2>&1) && fail "not refused: $*"
    case "$said" in *"$words"*) ;; *) fail "$*: expected \"$words\", got: $said" ;; esac
    [ "$(printf '%s\n' "$said" | wc -l)" = 1 ] || fail "more than a line: $said"
}
refused "a rate of 0 would let nothing pass" port set a --max-rate 0bit
refused "a rate of 0 would let nothing pass" port set a --receive-rate 0bit
refused "is no rate" port set a --max-rate fast
refused "is no VLAN" port set a --vlan 4095
refused 'no port "nobody"' port set nobody --link off
refused "required" port set a
refused "possible values: auto, on, off" port set a --link up
refused "64" run --queues 65 "$image" true
refused "without a network" run --network none --queues 2 "$image" true
small "after all"
ok "bad input is one line"

# The kernel lists the queues in use.
queues() { timeout 300 "$slipway" exec b sh -c 'ls -d /sys/class/net/eth0/queues/tx-* | wc -l'; }
[ "$(queues)" = 1 ] || fail "$(queues) queue pairs with one CPU"
for cpus in 2 1; do
    timeout 300 "$slipway" update b --cpus $cpus >/dev/null || fail "update to $cpus: $(explain)"
    [ "$(queues)" = $cpus ] || fail "$(queues) queue pairs with $cpus CPUs: $(explain)"
done
ok "the queues follow the CPUs"

"$slipway" rm --force --all >/dev/null || fail "rm"
"$slipway" network rm wide >/dev/null || fail "network rm"
