#!/usr/bin/env bash
# Control groups that are made ahead: a sandbox takes one, with its limits in force before the VMM
# runs, and gives it back. Whatever dies when, no group is in use twice and none is left. The first sandbox runs a guest; of the
# others, which are hollow, only the groups count.
. "$(dirname "$0")/lib.sh"
need_node
stop_daemon
[ -w /sys/fs/cgroup/pids ] || [ -w /sys/fs/cgroup/cgroup.procs ] || skip "writable control groups"
size=3
cat >>"$SLIPWAY_CONFIG" <<'CONFIG'
cgroup_pool = 3
cgroup_parent = "/slipway-e2e-pool/deep"
CONFIG
roots=(/sys/fs/cgroup/memory /sys/fs/cgroup/cpu /sys/fs/cgroup/pids)
[ ! -e /sys/fs/cgroup/cgroup.controllers ] || roots=(/sys/fs/cgroup)

end_all() {
    end_node
    for root in "${roots[@]}"; do
        rmdir "$root"/slipway-e2e-pool/{deep,} 2>/dev/null
    done
}
# Groups below the parent: all, those with a process, those without.
groups() { find "${roots[0]}/slipway-e2e-pool/deep" -mindepth 1 -type d -printf '%f\n' 2>/dev/null | sort; }
taken() { for one in $(groups); do [ -z "$(cat "${roots[0]}/slipway-e2e-pool/deep/$one/cgroup.procs")" ] || echo "$one"; done; }
ready() { comm -23 <(groups) <(taken); }
count() { [ "$("$1" | wc -l)" = "$2" ]; }
# The same groups are in each hierarchy.
alike() {
    for root in "${roots[@]}"; do
        diff <(groups) <(find "$root/slipway-e2e-pool/deep" -mindepth 1 -type d -printf '%f\n' | sort) >/dev/null || return 1
    done
}
group_of() { "$slipway" inspect "$1" | python3 -c 'import json,sys; print((json.load(sys.stdin)[0]["cgroup"] or {}).get("path", "none"))'; }
inside() { tr '\n' ' ' <"${roots[0]}$1/cgroup.procs"; }

start_daemon
wait_until 60 count ready "$size" || fail "the pool has $(ready | wc -l) groups"
# A group is made in one hierarchy after the other.
wait_until 20 alike || fail "hierarchies differ"
ok "the daemon makes $size groups below its setting's parent"

"$slipway" run -d --name one --cpus 1 --memory 128M "$image" -- sleep 100000 >/dev/null || fail "run: $(explain)"
one=$(group_of one)
case $one in
    /slipway-e2e-pool/deep/pool-*) ;;
    *) fail "the sandbox has the group $one" ;;
esac
vmm=$(vmm_of one)
grep -q "$one\$" "/proc/$vmm/cgroup" || fail "the VMM is in $(cat "/proc/$vmm/cgroup")"
[[ " $(inside "$one") " == *" $vmm "* ]] || fail "in the group: $(inside "$one")"
for root in "${roots[@]}"; do
    grep -qx "$vmm" "$root$one/cgroup.procs" || fail "the VMM is not in $root$one"
done
quota=$(cut -d ' ' -f 1 "/sys/fs/cgroup$one/cpu.max" 2>/dev/null || cat "/sys/fs/cgroup/cpu$one/cpu.cfs_quota_us" 2>/dev/null)
[ -z "$quota" ] || [ "$quota" = 200000 ] || fail "the limit of CPU time is $quota"
threads=$(cat "/sys/fs/cgroup$one/pids.max" 2>/dev/null || cat "/sys/fs/cgroup/pids$one/pids.max" 2>/dev/null)
[ -z "$threads" ] || [ "$threads" = 65 ] || fail "the limit of threads is $threads"
wait_until 60 count ready "$size" || fail "the pool has $(ready | wc -l) groups beside a sandbox"
ok "a sandbox has a group of the pool, $one, with its limits; the pool is full again"

hollow() { "$slipway" run --detach --accel hollow --network none --memory 128M "$@" "$image" sleep 1000 >/dev/null; }
hollow --name brief --cpus 1 && "$slipway" rm --force brief >/dev/null || fail "run: $(explain)"
wait_until 60 count groups $((size + 1)) || fail "after a run there are $(groups | wc -l) groups"
wait_until 20 alike || fail "hierarchies differ"
ok "a sandbox that ended leaves no further group"

# Five at once, more than are ready: the others' groups are made when they start.
for n in 1 2 3 4 5; do
    hollow --name "many$n" & many[n]=$!
done
for n in 1 2 3 4 5; do wait "${many[n]}" || fail "many$n: $(explain)"; done
[ "$(for n in 1 2 3 4 5; do group_of "many$n"; done | sort -u | wc -l)" = 5 ] || fail "two sandboxes have one group"
"$slipway" rm --force many1 many2 many3 many4 many5 >/dev/null || fail "rm: $(explain)"
wait_until 60 count groups $((size + 1)) || fail "after many runs: $(groups)"
ok "five at once have five groups"

# The sandbox dies with its daemon. The next one takes all groups.
end_daemon KILL
count groups $((size + 1)) || fail "the dead daemon left $(groups)"
start_daemon
wait_until 60 count groups "$size" || fail "the next daemon has $(groups)"
count taken 0 || fail "in use: $(taken)"
[ "$(state_of one)" = lost ] || fail "one is $(state_of one)"
[ "$(group_of one)" = none ] || fail "the record of a lost sandbox has $(group_of one)"
ok "after kill -9 the next daemon has the groups that the last one left"
"$slipway" rm one >/dev/null || fail "rm"

end_daemon TERM
count groups 0 || fail "left: $(groups)"
ok "a daemon that ends removes its groups"

refuses() {
    local status
    sed -i '/^cgroup_/d' "$SLIPWAY_CONFIG"
    printf '%s\n' "$1" >>"$SLIPWAY_CONFIG"
    timeout 60 "$slipway" daemon >"$work/out" 2>&1; status=$?
    [ "$status" != 0 ] && [ "$(grep -c . "$work/out")" = 1 ] && grep -q "$2" "$work/out" || fail "$1: status $status, $(cat "$work/out")"
    ok "$1 -> $(cat "$work/out")"
}
refuses 'cgroup_parent = "../x"' 'below the root'
refuses 'cgroup_parent = "/"' 'below the root'
refuses 'cgroup_pool = 1000000' 'at most 4096'
refuses 'cgroup_pool = -1' 'cgroup_pool'
refuses 'spare_vmms = 65' 'at most 64'
