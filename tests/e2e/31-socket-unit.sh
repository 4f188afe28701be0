#!/usr/bin/env bash
# A socket engine with no more rights than its unit leaves it (deploy/slipway-socket.service) serves programs of another user
# in another network namespace: it finds the namespace by the process, and asks the kernel in there for its addresses.
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
need_root
for program in setpriv unshare nsenter ip python3 curl; do command -v "$program" >/dev/null || skip "$program"; done
[ -x "$slipway" ] || fail "$slipway is not built; \`make build\` builds it"
library=${SLIPWAY_LIBRARY:-$(dirname "$(readlink -f "$slipway")")/libslipway.so}
[ -f "$library" ] || fail "$library is not built; \`make build\` builds it"
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
    "${@:2}" >"$work/$1.log" 2>&1 &
    started+=($!)
}

# The capabilities that the unit keeps, as setpriv(1) has them: "+dac_read_search,+ipc_lock,…".
kept=$(sed -n 's/^CapabilityBoundingSet=//p' "$top/deploy/slipway-socket.service" | tr ' ' '\n' | sed 's/^CAP_/+/' |
    tr 'A-Z\n' 'a-z,' | sed 's/,$//')
case $kept in
    *~*) fail "the unit names the capabilities that it gives up: $kept" ;;
    +*,+sys_admin,*) ;;
    *) fail "the unit's capabilities: $kept" ;;
esac
cat >"$work/confined" <<END
#!/bin/sh
exec setpriv --no-new-privs --bounding-set=-all,$kept "$slipway" "\$@"
END
chmod +x "$work/confined"
start engine "$work/confined" socket engine --socket "$SLIPWAY_SOCKET"
engine=${started[0]}
wait_until 20 test -S "$SLIPWAY_SOCKET" || fail "no engine: $(cat "$work/engine.log")"
grep -q '^NoNewPrivs:[[:space:]]*1$' "/proc/$engine/status" || fail "the engine may have new privileges"
# CAP_SYS_MODULE is bit 16, and CAP_SYS_ADMIN bit 21 (capability.h).
rights=$((16#$(awk '$1 == "CapEff:" { print $2 }' "/proc/$engine/status")))
[ $((rights >> 16 & 1)):$((rights >> 21 & 1)) = 0:1 ] || fail "the engine's capabilities: $rights"
ok "an engine with $kept"

start namespace unshare --net sleep 100000
holder=${started[1]}
is_apart() { [ "$(readlink "/proc/$holder/ns/net")" != "$(readlink /proc/self/ns/net)" ]; }
wait_until 20 is_apart || fail "no network namespace: $(cat "$work/namespace.log")"
inside() { nsenter --net="/proc/$holder/ns/net" -- "$@"; }
inside ip link set lo up && inside ip address add 10.213.99.1/32 dev lo || fail "no address in the namespace"
carried() { inside awk '$1 == "lo:" { print $2 }' /proc/net/dev; }

chmod 711 "$work"
install -m 755 "$library" "$work/libslipway.so"
install -d -m 755 "$work/served"
head -c 4000000 /dev/urandom >"$work/served/big"
cat >"$work/nobody" <<END
#!/bin/sh
exec nsenter --net=/proc/$holder/ns/net -- setpriv --reuid=65534 --regid=65534 --clear-groups \
    env LD_PRELOAD="$work/libslipway.so" SLIPWAY_SOCKET="$SLIPWAY_SOCKET" "\$@"
END
chmod +x "$work/nobody"
start server "$work/nobody" python3 -m http.server 8001 --bind 10.213.99.1 --directory "$work/served"
wait_until 60 engine_lists "$SLIPWAY_SOCKET" 8001 || fail "the server does not listen: $(cat "$work/server.log" "$work/engine.log")"
before=$(carried)
"$work/nobody" curl -sS --noproxy '*' --max-time 300 http://10.213.99.1:8001/big >"$work/got" || fail "curl: $(cat "$work/engine.log")"
cmp -s "$work/got" "$work/served/big" || fail "another file"
[ $(($(carried) - before)) -lt 100000 ] || fail "the kernel carried it: $(cat "$work/engine.log")"
ok "it serves another user's programs at an address of another network namespace"

# As `systemctl reload` does, in the bounds of the unit.
timeout 60 "$work/confined" socket reload --engine "$SLIPWAY_SOCKET" >"$work/reload" 2>&1 || fail "reload: $(cat "$work/reload" "$work/engine.log")"
kill "$engine"
wait "$engine" || fail "the engine ends with $?: $(cat "$work/engine.log")"
[ ! -e "$SLIPWAY_SOCKET" ] || fail "its socket is left"
ok "it reads its policy anew, and ends in order"
