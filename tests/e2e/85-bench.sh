#!/bin/bash
# `slipway bench block`. Without a VM: every configuration moves data, the report survives being
# written, a run is compared with an earlier one, and no target outlives its measurement. With guests:
# fio on a device of QEMU's own and on ours, and our own driver in a guest's user space.
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
[ -x "$slipway" ] || fail "$slipway is not built; \`make build\` builds it"

bench() { TMPDIR=$work timeout 120 "$slipway" bench block "$@"; }

bench --quick --native --json --svg "$work/a.svg" >"$work/a.json" 2>"$work/errors" || fail "a quick run: $(cat "$work/errors")"
python3 - "$work/a.json" <<'CHECK' || fail "the report does not hold what was asked for"
import json, sys
report = json.load(open(sys.argv[1]))
assert [s["name"] for s in report["subjects"]] == ["bare", "mapped", "shadow", "trapped"], report["subjects"]
assert len(report["runs"]) == 3 * 3 * 4, len(report["runs"])
for run in report["runs"]:
    latency = run["measured"]["latency"]
    commands = sum(count for _, count in latency["buckets"])
    assert commands > 0 and run["measured"]["bytes"] == 4096 * commands, run
    assert 0 < latency["least"] <= latency["greatest"], run
for key in ["machine", "kernel", "accelerator", "version"]:
    assert report["environment"][key], key
assert "bench block --quick" in report["command"]
CHECK
ok "four configurations, three loads, three turns each, with machine and command"
python3 -c 'import sys, xml.dom.minidom as m; m.parse(sys.argv[1])' "$work/a.svg" || fail "the picture is not well-formed"
ok "the picture is well-formed"

bench --report "$work/a.json" --compare "$work/a.json" >"$work/same" || fail "comparing a report with itself"
grep -q '^no difference exceeds the noise$' "$work/same" || fail "a report differs from itself: $(cat "$work/same")"
# A target that takes a tenth of the time: the report is forged, the verdict must follow.
python3 - "$work/a.json" "$work/b.json" <<'FORGE' || fail "forging a report"
import json, sys
report = json.load(open(sys.argv[1]))
for run in report["runs"]:
    if run["subject"] == "bare":
        run["measured"]["elapsed_ns"] = 1_000_000_000
        run["measured"]["latency"] = {"sum": 1000000, "least": 1000, "greatest": 1000, "buckets": [[320, 1000]]}
json.dump(report, open(sys.argv[1], "w"))
for run in report["runs"]:
    if run["subject"] == "bare":
        run["measured"]["elapsed_ns"] = 100_000_000
json.dump(report, open(sys.argv[2], "w"))
FORGE
bench --report "$work/b.json" --compare "$work/a.json" | grep -E 'bare +IOPS .*\+900\.0 %.*better' >/dev/null || fail "ten times the speed is not seen"
ok "a report equals itself, and ten times the speed is seen"

bench --quick --only mapped --disk "file:$work:4M" --workload randrw-4k-d8 --rounds 1 >"$work/file" || fail "a disk in a file"
grep -q '^mapped' "$work/file" || fail "no row for the file: $(cat "$work/file")"
ok "a disk in a file"
[ -z "$(find "$work" -name 'slipway-bench*')" ] || fail "left behind: $(find "$work" -name 'slipway-bench*')"
ok "sockets and files are gone"

bench --quick --neighbour --only mapped --json --output "$work/beside.json" >/dev/null 2>"$work/errors" || fail "a neighbour: $(cat "$work/errors")"
python3 - "$work/beside.json" <<'CHECK' || fail "the neighbour's report does not hold what was asked for"
import json, sys
report = json.load(open(sys.argv[1]))
names = ["mapped", "mapped+4x", "mapped+randread-4k-d128-t1", "mapped+randread-128k-d128-t1"]
assert [s["name"] for s in report["subjects"]] == names, report["subjects"]
assert len(report["runs"]) == 3 * 4, len(report["runs"])
for run in report["runs"]:
    assert run["load"] == "randread-4k-d1-t1" and run["measured"]["bytes"] > 0, run
    assert sum(n for _, n in run["measured"]["at_least"]["buckets"]) > 0, run
# A turn goes on until each queue of both clients has had a completion, however long one of them waits for a processor.
for name in names:
    asked = sum(run["measured"].get("neighbour_commands", 0) for run in report["runs"] if run["subject"] == name)
    assert (asked > 0) == ("+rand" in name), (name, asked)
CHECK
bench --report "$work/beside.json" | grep -q 'ratio' || fail "no table of ratios"
ok "a quiet client alone and beside two loads of a noisy one"

for bad in '--only tape' '--only passthrough --pci 0000:fe:1f.7' '--pci tape' '--neighbour=tape' '--workload randread-3k' '--disk tape:1M' '--report /dev/null' '--socket x=/nonexistent --only bare'; do
    # shellcheck disable=SC2086 # words
    bench --quick $bad >/dev/null 2>"$work/errors" && fail "bench block $bad succeeded"
    [ "$(wc -l <"$work/errors")" = 1 ] && grep -q '^slipway: ' "$work/errors" || fail "bench block $bad says: $(cat "$work/errors")"
done
ok "what makes no sense gets one line"

# The target's life hangs on its starter's: a starter that is killed leaves nobody behind.
TMPDIR=$work "$slipway" bench block --only mapped --workload randread-4k --time 60 >/dev/null 2>&1 &
starter=$!
target_of() { pgrep -P "$starter" >"$work/target"; }
wait_until 30 target_of || fail "no target was started"
target=$(cat "$work/target")
kill -9 "$starter"
gone() { ! runs "$target"; }
wait_until 30 gone || fail "target $target outlives its starter"
ok "a target ends with its starter"

# Roots: each subject reads image and layer of four owners, all at once and two at a time.
TMPDIR=$work timeout 120 "$slipway" bench roots --count 4 --at-once 0,2 --rounds 1 --json --svg "$work/r.svg" >"$work/r.json" \
    2>"$work/errors" || fail "bench roots: $(tail -3 "$work/errors")"
python3 - "$work/r.json" "$work/r.svg" <<'CHECK' || fail "the report of bench roots"
import json, sys, xml.dom.minidom
report = json.load(open(sys.argv[1]))
seen = sorted((run["load"], run["subject"]) for run in report["runs"])
assert seen == [(load, one) for load in ["n4", "n4-a2"] for one in ["floor", "made", "ready"]], seen
for run in report["runs"]:
    measured = run["measured"]
    assert 0 < measured["p50_ns"] <= measured["p99_ns"] <= measured["most_ns"], run
    assert 0 < measured["service_p50_ns"] <= measured["p99_ns"] and measured["cpu_ns"] > 0, run
xml.dom.minidom.parse(sys.argv[2])
CHECK
"$slipway" bench roots --report "$work/r.json" --compare "$work/r.json" >"$work/same" || fail "comparing roots"
grep -q '^floor ' "$work/same" && grep -q 'RunD-V' "$work/same" || fail "no row for the floor: $(cat "$work/same")"
[ -z "$(find "$work" -name 'slipway-bench*')" ] || fail "left behind: $(find "$work" -name 'slipway-bench*')"
ok "bench roots: three subjects, two orders, nothing is left"

# With guests. What is missing is named together with the package that brings it.
env PATH=/nonexistent "$slipway" bench block --only host >/dev/null 2>"$work/errors" && fail "fio without fio"
grep -q 'apt-get install fio' "$work/errors" || fail "what is missing is not named: $(cat "$work/errors")"
ok "a host without fio is told which package brings it"

# A configuration without its hardware is left out, with the next step.
"$slipway" bench block --only passthrough,qemu-viommu >/dev/null 2>"$work/errors" && fail "passthrough without hardware"
[ "$(grep -cE '^SKIPPED: (passthrough|qemu-viommu): .*(IOMMU|vfio-pci|--pci ADDRESS)' "$work/errors")" = 2 ] ||
    fail "missing hardware is not named: $(cat "$work/errors")"
ok "passthrough without hardware is skipped, and says what is missing"

need_node
mkdir "$work/guests"
timeout 300 "$slipway" bench block --quick --only virtio-blk,slipway,slipway-user --image "$image" --disk "file:$work/guests:16M" \
    --workload randrw-4k-d4 --rounds 1 --json --curves "$work/curves.svg" >"$work/guests.json" 2>"$work/errors" \
    || fail "fio in guests: $(cat "$work/errors")"
python3 - "$work/guests.json" "$work/curves.svg" <<'CHECK' || fail "the guests' report does not hold what was asked for"
import json, sys, xml.dom.minidom
report = json.load(open(sys.argv[1]))
assert [run["subject"] for run in report["runs"]] == ["virtio-blk", "slipway", "slipway-user"], report["runs"]
assert report["environment"]["accelerator"] in ("tcg", "kvm"), report["environment"]
for run in report["runs"]:
    commands = sum(count for _, count in run["measured"]["latency"]["buckets"])
    assert commands > 0 and abs(run["measured"]["bytes"] - 4096 * commands) <= 4096 * 64, run
assert "slipway-user" in open(sys.argv[2]).read()
xml.dom.minidom.parse(sys.argv[2])
CHECK
bench --report "$work/guests.json" | grep -q '^slipway-user ' || fail "no row for the driver in a guest's user space"
ok "fio in a guest on QEMU's virtio-blk and in one on Slipway, our driver in one's user space: $(python3 -c '
import json, sys
print(", ".join("%s %d commands" % (run["subject"], sum(n for _, n in run["measured"]["latency"]["buckets"])) for run in json.load(open(sys.argv[1]))["runs"]))' "$work/guests.json")"
[ "$("$slipway" ps --json)" = "[]" ] || fail "a guest is left: $("$slipway" ps)"
[ -z "$(ls "$work/guests")" ] || fail "left behind: $(ls "$work/guests")"
ok "guests and their disk are gone"

# A guest's life hangs on its starter's, too.
"$slipway" bench block --only slipway --image "$image" --disk "file:$work/guests:16M" --workload randread-4k --time 60 >/dev/null 2>&1 &
starter=$!
works() { "$slipway" ps --json | grep -q '"running"'; }
wait_until 60 works || fail "no guest was started"
kill -9 "$starter"
no_guest() { [ "$("$slipway" ps --json)" = "[]" ]; }
wait_until 60 no_guest || fail "a guest outlives its starter: $("$slipway" ps)"
ok "a guest ends with its starter"

# One sandbox with a replica, and two requests at once, which may have a second replica but no second sandbox.
timeout 600 "$slipway" bench function --quick --rounds 1 --only vertical --json --svg "$work/f.svg" "$image" >"$work/f.json" \
    2>"$work/errors" || fail "bench function: $(tail -3 "$work/errors")"
python3 - "$work/f.json" "$work/f.svg" <<'CHECK' || fail "the report of bench function"
import json, sys, xml.dom.minidom
report = json.load(open(sys.argv[1]))
run, = report["runs"]
measured = run["measured"]
assert (run["subject"], run["load"]) == ("vertical", "s1-q2"), run
assert 0 < measured["p50_ns"] <= measured["p99_ns"] <= measured["max_ns"], run
assert measured["sandboxes_made"] == 0 and measured["replicas_made"] <= 1 and measured["vmm_bytes"] > 0, run
xml.dom.minidom.parse(sys.argv[2])
CHECK
"$slipway" bench function --report "$work/f.json" --compare "$work/f.json" | grep -q '57.9 %' || fail "its table lacks RunD-V's figures"
[ "$("$slipway" ps --json)" = "[]" ] || fail "bench function leaves $("$slipway" ps)"
ok "bench function: a burst of two on one sandbox, nothing is left"

# A guest with a volume, in a turn of one and singly. Turns of several are those of 67-hollow.
timeout 600 "$slipway" bench startup --count 1 --rounds 1 --arms none --single --volume data:16M:/data --json --svg "$work/s.svg" \
    "$image" >"$work/s.json" 2>"$work/errors" || fail "bench startup: $(tail -3 "$work/errors")"
python3 - "$work/s.json" "$work/s.svg" <<'CHECK' || fail "the report of bench startup"
import json, sys, xml.dom.minidom
report = json.load(open(sys.argv[1]))
run, = report["runs"]
measured = run["measured"]
assert (run["subject"], run["load"]["count"], report["volumes"]) == ("none", 1, 1), run
assert measured["busy_ns"] > 0 and measured["singles"]["busy_ns"] > 0 and measured["processors"] > 0, run
assert len(measured["timelines"]) == 1 and len(measured["singles"]["times_ns"]) == 1, run
assert "single starts" in open(sys.argv[2]).read()
xml.dom.minidom.parse(sys.argv[2])
CHECK
[ "$("$slipway" ps --json)" = "[]" ] || fail "bench startup leaves $("$slipway" ps)"
ok "bench startup: a guest with a volume, and the same singly"
