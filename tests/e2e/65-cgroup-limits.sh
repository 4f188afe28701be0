#!/usr/bin/env bash
# A limit that the host cannot give: a start ends with one clear line and holds nothing, and the next one goes on.
. "$(dirname "$0")/lib.sh"
need_node
stop_daemon
parent=slipway-e2e-limits
if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
    # Version 2 gives a group what its parent has left, and refuses to make one that is too many.
    roots=(/sys/fs/cgroup)
    root=/sys/fs/cgroup file=cgroup.max.descendants none=0 all=max words='cannot create control group .*unavailable'
else
    # Version 1 refuses more CPU time than the parent has.
    roots=(/sys/fs/cgroup/memory /sys/fs/cgroup/cpu /sys/fs/cgroup/pids)
    root=/sys/fs/cgroup/cpu file=cpu.cfs_quota_us none=50000 all=-1 words='cannot set .*cpu\.cfs_quota_us: Invalid argument'
fi
mkdir -p "$root/$parent" 2>/dev/null || skip "writable control groups ($root)"
end_all() {
    local one
    end_node
    for one in "${roots[@]}"; do
        rmdir "$one/$parent" 2>/dev/null
    done
}
[ -w "$root/$parent/$file" ] || skip "control groups with $file"
echo "$none" >"$root/$parent/$file" || fail "cannot set $file"
cat >>"$SLIPWAY_CONFIG" <<CONFIG
cgroup_pool = 2
cgroup_parent = "/$parent"
CONFIG

groups() { find "$root/$parent" -mindepth 1 -type d 2>/dev/null; }
# Everything that a sandbox holds on the host but its record, one thing a line. A group of the pool's with no process in it is
# nobody's.
held() {
    vmms
    "$slipway" endpoint ls --json | grep '"id"'
    find "$SLIPWAY_RUN_DIR/s" -mindepth 1 -maxdepth 1 2>/dev/null
    groups | while read -r one; do cat "$one/cgroup.procs"; done
    groups | grep -v "/$parent/pool-"
}
nothing_held() { [ -z "$(held)" ]; }
ended() { [[ $(state_of "$1") =~ ^(failed|gone)$ ]]; }

# refused NAME ARGUMENTS…: a start that the host refuses.
refused() {
    local name=$1 status; shift
    timeout 120 "$slipway" run --name "$name" --cpus 1 --memory 128M "$@" "$image" -- true \
        >"$work/out" 2>"$work/err" </dev/null; status=$?
    [ "$status" != 0 ] || fail "a start succeeded with $file = $none"
    [ "$(grep -c . "$work/err")" = 1 ] || fail "$(grep -c . "$work/err") lines: $(cat "$work/err")"
    grep -q "$words" "$work/err" && grep -q "/$parent/" "$work/err" || fail "it says: $(cat "$work/err")"
    wait_until 60 ended "$name" || fail "the sandbox is $(state_of "$name")"
    wait_until 60 nothing_held || fail "held: $(held)"
    "$slipway" inspect "$name" 2>/dev/null | python3 -c 'import json, sys
one = (json.loads(sys.stdin.read() or "[]") or [{}])[0]
assert not one.get("cgroup") and not one.get("vmm_uid"), one' || fail "its record names a group or a user"
    "$slipway" rm "$name" >/dev/null 2>&1
    [ "$(state_of "$name")" = gone ] || fail "its record stays"
    ok "$name -> $status, $(cat "$work/err")"
}

start_daemon
refused limited
refused detached -d
# More than are ready, at once: nobody is served with what the host refused to another.
for n in 1 2 3 4 5; do
    "$slipway" run --rm --cpus 1 --memory 128M "$image" -- true >/dev/null 2>"$work/err$n" </dev/null & many[n]=$!
done
for n in 1 2 3 4 5; do
    ! wait "${many[n]}" || fail "start $n succeeded"
    grep -q "$words" "$work/err$n" || fail "start $n says: $(cat "$work/err$n")"
done
wait_until 60 nothing_held || fail "held: $(held)"
"$slipway" rm --force --all >/dev/null 2>&1
ok "five at once are refused"

echo "$all" >"$root/$parent/$file" || fail "cannot set $file"
"$slipway" run --rm --name limited --cpus 1 --memory 128M "$image" -- true || fail "run: $(explain)"
ok "once the host can give it, the same sandbox runs"
end_daemon TERM
[ -z "$(groups)" ] || fail "left: $(groups)"
[ -z "$(leftovers)" ] || fail "left: $(leftovers)"
ok "nothing is left"
