#!/usr/bin/env bash
# kill -9 of any process at any moment leaves nothing that ps does not show and rm does not clear.
#   SLIPWAY_KILLS  with 8 or more, moments before and after the start and in its midst are tried, and otherwise two of these
. "$(dirname "$0")/lib.sh"
need_node
command_at=(0.2 2) daemon_at=(0.3 2.5)
[ "${SLIPWAY_KILLS:-2}" -lt 8 ] || { command_at=(0.02 0.2 1 3) daemon_at=(0.05 0.3 1.5 4); }

# A command starts the node's daemon so. That of a command which was killed may come up while a later command's serves.
no_second_daemon() { [ "$(pgrep -fc -- "--run-dir $SLIPWAY_RUN_DIR --data-dir $SLIPWAY_DATA_DIR\$")" -le 1 ]; }
clean() {
    "$slipway" rm --force --all >/dev/null 2>&1
    wait_until 20 no_second_daemon || fail "$1: two daemons: $(pgrep -af -- "--data-dir $SLIPWAY_DATA_DIR\$")"
    stop_daemon
    local left
    left=$(leftovers)
    [ -z "$left" ] || fail "$1 left: $left"
}

for delay in "${command_at[@]}"; do
    "$slipway" run --name victim "$image" -- sleep 1000 >/dev/null 2>&1 & pid=$!
    sleep "$delay"; kill -9 "$pid"; wait "$pid" 2>/dev/null
    "$slipway" ps >/dev/null || fail "ps after kill -9 of the command"
    clean "kill -9 of the command after $delay s"
done
ok "kill -9 of the command at ${#command_at[@]} moments of a start"

for delay in "${daemon_at[@]}"; do
    "$slipway" run -d --name victim "$image" -- sleep 1000 >/dev/null 2>&1 & pid=$!
    wait_until 10 lock_holder >/dev/null || fail "no daemon"
    sleep "$delay"; vmm=$(vmm_of victim)
    kill -9 "$(lock_holder)"; wait "$pid" 2>/dev/null
    "$slipway" ps >"$work/ps" || fail "ps after kill -9 of the daemon"
    grep -q running "$work/ps" && fail "ps calls it running: $(cat "$work/ps")"
    runs "$vmm" && fail "the VMM $vmm outlived ps"
    clean "kill -9 of the daemon after $delay s"
done
ok "kill -9 of the daemon at ${#daemon_at[@]} moments"

"$slipway" run -d --name victim "$image" -- sleep 1000 >/dev/null || fail "run"
"$slipway" run -d --name other "$image" -- sleep 1000 >/dev/null || fail "run"
kill -9 "$(vmm_of victim)"
wait_until 20 is_state victim failed || fail "after kill -9 of QEMU: $("$slipway" ps)"
is_state other running || fail "the neighbour suffered"
[ "$("$slipway" exec other echo alive)" = alive ] || fail "the neighbour does not answer"
ok "kill -9 of QEMU: its sandbox has failed, its neighbour runs"
clean "kill -9 of QEMU"
ok "nothing is left"
