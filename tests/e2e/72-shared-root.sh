#!/usr/bin/env bash
# Sandboxes of one image share the pages of its root (shared_root = "on"): one copy in memory, which a guest
# maps in place, a disk and the network read, and the next daemon knows and goes on sharing. With QEMU a
# sandbox has its disk: 65-free-pages. In a network namespace of the test's own.
# alone: it measures the machine's shared memory.
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
[ "${SLIPWAY_VMM:-}" = native ] || skip "slipway-vmm on KVM (SLIPWAY_VMM=native): lab/kvm-host --test $test_name SLIPWAY"
need_network_node "$@"
echo 'shared_root = "on"' >>"$SLIPWAY_CONFIG"
start_keeper

in_sandbox() { timeout 60 "$slipway" exec "$1" -- "${@:2}"; }
has_pmem='test -b /dev/pmem0 || test -e /sys/block/pmem0'

start_daemon

# roots PID: the inodes of shared roots that a process has mapped, one line for each mapping.
roots() { sed -n 's/^[^ ]* [^ ]* [^ ]* [^ ]* \([0-9]*\) *\/memfd:shared-root (deleted)$/\1/p' "/proc/$1/maps"; }
# read_root NAME: KiB by which the guest's memory grew when 48 MiB of the root were read for the first time.
guest_kib() { awk '/^[0-9a-f]+-/ { its = /memfd:guest-memory/ } its && /^Rss:/ { kib += $2 } END { print kib + 0 }' "/proc/$(vmm_of "$1")/smaps"; }
read_root() {
    local before
    in_sandbox "$1" true && before=$(guest_kib "$1") &&
        in_sandbox "$1" sh -c 'find /usr/lib -type f -size +64k -exec cat {} + | head -c 50331648 >/dev/null' &&
        echo $(($(guest_kib "$1") - before))
}
shared_kib() { awk '/^Shmem:/ { print $2 }' /proc/meminfo; }

# Writes the mapping of a root file to a disk (O_DIRECT) and sends the file (sendfile), and compares what came back.
cat >"$work/use.py" <<'END'
import hashlib, mmap, os, socket, sys

path, disk, address = sys.argv[1:]
file = os.open(path, os.O_RDONLY)
size = os.fstat(file).st_size & ~4095
mapped = mmap.mmap(file, size, prot=mmap.PROT_READ)
expected = hashlib.sha256(mapped).hexdigest()
# A mapping of pages in place may have huge pages (Linux, fs/erofs/data.c); one of the page cache has not.
flags = {}
for line in open("/proc/self/smaps"):
    name = line.split()[-1] if ":" not in line.split()[0] else name
    if line.startswith("VmFlags:"):
        flags[name] = line.split()
print("in place" if "hg" in flags[os.path.realpath(path)] else "copied")

disk = os.open(disk, os.O_RDWR | os.O_DIRECT)
view, back = memoryview(mapped), mmap.mmap(-1, size)
for at in range(0, size, 65536):
    assert os.pwrite(disk, view[at:at + 65536], at) == min(65536, size - at)
    assert os.preadv(disk, [memoryview(back)[at:at + 65536]], at) == min(65536, size - at)
print("disk", "right" if hashlib.sha256(back).hexdigest() == expected else "WRONG")

with socket.create_connection((address, 80), 60) as peer:
    # A socket with a time limit does not block, and sendfile(2) ends where it would.
    peer.settimeout(None)
    sent = 0
    while sent < size:
        sent += os.sendfile(peer.fileno(), file, sent, size - sent)
    peer.shutdown(socket.SHUT_WR)
    told = b"".join(iter(lambda: peer.recv(4096), b"")).decode()
print("network", "right" if told == expected else "WRONG")
END
# Says the sum of what each connection sends.
server='
import hashlib, socket
server = socket.socket()
server.bind(("0.0.0.0", 80))
server.listen(4)
while True:
    client, _ = server.accept()
    got = hashlib.sha256()
    for part in iter(lambda: client.recv(65536), b""): got.update(part)
    client.sendall(got.hexdigest().encode())
    client.close()
'
start=$(shared_kib)
"$slipway" run --detach --name one --wait-network "$image" -- python3 -c "$server" >/dev/null || fail "run: $(explain)"
first=$(shared_kib)
"$slipway" run --detach --name two --wait-network --volume data:64M "$image" -- sleep 10000 >/dev/null ||
    fail "run: $(explain)"
second=$(shared_kib)
grep 'its root is a disk' "$work/daemon.log" && fail "a root is a disk"
for name in one two; do
    in_sandbox "$name" sh -c "$has_pmem" || fail "$name has no pmem: $(explain)"
done
root=$(roots "$(vmm_of one)" | sort -u)
[ -n "$root" ] || fail "the VMM of one has no shared root mapped"
[ "$root" = "$(roots "$(vmm_of two)" | sort -u)" ] || fail "two has another root"
ok "two sandboxes have one root mapped: memory grew by $((first - start)) KiB for the first and $((second - first)) KiB for the second"

grown=$(read_root two) || fail "reading: $(explain)"
[ "$grown" -lt 16384 ] || fail "48 MiB of a shared root take $grown KiB of the guest's memory"

address=$("$slipway" network inspect default | python3 -c 'import json,sys
print(next(s["ipv4"] for s in json.load(sys.stdin)[0]["sandboxes"] if s["name"] == "one"))')
use() {
    local said
    said=$(in_sandbox two python3 -c "$(cat "$work/use.py")" /usr/bin/python3 /dev/slipway/data "$address") ||
        fail "$1: $said $(explain)"
    [ "$said" = $'in place\ndisk right\nnetwork right' ] || fail "$1: $said"
    [ "$(roots "$daemon")" = "$root" ] || fail "$1: the plane has mapped: $(roots "$daemon" | tr '\n' ' ')"
}
use "at first"
ok "a root file is mapped in place; a disk (O_DIRECT) and the network (sendfile) read it; the plane has it mapped once"

vmms=$(vmm_of one),$(vmm_of two)
for signal in KILL TERM KILL; do
    end_daemon "$signal"
    start_daemon
    wait_until 60 is_state two running || fail "after SIG$signal: $("$slipway" ps; explain)"
    [ "$vmms" = "$(vmm_of one),$(vmm_of two)" ] || fail "after SIG$signal: $("$slipway" ps; explain)"
    use "after SIG$signal"
done
ok "three daemons later the same pages are read, and mapped once"

"$slipway" run --detach --name three "$image" -- sleep 10000 >/dev/null || fail "run: $(explain)"
[ "$root" = "$(roots "$(vmm_of three)" | sort -u)" ] || fail "a sandbox of the next daemon has another root"
ok "a sandbox that the next daemon starts shares the root of those before it"

# With a limit below the image's size the next root does not fit; the sandbox runs on its disk.
"$slipway" rm --force --all >/dev/null || fail "rm: $(explain)"
no_root() { [ -z "$(roots "$daemon")" ]; }
wait_until 20 no_root || fail "the plane keeps a root"
end_daemon TERM
echo 'shared_root_bytes = 2097152' >>"$SLIPWAY_CONFIG"
start_daemon
"$slipway" run --detach --name disk "$image" -- sleep 10000 >/dev/null || fail "run: $(explain)"
in_sandbox disk sh -c "$has_pmem" && fail "a root beyond the limit is shared"
grep -q 'its root is a disk.*do not fit' "$work/daemon.log" || fail "no reason is logged: $(explain)"
ok "the last sandbox frees the root; one that does not fit is a disk, and the log says why"
copied=$(read_root disk) || fail "reading: $(explain)"
[ "$copied" -gt 32768 ] || fail "48 MiB of a disk take $copied KiB of the guest's memory"
ok "reading 48 MiB of the root took $grown KiB of a guest's memory, and $copied KiB with a disk"
