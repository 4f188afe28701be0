#!/usr/bin/env bash
# Memory ports of a network and the packet generator on them, on a veth pair and on a TAP interface, in a
# network namespace of the test's own. No sandbox runs.
if [ "$(id -u)" = 0 ] && [ -z "${SLIPWAY_E2E_NAMESPACE:-}" ]; then
    SLIPWAY_E2E_NAMESPACE=1 exec unshare --net -- "$0" "$@"
fi
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
need_root
for program in nft ip taskset; do command -v "$program" >/dev/null || skip "$program"; done
[ -c /dev/net/tun ] || skip "/dev/net/tun"
[ -x "$slipway" ] || fail "$slipway is not built; \`make build\` builds it"
need_healthy "a node"
ip link set lo up
stop_daemon
rm -f "$SLIPWAY_RUN_DIR/slipway.sock"
daemon='' program=''
end_all() {
    [ -n "$program" ] && kill "$program" 2>/dev/null && wait "$program" 2>/dev/null
    "$slipway" port rm a b >/dev/null 2>&1
    "$slipway" network rm gen >/dev/null 2>&1
    [ -n "$daemon" ] && kill "$daemon" 2>/dev/null && wait "$daemon" 2>/dev/null
}
start_daemon() {
    rm -f "$SLIPWAY_RUN_DIR/slipway.sock"
    "$slipway" daemon 2>>"$work/daemon.log" & daemon=$!
    wait_until 60 test -S "$SLIPWAY_RUN_DIR/slipway.sock" || fail "no daemon: $(tail "$work/daemon.log")"
}
start_daemon

# figure FILE WORDS…: a value of a report.
figure() { python3 -c 'import json, sys
value = json.load(open(sys.argv[1]))
for word in sys.argv[2:]: value = value[word]
print(value)' "$@"; }
port_is() { "$slipway" port ls gen --json | python3 -c 'import json, sys
sys.exit(not any(p["name"] == "memory:" + sys.argv[1] and p["up"] == (sys.argv[2] == "up") for p in json.load(sys.stdin)))' "$1" "$2"; }
# lossless NAME COUNT: what the two reports say.
lossless() {
    local name=$1 count=$2 word got
    [ "$(figure "$work/source.json" total frames)" = "$count" ] || fail "$name: sent $(cat "$work/source.json")"
    [ "$(figure "$work/sink.json" total frames)" = "$count" ] || fail "$name: received $(cat "$work/sink.json")"
    for word in lost late duplicates; do
        got=$(figure "$work/sink.json" total "$word")
        [ "$got" = 0 ] || fail "$name: $got $word"
    done
    ok "$name: $count frames, none lost, late or twice; p50 $(figure "$work/sink.json" total latency_ns p50) ns"
}

left=02:00:00:00:00:0a right=02:00:00:00:00:0b
"$slipway" network create gen --internal >/dev/null || fail "network create"
socket=$("$slipway" port create a --network gen --mac $left --slots 32768) || fail "port create"
[ "$(stat -c '%F %a' "$socket")" = "socket 600" ] || fail "$socket: $(stat -c '%F %a' "$socket")"
"$slipway" port create b --network gen --slots 32768 >/dev/null || fail "port create"
"$slipway" network inspect gen | grep -q "$socket" || fail "inspect"
ok "two memory ports, $socket and another"

# On several processors the kernel may deliver frames of a veth pair in another order than they were sent.
one_cpu=(taskset -c "$(taskset -cp $$ | sed 's/.*: \([0-9]*\).*/\1/')")

# What rings hold for a second, so that a machine that is busy elsewhere loses nothing.
"$slipway" pktgen sink --port b --mac $right --count 10000 --time 600s --json >"$work/sink.json" & program=$!
wait_until 60 port_is b up || fail "the sink is not there"
"$slipway" pktgen source --port a --to $right --rate 10k --size imix --flows 100 --count 10000 --json \
    >"$work/source.json" || fail "source"
wait "$program" || fail "sink"
lossless "memory ports" 10000
wait_until 60 port_is b down || fail "the port is not free again"

"$slipway" pktgen pong --port b --mac $right >"$work/pong" 2>"$work/pong.log" & program=$!
wait_until 60 port_is b up || fail "the pong is not there"
"$slipway" pktgen ping --port a --to $right --count 1000 --timeout 120s >"$work/ping" || fail "ping: $(cat "$work/ping")"
grep -q 'answered: 1000 frames in .* 0 lost' "$work/ping" || fail "ping: $(cat "$work/ping")"
ok "ping and pong: $(tail -n 1 "$work/ping")"

# A program outlives the daemon, and goes on with the port that the next one made.
kill -9 "$daemon"; wait "$daemon" 2>/dev/null
start_daemon
wait_until 60 port_is b up || fail "the pong did not come back: $("$slipway" port ls)"
"$slipway" port ls gen | grep -q "memory:a .*$left" || fail "$("$slipway" port ls gen)"
"$slipway" pktgen ping --port a --to $right --count 100 --timeout 120s >"$work/ping" || fail "ping: $(cat "$work/ping")"
grep -q ' 0 lost' "$work/ping" || fail "ping: $(cat "$work/ping")"
ok "after kill -9 of the daemon the ports are there again, and their program goes on"
kill -INT "$program"
wait "$program" || fail "^C: $?"
grep -q '^sent back 1100 frames' "$work/pong" || fail "^C: $(cat "$work/pong")"
ok "^C ends it with its summary: $(tail -n 1 "$work/pong")"
program=''

ip link add v0 type veth peer name v1 && ip link set v0 up && ip link set v1 up || fail "veth"
"$slipway" pktgen sink --interface v1 --count 1000 --time 600s --json >"$work/sink.json" & program=$!
promiscuous() { ip -d link show "$1" | grep -q 'promiscuity [1-9]'; }
wait_until 60 promiscuous v1 || fail "the sink is not there"
"${one_cpu[@]}" "$slipway" pktgen source --interface v0 --to $right --rate 1k --burst 4 --size 60-1514 --count 1000 --json \
    >"$work/source.json" || fail "source"
wait "$program" || fail "sink"
lossless "a veth pair" 1000

"$slipway" pktgen sink --tap gen0 --count 1000 --time 600s --json >"$work/sink.json" & program=$!
is_up() { ip link show "$1" | grep -q LOWER_UP; }
wait_until 60 is_up gen0 || fail "the TAP interface is not there"
# Room for all frames and the kernel's own, for a sink that waits for a processor.
ip link set gen0 txqueuelen 10000 || fail "txqueuelen"
"$slipway" pktgen source --interface gen0 --to $right --rate 1k --burst 4 --count 1000 --json \
    >"$work/source.json" || fail "source"
wait "$program" || fail "sink"
lossless "a TAP interface" 1000
program=''

# refuses WORDS-TO-FIND ARGUMENTS…
refuses() {
    local want=$1 status lines; shift
    timeout 60 "$slipway" "$@" >"$work/out" 2>"$work/err" </dev/null; status=$?
    lines=$(grep -c . "$work/err")
    [ "$status" != 0 ] && [ "$status" != 124 ] || fail "$* -> $status"
    [ "$lines" = 1 ] || fail "$*: $lines lines: $(cat "$work/err")"
    grep -qE "$want" "$work/err" || fail "$*: $(cat "$work/err")"
}
source=(pktgen source --to "$right")
refuses 'leave --rate out' "${source[@]}" --port a --rate 0
refuses 'no rate' "${source[@]}" --port a --rate fast
refuses 'no size of a frame: 60 to 65549' "${source[@]}" --port a --size 59
refuses 'smaller size first' "${source[@]}" --port a --size 1500-64
refuses 'port.*tap.*interface' "${source[@]}"
refuses 'cannot be used with' "${source[@]}" --port a --tap gen0
refuses 'no MAC|MAC address|invalid value' pktgen source --port a --to x
refuses 'required' pktgen source --port a
refuses 'there is no memory port c; .*port create' "${source[@]}" --port c
refuses 'there is no network interface none0' "${source[@]}" --interface none0
refuses 'no name of an interface' "${source[@]}" --tap a/b
refuses 'may send from 02:00:00:00:00:0a only; leave --from out' "${source[@]}" --port a --from $right
refuses 'vary ip,port' "${source[@]}" --port a --flows 2 --vary mac
refuses 'send to itself' pktgen source --port a --to $left
refuses 'ends before it begins' pktgen sink --port b --time 0
refuses 'address is 02:00:00:00:00:0a; leave --mac out' pktgen sink --port a --mac $right
refuses 'no network "none-such"' port create c --network none-such
refuses 'called "a" is there already' port create a --network gen
refuses 'taken by memory port a' port create c --network gen --mac $left
refuses 'multicast' port create c --network gen --mac 01:00:00:00:00:00
refuses 'power of two' port create c --network gen --slots 100
refuses 'multiple of 64' port create c --network gen --slot-size 100
refuses 'no owner' port create c --network gen --owner me
refuses 'is no name' port create a/b --network gen
refuses 'no memory port "c"' port rm c
refuses 'has memory ports: a, b' network rm gen
"$slipway" pktgen sink --port b >/dev/null & program=$!
wait_until 60 port_is b up || fail "the sink is not there"
refuses 'another program has the memory port' pktgen sink --port b
kill -INT "$program"; wait "$program"; program=''
ok "what cannot be is refused in one line"

"$slipway" port rm a b >/dev/null || fail "port rm"
[ ! -e "$socket" ] || fail "$socket is left"
"$slipway" network rm gen >/dev/null || fail "network rm"
[ -z "$("$slipway" port ls --json | grep memory:)" ] || fail "a port is left"
ok "nothing is left"
