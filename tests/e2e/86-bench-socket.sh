#!/bin/bash
# `slipway bench socket`: every way that this machine has carries every load of a quick run, costs are counted,
# the report survives being written, a run is compared with an earlier one, and nothing of a measurement outlives
# it, however it ends. Speeds are not judged here.
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
[ -x "$slipway" ] || fail "$slipway is not built; \`make build\` builds it"

bench() { TMPDIR=$work timeout 120 "$slipway" bench socket "$@"; }

bench --quick --rounds 1 --json --svg "$work/a.svg" >"$work/a.json" 2>"$work/errors" || fail "a quick run: $(cat "$work/errors")"
python3 - "$work/a.json" <<'CHECK' || fail "the report does not hold what was asked for"
import json, sys
report = json.load(open(sys.argv[1]))
subjects = [s["name"] for s in report["subjects"]]
assert "tcp-loopback" in subjects, subjects
expected = ["tcp-veth", "slipway-netns", "slipway-encrypted"]
assert "slipway" not in subjects or "tcp-veth" not in subjects or all(s in subjects for s in expected), subjects
loads = ["stream-128k-c1", "stream-64b-c1", "pingpong-64b-busy", "window-4k-c16", "idle-c16"]
assert report["plan"]["loads"] == loads, report["plan"]
for subject in subjects:
    runs = {run["load"]: run["measured"] for run in report["runs"] if run["subject"] == subject}
    assert list(runs) == (loads[:-1] if subject.startswith("tls") else loads), (subject, list(runs))
    for load, measured in runs.items():
        both = [measured["client"], measured["server"]]
        if load.startswith("idle"):
            assert "memory_bytes" in measured and measured["bytes"] == 0, measured
            continue
        assert measured["bytes"] > 0 and sum(one["cpu_ns"] for one in both) > 0, (subject, load, measured)
        # Two programs with a processor each, whose clocks are read within the measured time, however long the machine stands
        # still. The quarter is for clocks that differ.
        assert sum(one["cpu_ns"] for one in both) < 2.5 * measured["elapsed_ns"], (subject, load, measured)
        assert ("latency" in measured) == load.startswith("pingpong"), (subject, load)
        if "latency" in measured:
            trips = sum(count for _, count in measured["latency"]["buckets"])
            # A trip that began within the measured time may end after it.
            assert 0 < trips <= measured["bytes"] // 64 + 2, (trips, measured["bytes"])
    if subject.startswith("slipway-encrypted"):
        # Every byte goes through both engines. On a busy machine the programs of a turn may have taken only what the engines had
        # carried before it.
        assert sum(measured["engine"]["cpu_ns"] for load, measured in runs.items() if not load.startswith("idle")) > 0, runs
parts = [run for run in report["runs"] if "parts" in run["measured"]]
assert len(parts) == ("slipway-encrypted" in subjects), parts
for run in parts:
    assert run["load"] == "stream-128k-c1" and all(value > 0 for value in run["measured"]["parts"].values()), run
for key in ["machine", "kernel", "version"]:
    assert report["environment"][key], key
assert "bench socket --quick" in report["command"]
CHECK
ok "five loads over $(python3 -c 'import json, sys; print(", ".join(s["name"] for s in json.load(open(sys.argv[1]))["subjects"]))' "$work/a.json")"
grep '^Left out' "$work/errors" | while read -r line; do say "SKIPPED: $line"; done
python3 -c 'import sys, xml.dom.minidom as m; m.parse(sys.argv[1])' "$work/a.svg" || fail "the picture is not well-formed"
ok "the picture is well-formed"

bench --report "$work/a.json" >"$work/table" || fail "showing a report"
grep -q '^tcp-loopback .* 1\.000 ' <(bench --report <(python3 - "$work/a.json" <<'FIRST'
import json, sys
report = json.load(open(sys.argv[1]))
report["subjects"] = [s for s in report["subjects"] if s["name"] == "tcp-loopback"]
print(json.dumps(report))
FIRST
)) || fail "no ratios: $(cat "$work/table")"
bench --report "$work/a.json" --compare "$work/a.json" >"$work/same" || fail "comparing a report with itself"
grep -q 'stream-128k-c1 tcp-loopback .* 1.00 ' "$work/same" || fail "a report differs from itself: $(cat "$work/same")"
ok "ratios, and a report equals itself"

for bad in '--only tape' '--load tape-1k' '--load stream-0b' '--report /dev/null'; do
    # shellcheck disable=SC2086 # words
    bench --quick $bad >/dev/null 2>"$work/errors" && fail "bench socket $bad succeeded"
    [ "$(wc -l <"$work/errors")" = 1 ] && grep -q '^slipway: ' "$work/errors" || fail "bench socket $bad says: $(cat "$work/errors")"
done
ok "what makes no sense gets one line"

# Both programs end with the measurement, and the namespaces with them.
TMPDIR=$work "$slipway" bench socket --only tcp-loopback --load stream-64b-c1 --time 60 >/dev/null 2>&1 &
starter=$!
both() { pgrep -P "$starter" >"$work/programs" && [ "$(wc -l <"$work/programs")" = 2 ]; }
wait_until 30 both || fail "no load was started"
kill -9 "$starter"
mapfile -t programs <"$work/programs"
gone() { ! runs "${programs[0]}" && ! runs "${programs[1]}"; }
wait_until 30 gone || fail "a load outlives its measurement: ${programs[*]}"
[ -z "$(find "$work" -name 'slipway-bench*')" ] || fail "left behind: $(find "$work" -name 'slipway-bench*')"
ok "the programs of a load end with their measurement"

bench --quick --apps --only tcp-loopback --rounds 1 --json >"$work/apps.json" 2>"$work/errors" || fail "programs as they are: $(cat "$work/errors")"
grep '^Left out' "$work/errors" | while read -r line; do say "SKIPPED: $line"; done
ok "programs as they are: $(python3 -c 'import json, sys
runs = json.load(open(sys.argv[1])).get("apps", [])
assert all(run["rate"] > 0 for run in runs), runs
print(", ".join(run["app"] for run in runs) or "none is installed")' "$work/apps.json")"
