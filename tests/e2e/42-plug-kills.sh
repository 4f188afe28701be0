#!/usr/bin/env bash
# kill -9 of the daemon or of the VMM while memory and CPUs come and go, at steps that are seen in the record (moments.py) and
# at random moments: `slipway update --memory` of a sandbox with room, up and down, containers that have memory and CPUs of
# their own, in a pod that booted and in one that is a fork, and containers whose pod has memory and CPUs come for their limits.
# `slipway ps` says afterwards what is true, the limits of the VMM's control group and the record agree with what the guest has
# plugged, a sandbox whose VMM lives goes on with all of its bytes, one whose VMM was killed has ended with a reason, and nothing
# is left of what came. Without slipway-vmm only CPUs come and go.
#   SLIPWAY_KILLS  how many of the kills are at random moments, 8 unless told otherwise, and none without slipway-vmm
#   SLIPWAY_SEED   another choice of moments
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
# shellcheck source=tests/e2e/kills.sh
. "$here/kills.sh"
# shellcheck source=tests/e2e/counts.sh
. "$here/counts.sh"
RANDOM=${SLIPWAY_SEED:-1}
native=''
[ "${SLIPWAY_VMM:-}" != native ] || native=yes
kills=${SLIPWAY_KILLS:-${native:+8}}
kills=${kills:-0}
need_node
start_keeper
start_daemon
told='at the start'
fail() { say "FAILED: $told: $*"; exit 1; }

# Writes numbers, and ends with status 9 if a byte of its memory has changed.
program='import time
held = bytearray(b"\1") * (32 << 20)
number = 0
while True:
    number += 1
    print(number, flush=True)
    time.sleep(0.2)
    if any(byte != 1 for byte in held[::4096]): raise SystemExit(9)'
binds=(--memory 256M) own=() comes=(--cpus 2)
[ -z "$native" ] || { binds+=(--bind-memory 120M); own=(--memory 64M); comes+=(--memory 96M); }

# What is killed in its midst, as `slipway` is asked for it.
up() { timeout 300 "$slipway" update grow --memory 512M; }
down() { timeout 300 "$slipway" update grow --memory 256M; }
come() { timeout 300 "$slipway" run --detach --pod web --name victim "${comes[@]}" "$image" -- sleep 100000; }
go() { timeout 300 "$slipway" rm --force web/victim; }

# of_record EXPRESSION: a value of the record of the sandbox $box, `one`, in Python.
of_record() { "$slipway" inspect "$box" | python3 -c 'import json, sys
one = json.load(sys.stdin)[0]
print(eval(sys.argv[1]))' "$1"; }
guest_bytes() { of_record 'one["memory_bytes"] + sum(one["bound"]["granted_bytes"])'; }
shown() { "$slipway" ps --json | python3 -c 'import json, sys
print(*[one[sys.argv[2]] for one in json.load(sys.stdin) if one["name"] == sys.argv[1]])' "$box" "$1"; }
in_guest() { timeout 60 "$slipway" exec "$served" -- "$@"; }
total() { in_guest sed -n 's/^MemTotal: *\([0-9]*\) kB/\1/p' /proc/meminfo; }
victim_state() { "$slipway" ps --json | python3 -c 'import json, sys
named = [one["state"] for box in json.load(sys.stdin) for one in box["containers"] if one["name"] == "victim"]
print(*named or ["gone"])'; }

# Prints what of the sandbox $box does not agree: the record, what `ps` shows, the guest, and the limits of the VMM's control
# group.
quarrels() {
    local bytes group limit cpus
    bytes=$(guest_bytes) cpus=$(shown cpus)
    [ "$(shown memory_bytes):$cpus" = "$bytes:$(of_record 'one["cpus"]')" ] ||
        echo "ps shows $(shown memory_bytes) bytes and $cpus CPUs, the record has $bytes and $(of_record 'one["cpus"]')"
    [ "$(in_guest nproc)" = "$cpus" ] || echo "the guest has $(in_guest nproc) CPUs, $cpus are shown"
    limit=$(cpu_quota "$box")
    [ -z "$limit" ] || [ "$limit" = $(((cpus + 1) * 100000)) ] || echo "the limit of CPU time is $limit for $cpus CPUs"
    [ -n "$native" ] || return 0
    python3 -c 'import sys
total, before, bytes, begin = map(int, sys.argv[1:])
wrong = total - before - (bytes - begin) // 1024
if abs(wrong) > 2048: print(f"the guest has {wrong} KiB beyond the {bytes} bytes of the record")' \
        "$(total)" "$base_total" "$bytes" "$base_bytes"
    group=$(of_record 'one["cgroup"]["path"]')
    limit=$(cat "/sys/fs/cgroup$group/memory.max" "/sys/fs/cgroup/memory$group/memory.limit_in_bytes" 2>/dev/null)
    [ -z "$limit" ] || [ $(((limit - $(of_record 'one["memory"]["overhead_bytes"]')) >> 20)) = $((bytes >> 20)) ] ||
        echo "the limit of memory is $limit for $bytes bytes of the guest"
}
agrees() { [ -z "$(quarrels 2>&1)" ]; }
# The sandbox $box has what it began with.
at_base() { [ "$(guest_bytes):$(shown cpus)" = "$base_bytes:1" ] && agrees; }
back() {
    case $box in
        grow) down >/dev/null 2>&1 ;;
        web) [ "$(victim_state)" = gone ] || go >/dev/null 2>&1 ;;
    esac
    at_base && { [ "$box" = grow ] || [ "$(victim_state)" = gone ]; }
}

# What the node holds, one thing a line.
held() {
    "$slipway" ps --json | python3 -c 'import json, sys
for box in json.load(sys.stdin): print(box["name"], box["state"], sorted((one["name"], one["state"]) for one in box["containers"]))'
    "$slipway" endpoint ls --json | grep '"id"' | sort
    find "$SLIPWAY_RUN_DIR" "$SLIPWAY_DATA_DIR/sandboxes" -mindepth 1 -not -path "$SLIPWAY_RUN_DIR/s/*/*" | sort
    # The state of a process is another one at each look.
    leftovers | sed -E 's/^[A-Z][^ ]* ([0-9]+ )/\1/'
}
holds_as() { held >"$work/held" 2>&1; cmp -s "$work/$1" "$work/held"; }
# holds_again FILE: the node holds what it held when FILE was written.
holds_again() { wait_until 60 holds_as "$1" || fail "$(diff "$work/$1" "$work/held"; explain)"; }
settled() { held >"$work/$1" 2>&1; sleep 1; holds_as "$1"; }
settle() { wait_until 60 settled "$1" || fail "what the node holds changes: $(diff "$work/$1" "$work/held")"; }
# The same, and its memory and descriptors, for a node without sandboxes.
all_held() { held; "$slipway" pool --json | grep -E '"(lent_bytes|sandboxes)"'; descriptors; }
all_settled() { all_held >"$work/all" 2>&1; sleep 1; all_held 2>&1 | cmp -s - "$work/all"; }
holds_all() { all_held >"$work/held" 2>&1; cmp -s "$work/all" "$work/held" && [ "$(shmem)" -le $((used + 1024)) ]; }

# begin grow|web: starts the sandbox, and has it serve. Sets `box`, `served`, `vmm`, and what it begins with.
begin() {
    box=$1
    if [ "$box" = grow ]; then
        served=grow
        timeout 300 "$slipway" run --detach --name grow --network none --cpus 1 --memory 256M --max-memory 768M "$image" -- \
            python3 -c "$program" >/dev/null || fail "run: $(explain)"
    else
        served=web/serves
        timeout 300 "$slipway" pod create web --network none --cpus 1 --max-cpus 3 "${binds[@]}" >/dev/null || fail "pod create: $(explain)"
        timeout 300 "$slipway" run --detach --pod web --name serves "${own[@]}" "$image" -- python3 -c "$program" >/dev/null ||
            fail "run in the pod: $(explain)"
    fi
    counts_on "$served"
    vmm=$(vmm_of "$box")
    base_bytes=$(guest_bytes) base_total=$(total)
    wait_until 60 agrees || fail "$box begins with: $(quarrels; explain)"
    [ "$box" = web ] || return 0
    # A pod's first such container makes what stays with the pod.
    come >"$work/said" 2>&1 && go >"$work/said" 2>&1 || fail "a container: $(cat "$work/said"; explain)"
    wait_until 60 at_base || fail "what came stays: $(guest_bytes) bytes, $(shown cpus) CPUs, $(quarrels; explain)"
}
remove() { "$slipway" rm --force "$box" >"$work/said" 2>&1 || fail "rm: $(cat "$work/said"; explain)"; }
declare -A took
# timed WHAT: how long it takes while nobody disturbs it, ms.
timed() {
    local begun
    begun=$(now_ms)
    "$1" >"$work/said" 2>&1 || fail "$1: $(cat "$work/said"; explain)"
    took[$1]=$(($(now_ms) - begun))
}

steady() { [[ $(victim_state) =~ ^(gone|running|exited|failed|lost)$ ]]; }
# judge_living: the sandbox whose VMM lives goes on, has what it is shown to have, and gives back what came.
judge_living() {
    [ "$(vmm_of "$box"):$(state_of "$box")" = "$vmm:running" ] || fail "$box has not gone on: $("$slipway" ps; explain)"
    counts_on "$served"
    wait_until 60 agrees || fail "$(quarrels; explain)"
    if [ "$box" = web ]; then
        wait_until 60 steady || fail "the container is $(victim_state): $(explain)"
        told+=", the container is $(victim_state)"
        # One whose removal had begun before the kill may end meanwhile.
        [ "$(victim_state)" != running ] || timeout 60 "$slipway" exec web/victim true || [ "$(victim_state)" != running ] ||
            fail "it does not run: $(explain)"
    fi
    wait_until 60 back || fail "what came stays: $(guest_bytes) bytes and $(shown cpus) CPUs of $base_bytes and 1, $(quarrels; explain)"
    counts_on "$served"
    holds_again with
}
# judge_dead: the sandbox without its VMM has ended with a reason, holds nothing, and the next one begins.
judge_dead() {
    wait_until 60 ended "$box" || fail "$box runs without its VMM: $("$slipway" ps; explain)"
    [ -n "$(of_record 'one["reason"]')" ] || fail "$box ended without a reason: $("$slipway" ps --all)"
    [ "$box" = grow ] || [[ $(victim_state) =~ ^(gone|exited|failed|lost)$ ]] || fail "the container is $(victim_state)"
    [ "$(of_record 'one["vmm_uid"]')" = None ] || fail "$box keeps a user id: $(explain)"
    remove
    holds_again without
    begin "$box"
    settle with
}
# kill_in WHAT daemon|VMM MOMENT: MOMENT is a step of moments.py, or a number of milliseconds.
kill_in() {
    local what=$1 victim=$2 moment=$3
    told="$what, $victim killed at $moment"
    case $what in
        down) up >"$work/said" 2>&1 || fail "before it: $(cat "$work/said"; explain)" ;;
        go) come >"$work/said" 2>&1 || fail "before it: $(cat "$work/said"; explain)" ;;
    esac
    "$what" >"$work/said" 2>&1 & client=$!
    if [[ $moment =~ ^[0-9]+$ ]]; then
        sleep_ms "$moment"
    else
        python3 "$here/moments.py" "$SLIPWAY_DATA_DIR" "$SLIPWAY_RUN_DIR" none "$box" "$moment" "$client" >/dev/null || told+=", too late"
    fi
    case $victim in
        daemon) restart_daemon ;;
        VMM) kill -KILL "$vmm" ;;
    esac
    judge_client "$told"
    told+=", $outcome"
    wait_until 60 no_lie || fail "$(lies)"
    if [ "$victim" = VMM ]; then judge_dead; else judge_living; fi
    say "$told"
}
# random_kills WHAT...: half as many kills of the daemon as there are, and as many of the VMM.
random_kills() {
    local number what victim
    for ((number = 0; number < kills * $# / 4; number++)); do
        what=${*:number % $# + 1:1} victim=daemon
        [ $((number / $# % 2)) = 0 ] || victim=VMM
        kill_in "$what" "$victim" $(((RANDOM * 32768 + RANDOM) % (took[$what] + 1)))
    done
}

# The work of a daemon that nobody disturbs. The first sandboxes make what all share.
if [ -n "$native" ]; then
    begin grow
    timed up
    timed down
    remove
fi
begin web
timed come
timed go
wait_until 60 at_base || fail "what came stays: $(guest_bytes) bytes, $(shown cpus) CPUs, $(quarrels; explain)"
remove
restart_daemon
wait_until 60 all_settled || fail "a node without sandboxes changes: $(all_held)"
used=$(shmem)
settle without
ok "undisturbed: $(for what in "${!took[@]}"; do printf '%s %s ms, ' "$what" "${took[$what]}"; done)and nothing is left"

if [ -n "$native" ]; then
    begin grow
    settle with
    for step in granted grown; do kill_in up daemon $step; done
    kill_in up VMM granted
    random_kills up down
    remove
    holds_again without
    ok "kills while memory comes and goes: what is said is true, and nothing is lost"
    steps=(added region bound cpus begun) fatal=(region bound begun)
else
    printf 'SKIPPED: %s\n' "e2e/$test_name: memory that comes and goes needs slipway-vmm on KVM (SLIPWAY_VMM=native): lab/kvm-host --test $test_name SLIPWAY"
    steps=(added cpus begun) fatal=(cpus)
fi

# pod_kills: kills at the steps in `steps`, and of the VMM in `fatal`, while a container comes and goes, and at random moments.
pod_kills() {
    begin web
    settle with
    for step in "${steps[@]}"; do kill_in come daemon "$step"; done
    kill_in go daemon ending
    for step in "${fatal[@]}"; do kill_in come VMM "$step"; done
    random_kills come go
    told='after the kills'
    come >"$work/said" 2>&1 || fail "the next container: $(cat "$work/said"; explain)"
    wait_until 60 agrees || fail "$(quarrels; explain)"
    go >/dev/null || fail "rm: $(explain)"
    wait_until 60 at_base || fail "what came stays: $(quarrels; explain)"
    holds_again with
    remove
}
[ -n "$native" ] || kills=$((kills * 2))
pod_kills
if [ -n "$native" ]; then
    ok "kills while containers come and go with memory and CPUs of their own: what is said is true"
    # 256 MiB are enough for 64 and the guest's kernel, and not for 96 more.
    binds=(--memory 256M --max-memory 512M) steps=(added granted grown cpus begun) fatal=(granted begun)
    pod_kills
fi
wait_until 60 holds_all ||
    fail "$used KiB of shared memory before, $(shmem) now; $(diff "$work/all" "$work/held"; explain)"
ok "kills while containers come and go with their ${native:+memory and }CPUs: what is said is true, and nothing is lost"
[ -n "$native" ] || exit 0

# A pod that is a fork of a template with the regions.
end_all() { "$slipway" template rm regions >/dev/null 2>&1; }
binds=(--memory 256M --bind-memory 120M) steps=(region bound begun) fatal=(bound) kills=4
timeout 300 "$slipway" template create regions --network none --cpus 1 --max-cpus 3 "${binds[@]}" >/dev/null || fail "template create: $(explain)"
binds+=(--from regions)
begin web
[ "$(of_record 'one["template"]')" = regions ] || fail "the pod is no fork: $("$slipway" inspect web)"
remove
settle without
pod_kills
holds_again without
ok "kills while containers of a fork come and go with memory and CPUs of their own: what is said is true, and nothing is lost"
