#!/usr/bin/env bash
# containerd runs pods in Slipway's microVMs: `ctr` names them by the annotations that containerd's CRI plugin
# uses, and `crictl` goes through that plugin itself where it and the plugins of CNI are installed.
. "$(dirname "$0")/lib.sh"
export SLIPWAY_SOCKET=$work/engine.sock
. "$(dirname "$0")/cri.sh"
. "$(dirname "$0")/containerd.sh"
. "$(dirname "$0")/pods.sh"
running() { grep -qE "^$1 +[0-9]+ +RUNNING" <<<"$(c task ls)"; }
deleted() { c task delete "$1" >"$work/out" 2>&1; c container delete "$1" || fail "container delete $1: $(explain)"; }
ended_with() { grep -q "exit code $1" "$work/out" || fail "delete says: $(cat "$work/out")"; }
in_daemon() { "$slipway" ps --json | python3 -c 'import json,sys
print(*sorted(c["name"] + ":" + c["state"] for s in json.load(sys.stdin) if s["name"].startswith(sys.argv[1] + "-") for c in s["containers"]))' "$1"; }
vmm() { "$slipway" ps --json | python3 -c 'import json,sys
print(*[s["vmm_pid"] for s in json.load(sys.stdin) if s["name"].startswith(sys.argv[1] + "-")])' "$1"; }

# Pools of functions of an earlier test.
rm -f "$SLIPWAY_RUN_DIR"/vf.ledger*
# QEMU is in its pod's control group only if the settings say so.
printf 'pod_functions = 2\npod_cgroups = true\npod_max_cpus = 2\n' >>"$SLIPWAY_CONFIG"
library=$(dirname "$(readlink -f "$slipway")")/libslipway.so
[ ! -f "$library" ] || echo 'pod_sockets = 1' >>"$SLIPWAY_CONFIG"
start_keeper
start_daemon
member none "$image" lonely true 2>"$work/err" && fail "a container ran without its pod"
grep -q 'there is no pod none' "$work/err" || fail "a container without its pod: $(cat "$work/err")"
c container delete lonely >/dev/null 2>&1
ok "$(tail -n 1 "$work/err")"

pod web --annotation dev.slipway.memory=320M
running web || fail "task ls: $(c task ls) $(explain)"
wait_until 60 one_shim || fail "shims: $(shims)"
out=$(member web --rm --env A=1 "$image" first sh -c 'echo out $A; echo err >&2; exit 7' 2>"$work/err"); status=$?
[ "$status:$out:$(cat "$work/err")" = "7:out 1:err" ] || fail "first: status $status, $out, $(cat "$work/err"): $(explain)"
ok "a pod without a process of its own runs; a container in it: output, error output, status 7"

started web "$image" one sh -c 'echo shared >/dev/shm/x; echo mine >/tmp/x; until [ -e /stop ]; do sleep 0.1; done; exit 5'
started web --memory-limit 67108864 "$image" two sh -c 'trap "exit 6" TERM; : >/ready; while :; do sleep 0.1; done'
wait_until 60 one_shim || fail "shims: $(shims)"
[ "$(in_daemon web)" = "one:running two:running" ] || fail "the daemon has: $("$slipway" ps)"
inside two sh -c 'until [ -e /ready ]; do sleep 0.1; done' || fail "exec: $(explain)"
out=$(inside two sh -c 'cat /dev/shm/x; ls /tmp; cat /sys/fs/cgroup/memory.max; ps | grep -c "[s]top"; exit 3'); status=$?
[ "$status:$out" = "3:shared
67108864
0" ] || fail "two sees: status $status, $out: $(explain)"
(inside one sh -c 'echo reply | nc -l -p 7000') & server=$!
got() { [ "$(inside two sh -c 'nc 127.0.0.1 7000 </dev/null')" = reply ]; }
wait_until 30 got || fail "no connection between the containers: $(explain)"
wait "$server"
inside web true 2>"$work/err" && fail "a process ran in the pod's sandbox"
grep -q 'has no processes' "$work/err" || fail "exec in the pod: $(cat "$work/err")"
for id in web two; do
    c task metrics $id >"$work/metrics" 2>&1 && grep -q memory "$work/metrics" || fail "metrics of $id: $(cat "$work/metrics")"
done
grep -q '\b67108864\b' "$work/metrics" || fail "metrics without the limit: $(cat "$work/metrics")"
ok "two containers in one microVM and one shim: /dev/shm and 127.0.0.1 shared, roots and processes not, a limit of memory"

# The limits of a pod's container, as in-place resize changes them.
of_web() { "$slipway" ps --json | python3 -c 'import json,sys
print(*[s[sys.argv[1]] for s in json.load(sys.stdin) if s["name"].startswith("web-")])' "$1"; }
has_cpus() { [ "$(of_web cpus):$(inside two sh -c 'grep -c ^processor /proc/cpuinfo')" = "$1:$1" ]; }
has_cpus 1 || fail "the pod begins with $(of_web cpus) CPUs: $(explain)"
"$slipway" update "$(of_web name)/two" --cpus 2 >/dev/null || fail "a limit of 2 CPUs: $(explain)"
has_cpus 2 || fail "for a limit of 2 CPUs the pod has $(of_web cpus): $(explain)"
"$slipway" update "$(of_web name)/two" --cpus 1 >/dev/null || fail "a limit of 1 CPU: $(explain)"
wait_until 60 has_cpus 1 || fail "for a limit of 1 CPU the pod has $(of_web cpus): $(explain)"
ok "a pod's microVM gets a CPU for a limit that is raised, and loses it when the limit is lowered"

# A debugging container, whose target `ctr` names by an annotation, and the CRI plugin in its record of the container.
joins() { member web --annotation dev.slipway.processes-of="$1" --with-ns "pid:/proc/$(vmm web)/ns/pid" "${@:2}"; }
started web "$image" target sh -c 'until [ -e /stop ]; do sleep 0.1; done; exit 5'
joins target -d "$image" debugs sleep 1000 >"$work/out" 2>&1 || fail "debugs: $(cat "$work/out") $(explain)"
grep -q 'until.*/stop' <<<"$(inside debugs cat /proc/1/cmdline | tr '\0' ' ')" || fail "debugs sees: $(inside debugs ps 2>&1) $(explain)"
joins none --rm "$image" other true 2>"$work/err" && fail "a container has a target that is not there"
grep -q 'there is no container none in the pod web' "$work/err" || fail "no target: $(cat "$work/err")"
c container delete other >/dev/null 2>&1
# The command may end with its container; the status is below.
inside target sh -c ': >/stop'
for id in target debugs; do wait_until 60 stopped $id || fail "$id after its target's end: $(c task ls) $(explain)"; done
deleted target; ended_with 5
deleted debugs; ended_with 137
ok "a debugging container sees the processes of its target, and ends with it, status 137; one without a target is refused"

# A secret of another user's than root, as kubelet lays one out and replaces it, in a container with a read-only root.
secret=$work/pods/0-1/volumes/kubernetes.io~secret/key
# version VOLUME NUMBER CONTENT
version() {
    mkdir -p "$1/..$2" && echo "$3" >"$1/..$2/token" && chmod 600 "$1/..$2/token" &&
        chown 1000:1000 "$1/..$2/token" && ln -s "..$2" "$1/..data_tmp" &&
        mv -T "$1/..data_tmp" "$1/..data" && ln -sf ..data/token "$1/token" || fail "version $2 of $1"
}
version "$secret" 1 one
started web --read-only --mount "type=bind,src=$secret,dst=/etc/key,options=rbind:ro" \
    "$image" holder sleep 1000
has() { [ "$(inside --user 1000 holder cat /etc/key/token)" = "$1" ]; }
has one || fail "a secret: $(inside holder ls -lna /etc/key 2>&1) $(explain)"
version "$secret" 2 two
rm -r "$secret/..1"
wait_until 60 has two || fail "a secret's second version: $(inside holder ls -lna /etc/key 2>&1) $(explain)"
alone() { [ "$(inside holder ls -A /etc/key | tr '\n' ' ')" = "..2 ..data token " ]; }
wait_until 60 alone || fail "beside a secret's second version: $(inside holder ls -A /etc/key)"
inside holder sh -c ': >/etc/key/x' 2>/dev/null && fail "the root became writable"
c task kill -s SIGKILL holder || fail "kill: $(explain)"
wait_until 60 stopped holder || fail "after SIGKILL: $(c task ls) $(explain)"
deleted holder
ok "a secret that changes changes in a container that runs, with its owner; the root stays read-only"

# A configMap over the image's /etc, and a part of it by kubelet's mount for subPath. No process of the host serves them,
# as the next part sees.
map=$work/pods/0-1/volumes/kubernetes.io~configmap/app part=$work/pods/0-1/volume-subpaths/app/maps/0
version "$map" 1 mapped
mkdir -p "${part%/*}" && : >"$part" && mount --bind "$map/..1/token" "$part" || fail "no mount for a part of a volume"
said=$(member web --rm --mount "type=bind,src=$map,dst=/etc,options=rbind:ro" \
    --mount "type=bind,src=$part,dst=/bin/part,options=rbind:ro" "$image" maps \
    sh -c 'ls -A /etc; cat /etc/token /bin/part; echo >/etc/x; echo >/bin/part; echo >/bin/x && echo writable' 2>"$work/err") ||
    fail "a configMap: $said $(cat "$work/err") $(explain)"
umount "$part" || fail "umount"
[ "$said" = "..1
..data
token
mapped
mapped
writable" ] && [ "$(grep -c 'Read-only file system' "$work/err")" = 2 ] || fail "a configMap: $said $(cat "$work/err") $(explain)"
ok "a configMap over a directory of the image is all that is there; it and its subPath are read-only, and the root is not"

# emptyDir volumes as kubelet makes them, one in memory: directories of the guest, which outlive a container. No process
# of the host serves them, and the host's directories stay empty.
volumes=$work/pods/0-1/volumes/kubernetes.io~empty-dir
mkdir -p "$volumes/cache" "$volumes/memory" && chgrp 2000 "$volumes/cache" && chmod 2777 "$volumes/cache" &&
    mount -t tmpfs -o size=4M,mode=777 tmpfs "$volumes/memory" || fail "no directories for volumes"
bind() { printf 'type=bind,src=%s,dst=%s,options=rbind:rw' "$1" "$2"; }
said=$(member web --rm --mount "$(bind "$volumes/cache" /cache)" --mount "$(bind "$volumes/memory" /memory)" "$image" fills \
    sh -c 'stat -c "%a %g" /cache; stat -f -c %b /memory; echo disk >/cache/x; echo memory >/memory/x' 2>"$work/err") ||
    fail "emptyDir: $said $(cat "$work/err") $(explain)"
[ "$said" = "2777 2000
1024" ] || fail "emptyDir: $said $(explain)"
said=$(member web --rm --mount "$(bind "$volumes/cache" /c)" --mount "$(bind "$volumes/memory" /m)" "$image" reads \
    cat /c/x /m/x 2>"$work/err") || fail "emptyDir: $said $(cat "$work/err") $(explain)"
[ "$said" = "disk
memory" ] || fail "a second container's emptyDir: $said $(explain)"
[ -z "$(servers)" ] && [ ! -e "$volumes/cache/x" ] && [ ! -e "$volumes/memory/x" ] || fail "emptyDir: the host has $(servers) $(ls -A "$volumes"/*)"
umount "$volumes/memory" || fail "umount"
ok "containers of a pod share emptyDir volumes in the guest, on a disk and in memory, and no process of the host serves them"

# Huge pages of the guest, and an emptyDir volume of them, whose files outlive a container with their pages. `ctr` has no
# option for the limit, but takes a configuration.
# huge SIZE BYTES PROGRAM: runs a container of the pod with a limit of pages of that size.
huge() {
    python3 - "$work" "$volumes/huge" "$@" >"$work/huge.json" <<'P' || fail "no configuration"
import json, sys
work, volume, size, limit, program = sys.argv[1:]
json.dump({"ociVersion": "1.0.2",
           "annotations": {"io.kubernetes.cri.container-type": "container", "io.kubernetes.cri.sandbox-id": "web"},
           "process": {"user": {"uid": 0, "gid": 0}, "args": ["/bin/sh", "-c", program], "env": ["PATH=/bin"], "cwd": "/"},
           "root": {"path": work + "/own"},
           "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"},
                      {"destination": "/huge", "type": "bind", "source": volume, "options": ["rbind", "rw"]}],
           "linux": {"cgroupsPath": "/default/huge",
                     "resources": {"devices": [{"allow": False, "access": "rwm"}],
                                   "hugepageLimits": [{"pageSize": size, "limit": int(limit)}]},
                     "namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "network")]}}, sys.stdout)
P
    run --rm --config "$work/huge.json" huge 2>"$work/err"
}
mkdir -p "$volumes/huge" "$work/own/bin" && cp "$(command -v busybox)" "$work/own/bin/busybox" && ln -s busybox "$work/own/bin/sh" || fail "no root"
pages='busybox awk "/^HugePages_(Total|Free)/ { print \$2 }" /proc/meminfo'
if ! mount -t hugetlbfs -o pagesize=2M,mode=777 none "$volumes/huge" 2>"$work/out"; then
    printf 'SKIPPED: %s\n' "e2e/$test_name: a volume of huge pages needs hugetlbfs: $(cat "$work/out")"
else
    said=$(huge 2MB 4194304 "$pages; busybox stat -c %a /huge; busybox fallocate -l 4194304 /huge/x && $pages
        cat=/sys/fs/cgroup/hugetlb.2MB.max; [ ! -e \$cat ] || [ \$(busybox cat \$cat) = 4194304 ] || echo no limit") ||
        fail "huge pages: $said $(cat "$work/err") $(explain)"
    [ "$(paste -sd ' ' <<<"$said")" = "2 2 777 2 0" ] || fail "huge pages: $said $(explain)"
    said=$(huge 2MB 4194304 "$pages; busybox stat -c %s /huge/x; busybox rm /huge/x; $pages") ||
        fail "huge pages again: $said $(cat "$work/err") $(explain)"
    [ "$(paste -sd ' ' <<<"$said")" = "2 0 4194304 2 2" ] || fail "huge pages again: $said $(explain)"
    no_pages() { [ "$(inside one sh -c "$pages" | paste -sd ' ')" = "0 0" ]; }
    wait_until 60 no_pages || fail "huge pages without their container: $(inside one sh -c "$pages") $(explain)"
    huge 1GB 1073741824 true && fail "a container has a huge page of 1 GiB"
    grep -q '1073741824 bytes of huge pages of "1GB" cannot be given' "$work/err" || fail "1 GiB: $(cat "$work/err")"
    c container delete huge >/dev/null 2>&1
    umount "$volumes/huge" || fail "umount"
    ok "containers have huge pages of the guest, and share a volume of them; the last of them leaves none"
fi

# A termination message, at the usual path of its file.
: >"$work/message" && mkdir -p "$work/pods/0-1/containers/says" && ln "$work/message" "$work/pods/0-1/containers/says/1" ||
    fail "no file for a message"
member web --rm --mount "type=bind,src=$work/pods/0-1/containers/says/1,dst=/dev/termination-log,options=rbind:rw" \
    "$image" says sh -c 'echo no disk >/dev/termination-log; exit 4' >"$work/out" 2>&1; status=$?
[ "$status:$(cat "$work/message")" = "4:no disk" ] ||
    fail "a termination message: status $status, $(cat "$work/message") $(cat "$work/out") $(explain)"
ok "a container's termination message is in the host's file for it"

# A block device of the host, as of volumeDevices: at its path in the container, and nowhere else.
truncate -s 8M "$work/disk" && printf 'of the host' | dd of="$work/disk" bs=4096 seek=1 conv=notrunc 2>/dev/null || fail "no file"
if disk=$(losetup --find --show "$work/disk" 2>"$work/err"); then
    said=$(member web --rm --device "$disk" "$image" holder sh -c "dd if=$disk bs=4096 skip=1 count=1 2>/dev/null | head -c 11
        printf 'of the guest' | dd of=$disk bs=4096 count=1 conv=sync 2>/dev/null; sync" 2>"$work/err") || fail "a device: $said $(cat "$work/err") $(explain)"
    losetup --detach "$disk"
    [ "$said:$(head -c 12 "$work/disk")" = "of the host:of the guest" ] || fail "a device: $said, $(head -c 12 "$work/disk") $(explain)"
    member web --rm --device /dev/null "$image" other true 2>"$work/err" && fail "a character device was given"
    grep -q "takes block devices only" "$work/err" || fail "a character device: $(cat "$work/err")"
    c container delete other >/dev/null 2>&1
    ok "a block device of the host is in a container at its path; a character device is refused"
else
    printf 'SKIPPED: %s\n' "e2e/$test_name: a block device of the host needs a loop device: $(cat "$work/err")"
fi

# A function of a pool, by the mount that `slipway device-plugin` has kubelet make.
functions=$(realpath "$SLIPWAY_RUN_DIR")/functions
mkdir -p "$functions" && : >"$functions/fast.1" && "$slipway" vf create fast --disk ram:1M --count 2 >/dev/null || fail "vf create: $(explain)"
given=(--mount "type=bind,src=$functions/fast.1,dst=/proc/slipway/functions/fast.1,options=rbind:ro")
owners() { "$slipway" vf inspect fast | python3 -c 'import json, sys
print(*(vf["state"] + vf["owner"][:12] for vf in json.load(sys.stdin)[0]["functions"]), sep=",")'; }
owned() { [ "$(owners)" = "$1" ]; }
said=$(member web --rm "${given[@]}" "$image" holder sh -c "head -c 4 /dev/slipway/fast-0 | tr '\\0' 0
    printf marked | dd of=/dev/slipway/fast-0 bs=512 conv=sync 2>/dev/null; sync" 2>"$work/err") || fail "a function: $said $(cat "$work/err") $(explain)"
[ "$said" = 0000 ] || fail "a function is not empty: $said"
owned ready,takenslipway-pod: || fail "the pool: $(owners)"
member web --rm --mount "type=bind,src=$work,dst=/proc/slipway/functions/fast.0,options=rbind:ro" "$image" other true 2>"$work/err" &&
    fail "a function was given that kubelet did not give"
grep -q 'slipway.dev/POOL' "$work/err" || fail "another mount: $(cat "$work/err")"
c container delete other >/dev/null 2>&1
ok "a container has the function of a pool that kubelet gave it, empty; a mount of something else is refused"

# A function of a pool of network interfaces: one more interface of the pod, with addresses of the pool's network.
members() { "$slipway" network inspect back | python3 -c 'import json, sys; print(*(m["ipv4"] for m in json.load(sys.stdin)[0]["sandboxes"]))'; }
no_members() { [ -z "$(members)" ]; }
reaches() { inside wired sh -c "busybox ip -o address show $interface && busybox ping -q -c 1 -W 20 $gateway" >"$work/out" 2>&1 && grep -qF " $own/" "$work/out"; }
wired=''
if ! command -v nft >/dev/null || [ ! -c /dev/net/tun ]; then
    printf 'SKIPPED: %s\n' "e2e/$test_name: an interface of a pool needs nft and /dev/net/tun"
else
    # Of an earlier test that failed.
    { "$slipway" port rm backport; "$slipway" network rm back; } >/dev/null 2>&1
    "$slipway" network create back --internal >/dev/null && "$slipway" port create backport --network back >/dev/null &&
        "$slipway" vf create nics --switch back --count 1 >/dev/null || fail "a pool of interfaces: $(explain)"
    : >"$functions/nics.0"
    gateway=$("$slipway" network inspect back | python3 -c 'import json, sys; print(json.load(sys.stdin)[0]["gateway"])')
    started web --mount "type=bind,src=$functions/nics.0,dst=/proc/slipway/functions/nics.0,options=rbind:ro" "$image" wired sleep 1000
    wired=wired
    own=$(members)
    interface=$(inside wired busybox ip -o address | awk -v own="$own/" 'index($4, own) == 1 { print $2 }')
    [ -n "$own" ] && [ -n "$interface" ] && reaches || fail "an interface of a pool: $own, $interface, $(cat "$work/out") $(explain)"
    inside wired busybox ip route | grep -q "^default.* dev $interface" && fail "it has a default route: $(inside wired busybox ip route)"
    ok "a container has a network interface of a pool, with an address of its network and no default route"
fi

# The pod's socket function, by such a mount too; its sockets have the addresses that the pod has in a network.
if [ -z "$wired" ] || [ ! -f "$library" ]; then
    printf 'SKIPPED: %s\n' "e2e/$test_name: a socket function needs nft, /dev/net/tun and $library"
else
    : >"$functions/sockets.0"
    talks=(--rm --mount "type=bind,src=$functions/sockets.0,dst=/proc/slipway/functions/sockets.0,options=rbind:ro" "$image")
    member web "${talks[@]}" talks true 2>"$work/err" && fail "a container had sockets without an engine"
    grep -q 'slipway socket engine' "$work/err" || fail "sockets without an engine: $(cat "$work/err")"
    c container delete talks >/dev/null 2>&1
    "$slipway" socket engine --policy /none --links /none >"$work/engine.log" 2>&1 & listener=$!
    wait_until 20 test -S "$work/engine.d/engine.sock" || fail "no engine: $(cat "$work/engine.log")"
    started web "${talks[@]:1}" talks sh -c 'test -S /run/slipway/socket.d/engine.sock && echo "$SLIPWAY_SOCKET" && exec sleep 1000'
    said=$(inside talks sh -c 'echo "$SLIPWAY_SOCKET"') && [ -n "$said" ] || fail "an exec with sockets: $said $(explain)"
    c task kill -s SIGKILL talks; wait_until 60 stopped talks; deleted talks
    "$slipway" socket ls | grep -q 'network:' || fail "the engine has no guest: $("$slipway" socket ls)"
    said=$(inside wired sh -c 'echo "$SLIPWAY_SOCKET"')
    [ -z "$said" ] || fail "a container that asks for no sockets has them: $said"
    ok "a container has the socket function of its pod that kubelet gave it; without an engine it does not start"
fi

# containerd dies and comes back, and a container ends meanwhile.
kill -9 "$containerd"; wait "$containerd" 2>/dev/null
sandbox=$("$slipway" ps --quiet | grep '^web-[0-9a-f]*$') || fail "no pod: $("$slipway" ps)"
timeout 60 "$slipway" exec "$sandbox/one" -- sh -c ': >/stop'
[ "$(timeout 60 "$slipway" wait "$sandbox/one")" = 5 ] || fail "one did not end: $("$slipway" ps)"
start_containerd
wait_until 60 stopped one || fail "after containerd's restart: $(c task ls) $(explain)"
deleted one; ended_with 5
running two && running web || fail "after containerd's restart: $(c task ls)"
ok "containerd was killed and came back: a container had ended with status 5, its pod and another ran on"

c task kill -s SIGTERM two || fail "kill: $(explain)"
wait_until 60 stopped two || fail "after SIGTERM: $(c task ls) $(explain)"
deleted two; ended_with 6
[ "$(in_daemon web)" = "${wired:+wired:running}" ] && running web || fail "after the last container: $("$slipway" ps)"
started web "${given[@]}" "$image" three sleep 1000
started web "$image" lines sh -c 'i=0; while :; do i=$((i + 1)); echo "line $i"; sleep 0.1; done'
kill -KILL "$daemon"; wait "$daemon" 2>/dev/null
rm -f "$SLIPWAY_RUN_DIR/slipway.sock"
start_daemon
wait_until 60 inside three true || fail "after the daemon's death: $(explain)"
running web && running lines || fail "after the daemon's death: $(c task ls)"
[ "$(inside three sh -c 'head -c 6 /dev/slipway/fast-0')" = marked ] || fail "a function after the daemon's death: $(explain)"
[ -z "$wired" ] || reaches || fail "an interface after the daemon's death: $(cat "$work/out") $(explain)"
ok "containers go one by one; the daemon was killed, and the pod and its containers ran on"

for what in shims holders shims; do
    pid=$($what)
    kill -9 "$pid" || fail "no single process of $what: $pid"
    another() { local now; now=$($what); [ -n "$now" ] && [ "$now" != "$pid" ]; }
    wait_until 60 another || fail "no other process of $what: $(explain)"
    inside three true || fail "after kill -9 of $what: $(explain)"
    running web && running lines && running three || fail "after kill -9 of $what: $(c task ls)"
    started web "$image" late true
    wait_until 60 stopped late || fail "a container after kill -9 of $what: $(c task ls) $(explain)"
    deleted late
done
ok "the pod's shim was killed, its holder, and the shim again: containers ran on, and others began and ended"

c task kill -s SIGTERM web || fail "kill: $(explain)"
for id in three lines $wired web; do
    wait_until 60 stopped $id || fail "$id after its pod's SIGTERM: $(c task ls) $(explain)"
done
deleted three; ended_with 1[34]
deleted web
! grep -q 'exit code [1-9]' "$work/out" || fail "the pod's end: $(cat "$work/out")"
deleted lines
[ -z "$wired" ] || deleted wired
gone() { [ -z "$("$slipway" ps --quiet)$(c task ls -q)$(shims)$(holders)" ]; }
wait_until 60 gone || fail "after the pod's end: $("$slipway" ps) $(c task ls) shims: $(shims)"
wait_until 60 owned ready,ready || fail "the pool after the pod's end: $(owners)"
"$slipway" vf rm fast >/dev/null || fail "vf rm: $(explain)"
if [ -n "$wired" ]; then
    wait_until 60 "$slipway" vf rm nics >/dev/null 2>&1 || fail "an interface does not go back: $("$slipway" vf inspect nics)"
    wait_until 60 no_members || fail "addresses of an interface that went back: $(members)"
    [ -z "$listener" ] || { kill "$listener"; wait "$listener" 2>/dev/null; listener=''; }
    "$slipway" port rm backport >/dev/null && "$slipway" network rm back >/dev/null || fail "network rm: $(explain)"
fi
ok "SIGTERM ends a pod with its containers, and its shim with the last of them; its function goes back"

pod orphan
started orphan "$image" inner sleep 1000
end_shims
wait_until 60 gone || fail "after kill -9 of the shim and its holder: $("$slipway" ps) $(c task ls) $(explain)"
for id in inner orphan; do c container delete $id || fail "container delete: $(explain)"; done
ok "a shim and its holder were killed: containerd cleaned up, and the pod is gone"
# The control group of a pod: below a parent that the pod's configuration names.
late=() parents=()
for root in /sys/fs/cgroup $([ -e /sys/fs/cgroup/cgroup.controllers ] || echo /sys/fs/cgroup/{memory,cpu,pids}); do
    [ ! -w "$root/cgroup.procs" ] || parents+=("$root/slipway-e2e-pods")
done
if [ ${#parents[@]} -gt 0 ]; then
    rmdir "${parents[@]}" 2>/dev/null
    run -d --cgroup /slipway-e2e-pods/late --annotation $kind=sandbox --annotation $of=late "$image" late true 2>"$work/err" &&
        fail "a pod has a control group without a parent"
    grep -q 'there is no control group .*/slipway-e2e-pods: make it first' "$work/err" || fail "no parent: $(cat "$work/err")"
    c task delete late >/dev/null 2>&1
    c container delete late || fail "container delete: $(explain)"
    wait_until 60 gone || fail "after a pod without a parent: $("$slipway" ps) shims: $(shims)"
    mkdir "${parents[@]}" && late=(--cgroup /slipway-e2e-pods/late) || fail "no parent was made"
fi
pod late "${late[@]}"
for parent in "${parents[@]}"; do
    grep -qx "$(vmm late)" "$parent/late/cgroup.procs" || fail "the VMM is in $(cat "/proc/$(vmm late)/cgroup")"
done
if [ ${#parents[@]} -gt 0 ]; then
    run -d --cgroup /slipway-e2e-pods --annotation $kind=sandbox --annotation $of=above "$image" above true 2>"$work/err" &&
        fail "a pod has a control group with others in it"
    grep -q 'other groups are in control group .*/slipway-e2e-pods: ' "$work/err" || fail "groups in it: $(cat "$work/err")"
    c task delete above >/dev/null 2>&1
    c container delete above || fail "container delete: $(explain)"
fi
started late "$image" inner sleep 1000
kill -KILL "$daemon"; wait "$daemon" 2>/dev/null
end_shims
# containerd waits 5 s for a removal, and forgets the pod then.
forgotten() { [ -z "$(c task ls -q)" ]; }
wait_until 60 forgotten || fail "after kill -9 of the shim without a daemon: $(c task ls) $(explain)"
rm -f "$SLIPWAY_RUN_DIR/slipway.sock"
start_daemon
wait_until 60 gone || fail "after the next daemon's start: $("$slipway" ps) $(c task ls) $(explain)"
for id in inner late; do c container delete $id || fail "container delete: $(explain)"; done
# `ps --quiet` does not list a sandbox that has ended, whose group is removed a moment later.
without_parents() {
    local parent
    for parent in "${parents[@]}"; do [ ! -d "$parent" ] || rmdir "$parent" || return; done
}
wait_until 60 without_parents || fail "left in the pod's control group: $(find "${parents[@]}")"
ok "a shim and its holder were killed while no daemon served: the next one removes the pod, and its control group below the parent"

# A pod in a network namespace as a CNI plugin leaves one: programs of the host in it reach the containers'
# ports at 127.0.0.1, as containerd's port forwarding does.
ns=slipway-e2e-pods
ip netns delete $ns 2>/dev/null
ip netns add $ns && ip -n $ns link set lo up && ip -n $ns link add eth0 type veth peer name peer0 &&
    ip -n $ns link set eth0 up && ip -n $ns link set peer0 up && ip -n $ns address add 10.89.0.2/24 dev eth0 ||
    fail "no network namespace"
pod net --with-ns network:/run/netns/$ns
started net "$image" serves sh -c 'while :; do echo hello | nc -l -p 8081; done'
said() { [ "$(nsenter --net=/run/netns/$ns busybox nc -w 5 127.0.0.1 8081 </dev/null)" = hello ]; }
wait_until 60 said || fail "no answer at 127.0.0.1 in the pod's namespace: $(explain)"
grep -q "inet 10.89.0.2/24" <<<"$(inside serves busybox ip address)" || fail "address: $(inside serves busybox ip address)"
kill -KILL "$(vmm net)"
for id in serves net; do wait_until 60 stopped $id || fail "$id after its VMM's death: $(c task ls) $(explain)"; done
for id in serves net; do deleted $id; ended_with 137; done
wait_until 60 gone || fail "after the VMM's death: $("$slipway" ps) $(c task ls) shims: $(shims)"
ip netns delete $ns
ok "a pod has the interface of its network namespace, and its ports there; its VMM was killed: all end with status 137"

if [ -z "${cri:-}" ]; then
    printf 'SKIPPED: e2e/75-pods: crictl needs %s\n' "crictl and the plugins of CNI"
else
    need_cri
    cat >"$work/pod.json" <<END
{"metadata": {"name": "web", "namespace": "default", "uid": "u1", "attempt": 1}, "hostname": "web-0",
 "log_directory": "$work/logs", "dns_config": {"servers": ["192.0.2.53"]},
 "linux": {"security_context": {"namespace_options": {"pid": 1}}}}
END
    first=$(sed -n 's/^Cpus_allowed_list:\s*\([0-9]*\).*/\1/p' /proc/self/status)
    cat >"$work/container.json" <<END
{"metadata": {"name": "server"}, "image": {"image": "docker.io/test/busybox:1"}, "log_path": "server.log",
 "command": ["sh", "-c", "hostname; cat /etc/resolv.conf; while :; do sleep 0.1; done"],
 "linux": {"resources": {"memory_limit_in_bytes": 67108864, "cpuset_cpus": "$first", "unified": {"memory.oom.group": "1"}, "oom_score_adj": 900}, "security_context": {"namespace_options": {"pid": 1}}}}
END
    pod=$(k runp --runtime slipway "$work/pod.json") || fail "crictl runp: $(explain)"
    container=$(k create "$pod" "$work/container.json" "$work/pod.json") || fail "crictl create: $(explain)"
    k start "$container" >/dev/null || fail "crictl start: $(explain)"
    said() { grep -q 192.0.2.53 <<<"$(k logs "$container")"; }
    wait_until 60 said || fail "crictl logs: $(k logs "$container")"
    [ "$(k logs "$container" | head -n 1)" = web-0 ] || fail "crictl logs: $(k logs "$container")"
    [ "$(k exec "$container" cat /sys/fs/cgroup/memory.max)" = 67108864 ] || fail "crictl exec: $(explain)"
    # A host with control groups of version 1 has no such files.
    [ ! -e /sys/fs/cgroup/cgroup.controllers ] || [ "$(k exec "$container" cat /sys/fs/cgroup/memory.oom.group)" = 1 ] ||
        fail "memory.oom.group: $(explain)"
    runs_on() { sed -n 's/^Cpus_allowed_list:\s*//p' "/proc/$vmm/task/"*/status | sort -u; }
    vmm=$(vmm "${pod:0:40}")
    [ "$(runs_on)" = "$first" ] || fail "with a container on CPU $first the VMM runs on $(runs_on)"
    # Nobody is protected better than the process that started it.
    score=$(cat "/proc/$containerd/oom_score_adj"); [ "$score" -gt 900 ] || score=900
    [ "$(k exec "$container" cat /proc/1/oom_score_adj):$(cat "/proc/$vmm/oom_score_adj")" = "$score:$score" ] ||
        fail "OOM scores: $(k exec "$container" cat /proc/1/oom_score_adj), of the VMM $(cat "/proc/$vmm/oom_score_adj"), and not $score"
    k stats "$container" >"$work/out" 2>&1 || fail "crictl stats: $(cat "$work/out")"
    k update --memory 134217728 "$container" >"$work/out" 2>&1 || fail "crictl update: $(cat "$work/out")"
    [ "$(k exec "$container" cat /sys/fs/cgroup/memory.max)" = 134217728 ] || fail "after the update: $(explain)"
    k stop --timeout 1 "$container" >/dev/null && k rm "$container" >/dev/null || fail "crictl stop: $(explain)"
    [ "$(runs_on)" = "$first" ] || fail "after its last container the VMM runs on $(runs_on)"
    k stopp "$pod" >/dev/null && k rmp "$pod" >/dev/null || fail "crictl stopp: $(explain)"
    wait_until 60 gone || fail "after crictl rmp: $("$slipway" ps) shims: $(shims)"
    ok "crictl: a pod and a container in it, log, exec, figures, limits, and the end of both"
fi

# A pod that begins with a template of the node's.
run -d --annotation $kind=sandbox --annotation $of=cold --annotation dev.slipway.template=cold "$image" cold true 2>"$work/err" &&
    fail "a pod began with a template that is not there"
grep -qF 'there is no template "cold": `slipway template create`' "$work/err" || fail "no template: $(cat "$work/err")"
c container delete cold >/dev/null 2>&1
wait_until 60 gone || fail "after a template that is not there: $("$slipway" ps) shims: $(shims)"
if [ "${SLIPWAY_VMM:-}" = native ]; then
    timeout 300 "$slipway" template create warm --memory 256M >/dev/null || fail "template create: $(explain)"
    pod warm --annotation dev.slipway.template=warm
    grep -rqs '"template": *"warm"' "$SLIPWAY_DATA_DIR/sandboxes" || fail "the pod has booted: $("$slipway" ps) $(explain)"
    mkdir "$work/shared" && echo of the host >"$work/shared/from" || fail "no directory to share"
    said=$(member warm --rm --mount "type=bind,src=$work/shared,dst=/data,options=rbind:rw" "$image" inner \
        sh -c 'cp /data/from /data/to; echo in a fork') || fail "a container in a fork: $(explain)"
    [ "$said:$(cat "$work/shared/to")" = "in a fork:of the host" ] || fail "a container in a fork: $said $(explain)"
    c task kill -s SIGKILL warm || fail "kill: $(explain)"
    wait_until 60 stopped warm || fail "warm: $(c task ls) $(explain)"
    deleted warm
    wait_until 60 gone || fail "after a fork: $("$slipway" ps) $(c task ls) shims: $(shims)"
    "$slipway" template rm warm >/dev/null || fail "template rm: $(explain)"
    # A template of the node's own: the second pod is a fork.
    pod first --annotation dev.slipway.template=auto
    made() { "$slipway" template ls --json | grep -q '"name": "auto-'; }
    wait_until 180 made || fail "no template is made: $(explain)"
    pod second --annotation dev.slipway.template=auto
    grep -rqs '"template": *"auto-' "$SLIPWAY_DATA_DIR/sandboxes" || fail "the second pod has booted: $("$slipway" ps) $(explain)"
    [ "$(member second --rm "$image" inner echo in a fork)" = "in a fork" ] || fail "a container in a fork: $(explain)"
    for pod in first second; do
        c task kill -s SIGKILL "$pod" || fail "kill: $(explain)"
        wait_until 60 stopped "$pod" || fail "$pod: $(c task ls) $(explain)"
        deleted "$pod"
    done
    wait_until 60 gone || fail "after forks: $("$slipway" ps) $(c task ls) shims: $(shims)"
    "$slipway" template ls --json | sed -n 's/.*"name": "\(auto-[0-9a-f]*\)".*/\1/p' | xargs "$slipway" template rm >/dev/null ||
        fail "template rm: $(explain)"
    ok "the node makes a template for the annotation dev.slipway.template=auto: the second pod is a fork"
    ok "a pod with the annotation dev.slipway.template is a fork; one whose template is not there is refused"
else
    printf 'SKIPPED: %s\n' "e2e/$test_name: a pod that is a fork needs slipway-vmm on KVM (SLIPWAY_VMM=native): lab/kvm-host --test $test_name SLIPWAY"
fi

# containerd has no Sandbox API before 2.0: these are its calls.
mkdir "$work/sandboxed" || fail "no bundle"
python3 "$(dirname "$0")/sandbox_api.py" "$shim" "$address" "$slipway" "$work/sandboxed" || fail "a pod by the Sandbox API: $(explain)"
ok "a pod by containerd's Sandbox API, without a pause container; one that is refused leaves no shim"

images | xargs -r "$slipway" image rm >/dev/null || fail "images stay"
left() { shims; holders; leftovers; grep -F "$work/" /proc/mounts; sockets | comm -13 "$work/sockets" -; }
nothing_left() { [ -z "$(left)" ]; }
wait_until 60 nothing_left || fail "left: $(left)"
ok "nothing is left: no sandbox, no shim, no mount, no socket"
