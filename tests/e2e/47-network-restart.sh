#!/usr/bin/env bash
# A network under the daemon's kill -9 and restart, with a keeper: addresses, MAC addresses, ports and
# rules are as before, and traffic goes on, of a sandbox with virtio-net and of one with an e1000 and the driver that a stock Linux
# has: a restart of the daemon resets the device, and the agent has the driver start it anew. That needs a guest kernel with the
# driver (`deploy/setup/setup.sh e1000`). In a network namespace of the test's own.
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
need_network_node "$@"
stop_daemon
rm -f "$SLIPWAY_RUN_DIR"/{slipway,keeper}.sock
echo 'keeper = true' >>"$SLIPWAY_CONFIG"
keeper='' daemon=''
kernel=${SLIPWAY_E1000_KERNEL:-/var/lib/slipway/kernel-e1000}
other=("${machine[@]}")
if [ ${#machine[@]} = 0 ]; then
    if [ -f "$kernel/vmlinuz" ]; then
        other=(--nic e1000 --kernel "$kernel")
    else
        # lab/kvm-host takes no test for skipped by this line.
        printf 'SKIPPED: e2e/%s, an e1000: needs a guest kernel with its driver (deploy/setup/setup.sh e1000)\n' "$test_name"
    fi
fi
end_all() {
    [ -n "$daemon" ] && runs "$daemon" && timeout 60 "$slipway" rm --force --all >/dev/null 2>&1
    [ -n "$daemon" ] && kill "$daemon" 2>/dev/null && wait "$daemon" 2>/dev/null
    [ -n "$keeper" ] && kill "$keeper" 2>/dev/null && wait "$keeper" 2>/dev/null
}
start_daemon() {
    "$slipway" daemon 2>>"$work/daemon.log" & daemon=$!
    wait_until 60 test -S "$SLIPWAY_RUN_DIR/slipway.sock" || fail "no daemon: $(tail "$work/daemon.log")"
}
"$slipway" keeper 2>"$work/keeper.log" & keeper=$!
wait_until 20 listens "$SLIPWAY_RUN_DIR/keeper.sock" || fail "no keeper: $(cat "$work/keeper.log")"
start_daemon

# Says back what it is told, line by line, on each connection.
echo_text='
import socket, threading
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(("0.0.0.0", 80))
server.listen(16)
def serve(client):
    while True:
        data = client.recv(4096)
        if not data: return
        client.sendall(data)
while True:
    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
'
"$slipway" run --detach --name e "${machine[@]}" --wait-network --publish 8080:80 "$image" python3 -c "$echo_text" >/dev/null ||
    fail "run: $(tail "$work/daemon.log")"
"$slipway" run --detach --name f "${other[@]}" --wait-network "$image" python3 -c "$echo_text" >/dev/null ||
    fail "run: $(tail "$work/daemon.log")"
shape() { "$slipway" network inspect default; nft list ruleset; ip -o address show | grep ' slip' | sort; }
shape >"$work/before"
address_of() { "$slipway" network inspect default | python3 -c 'import json,sys
print(next(s["ipv4"] for s in json.load(sys.stdin)[0]["sandboxes"] if s["name"] == sys.argv[1]))' "$1"; }
reaches() { python3 "$work/talk.py" "$(address_of "$1")"; }
# talk.py ADDRESS [STOP]: one connection, a line each 20 ms until the file STOP is there; the longest wait for an answer.
cat >"$work/talk.py" <<'END'
import os, socket, sys, time
talk = socket.create_connection((sys.argv[1], 80), 120)
talk.settimeout(120)
longest, count = 0, 0
while len(sys.argv) > 2 and not os.path.exists(sys.argv[2]):
    line, begin, told = b"line %d\n" % count, time.time(), b""
    talk.sendall(line)
    while len(told) < len(line):
        told += talk.recv(4096)
    assert told == line, told
    longest, count = max(longest, time.time() - begin), count + 1
    time.sleep(0.02)
print("%d lines, longest wait %.0f ms" % (count, longest * 1000))
END
talking=()
for name in e f; do
    wait_until 60 reaches $name >/dev/null || fail "the sandbox $name does not serve: $("$slipway" logs $name)"
    python3 "$work/talk.py" "$(address_of $name)" "$work/stop" >"$work/talk-$name" 2>&1 & talking+=($!)
done
for _ in 1 2 3; do
    sleep 3
    kill -9 "$daemon"; wait "$daemon" 2>/dev/null
    rm -f "$SLIPWAY_RUN_DIR/slipway.sock"
    start_daemon
done
sleep 3
touch "$work/stop"
for one in "${talking[@]}"; do
    wait "$one" || fail "a connection broke: $(cat "$work/talk-e" "$work/talk-f") $(tail "$work/daemon.log")"
done
ok "a connection to a sandbox goes on over three kills of the daemon: $(cat "$work/talk-e")"
ok "and one to a sandbox with ${other[*]:-virtio-net}: $(cat "$work/talk-f")"
shape >"$work/after"
diff "$work/before" "$work/after" >"$work/diff" || fail "not as before: $(cat "$work/diff")"
ok "addresses, ports and rules are as before"
python3 "$work/talk.py" 127.0.0.1 >/dev/null 2>&1 && fail "port 80 of the host answers"
timeout 20 python3 - <<'END' || fail "the published port"
import socket
talk = socket.create_connection(("127.0.0.1", 8080), 60)
talk.sendall(b"hello\n")
assert talk.recv(16) == b"hello\n"
END
told=$("$slipway" exec f python3 -c 'import socket
talk = socket.create_connection(("e", 80), 120)
talk.sendall(b"by name\n")
print(talk.recv(16).decode())') || fail "from sandbox to sandbox: $told"
ok "published ports, names and sandboxes answer"
"$slipway" rm --force --all >/dev/null || fail "rm"
kill "$daemon"; wait "$daemon" 2>/dev/null
ip -o link | grep -q ': slip' && fail "interfaces are left: $(ip -o link)"
nft list tables | grep -q slipway && fail "rules are left"
ok "a daemon that ends takes unused networks along"
