#!/usr/bin/env bash
# A client that sends garbage on its vfio-user socket changes nothing for the others.
. "$(dirname "$0")/lib.sh"
need_node

"$slipway" run -d --name good --memory 512M --volume data:64M "$image" -- sh -c '
    i=0; while fio --name=v --filename=/dev/slipway/data --rw=randwrite --bs=4k --size=8M --iodepth=32 \
        --ioengine=libaio --direct=1 --verify=crc32c --verify_fatal=1 --minimal >/dev/null; do
        echo round $i; i=$((i+1)); done; echo BROKEN' >/dev/null || fail "run"
wait_until 60 sh -c "'$slipway' logs good | grep -q 'round 1\$'" || fail "the neighbour does no I/O"
before=$("$slipway" logs good | grep -c round)
for i in 1 2 3 4; do
    "$slipway" endpoint create "evil$i" --socket "$work/evil$i" --disk ram:16M >/dev/null || fail "endpoint create"
done

python3 - "$work" <<'P' || fail "the garbage was not taken as it should"
import array, os, random, socket, struct, sys, time
random.seed(7)
def connect(i):
    s = socket.socket(socket.AF_UNIX); s.settimeout(60)
    end = time.monotonic() + 120
    while time.monotonic() < end:                                           # one client at a time: the rest queue
        try: s.connect(f"{sys.argv[1]}/evil{i}"); return s
        except BlockingIOError: time.sleep(0.01)
    sys.exit(f"evil{i} accepts nobody any more")
def message(id, command, payload, flags=0, size=None):
    return struct.pack("<HHIII", id, command, 16 + len(payload) if size is None else size, flags, 0) + payload
version = message(0, 1, struct.pack("<HH", 0, 1) + b'{"capabilities":{}}\0')
for round in range(60):
    s = connect(1)
    try:
        s.sendall(random.randbytes(random.randrange(1, 4096)))      # noise instead of a handshake
    except OSError: pass
    s.close()
for round in range(200):                                             # a handshake, then noise in frames
    s = connect(2)
    try:
        s.sendall(version)
        for _ in range(20):
            size = random.choice([None, 0, 1, 15, 16, 17, 0xffffffff, 0x7fffffff])
            s.sendall(message(1, random.randrange(0, 20), random.randbytes(random.randrange(0, 80)), random.randrange(0, 64), size))
    except OSError: pass
    s.close()
s = connect(3)                                                       # descriptors by the hundred
s.sendall(version)
fds = [os.open("/dev/null", os.O_RDWR) for _ in range(200)]
try:
    s.sendmsg([message(2, 2, b"\0" * 32)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
except OSError: pass
stuck = connect(4)                                                   # half a header, then silence
stuck.sendall(b"\0\0\1")
time.sleep(5)
P
rounds() { "$slipway" logs good | grep -c round; }
goes_on() { [ "$(rounds)" -gt "$before" ]; }
wait_until 60 goes_on
after=$(rounds)
is_state good running || fail "the neighbour ended: $("$slipway" logs --tail 3 good)"
"$slipway" logs good | grep -q BROKEN && fail "the neighbour's verified I/O broke"
[ "$after" -gt "$before" ] || fail "the neighbour stood still: $before, then $after rounds"
ok "the neighbour's verified I/O went on: $before rounds before, $after after"
"$slipway" endpoint ls | grep -q evil1 || fail "endpoint ls"
"$slipway" endpoint rm evil1 evil2 evil3 evil4 >/dev/null || fail "endpoint rm"
[ ! -e "$work/evil1" ] || fail "a socket is left"
"$slipway" rm -f good >/dev/null || fail "rm"
ok "the hostile clients' endpoints went without a trace"
