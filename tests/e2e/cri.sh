# containerd's CRI plugin with Slipway as its runtime, and `k`, crictl on it. Sourced between lib.sh and containerd.sh.
#   CRICTL   the program crictl, the one in the path unless told otherwise
#   CNI_BIN  the directory of CNI's plugins, one of the usual ones unless told otherwise
# Where crictl or a plugin is missing, $cri is empty and containerd has no CRI plugin.
crictl=${CRICTL:-$(command -v crictl)}
cni='' cri=''
for dir in ${CNI_BIN:-} /opt/cni/bin /usr/lib/cni; do
    [ -x "$dir/ptp" ] && [ -x "$dir/host-local" ] && [ -x "$dir/loopback" ] && cni=$dir && break
done
if [ -n "$crictl" ] && [ -n "$cni" ]; then
    cri="[plugins.\"io.containerd.grpc.v1.cri\"]
  sandbox_image = \"docker.io/test/busybox:1\"
  restrict_oom_score_adj = true
  disable_apparmor = true
[plugins.\"io.containerd.grpc.v1.cri\".containerd]
  default_runtime_name = \"slipway\"
[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.slipway]
  runtime_type = \"io.containerd.slipway.v2\"
  pod_annotations = [\"dev.slipway.*\"]
[plugins.\"io.containerd.grpc.v1.cri\".cni]
  bin_dir = \"$cni\"
  conf_dir = \"$work/cni\""
    mkdir -p "$work/cni"
    cat >"$work/cni/10-test.conflist" <<END
{"cniVersion": "0.4.0", "name": "slipway-e2e", "plugins": [{"type": "ptp", "ipam": {"type": "host-local",
  "dataDir": "$work/ipam", "subnet": "10.213.74.0/24"}}]}
END
    : >"$work/crictl.yaml"
fi

k() { timeout 120 "$crictl" --config "$work/crictl.yaml" --runtime-endpoint "unix://$address" --image-endpoint "unix://$address" --timeout 60s "$@"; }

# The image of containerd.sh, and a network for pods.
need_cri() {
    c -n k8s.io image import "$work/image.tar" >/dev/null || fail "ctr image import: $(explain)"
    ready() { grep -q '"lastCNILoadStatus": "OK"' <<<"$(k info)"; }
    wait_until 30 ready || fail "crictl info: $(k info) $(explain)"
}
