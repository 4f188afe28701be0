#!/usr/bin/env bash
# A chosen part of Kubernetes' critest against containerd's CRI plugin, with Slipway's runtime and its snapshotter: specs
# of each area, by `lab/cri` with what it keeps. Nothing is fetched or built here.
# alone: specs wait for limited times, which no setting makes longer.
. "$(dirname "$0")/lib.sh"
need_root
for program in "$slipway" "$(dirname "$slipway")"/{containerd-shim-slipway-v2,slipway-snapshotter}; do
    [ -x "$program" ] || fail "$program is not built; \`make build\` builds it"
done
need_healthy "a node that can run sandboxes"
stop_daemon

options=(--containerd 1.7 --snapshotter slipway --list "$top/lab/critest/chosen")
# Another node of the lab's goes first, if there is one.
SLIPWAY_LAB_LIMIT=$((600 * slower)) timeout 1500 "$top/lab/cri" --kept "${options[@]}" --report "$work/report" \
    "$slipway" >"$work/lab" 2>&1
status=$?
if [ "$status" = 77 ]; then
    skip "what \`lab/cri ${options[*]/"$top/"/} SLIPWAY\` fetches and builds once: $(tail -n 1 "$work/lab")"
fi
if [ "$status" != 0 ]; then
    cat "$work/lab"
    for log in containerd slipway snapshotter; do tail -n 20 "$work/report/$log.log" 2>/dev/null; done
    fail "lab/cri, status $status"
fi
grep -E '^cri: containerd|images were pulled lazily' "$work/lab"
ok "critest's chosen specs: $(grep -E '^[0-9]+ passed, ' "$work/lab")"
