#!/bin/bash
# What must hold of the sources. Every part runs, also after another one failed.
set -uo pipefail
cd "$(dirname "$(readlink -f "$0")")/../.." || exit
failed=()

part() {
    local name=$1
    shift
    printf 'check: %s\n' "$name"
    "$@" || failed+=("$name")
}

docs_without_warnings() {
    RUSTDOCFLAGS='-D warnings' cargo doc --quiet --locked --workspace --no-deps
}

# SC2154: variables of sourced files that shellcheck cannot find.
scripts() {
    git ls-files -z |
        xargs -0 grep -lZE '^#!(/bin/|/usr/bin/env )(ba)?sh|^# shellcheck shell=' -- |
        xargs -0 shellcheck -x -S warning -e SC2154
}

# The fuzz targets are a workspace of their own, built by `make fuzz`: its lock is looked at here.
fuzz_lock() { cargo metadata --locked --format-version 1 --manifest-path fuzz/Cargo.toml >/dev/null; }

part format cargo fmt --all --check
part lints cargo clippy --quiet --locked --workspace --all-targets -- -D warnings
part docs docs_without_warnings
part fuzz-lock fuzz_lock
part documents python3 deploy/check/docs.py
part words python3 deploy/check/words.py
part layout python3 deploy/check/layout.py
part circles python3 deploy/check/circles.py
part figures python3 deploy/check/figures.py
part floors python3 deploy/check/floors.py
part vmm-lines python3 deploy/check/vmm_lines.py
part units deploy/check/units.sh
part licences python3 deploy/check/licences.py
part scripts scripts

if [ ${#failed[@]} -gt 0 ]; then
    printf 'check: FAILED: %s\n' "${failed[*]}" >&2
    exit 1
fi
printf 'check: all is well\n'
