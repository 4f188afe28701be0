#!/usr/bin/env bash
# Forks with sockets: a template has room for a socket function, and each fork that asks has one of its own before its
# first command. Programs in two forks talk past both kernels, also after a daemon was killed; a fork that does not ask
# has no such function. The node makes such templates by itself.
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
need_network_node "$@"
[ "${SLIPWAY_VMM:-}" = native ] || skip "slipway-vmm on KVM (SLIPWAY_VMM=native): lab/kvm-host --test $test_name SLIPWAY"
[ -f "$(dirname "$(readlink -f "$slipway")")/libslipway.so" ] || skip "libslipway.so beside $slipway"
export SLIPWAY_SOCKET=$work/engine.sock
engine=''
end_all() {
    "$slipway" template rm web >/dev/null 2>&1
    [ -z "$engine" ] || kill "$engine" 2>/dev/null
}
printf '%s\n' '[[tenant]]' 'name = "host"' 'netns = "/proc/self/ns/net"' >"$work/policy.toml"
"$slipway" socket engine --policy "$work/policy.toml" --links /none >"$work/engine.log" 2>&1 & engine=$!
wait_until 20 test -S "$work/engine.d/engine.sock" || fail "no engine: $(cat "$work/engine.log")"
start_keeper
start_daemon
why() { cat "$work/engine.log"; explain; tail -n 20 "$SLIPWAY_DATA_DIR"/sandboxes/*/console.log; }

machine+=(--memory 320M)
timeout 300 "$slipway" template create --sockets "${machine[@]}" web >/dev/null || fail "template create: $(why)"
"$slipway" template ls --json | grep -q '"sockets": true' || fail "template ls: $("$slipway" template ls --json)"
ok "a template has room for sockets"

echo_py=$(cat "$here/echo.py")
# fork NAME COMMAND...
fork() {
    timeout 240 "$slipway" run --detach --name "$1" --sockets --wait-network --from web "${machine[@]}" "$image" -- "${@:2}" >/dev/null ||
        fail "run $1: $(why)"
}
in_fork() { timeout 240 "$slipway" exec "$@"; }
# The first command of `a` listens. Without the function its connections would be the kernel's.
fork a python3 -c "$echo_py" serve
serves() { "$slipway" logs a | grep -q serves; }
wait_until 60 serves || fail "a does not serve: $("$slipway" logs a; why)"
a4=$("$slipway" ps --json | python3 -c 'import json, sys
print(next(s["addresses"][0] for s in json.load(sys.stdin) if s["name"] == "a"))')
# Bytes that a sandbox's interface has carried, both ways.
# shellcheck disable=SC2016 # the guest's
carried() { in_fork "$1" sh -c 'cd /sys/class/net/eth0/statistics && echo $(($(cat rx_bytes) + $(cat tx_bytes)))'; }
# The first command of `b` sends: 700000 bytes both ways together.
# shellcheck disable=SC2016 # the guest's
fork b sh -c 'cd /sys/class/net/eth0/statistics && python3 -c "$0" check "$1" && echo carried $(($(cat rx_bytes) + $(cat tx_bytes))); exec sleep 100000' \
    "$echo_py" "$a4"
sent() { "$slipway" logs b | grep -q '^carried '; }
wait_until 120 sent || fail "b sends nothing: $("$slipway" logs b; why)"
moved=$("$slipway" logs b | sed -n 's/^carried //p')
[ "$moved" -lt 70000 ] || fail "the interface of b carried $moved bytes of 700000"
[ "$(carried a)" -lt 70000 ] || fail "the interface of a carried $(carried a) bytes of 700000"
guests() { "$slipway" socket ls --json | python3 -c 'import json, sys
print(*sorted(one["name"] for one in json.load(sys.stdin)["guests"]))'; }
[ "$(guests)" = "a b" ] || fail "the engine has other guests: $("$slipway" socket ls --json)"
ok "the first commands of two forks of a template talk past both kernels: the interface of one carried $moved bytes of 700000"

# shellcheck disable=SC2016 # the guest's
said=$(timeout 120 "$slipway" run --rm --from web "${machine[@]}" "$image" -- sh -c 'echo "${LD_PRELOAD:-none}"; ls /run/slipway 2>/dev/null || true') ||
    fail "a fork without sockets: $said $(why)"
[ "$said" = none ] || fail "a fork that asks for no sockets has some: $said"
ok "a fork that asks for no sockets has none"

vmms=$(vmm_of a),$(vmm_of b)
end_daemon KILL
start_daemon
wait_until 60 is_state b running || fail "after SIGKILL: $("$slipway" ps; why)"
[ "$vmms" = "$(vmm_of a),$(vmm_of b)" ] || fail "after SIGKILL: $("$slipway" ps; why)"
before=$(carried b)
[ "$(in_fork b python3 -c "$echo_py" check "$a4" 2>&1)" = whole ] || fail "after SIGKILL b does not reach a: $(why)"
moved=$(($(carried b) - before))
[ "$moved" -lt 70000 ] || fail "after SIGKILL the interface of b carried $moved bytes of 700000"
ok "the next daemon goes on with forks that have sockets"
"$slipway" rm --force a b >/dev/null || fail "rm: $(why)"

began() { python3 -c 'import json, sys
stages = json.load(open(sys.argv[1]))
stages = stages[0]["stages"] if isinstance(stages, list) else stages["stages"]
print("fork" if any(one["name"] == "resume" for one in stages) else "boot")' "$1"; }
# shellcheck disable=SC2016 # the guest's
automatic() {
    timeout 300 "$slipway" run --rm --sockets --from auto --timeline "$work/auto.json" "${machine[@]}" "$image" -- sh -c 'test -S "$SLIPWAY_SOCKET"' &&
        began "$work/auto.json"
}
made() { "$slipway" template ls --json | python3 -c 'import json, sys
sys.exit(not any(one["name"].startswith("auto-") and one["sockets"] for one in json.load(sys.stdin)))'; }
[ "$(automatic)" = boot ] || fail "there is a template already: $("$slipway" template ls; why)"
wait_until 120 made || fail "no template is made: $(why)"
[ "$(automatic)" = fork ] || fail "the second sandbox boots: $("$slipway" template ls; why)"
ok "the node makes a template for sandboxes with sockets, and the next one is a fork"

for name in $("$slipway" template ls --json | python3 -c 'import json, sys
print(*(one["name"] for one in json.load(sys.stdin)))'); do
    "$slipway" template rm "$name" >/dev/null || fail "template rm: $(why)"
done
nothing() { [ -z "$(leftovers)" ]; }
wait_until 30 nothing || fail "left: $(leftovers)"
ok "nothing is left"
