#!/usr/bin/env bash
# Forks of one template, one after the other and then at once. Each finds the image's root, a volume that another
# sandbox wrote before and one of its own that is empty; is reached and reaches its peer by name; and differs from
# all others in name, addresses, random numbers and keys. No byte of one is in another's memory, disks or frames:
# each fills some of all three with marks, and they and the host search for those of others (fork.py, marks.py).
#   SLIPWAY_FORKS_IN_ROW   forks one after the other, 6 unless told otherwise
#   SLIPWAY_FORKS_AT_ONCE  forks at once, 4 unless told otherwise
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
row=${SLIPWAY_FORKS_IN_ROW:-6} once=${SLIPWAY_FORKS_AT_ONCE:-4}
need_network_node "$@"
[ "${SLIPWAY_VMM:-}" = native ] || skip "slipway-vmm on KVM (SLIPWAY_VMM=native): lab/kvm-host --test $test_name SLIPWAY"
export SLIPWAY=$slipway PYTHONDONTWRITEBYTECODE=1
start_keeper
start_daemon

program=$(cat "$here/fork.py") volume=$work/before.img state=$work/marks
mkdir "$state"
truncate -s 8M "$volume"
timeout 120 "$slipway" run --rm --volume "file:$volume" "$image" -- python3 -c "$program" fill || fail "fill: $(explain)"
expected=$(timeout 120 "$slipway" run --rm --volume "file:$volume:ro" "$image" -- python3 -c "$program" digest) && [ ${#expected} = 64 ] ||
    fail "digest: $expected $(explain)"
timeout 300 "$slipway" template create web >/dev/null || fail "template create: $(explain)"
used=$(awk '/^Shmem:/ { print $2 }' /proc/meminfo)
ok "a volume is written, a template made: $("$slipway" template ls | tail -n 1)"

# fork NAME PEER: starts one in the background.
fork() {
    timeout 300 "$slipway" run --detach --name "$1" --wait-network --privileged --from web --volume "file:$volume:ro" \
        --volume own:8M "$image" -- python3 -c "$program" fork "$1" "$2" "$expected" >"$state/$1.run" 2>&1 || fail "run $1: $(cat "$state/$1.run"; explain)"
}
# says NAME WORD: true when the fork has said the word, and what follows is then in the state.
says() {
    "$slipway" logs "$1" >"$state/$1.log" 2>&1
    ! grep -E 'FAILED|Error|Traceback' "$state/$1.log" || fail "$1: $(cat "$state/$1.log")"
    grep -q "^$2: " "$state/$1.log" || return
    sed -n "s/^$2: //p" "$state/$1.log" >"$state/$1.$2"
}
# all_say WORD NAME...
all_say() {
    local name
    for name in "${@:2}"; do
        wait_until 60 says "$name" "$1" || fail "$name does not say $1: $(cat "$state/$name.log"; explain)"
    done
}
# look WHAT NAME=PEER...
look() {
    local wrong
    wrong=$(python3 "$here/marks.py" "$1" "$state" "${@:2}" 2>&1) || fail "$1: $wrong"
}
# goes_on NAME...: has forks check again what they have filled, and waits for their ends.
go_on() {
    local name
    for name in "$@"; do timeout 60 "$slipway" exec "$name" -- touch /go || fail "exec $name: $(explain)"; done
    all_say "done" "$@"
}
# ends NAME...
end() {
    local name
    for name in "$@"; do
        [ "$(timeout 60 "$slipway" wait "$name")" = 0 ] || fail "$name ends with an error: $("$slipway" logs "$name")"
    done
    "$slipway" rm --force "$@" >/dev/null || fail "rm: $(explain)"
}

# One that stays, for the others to talk with: it asks itself.
fork stays stays
all_say ready stays
begin=$SECONDS
for ((number = 1; number <= row; number++)); do
    name=row-$number
    fork "$name" stays
    all_say ready "$name"
    look look "$name=stays" "stays=stays"
    go_on "$name"
    look frames "$name=stays"
    end "$name"
done
ok "$row forks in a row in $((SECONDS - begin)) s: roots, volumes, names, peers, identities; no byte of another"

begin=$SECONDS names=() pairs=() clients=()
for ((number = 1; number <= once; number++)); do
    names+=("once-$number")
    pairs+=("once-$number=once-$((number % once + 1))")
done
for pair in "${pairs[@]}"; do
    fork "${pair%%=*}" "${pair##*=}" & clients+=($!)
done
for client in "${clients[@]}"; do wait "$client" || exit 1; done
all_say ready "${names[@]}"
look look "${pairs[@]}" "stays=stays"
go_on "${names[@]}"
look look "${pairs[@]}" "stays=stays"
look frames "${pairs[@]}"
end "${names[@]}"
ok "$once forks at once in $((SECONDS - begin)) s: the same"
python3 - "$state/known.json" <<'PYTHON'
import json, sys
with open(sys.argv[1]) as file:
    boxes = json.load(file).values()
for field in ("stack", "boot_id", "machine_id", "serial_of_driver"):
    print(f"of {len(boxes)} forks: {len({box[field] for box in boxes})} different values of {field}")
PYTHON

go_on stays
look frames "stays=stays"
end stays
freed() { [ "$(awk '/^Shmem:/ { print $2 }' /proc/meminfo)" -le "$((used + 1024))" ]; }
wait_until 30 freed || fail "shared memory: $used KiB before the forks, $(awk '/^Shmem:/ { print $2 }' /proc/meminfo) after them"
"$slipway" template rm web >/dev/null || fail "template rm: $(explain)"
left=$(leftovers)
[ -z "$left" ] || fail "left: $left"
ok "nothing is left, and the memory of all forks is the kernel's again"
