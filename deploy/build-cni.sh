#!/bin/bash
# slipway-cni, linked statically at a fixed address: hundreds start at once, and relocations would take a fifth of its
# start. With musl where this machine's Rust has it: glibc executes CPUID dozens of times at each start, and each is an exit
# to the hypervisor on a node that is a virtual machine itself (an empty program: 0.40 ms of CPU, with musl 0.16 ms).
#
# usage: build-cni.sh TARGET_DIRECTORY TARGET
#   TARGET  the glibc target, in whose directory the program is put either way
set -euo pipefail
directory=${1:?usage: build-cni.sh TARGET_DIRECTORY TARGET} host=${2:?usage: build-cni.sh TARGET_DIRECTORY TARGET}
target=${host%-*}-musl
[ -d "$(rustc --print sysroot)/lib/rustlib/$target" ] || target=$host
RUSTFLAGS='-C target-feature=+crt-static' \
    cargo rustc --profile agent --locked --package slipway-cni --bin slipway-cni --target "$target" \
    -- -C relocation-model=static
[ "$target" = "$host" ] ||
    install -D -m 755 "$directory/$target/agent/slipway-cni" "$directory/$host/agent/slipway-cni"
