#!/bin/bash
# `slipway bench vmm`: every VMM that is here runs the guest, the report survives being written, a run is compared with
# an earlier one, and no VMM is left.
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
[ -x "$slipway" ] || fail "$slipway is not built; \`make build\` builds it"
[ -w /dev/kvm ] || skip "VMMs: /dev/kvm"

bench() { TMPDIR=$work timeout 300 "$slipway" bench vmm "$@"; }

# A software KVM may not run a PC's firmware, and that says nothing about the benchmark.
bench --quick --only native,fork,fork-functions,bare --json --svg "$work/a.svg" >"$work/a.json" 2>"$work/errors" || fail "a quick run: $(cat "$work/errors")"
python3 - "$work/a.json" "$work/a.svg" <<'CHECK' || fail "the report does not hold what was asked for"
import json, sys, xml.dom.minidom
report = json.load(open(sys.argv[1]))
assert [s["name"] for s in report["subjects"]] == ["native", "fork", "fork-functions", "bare"], report["subjects"]
assert len(report["runs"]) == 3 * 4, len(report["runs"])
for run in report["runs"]:
    measured = run["measured"]
    assert run["load"] == "128M" and measured["byte_ns"] > 0 and measured["end_ns"] > 0, run
    assert ("slot_ns" in measured) == (run["subject"] == "bare"), run
    assert (0 < measured.get("private_bytes", 0) < 128 << 20) == (run["subject"] != "bare"), run
    assert ("cpu_ns" in measured) == (run["subject"] != "bare"), run
assert report["environment"]["accelerator"] == "kvm", report["environment"]
xml.dom.minidom.parse(sys.argv[2])
CHECK
ok "Slipway's VMM, forks of it with functions and without, and KVM alone ran the guest three times each"

bench --report "$work/a.json" --compare "$work/a.json" >"$work/same" || fail "comparing a report with itself"
grep -Eq '^128M native, byte .* 1\.00 .*noise$' "$work/same" || fail "a report differs from itself: $(cat "$work/same")"
# A VMM that takes a tenth of the time: the report is forged, the verdict must follow.
python3 - "$work/a.json" "$work/b.json" <<'FORGE' || fail "forging a report"
import json, sys
report = json.load(open(sys.argv[1]))
for file, ns in ((sys.argv[1], 10_000_000), (sys.argv[2], 1_000_000)):
    for run in report["runs"]:
        run["measured"]["byte_ns"] = ns + run["round"]
    json.dump(report, open(file, "w"))
FORGE
bench --report "$work/b.json" --compare "$work/a.json" >"$work/faster" || fail "comparing two reports"
grep -Eq '^128M native, byte .* 10\.00 .*faster$' "$work/faster" || fail "ten times the speed is not seen: $(cat "$work/faster")"
ok "a report equals itself, and ten times the speed is seen"

# What a VMM says when it cannot start is in the table, and the others are measured.
printf '#!/bin/sh\necho no such kernel >&2\nexit 1\n' >"$work/broken"
chmod 755 "$work/broken"
bench --quick --only native,bare --program "native=$work/broken" >"$work/table" 2>"$work/errors" && fail "a broken VMM is no error"
grep -q '^FAILED: native with 128M: .*no such kernel$' "$work/table" || fail "the table does not say why: $(cat "$work/table")"
grep -q '^bare ' "$work/table" || fail "the others were not measured: $(cat "$work/table")"
ok "a VMM that fails is named with its reason, and stops no other"

for bad in '--only tape' '--memory 1M' '--program tape=/bin/true' '--program bare=/bin/true' '--report /dev/null' '--only firecracker --program firecracker'; do
    # shellcheck disable=SC2086 # words
    bench --quick $bad >/dev/null 2>"$work/errors" && fail "bench vmm $bad succeeded"
done
ok "senseless arguments are refused"
[ -z "$(find "$work" -name 'slipway-bench*')" ] || fail "left behind: $(find "$work" -name 'slipway-bench*')"
! pgrep -f "$work/slipway-bench" >/dev/null || fail "a VMM is left: $(pgrep -af "$work/slipway-bench")"
ok "kernels and VMMs are gone"
