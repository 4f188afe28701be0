#!/usr/bin/env bash
# 47-network-restart with e1000 interfaces and the driver that a stock Linux has: a restart of the daemon resets the device, and
# the agent has the driver start it anew. Needs a guest kernel with the driver (`deploy/setup/setup.sh e1000`).
here=$(dirname "$0")
kernel=${SLIPWAY_E1000_KERNEL:-/var/lib/slipway/kernel-e1000}
if [ ! -f "$kernel/vmlinuz" ]; then
    # shellcheck source=tests/e2e/lib.sh
    . "$here/lib.sh"
    skip "a guest kernel with the driver e1000 (deploy/setup/setup.sh e1000)"
fi
export SLIPWAY_TEST_NIC=e1000 SLIPWAY_TEST_KERNEL=$kernel
exec "$here/47-network-restart.sh" "$@"
