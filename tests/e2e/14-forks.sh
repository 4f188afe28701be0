#!/usr/bin/env bash
# Forks of one template, one after the other and then at once. Each finds the image's root, a volume that another
# sandbox wrote before and one of its own that is empty; is reached and reaches its peer by name; and differs from
# all others in name, machine id, addresses, random numbers (the kernel's and OpenSSL's) and keys. No byte of one is
# in another's memory, disks or frames: each fills some of all three with marks, and they and the host search for those
# of others (fork.py, marks.py).
#   SLIPWAY_FORKS_IN_ROW   forks one after the other, 1 unless told otherwise
#   SLIPWAY_FORKS_AT_ONCE  forks at once, 2 unless told otherwise
#   SLIPWAY_SPARE_VMMS     VMMs that are started ahead, 0 unless told otherwise: forks in a row begin in them
# alone: it measures the machine's shared memory.
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
row=${SLIPWAY_FORKS_IN_ROW:-1} once=${SLIPWAY_FORKS_AT_ONCE:-2} spares=${SLIPWAY_SPARE_VMMS:-0}
need_network_node "$@"
[ "${SLIPWAY_VMM:-}" = native ] || skip "slipway-vmm on KVM (SLIPWAY_VMM=native): lab/kvm-host --test $test_name SLIPWAY"
export SLIPWAY=$slipway PYTHONDONTWRITEBYTECODE=1
end_all() { "$slipway" template rm web >/dev/null 2>&1; }
if [ "$spares" != 0 ]; then
    [ -w /sys/fs/cgroup/pids ] || [ -w /sys/fs/cgroup/cgroup.procs ] || skip "writable control groups"
    echo "spare_vmms = $spares" >>"$SLIPWAY_CONFIG"
fi
# The processes of VMMs that no sandbox has.
spare_pids() {
    local pid args
    ps -o pid=,args= -U "$(seq -s, "$uid_base" $((uid_base + 63)))" | while read -r pid args; do
        case $args:$(readlink "/proc/$pid/fd/1") in
            *" --spare fd:"*:/dev/null) echo "$pid" ;;
        esac
    done
}
no_spares() { [ -z "$(spare_pids)" ]; }
# figure NAME: a figure of the node.
figure() { "$slipway" metrics | sed -n "s/^slipway_$1 //p"; }
has_spares() { [ "$(figure spare_vmms)" = "$spares" ] && [ "$(spare_pids | wc -l)" = "$spares" ]; }
events() { figure "spare_vmm_events_total{event=\"$1\"}"; }
start_keeper
start_daemon

program=$(cat "$here/fork.py") volume=$work/before.img state=$work/marks
mkdir "$state"
truncate -s 1M "$volume"
timeout 120 "$slipway" run --rm --volume "file:$volume" "$image" -- python3 -c "$program" fill || fail "fill: $(explain)"
expected=$(timeout 120 "$slipway" run --rm --volume "file:$volume:ro" "$image" -- python3 -c "$program" digest) ||
    fail "digest: $expected $(explain)"
used=$(awk '/^Shmem:/ { print $2 }' /proc/meminfo)
timeout 300 "$slipway" template create "${machine[@]}" web >/dev/null || fail "template create: $(explain)"
ok "a volume is written, a template made: $("$slipway" template ls | tail -n 1)"

# fork NAME PEER: starts one, whose output goes to the state. A line of input has it go on.
declare -A input=() client=()
fork() {
    local pipe
    mkfifo "$state/$1.in"
    exec {pipe}<>"$state/$1.in"
    input[$1]=$pipe
    timeout 900 "$slipway" run --interactive --rm --name "$1" --wait-network --privileged --from web "${machine[@]}" --volume "file:$volume:ro" \
        --volume own:1M "$image" -- python3 -c "$program" fork "$1" "$2" "$expected" <"$state/$1.in" >"$state/$1.log" 2>&1 & client[$1]=$!
}
# all_say WORD NAME...: waits until each has said the word, and notes what follows it.
all_say() {
    local name deadline=$((SECONDS + 60 * slower))
    for name in "${@:2}"; do
        until grep -qs "^$1: .*}" "$state/$name.log"; do
            runs "${client[$name]}" || fail "$name has ended: $(cat "$state/$name.log"; explain)"
            [ "$SECONDS" -lt "$deadline" ] || fail "$name does not say $1: $(cat "$state/$name.log"; explain)"
            sleep 0.5
        done
        sed -n "s/^$1: //p" "$state/$name.log" >"$state/$name.$1"
    done
}
# look WHAT NAME=PEER...
look() {
    local wrong
    wrong=$(python3 "$here/marks.py" "$1" "$state" "${@:2}" 2>&1) || fail "$1: $wrong"
}
# go_on NAME...: has forks check again what they have filled.
go_on() {
    local name
    for name in "$@"; do echo go >&"${input[$name]}"; done
    all_say "done" "$@"
}
# end NAME...: waits for their ends.
end() {
    local name pipe
    for name in "$@"; do
        pipe=${input[$name]}
        echo end >&"$pipe"
        exec {pipe}>&-
        wait "${client[$name]}" || fail "$name ends with an error: $(cat "$state/$name.log")"
    done
}

[ "$spares" = 0 ] || wait_until 60 has_spares || fail "$(figure spare_vmms) spare VMMs: $(explain)"

# The fork `stays` is the peer of the forks in a row. Its own peer is itself.
fork stays stays
all_say ready stays
look look stays=stays
if [ "$spares" != 0 ]; then
    grep -qz -- --spare "/proc/$(vmm_of stays)/cmdline" || fail "a fork has a VMM of its own: $(explain)"
fi
taken=$(events taken)
begin=$SECONDS
for ((number = 1; number <= row; number++)); do
    name=row-$number
    [ "$spares" = 0 ] || wait_until 60 has_spares || fail "$(figure spare_vmms) spare VMMs: $(explain)"
    fork "$name" stays
    all_say ready "$name"
    look look "$name=stays"
    go_on "$name"
    look frames "$name=stays"
    end "$name"
done
look look stays=stays
forks=$("$slipway" metrics | sed -n 's/^slipway_sandbox_forks_total{kind="template"} //p')
[ "${forks:-0}" -gt "$row" ] || fail "forks are not counted: $("$slipway" metrics)"
if [ "$spares" != 0 ]; then
    [ "$(events taken)" = $((taken + row)) ] || fail "of $row forks $(($(events taken) - taken)) had a spare VMM"
    [ "$(events unfit)$(events failed)" = 00 ] || fail "spare VMMs: $(events unfit) unfit, $(events failed) failed"
fi
ok "$row forks in a row in $((SECONDS - begin)) s: roots, volumes, names, peers, identities; no byte of another"

begin=$SECONDS names=() pairs=()
for ((number = 1; number <= once; number++)); do
    names+=("once-$number")
    pairs+=("once-$number=once-$((number % once + 1))")
done
for pair in "${pairs[@]}"; do fork "${pair%%=*}" "${pair##*=}"; done
all_say ready "${names[@]}"
look look "${pairs[@]}"
go_on "${names[@]}"
look look "${pairs[@]}" stays=stays
look frames "${pairs[@]}"
end "${names[@]}"
ok "$once forks at once in $((SECONDS - begin)) s: the same"
python3 - "$state/known.json" <<'PYTHON'
import json, sys
with open(sys.argv[1]) as file:
    boxes = json.load(file).values()
for field in ("stack", "boot_id", "serial_of_driver"):
    values = {box[field] for box in boxes}
    print(f"of {len(boxes)} forks: {len(values)} different values of {field}, such as {min(values)}")
PYTHON

go_on stays
look frames "stays=stays"
end stays
"$slipway" template rm web >/dev/null || fail "template rm: $(explain)"
freed() { [ "$(awk '/^Shmem:/ { print $2 }' /proc/meminfo)" -le "$((used + 1024))" ]; }
wait_until 30 freed || fail "shared memory: $used KiB before the template, $(awk '/^Shmem:/ { print $2 }' /proc/meminfo) after them"
left=$(leftovers)
[ -z "$left" ] || fail "left: $left"
ok "nothing is left, and the memory of all forks and of the template is the kernel's again"

[ "$spares" != 0 ] || exit 0
wait_until 60 has_spares || fail "$(figure spare_vmms) spare VMMs: $(explain)"
kill -KILL "$(spare_pids | head -n 1)"
replaced() { [ "$(events failed)" = 1 ] && has_spares; }
wait_until 120 replaced || fail "a spare VMM that was killed is not replaced: $(explain)"
end_daemon KILL
wait_until 20 no_spares || fail "a killed daemon leaves the spare VMMs $(spare_pids)"
start_daemon
wait_until 60 has_spares || fail "$(figure spare_vmms) spare VMMs: $(explain)"
end_daemon TERM
no_spares || fail "a daemon that ends leaves the spare VMMs $(spare_pids)"
left=$(groups_left)
[ -z "$left" ] || fail "a daemon that ends leaves $left"
ok "$spares spare VMMs: a dead one is replaced, and daemons that end or are killed leave none"
