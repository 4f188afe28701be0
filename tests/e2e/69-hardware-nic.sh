#!/usr/bin/env bash
# Virtual functions (VFs) of a network interface whose physical function sets what they may do, an Intel 82576: a guest with
# Linux's igbvf, its MAC address, the check of addresses, VLANs and rates. The hardware is that of lab/kvm-host --igb. QEMU's
# 82576 tags frames and sorts them by VLAN; of rates and of the check of addresses it has the settings alone.
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
# shellcheck source=tests/e2e/hardware.sh
. "$here/hardware.sh"
need_root
need_hardware --igb
modprobe igb 2>/dev/null || skip "a kernel with the driver igb: lab/kvm-host --igb --test $test_name SLIPWAY"
need_node
rm -f "$SLIPWAY_RUN_DIR"/vf.ledger*
peer=
end_all() {
    end_pools gig plain
    ip link delete lab5 2>/dev/null
    [ -z "$peer" ] || ip address flush dev "$peer"
}
modprobe -a virtio_pci virtio_net vfio-pci 8021q || fail "no vfio-pci, no VLANs, or no drivers for virtio"
gigabit=$(physical 0x0200 0x8086) && nic=$(physical 0x0200 0x1af4) && disk=$(physical 0x0108) || fail "the lab has no such hardware"
make_disks "$disk"
for one in "$gigabit" "$nic"; do
    echo 0 >"$devices/$one/sriov_drivers_autoprobe"
    [ "$(cat "$devices/$one/sriov_numvfs")" = 2 ] || echo 2 >"$devices/$one/sriov_numvfs" || fail "VFs of $one"
done
# link_of PHYSICAL: the name of its interface.
link_of() { basename "$(compgen -G "$devices/$1/net/*" || compgen -G "$devices/$1/virtio*/net/*")"; }
link=$(link_of "$gigabit") peer=$(link_of "$nic")
ip link set "$link" up || fail "the host's end, $link"
# Its driver sets rates only then.
has_carrier() { [ "$(cat "/sys/class/net/$link/carrier")" = 1 ]; }
wait_until 60 has_carrier || fail "$link has no carrier"
# A host on the same wire, outside the device: without a VLAN, and in VLAN 5.
ip address add 10.79.0.1/24 dev "$peer" && ip link set "$peer" up && ip link add link "$peer" name lab5 type vlan id 5 &&
    ip address add 10.79.5.1/24 dev lab5 && ip link set lab5 up || fail "the other host, $peer"
# settings VF: what the physical function holds a VF to. `free`: nothing, and no driver has them.
settings() { ip link show dev "$link" | grep -E "^ *vf $1 "; }
free() {
    local n
    for n in 0 1; do
        grep -qE 'vlan|rate' <<<"$(settings "$n")" && fail "without a pool, VF $n is held to: $(settings "$n")"
        [ -z "$(driver_of "$(virtual "$gigabit" "$n")")" ] || fail "VF $n has the driver $(driver_of "$(virtual "$gigabit" "$n")")"
    done
}
start_keeper
start_daemon

refuses 'is no VLAN' vf create none --pci-of "$gigabit" --vlan 4095
refuses 'at least 1 Mbit/s' vf create none --pci-of "$gigabit" --max-rate 1kbit
for one in "$disk" "$nic"; do
    refuses 'has no physical function whose network interface' vf create none --pci-of "$one" --vlan 5
done
# No more than the link has.
refuses "$link, of which .* is a VF, sets no rate of it: .*; the pool was removed" vf create none --pci-of "$gigabit" --vlan 5 --max-rate 2Gbit
[ "$("$slipway" vf ls --json)" = "[]" ] || fail "pools are left: $("$slipway" vf ls)"
free

# guest POOL ADDRESS: a sandbox with a VF.
guest() {
    timeout 600 "$slipway" run -d --name gig --network none --vf "$1" --vf-address "$2" "$image" -- sleep 100000 >/dev/null ||
        fail "run --vf $1: $(explain)"
}
reaches() { timeout 60 "$slipway" exec gig ping -q -c 2 -W 20 "$1" >"$work/ping" 2>&1; }
end() { "$slipway" rm --force gig >/dev/null && wait_until 60 are "$1" ready,ready || fail "the end: $(states "$1")"; }

"$slipway" vf create gig --pci-of "$gigabit" --vlan 5 --max-rate 100Mbit >/dev/null || fail "vf create: $(explain)"
for n in 0 1; do
    grep -qE 'vlan 5\b.*rate 100\b' <<<"$(settings "$n")" || fail "VF $n is held to: $(settings "$n")"
done
guest gig 10.79.5.2/24
read -r address _ < <(taken gig)
number=0
[ "$(virtual "$gigabit" 0)" = "$address" ] || number=1
grep -qE '5a:13:.*spoof checking on' <<<"$(settings "$number")" || fail "VF $number is held to: $(settings "$number")"
mac=$(settings "$number" | grep -oE '5a:13:[0-9a-f:]*' | head -n 1)
timeout 60 "$slipway" exec gig sh -c 'cat /sys/class/net/*/address' >"$work/macs" 2>&1
grep -qF "$mac" "$work/macs" || fail "the guest's interfaces are $(cat "$work/macs"), and the VF's address $mac: $(explain)"
reaches 10.79.5.1 || fail "no frames of VLAN 5: $(cat "$work/ping") $(explain)"
ok "a guest with igbvf has the address $mac that its physical function checks, and is in VLAN 5 at 100 Mbit/s"
end gig
"$slipway" vf rm gig >/dev/null || fail "vf rm: $(explain)"
free
ok "with the pool go VLAN and rate"

"$slipway" vf create plain --pci-of "$gigabit" >/dev/null || fail "vf create: $(explain)"
guest plain 10.79.0.2/24
reaches 10.79.0.1 || fail "no frames without a VLAN: $(cat "$work/ping") $(explain)"
end plain
"$slipway" vf rm plain >/dev/null || fail "vf rm: $(explain)"
ok "a guest with a VF without a VLAN reaches a host without one"
