# shellcheck shell=bash
# The part `errors` of lab/kubernetes: pods that cannot run in a microVM say why. Sourced by lab/cluster/node, never run.

# find_line POD WORDS: sets $line to the line of `kubectl describe pod` with a warning that has the words.
find_line() {
    line=$(kubectl describe pod "$1" | grep -E '^  Warning ' | grep -F -- "$2" | sed -n 1p)
    [ -n "$line" ]
}

# one_line POD WORDS: no event of the pod with the words has a second line.
one_line() {
    kubectl get events --field-selector "involvedObject.kind=Pod,involvedObject.name=$1" -o json | python3 -c '
import json, sys
messages = [event["message"].strip() for event in json.load(sys.stdin)["items"]]
found = [message for message in messages if sys.argv[1] in message]
sys.exit(0 if found and not any("\n" in message for message in found) else 1)' "$2"
}

# says POD WORDS: the pod does not run, and one line of its description has the words.
says() {
    local line=''
    wait_until 300 find_line "$1" "$2" ||
        fail "no event of the pod $1 has '$2': $(kubectl describe pod "$1" | grep '^  Warning ' | tail -n 1)"
    one_line "$1" "$2" || fail "the event of the pod $1 with '$2' has several lines"
    ! is_running "$1" || fail "the pod $1 runs"
    echo "$1: $line" | tr -s ' '
}
is_running() { [ "$(phase "$1")" = Running ]; }

# An image for this machine whose program is for another one. kubelet takes it from containerd alone.
make_foreign() {
    python3 -B "$here/foreign.py" "$work/tmp/foreign.tar"
    ctr -n k8s.io image import "$work/tmp/foreign.tar"
    rm "$work/tmp/foreign.tar"
}

# A missing path never comes as far as the shim: kubelet checks a hostPath that has a type and the device of a volume,
# and containerd makes the directory of a hostPath without a type. So the socket and the device are there, and no microVM
# can have them. A device of a pool is missing all the same, if a file stands for a function that is not there.
part_errors() {
    [ "$LAB_RUNTIME" = slipway ] || { saw "only pods of Slipway's are refused"; return 0; }
    rm -rf "$work/tmp/host"
    mkdir "$work/tmp/host"
    # The path of a socket that is bound may have 107 bytes.
    (cd "$work/tmp/host" && python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("socket")')
    mkdir -p /run/slipway/functions
    : >/run/slipway/functions/none.0
    make_foreign
    apply errors
    says socket 'it is neither a directory nor a regular file'
    says device 'it is neither a directory nor a regular file'
    says both-ways 'what is mounted in a microVM cannot appear on its host'
    says host-network "the host's network cannot be a microVM's"
    says setting 'the kernel setting net.ipv4.tcp_syncookies'
    says foreign 'is a program for aarch64'
    says option 'is not known here: leave it out'
    says missing 'there is no pool'
    says misplaced 'only kubelet gives functions of pools'
    remove pod/socket pod/device pod/both-ways pod/host-network pod/setting pod/foreign pod/option pod/missing pod/misplaced \
        runtimeclass/wrong
    rm /run/slipway/functions/none.0
    ctr -n k8s.io image rm localhost/foreign:1
    check_without_daemon
    saw "10 pods said in one line why they do not run"
    check_left
}

# The next daemon is there before anything is said: parts that follow need it.
check_without_daemon() {
    local line='' found=yes
    end_program daemon
    name=waiting apply plain
    wait_until 300 find_line waiting 'no Slipway daemon serves at' || found=''
    start_slipway
    [ -n "$found" ] || fail "the events of a pod without a daemon do not name it: $(kubectl describe pod waiting | tail -n 3)"
    one_line waiting 'no Slipway daemon serves at' || fail "the event of the pod without a daemon has several lines"
    echo "waiting: $line" | tr -s ' '
    kubectl wait --for=condition=Ready pod/waiting --timeout=600s || fail "the pod does not run once the daemon serves again"
    remove pod/waiting
}
