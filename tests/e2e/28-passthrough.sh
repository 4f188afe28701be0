#!/usr/bin/env bash
# The disk on an NVMe namespace by passthrough commands, in a guest: its namespace is one of Slipway's, so
# this is Linux's driver between two ends of ours. What runs there is the block crate's own test.
. "$(dirname "$0")/lib.sh"
need_node
command -v cargo >/dev/null || skip "cargo, to find the test program"
program=$(test_program slipway-block --lib slipway_block) || fail "no test program of slipway-block: $(tail -3 "$work/cargo.log")"
strip -o "$work/program" "$program" || fail "strip"
"$slipway" run --privileged --interactive --memory 512M --volume data:16M --volume four:16M:4k "$image" -- sh -c '
    cat >/tmp/program && chmod +x /tmp/program && for node in /dev/ng0n3 /dev/ng0n4; do
        ls $node && SLIPWAY_TEST_NVME=$node /tmp/program --show-output passthrough || exit
    done' <"$work/program" >"$work/output" 2>&1 || fail "$(tail -20 "$work/output")"
grep -q 'SKIPPED' "$work/output" && fail "it was skipped: $(cat "$work/output")"
[ "$(grep -c 'a_namespace_equals_its_model ... ok' "$work/output")" = 2 ] || fail "$(tail -20 "$work/output")"
ok "a namespace equals its model by passthrough commands, with blocks of 512 bytes and of 4 KiB, and several disks share it"
