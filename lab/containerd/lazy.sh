# shellcheck shell=bash
# Slipway's snapshotter as the one of all pods of a node, and containerd's settings for it, as docs/containerd.md has
# them. Sourced after node.sh, never run. LAB_TRANSFER is set if containerd's transfer service pulls the images.
# shellcheck disable=SC2154 # node.sh, and those who source it, set $work and $root

start_snapshotter() {
    "$LAB_SNAPSHOTTER_PROGRAM" --root "$work/snapshotter" >>"$LAB_REPORT/snapshotter.log" 2>&1 &
    # shellcheck disable=SC2034 # the node ends it
    snapshotter=$!
    wait_until 60 test -S "$SLIPWAY_RUN_DIR/snapshotter.sock" ||
        die "Slipway's snapshotter does not answer: $(tail -n 5 "$LAB_REPORT/snapshotter.log")"
}

# exports: containerd 1.6 does not know them, and ignores them.
proxy_settings() {
    cat <<END
[proxy_plugins.slipway]
  type = "snapshot"
  address = "/run/slipway/snapshotter.sock"
  [proxy_plugins.slipway.exports]
    root = "$work/snapshotter"
$([ -z "$LAB_TRANSFER" ] || echo '    enable_remote_snapshot_annotations = "true"')
END
}

transfer_settings() {
    cat <<END
[[plugins."io.containerd.transfer.v1.local".unpack_config]]
  platform = "linux/amd64"
  snapshotter = "slipway"
[[plugins."io.containerd.transfer.v1.local".unpack_config]]
  platform = "linux/amd64"
  snapshotter = "overlayfs"
END
}

# Of version 2, for containerd 1.x: those of make_settings, which name the snapshotter, and the rest.
make_lazy_settings_2() {
    make_settings
    sed -i 's/^ *snapshotter = "slipway"$/&\n    disable_snapshot_annotations = false/' "$work/containerd.toml"
    proxy_settings >>"$work/containerd.toml"
}

# Of version 3, for containerd 2.x.
make_lazy_settings_3() {
    cat >"$work/containerd.toml" <<END
version = 3
root = "$work/containerd"
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs"]
[plugins."io.containerd.grpc.v1.cri"]
  stream_server_address = "127.0.0.1"
  stream_server_port = "0"
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "slipway"
$([ -n "$LAB_TRANSFER" ] || echo '  disable_snapshot_annotations = false')
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "registry.k8s.io/pause:3.10"
  [plugins."io.containerd.cri.v1.images".registry]
    config_path = "$work/mirrors"
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["$root/usr/lib/cni"]
    conf_dir = "$work/cni"
  [plugins."io.containerd.cri.v1.runtime".containerd]
    default_runtime_name = "slipway"
$(slipway_runtime io.containerd.cri.v1.runtime)
$([ -z "$LAB_TRANSFER" ] || transfer_settings)
$(proxy_settings)
END
}

make_lazy_settings() {
    case $LAB_VERSION in
        1.*) make_lazy_settings_2 ;;
        *) make_lazy_settings_3 ;;
    esac
}
