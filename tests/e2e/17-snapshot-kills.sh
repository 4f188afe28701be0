#!/usr/bin/env bash
# kill -9 of the daemon or of a VMM at the steps of the save of a sandbox that runs and of the start of a fork with its
# snapshot, which are seen in the records and in the snapshot's files (moments.py), and at random moments, and of the daemon while
# a sandbox gives its memory to a file or comes back: what `slipway ps` says afterwards is true, a sandbox that was saved counts on
# unless its own VMM was killed, a snapshot is there as a whole or not at all, and nothing of a fork that failed is left.
#   17-snapshot-kills.sh [SEED]   the same moments again; or RANDOM_SEED. It is printed
#   SLIPWAY_KILLS                 how many of the kills are at random moments, 12 unless told otherwise
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
# shellcheck source=tests/e2e/kills.sh
. "$here/kills.sh"
# shellcheck source=tests/e2e/counts.sh
. "$here/counts.sh"
kills=${SLIPWAY_KILLS:-12}
seed=${1:-${RANDOM_SEED:-$((SRANDOM % 1000000))}}
need_network_node "$@"
[ "${SLIPWAY_VMM:-}" = native ] || skip "slipway-vmm on KVM (SLIPWAY_VMM=native): lab/kvm-host --test $test_name SLIPWAY"
templates=$SLIPWAY_DATA_DIR/templates
end_all() { for name in cut base; do "$slipway" snapshot rm "$name"; done >/dev/null 2>&1; }
start_keeper
start_daemon
say "seed $seed"
RANDOM=$seed
told='at the start'
fail() { say "FAILED: seed $seed, $told: $*"; exit 1; }

# shellcheck disable=SC2016 # for the shell of the sandbox
counts='n=0; while :; do n=$((n + 1)); echo $n >/count; echo $n >/data/count; echo $n; sleep 0.2; done'
# Numbers that a sandbox may write between a look at its log and its save, and lines on their way to the log.
slack=10
save() { timeout 300 "$slipway" snapshot create parent cut; }
fork() { begin_fork victim base; }
begin_fork() { timeout 300 "$slipway" run --detach --name "$1" --wait-network --from "$2"; }
remove() { "$slipway" rm --force "$@" >/dev/null || fail "rm $*: $(explain)"; }
timed() {
    local begin
    begin=$(now_ms)
    "$@" >"$work/said" 2>&1 || fail "$*: $(cat "$work/said") $(explain)"
    took=$(($(now_ms) - begin))
}

# recorded SANDBOX FIELD: what its record on disk says, as JSON.
recorded() { python3 -c 'import glob, json, sys
for path in glob.glob(sys.argv[1] + "/sandboxes/*/record.json"):
    with open(path) as file: record = json.load(file)
    if record["name"] == sys.argv[2]: print(json.dumps(record[sys.argv[3]]))' "$SLIPWAY_DATA_DIR" "$@"; }
is_recorded() { [ "$(recorded "$1" "$2")" = "$3" ]; }

# What the node holds for sandboxes that have not ended, one thing a line: not their own files, nor the counts of what they do.
held() {
    "$slipway" ps --json | python3 -c 'import json, sys
with open(sys.argv[1], "w") as file:
    for box in json.load(sys.stdin):
        print(sys.argv[2] + "/sandboxes/" + box["id"], file=file)
        if box["state"] not in ("exited", "failed", "lost"): print(box["name"], box["state"], box["addresses"])
' "$work/files" "$SLIPWAY_DATA_DIR"
    "$slipway" endpoint ls --json | grep '"id"' | sort
    "$slipway" port ls --json | grep -E '"(network|name|mac)"' | sort
    "$slipway" network inspect default
    nft list ruleset
    ip -o link show | cut -d: -f 2
    ls "$templates"
    find "$SLIPWAY_RUN_DIR" -mindepth 1 -not -path "$SLIPWAY_RUN_DIR/s/*/*" | sort
    # The state of a process is another one at each look.
    leftovers | grep -vxFf "$work/files" | sed -E 's/^[A-Z][^ ]* ([0-9]+ )/\1/'
}
holds_as() { held >"$work/held" 2>&1; cmp -s "$work/$1" "$work/held"; }
# holds_again FILE: the node holds what it held when FILE was written.
holds_again() { wait_until 30 holds_as "$1" || fail "$(diff "$work/$1" "$work/held"; explain)"; }
# The same, but for the numbers of the processes and control groups that the VMMs have.
numberless() { sed -E 's/^[0-9]+ //; s/fd:[0-9]+/fd:N/g; s/pool-[-0-9a-f]+/pool-N/' "$work/$1" | sort; }
holds_like() { held >"$work/held" 2>&1; [ "$(numberless "$1")" = "$(numberless held)" ]; }
settled() { held >"$work/$1" 2>&1; sleep 0.5; holds_as "$1"; }
settle() { wait_until 30 settled "$1" || fail "what the node holds changes: $(diff "$work/$1" "$work/held")"; }
# The same, and its memory and descriptors, for a node without sandboxes.
all_held() { held; "$slipway" pool --json | grep -E '"(lent_bytes|sandboxes)"'; descriptors; }
all_settled() { all_held >"$work/all" 2>&1; sleep 1; all_held 2>&1 | cmp -s - "$work/all"; }
holds_all() { all_held >"$work/held" 2>&1; cmp -s "$work/all" "$work/held" && [ "$(shmem)" -le $((used + 1024)) ]; }

# The user ids of the parent and of one fork beside it: a node that has given back all others gives no other one.
own_uid() {
    local uid
    uid=$(recorded "$1" vmm_uid)
    case $uid in
        "$uid_base" | $((uid_base + 1))) ;;
        *) fail "the user id of $1 is $uid, so an earlier one is not given back: $("$slipway" ps)" ;;
    esac
}
# goes_on SANDBOX LEAST MOST: it counts, its disks take writes, its first number is from LEAST to MOST, and none is missing.
# shellcheck disable=SC2016
goes_on() {
    local at=$2 file
    counts_on "$1"
    own_uid "$1"
    sequence "$1" "$2" "$3"
    at=$(last "$1")
    for file in $(timeout 60 "$slipway" exec "$1" -- sh -c 'for at in /count /data/count; do
        until read -r n <$at; do :; done; echo $n; done; sync'; echo "end$?"); do
        case $file in
            end0) return ;;
            end*) break ;;
            *) [ "$file" -ge "$at" ] || fail "a file of $1 has $file, its output $at" ;;
        esac
    done
    fail "the files of $1: $(explain)"
}

# start_parent boot|fork: one that counts from 1 on, or from the snapshot on.
start_parent() {
    if [ "$1" = boot ]; then
        least=1 most=1
        timeout 300 "$slipway" run --detach --name parent --wait-network --volume data:16M:/data "$image" -- sh -c "$counts" >/dev/null
    else
        least=$base_least most=$base_most
        begin_fork parent base >/dev/null
    fi || fail "the next parent: $(explain)"
    vmm=$(vmm_of parent)
    goes_on parent "$least" "$most"
}

# The work of a daemon that nobody disturbs, and how long each takes. The first fork has its snapshot checked and loaded.
start_parent boot
base_least=$(last parent)
timeout 300 "$slipway" snapshot create parent base >/dev/null 2>&1 || fail "snapshot create: $(explain)"
base_most=$(($(last parent) + slack))
timed save
save_ms=$took
"$slipway" snapshot rm cut >/dev/null || fail "snapshot rm: $(explain)"
fork >/dev/null || fail "run: $(explain)"
remove victim
timed fork
fork_ms=$took
goes_on victim "$base_least" "$base_most"
timed "$slipway" ps
reach_ms=$took
remove victim parent
wait_until 30 all_settled || fail "a node without sandboxes changes: $(all_held)"
used=$(shmem)
settle without
start_parent fork
settle with
ok "a save takes $save_ms ms, a fork $fork_ms ms; without a sandbox the node holds $(wc -l <"$work/all") things and $used KiB of shared memory"

# The node lists as snapshots all that is in their directory. Sets `names` to them.
no_other() {
    names=$("$slipway" snapshot ls --json | sed -n 's/^ *"name": "\(.*\)",*$/\1/p' | sort | paste -sd ' ')
    [ "$names" = "$(find "$templates" -mindepth 1 -maxdepth 1 -printf '%f\n' | sort | paste -sd ' ')" ]
}
# released SANDBOX FILE: it has ended, and the node holds what it held without it, but its files until they are removed.
released() {
    wait_until 60 ended "$1" || fail "$1 does not end: $("$slipway" ps; explain)"
    holds_again "$2"
    [ "$state" != gone ] || return
    is_recorded "$1" vmm_uid null || fail "$1 has ended and keeps the user id $(recorded "$1" vmm_uid)"
    remove "$1"
}

# refused: nothing begins with the snapshot that was cut.
refused() {
    local said
    said=$(timeout 120 "$slipway" run --from cut 2>&1 </dev/null) && fail "a fork of a snapshot that was cut"
    [[ $said = *'no template or snapshot "cut"'* ]] || fail "a fork of a snapshot that was cut: $said"
}
# judge_parent: it counts on, or it is shown as ended if its VMM was killed.
judge_parent() {
    if [ "$what$victim" = saveVMM ]; then
        wait_until 60 ended parent || fail "the parent without its VMM: $("$slipway" ps)"
        sequence parent "$least" "$most"
    else
        wait_until 60 is_recorded parent saving false || fail "the parent is being saved for ever: $(explain)"
        [ "$(vmm_of parent)" = "$vmm" ] || fail "the parent has not the VMM $vmm: $("$slipway" ps; explain)"
        goes_on parent "$least" "$most"
    fi
}
# judge_snapshot: a fork begins with one that is there, and goes on from a number that the parent had.
judge_snapshot() {
    wait_until 30 no_other || fail "$(ls "$templates"), of which $names are snapshots"
    case $names in
        base)
            [ "$what$status" != save0 ] || fail "the snapshot that was made is not there"
            [ "$what" = fork ] || refused
            ;;
        "base cut")
            [ "$what" = save ] || fail "a snapshot from nowhere"
            begin_fork whole cut >/dev/null || fail "the snapshot is broken: $(explain)"
            goes_on whole "$before" $(($(last parent) + slack))
            remove whole
            "$slipway" snapshot rm cut >/dev/null || fail "snapshot rm: $(explain)"
            told+=", whole"
            ;;
        *) fail "snapshots: $names" ;;
    esac
}
# judge_victim: a fork that runs goes on from the snapshot, and of another one nothing is left.
judge_victim() {
    wait_until 60 over victim || fail "the fork neither runs nor has ended: $("$slipway" ps; explain)"
    told+=", the fork is $state"
    if [ "$state" = running ]; then
        goes_on victim "$base_least" "$base_most"
        remove victim
    else
        [ "$victim$status" != daemon0 ] || fail "a fork that ran is lost: $("$slipway" ps; explain)"
        released victim with
    fi
}

# kill_in WHAT daemon|VMM MOMENT: MOMENT is a step of moments.py, or a number of milliseconds. Sets `what`, `victim` and `before`.
# `parents` counts the parents whose VMM was killed: the next one boots and is a fork by turns.
parents=0
kill_in() {
    local moment=$3 box=parent of=''
    what=$1 victim=$2
    told="$what, $victim killed at $moment"
    [ "$what" = save ] || box=victim
    before=$(last parent)
    $what >"$work/said" 2>&1 & client=$!
    if [[ $moment =~ ^[0-9]+$ ]]; then
        sleep_ms "$moment"
        told+=" ms"
    else
        of=$(python3 "$here/moments.py" "$SLIPWAY_DATA_DIR" "$SLIPWAY_RUN_DIR" cut "$box" "$moment" "$client") || told+=", too late"
    fi
    case $what$victim:$of in
        *daemon:*) restart_daemon ;;
        saveVMM:*) kill -KILL "$vmm" ;;
        forkVMM:) kill_vmm "$vmm" ;;
        forkVMM:*) [ "$of" = 0 ] || kill -KILL "$of" 2>/dev/null ;;
    esac
    judge_client "$what"
    told+=", $outcome"
    # The node learns of the end a moment later.
    [ "$what$victim" != forkVMM ] || [ "${of:-0}" = 0 ] || wait_until 60 ended victim || fail "it runs without its VMM: $("$slipway" ps; explain)"
    wait_until 30 no_lie || fail "$(lies)"
    judge_parent
    judge_snapshot
    [ "$what" != fork ] || judge_victim
    if [ "$what$victim" = saveVMM ]; then
        released parent without
        holds_again without
        parents=$((parents + 1))
        start_parent "$([ $((parents % 2)) = 0 ] && echo fork || echo boot)"
        settle with
    else
        holds_again with
    fi
    save >/dev/null 2>&1 || fail "the next snapshot: $(explain)"
    "$slipway" snapshot rm cut >/dev/null || fail "the next snapshot: snapshot rm: $(explain)"
    say "$told"
}

for step in unfinished memory stands layer machine described whole; do kill_in save daemon "$step"; done
for step in memory stands layer; do kill_in save VMM "$step"; done
for step in created starting directory process launched running; do kill_in fork daemon "$step"; done
for step in process launched running; do kill_in fork VMM "$step"; done
told='after the kills at steps'
ok "kills at the steps of a save and of a fork: what is said is true, snapshots are whole, and nothing of a fork is left"

for ((round = 0; round < kills; round++)); do
    what=$([ $((round % 2)) = 0 ] && echo save || echo fork) victim=$([ $((round / 2 % 2)) = 0 ] && echo daemon || echo VMM)
    most_ms=$([ "$what" = save ] && echo "$save_ms" || echo "$fork_ms")
    # Not before the client has found the daemon.
    kill_in "$what" "$victim" $((reach_ms + (RANDOM * 32768 + RANDOM) % (most_ms > reach_ms ? most_ms - reach_ms : 1)))
done

# A sandbox that gives its memory to a file and comes back: after a kill of the daemon it is in the file, or it has a VMM.
put_away() { timeout 300 "$slipway" pause --to-file parent; }
back() { timeout 300 "$slipway" resume parent; }
is_one() { is_state parent running || is_state parent paused; }
stands() { local at; at=$(last parent); sleep 1; [ "$(last parent)" = "$at" ]; }
timed put_away
put_away_ms=$took
timed back
back_ms=$took
for ((number = 0; number < kills; number++)); do
    what=$([ $((number % 2)) = 0 ] && echo put_away || echo back)
    most_ms=$([ "$what" = put_away ] && echo "$put_away_ms" || echo "$back_ms")
    delay=$((reach_ms + (RANDOM * 32768 + RANDOM) % (most_ms > reach_ms ? most_ms - reach_ms : 1)))
    told="$what, daemon killed after $delay ms"
    [ "$what" = put_away ] || put_away >/dev/null || fail "pause: $(explain)"
    $what >"$work/said" 2>&1 & client=$!
    sleep_ms "$delay"
    restart_daemon
    wait "$client"
    wait_until 60 is_one || fail "neither paused nor running: $("$slipway" ps; explain)"
    told+=", $(state_of parent) with the VMM $(vmm_of parent)"
    is_state parent running || wait_until 30 stands || fail "it is paused, and writes: $("$slipway" ps; explain)"
    back >/dev/null 2>"$work/said" || fail "it does not come back: $(cat "$work/said") $(explain)"
    is_state parent running || fail "it does not run: $("$slipway" ps)"
    wait_until 30 no_lie || fail "$(lies)"
    goes_on parent "$least" "$most"
    # It has had another VMM since.
    wait_until 30 holds_like with || fail "$(diff "$work/with" "$work/held"; explain)"
    say "$told"
done

told="after $kills kills"
fork >/dev/null || fail "the next fork: $(explain)"
goes_on victim "$base_least" "$base_most"
goes_on parent "$least" "$most"
remove victim parent
wait_until 30 holds_all ||
    fail "$used KiB of shared memory before, $(shmem) now; $(diff "$work/all" "$work/held"); $(explain)"
"$slipway" snapshot rm base >/dev/null || fail "snapshot rm: $(explain)"
left=$(leftovers; ls "$templates")
[ -z "$left" ] || fail "left: $left"
ok "$kills kills: what is said is true, snapshots are whole, the parent's numbers have no gap, and nothing is lost"
