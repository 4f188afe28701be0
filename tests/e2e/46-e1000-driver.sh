#!/usr/bin/env bash
# The driver of guest/e1000-slipway in a Linux guest, with the communication status block and without: traffic whose content
# is compared, an interface that goes down and up, and what it costs in exits and interrupts. Needs a guest kernel and its
# headers (`deploy/setup/setup.sh driver`). SLIPWAY_DRIVER_ROUNDS is how often the interface goes down and up.
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
kernel=${SLIPWAY_E1000_KERNEL:-/var/lib/slipway/kernel-e1000}
headers=${SLIPWAY_E1000_HEADERS:-/var/lib/slipway/kernel-e1000-headers/build}
rounds=${SLIPWAY_DRIVER_ROUNDS:-10}
driver=$top/guest/e1000-slipway
[ -f "$kernel/vmlinuz" ] || skip "a guest kernel for modules (deploy/setup/setup.sh e1000)"
[ -f "$headers/Makefile" ] || skip "the headers of $kernel (deploy/setup/setup.sh driver)"
for program in gcc make iperf3; do command -v "$program" >/dev/null || skip "$program"; done
need_network_node "$@"

started=()
end_all() {
    local pid
    for pid in "${started[@]}"; do kill "$pid" 2>/dev/null && wait "$pid" 2>/dev/null; done
    "$slipway" port rm gen >/dev/null 2>&1
}

make -s -C "$driver" KDIR=/nowhere OUT="$work/module" 2>"$work/error" && fail "a driver without headers"
grep -q "no kernel headers in /nowhere; next step" "$work/error" || fail "no next step: $(cat "$work/error")"
make -s -C "$driver" KDIR="$headers" OUT="$work/module" FROM="$kernel" TO="$work/kernel" kernel >"$work/make" 2>&1 ||
    fail "the driver is not built: $(tail "$work/make")"
! grep -i warning: "$work/make" || fail "warnings of the compiler"
chmod a+x "$work"
ok "the driver is built without warnings"

peer=$here/e1000_driver.py
# inside ROLE ARGUMENT…: a part of the peer's program, in the guest.
inside() { timeout 120 "$slipway" exec own python3 -c "$(cat "$peer")" "$@" 2>&1; }
guest() { timeout 600 "$slipway" exec own sh -c "$1" 2>&1; }
traffic() {
    local way address
    for address in "$gateway" "$gateway6"; do
        for way in put get; do
            [ "$(inside "$way" "$address" 4000000)" = whole ] || fail "$1: $way $address: $(inside "$way" "$address" 1000)"
        done
    done
    [ "$(inside echo "$gateway" 100 1400)" = whole ] || fail "$1: datagrams: $(inside echo "$gateway" 1 100)"
}
# cost NAME BAR… -- COMMAND…: what the e1000 does meanwhile, and whether that is within bars, in $work/cost.
cost() {
    local bars=()
    while [ "$1" != -- ]; do bars+=("$1"); shift; done
    shift
    "$slipway" port inspect own >"$work/before"
    "$@" >"$work/load" 2>&1 || fail "$name: $(tail -3 "$work/load")"
    "$slipway" port inspect own >"$work/after"
    python3 "$peer" work "$work/before" "$work/after" "${bars[@]}" >"$work/cost"
}
# costs NAME BAR… -- COMMAND…: bars that hold on any machine.
costs() {
    local name=$1
    cost "${@:2}" || fail "$name: $(cat "$work/cost")"
    ok "$name: $(cat "$work/cost")"
}
# costs_under_load NAME BAR… -- COMMAND…: bars for a guest and a switch that both are busy. A machine on which one of
# them waits for its processor has the switch sleep, and the guest wake it: one of five rounds is enough.
costs_under_load() {
    local name=$1 round
    for round in 1 2 3 4 5; do
        cost "${@:2}" && ok "$name, round $round: $(cat "$work/cost")" && return
        say "$name, round $round: $(tr '\n' ' ' <"$work/cost")"
    done
    echo "SKIPPED: e2e/$test_name: $name: needs a processor for the guest and one for the switch"
}
# A guest that sends, and one that is sent to, as fast as either can.
sends() { guest "iperf3 -c $gateway -p 7002 -u -b 0 -l 64 -n 4M"; }
receives() {
    "$slipway" pktgen source --port gen --to "$mac" --rate 200k --count 100000
    # The answer comes behind all frames of the ring.
    guest "ping -c 1 -w 60 $gateway"
}

boot() {
    timeout 300 "$slipway" run --detach --name own --accel tcg --cpus "$2" --kernel "$work/kernel" --nic "$1" --wait-network \
        --privileged "$image" sleep 3600 >/dev/null || fail "no sandbox with an $1"
    gateway=$(guest 'ip route' | sed -n 's/default via \([^ ]*\).*/\1/p')
    gateway6=$(guest 'ip -6 route' | sed -n 's/default via \([^ ]*\).*/\1/p')
    address6=$(guest 'ip -6 -o addr show dev eth0 scope global' | awk '{ print $4 }')
    mac=$("$slipway" port inspect own | sed -n 's/.*"mac": "\(.*\)".*/\1/p')
    [ "$(guest 'basename "$(readlink /sys/class/net/eth0/device/driver)"')" = e1000-slipway ] || fail "another driver has the interface"
    [ ${#started[@]} -eq 0 ] || return 0
    "$slipway" port create --network default --slots 4096 gen >/dev/null || fail "no memory port"
    python3 "$peer" serve "$gateway" >"$work/serves" 2>&1 & started+=($!)
    wait_until 20 grep -q serves "$work/serves" || fail "no server: $(cat "$work/serves")"
    iperf3 -s -p 7002 >/dev/null 2>&1 & started+=($!)
    interface=$(ip -o addr show to "$gateway" | awk '{ print $2 }')
    python3 "$peer" reflect "$interface" 5 >"$work/reflects" 2>&1 & started+=($!)
    wait_until 20 grep -q reflects "$work/reflects" || fail "no reflector: $(cat "$work/reflects")"
}
# Down and up under traffic, and with other MTUs and rings. What the ring has no room for is lost, an answer among it.
shake() {
    guest "set -e; answers() { for try in 1 2 3 4 5 6 7 8 9 10; do ping -c 1 -w 5 $gateway && return; done; return 1; }
        for round in \$(seq $rounds); do
            ip link set eth0 down; ip link set eth0 up; ip route add default via $gateway; answers
        done" >"$work/shake" & local shaking=$!
    while kill -0 $shaking 2>/dev/null; do
        "$slipway" pktgen source --port gen --to "$mac" --rate 5k --burst 8 --count 500 >/dev/null
    done
    wait $shaking || fail "$1: no answer after the interface was down: $(tail "$work/shake")"
    guest "ip link set eth0 mtu 900 && ethtool -G eth0 rx 64 tx 128" >"$work/shake" || fail "$1: MTU and rings: $(cat "$work/shake")"
    guest "ping -c 2 -w 60 -s 800 $gateway" >"$work/shake" || fail "$1: no answer with an MTU of 900: $(cat "$work/shake")"
    # An interface that is down, or has such an MTU, has no IPv6.
    guest "ip link set eth0 mtu 1500 && ethtool -G eth0 rx 256 tx 256 && ip addr add $address6 dev eth0 nodad &&
        ip route add default via $gateway6" >"$work/shake" || fail "$1: an MTU of 1500: $(cat "$work/shake")"
    # The queue is never woken between its stop and the end of its ring.
    guest "iperf3 -c $gateway -p 7002 -u -b 0 -l 64 -t 3 >/dev/null & sending=\$!
        while kill -0 \$sending 2>/dev/null; do ethtool -G eth0 tx 128 && ethtool -G eth0 tx 256 || exit; done" >"$work/shake" ||
        fail "$1: rings under traffic: $(cat "$work/shake")"
    traffic "$1"
}

# Datagrams of a VLAN, whose tags the device inserts and strips, or does not.
tagged() {
    "$slipway" port set own --mac-spoof-check off >/dev/null || fail "port set"
    guest "ip link add link eth0 name tagged type vlan id 5 && ip addr add 10.77.0.2/24 dev tagged && ip link set tagged up &&
        ip neigh add 10.77.0.1 lladdr $(ip link show dev "$interface" | awk '/ether/ { print $2 }') dev tagged" >"$work/tagged" ||
        fail "VLAN: $(cat "$work/tagged")"
    [ "$(inside echo 10.77.0.1 50 1400)" = whole ] || fail "VLAN: $(tail -1 "$work/reflects")"
    guest "ethtool -K eth0 rxvlan off" >/dev/null
    [ "$(inside echo 10.77.0.1 50 1400)" = whole ] || fail "VLAN by software: $(tail -1 "$work/reflects")"
    guest "ethtool -K eth0 rxvlan on txvlan on; ip link del tagged" >/dev/null
    "$slipway" port set own --mac-spoof-check on >/dev/null
    ok "datagrams of a VLAN, by the device's tags and by the guest's"
}

boot e1000-csb 1
guest "ethtool --show-priv-flags eth0" | grep -q "csb *: on" || fail "the block is not used"
guest "ping -c 3 -w 60 $gateway" >/dev/null || fail "no answer"
traffic "with the block"
ok "with the block: ping, streams by IPv4 and IPv6 both ways, datagrams"
tagged
guest "ethtool -t eth0 offline" >"$work/selftest" && grep -q PASS "$work/selftest" || fail "the self test: $(cat "$work/selftest")"
guest "ping -c 1 -w 60 $gateway" >/dev/null || fail "no answer after the self test"
ok "ethtool's offline test passes: registers, EEPROM, interrupt, loopback, link"
costs "with the block, sending" needless_tdt_per_sent=0.02 -- sends
costs_under_load "with the block, sending" tdt_per_sent=0.02 -- sends
costs_under_load "with the block, receiving" interrupts_per_received=0.02 -- receives
shake "with the block"
ok "with the block: down and up $rounds times under traffic, an MTU of 900, rings of 64 and 128"

guest "ethtool --set-priv-flags eth0 csb off lazy-tx off" && traffic "without the block"
ok "without the block: streams and datagrams"
costs "without the block, sending" -- sends
guest "ethtool --set-priv-flags eth0 send-combining on && ethtool -C eth0 rx-usecs 1000" && traffic "send combining"
costs_under_load "send combining, at most an interrupt in 1 ms, sending" tdt_per_sent=0.1 -- sends
guest "ethtool --set-priv-flags eth0 lazy-tx on" >/dev/null && fail "send combining and lazy completion at the same time"
guest "ethtool --set-priv-flags eth0 send-combining off lazy-tx on && ethtool -C eth0 rx-usecs 50" && traffic "lazy completion"
costs "lazy completion, sending" -- sends
shake "lazy completion"
guest "ethtool --set-priv-flags eth0 polling on csb on" && traffic polling
costs "polling, receiving" interrupts_per_received=0 -- receives
guest "ethtool --set-priv-flags eth0 polling off"
ok "the private flags choose how frames are sent, and exclude each other where they must"
[ "$(guest 'cat /sys/class/net/eth0/statistics/rx_errors /sys/class/net/eth0/statistics/tx_errors /sys/class/net/eth0/statistics/tx_dropped' | sort -u)" = 0 ] ||
    fail "errors are counted: $(guest 'ip -s link show eth0')"
! guest dmesg | grep -E 'WARNING|BUG|sending has stopped' || fail "the guest's kernel complains"
ok "no errors are counted, and the kernel does not complain"
"$slipway" rm --force own >/dev/null

boot e1000-csb 2
traffic "two CPUs with the block"
shake "two CPUs with the block"
guest "ethtool --set-priv-flags eth0 csb off lazy-tx off" && traffic "two CPUs without the block"
shake "two CPUs without the block"
! guest dmesg | grep -E 'WARNING|BUG|sending has stopped' || fail "the guest's kernel complains"
ok "a guest with two CPUs, with the block and without: the same"
"$slipway" rm --force own >/dev/null

boot e1000 1
traffic "an e1000 without a block"
! guest dmesg | grep -E 'WARNING|BUG|sending has stopped' || fail "the guest's kernel complains"
ok "an e1000 that has no block"
