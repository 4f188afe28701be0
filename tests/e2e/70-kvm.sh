#!/usr/bin/env bash
# Where the CPU can do it, sandboxes run on KVM, and Slipway finds that out by itself. On a machine
# without KVM the same is shown in an emulated server.
. "$(dirname "$0")/lib.sh"
need_root

# Accelerator that the node's daemon chose last.
chosen() { sed -n 's/.*accelerator chosen accel=\([a-z]*\).*/\1/p' "$SLIPWAY_DATA_DIR/daemon.log" | tail -n 1; }
kvm_may_work() { "$slipway" doctor --json | python3 -c 'import json,sys
sys.exit(0 if any(f["check"] == "accelerator" and f["verdict"] == "ok" for f in json.load(sys.stdin)) else 1)'; }

if kvm_may_work; then
    need_node
    stop_daemon
    "$slipway" run --rm "$image" -- sh -c 'exit 3'
    status=$?
    [ "$status" = 3 ] || fail "exit 3 gave $status"
    if [ "$(chosen)" = kvm ]; then
        ok "KVM chosen, and a sandbox ran on it"
        exit 0
    fi
    say "this machine's KVM does not run the guest kernel: $(grep 'accelerator chosen' "$SLIPWAY_DATA_DIR/daemon.log" | tail -n 1)"
fi

# in_server OPTION...: what lab/kvm-host does with them.
in_server() {
    local status
    "${outside[@]}" "$top/lab/kvm-host" "$@" "$slipway" "$work" >"$work/lab" 2>&1
    status=$?
    [ "$status" = 77 ] && skip "an emulated server with KVM: $(tail -n 1 "$work/lab")"
    [ "$status" = 0 ] || { cat "$work/lab"; fail "the emulated server, status $status"; }
}
in_server
grep -E 'lab: (accelerator|cpu|vmms)=' "$work/lab"
ok "KVM probed, chosen and used in an emulated server, by slipway-vmm and by QEMU: exit status, two CPUs, a volume, two at once"
say "$(sed -n 's/^kvm-host: \(.* kills:\)/\1/p' "$work/lab")"
ok "two sandboxes on slipway-vmm outlived killed daemons, and every byte of a disk and of a TCP stream was right"
# A test of features that only slipway-vmm has. `make soak` runs the others in the server: they take minutes each.
in_server --test 14-forks
ok "on slipway-vmm in an emulated server: 14-forks"
