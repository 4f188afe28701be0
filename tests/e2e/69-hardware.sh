#!/usr/bin/env bash
# Virtual functions (VFs) of hardware: pools of them, a sandbox with an NVMe disk and one with a network interface, a VMM
# and a daemon that are killed, cycles of that, bad input. The hardware is that of lab/kvm-host --hardware.
# SLIPWAY_HARDWARE_CYCLES is the number of cycles of a start, kill -9 of the VMM and the VF's return: 3, or 100.
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
# shellcheck source=tests/e2e/hardware.sh
. "$here/hardware.sh"
need_root
need_hardware
need_node
cycles=${SLIPWAY_HARDWARE_CYCLES:-3}
rm -f "$SLIPWAY_RUN_DIR"/vf.ledger*
holder=
end_all() {
    [ -z "$holder" ] || kill "$holder" 2>/dev/null
    end_pools hw nics rest
}

modprobe -a virtio_pci virtio_net vfio-pci || fail "no vfio-pci, or no drivers for virtio"
disk=$(physical 0x0108) && nic=$(physical 0x0200 0x1af4) || fail "the lab has no hardware with SR-IOV"
start_keeper
start_daemon
refuses "$disk has no virtual functions yet: .*sriov_numvfs" vf create none --pci-of "$disk"
refuses 'no PCI function 0000:fe:1f.7' vf create none --pci-of 0000:fe:1f.7
refuses 'is no PCI address' vf create none --pci 00:fe
python3 "$here/hardware.py" queues "$disk" 4 || fail "VFs of the NVMe controller $disk"
echo 0 >"$devices/$nic/sriov_drivers_autoprobe" && echo 2 >"$devices/$nic/sriov_numvfs" ||
    fail "VFs of the network interface $nic"
"$slipway" doctor | grep -q '^hardware functions *ok *guests can be given some$' || fail "doctor: $("$slipway" doctor)"
first=$(virtual "$disk" 0) second=$(virtual "$disk" 1)

# What a start without the pool would wait for, and a VF that another program has.
echo vfio-pci >"$devices/$first/driver_override" && echo "$first" >/sys/bus/pci/drivers_probe
demand=$(python3 "$here/hardware.py" open "$first") || fail "$first cannot be opened by VFIO"
mkfifo "$work/held"
python3 "$here/hardware.py" hold "$first" <"$work/held" >"$work/holder" & holder=$!
exec 8>"$work/held"
wait_until 20 grep -q held "$work/holder" || fail "$first cannot be held"
refuses "$first.*(open already|busy|in use)" vf create busy --pci "$first"
exec 8>&-
wait "$holder"
holder=
echo "$first" >/sys/bus/pci/drivers/vfio-pci/unbind
echo >"$devices/$first/driver_override"

refuses '0000:fe:1f.7' vf create none --pci 0000:fe:1f.7
# A part of the south bridge, whose functions are one group.
refuses 'group' vf create none --pci 0000:00:1f.2
[ "$("$slipway" vf ls --json)" = "[]" ] || fail "pools are left: $("$slipway" vf ls)"

# A VF whose disk the host has. Without autoprobe, Linux binds a VF to the driver that its override names.
echo nvme >"$devices/$second/driver_override" && echo "$second" >/sys/bus/pci/drivers_probe
has_disk() { compgen -G "$devices/$second/nvme/nvme*/nvme*n*" >/dev/null; }
wait_until 60 has_disk || fail "the host has no disk of $second"
refuses "$second is in use by driver nvme" vf create busy --pci "$second"
echo "$second" >/sys/bus/pci/drivers/nvme/unbind
echo >"$devices/$second/driver_override"
"$slipway" vf create hw --pci-of "$disk" >/dev/null || fail "vf create --pci-of: $(explain)"
wait_until 60 are hw ready,ready,ready,ready || fail "not ready: $(states hw)"
"$slipway" vf ls | grep -qE "^hw +hardware $first\+3 +4 +4 +0 +0 +0 +0$" || fail "vf ls: $("$slipway" vf ls)"
refuses "$first" vf create twice --pci "$first"
"$slipway" vf ls --json | grep -q '"twice"' && fail "a pool is left: $("$slipway" vf ls)"
# took COMMAND…: its milliseconds.
took() {
    local begin
    begin=$(now_ms)
    "$slipway" "$@" >/dev/null || fail "$*: $(explain)"
    echo $(($(now_ms) - begin))
}
for n in 1 2 3 4 5 6 7; do
    took vf ls >>"$work/command"
    took vf take hw --owner test:time >>"$work/take"
    "$slipway" vf return hw --owner test:time >/dev/null && wait_until 60 are hw ready,ready,ready,ready || fail "return: $(states hw)"
done
median() { sort -n "$1" | sed -n 4p; }
say "attach, medians of seven: $(median "$work/take") ms by the pool, of which a command alone is $(median "$work/command"); open and reset on demand $demand ms"

begin_one() {
    timeout 300 "$slipway" run -d --name one --network none --memory 128M --vf hw "$image" -- sleep 100000 >/dev/null ||
        fail "run --vf: $(explain)"
}
# Writes a megabyte to the disk and reads it back.
uses_disk() {
    timeout 300 "$slipway" exec one sh -c '
        dd if=/dev/urandom of=/tmp/data bs=64k count=16 2>/dev/null &&
        dd if=/tmp/data of=/dev/slipway/hw-0 bs=64k oflag=direct 2>/dev/null &&
        dd if=/dev/slipway/hw-0 of=/tmp/back bs=16k count=64 iflag=direct 2>/dev/null && cmp /tmp/data /tmp/back'
}
begin_one
are hw ready,ready,ready,taken || fail "the pool: $(states hw)"
read -r address owner < <(taken hw)
[[ $owner = slipway-sandbox:* && -e $devices/$address ]] || fail "$address has the owner $owner"
uses_disk || fail "the disk of $address: $(explain)"
ok "a sandbox writes to $address and reads it back"

refuses 'are disks' run --rm --network none --memory 128M --vf hw --vf-address 10.1.0.2/24 "$image" -- true
wait_until 60 are hw ready,ready,ready,taken || fail "after an error: $(states hw)"
for n in 1 2 3; do "$slipway" vf take hw --owner "test:$n" >/dev/null || fail "take $n"; done
refuses 'of 4 4 are taken' run --rm --network none --memory 128M --vf hw "$image" -- true
"$slipway" vf reconcile --kind test >/dev/null
wait_until 60 are hw ready,ready,ready,taken || fail "reconcile: $(states hw)"

for n in $(seq "$cycles"); do
    kill -9 "$(vmm_of one)" || fail "no VMM in cycle $n"
    wait_until 60 are hw ready,ready,ready,ready || fail "cycle $n: the VF does not come back: $(states hw)"
    "$slipway" rm --force one >/dev/null || fail "rm in cycle $n"
    begin_one
    [ $((n % 10)) != 1 ] || uses_disk || fail "the disk in cycle $n: $(explain)"
done
ok "$cycles times kill -9 of the VMM: the VF comes back, and the next sandbox has one"
"$slipway" rm --force one >/dev/null && wait_until 60 are hw ready,ready,ready,ready || fail "the end: $(states hw)"

# QEMU, by a daemon that is told to use it. It speaks vfio-user, and adds the function to its machine while that runs.
end_daemon KILL
SLIPWAY_VMM=qemu start_daemon
wait_until 60 are hw ready,ready,ready,ready || fail "after kill -9 of the daemon: $(states hw)"
begin_one
grep -aq qemu "/proc/$(vmm_of one)/cmdline" || fail "the VMM is $(tr '\0' ' ' <"/proc/$(vmm_of one)/cmdline")"
uses_disk || fail "the disk by QEMU: $(explain)"
kill -9 "$(vmm_of one)" && wait_until 60 are hw ready,ready,ready,ready || fail "the VF does not come back: $(states hw)"
"$slipway" rm --force one >/dev/null || fail "rm of a sandbox of QEMU"
ok "a sandbox of QEMU's uses a disk, and its VF comes back after kill -9"

# Hardware does not go on without the process that has it open: the next daemon has the pool again.
# Its sandboxes have recycled memory, the second one that of the first.
end_daemon KILL
echo 'memory = "pool"' >>"$SLIPWAY_CONFIG"
start_daemon
wait_until 60 are hw ready,ready,ready,ready || fail "after kill -9 of the daemon: $(states hw)"
for n in 1 2; do
    begin_one
    uses_disk || fail "the disk after a restart: $(explain)"
    "$slipway" rm --force one >/dev/null && wait_until 60 are hw ready,ready,ready,ready || fail "the end: $(states hw)"
done
ok "kill -9 of the daemon: the next one has the pool, and sandboxes in recycled memory use its disks"

# One has a driver of the host, which has it back later.
one=$(virtual "$nic" 0) other=$(virtual "$nic" 1)
echo virtio-pci >"$devices/$other/driver_override" && echo "$other" >/sys/bus/pci/drivers_probe
[ "$(driver_of "$other")" = virtio-pci ] || fail "$other has no driver"
"$slipway" vf create nics --pci-of "$nic" >/dev/null || fail "a pool of interfaces: $(explain)"
link=$(basename "$devices/$nic"/virtio*/net/*)
ip address add 10.77.0.1/24 dev "$link" && ip link set "$link" up || fail "the host's end, $link"
timeout 300 "$slipway" run -d --name two --network none --memory 128M --vf nics --vf-address 10.77.0.2/24 "$image" -- \
    sleep 100000 >/dev/null || fail "run --vf with an interface: $(explain)"
timeout 60 "$slipway" exec two ping -q -c 2 -W 20 10.77.0.1 >/dev/null || fail "no frames through the VF: $(explain)"
"$slipway" rm --force two >/dev/null && wait_until 60 are nics ready,ready || fail "the interface: $(states nics)"
ok "a sandbox reaches the host through an interface of hardware"

# The notes of the drivers outlive the daemon, as vfio-pci does.
end_daemon KILL
start_daemon
wait_until 60 are hw ready,ready,ready,ready || fail "after kill -9 of the daemon: $(states hw)"
wait_until 60 are nics ready,ready || fail "after kill -9 of the daemon: $(states nics)"
"$slipway" vf rm hw nics >/dev/null || fail "vf rm"
[ "$(driver_of "$other")" = virtio-pci ] || fail "$other has the driver $(driver_of "$other"), and had virtio-pci"
for none in "$one" "$first"; do
    [ -z "$(driver_of "$none")" ] || fail "$none has the driver $(driver_of "$none"), and had none"
done
! compgen -G "$SLIPWAY_RUN_DIR/vf/*.driver" || fail "notes of drivers are left"
ok "kill -9 of the daemon, rm: the VFs are their drivers' again"
