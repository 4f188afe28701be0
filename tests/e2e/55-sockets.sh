#!/usr/bin/env bash
# Programs that know nothing of it under libslipway.so, among each other and with peers that use the kernel's
# TCP, in a network namespace of the test's own, whose loopback counts what the kernel carried.
if [ "$(id -u)" = 0 ] && [ -z "${SLIPWAY_E2E_NAMESPACE:-}" ]; then
    SLIPWAY_E2E_NAMESPACE=1 exec unshare --net -- "$0" "$@"
fi
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
[ "$(id -u)" = 0 ] || skip "root, for a network namespace"
for program in ip python3 curl readelf; do command -v "$program" >/dev/null || skip "$program"; done
[ -x "$slipway" ] || fail "$slipway is not built; \`make build\` builds it"
library=${SLIPWAY_LIBRARY:-$(dirname "$(readlink -f "$slipway")")/libslipway.so}
[ -f "$library" ] || fail "$library is not built; \`make build\` builds it"
# Images with no other shared library than the C library are common: busybox's, distroless ones.
others=$(readelf -d "$library" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | grep -v -e '^libc\.so' -e '^ld-linux')
[ -z "$others" ] || fail "$library needs other libraries than the C library: $others"
ip link set lo up
export SLIPWAY_SOCKET=$work/engine.sock
started=()
end_all() {
    local pid
    for pid in "${started[@]}"; do kill "$pid" 2>/dev/null; done
    for pid in "${started[@]}"; do wait "$pid" 2>/dev/null; done
}
trap 'status=$?; end_all; rm -rf "$work"; exit "$status"' EXIT
# start NAME COMMAND…: in the background, its words in a file.
start() {
    local name=$1
    shift
    "$@" >"$work/$name.log" 2>&1 &
    started+=($!)
}
ours() { LD_PRELOAD=$library "$@"; }
listens() { engine_lists "$SLIPWAY_SOCKET" "$1"; }
# What the kernel's loopback has carried, in bytes.
carried() { awk '$1 == "lo:" { print $2 }' /proc/net/dev; }

start engine "$slipway" socket engine
engine=${started[0]}
wait_until 20 test -S "$SLIPWAY_SOCKET" || fail "no engine: $(cat "$work/engine.log")"

"$top/front/preload/tests/run.sh" "$library" "$SLIPWAY_SOCKET" >"$work/semantics" 2>&1 ||
    fail "sockets do not behave as the kernel's: $(cat "$work/semantics")"
ok "calls and errors are those of the kernel's sockets ($(tail -n 1 "$work/semantics"))"
SLIPWAY_SOCKET_EVENTFDS=0 "$top/front/preload/tests/run.sh" "$library" "$SLIPWAY_SOCKET" >"$work/semantics" 2>&1 ||
    fail "connections that share eventfds do not behave as the kernel's: $(cat "$work/semantics")"
ok "so are those of connections that share eventfds"

# The order of level-triggered events is stricter than the kernel's, which keeps a reported descriptor in its place.
for shared in 64 0; do
    SLIPWAY_SOCKET_EVENTFDS=$shared ours timeout 300 python3 "$top/front/preload/tests/order.py" >"$work/order" 2>&1 ||
        fail "what was sent first is not reported first: $(cat "$work/order")"
    ! grep -q '^ours: 0$' "$work/order" || fail "no connection was ours: $(cat "$work/order")"
done
ok "what is sent on one connection before another is reported in that order by epoll, poll and select"

head -c 4000000 /dev/urandom >"$work/big"
head -c 100 "$work/big" >"$work/small"
# fetch WHO PORT NAME: both files, as they are.
fetch() {
    local who=$1 port=$2 file
    for file in big small; do
        if [ "$who" = ours ]; then
            ours timeout 20 curl -sS -o "$work/got" "http://127.0.0.1:$port/$file"
        else
            timeout 20 curl -sS -o "$work/got" "http://127.0.0.1:$port/$file"
        fi || fail "$3: curl ($who): status $?"
        cmp -s "$work/got" "$work/$file" || fail "$3: $file is another one ($who)"
    done
}
# serves NAME PORT: to a client with the library the kernel carries next to nothing.
serves() {
    local before after
    wait_until 20 listens "$2" || fail "$1 does not listen: $(cat "$work/$1.log")"
    before=$(carried)
    fetch ours "$2" "$1"
    after=$(carried)
    [ $((after - before)) -lt 100000 ] || fail "$1: the kernel carried $((after - before)) bytes of 4 million"
    fetch kernel "$2" "$1"
    [ $(($(carried) - after)) -gt 4000000 ] || fail "$1: the kernel's peer was not the kernel's"
    ok "$1: curl's bodies are whole, with the library and without; the kernel carried $((after - before)) bytes"
}

start http.server env LD_PRELOAD="$library" python3 -m http.server 8001 --bind 127.0.0.1 --directory "$work"
serves http.server 8001

cat >"$work/streams.py" <<'PYTHON'
import asyncio, sys
async def serve(reader, writer):
    name = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
    body = open(sys.argv[1] + name, "rb").read()
    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    await writer.drain()
    writer.close()
async def main():
    async with await asyncio.start_server(serve, "127.0.0.1", 8002) as server:
        await server.serve_forever()
asyncio.run(main())
PYTHON
start asyncio env LD_PRELOAD="$library" python3 "$work/streams.py" "$work"
serves asyncio 8002

if command -v nginx >/dev/null; then
    cat >"$work/nginx.conf" <<CONF
daemon off; user root; worker_processes 1; pid $work/nginx.pid; error_log stderr;
events { worker_connections 256; }
http {
    access_log off; sendfile on;
    client_body_temp_path $work/t1; proxy_temp_path $work/t2; fastcgi_temp_path $work/t3;
    uwsgi_temp_path $work/t4; scgi_temp_path $work/t5;
    upstream back { server 127.0.0.1:8003; keepalive 16; }
    server { listen 127.0.0.1:8003; root $work; }
    server { listen 127.0.0.1:8004; location / {
        proxy_pass http://back; proxy_http_version 1.1; proxy_set_header Connection ""; } }
}
CONF
    start nginx env LD_PRELOAD="$library" nginx -e stderr -c "$work/nginx.conf"
    serves nginx 8003
    fetch ours 8004 "nginx as a proxy"
    fetch kernel 8004 "nginx as a proxy"
    ok "nginx as a proxy before nginx"
    if command -v wrk >/dev/null; then
        before=$(carried)
        for port in 8003 8004; do
            ours timeout 30 wrk --timeout 60s -t 1 -c 16 -d 2 "http://127.0.0.1:$port/small" >"$work/wrk" 2>&1 ||
                fail "wrk: $(cat "$work/wrk")"
            ! grep -E 'Socket errors|Non-2xx' "$work/wrk" || fail "wrk saw errors at $port"
            ok "wrk at $port: $(grep Requests/sec "$work/wrk")"
        done
        [ $(($(carried) - before)) -lt 200000 ] || fail "the kernel carried wrk's load"
    else
        say "SKIPPED: e2e/$test_name (wrk): needs wrk"
    fi
else
    say "SKIPPED: e2e/$test_name (nginx): needs nginx"
fi

if command -v node >/dev/null; then
    cat >"$work/server.js" <<'JS'
const fs = require('fs'), root = process.argv[2];
require('http').createServer((ask, answer) => answer.end(fs.readFileSync(root + ask.url))).listen(8005, '127.0.0.1');
JS
    start node env LD_PRELOAD="$library" node "$work/server.js" "$work"
    serves node 8005
else
    say "SKIPPED: e2e/$test_name (node): needs node"
fi

if command -v redis-server >/dev/null && command -v redis-benchmark >/dev/null; then
    start redis env LD_PRELOAD="$library" redis-server --port 8006 --bind 127.0.0.1 --save '' --appendonly no
    wait_until 20 listens 8006 || fail "redis does not listen: $(cat "$work/redis.log")"
    before=$(carried)
    LD_PRELOAD=$library timeout 60 redis-benchmark -p 8006 -t set,get,lrange_100 -n 3000 -c 20 -d 1000 --csv \
        >"$work/redis.csv" 2>&1 || fail "redis-benchmark: $(cat "$work/redis.csv")"
    [ $(($(carried) - before)) -lt 200000 ] || fail "the kernel carried redis-benchmark's load"
    timeout 60 redis-benchmark -p 8006 -t set,get -n 3000 -c 20 --csv >>"$work/redis.csv" 2>&1 ||
        fail "redis-benchmark with the kernel's sockets: $(tail "$work/redis.csv")"
    ok "redis-benchmark, with the library and without: $(grep '^"SET' "$work/redis.csv" | cut -d , -f 1,2 | tr '\n' ' ')"
else
    say "SKIPPED: e2e/$test_name (redis): needs redis-server and redis-tools"
fi

if command -v memcached >/dev/null; then
    cat >"$work/memcached.py" <<'PYTHON'
import hashlib, os, socket
values = {b"k%d" % n: os.urandom(1 + n * 997) for n in range(200)}
sock = socket.create_connection(("127.0.0.1", 8007))
stream = sock.makefile("rb")
for key, value in values.items():
    sock.sendall(b"set %s 0 0 %d\r\n%s\r\n" % (key, len(value), value))
    assert stream.readline() == b"STORED\r\n"
for key, value in values.items():
    sock.sendall(b"get %s\r\n" % key)
    length = int(stream.readline().split()[3])
    assert hashlib.sha256(stream.read(length)).digest() == hashlib.sha256(value).digest()
    assert stream.readline() + stream.readline() == b"\r\nEND\r\n"
PYTHON
    start memcached env LD_PRELOAD="$library" memcached -u root -U 0 -l 127.0.0.1 -p 8007
    wait_until 20 listens 8007 || fail "memcached does not listen: $(cat "$work/memcached.log")"
    ours timeout 60 python3 "$work/memcached.py" || fail "memcached with the library"
    timeout 60 python3 "$work/memcached.py" || fail "memcached with the kernel's sockets"
    ok "memcached: 200 values come back as they were, with the library and without"
else
    say "SKIPPED: e2e/$test_name (memcached): needs memcached"
fi

if command -v iperf3 >/dev/null; then
    start iperf3 env LD_PRELOAD="$library" iperf3 -s -B 127.0.0.1 -p 8008
    wait_until 20 listens 8008 || fail "iperf3 does not listen: $(cat "$work/iperf3.log")"
    before=$(carried)
    for how in '' -R '-P 4' --bidir; do
        # shellcheck disable=SC2086 # words
        of_iperf "$work/iperf3" ours timeout 60 iperf3 -c 127.0.0.1 -p 8008 -t 1 $how ||
            fail "iperf3 $how: $(cat "$work/iperf3")"
        ok "iperf3 $how: $(grep receiver "$work/iperf3" | tail -n 1 | tr -s ' ' | cut -d ' ' -f 5-8)"
    done
    [ $(($(carried) - before)) -lt 1000000 ] || fail "the kernel carried iperf3's load"
    of_iperf "$work/iperf3" timeout 60 iperf3 -c 127.0.0.1 -p 8008 -t 1 || fail "iperf3 by the kernel: $(cat "$work/iperf3")"
    ok "iperf3's server with a client of the kernel's"
else
    say "SKIPPED: e2e/$test_name (iperf3): needs iperf3"
fi

cat >"$work/ends.py" <<'PYTHON'
import os, resource, socket, subprocess, sys
# As long as a child lives that holds the other end, nothing would come.
reader = [sys.executable, "-c", "import os, sys; sys.exit(3 if os.read(0, 1) == b'' else 4)"]
# The number of a ticket is beyond this limit.
lower = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
for argv, environment, before in ((["sleep", "100000"], {}, None), (["sh", "-c", "exec env -i sleep 100000"], dict(os.environ), None),
                                  (reader, dict(os.environ), lower), (sys.argv[1:], dict(os.environ), None)):
    if not argv:
        continue
    server = socket.create_server(("127.0.0.1", 0))
    a = socket.create_connection(server.getsockname())
    b, _ = server.accept()
    assert "eventfd" in os.readlink("/proc/self/fd/%d" % a.fileno())
    child = subprocess.Popen(argv, stdin=b, stdout=b, env=environment, preexec_fn=before)
    b.close()
    a.settimeout(60)
    print(a.recv(1))
    if argv == sys.argv[1:] or argv == reader:
        print(child.wait(60))
    child.kill()
    child.wait()
PYTHON
static=()
if command -v cc >/dev/null; then
    printf '#include <unistd.h>\nint main(void) { char c; return read(0, &c, 1) == 0 ? 3 : 4; }\n' >"$work/static.c"
    if cc -static -o "$work/static" "$work/static.c" 2>/dev/null; then static=("$work/static"); fi
fi
ours timeout 60 python3 "$work/ends.py" "${static[@]}" >"$work/ends" 2>&1 || fail "programs without the library: $(cat "$work/ends")"
! grep -qv -e "^b''$" -e '^3$' "$work/ends" || fail "programs without the library: $(cat "$work/ends")"
[ "$(grep -c "^b''$" "$work/ends")" -ge 3 ] || fail "programs without the library: $(cat "$work/ends")"
ok "what is handed to a program without the library, or cannot be handed on, ends there, for both ends"

if command -v socat >/dev/null; then
    start socat env LD_PRELOAD="$library" socat TCP-LISTEN:8010,bind=127.0.0.1,reuseaddr,fork EXEC:cat,nofork
    wait_until 20 listens 8010 || fail "socat does not listen: $(cat "$work/socat.log")"
    before=$(carried)
    for _ in 1 2 3; do
        ours timeout 20 socat -t 100 - TCP:127.0.0.1:8010 <"$work/big" >"$work/got" || fail "socat: status $?"
        cmp -s "$work/got" "$work/big" || fail "what cat sends back by a connection that it inherited is not what it was sent"
    done
    [ $(($(carried) - before)) -lt 200000 ] || fail "the kernel carried what cat was to"
    ok "socat starts cat with each connection as its standard input and output"
else
    say "SKIPPED: e2e/$test_name (socat): needs socat"
fi

# An echo between a program linked with musl and itself, or one of the C library here: by poll, without blocking.
musl=$(dirname "$library")/libslipway-musl.so
if command -v musl-gcc >/dev/null && command -v cc >/dev/null && [ -f "$musl" ]; then
    cat >"$work/echo.c" <<'SOURCE'
#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>
enum { SIZE = 1 << 20 };
static char out[SIZE], in[SIZE];
static int serve(int fd) {
    char piece[9000];
    for (ssize_t n; (n = read(fd, piece, sizeof piece)) > 0;)
        for (ssize_t done = 0; done < n;) done += write(fd, piece + done, n - done);
    return close(fd);
}
static int ask(int fd) {
    ssize_t sent = 0, got = 0;
    int yes = 1;
    for (int at = 0; at < SIZE; at++) out[at] = at * 31 >> 3;
    if (ioctl(fd, FIONBIO, &yes)) return perror("ioctl"), 1;
    while (got < SIZE) {
        struct pollfd one = {fd, POLLIN | (sent < SIZE ? POLLOUT : 0), 0};
        if (poll(&one, 1, 100000) != 1) return fprintf(stderr, "nothing comes\n"), 1;
        struct iovec two[] = {{out + sent, (SIZE - sent) / 2}, {out + sent + (SIZE - sent) / 2, SIZE - sent - (SIZE - sent) / 2}};
        ssize_t n = one.revents & POLLOUT ? writev(fd, two, 2) : 0;
        if (n > 0) sent += n;
        n = read(fd, in + got, SIZE - got);
        if (n > 0) got += n;
    }
    shutdown(fd, SHUT_WR);
    return memcmp(in, out, SIZE) ? fprintf(stderr, "other bytes\n"), 1 : 0;
}
int main(int argc, char **argv) {
    struct sockaddr_in at = {AF_INET, htons(8011), {htonl(INADDR_LOOPBACK)}};
    int fd = socket(AF_INET, SOCK_STREAM, 0), yes = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (argc > 1) return connect(fd, (void *)&at, sizeof at) ? perror("connect"), 1 : ask(fd);
    if (bind(fd, (void *)&at, sizeof at) || listen(fd, 5)) return perror("listen"), 1;
    for (;;) serve(accept4(fd, NULL, NULL, SOCK_CLOEXEC));
}
SOURCE
    cc -D_GNU_SOURCE -o "$work/echo-libc" "$work/echo.c" || fail "the program does not build"
    musl-gcc -D_GNU_SOURCE -o "$work/echo-musl" "$work/echo.c" || fail "the program does not build with musl"
    start echo "$slipway" socket run -- "$work/echo-musl"
    wait_until 20 listens 8011 || fail "a musl program does not listen: $(cat "$work/echo.log")"
    before=$(carried)
    for client in musl libc; do
        timeout 30 "$slipway" socket run -- "$work/echo-$client" client >"$work/echo.out" 2>&1 ||
            fail "an echo ($client) of a musl program: $(cat "$work/echo.out" "$work/echo.log")"
    done
    [ $(($(carried) - before)) -lt 20000 ] || fail "the kernel carried what a musl program was to"
    ok "a program linked with musl talks to itself and to one that is not"
else
    say "SKIPPED: e2e/$test_name (musl): needs cc, musl-gcc and $musl, which \`make build\` makes where Rust has musl's target"
fi

# The engine's end: what is open is reset at once, what is new is the kernel's, and the next engine's.
cat >"$work/lost.py" <<'PYTHON'
import os, signal, socket, sys, time
server = socket.create_server(("127.0.0.1", 8009))
a = socket.create_connection(("127.0.0.1", 8009))
b, _ = server.accept()
os.kill(int(sys.argv[1]), signal.SIGKILL)
began = time.monotonic()
try:
    print("lost:", a.recv(1))
except ConnectionResetError:
    print("reset", round(time.monotonic() - began, 3))
c = socket.create_connection(("127.0.0.1", 8009))
d, _ = server.accept()
c.sendall(b"by the kernel")
print(d.recv(100).decode())
PYTHON
ours timeout 30 python3 "$work/lost.py" "$engine" >"$work/lost" 2>&1 || fail "an engine that was killed: $(cat "$work/lost")"
grep -q '^reset' "$work/lost" || fail "an engine that was killed: $(cat "$work/lost")"
ok "when the engine is killed connections are reset after $(sed -n 's/^reset //p' "$work/lost") s, and new ones are the kernel's"
start engine2 "$slipway" socket engine
answers() { "$slipway" socket ls --engine "$SLIPWAY_SOCKET" >/dev/null; }
wait_until 20 answers || fail "no second engine: $(cat "$work/engine2.log")"
"$top/front/preload/tests/run.sh" "$library" "$SLIPWAY_SOCKET" plain ends forks >"$work/semantics" 2>&1 ||
    fail "with the next engine: $(cat "$work/semantics")"
ok "the next engine takes new connections"
for port in 8001 8002; do
    # The first connection is the kernel's, and makes the listener known.
    fetch ours "$port" "a server that outlived the engine"
    before=$(carried)
    fetch ours "$port" "the same server, once more"
    [ $(($(carried) - before)) -lt 100000 ] || fail "the server at $port, which outlived the engine, is the kernel's alone"
done
ok "servers that outlived the engine are the next one's"
