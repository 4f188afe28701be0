#!/usr/bin/env bash
# The disk on an NVMe namespace by passthrough commands, in a guest: its namespace is one of Slipway's, so
# this is Linux's driver between two ends of ours. What runs there is the block crate's own test.
. "$(dirname "$0")/lib.sh"
need_node
command -v cargo >/dev/null || skip "cargo, to find the test program"
# `make test` has built the whole workspace's, with features of their own: they are not built twice.
scope=${SLIPWAY_TEST_SCOPE:---package slipway-block --lib}
# shellcheck disable=SC2086 # words
program=$(cd "$(dirname "$0")/../.." && cargo test --locked $scope --no-run --message-format=json 2>"$work/cargo.log" |
    python3 -c 'import json, sys
for line in sys.stdin:
    one = json.loads(line) if line.startswith("{") else {}
    if one.get("executable") and one["target"]["name"] == "slipway_block" and one["profile"]["test"]:
        print(one["executable"])')
[ -x "$program" ] || fail "no test program of slipway-block: $(tail -3 "$work/cargo.log")"
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
