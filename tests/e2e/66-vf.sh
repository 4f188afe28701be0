#!/usr/bin/env bash
# Pools of virtual functions: made, taken, returned, drained, removed; a daemon that is killed at any
# time; a ledger that is cut in half; bad input.
. "$(dirname "$0")/lib.sh"
need_root
[ -x "$slipway" ] || fail "$slipway is not built; \`make build\` builds it"
mkdir -p "$SLIPWAY_RUN_DIR" "$SLIPWAY_DATA_DIR"
end_all() {
    [ -n "$daemon" ] && runs "$daemon" && for pool in fast nics; do timeout 60 "$slipway" vf rm "$pool"; done >/dev/null 2>&1
    [ -n "$daemon" ] && runs "$daemon" && { "$slipway" port rm vfport; "$slipway" network rm vfnet; } >/dev/null 2>&1
    rm -f "$SLIPWAY_RUN_DIR"/vf.ledger*
}
rm -f "$SLIPWAY_RUN_DIR"/vf.ledger*

# states POOL: the states of its functions, sorted: which one is ready first is a matter of chance.
states() { "$slipway" vf inspect "$1" | python3 -c 'import json, sys
print(*sorted(vf["state"] for vf in json.load(sys.stdin)[0]["functions"]), sep=",")'; }
are() { [ "$(states "$1")" = "$2" ]; }
# refuses WORDS COMMAND…: the command fails, in one line that has these words.
refuses() {
    local words=$1 said; shift
    said=$("$slipway" "$@" 2>&1) && fail "slipway $*: should fail"
    [ "$(wc -l <<<"$said")" = 1 ] || fail "slipway $*: not one line: $said"
    grep -qF -- "$words" <<<"$said" || fail "slipway $*: $said"
}

start_keeper
start_daemon
"$slipway" vf create fast --disk ram:8M --count 3 --set-size 2 >/dev/null || fail "vf create: $(explain)"
are fast ready,ready,ready || fail "not ready: $(states fast)"
[ "$("$slipway" endpoint ls --json | grep -c '"fast\.')" = 3 ] || fail "no endpoints: $("$slipway" endpoint ls)"
read -r one socket < <("$slipway" vf take fast --owner sandbox:one) || fail "vf take"
[ "${socket##*.}" = "$one" ] && [ -S "$socket" ] || fail "take said: $one $socket"
other=$(((one + 1) % 3))
are fast ready,ready,taken || fail "not taken: $(states fast)"
"$slipway" vf ls | grep -qE '^fast +nvme +3 +2 +1 +0 +0 +0$' || fail "vf ls: $("$slipway" vf ls)"
"$slipway" vf ls --json | python3 -c 'import json, sys
pool = json.load(sys.stdin)[0]
vf = pool["functions"][int(sys.argv[1])]
assert (pool["kind"], pool["devset_size"], vf["owner"], vf["takes"]) == ("nvme", 2, "sandbox:one", 1), pool' "$one" ||
    fail "vf ls --json"
ok "a pool of three; one is taken: $socket"

refuses "sandbox:one has VF $one of pool fast already" vf take fast --owner sandbox:one
refuses "sandbox:two has no VF of pool fast" vf return fast --owner sandbox:two
refuses "there is no pool" vf take slow --owner sandbox:one
refuses "is no owner" vf take fast --owner one
refuses "a pool called \"fast\" is there already" vf create fast --disk ram:8M
refuses "is no pool's name" vf create a/b --disk ram:8M
refuses "only those are empty for each owner" vf create null --disk null:8M
refuses "is larger than the pool" vf create big --disk ram:8M --count 2 --set-size 3
refuses "--layers is for --disk overlay:PATH" vf create bounded --disk ram:8M --layers 8M
refuses "cannot be reset: VF $one is taken" vf reset fast --set $((one / 2))
refuses "has no devset 7" vf reset fast --set 7
refuses "has no VF 9" vf drain fast --vf 9
refuses "owners have 1 of its VFs" vf rm fast
refuses "is whole" vf rebuild
refuses "--help tells more" vf create none
"$slipway" vf take fast --owner sandbox:two >/dev/null || fail "the second"
read -r three _ < <("$slipway" vf take fast --owner sandbox:three) || fail "the third"
refuses "of 3 3 are taken, 0 are being reset" vf take fast --owner sandbox:four
ok "bad input and an empty pool: one clear line each"

# The functions go on with the keeper, and the owners with the ledger.
end_daemon KILL
start_daemon
are fast taken,taken,taken || fail "after a kill: $(states fast)"
"$slipway" vf return fast --owner sandbox:two >/dev/null || fail "vf return"
[ "$("$slipway" vf reconcile --kind sandbox one)" = "fast.$three" ] || fail "vf reconcile"
wait_until 30 are fast ready,ready,taken || fail "not returned: $(states fast)"
ok "kill -9 of the daemon: owners keep their functions, and those of owners that are gone return"

# An owner that is a process which ends while no daemon runs.
sleep 600 & process=$!
started=$(sed 's/.*) //' "/proc/$process/stat" | cut -d' ' -f20)
"$slipway" vf take fast --owner "process:$process-$started" >/dev/null || fail "take for a process"
end_daemon KILL
start_daemon
are fast ready,taken,taken || fail "a living process lost its function: $(states fast)"
end_daemon KILL
kill "$process"; wait "$process" 2>/dev/null
start_daemon
wait_until 30 are fast ready,ready,taken || fail "the function of a process that is gone: $(states fast)"
ok "a process that ended meanwhile: its function is ready again"

# Kills at any point of takes and returns.
for round in 1 2 3 4 5 6; do
    (for n in 1 2 3 4 5 6 7 8; do
        "$slipway" vf take fast --owner "loop:$n" && "$slipway" vf return fast --owner "loop:$n"
    done) >/dev/null 2>&1 & loop=$!
    sleep "0.0$((round * 13 % 10))"
    end_daemon KILL
    rm -f "$SLIPWAY_RUN_DIR/slipway.sock"
    start_daemon
    wait "$loop"
    "$slipway" vf reconcile --kind loop >/dev/null || fail "reconcile in round $round"
    wait_until 30 are fast ready,ready,taken || fail "round $round: $(states fast)"
done
ok "six kills amid takes and returns: no function is lost, and none has an owner that is gone"

"$slipway" vf drain fast --vf "$other" >/dev/null && wait_until 30 are fast drained,ready,taken || fail "drain: $(states fast)"
"$slipway" vf drain fast --vf "$one" >/dev/null && are fast drained,ready,taken || fail "drain of a taken one: $(states fast)"
"$slipway" vf return fast --owner sandbox:one >/dev/null
wait_until 30 are fast drained,drained,ready || fail "drained on return: $(states fast)"
end_daemon KILL
start_daemon
wait_until 30 are fast drained,drained,ready || fail "drained after a restart: $(states fast)"
"$slipway" vf reset fast --set 0 >/dev/null || fail "vf reset"
"$slipway" vf resume fast >/dev/null
wait_until 30 are fast ready,ready,ready || fail "resume: $(states fast)"
ok "drain, resume, reset of a set"

refuses 'there is no switch "nope"; the pool was removed' vf create bad --switch nope --count 2
"$slipway" network create vfnet --internal >/dev/null && "$slipway" port create vfport --network vfnet >/dev/null ||
    fail "a network for interfaces"
"$slipway" vf create nics --switch vfnet --count 2 >/dev/null || fail "vf create --switch"
mac=$("$slipway" vf take nics --owner sandbox:one --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["mac"])')
"$slipway" port ls | grep -q "nics\.[01] .*$mac" || fail "no port with $mac: $("$slipway" port ls)"
end_daemon KILL
start_daemon
are nics ready,taken || fail "interfaces after a kill: $(states nics)"
"$slipway" vf return nics --owner sandbox:one >/dev/null && wait_until 30 are nics ready,ready || fail "$(states nics)"
# An interface that returns while its switch is gone fails, and comes back with the switch.
"$slipway" vf take nics --owner sandbox:two >/dev/null && "$slipway" port rm vfport >/dev/null && "$slipway" network rm vfnet >/dev/null ||
    fail "the pool's switch does not go: $(explain)"
"$slipway" vf return nics --owner sandbox:two >/dev/null || fail "vf return: $(explain)"
waits() {
    "$slipway" vf ls | grep -qE '^nics .* 1 \(try [0-9]+ in [0-9]+ s\) ' && "$slipway" vf inspect nics | python3 -c 'import json, sys
sys.exit(not any(vf["state"] == "failed" and vf["reason"] and vf["tries"] and vf["next_try_ms"] for vf in json.load(sys.stdin)[0]["functions"]))'
}
wait_until 60 waits || fail "no try is planned: $("$slipway" vf inspect nics)"
"$slipway" network create vfnet --internal >/dev/null && "$slipway" port create vfport --network vfnet >/dev/null ||
    fail "a network for interfaces, once more"
wait_until 120 are nics ready,ready || fail "the interface does not come back: $("$slipway" vf inspect nics) $(explain)"
ok "an interface that failed is tried again, and comes back"
"$slipway" vf rm nics >/dev/null && "$slipway" port rm vfport >/dev/null && "$slipway" network rm vfnet >/dev/null ||
    fail "interfaces are not removed"
ok "network interfaces on a switch, over a kill"

"$slipway" vf rm fast >/dev/null || fail "vf rm"
[ -z "$(ls "$SLIPWAY_RUN_DIR/vf")" ] || fail "sockets are left: $(ls "$SLIPWAY_RUN_DIR/vf")"
[ "$("$slipway" endpoint ls --json | grep -c '"fast\.')" = 0 ] || fail "endpoints are left"
ok "rm: nothing is left"

"$slipway" vf create fast --disk ram:8M --count 2 >/dev/null || fail "vf create again"
end_daemon KILL
ledger=$SLIPWAY_RUN_DIR/vf.ledger
truncate --size "$(($(stat -c %s "$ledger") / 2))" "$ledger"
start_daemon
refuses "the ledger $ledger is damaged" vf ls
refuses "slipway vf rebuild" vf take fast --owner sandbox:one
"$slipway" vf rebuild | grep -qF "$ledger.damaged-1" || fail "vf rebuild"
[ "$("$slipway" endpoint ls --json | grep -c '"fast\.')" = 0 ] || fail "endpoints of the lost ledger are left"
"$slipway" vf create fast --disk ram:8M --count 2 >/dev/null && are fast ready,ready || fail "a pool after the rebuild"
"$slipway" vf rm fast >/dev/null || fail "rm after the rebuild"
ok "a ledger cut in half: said, and rebuilt"
