#!/bin/bash
# `slipway bench cgroups`: groups on demand and of the pool, the report survives being written, and no group and no
# process is left.
# alone: a hierarchy that it mounts has its controllers to itself.
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
need_root
[ -x "$slipway" ] || fail "$slipway is not built; \`make build\` builds it"
two='' one=''
[ ! -w /sys/fs/cgroup/pids ] || one=create,pool,create-fifo,pool-no-fifo,create-self,pool-self,mkdir,take
[ ! -w /sys/fs/cgroup/unified/cgroup.procs ] && [ ! -w /sys/fs/cgroup/cgroup.procs ] || two=create-v2,pool-v2
[ -n "$one$two" ] || skip "control groups: none can be made here"
subjects=$(tr ' ' '\n' <<<"$one $two" | grep . | paste -sd,)

bench() { TMPDIR=$work timeout 300 "$slipway" bench cgroups "$@"; }

bench --quick --only "$subjects" --json --svg "$work/a.svg" >"$work/a.json" 2>"$work/errors" || fail "a quick run: $(cat "$work/errors")"
python3 - "$work/a.json" "$work/a.svg" "$subjects" <<'CHECK' || fail "the report does not hold what was asked for"
import json, sys, xml.dom.minidom
report = json.load(open(sys.argv[1]))
names = sys.argv[3].split(",")
assert [s["name"] for s in report["subjects"]] == names, report["subjects"]
assert len(report["runs"]) == 2 * len(names), len(report["runs"])
for run in report["runs"]:
    measured = run["measured"]
    assert run["load"] == "50-t4" and 0 < measured["p50_ns"] <= measured["p99_ns"] <= measured["total_ns"], run
    assert ("refill_ns" in measured) == run["subject"].startswith(("pool", "take")), run
systems = [line.rstrip("\n").split(" - ", 1)[1].split(" ") for line in open("/proc/self/mountinfo")]
favours = any(kind in ("cgroup", "cgroup2") and "favordynmods" in options.split(",") for kind, _, options in systems)
assert report["favours_moves"] == favours, report
xml.dom.minidom.parse(sys.argv[2])
CHECK
[ -z "$(find /sys/fs/cgroup -maxdepth 2 -name 'slipway-bench-*')" ] || fail "left: $(find /sys/fs/cgroup -maxdepth 2 -name 'slipway-bench-*')"
! pgrep -f "$work/a.svg" >/dev/null || fail "a process is left"
ok "$subjects: fifty groups twice each, and none is left"

# RunD-V's joint controllers, where no hierarchy of the host has one.
joint=joint,joint-pool,joint-mkdir,joint-take
if bench --quick --only "$joint" --json >"$work/j.json" 2>"$work/errors"; then
    python3 - "$work/j.json" "$joint" <<'CHECK' || fail "the report of joint controllers"
import json, sys
report = json.load(open(sys.argv[1]))
names = sys.argv[2].split(",")
assert [s["name"] for s in report["subjects"]] == names, report["subjects"]
assert len(report["runs"]) == 2 * len(names) and not report.get("faults"), report
CHECK
    ! grep -q "^cgroup $work" /proc/mounts || fail "the joint hierarchy is still mounted"
    ok "$joint: fifty groups twice each in one hierarchy, which is gone"
else
    grep -q '^SKIPPED: joint: .*mounted already\|^SKIPPED: joint: .*cannot mount\|^SKIPPED: joint: .*no controller' "$work/errors" ||
        fail "joint controllers: $(cat "$work/errors")"
    say "$(grep -m 1 '^SKIPPED' "$work/errors")"
fi

bench --report "$work/a.json" --compare "$work/a.json" >"$work/same" || fail "comparing a report with itself"
grep -Eq '^50-t4 .* 1\.00 ' "$work/same" || fail "a report differs from itself: $(cat "$work/same")"
grep -q '^moves: the host ' "$work/same" || fail "the table does not say whether the host favours moves: $(cat "$work/same")"
ok "a report that was written is compared with itself"

# Short turns: 20 processes are woken ten times a second, by pipes, and are in groups of the controllers that this host has.
idle=''
[ ! -w /sys/fs/cgroup/cpu ] || [ ! -w /sys/fs/cgroup/memory ] || idle=one,each,each-no-cpu
! grep -qsw cpu /sys/fs/cgroup/cgroup.subtree_control || idle="one-v2,each-v2,each-no-cpu-v2"
if [ -n "$idle" ]; then
    bench --quick --rounds 1 --idle 20-w10 --only "$idle" --json --svg "$work/i.svg" >"$work/i.json" 2>"$work/errors" ||
        fail "idle groups: $(cat "$work/errors")"
    python3 - "$work/i.json" "$work/i.svg" "$idle" <<'CHECK' || fail "the report of idle groups"
import json, sys, xml.dom.minidom
report = json.load(open(sys.argv[1]))
assert [run["subject"] for run in report["runs"]] == sys.argv[3].split(","), report["runs"]
for run in report["runs"]:
    measured = run["measured"]
    assert run["load"] == "20-w10" and measured["processors"] > 0, run
    assert measured["window_ns"] >= 250_000_000 and measured["woken_in_1000s"] > 0, run
    assert measured["busy_ns"] <= measured["window_ns"] * measured["processors"], run
    assert measured["p50_ns"] <= measured["p99_ns"] <= measured["lost_ns"], run
xml.dom.minidom.parse(sys.argv[2])
CHECK
    [ -z "$(find /sys/fs/cgroup -maxdepth 2 -name 'slipway-bench-*')" ] || fail "idle groups are left"
    bench --idle --report "$work/i.json" --compare "$work/i.json" >"$work/same" || fail "a report of idle groups, shown again"
    grep -q '^RunD-V, as published: 7.6 %' "$work/same" || fail "its table: $(cat "$work/same")"
    ok "$idle: idle processes are woken, and no group is left"
fi

for bad in "--load 0-t1" "--load 5" "--idle 0" "--idle 5 --load 5-t1" "--only nosuch" "--only joint,create-v2" "--controllers ../x" "--report $work/a.svg"; do
    # shellcheck disable=SC2086 # words
    bench --quick $bad >/dev/null 2>"$work/errors" && fail "bench cgroups $bad succeeded"
    [ -s "$work/errors" ] || fail "bench cgroups $bad says nothing"
    ok "bench cgroups $bad -> $(grep -m 1 . "$work/errors")"
done
