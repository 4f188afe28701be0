#!/usr/bin/env bash
# containerd runs containers in Slipway's microVMs: it, `ctr`, the shim and the daemon as they are, on an
# image of one program.
. "$(dirname "$0")/lib.sh"
. "$(dirname "$0")/containerd.sh"

# refuses WORDS ARGUMENTS…: `ctr run` fails and says so.
refuses() {
    local want=$1; shift
    run --rm "$@" >"$work/out" 2>"$work/err" && fail "$* ran"
    grep -qF -- "$want" "$work/err" || fail "$*: $(cat "$work/err")"
    ! grep -q '^: exit status' "$work/err" || fail "$*: an error has two lines: $(cat "$work/err")"
    ok "$* -> $(tail -n 1 "$work/err")"
}
refuses 'no Slipway daemon serves at' "$image" none true
start_keeper
start_daemon
(c events >"$work/events" 2>&1) & listener=$!
# Each label that is set is an event.
listens() { c image label "$image" listens=yes >/dev/null && grep -q " /images/" "$work/events"; }
wait_until 60 listens || fail "no events: $(cat "$work/events") $(explain)"
refuses "host's network cannot" --net-host "$image" host true
refuses "the host's /srv cannot be mounted at /data" --mount type=bind,src=/srv,dst=/data,options=rbind:rshared "$image" bound true
refuses "own is there" --mount type=bind,src=/srv,dst=/proc/data,options=rbind "$image" bound true
refuses 'the AppArmor profile "own" would not be applied' --apparmor-profile own "$image" confined true
refuses 'ConfigPath names the file "/etc/hostname"' --runtime-config-path /etc/hostname "$image" configured true
refuses 'no such file' "$image" nothing /bin/no-such-program
printf '\177ELF\2\1\1\0\0\0\0\0\0\0\0\0\2\0\363\0' >"$work/foreign" && truncate -s 64 "$work/foreign" && chmod 755 "$work/foreign"
refuses "is a program for riscv64 and this machine is $(uname -m): pull the image for linux/" \
    --mount "type=bind,src=$work/foreign,dst=/etc/foreign,options=rbind:ro" "$image" foreign /etc/foreign
[ -z "$("$slipway" ps --quiet)" ] || fail "sandboxes are left: $("$slipway" ps)"
no_shims() { [ -z "$(shims)$(holders)" ]; }
wait_until 30 no_shims || fail "shims of refused containers are left: $(shims)"
before=$(images)

# A container's process prints its CapBnd, NoNewPrivs and Seccomp, and the answer to a new user namespace, which containerd's
# default profile of system calls refuses.
look='while read -r name value; do
        case $name in CapBnd: | NoNewPrivs: | Seccomp:) printf "%s " "$value" ;; esac; done </proc/self/status
        busybox unshare -U echo made 2>&1'
out=$(run --rm --env A=1 --cwd /tmp "$image" first sh -c 'cat /etc/slipway-test; echo $A $PWD; '"$look"'; echo err >&2; exit 7' 2>"$work/err"); status=$?
[ "$status:$out:$(cat "$work/err")" = "7:second layer
1 /tmp
00000000a80425fb 1 0 made:err" ] || fail "first: status $status, $out, $(cat "$work/err"): $(explain)"
ok "ctr run --rm: output, error output and status 7; without options it has the usual rights and no profile of system calls"
[ "$(images)" = "$before" ] && [ "$(wc -w <<<"$before")" = 1 ] || fail "images: $before, then $(images)"
ok "both layers are one image, made once"
# One of the two at once has bind mounts, the other much to say.
"$slipway" image rm "$before" >/dev/null || fail "the image stays"
echo 'of the host' >"$work/shown"
mkdir "$work/data"
run --rm --mount "type=bind,src=$work/shown,dst=/etc/shown,options=rbind:ro" --mount "type=bind,src=$work/data,dst=/data,options=rbind:rw" \
    "$image" shown sh -c 'cp /etc/shown /data/copy; echo x >/etc/shown || cat /etc/shown' >"$work/shows" 2>/dev/null & twin=$!
[ "$(run --rm "$image" many seq 1 300000 | sha256sum)" = "$(seq 1 300000 | sha256sum)" ] || fail "output is not what was written: $(explain)"
wait "$twin" || fail "bind mounts: $(cat "$work/shows") $(explain)"
[ "$(images)" = "$before" ] || fail "images: $before, then $(images)"
ok "two at once make it once"
[ "$(cat "$work/shows")" = 'of the host' ] && [ "$(cat "$work/data/copy")" = 'of the host' ] ||
    fail "bind mounts: $(cat "$work/shows"), $(ls "$work/data")"
ok "a file that is mounted read-only, and a directory that is writable, are the host's"
ok "2 MB of output, byte by byte"
# The shim's control group, as clients of containerd's name it: ctr has no option for it.
group=/slipway-e2e-shim
roots=$(if [ -e /sys/fs/cgroup/cgroup.controllers ]; then echo /sys/fs/cgroup; else echo /sys/fs/cgroup/pids; fi)
options() { python3 - "$1" "${2-containerd.runc.v1.Options}" <<'P'
import sys
field = lambda number, text: bytes([number << 3 | 2, len(text)]) + text.encode()
sys.stdout.buffer.write(field(1, sys.argv[2]) + field(2, field(3, sys.argv[1]).decode()))
P
}
mkdir "$work/bundle" && echo '{}' >"$work/bundle/config.json" || fail "no bundle"
begin() { (cd "$work/bundle" && options "$@" | "$shim" -namespace e2e -id grouped -address "$address" start); }
begin /slipway-e2e-none >"$work/out" 2>&1 && fail "a shim in a control group that is not there"
grep -q 'control group "/slipway-e2e-none".*there is none' "$work/out" || fail "a shim's control group: $(cat "$work/out")"
begin $group runsc.v1.Options >"$work/out" 2>&1 && fail "a shim with options that it does not know"
grep -q '"runsc.v1.Options" are not known' "$work/out" || fail "unknown options: $(cat "$work/out")"
if mkdir "$roots$group" 2>/dev/null; then
    begin $group >"$work/out" 2>&1 || fail "a shim in a control group: $(cat "$work/out")"
    pid=$(cat "$work/bundle/shim.pid")
    grep -qx "$pid" "$roots$group/cgroup.procs" || fail "not in its control group: $(cat "/proc/$pid/cgroup")"
    kill "$pid"
    emptied() { rmdir "$roots$group" 2>/dev/null; }
    wait_until 30 emptied || fail "the shim's control group stays"
    rm "$(sed 's,^unix://,,' "$work/bundle/address")"
    ok "a shim runs in the control group that its options name, which must be there"
else
    printf 'SKIPPED: %s\n' "e2e/$test_name: a shim's control group needs writable control groups"
fi

rights=(--cap-drop CAP_NET_BIND_SERVICE --cap-add CAP_SYS_PTRACE --allow-new-privs --seccomp)
out=$(run --rm "${rights[@]}" "$image" rights sh -c "$look" 2>&1)
[[ $out == '00000000a80c21fb 0 2 '*'peration not permitted' ]] || fail "${rights[*]}: $out: $(explain)"
ok "${rights[*]} -> CapBnd, NoNewPrivs, Seccomp, a user namespace: $out"
ok "containerd's default profile of system calls goes for a container that asks for it"

run -d --annotation dev.slipway.max-cpus=2 "$image" web sh -c 'until [ -e /stop ]; do echo up; sleep 0.1; done; echo down; exit 5' >"$work/web.out" 2>&1 ||
    fail "ctr run -d: $(cat "$work/web.out") $(explain)"
grep -qE '^web +[0-9]+ +RUNNING' <<<"$(c task ls)" || fail "task ls: $(c task ls)"
[ "$(c task ps web | wc -l)" -ge 2 ] || fail "task ps: $(c task ps web)"
counts=memory; [ ! -e /sys/fs/cgroup/cgroup.controllers ] || counts=memory.usage_limit
c task metrics web >"$work/metrics" 2>&1 && grep -q "$counts" "$work/metrics" || fail "metrics: $(cat "$work/metrics")"
out=$(c task exec --exec-id one --fifo-dir "$work/fifo" web sh -c 'id -u; exit 3' </dev/null 2>&1); status=$?
[ "$status:$out" = 3:0 ] || fail "exec: status $status, $out: $(explain)"
ok "task ls, ps, metrics; exec with output and status 3"
echo "from a pipe" | c task exec --exec-id two --fifo-dir "$work/fifo" web cat >"$work/out" 2>&1 || fail "exec with input: $(cat "$work/out")"
[ "$(cat "$work/out")" = "from a pipe" ] || fail "input came back as: $(cat "$work/out")"
ok "input by a pipe reaches a process, and ends"
# in_terminal ARGUMENTS…: `ctr` in a terminal of its own, what it prints there, and its status.
in_terminal() {
    python3 - "$address" "$@" <<'P'
import os, pty, sys
pid, fd = pty.fork()
if pid == 0:
    os.execvp("ctr", ["ctr", "--address"] + sys.argv[1:])
out = b""
try:
    while data := os.read(fd, 4096):
        out += data
except OSError:
    pass
print(out.decode().strip(), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
P
}
out=$(in_terminal task exec --exec-id three --fifo-dir "$work/fifo" -t web sh -c 'tty; exit 4')
[[ $out == */dev/pts/*4 ]] || fail "exec -t: $out"
out+=", $(in_terminal run --rm -t --runtime io.containerd.slipway.v2 --fifo-dir "$work/fifo" "$image" terminal sh -c 'test -t 0 && test -t 2 && echo yes; exit 5')"
[[ $out == *yes*5 ]] || fail "run -t: $out"
ok "terminals: $out"

state_of() { c task ls | awk -v name="$1" '$1 == name { print $3 }'; }
c task pause web || fail "task pause: $(explain)"
[ "$(state_of web)" = PAUSED ] || fail "after task pause: $(c task ls)"
"$slipway" ps | grep -q 'web-.*paused' || fail "after task pause: $("$slipway" ps)"
c task exec --exec-id paused --fifo-dir "$work/fifo" web true 2>"$work/err" && fail "a process began in a paused container"
grep -q 'is paused: `slipway resume`' "$work/err" || fail "exec while paused: $(cat "$work/err")"
c task resume web || fail "task resume: $(explain)"
[ "$(state_of web)" = RUNNING ] || fail "after task resume: $(c task ls)"
ok "a container is paused, and goes on"
# ctr has no command for updates, so this is the call.
python3 - "$work/state/io.containerd.runtime.v2.task/default/web/address" <<'P' || fail "update: $(explain)"
import json, os, socket, struct, sys
def field(number, data):
    length, size = b"", len(data)
    while size > 127:
        length, size = length + bytes([size & 127 | 128]), size >> 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + data
shim = socket.socket(socket.AF_UNIX)
shim.connect(open(sys.argv[1]).read().removeprefix("unix://"))
def update(resources):
    call = field(1, b"web") + field(2, field(2, json.dumps(resources).encode()))
    call = field(1, b"containerd.task.v2.Task") + field(2, b"Update") + field(3, call)
    shim.sendall(struct.pack(">IIBB", len(call), 1, 1, 0) + call)
    length, _, kind, _ = struct.unpack(">IIBB", shim.recv(10, socket.MSG_WAITALL))
    return shim.recv(length, socket.MSG_WAITALL) if length else b""
answer = update({"cpu": {"quota": 200000, "period": 100000}})
assert answer == b"", answer
answer = update({"memory": {"limit": 1 << 30}})
assert b"is too much for sandbox" in answer, answer
answer = update({"pids": {"limit": 50}, "unified": {"memory.oom.group": "1"}})
assert answer == b"", answer
answer = update({"unified": {"io.weight": "10"}})
assert b'file "io.weight" cannot be set' in answer, answer
answer = update({"blockIO": {"weight": 10}})
assert b"is not implemented" in answer, answer
cpu = min(os.sched_getaffinity(0))
answer = update({"cpu": {"cpus": f"{cpu},8191"}})
assert b"CPU 8191 of the set" in answer, answer
answer = update({"cpu": {"cpus": str(cpu)}})
assert answer == b"", answer
P
vmm=$("$slipway" ps --json | python3 -c 'import json,sys; print(*[s["vmm_pid"] for s in json.load(sys.stdin)])')
first=$(sed -n 's/^Cpus_allowed_list:\s*\([0-9]*\).*/\1/p' /proc/self/status)
[ "$(sed -n 's/^Cpus_allowed_list:\s*//p' "/proc/$vmm/task/"*/status | sort -u)" = "$first" ] || fail "the VMM runs on: $(grep Cpus_allowed_list "/proc/$vmm/task/"*/status)"
[ "$("$slipway" ps --json | grep -o '"cpus": [0-9]*')" = '"cpus": 2' ] || fail "after the update: $("$slipway" ps --json)"
out=$(c task exec --exec-id limits --fifo-dir "$work/fifo" web cat /sys/fs/cgroup/pids.max /sys/fs/cgroup/memory.oom.group </dev/null 2>&1)
[ "$out" = "50
1" ] || fail "limits in the guest: $out $(explain)"
ok "updates of the limit of processes and of files of the control group reach the guest; other files are refused"
ok "an update of the CPU limit gives a CPU, one of the CPU set confines the VMM; memory without room and other updates are refused"

# containerd dies and comes back: containers do not notice, and their ends are seen.
run -d "$image" meanwhile sh -c 'until [ -e /stop ]; do sleep 0.1; done; exit 9' >/dev/null || fail "meanwhile: $(explain)"
sandbox=$("$slipway" ps --quiet | grep '^meanwhile-') || fail "no sandbox of that name: $("$slipway" ps)"
grep -q '"dev.slipway.containerd.id": "meanwhile"' <<<"$("$slipway" inspect "$sandbox")" || fail "labels: $("$slipway" inspect "$sandbox")"
kill -9 "$containerd"; wait "$containerd" 2>/dev/null
# A process that lets its container end may end with it, so its status says nothing here.
timeout 60 "$slipway" exec "$sandbox" -- sh -c ': >/stop'
[ "$(timeout 60 "$slipway" wait "$sandbox")" = 9 ] || fail "the container did not end: $("$slipway" ps)"
start_containerd
wait_until 60 stopped meanwhile || fail "after containerd's restart: $(c task ls) $(explain)"
c task delete meanwhile >"$work/out" 2>&1
grep -q 'exit code 9' "$work/out" || fail "delete says: $(cat "$work/out")"
c container delete meanwhile || fail "container delete: $(explain)"
wait "$listener" 2>/dev/null; listener=''
grep -qE '^web +[0-9]+ +RUNNING' <<<"$(c task ls)" || fail "after containerd's restart: $(c task ls) $(explain)"
c task attach web >"$work/attached" 2>&1 & attached=$!
wait_until 60 grep -q up "$work/attached" || fail "attach: $(cat "$work/attached") $(explain)"
c task exec --exec-id four --fifo-dir "$work/fifo" web sh -c ': >/stop' </dev/null
wait "$attached"; status=$?
[ "$status:$(tail -n 1 "$work/attached" | tr -d '\r')" = 5:down ] || fail "attach: status $status, $(cat "$work/attached")"
c task delete web >/dev/null 2>&1; c container delete web || fail "container delete: $(explain)"
ok "containerd was killed and came back: a task ran on with its output, another had ended; both statuses are right"

# The daemon dies and comes back: no line is missing or doubled.
run --rm "$image" lines sh -c 'i=0; while :; do i=$((i + 1)); echo "line $i"; sleep 0.01; done' \
    >"$work/lines" 2>"$work/lines.err" & client=$!
wait_until 60 grep -q 'line 20' "$work/lines" || fail "lines: $(cat "$work/lines.err") $(explain)"
for signal in KILL TERM; do
    kill "-$signal" "$daemon"; wait "$daemon" 2>/dev/null
    rm -f "$SLIPWAY_RUN_DIR/slipway.sock"
    start_daemon
    seen=$(wc -l <"$work/lines")
    more() { [ "$(wc -l <"$work/lines")" -gt "$seen" ]; }
    wait_until 60 more || fail "no more lines: $(tail -n 3 "$work/lines") $(explain)"
done
kill -KILL "$daemon"; wait "$daemon" 2>/dev/null
rm -f "$SLIPWAY_RUN_DIR/slipway.sock"
c task kill -s SIGKILL lines || fail "kill without a daemon: $(explain)"
start_daemon
wait "$client"; status=$?
[ "$status" = 137 ] || fail "SIGKILL without a daemon: status $status, $(c task ls) $(explain)"
# The last one may have been cut.
count=$(wc -l <"$work/lines")
cmp <(seq -f 'line %.0f' "$count") <(head -n "$count" "$work/lines") || fail "$(tail -n 3 "$work/lines")"
ok "the daemon was killed, and ended, and came back: $count lines, each once"
ok "a SIGKILL that no daemon took is carried out by the next: status 137"

# The shim dies and comes back, and so does its holder: nobody notices.
wait_until 60 no_shims || fail "shims: $(shims) $(holders)"
run --rm "$image" kept sh -c 'told=; trap "told=yes" TERM
    i=0; until [ "$told" ]; do i=$((i + 1)); echo "line $i"; sleep 0.01; done; echo "last $i"; exit 6' \
    >"$work/kept" 2>"$work/kept.err" & client=$!
wait_until 60 grep -q 'line 20' "$work/kept" || fail "kept: $(cat "$work/kept.err") $(explain)"
for what in shims holders shims; do
    pid=$($what)
    kill -9 "$pid" || fail "no single process of $what: $pid"
    another() { local now; now=$($what); [ -n "$now" ] && [ "$now" != "$pid" ]; }
    wait_until 60 another || fail "no other process of $what: $(explain)"
    [ "$(c task ls | awk '$1 == "kept" { print $3 }')" = RUNNING ] || fail "after kill -9 of $what: $(c task ls) $(explain)"
    seen=$(wc -l <"$work/kept")
    more() { [ "$(wc -l <"$work/kept")" -gt "$seen" ]; }
    wait_until 60 more || fail "no more lines after kill -9 of $what: $(tail -n 3 "$work/kept") $(explain)"
    c task exec --exec-id "after-$pid" --fifo-dir "$work/fifo" kept sh -c 'exit 3' </dev/null; status=$?
    [ "$status" = 3 ] || fail "an exec after kill -9 of $what: status $status $(explain)"
done
c task kill -s SIGTERM kept || fail "kill: $(explain)"
wait "$client"; status=$?
count=$(($(wc -l <"$work/kept") - 1))
[ "$status" = 6 ] && cmp <(seq -f 'line %.0f' "$count"; echo "last $count") "$work/kept" || fail "status $status: $(tail -n 3 "$work/kept")"
ok "the shim was killed, its holder, and the shim again: $count lines, each once, processes by exec, and status 6 by SIGTERM"
run --rm "$image" flood sh -c 'for i in 1 2 3 4; do seq 1 100000; done; exit 6' >"$work/flood" 2>"$work/flood.err" & client=$!
wait_until 60 test -s "$work/flood" || fail "flood: $(cat "$work/flood.err") $(explain)"
# shellcheck disable=SC2046 # the last kills may find that it has ended
for _ in 1 2 3; do kill -9 $(shims) 2>/dev/null; sleep 0.4; done
wait "$client"; status=$?
[ "$status" = 6 ] && cmp <(for _ in 1 2 3 4; do seq 1 100000; done) "$work/flood" || fail "status $status: $(tail -n 3 "$work/flood") $(explain)"
ok "2.4 MB of output while the shim was killed: byte by byte, and status 6"
# The shim of the container before ends a moment after that.
wait_until 60 no_shims || fail "shims: $(shims) $(holders)"
run -d "$image" lasting sleep 1000 >/dev/null || fail "lasting: $(explain)"
kill -9 "$(shims)" || fail "no single shim: $(shims)"
c task kill -s SIGKILL lasting || fail "kill after kill -9 of the shim: $(explain)"
wait_until 60 stopped lasting || fail "after kill -9 of the shim and SIGKILL: $(c task ls) $(explain)"
c task delete lasting >"$work/out" 2>&1
grep -q 'exit code 137' "$work/out" || fail "delete says: $(cat "$work/out")"
c container delete lasting || fail "container delete: $(explain)"
wait_until 60 no_shims || fail "shims are left: $(shims) $(holders)"
ok "a container whose shim was killed is killed and deleted as any other, and no shim is left"

run -d "$image" loud sh -c 'seq 1 1000000; : >/done' >/dev/null || fail "loud: $(explain)"
c task exec --exec-id look --fifo-dir "$work/fifo" loud test -e /done </dev/null && fail "output went nowhere"
c task kill -s SIGKILL loud || fail "kill: $(explain)"
wait_until 60 stopped loud || fail "after SIGKILL: $(c task ls)"
c task delete loud >"$work/out" 2>&1
grep -q 'exit code 137' "$work/out" || fail "delete says: $(cat "$work/out")"
c container delete loud || fail "container delete: $(explain)"
ok "output that nobody reads holds its container and does not end it; it can be killed"

mkdir -p "$work/own/bin" && cp "$(command -v busybox)" "$work/own/bin/sh"
out=$(run --rm --privileged --rootfs "$work/own" own /bin/sh -c 'while read -r name value; do
    [ "$name" != CapEff: ] || echo "$value"; done </proc/self/status') || fail "own root: $(explain)"
own=$(awk '/^CapEff/ { print $2 }' /proc/self/status)
[ "$out:$(images)" = "$own:$before" ] || fail "own root: $out and not $own, images: $(images)"
ok "a root of a container's own leaves no image; a privileged container has all capabilities that ctr has"

# Hooks: programs of the host. ctr has no option for them, but takes a configuration.
cp "$(command -v busybox)" "$work/own/bin/busybox"
cat >"$work/hook" <<END
#!/bin/sh
cat >"$work/hook.\$1"
echo "\$1" >>"$work/hooks"
pid=\$(sed -n 's/.*"pid":\([0-9]*\).*/\1/p' "$work/hook.\$1")
[ -z "\$pid" ] || readlink "/proc/\$pid/ns/net" >"$work/hook.\$1.net"
[ "\$1" != failing ] || { echo 'told by the hook' >&2; exit 3; }
[ "\$1" != slow ] || sleep 1000
[ "\$1" != wired ] || {
    ip link add sw-e2e-hook type veth peer name eth0 netns "\$pid" && ip addr add 10.254.77.1/24 dev sw-e2e-hook &&
    ip link set sw-e2e-hook up && nsenter --target "\$pid" --net sh -c 'ip addr add 10.254.77.2/24 dev eth0 && ip link set eth0 up'
}
END
chmod 755 "$work/hook"
# with_hooks PROGRAM POINT:WORD…: runs the container "hooked", whose hooks are called with these words.
with_hooks() {
    python3 - "$work" "$@" >"$work/hooked.json" <<'P' || fail "no configuration"
import json, sys
work, program, *points = sys.argv[1:]
hooks = {}
for point in points:
    point, word = point.split(":")
    hook = {"path": work + "/hook", "args": ["hook", word], "env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"]}
    hooks.setdefault(point, []).append(hook | ({"timeout": 1} if word == "slow" else {}))
json.dump({"ociVersion": "1.0.2", "hooks": hooks, "annotations": {"of": "the test"}, "hostname": "hooked",
           "process": {"user": {"uid": 0, "gid": 0}, "args": ["/bin/sh", "-c", program], "env": ["PATH=/bin"], "cwd": "/"},
           "root": {"path": work + "/own"},
           "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
           "linux": {"cgroupsPath": "/default/hooked", "resources": {"devices": [{"allow": False, "access": "rwm"}]},
                     "namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "network")]}}, sys.stdout)
P
    rm -f "$work"/hook.* "$work/hooks"
    run --rm --config "$work/hooked.json" hooked
}
# Of containers of another test, which has mounts of its own in `make test`, there may be others.
networks() { pgrep --ns $$ --nslist mnt -f '^slipway-shim-network ' || true; }
others=$(networks)
out=$(with_hooks 'echo ran; exit 4' prestart:first createRuntime:second poststart:third poststop:fourth 2>"$work/err"); status=$?
[ "$status:$out" = 4:ran ] || fail "hooks: status $status, $out: $(cat "$work/err") $(explain)"
[ "$(paste -sd ' ' "$work/hooks")" = 'first second third fourth' ] || fail "hooks ran: $(cat "$work/hooks")"
python3 - "$work" <<'P' || fail "states: $(cat "$work"/hook.*)"
import json, sys
states = [json.load(open(f"{sys.argv[1]}/hook.{one}")) for one in ("first", "second", "third", "fourth")]
assert [state["status"] for state in states] == ["creating", "creating", "running", "stopped"], states
assert all((state["id"], state["annotations"]) == ("hooked", {"of": "the test"}) for state in states), states
assert len({state["pid"] for state in states[:3]}) == 1 and "pid" not in states[3], states
P
[ "$(cat "$work/hook.second.net")" != "$(readlink /proc/self/ns/net)" ] || fail "the hook's process has the host's network"
out=$(with_hooks 'echo ran' createRuntime:failing createRuntime:second poststop:fourth 2>&1) && fail "a hook failed, and: $out"
grep -q 'the createRuntime hook .*/hook failed: exit status: 3: told by the hook' <<<"$out" || fail "a hook that fails: $out"
[ "$(paste -sd ' ' "$work/hooks")" = 'failing fourth' ] || fail "hooks ran: $(cat "$work/hooks")"
out=$(with_hooks 'echo ran' createRuntime:slow 2>&1) && fail "a hook did not end, and: $out"
grep -q 'hook was killed after 1 s' <<<"$out" || fail "a hook that does not end: $out"
out=$(with_hooks 'echo ran' createContainer:first 2>&1) && fail "a hook of the container's namespaces ran: $out"
grep -q 'createContainer hooks run in a container' <<<"$out" && [ ! -e "$work/hooks" ] || fail "createContainer: $out"
no_networks() { [ "$(networks)" = "$others" ]; }
wait_until 30 no_networks || fail "processes with networks are left: $(networks)"
ok "hooks run in order with the container's state; one that fails or does not end fails the container"
if [ -e /dev/net/tun ] && type -P nft ip nsenter >/dev/null; then
    # shellcheck disable=SC2016 # the guest's
    out=$(with_hooks 'until busybox ip -o addr | busybox grep -o "10.254.77.2/24"; do busybox sleep 0.1; done' createRuntime:wired 2>&1) ||
        fail "a network of a hook's: $out $(explain)"
    [ "$out" = 10.254.77.2/24 ] || fail "a network of a hook's: $out"
    unwired() { ! ip link show sw-e2e-hook >/dev/null 2>&1; }
    wait_until 30 unwired || { ip link delete sw-e2e-hook; fail "the network of a hook's is left"; }
    ok "the guest has the interface that a hook has made, and it goes with the container"
else
    printf 'SKIPPED: %s\n' "e2e/$test_name: a network of a hook's needs nft, ip, nsenter and /dev/net/tun"
fi

# A logger: a program of the host that gets both outputs.
cat >"$work/logger" <<'END'
#!/bin/sh
exec 5>&-
copy() { while read -r line; do echo "$1 $line"; done; }
{
    copy err <&4 &
    copy out <&3
    wait
    echo "$CONTAINER_NAMESPACE/$CONTAINER_ID $* $OWN"
} >>"$2"
END
chmod 755 "$work/logger"
logged() { run --log-uri "binary://$work/logger?file=$work/log&env.OWN=its%20own" "$@"; }
has_last() { [ "$(tail -n 1 "$work/log")" = "default/$1 file $work/log its own" ]; }
refuses 'the logger /no/such/logger cannot be run' --log-uri binary:///no/such/logger "$image" unlogged true
wait_until 60 no_shims || fail "shims: $(shims) $(holders)"
logged -d "$image" logged sh -c 'echo two >&2; i=0; until [ -e /stop ]; do i=$((i + 1)); echo "line $i"; sleep 0.01; done; echo "last $i"; exit 4' >/dev/null ||
    fail "a logger of a detached container: $(explain)"
wait_until 60 grep -q 'line 20$' "$work/log" || fail "a logger: $(cat "$work/log") $(explain)"
kill -9 "$(shims)" || fail "no single shim: $(shims)"
seen=$(wc -l <"$work/log")
more() { [ "$(wc -l <"$work/log")" -gt "$((seen + 20))" ]; }
wait_until 60 more || fail "no more lines after kill -9 of the shim: $(tail -n 3 "$work/log") $(explain)"
c task exec --exec-id stop --fifo-dir "$work/fifo" logged sh -c ': >/stop' </dev/null
wait_until 60 stopped logged || fail "a logged container goes on: $(c task ls) $(explain)"
c task delete logged >"$work/out" 2>&1
grep -q 'exit code 4' "$work/out" || fail "delete says: $(cat "$work/out")"
c container delete logged || fail "container delete: $(explain)"
wait_until 30 has_last logged || fail "the logger goes on: $(tail -n 3 "$work/log") $(pgrep -af "$work/logger")"
[ "$(grep -cx 'err two' "$work/log")" = 1 ] || fail "a logger of errors: $(grep -v '^out line' "$work/log")"
count=$(($(wc -l <"$work/log") - 3))
cmp <(seq -f 'out line %.0f' "$count"; echo "out last $count") <(head -n -1 "$work/log" | grep -vx 'err two') || fail "$(tail -n 3 "$work/log")"
ok "a logger gets both outputs; the shim was killed: $count lines, each once, and the logger ended"

# From 2.1 on containerd can keep layers as EROFS files.
if c plugins ls 2>/dev/null | grep -qE '^io.containerd.snapshotter.v1 +erofs .* ok'; then
    mounts=$(grep -c ' erofs ' /proc/mounts)
    for name in erofs-1 erofs-2; do
        [ "$(run --rm --snapshotter erofs "$image" $name cat /etc/slipway-test)" = 'second layer' ] || fail "$name: $(explain)"
    done
    chain=$(images | grep -vxF "$before")
    [ "$(wc -w <<<"$chain")" = 1 ] || fail "images: $(images)"
    # containerd 2.1 mounts a layer when it is asked for it; later ones leave that to the shim.
    [ "$(containerd --version | grep -c ' v\?2\.1\.')" = 1 ] || [ "$(grep -c ' erofs ' /proc/mounts)" = "$mounts" ] ||
        fail "mounted: $(grep ' erofs ' /proc/mounts)"
    "$slipway" image rm "$chain" >/dev/null || fail "the image of EROFS layers stays"
    ok "layers of the EROFS snapshotter are one image, made once, and nothing is mounted for it"
fi

# Machines are saved by slipway-vmm.
if [ "${SLIPWAY_VMM:-}" = native ]; then
    inside() { c task exec --exec-id "in-$RANDOM" --fifo-dir "$work/fifo" "$@" </dev/null 2>/dev/null; }
    ends() { inside "$1" touch /tmp/stop; wait_until 60 stopped "$1" || fail "$1 goes on: $(c task ls) $(explain)"; c task delete "$1" >/dev/null 2>&1; }
    run -d --annotation dev.slipway.memory=128M --annotation dev.slipway.layers=32M "$image" saved \
        sh -c 'status=6; echo kept >/tmp/kept; until [ -e /tmp/stop ]; do sleep 0.1; done; exit $status' >/dev/null || fail "saved: $(explain)"
    wait_until 30 inside saved test -s /tmp/kept || fail "saved: $(explain)"
    checkpoint=$(c task checkpoint saved 2>"$work/err") || fail "task checkpoint: $(cat "$work/err") $(explain)"
    ends saved; status=$?
    [ "$status" = 6 ] || fail "the saved container: status $status $(explain)"
    run -d --checkpoint "$checkpoint" "$image" again >/dev/null 2>"$work/err" || fail "run --checkpoint: $(cat "$work/err") $(explain)"
    [ "$(inside again cat /tmp/kept)" = kept ] || fail "its root: $(explain)"
    ends again; status=$?
    [ "$status" = 6 ] || fail "a container of a checkpoint: status $status $(explain)"
    [ -z "$("$slipway" snapshot ls | tail -n +2)" ] || fail "snapshots: $("$slipway" snapshot ls)"
    c container delete saved again && c image rm "$checkpoint" >/dev/null || fail "container delete: $(explain)"
    grep -q /tasks/checkpointed "$work/events" || fail "no event /tasks/checkpointed: $(cat "$work/events")"
    ok "a container goes on after its checkpoint, and another one begins with that"
fi

wait_until 60 no_shims || fail "shims: $(shims) $(holders)"
run -d "$image" orphan sleep 1000 >/dev/null || fail "orphan: $(explain)"
one_of_each() { one_shim && [ "$(holders | wc -l)" = 1 ]; }
wait_until 60 one_of_each || fail "shims: $(shims) $(holders)"
pid=$(shims) holder=$(holders)
score=$(cat "/proc/$containerd/oom_score_adj"); [ "$score" -lt 1000 ] && score=$((score + 1))
for process in "$pid" "$holder"; do
    [ "$(cat "/proc/$process/oom_score_adj")" = "$score" ] || fail "the shim's OOM score: $(cat "/proc/$process/oom_score_adj"), not $score"
done
private=$(cat "/proc/$pid/smaps_rollup" "/proc/$holder/smaps_rollup" | awk '/^Private_/ { sum += $2 } END { print sum }')
most=5120
with_assertions && most=7168
[ "$private" -le $most ] || fail "a shim and its holder have $private KiB of their own"
end_shims
gone() { [ -z "$("$slipway" ps --quiet)" ] && [ -z "$(c task ls -q)" ]; }
wait_until 60 gone || fail "after kill -9 of the shim and its holder: $("$slipway" ps) $(c task ls) $(explain)"
c container delete orphan || fail "container delete: $(explain)"
ok "a shim and its holder (private memory: $private KiB) were killed: containerd cleaned up, and the sandbox is gone"

for event in create start exit delete exec-added exec-started; do
    grep -q "/tasks/$event" "$work/events" || fail "no event /tasks/$event: $(cat "$work/events")"
done
python3 - "$work/events" <<'P' || fail "events of the first container: $(cat "$work/events")"
import sys
topics = [line.split(" /tasks/")[1].split()[0] for line in open(sys.argv[1]) if " /tasks/" in line and '"first"' in line]
assert topics == ["create", "start", "exit", "delete"], topics
P
ok "events: create, start, exit, delete, in this order"

[ "$(images)" = "$before" ] || fail "images: $(images)"
"$slipway" image rm "$before" >/dev/null || fail "the image stays"
left() { shims; holders; leftovers; grep -F "$work/" /proc/mounts; sockets | comm -13 "$work/sockets" -; }
nothing_left() { [ -z "$(left)" ]; }
wait_until 60 nothing_left || fail "left: $(left)"
ok "nothing is left: no sandbox, no shim, no mount, no socket"
