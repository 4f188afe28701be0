#!/usr/bin/env bash
# A running sandbox is given memory and gives it back: its container can use it, the control group and the record say
# so, also after the daemon was killed, and the host has back what went. What is in use stays, and one line says so. A pod
# grows and shrinks with its containers' limits, as they begin, change and end. With QEMU, room for memory is refused in one
# line.
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
need_node
start_keeper

# refused PATTERN WORDS…: a command that fails with one line, which matches.
refused() {
    local said
    said=$(timeout 300 "$slipway" "${@:2}" 2>&1 </dev/null) && fail "no error: slipway ${*:2}: $said"
    [ "$(wc -l <<<"$said")" = 1 ] || fail "more than a line: slipway ${*:2}: $said"
    grep -qE "$1" <<<"$said" || fail "slipway ${*:2} says: $said"
    ok "${*:2} -> $said"
}

if [ "${SLIPWAY_VMM:-}" != native ]; then
    export SLIPWAY_VMM=qemu
    start_daemon
    refused 'its VMM is QEMU' run --rm --memory 128M --max-memory 256M "$image" -- true
    refused 'less than the 256 MiB' run --rm --memory 256M --max-memory 128M "$image" -- true
    [ -z "$("$slipway" ps --quiet)" ] || fail "a sandbox is left: $("$slipway" ps)"
    skip "slipway-vmm on KVM (SLIPWAY_VMM=native): lab/kvm-host --test $test_name SLIPWAY"
fi
start_daemon

field() { "$slipway" inspect web | python3 -c 'import json,sys
one = json.load(sys.stdin)[0]
for part in sys.argv[1].split("."): one = one[part]
print(one)' "$1"; }
# The limit of the VMM's memory beside what the VMM needs itself, in MiB.
limit() {
    local group bytes
    group=$(field cgroup.path)
    bytes=$(cat "/sys/fs/cgroup$group/memory.max" "/sys/fs/cgroup/memory$group/memory.limit_in_bytes" 2>/dev/null)
    [ -z "$bytes" ] || echo $(((bytes - $(field memory.overhead_bytes)) >> 20))
}
has() {
    local limit
    [ "$(($(field memory_bytes) >> 20))" = "$1" ] || fail "the record has $(field memory_bytes) bytes, not $1 MiB"
    limit=$(limit)
    [ -z "$limit" ] || [ "$limit" = "$1" ] || fail "$1 MiB with the limit $limit"
}
in_guest() { timeout 300 "$slipway" exec web sed -n 's/^MemTotal: *\([0-9]*\) kB/\1/p' /proc/meminfo; }
# The memory of the VMM's file that is in use, MiB.
held() { echo $(($("$slipway" stats --json web | python3 -c 'import json,sys
print(json.load(sys.stdin)[0]["vmm_resident_bytes"])') >> 20)); }
fill() { timeout 300 "$slipway" exec web dd if=/dev/zero of=/dev/null bs=150M count=1 2>/dev/null; }

"$slipway" run -d --name web --network none --memory 128M --max-memory 300M "$image" -- sleep 100000 >/dev/null \
    || fail "run: $(explain)"
has 128
before=$(in_guest)
fill && fail "150 MiB of 128"
timeout 300 "$slipway" update web --memory 384M >/dev/null || fail "update to 384M"
has 384
[ "$(($(in_guest) - before))" = $((256 << 10)) ] || fail "the guest has $(in_guest) KiB, $before before"
fill || fail "a program cannot use the memory that came"
full=$(held)
ok "a sandbox of 128 MiB was given 256 more, and a program used them"

end_daemon KILL
start_daemon
has 384
timeout 300 "$slipway" update web --memory 128M >/dev/null || fail "update to 128M"
has 128
[ "$(in_guest)" = "$before" ] || fail "the guest has $(in_guest) KiB, $before before"
[ "$(held)" -lt $((full - 100)) ] || fail "the VMM holds $(held) MiB, $full before"
ok "the next daemon took all of it back: the VMM holds $(held) MiB, and $full before"

timeout 300 "$slipway" update web --memory 384M >/dev/null || fail "update to 384M again"
"$slipway" exec web sh -c 'dd if=/dev/zero bs=150M count=1 2>/dev/null |
    { head -c 1 >/dev/null; sh -c "echo \$\$ >/tmp/holds; exec sleep 1000"; }' 2>/dev/null &
holder=$!
until timeout 300 "$slipway" exec web test -s /tmp/holds; do sleep 0.2; done
refused 'web has [0-9]* MiB of memory now: its programs use' update web --memory 128M
left=$(($(field memory_bytes) >> 20))
{ [ "$left" -gt 128 ] && [ "$left" -lt 384 ]; } || fail "$left MiB are left"
has "$left"
timeout 300 "$slipway" exec web sh -c 'kill $(cat /tmp/holds)'
wait "$holder"
timeout 300 "$slipway" update web --memory 128M >/dev/null || fail "update to 128M again"
has 128
ok "what a program used stayed until it ended: $left of 384 MiB"

"$slipway" rm --force web >/dev/null || fail "rm"
"$slipway" run -d --name web --network none --memory 128M --max-memory 256M "$image" -- sleep 100000 >/dev/null || fail "run"
refused 'too little for sandbox web: the 128 MiB' update web --memory 1M
refused 'too much for sandbox web: at most 256 MiB' update web --memory 1G
refused 'more than this host has' run --memory 128M --max-memory 900T "$image" -- true
refused 'no template or snapshot' run --from nothing --memory 128M --max-memory 256M "$image" -- true
has 128
"$slipway" rm --force web >/dev/null || fail "rm"

# A pod has twice its memory as room. It grows for the limits of its containers and 128 MiB of its guest's kernel, and shrinks
# again after them.
"$slipway" pod create web --network none --memory 128M >/dev/null || fail "pod create: $(explain)"
"$slipway" run -d --pod web --name one --memory 32M "$image" -- sleep 100000 >/dev/null || fail "run in the pod: $(explain)"
in_one() { timeout 300 "$slipway" exec web/one "$@"; }
has 160
timeout 300 "$slipway" update web/one --memory 200M >/dev/null || fail "update of a container to 200M: $(explain)"
has 256
[ "$(in_one cat /sys/fs/cgroup/memory.max)" = $((200 << 20)) ] || fail "the container's limit is $(in_one cat /sys/fs/cgroup/memory.max)"
in_one dd if=/dev/zero of=/dev/null bs=150M count=1 2>/dev/null || fail "the container cannot use 150 of 200 MiB"
refused '1024 MiB is more than the 256 MiB' update web/one --memory 1G
timeout 300 "$slipway" update web/one --memory 48M >/dev/null 2>"$work/said" || fail "update of a container to 48M: $(explain)"
# The guest may count memory as used for a moment after the container has set it free.
grep -qxE 'slipway: web gave back [0-9]+ MiB of memory|slipway: more than the limits need stays for now: sandbox web has .*' "$work/said" ||
    fail "the update does not say what went back: $(cat "$work/said")"
[ "$(in_one cat /sys/fs/cgroup/memory.max)" = $((48 << 20)) ] || fail "the container's limit is $(in_one cat /sys/fs/cgroup/memory.max)"
shrunk() { [ "$(($(field memory_bytes) >> 20))" = "$1" ]; }
shrinks() {
    wait_until 60 shrunk "$1" || fail "the pod has $(field memory_bytes) bytes, not $1 MiB: $(explain)"
    has "$1"
}
shrinks 176
ok "a pod grew for the limit of its container, which used the memory, and shrank after it"

# run_two COMMAND…: a second container with a limit of 60 MiB.
run_two() { timeout 300 "$slipway" run --pod web --name two --memory 60M "$@" >/dev/null 2>"$work/said"; }
run_two -d "$image" -- sleep 100000 || fail "a second container: $(cat "$work/said"; explain)"
has 236
timeout 300 "$slipway" exec web/two dd if=/dev/zero of=/dev/null bs=40M count=1 2>/dev/null || fail "it cannot use 40 of 60 MiB"
"$slipway" rm --force web/two >/dev/null || fail "rm of the second container: $(explain)"
shrinks 176
run_two --rm "$image" -- true || fail "a container that ends: $(cat "$work/said"; explain)"
shrinks 176
# The next daemon has memory go back that the one before has not had the time for.
run_two -d "$image" -- sleep 100000 || fail "a second container: $(cat "$work/said"; explain)"
has 236
"$slipway" stop --time 0 web/two >/dev/null || fail "stop: $(explain)"
end_daemon KILL
start_daemon
shrinks 176
[ "$(in_one cat /sys/fs/cgroup/memory.max)" = $((48 << 20)) ] || fail "the neighbour's limit is $(in_one cat /sys/fs/cgroup/memory.max)"
"$slipway" rm --force web/one >/dev/null || fail "rm of the first container: $(explain)"
shrinks 128
"$slipway" rm --force web >/dev/null || fail "rm of the pod"
ok "memory came before a container began and went back after its end, also when the daemon was killed"
[ -z "$(leftovers)" ] || fail "left: $(leftovers)"
ok "nothing is left"
