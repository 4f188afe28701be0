#!/usr/bin/env bash
# Each container of a pod has memory of its own: it comes before the container begins, holds what the container's processes
# use, and goes back to the host whole when the container has ended, while a neighbour goes on. The control group and the
# record say so, also after the daemon was killed. A function's replicas have such memory, too, in a sandbox that booted and in
# one that is a fork. With QEMU such a pod is refused in one line.
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
need_node
start_keeper

s() { timeout 300 "$slipway" "$@"; }
# refused PATTERN WORDS…: a command that fails with one line, which matches.
refused() {
    local said
    said=$(s "${@:2}" 2>&1 </dev/null) && fail "no error: slipway ${*:2}: $said"
    [ "$(wc -l <<<"$said")" = 1 ] || fail "more than a line: slipway ${*:2}: $said"
    grep -qE "$1" <<<"$said" || fail "slipway ${*:2} says: $said"
    ok "${*:2} -> $said"
}

if [ "${SLIPWAY_VMM:-}" != native ]; then
    export SLIPWAY_VMM=qemu
    start_daemon
    refused 'bind-memory needs slipway-vmm.*its VMM is QEMU' pod create web --network none --memory 128M --bind-memory 128M
    [ -z "$(s ps --quiet)" ] || s rm --force --all >/dev/null || fail "a pod is left: $(s ps)"
    skip "slipway-vmm on KVM (SLIPWAY_VMM=native): lab/kvm-host --test $test_name SLIPWAY"
fi
start_daemon

pod=web
server=''
end_all() { [ -z "$server" ] || kill -9 "$server" 2>/dev/null; }
# record EXPRESSION: a value of the record of the pod $pod, `one`, in Python.
record() { s inspect "$pod" | python3 -c 'import json,sys
one = json.load(sys.stdin)[0]
print(eval(sys.argv[1]))' "$1"; }
bound() { echo $(($(record 'sum(one["bound"]["granted_bytes"])') >> 20)); }
has() { [ "$(bound)" = "$1" ] && limits "$1"; }
# Whether the VMM's control group has room for so many MiB beside the pod's own 256 and what the VMM needs.
limits() {
    local group bytes
    group=$(record 'one["cgroup"]["path"]')
    bytes=$(cat "/sys/fs/cgroup$group/memory.max" "/sys/fs/cgroup/memory$group/memory.limit_in_bytes" 2>/dev/null)
    [ -z "$bytes" ] || [ $(((bytes - $(record 'one["memory"]["overhead_bytes"]')) >> 20)) = $((256 + $1)) ]
}
# The memory of the VMM's file that is in use, MiB.
held() { echo $(($(s stats --json web | python3 -c 'import json,sys
print(json.load(sys.stdin)[0]["vmm_resident_bytes"])') >> 20)); }
holds_less() { [ "$(held)" -lt "$1" ]; }
# The MiB that the guest uses of a NUMA node.
used() { s exec web/idle sh -c "sed -n 's/.*MemUsed: *\([0-9]*\) kB/\1/p' /sys/devices/system/node/node$1/meminfo"; }
fills='x = bytearray(b"\1") * (96 << 20)
open("/filled", "w").write("y")
import time
while True:
    time.sleep(0.2)
    if any(one != 1 for one in x[::4096]): raise SystemExit(9)'
filled() { s exec "web/$1" test -s /filled; }

s pod create web --network none --memory 256M --bind-memory 160M >/dev/null || fail "pod create: $(explain)"
s run -d --pod web --name idle "$image" -- sleep 100000 >/dev/null || fail "idle: $(explain)"
has 0 || fail "a pod begins with $(bound) MiB for containers"
for name in a b; do
    s run -d --pod web --name $name --memory 128M "$image" -- python3 -c "$fills" >/dev/null || fail "$name: $(explain)"
    wait_until 60 filled $name || fail "$name fills no 96 MiB: $(explain)"
done
has 264 || fail "two containers have $(bound) MiB: $(explain)"
for node in 1 2; do
    [ "$(used $node)" -gt $((90 << 10)) ] || fail "node $node has $(used $node) KiB of its container's 96 MiB"
done
[ "$(s exec web/b cat /sys/fs/cgroup/memory.max)" = $((128 << 20)) ] || fail "b has another limit"
[ "$(s exec web/b sh -c 'echo piped | cat')" = piped ] || fail "a pipe in b: $(explain)"
ok "two containers have 96 MiB each in nodes of their own"

full=$(held)
s rm --force web/a >/dev/null || fail "rm: $(explain)"
wait_until 60 has 132 || fail "after a's end its memory stays: $(bound) MiB, $(explain)"
wait_until 60 holds_less $((full - 90)) || fail "the VMM holds $(held) MiB, $full before"
ok "the memory of a container that ended went back: the VMM holds $(held) MiB, and $full before"

end_daemon KILL
start_daemon
has 132 || fail "after a kill: $(bound) MiB"
s update web/b --memory 150M >/dev/null || fail "update: $(explain)"
has 154 || fail "for 150 MiB b has $(bound)"
refused 'more than the [0-9]* MiB that a container of the pod can have' update web/b --memory 1G
refused 'uses [0-9]* KiB of memory, which is more than' update web/b --memory 64M
has 154 || fail "after a limit below what b uses: $(bound) MiB, $(explain)"
s update web/b --memory 128M >/dev/null || fail "update down: $(explain)"
wait_until 60 has 132 || fail "for 128 MiB b has $(bound)"
for round in 1 2 3; do
    s run --pod web --rm --memory 64M "$image" -- sh -c 'dd if=/dev/zero of=/dev/null bs=32M count=2 2>/dev/null' || fail "round $round: $(explain)"
    wait_until 60 has 132 || fail "round $round leaves $(bound) MiB: $(explain)"
done
s run --pod web --rm --memory 32M "$image" -- python3 -c 'x = bytearray(64 << 20)' >/dev/null 2>&1
[ $? = 137 ] || fail "a container exceeds its limit"
s exec web/b true || fail "b is gone: $(s ps; explain)"
ok "containers come and go, in the same region again, and their neighbour's bytes stay"

refused 'change the containers. limits' update web --memory 256M
for number in 2 3 4 5 6 7 8; do
    s run -d --pod web --name "n$number" --memory 32M "$image" -- sleep 100000 >/dev/null || fail "n$number: $(explain)"
done
out=$(s run --pod web --rm --memory 32M "$image" -- true 2>&1) && fail "a ninth container has memory of its own"
grep -q 'has 8 containers with memory of their own' <<<"$out" || fail "the ninth: $out"
s stop --time 1 web >/dev/null && s rm web >/dev/null || fail "rm of the pod: $(explain)"
[ -z "$(leftovers)" ] || fail "left: $(leftovers)"
ok "a ninth container is refused in a line, and nothing is left"

# serve NAME: serves a function with a sandbox, the pod NAME-1. An invocation goes on until its replica has the file /go.
serve() {
    pod=$1-1
    "$slipway" function serve --listen 127.0.0.1:0 --network none --memory 256M --bind-memory 128M --min-sandboxes 1 \
        --max-sandboxes 1 --keep-alive 20s --timeout 1h --queue-time 1h "$1" "$image" -- sh -c "$waits" \
        2>"$work/server" & server=$!
    wait_until 60 grep -q "^Serving $1 at " "$work/server" || fail "no server: $(cat "$work/server")"
    wait_until 60 is_state "$pod" running || fail "no sandbox: $(cat "$work/server"; explain)"
}
waits='until [ -e /go ]; do sleep 0.1; done; rm /go; cat /sys/fs/cgroup/memory.max'
# let_go: lets the invocation of each replica end. False if one of them has not begun.
let_go() {
    local name names
    names=$(record '" ".join(each["name"] for each in one["added"])') && [ -n "$names" ] || return 1
    for name in $names; do s exec "$pod/$name" touch /go || return 1; done
}
# invoke NAME: one invocation, during which its replica has memory of its own: a replica that is idle loses it after a while.
invoke() {
    local asked
    s function invoke "$1" >"$work/answer" & asked=$!
    wait_until 120 has 132 || fail "a replica of $1 has $(bound) MiB: $(s function ls --json; cat "$work/server"; explain)"
    wait_until 60 let_go || fail "no replica of $1: $(s inspect "$pod"; explain)"
    wait "$asked" && [ "$(cat "$work/answer")" = $((128 << 20)) ] || fail "invoke $1: $(cat "$work/answer" "$work/server"; explain)"
}
end_server() {
    kill "$server"
    wait "$server" || fail "the server ended with status $?: $(cat "$work/server")"
    server=''
}
serve f
invoke f
s function load "$(sed -n 's,^Serving f at \(.*\)$,\1,p' "$work/server")" --bursts 2 --timeout 1h >"$work/load" & load=$!
wait_until 120 has 264 || fail "two replicas have $(bound) MiB: $(s function ls --json; explain)"
wait_until 60 let_go || fail "two invocations do not end: $(s inspect "$pod"; explain)"
wait "$load" || fail "load: $(cat "$work/load" "$work/server")"
wait_until 120 has 0 || fail "idle replicas leave $(bound) MiB: $(s function ls --json; cat "$work/server"; explain)"
invoke f
ok "the memory of a function's replicas comes and goes with them"
# Its first sandbox had the node make a template with the same regions.
made() { s template ls --json | grep -q '"bound_memory_bytes": [1-9]'; }
wait_until 120 made || fail "no template of the function's sandboxes: $(s template ls; explain)"
end_server
serve g
[[ "$(record 'one["template"]')" = auto-* ]] || fail "the sandbox of g is no fork: $(s inspect g-1)"
invoke g
wait_until 120 has 0 || fail "an idle replica leaves $(bound) MiB in a fork: $(cat "$work/server"; explain)"
end_server
for name in $(s template ls --json | python3 -c 'import json, sys
for one in json.load(sys.stdin): print(one["name"])'); do
    s template rm "$name" >/dev/null || fail "template rm: $(explain)"
done
ok "a function's sandbox with memory of replicas is a fork"
refused 'at most 8' function serve --bind-memory 128M --replicas-per-sandbox 9 h "$image" -- true
[ -z "$(leftovers)" ] || fail "left: $(leftovers)"
