#!/usr/bin/env bash
# Bad input gets one clear line and a non-zero status, and leaves nothing.
. "$(dirname "$0")/lib.sh"
need_node

# refuses WORDS-TO-FIND ARGUMENTS…
refuses() {
    local want=$1 status lines; shift
    "$slipway" "$@" >"$work/out" 2>"$work/err" </dev/null; status=$?
    lines=$(grep -c . "$work/err")
    [ "$status" != 0 ] || fail "$* succeeded"
    [ "$lines" = 1 ] || fail "$*: $lines lines: $(cat "$work/err")"
    grep -qiE "$want" "$work/err" || fail "$*: $(cat "$work/err")"
    ok "$* -> $status, $(cat "$work/err")"
}

"$slipway" completions bash 2>"$work/err" | head -n 1 >/dev/null
[ ! -s "$work/err" ] || fail "completions to a reader that leaves: $(head -n 3 "$work/err")"
ok "completions whose reader leaves end without a word"

refuses 'no image "localhost:1/no/such:image" on this node, and it cannot be pulled: registry localhost:1: ' \
    run localhost:1/no/such:image true
refuses 'not in the cache|no image' run --pull never no-such-image:1 true
mkdir -p "$work/oci/blobs/sha256"
python3 - "$work/oci" <<'P'
import hashlib, io, json, os, sys, tarfile, gzip
root = sys.argv[1]
def blob(data, kind, lie=False):
    digest = hashlib.sha256(data).hexdigest()
    open(f"{root}/blobs/sha256/{digest}", "wb").write(data[:-1] + bytes([data[-1] ^ 1]) if lie else data)
    return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(data)}
tar = io.BytesIO()
with tarfile.open(fileobj=tar, mode="w") as t:
    info = tarfile.TarInfo("etc/x"); info.size = 5; t.addfile(info, io.BytesIO(b"hello"))
layer = tar.getvalue()
diff = "sha256:" + hashlib.sha256(layer).hexdigest()
manifests = []
for name, arch, lie in [("corrupt", "amd64", True), ("foreign", "riscv64", False)]:
    config = json.dumps({"architecture": arch, "os": "linux", "rootfs": {"type": "layers", "diff_ids": [diff]}, "config": {"Cmd": ["/x"]}}).encode()
    manifest = json.dumps({"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": blob(config, "application/vnd.oci.image.config.v1+json"),
        "layers": [blob(gzip.compress(layer, mtime=1 + lie), "application/vnd.oci.image.layer.v1.tar+gzip", lie)]}).encode()
    entry = blob(manifest, "application/vnd.oci.image.manifest.v1+json")
    entry["annotations"] = {"org.opencontainers.image.ref.name": name}
    entry["platform"] = {"architecture": arch, "os": "linux"}
    manifests.append(entry)
json.dump({"schemaVersion": 2, "manifests": manifests}, open(f"{root}/index.json", "w"))
json.dump({"imageLayoutVersion": "1.0.0"}, open(f"{root}/oci-layout", "w"))
P
refuses 'digest' image import "oci:$work/oci:corrupt"
refuses 'riscv64' image import "oci:$work/oci:foreign"
refuses 'read /no/such: no such file' image import layers:/no/such nothing:1
[ "$(grep -oi 'no such file' "$work/err" | wc -l)" = 1 ] || fail "a cause is told twice: $(cat "$work/err")"
python3 - "$work/many.erofs" <<'P'
# 4,000 names of one file with 64 shared attributes of 1,000 bytes, each of which makes a file of its own.
import struct, sys
block = 65536
image = bytearray(3 * block)
def inode(at, attributes, mode, size, first):
    struct.pack_into("<HHHHIII", image, block + at, 0, attributes, mode, 1, size, 0, first)
struct.pack_into("<I", image, 1024, 0xe0f5e1e2)
image[1024 + 12] = 16
struct.pack_into("<II", image, 1024 + 40, 1, 2)
folder, names = [], [b"%05d" % i for i in range(4000)]
for at in range(0, len(names), 3800):
    part = names[at:at + 3800]
    heads = [struct.pack("<QHBB", 4, 12 * len(part) + 5 * i, 1, 0) for i in range(len(part))]
    folder.append(b"".join(heads + part))
folder = b"".join(part.ljust(block, b"\0") for part in folder[:-1]) + folder[-1]
inode(0, 0, 0o40755, len(folder), 3)
inode(128, 1 + 64, 0o100644, 1, 0)
image[block + 160 + 4] = 64
for i in range(64):
    struct.pack_into("<I", image, block + 172 + 4 * i, 252 * i)
    struct.pack_into("<BBH2s", image, 2 * block + 1008 * i, 2, 1, 1000, b"%02d" % i)
open(sys.argv[1], "wb").write(image + folder)
P
(ulimit -S -d 131072; refuses 'needs more memory' image import "layers:$work/many.erofs" many:1) || exit 1
refuses 'larger than|free' run --volume data:900T "$image" true
refuses '/no/such' run --volume /no/such:/data "$image" true
refuses 'cannot read /no/such' run --copy /no/such:/etc/x "$image" true
refuses 'neither a file nor a directory' run --copy /dev/null:/etc/x "$image" true
refuses "container's own" run --copy /etc/hostname:/proc/x "$image" true
refuses 'no size' run --tmpfs /run:size=lots "$image" true
refuses 'no option of a tmpfs' run --tmpfs /run:size=1m,ro "$image" true
refuses 'a tmpfs cannot be at' run --tmpfs /proc/x "$image" true
refuses 'NAME:PATH' cp /etc/hosts "$work/hosts"
refuses 'names no path' cp nobody: "$work/hosts"
refuses 'no sandbox' cp nobody:/etc/hosts "$work/hosts"
refuses 'unknown limit "foo"' run --ulimit foo=1 "$image" true
refuses 'working directory "rel" is not an absolute path' run -w rel "$image" true
refuses 'kernel' run --kernel /etc/passwd "$image" true
refuses 'memory' run --memory 1 "$image" true
refuses 'no size' run --memory lots "$image" true
refuses 'no such file|not there|No such' run --volume "file:/no/such/disk" "$image" true
refuses 'tty' run -t "$image" true
refuses 'whose port of the host' run --count 2 --publish 19000:80 "$image" true
refuses 'whose port of the host' fork nobody --count 2 --publish 19000:80
refuses 'no sandbox' logs nobody
refuses '0.5 CPUs: a sandbox or a pod has whole CPUs' run --cpus 0.5 no-such-image:1 true
refuses '"x y" is no host name' run --hostname 'x y' "$image" true
refuses 'has to end in .svg, for a picture, or in .json' run --timeline "$work/t.txt" "$image" true
refuses 'signal' kill --signal NOPE nobody
# Of this one only the name counts.
"$slipway" run -d --accel hollow --name taken "$image" -- sleep 100000 >/dev/null || fail "run"
refuses 'taken.*which runs; .*rm --force' run --name taken "$image" true
# ends STATUS ARGUMENTS…: a command that prints nothing but an error, and ends with this status.
ends() {
    local want=$1 status; shift
    "$slipway" "$@" >"$work/out" 2>"$work/err" </dev/null; status=$?
    [ "$status" = "$want" ] && [ ! -s "$work/out" ] && [ -s "$work/err" ] ||
        fail "$*: status $status: $(cat "$work/out" "$work/err")"
}
for command in inspect logs wait stop stats 'stats --json' 'port stats' 'endpoint inspect' 'pod ps' 'update --cpus 2' \
    'inspect --live' 'port inspect' 'disk rm' 'snapshot inspect' 'vf inspect' 'network inspect'; do
    # shellcheck disable=SC2086 # A command may have an option.
    ends 1 $command nobody
done
ends 125 exec nobody true
ends 125 attach nobody
ends 125 run --pull never no-such-image:1
ends 2 run --no-such-option
ok "status 1 of a failure, 125 of a command that has a container's status, 2 of wrong usage"
refuses 'nosuchprog' run -d --name never "$image" nosuchprog
"$slipway" logs never >"$work/out" 2>"$work/err" || fail "logs of a container that never ran"
grep -q 'never failed: .*nosuchprog' "$work/err" || fail "logs does not say why: $(cat "$work/err")"
ok "a detached container that never ran is an error, and logs says why"
truncate -s 16M "$work/empty.img"
refuses 'holds no ext4 file system.*mkfs.ext4' run -d --name unmounted --volume "file:$work/empty.img:/data" "$image" -- sleep 100000
"$slipway" logs unmounted >"$work/out" 2>"$work/err" || fail "logs of a container whose volume cannot be mounted"
grep -q 'unmounted failed: .*empty.* holds no ext4' "$work/err" || fail "logs does not say why: $(cat "$work/err")"
ok "a detached container whose volume cannot be mounted is an error, and logs says why"
for ended in never unmounted; do "$slipway" ps -a | grep -q "$ended" || fail "ps -a lacks $ended: $("$slipway" ps -a)"; done
[ "$("$slipway" ps -aq)" = "$("$slipway" ps --all --quiet)" ] || fail "ps --all"
ok "ps -a lists what has ended"
"$slipway" rm never unmounted >/dev/null || fail "rm"
mkdir -m 700 "$work/closed"
SLIPWAY_DATA_DIR=$work/closed/data "$slipway" doctor >"$work/out" 2>&1 && fail "doctor passes a closed data directory: $(cat "$work/out")"
grep -q '^data directory  *MISSING .*is closed to the users that VMMs run as' "$work/out" || fail "doctor: $(cat "$work/out")"
grep -Eq '^moves into groups  *(ok|note .*mount -o remount,favordynmods /)' "$work/out" || fail "doctor: $(cat "$work/out")"
ok "doctor fails for a data directory that VMMs cannot enter"
SLIPWAY_DATA_DIR=$work/elsewhere refuses 'has its data in' ps
"$slipway" rm -f taken >/dev/null
settings=$work/settings.toml
for wrong in 'accelerator = "kqemu"' 'vmm = "bochs"' 'cpu_template = "x86-64-v9"' 'network_reach = "some"' \
    'network_allow = ["10.0.0.0/33"]' 'network_deny = ["x"]' 'memory = "disk"' 'templates_after = 1001' \
    'templates_within_s = 0' 'spare_forks = 65' 'cpus = 0' 'cpus = 99' 'no_such_setting = 1'; do
    echo "$wrong" >"$settings"
    SLIPWAY_VMM='' refuses "${wrong%% *}" --config "$settings" daemon --check
done
echo 'accelerator = "hollow"' >"$settings"
SLIPWAY_VMM='' "$slipway" --config "$settings" daemon --check >"$work/out" 2>"$work/err" || fail "daemon --check: $(cat "$work/err")"
stop_daemon
SLIPWAY_VMM=qemu SLIPWAY_QEMU=/no/such/qemu refuses 'qemu' run "$image" true
if id nobody >/dev/null 2>&1; then
    cp "$slipway" "$work/slipway"; chmod 755 "$work" "$work/slipway"
    su -s /bin/sh nobody -c "SLIPWAY_RUN_DIR=$work/nr SLIPWAY_DATA_DIR=$work/nd '$work/slipway' run x true" 2>"$work/err"
    status=$?
    [ "$status" != 0 ] && [ "$(grep -c . "$work/err")" = 1 ] && grep -q 'root' "$work/err" \
        || fail "without root: $status $(cat "$work/err")"
    ok "without root -> $status, $(cat "$work/err")"
fi
full=$work/full; mkdir "$full"
if mount -t tmpfs -o size=8m none "$full" 2>/dev/null; then
    SLIPWAY_RUN_DIR=$work/run2 SLIPWAY_DATA_DIR=$full refuses 'space' image import "dir:/usr/share"
    umount "$full"
else
    say "SKIPPED: e2e/$test_name no space left: needs the right to mount a tmpfs"
fi
[ -z "$("$slipway" ps -q)" ] || fail "left: $("$slipway" ps)"
[ -z "$(leftovers)" ] || fail "left: $(leftovers)"
ok "nothing is left"
