# A part of 16-snapshots, whose functions and pod it uses: the pod goes to a file with its containers, and comes back.
# shellcheck shell=bash disable=SC2154

# A pod with its containers. One is paused by its user, and stays so; one ends after the pod has come back.
# of_pod CONTAINER: its state.
of_pod() { "$slipway" ps --json | python3 -c 'import json, sys
boxes = {box["name"]: box["containers"] for box in json.load(sys.stdin)}
print(next((one["state"] for one in boxes["pod"] if one["name"] == sys.argv[1]), "gone"))' "$1"; }
is_of_pod() { [ "$(of_pod "$1")" = "$2" ]; }
# shellcheck disable=SC2016
numbers='n=0; while :; do n=$((n + 1)); echo $n >/count; echo $n; sleep 0.2; done'
timeout 120 "$slipway" run --detach --pod pod --name one --memory 64M "$image" -- sh -c "$numbers" >/dev/null || fail "pod/one: $(explain)"
timeout 120 "$slipway" run --detach --pod pod --name still "$image" -- sh -c "$numbers" >/dev/null || fail "pod/still: $(explain)"
# shellcheck disable=SC2016
"$slipway" run --pod pod --name ends "$image" -- sh -c 'echo here; until [ -e /end ]; do sleep 0.1; done; echo gone; exit 7' >"$work/ends" &
client=$!
wait_until 120 grep -q here "$work/ends" || fail "no output of pod/ends: $(explain)"
# shellcheck disable=SC2016
blob='dd if=/blob bs=64k iflag=direct 2>/dev/null | sha256sum'
in_sandbox pod/one sh -c 'dd if=/dev/urandom of=/blob bs=64k count=32 conv=fsync 2>/dev/null' || fail "blob: $(explain)"
was=$(in_sandbox pod/one sh -c "$blob; cat /sys/fs/cgroup/memory.max; ip -o -4 address show dev eth0")
counts_on pod/one pod/still
"$slipway" pause pod/still >/dev/null || fail "pause pod/still: $(explain)"
says 'a container of a pod: pause the pod' pause --to-file pod/one
of_one=$SLIPWAY_DATA_DIR/sandboxes/$(of_ps pod id)/saved-layer-one
nsid=$("$slipway" endpoint attach pod ram:1M) || fail "attach: $(explain)"
says "slipway endpoint detach pod $nsid" pause --to-file pod
"$slipway" endpoint detach pod "$nsid" >/dev/null || fail "detach: $(explain)"
counts_on pod/one
goes_to_file pod
for name in one still ends; do is_of_pod "$name" paused || fail "pod/$name is $(of_pod "$name")"; done
says 'pod is paused.*slipway resume' exec pod/one -- true
says 'pod is paused.*slipway resume' stop pod/one
says 'pod is paused.*slipway resume' rm --force pod/one
says 'pod is paused.*slipway resume' run --detach --pod pod --name never "$image" -- true
comes_back pod
counts_on pod/one
sequence pod/one 1 1
[ "$(in_sandbox pod/one sh -c "$blob; cat /sys/fs/cgroup/memory.max; ip -o -4 address show dev eth0")" = "$was" ] ||
    fail "the files, the limit or the address of pod/one differ: $was"
is_of_pod still paused || fail "pod/still is $(of_pod still)"
in_sandbox pod/ends touch /end || fail "exec: $(explain)"
wait "$client"
[ $? = 7 ] || fail "not the status of pod/ends: $(explain)"
[ "$(cat "$work/ends")" = "here
gone" ] || fail "the output: $(cat "$work/ends")"
[ "$(timeout 120 "$slipway" run --rm --pod pod "$image" -- echo on)" = on ] || fail "a further container: $(explain)"
ok "a pod gives its memory to a file and comes back, with files, limits, output and exit statuses of its containers"

goes_to_file pod
end_daemon KILL
start_daemon
wait_until 60 in_file pod || fail "after SIGKILL: $("$slipway" ps; explain)"
comes_back pod
"$slipway" resume pod/still >/dev/null || fail "resume pod/still: $(explain)"
counts_on pod/one pod/still
sequence pod/one 1 1
sequence pod/still 1 1
[ "$(in_sandbox pod/one sh -c "$blob; cat /sys/fs/cgroup/memory.max; ip -o -4 address show dev eth0")" = "$was" ] ||
    fail "the files, the limit or the address of pod/one differ: $was"
[ -e "$of_one" ] || fail "no file under the layer of pod/one"
"$slipway" rm --force pod/one pod/still pod/ends >/dev/null || fail "rm: $(explain)"
[ ! -e "$of_one" ] || fail "the file under the layer of pod/one is left"
ok "a pod in a file outlives a daemon, and comes back a second time with its containers"
