# shellcheck shell=bash
# The parts of lab/kubernetes. Sourced by lab/cluster/node, never run.

all_parts="deployment commands volumes update resize job functions errors lifecycle policy install upgrade restart"
fail() { echo "failed: $*"; exit 1; }
# saw WORDS...: goes into the line of the part.
saw() { echo "saw: $*"; }

# apply NAME: a manifest, with the class of the pods and the numbers put in.
apply() {
    sed -e "s/CLASS/$LAB_RUNTIME/; s/NAME/${name:-}/; s/REPLICAS/${replicas:-$LAB_PODS}/; s/COMPLETIONS/$LAB_JOBS/; s|DIRECTORY|$work/tmp/host|" \
        "$LAB_MANIFESTS/$1.yaml" | kubectl apply -f -
}

# remove KIND/NAME...: with all of its pods.
remove() { kubectl delete --wait --cascade=foreground --timeout=300s "$@"; }

# same WHAT FOUND WANTED
same() { [ "$2" = "$3" ] || fail "$1 is '$2', and not '$3'"; }

ready_pods() { kubectl get deployment web -o jsonpath='{.status.readyReplicas}'; }

# The Service's address answers from the host and from a pod of runc's.
check_service() {
    local ip
    ip=$(kubectl get service web -o jsonpath='{.spec.clusterIP}')
    wait_until 30 curl -sf -m 10 -o /dev/null "http://$ip:8080/" || fail "the service does not answer to the host"
    for _ in 1 2 3 4 5 6; do
        curl -sf -m 20 "http://$ip:8080/" | grep -q 'It works' || fail "the service does not answer to the host"
        kubectl exec client -- timeout 20 wget -q -O - "http://$ip:8080/" | grep -q 'It works' ||
            fail "the service does not answer to a pod"
    done
    echo "the service answered 12 times"
}

deploy() {
    apply web
    kubectl rollout status deployment/web --timeout=900s || fail "the deployment is not ready"
    same "the number of ready pods" "$(ready_pods)" "${replicas:-$LAB_PODS}"
}

client() {
    apply client
    kubectl wait --for=condition=Ready pod/client --timeout=120s
}

part_deployment() {
    local from=$SECONDS
    deploy
    echo "$LAB_PODS pods are ready after $((SECONDS - from)) s"
    kubectl get pods -o wide
    [ "$LAB_RUNTIME" = runc ] || same "what the class adds to a pod" \
        "$(kubectl get pods -l app=web -o jsonpath='{.items[0].spec.overhead.memory}')" 160Mi
    [ "$LAB_RUNTIME" = runc ] || same "the nodes that the class asks for" \
        "$(kubectl get pods -l app=web -o jsonpath='{.items[0].spec.nodeSelector.dev\.slipway\.node}')" ready
    client
    check_service
    remove deployment/web service/web pod/client
    check_left
}

part_commands() {
    local forward
    apply tool
    kubectl wait --for=condition=Ready pod/tool --timeout=300s
    check_exec
    kubectl logs tool | grep -q 'httpd: serving port 80' || fail "kubectl logs has not the server's line"
    kubectl port-forward --address 127.0.0.1 pod/tool 18080:80 &
    forward=$!
    wait_until 30 curl -sf -m 10 -o /dev/null http://127.0.0.1:18080/ || fail "kubectl port-forward does not lead to the server"
    kill "$forward"
    check_copy
    check_debug
    remove pod/tool
    check_left
}

check_exec() {
    local kernel status=0
    kernel=$(kubectl exec tool -- uname -r)
    echo "kernels: the pod's $kernel, the host's $(uname -r)"
    [ "$LAB_RUNTIME" != slipway ] || [ "$kernel" != "$(uname -r)" ] || fail "the pod runs on the host's kernel"
    kubectl exec tool -- sh -c 'exit 7' || status=$?
    same "the status of kubectl exec" "$status" 7
    same "what kubectl exec -i returns" "$(echo through | kubectl exec -i tool -- cat)" through
}

check_copy() {
    head -c 3000000 /dev/urandom >"$work/tmp/there"
    kubectl cp "$work/tmp/there" tool:/tmp/file
    kubectl cp tool:/tmp/file "$work/tmp/back" >/dev/null
    cmp "$work/tmp/there" "$work/tmp/back" || fail "kubectl cp changes a file"
}

# A debugging container has the pod's network, and sees the server's processes where it names that one as its target.
check_debug() {
    local image=registry.k8s.io/e2e-test-images/busybox:1.29-2
    kubectl debug tool --image=$image -c plain --profile=general -- wget -q -O - http://127.0.0.1/
    wait_until 60 debugged plain 'It works' || fail "a debugging container does not reach the server: $(kubectl logs tool -c plain)"
    kubectl debug tool --image=$image -c target --target=web --profile=general -- sh -c 'ps; echo processes'
    wait_until 60 debugged target processes || fail "a debugging container with a target does not run: $(kubectl logs tool -c target)"
    kubectl logs tool -c target
    kubectl logs tool -c target | grep -q 'httpd -f' || fail "with --target, the server's processes are not seen"
}
debugged() { kubectl logs tool -c "$1" | grep -q "$2"; }

in_one() { kubectl exec volumes -c one -- sh -c "$1"; }
in_two() { kubectl exec volumes -c two -- sh -c "$1"; }
has_only_word() { [ "$(in_two 'ls /etc/network; cat /etc/network/word')" = "word
second" ]; }
has_word() { [ "$(in_two 'cat /conf/word')" = "$1" ]; }

part_volumes() {
    local at
    rm -rf "$work/tmp/host"
    mkdir "$work/tmp/host"
    echo host >"$work/tmp/host/file"
    apply volumes
    kubectl wait --for=condition=Ready pod/volumes --timeout=300s || fail "the pod is not ready: $(kubectl get pod volumes -o jsonpath='{.status.containerStatuses[0].state}')"
    for at in data memory part; do
        in_one "echo $at >/$at/file"
        same "what the other container reads of /$at" "$(in_two "cat /$at/file")" "$at"
    done
    same "the sub-path's file" "$(in_two 'cat /data/part/file')" part
    same "the host's file" "$(in_one 'cat /host/file; echo pod >/host/written')" host
    same "what the host reads" "$(cat "$work/tmp/host/written")" pod
    same "the downward API's file" "$(in_one 'cat /pod/name')" volumes
    in_one 'test -s /var/run/secrets/kubernetes.io/serviceaccount/token' || fail "there is no service account's token"
    has_word first || fail "the configMap is not there"
    check_copied
    check_change
    check_message
    remove pod/volumes configmap/volumes secret/volumes
    check_left
}

# A configMap has a directory of the image for itself, and nothing of a volume can be written to.
check_copied() {
    local at
    same "a configMap over a directory of the image" "$(in_one "ls /etc/network | tr '\n' ' '")" "if-up.d word "
    same "the secret and its mode" "$(in_one 'cat /secret/key; stat -c %a /secret/..data/key')" secret400
    same "a part of the configMap" "$(in_two 'cat /tmp/part')" first
    for at in conf/x etc/network/word secret/key tmp/part; do
        in_one "echo written >/$at" 2>/dev/null && fail "/$at was written to"
    done
    in_one 'echo written >/etc/written' || fail "the container's root cannot be written to"
}

check_change() {
    kubectl create configmap volumes --from-literal=word=second --dry-run=client -o yaml | kubectl replace -f -
    wait_until 150 has_word second || fail "the configMap's change does not come through"
    wait_until 60 has_only_word || fail "/etc/network has $(in_two 'cat /etc/network/*')"
    same "a part of the configMap after its change" "$(in_two 'cat /tmp/part')" first
}

# The pod has ended by itself, and says why; its user is not root, who has a token all the same.
check_message() {
    apply message
    kubectl wait --for=jsonpath='{.status.phase}'=Failed pod/message --timeout=300s
    same "the termination message" \
        "$(kubectl get pod message -o jsonpath='{.status.containerStatuses[0].state.terminated.message}')" "1000 has a token"
    remove pod/message
}

only_new() { ! kubectl get pods -l app=web -o jsonpath='{.items[*].spec.containers[0].image}' | grep httpd; }

part_update() {
    replicas=4
    deploy
    client
    kubectl set image deployment/web web=registry.k8s.io/e2e-test-images/nginx:1.14-2
    kubectl rollout status deployment/web --timeout=900s || fail "the update does not end"
    same "the number of ready pods" "$(ready_pods)" 4
    check_service
    wait_until 60 only_new || fail "old pods are left"
    remove deployment/web service/web pod/client
    check_left
}

# resize_to SIZE BYTES: the limit and the request, and what the guest's control group has then.
resize_to() {
    kubectl patch pod resize --subresource resize -p \
        "{\"spec\":{\"containers\":[{\"name\":\"web\",\"resources\":{\"limits\":{\"memory\":\"$1\"},\"requests\":{\"memory\":\"$1\"}}}]}}"
    wait_until 120 has_limit "$2" ||
        fail "the container's limit is $(group_limit), and not $2: $(kubectl get pod resize -o jsonpath='{.status.conditions}')"
    wait_until 60 reports_limit "$1" || fail "the pod's status does not have the limit $1"
}
# By the container's own control group, of whichever version.
group_limit() {
    kubectl exec resize -- sh -c 'cat /sys/fs/cgroup/memory.max 2>/dev/null || cat /sys/fs/cgroup/memory/memory.limit_in_bytes'
}
has_limit() { [ "$(group_limit)" = "$1" ]; }
reports_limit() { [ "$(kubectl get pod resize -o jsonpath='{.status.containerStatuses[0].resources.limits.memory}')" = "$1" ]; }

# field_of FIELD: of the microVM of the one pod that runs.
field_of() {
    slipway ps --json | python3 -c 'import json, sys
print([s[sys.argv[1]] for s in json.load(sys.stdin) if s["pod"] and s["state"] == "running"][0])' "$1"
}
# memory_of FIELD: in MiB.
memory_of() { echo $(($(field_of "$1") >> 20)); }
has_cpus() { [ "$(field_of cpus)" = "$1" ]; }
group_quota() {
    kubectl exec resize -- sh -c 'cut -d " " -f 1 /sys/fs/cgroup/cpu.max 2>/dev/null || cat /sys/fs/cgroup/cpu/cpu.cfs_quota_us'
}
has_quota() { [ "$(group_quota)" = "$1" ]; }

# resize_cpus_to LIMIT QUOTA CPUS: the limit, what the container's control group has then, and what the microVM has.
resize_cpus_to() {
    kubectl patch pod resize --subresource resize -p \
        "{\"spec\":{\"containers\":[{\"name\":\"web\",\"resources\":{\"limits\":{\"cpu\":\"$1\"}}}]}}"
    wait_until 120 has_quota "$2" ||
        fail "the container's quota is $(group_quota), and not $2: $(kubectl get pod resize -o jsonpath='{.status.conditions}')"
    [ "$LAB_RUNTIME" != slipway ] || wait_until 120 has_cpus "$3" ||
        fail "the microVM has $(field_of cpus) CPUs, and not $3"
}
has_memory() { [ "$(memory_of memory_bytes)" = "$1" ]; }

# Raises the limit above what the microVM has, where its VMM can give it more, and lowers it again.
resize_beyond() {
    local begin=none
    if [ "$LAB_RUNTIME" = slipway ]; then
        begin=$(memory_of memory_bytes)
        [ "$(memory_of max_memory_bytes)" -gt "$begin" ] || { echo "the VMM gives microVMs no memory"; return 0; }
    fi
    resize_to 320Mi $((320 << 20))
    kubectl exec resize -- dd if=/dev/zero of=/dev/null bs=256M count=1 || fail "256 of 320 MiB cannot be used"
    resize_to 48Mi $((48 << 20))
    [ "$begin" = none ] || wait_until 120 has_memory "$begin" ||
        fail "the microVM has $(memory_of memory_bytes) MiB, and not $begin"
}

part_resize() {
    apply resize
    kubectl wait --for=condition=Ready pod/resize --timeout=300s
    same "the limit" "$(group_limit)" $((64 << 20))
    resize_to 96Mi $((96 << 20))
    resize_to 48Mi $((48 << 20))
    same "the quota" "$(group_quota)" 50000
    resize_cpus_to 1500m 150000 2
    resize_cpus_to 500m 50000 1
    resize_beyond
    same "the number of restarts" "$(kubectl get pod resize -o jsonpath='{.status.containerStatuses[0].restartCount}')" 0
    remove pod/resize
    check_left
}

part_job() {
    local from=$SECONDS
    apply job
    kubectl wait --for=condition=Complete job/batch --timeout=2400s || fail "the job does not complete"
    echo "$LAB_JOBS pods are complete after $((SECONDS - from)) s"
    same "the number of pods that succeeded" "$(kubectl get job batch -o jsonpath='{.status.succeeded}')" "$LAB_JOBS"
    same "the number of logs that have their index" "$(kubectl logs -l job-name=batch --tail=-1 --max-log-requests 100 | sort -u | grep -c '^index ')" "$LAB_JOBS"
    remove job/batch
    check_left
}

# capacity [POOL]
capacity() { kubectl get node node -o jsonpath="{.status.allocatable.slipway\\.dev/${1:-scratch}}"; }
# has_capacity COUNT [POOL]
has_capacity() { [ "$(capacity "${2:-scratch}")" = "$1" ]; }
phase() { kubectl get pod "$1" -o jsonpath='{.status.phase}'; }
waits_for_function() { kubectl describe pod third | grep -q 'Insufficient slipway.dev/scratch'; }
# on_function POD COMMAND: with the pod's function as $disk.
on_function() { kubectl exec "$1" -- sh -c "disk=/dev/slipway/scratch-0; $2"; }

# Functions of a pool by the device plugin: two pods have the two that there are, and a third one waits.
part_functions() {
    [ "$LAB_RUNTIME" = slipway ] || { echo "only pods of Slipway's have functions"; return 0; }
    slipway vf create scratch --disk ram:16M --count 2
    begin plugin slipway device-plugin
    wait_until 60 has_capacity 2 || fail "the node has '$(capacity)' functions, and not 2"
    for name in first second third; do
        name=$name apply functions
        [ "$name" = third ] || kubectl wait --for=condition=Ready "pod/$name" --timeout=300s || fail "$name is not ready"
    done
    wait_until 60 waits_for_function || fail "the third pod does not wait for a function, but is $(phase third)"
    on_function first 'echo mark-of-first | dd of=$disk conv=fsync 2>/dev/null'
    same "what the second pod reads" "$(on_function second 'dd if=$disk bs=13 count=1 2>/dev/null | tr -d "\0"')" ""
    same "what the first pod reads" "$(on_function first 'dd if=$disk bs=13 count=1 2>/dev/null')" mark-of-first
    # A kubelet that starts again asks the plugin anew; the pods go on.
    kill_program kubelet
    start_kubelet
    wait_until 120 has_capacity 2 || fail "the node has '$(capacity)' functions after kubelet's restart"
    remove pod/first
    kubectl wait --for=condition=Ready pod/third --timeout=300s || fail "the third pod does not get the function that is free"
    same "what the third pod reads" "$(on_function third 'dd if=$disk bs=13 count=1 2>/dev/null | tr -d "\0"')" ""
    remove pod/second pod/third
    check_interface
    check_sockets
    end_program plugin
    slipway vf rm nics scratch
    slipway port rm backport
    slipway network rm back
    check_left
}

# A function of a pool of network interfaces: the pod has it beside CNI's, with an address of the pool's network. One
# that is drained is no device any more.
check_interface() {
    local gateway
    slipway network create back --internal
    slipway port create backport --network back
    slipway vf create nics --switch back --count 1
    wait_until 60 has_capacity 1 nics || fail "the node has '$(capacity nics)' interfaces, and not 1"
    name=wired apply interface
    kubectl wait --for=condition=Ready pod/wired --timeout=300s || fail "the pod with an interface is not ready"
    gateway=$(slipway network inspect back | python3 -c 'import json, sys; print(json.load(sys.stdin)[0]["gateway"])')
    kubectl exec wired -- ip -o -4 address
    same "the number of interfaces with an address" \
        "$(kubectl exec wired -- ip -o -4 address | grep -vc ' lo ')" 2
    kubectl exec wired -- ping -q -c 1 -W 20 "$gateway" || fail "the pod does not reach the network of its interface"
    remove pod/wired
    slipway vf drain nics
    wait_until 60 has_capacity 0 nics || fail "an interface that is drained stays healthy"
    slipway vf resume nics
    wait_until 60 has_capacity 1 nics || fail "an interface that is not drained any more is not healthy"
}

# The socket function of a pod whose interface by CNI is in no network of Slipway's: its sockets have the addresses of
# its interface of a pool. They are healthy while an engine serves.
check_sockets() {
    # start_slipway reads it.
    local pod_sockets=1
    kill_program daemon
    start_slipway
    end_program plugin
    begin plugin slipway device-plugin
    wait_until 60 has_capacity 0 sockets || fail "socket functions are '$(capacity sockets)' without an engine, and not 0"
    begin engine slipway socket engine --policy /none --links /none
    wait_until 60 has_capacity 1 sockets || fail "the node has '$(capacity sockets)' socket functions, and not 1"
    name=talks apply sockets
    kubectl wait --for=condition=Ready pod/talks --timeout=300s || fail "the pod with sockets is not ready"
    kubectl exec talks -- test -S /run/slipway/socket.d/engine.sock || fail "the pod has no engine"
    slipway socket ls | grep network:back || fail "the engine has no guest of the network"
    remove pod/talks
    end_program engine
    wait_until 60 has_capacity 0 sockets || fail "socket functions stay healthy without an engine"
    # shellcheck disable=SC2034 # start_slipway reads it.
    pod_sockets=0
    kill_program daemon
    start_slipway
}

# started_since TIME: every ready pod's container has started after that.
started_since() {
    kubectl get pods -l app=web -o json | python3 -c '
import json, sys
pods = json.load(sys.stdin)["items"]
def fresh(pod):
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))
    status = (pod["status"].get("containerStatuses") or [{}])[0]
    return ready and status.get("state", {}).get("running", {}).get("startedAt", "") >= sys.argv[1]
sys.exit(0 if len(pods) == int(sys.argv[2]) and all(map(fresh, pods)) else 1)' "$1" "$replicas"
}

# Kills all that runs pods, as the loss of a node's power does, but for the kernel. A shim of runc's that is killed
# leaves its socket, whoever cleans up after it; that is removed here.
kill_runtime() {
    local pid name pids=() sockets=()
    kill_program kubelet
    kill_program containerd
    [ -z "$LAB_SLIPWAY" ] || { kill_program daemon; kill_keeper; }
    while read -r _ pid name; do
        case $name in
            containerd-shim-runc-v2) mapfile -t -O "${#sockets[@]}" sockets < <(sockets_of "$pid") ;;
            containerd-shim-* | slipway-shim-holder) ;;
            *) continue ;;
        esac
        pids+=("$pid")
    done < <(processes)
    # A shim of Slipway's and its holder start each other again, unless they are stopped.
    kill -STOP "${pids[@]}" || true
    kill -KILL "${pids[@]}" || true
    rm -f "${sockets[@]}"
}
kill_keeper() {
    ss -xlpH | sed -n 's|.* /run/slipway/keeper.sock .*pid=\([0-9]*\),.*|\1|p' | xargs -r kill -KILL
}
sockets_of() { ss -xlpH | awk -v pid="pid=$1," 'index($0, pid) && $5 ~ "^/run/containerd/s/" { print $5 }'; }

# Prints id, start time and number of restarts of each container of the deployment's pods.
running() {
    kubectl get pods -l app=web -o jsonpath='{range .items[*].status.containerStatuses[*]}{.containerID} {.state.running.startedAt} {.restartCount}{"\n"}{end}' | sort
}

# The programs around the pods are killed and started again, as at an upgrade; the pods go on.
part_upgrade() {
    local before name
    replicas=2
    deploy
    client
    before=$(running)
    for name in kubelet containerd daemon; do kill_program "$name"; done
    start_runtime
    start_kubelet
    for name in $(kubectl get pods -l app=web -o name); do
        wait_until 120 kubectl exec "$name" -- true || fail "$name cannot be reached again"
    done
    check_service
    same "what runs" "$(running)" "$before"
    remove deployment/web service/web pod/client
    check_left
}

part_restart() {
    local from time
    replicas=3
    deploy
    client
    from=$SECONDS
    kill_runtime
    sleep 1
    time=$(date -u +%FT%TZ)
    start_runtime
    start_kubelet
    wait_until 600 started_since "$time" || fail "the pods are not ready again"
    echo "the pods are ready $((SECONDS - from)) s after the kill"
    kubectl wait --for=condition=Ready pod/client --timeout=120s
    wait_until 60 kubectl exec client -- true || fail "the client does not run"
    check_service
    remove deployment/web service/web pod/client
    check_left
}

# explain: what a failed part leaves to look at.
explain() {
    kubectl get pods -o wide
    kubectl get events --sort-by=.lastTimestamp | tail -n 30
    kubectl delete --ignore-not-found service/web
    nft delete table bridge lab 2>/dev/null
    kubectl delete pods --all --wait=false
    let_go
    kubectl delete deployments,jobs,pods --all --timeout=120s
}

# run_part NAME: prints one line, and returns the part's status.
run_part() {
    local from status=0 state=passed log=$LAB_REPORT/part-$1.log line
    present | sort >"$work/before"
    from=$(date +%s.%N)
    set +e
    (set -e; "part_$1") >"$log" 2>&1
    status=$?
    set -e
    line=$(printf '%6.1f s  %s' "$(echo "$(date +%s.%N) $from" | awk '{ print $1 - $2 }')" "$1")
    if [ "$status" != 0 ]; then
        state=failed
        line+=": $(grep '^failed: ' "$log" | tail -n 1 | cut -c 9- || true)"
        line=${line%: }
        explain >>"$log" 2>&1 || true
    else
        line+=": $(grep -E '^saw: | s after | ready after | complete after ' "$log" | sed 's/^saw: //' | paste -sd ';' | sed 's/;/; /g')"
        line=${line%: }
    fi
    echo "$state $line" | tee -a "$LAB_REPORT/parts.tsv"
    return "$status"
}

# run_parts [PART...]
run_parts() {
    local part failed=0 passed=0
    [ $# -gt 0 ] || eval "set -- $all_parts"
    for part in "$@"; do
        case " $all_parts " in *" $part "*) ;; *) die "there is no part $part; there are $all_parts" ;; esac
    done
    for part in "$@"; do
        if run_part "$part"; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
    done
    echo "$passed passed, $failed failed"
    [ "$failed" = 0 ]
}
