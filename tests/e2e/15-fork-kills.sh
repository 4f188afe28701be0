#!/usr/bin/env bash
# kill -9 of the VMM or of the daemon at the steps of the save of a template and of the start of a fork, which are seen in the
# record and in the template's files (moments.py), and at random moments: what `slipway ps` and `slipway template ls` say
# afterwards is true, and no process, memory, file, port, address, endpoint or descriptor is lost. A template that was cut is not
# there, so that no fork begins with it, and one that is there is whole.
#   SLIPWAY_KILLS  how many of the kills are at random moments, 4 unless told otherwise
#   SLIPWAY_SEED   another choice of moments
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
# shellcheck source=tests/e2e/kills.sh
. "$here/kills.sh"
kills=${SLIPWAY_KILLS:-4}
RANDOM=${SLIPWAY_SEED:-1}
need_network_node "$@"
[ "${SLIPWAY_VMM:-}" = native ] || skip "slipway-vmm on KVM (SLIPWAY_VMM=native): lab/kvm-host --test $test_name SLIPWAY"
end_all() { "$slipway" template rm web cut >/dev/null 2>&1; }
start_keeper
start_daemon

save() { timeout 300 "$slipway" template create cut; }
fork() { timeout 300 "$slipway" run --detach --name victim --wait-network --volume data:16M --from web "$image" -- sleep 100000; }
templates() { "$slipway" template ls --json | python3 -c 'import json, sys
print(*sorted(one["name"] for one in json.load(sys.stdin)))'; }

# Everything that the node holds without a sandbox, one thing a line.
held() {
    "$slipway" ps --quiet
    "$slipway" endpoint ls --json
    "$slipway" port ls --json | grep -E '"(network|name|mac)"'
    "$slipway" network inspect default
    "$slipway" pool --json
    nft list ruleset
    ip -o link show | cut -d: -f 2
    find "$SLIPWAY_DATA_DIR/templates" -mindepth 1 -maxdepth 1
    leftovers
    descriptors
}
is_as_before() { held >"$work/held" 2>&1; cmp -s "$work/before" "$work/held" && [ "$(shmem)" -le $((used + 1024)) ]; }

# The work of a daemon that nobody disturbs, and how long each takes.
timeout 300 "$slipway" template create web >/dev/null || fail "template create: $(explain)"
begin=$(now_ms)
save >/dev/null || fail "template create: $(explain)"
save_ms=$(($(now_ms) - begin))
"$slipway" template rm cut >/dev/null || fail "template rm: $(explain)"
fork >/dev/null || fail "run: $(explain)"
"$slipway" rm --force victim >/dev/null
begin=$(now_ms)
fork >/dev/null || fail "run: $(explain)"
fork_ms=$(($(now_ms) - begin))
"$slipway" rm --force victim >/dev/null
settled() { held >"$work/before" 2>&1; sleep 1; held 2>&1 | cmp -s - "$work/before"; }
wait_until 30 settled || fail "a node without sandboxes changes: $(held)"
used=$(shmem)
ok "a save takes $save_ms ms, a fork $fork_ms ms; without a sandbox the node holds $(wc -l <"$work/before") things and $used KiB of shared memory"

# refused: nothing begins with the template that was cut.
refused() {
    local said
    said=$(timeout 120 "$slipway" run --from cut 2>&1 </dev/null) && fail "$told: a fork of a template that was cut"
    [[ $said = *'no template or snapshot "cut"'* ]] || fail "$told: a fork of a template that was cut: $said"
}
# kill_in WHAT daemon|VMM MOMENT: MOMENT is a step of moments.py, or a number of milliseconds.
kill_in() {
    local what=$1 victim=$2 moment=$3 vmm name=victim
    told="$what, $victim killed at $moment"
    [ "$what" = fork ] || name="cut"
    $what >"$work/said" 2>&1 & client=$!
    if [[ $moment =~ ^[0-9]+$ ]]; then
        sleep_ms "$moment"
        told+=" ms"
    else
        vmm=$(python3 "$here/moments.py" "$SLIPWAY_DATA_DIR" "$SLIPWAY_RUN_DIR" cut "$name" "$moment" "$client") || told+=", too late"
    fi
    case $victim:${vmm:-} in
        daemon:*) restart_daemon ;;
        VMM:) kill_vmm ;;
        # A machine that is being saved may have ended by now.
        VMM:*) [ "$vmm" = 0 ] || kill -KILL "$vmm" 2>/dev/null ;;
    esac
    judge_client "$told"
    told+=", $outcome"
    wait_until 30 no_lie || fail "$told: $(lies)"
    case $(templates) in
        web) refused ;;
        "cut web")
            [ "$what" = save ] || fail "$told: a template from nowhere"
            timeout 120 "$slipway" run --rm --from cut "$image" -- true || fail "$told: the template is broken: $(explain)"
            "$slipway" template rm cut >/dev/null || fail "$told: template rm: $(explain)"
            ;;
        *) fail "$told: templates: $(templates)" ;;
    esac
    "$slipway" rm --force --all >/dev/null || fail "$told: rm: $(explain)"
    timeout 120 "$slipway" run --rm --wait-network --from web "$image" -- true || fail "$told: the next fork: $(explain)"
    wait_until 30 is_as_before ||
        fail "$told: $used KiB of shared memory before, $(shmem) now; $(diff "$work/before" "$work/held"); $(explain)"
    say "$told"
}

for step in created starting unfinished process launched machine memory described whole; do kill_in save daemon "$step"; done
for step in process launched machine; do kill_in save VMM "$step"; done
for step in created starting directory process launched running; do kill_in fork daemon "$step"; done
for step in process launched running; do kill_in fork VMM "$step"; done
ok "kills at the steps of a save and of a fork: what is said is true, the next fork runs, and nothing is lost"

for ((number = 0; number < kills; number++)); do
    what=$([ $((number % 2)) = 0 ] && echo save || echo fork) victim=$([ $((number / 2 % 2)) = 0 ] && echo VMM || echo daemon)
    most=$([ "$what" = save ] && echo "$save_ms" || echo "$fork_ms")
    kill_in "$what" "$victim" $(((RANDOM * 32768 + RANDOM) % (most + 1)))
done
ok "$kills kills at random moments: what is said is true, the next fork runs, and nothing is lost"
