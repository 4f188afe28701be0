# shellcheck shell=bash
# Kubernetes' programs on the node: each has a log in the report, and its process id in $work/pids. Sourced by
# lab/cluster/node, never run.

# The node's address. Loopback is none that kubelet takes.
address=10.98.0.1

# begin NAME COMMAND...
begin() {
    local name=$1
    shift
    "$@" >>"$LAB_REPORT/$name.log" 2>&1 </dev/null &
    note "$name" "$!"
}

# note NAME PID: the shell does not report how it ended.
note() {
    echo "$2" >"$work/pids/$1"
    disown "$2"
}
pid_of() { cat "$work/pids/$1" 2>/dev/null; }
# kill_program NAME: with -9. Its locks are free when it is gone.
kill_program() {
    local pid
    pid=$(pid_of "$1") && kill -KILL "$pid" 2>/dev/null || return 0
    wait_until 20 test ! -e "/proc/$pid" || true
}
# end_program NAME: waits until it has ended.
end_program() {
    local pid
    pid=$(pid_of "$1") && kill "$pid" 2>/dev/null || return 0
    wait_until 20 test ! -e "/proc/$pid" || kill -KILL "$pid" 2>/dev/null || true
}

# Mounts directories of the node's own where kubelet keeps its files and its pods', and makes an interface.
make_node() {
    mkdir -p "$work"/{pids,kubelet,log,tmp,etcd,apiserver}
    export TMPDIR=$work/tmp
    mount --bind "$work/kubelet" /var/lib/kubelet
    mount --make-shared /var/lib/kubelet
    mount --bind "$work/log" /var/log
    hostname node
    ip link add node0 type bridge
    ip address add "$address/24" dev node0
    ip link set node0 up
    # Addresses of Services are of no interface: they need a route to be looked at.
    ip route add default via "${address%.*}.254" dev node0
    local hierarchy
    for hierarchy in /sys/fs/cgroup/*/; do
        ! mountpoint -q "$hierarchy" || mkdir -p "$hierarchy/slipway-lab"
    done
    if [ -e /sys/fs/cgroup/cgroup.controllers ]; then mkdir -p /sys/fs/cgroup/slipway-lab; fi
}

# One user, who may do everything, and a key for the tokens of service accounts.
make_credentials() {
    local token
    token=$(openssl rand -hex 16)
    echo "$token,admin,admin,system:masters" >"$work/tokens.csv"
    openssl genrsa -out "$work/accounts.key" 2048 2>/dev/null
    export KUBECONFIG=$work/kubeconfig
    cat >"$KUBECONFIG" <<END
apiVersion: v1
kind: Config
clusters: [{name: lab, cluster: {server: "https://$address:6443", certificate-authority: "$work/apiserver/apiserver.crt"}}]
users: [{name: admin, user: {token: "$token"}}]
contexts: [{name: lab, context: {cluster: lab, user: admin}}]
current-context: lab
END
}

start_etcd() {
    begin etcd etcd --data-dir "$work/etcd" --listen-client-urls http://127.0.0.1:2379 \
        --advertise-client-urls http://127.0.0.1:2379 --listen-peer-urls http://127.0.0.1:2380 \
        --unsafe-no-fsync --log-level warn
}

start_apiserver() {
    begin apiserver kube-apiserver --etcd-servers http://127.0.0.1:2379 --bind-address 0.0.0.0 \
        --advertise-address "$address" --cert-dir "$work/apiserver" --token-auth-file "$work/tokens.csv" \
        --authorization-mode RBAC --service-cluster-ip-range 10.97.0.0/16 --allow-privileged \
        --service-account-issuer https://kubernetes.default.svc --service-account-key-file "$work/accounts.key" \
        --service-account-signing-key-file "$work/accounts.key" --kubelet-preferred-address-types InternalIP
    wait_until 180 kubectl get --raw /readyz ||
        die "the API server does not answer: $(tail -n 3 "$LAB_REPORT/apiserver.log")"
}

start_controllers() {
    begin controllers kube-controller-manager --kubeconfig "$KUBECONFIG" --leader-elect=false \
        --service-account-private-key-file "$work/accounts.key" --root-ca-file "$work/apiserver/apiserver.crt"
    begin scheduler kube-scheduler --kubeconfig "$KUBECONFIG" --leader-elect=false
}

# Limits of connections are the machine's, and are left alone.
start_proxy() {
    cat >"$work/proxy.yaml" <<END
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
clientConnection: {kubeconfig: "$KUBECONFIG"}
hostnameOverride: node
mode: nftables
clusterCIDR: 10.99.0.0/16
oomScoreAdj: 0
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
END
    begin proxy kube-proxy --config "$work/proxy.yaml"
}

# Calls of the runtime may take long where sandboxes boot under emulation.
start_kubelet() {
    cat >"$work/kubelet.yaml" <<END
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
runtimeRequestTimeout: 10m
cgroupDriver: cgroupfs
cgroupRoot: /slipway-lab
enforceNodeAllocatable: []
failCgroupV1: false
failSwapOn: false
oomScoreAdj: 0
makeIPTablesUtilChains: false
resolvConf: "$work/resolv.conf"
volumePluginDir: "$work/plugins"
evictionHard: {memory.available: 100Mi, nodefs.available: 1%, imagefs.available: 1%}
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
END
    begin kubelet kubelet --config "$work/kubelet.yaml" --kubeconfig "$KUBECONFIG" --hostname-override node \
        --node-ip "$address"
}

# make_cluster_settings: containerd's, with a further runtime for the part `errors`: its option is none of Slipway's.
make_cluster_settings() {
    make_settings
    [ -z "$LAB_SHIM" ] || cat >>"$work/containerd.toml" <<'END'
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.wrong]
  runtime_type = "io.containerd.slipway.v2"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.wrong.options]
    NoSuchOption = "here"
END
}

# Starts the daemon. A daemon that was killed leaves its socket; the new one must make its own.
start_slipway() {
    rm -f /run/slipway/slipway.sock
    start_daemon 'keeper = true' 'memory_bytes = 201326592' 'pod_functions = 2' 'pod_max_cpus = 2' "pod_sockets = ${pod_sockets:-0}"
    # shellcheck disable=SC2154 # set there
    note daemon "$daemon"
}

# Starts the daemon and containerd. The parts `upgrade` and `restart` call it again.
start_runtime() {
    [ -z "$LAB_SLIPWAY" ] || start_slipway
    start_containerd
    # shellcheck disable=SC2154 # set there
    note containerd "$containerd"
}

node_is_ready() { kubectl wait --for=condition=Ready node/node --timeout=1s; }
account_is_there() { kubectl get serviceaccount default; }

make_cluster() {
    make_mounts
    make_path
    make_network '{"type": "bandwidth", "capabilities": {"bandwidth": true}}'
    make_mirrors
    make_cluster_settings
    make_node
    make_credentials
    start_registry
    start_etcd
    start_apiserver
    start_controllers
    start_runtime
    start_proxy
    start_kubelet
    wait_until 180 node_is_ready || die "the node is not ready: $(tail -n 3 "$LAB_REPORT/kubelet.log")"
    wait_until 60 account_is_there || die "no service account: $(tail -n 3 "$LAB_REPORT/controllers.log")"
    # As the installer does; pods of the class go nowhere else.
    kubectl label node node dev.slipway.node=ready >/dev/null
    kubectl apply -f "$LAB_DEPLOY/runtimeclass.yaml" -f "$LAB_MANIFESTS/runc.yaml" >/dev/null
    say "the node is ready after $SECONDS s"
}
