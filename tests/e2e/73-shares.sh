#!/usr/bin/env bash
# Directories and files of the host in containers: both sides see each other's changes, what is read-only
# stays so, nothing beside a share is reached, and the process that serves them comes and goes with its
# sandbox and survives the daemon.
. "$(dirname "$0")/lib.sh"
need_node

end_all() {
    umount -l "$work/dir/below" "$work/fixed/below" 2>/dev/null
}
in_sandbox() { timeout 60 "$slipway" exec "$1" -- bash -c "$2"; }

start_keeper
start_daemon

mkdir -p "$work/dir/sub" "$work/dir/below" "$work/fixed/below" "$work/secret"
mount -t tmpfs none "$work/dir/below" && mount -t tmpfs none "$work/fixed/below" || fail "no tmpfs"
echo below >"$work/dir/below/f"; echo below >"$work/fixed/below/f"
echo 'from the host' >"$work/dir/hello"; echo one >"$work/dir/sub/one"
echo fixed >"$work/fixed/f"; echo secret >"$work/secret/s"; echo setting=1 >"$work/app.conf"
ln -s "$work/secret" "$work/dir/out"; ln -s sub/one "$work/dir/in"
head -c 20000000 /dev/urandom >"$work/dir/big"; big=$(sha256sum <"$work/dir/big")
chmod 711 "$work"; chown 1234:1235 "$work/dir/sub/one"

# One sandbox with a directory, one that is read-only, and a file.
timeout 300 "$slipway" run -d --name one -v "$work/dir:/srv/data" -v "$work/fixed:/fixed:ro" -v "$work/app.conf:/etc/app.conf" \
    "$image" -- sleep 100000 >/dev/null || fail "run: $(explain)"
[ "$(servers | wc -l)" = 1 ] || fail "servers of shares: $(servers)"
server=$(servers)

out=$(in_sandbox one 'cat /srv/data/hello /srv/data/in /etc/app.conf /fixed/f; stat -c "%u %g" /srv/data/sub/one; sha256sum </srv/data/big') || fail "reading: $out"
[ "$out" = "from the host
one
setting=1
fixed
1234 1235
$big" ] || fail "reading: $out"
ok "a container reads a directory, a read-only one, and a file of the host, 20 MB included"

in_sandbox one 'set -e; cd /srv/data; echo from the guest >new; mkdir -p d/e; mv new d/e/moved; ln -s moved d/e/link
    ln d/e/moved d/hard; chmod 640 d/e/moved; chown 77:88 d/e/moved; mkfifo d/pipe; touch d/gone; rm d/gone
    head -c 10000000 /dev/zero | tr "\0" x >d/x; truncate -s 5000000 d/x; echo more >>hello; echo setting=2 >/etc/app.conf
    dd if=/dev/zero of=d/hole bs=1M count=4 status=none; fallocate -p -o 0 -l 1M d/hole; sync' || fail "writing"
cd "$work/dir" || fail "no directory"
[ "$(cat d/e/moved)" = 'from the guest' ] && [ "$(readlink d/e/link)" = moved ] || fail "written files: $(ls -lR d)"
[ "$(stat -c '%a %u %g %h' d/e/moved)" = '640 77 88 2' ] || fail "mode and owner: $(stat d/e/moved)"
[ "$(stat -c '%u %g' d/x)" = '0 0' ] && [ "$(stat -c %s d/x)" = 5000000 ] || fail "size and owner: $(stat d/x)"
[ "$(tr -d x <d/x | wc -c)" = 0 ] && [ ! -e d/gone ] && [ -p d/pipe ] || fail "content: $(ls -l d)"
[ "$(tail -n 1 hello)" = more ] && [ "$(cat "$work/app.conf")" = setting=2 ] || fail "appended: $(cat hello)"
cd / || fail "no root"
ok "the host sees what the container writes, renames, links and removes, with its owner and mode"

out=$(in_sandbox one 'setpriv --reuid 1234 --regid 1235 --clear-groups sh -c "echo mine >/srv/data/sub/one; touch /srv/data/sub/new" 2>&1')
grep -q 'Permission denied' <<<"$out" || fail "an ordinary user in a directory of root's: $out"
[ "$(cat "$work/dir/sub/one")" = mine ] || fail "an ordinary user's own file: $(cat "$work/dir/sub/one")"
chmod 777 "$work/dir/sub"
in_sandbox one 'setpriv --reuid 1234 --regid 1235 --clear-groups touch /srv/data/sub/users' || fail "a user's file"
[ "$(stat -c '%u %g' "$work/dir/sub/users")" = '1234 1235' ] || fail "whose it is: $(stat "$work/dir/sub/users")"
ok "permissions hold for the container's users, and new files are theirs"

echo 'changed on the host' >"$work/dir/hello"; echo late >"$work/dir/late"
seen() { [ "$(in_sandbox one 'cat /srv/data/hello /srv/data/late')" = 'changed on the host
late' ]; }
wait_until 20 seen || fail "changes of the host: $(in_sandbox one 'cat /srv/data/hello')"
ok "the container sees what the host changes"

for command in 'echo x >/fixed/f' 'touch /fixed/g' 'rm /fixed/f' 'mkdir /fixed/d' 'chmod 777 /fixed/f' \
    'mount -o remount,rw /fixed; touch /fixed/g' 'touch /fixed/below/g'; do
    in_sandbox one "$command" >/dev/null 2>&1 && fail "a read-only share was changed: $command"
done
[ "$(cd "$work/fixed" && find . -type f | sort | tr '\n' ' '; cat f)" = './below/f ./f fixed' ] || fail "a read-only share: $(ls -R "$work/fixed")"
ok "a read-only share is not changed, nor what is mounted below it"

out=$(in_sandbox one 'cat /srv/data/below/f; echo new >/srv/data/below/new; stat -c %d /srv/data /srv/data/below | uniq | wc -l') || fail "below a share: $out"
[ "$out" = 'below
2' ] && [ "$(cat "$work/dir/below/new")" = new ] || fail "below a share: $out"
ok "what is mounted below a share is there, as another file system"

out=$(in_sandbox one 'cat /srv/data/out/s /srv/data/../../etc/shadow.host /srv/data/sub/../../dir/hello 2>&1; ls /srv/data/..; mknod /srv/data/null c 1 3 2>&1')
grep -q secret <<<"$out" && fail "a link led out of a share: $out"
[ ! -e "$work/dir/null" ] || fail "a device node: $out"
[ "$(ls "/proc/$server/root" | tr '\n' ' ')" = 'proc shares ' ] || fail "the server's files: $(ls "/proc/$server/root")"
[ "$(ls "/proc/$server/root/shares" | tr '\n' ' ')" = '0 1 2 ' ] || fail "the server's shares: $(ls "/proc/$server/root/shares")"
[ "$(ls "/proc/$server/root/shares/2")" = file ] || fail "the server's file: $(ls "/proc/$server/root/shares/2")"
grep -q '^Seccomp:[[:space:]]*2' "/proc/$server/status" || fail "no filter: $(cat "/proc/$server/status")"
grep -q '^CapBnd:[[:space:]]*00000000000000db$' "/proc/$server/status" || fail "rights: $(grep Cap "/proc/$server/status")"
for namespace in mnt net pid ipc uts; do
    [ "$(readlink "/proc/$server/ns/$namespace")" != "$(readlink "/proc/self/ns/$namespace")" ] || fail "$namespace is the host's"
done
ok "links and device nodes lead nowhere, and the server has the shares and few rights"

end_daemon KILL
start_daemon
is_state one running || fail "after the daemon's end: $("$slipway" ps; explain)"
[ "$(servers)" = "$server" ] || fail "after the daemon's end: servers $(servers)"
[ "$(in_sandbox one 'echo again >/srv/data/again; cat /srv/data/late')" = late ] && [ "$(cat "$work/dir/again")" = again ] \
    || fail "a share after the daemon's end: $(explain)"
ok "a share goes on when the daemon is killed"

"$slipway" run -d --accel hollow --name plain "$image" -- sleep 100000 >/dev/null || fail "run: $(explain)"
[ "$(servers)" = "$server" ] || fail "a sandbox without shares has a server: $(servers)"
ok "a sandbox without shares has no server"

timeout 60 "$slipway" stop --time 1 one >/dev/null || fail "stop: $(explain)"
wait_until 20 no_server || fail "left behind: $(servers)"
"$slipway" rm one >/dev/null || fail "rm"
ok "the server ends with its sandbox, whose daemon was another"

timeout 300 "$slipway" run -d --name two -v "$work/dir:/data" "$image" -- sleep 100000 >/dev/null || fail "run: $(explain)"
kill -KILL "$(servers)" || fail "no server"
wait_until 20 no_server || fail "it does not end"
[ "$(in_sandbox two 'echo alive')" = alive ] || fail "a sandbox whose server was killed: $("$slipway" ps; explain)"
wait_until 20 grep -q 'the server of its shares has ended' "$work/daemon.log" || fail "the log says nothing: $(explain)"
# An access waits; the command that waits for it ends no earlier when it is asked to.
command timeout -s KILL 10 "$slipway" exec two -- ls /data >/dev/null 2>&1 && fail "a share without a server"
[ "$(in_sandbox two 'echo still')" = still ] || fail "a sandbox with a waiting process: $(explain)"
timeout 60 "$slipway" rm --force two >/dev/null || fail "rm --force of such a sandbox: $(explain)"
ok "a killed server takes its shares along, and not the sandbox"

refused() {
    local out
    out=$("$slipway" run --rm "${@:2}" "$image" -- true 2>&1) && fail "accepted: ${*:2}"
    grep -qF -- "$1" <<<"$out" || fail "${*:2} said: $out"
}
refused 'No such file' -v "$work/absent:/data"
refused 'expected HOST:/PATH' -v "$work/dir"
refused 'neither a directory nor' -v /dev/null:/data
refused "own is there" -v "$work/dir:/proc/x"
refused 'two with this path' -v "$work/dir:/data" -v "$work/fixed:/data"
ok "what cannot be shared is refused in a line"

"$slipway" rm --force --all >/dev/null
wait_until 20 no_server || fail "left behind: $(servers)"
