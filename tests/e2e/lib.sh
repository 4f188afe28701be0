# Shared by the end-to-end tests: a node of their own, real QEMU, a real Debian image.
#
# Each test is a bash script that sources this file, calls `need_node`, and says `ok WORDS` for
# every fact that it has seen hold. The first fact that does not hold ends it with status 1.
# What a machine lacks is said as "SKIPPED: test: needs what", and the test ends with status 0.
#
# `make test` runs two tests at a time, each on a node with directories, user ids, a network and mounts of its own. Processors,
# memory, control groups, names of processes and /tmp are those of the machine: a test looks for what is of its node there, or
# for what has its process id in its name. One that cannot has a line "# alone: REASON" in its head, and runs by itself.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
top=$(cd "$here/../.." && pwd)
test_name=$(basename "$0" .sh)
slipway=${SLIPWAY:-$top/target/release/slipway}
export SLIPWAY_RUN_DIR=${SLIPWAY_RUN_DIR:-/run/slipway-e2e}
export SLIPWAY_DATA_DIR=${SLIPWAY_DATA_DIR:-/var/lib/slipway-e2e}
# Debian with the tools that the tests use in the guest; made once by `image`, and named for it.
image=slipway-e2e:$(sha256sum "$here/image" | cut -c 1-12)
# Options for the sandboxes of tests that hold with any interface: SLIPWAY_TEST_NIC is its kind, SLIPWAY_TEST_KERNEL the
# directory of a kernel that has a driver for it.
# shellcheck disable=SC2034 # of such tests
machine=(${SLIPWAY_TEST_NIC:+--nic "$SLIPWAY_TEST_NIC"} ${SLIPWAY_TEST_KERNEL:+--kernel "$SLIPWAY_TEST_KERNEL"})
packages=()
# own_image NAME PACKAGE…: the test uses Debian with these packages in place of that image.
own_image() {
    packages=("${@:2}")
    image=slipway-e2e-$1:$({ cat "$here/image"; echo "${packages[@]}"; } | sha256sum | cut -c 1-12)
}
work=$(mktemp -d "${TMPDIR:-/tmp}/slipway-e2e.XXXXXX")
# The first user id of this node's VMMs.
uid_base=${SLIPWAY_E2E_UIDS:-1879048192}
# Runs a command in the machine's network, for those that fetch packages: `make test` gives a test a network of its own.
outside=(${SLIPWAY_E2E_OUTSIDE:+nsenter --net="$SLIPWAY_E2E_OUTSIDE"})
# Settings of the tests' daemons, of which a test may write more to $SLIPWAY_CONFIG. A guest under
# emulation on a busy machine starts slowly, and no test is about how long that takes.
export SLIPWAY_CONFIG=$work/config.toml
printf 'boot_timeout_s = 3600\nvmm_uid_base = %s\n' "$uid_base" >"$SLIPWAY_CONFIG"

say() { printf '%s: %s\n' "$test_name" "$*"; }
ok() { say "ok: $*"; }
fail() { say "FAILED: $*"; exit 1; }
skip() { printf 'SKIPPED: e2e/%s: needs %s\n' "$test_name" "$*"; exit 0; }
# only_in_soak REASON: ends a test that `make soak` runs, with SLIPWAY_SOAK=1, and `make test` does not.
only_in_soak() {
    [ -n "${SLIPWAY_SOAK:-}" ] && return
    say "a part of \`make soak\` (SLIPWAY_SOAK=1), since $*"
    exit 0
}

# Ends what a test has started itself. A test that starts something defines this anew.
end_all() { :; }

# Whatever happened, no sandbox and no daemon of this node outlives a test. The status is the test's.
leave() {
    local status=$?
    end_all
    end_node
    [ -z "$collector" ] || kill "$collector" 2>/dev/null
    "$slipway" rm --force --all >/dev/null 2>&1
    stop_daemon
    rm -rf "$work"
    exit "$status"
}
trap leave EXIT

# start_collector: a collector of traces for the daemons that are started later. It writes the spans to $work/spans, one in a
# line: trace, span, parent, outcome, name, attributes. $traceparent is a caller's place: of the span $caller in $trace.
# shellcheck disable=SC2034 # of such tests
start_collector() {
    python3 "$here/collector.py" "$work/spans" >"$work/collector" & collector=$!
    wait_until 20 grep -q . "$work/collector" || fail "no collector"
    echo "otlp_endpoint = \"http://127.0.0.1:$(cat "$work/collector")\"" >>"$SLIPWAY_CONFIG"
    trace=4bf92f3577b34da6a3ce929d0e0e4736 caller=00f067aa0ba902b7
    traceparent=00-$trace-$caller-01
}
collector=''
# spans_of NAME: the lines of the spans with this name.
spans_of() { awk -v name="$1" '$5 == name' "$work/spans"; }

stop_daemon() {
    local pid
    pid=$(lock_holder) && kill "$pid" 2>/dev/null && wait_until 10 daemon_gone
}

# lock_holder [LOCK]: the process that holds the daemon's lock, or another one, from the kernel's own list.
# shellcheck disable=SC2120 # some tests name a lock
lock_holder() {
    local lock=${1:-$SLIPWAY_DATA_DIR/daemon.lock} inode pid fd
    inode=$(stat -c %i "$lock" 2>/dev/null) || return 1
    # A file of another device may have the same number, and the list's name of a device is not always that of stat(2).
    for pid in $(awk -v inode="$inode" '$2 == "FLOCK" { split($6, at, ":"); if (at[3] == inode) print $5 }' /proc/locks); do
        for fd in "/proc/$pid/fd"/*; do
            [ "$fd" -ef "$lock" ] || continue
            printf '%s\n' "$pid"
            return
        done
    done
    return 1
}
daemon_gone() { ! lock_holder >/dev/null; }

# The limits in the tests are those of a machine that does nothing else. On one that has other work, any process may stand
# still for half a minute, so each limit is this many times longer. Only a test that fails waits for it.
slower=${SLIPWAY_E2E_SLOWER:-5}
timeout() { command timeout "$(($1 * slower))" "${@:2}"; }

# wait_until SECONDS COMMAND…: true as soon as the command is.
wait_until() {
    local deadline=$((SECONDS + $1 * slower)); shift
    until "$@" 2>/dev/null; do
        [ "$SECONDS" -lt "$deadline" ] || return 1
        sleep 0.1
    done
}

# of_iperf FILE COMMAND…: runs a client of iperf3, whose words come in the file. A server on a busy machine may still be with
# the client before, and says so.
of_iperf() {
    local file=$1 deadline=$((SECONDS + 60 * slower)); shift
    until "$@" >"$file" 2>&1; do
        grep -q 'server is busy' "$file" && [ "$SECONDS" -lt "$deadline" ] || return 1
        sleep 0.2
    done
}

# listens SOCKET: whether a process listens there. Between bind(2) and listen(2) a socket refuses connections, as one does that
# an earlier process has left, which is removed.
listens() { [ -S "$1" ] && awk -v path="$1" '$4 == "00010000" && $NF == path { found = 1 } END { exit !found }' /proc/net/unix; }

# engine_lists SOCKET PORT: whether the socket engine lists a program that listens at the port. The kernel shows
# the program a moment earlier, and a connection within that moment is the kernel's.
engine_lists() { "$slipway" socket ls --json --engine "$1" | grep -q "\"address\": \"[^\"]*:$2\""; }

state_of() { "$slipway" ps --json | python3 -c 'import json,sys
print(next((s["state"] for s in json.load(sys.stdin) if s["name"] == sys.argv[1]), "gone"))' "$1"; }
vmm_of() { "$slipway" ps --json | python3 -c 'import json,sys
print(next((s["vmm_pid"] or 0 for s in json.load(sys.stdin) if s["name"] == sys.argv[1]), 0))' "$1"; }
# Whether a process runs; one that is dead and waits for its parent does not.
runs() { [ "$1" != 0 ] && grep -q '^State:[[:space:]]*[RSDTtI]' "/proc/$1/status" 2>/dev/null; }
# cpu_quota NAME: what the VMM of a sandbox may use of each 100 ms, in microseconds: the time of its CPUs, and as much as one
# more. Nothing where the host has no such control groups.
cpu_quota() {
    local group
    group=$("$slipway" inspect "$1" | python3 -c 'import json,sys; print(json.load(sys.stdin)[0]["cgroup"]["path"])')
    cut -d ' ' -f 1 "/sys/fs/cgroup$group/cpu.max" 2>/dev/null \
        || cat "/sys/fs/cgroup/cpu$group/cpu.cfs_quota_us" 2>/dev/null
}
is_state() { [ "$(state_of "$1")" = "$2" ]; }

# Processes of VMMs of this node, one a line: nodes may have the same user ids, and each VMM prints into a
# directory of its node's. What is dead and waits for init to take note of it holds nothing any more.
vmms() {
    local stat pid args
    ps -o stat=,pid=,args= -U "$(seq -s, "$uid_base" $((uid_base + 63)))" | while read -r stat pid args; do
        case $stat:$(readlink "/proc/$pid/fd/1") in
            Z*) ;;
            *:"$SLIPWAY_RUN_DIR"/*) printf '%s %s %s\n' "$stat" "$pid" "$args" ;;
        esac
    done
}

# has_process_or_gone GROUP: true if the control group has a process, or is removed.
has_process_or_gone() { read -r _ <"$1/cgroup.procs" || [ ! -d "$1" ]; }

# Control groups of sandboxes, but those with a process in them that is no VMM of this node's, those of another
# node's pool, whose names begin with its data directory's number, and those that a daemon has ready while it runs.
groups_left() {
    local group pid runs='' own
    ! lock_holder >/dev/null || runs=yes
    # shellcheck disable=SC2046,SC2183 # two numbers
    own=$(printf 'pool-%s-%x-' $(stat -Lc '%D %i' "$SLIPWAY_DATA_DIR" 2>/dev/null))
    find /sys/fs/cgroup -maxdepth 3 -path '*/slipway/*' -type d 2>/dev/null | while read -r group; do
        case ${group##*/} in
            "$own"*) ;;
            pool-*) continue ;;
        esac
        read -r pid 2>/dev/null <"$group/cgroup.procs" || pid=
        case $runs$pid:$(readlink "/proc/${pid:-none}/fd/1")${group##*/} in
            yes:pool-*) ;;
            :"$own"* | *:"$SLIPWAY_RUN_DIR"/*) printf '%s\n' "$group" ;;
            # A group that is in no pool does not say whose it is. One of another node has no process while it is made or removed.
            :* | yes:*) wait_until 20 has_process_or_gone "$group" || printf '%s\n' "$group" ;;
        esac
    done
}

# Everything on the host that belongs to sandboxes of this node, one thing a line.
leftovers() {
    vmms
    groups_left
    find "$SLIPWAY_RUN_DIR/s" -mindepth 1 -maxdepth 1 2>/dev/null
    find "$SLIPWAY_DATA_DIR/sandboxes" -mindepth 1 -maxdepth 1 2>/dev/null
    grep -F "$SLIPWAY_RUN_DIR/" /proc/mounts
    return 0
}

# A daemon that is the test's child, beside a keeper: it can be ended and started again.
keeper='' daemon=''
explain() { tail -n 30 "$work/daemon.log"; }
start_keeper() {
    stop_daemon
    rm -f "$SLIPWAY_RUN_DIR"/{slipway,keeper}.sock
    echo 'keeper = true' >>"$SLIPWAY_CONFIG"
    "$slipway" keeper 2>"$work/keeper.log" & keeper=$!
    wait_until 20 listens "$SLIPWAY_RUN_DIR/keeper.sock" || fail "no keeper: $(cat "$work/keeper.log")"
}
# start_daemon [PROGRAM]: starts one, of another build of slipway if PROGRAM is given.
start_daemon() {
    rm -f "$SLIPWAY_RUN_DIR/slipway.sock"
    "${1:-$slipway}" daemon 2>>"$work/daemon.log" & daemon=$!
    # Not by asking: a question to no daemon would start one.
    wait_until 60 test -S "$SLIPWAY_RUN_DIR/slipway.sock" || fail "no daemon: $(explain)"
}
# end_daemon SIGNAL: ends it, and waits for that.
end_daemon() {
    runs "$daemon" || fail "the daemon has gone by itself: $(explain)"
    kill "-$1" "$daemon"; wait "$daemon" 2>/dev/null
}
# Ends both, in this order: a keeper ends when it holds nothing.
end_node() {
    [ -n "$daemon" ] && runs "$daemon" && timeout 60 "$slipway" rm --force --all >/dev/null 2>&1
    [ -n "$daemon" ] && kill "$daemon" 2>/dev/null && wait "$daemon" 2>/dev/null
    [ -n "$keeper" ] && kill "$keeper" 2>/dev/null && wait "$keeper" 2>/dev/null
}

# Processes that serve directories of the host to sandboxes of this node.
servers() {
    local exe
    for exe in /proc/[0-9]*/exe; do
        case $(readlink "$exe" 2>/dev/null):$(readlink "${exe%exe}fd/1" 2>/dev/null) in
            */slipway-fs:"$SLIPWAY_RUN_DIR"/*) basename "${exe%/exe}" ;;
        esac
    done
}
no_server() { [ -z "$(servers)" ]; }

need_root() { [ "$(id -u)" = 0 ] || skip "root"; }

# need_healthy WHAT: skips where `slipway doctor` names what the machine lacks; where it fails for another
# reason, so does the test.
need_healthy() {
    local report lacks
    report=$("$slipway" doctor 2>&1) && return
    lacks=$(grep MISSING <<<"$report" | tr -s ' ' | tr '\n' ';')
    [ -n "$lacks" ] || fail "slipway doctor: $report"
    skip "$1: $lacks"
}

# A machine and a node that can run sandboxes, with the test image in the node's cache.
need_image() {
    need_root
    [ -x "$slipway" ] || fail "$slipway is not built; \`make build\` builds it"
    need_healthy "a node that can run sandboxes"
    "${outside[@]}" "$here/image" "$slipway" "$image" "${packages[@]}" && return
    [ ${#packages[@]} -eq 0 ] || skip "an image with Debian's ${packages[*]}"
    fail "the test image could not be made"
}

# The same, with no sandbox of an earlier test's.
need_node() {
    need_image
    "$slipway" rm --force --all >/dev/null 2>&1 || true
}

# with_assertions: says whether $slipway is one of the programs that `make test` compiles (deploy/check/test-programs.sh). They
# are less optimised than those that are installed, and take more memory.
with_assertions() { [ "$(basename "$(dirname "$slipway")")" = tests ]; }

# test_program PACKAGE SCOPE TARGET: the program with the tests of a target of PACKAGE that cargo finds by
# SCOPE, "--lib" or "--test NAME". `make test` has built the whole workspace's, with features of their
# own: they are not built twice.
test_program() {
    # shellcheck disable=SC2086 # words
    (cd "$top" && cargo test --locked ${SLIPWAY_TEST_SCOPE:---package $1 $2} --no-run --message-format=json) 2>"$work/cargo.log" |
        python3 -c 'import json, sys
for line in sys.stdin:
    one = json.loads(line) if line.startswith("{") else {}
    if one.get("executable") and one["target"]["name"] == sys.argv[1] and one["profile"]["test"]:
        print(one["executable"])' "$3" | grep .
}

# A node in a network namespace of the test's own, where nothing of the machine's interfaces and rules is
# touched: `need_network_node "$@"` runs the test again in there. The image is made before: there is no way
# to a package mirror inside.
need_network_node() {
    local program
    need_root
    for program in nft ip nsenter; do
        command -v "$program" >/dev/null || skip "$program"
    done
    [ -c /dev/net/tun ] || skip "/dev/net/tun"
    if [ -z "${SLIPWAY_E2E_NAMESPACE:-}" ]; then
        need_image
        rm -rf "$work"
        SLIPWAY_E2E_NAMESPACE=1 exec unshare --net -- "$0" "$@"
    fi
    ip link set lo up
    stop_daemon
    need_node
}
