#!/usr/bin/env bash
# Pods of containerd with virtual functions of hardware, by the mounts that `slipway device-plugin` has kubelet make: a
# container writes to a disk of hardware, a container that is started again finds it as it was, a pod that is killed gives it
# back. The hardware is that of lab/kvm-host --hardware.
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
# shellcheck source=tests/e2e/hardware.sh
. "$here/hardware.sh"
need_root
need_hardware
. "$here/containerd.sh"
. "$here/pods.sh"
rm -f "$SLIPWAY_RUN_DIR"/vf.ledger*
full=ready,ready,ready,ready
printf 'pod_functions = 2\npod_cgroups = true\n' >>"$SLIPWAY_CONFIG"
disk=$(physical 0x0108) && modprobe vfio-pci || fail "the lab has no NVMe controller with SR-IOV, or no vfio-pci"
make_disks "$disk"
start_keeper
start_daemon
"$slipway" vf create hw --pci-of "$disk" >/dev/null && wait_until 60 are hw $full || fail "the pool hw: $(explain)"
"$slipway" device-plugin --show | grep -q 'slipway.dev/hw' || fail "the device plugin: $("$slipway" device-plugin --show)"

functions=$(realpath "$SLIPWAY_RUN_DIR")/functions
mkdir -p "$functions"
# given NUMBER: the option for the function of this number.
given() {
    : >"$functions/hw.$1"
    echo "--mount=type=bind,src=$functions/hw.$1,dst=/proc/slipway/functions/hw.$1,options=rbind:ro"
}
pod web
said=$(member web --rm "$(given 1)" "$image" writer sh -c 'echo marked | dd of=/dev/slipway/hw-0 bs=512 conv=sync 2>/dev/null
    sync; busybox stat -c %F /dev/slipway/hw-0' 2>"$work/err") || fail "a disk of hardware: $said $(cat "$work/err") $(explain)"
[ "$said" = "block special file" ] || fail "a disk of hardware: $said"
are hw ready,ready,ready,taken || fail "the pool: $(states hw)"
read -r vf owner < <(taken hw)
[[ $owner = slipway-pod:* && $vf = "$(virtual "$disk" 1)" ]] || fail "$vf has the owner $owner"
said=$(member web --rm "$(given 1)" "$image" reader sh -c 'busybox head -c 6 /dev/slipway/hw-0' 2>"$work/err")
[ "$said" = marked ] || fail "a container that is started again: $said $(cat "$work/err") $(explain)"
ok "containers of a pod have the function $vf of hardware that kubelet names, one after the other"

read -r number _ < <("$slipway" vf take hw --owner test:other) || fail "take: $(explain)"
member web --rm "$(given "$number")" "$image" other true 2>"$work/err" && fail "a container has a function that another owner has"
grep -q 'test:other' "$work/err" || fail "a function of another owner: $(cat "$work/err")"
c container delete other >/dev/null 2>&1
"$slipway" vf return hw --owner test:other >/dev/null && wait_until 60 are hw ready,ready,ready,taken || fail "return: $(states hw)"
ok "a function that somebody else has is refused, and the error says who has it"

vmm=$("$slipway" ps --json | python3 -c 'import json, sys
print(*[one["vmm_pid"] for one in json.load(sys.stdin) if one["name"].startswith("web-")])')
kill -9 "$vmm" || fail "the pod has the VMM \"$vmm\""
wait_until 60 are hw $full || fail "a pod was killed, and its function does not come back: $(states hw)"
c task rm -f web >/dev/null 2>&1
c container delete web >/dev/null 2>&1
"$slipway" vf rm hw >/dev/null || fail "vf rm: $(explain)"
ok "a pod was killed: its function is in the pool again"
