#!/usr/bin/env bash
# A stock kernel is given a disk and a CPU while it runs, uses both, and gives them up again, on slipway-vmm in an emulated
# server. A part of `make soak`.
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
need_root
only_in_soak "programs are compiled for its server"
[ -e "${SLIPWAY_LAB:-/var/lib/slipway/lab}/kernels/bookworm/release" ] || skip "a kernel that lab/kernel has fetched"

"${outside[@]}" "$top/lab/plug" bookworm >"$work/lab" 2>&1
status=$?
[ "$status" = 77 ] && skip "an emulated server with KVM: $(tail -n 1 "$work/lab")"
[ "$status" = 0 ] || { cat "$work/lab"; fail "the emulated server, status $status"; }
ok "a disk and a second CPU came, were used and went, twice: $(tail -n 1 "$work/lab")"
