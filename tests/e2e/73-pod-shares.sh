#!/usr/bin/env bash
# Directories and files of the host in containers of a pod: they come with a container while the pod runs, and go with it;
# containers that have the same directory have the same files; a pod without them has no process for them.
. "$(dirname "$0")/lib.sh"
need_node

end_all() {
    umount -l "$work/dir/below" "$work/dir/late" 2>/dev/null
    umount -l "$work/dir" 2>/dev/null
}
s() { timeout 120 "$slipway" "$@"; }
in_pod() { s exec "pod/$1" -- sh -c "$2"; }
add() { s run -d --pod pod --name "$1" "${@:2}" "$image" -- sleep 100000 >/dev/null || fail "container $1: $(explain)"; }
# Numbers of the trees that the server has.
trees() { ls "/proc/$server/root/shares" | tr '\n' ' '; }

start_keeper
start_daemon
chmod 711 "$work"; mkdir -p "$work/dir" "$work/fixed"
# A mount that shares its changes with others, as those of a host do.
mount -t tmpfs none "$work/dir" && mount --make-shared "$work/dir" || fail "no tmpfs"
mkdir "$work/dir"/{below,late}; mount -t tmpfs none "$work/dir/below" || fail "no tmpfs"
echo host >"$work/dir/hello"; echo below >"$work/dir/below/f"; echo fixed >"$work/fixed/f"; echo conf >"$work/conf"

s pod create pod --memory 512M >/dev/null || fail "no pod: $(explain)"
add plain
no_server || fail "a pod without shares has a server: $(servers)"
ok "a pod without shares has no server"

add a -v "$work/dir:/data" -v "$work/fixed:/fixed:ro" -v "$work/conf:/etc/app.conf"
server=$(servers)
[ "$(wc -w <<<"$server")" = 1 ] || fail "servers: $server"
out=$(in_pod a 'cat /data/hello /data/below/f /fixed/f /etc/app.conf; echo a >/data/a; echo b >/data/below/b; touch /fixed/x 2>&1') && fail "a read-only share was changed"
[ "$(head -n 4 <<<"$out")" = 'host
below
fixed
conf' ] || fail "reading: $out"
[ "$(cat "$work/dir/a" "$work/dir/below/b")" = 'a
b' ] && [ ! -e "$work/fixed/x" ] || fail "writing: $(ls -R "$work/dir" "$work/fixed")"
in_pod plain '! [ -e /data ] && ! grep -q virtiofs /proc/mounts' || fail "a neighbour has it too"
ok "a container gets directories and a file while its pod runs, and its neighbour does not"

add b -v "$work/dir:/data"
[ "$(servers)" = "$server" ] || fail "servers: $(servers)"
[ "$(trees)" = '0 1 2 ' ] || fail "trees: $(trees)"
share='import mmap, sys, time
f = open("/data/map", "r+b"); m = mmap.mmap(f.fileno(), 4096)'
in_pod a 'head -c 4096 /dev/zero >/data/map' || fail "no file to map"
in_pod a "exec python3 -c '$share
m[0:5] = b\"hello\"
while m[8:11] != b\"bye\": time.sleep(0.01)'" & mapper=$!
in_pod b "exec timeout 300 python3 -c '$share
while m[0:5] != b\"hello\": time.sleep(0.01)
m[8:11] = b\"bye\"'" || fail "b does not see what a maps"
wait "$mapper" || fail "a does not see what b maps"
ok "containers with the same directory have the same files, mapped ones too, and one server"

for _ in 1 2; do
    end_daemon KILL
    start_daemon
    [ "$(in_pod a 'cat /fixed/f')" = fixed ] || fail "after a kill: $(explain)"
done
add c -v "$work/fixed:/fixed:ro" -v "$work/dir:/data:ro,rslave"
[ "$(servers)" = "$server" ] && [ "$(trees)" = '0 1 2 3 ' ] || fail "after two kills: $(servers), trees $(trees)"
in_pod c 'cat /data/late/f' >/dev/null 2>&1 && fail "what is to come is there"
mount -t tmpfs none "$work/dir/late" || fail "no tmpfs"
echo late >"$work/dir/late/f"
late() { [ "$(in_pod c 'cat /data/late/f' 2>/dev/null)" = late ]; }
wait_until 20 late || fail "what the host mounts later: $(in_pod c 'ls -R /data')"
in_pod a '! [ -e /data/late/f ]' || fail "a has it without being asked to"
ok "shares go on when the daemon is killed, others come after that, and what the host mounts later where it was asked for"

has_trees() { [ "$(trees)" = "$1" ]; }
s stop --time 1 pod/a >/dev/null && s rm pod/a >/dev/null || fail "a does not go: $(explain)"
wait_until 20 has_trees '0 1 3 ' || fail "after a: trees $(trees)"
[ "$(in_pod b 'cat /data/hello')" = host ] || fail "b lost its share"
s rm -f pod/b pod/c >/dev/null || fail "rm: $(explain)"
wait_until 20 has_trees '' || fail "after all: trees $(trees)"
umount "$work/dir/late" "$work/dir/below" || fail "the host's mounts are held"
add d -v "$work/dir:/data"
[ "$(in_pod d 'cat /data/hello; ls -A /data/below')" = host ] || fail "d: $(in_pod d 'ls -R /data')"
ok "a share goes with the last container that has it"

refused() {
    local out
    out=$(s run --pod pod --rm "${@:2}" "$image" -- true 2>&1) && fail "accepted: ${*:2}"
    grep -qF -- "$1" <<<"$out" || fail "${*:2} said: $out"
}
refused 'own is there' -v "$work/dir:/sys/x"
kill -KILL "$server"
wait_until 20 no_server || fail "it does not end"
[ "$(in_pod plain 'echo alive')" = alive ] || fail "a container without shares: $(s ps; explain)"
refused "server of the pod's shares has ended" -v "$work/dir:/data"
s rm -f pod >/dev/null || fail "rm of such a pod: $(explain)"
wait_until 20 no_server || fail "left behind: $(servers)"
[ -z "$(leftovers)" ] || fail "left over: $(leftovers)"
ok "what cannot be shared is refused, also when the server was killed, and the pod leaves nothing"
