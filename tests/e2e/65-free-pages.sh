#!/usr/bin/env bash
# A guest reports the pages that it does not use (free_page_reporting = true): after a program that used 256 MiB has ended,
# the file of the guest's memory is small again, and not a byte of another program or sandbox has changed. Such a sandbox is
# saved, forked, and paused to a file, and its fork, itself when it is back, and a fork of a template give back what a program
# used. With QEMU the guest reports nothing, and the log says why, as it does of a root that cannot be shared (72-shared-root).
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
need_node
echo 'free_page_reporting = true' >>"$SLIPWAY_CONFIG"
start_keeper

if [ "${SLIPWAY_VMM:-}" != native ]; then
    export SLIPWAY_VMM=qemu
    echo 'shared_root = "on"' >>"$SLIPWAY_CONFIG"
    start_daemon
    "$slipway" run --rm --network none "$image" -- sh -c 'test -b /dev/pmem0 || test -e /sys/block/pmem0 && exit 1; exit 9'
    status=$?
    [ "$status" = 9 ] || fail "with QEMU the status is $status: $(explain)"
    grep -q 'its root is a disk.*its VMM is QEMU' "$work/daemon.log" || fail "no reason is logged: $(explain)"
    ok "with QEMU the root is a disk, and the log says why"
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
# Uses 256 MiB until the file /used is there.
uses='
import os, time
x = b"\x5a" * (256 << 20)
while not os.path.exists("/used"): time.sleep(0.1)
os.remove("/used")
'
# ends_use NAME: has the program of NAME that uses memory end.
ends_use() { timeout 60 "$slipway" exec "$1" touch /used || fail "exec in $1: $(explain)"; }

# held NAME: MiB of the file of the guest's memory that have pages.
held() {
    local file
    file=$(find "/proc/$(vmm_of "$1")/fd" -lname '/memfd:guest-memory*' -print -quit)
    [ -n "$file" ] || fail "the VMM of $1 has no guest memory"
    echo $(($(stat -Lc %b "$file") >> 11))
}
said() { timeout 60 "$slipway" exec "$1" cat /said; }
turns() { said "$1" | cut -d ' ' -f 1; }

# is_right NAME WHEN: the program of the sandbox looks at its memory again, and finds what it has put there.
is_right() {
    local turn
    turn=$(turns "$1")
    looked_again() { [ "$(turns "$1")" -gt $((turn + 1)) ]; }
    wait_until 60 looked_again "$1" || fail "$2: $1 looks at its memory no more"
    said "$1" | grep -q right || fail "$2: memory of $1 has changed"
}
# why_not NAME: why the host has no free pages back, as inspect says it.
why_not() { "$slipway" inspect "$1" | python3 -c 'import json, sys
said = json.load(sys.stdin)[0]
assert said["free_page_reporting"] == (said["free_page_reporting_why_not"] == ""), said
print(said["free_page_reporting_why_not"])'; }

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
    is_full() { [ "$(held web)" -ge $((before + 150)) ]; }
    wait_until 60 is_full || fail "round $round: the program did not use its memory: $(held web) MiB, $before before"
    full=$(held web)
    ends_use web
    wait "$program" || fail "round $round: the program: $(explain)"
    is_back() { [ "$(held web)" -le $((before + 60)) ]; }
    wait_until 60 is_back || fail "round $round: $(held web) MiB of $full are held, $before before"
    for name in web other; do is_right "$name" "round $round"; done
    ok "round $round: $before MiB before, $full MiB in use, $(held web) MiB after the program; others' memory is as it was"
done
[ -z "$(why_not web)" ] || fail "web: $(why_not web)"
"$slipway" run -d --name quiet --network none --free-page-reporting=off "$image" -- sleep 1000 >/dev/null || fail "run: $(explain)"
why_not quiet | grep -q 'reporting=off' || fail "quiet: $(why_not quiet)"
ok "a sandbox says itself that its guest reports nothing"

timeout 300 "$slipway" snapshot create web kept >/dev/null || fail "snapshot: $(explain)"
timeout 300 "$slipway" run -d --name heir --from kept >/dev/null || fail "run --from: $(explain)"
timeout 300 "$slipway" pause --to-file web >/dev/null || fail "pause: $(explain)"
timeout 300 "$slipway" resume web >/dev/null || fail "resume: $(explain)"

# settled NAME: prints how many MiB the memory of NAME holds, once that does not change: pages are copied behind the faults.
settled() {
    local name=$1 last=-1 now
    rests() { last=$now; sleep 2; now=$(held "$name"); [ "$now" = "$last" ]; }
    now=$(held "$name")
    wait_until 180 rests || fail "the memory of $name does not come to rest: $now MiB"
    echo "$now"
}
# gives_back NAME: a program of NAME uses 128 MiB, and the host has them back when it has ended.
gives_back() {
    local name=$1 before full program
    [ -z "$(why_not "$name")" ] || fail "$name: $(why_not "$name")"
    before=$(settled "$name")
    timeout 120 "$slipway" exec "$name" python3 -c "${uses/256/128}" </dev/null &
    program=$!
    is_full() { [ "$(held "$name")" -ge $((before + 100)) ]; }
    wait_until 60 is_full || fail "$name: the program did not use its memory: $(held "$name") MiB, $before before"
    full=$(held "$name")
    ends_use "$name"
    wait "$program" || fail "$name: the program: $(explain)"
    is_back() { [ "$(held "$name")" -le $((before + 50)) ]; }
    wait_until 60 is_back || fail "$name: $(held "$name") MiB of $full are held, $before before"
    is_right "$name" "reports of a fork"
    ok "$name: $before MiB before, $full MiB in use, $(held "$name") MiB after the program; its memory is as it was"
}
for name in heir web; do
    is_right "$name" "after a save"
    gives_back "$name"
done
ok "a sandbox that reports is saved and comes back from a file; its fork and itself report"

# The host has room for the memory of a few sandboxes only.
"$slipway" rm --force web other quiet heir >/dev/null || fail "rm: $(explain)"
timeout 300 "$slipway" template create --memory 512M --network none machine >/dev/null || fail "template create: $(explain)"
for options in --name=leaf "--name=shy --free-page-reporting=off"; do
    # shellcheck disable=SC2086 # the options are words
    timeout 300 "$slipway" run -d $options --from machine --network none --memory 512M "$image" -- python3 -c "$keeps" \
        >/dev/null || fail "run --from: $(explain)"
done
begun() { [ "$(turns leaf 2>/dev/null || echo 0)" -gt 0 ]; }
wait_until 60 begun || fail "leaf did not begin: $(explain)"
gives_back leaf
why_not shy | grep -q 'reporting=off' || fail "shy: $(why_not shy)"
timeout 300 "$slipway" run --rm --from machine --network none --memory 512M "$image" -- true \
    || fail "the template was changed: $(explain)"
ok "a fork of a template reports, unless its user wants none"
