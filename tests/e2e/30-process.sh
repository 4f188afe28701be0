#!/usr/bin/env bash
# A process in a sandbox behaves as one: status, signals, terminal, streams, detaching. What a process says and gets is the same
# for one that has its sandbox for itself and for one in a pod, so that several are in one pod.
. "$(dirname "$0")/lib.sh"
need_node

"$slipway" pod create pod >/dev/null || fail "pod create"
in_pod() { "$slipway" run --pod pod --rm "$@"; }
out=$(in_pod -e A=1 -e B='two words' -w /usr -u nobody "$image" -- \
    sh -c 'echo "$A|$B|$(pwd)|$(id -un)"; exit 3')
status=$?
[ "$status" = 3 ] || fail "exit 3 gave $status"
ok "exit status 3"
[ "$out" = "1|two words|/usr|nobody" ] || fail "environment, directory, user: $out"
ok "environment, working directory, user"
in_pod "$image" -- /no/such/program 2>"$work/err"; [ $? = 127 ] || fail "127: $(cat "$work/err")"
ok "a missing program gives 127: $(cat "$work/err")"
in_pod "$image" -- /etc/passwd 2>/dev/null; [ $? = 126 ] || fail "not executable"
ok "a file that is no program gives 126"

"$slipway" run --pod pod --name term "$image" -- sh -c 'trap "echo caught; exit 7" TERM; echo ready; while :; do sleep 0.1; done' \
    >"$work/term" & pid=$!
wait_until 60 grep -q ready "$work/term" || fail "not ready"
kill -TERM "$pid"; wait "$pid"; status=$?
[ "$status" = 7 ] && grep -q caught "$work/term" || fail "SIGTERM: status $status, $(cat "$work/term")"
"$slipway" rm pod/term >/dev/null || fail "rm"
ok "SIGTERM to the command reaches the process"

bytes=$(head -c 5000000 /dev/urandom | tee "$work/in" | in_pod -i "$image" -- \
    sh -c 'sha256sum >&2; head -c 20000000 /dev/zero | tr "\0" x; echo end >&2' 2>"$work/err" | sha256sum)
want=$(head -c 20000000 /dev/zero | tr '\0' x | sha256sum)
[ "$bytes" = "$want" ] && grep -q end "$work/err" || fail "20 MB came as another stream"
ok "20 MB through standard output arrive whole"
grep -qxF "$(sha256sum <"$work/in")" "$work/err" || fail "standard input: $(cat "$work/err")"
ok "5 MB through standard input arrive whole"

# In a sandbox of its own, as a user has it.
python3 - "$slipway" "$image" "$slower" <<'P' || fail "no usable shell with -it"
import fcntl, os, pty, re, select, struct, sys, termios, time
pid, fd = pty.fork()
if pid == 0:
    os.execv(sys.argv[1], [sys.argv[1], "run", "--rm", "-it", sys.argv[2], "--", "sh"])
fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 132, 0, 0))
seen = b""
def expect(pattern, seconds, again=None):
    """Reads until the pattern has come, for so many seconds of a machine that does nothing else; types `again` every 2 s meanwhile."""
    global seen
    end, next_time = time.time() + seconds * int(sys.argv[3]), time.time() + 2
    while not re.search(pattern, seen):
        ready, _, _ = select.select([fd], [], [], 0.2)
        if ready:
            try: seen += os.read(fd, 65536)
            except OSError: sys.exit(f"it ended without {pattern!r}: {seen!r}")
        if time.time() > end: sys.exit(f"no {pattern!r} in {seen!r}")
        if again and time.time() > next_time:
            os.write(fd, again)
            next_time = time.time() + 2
    seen = re.split(pattern, seen, maxsplit=1)[-1]
def type(text): os.write(fd, text)
expect(rb"[#$] ", 120)
type(b"tty; echo size:$(stty size)\n"); expect(rb"/dev/pts/\d+", 60); expect(rb"size:40 132\r\n[#$] ", 60)
# It says that it is there before it sleeps; interrupted, the shell goes on.
type(b"sh -c 'echo is; exec sleep 1000'; echo inter''rupted\n"); expect(rb"\nis\r\n", 60)
expect(rb"interrupted|\^C\r\n", 60, again=b"\x03")
fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 100, 0, 0))
expect(rb"size:50 100", 60, again=b"echo size:$(stty size)\n")
type(b"exit 5\n")
_, status = os.waitpid(pid, 0)
sys.exit(0 if os.waitstatus_to_exitcode(status) == 5 else f"status {status}")
P
ok "-it: a terminal of the right size, ^C, resize, exit status"

"$slipway" run -d --name back "$image" -- \
    sh -c 'trap "exit 0" TERM; i=0; while :; do echo line $i; i=$((i+1)); sleep 0.2; done' >/dev/null || fail "-d"
"$slipway" logs -f back >"$work/follow" & follower=$!
wait_until 20 grep -q 'line 5' "$work/follow" || fail "logs -f: $(cat "$work/follow")"
[ "$("$slipway" exec back cat /proc/1/comm)" = sh ] || fail "exec"
"$slipway" exec back sh -c 'exit 4'; [ $? = 4 ] || fail "exec's status"
[ "$(echo typed | "$slipway" exec -i back cat)" = typed ] || fail "exec -i"
# A pipe would not hold so much output of a command that nobody attaches to.
"$slipway" exec -d back sh -c 'head -c 1000000 /dev/zero; echo there >/tmp/detached; exec sleep 1000' || fail "exec -d"
detached() { [ "$("$slipway" exec back cat /tmp/detached 2>/dev/null)" = there ]; }
wait_until 60 detached || fail "a detached command does not go on"
"$slipway" exec -d back nosuchprog 2>"$work/err"; [ $? = 127 ] || fail "exec -d of no program: $(cat "$work/err")"
ok "exec -d returns at once, and the command goes on"
# Files go in and out, by docker's rules for their places.
mkdir -p "$work/tree/sub"; head -c 3000000 /dev/urandom >"$work/tree/sub/big"; ln -s sub/big "$work/tree/link"
"$slipway" cp "$work/tree" back:/tmp || fail "cp of a directory into one that is there"
"$slipway" cp "$work/tree/." back:tmp/new || fail "cp of what is in a directory"
[ "$("$slipway" exec back sh -c 'cd /tmp; readlink tree/link; stat -c %u new/sub; sha256sum <new/link')" = "sub/big
0
$(sha256sum <"$work/tree/sub/big")" ] || fail "cp into a sandbox: $("$slipway" exec back ls -lR /tmp)"
"$slipway" cp back:/tmp/tree "$work/came" && diff -r "$work/tree" "$work/came" || fail "cp out of a sandbox"
"$slipway" cp back:/tmp/tree/link "$work/came/link2" && [ "$(readlink "$work/came/link2")" = sub/big ] || fail "cp of a link"
"$slipway" cp -L back:/tmp/tree/link "$work/followed" && cmp "$work/followed" "$work/tree/sub/big" || fail "cp -L"
mkdir "$work/aim"; ln -s aim "$work/sent"
! "$slipway" cp back:/tmp/tree/sub/big "$work/sent" 2>"$work/err" && grep -q 'is a symbolic link' "$work/err" && [ ! -e "$work/aim/big" ] ||
    fail "cp to a link: $(cat "$work/err")"
"$slipway" cp back:/tmp/tree/sub/big "$work/sent/" && cmp "$work/aim/big" "$work/tree/sub/big" || fail "cp to the directory of a link"
tar -C "$work" -c tree | "$slipway" cp - back:/mnt || fail "cp of an archive"
[ "$("$slipway" cp back:/mnt/tree - | tar -t | sort | tr '\n' ' ')" = "tree/ tree/link tree/sub/ tree/sub/big " ] || fail "cp to an archive"
"$slipway" exec back mkfifo /tmp/tree/pipe
"$slipway" cp back:/tmp/tree/. "$work/came" 2>"$work/err" && grep -q 'left out 1 .* pipe$' "$work/err" && [ ! -e "$work/came/pipe" ] ||
    fail "cp of a pipe: $(cat "$work/err")"
! "$slipway" cp back:/tmp/none "$work/none" 2>"$work/err" && grep -q '/tmp/none: No such file' "$work/err" || fail "cp of nothing: $(cat "$work/err")"
! "$slipway" cp "$work/tree" back:/no/such 2>"$work/err" && [ "$(grep -c . "$work/err")" = 1 ] || fail "cp to nowhere: $(cat "$work/err")"
ok "cp: files, directories, links and archives, into a sandbox and out of it"
# Its VMM is in a cage: nothing of the starter's environment, nothing of the host to name.
vmm=$(vmm_of back)
runs "$vmm" || fail "no VMM of back: $vmm"
[ "$(wc -c <"/proc/$vmm/environ")" = 0 ] || fail "the VMM has an environment: $(tr '\0' ' ' <"/proc/$vmm/environ")"
for namespace in net mnt pid ipc uts cgroup; do
    [ "$(readlink "/proc/$vmm/ns/$namespace")" != "$(readlink "/proc/self/ns/$namespace")" ] ||
        fail "the VMM shares its $namespace namespace with the host"
done
for place in root cwd; do
    [ -z "$(ls -A "/proc/$vmm/$place/")" ] || fail "the VMM's $place holds $(ls -A "/proc/$vmm/$place/")"
done
[ "$(wc -l <"/proc/$vmm/mounts")" = 1 ] || fail "the VMM's mounts: $(cat "/proc/$vmm/mounts")"
grep -qx "$(printf 'Seccomp_filters:\t2')" "/proc/$vmm/status" || fail "$(grep Seccomp "/proc/$vmm/status")"
for fd in "/proc/$vmm/fd/"*; do
    [ ! -d "$fd" ] || fail "the VMM has a directory open: $(readlink "$fd")"
done
other=$(vmm_of pod)
runs "$other" || fail "no VMM of the pod: $other"
for namespace in net mnt pid ipc; do
    [ "$(readlink "/proc/$vmm/ns/$namespace")" != "$(readlink "/proc/$other/ns/$namespace")" ] ||
        fail "two VMMs share a $namespace namespace"
done
"$slipway" rm --force pod >/dev/null || fail "rm"
ok "a VMM has no environment, no files, and namespaces and a filter of its own"
"$slipway" stats back | grep -q back || fail "stats"
"$slipway" stats -f back >"$work/stats" & stats=$!
twice() { [ "$(grep -c back "$work/stats")" -ge 2 ]; }
wait_until 20 twice || fail "stats -f: $(cat "$work/stats")"
kill "$stats"; wait "$stats" 2>/dev/null
! grep -q "$(printf '\033')" "$work/stats" || fail "stats -f sends escape codes to a file: $(cat -v "$work/stats")"
ok "stats -f repeats itself, without escape codes where there is no terminal"
"$slipway" inspect back | python3 -c 'import json,sys; assert json.load(sys.stdin)[0]["name"] == "back"' || fail "inspect"
"$slipway" stop back >/dev/null || fail "stop"
wait "$follower" || fail "logs -f did not end well"
is_state back exited || fail "after stop: $("$slipway" ps)"
[ "$("$slipway" logs --tail 1 back)" = "$(tail -1 "$work/follow")" ] || fail "logs --tail"
[ "$("$slipway" logs --tail all back)" = "$("$slipway" logs back)" ] || fail "logs --tail all"
"$slipway" rm back >/dev/null || fail "rm"
ok "-d with logs -f, exec, stats, inspect, stop, rm from other commands"
