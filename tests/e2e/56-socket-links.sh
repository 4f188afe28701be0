#!/usr/bin/env bash
# Two nodes: docs/sockets.md, "Two nodes on one host", command for command, then what the engines do when
# certificates, the other engine or the wire are not what they should be. In namespaces of the test's own.
if [ "$(id -u)" = 0 ] && [ -z "${SLIPWAY_E2E_NAMESPACE:-}" ]; then
    # A process namespace as well: whatever the test started ends with it.
    SLIPWAY_E2E_NAMESPACE=1 exec unshare --net --mount --pid --fork --mount-proc --kill-child -- "$0" "$@"
fi
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
[ "$(id -u)" = 0 ] || skip "root, for network namespaces"
for program in ip ss openssl python3 curl; do command -v "$program" >/dev/null || skip "$program"; done
for program in redis-server redis-benchmark; do command -v "$program" >/dev/null || skip "$program"; done
[ -x "$slipway" ] || fail "$slipway is not built; \`make build\` builds it"
folder=$(dirname "$(readlink -f "$slipway")")
[ -f "$folder/libslipway.so" ] || fail "$folder/libslipway.so is not built; \`make build\` builds it"
PATH=$folder:$PATH
trap 'status=$?; cd /; rm -rf "$work"; exit "$status"' EXIT
# Names of network namespaces that nobody else sees.
mkdir -p /run/netns
mount -t tmpfs tmpfs /run/netns
cd "$work" || exit 1

# block N: the Nth of the section's commands.
block() {
    awk -v wanted="$1" '/^## / { here = $0 == "## Two nodes on one host" }
        here && /^```sh/ { inside = ++count == wanted; next }
        /^```/ { inside = 0 }
        inside' "$top/docs/sockets.md"
}
[ "$(block 7 | wc -l) $(block 8 | wc -l)" = "3 0" ] || fail "the section of docs/sockets.md has not 7 blocks"

on() { local node=$1; shift; ip netns exec "node$node" "$@"; }
# run NODE COMMAND…: under the library.
run() { local node=$1; shift; on "$node" slipway socket run --engine "socket$node.sock" -- "$@"; }
# server NODE PORT: the process that listens there.
server() { on "$1" ss -Hltnp "sport = :$2" | sed -n 's/.*pid=\([0-9]*\).*/\1/p'; }
listens() { [ -n "$(server "$@")" ]; }
has_ended() { ! runs "$1"; }
serves() { [ -S "socket$1.sock" ] && listens "$1" 4790; }
# Bytes that the first node's interface has carried, both ways.
carried() { on 1 cat /proc/net/dev | awk '$1 == "veth1:" { printf "%.0f", $2 + $10 }'; }
connections() { on 1 ss -Htn state established '( dport = :4790 or sport = :4790 )' | wc -l; }
logs() { cat "engine$1.log"; }

for n in 1 2 3; do eval "$(block $n)" >"block$n.out" 2>&1 || fail "block $n: $(cat "block$n.out")"; done
eval "$(block 4)"
for n in 1 2; do wait_until 20 serves $n || fail "engine $n: $(logs $n)"; done
ok "certificates by openssl, and an engine in each of two network namespaces"
# The document has the reader wait for a second.
eval "$(block 5 | sed 's/^sleep 1$/wait_until 20 engine_lists socket2.sock 6379/')" >benchmark 2>&1 || fail "redis-benchmark: $(cat benchmark redis.log engine?.log)"
grep -q 'GET: .* requests per second' benchmark || fail "redis-benchmark: $(cat benchmark)"
ok "redis-benchmark from node to node: $(tr '\r' '\n' <benchmark | grep 'per second' | tr '\n' ' ')"
eval "$(block 6)" >shown 2>&1 || fail "what engines say: $(cat shown)"
grep -q 192.0.2.2:4790 shown || fail "no connection of the engines': $(cat shown)"
[ "$(connections)" -le 2 ] || fail "the streams have $(connections) connections: $(cat shown)"
! on 1 ss -Htn | grep -q :6379 || fail "redis is asked through the kernel's sockets"
ok "50 clients of redis shared $(connections) connection of the engines'"

# What the wire carries is looked at: nginx sends a file whose every line is a marker.
cat >capture.py <<'PYTHON'
import signal, socket, sys
sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
sock.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE
sock.bind((sys.argv[1], 0))
print("ready", flush=True)
on = True
def stop(*_):
    global on
    on = False
signal.signal(signal.SIGTERM, stop)
sock.settimeout(0.2)
total = marked = 0
while True:
    try:
        frame = sock.recv(1 << 17)
    except TimeoutError:
        # What the interface has had until it was told to stop is read.
        if on: continue
        break
    total += len(frame)
    marked += frame.count(b"THIS IS PLAIN TEXT")
print(total, marked)
PYTHON
# look FILE COMMAND…: bytes of frames on the wire meanwhile, and how often the marker is in them.
look() {
    local file=$1 capture
    shift
    on 1 python3 capture.py veth1 >"$file" 2>&1 &
    capture=$!
    wait_until 20 grep -q ready "$file" || fail "no capture: $(cat "$file")"
    "$@" || return 1
    on 1 pkill -TERM -P "$capture" 2>/dev/null || kill -TERM "$capture"
    wait "$capture"
    read -r total marked < <(tail -n 1 "$file")
}
# Random bytes as well, since what is the same again and again is no test of order.
{ yes 'THIS IS PLAIN TEXT' | head -c 2000000; head -c 2000000 /dev/urandom; } >file
if command -v nginx >/dev/null; then
    cat >nginx.conf <<CONF
daemon off; user root; worker_processes 1; pid $work/nginx.pid; error_log stderr;
events { worker_connections 256; }
http {
    access_log off; sendfile on;
    client_body_temp_path $work/t1; proxy_temp_path $work/t2; fastcgi_temp_path $work/t3;
    uwsgi_temp_path $work/t4; scgi_temp_path $work/t5;
    server { listen 192.0.2.2:8080; root $work; }
}
CONF
    run 2 nginx -e stderr -c "$work/nginx.conf" 2>nginx.log &
    wait_until 20 engine_lists socket2.sock 8080 || fail "nginx does not listen: $(cat nginx.log)"
    look by-engines run 1 timeout 120 curl -sS -o got http://192.0.2.2:8080/file || fail "curl: $(cat engine?.log)"
    [ "$(sha256sum <got)" = "$(sha256sum <file)" ] || fail "nginx's file is another one"
    [ "$total" -gt 4000000 ] || fail "the wire carried $total bytes of 4 million"
    [ "$marked" = 0 ] || fail "the wire carried the marker $marked times"
    look by-kernel on 1 timeout 120 curl -sS -o got http://192.0.2.2:8080/file || fail "curl by the kernel's sockets"
    [ "$marked" -gt 10000 ] || fail "a marker that nobody enciphered was not seen: $marked"
    ok "curl has nginx's file whole; of its plain text nothing is on the wire (without the library: $marked times)"
else
    say "SKIPPED: e2e/$test_name (nginx): needs nginx"
fi

if command -v iperf3 >/dev/null; then
    run 2 iperf3 -s -B 192.0.2.2 >iperf3.log 2>&1 &
    wait_until 20 engine_lists socket2.sock 5201 || fail "iperf3 does not listen: $(cat iperf3.log)"
    for how in '' -R '-P 16' --bidir; do
        before=$(carried)
        # shellcheck disable=SC2086 # words
        of_iperf iperf.out run 1 timeout 300 iperf3 -c 192.0.2.2 -t 1 $how ||
            fail "iperf3 $how: $(tail -n 3 iperf.out) $(logs 1)"
        [ "$(connections)" -le 2 ] || fail "iperf3 $how: the engines have $(connections) connections"
        [ $(($(carried) - before)) -gt 1000000 ] || fail "iperf3 $how: the wire carried nothing"
        ok "iperf3 $how: $(grep receiver iperf.out | tail -n 1 | tr -s ' ' | cut -d ' ' -f 5-8)"
    done
else
    say "SKIPPED: e2e/$test_name (iperf3): needs iperf3"
fi

# Failures. A server that keeps what connects, and a client that says what becomes of it.
cat >keep.py <<'PYTHON'
import socket
server = socket.create_server(("192.0.2.2", 9000), backlog=64)
kept = []
while True:
    kept.append(server.accept()[0])
    kept[-1].sendall(b"hello")
PYTHON
cat >meet.py <<'PYTHON'
import errno, os, socket, sys, time
began = time.monotonic()
def end(error):
    print(errno.errorcode.get(error.errno, error), round(time.monotonic() - began, 2), flush=True)
    sys.exit()
sock = socket.socket()
try:
    sock.connect(("192.0.2.2", 9000))
    assert sock.recv(5) == b"hello"
except OSError as error:
    end(error)
print("connected", flush=True)
if len(sys.argv) > 1:
    began = time.monotonic()
    try:
        end(OSError(0, str(sock.recv(1))))
    except OSError as error:
        # When it came, in the clock of the shell that knows when its cause did.
        print(errno.errorcode.get(error.errno, error), time.time(), flush=True)
PYTHON
meet() { run 1 timeout 300 python3 meet.py "$@" 2>&1; }
# A new server: one that listened before its engine did is the kernel's alone.
keep() {
    end 2 9000 KILL
    run 2 python3 keep.py >keep.log 2>&1 &
    wait_until 20 engine_lists socket2.sock 9000 || fail "no server: $(cat keep.log)"
}
# end NODE PORT SIGNAL: ends who listens there.
end() {
    local pid
    pid=$(server "$1" "$2")
    [ -n "$pid" ] || return 0
    kill "-$3" "$pid"
    wait_until 20 has_ended "$pid" || fail "the server at port $2 of node $1 does not end"
}
# engine NODE [LINKS]: another one in place of the one that is there.
engine() {
    end "$1" 4790 TERM
    # A killed engine leaves its socket, and a program to which nobody answers there starts an engine of its own.
    rm -f "socket$1.sock"
    ip netns exec "node$1" slipway socket engine --socket "socket$1.sock" --policy "policy$1.toml" --links "${2:-links$1.toml}" \
        2>"engine$1.log" &
    wait_until 20 serves "$1" || fail "engine $1: $(logs "$1")"
}
# told WHAT ERRNO PATTERN: what a program that connects is told, and the one line of the log that says why.
told() {
    local said
    said=$(meet)
    [[ ${said% *} =~ ^($2)$ ]] || fail "$1: the program is told '$said', not $2: $(logs 1)"
    wait_until 10 grep -q "$3" engine1.log || fail "$1: the log does not say so: $(logs 1)"
    ok "$1: ${said/ / after } s; log: $(grep "$3" engine1.log | tail -n 1 | sed 's/.*WARN *//')"
}
# lost WHAT COMMAND…: a connection whose engines the command parts is reset. How soon is printed: a second after a death, and 3
# seconds of silence after a cut, on a machine that does nothing else.
lost() {
    local what=$1 client began
    shift
    : >met
    meet wait >met &
    client=$!
    wait_until 20 grep -q connected met || fail "$what: no connection: $(cat met) $(logs 1)"
    began=$(date +%s.%N)
    "$@"
    wait "$client"
    python3 -c 'import sys
errno, when = sys.argv[1].split()[-2:]
assert errno == "ECONNRESET"
print(round(float(when) - float(sys.argv[2]), 3))' "$(cat met)" "$began" >when 2>&1 ||
        fail "$what: $(cat met when) $(logs 1)"
    ok "$what: ECONNRESET after $(cat when) s"
}
works() { [ "$(meet)" = connected ]; }

keep
works || fail "a connection that nothing is wrong with: $(meet) $(logs 1)"
lost "the other engine killed" end 2 4790 KILL
told "no engine there" ECONNREFUSED 'refused.*node2.example'
engine 2
keep
wait_until 10 works || fail "with the next engine there: $(meet) $(logs 1)"
ok "the next engine there takes new connections"

lost "the wire cut" ip -n node2 link set veth2 down
sed 's/^listen/handshake_ms = 1000\nlisten/' links1.toml >hasty.toml
engine 1 hasty.toml
# The kernel may know already that nobody has the address.
told "nobody reached" 'ETIMEDOUT|EHOSTUNREACH' 'handshake.*node2.example'
ip -n node2 link set veth2 up
wait_until 20 works || fail "the wire mended: $(meet) $(logs 1)"
ok "the wire mended: connections as before"

# Certificates that are none: of yesterday, of somebody else.
openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=node1.example \
    -addext subjectAltName=DNS:node1.example -keyout old.key -out old.csr 2>/dev/null
openssl x509 -req -in old.csr -copy_extensions copy -CA ca.pem -CAkey ca.key -days 0 -out old.pem 2>/dev/null
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=stranger \
    -keyout stranger.key -out stranger.pem 2>/dev/null
openssl x509 -req -in old.csr -copy_extensions copy -CA stranger.pem -CAkey stranger.key -days 1 \
    -out strange.pem 2>/dev/null
sleep 2
for which in old strange; do
    sed "s/node1.pem/$which.pem/; s/node1.key/old.key/" links1.toml >$which.toml
    engine 1 $which.toml
    : >engine2.log
    case $which in
        old) told "an expired certificate" EHOSTUNREACH 'xpired.*node2.example' ;;
        strange) told "a certificate of another authority" EHOSTUNREACH 'UnknownCA.*node2.example' ;;
    esac
    grep -c . engine2.log >lines
    [ "$(cat lines)" -le 8 ] || fail "the other engine's log has $(cat lines) lines: $(logs 2)"
done
sed 's/ca.pem/stranger.pem/' links1.toml >distrust.toml
engine 1 distrust.toml
told "the other engine's certificate of another authority" EHOSTUNREACH 'UnknownIssuer.*node2.example'
engine 1
wait_until 10 works || fail "with good certificates again: $(meet) $(logs 1)"
ok "good certificates again: connections as before"

# Files are read anew by a running engine: all of them, or nothing is changed.
reload() { slipway socket reload --engine "socket$1.sock"; }
# refused WHAT PATTERN: a reload says what is wrong, and everything is as before.
refused() {
    ! reload 1 2>said || fail "$1: reloaded all the same"
    grep -q "goes on as before.*$2" said || fail "$1: $(cat said)"
    grep -q "stay as they were.*$2" engine1.log || fail "$1: the log does not say so: $(logs 1)"
    works || fail "$1: $(meet) $(logs 1)"
    ok "$1: $(sed 's/.*as before: //' said)"
}
cp policy1.toml policy.kept
cp node1.pem node.kept
printf 'weight = "much"\n' >>policy1.toml
refused "a policy that is none" policy1.toml:4
cp policy.kept policy1.toml
echo nonsense >node1.pem
refused "a certificate that is none" node1.pem
cp old.pem node1.pem
refused "a certificate of another key" certificate
cp node1.key key.kept
cp old.key node1.key
reload 1 || fail "an old certificate: $(logs 1)"
# The engines' connection is there still: it is for new ones that certificates are shown.
end 2 4790 TERM
engine 2
keep
told "a certificate that has become old" EHOSTUNREACH 'xpired.*node2.example'
cp node.kept node1.pem
cp key.kept node1.key
reload 1 || fail "a new certificate: $(logs 1)"
works || fail "a new certificate: $(meet) $(logs 1)"
: >met
meet wait >met &
client=$!
wait_until 20 grep -q connected met || fail "no connection: $(cat met) $(logs 1)"
reload 1 || fail "a reload: $(logs 1)"
sleep 0.5
runs "$client" || fail "a reload has ended a connection: $(cat met)"
ok "a new certificate, without a new engine; connections outlive a reload"
sed '/^\[\[engine\]\]/,$d' links1.toml >links.kept
cp links1.toml links.all
cp links.kept links1.toml
reload 1 || fail "links to nobody: $(logs 1)"
wait "$client"
grep -q ECONNRESET met || fail "an engine that is named no more: $(cat met)"
cp links.all links1.toml
reload 1 || fail "links as they were: $(logs 1)"
works || fail "links as they were: $(meet) $(logs 1)"
ok "an engine that is named no more: ECONNRESET; named again: connections as before"
slipway --run-dir "$work/run" socket ls 2>said && fail "an engine where none is"
grep -q "$work/run/socket.sock" said || fail "the run directory does not move the engine's socket: $(cat said)"
ok "the run directory moves the engine's socket"

# A policy that is read anew goes for who connects from then on. One engine for both namespaces, whose programs reach
# each other by the kernel as well.
slipway socket engine --socket between.sock --policy between.toml 2>between.log &
between=$!
wait_until 20 test -S between.sock || fail "no engine between namespaces: $(cat between.log)"
cat >echo.py <<'PYTHON'
import socket, threading
def echo(sock):
    while data := sock.recv(100):
        sock.sendall(data)
def serve(port):
    server = socket.create_server(("192.0.2.2", port))
    while True:
        threading.Thread(target=echo, args=(server.accept()[0],)).start()
for port in (9001, 9002):
    threading.Thread(target=serve, args=(port,)).start()
PYTHON
cat >rules.py <<'PYTHON'
import os, signal, socket, subprocess, sys, time
plain = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
def allow(port):
    with open("between.toml", "w") as file:
        for n in (1, 2):
            file.write('[[tenant]]\nname = "node%d"\nnetns = "node%d"\n' % (n, n))
        file.write('[[allow]]\nfrom = "node1"\nto = "node2"\nports = "%d"\n' % port)
def reload():
    subprocess.run("slipway socket reload --engine between.sock".split(), check=True, env=plain)
def talk(sock):
    sock.sendall(b"x")
    assert sock.recv(1) == b"x"
    return "eventfd" in os.readlink("/proc/self/fd/%d" % sock.fileno())
def by_engine():
    found = []
    for port in (9001, 9002):
        with socket.create_connection(("192.0.2.2", port), timeout=120) as sock:
            if talk(sock):
                found.append(port)
    return found
assert by_engine() == [], "no rule"
allow(9001)
reload()
assert by_engine() == [9001], "the first rule"
kept = socket.create_connection(("192.0.2.2", 9001), timeout=120)
assert talk(kept)
allow(9002)
reload()
assert by_engine() == [9002], "the second rule"
assert talk(kept), "what was open"
allow(9001)
os.kill(int(sys.argv[1]), signal.SIGHUP)
deadline = time.monotonic() + 120
while by_engine() != [9001]:
    assert time.monotonic() < deadline, "the first rule, by a signal"
assert talk(kept), "what was open, after the signal"
PYTHON
on 2 slipway socket run --engine between.sock -- python3 echo.py >echo.log 2>&1 &
for port in 9001 9002; do wait_until 20 engine_lists between.sock $port || fail "no server at $port: $(cat echo.log)"; done
on 1 slipway socket run --engine between.sock -- timeout 600 python3 rules.py "$between" >rules 2>&1 ||
    fail "policies that are read anew: $(cat rules between.log)"
ok "a policy that is read anew: who connects then goes by it, to the engine or to the kernel; what was open stays"

engines="$(server 1 4790) $(server 2 4790) $between"
eval "$(block 7)" >/dev/null 2>&1
for pid in $engines; do wait_until 10 has_ended "$pid" || fail "an engine outlives the last of the commands"; done
[ -z "$(ip netns list)" ] || fail "network namespaces are left: $(ip netns list)"
ok "nothing is left"
