#!/usr/bin/env bash
# Networks of sandboxes: names, the host, the outside, published ports, isolation, forged addresses,
# addresses that come back, bad input. All of it in a network namespace of the test's own, where a
# second one plays the outside: nothing of the machine's interfaces and rules is touched. Sandboxes of
# which the addresses alone count are hollow: they run no guest.
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
need_network_node "$@"
# No machine is made beside the three sandboxes, which would have an address among them.
echo 'templates = "off"' >>"$SLIPWAY_CONFIG"

# The outside: knows the host's address, and no way to a sandbox's.
unshare --net sleep 3600 &
outside_pid=$!
outside() { nsenter --net="/proc/$outside_pid/ns/net" "$@"; }
# The process is in the test's namespace until it has made its own.
apart() { [ "$(readlink "/proc/$outside_pid/ns/net")" != "$(readlink /proc/self/ns/net)" ]; }
wait_until 20 apart && outside true || fail "no second namespace"
ip link add out0 type veth peer name out1 netns "$outside_pid"
ip address add 192.0.2.1/24 dev out0
ip address add 2001:db8::1/64 dev out0 nodad
ip link set out0 up
outside ip address add 192.0.2.2/24 dev out1
outside ip address add 2001:db8::2/64 dev out1 nodad
outside ip link set out1 up
outside ip link set lo up
background=("$outside_pid")
end_all() { kill "${background[@]}" 2>/dev/null; }

# A server that says who asks; a client that prints what it is told within some seconds.
cat >"$work/server.py" <<'END'
import socket, sys, threading
def serve(family, address):
    server = socket.socket(family, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    server.bind(address)
    server.listen(64)
    while True:
        client, peer = server.accept()
        client.sendall(("%s to %s\n" % (socket.gethostname(), peer[0])).encode())
        client.close()
def datagrams(address):
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(address)
    while True:
        data, peer = server.recvfrom(2048)
        server.sendto(socket.gethostname().encode() + b" has " + data, peer)
port = int(sys.argv[1])
threading.Thread(target=datagrams, args=(("0.0.0.0", port),), daemon=True).start()
threading.Thread(target=serve, args=(socket.AF_INET6, ("::", port)), daemon=True).start()
serve(socket.AF_INET, ("0.0.0.0", port))
END
cat >"$work/ask.py" <<'END'
import socket, sys, time
kind, host, port, patience = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
family = {"4": socket.AF_INET, "6": socket.AF_INET6, "u": socket.AF_INET}[kind]
end, why = time.time() + patience, "no time"
while time.time() < end:
    try:
        transport = socket.SOCK_DGRAM if kind == "u" else socket.SOCK_STREAM
        where = socket.getaddrinfo(host, port, family, transport)[0][4]
        asking = socket.socket(family, transport)
        asking.settimeout(2)
        asking.connect(where)
        if kind == "u":
            asking.send(b"datagram")
        print(asking.recv(2048).decode().strip())
        sys.exit(0)
    except OSError as error:
        why = error
        time.sleep(0.2)
print("nothing:", why)
sys.exit(1)
END
ask_text=$(cat "$work/ask.py")
server_text=$(cat "$work/server.py")
# The patience for what comes, in seconds.
long=$((120 * slower))
# ask_in SANDBOX 4|6|u HOST PORT PATIENCE; ask: the same from the host; ask_outside: from there.
ask_in() { local sandbox=$1; shift; "$slipway" exec "$sandbox" python3 -c "$ask_text" "$@"; }
ask() { python3 "$work/ask.py" "$@"; }
ask_outside() { outside python3 "$work/ask.py" "$@"; }
# field NAME EXPRESSION: of a sandbox in `ps`.
field() { "$slipway" ps --json | python3 -c 'import json, sys
one = next(s for s in json.load(sys.stdin) if s["name"] == sys.argv[1])
print(eval(sys.argv[2], {"one": one}))' "$1" "$2"; }
expect() { case "$2" in *"$1"*) ;; *) fail "$3: expected \"$1\", got: $2" ;; esac; }

python3 "$work/server.py" 7001 & background+=("$!")
nsenter --net="/proc/$outside_pid/ns/net" python3 "$work/server.py" 7000 & background+=("$!")

"$slipway" run --count 3 --name n --detach --wait-network --publish 80 --publish 81:80/udp "$image" \
    python3 -c "$server_text" 80 >"$work/out" 2>&1 && fail "port 81 was published three times"
expect "whose port of the host" "$(cat "$work/out")" "a port that is published three times"
[ -z "$("$slipway" ps --all --quiet)" ] || fail "a refused run has begun: $("$slipway" ps --all)"
"$slipway" run --count 3 --name n --detach --wait-network --publish 80 "$image" \
    python3 -c "$server_text" 80 >/dev/null || fail "three sandboxes with the default network"
for number in 1 2 3; do
    expect "n-$number to $(field n-1 'one["addresses"][0]')" "$(ask_in n-1 4 "n-$number" 80 "$long")" "n-$number"
    expect "n-$number to $(field n-1 'one["addresses"][1]')" "$(ask_in n-1 6 "n-$number.default" 80 "$long")" "n-$number, IPv6"
done
ok "three sandboxes reach each other by name, IPv4 and IPv6"
expect "to $(field n-2 'one["addresses"][0]')" "$(ask_in n-2 4 host.slipway.internal 7001 "$long")" "the host"
expect "to 192.0.2.1" "$(ask_in n-2 4 192.0.2.2 7000 "$long")" "the outside"
expect "to 2001:db8::1" "$(ask_in n-2 6 2001:db8::2 7000 "$long")" "the outside, IPv6"
ok "they reach the host, and the outside by the host's address"

port=$(field n-3 'one["published"][0].split(":")[0]')
expect "n-3 to 192.0.2.2" "$(ask_outside 4 192.0.2.1 "$port" "$long")" "published, from outside"
expect "n-3 to 2001:db8::2" "$(ask_outside 6 2001:db8::1 "$port" "$long")" "published, from outside, IPv6"
for address in 127.0.0.1 192.0.2.1; do
    expect "n-3 to" "$(ask 4 "$address" "$port" "$long")" "published, from the host at $address"
done
expect "n-3 to" "$(ask 6 ::1 "$port" "$long")" "published, from the host at ::1"
expect "n-3 to" "$(ask_in n-1 4 host.slipway.internal "$port" "$long")" "published, from a sandbox"
ok "published ports answer, from outside, from the host, from a sandbox"

"$slipway" network create blue --subnet 10.99.0.0/29 --mtu 1400 >/dev/null || fail "network create"
"$slipway" run --name b --detach --wait-network --network blue --publish 82:80/udp "$image" \
    python3 -c "$server_text" 80 >/dev/null || fail "a sandbox in another network"
expect "b has datagram" "$(ask_outside u 192.0.2.1 82 "$long")" "published UDP, from outside"
expect "b has datagram" "$(ask u 127.0.0.1 82 "$long")" "published UDP, from the host"
expect 1400 "$("$slipway" exec b cat /sys/class/net/eth0/mtu)" "the MTU of the network"
expect "b to" "$(ask 4 10.99.0.2 80 "$long")" "another network's sandbox, from the host"
other=$(field n-1 'one["addresses"][0]')
gateway=$("$slipway" network inspect default | python3 -c 'import json,sys; print(json.load(sys.stdin)[0]["gateway"])')
for target in "n-1 4 10.99.0.2 80" "n-1 4 b 80" "n-1 4 10.99.0.1 7001" "b 4 $other 80" \
    "b 4 n-1 80" "b 4 $gateway 7001" "b 4 192.0.2.1 $port"; do
    # shellcheck disable=SC2086
    told=$(ask_in $target 3) && fail "one network sees another: $target: $told"
done
ok "two networks do not see each other, by address, name, gateway or published port"

"$slipway" network create inner --internal >/dev/null || fail "network create --internal"
"$slipway" run --name i --detach --wait-network --network inner "$image" sleep 3600 >/dev/null || fail "inner"
told=$(ask_in i 4 192.0.2.2 7000 3) && fail "an internal network has a way out: $told"
expect "to" "$(ask_in i 4 host.slipway.internal 7001 "$long")" "the host, from an internal network"
ok "an internal network reaches the host's end only"

# Whoever has every right in the guest sends what another's addresses are on.
forge='
import socket, struct, sys
raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
raw.bind(("eth0", 0))
own = raw.getsockname()[4]
mac = lambda text: bytes.fromhex(text.replace(":", ""))
theirs, address = mac(sys.argv[1]), socket.inet_aton(sys.argv[2])
for source in (theirs, own):
    for sender in (theirs, own):
        arp = struct.pack("!HHBBH", 1, 0x800, 6, 4, 2) + sender + address + own + address
        raw.send(b"\xff" * 6 + source + b"\x08\x06" + arp + bytes(18))
head = struct.pack("!BBHHHBBH", 0x45, 0, 20, 0, 0, 64, 17, 0) + address + address
raw.send(theirs + own + b"\x08\x00" + head + bytes(26))
'
id=$(field n-1 'one["id"]')
"$slipway" exec --privileged n-1 python3 -c "$forge" "$(field n-2 'one["mac"]')" "$(field n-2 'one["addresses"][0]')" ||
    fail "frames could not be sent"
forged() { "$slipway" port stats default --json | python3 -c 'import json, sys
port = next(p for p in json.load(sys.stdin) if p["name"] == sys.argv[1] + ".net")
dropped = port["dropped_in"]
sys.exit((dropped.get("spoofed-mac", 0), dropped.get("spoofed-address", 0)) < (2, 3))' "$id"; }
wait_until 10 forged || fail "forged frames passed: $("$slipway" port stats default --json)"
expect "n-2 to" "$(ask_in n-3 4 n-2 80 "$long")" "whose addresses were forged"
ok "a sandbox cannot take another's MAC or IP address"

# refused WORDS COMMAND…: one line, and nothing is left.
refused() {
    local words=$1 said; shift
    said=$("$slipway" "$@" 2>&1) && fail "not refused: $*"
    expect "$words" "$said" "$*"
    [ "$(printf '%s\n' "$said" | wc -l)" = 1 ] || fail "more than a line: $said"
}
before=$("$slipway" ps --quiet | sort)
taken=$(field n-2 'one["addresses"][0]')
run=(run --detach --name x)
refused 'no network "nowhere"' "${run[@]}" --network nowhere "$image" true
refused "taken by sandbox n-2" "${run[@]}" --ip "$taken" "$image" true
refused "outside of" "${run[@]}" --ip 10.99.0.3 "$image" true
refused "broadcast" "${run[@]}" --ip "${taken%.*}.255" "$image" true
refused "network's own" "${run[@]}" --ip "${taken%.*}.0" "$image" true
refused "gateway's" "${run[@]}" --ip "$gateway" "$image" true
refused "no IP address" "${run[@]}" --ip 10.0.0 "$image" true
refused "multicast" "${run[@]}" --mac 01:00:5e:00:00:01 "$image" true
refused "no MAC address" "${run[@]}" --mac 5a:11 "$image" true
refused "taken by sandbox n-2" "${run[@]}" --mac "$(field n-2 'one["mac"]')" "$image" true
refused "is in use" "${run[@]}" --publish "$port:80" "$image" true
refused "cannot be published" "${run[@]}" --publish 0:80 "$image" true
refused "without a network" "${run[@]}" --network none --publish 80 "$image" true
refused "is internal" "${run[@]}" --network inner --publish 80 "$image" true
refused "whose address" "${run[@]}" --count 2 --ip "$taken" "$image" true
refused "exists already" network create blue
refused "overlaps" network create red --subnet 10.99.0.0/24
refused "no subnet" network create red --subnet 10.1.0.1/24
refused "MTU" network create red --mtu 20
refused "no name" network create none
refused "has sandboxes: b" network rm blue
refused 'no network "red"' network inspect red
"$slipway" network create tiny --subnet 10.98.0.0/30 >/dev/null
hollow() { "$slipway" run --detach --accel hollow --wait-network "$@" "$image" sleep 3600; }
hollow --name t --network tiny >/dev/null || fail "the last address"
refused "is full" "${run[@]}" --network tiny "$image" true
"$slipway" rm --force t >/dev/null
[ "$("$slipway" ps --quiet | sort)" = "$before" ] || fail "something is left: $("$slipway" ps)"
members() { "$slipway" network inspect "$1" | python3 -c 'import json,sys; print(len(json.load(sys.stdin)[0]["sandboxes"]))'; }
[ "$(members default)" = 3 ] || fail "addresses are left: $("$slipway" network inspect default)"
ok "bad input is one line, and nothing is left"

[ "$("$slipway" exec n-1 cat /sys/class/net/lo/operstate)" != down ] || fail "the loopback interface is down"

"$slipway" rm --force n-2 >/dev/null || fail "rm"
hollow --name n-2 --ip "$taken" >/dev/null || fail "the address did not come back after rm"
ok "an address comes back after rm"

daemon=$(lock_holder) || fail "no daemon"
vmms=$("$slipway" ps --json | python3 -c 'import json,sys
for one in json.load(sys.stdin): print(one["vmm_pid"] or "")')
kill -9 "$daemon"
wait_until 10 daemon_gone || fail "the daemon does not end"
"$slipway" rm --all >/dev/null || fail "what a killed daemon left"
for pid in $vmms; do runs "$pid" && fail "VMM $pid is left"; done
for name in default blue inner; do
    [ "$(members "$name")" = 0 ] || fail "addresses of $name are left: $("$slipway" network inspect "$name")"
done
hollow --name last --ip "$taken" --publish "$port:80" >/dev/null || fail "address and port did not come back after kill -9"
"$slipway" rm --force last >/dev/null || fail "rm"
ok "addresses and ports come back after kill -9 of the daemon"

for name in blue inner tiny; do "$slipway" network rm "$name" >/dev/null || fail "network rm $name"; done
stop_daemon
nft list tables | grep -q slipway && fail "rules are left: $(nft list ruleset)"
ip -o link | grep -q ': slip' && fail "interfaces are left: $(ip -o link)"
left=$(leftovers)
[ -z "$left" ] || fail "left: $left"
ok "the daemon takes its rules and interfaces with it"
