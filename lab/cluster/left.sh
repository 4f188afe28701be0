# shellcheck shell=bash
# Finds things that pods have left on the node. Sourced by lab/cluster/node, never run.

# present: a line for each thing on the node that belongs to a pod.
present() {
    ctr -n k8s.io containers ls -q | sed 's/^/container /'
    ctr -n k8s.io tasks ls -q | sed 's/^/task /'
    awk '$2 ~ "^/run/(containerd|netns|slipway)/|/containerd/|/slipway/|/kubelet/pods/" { print "mount", $2 }' /proc/mounts
    find /run/netns -mindepth 1 -maxdepth 1 2>/dev/null | sed 's/^/namespace /'
    { ip -o link show type veth; ip -o link show type ifb; } | awk '{ sub("[@:].*", "", $2); print "interface", $2 }'
    find /var/lib/cni -path '*/networks/lab/10.*' 2>/dev/null | sed 's/^/address /'
    find /var/lib/kubelet/pods /run/containerd/s /var/log/pods -mindepth 1 -maxdepth 1 2>/dev/null | sed 's/^/file /'
    find /run/containerd/io.containerd.* "$work"/containerd/io.containerd.grpc.v1.cri "$work"/containerd/io.containerd.runtime* \
        -mindepth 2 -path '*k8s.io/*' -prune 2>/dev/null | sed 's/^/file /'
    find /sys/fs/cgroup -maxdepth 6 -type d -path '*/slipway-lab/*' -name 'pod*' 2>/dev/null | sed 's/^/group /'
    processes
    [ -z "$LAB_SLIPWAY" ] || sandboxes
}

# Shims and VMMs: those of the node, which has its own process ids.
processes() {
    local file name
    for file in /proc/[0-9]*/cmdline; do
        name=$({ tr '\0' ' ' <"$file"; } 2>/dev/null | cut -d ' ' -f 1) || continue
        case ${name##*/} in
            containerd-shim-* | slipway-shim-holder | qemu-system-* | slipway-vmm | slipway-fs)
                echo "process ${file//[!0-9]/} ${name##*/}"
                ;;
        esac
    done
}

# Images stay, and what is ready for the next sandbox.
sandboxes() {
    timeout 60 slipway ps --quiet | sed 's/^/sandbox /'
    find /run/slipway/s "$SLIPWAY_DATA_DIR/sandboxes" -mindepth 1 -maxdepth 1 2>/dev/null | sed 's/^/file /'
}

nothing_is_left() { [ -z "$(comm -13 "$work/before" <(present | sort))" ]; }

# check_left: fails if pods that are gone have left anything. kubelet removes containers of such pods once a minute.
check_left() {
    local from=$SECONDS
    if wait_until 240 nothing_is_left; then
        echo "nothing is left, $((SECONDS - from)) s after the pods"
        return
    fi
    comm -13 "$work/before" <(present | sort)
    fail "$(comm -13 "$work/before" <(present | sort) | wc -l) things are left: $(comm -13 "$work/before" <(present | sort) | head -n 1)"
}
