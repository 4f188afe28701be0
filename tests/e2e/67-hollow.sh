#!/usr/bin/env bash
# Hollow sandboxes: starts without guest code, whose functions Slipway's own drivers use. With and without
# a network, with a function of a pool; kills of a sandbox and of the daemon; bad input; the benchmark.
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
need_network_node "$@"
end_all() {
    [ -n "$daemon" ] && runs "$daemon" && { "$slipway" rm --force --all; timeout 60 "$slipway" vf rm nics; } >/dev/null 2>&1
    [ -n "$daemon" ] && runs "$daemon" && { "$slipway" port rm kept; "$slipway" network rm other; } >/dev/null 2>&1
    rm -f "$SLIPWAY_RUN_DIR"/vf.ledger*
}
rm -f "$SLIPWAY_RUN_DIR"/vf.ledger*

refuses() {
    local words=$1 said; shift
    said=$("$slipway" "$@" 2>&1) && fail "slipway $*: should fail"
    grep -qF -- "$words" <<<"$said" || fail "slipway $*: $said"
}
states() { "$slipway" vf inspect "$1" | python3 -c 'import json, sys
print(*sorted(vf["state"] for vf in json.load(sys.stdin)[0]["functions"]), sep=",")'; }
are() { [ "$(states "$1")" = "$2" ]; }
hollow() { timeout 60 "$slipway" run --detach --accel hollow "$@" "$image" sleep 1000; }

start_keeper
start_daemon
hollow --name plain --network none >/dev/null || fail "without a network: $(explain)"
[ "$("$slipway" inspect plain | python3 -c 'import json, sys
record = json.load(sys.stdin)[0]
names = {stage["name"] for stage in record["timeline"]["stages"]}
assert {"vf-attach", "dma-ram", "vmm", "vf-driver", "container"} <= names, names
print(record["accelerator"])')" = hollow ] || fail "inspect: $("$slipway" inspect plain)"
refuses "runs no programs" exec plain true
"$slipway" rm --force plain >/dev/null || fail "rm"
ok "a start without guest code: the image's and the volatile layer's first block were read"

hollow --name wired --wait-network >/dev/null || fail "with a network: $(explain)"
# Keeps the network's switch, which the pool is on.
"$slipway" port create kept --network default >/dev/null || fail "port create: $(explain)"
"$slipway" vf create nics --switch default --count 2 >/dev/null || fail "vf create"
hollow --name one --wait-network --vf nics >/dev/null || fail "with a function of a pool: $(explain)"
are nics ready,taken || fail "the pool: $(states nics)"
mac=$("$slipway" inspect one | python3 -c 'import json, sys; print(json.load(sys.stdin)[0]["network"]["mac"])')
"$slipway" port ls --json | python3 -c 'import json, sys
ports = [port for port in json.load(sys.stdin) if sys.argv[1] in json.dumps(port)]
assert len(ports) == 1, ports' "$mac" || fail "no port has the sandbox's address $mac"
ok "an interface of a pool has the sandbox's addresses, and has sent a frame"

hollow --name two --wait-network --vf nics >/dev/null || fail "the second function: $(explain)"
refuses "of 2 2 are taken" run --detach --accel hollow --vf nics "$image" true
refuses 'there is no pool "none"' run --detach --accel hollow --vf none "$image" true
refuses "cannot be used with" run --detach --accel hollow --vf nics --queues 2 "$image" true
"$slipway" network create other --internal >/dev/null || fail "network create"
kill -9 "$(vmm_of two)"
wait_until 30 are nics ready,taken || fail "after a kill of the VM: $(states nics)"
refuses "on the switch default, the sandbox's network on other" \
    run --detach --accel hollow --vf nics --network other "$image" true
wait_until 30 are nics ready,taken || fail "after a refusal: $(states nics)"
ok "a pool that is empty, unknown or of another network; a sandbox that is killed returns its function"

# A hollow sandbox does not outlive its daemon; the next one takes its function back.
end_daemon KILL
start_daemon
wait_until 30 are nics ready,ready || fail "after a kill of the daemon: $(states nics)"
hollow --name three --wait-network --vf nics >/dev/null || fail "a third: $(explain)"
vmm=$(vmm_of three)
end_daemon KILL
kill -9 "$vmm"
start_daemon
wait_until 30 are nics ready,ready || fail "a sandbox that ended without a daemon keeps its function: $(states nics)"
ok "kill -9 of the daemon: the next one takes the functions of its sandboxes back"

echo 'vf_pool = "nics"' >>"$SLIPWAY_CONFIG"
end_daemon KILL
start_daemon
for name in a b c; do
    hollow --name "$name" --wait-network >/dev/null || fail "$name with the settings' pool: $(explain)"
done
are nics taken,taken || fail "the settings' pool: $(states nics)"
"$slipway" rm --force --all >/dev/null 2>&1
wait_until 30 are nics ready,ready || fail "after the end: $(states nics)"
ok "a pool of the settings; where it is empty, an interface is made"
"$slipway" vf rm nics >/dev/null || fail "vf rm"

own_layers() { find "$SLIPWAY_DATA_DIR/sandboxes" -name layer-main.ext4 | wc -l; }
sed -i '/^vf_pool/d' "$SLIPWAY_CONFIG"
echo 'layer_template = false' >>"$SLIPWAY_CONFIG"
end_daemon KILL
start_daemon
for name in a b; do
    hollow --name "$name" --network none >/dev/null || fail "$name without a template of layers: $(explain)"
done
[ "$(own_layers)" = 2 ] || fail "$(own_layers) volatile layers were formatted, of 2"
"$slipway" rm --force --all >/dev/null 2>&1
[ "$(own_layers)" = 0 ] || fail "$(own_layers) volatile layers are left"
sed -i '/^layer_template/d' "$SLIPWAY_CONFIG"
end_daemon KILL
start_daemon
hollow --name a --network none >/dev/null || fail "with a template of layers: $(explain)"
[ "$(own_layers)" = 0 ] || fail "a volatile layer was formatted beside the template"
"$slipway" rm --force --all >/dev/null 2>&1
ok "layer_template = false: each volatile layer is formatted when its sandbox starts"

"$slipway" bench startup --engine hollow --count 6 --rounds 2 --arms none,slipway,pool,one-lock --wait-network --json --svg "$work/a.svg" \
    "$image" >"$work/a.json" 2>"$work/errors" || fail "bench startup: $(tail -3 "$work/errors")"
python3 - "$work/a.json" "$work/a.svg" <<'CHECK' || fail "the report"
import json, sys, xml.dom.minidom
report = json.load(open(sys.argv[1]))
assert report["environment"]["accelerator"] == "hollow", report["environment"]
assert [one["subject"] for one in report["runs"]] == ["none", "slipway", "pool", "one-lock"] * 2
assert all(len(one["measured"]["timelines"]) == 6 for one in report["runs"])
has = {one["subject"]: {stage["name"] for line in one["measured"]["timelines"] for stage in line["stages"]} for one in report["runs"]}
assert "network" in has["pool"] and "network" in has["slipway"] and "network" not in has["none"], has
# Each waits 100 ms for its reset, one after the other: the last of six ends 600 ms after the first began, whenever that was.
for one in (one for one in report["runs"] if one["subject"] == "one-lock"):
    resets = [(stage["start_ns"], stage["end_ns"]) for line in one["measured"]["timelines"] for stage in line["stages"]
              if stage["name"] == "vf-reset"]
    assert len(resets) == 6 and min(end - start for start, end in resets) >= 100_000_000, resets
    assert max(end for _, end in resets) - min(start for start, _ in resets) >= 600_000_000, resets
assert "vf-reset" not in has["pool"], has
xml.dom.minidom.parse(sys.argv[2])
CHECK
[ -z "$("$slipway" vf ls | grep bench)" ] || fail "the benchmark's pool is left"
ok "bench startup: four ways in turn, nothing is left"

# Interfaces of the kernel's, several numbers of sandboxes, volumes, and single starts.
"$slipway" bench startup --engine hollow --count 1,3 --rounds 1 --arms none,veth,no-async --volume data:16M:/data --single \
    --wait-network --json --output "$work/b.json" --svg "$work/b.svg" "$image" >"$work/printed" 2>"$work/errors" ||
    fail "ways: $(tail -3 "$work/errors")"
cmp -s "$work/b.json" "$work/printed" || fail "the printed report is not the written one"
python3 - "$work/b.json" "$work/b.svg" <<'CHECK' || fail "the report of several ways"
import json, sys, xml.dom.minidom
report = json.load(open(sys.argv[1]))
assert [load["count"] for load in report["plan"]["loads"]] == [1, 3] and report["volumes"] == 1, report["plan"]
assert [(one["load"]["count"], one["subject"]) for one in report["runs"]] == [
    (count, way) for count in (1, 3) for way in ("none", "veth", "no-async")]
for one in report["runs"]:
    measured = one["measured"]
    names = {stage["name"] for line in measured["timelines"] for stage in line["stages"]}
    assert len(measured["timelines"]) == len(measured["singles"]["times_ns"]) == one["load"]["count"], one
    assert all(measured["singles"]["times_ns"]) and ("interface" in names) == (one["subject"] == "veth"), names
    assert ("network" in names) == (one["subject"] != "none"), names
assert "sandboxes at once" in open(sys.argv[2]).read()
xml.dom.minidom.parse(sys.argv[2])
CHECK
"$slipway" bench startup --engine hollow --count 1,3 --rounds 1 --arms none --compare "$work/b.json" "$image" >"$work/out" 2>&1 ||
    fail "a comparison: $(tail -3 "$work/out")"
grep -q '^3 at once none, mean ' "$work/out" && grep -q '^to none ' "$work/out" || fail "its tables: $(cat "$work/out")"
[ "$("$slipway" ps --json)" = "[]" ] || fail "bench startup leaves $("$slipway" ps)"
[ -z "$(ip -o link show type veth)" ] || fail "interfaces are left: $(ip -o link show type veth)"
"$slipway" bench startup --engine hollow --count 2 --rounds 1 --arms none,runc,runc-cni --output "$work/c.json" "$image" \
    >"$work/out" 2>"$work/errors" || fail "runc beside: $(tail -3 "$work/errors")"
if grep '^SKIPPED: the way runc:' "$work/errors"; then
    grep -q '^runc ' "$work/out" && fail "a way that was left out has figures: $(cat "$work/out")"
else
    grep -q '^runc ' "$work/out" || fail "no figures of runc: $(cat "$work/out")"
fi
if grep '^SKIPPED: the way runc-cni' "$work/errors"; then
    grep -q '^runc-cni ' "$work/out" && fail "a way that was left out has figures: $(cat "$work/out")"
else
    grep -q '^runc-cni ' "$work/out" || fail "no figures of runc-cni: $(cat "$work/out")"
fi
CNI_PATH=$work "$slipway" bench startup --engine hollow --count 2 --rounds 1 --arms none,runc-cni "$image" >"$work/out" 2>"$work/errors" ||
    fail "without plugins: $(tail -3 "$work/errors")"
grep -q '^SKIPPED: the way runc-cni' "$work/errors" || fail "no word of missing plugins: $(cat "$work/errors")"
grep -q '^runc-cni ' "$work/out" && fail "a way without its plugins has figures: $(cat "$work/out")"
# Ways that a setting of a daemon of their own makes, which has a keeper as the node has.
"$slipway" bench startup --engine hollow --count 3 --rounds 2 --arms pool,pool-no-cgroups,pool-no-layer --wait-network --json \
    "$image" >"$work/e.json" 2>"$work/errors" || fail "mechanisms switched off: $(tail -3 "$work/errors")"
python3 - "$work/e.json" <<'CHECK' || fail "the report of mechanisms switched off"
import json, sys
report = json.load(open(sys.argv[1]))
assert [one["subject"] for one in report["runs"]] == ["pool", "pool-no-cgroups", "pool-no-layer"] * 2, report["subjects"]
assert all(len(one["measured"]["timelines"]) == 3 for one in report["runs"])
assert all(stage["start_ns"] <= stage["end_ns"] for one in report["runs"] for line in one["measured"]["timelines"] for stage in line["stages"])
CHECK
own_folders() { find "$SLIPWAY_DATA_DIR" "$SLIPWAY_RUN_DIR" -maxdepth 1 -name 'slipway-bench*'; }
[ -z "$(own_folders)" ] || fail "folders of the benchmark's daemons are left: $(own_folders)"
own_daemons() { grep -las 'slipway-bench[^/]*/settings.toml' /proc/[0-9]*/cmdline; }
[ -z "$(own_daemons)" ] || fail "daemons of the benchmark are left: $(own_daemons)"
[ -z "$("$slipway" vf ls | grep bench)" ] || fail "the benchmark's pool is left"
"$slipway" image ls >/dev/null || fail "the node's images after the benchmark"
# Not by a function of the shell, which would get the signal.
"$slipway" bench startup --engine hollow --count 2 --rounds 1000 --arms pool,pool-no-layer,runc "$image" >/dev/null 2>"$work/ended" & bench=$!
has_turns() { grep -q '^round 2 ' "$work/ended"; }
wait_until 120 has_turns || fail "no turns: $(tail -3 "$work/ended")"
kill -TERM "$bench"
wait "$bench" && fail "bench startup succeeds when it is ended"
grep -q interrupted "$work/ended" || fail "bench startup that is ended says: $(tail -3 "$work/ended")"
no_sandbox() { [ "$("$slipway" ps --json)" = "[]" ]; }
wait_until 20 no_sandbox || fail "bench startup that was ended leaves $("$slipway" ps)"
[ -z "$(own_folders)$(own_daemons)" ] || fail "bench startup that was ended leaves $(own_folders) $(own_daemons)"
[ -z "$("$slipway" vf ls | grep bench)" ] || fail "bench startup that was ended leaves its pool"
# The control group of a container of runc has the container's name. A process that was killed is there until it is reaped.
no_container() { ! grep -qs "bench-startup-$bench-" /proc/[0-9]*/cgroup; }
wait_until 20 no_container || fail "bench startup that was ended leaves containers of runc"
refuses "needs guests" bench startup --engine hollow --arms pool,pool-no-late "$image"
refuses 'need shared_root = "on"' bench startup --arms pool-no-root "$image"
refuses "with the network default" bench startup --engine hollow --arms pool-no-layer --network other "$image"
ok "bench startup: a pool of control groups and a layers' template switched off, each in a daemon of its own; nothing is left, also of one that is ended"

refuses "--vf-pool POOL" bench startup --arms vf "$image"
refuses "needs guests" bench startup --engine hollow --arms tap "$image"
"$slipway" bench startup --engine hollow --count 1,2 --rounds 2 --arms vf,none --vf-pool missing --output "$work/f.json" "$image" \
    >"$work/out" 2>"$work/errors" && fail "a way that fails, and the status is 0"
grep -q '^FAILED: vf with 1 at once: ' "$work/out" || fail "no word of a way that failed: $(cat "$work/out" "$work/errors")"
python3 - "$work/f.json" <<'CHECK' || fail "the report of a way that fails beside another"
import json, sys
report = json.load(open(sys.argv[1]))
assert [(one["subject"], one["load"]["count"]) for one in report["runs"]] == [("none", 1)] * 2 + [("none", 2)] * 2, report["runs"]
assert [(one["subject"], one["round"]) for one in report["faults"] if one["failed"]] == [("vf", 0)] * 2, report["faults"]
CHECK
[ "$("$slipway" ps --json)" = "[]" ] || fail "a way that fails leaves $("$slipway" ps)"
ok "bench startup: a way that fails has no further turns with a number, and the others are measured"
# Reports of an earlier format are refused in one line.
echo '{"format": 2, "points": [], "arms": [], "rounds": []}' >"$work/old.json"
refuses "its format is 2; reports of start-up have format 3" bench startup --engine hollow --arms none --compare "$work/old.json" "$image"
ok "bench startup: veth pairs, a container that waits, two numbers of sandboxes, single starts; nothing is left"

density() { timeout 900 "$slipway" bench density --engine hollow "$@"; }
density --idle 0.5 --deployed 0,1,2,4 --burst 1,2 --rounds 2 --json --svg "$work/d.svg" "$image" >"$work/d.json" 2>"$work/errors" \
    || fail "bench density: $(tail -3 "$work/errors")"
python3 - "$work/d.json" "$work/d.svg" <<'CHECK' || fail "the report of density"
import json, sys, xml.dom.minidom
report = json.load(open(sys.argv[1]))
assert report["subjects"][0]["name"] == "slipway-hollow", report["subjects"]
assert not any(fault["failed"] for fault in report.get("faults", [])), report["faults"]
loads = [(run["load"]["count"], run["load"]["more"]) for run in report["runs"]]
assert loads == [load for count in (0, 1, 2, 4) for load in [(count, 0)] + [(count, 1)] * 2 + [(count, 2)] * 2], loads
none, *points = [run["measured"]["idle"] for run in report["runs"] if run["load"]["more"] == 0]
assert none["taken"]["vmms"]["pss"] == 0, none
for point in points:
    vmms = point["taken"]["vmms"]
    assert vmms["pss"] >= vmms["pss_shmem"] > 0 and vmms["private"] > 0, vmms
    assert 0 < point["taken"]["vmm_range"][0] <= point["taken"]["vmm_range"][1], point
for run in report["runs"]:
    at_once = [len(times) for times in run["measured"].get("starts", [])]
    assert at_once == [more for more in [run["load"]["more"]] if more > 0], run
# Pages of the program are private only while one process has them.
assert points[2]["taken"]["vmms"]["pss"] > points[0]["taken"]["vmms"]["pss"], points
xml.dom.minidom.parse(sys.argv[2])
CHECK
"$slipway" bench density --report "$work/d.json" --compare "$work/d.json" >"$work/same" || fail "a report of density, shown again"
grep -q '^one more ' "$work/same" && grep -q '^one sandbox more, PSS: ' "$work/same" || fail "its tables: $(cat "$work/same")"
[ "$("$slipway" ps --json)" = "[]" ] || fail "bench density leaves $("$slipway" ps)"
ok "bench density: no, one, two and four sandboxes, starts beside them, nothing is left"

# Not by a function of the shell, as `timeout` is here, which would get the signal.
"$slipway" bench density --engine hollow --deployed 2 --idle 600 "$image" >/dev/null 2>"$work/errors" & bench=$!
has_one() { "$slipway" ps --json | grep -q bench-density; }
wait_until 60 has_one || fail "no sandbox of bench density: $(cat "$work/errors")"
kill -TERM "$bench"
wait "$bench" && fail "bench density succeeds when it is ended"
[ "$("$slipway" ps --json)" = "[]" ] || fail "bench density that was ended leaves $("$slipway" ps)"
ok "bench density that is ended removes what it has made: $(grep -m 1 interrupted "$work/errors")"
