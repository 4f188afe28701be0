#!/bin/bash
# Sockets behave under libslipway.so as the kernel's do: every part of semantics.py, both ways.
#   run.sh LIBRARY ENGINE_SOCKET [PART…]
set -u
library=$1 engine=$2
shift 2
script=$(dirname "$(readlink -f "$0")")/semantics.py
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
timeout 600 python3 "$script" "$@" >"$work/kernel" 2>"$work/kernel.errors"
SLIPWAY_SOCKET=$engine LD_PRELOAD=$library timeout 600 python3 "$script" "$@" >"$work/ours" 2>"$work/errors"
if ! diff -u "$work/kernel" "$work/ours"; then
    cat "$work/errors"
    exit 1
fi
if ! grep -qE '^ours: [1-9]' "$work/errors"; then
    printf 'no connection was ours\n' >&2
    cat "$work/errors"
    exit 1
fi
printf 'the same, %s\n' "$(tail -n 1 "$work/errors")"
