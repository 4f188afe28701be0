#!/usr/bin/env bash
# Containers come to a pod and go from it while others run: they share network, IPC, host name and
# /dev/shm, and nothing else; each has its own root, limits, output and exit status. The daemon is
# killed with -9 in between, and the containers go on.
. "$(dirname "$0")/lib.sh"
need_node

s() { timeout 120 "$slipway" "$@"; }
in_pod() { s exec "pod/$1" -- sh -c "$2"; }
# The state of a container of the pod, "gone" without one.
container() { s ps --json | python3 -c 'import json,sys
pods = {s["name"]: s["containers"] for s in json.load(sys.stdin)}
print(next((c["state"] for c in pods.get("pod", []) if c["name"] == sys.argv[1]), "gone"))' "$1"; }
is() { [ "$(container "$1")" = "$2" ]; }
# Disks of the pod's function, one a line.
disks() { s endpoint ls --json | python3 -c 'import json,sys
for e in json.load(sys.stdin):
    if e["id"] == sys.argv[1]: print(*[n["nsid"] for n in e["namespaces"]], sep="\n")' "$1"; }
refused() {
    local words=$1 out; shift
    out=$(s "$@" 2>&1) && fail "not refused: slipway $*"
    [ "$(wc -l <<<"$out")" = 1 ] && grep -q -- "$words" <<<"$out" || fail "slipway $*: $out"
}

start_keeper
start_daemon

[ "$(s pod create pod --memory 512M --layers 64M --hostname shared)" = pod ] || fail "no pod: $(explain)"
is_state pod running || fail "the pod is $(state_of pod)"
id=$(s inspect pod | python3 -c 'import json,sys; print(json.load(sys.stdin)[0]["id"])') || fail "inspect"
[ -z "$(disks "$id")" ] || fail "a new pod has disks: $(disks "$id")"
ok "a pod runs without a container, and without a disk"

out=$(s run --pod pod --name one --rm "$image" -- sh -c 'echo out; echo err >&2; exit 7' 2>"$work/one.err")
status=$?
[ "$status:$out:$(cat "$work/one.err")" = "7:out:err" ] || fail "one: $status $out $(cat "$work/one.err"); $(explain)"
wait_until 20 is one gone || fail "--rm left one: $(s ps)"
[ -z "$(disks "$id")" ] || fail "one left disks: $(disks "$id")"
ok "output, exit status and --rm of a container; its disks are gone"

s run -d --pod pod --name a "$image" -- sleep 1000 >/dev/null || fail "a: $(explain)"
s pod run pod --name b --memory 64M -d "$image" -- sleep 1000 >/dev/null || fail "b: $(explain)"
[ "$(disks "$id" | wc -l)" = 4 ] || fail "two containers have other than four disks: $(disks "$id")"
[ "$(in_pod a hostname) $(in_pod b hostname)" = "shared shared" ] || fail "host names: $(in_pod b hostname)"
in_pod a 'echo hello >/dev/shm/x; ipcmk -Q >/dev/null; echo a >/root/mine' || fail "a cannot write"
[ "$(in_pod b 'cat /dev/shm/x; ipcs -q | grep -c 0x; ls /root/mine 2>/dev/null')" = "hello
1" ] || fail "b sees: $(in_pod b 'cat /dev/shm/x; ipcs -q; ls /root')"
in_pod a 'timeout 300 python3 -c "
import socket
s = socket.create_server((\"127.0.0.1\", 7000)); c, _ = s.accept(); c.sendall(b\"reply\")"' & server=$!
wait_until 20 in_pod b 'python3 -c "
import socket
print(socket.create_connection((\"127.0.0.1\", 7000)).recv(9).decode())" | grep -q reply' || fail "no connection between containers"
wait "$server" || fail "the server in a failed"
[ "$(in_pod a 'ps ax | grep -c "[s]leep 1000"')" = 1 ] || fail "a sees processes of b"
[ "$(in_pod b 'cat /sys/fs/cgroup/memory.max')" = 67108864 ] || fail "b has another limit"
[ "$(s update pod/b --memory 96M)" = pod/b ] || fail "update: $(explain)"
[ "$(in_pod b 'cat /sys/fs/cgroup/memory.max')" = 100663296 ] || fail "an update did not change b's limit"
ok "containers share network, IPC, host name and /dev/shm, and neither root nor processes"

s run -d --pod pod --name p --share-processes "$image" -- sleep 2000 >/dev/null || fail "p: $(explain)"
s run -d --pod pod --name q --share-processes "$image" -- sh -c '(sleep 0.1 & ) ; exec sleep 3000' >/dev/null || fail "q: $(explain)"
out=$(in_pod q 'ps -eo pid,stat,args') || fail "ps: $out"
grep -q '[s]leep 2000' <<<"$out" && grep -q '^ *1 ' <<<"$out" && ! grep -q '[s]leep 1000' <<<"$out" || fail "q sees: $out"
s run --pod pod --rm --share-processes --privileged "$image" -- ls -A /proc/1/root >"$work/root" 2>&1 || true
[ ! -s "$work/root" ] || fail "the root of process 1: $(cat "$work/root")"
in_pod q 'kill -9 1; pkill -f "[s]leep 2000"' || true
wait_until 20 is p exited || fail "p cannot be killed by q"
wait_until 20 in_pod q '! ps -eo stat | grep -q Z' || fail "zombies: $(in_pod q 'ps -eo pid,stat,args')"
is q running && s rm -f pod/q pod/p >/dev/null || fail "q: $(s ps)"
ok "containers that share processes see each other, and process 1 holds nothing"

# A file of the host's is a disk of the container's: what is written there is the host's at once.
truncate -s 8M "$work/disk" && printf 'of the host' | dd of="$work/disk" bs=4096 seek=1 conv=notrunc 2>/dev/null || fail "no file"
out=$(s run --pod pod --rm --volume "file:$work/disk" "$image" -- sh -c 'dd if=/dev/slipway/disk bs=4096 skip=1 count=1 2>/dev/null | head -c 11
    printf "of the guest" | dd of=/dev/slipway/disk bs=4096 count=1 conv=sync oflag=direct 2>/dev/null') || fail "a volume: $out $(explain)"
[ "$out:$(head -c 12 "$work/disk")" = "of the host:of the guest" ] || fail "a volume: $out, $(head -c 12 "$work/disk")"
wait_until 20 eval '[ "$(disks "$id" | wc -l)" = 4 ]' || fail "a volume is left: $(disks "$id")"
refused "files and block devices of the host" run --pod pod --rm --volume scratch:64M "$image" -- true
refused "at least 512\|multiple of 512\|No such file" run --pod pod --rm --volume file:/no/such/disk "$image" -- true
ok "a container of a pod has a file of the host as a block device"

s run --pod pod --name big --memory 64M "$image" -- python3 -c 'x = bytearray(200 << 20)' >/dev/null 2>"$work/big.err"
[ $? = 137 ] && grep -q 'memory limit' "$work/big.err" || fail "big: $(cat "$work/big.err")"
is big exited || fail "big is $(container big)"
in_pod a true && in_pod b true || fail "a neighbour was disturbed"
ok "a container that exceeds its limit ends alone, and says why"

# What containers write to their roots is memory of the host, with a bound for all of the pod.
layers() { s stats --json pod | python3 -c 'import json,sys; print(json.load(sys.stdin)[0]["layers_" + sys.argv[1]])' "$1"; }
holds_less() { [ "$(layers bytes)" -lt "$1" ]; }
fill='dd if=/dev/zero of=/fill bs=1M count=40 conv=fsync 2>&1'
[ "$(layers limit_bytes)" = 67108864 ] || fail "another bound: $(s stats pod)"
in_pod a "$fill" >/dev/null || fail "40 MiB do not fit: $(explain)"
[ "$(layers bytes)" -gt 41943040 ] || fail "40 MiB are not counted: $(s stats pod)"
out=$(s run --pod pod --rm "$image" -- sh -c "$fill") && fail "80 MiB fit into 64: $out, $(s stats pod)"
[ "$(layers refused_writes)" -gt 0 ] || fail "no write was refused: $out, $(s stats pod)"
[ "$(grep -c 'overlays hold all that they may' "$work/daemon.log")" = 1 ] || fail "the log does not say it once: $(explain)"
wait_until 20 holds_less 50000000 || fail "a container's layer is left: $(s stats pod)"
in_pod a 'cat /fill | wc -c && rm /fill' | grep -qx 41943040 || fail "a neighbour's file is another"
wait_until 20 holds_less 10000000 || fail "a removed file holds memory: $(s stats pod)"
s run --pod pod --rm "$image" -- sh -c "$fill" >/dev/null || fail "nothing was given back: $(s stats pod)"
ok "root layers of a pod stay within its bound, and removed files and containers give memory back"

# Output goes on across daemons, without a line missing or doubled.
lines='i=0; until [ -e /stop ]; do i=$((i + 1)); echo "line $i"; [ $((i % 20)) = 0 ] && sleep 0.1; done; exit 5'
s run -d --pod pod --name lines "$image" -- sh -c "$lines" >/dev/null || fail "lines: $(explain)"
for _ in 1 2 3; do
    end_daemon KILL
    start_daemon
    is lines running && is a running && is b running || fail "after a kill: $(s ps; explain)"
    in_pod lines true || fail "no exec after a kill: $(explain)"
done
# The container may end before this command does, and takes the command with it. The status is below.
in_pod lines 'touch /stop'
[ "$(s wait pod/lines)" = 5 ] || fail "lines ended with another status: $(s ps)"
s logs pod/lines >"$work/lines" || fail "no log"
awk '$0 != "line " NR { print NR ": " $0; exit 1 }' "$work/lines" || fail "the log is not whole"
[ "$(wc -l <"$work/lines")" -gt 20 ] || fail "few lines"
[ "$(disks "$id" | wc -l)" = 4 ] || fail "disks after three kills: $(disks "$id")"
ok "containers go on through three deaths of the daemon, $(wc -l <"$work/lines") lines in order"

# A paused container stays where it is, also across a death of the daemon. A stop has it go on first.
# Its steps are counted in memory that the pod's containers share: output may be on its way for a while.
ticks='i=0; trap "exit 6" TERM; while :; do i=$((i + 1)); echo $i; echo $i >>/dev/shm/ticks; sleep 0.05; done'
steps() { in_pod a 'wc -l </dev/shm/ticks'; }
grew() { [ "$(steps)" -gt "$1" ] && [ "$(s logs pod/ticks | wc -l)" -gt "$1" ]; }
s run -d --pod pod --name ticks "$image" -- sh -c "$ticks" >/dev/null || fail "ticks: $(explain)"
wait_until 30 grew 2 || fail "ticks writes nothing: $(explain)"
s pause pod/ticks >/dev/null || fail "pause: $(explain)"
is ticks paused && is a running || fail "after pause: $(s ps; explain)"
before=$(steps)
refused 'is paused: `slipway resume`' exec pod/ticks -- true
refused 'is paused' pause pod/ticks
refused 'is a pod' pause pod
end_daemon KILL
start_daemon
is ticks paused && in_pod a true || fail "after a kill: $(s ps; explain)"
sleep 1
[ "$(steps)" = "$before" ] || fail "a paused container went on: $before steps, then $(steps)"
s resume pod/ticks >/dev/null && is ticks running || fail "resume: $(explain)"
wait_until 30 grew "$before" || fail "it does not go on: $(explain)"
s pause pod/ticks >/dev/null || fail "pause: $(explain)"
s stop --time 60 pod/ticks >/dev/null && [ "$(s wait pod/ticks)" = 6 ] || fail "stop: $(s ps; explain)"
s run -d --pod pod --name held "$image" -- sleep 1000 >/dev/null && s pause pod/held >/dev/null || fail "held: $(explain)"
s kill --signal KILL pod/held >/dev/null && [ "$(s wait pod/held)" = 137 ] || fail "SIGKILL: $(s ps; explain)"
is held exited && s rm pod/ticks pod/held >/dev/null || fail "after pauses: $(s ps)"
ok "a container is paused and goes on, and ends by a stop, or by SIGKILL, while it is paused"

for command in attach logs 'logs --follow'; do
    # shellcheck disable=SC2086 # A command may have an option.
    refused 'pod is a pod: name one of its containers' $command pod
done
refused 'is a pod' exec pod -- true
refused "more than the [0-9]* MiB that the pod's microVM" update pod/b --memory 4G
[ "$(in_pod b 'cat /sys/fs/cgroup/memory.max')" = 100663296 ] || fail "a refused update changed a limit"
refused 'no sandbox' exec pod/none -- true
refused 'no sandbox' run --pod none "$image" -- true
refused 'has a container a already' run --pod pod --name a "$image" -- true
refused 'cannot have' run --pod pod --network none "$image" -- true
refused 'has whole CPUs' pod create half --cpus 0.5
refused 'cannot have' run --pod pod --max-cpus 2 "$image" -- true
refused 'is no name' run --pod pod --name 'a/b' "$image" -- true
refused 'slipway stop' rm pod/a
refused 'no image' run --pod pod --pull never none:none -- true
out=$(s run --pod pod --rm "$image" -- /no/such 2>&1); [ $? = 127 ] || fail "no such program: $out"
[ "$(disks "$id" | wc -l)" = 4 ] || fail "a container that failed left disks: $(disks "$id")"
ok "bad requests are refused in a line"

s stop --time 1 pod/a >/dev/null || fail "a does not stop: $(explain)"
is a exited && is b running || fail "after stop: $(s ps)"
s rm pod/a >/dev/null && s rm -f pod/b >/dev/null || fail "rm: $(explain)"
[ "$(container a) $(container b)" = "gone gone" ] || fail "after rm: $(s ps)"
[ -z "$(disks "$id")" ] || fail "disks after all ended: $(disks "$id")"
s run -d --pod pod --name last "$image" -- sleep 1000 >/dev/null || fail "last: $(explain)"
s stop --time 1 pod >/dev/null || fail "the pod does not stop"
is_state pod exited || fail "the pod is $(state_of pod)"
is last exited || fail "a container of an ended pod is $(container last)"
s rm pod >/dev/null || fail "rm pod"

# The guest, the record and the host's control group follow the limits of CPU time.
s pod create room --cpus 1 --max-cpus 3 --max-containers 4 --network none >/dev/null || fail "room: $(explain)"
s run -d --pod room --name idle "$image" -- sleep 1000 >/dev/null || fail "idle: $(explain)"
[ "$(s exec room/idle ls /sys/class/net)" = lo ] || fail "without a network a pod has: $(s exec room/idle ls /sys/class/net)"
ok "without a network there is the loopback interface only"
has_cpus() {
    local limit
    [ "$(s ps --json | python3 -c 'import json,sys
print(*[one["cpus"] for one in json.load(sys.stdin) if one["name"] == "room"])'):$(s exec room/idle nproc)" = "$1:$1" ] || return 1
    limit=$(cpu_quota room)
    [ -z "$limit" ] || [ "$limit" = $((($1 + 1) * 100000)) ]
}
has_cpus 1 || fail "room begins with: $(s ps)"
out=$(s run --pod room --rm --cpus 2 "$image" -- sh -c 'nproc; cut -d " " -f 1 /sys/fs/cgroup/cpu.max') || fail "two CPUs: $out $(explain)"
[ "$out" = "2
200000" ] || fail "a container with a limit of two CPUs begins with: $out"
wait_until 60 has_cpus 1 || fail "after its end: $(s ps; explain)"
s run -d --pod room --name one --cpus 1 "$image" -- sleep 1000 >/dev/null && s run -d --pod room --name two --cpus 2 "$image" -- sleep 1000 >/dev/null || fail "one, two: $(explain)"
has_cpus 3 || fail "limits of three CPUs together: $(s ps; explain)"
s update room/one --cpus 0.5 >/dev/null || fail "half a CPU: $(explain)"
[ "$(s exec room/one cut -d ' ' -f 1 /sys/fs/cgroup/cpu.max)" = 50000 ] || fail "the limit is not half a CPU: $(explain)"
s update room/one --cpus 1 >/dev/null && has_cpus 3 || fail "a CPU again: $(s ps; explain)"
[ "$(s run --pod room --rm --cpus 8 "$image" -- nproc)" = 3 ] || fail "a limit beyond the room: $(explain)"
end_daemon KILL
start_daemon
has_cpus 3 || fail "after a kill: $(s ps; explain)"
s rm -f room/two >/dev/null || fail "two: $(explain)"
wait_until 60 has_cpus 1 || fail "a limit of one CPU is left: $(s ps; explain)"
s update room --cpus 2 >/dev/null && has_cpus 2 || fail "update: $(s ps; explain)"
[ "$(s run --pod room --rm --cpus 3 "$image" -- nproc)" = 2 ] && has_cpus 2 || fail "a chosen number changes: $(s ps; explain)"
s update room --cpus 1 >/dev/null && [ "$(s run --pod room --rm --cpus 2 "$image" -- nproc)" = 3 ] || fail "it follows no more: $(s ps; explain)"
wait_until 60 has_cpus 1 || fail "at last: $(s ps; explain)"
ok "CPUs come before containers with limits begin, and go after them; a number that the user chose stays"

# It has idle and one.
for name in c d; do s run -d --pod room --name $name "$image" -- sleep 1000 >/dev/null || fail "$name: $(explain)"; done
refused 'room has 4 containers that have not ended, the most that there may be' run -d --pod room --name e "$image" -- true
s stop --time 1 room/d >/dev/null || fail "d does not stop: $(explain)"
s run -d --pod room --name e "$image" -- sleep 1000 >/dev/null || fail "a container in place of one that has ended: $(explain)"
refused 'room has 4 containers' run -d --pod room --name f "$image" -- true
ok "one container more than a pod may have is refused in a line, and one that has ended makes room"
kill -9 "$(vmm_of room)"
[ "$(s wait room/c)" = 137 ] || fail "a container of a dead VMM: $(s ps)"
wait_until 20 is_state room failed || fail "a pod whose VMM was killed is $(state_of room)"
s rm room >/dev/null || fail "rm room"
[ -z "$(leftovers)" ] || fail "left over: $(leftovers)"
ok "containers and pods end, also by the death of their VMM, and leave nothing"
