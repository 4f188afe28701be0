#!/usr/bin/env bash
# A running sandbox is given a CPU and loses it again, twice: its container, the VMM's process, its control group and
# the record say so, also after the daemon was killed. What it cannot have is refused in one line.
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
need_node

start_keeper
start_daemon

# refused PATTERN NAME WORDS…: an update that fails with one line, which matches.
refused() {
    local status
    timeout 300 "$slipway" update "${@:2}" >"$work/out" 2>"$work/err"
    status=$?
    [ "$status" = 1 ] || [ "$status" = 2 ] || fail "update ${*:2}: status $status, $(cat "$work/out" "$work/err")"
    grep -qE "$1" "$work/err" || fail "update ${*:2} says: $(cat "$work/err")"
    ok "update ${*:2} -> $status, $(grep -m 1 . "$work/err")"
}
recorded() { "$slipway" inspect web | python3 -c 'import json,sys
one = json.load(sys.stdin)[0]
print(one["cpus"], one["boot_cpus"], one["max_cpus"])'; }
has() {
    local found limit
    found=$(timeout 300 "$slipway" exec web nproc) || fail "exec: $found"
    [ "$found" = "$1" ] || fail "the container has $found CPUs, not $1"
    [ "$(recorded)" = "$1 2 3" ] || fail "the record has $(recorded), not $1 2 3"
    limit=$(cpu_quota web)
    [ -z "$limit" ] || [ "$limit" = $((($1 + 1) * 100000)) ] || fail "$1 CPUs with the limit $limit"
}

"$slipway" run -d --name web --cpus 2 --max-cpus 3 "$image" -- sleep 100000 >/dev/null || fail "run"
has 2
ok "a sandbox with room for three CPUs begins with two"
for round in 1 2; do
    timeout 300 "$slipway" update web --cpus 3 >/dev/null || fail "update to 3"
    has 3
    timeout 300 "$slipway" exec web -- taskset -c 2 true || fail "a process cannot run on CPU 2"
    [ "$("$slipway" update --json web --cpus 3 | python3 -c 'import json,sys; print(json.load(sys.stdin)["cpus"])')" = 3 ] \
        || fail "the same again"
    if [ "$round" = 2 ]; then
        end_daemon KILL
        start_daemon
        has 3
        ok "the next daemon knows the CPUs of a sandbox that it adopts"
    fi
    timeout 300 "$slipway" update web --cpus 2 >/dev/null || fail "update to 2"
    has 2
done
ok "a third CPU came, ran a process and went, twice"

refused '"0" is no number of CPUs' web --cpus 0
refused '"many" is no number of CPUs' web --cpus many
refused '0.5 CPUs: a sandbox or a pod has whole CPUs' web --cpus 0.5
refused 'web: at most 3; `slipway run --max-cpus`' web --cpus 4
refused 'the 2 that it began with' web --cpus 1
refused 'no sandbox' nobody --cpus 2
refused 'cpus' web
"$slipway" run --cpus 4 --max-cpus 2 "$image" true 2>"$work/err" && fail "--max-cpus 2 with --cpus 4"
grep -q -- '--max-cpus 2 is less than the 4 CPUs' "$work/err" || fail "$(cat "$work/err")"
has 2
"$slipway" stop -t 1 web >/dev/null
refused 'web is exited: ' web --cpus 3
"$slipway" rm --force web >/dev/null || fail "rm"
[ -z "$(leftovers)" ] || fail "left: $(leftovers)"
ok "nothing is left"
