# shellcheck shell=bash
# Pods of containerd without its CRI plugin: `ctr` names them by the annotations that the plugin uses. Sourced after
# containerd.sh.
pod() { run -d --annotation $kind=sandbox --annotation $of="$1" "${@:2}" "$image" "$1" true >"$work/out" 2>&1 || fail "pod $1: $(cat "$work/out") $(explain)"; }
# member POD ARGUMENTS…: `ctr run` of a container in it.
member() { run --annotation $kind=container --annotation $of="$1" "${@:2}"; }
started() { member "$1" -d "${@:2}" >"$work/out" 2>&1 || fail "$*: $(cat "$work/out") $(explain)"; }
inside() { c task exec --exec-id "x$RANDOM$RANDOM" --fifo-dir "$work/fifo" "$@" </dev/null; }
