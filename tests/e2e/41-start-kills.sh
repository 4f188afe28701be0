#!/usr/bin/env bash
# kill -9 of the command, of the daemon or of the VMM at the steps of the start of a sandbox that has a network, a published
# port, an interface of a pool and a volume: what `slipway ps` says afterwards is true, and when the sandbox is removed the node
# holds what it held before. The steps are seen in the sandbox's record, its sockets and processes (moments.py). Before that, the
# guest reaches its gateway by the interface of the pool, also after kill -9 of the daemon, and gives it back.
#   SLIPWAY_KILLS  with 8 or more, the kills are at all steps, and otherwise at those where something new is held
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
# shellcheck source=tests/e2e/kills.sh
. "$here/kills.sh"
need_network_node "$@"
end_all() {
    [ -n "$daemon" ] && runs "$daemon" && { "$slipway" rm --force --all; timeout 60 "$slipway" vf rm nics; "$slipway" port rm kept; } >/dev/null 2>&1
    rm -f "$SLIPWAY_RUN_DIR"/vf.ledger*
}
rm -f "$SLIPWAY_RUN_DIR"/vf.ledger*
start_keeper
start_daemon
told='at the start'
fail() { say "FAILED: $told: $*"; exit 1; }

# Keeps the network's switch, which the pool is on.
"$slipway" port create kept --network default >/dev/null || fail "port create: $(explain)"
"$slipway" vf create nics --switch default --count 2 >/dev/null || fail "vf create: $(explain)"
run=("$slipway" run --detach --name victim --wait-network --vf nics --publish 8080:80 --volume data:16M:/data "$image" -- sleep 100000)

# Prints the sandboxes, functions, ports, interfaces, rules and files that the node holds.
held() {
    "$slipway" ps --quiet
    "$slipway" vf inspect nics | grep -E '"(owner|state)"' | sort
    "$slipway" endpoint ls --json | grep '"id"' | sort
    "$slipway" port ls --json | grep -E '"(network|name)"' | sort
    "$slipway" network inspect default
    nft list ruleset
    ip -o link show | cut -d: -f 2
    find "$SLIPWAY_RUN_DIR" -mindepth 1 | sort
    leftovers
}
holds_as_before() { held >"$work/held" 2>&1; cmp -s "$work/before" "$work/held"; }
# A function that is still being reset does not belong to what the node holds at rest.
settled() { held >"$work/before" 2>&1; sleep 1; ! grep -q '"state": "being reset"' "$work/before" && holds_as_before; }

# A sandbox whose client was killed may go by itself meanwhile.
remove() { "$slipway" rm --force victim >"$work/said" 2>&1 || is_state victim gone || fail "rm: $(cat "$work/said"; explain)"; }

states() { "$slipway" vf inspect nics | python3 -c 'import json, sys
print(*sorted(vf["state"] for vf in json.load(sys.stdin)[0]["functions"]), sep=",")'; }
are() { [ "$(states)" = "$1" ]; }
gateway() { "$slipway" network inspect default | python3 -c 'import json, sys; print(json.load(sys.stdin)[0]["gateway"])'; }
reaches_gateway() { timeout 60 "$slipway" exec victim ping -q -c 2 -W 20 "$(gateway)" >/dev/null || fail "$1: $(explain)"; }

# It works, and is given back.
timeout 300 "${run[@]}" >"$work/said" 2>&1 || fail "run: $(cat "$work/said") $(explain)"
are ready,taken || fail "its interface is not of the pool: $("$slipway" vf inspect nics)"
grep -q 'dport 8080 dnat' <<<"$(nft list ruleset)" || fail "its port is not published: $(nft list ruleset)"
reaches_gateway "a guest with an interface of the pool"
restart_daemon
wait_until 30 is_state victim running || fail "after kill -9 of the daemon: $("$slipway" ps)"
are ready,taken || fail "the pool after kill -9 of the daemon: $(states)"
reaches_gateway "a guest after kill -9 of the daemon"
ok "a guest with an interface of a pool reaches its gateway, and goes on over kill -9 of the daemon"
remove
wait_until 30 are ready,ready || fail "the pool after the end: $(states)"
ok "its interface goes back"
restart_daemon
wait_until 60 settled || fail "a node without sandboxes changes: $(diff "$work/before" "$work/held")"
grep -q '"state": "taken"' "$work/before" && fail "a function is lost: $(cat "$work/before")"
ok "without a sandbox the node holds $(wc -l <"$work/before") things"

# kill_at VICTIM STEP
kill_at() {
    local victim=$1 vmm late='' outcome=0
    told="$victim killed when \"$2\" was seen"
    # A killed `timeout` would leave the command.
    if [ "$victim" = command ]; then
        "${run[@]}" >"$work/said" 2>&1 &
    else
        timeout 300 "${run[@]}" >"$work/said" 2>&1 &
    fi
    client=$!
    vmm=$(python3 "$here/moments.py" "$SLIPWAY_DATA_DIR" "$SLIPWAY_RUN_DIR" nics victim "$2" "$client") || late=yes
    case $victim in
        command) kill -KILL "$client" 2>/dev/null ;;
        daemon) restart_daemon ;;
        VMM) [ "$vmm" = 0 ] || kill -KILL "$vmm" 2>/dev/null ;;
    esac
    wait "$client" || outcome=$?
    [ "$outcome" != 124 ] || fail "the command waits for ever: $("$slipway" ps; explain)"
    [ "$late$outcome" != yes0 ] || told+=", too late"
    [ -z "$late" ] || [ "$outcome" = 0 ] || fail "the start failed by itself: $(cat "$work/said"; explain)"
    wait_until 300 over victim || fail "the start comes to no end: $("$slipway" ps; explain)"
    if [ "$victim" = VMM ] && [ "$vmm" != 0 ]; then
        wait_until 60 ended victim || fail "it runs without its VMM: $("$slipway" ps; explain)"
    fi
    wait_until 60 no_lie || fail "$(lies)"
    over victim
    told+=": status $outcome, $state"
    [ "$state" = gone ] || remove
    wait_until 60 holds_as_before || fail "$(diff "$work/before" "$work/held"; explain)"
    say "$told"
}
command_at=(function) daemon_at=(starting function process running) vmm_at=(launched)
if [ "${SLIPWAY_KILLS:-2}" -ge 8 ]; then
    command_at=(created function launched) vmm_at=(process launched running)
    daemon_at=(created starting directory function process launched running)
fi
for step in "${command_at[@]}"; do kill_at command "$step"; done
told='kill -9 of the command'
ok "kill -9 of the command during a start (${command_at[*]}): what is said is true, and nothing is left"
for step in "${daemon_at[@]}"; do kill_at daemon "$step"; done
told='kill -9 of the daemon'
ok "kill -9 of the daemon (${daemon_at[*]})"
for step in "${vmm_at[@]}"; do kill_at VMM "$step"; done
told='kill -9 of the VMM'
ok "kill -9 of the VMM (${vmm_at[*]})"

told='after the kills'
timeout 300 "${run[@]}" >"$work/said" 2>&1 || fail "run: $(cat "$work/said") $(explain)"
is_state victim running || fail "the next sandbox: $("$slipway" ps)"
remove
wait_until 60 holds_as_before || fail "$(diff "$work/before" "$work/held"; explain)"
"$slipway" vf rm nics >/dev/null || fail "vf rm: $(explain)"
ok "the next sandbox starts, and gives everything back"
