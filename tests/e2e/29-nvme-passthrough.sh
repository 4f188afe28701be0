#!/usr/bin/env bash
# A disk and an endpoint on an NVMe namespace by passthrough commands, in a guest. The namespace is one of
# Slipway's, so that Linux's driver is between two ends of ours. Of the disk the block crate's own tests
# run in the guest. The endpoint has a driver of ours as its client: data is the same by the namespace's
# block device; resets, another size and the end of the namespace beneath it. That is the plane's own
# test, which says what is to be done to it.
. "$(dirname "$0")/lib.sh"
need_node
command -v cargo >/dev/null || skip "cargo, to find the test program"
program=$(test_program slipway-block --lib slipway_block) || fail "no test program of slipway-block: $(tail -3 "$work/cargo.log")"
strip -o "$work/block" "$program" || fail "strip"
program=$(test_program slipway-plane "--test passthrough" passthrough) || fail "no test program of slipway-plane: $(tail -3 "$work/cargo.log")"
strip -o "$work/program" "$program" || fail "strip"

"$slipway" disk create medium ram:16M >/dev/null || fail "disk create"
"$slipway" run -d --name guest --privileged --memory 512M --volume data:16M --volume four:16M:4k "$image" -- sleep 100000 >/dev/null ||
    fail "run"
in_guest() { "$slipway" exec "$@"; }
in_guest -i guest sh -c 'cat >/tmp/block && chmod +x /tmp/block && for node in /dev/ng0n3 /dev/ng0n4; do
        ls $node && SLIPWAY_TEST_NVME=$node /tmp/block --show-output passthrough || exit
    done; rm /tmp/block' <"$work/block" >"$work/output" 2>&1 || fail "$(tail -20 "$work/output")"
grep -q 'SKIPPED' "$work/output" && fail "it was skipped: $(cat "$work/output")"
[ "$(grep -c 'a_namespace_equals_its_model ... ok' "$work/output")" = 2 ] || fail "$(tail -20 "$work/output")"
ok "a namespace equals its model by passthrough commands, with blocks of 512 bytes and of 4 KiB, and several disks share it"
id=$("$slipway" inspect guest | python3 -c 'import json,sys; print(json.load(sys.stdin)[0]["id"])')
nsid=$("$slipway" endpoint attach "$id" medium) || fail "attach"
node=nvme0n$nsid generic=ng0n$nsid
sectors() { in_guest guest cat "/sys/class/block/$node/size" 2>/dev/null; }
has_sectors() { [ "$(sectors)" = "$1" ]; }
wait_until 30 has_sectors 32768 || fail "no $node in the guest"
in_guest guest sh -ec "
    node() { test -e /dev/\$2 || mknod -m 600 /dev/\$2 \$1 \$(tr : ' ' <\$3/dev); }
    node b $node /sys/class/block/$node
    node c $generic /sys/class/nvme-generic/$generic" || fail "no device nodes"
in_guest -i guest sh -c 'cat >/tmp/program && chmod +x /tmp/program' <"$work/program" || fail "upload"

in_guest guest sh -c "mkdir /tmp/t; TMPDIR=/tmp/t SLIPWAY_TEST_NVME=/dev/$generic /tmp/program --nocapture" >"$work/output" 2>&1 &
test_pid=$!
explain() { tail -20 "$work/output"; }
# asked WHAT: the test asks for it, or has ended.
asked() { grep -q "please: $1\$" "$work/output" || ! runs "$test_pid"; }
# answer WHAT COMMAND…: does what the test asks for, when it does.
answer() {
    local what=$1; shift
    wait_until 180 asked "$what" || fail "the test does not get to $what: $(explain)"
    runs "$test_pid" || fail "the test ended before $what: $(explain)"
    "$@" >/dev/null || fail "$what"
    in_guest guest touch "/tmp/t/$what" || fail "the guest is stuck after $what"
}
# So few a second that the drive has commands when it is reset.
reset() {
    "$slipway" endpoint limit "$id" --iops 200 --iops-burst 1 && in_guest guest nvme reset /dev/nvme0 &&
        "$slipway" endpoint limit "$id"
}
for round in 0 1 2; do
    answer "reset-$round" reset
done
shrink() { "$slipway" disk resize medium 8M --shrink && wait_until 30 has_sectors 16384; }
answer shrink shrink
answer detach "$slipway" endpoint detach "$id" medium
wait "$test_pid" || fail "the test: $(explain)"
grep -q 'SKIPPED' "$work/output" && fail "it was skipped: $(explain)"
grep -q '1 passed' "$work/output" || fail "the test: $(explain)"
grep -E 'commands be(side|fore)' "$work/output"
ok "what is written through an endpoint on /dev/$generic is read by /dev/$node, and the other way round"
ok "three resets of the drive under 32 commands: no error"
ok "a namespace that gets smaller: LBA Out of Range; one that goes: errors of the medium, and no command that does not end"
in_guest guest true || fail "the guest is stuck"
wait_until 30 in_guest guest sh -c "! test -e /sys/class/block/$node" || fail "$node does not go"
ok "the guest has let go of the namespace"
