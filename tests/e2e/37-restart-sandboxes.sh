#!/usr/bin/env bash
# Sandboxes go on while the daemon is killed with -9, or told to end, and started again: no line of
# output is missing or doubled, no byte of a disk is wrong, commands that were attached go on, and
# exit statuses are right, also of what ended while no daemon was there.
#   SLIPWAY_RESTART_KILLS  how often the daemon is ended, 3 unless told otherwise
#   SLIPWAY_OTHER          another build of slipway, which takes turns with SLIPWAY: an upgrade and a
#                          way back with each kill
. "$(dirname "$0")/lib.sh"
kills=${SLIPWAY_RESTART_KILLS:-3} other=${SLIPWAY_OTHER:-$slipway}
need_node

in_sandbox() { timeout 60 "$slipway" exec "$1" -- bash -c "$2"; }
all_are() {
    local name
    for name in "${@:2}"; do is_state "$name" "$1" || return 1; done
}

start_keeper
start_daemon

# Numbered lines on both streams, until it is told to stop; it ends a while after that. All daemons
# together get more than an agent keeps, and each of them hardly enough to tell the agent so.
lines='i=0; until [ -e /stop ]; do i=$((i + 1)); echo "line $i of a container that talks"
[ $((i % 10)) = 0 ] && echo "tenth $i" >&2; [ $((i % 50)) = 0 ] && sleep 0.02; done; echo "last $i"; sleep 3; exit 7'
# Files on the root file system, each read back from the disk. Between them the other sandboxes have the processor.
disk='n=0; until [ -e /stop ]; do n=$((n + 1)); f=/f$((n % 8))
head -c 3000000 /dev/urandom >$f; sha256sum $f >$f.sum; sync; echo 3 >/proc/sys/vm/drop_caches
sha256sum --quiet -c $f.sum || exit 1; echo "checked $n"; sleep 0.3; done
for f in /f?; do sha256sum --quiet -c $f.sum || exit 1; done; exit 41'
# Ends a while after it was told to, with nobody there to see it.
later='until [ -e /go ]; do sleep 0.1; done; sleep 3; echo "ended alone"; exit 9'

"$slipway" run --name lines "$image" -- bash -c "$lines" >"$work/lines.out" 2>"$work/lines.err" & client=$!
"$slipway" run -d --name disk --privileged "$image" -- bash -c "$disk" >/dev/null || fail "run: $(explain)"
"$slipway" run --rm --name later "$image" -- bash -c "$later" >"$work/later.out" 2>"$work/later.err" & brief=$!
wait_until 120 all_are running lines disk later || fail "they do not start: $("$slipway" ps; cat "$work"/*.err; explain)"
"$slipway" logs -f lines >"$work/follow.out" 2>"$work/follow.err" & follower=$!
"$slipway" wait lines >"$work/wait.out" 2>&1 & waiter=$!
vmms=$(vmm_of lines) && vmms+=" $(vmm_of disk) $(vmm_of later)"

builds=("$slipway" "$other") signals=(KILL KILL TERM)
for ((kill = 1; kill <= kills; kill++)); do
    sleep "0.$((kill * 37 % 10))"
    end_daemon "${signals[$((kill % 3))]}"
    # A command that finds no daemon waits for the next one and starts none of its own.
    "$slipway" ps --json >"$work/ps" 2>"$work/ps.err" & asker=$!
    sleep "0.$((kill * 53 % 10))"
    start_daemon "${builds[$((kill % 2))]}"
    wait "$asker" || fail "ps while no daemon ran: $(cat "$work/ps.err")"
    [ "$(vmm_of lines) $(vmm_of disk) $(vmm_of later)" = "$vmms" ] || fail "after end $kill of the daemon: $("$slipway" ps; explain)"
    all_are running lines disk later || fail "after end $kill of the daemon: $("$slipway" ps)"
    [ "$(in_sandbox lines "echo $kill")" = "$kill" ] || fail "exec after end $kill of the daemon: $(explain)"
    sleep 1
done
ok "$kills ends of the daemon: three sandboxes run on, ps shows them, exec works"

ended() { ! runs "$1"; }
# The status of a command that waits, once it returns.
status_of() {
    wait_until 120 ended "$1" || fail "a command still waits: $("$slipway" ps; explain)"
    wait "$1"
}
enough() { [ "$(wc -l <"$work/lines.out")" -gt 1000 ]; }
wait_until 120 enough || fail "only $(wc -l <"$work/lines.out") lines: $(explain)"
# A command that has its container end may end with it, before its own status is known.
in_sandbox lines 'touch /stop' >/dev/null 2>&1
in_sandbox later 'touch /go' >/dev/null 2>&1
end_daemon KILL
sleep 5
start_daemon
status_of "$brief"; status=$?
[ "$status" = 9 ] || fail "the status of what ended alone is $status: $(cat "$work/later.err"; explain)"
[ "$(cat "$work/later.out")" = "ended alone" ] || fail "what ended alone said: $(cat "$work/later.out")"
ok "a container that ended without a daemon: its last words and its status reach the command that waits"

status_of "$client"; status=$?
[ "$status" = 7 ] || fail "the status of the lines is $status: $(tail -n 3 "$work/lines.err"; explain)"
status_of "$follower" || fail "logs -f: $(tail -n 3 "$work/follow.err")"
status_of "$waiter"; [ "$(cat "$work/wait.out")" = 7 ] || fail "wait: $(cat "$work/wait.out")"
"$slipway" logs lines >"$work/log.out" 2>"$work/log.err" || fail "logs"
last=$(sed -n 's/^last //p' "$work/lines.out")
[ "${last:-0}" -gt 1000 ] || fail "only ${last:-no} lines"
{ seq -f 'line %.0f of a container that talks' "$last"; echo "last $last"; } >"$work/expected.out"
seq -f 'tenth %.0f' 10 10 "$last" >"$work/expected.err"
for what in lines log follow; do
    cmp "$work/expected.out" "$work/$what.out" || fail "the output by $what"
    cmp "$work/expected.err" "$work/$what.err" || fail "the errors by $what"
done
ok "$last lines: none missing, none doubled, in run, logs and logs -f; status 7 by run and wait"

# A VMM that ends while nobody looks is not taken for one that runs; its neighbour stays.
"$slipway" run -d --name victim "$image" -- sleep 1000 >/dev/null || fail "run: $(explain)"
victim=$(vmm_of victim)
end_daemon KILL
kill -9 "$victim"
start_daemon
is_state victim lost || fail "a VMM that ended without a daemon: $("$slipway" ps)"
is_state disk running || fail "its neighbour: $("$slipway" ps)"
ok "a VMM that ended without a daemon is found lost, and its neighbour runs on"

in_sandbox disk 'touch /stop' >/dev/null 2>&1
status=$(timeout 120 "$slipway" wait disk)
[ "$status" = 41 ] || fail "the disk's status is $status: $("$slipway" logs disk 2>&1 | tail -n 5; explain)"
ok "$("$slipway" logs --tail 1 disk | tr -cd 0-9) files written to a root file system and read back"

"$slipway" rm --force --all >/dev/null || fail "rm"
left=$(leftovers)
[ -z "$left" ] || fail "left: $left"
kill "$daemon"; wait "$daemon" 2>/dev/null; daemon=''
wait_until 10 ended "$keeper" || fail "the keeper holds something"
ok "rm leaves nothing behind, and the keeper ends"
