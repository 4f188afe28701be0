# Guests with an e1000 interface, and a list of checks that hold with any driver of it. Sourced after lib.sh.
#   guest_kernel   directory of the guest's kernel
#   guest_driver   name of the driver that shall have the interface
#   SLIPWAY_DRIVER_ROUNDS   how often the interface goes down and up (2); from 10 on guests of more kinds are tried
# The guest is the sandbox `nic`. For `checks` there are a server, a reflector for VLANs, iperf3 and the memory port `gen` on the
# host (`start_peers`), and in the guest's network the sandbox `neighbour`, which has a virtio-net interface (`boot_neighbour`).
kernel=${SLIPWAY_E1000_KERNEL:-/var/lib/slipway/kernel-e1000}
guest_kernel=$kernel
guest_driver=e1000
rounds=${SLIPWAY_DRIVER_ROUNDS:-2}
peer=$here/e1000_driver.py

need_e1000_guests() {
    [ -f "$kernel/vmlinuz" ] || skip "a guest kernel with the driver e1000 (deploy/setup/setup.sh e1000)"
    need_network_node "$@"
}

started=()
end_all() {
    local pid
    for pid in "${started[@]}"; do kill "$pid" 2>/dev/null && wait "$pid" 2>/dev/null; done
    "$slipway" port rm gen >/dev/null 2>&1
    "$slipway" rm --force nic >/dev/null 2>&1
    "$slipway" network rm wide >/dev/null 2>&1
}

# inside ROLE ARGUMENT…: a part of the peer's program, in the guest.
inside() { timeout 120 "$slipway" exec nic python3 -c "$(cat "$peer")" "$@" 2>&1; }
guest() { timeout 600 "$slipway" exec nic sh -c "$1" 2>&1; }

# boot KIND CPUS OPTION…: a guest with an interface of this kind.
boot() {
    timeout 300 "$slipway" run --detach --name nic --accel tcg --cpus "$2" --kernel "$guest_kernel" --nic "$1" --wait-network \
        --privileged "${@:3}" "$image" sleep 36000 >/dev/null || fail "no sandbox with an $1"
    gateway=$(guest 'ip route' | sed -n 's/default via \([^ ]*\).*/\1/p')
    gateway6=$(guest 'ip -6 route' | sed -n 's/default via \([^ ]*\).*/\1/p')
    address6=$(guest 'ip -6 -o addr show dev eth0 scope global' | awk '{ print $4 }')
    mac=$("$slipway" port inspect nic | sed -n 's/.*"mac": "\(.*\)".*/\1/p')
    [ "$(guest 'basename "$(readlink /sys/class/net/eth0/device/driver)"')" = "$guest_driver" ] || fail "another driver has the interface"
}

# start_peers: what the guests of this test have on the host, at the address of their network.
start_peers() {
    "$slipway" port create --network default --slots 4096 gen >/dev/null || fail "no memory port"
    python3 "$peer" serve "$gateway" "$gateway6" >"$work/serves" 2>&1 & started+=($!)
    wait_until 20 grep -q serves "$work/serves" || fail "no server: $(cat "$work/serves")"
    iperf3 -s -p 7002 >/dev/null 2>&1 & started+=($!)
    interface=$(ip -o addr show to "$gateway" | awk '{ print $2 }')
    python3 "$peer" reflect "$interface" 5 >"$work/reflects" 2>&1 & started+=($!)
    wait_until 20 grep -q reflects "$work/reflects" || fail "no reflector: $(cat "$work/reflects")"
}

# boot_neighbour: a guest with virtio-net, which serves at its own addresses and at those of VLAN 6: the host's kernel may have
# no VLANs.
boot_neighbour() {
    timeout 300 "$slipway" run --detach --name neighbour --accel tcg --wait-network --privileged "$image" sleep 36000 >/dev/null ||
        fail "no sandbox with virtio-net"
    "$slipway" port set neighbour --spoof-check off >/dev/null || fail "port set"
    "$slipway" exec neighbour sh -c 'ip link add link eth0 name tagged type vlan id 6 && ip link set tagged up &&
        ip addr add 10.78.0.1/24 dev tagged && ip addr add fd78::1/64 dev tagged nodad' >"$work/neighbour" 2>&1 ||
        fail "the neighbour's VLAN: $(cat "$work/neighbour")"
    "$slipway" exec neighbour python3 -c "$(cat "$peer")" serve 0.0.0.0 fd78::1 >"$work/neighbour" 2>&1 & started+=($!)
    wait_until 120 grep -q serves "$work/neighbour" || fail "the neighbour does not serve: $(cat "$work/neighbour")"
    "$slipway" exec neighbour iperf3 -s -p 7002 >/dev/null 2>&1 & started+=($!)
}

# streams NAME ADDRESS…: streams to each address and from it.
streams() {
    local name=$1 way address
    for address in "${@:2}"; do
        for way in put get; do
            [ "$(inside "$way" "$address" 1000000)" = whole ] || fail "$name: $way $address: $(inside "$way" "$address" 1000)"
        done
    done
}
# datagrams NAME ADDRESS…: datagrams to each address and back.
datagrams() {
    local name=$1 address
    for address in "${@:2}"; do
        [ "$(inside echo "$address" 100 1400)" = whole ] || fail "$name: datagrams: $address: $(inside echo "$address" 1 100)"
    done
}
traffic() {
    streams "$1" "$gateway" "$gateway6"
    datagrams "$1" "$gateway" "$gateway6"
}

# iperf NAME ADDRESS…: iperf3 to each address and from it, by TCP and by UDP. UDP may lose some and not all.
iperf() {
    local name=$1 address way kind
    for address in "${@:2}"; do
        for way in "" -R; do
            for kind in "-n 1M" "-u -b 10M -n 1M -l 1200"; do
                iperf_arrives "-c $address -p 7002 $kind $way" || fail "$name: iperf3 $kind $way $address: $(tail "$work/iperf")"
            done
        done
    done
}
# A server on a busy machine may see the end of a short test before its datagrams.
iperf_arrives() {
    local try
    for try in 1 2 3; do
        of_iperf "$work/iperf" guest "iperf3 $1 --json" && python3 "$peer" arrived "$work/iperf" && return
        sleep "$try"
    done
    return 1
}

# Datagrams of a VLAN, whose tags the device inserts and strips, or does not; and streams with a neighbour in another one.
tagged() {
    "$slipway" port set nic --spoof-check off >/dev/null || fail "port set"
    guest "ip link add link eth0 name tagged type vlan id 5 && ip addr add 10.77.0.2/24 dev tagged && ip link set tagged up &&
        ip neigh add 10.77.0.1 lladdr $(ip link show dev "$interface" | awk '/ether/ { print $2 }') dev tagged &&
        ip link add link eth0 name streams type vlan id 6 && ip addr add 10.78.0.2/24 dev streams && ip link set streams up &&
        ip addr add fd78::2/64 dev streams nodad" >"$work/tagged" || fail "$1: VLAN: $(cat "$work/tagged")"
    tagged_traffic "$1, VLAN"
    iperf "$1, VLAN" 10.78.0.1 fd78::1
    guest "ethtool -K eth0 rxvlan off txvlan off" >/dev/null
    tagged_traffic "$1, VLAN by software"
    guest "ethtool -K eth0 rxvlan on txvlan on; ip link del tagged; ip link del streams" >/dev/null
    "$slipway" port set nic --spoof-check on >/dev/null
}
tagged_traffic() {
    [ "$(inside echo 10.77.0.1 50 1400)" = whole ] || fail "$1: $(tail -1 "$work/reflects")"
    streams "$1" 10.78.0.1 fd78::1
    datagrams "$1" 10.78.0.1 fd78::1
}

self_test() {
    guest "ethtool -t eth0 offline" >"$work/selftest" && grep -q PASS "$work/selftest" || fail "$1: the self test: $(cat "$work/selftest")"
    answers || fail "$1: no answer after the self test"
}
answers() { guest "ping -c 3 -w 60 $gateway" >/dev/null; }

# shake NAME: down and up under traffic, and with other MTUs and rings. What the ring has no room for is lost, an answer among it.
shake() {
    down_and_up "$1"
    guest "ip link set eth0 mtu 900 && ethtool -G eth0 rx 64 tx 128" >"$work/shake" || fail "$1: MTU and rings: $(cat "$work/shake")"
    guest "ping -c 2 -w 60 -s 800 $gateway" >"$work/shake" || fail "$1: no answer with an MTU of 900: $(cat "$work/shake")"
    # An interface that is down, or has such an MTU, has no IPv6.
    guest "ip link set eth0 mtu 1500 && ethtool -G eth0 rx 256 tx 256 && ip addr add $address6 dev eth0 nodad &&
        ip route add default via $gateway6" >"$work/shake" || fail "$1: an MTU of 1500: $(cat "$work/shake")"
    # The queue is never woken between its stop and the end of its ring.
    guest "iperf3 -c $gateway -p 7002 -u -b 0 -l 64 -t 1 >/dev/null & sending=\$!
        while kill -0 \$sending 2>/dev/null; do ethtool -G eth0 tx 128 && ethtool -G eth0 tx 256 || exit; done" >"$work/shake" ||
        fail "$1: rings under traffic: $(cat "$work/shake")"
    traffic "$1"
}
down_and_up() {
    guest "set -e; answers() { for try in 1 2 3 4 5 6 7 8 9 10; do ping -c 1 -w 5 $gateway && return; done; return 1; }
        for round in \$(seq $rounds); do
            ip link set eth0 down; ip link set eth0 up; ip route add default via $gateway; answers
        done" >"$work/shake" & local shaking=$!
    while kill -0 $shaking 2>/dev/null; do
        "$slipway" pktgen source --port gen --to "$mac" --rate 5k --burst 8 --count 500 >"$work/source" || fail "$1: $(cat "$work/source")"
    done
    wait $shaking || fail "$1: no answer after the interface was down: $(tail "$work/shake")"
}

# boot_jumbo KIND CPUS OPTION…: a guest in the network `wide`, whose MTU is 9000. The peers of the first network serve there, too.
boot_jumbo() {
    "$slipway" network rm wide >/dev/null 2>&1  # Of a run that was killed.
    "$slipway" network create wide --mtu 9000 >/dev/null || fail "network create"
    boot "$1" "$2" --network wide "${@:3}"
}
# jumbo NAME: frames of 9000 bytes both ways, before and after an MTU of 1500.
jumbo() {
    [ "$(guest 'cat /sys/class/net/eth0/mtu')" = 9000 ] || fail "$1: an MTU of $(guest 'cat /sys/class/net/eth0/mtu')"
    jumbo_traffic "$1"
    guest "ip link set eth0 mtu 1500" || fail "$1: an MTU of 1500"
    guest "ping -c 1 -w 60 -M do -s 8972 $gateway" >/dev/null && fail "$1: a frame that is larger than the MTU"
    streams "$1, an MTU of 1500" "$gateway" "$gateway6"
    guest "ip link set eth0 mtu 9000" || fail "$1: an MTU of 9000"
    jumbo_traffic "$1, an MTU of 9000 again"
}
jumbo_traffic() {
    guest "ping -c 3 -w 60 -M do -s 8972 $gateway" >"$work/jumbo" || fail "$1: frames of 9000 bytes: $(cat "$work/jumbo")"
    streams "$1" "$gateway" "$gateway6"
}

# checks NAME: everything that holds with any driver.
checks() {
    answers || fail "$1: no answer"
    traffic "$1"
    iperf "$1" "$gateway" "$gateway6"
    ok "$1: ping; streams, datagrams and iperf3, by IPv4 and IPv6, both ways"
    tagged "$1"
    ok "$1: the same in VLANs, by the device's tags and by the guest's"
    self_test "$1"
    ok "$1: ethtool's offline test passes: registers, EEPROM, interrupt, loopback, link"
    shake "$1"
    ok "$1: down and up $rounds times under traffic, an MTU of 900, rings of 64 and 128"
}

# no_errors: what the interface and the guest's kernel have counted and printed since it booted.
no_errors() {
    [ "$(guest 'cat /sys/class/net/eth0/statistics/rx_errors /sys/class/net/eth0/statistics/tx_errors /sys/class/net/eth0/statistics/tx_dropped' | sort -u)" = 0 ] ||
        fail "errors are counted: $(guest 'ip -s link show eth0')"
    no_complaints
}
no_complaints() { ! guest dmesg | grep -E 'WARNING|BUG|sending has stopped' || fail "the guest's kernel complains"; }
