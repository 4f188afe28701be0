# Shared by the tests that kill a VMM or the daemon while a client waits for it; they source lib.sh before.
# shellcheck shell=bash

now_ms() { echo $((${EPOCHREALTIME/./} / 1000)); }
sleep_ms() { sleep "$(($1 / 1000)).$(printf %03d $(($1 % 1000)))"; }
# The keeper's process: a daemon starts another one in place of one that had nothing to hold when its daemon was killed.
keeper_pid() { lock_holder "$SLIPWAY_RUN_DIR/keeper.lock"; }
# Shared memory in KiB that the daemon and the keeper hold, by a descriptor or a mapping. The machine's has that of others.
shmem() {
    local keeper
    keeper=$(keeper_pid)
    find /proc/"$daemon"/{fd,map_files} /proc/"$keeper"/{fd,map_files} \( -lname '/memfd:*' -o -lname '/dev/zero*' \) \
        -exec stat -Lc '%d:%i %b' {} + 2>/dev/null | awk '{ blocks[$1] = $2 } END { for (file in blocks) sum += blocks[file]; print int(sum / 2) }'
}

# Sandboxes whose state is not that of their VMMs, and VMMs of no sandbox, one a line.
lies() {
    vmms >"$work/vmms"
    "$slipway" ps --json | python3 -c 'import json, sys
with open(sys.argv[1]) as file:
    vmms = {int(line.split()[1]): line for line in file}
boxes = json.load(sys.stdin)
for box in boxes:
    if (box["state"] == "running") != (box["vmm_pid"] in vmms):
        print(box["name"], "is", box["state"], "and its VMM is", box["vmm_pid"], "of", sorted(vmms))
for pid in set(vmms) - {box["vmm_pid"] for box in boxes}:
    print("a VMM of no sandbox:", vmms[pid])' "$work/vmms"
}
no_lie() { [ -z "$(lies)" ]; }

# Descriptors that the keeper holds, and memory that the daemon does, one kind a line.
descriptors() {
    find "/proc/$(keeper_pid)/fd" -mindepth 1 -printf '%l\n' 2>/dev/null | sed 's/[0-9]\{2,\}/N/g; s|.*\.log$|log|' | sort | uniq -c | sed 's/^/keeper: /'
    find "/proc/$daemon/fd" -mindepth 1 -lname '/memfd:*' -printf '%l\n' 2>/dev/null | sort | uniq -c | sed 's/^/daemon: /'
}

# kill_vmm [BUT]: kills the VMM that runs, another one than BUT, or the next one while the client waits for it.
kill_vmm() {
    local vmm
    until vmm=$(vmms | awk -v but="${1:-0}" '$2 != but { print $2; exit }') && [ -n "$vmm" ]; do
        runs "$client" || return
    done
    kill -KILL "$vmm" 2>/dev/null
}

# judge_client WORDS: the command $client, whose output is in $work/said, says one line of error, or has done what it was
# asked before the kill. Sets `outcome`, and `status` to its status.
judge_client() {
    status=0
    wait "$client" || status=$?
    [ "$status" != 124 ] || fail "$1: the command waits for ever: $("$slipway" ps; explain)"
    [ "$status" = 0 ] || [ "$(wc -l <"$work/said")" = 1 ] || fail "$1: status $status and more than a line: $(cat "$work/said")"
    # shellcheck disable=SC2034 # of the tests
    outcome="status $status$([ "$status" = 0 ] || head -c 200 "$work/said" | sed 's/^/: /')"
}

# A client that found no daemon has started one, which may have been faster: it ends for the test's own.
restart_daemon() {
    end_daemon KILL
    start_daemon
    [ "$(lock_holder)" = "$daemon" ] && return
    say "the client has started a daemon"
    stop_daemon
    wait "$daemon" 2>/dev/null
    start_daemon
}

# over SANDBOX: its start has come to an end. Sets `state`.
over() {
    state=$(state_of "$1")
    [[ $state =~ ^(gone|exited|failed|lost|running)$ ]]
}
ended() { over "$1" && [ "$state" != running ]; }
