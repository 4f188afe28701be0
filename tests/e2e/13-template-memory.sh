#!/usr/bin/env bash
# Templates with room for more memory and with memory of containers: forks and pods are given memory and give it back, and
# nobody else's bytes change. In a network namespace of the test's own.
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
# shellcheck source=tests/e2e/templates.sh
. "$here/templates.sh"
need_network_node "$@"
need_native
start_keeper
start_daemon

# A template with room for more memory, nothing of which is plugged. Each fork has the room, with memory of its own in it.
room=(--network none --memory 128M --max-memory 384M)
timeout 300 "$slipway" template create roomy "${room[@]}" >/dev/null || fail "template create --max-memory: $(explain)"
"$slipway" template ls | grep -qE '^roomy +128 of 384 MiB ' || fail "templates: $("$slipway" template ls)"
says 'room for more memory (--max-memory): 256 MiB, and 0 MiB is asked for' run --rm --network none --memory 128M --from roomy "$image" -- true
says 'room for more memory (--max-memory): 256 MiB, and 128 MiB is asked for' run --rm --network none --memory 128M --max-memory 256M --from roomy "$image" -- true
for name in grows stays; do
    timeout 120 "$slipway" run --detach --name "$name" "${room[@]}" --from roomy "$image" -- sleep 100000 >/dev/null || fail "run $name: $(explain)"
done
# has_mib SANDBOX MIB: the record and the guest say that it has so much, of which the guest's kernel takes a part.
has_mib() {
    local total
    "$slipway" inspect "$1" | python3 -c 'import json, sys
has = json.load(sys.stdin)[0]["memory_bytes"] >> 20
assert has == int(sys.argv[1]), has' "$2" || fail "the record of $1 has not $2 MiB: $(explain)"
    total=$(in_sandbox "$1" sed -n 's/^MemTotal: *\([0-9]*\) kB/\1/p' /proc/meminfo)
    { [ "$((total >> 10))" -le "$2" ] && [ "$((total >> 10))" -gt "$(($2 - 100))" ]; } || fail "the guest of $1 has $total KiB of $2 MiB"
}
give() { timeout 300 "$slipway" update "$1" --memory "$2M" >/dev/null || fail "update $1 to $2 MiB: $(explain)"; has_mib "$1" "$2"; }
fill() { in_sandbox grows dd if=/dev/zero of=/dev/null bs=150M count=1 2>/dev/null; }
sum() { in_sandbox "$1" sha256sum /dev/shm/x; }
has_mib grows 128
has_mib stays 128
give stays 256
in_sandbox stays sh -c 'head -c 32M /dev/urandom >/dev/shm/x' || fail "32 MiB of 256: $(explain)"
kept=$(sum stays) || fail "sum: $(explain)"
fill && fail "150 MiB of 128"
for _ in 1 2; do
    before=$(held grows)
    give grows 384
    fill || fail "a program cannot use the memory that came: $(explain)"
    full=$(held grows)
    [ "$full" -gt $((before + 60)) ] || fail "the VMM holds $full MiB with 150 MiB touched, $before before"
    end_daemon KILL
    start_daemon
    wait_until 60 is_state grows running || fail "after SIGKILL: $("$slipway" ps; explain)"
    give grows 128
    [ "$(held grows)" -lt $((full - 60)) ] || fail "the VMM holds $(held grows) MiB, $full before"
    [ "$(sum stays)" = "$kept" ] || fail "the memory of another fork has changed: $(explain)"
done
has_mib stays 256
ok "forks of a template with room are given memory and give it back, the others' untouched"

# Plugged memory is part of a live fork, and of a sandbox that comes back from a file.
timeout 300 "$slipway" fork stays --name twin >/dev/null || fail "fork: $(explain)"
has_mib twin 256
[ "$(sum twin)" = "$kept" ] || fail "the plugged memory of a live fork differs: $(explain)"
in_sandbox twin rm /dev/shm/x || fail "rm: $(explain)"
give twin 128
give twin 384
timeout 300 "$slipway" pause --to-file stays >/dev/null || fail "pause: $(explain)"
timeout 300 "$slipway" resume stays >/dev/null 2>&1 || fail "resume: $(explain)"
has_mib stays 256
[ "$(sum stays)" = "$kept" ] || fail "the plugged memory of a sandbox that came back differs: $(explain)"
in_sandbox stays rm /dev/shm/x || fail "rm: $(explain)"
give stays 128
ok "a live fork, and a sandbox that came back from a file, have what was plugged, and give it back"

# A pod that is a fork grows for a container with a limit, and shrinks after it.
timeout 120 "$slipway" pod create roomy-pod "${room[@]}" --from roomy >/dev/null || fail "pod create: $(explain)"
timeout 300 "$slipway" run --detach --pod roomy-pod --name one --memory 200M "$image" -- sleep 100000 >/dev/null || fail "pod run: $(explain)"
pod_has() { "$slipway" inspect roomy-pod | python3 -c 'import json, sys
sys.exit(json.load(sys.stdin)[0]["memory_bytes"] >> 20 != int(sys.argv[1]))' "$1"; }
pod_has 328 || fail "the pod has not 328 MiB: $(explain)"
timeout 300 "$slipway" exec roomy-pod/one dd if=/dev/zero of=/dev/null bs=150M count=1 2>/dev/null || fail "150 of 200 MiB: $(explain)"
"$slipway" rm --force roomy-pod/one >/dev/null || fail "rm: $(explain)"
wait_until 60 pod_has 128 || fail "the pod has not 128 MiB: $(explain)"
"$slipway" rm --force --all >/dev/null || fail "rm: $(explain)"
"$slipway" template rm roomy >/dev/null || fail "template rm: $(explain)"
for name in $("$slipway" snapshot ls --json | python3 -c 'import json, sys
for one in json.load(sys.stdin): print(one["name"])'); do
    "$slipway" snapshot rm "$name" >/dev/null || fail "snapshot rm: $(explain)"
done
ok "a pod that is a fork with room grows and shrinks with its containers"

mkdir "$work/shared" && head -c 8000000 /dev/urandom | tee "$work/shared/from" >"$work/shared/to" || fail "no directory to share"
# A template whose forks are pods with memory of containers. Each fork has the regions, with memory of its own in them.
regions=(--network none --memory 192M --bind-memory 100M)
timeout 300 "$slipway" template create bound "${regions[@]}" >/dev/null || fail "template create --bind-memory: $(explain)"
"$slipway" template ls | grep -qE '^bound +192 \+ 8 x 124 MiB ' || fail "templates: $("$slipway" template ls)"
says '(--bind-memory): up to 124 MiB, and none is asked for' run --rm --network none --memory 192M --from bound "$image" -- true
says '(--bind-memory): up to 124 MiB, and up to 252 MiB is asked for' pod create --network none --memory 192M --bind-memory 200M --from bound other
fills='import time
x = bytearray(b"\1") * (64 << 20)
open("/filled", "w").write("y")
while True:
    time.sleep(0.2)
    if any(one != 1 for one in x[::4096]): raise SystemExit(9)'
filled() { in_sandbox "$1" test -s /filled; }
# grants POD MIB: the record says that its containers have so much memory of their own.
grants() { [ "$(of_record "$1" 'sum(one["bound"]["granted_bytes"]) >> 20')" = "$2" ]; }
holds_less() { [ "$(held "$1")" -lt "$2" ]; }
# begin_filling POD/CONTAINER: starts a container with a limit of 90 MiB, which fills 64 MiB and looks at them again and again.
begin_filling() {
    timeout 300 "$slipway" run --detach --pod "${1%/*}" --name "${1#*/}" --memory 90M "$image" -- python3 -c "$fills" >/dev/null || fail "$1: $(explain)"
    wait_until 60 filled "$1" || fail "$1 fills no 64 MiB: $(explain)"
}
for pod in p q; do
    timeout 120 "$slipway" pod create "${regions[@]}" --from bound "$pod" >/dev/null || fail "pod create $pod: $(explain)"
    [ "$(of_record "$pod" 'one["template"]')" = bound ] || fail "$pod is no fork: $("$slipway" inspect "$pod")"
    grants "$pod" 0 || fail "a fork begins with memory for containers: $("$slipway" inspect "$pod")"
    begin_filling "$pod/a"
    begin_filling "$pod/b"
    grants "$pod" 188 || fail "two containers of $pod: $("$slipway" inspect "$pod") $(explain)"
    for node in 1 2; do
        used=$(in_sandbox "$pod/b" sed -n 's/.*MemUsed: *\([0-9]*\) kB/\1/p' "/sys/devices/system/node/node$node/meminfo")
        [ "$used" -gt $((60 << 10)) ] || fail "node $node of $pod has $used KiB of its container's 64 MiB"
    done
done
full=$(held p)
"$slipway" rm --force p/a >/dev/null || fail "rm: $(explain)"
wait_until 60 grants p 94 || fail "the memory of a container that ended stays: $("$slipway" inspect p) $(explain)"
wait_until 60 holds_less p $((full - 50)) || fail "the VMM holds $(held p) MiB, $full before"
end_daemon KILL
start_daemon
for pod in p q; do wait_until 60 is_state $pod running || fail "after SIGKILL: $("$slipway" ps; explain)"; done
grants p 94 && grants q 188 || fail "after SIGKILL: $("$slipway" inspect p q)"
begin_filling p/c
grants p 188 || fail "a region once more: $("$slipway" inspect p) $(explain)"
# The server of the directory has the rest of the template copied into the fork's memory.
timeout 120 "$slipway" run --rm --pod p --memory 32M -v "$work/shared:/data" "$image" -- cmp /data/from /data/to ||
    fail "a directory of the host beside memory of containers: $(explain)"
"$slipway" rm --force q/a >/dev/null || fail "rm by the next daemon: $(explain)"
wait_until 60 grants q 94 && wait_until 60 grants p 188 || fail "memory stays: $("$slipway" inspect p q) $(explain)"
for name in p/b p/c q/b; do in_sandbox "$name" true || fail "$name has lost bytes: $("$slipway" ps; explain)"; done
"$slipway" rm --force --all >/dev/null || fail "rm: $(explain)"
"$slipway" template rm bound >/dev/null || fail "template rm: $(explain)"
ok "pods that are forks have memory of containers, which comes and goes, also after the daemon was killed"
