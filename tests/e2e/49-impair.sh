#!/usr/bin/env bash
# A port's link made worse, and what passes it captured: loss, delay and rate as pings from the host to a
# sandbox see them, a pcapng file that tcpdump reads, a trace, bad input. In a network namespace of the
# test's own. Times are bounds from below only: the machine may be busy.
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
need_network_node "$@"

# ping.py ADDRESS COUNT BYTES PATIENCE: sends all of them at once; prints answers, least round trip and the
# time from the first ping to the last answer, in ms: answers may be seen late, and then at once. It ends at the last answer,
# or when patience does.
cat >"$work/ping.py" <<'END'
import os, socket, struct, sys, time
address, count, size, patience = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
# A late answer to an earlier run is none to this one.
own = os.getpid() & 0xffff
ping = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
ping.settimeout(0.1)
def checksum(data):
    total = sum(struct.unpack("!%dH" % (len(data) // 2), data))
    while total >> 16: total = (total & 0xffff) + (total >> 16)
    return ~total & 0xffff
sent, back = {}, {}
for number in range(count):
    body = struct.pack("!HH", own, number) + b"p" * (size // 2 * 2)
    head = struct.pack("!BBH", 8, 0, checksum(b"\x08\x00\x00\x00" + body))
    sent[number] = time.monotonic()
    ping.sendto(head + body, (address, 0))
while len(back) < count and time.monotonic() < sent[count - 1] + patience:
    try:
        data = ping.recv(65536)
    except TimeoutError:
        continue
    kind, _, _, ident, number = struct.unpack("!BBHHH", data[20:28])
    if kind == 0 and ident == own:
        back.setdefault(number, time.monotonic())
least = min((back[n] - sent[n] for n in back), default=0)
spread = max(back.values(), default=sent[0]) - sent[0]
print(len(back), int(least * 1000), int(spread * 1000))
END
# pings_until FILE COUNT: pings again and again, until the file is there.
pings_until() {
    until [ -e "$work/$1" ] || [ ! -e "$work/ping.py" ]; do
        python3 "$work/ping.py" "$address" "$2" 56 2
        sleep 0.3
    done >"$work/last"
}
# probe COUNT BYTES PATIENCE: sets answers, least and spread.
probe() { read -r answers least spread <<<"$(python3 "$work/ping.py" "$address" "$@")"; }
impair() { "$slipway" port impair w "$@" >/dev/null || fail "port impair $*"; }
expect() { case "$2" in *"$1"*) ;; *) fail "$3: expected \"$1\", got: $2" ;; esac; }
refuses() {
    local expected=$1 told; shift
    told=$(timeout 20 "$slipway" port "$@" 2>&1 >/dev/null) && fail "port $* was taken"
    expect "$expected" "$told" "port $*"
    [ "$(printf '%s\n' "$told" | wc -l)" = 1 ] || fail "port $*: more than a line: $told"
}

"$slipway" run --name w --detach --wait-network "$image" sleep 3600 >/dev/null || fail "run"
address=$("$slipway" network inspect default | python3 -c 'import json,sys
print(json.load(sys.stdin)[0]["sandboxes"][0]["ipv4"])')
for _ in 1 2 3 4 5 6 7 8 9 10; do
    probe 10 56 20
    [ "$answers" = 10 ] && break
done
[ "$answers" = 10 ] || fail "a link that is well: $answers of 10 pings answered"

impair --delay 60ms
probe 5 56 120
{ [ "$answers" = 5 ] && [ "$least" -ge 120 ]; } || fail "60 ms each way: $answers of 5, $least ms"
expect "delay 60ms" "$("$slipway" port ls)" "port ls"
impair --delay 60ms --jitter 20ms --direction sent
probe 5 56 120
{ [ "$answers" = 5 ] && [ "$least" -ge 40 ]; } || fail "40 to 80 ms one way: $answers of 5, $least ms"
ok "delay, jitter and direction are kept"

impair --loss 50% --seed 5
for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
    probe 100 56 2
    # Fewer answers within 2 s are those of a guest that waits for a processor.
    [ "$answers" -lt 5 ] || break
done
{ [ "$answers" -ge 5 ] && [ "$answers" -le 50 ]; } || fail "50 % each way: $answers of 100 answered"
impair --loss 100%
probe 4 56 1
[ "$answers" = 0 ] || fail "everything is lost, and $answers of 4 answered"
counted() { case $("$slipway" port stats w) in *"received loss"*) ;; *) false ;; esac; }
wait_until 20 counted || fail "port stats: $("$slipway" port stats w; "$slipway" port stats)"
impair --rate 80kbit --burst 2000
probe 10 1400 120
{ [ "$answers" = 10 ] && [ "$spread" -ge 1000 ]; } || fail "10 kB/s: $answers of 10 within $spread ms"
impair --clear
probe 10 56 120
[ "$answers" = 10 ] || fail "cleared: $answers of 10 answered"
ok "loss and rate are kept, counted, and cleared"

# capture ARGUMENTS…: pings once it has begun, until it has what it wants.
"$slipway" port capture w -w "$work/a.pcapng" --count 12 2>"$work/told" & capture=$!
wait_until 20 grep -q '^capturing on w' "$work/told" || fail "capture: $(cat "$work/told")"
for _ in 1 2 3 4 5; do probe 6 56 60; done
wait_until 20 grep -q '^12 frames captured, 0 not' "$work/told" || fail "capture: $(cat "$work/told")"
wait "$capture" || fail "capture ended with $?"
if command -v tcpdump >/dev/null; then
    text=$(tcpdump -nr "$work/a.pcapng" icmp 2>"$work/tcpdump") || fail "tcpdump: $(cat "$work/tcpdump")"
    expect "> $address: ICMP echo request" "$text" "what the sandbox received"
    expect "$address > " "$(grep 'echo reply' <<<"$text")" "what the sandbox sent"
    # Pings until it has what it wants, whenever it begins.
    pings_until captured 8 & pinger=$!
    text=$(timeout 30 "$slipway" port capture w -w - --snaplen 64 --count 4 2>/dev/null | tcpdump -nr - 2>/dev/null)
    : >"$work/captured"; wait "$pinger"
    [ "$(wc -l <<<"$text")" = 4 ] || fail "a capture in a pipe: $text"
    ok "tcpdump reads a capture of both directions, from a file and a pipe"
else
    echo "SKIPPED: e2e/$test_name: reading a capture needs tcpdump"
fi

# Pings until a trace has seen some: it may begin late, and so may they.
pings_until traced 4 & pinger=$!
traced() {
    "$slipway" port trace w --duration 2s >"$work/trace" || fail "trace"
    grep -q '^received.*icmp' "$work/trace" && grep -qF "> $address, 98 bytes" "$work/trace"
}
wait_until 60 traced || fail "counts and headers of a trace: $(cat "$work/trace")"
: >"$work/traced"; wait "$pinger"
ok "a trace counts and shows headers"

refuses 'there is no port "nobody"' impair nobody --loss 1%
refuses 'there is no port "nobody"' capture nobody -w "$work/b.pcapng"
[ -e "$work/b.pcapng" ] && fail "a capture of nobody made a file"
refuses 'there is no port "nobody", and no network of that name is in use: give a network (in use: default)' stats nobody
refuses 'there is no switch "red"' impair red/w --loss 1%
refuses 'a rate of 0' impair w --rate 0bit
refuses 'a jitter can be as large as the delay' impair w --delay 1ms --jitter 2ms
refuses 'a delay is 60 s at most' impair w --delay 61s
refuses 'nothing to do to the port' impair w
refuses 'cannot write /nowhere/b' capture w -w /nowhere/b
case $("$slipway" port ls) in *delay* | *loss* | *rate*) fail "a refusal left something" ;; esac
ok "bad input: a line each, and nothing left"
