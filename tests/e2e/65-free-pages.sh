#!/usr/bin/env bash
# A guest reports the pages that it does not use (free_page_reporting = true): after a program that used 256 MiB has ended,
# the file of the guest's memory is small again, and not a byte of another program or sandbox has changed. With QEMU the
# guest reports nothing, and the log says why.
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
need_node
echo 'free_page_reporting = true' >>"$SLIPWAY_CONFIG"
start_keeper

if [ "${SLIPWAY_VMM:-}" != native ]; then
    export SLIPWAY_VMM=qemu
    start_daemon
    "$slipway" run --rm --network none "$image" -- true || fail "run: $(explain)"
    grep -q 'its guest reports no free pages.*its VMM is QEMU' "$work/daemon.log" || fail "no reason is logged: $(explain)"
    ok "with QEMU a guest reports no free pages, and the log says why"
    skip "slipway-vmm on KVM (SLIPWAY_VMM=native): lab/kvm-host --test $test_name SLIPWAY"
fi
start_daemon

# Keeps 64 MiB, and says again and again whether they are what they were.
keeps='
import hashlib, os, time
kept = os.urandom(64 << 20)
first = hashlib.sha256(kept).digest()
turn = 0
while True:
    turn += 1
    said = "right" if hashlib.sha256(kept).digest() == first else "WRONG"
    with open("/said.new", "w") as file: file.write(f"{turn} {said}\n")
    os.rename("/said.new", "/said")
    time.sleep(0.2)
'
uses='x = b"\x5a" * (256 << 20); import time; time.sleep(8)'

# held NAME: MiB of the file of the guest's memory that have pages.
held() {
    local file
    file=$(find "/proc/$(vmm_of "$1")/fd" -lname '/memfd:guest-memory*' -print -quit)
    [ -n "$file" ] || fail "the VMM of $1 has no guest memory"
    echo $(($(stat -Lc %b "$file") >> 11))
}
said() { timeout 60 "$slipway" exec "$1" cat /said; }
turns() { said "$1" | cut -d ' ' -f 1; }

for name in web other; do
    "$slipway" run -d --name "$name" --network none --memory 512M "$image" -- python3 -c "$keeps" >/dev/null \
        || fail "run: $(explain)"
done
grep 'its guest reports no free pages' "$work/daemon.log" && fail "a guest reports nothing"
for name in web other; do
    begun() { [ "$(turns "$name" 2>/dev/null || echo 0)" -gt 0 ]; }
    wait_until 60 begun || fail "$name did not begin: $(explain)"
done

for round in 1 2 3; do
    before=$(held web)
    timeout 120 "$slipway" exec web python3 -c "$uses" </dev/null &
    program=$!
    is_full() { [ "$(held web)" -ge $((before + 200)) ]; }
    wait_until 60 is_full || fail "round $round: the program did not use its memory: $(held web) MiB, $before before"
    full=$(held web)
    wait "$program" || fail "round $round: the program: $(explain)"
    is_back() { [ "$(held web)" -le $((full - 180)) ]; }
    wait_until 60 is_back || fail "round $round: $(held web) MiB of $full are held, $before before"
    for name in web other; do
        turn=$(turns "$name")
        looked_again() { [ "$(turns "$name")" -gt $((turn + 1)) ]; }
        wait_until 60 looked_again || fail "$name looks at its memory no more"
        said "$name" | grep -q right || fail "round $round: memory of $name has changed"
    done
    ok "round $round: $before MiB before, $full MiB in use, $(held web) MiB after the program; others' memory is as it was"
done
