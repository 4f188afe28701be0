#!/usr/bin/env bash
# Images that are pulled lazily, from a registry of the test's own: containers read them before they are here, the
# fetcher is killed, and with crictl a pod of containerd runs from one by `slipway-snapshotter`.
. "$(dirname "$0")/lib.sh"
. "$(dirname "$0")/cri.sh"
need_root
for program in python3 busybox; do
    command -v "$program" >/dev/null || skip "$program"
done
[ -x "$slipway" ] || fail "$slipway is not built; \`make build\` builds it"
need_healthy "a node that can run sandboxes"
stop_daemon
registry='' snapshotter=''
end_registry() {
    [ -n "$snapshotter" ] && kill "$snapshotter" 2>/dev/null
    [ -n "$registry" ] && kill "$registry" 2>/dev/null
}
end_all() { end_registry; }

# Layers: programs; a file that is read beside one that is not; one that is read while its fetcher dies.
mkdir -p "$work/programs"/{bin,proc,sys,dev,run,tmp,etc,root} "$work/files/data" "$work/big/data" || fail "no folders"
cp "$(command -v busybox)" "$work/programs/bin/busybox" || fail "no busybox"
for name in sh cat echo sleep id ls sha256sum; do ln -s busybox "$work/programs/bin/$name"; done
printf 'root:x:0:0::/root:/bin/sh\ngames:x:5:60::/:/bin/sh\n' >"$work/programs/etc/passwd"
head -c 8M /dev/urandom >"$work/files/data/read"
head -c 16M /dev/urandom >"$work/files/data/never"
head -c 16M /dev/urandom >"$work/big/data/big"
echo of the image >"$work/big/data/small"
make_image() { python3 "$here/estargz.py" "$work/registry" "$@" || fail "no image $1"; }
make_image test/lazy:1 "$work/programs" "$work/files" >/dev/null
make_image test/big:1 "$work/programs" "$work/big" >/dev/null
pod_image=$(make_image test/pod:1 --volume /data --first data/small "$work/programs" "$work/big") || exit
make_image test/plain:1 --plain "$work/big" "$work/programs" >/dev/null
mkdir "$work/more" && echo more >"$work/more/more" || fail "no folder"
make_image test/derived:1 --plain "$work/programs" "$work/more" >/dev/null
python3 "$here/registry.py" "$work/registry" "$work/rate" >"$work/port" 2>"$work/registry.log" & registry=$!
wait_until 20 test -s "$work/port" || fail "no registry: $(cat "$work/registry.log")"
from=127.0.0.1:$(cat "$work/port")
sent() { python3 -c 'import sys, urllib.request; print(urllib.request.urlopen(f"http://{sys.argv[1]}/sent").read().decode())' "$from"; }
# The images of this registry that are in the node's cache, and whether they are whole.
of_registry() { "$slipway" image ls --json | python3 -c 'import json, sys
print(*(name + (":lazy" if one["lazy"] else ":whole") for one in json.load(sys.stdin) for name in one["references"]
        if name.startswith(sys.argv[1])))' "$from/$1"; }
is_whole() { [[ $(of_registry "$1") == *:whole ]]; }
sum() { sha256sum <"$1" | cut -d ' ' -f 1; }

# rate BYTES [MOST]: so many bytes a second, and none after as many in all.
rate() { echo "$@" >"$work/rate.new" && mv "$work/rate.new" "$work/rate"; }
rate $((8 << 20))
"$slipway" image pull --lazy "$from/test/lazy:1" >"$work/out" 2>"$work/err" || fail "image pull --lazy: $(cat "$work/err")"
[[ $(of_registry test/lazy) == *:lazy ]] || fail "after image pull --lazy: $(of_registry '')"
pulled=$(sent)
[ "$pulled" -lt $((1 << 20)) ] || fail "image pull --lazy fetched $pulled bytes of $(du -bs "$work/registry/blobs" | cut -f 1)"
ok "an image of 24 MiB and more is there after $pulled bytes"
start_daemon
"$slipway" run --rm --lazy "$from/test/lazy:1" -- sh -c 'sha256sum /data/read; sleep 1' >"$work/read" 2>"$work/err" & run=$!
wait_until 120 test -s "$work/read" || fail "run --lazy: $(cat "$work/err") $(explain)"
early=$(sent)
wait "$run" || fail "run --lazy: $(cat "$work/err") $(explain)"
[ "$(cut -d ' ' -f 1 "$work/read")" = "$(sum "$work/files/data/read")" ] || fail "what was read: $(cat "$work/read")"
rate ''
wait_until 60 is_whole test/lazy || fail "the image stays lazy: $(of_registry '') $(explain)"
ok "a container read 8 MiB of it right, after $early of $(sent) bytes; then the rest came"
out=$("$slipway" run --rm --pull never "$from/test/lazy:1" -- sha256sum /data/never 2>"$work/err") || fail "run: $(cat "$work/err")"
[ "${out%% *}" = "$(sum "$work/files/data/never")" ] || fail "of the whole image: $out"
ok "the image is an ordinary one then, and its other file is right too"

fetchers() { pgrep -f -- "fetch .*--run-dir $SLIPWAY_RUN_DIR( |$)" | while read -r pid; do runs "$pid" && echo "$pid"; done; }
# It does not come to its end before it is killed: nothing comes after a part.
before=$(sent)
rate $((512 << 10)) $((before + (3 << 20)))
"$slipway" run --rm --lazy "$from/test/big:1" -- sha256sum /data/big >"$work/out" 2>"$work/err" & run=$!
under_way() { [ "$(sent)" -ge $((before + (3 << 20))) ] && [ -n "$(fetchers)" ]; }
wait_until 120 under_way || fail "nothing is fetched: $(cat "$work/err") $(explain)"
for pid in $(fetchers); do kill -9 "$pid"; done
rate ''
wait "$run" || fail "after the fetcher's death: $(cat "$work/err") $(explain)"
[ "$(cut -d ' ' -f 1 "$work/out")" = "$(sum "$work/big/data/big")" ] || fail "after the fetcher's death: $(cat "$work/out")"
ok "the fetcher was killed while a file was read, and the file is right"
for name in lazy big; do "$slipway" image rm "$from/test/$name:1" >/dev/null || fail "image rm $name"; done
kill "$daemon"; wait "$daemon" 2>/dev/null

if [ -z "$cri" ] || ! command -v containerd >/dev/null; then
    printf 'SKIPPED: %s\n' "e2e/$test_name: a pod of a lazily pulled image needs containerd, crictl and plugins of CNI"
    exit
fi
snapshotter_program=${SLIPWAY_SNAPSHOTTER:-$(dirname "$slipway")/slipway-snapshotter}
[ -x "$snapshotter_program" ] || fail "$snapshotter_program is not built; \`make build\` builds it"
layers=$(printf '  snapshotter = "slipway"\n  disable_snapshot_annotations = false')
cri=${cri/'default_runtime_name = "slipway"'/'default_runtime_name = "slipway"'$'\n'$layers}
cri+="
[proxy_plugins.slipway]
  type = \"snapshot\"
  address = \"$SLIPWAY_RUN_DIR/snapshotter.sock\""
start_snapshotter() {
    "$snapshotter_program" --root "$work/snapshots" 2>>"$work/snapshotter.log" & snapshotter=$!
    wait_until 20 grep -q 'serves snapshots' "$work/snapshotter.log" || fail "no snapshotter: $(cat "$work/snapshotter.log")"
}
mkdir -p "$SLIPWAY_RUN_DIR" && start_snapshotter
. "$here/containerd.sh"
end_containerd=$(declare -f end_all | sed '1s/end_all/end_containerd/')
eval "$end_containerd"
end_all() { end_containerd; end_registry; }
explain() { tail -n 20 "$work/containerd.log" "$work/daemon.log" "$work/snapshotter.log"; }
start_keeper
start_daemon
need_cri
rate $((4 << 20))
before=$(sent)
k pull "$from/test/pod:1" >"$work/out" 2>&1 || fail "crictl pull: $(cat "$work/out") $(explain)"
pulled=$(($(sent) - before))
# The volume's files are fetched for containerd, which copies them: 16 MiB of the layer, and nothing else.
[ "$pulled" -lt $((18 << 20)) ] || fail "crictl pull fetched $pulled bytes: $(explain)"
[ "$(find "$work/snapshots/snapshots" -name image.json | wc -l)" = 2 ] || fail "layers: $(find "$work/snapshots") $(explain)"
[[ $(of_registry test/pod) == "$from/test/pod@$pod_image":* ]] || fail "after crictl pull: $(of_registry '') $(explain)"
ok "crictl pulled an image by slipway-snapshotter: two layers without files, after $pulled bytes"

# Its ledger outlives it.
kill -9 "$snapshotter"; wait "$snapshotter" 2>/dev/null
: >"$work/snapshotter.log"
start_snapshotter
# containerd connects again after a pause.
reached() { c -n k8s.io snapshots --snapshotter slipway ls >/dev/null 2>&1; }
wait_until 60 reached || fail "containerd does not reach the snapshotter again: $(explain)"
rate ''
cat >"$work/pod.json" <<END
{"metadata": {"name": "lazy", "namespace": "default", "uid": "u1", "attempt": 1}, "log_directory": "$work/logs", "linux": {}}
END
cat >"$work/container.json" <<END
{"metadata": {"name": "reader"}, "image": {"image": "$from/test/pod:1"}, "log_path": "reader.log",
 "command": ["sh", "-c", "id -u; cat /data/small; sha256sum /data/big; while :; do sleep 0.1; done"],
 "linux": {"security_context": {"run_as_username": "games"}}}
END
pod=$(k runp --runtime slipway "$work/pod.json") || fail "crictl runp: $(explain)"
container=$(k create "$pod" "$work/container.json" "$work/pod.json") || fail "crictl create: $(explain)"
k start "$container" >/dev/null || fail "crictl start: $(explain)"
said() { [ "$(k logs "$container" | wc -l)" = 3 ]; }
wait_until 120 said || fail "crictl logs: $(k logs "$container") $(explain)"
[ "$(k logs "$container" | cut -d ' ' -f 1 | tr '\n' ' ')" = "5 of $(sum "$work/big/data/big") " ] ||
    fail "crictl logs: $(k logs "$container") $(explain)"
ok "a pod runs from it, as a user of its /etc/passwd, and reads its volume"
k stop --timeout 1 "$container" >/dev/null && k rm "$container" >/dev/null || fail "crictl stop: $(explain)"
k stopp "$pod" >/dev/null && k rmp "$pod" >/dev/null || fail "crictl stopp: $(explain)"

# Images without an index: one on a layer of the lazy one, which Slipway pulls, and one that containerd unpacks. Then
# no image is left.
for name in derived plain; do
    k pull "$from/test/$name:1" >"$work/out" 2>&1 || fail "crictl pull of $name: $(cat "$work/out") $(explain)"
done
[[ $(of_registry test/derived) == *:whole ]] || fail "an image on a lazy layer: $(of_registry '') $(explain)"
[ "$(find "$work/snapshots/snapshots" -name image.json | wc -l)" = 3 ] || fail "layers: $(find "$work/snapshots" -maxdepth 3) $(explain)"
# The other one is the volume of the lazy image.
[ "$(find "$work/snapshots/snapshots" -path '*/fs/data/big' | wc -l)" = 2 ] || fail "a plain layer: $(find "$work/snapshots" -maxdepth 4)"
for name in pod derived plain; do
    k rmi "$from/test/$name:1" >"$work/out" 2>&1 || fail "crictl rmi: $(cat "$work/out") $(explain)"
done
no_image() { [ -z "$(of_registry test/)" ]; }
wait_until 60 no_image || fail "after crictl rmi: $(of_registry '') $(find "$work/snapshots" -name image.json) $(explain)"
ok "images without an index are pulled on a lazy layer, or unpacked as ever; all go from the node's cache with their layers"
