#!/usr/bin/env bash
# The driver of guest/e1000-slipway in a Linux guest, with the communication status block and without: traffic whose content
# is compared, an interface that goes down and up, and what it costs in exits and interrupts. Needs a guest kernel and its
# headers (`deploy/setup/setup.sh driver`).
# alone: what it costs is seen with a processor for the guest and one for the switch.
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
# shellcheck source=tests/e2e/e1000.sh
. "$here/e1000.sh"
only_in_soak "it takes minutes by itself, on all processors; 46-e1000 has the kernel's own driver"
headers=${SLIPWAY_E1000_HEADERS:-/var/lib/slipway/kernel-e1000-headers/build}
driver=$top/guest/e1000-slipway
[ -f "$headers/Makefile" ] || skip "the headers of $kernel (deploy/setup/setup.sh driver)"
for program in gcc make iperf3; do command -v "$program" >/dev/null || skip "$program"; done
need_e1000_guests "$@"
guest_kernel=$work/kernel
guest_driver=e1000-slipway

make -s -C "$driver" KDIR=/nowhere OUT="$work/module" 2>"$work/error" && fail "a driver without headers"
grep -q "no kernel headers in /nowhere; next step" "$work/error" || fail "no next step: $(cat "$work/error")"
make -s -C "$driver" KDIR="$headers" OUT="$work/module" FROM="$kernel" TO="$work/kernel" kernel >"$work/make" 2>&1 ||
    fail "the driver is not built: $(tail "$work/make")"
! grep -i warning: "$work/make" || fail "warnings of the compiler"
chmod a+x "$work"
ok "the driver is built without warnings"

# cost NAME BAR… -- COMMAND…: what the e1000 does meanwhile, and whether that is within bars, in $work/cost.
cost() {
    local bars=()
    while [ "$1" != -- ]; do bars+=("$1"); shift; done
    shift
    "$slipway" port inspect nic >"$work/before"
    "$@" >"$work/load" 2>&1 || fail "$name: $(tail -3 "$work/load")"
    "$slipway" port inspect nic >"$work/after"
    python3 "$peer" work "$work/before" "$work/after" "${bars[@]}" >"$work/cost"
}
# costs NAME BAR… -- COMMAND…: bars that hold on any machine.
costs() {
    local name=$1
    cost "${@:2}" || fail "$name: $(cat "$work/cost")"
    ok "$name: $(cat "$work/cost")"
}
# costs_under_load NAME BAR… -- COMMAND…: bars for a guest and a switch that both are busy. A machine on which one of
# them waits for its processor has the switch sleep, and the guest wake it: one of three rounds is enough.
costs_under_load() {
    local name=$1 round
    for round in 1 2 3; do
        cost "${@:2}" && ok "$name, round $round: $(cat "$work/cost")" && return
        say "$name, round $round: $(tr '\n' ' ' <"$work/cost")"
    done
    echo "SKIPPED: e2e/$test_name: $name: needs a processor for the guest and one for the switch"
}
# A guest that sends, and one that is sent to, as fast as either can.
sends() { guest "iperf3 -c $gateway -p 7002 -u -b 0 -l 64 -n 1M"; }
receives() {
    "$slipway" pktgen source --port gen --to "$mac" --rate 200k --count 30000
    # The answer comes behind all frames of the ring.
    guest "ping -c 1 -w 60 $gateway"
}

# Guests of three kinds, as the benchmark has them: their kernels are beside the node's own. Loads between two guests need a
# second one of each kind.
loads=udp8-gh,udp18-sg-o5k ends=(gh sg)
[ "$rounds" -lt 10 ] || { loads+=,rr-gg; ends+=(gg); }
mkdir "$work/kernels"
ln -s "${SLIPWAY_KERNEL_DIR:-/var/lib/slipway/kernel}" "$work/kernels/kernel"
ln -s "$kernel" "$work/kernels/kernel-e1000"
ln -s "$work/kernel" "$work/kernels/kernel-e1000-slipway"
{ cat "$SLIPWAY_CONFIG"; echo "kernel_dir = \"$work/kernels/kernel\""; } >"$work/bench.toml"
SLIPWAY_CONFIG=$work/bench.toml timeout 600 "$slipway" bench packet --guests --accel tcg --image "$image" --rounds 1 --time 0.5 \
    --only csb,virtio,qemu-sc --load "$loads" --json --svg "$work/nic.svg" >"$work/nic.json" 2>"$work/error" ||
    fail "bench packet --guests: $(tail -3 "$work/error")"
python3 "$peer" measured "$work/nic.json" "${ends[@]}" || fail "bench packet --guests: $(cat "$work/nic.json")"
python3 -c 'import sys, xml.dom.minidom as m; m.parse(sys.argv[1])' "$work/nic.svg" || fail "the picture is not well-formed"
SLIPWAY_CONFIG=$work/bench.toml "$slipway" bench packet --guests --only stack 2>"$work/error" && fail "an unknown kind"
grep -q 'there is no interface "stack"' "$work/error" || fail "an unknown kind: $(cat "$work/error")"
! ip link | grep slwb || fail "an interface is left"
ok "bench packet --guests: $loads; with the block, virtio-net and QEMU's own e1000"

boot e1000-csb 1
start_peers
boot_neighbour
guest "ethtool --show-priv-flags eth0" | grep -q "csb *: on" || fail "the block is not used"
checks "with the block"
# Frames that come in batches as long as the ring. A driver that does not kick a device that sleeps says later that sending
# has stopped (`no_errors`).
guest "ethtool -K eth0 tso off && iperf3 -c neighbour -p 7002 -t 1 && ethtool -K eth0 tso on" >"$work/load" 2>&1 ||
    fail "batches: $(tail -3 "$work/load")"
no_complaints
ok "frames in batches, without segmentation by the device: $(awk '/receiver/ { print $7, $8 }' "$work/load")"
# Segments come whole, and the guest passes them on with what is left to do: it is a router between the neighbour and the host.
segments() { guest "ethtool -S eth0" | awk '/rx_segments/ { print $2 }'; }
before=$(segments)
traffic "segments of the host"
[ "$(segments)" -gt "$before" ] || fail "the host's segments do not come whole: $(guest 'ethtool -S eth0')"
address=$(guest 'ip -4 -o addr show dev eth0' | awk '{ sub("/.*", "", $4); print $4 }')
"$slipway" port set nic --spoof-check off >/dev/null
guest "cd /proc/sys/net/ipv4 && echo 1 >ip_forward && echo 0 | tee conf/all/send_redirects conf/eth0/send_redirects" >/dev/null
before=$(segments)
"$slipway" exec neighbour sh -c "ip route add $gateway/32 via $address && iperf3 -c $gateway -p 7002 -n 2M" >"$work/load" 2>&1 ||
    fail "a guest that forwards segments: $(tail -3 "$work/load")"
[ "$(segments)" -gt "$before" ] || fail "the neighbour's segments do not come whole: $(guest 'ethtool -S eth0')"
guest "echo 0 >/proc/sys/net/ipv4/ip_forward && ethtool -K eth0 rx-gro-hw off"
before=$(segments)
traffic "without segments"
[ "$(segments)" = "$before" ] || fail "segments come that are not wanted"
guest "ethtool -K eth0 rx-gro-hw on"
traffic "segments again"
[ "$(segments)" -gt "$before" ] || fail "no segments after rx-gro-hw was off"
no_complaints
ok "segments of the host and of another guest come whole, and are forwarded; rx-gro-hw says whether they do"
"$slipway" rm --force neighbour >/dev/null
costs "with the block, sending" needless_tdt_per_sent=0.02 -- sends
costs_under_load "with the block, sending" tdt_per_sent=0.02 -- sends
costs_under_load "with the block, receiving" interrupts_per_received=0.02 -- receives

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
guest "ethtool --set-priv-flags eth0 polling off && echo 1 >/sys/module/e1000_slipway/parameters/poll_idle &&
    ethtool --set-priv-flags eth0 polling on" && traffic "polling in the idle loop"
idle_polls() { guest "ethtool -S eth0" | awk '/idle_polls/ { print $2 }'; }
[ "$(idle_polls)" -gt 0 ] || fail "nothing polls in the idle loop"
guest "ethtool --set-priv-flags eth0 polling off"
polls=$(idle_polls)
sleep 1
[ "$(idle_polls)" = "$polls" ] || fail "the idle loop polls on"
ok "the private flags choose how frames are sent, and exclude each other where they must"
no_errors
ok "no errors are counted, and the kernel does not complain"
"$slipway" rm --force nic >/dev/null

if [ "$rounds" -lt 10 ]; then
    say "guests with two CPUs and with an MTU of 9000: with SLIPWAY_DRIVER_ROUNDS=10, as in \`make soak\`"
    exit 0
fi
boot e1000-csb 2
traffic "two CPUs with the block"
shake "two CPUs with the block"
guest "ethtool --set-priv-flags eth0 csb off lazy-tx off" && traffic "two CPUs without the block"
shake "two CPUs without the block"
no_complaints
ok "a guest with two CPUs, with the block and without: the same"
"$slipway" rm --force nic >/dev/null

boot_jumbo e1000 1
jumbo "an e1000 without a block"
no_errors
ok "an e1000 that has no block; an MTU of 9000"
