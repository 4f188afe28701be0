# shellcheck shell=dash
# Sandboxes that run on the node, and the services around them. Sourced by slipway-node, never run.

# processes PATTERN: process ids whose program's path matches, also when its file has been replaced since.
processes() {
    # A process may end meanwhile.
    # shellcheck disable=SC2012 # links of /proc
    ls -l /proc/[0-9]*/exe 2>/dev/null | sed -n "s|.* /proc/\([0-9]*\)/exe -> .*/$1\( (deleted)\)\{0,1\}\$|\1|p"
}

# running: a line for each sandbox of the node; shims and VMMs, where no daemon can be asked.
running() {
    local program
    program=$(installed_program)
    {
        processes 'containerd-shim-slipway-v2' | sed 's/^/process /'
        processes 'slipway-vmm' | sed 's/^/process /'
    } >"$work/running"
    if [ -S "$host/run/slipway/slipway.sock" ] && [ -x "$host$program" ] &&
        on_host timeout 30 "$program" ps --quiet --running >"$work/ps" 2>/dev/null && [ -s "$work/ps" ]; then
        cat "$work/ps"
    else
        cat "$work/running"
    fi
}

keeper_runs() {
    local pid
    for pid in $(processes slipway); do
        if tr '\0' '\n' <"/proc/$pid/cmdline" 2>/dev/null | sed -n 2p | grep -qx keeper; then return 0; fi
    done
    return 1
}

# A daemon without a keeper ends its sandboxes when it is restarted.
check_restart() {
    local sandboxes
    [ -s "$work/changed" ] || [ -s "$work/gone" ] || return 0
    has_systemd && is_active slipway.service && ! keeper_runs || return 0
    sandboxes=$(running | wc -l)
    [ "$sandboxes" = 0 ] || die "sandboxes run on this node ($sandboxes) that would end with the daemon," \
        "which has no keeper: drain the node first ($guide, Upgrade)"
}

restart_daemon() {
    on_host systemctl daemon-reload
    [ -e "$host$state/enabled" ] || ! on_host systemctl is-enabled --quiet slipway.service 2>/dev/null ||
        echo before >"$host$state/enabled"
    [ -e "$host$state/enabled" ] || echo here >"$host$state/enabled"
    on_host systemctl enable --quiet slipway.service 2>"$work/err" ||
        die "slipway.service cannot be enabled: $(last_line "$work/err")"
    if on_host systemctl restart slipway.service 2>"$work/err" && is_active slipway.service; then
        tell "Slipway's daemon was started"
        return
    fi
    [ -e "$work/files-before" ] || die "Slipway's daemon does not start: see \`journalctl -u slipway\` on the node"
    undo_rename
    write_host "$state/files" "$work/files-before"
    on_host systemctl daemon-reload
    on_host systemctl restart slipway.service 2>"$work/err" ||
        die "Slipway's daemon starts neither in the new nor in the old version: see \`journalctl -u slipway\`"
    sed -i '/^slipway$/d' "$host$state/pending"
    [ -s "$host$state/pending" ] || rm "$host$state/pending"
    die "the new daemon does not start, so the old version is back: see \`journalctl -u slipway\`; if it refuses what" \
        "the old one has left, drain the node and try again"
}

# restart_services: only those that have something new, or had when an earlier run was killed.
restart_services() {
    local pending=$host$state/pending
    if ! has_systemd; then
        [ ! -s "$pending" ] || say "next step: restart Slipway's daemon (\`slipway daemon\`) and containerd by the node's own" \
            "service manager, since it has no systemd$(by_hand)"
        rm -f "$pending"
        return
    fi
    if grep -qsx slipway "$pending" || ! is_active slipway.service; then restart_daemon; fi
    start_units
    if grep -qsx containerd "$pending"; then restart_containerd; fi
    stop_units
    rm -f "$pending"
}

# label_node WORD: by kubelet's own credentials, which may set the labels of its node. No other rights are needed.
label_node() {
    local credentials=/etc/kubernetes/kubelet.conf
    [ -n "${NODE_NAME:-}" ] || return 0
    if [ ! -e "$host$credentials" ] || ! on_host sh -c 'command -v kubectl' >/dev/null 2>&1; then
        say "the node's label is left alone, since it has no kubectl or no $credentials:" \
            "kubectl label node $NODE_NAME $label$1"
        return
    fi
    on_host kubectl --kubeconfig "$credentials" label node "$NODE_NAME" "$label$1" --overwrite \
        >"$work/out" 2>"$work/err" ||
        say "the node's label is left alone: $(last_line "$work/err")"
}

# report: what the node lacks, in the words of `slipway doctor`.
report() {
    on_host timeout 120 "$(installed_program)" doctor >"$work/out" 2>&1 || true
    grep MISSING "$work/out" | tr -s ' ' | sed 's/^/slipway-node: the node lacks: /' || true
}

stop_daemon() {
    if ! has_systemd; then
        say "next step: end Slipway's daemon, and restart containerd, since the node has no systemd"
        return
    fi
    [ "$(cat "$host$state/enabled" 2>/dev/null)" = before ] ||
        on_host systemctl disable --quiet slipway.service 2>/dev/null || true
    on_host systemctl stop slipway.service ||
        die "slipway.service cannot be stopped: see \`systemctl status slipway\` on the node"
}
