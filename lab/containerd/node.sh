# shellcheck shell=bash
# A node's registry, network and containerd, and Slipway's daemon, in the node's own namespaces. Sourced by the
# first process of the node (`lab/critest/node`, `lab/cluster/node`) after it has set $here, never run. It takes
# from its environment what `run_node` of host.sh exports; $work and $root are $LAB_WORK and $LAB_ROOT.
# shellcheck disable=SC2034 # those who source it use them

registry=127.0.0.1:5000
# The hosts that critest's images are from.
image_hosts=(registry.k8s.io gcr.io k8s.gcr.io)

# wait_until SECONDS COMMAND...: fails if the command does not succeed in that time.
wait_until() {
    local deadline=$((SECONDS + $1))
    shift
    until "$@" >/dev/null 2>&1; do
        [ "$SECONDS" -lt "$deadline" ] || return 1
        sleep 0.1
    done
}

# start_registry [SETTINGS URL]: with more settings of its HTTP server, and the address where it then answers.
start_registry() {
    local url=${2:-http://$registry}
    ip link set lo up
    cat >"$work/registry.yml" <<END
version: 0.1
storage: {filesystem: {rootdirectory: "$LAB_IMAGES"}}
http: {addr: "$registry"${1:+, $1}}
log: {level: error, accesslog: {disabled: true}}
END
    "$root/usr/bin/docker-registry" serve "$work/registry.yml" >"$work/registry.log" 2>&1 &
    server=$!
    wait_until 30 python3 -c "import urllib.request as r; r.urlopen('$url/v2/')" ||
        die "the registry does not answer: $(tail -n 3 "$work/registry.log")"
}

# serve_hosts HOST...: the registry, under the names of these hosts, by TLS with a certificate of an authority that
# all which the node starts from now on is told about. /etc/hosts is the node's own.
serve_hosts() {
    local host names=''
    for host; do names+="${names:+,}DNS:$host"; done
    {
        openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=lab \
            -keyout "$work/ca.key" -out "$work/ca.pem"
        openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=registry \
            -keyout "$work/server.key" -out "$work/server.csr"
        openssl x509 -req -days 2 -in "$work/server.csr" -CA "$work/ca.pem" -CAkey "$work/ca.key" -CAcreateserial \
            -extfile <(echo "subjectAltName=$names") -out "$work/server.pem"
    } >"$work/certificates.log" 2>&1 || die "no certificate is made: $(tail -n 3 "$work/certificates.log")"
    printf '127.0.0.1 %s\n' localhost "$(hostname)" "$@" >/etc/hosts
    export SSL_CERT_FILE=$work/ca.pem
    unset {http,https}_proxy {HTTP,HTTPS}_PROXY SSL_CERT_DIR
    registry=127.0.0.1:443
    start_registry "tls: {certificate: $work/server.pem, key: $work/server.key}" "https://$1"
}

# Debian's iptables with its own libraries, for the plugin that forwards ports; the rest as it is.
make_path() {
    local program loader=$root/lib64/ld-linux-x86-64.so.2
    local libraries=$root/lib/x86_64-linux-gnu:$root/usr/lib/x86_64-linux-gnu
    mkdir -p "$work/path"
    for program in iptables ip6tables; do
        cat >"$work/path/$program" <<END
#!/bin/sh
export XTABLES_LIBDIR=$root/usr/lib/x86_64-linux-gnu/xtables
exec $loader --library-path $libraries $root/usr/sbin/xtables-nft-multi $program "\$@"
END
        chmod 755 "$work/path/$program"
    done
    ln -s "$root/usr/sbin/runc" "$LAB_CONTAINERD"/* "$LAB_PROGRAMS"/* "$work/path"
    [ "$LAB_SNAPSHOTTER" != erofs ] || ln -s "$LAB_TOOLS/bin/mkfs.erofs" "$work/path"
    [ -z "$LAB_SLIPWAY" ] || ln -s "$LAB_SLIPWAY" "$work/path/slipway"
    [ -z "$LAB_SHIM" ] || ln -s "$LAB_SHIM" "$work/path/containerd-shim-slipway-v2"
    export PATH=$work/path:$PATH
}

# Everything below /run is this node's own, and so is what CNI keeps. The host's resolv.conf may be there.
make_mounts() {
    local resolv
    resolv=$(readlink -f /etc/resolv.conf)
    cp "$resolv" "$work/resolv.conf"
    mount --make-rshared /
    mount -t tmpfs -o mode=755 tmpfs /run
    mount -t tmpfs -o mode=700 tmpfs /var/lib/cni
    mkdir -p /run/lock
    [ -e "$resolv" ] || install -D -m 644 "$work/resolv.conf" "$resolv"
}

# make_network [PLUGIN...]: with further plugins of the chain, as JSON.
make_network() {
    local plugin more=''
    for plugin; do more+=",
  $plugin"; done
    mkdir -p "$work/cni"
    cat >"$work/cni/10-lab.conflist" <<END
{"cniVersion": "1.0.0", "name": "lab", "plugins": [
  {"type": "bridge", "bridge": "cri0", "isGateway": true, "ipMasq": true, "hairpinMode": true,
   "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.99.0.0/16"}]], "routes": [{"dst": "0.0.0.0/0"}]}},
  {"type": "portmap", "capabilities": {"portMappings": true}}$more]}
END
}

# Every host that images are from is this registry.
make_mirrors() {
    local host
    for host in "${image_hosts[@]}"; do
        mkdir -p "$work/mirrors/$host"
        cat >"$work/mirrors/$host/hosts.toml" <<END
server = "http://$registry"
[host."http://$registry"]
  capabilities = ["pull", "resolve"]
END
    done
}

# With `--sandboxer shim` pods are sandboxes of the shim's, without a pause container. 2.4 can do without its image.
sandboxer_settings() {
    [ "${LAB_SANDBOXER:-}" = shim ] || return 0
    echo '      sandboxer = "shim"'
    [ "$LAB_VERSION" != 2.4 ] || echo '      disable_pause_image_pull = true'
}

# slipway_runtime [PLUGIN]: Slipway's handler. Its pods have their guest's devices, and see its annotations.
# shellcheck disable=SC2120 # lazy.sh names the plugin
slipway_runtime() {
    cat <<END
    [plugins."${1:-io.containerd.grpc.v1.cri}".containerd.runtimes.slipway]
      runtime_type = "io.containerd.slipway.v2"
      privileged_without_host_devices = true
      pod_annotations = ["dev.slipway.*"]
      container_annotations = ["dev.slipway.*"]
$(sandboxer_settings)
END
}

# The EROFS snapshotter with its differ, for images that ctr, the CRI plugin or the transfer service unpack.
erofs_settings() {
    cat <<END
[plugins."io.containerd.service.v1.diff-service"]
  default = ["erofs", "walking"]
[[plugins."io.containerd.transfer.v1.local".unpack_config]]
  platform = "linux/amd64"
  snapshotter = "erofs"
  differ = "erofs"
END
}

# Version 2 of the settings is what every containerd from 1.6 on takes.
make_settings() {
    cat >"$work/containerd.toml" <<END
version = 2
root = "$work/containerd"
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.aufs",
  "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs"]
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "registry.k8s.io/pause:3.10"
  restrict_oom_score_adj = true
  disable_apparmor = true
  stream_server_address = "127.0.0.1"
  stream_server_port = "0"
  [plugins."io.containerd.grpc.v1.cri".registry]
    config_path = "$work/mirrors"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "$root/usr/lib/cni"
    conf_dir = "$work/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    default_runtime_name = "runc"
    snapshotter = "$LAB_SNAPSHOTTER"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
$([ -z "$LAB_SHIM" ] || slipway_runtime)
$([ "$LAB_SNAPSHOTTER" != erofs ] || erofs_settings)
END
}

# Its CRI plugin serves, where crictl is there to ask it; else containerd itself.
containerd_serves() { if command -v crictl; then crictl info; else ctr version; fi; }

start_containerd() {
    export CONTAINER_RUNTIME_ENDPOINT=unix:///run/containerd/containerd.sock
    # As pod_annotations, of which containerd does not tell a shim that makes sandboxes.
    export SLIPWAY_POD_ANNOTATIONS='dev.slipway.*'
    containerd --config "$work/containerd.toml" >>"$LAB_REPORT/containerd.log" 2>&1 &
    containerd=$!
    wait_until 60 containerd_serves ||
        die "containerd does not answer: $(tail -n 5 "$LAB_REPORT/containerd.log")"
}

# start_daemon SETTING...: a daemon with directories of its own, and with user ids that no other daemon's VMMs
# have by default.
start_daemon() {
    export SLIPWAY_PROGRAM=$LAB_SLIPWAY SLIPWAY_RUN_DIR=/run/slipway
    export SLIPWAY_DATA_DIR=$work/slipway SLIPWAY_CONFIG=$work/slipway.toml
    cat >"$SLIPWAY_CONFIG" <<END
boot_timeout_s = 600
vmm_uid_base = 1879052288
vmm_uid_count = 256
$(printf '%s\n' "$@")
END
    "$LAB_SLIPWAY" daemon >>"$LAB_REPORT/slipway.log" 2>&1 &
    daemon=$!
    wait_until 120 test -S "$SLIPWAY_RUN_DIR/slipway.sock" ||
        die "Slipway's daemon does not answer: $(tail -n 5 "$LAB_REPORT/slipway.log")"
}
