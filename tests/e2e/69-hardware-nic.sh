#!/usr/bin/env bash
# Virtual functions (VFs) of a network interface whose physical function sets what they may do, an Intel 82576: a guest with
# Linux's igbvf, its MAC address, the check of addresses, VLANs and rates, those of a pool and those of an attachment of the
# CNI plugin. The hardware is that of lab/kvm-host --igb. QEMU's
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
peer='' mine=slipway-nic-$$ cni=${SLIPWAY_CNI:-/usr/libexec/slipway/slipway-cni}
[ -x "$cni" ] || fail "$cni is not there; \`make build\` builds it, and lab/kvm-host takes it to the server"
end_all() {
    end_pools gig plain disks
    ip netns delete "$mine" 2>/dev/null
    ip link delete lab5 2>/dev/null
    [ -z "$peer" ] || ip address flush dev "$peer"
}
modprobe -a virtio_pci virtio_net vfio-pci 8021q tun || fail "no vfio-pci, no VLANs, no TAP, or no drivers for virtio"
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

# The CNI plugin: call COMMAND [POOL [MORE]], whose answer is in $work/out.
call() {
    CNI_COMMAND=$1 CNI_CONTAINERID=$mine CNI_NETNS=/run/netns/$mine CNI_IFNAME=eth0 timeout 120 "$cni" >"$work/out" 2>"$work/err" \
        <<<"{\"cniVersion\": \"1.1.0\", \"name\": \"wire\", \"type\": \"slipway-cni\", \"pool\": \"${2:-gig}\"${3:-}}"
}
does() { call "$@" || fail "$1: $(cat "$work/out" "$work/err") $(explain)"; }
# said EXPRESSION: a value of the answer, `x`, whose interface is `one`.
said() { python3 -c 'import json, sys
x = json.load(open(sys.argv[1])); one = x.get("interfaces", [{}])[0]; print(eval(sys.argv[2]))' "$work/out" "$1"; }
# denies CODE WORDS COMMAND…
denies() {
    local code=$1 words=$2; shift 2
    call "$@" && fail "$* was not refused: $(cat "$work/out")"
    [ "$(said 'x["code"]')" = "$code" ] && grep -qF -- "$words" "$work/out" || fail "$*: $(cat "$work/out" "$work/err")"
    ok "$1 -> $(said '"%d %s" % (x["code"], x["msg"])')"
}
# cleared: no VF has what an attachment had.
cleared() {
    local n
    for n in 0 1; do ! grep -qE "$mac|vlan|rate|checking off" <<<"$(settings "$n")" || return; done
}
owner=slipway-cni:wire,$mine,eth0
bandwidth=', "runtimeConfig": {"mac": "5a:11:00:00:00:69", "bandwidth": {"egressRate": 50000000}}'
mac=5a:11:00:00:00:69
ip netns add "$mine" && ip -n "$mine" link set lo up || fail "ip netns add"
"$slipway" vf create gig --pci-of "$gigabit" >/dev/null || fail "vf create: $(explain)"
"$slipway" vf create disks --pci "$(virtual "$disk" 0)" >/dev/null || fail "vf create: $(explain)"
wait_until 60 are gig ready,ready && wait_until 60 are disks ready || fail "the pools: $(states gig) $(states disks)"
denies 7 'has no physical function whose network interface' ADD disks
denies 7 'no VLAN' ADD gig ', "vlan": 4095'
denies 7 'leave out the burst' ADD gig ', "runtimeConfig": {"bandwidth": {"ingressRate": 8000000}}'
denies 7 'nothing is published' ADD gig ', "runtimeConfig": {"portMappings": [{"hostPort": 8069, "containerPort": 80}]}'
# The physical function refuses more than the link has, and what it has set by then is ended.
denies 100 "sets no rate of it" ADD gig ', "vlan": 5, "runtimeConfig": {"bandwidth": {"egressRate": 2000000000}}'
wait_until 60 are gig ready,ready || fail "after refusals: $("$slipway" vf inspect gig)"
cleared || fail "settings are left: $(settings 0) $(settings 1)"
does STATUS
does ADD gig ", \"vlan\": 5, \"spoofchk\": \"off\"$bandwidth"
read -r address found < <(taken gig)
[ "$found" = "$owner" ] || fail "the owner is $found"
number=0
[ "$(virtual "$gigabit" 0)" = "$address" ] || number=1
[ "$(said 'one["pciID"]')" = "$address" ] && [ "$(said 'one["mac"]')" = "$mac" ] && [ -S "$(said 'one["socketPath"]')" ] ||
    fail "ADD: $(cat "$work/out")"
[ "$(said '"gateway" in x["ips"][0] or len(x["routes"])')" = 0 ] || fail "a gateway of the switch: $(cat "$work/out")"
grep -qE "$mac.*vlan 5\b.*rate 50\b.*spoof checking off" <<<"$(settings "$number")" || fail "VF $number is held to: $(settings "$number")"
ip -n "$mine" -o link show eth0 | grep -qF "$mac" || fail "no placeholder: $(ip -n "$mine" link)"
does CHECK
refuses 'has a function of hardware, of pool gig' run --network-namespace "/run/netns/$mine" "$image" true
does DEL; does DEL
wait_until 60 are gig ready,ready || fail "after DEL: $("$slipway" vf inspect gig)"
cleared || fail "settings are left: $(settings 0) $(settings 1)"
ok "ADD takes a VF with MAC address, VLAN and rate, names it in its result, and DEL gives it back without them"

does ADD gig ", \"vlan\": 5$bandwidth"
end_daemon KILL
start_daemon
wait_until 60 are gig ready,ready || fail "after kill -9 of the daemon: $("$slipway" vf inspect gig) $(explain)"
cleared || fail "the next daemon leaves settings: $(settings 0) $(settings 1)"
denies 104 'has lost its function' CHECK
does DEL
does ADD gig ", \"vlan\": 5$bandwidth"
call GC gig ', "cni.dev/valid-attachments": []' || fail "GC: $(cat "$work/out" "$work/err")"
wait_until 60 are gig ready,ready || fail "after GC: $("$slipway" vf inspect gig)"
cleared || fail "settings are left: $(settings 0) $(settings 1)"
"$slipway" vf rm gig >/dev/null && "$slipway" vf create gig --pci-of "$gigabit" --vlan 5 --max-rate 100Mbit >/dev/null ||
    fail "a pool with limits: $(explain)"
wait_until 60 are gig ready,ready || fail "the pool: $(states gig)"
denies 7 'are in VLAN 5, not in VLAN 6' ADD gig ', "vlan": 6'
does ADD gig ', "runtimeConfig": {"bandwidth": {"egressRate": 200000000}}'
read -r address _ < <(taken gig)
number=0
[ "$(virtual "$gigabit" 0)" = "$address" ] || number=1
grep -qE 'vlan 5\b.*rate 100\b' <<<"$(settings "$number")" || fail "VF $number is held to: $(settings "$number")"
does DEL
wait_until 60 are gig ready,ready || fail "after DEL: $("$slipway" vf inspect gig)"
ok "an attachment stays within the VLAN and the rate of its pool"
"$slipway" vf rm gig >/dev/null && "$slipway" vf rm disks >/dev/null || fail "vf rm: $(explain)"
free
ok "the next daemon ends what one that was killed had set; GC gives a VF back"
