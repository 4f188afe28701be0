#!/usr/bin/env bash
# kill -9 of the VMM or of the daemon at random moments of the save of a template and of the start of a fork: what
# `slipway ps` and `slipway template ls` say afterwards is true, and no process, memory, file, port, address, endpoint
# or descriptor is lost. A template that was cut is not there, and one that is there is whole.
#   SLIPWAY_KILLS  how often something is killed, 4 unless told otherwise
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

for ((number = 0; number < kills; number++)); do
    what=$([ $((number % 2)) = 0 ] && echo save || echo fork) victim=$([ $((number / 2 % 2)) = 0 ] && echo VMM || echo daemon)
    most=$([ "$what" = save ] && echo "$save_ms" || echo "$fork_ms")
    delay=$(((RANDOM * 32768 + RANDOM) % most))
    $what >"$work/said" 2>&1 & client=$!
    sleep_ms "$delay"
    if [ "$victim" = VMM ]; then
        kill_vmm
    else
        end_daemon KILL
        start_daemon
    fi
    judge_client "$what, $victim after $delay ms"
    told="$what, $victim killed after $delay ms, $outcome"
    wait_until 30 no_lie || fail "$told: $(lies)"
    case $(templates) in
        web) ;;
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
done
ok "$kills kills: what is said is true, the next fork runs, and nothing is lost"
