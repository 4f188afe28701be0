#!/bin/bash
# Runs every test and says at the end which were skipped and why.
#
# usage: test.sh SLIPWAY      the program that the end-to-end tests use
#
# Two end-to-end tests run at a time, since each waits for one busy processor, or for time: there are two lanes, and each lane
# is a node with directories, user ids, a network and mounts of its own. A test with a line `# alone: REASON` runs behind
# these, by itself. Programs of the unit tests run in the lanes too, one after the other in each; what they need of the machine
# they make for themselves.
set -uo pipefail
SLIPWAY=$(readlink -e "${1:?usage: test.sh SLIPWAY}") || exit
export SLIPWAY
cd "$(dirname "$(readlink -f "$0")")/../.." || exit
# The targets that are compiled. Examples are left out: `make check` compiles them.
unit_tests='--workspace --tests'
logs=$(mktemp -d)
# Groups of processes that run beside this script. They end with it: it waits until their tests have taken their nodes down.
beside=()
leave() {
    local group
    for group in "${beside[@]}"; do kill -- -"$group" 2>/dev/null; done
    wait
    rm -rf "$logs"
}
trap leave EXIT
touch "$logs/failed"

log_of() { printf '%s/log-%s' "$logs" "${1//[^a-z0-9.-]/_}"; }
clock() { printf '%d:%02d' $(($1 / 60)) $(($1 % 60)); }

# passed NAME STATUS: an end-to-end test that says so has failed, whatever its status.
passed() {
    [ "$2" -eq 0 ] && ! grep -qE '^[a-z0-9-]+: FAILED: ' "$(log_of "$1")" && return
    echo "$1" >>"$logs/failed"
    return 1
}

# part NAME SHOWN COMMAND...: runs it. Lines that match SHOWN go to the screen, and the end of the
# rest when it failed, which is the status. Its heading says how long the tests have run until then.
part() {
    local name=$1 shown=$2 log
    log=$(log_of "$name")
    shift 2
    printf '== %s (%s)\n' "$name" "$(clock $SECONDS)"
    "$@" </dev/null 2>&1 | tee "$log" | grep --line-buffered -E "$shown"
    passed "$name" "${PIPESTATUS[0]}" && return
    printf '== %s FAILED; the last of what it said:\n' "$name"
    tail -n 60 "$log"
    return 1
}

# Of each part that failed the lines that say so, and what each failed test said: it stands between
# `failures:` and the result, behind what the tests that passed said, panics that were meant to be too.
reasons() {
    local name
    for name in "${failed[@]}"; do
        printf '== %s\n' "$name"
        awk '
            /^successes:$/ { passed = 1; failed = left = 0 }
            /^failures:$/ { failed = 1; passed = left = 0; next }
            /^test result:/ { passed = failed = left = 0 }
            /^ +Running / { target = $0 }
            passed { next }
            failed && /^---- / { if (target) print target; target = ""; left = 40 }
            # Behind many other words of the test, it would be cut off.
            failed && left < 20 && /panicked at/ { left = 20 }
            failed && /^stack backtrace:/ { left = 0 }
            !failed && /FAILED|^error|panicked at|ERROR: libFuzzer/ { left = 7 }
            left > 0 { print; left-- }
        ' "$(log_of "$name")" | tail -n 200
    done
}

# Tests that load the library into a program find it.
SLIPWAY_LIBRARY=$(dirname "$SLIPWAY")/libslipway.so
export SLIPWAY_LIBRARY

# The way out of a lane's network, for what fetches packages.
export SLIPWAY_E2E_OUTSIDE=/proc/$$/ns/net
first=${SLIPWAY_DATA_DIR:-/var/lib/slipway-e2e}
second=$first-2

# apart COMMAND...: runs it with a network and mounts of its own, where the machine can make them: shims of all containerds have
# their sockets in one directory.
apart() {
    if ! unshare --net --mount mkdir -p /run/containerd 2>/dev/null; then "$@"; return; fi
    unshare --net --mount -- sh -c 'ip link set lo up && mount -t tmpfs -o mode=711 tmpfs /run/containerd && exec "$@"' sh "$@"
}

# end_to_end TEST: runs it on the node of this lane. What it says is shown as a whole when it ends, with when it began, and how
# long it took.
end_to_end() {
    local name status=0 begin=$SECONDS node=(env)
    name=$(basename "$1")
    if [ "$lane" = 2 ]; then
        # User ids that no other daemon has by default.
        node+=(SLIPWAY_RUN_DIR="${SLIPWAY_RUN_DIR:-/run/slipway-e2e}-2" SLIPWAY_DATA_DIR="$second" SLIPWAY_E2E_UIDS=1879113728)
    fi
    apart "${node[@]}" "$1" </dev/null >"$(log_of "$name")" 2>&1 || status=$?
    {
        flock 9
        printf '== %s (%s, %d s)\n' "$name" "$(clock "$begin")" $((SECONDS - begin))
        cat "$(log_of "$name")"
        passed "$name" "$status" || printf '== %s FAILED\n' "$name"
    } 9<"$logs"
}

# build_units: compiles the unit tests. $logs/artifacts has what was built.
build_units() {
    cargo test --locked $unit_tests --no-run --message-format=json-render-diagnostics >"$logs/artifacts"
}

# unit_programs: the programs of the unit tests, one a line: its path, its package's directory, its source, and what `cargo test`
# has to be told to run it. The largest come first: the small ones are quick, so that the lanes end together.
unit_programs() {
    python3 - "$logs/artifacts" <<'END'
import json, os, sys
built = [one for one in map(json.loads, open(sys.argv[1])) if one.get("executable") and one["profile"]["test"]]
for one in sorted(built, key=lambda one: -os.path.getsize(one["executable"])):
    target, manifest = one["target"], one["manifest_path"]
    kind = target["kind"][0] if target["kind"][0] in ("bin", "test") else "lib"
    package = os.path.dirname(manifest)
    again = f"--manifest-path {os.path.relpath(manifest)} --{kind}" + (f" {target['name']}" if kind != "lib" else "")
    print(one["executable"], package, os.path.relpath(target["src_path"]), again, sep="\t")
END
}

# unit PROGRAM: runs a program of the unit tests. What it says goes to the log of all as a whole when it ends, in cargo's words. The output of tests that passed is kept too, since that is where they say that they were
# skipped; what panics in a test that passes was meant to.
unit() {
    local log status=0
    log=$(mktemp "$logs/unit.XXXXXX")
    {
        printf '     Running %s (%s)\n' "${source_of[$1]}" "$1"
        # As cargo runs it.
        (cd "${package_of[$1]}" && exec "$1" --show-output)
    } </dev/null >"$log" 2>&1 || status=$?
    [ $status = 0 ] || printf 'error: status %s; again: cargo test %s\n' "$status" "${again_of[$1]}" >>"$log"
    {
        flock 9
        cat "$log" >>"$(log_of units)"
        grep -E '^ +Running|^test result|^error|FAILED' "$log"
        [ $status = 0 ] || touch "$logs/units-failed"
    } 9<"$logs"
    rm "$log"
}

# lane NUMBER TEST...: runs those of the tests that no other lane has begun.
lane() {
    local lane=$1 test
    # Not before the test that runs has ended.
    trap 'exit 143' TERM
    for test in "${@:2}"; do
        # One lane makes the directory.
        mkdir "$logs/has-$(basename "$test")" 2>/dev/null || continue
        case $test in
            *.sh) end_to_end "$test" ;;
            *) unit "$test" ;;
        esac
    done
}

# in_lanes COUNT TEST...: runs the tests in so many lanes.
in_lanes() {
    local number running=() others=("${beside[@]}")
    # Each lane is a process group.
    set -m
    for number in $(seq "$1"); do
        lane "$number" "${@:2}" & running+=($!)
    done
    set +m
    beside+=("${running[@]}")
    wait "${running[@]}"
    beside=("${others[@]}")
}

# The second lane has the images of the first, which makes the one that most tests use.
share_images() {
    local image
    image=slipway-e2e:$(sha256sum tests/e2e/image | cut -c 1-12)
    bash -c '. tests/e2e/lib.sh && need_node' images || return
    if [ ! -r "$first/images/index.json" ] || grep -qsF "$image" "$second/images/index.json"; then return; fi
    # Aside first: what is cut off has no index.
    install -d -m 711 "$second" && rm -rf "$second"/images{,.new} && cp -a --reflink=auto "$first/images" "$second/images.new" &&
        mv "$second/images.new" "$second/images"
}

# The unit tests are compiled while the end-to-end tests run, which wait for a part of their time: with the scheduling policy
# SCHED_IDLE this takes only processor time that nothing else wants. They are compiled again below, so errors are told
# there. In a process group of its own, so that it ends with this script.
set -m
chrt --idle 0 bash -c "cargo test --locked $unit_tests --no-run; touch $logs/compiled" \
    </dev/null >"$logs/compiling" 2>&1 &
compiling=$!
set +m
beside=("$compiling")

# A lane may take 6 GiB of memory.
lanes=2
[ "$(nproc)" -ge 2 ] && awk '/^MemAvailable:/ { exit $2 < 12 * 1024 * 1024 }' /proc/meminfo || lanes=1
# The longest come first, so that the lanes end together. A test that is named twice is run once.
longest=(70-kvm 74-containerd 46-network-namespace 46-guest-network 75-pods 42-plug-kills 45-network 20-disks 37-restart-sandboxes
    46-e1000)
shared=() alone=() programs=()
for test in "${longest[@]/#/tests/e2e/}" tests/e2e/[0-9]*.sh; do
    test=${test%.sh}.sh
    [ -x "$test" ] || continue
    if grep -q '^# alone: ' "$test"; then
        alone+=("$test")
    elif grep -q test_program "$test"; then
        programs+=("$test")
    else
        shared+=("$test")
    fi
done
[ $lanes = 1 ] || part images . share_images
in_lanes $lanes "${shared[@]}"
in_lanes 1 "${alone[@]}"
printf '== the rest of what the unit tests need is compiled (%s)\n' "$(clock $SECONDS)"
until [ -e "$logs/compiled" ] || ! kill -0 "$compiling" 2>/dev/null; do sleep 1; done
units=()
if part units '^error' build_units; then
    declare -A package_of source_of again_of
    while IFS=$'\t' read -r program package source again; do
        units+=("$program")
        package_of[$program]=$package source_of[$program]=$source again_of[$program]=$again
    done < <(unit_programs)
fi
# Built just now; an end-to-end test that needs a test program finds it. It takes longer than a program of the unit tests.
export SLIPWAY_TEST_SCOPE=$unit_tests
in_lanes $lanes "${programs[@]}" "${units[@]}"
[ ! -e "$logs/units-failed" ] || echo units >>"$logs/failed"
wait "$compiling"
beside=()

skipped=$(grep -rhoE '^ *SKIPPED: .*' "$logs" | sed 's/^ *//' | sort -u)
if [ -n "$skipped" ]; then
    printf '\n== skipped\n%s\n' "$skipped"
else
    printf '\n== no test was skipped\n'
fi
mapfile -t failed <"$logs/failed"
if [ ${#failed[@]} -gt 0 ]; then
    reasons
    printf '\n== FAILED: %s\n' "${failed[*]}"
    exit 1
fi
printf '\n== all tests passed\n'
