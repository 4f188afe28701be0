#!/usr/bin/env bash
# Templates: a machine that has booted is saved, and sandboxes and pods begin with it. Each has its disks, its
# addresses, its name and its random numbers. With QEMU a template is refused in one line. In a network namespace
# of the test's own.
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
need_network_node "$@"
start_keeper

# refused COMMAND... : the line of an error of slipway, which ends with a status other than 0.
refused() {
    local said
    said=$(timeout 120 "$slipway" "$@" 2>&1 </dev/null) && fail "no error: slipway $*: $said"
    [ "$(wc -l <<<"$said")" = 1 ] || fail "more than a line: slipway $*: $said"
    echo "$said"
}
# says TEXT COMMAND...: the error has this text.
says() {
    local said
    said=$(refused "${@:2}") || { echo "$said"; exit 1; }
    grep -qF -- "$1" <<<"$said" || fail "slipway ${*:2}: $said"
}

if [ "${SLIPWAY_VMM:-}" != native ]; then
    export SLIPWAY_VMM=qemu
    start_daemon
    says "its VMM is QEMU" template create one --network none
    says 'there is no template or snapshot "one"' run --rm --network none --from one "$image" -- true
    [ -z "$("$slipway" ps --quiet)" ] || fail "a sandbox is left: $("$slipway" ps)"
    ok "with QEMU a template is refused, and nothing is left"
    skip "slipway-vmm on KVM (SLIPWAY_VMM=native): lab/kvm-host --test $test_name SLIPWAY"
fi
start_daemon

templates() { "$slipway" template ls --json | python3 -c 'import json,sys
for one in json.load(sys.stdin): print(one["name"], one["memory_bytes"] >> 20, one["cpus"], one["nic"] or "none")'; }
# times TEXT FILE...: how often the files have this text in them. Holes have none.
times() { python3 - "$@" <<'END'
import os, sys
text, count = sys.argv[1].encode(), 0
for path in sys.argv[2:]:
    file, at = os.open(path, os.O_RDONLY), 0
    while True:
        try: at = os.lseek(file, at, os.SEEK_DATA)
        except OSError: break
        hole, kept = os.lseek(file, at, os.SEEK_HOLE), b""
        while at < hole:
            data = os.pread(file, min(1 << 20, hole - at), at)
            at, data = at + len(data), kept + data
            count += data.count(text)
            kept = data[len(data) - len(text) + 1:] if len(data) >= len(text) else data
print(count)
END
}
# The memory of a sandbox is given to others, and so to the one of which the template is made.
secret=$(head -c 24 /dev/urandom | od -An -tx1 | tr -d ' \n')
# shellcheck disable=SC2016 # for the shell of the sandbox
timeout 120 "$slipway" run --rm --name spy --env "SECRET=$secret" "$image" -- sh -c 'yes "$SECRET" | head -n 200000 >/dev/shm/x
    cp /dev/shm/x /x && sync && [ "$(tail -n 1 /x)" = "$SECRET" ]' || fail "a sandbox with a secret: $(explain)"

timeout 300 "$slipway" template create web >/dev/null || fail "template create: $(explain)"
[ "$(templates)" = "web 256 1 virtio" ] || fail "templates: $(templates)"
[ -z "$("$slipway" ps --quiet)" ] || fail "a sandbox is left: $("$slipway" ps)"
ok "a machine is saved as a template, and ends: $("$slipway" template ls | tail -n 1)"

of_web=("$SLIPWAY_DATA_DIR"/templates/web/*)
[ "$(times 'Linux version ' "${of_web[@]}")" -gt 0 ] || fail "no text of the kernel is found: nothing is searched"
[ "$(times "$secret" "${of_web[@]}")" = 0 ] || fail "the template has the environment of an earlier sandbox's container"
ok "no byte of an earlier sandbox's environment, memory and files is in a template"

# Its program never begins.
timeout 120 "$slipway" run --rm --from web "$image" -- /no/such/program 2>/dev/null
[ $? = 127 ] || fail "a fork without a program: $(explain)"
[ -s "$SLIPWAY_DATA_DIR/templates/web/working-set" ] || fail "the first fork's working set is not known before its program begins: $(explain)"
ok "what is copied ahead for later forks is what the first one touched before its program began"

timeout 120 "$slipway" run --rm --from web "$image" -- sh -c 'exit 3'
[ $? = 3 ] || fail "exit 3 of a fork: $(explain)"
said=$(timeout 120 "$slipway" run --rm --from web "$image" -- sh -c 'head -c 1000000 /usr/bin/perl | sha256sum; head -c 1000000 /dev/zero | sha256sum')
[ "$(sed -n 2p <<<"$said")" = "$(head -c 1000000 /dev/zero | sha256sum)" ] || fail "a fork says: $said $(explain)"
ok "a fork runs a container of its own image and gives its exit status"

# The time from the VMM's start to the guest's agent, by the stages of the timeline.
stages() { python3 - "$1" <<'END'
import json, sys
stages = json.load(open(sys.argv[1]))
stages = stages[0]["stages"] if isinstance(stages, list) else stages["stages"]
for one in stages: print("%s %.1f ms" % (one["name"], (one["end_ns"] - one["start_ns"]) / 1e6), end="; ")
END
}
timeout 120 "$slipway" run --rm --timeline "$work/boot.json" "$image" -- true || fail "a boot: $(explain)"
say "a boot: $(stages "$work/boot.json")"
for _ in 1 2 3; do
    timeout 120 "$slipway" run --rm --from web --timeline "$work/fork.json" "$image" -- true || fail "a fork: $(explain)"
    say "a fork: $(stages "$work/fork.json")"
done

# Each fork prints a line of its name, MAC address and random numbers.
who='read uuid </proc/sys/kernel/random/uuid; read mac </sys/class/net/eth0/address; echo "$(hostname) $uuid $mac $(head -c 16 /dev/urandom | od -An -tx1 | tr -d " ")"; exec sleep 10000'
for name in a b c; do
    timeout 120 "$slipway" run --detach --name "$name" --wait-network --from web --volume data:64M "$image" -- sh -c "$who" >/dev/null ||
        fail "run $name: $(explain)"
done
lines() { for name in a b c; do "$slipway" logs "$name"; done; }
all_speak() { [ "$(lines | wc -l)" = 3 ]; }
wait_until 60 all_speak || fail "three forks say: $(lines)"
lines=$(lines)
for field in 1 2 3 4; do
    [ "$(cut -d ' ' -f $field <<<"$lines" | sort -u | wc -l)" = 3 ] || fail "two forks agree: $lines"
done
[ "$(cut -d ' ' -f 1 <<<"$lines" | tr '\n' ' ')" = "a b c " ] || fail "names: $lines"
ok "three forks differ in name, MAC address and random numbers"

in_sandbox() { timeout 60 "$slipway" exec "$1" -- "${@:2}"; }
begin=$(date +%s)
now=$(in_sandbox a date +%s) || fail "exec: $(explain)"
[ $((begin - now)) -lt 30 ] && [ $((now - $(date +%s))) -lt 30 ] || fail "a fork's clock: $now, asked at $begin, answered by $(date +%s)"
for name in a b c; do
    in_sandbox "$name" sh -c 'head -c 33554432 /dev/urandom >/dev/shm/x && dd if=/dev/shm/x of=/dev/slipway/data bs=1M oflag=direct 2>/dev/null &&
        dd if=/dev/slipway/data bs=1M count=32 iflag=direct 2>/dev/null | cmp - /dev/shm/x' || fail "volume of $name: $(explain)"
done
in_sandbox a ping -c 2 -W 10 b >/dev/null || fail "a does not reach b: $(explain)"
in_sandbox c ping -c 2 -W 10 a >/dev/null || fail "c does not reach a: $(explain)"
ok "each fork has a volume of its own, the time, and reaches the others by name"

# The guests of two forks keep the template's MAC address, which is the same, and their ports translate it. The network gives
# out the lowest free address, so that `a` should have that very one.
for name in d e; do
    timeout 120 "$slipway" run --detach --name "$name" --wait-network --from web --mac-at-port "$image" -- sleep 10000 >/dev/null ||
        fail "run --mac-at-port $name: $(explain)"
done
macs=$(for name in d e; do in_sandbox "$name" cat /sys/class/net/eth0/address; done)
[ "$(sort -u <<<"$macs" | wc -l)" = 1 ] || fail "the MAC addresses of two guests differ: $macs"
"$slipway" port ls --json | python3 -c '
import json, sys
ports = {one["sandbox"]: one for one in json.load(sys.stdin)}
d, e, a = ports["d"], ports["e"], ports["a"]
assert d["peer_mac"] == e["peer_mac"] == sys.argv[1] and d["mac"] != e["mac"] and not a["peer_mac"], (d, e, a)
' "$(head -n 1 <<<"$macs")" || fail "ports of forks: $("$slipway" port ls --json)"
for version in 4 6; do
    in_sandbox d ping "-$version" -c 2 -W 10 e >/dev/null || fail "d does not reach e by IPv$version: $(explain)"
    in_sandbox a ping "-$version" -c 2 -W 10 d >/dev/null || fail "a does not reach d by IPv$version: $(explain)"
    in_sandbox d ping "-$version" -c 2 -W 10 a >/dev/null || fail "d does not reach a by IPv$version: $(explain)"
done
says "begins with a template" run --rm --mac-at-port "$image" -- true
"$slipway" rm --force d e >/dev/null || fail "rm: $(explain)"
ok "forks whose ports translate one MAC address reach each other and others"

vmms=$(vmm_of a),$(vmm_of b)
for signal in KILL TERM; do
    end_daemon "$signal"
    start_daemon
    wait_until 60 is_state b running || fail "after SIG$signal: $("$slipway" ps; explain)"
    [ "$vmms" = "$(vmm_of a),$(vmm_of b)" ] || fail "after SIG$signal: $("$slipway" ps; explain)"
    in_sandbox b sh -c 'cmp -n 33554432 /dev/slipway/data /dev/shm/x' || fail "after SIG$signal: $(explain)"
    in_sandbox b ping -c 2 -W 10 a >/dev/null || fail "after SIG$signal b does not reach a: $(explain)"
done
timeout 120 "$slipway" run --rm --from web "$image" -- true || fail "a fork by the next daemon: $(explain)"
ok "two daemons later the forks run, and more begin"

timeout 120 "$slipway" pod create --from web pod >/dev/null || fail "pod create: $(explain)"
[ "$(timeout 60 "$slipway" pod run pod --name x "$image" -- echo in a pod)" = "in a pod" ] || fail "pod run: $(explain)"
ok "a pod is a fork"

# A directory of the host: its server finds the guest's requests in memory that was the template's.
mkdir "$work/shared" && head -c 8000000 /dev/urandom >"$work/shared/from" || fail "no directory to share"
timeout 120 "$slipway" pod run pod --name y -v "$work/shared:/data" "$image" -- sh -c 'cp /data/from /data/to && sync' >"$work/out" 2>&1 ||
    fail "a directory of the host in a fork: $(cat "$work/out") $(explain)"
cmp "$work/shared/from" "$work/shared/to" || fail "a file that a fork wrote to the host differs"
ok "a pod that is a fork has a directory of the host"

timeout 120 "$slipway" run --rm --from web -v "$work/shared:/data" "$image" -- sh -c 'cp /data/from /data/own && sync' >"$work/out" 2>&1 ||
    fail "a directory of the host in a sandbox that is a fork: $(cat "$work/out") $(explain)"
cmp "$work/shared/from" "$work/shared/own" || fail "a file that a fork wrote to the host differs"
ok "a sandbox that is a fork has a directory of the host"

says "256 MiB, and 512 MiB" run --rm --memory 512M --from web "$image" -- true
says "none is asked for" run --rm --network none --from web "$image" -- true
says "1 of 1, and 2 of 2" run --rm --cpus 2 --from web "$image" -- true
says 'there is no template or snapshot "nothing"' run --rm --from nothing "$image" -- true
says 'web is a template, without a container' run --rm --from web
says 'there is a template or snapshot "web" already' template create web
says "no name for a template" template create ../x
says "templates of the node's own" template create auto
says "templates of the node's own" template create auto-0123456789ab
says "no template" template create none
says "name an image" run --rm --from none
ok "a sandbox that cannot be a fork of the template gets one line"

"$slipway" rm --force --all >/dev/null || fail "rm: $(explain)"
end_daemon TERM
printf X | dd of="$SLIPWAY_DATA_DIR/templates/web/memory" bs=1 seek=$((1 << 20)) conv=notrunc 2>/dev/null
start_daemon
says 'its file "memory" was changed' run --rm --from web "$image" -- true
[ "$("$slipway" template rm web)" = web ] || fail "template rm: $(explain)"
[ -z "$(templates)" ] || fail "left: $(templates)"
ok "a template with a changed byte is refused, and removed"

# An interface with an MTU of its own.
timeout 300 "$slipway" template create --mtu 1400 small >/dev/null || fail "template create --mtu: $(explain)"
says "an MTU of 1400, not virtio, 0 and 1500" run --rm --from small "$image" -- true
"$slipway" template rm small >/dev/null || fail "template rm: $(explain)"
ok "a template has the MTU that it is made with"

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
# The memory of the VMM's file that is in use, MiB.
held() { echo $(($("$slipway" stats --json "$1" | python3 -c 'import json, sys
print(json.load(sys.stdin)[0]["vmm_resident_bytes"])') >> 20)); }
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
of_record() { "$slipway" inspect "$1" | python3 -c 'import json, sys
one = json.load(sys.stdin)[0]
print(eval(sys.argv[1]))' "$2"; }
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

# Templates of the node's own: the first sandbox boots and has the template made, the next one is a fork.
began() { python3 -c 'import json, sys
stages = json.load(open(sys.argv[1]))
stages = stages[0]["stages"] if isinstance(stages, list) else stages["stages"]
print("fork" if any(one["name"] == "resume" for one in stages) else "boot")' "$1"; }
automatic() { timeout 300 "$slipway" run --rm --from auto --timeline "$work/auto.json" "$@" "$image" -- true && began "$work/auto.json"; }
has() { [ "$(templates | wc -l)" = "$1" ]; }
forks_of() { "$slipway" metrics | sed -n "s/^slipway_sandbox_forks_total{kind=\"$1\"} //p"; }
named=$(forks_of template)
[ "$(automatic)" = boot ] || fail "there is a template already: $(templates) $(explain)"
wait_until 120 has 1 || fail "no template is made: $(templates) $(explain)"
templates | grep -qx 'auto-[0-9a-f]* 256 1 virtio' || fail "templates: $(templates)"
[ "$(automatic)" = fork ] || fail "the second sandbox boots: $(templates) $(explain)"
[ "$(automatic --memory 320M --network none)" = boot ] || fail "another machine: $(templates) $(explain)"
wait_until 120 has 2 || fail "no second template is made: $(templates) $(explain)"
[ "$(automatic --memory 320M --network none)" = fork ] || fail "another machine boots again: $(templates) $(explain)"
[ -z "$("$slipway" ps --quiet)" ] || fail "a sandbox is left: $("$slipway" ps)"
ok "the node makes a template of each machine that is asked for with --from auto, and the next such sandbox is a fork"
[ "$(forks_of template) $(forks_of automatic)" = "$named 2" ] || fail "counts of forks: $("$slipway" metrics)"
ok "metrics tell forks of the node's own templates apart"

# Sandboxes that start together are forks without being told to. Of few, the first burst boots, and of more than two for
# each CPU, it waits for the template: one boot, and no kernel's stage in any of them.
burst() {
    timeout 600 "$slipway" run --rm --count "$1" --network none --timeline "$work/burst.json" "${@:2}" "$image" -- true >/dev/null 2>"$work/burst" ||
        fail "a burst of $*: $(tail -n 5 "$work/burst"; explain)"
    python3 -c 'import collections, json, sys
ways = collections.Counter("fork" if {"resume"} <= {one["name"] for one in run["stages"]} else "boot" for run in json.load(open(sys.argv[1])))
print(*(f"{way} {count}" for way, count in sorted(ways.items())))' "$work/burst.json"
}
many=$((2 * $(nproc) + 1))
began=$(burst 2 --memory 288M); [ "$began" = "boot 2" ] || fail "two sandboxes do not boot: $began: $(templates) $(explain)"
wait_until 120 has 3 || fail "no template is made of two that booted: $(templates) $(explain)"
began=$(burst 2 --memory 288M); [ "$began" = "fork 2" ] || fail "two sandboxes boot again: $began: $(templates) $(explain)"
began=$(burst "$many" --memory 304M); [ "$began" = "fork $many" ] || fail "of $many sandboxes some boot: $began: $(templates) $(explain)"
has 4 || fail "no template of a burst, or several: $(templates)"
began=$(burst 2 --memory 272M --max-memory 512M); [ "$began" = "boot 2" ] || fail "two sandboxes with room do not boot: $began: $(templates) $(explain)"
wait_until 120 has 5 || fail "no template with room is made: $(templates) $(explain)"
began=$(burst 2 --memory 272M --max-memory 512M); [ "$began" = "fork 2" ] || fail "two sandboxes with room boot again: $began: $(templates) $(explain)"
# A pod with memory of containers, too. Another limit with the same regions is the same machine.
timeout 300 "$slipway" pod create --from auto "${regions[@]}" first >/dev/null || fail "pod create: $(explain)"
wait_until 120 has 6 || fail "no template with memory of containers is made: $(templates) $(explain)"
timeout 300 "$slipway" pod create --from auto --network none --memory 192M --bind-memory 120M second >/dev/null || fail "pod create: $(explain)"
[[ "$(of_record first 'one["template"]') $(of_record second 'one["template"]')" =~ ^None\ auto- ]] || fail "pods with --from auto: $("$slipway" inspect first second)"
"$slipway" rm --force first second >/dev/null || fail "rm: $(explain)"
for made in $(templates | awk '$2 == 192 || $2 == 272 || $2 == 288 || $2 == 304 { print $1 }'); do
    "$slipway" template rm "$made" >/dev/null || fail "template rm: $(explain)"
done
[ -z "$("$slipway" ps --quiet)" ] || fail "a sandbox is left: $("$slipway" ps)"
ok "sandboxes that start together are forks; $many of them wait for their template"

# Two interfaces of a network namespace, whose other ends are down. The namespace's name is the machine's.
two=slipway-e2e-$$-two
ip netns add "$two" || fail "ip netns add"
for name in eth0 net1; do
    ip -n "$two" link add "$name" type veth peer name "far-$name" && ip -n "$two" link set "$name" up
done
own=$(templates | sed -n '1s/ .*//p')
named=$(refused run --rm --network-namespace "/run/netns/$two" --from "$own" "$image" -- true)
starts=$(for _ in 1 2; do automatic --network-namespace "/run/netns/$two"; done | xargs)
ip netns delete "$two"
grep -q "a sandbox with several network interfaces boots" <<<"$named" || fail "a template for two interfaces: $named"
[ "$starts" = "boot boot" ] || fail "two interfaces and --from auto: $starts $(explain)"
ok "a sandbox with several interfaces boots with --from auto, and a named template is refused"

# A damaged template is no error: the next sandbox boots, and the node makes the template again.
end_daemon TERM
for damaged in "$SLIPWAY_DATA_DIR"/templates/auto-*; do
    printf X | dd of="$damaged/memory" bs=1 seek=$((1 << 20)) conv=notrunc 2>/dev/null
done
start_daemon
[ "$(automatic)" = boot ] || fail "a damaged template: $(explain)"
forks() { [ "$(automatic)" = fork ]; }
wait_until 120 forks || fail "a damaged template is not made anew: $(templates) $(explain)"
for name in $(templates | cut -d ' ' -f 1); do "$slipway" template rm "$name" >/dev/null || fail "template rm: $(explain)"; done
ok "a damaged template of the node's own is made anew"

# Single sandboxes of an image that is started often do as with --from auto, without being told to.
end_daemon TERM
printf '%s\n' 'templates_after = 2' 'templates_within_s = 86400' >>"$SLIPWAY_CONFIG"
start_daemon
# single OPTION...: how a sandbox began, and why it booted or the name of its template, as inspect says it.
single() {
    timeout 300 "$slipway" run --name single --network none --timeline "$work/single.json" "$@" "$image" -- true || return
    began "$work/single.json"
    "$slipway" inspect single | python3 -c 'import json, sys
one = json.load(sys.stdin)[0]
print(one["template"] or one["template_why_not"])' || return
    "$slipway" rm single >/dev/null
}
# singly PATTERN OPTION...: what `single` says matches.
singly() {
    local said
    said=$(single "${@:2}" | xargs -d '\n')
    [[ $said =~ ^$1 ]] || fail "run ${*:2}: not $1: $said: $(templates) $(explain)"
}
singly 'boot its image was not started often'
has 0 || fail "a template after one start: $(templates)"
singly 'boot the node had no template'
wait_until 120 has 1 || fail "no template of an image that is started often: $(templates) $(explain)"
templates | grep -qx 'auto-[0-9a-f]* 256 1 none' || fail "templates: $(templates)"
singly 'fork auto-'
singly 'boot *$' --from none
singly 'boot its image was not started often' --memory 272M
singly 'boot its image was not started often' --max-memory 512M
singly 'fork auto-'
has 1 || fail "templates of sandboxes that were not started often: $(templates)"
"$slipway" template rm "$(templates | cut -d ' ' -f 1)" >/dev/null || fail "template rm: $(explain)"
ok "single sandboxes of an image that is started often are forks of a template of the node's own; others boot and say why"

# Killed while it is saved: the next daemon has no template, no sandbox and no file of it.
"$slipway" template create cut >/dev/null 2>&1 &
client=$!
wait_until 120 test -d "$SLIPWAY_DATA_DIR/templates/cut.unfinished" || fail "no template begins: $(explain)"
end_daemon KILL
wait "$client" 2>/dev/null
start_daemon
[ -z "$(templates)" ] || fail "left: $(templates)"
[ -z "$(ls "$SLIPWAY_DATA_DIR/templates")" ] || fail "left: $(ls "$SLIPWAY_DATA_DIR/templates")"
nothing_runs() { [ -z "$(vmms)" ]; }
wait_until 60 nothing_runs || fail "a VMM is left: $(vmms)"
ok "a template that was cut leaves nothing"
