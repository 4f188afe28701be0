#!/usr/bin/env bash
# Templates: a machine that has booted is saved, and sandboxes and pods begin with it. Each has its disks, its
# addresses, its name and its random numbers. With QEMU a template is refused in one line. In a network namespace
# of the test's own.
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
# shellcheck source=tests/e2e/templates.sh
. "$here/templates.sh"
need_network_node "$@"
start_keeper

if [ "${SLIPWAY_VMM:-}" != native ]; then
    export SLIPWAY_VMM=qemu
    start_daemon
    says "its VMM is QEMU" template create one --network none
    says 'there is no template or snapshot "one"' run --rm --network none --from one "$image" -- true
    [ -z "$("$slipway" ps --quiet)" ] || fail "a sandbox is left: $("$slipway" ps)"
    ok "with QEMU a template is refused, and nothing is left"
    need_native
fi
start_daemon

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

# Templates of the node's own: the first sandbox boots and has the template made, the next one is a fork. 13-template-auto has
# the rest: several forks at once take an emulated server longer than an agent may take to answer.
[ "$(automatic)" = boot ] || fail "there is a template already: $(templates) $(explain)"
wait_until 120 has 1 || fail "no template is made: $(templates) $(explain)"
templates | grep -qx 'auto-[0-9a-f]* 256 1 virtio' || fail "templates: $(templates)"
[ "$(automatic)" = fork ] || fail "the second sandbox boots: $(templates) $(explain)"
[ -z "$("$slipway" ps --quiet)" ] || fail "a sandbox is left: $("$slipway" ps)"
"$slipway" template rm "$(templates | cut -d ' ' -f 1)" >/dev/null || fail "template rm: $(explain)"
ok "the node makes a template of a machine that is asked for with --from auto, and the next sandbox of it is a fork"

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
