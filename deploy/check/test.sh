#!/bin/bash
# Runs every test and says at the end which were skipped and why.
#
# usage: test.sh SLIPWAY      the program that the end-to-end tests use
set -uo pipefail
SLIPWAY=$(readlink -e "${1:?usage: test.sh SLIPWAY}") || exit
export SLIPWAY
cd "$(dirname "$(readlink -f "$0")")/../.." || exit
logs=$(mktemp -d)
trap 'kill -- -"$compiling" 2>/dev/null; rm -rf "$logs"' EXIT
failed=()

# part NAME SHOWN COMMAND...: runs it. Lines that match SHOWN go to the screen, and the end of the
# rest when it failed. Its heading says how long the tests have run until then.
part() {
    local name=$1 shown=$2 log=$logs/${1//[^a-z0-9.-]/_}
    shift 2
    printf '== %s (%d:%02d)\n' "$name" $((SECONDS / 60)) $((SECONDS % 60))
    "$@" </dev/null 2>&1 | tee "$log" | grep --line-buffered -E "$shown"
    # An end-to-end test that says so has failed, whatever its status.
    [ "${PIPESTATUS[0]}" -eq 0 ] && ! grep -qE '^[a-z0-9-]+: FAILED: ' "$log" && return
    failed+=("$name")
    printf '== %s FAILED; the last of what it said:\n' "$name"
    tail -n 60 "$log"
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
            /^ +(Running|Doc-tests) / { target = $0 }
            passed { next }
            failed && /^---- / { if (target) print target; target = ""; left = 40 }
            # Behind many other words of the test, it would be cut off.
            failed && left < 20 && /panicked at/ { left = 20 }
            failed && /^stack backtrace:/ { left = 0 }
            !failed && /FAILED|^error|panicked at|ERROR: libFuzzer/ { left = 7 }
            left > 0 { print; left-- }
        ' "$logs/${name//[^a-z0-9.-]/_}" | tail -n 200
    done
}

# Tests that load the library into a program find it.
SLIPWAY_LIBRARY=$(dirname "$SLIPWAY")/libslipway.so
export SLIPWAY_LIBRARY
# The unit tests and the fuzz targets are compiled while the end-to-end tests run, which wait for most of their
# time: with the scheduling policy SCHED_IDLE this takes only processor time that nothing else wants. Both are
# compiled again below, so errors are told there. In a process group of its own, so that it ends with this script.
set -m
chrt --idle 0 bash -c 'cargo test --locked --workspace --no-run; fuzz/run --build' </dev/null >"$logs/compiling" 2>&1 &
compiling=$!
set +m

# end_to_end OPTION: the end-to-end tests that run a program of the unit tests (-l), or those that do not (-L).
end_to_end() {
    local test
    for test in $(grep "$1" test_program tests/e2e/[0-9]*.sh); do
        [ -x "$test" ] && part "$(basename "$test")" . "$test"
    done
}
end_to_end -L
printf '== the rest of what the unit tests need is compiled (%d:%02d)\n' $((SECONDS / 60)) $((SECONDS % 60))
wait "$compiling"
# Output of passed tests is kept too, since that is where they say that they were skipped; what panics
# in a test that passes was meant to.
part units '^ +Running|^test result|^error|FAILED' \
    cargo test --locked --workspace --no-fail-fast -- --show-output
# Built just now; a test that needs a test program finds it.
export SLIPWAY_TEST_SCOPE=--workspace
end_to_end -l
part fuzz . fuzz/run --total 100

skipped=$(grep -rhoE '^ *SKIPPED: .*' "$logs" | sed 's/^ *//' | sort -u)
if [ -n "$skipped" ]; then
    printf '\n== skipped\n%s\n' "$skipped"
else
    printf '\n== no test was skipped\n'
fi
if [ ${#failed[@]} -gt 0 ]; then
    reasons
    printf '\n== FAILED: %s\n' "${failed[*]}"
    exit 1
fi
printf '\n== all tests passed\n'
