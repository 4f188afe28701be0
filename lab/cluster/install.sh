# shellcheck shell=bash
# The part `install` of lab/kubernetes: the DaemonSet that installs Slipway on this node, upgrades it under a running
# pod and removes it. Sourced by lab/cluster/node, never run.
#
# The node's directories of programs and settings are this machine's, under a layer that ends with the part. No systemd
# runs here: a `systemctl` of the part's own hands what it is told to a process that is in no pod's control group.

requests=/run/slipway-lab
layered="/etc /opt /usr/local /usr/libexec /var/lib/slipway"

# lacks: prints what the part needs and this run does not have.
lacks() {
    command -v make >/dev/null || echo make
    [ -e "$programs/slipway-bench" ] || echo "other program of \`make build\` beside $LAB_SLIPWAY"
    [ -e "$LAB_TOOLS/bin/mkfs.erofs" ] || echo "mkfs.erofs of deploy/setup/setup.sh run"
    # A static program names no loader.
    { [ -x /usr/bin/busybox ] && ! readelf -lW /usr/bin/busybox | grep -qw INTERP; } || echo busybox-static
}

# image NAME: makes the image of the programs in $tree and gives it to containerd.
image() {
    /usr/bin/python3 "$LAB_DEPLOY/node/image.py" --level 0 --tools "$LAB_TOOLS" --name "$1" "$tree" "$work/tmp/node.tar"
    ctr -n k8s.io image import "$work/tmp/node.tar"
    rm "$work/tmp/node.tar"
}

# A layer above each directory in which something is installed; the node's own files stay as they are. What is
# mounted in them later comes through, and nothing goes back.
layer_root() {
    local dir layer
    mkdir -p "$requests/own" /run/systemd/system
    mount --rbind "$work" "$requests/own"
    mount --make-rslave "$requests/own"
    for dir in $layered; do
        layer=$requests/layers$dir
        mkdir -p "$layer"/{upper,work}
        [ ! -d "$dir" ] || mount -t overlay overlay -o "lowerdir=$dir,upperdir=$layer/upper,workdir=$layer/work" "$dir"
        case $work in "$dir"/*) mount --rbind "$requests/own" "$work" ;; esac
    done
    rm -f /usr/local/bin/{slipway,containerd-shim-slipway-v2} "$work/path"/{slipway,containerd-shim-slipway-v2}
    rm -rf /var/lib/slipway/node /etc/slipway
    mkdir -p /etc/kubernetes
    cp "$KUBECONFIG" /etc/kubernetes/kubelet.conf
    ln -sf "$LAB_PROGRAMS/kubectl" /usr/local/bin/kubectl
    make_systemctl
}

unlayer_root() {
    local dir
    for dir in $layered "$requests/own"; do
        if mountpoint -q "$dir"; then umount -l "$dir"; fi
    done
    rm -rf --one-file-system "$requests" /run/systemd/system
    ln -sf "$LAB_SLIPWAY" "$work/path/slipway"
    ln -sf "$LAB_SHIM" "$work/path/containerd-shim-slipway-v2"
}

# Units are active while their processes are there.
make_systemctl() {
    cat >/usr/local/bin/systemctl <<END
#!/bin/bash
unit=\${*: -1} unit=\${unit%.service}
pids=$work/pids/\${unit/#slipway/daemon}
case \$1 in
    show) cat "\$pids" ;;
    is-active) kill -0 "\$(cat "\$pids")" 2>/dev/null ;;
    is-enabled) [ -e "$requests/enabled-\$unit" ] ;;
    enable) : >"$requests/enabled-\$unit" ;;
    disable) rm -f "$requests/enabled-\$unit" ;;
    stop | restart)
        rm -f "$requests/answer"
        echo "\$1 \$unit" >"$requests/.request"
        mv "$requests/.request" "$requests/request"
        until [ -e "$requests/answer" ]; do sleep 0.1; done
        exit "\$(cat "$requests/answer")"
        ;;
esac
END
    chmod 755 /usr/local/bin/systemctl
}

# Carries out what systemctl is told, one request after the other, until the part ends.
serve_requests() {
    local verb unit status
    while [ -d "$requests" ]; do
        if [ ! -e "$requests/request" ]; then sleep 0.1; continue; fi
        read -r verb unit <"$requests/request"
        rm "$requests/request"
        status=0
        (unit_does "$verb" "$unit") || status=1
        echo "$status" >"$requests/.answer"
        mv "$requests/.answer" "$requests/answer"
    done
}

# The installed programs alone are in the path of a containerd that is started here.
unit_does() {
    local installed=/usr/local/bin
    case $1-$2 in
        restart-containerd)
            end_program containerd
            SLIPWAY_PROGRAM=$installed/slipway PATH=$PATH:$installed start_containerd
            note containerd "$containerd"
            ;;
        restart-slipway) end_program daemon; LAB_SLIPWAY=$installed/slipway start_slipway ;;
        stop-slipway) end_program daemon ;;
        *) echo "no request to $1 $2 was expected"; return 1 ;;
    esac
}

rolled_out() {
    kubectl -n slipway rollout status "daemonset/$1" --timeout=900s ||
        fail "the DaemonSet $1 is not ready: $(kubectl -n slipway logs -l "app=$1" --tail=1)"
}
node_label() { kubectl get node node -o jsonpath='{.metadata.labels.dev\.slipway\.node}'; }
# Prints values that differ after a restart of the pod, its container or its microVM.
identity() {
    kubectl get pod counter -o jsonpath='{.status.containerStatuses[0].containerID} {.status.containerStatuses[0].restartCount} '
    kubectl exec counter -- cat /proc/sys/kernel/random/boot_id
}
count() { kubectl exec counter -- cat /tmp/count; }
counts_beyond() { [ "$(count)" -gt "$1" ]; }

part_install() {
    [ "$LAB_RUNTIME" = slipway ] || { saw "only Slipway is installed"; return 0; }
    local target programs tree=$work/tmp/tree status server lack
    programs=$(dirname "$(readlink -f "$LAB_SLIPWAY")")
    target=$(dirname "$programs")
    lack=$(lacks | paste -sd ,)
    [ -z "$lack" ] || { saw "the installation is left out, since there is no ${lack//,/, no }"; return 0; }
    make -s -C "$LAB_DEPLOY/../.." -o build install "DESTDIR=$tree" "CARGO_TARGET_DIR=$target" "PROGRAMS=$programs" ||
        fail "make install does not find all programs in $target"
    end_program daemon
    end_program containerd
    layer_root
    LAB_SHIM='' make_settings
    cp "$work/containerd.toml" "$work/tmp/settings"
    start_containerd
    note containerd "$containerd"
    serve_requests &
    server=$!
    disown "$server"
    # Whatever fails, the node is as before for the parts that follow.
    set +e
    (set -e; check_install; check_upgrade; check_metrics; check_removal)
    status=$?
    if [ "$status" != 0 ]; then kubectl -n slipway get pods -o wide; kubectl -n slipway get events; fi
    kubectl delete --ignore-not-found --timeout=300s pod/counter
    kubectl delete --ignore-not-found --timeout=300s namespace/slipway
    kill "$server"
    set -e
    restore_node
    [ "$status" = 0 ] || exit "$status"
    check_left
}

restore_node() {
    end_program daemon
    end_program containerd
    unlayer_root
    rm -rf "$tree" "$work/tmp/settings"
    make_cluster_settings
    start_runtime
    kubectl label --overwrite node node dev.slipway.node=ready
}

check_install() {
    local version
    version=$("$LAB_SLIPWAY" --version | cut -d ' ' -f 2)
    image "localhost/slipway-node:$version"
    kubectl label node node dev.slipway.node-
    sed "/SLIPWAY_SANDBOXER/s/value: \"\"/value: \"${LAB_SANDBOXER:-}\"/" "$LAB_DEPLOY/node/install.yaml" | kubectl apply -f -
    rolled_out slipway-node
    same "the node's label" "$(node_label)" ready
    grep -q 'runtimes\.slipway\]' "$work/containerd.toml" || fail "containerd's settings do not name the runtime"
    [ "${LAB_SANDBOXER:-}" != shim ] || grep -q 'sandboxer = "shim"' "$work/containerd.toml" ||
        fail "containerd's settings do not name the sandboxer"
    same "the program of the daemon" "$(readlink "/proc/$(pid_of daemon)/exe")" /usr/local/bin/slipway
    apply counter
    kubectl wait --for=condition=Ready pod/counter --timeout=600s ||
        fail "no pod runs on the installation: $(kubectl describe pod counter | tail -n 1)"
    saw "the DaemonSet has installed $version, and a pod runs"
}

# The other version differs by a line in the main program.
check_upgrade() {
    local before counted served words=of-another-version
    before=$(identity)
    counted=$(count)
    served=$(pid_of daemon)
    echo "$words" >>"$tree/usr/local/bin/slipway"
    image localhost/slipway-node:other
    kubectl -n slipway set image daemonset/slipway-node node=localhost/slipway-node:other
    rolled_out slipway-node
    same "the end of the program on the node" "$(tail -c $((${#words} + 1)) /usr/local/bin/slipway)" "$words"
    [ "$(pid_of daemon)" != "$served" ] || fail "the daemon was not started again"
    same "what runs after the upgrade" "$(identity)" "$before"
    wait_until 120 counts_beyond "$counted" || fail "the pod's counter stays at $counted after the upgrade"
    saw "an upgrade: the pod counted on from $counted to $(count)"
}

check_metrics() {
    local ip
    kubectl apply -f "$LAB_DEPLOY/metrics.yaml"
    rolled_out slipway-metrics
    ip=$(kubectl -n slipway get pods -l app=slipway-metrics -o jsonpath='{.items[0].status.podIP}')
    curl -sf -m 60 "http://$ip:9754/metrics" >"$work/tmp/metrics" || fail "the DaemonSet of metrics does not answer"
    grep -q '^slipway_sandboxes{state="running"} 1$' "$work/tmp/metrics" ||
        fail "the metrics do not have the one sandbox: $(grep '^slipway_sandboxes' "$work/tmp/metrics" | paste -sd ' ')"
    kubectl -n slipway delete --wait --cascade=foreground --timeout=300s daemonset/slipway-metrics
    saw "metrics of the node came from a pod: $(wc -l <"$work/tmp/metrics") lines"
    rm "$work/tmp/metrics"
}

check_removal() {
    remove pod/counter
    kubectl -n slipway delete --wait --cascade=foreground --timeout=300s daemonset/slipway-node
    kubectl apply -f "$LAB_DEPLOY/node/remove.yaml"
    rolled_out slipway-node-remove
    cmp "$work/containerd.toml" "$work/tmp/settings" || fail "the removal does not restore containerd's settings"
    { [ ! -e /var/lib/slipway/node ] && [ ! -e /usr/local/bin/slipway ]; } || fail "the removal leaves files"
    same "the node's label after the removal" "$(node_label)" ""
    saw "the removal has restored containerd's settings byte for byte"
}
