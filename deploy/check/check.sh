#!/bin/bash
# What must hold of the sources. Every part runs, also after another one failed.
set -uo pipefail
cd "$(dirname "$(readlink -f "$0")")/../.." || exit
failed=()
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

# part NAME COMMAND...: runs it, and what it says is shown at once.
part() {
    local name=$1
    shift
    printf 'check: %s\n' "$name"
    "$@" || failed+=("$name")
}

# beside NAME COMMAND...: runs it beside the parts, and what it says is shown by `shown`.
asides=()
beside() {
    local name=$1
    shift
    asides+=("$name")
    (
        "$@" >"$logs/$name" 2>&1
        echo $? >"$logs/$name.status"
    ) &
}

shown() {
    local name
    wait
    for name in "${asides[@]}"; do
        printf 'check: %s\n' "$name"
        cat "$logs/$name"
        [ "$(cat "$logs/$name.status")" = 0 ] || failed+=("$name")
    done
}

# SC2154: variables of sourced files that shellcheck cannot find.
scripts() {
    git ls-files -z |
        xargs -0 grep -lZE '^#!(/bin/|/usr/bin/env )(ba)?sh|^# shellcheck shell=' -- |
        xargs -0 shellcheck -x -S warning -e SC2154
}

# The fuzz targets are a workspace of their own, built by `make fuzz`: its lock is looked at here.
fuzz_lock() { cargo metadata --locked --format-version 1 --manifest-path fuzz/Cargo.toml >/dev/null; }

# The programs that read the sources. One after the other: together they would take the processors of the lints.
sources() {
    local check status=0
    for check in documents:docs words layout circles figures floors vmm-lines:vmm_lines licences; do
        python3 "deploy/check/${check#*:}.py" || { echo "${check%:*}: FAILED"; status=1; }
    done
    return $status
}

part format cargo fmt --all --check
beside scripts scripts
beside sources sources
beside units deploy/check/units.sh
part lints cargo clippy --quiet --locked --workspace --all-targets -- -D warnings
part fuzz-lock fuzz_lock
shown

if [ ${#failed[@]} -gt 0 ]; then
    printf 'check: FAILED: %s\n' "${failed[*]}" >&2
    exit 1
fi
printf 'check: all is well\n'
