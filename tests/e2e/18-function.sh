#!/usr/bin/env bash
# `slipway function`: requests run a command in replicas, which are made one after the other in a sandbox. Its bounds, what
# hostile requests get, the end of idle replicas, a server that is killed with -9, whose sandbox the next one has, and one that
# is told to end while an invocation runs. Then invocations that are forks of a zygote, and programs that cannot be forked.
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
need_node
for program in curl python3; do command -v "$program" >/dev/null || skip "$program"; done
stop_daemon
server=''
end_all() { [ -z "$server" ] || kill -9 "$server" 2>/dev/null; }

f() { timeout 120 "$slipway" function "$@"; }
# /dev/shm is that of the sandbox, which its replicas share.
command='case $PATH_INFO in
    /meet) echo >>/dev/shm/meet; until [ "$(wc -l </dev/shm/meet)" -ge 3 ]; do sleep 0.1; done ;;
    /wait*) until [ -e "/dev/shm/go${PATH_INFO#/wait}" ]; do sleep 0.1; done ;;
    /fail) echo "its last words" >&2; exit 3 ;;
esac
echo "$REQUEST_METHOD $PATH_INFO $QUERY_STRING"; cat'
# serve OPTION…: a server of the function f with at most three replicas in one sandbox. Its time limits are nobody's concern.
# The log of the server before it is removed, since it names the same function at another address.
serve() {
    rm -f "$work/server"
    "$slipway" function serve --listen 127.0.0.1:0 --max-sandboxes 1 --replicas-per-sandbox 3 --queue 2 --from none \
        --timeout 1h --queue-time 1h "$@" f "$image" -- sh -c "$command" 2>"$work/server" & server=$!
    wait_until 60 grep -q '^Serving f at ' "$work/server" || fail "no server: $(cat "$work/server")"
    url=$(sed -n 's,^Serving f at \(.*\)/$,\1,p' "$work/server")
}
# is KEY VALUE: whether the figures of $name say so; sandboxes are counted, and `ready` are those of them that are.
name=f
is() { [ "$(f ls --json | python3 -c 'import json,sys
one = next((f for f in json.load(sys.stdin) if f["name"] == sys.argv[1]), {})
one["ready"] = [sandbox for sandbox in one.get("sandboxes", []) if sandbox["state"] == "ready"]
value = one.get(sys.argv[2], "none")
print(len(value) if isinstance(value, list) else value)' "$name" "$1")" = "$2" ]; }
# Have the invocations of /wait… go on, by a further process in a replica.
go() {
    local replica
    replica=$("$slipway" ps --json | python3 -c 'import json,sys
print(next(c["name"] for s in json.load(sys.stdin) for c in s["containers"] if s["name"] == "f-1" and c["state"] == "running"))')
    timeout 60 "$slipway" exec "f-1/$replica" touch "/dev/shm/go$1" || fail "no way into f-1/$replica: $(explain)"
}
status() { curl -s -D "$work/head" -o "$work/body" -w '%{http_code}' "$@"; }
start_daemon

serve --keep-alive 1h
[ "$(printf 'a\nb' | f invoke f -)" = "$(printf 'POST / \na\nb')" ] || fail "invoke: $(cat "$work/server"; explain)"
is sandboxes 1 && is replicas 1 && is invocations 1 || fail "after the first: $(f ls)"
[ "$(status "$url/a%20b?c=d" --data x)" = 200 ] || fail "a request: $(cat "$work/body")"
[ "$(cat "$work/body")" = "$(printf 'POST /a%%20b c=d\nx')" ] || fail "its answer: $(cat "$work/body")"
grep -qi '^x-slipway-replica: f-1/r1' "$work/head" || fail "its head: $(cat "$work/head")"
ok "requests run the command in a replica of a sandbox"

f load "$url/meet" --bursts 3 --timeout 1h --json >"$work/load" || fail "load: $(cat "$work/load" "$work/server")"
python3 - "$work/load" <<'END' || fail "a burst: $(cat "$work/load")"
import json, sys
one, = json.load(open(sys.argv[1]))
assert (one["sent"], one["answered"], one["replicas"], one["sandboxes"]) == (3, 3, 3, 1)
assert 0 < one["p50_ns"] <= one["p99_ns"] <= one["max_ns"] and one["errors"] == {}
END
is replicas 3 && is sandboxes 1 && is sandboxes_made 1 || fail "after a burst: $(f ls --json)"
ok "a burst of three that wait for each other has three replicas in the sandbox"

clients=()
for _ in 1 2 3 4 5; do curl -s -o /dev/null -w '%{http_code}\n' "$url/wait" >>"$work/codes" & clients+=($!); done
wait_until 60 is waiting 2 && is busy 3 || fail "three run and two wait: $(f ls)"
[ "$(status "$url/wait")" = 503 ] && grep -qi '^retry-after: 1' "$work/head" || fail "a full queue: $(cat "$work/head" "$work/body")"
go ''
wait "${clients[@]}"
[ "$(sort "$work/codes" | uniq -c | tr -s ' ')" = " 5 200" ] || fail "those that waited: $(cat "$work/codes")"
ok "two wait for three replicas that are busy, and a third is refused: $(cat "$work/body")"

[ "$(status "$url/fail")" = 502 ] || fail "a failure: $(cat "$work/body")"
grep -q 'ended with status 3' "$work/body" && ! grep -q words "$work/body" || fail "a failure: $(cat "$work/body")"
grep -q 'its last words' "$work/server" || fail "the server's log: $(cat "$work/server")"
# The client asks before it sends the body, and waits for the answer.
head -c 1100000 /dev/zero >"$work/large"
[ "$(status -H 'Expect: 100-continue' --expect100-timeout 600 --data-binary "@$work/large" "$url/")" = 413 ] || fail "a body of 1.1 MB: $(cat "$work/head")"
f invoke none x >"$work/out" 2>&1 && fail "a function that is not served"
f serve --listen 127.0.0.1:0 f "$image" -- true >"$work/out" 2>&1 && fail "a second server"
grep -q "process $server.* serves the function f" "$work/out" || fail "a second server: $(cat "$work/out")"
f serve --concurrency 6 g "$image" -- true >"$work/out" 2>&1 && fail "seven processes in each of eight replicas"
[ "$(wc -l <"$work/out")" = 1 ] || fail "more than a line: $(cat "$work/out")"
[ "$(f invoke f x)" = "$(printf 'POST / \nx')" ] || fail "invoke: $(cat "$work/server")"
ok "failures, large requests and bad settings have an answer each -> $(cat "$work/out")"

vmm=$(vmm_of f-1)
kill -9 "$server"; wait "$server" 2>/dev/null
is state killed || fail "a server that was killed: $(f ls)"
runs "$vmm" || fail "the sandbox of a killed server has gone: $(explain)"
serve --keep-alive 1s --min-sandboxes 1
[ "$(f invoke f x)" = "$(printf 'POST / \nx')" ] || fail "invoke: $(cat "$work/server"; explain)"
[ "$(vmm_of f-1)" = "$vmm" ] && is sandboxes_made 0 || fail "the next server has another sandbox: $(f ls --json)"
ok "after kill -9 the next server has the sandbox"

wait_until 60 is replicas 0 || fail "an idle replica stays: $(f ls --json; cat "$work/server")"
is sandboxes 1 && is recycled 1 || fail "a sandbox that stays: $(f ls --json)"
ok "an idle replica goes after the keep-alive time"

curl -s -o "$work/last" "$url/wait-last" --data bye & client=$!
wait_until 60 is busy 1 || fail "the last one does not run: $(f ls; cat "$work/server")"
kill "$server"
wait_until 60 is state ending || fail "the server does not end: $(f ls)"
go -last
wait "$client"
[ "$(cat "$work/last")" = "$(printf 'POST /wait-last \nbye')" ] || fail "the last answer: $(cat "$work/last" "$work/server")"
wait "$server" || fail "the server ended with status $?: $(cat "$work/server")"
server=''
[ "$(state_of f-1)" = gone ] && [ "$(f ls --json)" = '[]' ] || fail "left: $("$slipway" ps; f ls)"
[ -z "$(leftovers)" ] || fail "left over: $(leftovers)"
ok "SIGTERM lets the last invocation end, and nothing is left"

# What is made before the zygote stops itself is the same in each of its forks. The variables are at descriptor 3.
zygote='made=$(cat /proc/sys/kernel/random/uuid); kill -STOP $$
while read -r variable; do export "$variable"; done <&3
case $PATH_INFO in
    /meet) echo >>/dev/shm/meet; until [ "$(wc -l </dev/shm/meet)" -ge 3 ]; do sleep 0.1; done ;;
    /leave) sleep 100000 </dev/null >/dev/null 2>&1 & ;;
    /count) ps | grep -c "[s]leep 100000" ;;
    /fail) echo "its last words" >&2; exit 3 ;;
esac
echo "$made $REQUEST_METHOD $PATH_INFO"; cat'
# fork NAME OPTION… -- COMMAND…: a server of the function NAME with a sandbox that is ready. A zygote that takes too long is not
# forked, so it has the longest time that it can be given.
fork() {
    name=$1; shift
    local options=()
    while [ "$1" != -- ]; do options+=("$1"); shift; done
    rm -f "$work/server"
    "$slipway" function serve --listen 127.0.0.1:0 --min-sandboxes 1 --max-sandboxes 1 --replicas-per-sandbox 3 --from none \
        --timeout 1h --queue-time 1h --keep-alive 1h "${options[@]}" "$name" "$image" "$@" 2>"$work/server" & server=$!
    wait_until 60 grep -q "^Serving $name at " "$work/server" || fail "no server: $(cat "$work/server")"
    url=$(sed -n "s,^Serving $name at \\(.*\\)/\$,\\1,p" "$work/server")
    wait_until 120 is ready 1 || fail "no sandbox of $name: $(f ls; cat "$work/server"; explain)"
}
# The server ends, and nothing is left.
finish() {
    kill "$server"
    wait "$server" || fail "the server ended with status $?: $(cat "$work/server")"
    server=''
    [ -z "$(leftovers)" ] || fail "left over: $(leftovers)"
}

fork z --zygote --ready-timeout 1m -- sh -c "$zygote"
[ "$(status "$url/first" --data x)" = 200 ] || fail "the first request: $(cat "$work/body" "$work/server"; explain)"
made=$(sed -n '1s/ .*//p' "$work/body")
for n in 1 2 3; do
    [ "$(printf 'a\nb' | curl -s --data-binary @- "$url/p$n")" = "$(printf '%s POST /p%s\na\nb' "$made" "$n")" ] ||
        fail "fork $n: $(curl -s "$url/again"; cat "$work/server")"
done
is zygote yes && is forked 4 || fail "forks: $(f ls --json; cat "$work/server")"
ok "invocations are forks of a zygote"

f load "$url/meet" --bursts 3 --timeout 1h --json >"$work/load" || fail "load: $(cat "$work/load" "$work/server")"
python3 - "$work/load" <<'END' || fail "a burst of forks: $(cat "$work/load")"
import json, sys
one, = json.load(open(sys.argv[1]))
assert (one["answered"], one["replicas"], one["sandboxes"]) == (3, 3, 1)
END
[ "$(status "$url/fail")" = 502 ] && grep -q 'its last words' "$work/server" || fail "a fork that fails: $(cat "$work/body")"
[ "$(status "$url/leave")" = 200 ] || fail "a fork that leaves a process: $(cat "$work/body")"
none_left() { status "$url/count" >/dev/null; [ "$(head -n 1 "$work/body")" = 0 ]; }
wait_until 60 none_left || fail "a process of a fork is left: $(cat "$work/body")"
finish
ok "forks run at once, fail by themselves, and leave no process"

fork z --zygote --ready-timeout 1m -- sh -c 'cat <&3 | grep PATH_INFO; echo "$PATH_INFO"; cat'
[ "$(status "$url/a" --data x)" = 200 ] || fail "a program that does not stop itself: $(cat "$work/body" "$work/server")"
[ "$(cat "$work/body")" = "$(printf 'PATH_INFO=/a\n/a\nx')" ] || fail "its answer: $(cat "$work/body")"
is forked 0 || fail "a fork of a program that has ended: $(f ls --json)"
f ls | grep -q 'zygote: no: it ended with status 0' || fail "what ls says: $(f ls)"
[ "$(grep -c 'zygote: no' "$work/server")" = 1 ] || fail "the server's log: $(cat "$work/server")"
finish
ok "a program that cannot be forked is started anew"
