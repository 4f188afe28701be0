# shellcheck shell=bash
# The part `lifecycle` of lab/kubernetes: probes, hooks, ends, streams and the order of containers. Sourced by
# lab/cluster/node, never run. Nothing is told by time: programs go on when a file is made, and what is waited for stays.

# status POD CONTAINER FIELD: of the container's status.
status() { kubectl get pod "$1" -o jsonpath="{.status.containerStatuses[?(@.name==\"$2\")].$3}"; }
has_status() { [ "$(status "$1" "$2" "$3")" = "$4" ]; }
# become POD CONTAINER FIELD VALUE
become() {
    wait_until 300 has_status "$@" || fail "the container $2 of $1 has $3 '$(status "$1" "$2" "$3")', and not '$4'"
}
# in_container POD CONTAINER COMMAND: also in one that is being started again.
in_container() {
    wait_until 120 kubectl exec "$1" -c "$2" -- sh -c "$3" || fail "in the container $2 of $1, '$3' does not succeed"
}

part_lifecycle() {
    rm -rf "$work/tmp/host"
    mkdir "$work/tmp/host"
    apply lifecycle
    check_probes
    check_order
    check_attach
    check_follow
    check_memory
    remove pod/probes pod/order pod/talk pod/greedy
    check_ends
    check_left
}

# Containers `exec`, `http` and `tcp` have probes of these kinds. Startup probes let them take their time.
check_probes() {
    local one
    for one in http tcp; do become probes "$one" started true; done
    wait_until 300 kubectl exec probes -c exec -- test -e /tmp/alive || fail "the container exec of probes does not run"
    same "whether a container has started whose startup probe fails" "$(status probes exec started)" false
    in_container probes exec 'touch /tmp/started'
    become probes exec started true
    same "whether a container is ready whose readiness probe fails" "$(status probes exec ready)" false
    in_container probes exec 'touch /tmp/ready'
    become probes exec ready true
    kubectl exec probes -c exec -- rm /tmp/ready
    become probes exec ready false
    same "the number of restarts before a liveness probe fails" \
        "$(kubectl get pod probes -o jsonpath='{.status.containerStatuses[*].restartCount}')" "0 0 0"
    kubectl exec probes -c exec -- rm /tmp/alive
    kubectl exec probes -c http -- rm /var/www/index.html
    # shellcheck disable=SC2016 # for the container's shell
    kubectl exec probes -c tcp -- sh -c 'kill $(pidof httpd)'
    for one in exec http tcp; do become probes "$one" restartCount 1; done
    in_container probes exec 'touch /tmp/started'
    # Events do not tell: kubelet has sent as many as it may of a pod whose startup probe failed for long.
    for one in exec http tcp; do become probes "$one" started true; done
    same "the status of a container whose liveness probe failed, after SIGTERM" \
        "$(status probes exec lastState.terminated.exitCode)" 0
    same "the number of restarts after each liveness probe has failed once" \
        "$(kubectl get pod probes -o jsonpath='{.status.containerStatuses[*].restartCount}')" "1 1 1"
    saw "probes by exec, httpGet and tcpSocket: one restart each"
}

# Init containers, a side-car that begins before the pod's container and ends after it.
check_order() {
    kubectl wait --for=jsonpath='{.status.phase}'=Succeeded pod/order --timeout=600s ||
        fail "the pod with init containers is $(phase order), after: $(paste -sd ' ' "$work/tmp/host/order")"
    same "the order of a pod's containers" "$(paste -sd ' ' "$work/tmp/host/order")" \
        "first second side main side-ends"
    saw "init containers, the side-car and the container ran in order"
}

# The input of one who attaches is closed with the pipe: the program ends by itself.
check_attach() {
    local attached
    become talk talker started true
    mkfifo "$work/tmp/words"
    kubectl attach -i talk -c talker <"$work/tmp/words" >"$work/tmp/answers" 2>&1 &
    attached=$!
    exec 8>"$work/tmp/words"
    echo one >&8
    wait_until 120 grep -qx 'answer to one' "$work/tmp/answers" ||
        fail "the program does not answer to kubectl attach: $(cat "$work/tmp/answers")"
    echo two >&8
    wait_until 120 grep -qx 'answer to two' "$work/tmp/answers" ||
        fail "the program does not answer twice to kubectl attach: $(cat "$work/tmp/answers")"
    exec 8>&-
    become talk talker state.terminated.exitCode 5
    wait_until 60 test ! -e "/proc/$attached" || fail "kubectl attach does not end with the program"
    rm "$work/tmp/words" "$work/tmp/answers"
    saw "kubectl attach: two answers, and the end of the input"
}

# Each line is asked for when the one before has been seen.
check_follow() {
    local follows number status=0
    become talk lines started true
    kubectl logs -f talk -c lines >"$work/tmp/lines" 2>&1 &
    follows=$!
    for number in 1 2 3; do
        in_container talk lines "touch /tmp/$number"
        wait_until 120 grep -qx "line $number" "$work/tmp/lines" ||
            fail "kubectl logs -f does not show line $number: $(cat "$work/tmp/lines")"
    done
    in_container_that_ends talk lines 'touch /tmp/end'
    wait_until 120 test ! -e "/proc/$follows" || fail "kubectl logs -f does not end with the container"
    wait "$follows" || status=$?
    same "the status of kubectl logs -f" "$status" 0
    same "what kubectl logs -f has shown" "$(paste -sd ' ' "$work/tmp/lines")" "line 1 line 2 line 3"
    become talk lines state.terminated.exitCode 0
    rm "$work/tmp/lines"
    saw "kubectl logs -f: three lines as they came, and the end"
}
# The container may have ended before the command has.
in_container_that_ends() { kubectl exec "$1" -c "$2" -- sh -c "$3" || true; }

check_memory() {
    become greedy one state.terminated.reason OOMKilled
    same "the status of what took too much memory" "$(status greedy one state.terminated.exitCode)" 137
    same "what kubectl get pod says of it" "$(kubectl get pod greedy --no-headers | awk '{ print $3 }')" OOMKilled
    saw "64 MiB with a limit of 32 MiB: OOMKilled"
}

# Two pods that are deleted. A finalizer keeps their status until it has been looked at.
check_ends() {
    local asked finished
    kubectl wait --for=condition=Ready pod/polite pod/deaf --timeout=600s
    same "what the postStart hook has written" "$(cat "$work/tmp/host/hooks")" postStart
    asked=$(date +%s)
    kubectl delete --wait=false pod/polite pod/deaf
    become polite one state.terminated.exitCode 42
    same "the order of hooks and SIGTERM" "$(paste -sd ' ' "$work/tmp/host/hooks")" "postStart preStop TERM"
    become deaf one state.terminated.exitCode 137
    finished=$(date -d "$(status deaf one state.terminated.finishedAt)" +%s)
    # Both times are in whole seconds.
    [ $((finished - asked)) -ge 7 ] || fail "a program that ignores SIGTERM was killed $((finished - asked)) s after the deletion, and has 8 s"
    let_go
    kubectl wait --for=delete pod/polite pod/deaf --timeout=300s
    saw "ends: 42 by the program itself after preStop, 137 by SIGKILL after its grace of 8 s"
}
# Takes the finalizers of all pods away.
let_go() { kubectl get pods -o name | xargs -rI {} kubectl patch {} --type=merge -p '{"metadata":{"finalizers":null}}'; }
