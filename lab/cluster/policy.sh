# shellcheck shell=bash
# The part `policy` of lab/kubernetes: what is done to a pod's traffic at the host's end of its interface stays
# effective. Sourced by lab/cluster/node, never run.

pod_address() { kubectl get pod "$1" -o jsonpath='{.status.podIP}'; }
# fetches FROM TO: the first pod gets a page of the second one.
fetches() { kubectl exec "$1" -- timeout 30 wget -q -O - "http://$(pod_address "$2")/" | grep -q 'It works'; }
reaches() { wait_until 120 fetches "$1" "$2" || fail "$1 does not reach $2 ($3)"; }

part_policy() {
    apply policy
    kubectl wait --for=condition=Ready pod/target pod/other pod/foe pod/friend --timeout=600s
    check_rule
    check_rate
    remove pod/target pod/other pod/foe pod/friend
    check_left
}

# A rule on the bridge between the pods, as an agent of network policies makes it: `foe` may not talk to `target`.
# The rule's counter says that the frames came by, and what follows, that nothing else kept them.
check_rule() {
    reaches foe target "before the rule"
    nft add table bridge lab
    nft 'add chain bridge lab forward { type filter hook forward priority 0; policy accept; }'
    nft add rule bridge lab forward ip saddr "$(pod_address foe)" ip daddr "$(pod_address target)" counter drop
    ! fetches foe target || fail "foe reaches target in spite of the rule"
    [ "$(dropped)" -gt 0 ] || fail "the rule has dropped nothing, and foe does not reach target"
    reaches friend target "with a rule for foe alone"
    reaches foe other "with a rule for target alone"
    reaches target other "with a rule for foe alone"
    saw "a rule for two addresses dropped $(dropped) frames, and stopped no other pod"
    nft delete table bridge lab
    reaches foe target "after the rule"
}
dropped() { nft list table bridge lab | sed -n 's/.* counter packets \([0-9]*\) .*/\1/p'; }

# can_limit: this kernel has what the plugin `bandwidth` makes for what a pod sends.
can_limit() {
    ip link add lab-rate type ifb 2>/dev/null || return
    local status=0
    {
        tc qdisc add dev lab-rate root tbf rate 1mbit burst 10kb latency 50ms &&
            tc qdisc add dev lab-rate ingress &&
            tc filter add dev lab-rate parent ffff: protocol all u32 match u32 0 0 action mirred egress redirect dev lo
    } 2>/dev/null || status=$?
    ip link delete lab-rate
    return "$status"
}

# sent POD: the bytes per second of a file that the pod sends to the host, the host's time.
sent() {
    curl -sf -m 1800 -o /dev/null -w '%{size_download} %{time_total}\n' "http://$(pod_address "$1")/file" |
        awk -v size="$chunk" '{ if ($1 != size) exit 1; printf "%d\n", $1 / $2 }'
}

# containerd gives the plugin the largest burst that there is, 512 MiB, however small the rate: so files are sent
# until one takes its time, or twice that burst has passed. Only the upper bound is looked at. A pod without a
# limit shows that the machine sends faster.
check_rate() {
    local chunk=$((4 << 20)) limit=125000 number pod rate free most
    can_limit || { saw "rates are left out: this kernel lacks ifb, tbf or mirred"; return 0; }
    most=$((limit * 3 / 2))
    apply rate
    kubectl wait --for=condition=Ready pod/slow --timeout=600s || fail "a pod with a limit of what it sends does not run: $(kubectl describe pod slow | tail -n 2)"
    for pod in slow other; do
        kubectl exec "$pod" -- dd if=/dev/zero of=/var/www/file bs=1M count=4 2>/dev/null
    done
    free=$(sent other) || fail "the pod without a limit does not send the file"
    [ "$free" -gt "$most" ] || { saw "rates are left out: without a limit this machine sends $free bytes/s"; remove pod/slow; return 0; }
    for number in $(seq 256); do
        rate=$(sent slow) || fail "the pod with a limit does not send the file"
        [ "$rate" -gt "$most" ] || break
    done
    [ "$rate" -le "$most" ] || fail "a pod that may send $limit bytes/s sends $rate"
    saw "a pod that may send $limit bytes/s sends $rate, in file $number; one without a limit $free"
    remove pod/slow
}
