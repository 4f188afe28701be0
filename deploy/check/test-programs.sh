#!/bin/bash
# The programs that `make test` tests, but for static ones: compiled as the unit tests are, which takes a tenth of a release
# build's time when these are compiled anyway, and with assertions and checks of overflows.
#
# usage: test-programs.sh TARGET_DIRECTORY TO
#   TO  a directory for these programs alone. In cargo's own directory are programs for guests, too, that are not static: a
#       `slipway` that is started there finds them first
set -euo pipefail
directory=${1:?usage: test-programs.sh TARGET_DIRECTORY TO} to=${2:?usage: test-programs.sh TARGET_DIRECTORY TO}
# One test is among the targets, so that all crates have the features that the unit tests need.
cargo build --locked --workspace --lib --bins --test header
mkdir -p "$to"
for program in slipway slipway-bench containerd-shim-slipway-v2 slipway-snapshotter libslipway.so; do
    ln -f "$directory/debug/$program" "$to/"
done
"$(dirname "$0")/../build-musl.sh" "$directory" "$to"
