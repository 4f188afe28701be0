# A Kubernetes node of the test's own, and the image that installs Slipway on it. The node is a root directory, process ids
# and mounts of its own. It has the machine's programs, a real containerd, and a systemctl that starts containerd and
# takes note of the rest, since no systemd can run there. Sourced after lib.sh.
#   on COMMAND…          runs on the node
#   pod ARGUMENTS…       runs the image's program in a container of the node's, with the files of $files and $options
#   does, refuses        the same, which has to succeed, or to fail in one line and change nothing
# shellcheck shell=bash disable=SC2034 # the tests use what is set here
need_root
for program in busybox containerd unshare nsenter pivot_root python3 make; do
    command -v "$program" >/dev/null || skip "$program"
done
[ -x "$slipway" ] || fail "$slipway is not built; \`make build\` builds it"
[ -e "${SLIPWAY_TOOLS:-/var/lib/slipway/tools}/bin/mkfs.erofs" ] || skip "mkfs.erofs of deploy/setup/setup.sh run"
sources=$top/deploy/kubernetes/node target=$(dirname "$(dirname "$(readlink -f "$slipway")")")
node=$work/node image=$work/image init=''

end_all() {
    [ -z "$init" ] || kill -KILL "$init" 2>/dev/null
    awk -v under="$work/" 'index($2, under) == 1 { print $2 }' /proc/mounts | sort -r | xargs -r umount -l
}

# --- the image ---

mkdir -p "$work/kernel/modules/kernel"
echo 6.1.0-1-cloud-amd64 >"$work/kernel/release"
echo kernel >"$work/kernel/vmlinuz"
echo module >"$work/kernel/modules/kernel/one.ko"
make -s -C "$top" -o build install DESTDIR="$work/tree" CARGO_TARGET_DIR="$target" PROGRAMS="$(dirname "$slipway")" >"$work/out" 2>&1 || fail "make install: $(tail -n 3 "$work/out")"
make_image() {
    /usr/bin/python3 "$sources/image.py" --kernel "$work/kernel" --tools "${SLIPWAY_TOOLS:-/var/lib/slipway/tools}" \
        --busybox "$(command -v busybox)" "$@" 2>&1
}
make_image --level 0 "$work/tree" "$work/image.tar" >"$work/out" || fail "image: $(cat "$work/out")"
# Every digest is looked at, then the layers are laid upon each other as containerd does.
/usr/bin/python3 - "$work/image.tar" "$image" <<'P' || fail "the image is not well-formed"
import hashlib, io, json, sys, tarfile
archive = tarfile.open(sys.argv[1])
def blob(one):
    data = archive.extractfile("blobs/sha256/" + one["digest"].removeprefix("sha256:")).read()
    assert len(data) == one["size"] and "sha256:" + hashlib.sha256(data).hexdigest() == one["digest"], one
    return data
assert json.load(archive.extractfile("oci-layout"))["imageLayoutVersion"] == "1.0.0"
entry, = json.load(archive.extractfile("index.json"))["manifests"]
assert entry["annotations"]["io.containerd.image.name"].startswith("localhost/slipway-node:"), entry
manifest = json.loads(blob(entry))
config = json.loads(blob(manifest["config"]))
assert config["config"]["Entrypoint"] == ["/bin/slipway-node"], config
layers = [blob(one) for one in manifest["layers"]]
assert ["sha256:" + hashlib.sha256(one).hexdigest() for one in layers] == config["rootfs"]["diff_ids"]
for one in layers:
    tarfile.open(fileobj=io.BytesIO(one)).extractall(sys.argv[2])
P

# --- the node ---

mkdir -p "$node"/{etc/containerd,var/lib,run,proc,sys,dev,tmp,opt,root,usr,image} "$work/local/bin" "$work/usr-local" "$work/usr-libexec"
for link in bin sbin lib lib64; do ln -s "usr/$link" "$node/$link"; done
cp /etc/passwd /etc/group "$node/etc"
# Units are active while the file is there. The service of containerd is a real one.
cat >"$work/local/bin/systemctl" <<'END'
#!/bin/bash
echo "$*" >>/run/systemctl.log
unit=${*: -1} unit=${unit%.service}
case $1 in
    show) cat /run/containerd.pid 2>/dev/null || echo 0 ;;
    is-active) [ -e "/run/active-$unit" ] ;;
    is-enabled) [ -e "/etc/enabled-$unit" ] ;;
    enable) : >"/etc/enabled-$unit" ;;
    disable) rm -f "/etc/enabled-$unit" ;;
    stop) rm -f "/run/active-$unit" ;;
    restart)
        rm -f "/run/active-$unit"
        if [ "$unit" = containerd ]; then
            pid=$(cat /run/containerd.pid 2>/dev/null) && kill "$pid" && while [ -e "/proc/$pid" ]; do sleep 0.02; done
            containerd >>/tmp/containerd.log 2>&1 </dev/null &
            echo $! >/run/containerd.pid
            for _ in $(seq 4000); do ctr version >/dev/null 2>&1 && break; sleep 0.05; done
            ctr version >/dev/null || exit
        elif grep -qsaf /run/refused /usr/local/bin/slipway; then
            echo 'Job for slipway.service failed' >&2
            exit 1
        fi
        : >"/run/active-$unit"
        ;;
esac
END
cat >"$work/local/bin/kubectl" <<'END'
#!/bin/sh
echo "$*" >>/run/kubectl.log
END
chmod 755 "$work/local/bin"/*
mkdir "$node/etc/kubernetes"
echo credentials >"$node/etc/kubernetes/kubelet.conf"
cp -a "$work/local/." "$work/usr-local"
# shellcheck disable=SC2016 # for the other shell
unshare --mount --pid --fork --kill-child -- bash -c '
    set -e
    cd "$1"
    mount --bind . . && cd "$1"
    mount --bind /usr usr && mount -o remount,bind,ro usr
    mount --bind "$2" usr/local && mount --bind "$3" usr/libexec
    mount --rbind /dev dev && mount --rbind /sys sys && mount -t proc proc proc && mount -t tmpfs tmpfs run
    mount --bind "$4" image
    pivot_root . . && umount -l .
    cd / && : >/run/ready
    while :; do sleep 1000 & wait $!; done' init "$node" "$work/usr-local" "$work/usr-libexec" "$image" 2>"$work/init" &
unshared=$!
started() { init=$(pgrep -P "$unshared" -x bash) && nsenter -t "$init" -m -- test -e /run/ready; }
wait_until 20 started || fail "no node: $(cat "$work/init")"
# on COMMAND…: runs on the node.
on() { nsenter -t "$init" -m -p -- env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$@"; }
# pod ARGUMENTS…: the image's program in a container of the node's, with the files of $files and the options.
files=/image/slipway options=()
pod() {
    on env "${options[@]}" unshare --mount -- sh -c 'mount --bind "$0" /image/slipway && mount --rbind / /image/host && mount -t proc proc /image/proc &&
        exec chroot /image env NODE_NAME=one SLIPWAY_CONTAINERD_CONFIG= /bin/slipway-node "$@"' "$files" "$@" >"$work/out" 2>&1
}
does() { pod "$@" || fail "$*: $(cat "$work/out")"; }
# refuses WORDS ARGUMENTS…: it fails in one line that has the words, and changes nothing on the node.
refuses() {
    local want=$1 before; shift
    before=$(contents)
    pod "$@" && fail "$* was not refused: $(cat "$work/out")"
    [ "$(wc -l <"$work/out")" = 1 ] && grep -qF -- "$want" "$work/out" || fail "$*: $(cat "$work/out")"
    [ "$(contents)" = "$before" ] || fail "$* changed: $(diff <(echo "$before") <(contents))"
    ok "$1 -> $(cat "$work/out")"
}
# contents: a line for each file, link and directory of the node. A big file is the same one or another one.
contents() {
    on find /etc /usr/local /usr/libexec /var /opt \( -path /var/lib/containerd -prune \) -o -type f -size -2048 -exec sha256sum {} + \
        -o -type f -printf '%p %i %T@ %s\n' -o -printf '%p %y %l\n' | sort
}
inodes() { on find /etc /usr/local /usr/libexec /var/lib/slipway /opt -type f -printf '%i %T@ %p\n' | sort; }
systemctl_did() { on cat /run/systemctl.log | grep -E "^(restart|enable|disable|stop|daemon-reload)" | paste -sd ' '; on rm -f /run/systemctl.log; }
has_line() { grep -qF -- "$1" "$work/out" || fail "no line \`$1\`: $(cat "$work/out")"; }

# starts_containerd: the node has systemd and a containerd that runs.
starts_containerd() {
    on mkdir -p /run/systemd/system
    on systemctl restart containerd.service || fail "no containerd on the node: $(tail -n 3 "$node/tmp/containerd.log")"
    on rm -f /run/systemctl.log
}

# start_shim: a process with the name of a shim runs on the node; its id there is in /run/shim.pid.
start_shim() {
    cp "$(command -v sleep)" "$node/tmp/containerd-shim-slipway-v2"
    on sh -c '/tmp/containerd-shim-slipway-v2 100000 >/dev/null 2>&1 & echo $! >/run/shim.pid'
    wait_until 10 on sh -c '[ "$(readlink "/proc/$(cat /run/shim.pid)/exe")" = /tmp/containerd-shim-slipway-v2 ]' || fail "no shim on the node"
}

# light_files: few files, so that a test is short.
light_files() {
    local light=$node/tmp/light
    mkdir -p "$light/usr/local/bin" "$light/usr/local/lib"
    cp -al "$image/slipway/var" "$light"
    cp -al "$image/slipway/usr/local/lib/systemd" "$light/usr/local/lib"
    cp -al "$image/slipway/usr/local/bin/slipway" "$light/usr/local/bin"
    files=/tmp/light
}

# --- settings of containerd ---

# without_systemd: a small program in place of Slipway's, and containerd is asked about settings alone.
without_systemd() {
    on sh -c 'kill "$(cat /run/containerd.pid)"; rm -r /run/systemd'
    mkdir -p "$node/tmp/small/usr/local/bin"
    printf '#!/bin/sh\necho slipway 0\n' >"$node/tmp/small/usr/local/bin/slipway"
    chmod 755 "$node/tmp/small/usr/local/bin/slipway"
    files=/tmp/small settings=$node/etc/containerd/config.toml
}
dump() { on containerd --config /etc/containerd/config.toml config dump 2>/dev/null | tr "'" '"'; }
runtimes() { sed -n 's/^ *\[plugins\."[^"]*"\.containerd\.runtimes\.\([^].]*\)\]$/\1/p' <<<"$1" | sort | paste -sd ' '; }

# gives NAME RUNTIMES [WORDS]: with the settings as they are, the node has these runtimes after the installation, and a
# setting with these words; a second one changes nothing, and a removal restores the settings.
gives() {
    local name=$1 want=$2 words=${3:-} now was=absent
    [ ! -e "$settings" ] || was=$(sha256sum <"$settings")
    does install
    has_line 'next step: restart Slipway'
    now=$(dump)
    [ "$(runtimes "$now")" = "$want" ] || fail "$name: the runtimes are $(runtimes "$now"), not $want: $now"
    grep -q 'default_runtime_name = "runc"' <<<"$now" || fail "$name: runc is not the default"
    grep -q 'runtime_type = "io.containerd.slipway.v2"' <<<"$now" || fail "$name: the type is wrong"
    grep -qF -- "$words" <<<"$now" || fail "$name: no $words in $now"
    now=$(inodes)
    does install
    has_line 'nothing is new'
    [ "$(inodes)" = "$now" ] || fail "$name: the second installation changed $(diff <(echo "$now") <(inodes))"
    does remove
    if [ "$was" = absent ]; then
        [ ! -e "$settings" ] || fail "$name: the settings stay: $(cat "$settings")"
    else
        [ "$(sha256sum <"$settings")" = "$was" ] || fail "$name: the settings are not as they were: $(cat "$settings")"
    fi
    ok "containerd $version, $name: runtimes $want"
}

# with_each_containerd COMMAND: runs it with each containerd that this machine has, whose version is $version then.
with_each_containerd() {
    local folder
    for folder in system "${SLIPWAY_LAB:-/var/lib/slipway/lab}"/cri/containerd-*; do
        [ "$folder" = system ] || { [ -x "$folder/containerd" ] && cp "$folder/containerd" "$work/usr-local/bin/containerd" || continue; }
        version=$(on containerd --version | cut -d ' ' -f 3)
        version=${version#v}
        "$1"
    done
    rm -f "$work/usr-local/bin/containerd"
}
