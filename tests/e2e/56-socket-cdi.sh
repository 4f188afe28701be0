#!/usr/bin/env bash
# The sockets of the engine as a CDI device of ordinary containers: what is written is what the specification
# allows, and a container that is given it, and nothing else of the host's, talks past its kernel.
if [ "$(id -u)" = 0 ] && [ -z "${SLIPWAY_E2E_NAMESPACE:-}" ]; then
    SLIPWAY_E2E_NAMESPACE=1 exec unshare --net -- "$0" "$@"
fi
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
[ "$(id -u)" = 0 ] || skip "root, for namespaces"
for program in ip python3 unshare; do command -v "$program" >/dev/null || skip "$program"; done
[ -x "$slipway" ] || fail "$slipway is not built; \`make build\` builds it"
[ -f "$(dirname "$(readlink -f "$slipway")")/libslipway.so" ] || skip "libslipway.so beside $slipway"
ip link set lo up
export SLIPWAY_SOCKET=$work/engine.sock
started=()
end_all() {
    local pid
    # unshare heeds nothing less; its container ends with it.
    for pid in "${started[@]}"; do kill -9 "$pid" 2>/dev/null; done
    for pid in "${started[@]}"; do wait "$pid" 2>/dev/null; done
}
trap 'status=$?; end_all; rm -rf "$work"; exit "$status"' EXIT
carried() { awk '$1 == "lo:" { print $2 }' /proc/net/dev; }

# What the specification wants of a description, and a container of it by hand: a root of the host's own files in
# namespaces of its own, with the mounts and the variables that the device says, as an OCI runtime makes them.
cat >"$work/cdi.py" <<'PYTHON'
import ctypes, json, os, re, sys
spec = json.load(open(sys.argv[1]))
assert set(spec) == {"cdiVersion", "kind", "devices"} and spec["devices"]
assert re.fullmatch(r"\d+\.\d+\.\d+", spec["cdiVersion"])
vendor, name = spec["kind"].split("/")
assert re.fullmatch(r"[a-zA-Z]([\w.-]*[a-zA-Z0-9])?", vendor) and re.fullmatch(r"[a-zA-Z][\w-]*[a-zA-Z0-9]", name)
for one in spec["devices"]:
    assert set(one) == {"name", "containerEdits"} and re.fullmatch(r"[a-zA-Z0-9]([\w.:-]*[a-zA-Z0-9])?", one["name"])
    assert set(one["containerEdits"]) == {"env", "mounts"}
    assert all(re.fullmatch(r"\w+=.*", text) for text in one["containerEdits"]["env"])
    for mount in one["containerEdits"]["mounts"]:
        assert set(mount) == {"hostPath", "containerPath", "options"} and all(type(o) is str for o in mount["options"])
        assert mount["hostPath"].startswith("/") and mount["containerPath"].startswith("/")
if len(sys.argv) == 2:
    print(" ".join(f"{spec['kind']}={one['name']}" for one in spec["devices"]))
    sys.exit()
libc = ctypes.CDLL(None, use_errno=True)
RDONLY, NOSUID, NODEV, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
FLAGS = {"ro": RDONLY, "nosuid": NOSUID, "nodev": NODEV, "rbind": BIND | REC, "bind": BIND}
def mount(source, target, kind=None, flags=0):
    if libc.mount(os.fsencode(source), os.fsencode(target), kind, flags, None):
        raise OSError(ctypes.get_errno(), target)
edits = next(one for one in spec["devices"] if one["name"] == sys.argv[2])["containerEdits"]
mount("none", "/", None, REC | PRIVATE)
sources = [os.open(one["hostPath"], os.O_PATH) for one in edits["mounts"]]
mount("none", "/run", b"tmpfs")
for one, source in zip(edits["mounts"], sources):
    flags = 0
    for option in one["options"]: flags |= FLAGS[option]
    path, target = f"/proc/self/fd/{source}", one["containerPath"]
    os.makedirs(os.path.dirname(target), exist_ok=True)
    os.makedirs(target) if os.path.isdir(path) else open(target, "w").close()
    mount(path, target, None, flags & (BIND | REC))
    mount("none", target, None, flags & ~REC | REMOUNT)
environment = dict(text.split("=", 1) for text in edits["env"])
os.execvpe(sys.argv[3], sys.argv[3:], {"PATH": os.environ["PATH"], **environment})
PYTHON
contained=(unshare --mount --pid --ipc --uts --fork --kill-child -- python3 "$work/cdi.py" "$work/cdi/slipway.json" glibc)

"$slipway" socket cdi --output "$work/cdi/slipway.json" 2>"$work/said" || fail "socket cdi: $(cat "$work/said")"
grep -q 'no engine serves' "$work/said" || fail "without an engine nothing is said: $(cat "$work/said")"
devices=$(python3 "$work/cdi.py" "$work/cdi/slipway.json") || fail "no description: $(cat "$work/cdi/slipway.json")"
case " $devices " in *" slipway.io/socket=glibc "*) ;; *) fail "devices: $devices" ;; esac
[ "$("$slipway" socket cdi --output - | python3 "$work/cdi.py" /dev/stdin)" = "$devices" ] || fail "it prints another one"
ok "the description has what the specification allows: $devices"

"$slipway" socket engine --policy /none --links /none >"$work/engine.log" 2>&1 & started+=("$!")
wait_until 20 test -S "$work/engine.d/engine.sock" || fail "no engine: $(cat "$work/engine.log")"
[ "$(ls -A "$work/engine.d")" = engine.sock ] || fail "the engine's folder has more: $(ls -A "$work/engine.d")"
cat >"$work/talk.py" <<'PYTHON'
import os, socket, sys
assert not any("engine.lock" in name or name == "slipway.sock" for name in os.listdir("/run/slipway"))
for name in "/run/slipway/libslipway.so", "/run/slipway/socket.d/x":
    try:
        open(name, "ab").close()
        sys.exit(f"{name} can be written")
    except OSError:
        pass
if sys.argv[1] == "serve":
    server = socket.create_server(("127.0.0.1", 8101))
    print("serves", flush=True)
    while True:
        peer, _ = server.accept()
        with peer:
            while data := peer.recv(65536):
                peer.sendall(data)
sock = socket.create_connection(("127.0.0.1", 8101))
sock.settimeout(120)
for _ in range(64):
    data = os.urandom(65536)
    sock.sendall(data)
    got = b""
    while len(got) < len(data):
        got += sock.recv(65536)
    assert got == data
PYTHON
# talk: bytes that the kernel's loopback carried of eight million.
talk() {
    local before
    before=$(carried)
    "${contained[@]}" timeout 300 python3 "$work/talk.py" talk >"$work/talk" 2>&1 || fail "a container's client: $(cat "$work/talk")"
    echo $(($(carried) - before))
}
serve() {
    # What an earlier one said is there until the new one begins.
    rm -f "$work/serve"
    "${contained[@]}" python3 "$work/talk.py" serve >"$work/serve" 2>&1 & started+=("$!")
    wait_until 20 grep -q serves "$work/serve" || fail "a container's server: $(cat "$work/serve")"
}
serve
count=$(talk) || exit 1
[ "$count" -lt 200000 ] || fail "the kernel carried $count bytes of 8 million"
ok "two containers of one network namespace talk past the kernel, which carried $count bytes of 8 million"

# What was given to containers is a folder: they find the next engine in it.
# shellcheck disable=SC2016 # the container's
"${contained[@]}" sh -c 'while [ ! -e "$1" ]; do sleep 0.1; done; exec python3 "$0" talk' "$work/talk.py" "$work/next" >"$work/late" 2>&1 & late=$!
kill "${started[0]}" && wait "${started[0]}"
[ ! -e "$work/engine.d/engine.sock" ] || fail "the engine left its socket to containers"
"$slipway" socket engine --policy /none --links /none >"$work/engine.log" 2>&1 & started+=("$!")
wait_until 20 test -S "$work/engine.d/engine.sock" || fail "no second engine: $(cat "$work/engine.log")"
kill -9 "${started[1]}"; wait "${started[1]}" 2>/dev/null
# Its container ends a moment later, and has port 8101 (1fa5) until then.
free() { ! grep -qi ':1fa5 [0-9a-f:]* 0a ' /proc/net/tcp; }
wait_until 20 free || fail "the first server does not end"
serve
before=$(carried)
touch "$work/next"
wait "$late" || fail "a container that is older than the engine: $(cat "$work/late")"
count=$(($(carried) - before))
[ "$count" -lt 200000 ] || fail "with the next engine the kernel carried $count bytes of 8 million"
ok "a container that was there before finds the next engine"
