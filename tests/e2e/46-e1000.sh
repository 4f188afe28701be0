#!/usr/bin/env bash
# An e1000 in place of virtio-net, with the driver that a stock Linux has: names, frames of every size both ways,
# interface down and up, bad input. Needs a guest kernel with the driver (`deploy/setup/setup.sh e1000`).
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
kernel=${SLIPWAY_E1000_KERNEL:-/var/lib/slipway/kernel-e1000}
[ -f "$kernel/vmlinuz" ] || skip "a guest kernel with the driver e1000 (deploy/setup/setup.sh e1000)"
need_network_node "$@"

"$slipway" run --nic e2000 "$image" true 2>"$work/error" && fail "a kind of interface that is none is taken"
grep -q "virtio.*e1000.*e1000-csb" "$work/error" || fail "no list of kinds: $(cat "$work/error")"
"$slipway" run --nic e1000 --queues 2 "$image" true 2>"$work/error" && fail "an e1000 with two queue pairs is taken"
grep -q "one queue pair" "$work/error" || fail "no word about queue pairs: $(cat "$work/error")"
ok "bad input is one clear line"

timeout 300 "$slipway" run --detach --name old --accel tcg --kernel "$kernel" --nic e1000 --wait-network --privileged \
    "$image" sleep 3600 >/dev/null || fail "no sandbox with an e1000"
driver=$("$slipway" exec old sh -c 'basename "$(readlink /sys/class/net/e*/device/driver)"')
[ "$driver" = e1000 ] || fail "the driver is $driver"
ok "the guest's own driver e1000 has bound the interface"

timeout 300 "$slipway" run --detach --name new --accel tcg --wait-network "$image" sleep 3600 >/dev/null ||
    fail "no sandbox with virtio-net"
python=$(cat <<'END'
import hashlib, os, socket, sys
def receive(port):
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("0.0.0.0", port)); server.listen(1)
    peer = server.accept()[0]
    digest, size = hashlib.sha256(), 0
    while True:
        part = peer.recv(65536)
        if not part: break
        digest.update(part); size += len(part)
    peer.sendall(("%d %s" % (size, digest.hexdigest())).encode())
def send(host, port, size):
    data = os.urandom(size)
    peer = socket.create_connection((host, port), 60)
    peer.sendall(data); peer.shutdown(socket.SHUT_WR)
    answer = peer.recv(200).decode()
    assert answer == "%d %s" % (size, hashlib.sha256(data).hexdigest()), answer
    print("whole")
receive(int(sys.argv[2])) if sys.argv[1] == "receive" else send(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
END
)
# stream FROM TO BYTES: a stream whose content is compared at its end.
stream() {
    "$slipway" exec "$2" python3 -c "$python" receive 7000 & local server=$!
    local answer=''
    for _ in $(seq 30); do
        answer=$(timeout 120 "$slipway" exec "$1" python3 -c "$python" send "$2" 7000 "$3" 2>"$work/error") && break
        sleep 1
    done
    [ "$answer" = whole ] || fail "the stream from $1 to $2: $answer $(tail -1 "$work/error")"
    wait "$server"
}
stream old new 3000000
stream new old 3000000
ok "streams between an e1000 and virtio-net, both ways, arrive whole"
"$slipway" port inspect old | python3 -c 'import json, sys
work = json.load(sys.stdin)[0]["e1000"]
exits = work["exits_by_register"]
assert exits["TDT"]["writes"] > 0 and exits["ICR"]["reads"] > 0 and work["exits"] > work["interrupts"] > 0, work
# Segments of up to 64 KiB count as frames.
assert 0 < work["interrupts_per_frame"] and min(work["frames_sent"], work["frames_received"]) > 40, work' \
    || fail "port inspect: $("$slipway" port inspect old)"
"$slipway" port inspect new | grep -q '"e1000": null' || fail "port inspect: $("$slipway" port inspect new)"
ok "exits, kicks and interrupts of an e1000 are counted"

"$slipway" exec old sh -c 'ethtool -t "$(basename /sys/class/net/e*)" offline' >"$work/selftest" ||
    fail "the driver's own test: $(cat "$work/selftest")"
grep -q PASS "$work/selftest" || fail "the driver's own test: $(cat "$work/selftest")"
ok "ethtool's offline test passes: registers, EEPROM, interrupts, loopback, link"
stream new old 500000

"$slipway" exec old sh -c 'cat /sys/class/net/e*/statistics/rx_errors /sys/class/net/e*/statistics/tx_errors' | sort -u >"$work/errors"
[ "$(cat "$work/errors")" = 0 ] || fail "errors are counted: $(cat "$work/errors")"
ok "no errors are counted"

"$slipway" rm --force old >/dev/null
timeout 300 "$slipway" run --detach --name block --accel tcg --kernel "$kernel" --nic e1000-csb --wait-network \
    "$image" sleep 3600 >/dev/null || fail "no sandbox with an e1000 that has a communication status block"
stream block new 500000
ok "an e1000 with a communication status block is a plain one for a driver that does not know it"
