# shellcheck shell=bash
# Hardware with virtual functions (VFs), that of lab/kvm-host --hardware or --igb, and pools of them. Sourced after lib.sh.
devices=/sys/bus/pci/devices

# Of a machine's own hardware nothing is known: it may be in use.
need_hardware() {
    [ -n "${SLIPWAY_LAB_HARDWARE:-}" ] ||
        skip "hardware that a test may reset: lab/kvm-host ${1:---hardware} --test $test_name SLIPWAY"
}

# end_pools POOL…: ends all sandboxes and removes these pools.
end_pools() {
    local pool
    [ -n "$daemon" ] && runs "$daemon" && {
        "$slipway" rm --force --all
        for pool in "$@"; do timeout 60 "$slipway" vf rm "$pool"; done
    } >/dev/null 2>&1
    rm -f "$SLIPWAY_RUN_DIR"/vf.ledger*
}

# physical CLASS [VENDOR]: the address of the first physical function with SR-IOV whose class code begins so.
physical() {
    local device
    for device in "$devices"/*; do
        [[ $(cat "$device/sriov_totalvfs" 2>/dev/null || echo 0) != 0 && $(cat "$device/class") == "$1"* ]] || continue
        [[ $(cat "$device/vendor") == "${2:-}"* ]] || continue
        echo "${device##*/}"
        return
    done
    return 1
}
# virtual PHYSICAL NUMBER: the address of a VF.
virtual() { basename "$(readlink "$devices/$1/virtfn$2")"; }
driver_of() { basename "$(readlink "$devices/$1/driver")" 2>/dev/null; }
# make_disks PHYSICAL: has an NVMe controller make its four VFs, unless an earlier test has.
make_disks() {
    [ "$(cat "$devices/$1/sriov_numvfs")" = 4 ] || python3 "$here/hardware.py" queues "$1" 4 ||
        fail "VFs of the NVMe controller $1"
}
states() { "$slipway" vf inspect "$1" | python3 -c 'import json, sys
print(*sorted(vf["state"] for vf in json.load(sys.stdin)[0]["functions"]), sep=",")'; }
are() { [ "$(states "$1")" = "$2" ]; }
# taken POOL: the PCI address of the first VF that has an owner, and the owner.
taken() { "$slipway" vf inspect "$1" | python3 -c 'import json, sys
print(*next((vf["pci_address"], vf["owner"]) for vf in json.load(sys.stdin)[0]["functions"] if vf["owner"]))'; }
# attached POOL: the MiB, the microseconds and the zeroed MiB of the DMA maps of the pool's client.
attached() { "$slipway" endpoint ls --json | python3 -c 'import json, sys
one = next(one for one in json.load(sys.stdin) if one["id"].startswith(sys.argv[1] + ".") and one["client_pid"])
mapped = sum(region["size_bytes"] for region in one["dma_regions"] if not region["message_only"])
print(mapped >> 20, one["dma_map_ns"] // 1000, one["zeroed_for_hardware_bytes"] >> 20)' "$1"; }
# refuses PATTERN COMMAND…: the command fails, in one line that matches.
refuses() {
    local pattern=$1 said; shift
    said=$(timeout 300 "$slipway" "$@" 2>&1 </dev/null) && fail "slipway $*: should fail"
    [ "$(wc -l <<<"$said")" = 1 ] || fail "slipway $*: not one line: $said"
    grep -qE -- "$pattern" <<<"$said" || fail "slipway $*: $said"
    ok "$* -> $said"
}
now_ms() { echo $((${EPOCHREALTIME/./} / 1000)); }
