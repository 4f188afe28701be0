# Shared by the tests of sandboxes that write a line for each number from 1 on, which begins with the number; they source
# lib.sh before.
# shellcheck shell=bash

# The number that a sandbox wrote last to its output.
last() {
    local number
    # A line that comes while this one is printed is printed too.
    number=$("$slipway" logs --tail 1 "$1" | tail -n 1 | cut -d ' ' -f 1)
    echo "${number:-0}"
}
beyond() { [ "$(last "$1")" -gt "$2" ]; }
# counts_on SANDBOX...: each counts.
counts_on() {
    local name
    for name in "$@"; do wait_until 60 beyond "$name" "$(last "$name")" || fail "$name does not count: $("$slipway" ps) $(explain)"; done
}
# sequence SANDBOX LEAST MOST: its output begins with a number from LEAST to MOST, and has each number from there on.
sequence() {
    "$slipway" logs "$1" | python3 -c 'import sys
numbers = [int(line.split()[0]) for line in sys.stdin if line.endswith("\n")]
assert numbers and int(sys.argv[1]) <= numbers[0] <= int(sys.argv[2]), (sys.argv, numbers[:3])
assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), numbers' "$2" "$3" || fail "the output of $1: $("$slipway" logs "$1" | head -n 3)"
}
