#!/usr/bin/env bash
# An e1000 in place of virtio-net, with the driver that a stock Linux has: names, frames of every size both ways,
# interface down and up, bad input. Needs a guest kernel with the driver (`deploy/setup/setup.sh e1000`).
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
# shellcheck source=tests/e2e/e1000.sh
. "$here/e1000.sh"
command -v iperf3 >/dev/null || skip "iperf3"
need_e1000_guests "$@"

"$slipway" run --nic e2000 "$image" true 2>"$work/error" && fail "a kind of interface that is none is taken"
grep -q "virtio.*e1000.*e1000-csb" "$work/error" || fail "no list of kinds: $(cat "$work/error")"
"$slipway" run --nic e1000 --queues 2 "$image" true 2>"$work/error" && fail "an e1000 with two queue pairs is taken"
grep -q "one queue pair" "$work/error" || fail "no word about queue pairs: $(cat "$work/error")"
"$slipway" run --nic virtio --nic-interval 1ms "$image" true 2>"$work/error" && fail "virtio-net has an interval between interrupts"
grep -q "choose --nic e1000" "$work/error" || fail "no next step: $(cat "$work/error")"
"$slipway" run --nic e1000 --nic-interval 17ms "$image" true 2>"$work/error" && fail "an interval of 17 ms is taken"
grep -q "at most 16.7 ms" "$work/error" || fail "no longest interval: $(cat "$work/error")"
ok "bad input is one clear line"

boot e1000 1
ok "the guest's own driver e1000 has bound the interface"
start_peers
boot_neighbour
streams "a neighbour with virtio-net" neighbour
ok "streams between an e1000 and virtio-net, both ways, arrive whole"
"$slipway" port inspect nic | python3 -c 'import json, sys
work = json.load(sys.stdin)[0]["e1000"]
exits = work["exits_by_register"]
assert exits["TDT"]["writes"] > 0 and exits["ICR"]["reads"] > 0 and work["exits"] > work["interrupts"] > 0, work
# Segments of up to 64 KiB count as frames.
assert 0 < work["interrupts_per_frame"] and min(work["frames_sent"], work["frames_received"]) > 10, work' \
    || fail "port inspect: $("$slipway" port inspect nic)"
"$slipway" port inspect neighbour | grep -q '"e1000": null' || fail "port inspect: $("$slipway" port inspect neighbour)"
ok "exits, kicks and interrupts of an e1000 are counted"

checks "the stock driver"
no_errors
ok "no errors are counted, and the kernel does not complain"
"$slipway" rm --force nic >/dev/null

boot_jumbo e1000-csb 1 --nic-interval 5ms
jumbo "the stock driver beside a block"
no_errors
ok "an e1000 with a communication status block is a plain one for a driver that does not know it; an MTU of 9000"

# interrupts: those of the guest's interface until now.
interrupts() { "$slipway" port inspect nic | sed -n 's/.*"interrupts": \([0-9]*\).*/\1/p'; }
begin=$(date +%s%N)
before=$(interrupts)
guest "ping -q -i 0.002 -c 500 -w 600 $gateway" >"$work/ping" || fail "no answer: $(cat "$work/ping")"
count=$(($(interrupts) - before))
most=$((($(date +%s%N) - begin) / 5000000 + 2))
[ "$count" -gt 0 ] && [ "$count" -le "$most" ] || fail "$count interrupts in a time that has room for $most"
ok "at most an interrupt in 5 ms, as the host has it: $count, of $most at most, for 500 pings"
