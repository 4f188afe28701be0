#!/usr/bin/env bash
# A guest's socket function: programs in two sandboxes, which know nothing of it, talk past both kernels, as do
# programs of the host; the guests' interfaces count what did not. And what is left when a VM dies.
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
need_network_node "$@"
dir=$(dirname "$(readlink -f "$slipway")")
[ -f "$dir/libslipway.so" ] || skip "libslipway.so beside $slipway"
export SLIPWAY_SOCKET=$work/engine.sock
background=()
end_all() { [ ${#background[@]} = 0 ] || kill "${background[@]}" 2>/dev/null; }
# `a` is a sandbox with a container; `b` is a pod, and its container b/c.
container() { if [ "$1" = b ]; then echo b/c; else echo "$1"; fi; }
in_guest() { local name; name=$(container "$1"); shift; timeout 240 "$slipway" exec "$name" "$@"; }
run() { "$slipway" run --detach --sockets --network pods --wait-network --memory 320M "$@"; }
ipv4() { "$slipway" ps --json | python3 -c 'import json, sys
print(next(s["addresses"][0] for s in json.load(sys.stdin) if s["name"] == sys.argv[1]))' "$1"; }
# Bytes that a sandbox's interface has carried, both ways.
# shellcheck disable=SC2016 # the guest's
carried() { in_guest "$1" sh -c 'cd /sys/class/net/eth0/statistics && echo $(($(cat rx_bytes) + $(cat tx_bytes)))'; }
engine() {
    "$slipway" socket engine --policy "$work/policy.toml" --links /none >"$work/engine.log" 2>&1 & engine=$!
    background+=("$engine")
    wait_until 20 test -S "$work/engine.d/engine.sock" || fail "no engine: $(cat "$work/engine.log")"
}
"$slipway" network rm pods >/dev/null 2>&1  # Of a run that was killed.
"$slipway" network create pods >/dev/null || fail "network create"

said=$(run --name none "$image" true 2>&1) && fail "without an engine it ran"
case $said in *"engine.sock"*"slipway socket engine"*) ;; *) fail "without an engine: $said" ;; esac
[ -z "$(leftovers)" ] || fail "without an engine something is left: $(leftovers)"
cat >"$work/policy.toml" <<TOML
[[tenant]]
name = "host"
netns = "/proc/self/ns/net"
[[allow]]
from = "host"
to = "*"
[[allow]]
from = "network:pods"
to = "host"
ports = "7001"
TOML
engine
said=$("$slipway" run --sockets --network none "$image" true 2>&1) && fail "without a network it ran"
case $said in *"needs a network"*) ;; *) fail "without a network: $said" ;; esac
ok "without an engine, or without a network, no sandbox with sockets starts, and nothing is left"

echo_py=$(cat "$here/echo.py")
# shellcheck disable=SC2016 # the guest's
serve='redis-server --port 6379 --bind 0.0.0.0 --protected-mode no --save "" --appendonly no >/dev/null &
    iperf3 -s >/dev/null &
    for port in 18EB 1451; do until grep -q ":$port " /proc/net/tcp /proc/net/tcp6; do sleep 0.1; done; done
    exec python3 -c "$0" serve'
why() { cat "$work/engine.log"; tail -n 20 "$SLIPWAY_DATA_DIR"/sandboxes/*/console.log; }
run --name a "$image" sh -c "$serve" "$echo_py" >/dev/null || fail "run a: $(why)"
"$slipway" pod create b --sockets --network pods --wait-network --memory 320M >/dev/null || fail "pod create b: $(why)"
"$slipway" run --detach --pod b --name c "$image" sh -c "$serve" "$echo_py" >/dev/null || fail "run b/c: $(why)"
for name in a b/c; do
    wait_until 60 sh -c "'$slipway' logs $name | grep -q serves" || fail "$name does not serve: $("$slipway" logs "$name")"
done
a4=$(ipv4 a)
[ "$("$slipway" ps --json | python3 -c 'import json, sys
print([s["sockets"] for s in json.load(sys.stdin)])')" = "[True, True]" ] || fail "ps --json: $("$slipway" ps --json)"
"$slipway" inspect a | grep -qF "$SLIPWAY_SOCKET" || fail "inspect: $("$slipway" inspect a)"
for name in a b; do
    # shellcheck disable=SC2016 # the guest's
    in_guest "$name" sh -c 'test -S "$SLIPWAY_SOCKET" && ! touch "$(dirname "$SLIPWAY_SOCKET")/x" 2>/dev/null &&
        case $LD_PRELOAD in /run/slipway/libslipway.so) ;; *) exit 1 ;; esac' || fail "what an exec in $name gets"
done

# past WHAT BYTES COMMAND…: the command runs in `b`; the interfaces carry less than a tenth of BYTES meanwhile.
past() {
    local what=$1 bytes=$2 before=() name moved
    shift 2
    for name in a b; do before+=("$(carried "$name")"); done
    in_guest b "$@" >"$work/out" 2>&1 || fail "$what: status $?: $(cat "$work/out" "$work/engine.log")"
    for name in a b; do
        moved=$(($(carried "$name") - before[0]))
        before=("${before[@]:1}")
        [ "$moved" -lt $((bytes / 10)) ] || fail "$what: $name's interface carried $moved bytes of $bytes"
    done
}
past echo 700000 python3 -c "$echo_py" check "$a4"
ok "bytes between two sandboxes come back as they were, and not through their interfaces"
for how in "" -R; do
    # shellcheck disable=SC2086 # words
    past "iperf3 $how" 10000000 iperf3 -c "$a4" -n 10M $how
    grep -q receiver "$work/out" || fail "iperf3 $how: $(cat "$work/out")"
    ok "iperf3 $how: $(grep receiver "$work/out" | tail -n 1 | tr -s ' ' | cut -d ' ' -f 5-8)"
done
past redis-benchmark 2000000 redis-benchmark -h "$a4" -t set,get -n 2000 -c 8 -d 1000 --csv
grep -q '^"GET"' "$work/out" || fail "redis-benchmark: $(cat "$work/out")"
ok "redis-benchmark: $(grep -E '^"(SET|GET)"' "$work/out" | cut -d , -f 1,2 | tr '\n' ' ')"

was=$(carried a)
timeout 120 "$slipway" socket run -- python3 "$here/echo.py" check "$a4" >"$work/out" 2>&1 || fail "a program of the host: $(cat "$work/out")"
moved=$(($(carried a) - was))
[ "$moved" -lt 100000 ] || fail "between the host and a sandbox its interface carried $moved bytes of 700000"
timeout 120 python3 "$here/echo.py" check "$a4" >"$work/out" 2>&1 || fail "a peer that uses the kernel: $(cat "$work/out")"
ok "programs of the host reach a sandbox by its function where policy lets them, and by its interface without the library"

# shellcheck disable=SC2016 # the guest's
in_guest b python3 -c "$echo_py" hold "$a4" >"$work/hold" 2>&1 & hold=$!
wait_until 60 grep -q holds "$work/hold" || fail "no connection to hold: $(cat "$work/hold")"
began=$(date +%s%N)
kill -9 "$(vmm_of a)"
wait "$hold" || fail "the other end of a VM that was killed: $(cat "$work/hold")"
took=$((($(date +%s%N) - began) / 1000000))
grep -qE '^(end|reset)$' "$work/hold" || fail "the other end of a VM that was killed: $(cat "$work/hold")"
wait_until 30 is_state a failed || wait_until 1 is_state a exited || fail "the VM that was killed: $(state_of a)"
ok "when a VM is killed the other end is told ($(tail -n 1 "$work/hold")), and its process has ended, after $took ms"

gateway=$("$slipway" network inspect pods | python3 -c 'import json, sys; print(json.load(sys.stdin)[0]["gateway"])')
"$slipway" socket run -- python3 "$here/echo.py" serve >"$work/server" 2>&1 & background+=("$!")
wait_until 20 grep -q serves "$work/server" || fail "no server on the host: $(cat "$work/server")"
was=$(carried b)
in_guest b python3 -c "$echo_py" check "$gateway" >"$work/out" 2>&1 || fail "from a sandbox to the host: $(cat "$work/out" "$work/engine.log")"
moved=$(($(carried b) - was))
[ "$moved" -lt 100000 ] || fail "between a sandbox and the host its interface carried $moved bytes of 700000"
ok "a sandbox reaches a program of the host by its function where policy lets it"

# The earlier words are not the next holder's.
rm -f "$work/hold"
in_guest b python3 -c "$echo_py" hold "$gateway" >"$work/hold" 2>&1 & hold=$!
wait_until 60 grep -q holds "$work/hold" || fail "no connection to hold: $(cat "$work/hold")"
began=$(date +%s%N)
kill -9 "$engine"
wait "$engine" 2>/dev/null
wait "$hold" || fail "a sandbox whose engine was killed: $(cat "$work/hold")"
took=$((($(date +%s%N) - began) / 1000000))
grep -qE '^(end|reset)$' "$work/hold" || fail "a sandbox whose engine was killed: $(cat "$work/hold")"
kernel=$(in_guest b python3 -c "$echo_py" check "$gateway" 2>&1)
case $kernel in *whole*) ;; *) fail "by the kernel, after the engine's death: $kernel" ;; esac
ok "when the engine is killed the sandbox is told ($(tail -n 1 "$work/hold")) after $took ms, and goes on by its interface"

"$slipway" rm --force --all >/dev/null || fail "rm"
"$slipway" network rm pods >/dev/null || fail "network rm"
[ -z "$(leftovers)" ] || fail "left: $(leftovers)"
ok "nothing is left"
