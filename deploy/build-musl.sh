#!/bin/bash
# libslipway-musl.so, for programs that are linked with musl, where this machine's Rust has that target.
#
# usage: build-musl.sh TARGET_DIRECTORY TO
#   TO  the directory that the library is put into
set -euo pipefail
directory=${1:?usage: build-musl.sh TARGET_DIRECTORY TO} to=${2:?usage: build-musl.sh TARGET_DIRECTORY TO}
target=$(uname -m)-unknown-linux-musl
rust=$(rustc --print sysroot)/lib/rustlib/$target
if [ ! -d "$rust" ] || ! command -v musl-gcc >/dev/null; then
    printf '%s\n' "NOT BUILT: libslipway-musl.so, for programs linked with musl: needs rustup target add $target, and musl-tools" >&2
    exit 0
fi
# Rust asks for the C compiler's library to unwind with, which is glibc's here; it brings one for musl.
shims=$directory/musl-shims
mkdir -p "$shims"
echo "INPUT($rust/lib/self-contained/libunwind.a)" >"$shims/libgcc_s.so"
# A library that is loaded cannot be static.
RUSTFLAGS="-C target-feature=-crt-static -C linker=musl-gcc -L native=$shims" \
    cargo build --release --locked --package slipway-preload --target "$target"
cp "$directory/$target/release/libslipway.so" "$to/libslipway-musl.so"
