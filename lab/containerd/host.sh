# shellcheck shell=bash
# A node on this machine, in namespaces of its own, and what ends it. Sourced after common.sh, never run.
# shellcheck disable=SC2034 # the scripts use them

# find_programs [SLIPWAY [SHIM]]
find_programs() {
    [ $# -gt 0 ] || return 0
    slipway=$(readlink -e "$1") || die "$1 is not there; \`make build\` builds it"
    shim=$(readlink -e "${2:-$(dirname "$slipway")/containerd-shim-slipway-v2}") ||
        die "the shim for $1 is not there; \`make build\` builds it"
}

# Takes the runtime from the given programs unless it was named.
check_runtime() {
    case ${runtime:=${slipway:+slipway}} in
        slipway) [ -n "$slipway" ] || die "Slipway's handler needs the program" "see lab/$script --help" ;;
        runc | '') runtime=runc slipway='' shim='' ;;
        *) usage ;;
    esac
}

check_machine() {
    [ "$(id -u)" = 0 ] || cannot "root, for namespaces and mounts"
    need_programs python3:python3 unshare:util-linux setpriv:util-linux ipcmk:util-linux ip:iproute2 \
        dpkg-deb:dpkg apt-get:apt "$@"
}

# Control groups of pods and of other containers, in every hierarchy. Those of a node that was killed stay.
pods_groups() {
    find /sys/fs/cgroup -depth -regextype posix-extended -type d \
        -regex ".*/(k8s\.io|test\.slice[^/]*|slipway-lab|${more_groups:-k8s\.io})(/.*)?" 2>/dev/null | sort -r
}
remove_groups() {
    comm -13 <(sort <<<"$groups") <(pods_groups | sort) | sort -r | while read -r group; do
        rmdir "$group" 2>/dev/null || true
    done
}

# begin_work: one node at a time, with a directory of its own, $work. What `leave` has to undo is noted.
begin_work() {
    kept=$lab/cri
    mkdir -p "$kept"
    exec 9>"$kept/lock"
    flock -n 9 || { say "another one is running; waiting for it"; flock 9; }
    # A run that was killed may have left its directory. The lock says that no other run uses one.
    rm -rf --one-file-system "$kept"/work.*
    node='' made=() settings=()
    groups=$(pods_groups)
    work=$(mktemp -d "$kept/work.XXXXXX")
    # VMMs have users of their own.
    chmod 755 "$work"
    trap leave EXIT
    trap 'exit 130' INT TERM
}

# need_directory DIR: is there while the node mounts something of its own on it.
need_directory() { [ -d "$1" ] || { mkdir -p "$1" && made+=("$1"); }; }

# keep_settings FILE...: kernel settings of this machine that the node changes.
keep_settings() {
    local file
    for file in "$@"; do
        [ ! -e "/proc/sys/$file" ] || settings+=("$file=$(cat "/proc/sys/$file")")
    done
}

restore_settings() {
    local setting file
    for setting in "${settings[@]}"; do
        file=/proc/sys/${setting%%=*}
        [ "$(cat "$file")" = "${setting#*=}" ] || echo "${setting#*=}" >"$file" || true
    done
}

# run_node PROGRAM COMMAND...: a node of its own, whose first process is `PROGRAM run COMMAND...` and which ends
# when this script does. Its own session: an interrupt from the terminal is for this script alone.
run_node() {
    export LAB_WORK=$work LAB_ROOT=$root LAB_IMAGES=$images LAB_CONTAINERD=$containerd LAB_PROGRAMS=$programs \
        LAB_SHIM=$shim LAB_SLIPWAY=$slipway LAB_REPORT=$report LAB_RUNTIME=$runtime \
        LAB_SNAPSHOTTER=${snapshotter:-overlayfs} LAB_SNAPSHOTTER_PROGRAM=${snapshotter_program:-} \
        LAB_VERSION=${version:-} LAB_TRANSFER=${transfer:-} LAB_SANDBOXER=${sandboxer:-} LAB_TOOLS=$tools
    local status=0 program=$1
    shift
    setsid setpriv --pdeathsig KILL unshare --mount --net --pid --ipc --uts --fork --kill-child --mount-proc \
        -- "$program" run "$@" 3<&0 &
    node=$!
    wait "$node" || status=$?
    node=''
    return "$status"
}

# The node's first process ends what is outside of its namespaces, and is killed if that takes long.
end_node() {
    local _
    pkill -TERM -P "$node" || true
    for _ in $(seq 900); do
        [ -e "/proc/$node" ] || break
        sleep 0.1
    done
    kill -KILL "$node" 2>/dev/null || true
    wait "$node" 2>/dev/null || true
}

leave() {
    trap '' INT TERM
    [ -z "$node" ] || end_node
    remove_groups
    restore_settings
    rm -rf --one-file-system "$work"
    [ ${#made[@]} -eq 0 ] || rmdir "${made[@]}" 2>/dev/null || true
}
