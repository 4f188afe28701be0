#!/bin/bash
# `slipway bench memory`: every source of memory and every gate has its turns, the report survives being written, a run is
# compared with an earlier one, and what the host lacks is named with the remedy.
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
[ -x "$slipway" ] || fail "$slipway is not built; \`make build\` builds it"
[ -w /dev/userfaultfd ] || skip "memory of a pool: /dev/userfaultfd"

bench() { TMPDIR=$work timeout 300 "$slipway" bench memory "$@"; }

sources=new,pool,pool-ahead,pre50
bench --quick --load 32M-4k,gate-block --only $sources,plain,late,given --json --svg "$work/a.svg" >"$work/a.json" 2>"$work/errors" ||
    fail "a quick run: $(cat "$work/errors")"
python3 - "$work/a.json" "$work/a.svg" <<'CHECK' || fail "the report does not hold what was asked for"
import json, sys, xml.dom.minidom
report = json.load(open(sys.argv[1]))
turns = {}
for run in report["runs"]:
    (kind, measured), = run["measured"].items()
    assert all(value > 0 for value in measured.values()), run
    turns[kind, run["load"], run["subject"]] = turns.get((kind, run["load"], run["subject"]), 0) + 1
given = {("given", "32M-4k", name): 2 for name in ("new", "pool", "pool-ahead", "pre50")}
accessed = {("accessed", "gate-block", name): 2 for name in ("plain", "late", "given")}
assert turns == given | accessed, turns
assert report["left_out"] == [], report["left_out"]
xml.dom.minidom.parse(sys.argv[2])
CHECK
ok "each source gave memory twice, all of it zeros, and each gate was measured"

bench --report "$work/a.json" --compare "$work/a.json" >"$work/same" || fail "comparing a report with itself"
grep -Eq '^32M-4k pool, ready .* 1\.00 .*needs three rounds$' "$work/same" || fail "a report differs from itself: $(cat "$work/same")"
ok "a report equals itself"

# No host has so many huge pages: the others are measured, and the table tells what would help.
bench --quick --load 1024G-2m,gate-word --only new,pool,plain >"$work/table" 2>"$work/errors" || fail "a run without huge pages: $(cat "$work/errors")"
for name in new pool; do
    grep -q "^LEFT OUT: $name with 1024G-2m: .*sysctl vm.nr_hugepages=524288" "$work/table" || fail "$name is not named: $(cat "$work/table")"
done
grep -q '^plain ' "$work/table" || fail "the others were not measured: $(cat "$work/table")"
ok "a load that the host cannot run is left out, with the remedy"

for bad in '--only tape' '--load 1M-4k' '--load 17M-2m' '--load gate-tape' '--only new --load gate-pin' '--report /dev/null'; do
    # shellcheck disable=SC2086 # words
    bench --quick $bad >/dev/null 2>"$work/errors" && fail "bench memory $bad succeeded"
done
ok "senseless arguments are refused"
[ -z "$(find "$work" -name 'slipway-bench*')" ] || fail "left behind: $(find "$work" -name 'slipway-bench*')"
ok "sockets are gone"
