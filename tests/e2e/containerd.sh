# Shared by the tests with containerd: starts a containerd of the test's own that has the shim and an image of busybox,
# and defines functions that start and end it, a daemon and a keeper. Sourced after lib.sh.
#   SLIPWAY_SHIM  the shim; by default the one beside SLIPWAY
#   cri           settings for containerd's CRI plugin, set by the test; without them the plugin is off
# Another version of containerd is tested if its programs are first in PATH.
shim=${SLIPWAY_SHIM:-$(dirname "$slipway")/containerd-shim-slipway-v2}
need_root
for program in containerd ctr busybox python3; do
    command -v "$program" >/dev/null || skip "$program"
done
[ -x "$slipway" ] || fail "$slipway is not built; \`make build\` builds it"
[ -x "$shim" ] || fail "$shim is not built; \`make build\` builds it"
need_healthy "a node that can run sandboxes"
"$slipway" rm --force --all >/dev/null 2>&1 || true
stop_daemon
rm -f "$SLIPWAY_RUN_DIR"/{slipway,keeper}.sock
echo 'keeper = true' >>"$SLIPWAY_CONFIG"
containerd='' daemon='' keeper='' listener=''
# The annotations by which containerd's CRI plugin tells a shim the kind of a container, and its pod.
kind=io.kubernetes.cri.container-type of=io.kubernetes.cri.sandbox-id
sockets() { find /run/containerd/s \( -type s -o -name '*.state' \) 2>/dev/null | sort; }
sockets >"$work/sockets"

mkdir "$work/bin" "$work/fifo"
ln -s "$shim" "$work/bin/containerd-shim-slipway-v2"
export PATH=$work/bin:$PATH SLIPWAY_PROGRAM=$slipway
address=$work/containerd.sock
off='"io.containerd.grpc.v1.cri", '
[ -n "${cri:-}" ] && off=
cat >"$work/containerd.toml" <<END
version = 2
root = "$work/root"
state = "$work/state"
disabled_plugins = [$off"io.containerd.snapshotter.v1.aufs",
    "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs",
    "io.containerd.internal.v1.opt"]
[grpc]
  address = "$address"
[ttrpc]
  address = "$address.ttrpc"
${cri:-}
END

# shims, holders: process ids of the shims of this containerd, and of the processes that start them again.
shims() { pgrep -f -- "[^-]-address $address" | while read -r pid; do runs "$pid" && echo "$pid"; done; }
holders() { pgrep -f -- "slipway-shim-holder .*--address=$address " | while read -r pid; do runs "$pid" && echo "$pid"; done; }
# end_shims: kills shims and their holders. All are stopped first, so that no holder sees its shim end and starts it.
end_shims() {
    local all; all=$(shims; holders)
    [ -n "$all" ] || return 0
    # shellcheck disable=SC2086 # process ids
    { kill -STOP $all; kill -KILL $all; } 2>/dev/null
}
# explain: the last lines of the logs, for the messages of failures.
explain() { tail -n 20 "$work/containerd.log"; tail -n 20 "$work/daemon.log"; }
c() { timeout 120 ctr --address "$address" "$@"; }
run() { c run --runtime io.containerd.slipway.v2 --fifo-dir "$work/fifo" "$@" </dev/null; }

# Plugins of CNI make the host forward packets; the end of the test restores the setting.
forwarding=$(cat /proc/sys/net/ipv4/ip_forward)
# end_all: ends what the test has started. lib.sh calls it when the test ends.
end_all() {
    local id
    echo "$forwarding" >/proc/sys/net/ipv4/ip_forward
    [ -n "$listener" ] && kill "$listener" 2>/dev/null
    if [ -n "$containerd" ] && runs "$containerd"; then
        for id in $(c task ls -q 2>/dev/null); do c task rm -f "$id" >/dev/null 2>&1; done
        kill "$containerd"; wait "$containerd" 2>/dev/null
    fi
    end_shims
    [ -n "$daemon" ] && runs "$daemon" && timeout 60 "$slipway" rm --force --all >/dev/null 2>&1
    [ -n "$daemon" ] && kill "$daemon" 2>/dev/null && wait "$daemon" 2>/dev/null
    [ -n "$keeper" ] && kill "$keeper" 2>/dev/null && wait "$keeper" 2>/dev/null
    awk -v under="$work/" 'index($2, under) == 1 { print $2 }' /proc/mounts | xargs -r umount -l
}

start_containerd() {
    # containerd unpacks checkpoints in XDG_RUNTIME_DIR and does not remove them.
    XDG_RUNTIME_DIR=$work containerd --config "$work/containerd.toml" 2>>"$work/containerd.log" &
    containerd=$!
    wait_until 60 c version >/dev/null || fail "containerd does not answer: $(explain)"
}
start_daemon() {
    "$slipway" daemon 2>>"$work/daemon.log" &
    daemon=$!
    # A command of the CLI is no test of a daemon here: without one it would start another.
    wait_until 60 test -S "$SLIPWAY_RUN_DIR/slipway.sock" || fail "no daemon: $(explain)"
}

start_keeper() {
    "$slipway" keeper 2>"$work/keeper.log" & keeper=$!
    wait_until 20 listens "$SLIPWAY_RUN_DIR/keeper.sock" || fail "no keeper: $(cat "$work/keeper.log")"
}
# one_shim: succeeds if exactly one shim runs. A shim ends a moment after its last container is deleted, so wait for it.
one_shim() { [ "$(shims | wc -l)" = 1 ]; }
# stopped CONTAINER: succeeds if containerd has the container's task as ended.
stopped() { c task ls | grep -qE "^$1 +[0-9]+ +STOPPED"; }

# An image of two layers, as an archive that `ctr image import` takes.
python3 - "$(command -v busybox)" "$work/image.tar" <<'P' || fail "no image was made"
import hashlib, io, json, sys, tarfile
busybox, archive = open(sys.argv[1], "rb").read(), sys.argv[2]
blobs = {}
def blob(data, kind):
    digest = hashlib.sha256(data).hexdigest()
    blobs[digest] = data
    return {"mediaType": kind, "digest": "sha256:" + digest, "size": len(data)}
def layer(files):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.mode = 0o755
            if data is None:
                info.type = tarfile.DIRTYPE
            elif isinstance(data, str):
                info.type, info.linkname = tarfile.SYMTYPE, data
            else:
                info.size = len(data)
            tar.addfile(info, io.BytesIO(data) if isinstance(data, bytes) else None)
    return out.getvalue()
names = ["sh", "echo", "cat", "sleep", "id", "stat", "stty", "seq", "hostname", "env", "tty", "test", "uname", "true", "nc", "ls", "kill", "ps"]
layers = [layer([(d, None) for d in ("bin", "proc", "sys", "dev", "run", "tmp", "etc", "root")] + [("bin/busybox", busybox)]
                + [("bin/" + name, "busybox") for name in names]),
          layer([("etc/slipway-test", b"second layer\n"), ("etc/passwd", b"root:x:0:0::/root:/bin/sh\ngames:x:5:60::/:/bin/sh\n")])]
config = {"architecture": "amd64", "os": "linux", "config": {"Env": ["PATH=/bin"], "Cmd": ["/bin/sh"]},
          "rootfs": {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(one).hexdigest() for one in layers]}}
manifest = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": blob(json.dumps(config).encode(), "application/vnd.oci.image.config.v1+json"),
            "layers": [blob(one, "application/vnd.oci.image.layer.v1.tar") for one in layers]}
entry = blob(json.dumps(manifest).encode(), "application/vnd.oci.image.manifest.v1+json")
entry["annotations"] = {"io.containerd.image.name": "docker.io/test/busybox:1"}
with tarfile.open(archive, "w") as tar:
    files = {"oci-layout": b'{"imageLayoutVersion":"1.0.0"}',
             "index.json": json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode()}
    files |= {"blobs/sha256/" + digest: data for digest, data in blobs.items()}
    for name, data in files.items():
        info = tarfile.TarInfo(name)
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
P

# images: the names of the images that the shim made of layers. Those of an earlier run, whose containerd is gone, are
# removed.
images() { "$slipway" image ls --json | sed -n 's|.*"docker.io/\(containerd/[^"]*\)".*|\1|p'; }
images | xargs -r "$slipway" image rm >/dev/null || fail "images of an earlier run stay"

start_containerd
c image import "$work/image.tar" >/dev/null || fail "ctr image import: $(explain)"
image=docker.io/test/busybox:1
