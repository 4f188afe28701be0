#!/usr/bin/env bash
# Where the time goes: a live sandbox's latencies by layer, as a table, JSON and a picture, while
# fio runs in the guest; and nothing left of the tracing afterwards.
# alone: the clocks that it compares agree while no processor is taken away.
. "$(dirname "$0")/lib.sh"
need_node

"$slipway" run -d --name snooped --privileged --volume data:64M "$image" -- sleep 100000 >/dev/null \
    || fail "the sandbox did not start"

# load OPTIONS…: fio's report on direct I/O at depth 1.
load() {
    "$slipway" exec snooped fio --name=load --filename=/dev/slipway/data --rw=randrw --bs=4k --direct=1 \
        --ioengine=psync --output-format=json "$@"
}
# tracing: what is switched on in the guest, outside of anybody's sight.
tracing() {
    "$slipway" exec --privileged snooped sh -c 'mkdir -p /tracing && mount -t tracefs none /tracing &&
        ls /tracing/instances; umount /tracing'
}

# What fio's own start reads is in no system call: it is read before.
load --time_based --runtime=1 >/dev/null 2>&1 || fail "fio does not run"
# measured: whether the layers add up to what fio saw, in `facts`.
#
# A processor that is taken away between two clock readings is in one of them only, so on a machine
# that others use too it is tried again: what adds up wrongly does so each time.
measured() {
    # From before the load until after it, however long that takes, so that both see the same commands.
    rm -f "$work/snoop.json"
    "$slipway" snoop snooped --interval 1s --json --svg "$work/stack.svg" >"$work/snoop.json" 2>"$work/snoop.err" &
    snoop=$!
    wait_until 60 test -s "$work/snoop.json" || fail "no report: $(cat "$work/snoop.err")"
    load --number_ios=5000 --runtime=45 >"$work/fio.json" 2>"$work/fio.err" || fail "fio: $(cat "$work/fio.err")"
    sleep 3
    kill -INT "$snoop"
    wait "$snoop" || fail "snoop: $(cat "$work/snoop.err")"
    grep -q "no layers of the guest" "$work/snoop.err" && fail "$(cat "$work/snoop.err")"
    facts=$(python3 - "$work" 2>&1 <<'PYTHON'
import json, sys
work = sys.argv[1]
lines = [json.loads(line) for line in open(f"{work}/snoop.json")]
fio = json.load(open(f"{work}/fio.json"))["jobs"][0]
assert len(lines) >= 4 and [line["total"] for line in lines] == [False] * (len(lines) - 1) + [True]
total = lines[-1]
rows = {row["opcode"]: {layer["layer"]: layer for layer in row["layers"]} for row in total["rows"]}
for opcode in ("read", "write"):
    layers = rows[opcode]
    parts = sum(layer["mean_ns"] for layer in layers.values() if layer["part"])
    calls, whole = (layers[name]["mean_ns"] for name in ("system call, whole", "application"))
    assert abs(parts - whole) <= 1, (opcode, parts, whole)
    for name in ("program", "system call", "guest block layer", "guest driver", "doorbell to fetch", "fetch to backend",
                 "backend", "completion to interrupt"):
        assert layers[name]["mean_ns"] > 0, (opcode, name)
    host, guest = layers["controller"]["count"], layers["system call, whole"]["count"]
    assert host >= 50 and abs(host - guest) <= 0.35 * host, (opcode, host, guest)
    assert abs(guest - fio[opcode]["total_ios"]) <= 0.02 * guest, (opcode, guest, fio[opcode]["total_ios"])
    error = layers["guest driver"]["clock_error_ns"]
    assert 0 < error < whole, error
    seen = fio[opcode]["lat_ns"]["mean"]
    # What fio's own clock says of the same commands. It is read in the program, around the system
    # call: the layers may be wrong by that estimate's error, and by no more than 5 %.
    wrong = layers["program"]["estimate_error_ns"]
    assert calls <= 1.01 * seen and seen <= 1.01 * (whole + wrong), (opcode, calls, seen, whole, wrong)
    assert abs(parts / seen - 1) <= 0.05, (opcode, parts, seen)
    print(f"{opcode}: {host} commands, layers {parts / 1e3:.1f} us, fio {seen / 1e3:.1f} us, "
          f"ratio {parts / seen:.3f}, clock error {error / 1e3:.2f} us", end="; ")
PYTHON
)
}
for _ in 1 2 3 4 5 6; do
    measured && facts_hold=yes && break
    say "once more: $facts"
done
[ "${facts_hold:-}" ] || fail "figures: $facts $(tail -1 "$work/snoop.json" | cut -c -600)"
ok "layers add up: ${facts%; }"
load --time_based --runtime=3000 >"$work/fio-2.json" 2>"$work/fio.err" &
fio=$!
# As soon as there is a command.
for _ in {1..20}; do
    "$slipway" snoop snooped --interval 500ms --duration 1200ms >"$work/table" || fail "snoop as a table"
    grep -q 'guest driver' "$work/table" && break
done
"$slipway" snoop snooped --measure-overhead >"$work/overhead" || fail "overhead"
"$slipway" exec snooped pkill -x fio || fail "the load ended early: $(cat "$work/fio.err")"
wait "$fio"
grep -q 'guest driver' "$work/table" && grep -q '^In all:' "$work/table" || fail "no table: $(cat "$work/table")"
ok "a table"
python3 -c 'import sys, xml.dom.minidom as x; t = open(sys.argv[1]).read(); x.parseString(t); assert "guest driver" in t and "read" in t' \
    "$work/stack.svg" || fail "the picture"
ok "a picture"
grep -qE '^host: overhead [+-][0-9.]+ %' "$work/overhead" && grep -qE "^the guest's tracing: overhead [+-]" "$work/overhead" \
    || fail "no overhead: $(cat "$work/overhead")"
ok "what it costs: $(tail -2 "$work/overhead" | tr '\n' ';')"
"$slipway" snoop snooped --measure-overhead >"$work/idle" 2>&1 && fail "the overhead of no load: $(cat "$work/idle")"
grep -q 'no load' "$work/idle" || fail "it was told: $(cat "$work/idle")"
[ -z "$(tracing)" ] || fail "tracing goes on in the guest: $(tracing)"
ok "nothing is traced afterwards"

"$slipway" snoop snooped --interval 200ms >"$work/live" 2>&1 &
first=$!
wait_until 10 grep -q 'commands followed in' "$work/live" || fail "the first snoop: $(cat "$work/live")"
"$slipway" snoop snooped --duration 1s >"$work/second" 2>&1 && fail "two snooped at once"
grep -q 'somebody snoops' "$work/second" || fail "the second was told: $(cat "$work/second")"
kill -9 "$first"
wait_until 15 "$slipway" snoop snooped --interval 100ms --duration 300ms || fail "a killed one holds the place"
ok "one at a time, and a killed one leaves nothing behind"
