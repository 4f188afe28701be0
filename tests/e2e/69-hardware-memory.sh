#!/usr/bin/env bash
# The memory of sandboxes with virtual functions of hardware: a device reads all of it, recycled from sandboxes that filled
# theirs with a mark, and finds none; memory that hardware had is zeroed by the time that the next sandbox has it; how the
# time to attach grows with memory. The hardware is that of lab/kvm-host --hardware.
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
# shellcheck source=tests/e2e/hardware.sh
. "$here/hardware.sh"
need_root
need_hardware
need_node
rm -f "$SLIPWAY_RUN_DIR"/vf.ledger*
end_all() { end_pools hw; }
full=ready,ready,ready,ready
disk=$(physical 0x0108) && modprobe vfio-pci || fail "the lab has no NVMe controller with SR-IOV, or no vfio-pci"
make_disks "$disk"
start_keeper
start_daemon
"$slipway" vf create hw --pci-of "$disk" >/dev/null && wait_until 60 are hw $full || fail "the pool hw: $(explain)"

# begin SIZE: a sandbox with a function, and so much memory.
begin() {
    timeout 600 "$slipway" run -d --name one --network none --privileged --memory "$1" --vf hw "$image" -- sleep 100000 >/dev/null ||
        fail "run --vf with $1: $(explain)"
}
end() { "$slipway" rm --force one >/dev/null && wait_until 120 are hw $full || fail "the end: $(states hw)"; }

# growth WHOSE SIZE…: how long the DMA maps of sandboxes of these sizes take, and the slope, by least squares.
growth() {
    local whose=$1 size; shift
    : >"$work/growth"
    for size in "$@" "$@"; do
        begin "$size"
        attached hw >>"$work/growth" || fail "no function has a client: $("$slipway" endpoint ls --json)"
        end
    done
    say "$whose: $(python3 - "$work/growth" <<'P'
import sys
rows = [tuple(map(int, line.split())) for line in open(sys.argv[1])]
sizes, times = [row[0] for row in rows], [row[1] for row in rows]
mean_size, mean_time = sum(sizes) / len(rows), sum(times) / len(rows)
slope = sum((s - mean_size) * (t - mean_time) for s, t in zip(sizes, times)) / sum((s - mean_size) ** 2 for s in sizes)
for size in sorted(set(sizes)):
    of = sorted(row[1:] for row in rows if row[0] == size)
    print(f"{size} MiB in {of[len(of) // 2][0] / 1000:.1f} ms (zeroed then {max(row[1] for row in of)} MiB),", end=" ")
print(f"{slope:.2f} us for each MiB")
P
    )"
}
growth "memory of the kernel" 128M 512M 1G 2G

# A pool that has room for two such sandboxes.
end_daemon KILL
printf 'memory = "pool"\npool_bytes = %s\n' $((256 << 20)) >>"$SLIPWAY_CONFIG"
start_daemon
wait_until 60 are hw $full || fail "after a restart: $(states hw)"
figure() { "$slipway" pool --json | python3 -c 'import json, sys; print(json.load(sys.stdin)[sys.argv[1]])' "$1"; }
has() { [ "$(figure "$1")" = "$2" ]; }
# Guests fill most of their memory with a mark of 16 bytes. What the pool keeps then is theirs: it gives the oldest away.
mark=$(od -An -N 16 -t x1 /dev/urandom | tr -d ' \n')
digest=$(python3 -c 'import hashlib, sys; print(hashlib.sha256(bytes.fromhex(sys.argv[1])).hexdigest())' "$mark")
for n in 1 2 3; do
    timeout 300 "$slipway" run -d --name "filled-$n" --network none --memory 128M "$image" -- python3 -uc "import time
kept = bytes.fromhex('$mark') * (48 << 16)
print('filled')
time.sleep(1e6)" >/dev/null || fail "run: $(explain)"
done
says() { "$slipway" logs "$1" | grep -q "$2"; }
for n in 1 2 3; do wait_until 120 says "filled-$n" filled || fail "filled-$n: $("$slipway" logs "filled-$n")"; done
"$slipway" rm --force filled-1 filled-2 filled-3 >/dev/null && wait_until 60 has lent_bytes 0 || fail "the pool: $("$slipway" pool)"
free=$(figure free_bytes)
begin 128M
read -r mapped _ zeroed < <(attached hw)
[ -n "$mapped" ] || fail "no function has a client: $("$slipway" endpoint ls --json)"
[ "$(figure free_bytes)" -lt "$free" ] || fail "the pool gave new memory: $("$slipway" pool)"
said=$(timeout 1200 "$slipway" exec --privileged one python3 -c "$(cat "$here/hostile_dma.py")" "$digest" 2>&1) ||
    fail "the driver of the function: $said"
read -r pages stale own <<<"$said"
[ "$pages" -ge 24576 ] || fail "the device read $pages pages: $said"
[ "$own" -ge 256 ] || fail "the device finds $own of 256 pages that the guest has filled: it cannot tell"
[ "$stale" = 0 ] || fail "the device finds $stale pages of earlier sandboxes"
ok "a device reads $pages pages of recycled memory, and finds no mark of earlier sandboxes ($zeroed of $mapped MiB were zeroed when it was given them)"
end

# Memory that hardware had is zeroed when it returns.
wait_until 60 has lent_bytes 0 && wait_until 60 has dirty_bytes 0 || fail "the pool is not zeroed: $("$slipway" pool)"
begin 128M
read -r mapped _ zeroed < <(attached hw)
[ "$zeroed" = 0 ] || fail "$zeroed of $mapped MiB were zeroed when the function was given memory that the pool had zeroed"
ok "memory that hardware had is zero when the next sandbox has it: nothing of $mapped MiB is zeroed when a function is given it"
end
growth "memory of the pool" 128M 192M 256M
"$slipway" vf rm hw >/dev/null || fail "vf rm: $(explain)"
