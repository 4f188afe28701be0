#!/usr/bin/env bash
# The disk on an NVMe namespace by passthrough commands, in a guest: its namespace is one of Slipway's, so
# this is Linux's driver between two ends of ours. What runs there is the block crate's own test.
. "$(dirname "$0")/lib.sh"
need_node
command -v cargo >/dev/null || skip "cargo, to find the test program"
program=$(test_program slipway-block --lib slipway_block) || fail "no test program of slipway-block: $(tail -3 "$work/cargo.log")"
strip -o "$work/program" "$program" || fail "strip"
for size in 16M 16M:4k; do
    "$slipway" run --privileged --interactive --memory 512M --volume "data:$size" "$image" -- sh -c '
        cat >/tmp/program && chmod +x /tmp/program && ls /dev/ng0n3 &&
        SLIPWAY_TEST_NVME=/dev/ng0n3 /tmp/program --show-output passthrough' \
        <"$work/program" >"$work/output" 2>&1 || fail "a volume of $size: $(tail -20 "$work/output")"
    grep -q 'SKIPPED' "$work/output" && fail "it was skipped: $(cat "$work/output")"
    grep -q 'a_namespace_equals_its_model ... ok' "$work/output" || fail "a volume of $size: $(tail -20 "$work/output")"
    ok "a namespace of $size equals its model by passthrough commands, and several disks share it"
done
