#!/usr/bin/env bash
# The memory that a pod of containerd's takes of its host beside its guest's own: shim, VMM, and what the daemon
# grows by. With slipway-vmm it is at most 12 MiB; runc's and Kata's are printed where they are installed.
. "$(dirname "$0")/lib.sh"
# Of QEMU nothing is promised.
[ "${SLIPWAY_VMM:-}" = native ] || skip "slipway-vmm on KVM (SLIPWAY_VMM=native): lab/kvm-host --test $test_name SLIPWAY"
. "$(dirname "$0")/containerd.sh"

pods=${SLIPWAY_PODS:-4}
run_runc() { c run --runtime io.containerd.runc.v2 "$@" </dev/null; }

run_kata() { c run --runtime io.containerd.kata.v2 "$@" </dev/null; }

# begin_pod RUN ID: a pod with a container in it that does nothing.
begin_pod() {
    "$1" -d --annotation $kind=sandbox --annotation $of="$2" --annotation dev.slipway.memory=128M \
        "$image" "$2" sleep 1000000 >"$work/out" 2>&1 &&
        "$1" -d --annotation $kind=container --annotation $of="$2" "$image" "$2-one" sleep 1000000 >"$work/out" 2>&1
}
pod() { begin_pod "$@" || fail "pod $2: $(cat "$work/out") $(explain)"; }
vmms() { "$slipway" ps --json | python3 -c 'import json,sys
print(*[one["vmm_pid"] for one in json.load(sys.stdin)])'; }

# memory PID...: proportional memory in KiB of all of these, with their page tables. A guest's memory is a memfd, or a
# file in /dev/shm as Kata's QEMU has it, and what rings and queues share is one too: all of these are left out.
memory() { python3 - "$@" <<'P'
import re, sys
total = 0
for pid in sys.argv[1:]:
    counts = True
    for line in open(f"/proc/{pid}/smaps"):
        head = re.match(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+ *(.*)", line)
        if head:
            counts = not head[1].startswith(("/memfd:", "/dev/shm/"))
        elif counts and line.startswith("Pss:"):
            total += int(line.split()[1])
    total += sum(int(line.split()[1]) for line in open(f"/proc/{pid}/status") if line.startswith("VmPTE:"))
print(total)
P
}
# each TEXT KIB: for one pod, in MiB.
each() { python3 -c 'import sys; print("%.2f" % (int(sys.argv[1]) / 1024 / int(sys.argv[2])))' "$1" "$pods"; }

# The first pod makes what all share.
start_keeper
start_daemon
pod run first
before=$(memory "$daemon") own=$(vmms) shims=$(shims) holders=$(holders)
for number in $(seq "$pods"); do pod run "pod$number"; done
# A pod that has just begun still has what its start took.
sleep 2
ours=$(for pid in $(shims); do grep -qw "$pid" <<<"$shims" || echo "$pid"; done)
helpers=$(for pid in $(holders); do grep -qw "$pid" <<<"$holders" || echo "$pid"; done)
machines=$(for pid in $(vmms); do grep -qw "$pid" <<<"$own" || echo "$pid"; done)
[ "$(wc -w <<<"$ours"):$(wc -w <<<"$machines")" = "$pods:$pods" ] ||
    fail "$pods pods have the shims $ours and the VMMs $machines"
# shellcheck disable=SC2086 # process ids
shim=$(memory $ours $helpers) vmm=$(memory $machines) plane=$(($(memory "$daemon") - before))
all=$((shim + vmm + plane))
say "MiB of each of $pods pods: $(each $all) = shim $(each $shim) + VMM $(each $vmm) + daemon $(each $plane)"
no_server || fail "processes for file systems: $(servers)"
[ $all -le $((12 * 1024 * pods)) ] || fail "a pod takes more than 12 MiB"
ok "a pod takes $(each $all) MiB of its host beside its guest's memory"

if command -v runc containerd-shim-runc-v2 >/dev/null; then
    runcs() { pgrep -f "containerd-shim-runc-v2 .*-address $address|^sleep 1000000" | sort -u; }
    for number in $(seq "$pods"); do pod run_runc "runc$number"; done
    sleep 2
    # shellcheck disable=SC2046 # process ids
    say "MiB of each of $pods pods with runc: $(each "$(memory $(runcs))"), its containers' processes among them"
fi

# Kata's settings, where its packages put them.
kata_settings() {
    local file
    for file in ${KATA_CONF_FILE:-} {/etc,/opt/kata/share/defaults,/usr/share/defaults}/kata-containers/configuration.toml \
        /opt/kata/share/defaults/kata-containers/runtime-rs/configuration.toml; do
        [ ! -e "$file" ] || return 0
    done
    return 1
}
# no_kata REASON: lab/kvm-host takes no other test for skipped by this line.
no_kata() { printf 'SKIPPED: %s\n' "e2e/$test_name, the same figure of Kata: $*"; }
begin_katas() {
    local number
    for number in $(seq "$pods"); do begin_pod run_kata "kata$number" || return; done
}
# The shims, VMMs and file servers of Kata's pods: each but the shim has a directory of its pod in its command.
katas() { pgrep -f "containerd-shim-kata-v2 .*-address $address|/(vm|sandboxes|firecracker)/kata[0-9]+/" | sort -u; }
if ! command -v containerd-shim-kata-v2 >/dev/null; then
    no_kata "needs Kata Containers, which is not installed: no containerd-shim-kata-v2 in the path"
elif ! kata_settings; then
    no_kata "needs Kata's configuration.toml, which is in none of its places; KATA_CONF_FILE names another one"
elif ! begin_katas; then
    no_kata "its pods do not begin: $(tail -n 1 "$work/out")"
else
    sleep 2
    # shellcheck disable=SC2046 # process ids
    say "MiB of each of $pods pods with Kata: $(each "$(memory $(katas))")"
fi

for id in $(c task ls -q); do c task rm -f "$id" >/dev/null 2>&1; done
gone() { [ -z "$("$slipway" ps --quiet)$(shims)" ]; }
wait_until 60 gone || fail "after the pods' end: $("$slipway" ps) shims: $(shims)"
ok "pods end, and leave nothing"
