#!/usr/bin/env bash
# Templates with a container: an image is started, its container becomes ready, and both are saved; forks go on with the
# container. What goes wrong before the save is told in one line, by QEMU's sandboxes too, and leaves no sandbox, no
# template and no VMM. In a network namespace of the test's own.
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
need_network_node "$@"
start_keeper

in_sandbox() { timeout 60 "$slipway" exec "$1" -- "${@:2}"; }
# says PATTERN COMMAND... : the command of slipway fails with one line, which matches.
says() {
    local said
    said=$(timeout 900 "$slipway" "${@:2}" 2>&1 </dev/null) && fail "no error: slipway ${*:2}: $said"
    [ "$(wc -l <<<"$said")" = 1 ] || fail "more than a line: slipway ${*:2}: $said"
    grep -qiE -- "$1" <<<"$said" || fail "slipway ${*:2}: $said"
}
snapshots() { "$slipway" snapshot ls --json | python3 -c 'import json, sys
for one in json.load(sys.stdin): print(one["name"], *one["volumes"])'; }
nothing_runs() { [ -z "$(vmms)" ]; }
# nothing_left WHAT: no sandbox, no file of a template and no VMM.
nothing_left() {
    [ -z "$("$slipway" ps --quiet)" ] || fail "$1: a sandbox is left: $("$slipway" ps)"
    [ -z "$(snapshots)$(ls "$SLIPWAY_DATA_DIR/templates" 2>/dev/null)" ] || fail "$1: left: $(ls "$SLIPWAY_DATA_DIR/templates")"
    wait_until 60 nothing_runs || fail "$1: a VMM is left: $(vmms)"
}
[ "${SLIPWAY_VMM:-}" = native ] || export SLIPWAY_VMM=qemu
start_daemon
create=(template create --network none --image "$image")

says 'of the node.s own' "${create[@]}" auto
says 'no name for a template' "${create[@]}" ../x
says 'leave it out' "${create[@]}" --volume /tmp:/tmp one
says 'is not made' template create --network none --image "sha256:$(printf '0%.0s' {1..64})" one
nothing_left "options that a template cannot have, and an image that is gone"
ok "an image that is gone, and what no template can have, is refused in one line before anything starts"

says 'template one is not made: the command of --after failed: status 3: no such thing' \
    "${create[@]}" one --after 'echo first; echo "no such thing" >&2; exit 3' -- sleep 10000
says 'the command of --after has not ended within 3s' "${create[@]}" one --after 'sleep 10000' --timeout 3s -- sleep 10000
# On a busy machine the probe may not end once within the first of these times.
for limit in 5s 60s 600s; do
    said=$(timeout 900 "$slipway" "${create[@]}" one --probe 'echo not yet; false' --timeout $limit -- sleep 10000 2>&1 </dev/null) &&
        fail "a probe that never succeeds: $said"
    grep -q ': it has not ended once$' <<<"$said" || break
done
[ "$(wc -l <<<"$said")" = 1 ] && grep -q "the probe has not succeeded within $limit: status 1: not yet" <<<"$said" || fail "a probe: $said"
says 'its container has ended \(status 5\)' "${create[@]}" one --probe false --timeout 10m -- sh -c 'sleep 1; exit 5'
nothing_left "containers that do not become ready"
ok "a command that fails, one that lasts, a probe that never succeeds and a container that ends are told in one line"

"$slipway" "${create[@]}" cut --probe 'echo >/asked; false' --timeout 1h -- sleep 10000 >"$work/cut" 2>&1 & client=$!
named() { name=$("$slipway" ps --quiet) && [ -n "$name" ]; }
asked() { named && in_sandbox "$name" test -e /asked 2>/dev/null; }
wait_until 120 asked || fail "no probe: $(cat "$work/cut") $(explain)"
kill -TERM "$client"
wait "$client" && fail "an interrupted command succeeds: $(cat "$work/cut")"
grep -q 'template cut is not made: interrupted' "$work/cut" || fail "interrupted: $(cat "$work/cut")"
nothing_left "an interrupted command"
ok "a command that is interrupted leaves nothing"

if [ "$SLIPWAY_VMM" != native ]; then
    says 'qemu|slipway-vmm' "${create[@]}" one -- sleep 10000
    nothing_left "QEMU"
    ok "with QEMU the save is refused, and nothing is left"
    skip "slipway-vmm on KVM (SLIPWAY_VMM=native): lab/kvm-host --test $test_name SLIPWAY"
fi

# The container counts, and is ready at 3.
counts='echo "$KIND" >/kind; number=0; while :; do number=$((number + 1)); echo $number >/number; [ $number != 3 ] || : >/ready; sleep 1; done'
[ "$(timeout 300 "$slipway" "${create[@]}" web --env KIND=counter --volume data:16M --probe 'test -e /ready' -- sh -c "$counts" 2>"$work/said")" = web ] ||
    fail "template create: $(cat "$work/said") $(explain)"
[ -z "$("$slipway" ps --quiet)" ] || fail "a sandbox is left: $("$slipway" ps)"
[ "$(snapshots)" = "web data" ] || fail "snapshots: $(snapshots)"
says 'there is a template or snapshot "web" already' "${create[@]}" web
says 'there is a template or snapshot "web" already' template create web
[ -z "$("$slipway" ps --quiet)" ] || fail "a sandbox is left: $("$slipway" ps)"
ok "a container is saved once its probe succeeds; its sandbox ends; its name is taken"

timeout 120 "$slipway" run --detach --from web --name one --count 3 >/dev/null || fail "forks: $(explain)"
for name in one-1 one-2 one-3; do
    [ "$(in_sandbox "$name" sh -c 'cat /kind; hostname; ls /ready /dev/slipway/data' | tr '\n' ' ')" = "counter $name /dev/slipway/data /ready " ] ||
        fail "$name: $(in_sandbox "$name" sh -c 'cat /kind; hostname; ls /ready /dev/slipway/data') $(explain)"
    before=$(in_sandbox "$name" cat /number)
    further() { [ "$(in_sandbox "$name" cat /number)" -gt "$before" ]; }
    [ "$before" -ge 3 ] || fail "$name began anew: $before"
    wait_until 60 further || fail "$name does not go on: $before $(explain)"
done
"$slipway" rm --force --all >/dev/null || fail "rm: $(explain)"
says 'slipway snapshot rm web' template rm web
[ "$("$slipway" snapshot rm web)" = web ] || fail "snapshot rm: $(explain)"
ok "forks go on with the container from where it was ready"

timeout 300 "$slipway" "${create[@]}" made --after 'sleep 1; echo after >/made' -- sleep 10000 >/dev/null 2>"$work/said" ||
    fail "template create --after: $(cat "$work/said") $(explain)"
timeout 120 "$slipway" run --detach --from made --name two >/dev/null || fail "a fork: $(explain)"
[ "$(in_sandbox two cat /made)" = after ] || fail "a fork lacks what the command made: $(explain)"
"$slipway" rm --force two >/dev/null && "$slipway" snapshot rm made >/dev/null || fail "rm: $(explain)"
nothing_left "all of it"
ok "forks have what the command of --after has made"
