#!/usr/bin/env bash
# A guest whose network interface is a function of a pool: it reaches its gateway, goes on over kill -9 of the
# daemon, and gives the function back.
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
need_network_node "$@"
end_all() {
    [ -n "$daemon" ] && runs "$daemon" && { "$slipway" rm --force --all; timeout 60 "$slipway" vf rm nics; "$slipway" port rm kept; } >/dev/null 2>&1
    rm -f "$SLIPWAY_RUN_DIR"/vf.ledger*
}
rm -f "$SLIPWAY_RUN_DIR"/vf.ledger*
states() { "$slipway" vf inspect nics | python3 -c 'import json, sys
print(*sorted(vf["state"] for vf in json.load(sys.stdin)[0]["functions"]), sep=",")'; }
are() { [ "$(states)" = "$1" ]; }
gateway() { "$slipway" network inspect default | python3 -c 'import json, sys; print(json.load(sys.stdin)[0]["gateway"])'; }
reaches_gateway() { timeout 60 "$slipway" exec real ping -q -c 2 -W 20 "$(gateway)" >/dev/null || fail "$1: $(explain)"; }

start_keeper
start_daemon
# Keeps the network's switch, which the pool is on.
"$slipway" port create kept --network default >/dev/null || fail "port create: $(explain)"
"$slipway" vf create nics --switch default --count 2 >/dev/null || fail "vf create: $(explain)"
timeout 300 "$slipway" run --detach --name real --accel tcg --wait-network --vf nics "$image" sleep 3600 >/dev/null ||
    fail "run: $(explain)"
are ready,taken || fail "the pool: $(states)"
reaches_gateway "a guest with a function of the pool"
ok "a guest with an interface of a pool reaches its gateway"

end_daemon KILL
start_daemon
wait_until 30 is_state real running || fail "after a restart: $("$slipway" ps)"
are ready,taken || fail "the pool after a restart: $(states)"
reaches_gateway "a guest after kill -9 of the daemon"
ok "it goes on over kill -9 of the daemon"

"$slipway" rm --force real >/dev/null || fail "rm: $(explain)"
wait_until 30 are ready,ready || fail "the pool after the end: $(states)"
ok "its function goes back"
