# Shared by the tests of templates; they source lib.sh before.
# shellcheck shell=bash

# refused COMMAND... : the line of an error of slipway, which ends with a status other than 0.
refused() {
    local said
    said=$(timeout 120 "$slipway" "$@" 2>&1 </dev/null) && fail "no error: slipway $*: $said"
    [ "$(wc -l <<<"$said")" = 1 ] || fail "more than a line: slipway $*: $said"
    echo "$said"
}
# says TEXT COMMAND...: the error has this text.
says() {
    local said
    said=$(refused "${@:2}") || { echo "$said"; exit 1; }
    grep -qF -- "$1" <<<"$said" || fail "slipway ${*:2}: $said"
}

# templates: name, memory in MiB, CPUs and interface of each template, one a line.
templates() { "$slipway" template ls --json | python3 -c 'import json,sys
for one in json.load(sys.stdin): print(one["name"], one["memory_bytes"] >> 20, one["cpus"], one["nic"] or "none")'; }
# has COUNT: there are so many templates.
has() { [ "$(templates | wc -l)" = "$1" ]; }
in_sandbox() { timeout 60 "$slipway" exec "$1" -- "${@:2}"; }
# The memory of the VMM's file that is in use, MiB.
held() { echo $(($("$slipway" stats --json "$1" | python3 -c 'import json, sys
print(json.load(sys.stdin)[0]["vmm_resident_bytes"])') >> 20)); }
# of_record SANDBOX EXPRESSION: the value of an expression of Python over the record `one`.
of_record() { "$slipway" inspect "$1" | python3 -c 'import json, sys
one = json.load(sys.stdin)[0]
print(eval(sys.argv[1]))' "$2"; }
# began TIMELINE: whether a sandbox was a fork or booted.
began() { python3 -c 'import json, sys
stages = json.load(open(sys.argv[1]))
stages = stages[0]["stages"] if isinstance(stages, list) else stages["stages"]
print("fork" if any(one["name"] == "resume" for one in stages) else "boot")' "$1"; }
# automatic OPTION...: runs a sandbox with --from auto, and says how it began.
automatic() { timeout 300 "$slipway" run --rm --from auto --timeline "$work/auto.json" "$@" "$image" -- true && began "$work/auto.json"; }
# need_native: the rest of a test needs slipway-vmm.
need_native() { [ "${SLIPWAY_VMM:-}" = native ] || skip "slipway-vmm on KVM (SLIPWAY_VMM=native): lab/kvm-host --test $test_name SLIPWAY"; }
