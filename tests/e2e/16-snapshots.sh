#!/usr/bin/env bash
# Snapshots: a sandbox is saved while it runs, and goes on; others begin with its container. Each has what it had
# written, and from there on disks, addresses, a name and random numbers of its own. With QEMU a snapshot is refused in
# one line. In a network namespace of the test's own.
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
# shellcheck source=tests/e2e/counts.sh
. "$here/counts.sh"
need_network_node "$@"
end_all() { rm -f "$SLIPWAY_RUN_DIR"/vf.ledger*; }
end_all
start_keeper

in_sandbox() { timeout 60 "$slipway" exec "$1" -- "${@:2}"; }
# says PATTERN COMMAND... : the command of slipway fails with one line, which matches.
says() {
    local said
    said=$(timeout 120 "$slipway" "${@:2}" 2>&1 </dev/null) && fail "no error: slipway ${*:2}: $said"
    [ "$(wc -l <<<"$said")" = 1 ] || fail "more than a line: slipway ${*:2}: $said"
    grep -qiE -- "$1" <<<"$said" || fail "slipway ${*:2}: $said"
}
snapshots() { "$slipway" snapshot ls --json | python3 -c 'import json, sys
for one in json.load(sys.stdin): print(one["name"], one["sandbox"], one["memory_bytes"] >> 20, *one["volumes"])'; }
templates=$SLIPWAY_DATA_DIR/templates

if [ "${SLIPWAY_VMM:-}" != native ]; then
    export SLIPWAY_VMM=qemu
    start_daemon
    timeout 300 "$slipway" run --detach --name parent --network none "$image" -- sleep 10000 >/dev/null || fail "run: $(explain)"
    says 'qemu|slipway-vmm' snapshot create parent one
    says 'qemu|slipway-vmm' fork parent
    says 'no template or snapshot "one"' run --from one
    [ "$(in_sandbox parent echo on)" = on ] || fail "the sandbox does not go on: $(explain)"
    [ "$("$slipway" ps --quiet)" = parent ] || fail "a sandbox is left: $("$slipway" ps)"
    [ -z "$(ls "$templates" 2>/dev/null)$(snapshots)" ] || fail "left: $(ls "$templates")"
    ok "with QEMU a snapshot is refused, the sandbox goes on, and nothing is left"
    skip "slipway-vmm on KVM (SLIPWAY_VMM=native): lab/kvm-host --test $test_name SLIPWAY"
fi
start_daemon

# Says back each line that it is told.
echoes='
import socket, threading
server = socket.create_server(("0.0.0.0", 80), backlog=16)
def serve(client):
    try:
        while data := client.recv(4096): client.sendall(data)
    except OSError: pass
while True:
    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
'
# One connection for good. Its state is in /talk.
talks='
import os, socket, time
talk, count = socket.create_connection(("peer", 80), 60), 0
talk.settimeout(120)
def say(text):
    with open("/talk.new", "w") as file: file.write(text + "\n")
    os.rename("/talk.new", "/talk")
try:
    while True:
        line, told = b"%d\n" % count, b""
        talk.sendall(line)
        while len(told) < len(line):
            more = talk.recv(64)
            if not more: raise EOFError
            told += more
        count += 1
        say("goes %d" % count if told == line else "wrong")
        time.sleep(0.3)
except TimeoutError: say("hung")
except Exception as error: say("cut by " + type(error).__name__)
'
# shellcheck disable=SC2016 # for the shell of the sandbox
counts='python3 -c "$0" & n=0
while :; do
    n=$((n + 1)); read -r uuid </proc/sys/kernel/random/uuid
    echo $n >/count; echo $n >/data/count; echo "$n $uuid"
    sleep 0.2
done'

mkdir "$work/shared"
timeout 120 "$slipway" run --detach --name peer --wait-network -v "$work/shared:/shared" "$image" -- python3 -c "$echoes" >/dev/null ||
    fail "run peer: $(explain)"
timeout 120 "$slipway" run --detach --name parent --wait-network --volume data:16M:/data "$image" -- sh -c "$counts" "$talks" >/dev/null ||
    fail "run parent: $(explain)"

# shellcheck disable=SC2016
in_file() { in_sandbox "$1" sh -c 'until read -r n <"$0"; do :; done; echo "$n"' "$2"; }
talk_is() { in_sandbox "$1" cat /talk | grep -qE "$2"; }
talk_beyond() { [ "$(in_sandbox "$1" sed -n 's/^goes //p' /talk)" -gt "$2" ]; }
talks_on() { wait_until 60 talk_beyond "$1" "$(in_sandbox "$1" sed -n 's/^goes //p' /talk)" || fail "$1: $(in_sandbox "$1" cat /talk)"; }

# In the root and in the volume, past the guest's cache.
# shellcheck disable=SC2016
blobs='for at in /blob /data/blob; do dd if=$at bs=64k iflag=direct 2>/dev/null | sha256sum; done'
wait_until 60 talk_is parent '^goes ' || fail "no connection: $(explain)"
in_sandbox parent sh -c 'for at in /blob /data/blob; do dd if=/dev/urandom of=$at bs=64k count=32 conv=fsync 2>/dev/null || exit; done' ||
    fail "blobs: $(explain)"
blob=$(in_sandbox parent sh -c "$blobs")
# A line that was on its way to the log when the sandbox was saved may be in none.
before=$(last parent)
[ "$(timeout 120 "$slipway" snapshot create parent s 2>"$work/pause")" = s ] || fail "snapshot create: $(cat "$work/pause") $(explain)"
after=$(last parent)
grep -q '^slipway: parent stood still for [0-9]* ms$' "$work/pause" || fail "the pause: $(cat "$work/pause")"
[ "$(snapshots)" = "s parent 256 data" ] || fail "snapshots: $(snapshots)"
"$slipway" template ls --json | grep -q '"s"' && fail "template ls has a snapshot"
counts_on parent
talks_on parent
ok "a running sandbox is saved and goes on, and so does its connection: $(cat "$work/pause")"
say "$("$slipway" snapshot ls | tail -n 1)"

for name in one two; do
    begin=$EPOCHREALTIME
    [ "$(timeout 120 "$slipway" run --detach --from s --name "$name")" = "$name" ] || fail "run $name: $(explain)"
    say "a fork in $(((${EPOCHREALTIME/./} - ${begin/./}) / 1000)) ms"
done
counts_on one two parent
for name in one two; do
    sequence "$name" "$before" $((after + 3))
    for file in /count /data/count; do
        [ "$(in_file "$name" "$file")" -ge "$before" ] || fail "$file of $name: $(in_file "$name" "$file"), before: $before"
    done
    [ "$(in_sandbox "$name" sh -c "$blobs")" = "$blob" ] || fail "the files of $name differ"
done
sequence parent 1 1
ok "two forks go on from the counter in root, volume and output, and all that was written is there"

# shellcheck disable=SC2016
who='read -r mac </sys/class/net/eth0/address; set -- $(ip -o -4 address show dev eth0)
    grep -q "^${4%/*}[[:space:]]$(hostname)\$" /etc/hosts && echo "$(hostname) $mac ${4%/*} $(cat /etc/machine-id)"'
lines=$(for name in parent one two; do in_sandbox "$name" sh -c "$who"; done)
[ "$(cut -d ' ' -f 1 <<<"$lines" | tr '\n' ' ')" = "parent one two " ] || fail "names: $lines"
for field in 2 3 4; do
    [ "$(cut -d ' ' -f $field <<<"$lines" | sort -u | wc -l)" = 3 ] || fail "two are alike: $lines"
done
# Each line of output has a number of the kernel's generator. The program may have drawn that of a fork's first line before
# the sandbox was saved: then it is the parent's of the same count. All others differ, and so do those of new processes, which
# OpenSSL draws too.
for name in parent one two; do
    "$slipway" logs "$name" | grep ' ' >"$work/drawn-$name" || fail "no output of $name"
    in_sandbox "$name" sh -c 'cat /proc/sys/kernel/random/uuid; python3 -c "import ssl; print(ssl.RAND_bytes(16).hex())"' >>"$work/drawn" ||
        fail "exec in $name: $(explain)"
done
alike=$(python3 - "$work" <<'END'
import collections, sys
parent, *forks = ([tuple(line.split()) for line in open(f"{sys.argv[1]}/drawn-{name}")] for name in ("parent", "one", "two"))
for fork in forks:
    if fork[0] in parent: del fork[0]
drawn = [number for lines in (parent, *forks) for _, number in lines] + open(f"{sys.argv[1]}/drawn").read().split()
assert len(drawn) > 6, drawn
print(*[number for number, times in collections.Counter(drawn).items() if times > 1])
END
) || fail "random numbers: $(cat "$work"/drawn*)"
[ -z "$alike" ] || fail "random numbers that came twice: $alike"
ok "parent and forks differ in host name, MAC address, addresses, /etc/hosts, machine id and random numbers"

for name in one two; do
    wait_until 60 talk_is "$name" '^(cut|hung|wrong)' || fail "the connection of $name: $(in_sandbox "$name" cat /talk)"
    talk_is "$name" '^cut by (Connection|BrokenPipe)' || fail "the connection of $name: $(in_sandbox "$name" cat /talk)"
done
talks_on parent
in_sandbox one ping -c 1 -W 20 parent >/dev/null || fail "one does not reach parent: $(explain)"
in_sandbox parent ping -c 1 -W 20 two >/dev/null || fail "parent does not reach two: $(explain)"
in_sandbox two ping -c 1 -W 20 one >/dev/null || fail "two does not reach one: $(explain)"
in_sandbox one python3 -c 'import socket
with socket.create_connection(("peer", 80), 60) as talk:
    talk.sendall(b"again")
    assert talk.recv(16) == b"again"' || fail "one does not reach peer: $(explain)"
ok "the forks' copies of the connection are cut, the parent's goes on, and they reach each other by name"

in_sandbox one sh -c 'echo one >/mine && echo one >/data/mine && sync' || fail "one writes: $(explain)"
for name in two parent; do
    in_sandbox "$name" sh -c '[ ! -e /mine ] && [ ! -e /data/mine ]' || fail "$name sees what one wrote"
done
ok "a write in a fork is seen by that fork alone"

vmms_are() { echo "$(vmm_of parent),$(vmm_of one),$(vmm_of two)"; }
vmms=$(vmms_are)
end_daemon KILL
start_daemon
for name in parent one two; do wait_until 60 is_state "$name" running || fail "after SIGKILL: $("$slipway" ps; explain)"; done
counts_on parent one two
[ "$("$slipway" snapshot rm s)" = s ] || fail "snapshot rm: $(explain)"
[ -z "$(snapshots)$(ls "$templates")" ] || fail "left: $(ls "$templates")"
end_daemon TERM
start_daemon
for name in parent one two; do wait_until 60 is_state "$name" running || fail "after SIGTERM: $("$slipway" ps; explain)"; done
counts_on parent one two
[ "$vmms" = "$(vmms_are)" ] || fail "other VMMs: $("$slipway" ps; explain)"
for name in one two; do
    sequence "$name" "$before" $((after + 3))
    [ "$(in_sandbox "$name" sh -c "$blobs")" = "$blob" ] || fail "the files of $name differ after two daemons"
done
talks_on parent
ok "the forks outlive two daemons, one of them killed, and the snapshot"
"$slipway" rm --force one two >/dev/null || fail "rm: $(explain)"

[ "$(timeout 120 "$slipway" fork parent --count 3 --name f 2>"$work/pause" | sort | tr '\n' ' ')" = "f-1 f-2 f-3 " ] ||
    fail "fork: $(cat "$work/pause") $(explain)"
grep -q '^slipway: parent stood still for [0-9]* ms$' "$work/pause" || fail "the pause: $(cat "$work/pause")"
[ -z "$(snapshots)$(ls "$templates")" ] || fail "left: $(ls "$templates")"
counts_on f-1 f-2 f-3 parent
[ "$(timeout 120 "$slipway" fork f-1 --name g 2>/dev/null)" = g ] || fail "a fork of a fork: $(explain)"
counts_on g f-1
[ "$(in_sandbox g sh -c "hostname; $blobs")" = "g
$blob" ] || fail "a fork of a fork: $(explain)"
"$slipway" rm --force f-1 f-2 f-3 g >/dev/null || fail "rm: $(explain)"
grep -q 'no memory is copied ahead' "$work/daemon.log" && fail "memory was copied in a pause: $(explain)"
ok "three forks of a running sandbox by one command, and a fork of a fork"

timeout 120 "$slipway" snapshot create parent s >/dev/null 2>&1 || fail "snapshot create: $(explain)"
"$slipway" run --rm --from s --name front >"$work/front" 2>&1 & client=$!
speaks() { grep -qE '^[0-9]+ ' "$work/front"; }
wait_until 60 speaks || fail "a fork in the foreground: $(cat "$work/front") $(explain)"
"$slipway" kill front >/dev/null || fail "kill: $(explain)"
wait "$client"
[ $? = 137 ] || fail "the status of a fork in the foreground: $(cat "$work/front")"
ok "a fork in the foreground shows its output, and its exit status"

timeout 120 "$slipway" pod create pod >/dev/null || fail "pod create: $(explain)"
says 'pod' snapshot create pod t
says 'pod cannot be saved as a snapshot: it is a pod' fork pod --name never
says 'peer cannot be saved as a snapshot: it has directories' fork peer --name never
says 'nothing' fork nothing --name never
says 'director|share' snapshot create peer t
says 'nothing' snapshot create nothing t
says '"s"' snapshot create parent s
says 'leave the image and the command out' run --from s "$image" -- true
says 'leave --memory out' run --from s --memory 512M
says 'leave --volume out' run --from s --volume more:1M
says 'no template or snapshot "nothing"' run --from nothing
says 'snapshot rm' template rm s
[ "$(snapshots)" = "s parent 256 data" ] || fail "snapshots: $(snapshots)"
[ "$("$slipway" ps --quiet | sort | tr '\n' ' ')" = "parent peer pod " ] || fail "sandboxes: $("$slipway" ps)"
ok "what cannot be saved, and what a snapshot has already, is refused in one line"

# flip PATH: changes a byte of a file of a save, and changes it back: of JSON one in the name of the sandbox that was saved, and one
# of the first data of any other.
flip() { python3 -c 'import os, re, sys
file = os.open(sys.argv[1], os.O_RDWR)
is_json = sys.argv[1].endswith(".json")
at = re.search(rb"\"[pq]arent\"", os.pread(file, 1 << 20, 0)).start() + 1 if is_json else os.lseek(file, 0, os.SEEK_DATA) + 64
os.pwrite(file, bytes([os.pread(file, 1, at)[0] ^ (1 if is_json else 0xff)]), at)' "$1" || fail "cannot change $1"; }
# The next daemon has checked nothing yet.
end_daemon TERM
start_daemon
mapfile -t files < <(find "$templates/s" -type f ! -name 'working-set*')
for file in "${files[@]}"; do
    flip "$file"
    says 'changed|damaged|length' run --detach --from s --name never
    flip "$file"
done
[ ${#files[@]} -ge 4 ] || fail "only ${#files[@]} files: ${files[*]}"
[ "$("$slipway" ps --quiet | sort | tr '\n' ' ')" = "parent peer pod " ] || fail "sandboxes: $("$slipway" ps)"
# is_unused FILE: the daemon has said that it does not use this working set.
is_unused() { grep -F "a working set is not used" "$work/daemon.log" | grep -qF "$1"; }
set=$templates/s/working-set
[ -s "$set" ] || fail "no working set after forks of s: $(ls "$templates/s")"
flip "$set"
[ "$(timeout 120 "$slipway" run --detach --rm --from s --name whole)" = whole ] || fail "a fork of a whole snapshot: $(explain)"
is_unused "$set" || fail "a damaged working set is not named: $(explain)"
wait_until 60 python3 -c 'import json, sys; json.load(open(sys.argv[1]))' "$set" || fail "the working set is not made anew: $(explain)"
"$slipway" rm --force whole >/dev/null || fail "rm: $(explain)"
ok "a snapshot with a changed byte in any of its ${#files[@]} files is refused, and its working set is made anew"

# The memory of a sandbox goes to a file, and its VMM ends. It comes back as it was, with its connection.
# of_ps SANDBOX FIELD: what `slipway ps` says of it.
of_ps() { "$slipway" ps --json | python3 -c 'import json, sys
print(next(box[sys.argv[2]] for box in json.load(sys.stdin) if box["name"] == sys.argv[1]))' "$@"; }
in_file() { is_state "$1" paused && [ "$(of_ps "$1" in_file)" = True ]; }
comes_back() {
    timeout 300 "$slipway" resume "$1" >/dev/null 2>"$work/back" || fail "resume: $(cat "$work/back") $(explain)"
    for moment in ready 'first exec' 'last page'; do
        grep -qE "^slipway: $1: $moment after [0-9]+ ms\$" "$work/back" || fail "no $moment: $(cat "$work/back")"
    done
}
goes_to_file() {
    local vmm
    vmm=$(vmm_of "$1")
    timeout 300 "$slipway" pause --to-file "$1" >/dev/null || fail "pause: $(explain)"
    runs "$vmm" && fail "its VMM $vmm runs on"
    in_file "$1" || fail "not in a file: $("$slipway" ps)"
    "$slipway" ps | grep -qE "$1 .*paused \(in a file\)" || fail "ps: $("$slipway" ps)"
}
saved=$SLIPWAY_DATA_DIR/sandboxes/$(of_ps parent id)/paused
set=$(dirname "$saved")/working-set
set_kib() { python3 -c 'import json, sys
print(sum(end - start for start, end in json.load(open(sys.argv[1]))["ranges"]) >> 10)' "$set"; }
was=$(in_sandbox parent sh -c "$who")
before=$(last parent)
goes_to_file parent
says 'is paused.*slipway resume' exec parent -- true
says 'paused' pause --to-file parent
says 'slipway resume' kill --signal TERM parent
say "$(du -sh "$saved" | cut -f 1) in a file"
comes_back parent
say "$(cut -d ' ' -f 2- "$work/back" | paste -sd ',')"
[ ! -e "$saved" ] || fail "the file is left"
say "a working set of $(set_kib) KiB"
[ "$(set_kib)" -gt 0 ] || fail "no working set: $(explain)"
counts_on parent
talks_on parent
sequence parent 1 1
[ "$(in_sandbox parent sh -c "$who")" = "$was" ] || fail "another name or address: $was"
[ "$(in_sandbox parent sh -c "$blobs")" = "$blob" ] || fail "the files of parent differ"
in_sandbox peer ping -c 1 -W 20 parent >/dev/null || fail "parent is not reached: $(explain)"
[ "$(last parent)" -gt "$before" ] || fail "parent does not count"
ok "a sandbox gives its memory to a file and comes back, with its addresses, files, output and connection"

goes_to_file parent
files=("$saved"/*)
end_daemon KILL
start_daemon
wait_until 60 in_file parent || fail "after SIGKILL: $("$slipway" ps; explain)"
for file in "${files[@]}"; do
    flip "$file"
    says 'changed|damaged|length' resume parent
    in_file parent || fail "not in its file any more: $("$slipway" ps)"
    flip "$file"
done
cp --sparse=always "$saved/memory" "$work/memory" && truncate -s -1M "$saved/memory" || fail "cannot cut the file"
says 'another length' resume parent
cp --sparse=always "$work/memory" "$saved/memory" || fail "cannot mend the file"
rm "$work/memory"
is_unused "$set" && fail "the working set is sound: $(explain)"
flip "$set"
comes_back parent
is_unused "$set" || fail "a damaged working set is not named: $(explain)"
[ "$(set_kib)" -gt 0 ] || fail "the working set is not made anew: $(explain)"
counts_on parent
talks_on parent
sequence parent 1 1
ok "a sandbox in a file outlives a daemon, comes back a second time, also without its working set, and not from a file that was cut or changed"

# shellcheck disable=SC2016
"$slipway" run --rm --name front --network none "$image" -- sh -c 'echo here; until [ -e /end ]; do sleep 0.1; done; echo gone; exit 7' >"$work/front" &
client=$!
wait_until 120 grep -q here "$work/front" || fail "no output: $(explain)"
goes_to_file front
comes_back front
in_sandbox front touch /end || fail "exec: $(explain)"
wait "$client"
[ $? = 7 ] || fail "not the status of the container: $(explain)"
[ "$(cat "$work/front")" = "here
gone" ] || fail "the output: $(cat "$work/front")"
timeout 120 "$slipway" run --detach --name killed --network none "$image" -- sleep 1000 >/dev/null || fail "run: $(explain)"
goes_to_file killed
"$slipway" kill killed >/dev/null || fail "kill: $(explain)"
wait_until 60 is_state killed exited || fail "not killed: $("$slipway" ps)"
[ ! -e "$SLIPWAY_DATA_DIR/sandboxes/$(of_ps killed id)/paused" ] || fail "the file of a sandbox that was killed is left"
"$slipway" rm killed >/dev/null || fail "rm: $(explain)"
says 'directories of the host' pause --to-file peer
ok "an attached run gets output and exit status of a sandbox that came back; SIGKILL ends one in its file"

# Pods in files: with SLIPWAY_SOAK=1, as `make soak` has it.
if [ -n "${SLIPWAY_SOAK:-}" ]; then
    # shellcheck source=tests/e2e/pod-in-file.sh
    . "$here/pod-in-file.sh"
fi

# other WHAT: makes the snapshot WHAT of s, as one would be of another build, processor, layout or agent. Its digests are right.
other() { python3 - "$templates" "$1" <<'END' || fail "no snapshot of another $1"
import hashlib, json, os, sys
source, copy, what = sys.argv[1] + "/s", "/".join(sys.argv[1:3]), sys.argv[2]
os.mkdir(copy, 0o700)
for name in set(os.listdir(source)) - {"machine", "template.json"}: os.link(f"{source}/{name}", f"{copy}/{name}")
with open(f"{source}/machine", "rb") as file: state = file.read()
with open(f"{source}/template.json") as file: manifest = json.load(file)
# Behind the header (host/vmm/src/state/mod.rs): a line of what must be the same, and one of the rest.
identity, rest = state[56:].split(b"\n", 1)
identity = json.loads(identity)
manifest["name"] = what
if what == "build": identity["build"] += "-other"
if what == "processor": identity["shown"]["processor"] = "another"
if what == "layout": manifest["version"] += 1
if what == "agent": manifest["shape"]["initramfs"] += "-other"
content = json.dumps(identity).encode() + b"\n" + rest
state = state[:16] + len(content).to_bytes(8, "little") + hashlib.sha256(content).digest() + content
manifest["machine_sha256"] = hashlib.sha256(state).hexdigest()
del manifest["sha256"]
described = json.dumps(manifest, separators=(",", ":"), sort_keys=True, ensure_ascii=False)
manifest["sha256"] = hashlib.sha256(described.encode()).hexdigest()
with open(f"{copy}/machine", "wb") as file: file.write(state)
with open(f"{copy}/template.json", "w") as file: json.dump(manifest, file)
END
}
# without WHAT PATTERN: no sandbox begins with it, for the reason that matches, and nothing of the attempt is left.
without() {
    other "$1"
    says "$2" run --detach --rm --from "$1" --name never
    wait_until 60 is_state never gone || fail "a sandbox is left: $("$slipway" ps)"
    "$slipway" snapshot rm "$1" >/dev/null || fail "snapshot rm $1: $(explain)"
}
without build 'slipway-vmm: it was saved with [^ ]*-other, and this machine has'
without processor 'the processor: it was saved with another, and this machine has'
without layout 'it has layout [0-9]+, this version reads [0-9]+'
without agent 'it was made with another agent'
ok "a snapshot of another build, processor, layout or agent is refused in one line that names it"

# The file of the image is gone, which Slipway's own commands leave while there is a snapshot of it.
of_image=$(python3 -c 'import json, sys
print(json.load(open(sys.argv[1]))["snapshot"]["settings"]["image_path"])' "$templates/s/template.json") || fail "no path of the image"
mv "$of_image" "$of_image.gone" || fail "the image has no file"
says 'the image "[^"]*" is not in the cache' run --detach --from s --name never
mv "$of_image.gone" "$of_image" || fail "the image is lost"
[ "$("$slipway" ps --quiet | sort | tr '\n' ' ')" = "parent peer pod " ] || fail "sandboxes: $("$slipway" ps)"
[ "$(timeout 120 "$slipway" run --detach --rm --from s --name back)" = back ] || fail "a fork with the image back: $(explain)"
"$slipway" rm --force back >/dev/null || fail "rm: $(explain)"
ok "without its image a fork is refused in one line, and begins once that is back"
"$slipway" snapshot rm s >/dev/null || fail "snapshot rm: $(explain)"

# A function of a pool has one queue pair; an interface that is made for a sandbox has one for each CPU.
"$slipway" vf create nics --switch default --count 1 >/dev/null || fail "vf create: $(explain)"
timeout 120 "$slipway" run --detach --name pooled --cpus 2 --wait-network --vf nics "$image" -- sleep 10000 >/dev/null ||
    fail "run pooled: $(explain)"
says 'that of a network namespace or of a pool' pause --to-file pooled
timeout 120 "$slipway" snapshot create pooled p >/dev/null 2>&1 || fail "snapshot create pooled: $(explain)"
says 'leave out the pool of functions' run --detach --from p --vf nics --name never
[ "$(timeout 120 "$slipway" run --detach --from p --name made)" = made ] || fail "a fork of a sandbox with a function of a pool: $(explain)"
in_sandbox made ping -c 1 -W 20 pooled >/dev/null || fail "made does not reach pooled: $(explain)"
in_sandbox pooled ping -c 1 -W 20 made >/dev/null || fail "pooled does not reach made: $(explain)"
"$slipway" rm --force pooled made >/dev/null || fail "rm: $(explain)"
"$slipway" snapshot rm p >/dev/null || fail "snapshot rm: $(explain)"
no_pool() { "$slipway" vf rm nics >/dev/null 2>&1; }
wait_until 60 no_pool || fail "vf rm: $(explain)"
ok "a sandbox with a function of a pool is saved, and its forks have interfaces made for them; its memory cannot be in a file"

# The controllers of a live fork and of its parent have serial numbers of their own. Both drivers know the one that was read when
# the parent booted.
timeout 120 "$slipway" run --detach --name serials --privileged --network none "$image" -- sleep 10000 >/dev/null ||
    fail "run serials: $(explain)"
[ "$(timeout 120 "$slipway" fork serials --name serials-too 2>/dev/null)" = serials-too ] || fail "fork serials: $(explain)"
for name in serials serials-too; do
    own=$(of_ps "$name" id)
    said=$(in_sandbox "$name" sh -c 'nvme id-ctrl /dev/nvme0 | sed -n "s/^sn *: *//p"; cat /sys/class/nvme/nvme0/serial' | tr -d ' ' | tr '\n' ' ')
    expected=$(of_ps serials id)
    [ "$said" = "${own^^} ${expected^^} " ] || fail "the serial numbers of $name, of the controller and of the driver: $said, not ${own^^} ${expected^^}"
done
"$slipway" rm --force serials serials-too >/dev/null || fail "rm: $(explain)"
ok "the controller of a live fork has a serial number of its own, and the driver that of the parent's"

# Killed while it is saved: the next daemon has the sandbox go on, and no file of the snapshot.
"$slipway" snapshot create parent cut >/dev/null 2>&1 & client=$!
wait_until 60 test -d "$templates/cut.unfinished" || fail "no snapshot begins: $(explain)"
end_daemon KILL
wait "$client" 2>/dev/null
start_daemon
wait_until 60 is_state parent running || fail "after SIGKILL: $("$slipway" ps; explain)"
counts_on parent
talks_on parent
sequence parent 1 1
[ -z "$(snapshots)$(ls "$templates")" ] || fail "left: $(ls "$templates")"
ok "a snapshot that was cut leaves nothing, and its sandbox goes on"
"$slipway" rm --force --all >/dev/null || fail "rm: $(explain)"
left=$(leftovers)
[ -z "$left" ] || fail "left: $left"
