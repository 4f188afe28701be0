#!/usr/bin/env bash
# `slipway bench block` on a virtual function of an NVMe controller: served by Slipway, had by QEMU's VFIO, and behind an IOMMU
# of the guest's. A function that is no spare disk is refused; afterwards it is as it was. The hardware is that of
# lab/kvm-host --hardware.
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
# shellcheck source=tests/e2e/hardware.sh
. "$here/hardware.sh"
need_root
# Slipway's own VMM where it can be, and QEMU for what is QEMU's.
export SLIPWAY_VMM=auto
need_hardware
need_node
rm -f "$SLIPWAY_RUN_DIR"/vf.ledger*
end_all() { end_pools hw; }

modprobe -a vfio-pci virtio_pci || fail "no vfio-pci"
disk=$(physical 0x0108) && nic=$(physical 0x0200 0x1af4) || fail "the lab has no hardware with SR-IOV"
make_disks "$disk"
one=$(virtual "$disk" 0) other=$(virtual "$disk" 1)
start_keeper
start_daemon
bench=(bench block --quick --rounds 1 --workload randrw-4k-d4 --image "$image" --memory 192M)

echo 0 >"$devices/$disk/sriov_drivers_autoprobe"
# An earlier test may have left it with vfio-pci.
[ -z "$(driver_of "$one")" ] || echo "$one" >"$devices/$one/driver/unbind"
echo >"$devices/$one/driver_override"
refuses "$one has no driver, and .*drivers_probe" "${bench[@]}" --only passthrough --pci "$one"
refuses "$nic is no NVMe controller" "${bench[@]}" --only qemu-passthrough --pci "$nic"
echo nvme >"$devices/$one/driver_override" && echo "$one" >/sys/bus/pci/drivers_probe
has_disk() { compgen -G "$devices/$one/nvme/nvme*/nvme*n*" >/dev/null; }
wait_until 60 has_disk || fail "the host has no disk of $one"
refuses "$one has the driver nvme, and the content of its disk would be lost" "${bench[@]}" --only passthrough --pci "$one"
[ "$(driver_of "$one")" = nvme ] || fail "$one has the driver $(driver_of "$one")"
echo "$one" >/sys/bus/pci/drivers/nvme/unbind
echo vfio-pci >"$devices/$one/driver_override" && echo "$one" >/sys/bus/pci/drivers_probe
[ "$(driver_of "$one")" = vfio-pci ] || fail "vfio-pci does not take $one"

# measured NAME…: the report has one turn of each of these configurations, with commands in it.
measured() {
    python3 - "$work/report" "$@" <<'CHECK'
import json, sys
report = json.load(open(sys.argv[1]))
assert [run["subject"] for run in report["runs"]] == sys.argv[2:], report
for run in report["runs"]:
    commands = sum(count for _, count in run["measured"]["latency"]["buckets"])
    assert commands > 0 and run["measured"]["bytes"] > 0, run
    print(run["subject"], commands, "commands", end="; ")
CHECK
}
# reasons: what the report says of turns that failed.
reasons() { python3 -c 'import json, sys; print(*json.load(sys.stdin)["faults"], sep="\n")' <"$work/report" 2>/dev/null; }
# given_back: nothing of a measurement is left.
given_back() {
    [ "$("$slipway" ps --json)" = "[]" ] || fail "a guest is left: $("$slipway" ps)"
    "$slipway" vf ls --json | grep -q '"bench-' && fail "a pool is left: $("$slipway" vf ls)"
    [ "$(driver_of "$one")" = vfio-pci ] || fail "$one has the driver $(driver_of "$one"), and had vfio-pci"
    group=/dev/vfio/$(basename "$(readlink "$devices/$one/iommu_group")")
    [ "$(stat -c %u:%g "$group")" = "$owner" ] || fail "$group is $(stat -c %u:%g "$group")'s, and was $owner's"
}
owner=$(stat -c %u:%g "/dev/vfio/$(basename "$(readlink "$devices/$one/iommu_group")")")
names=(passthrough qemu-passthrough qemu-viommu)
timeout 1800 "$slipway" "${bench[@]}" --only "$(IFS=,; echo "${names[*]}")" --pci "$one" --json >"$work/report" 2>"$work/errors" ||
    fail "passthrough: $(tail -3 "$work/errors"; reasons) $(explain)"
said=$(measured "${names[@]}") || fail "the report: $(cat "$work/report")"
given_back
ok "fio in a guest on $one in three ways: $said"

# A pool that somebody has made serves the first way alone.
"$slipway" vf create hw --pci "$other" >/dev/null && wait_until 60 are hw ready || fail "a pool: $(explain)"
timeout 900 "$slipway" "${bench[@]}" --only passthrough,qemu-passthrough --vf-pool hw --json >"$work/report" 2>"$work/errors" ||
    fail "passthrough of a pool: $(tail -3 "$work/errors"; reasons) $(explain)"
grep -q '^SKIPPED: qemu-passthrough: .*--pci ADDRESS' "$work/errors" || fail "QEMU and a pool: $(cat "$work/errors")"
measured passthrough >/dev/null || fail "the report: $(cat "$work/report")"
given_back
wait_until 60 are hw ready || fail "the function of the pool does not come back: $(states hw)"
"$slipway" vf rm hw >/dev/null || fail "vf rm"
ok "a function of a pool is measured by Slipway's way, and comes back"
echo "$one" >/sys/bus/pci/drivers/vfio-pci/unbind
echo >"$devices/$one/driver_override"
