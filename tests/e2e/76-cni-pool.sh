#!/usr/bin/env bash
# Functions of pools by the CNI plugin: ADD takes one and names its socket, a guest in the namespace has it and goes on
# over kill -9 of the daemon, the next guest there has it too; DEL, with a daemon and without, and GC give it back; errors.
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
need_network_node "$@"
cni=${SLIPWAY_CNI:-$(dirname "$slipway")/../x86_64-unknown-linux-gnu/agent/slipway-cni}
[ -x "$cni" ] || fail "$cni is not built; \`make build\` builds it"
mine=slipway-cni-pool-$$
files=$SLIPWAY_DATA_DIR/networks/attachments
end_all() {
    [ -n "$daemon" ] && runs "$daemon" && { "$slipway" rm --force --all; "$slipway" port rm kept; } >/dev/null 2>&1
    for name in a b c; do ip netns delete "$mine-$name" 2>/dev/null; done
    rm -f "$SLIPWAY_RUN_DIR"/vf.ledger*
}
rm -f "$SLIPWAY_RUN_DIR"/vf.ledger*

pool=nics version=1.1.0 more=''
# call COMMAND NAME: the plugin's answer in $work/out, and its status.
call() {
    CNI_COMMAND=$1 CNI_CONTAINERID=$mine-$2 CNI_NETNS=/run/netns/$mine-$2 CNI_IFNAME=eth0 "$cni" >"$work/out" 2>"$work/err" \
        <<<"{\"cniVersion\": \"$version\", \"name\": \"blue\", \"type\": \"slipway-cni\", \"pool\": \"$pool\"$more}"
}
does() { call "$@" || fail "$1 $2: $(cat "$work/out" "$work/err") $(explain)"; }
# said EXPRESSION: a value of the answer, `x`.
said() { python3 -c 'import json, sys; x = json.load(open(sys.argv[1])); print(eval(sys.argv[2]))' "$work/out" "$1"; }
# refuses CODE WORDS COMMAND NAME
refuses() {
    local code=$1 words=$2; shift 2
    call "$@" && fail "$* was not refused: $(cat "$work/out")"
    [ "$(said 'x["code"]')" = "$code" ] && grep -qF -- "$words" "$work/out" || fail "$*: $(cat "$work/out" "$work/err")"
    ok "$1 $2 -> $(said '"%d %s" % (x["code"], x["msg"])')"
}
# of EXPRESSION: a value of the pool's functions `x`, of which `a` is that of the attachment of the namespace a, or None.
of() {
    "$slipway" vf inspect nics | python3 -c 'import json, sys
x = json.load(sys.stdin)[0]["functions"]
a = next((vf for vf in x if vf["owner"] == sys.argv[1]), None)
print(eval(sys.argv[2]))' "slipway-cni:blue,$mine-a,eth0" "$1"
}
are() { [ "$(of '",".join(sorted(vf["state"] for vf in x))')" = "$1" ]; }
become() { wait_until 30 are "$1" || fail "the pool: $("$slipway" vf inspect nics) $(explain)"; }
# begins WORDS…: a sandbox in the namespace a, which has the attachment's function and no other.
begins() {
    timeout 300 "$slipway" run --detach --name real --accel tcg --wait-network --network-namespace "/run/netns/$mine-a" \
        "$image" sleep 3600 >"$work/out" 2>&1 || fail "run: $(cat "$work/out") $(explain)"
    "$slipway" port ls --json | grep -qF '.net"' && fail "a function was made for it: $("$slipway" port ls)"
    reaches_gateway "a guest with the attachment's function"
}
gateway() { "$slipway" network inspect default | python3 -c 'import json, sys; print(json.load(sys.stdin)[0]["gateway"])'; }
reaches_gateway() { timeout 60 "$slipway" exec real ping -q -c 2 -W 20 "$(gateway)" >/dev/null || fail "$1: $(explain)"; }

start_keeper
start_daemon
for name in a b c; do ip netns add "$mine-$name" && ip -n "$mine-$name" link set lo up || fail "ip netns add"; done
refuses 50 'there is no pool' STATUS a
refuses 7 'there is no pool' ADD a
# Keeps the network's switch, which the pool is on.
"$slipway" port create kept --network default >/dev/null || fail "port create: $(explain)"
"$slipway" vf create nics --switch default --count 2 >/dev/null || fail "vf create: $(explain)"
"$slipway" vf create disks --disk ram:64M --count 1 >/dev/null || fail "vf create: $(explain)"
pool=disks refuses 7 'no interfaces' ADD a
[ -z "$(ls "$files")" ] || fail "left: $(ls "$files")"
become ready,ready
does STATUS a

does ADD a
[ "$(said 'x["interfaces"][0]["socketPath"]')" = "$(of 'a["socket_path"]')" ] || fail "ADD: $(cat "$work/out") $("$slipway" vf inspect nics)"
ip -n "$mine-a" -o link show eth0 | grep -q NO-CARRIER || fail "no placeholder: $(ip -n "$mine-a" link)"
number=$(of 'a["number"]')
version=1.0.0 does ADD b
[ "$(said 'x["interfaces"][0].get("socketPath")')" = None ] || fail "ADD by 1.0.0: $(cat "$work/out")"
are taken,taken || fail "the pool: $("$slipway" vf inspect nics)"
refuses 50 'no function ready' STATUS a
refuses 11 'no VF ready' ADD c
[ ! -e "$files/blue,$mine-c,eth0.json" ] || fail "left: $(ls "$files")"
does CHECK a
does DEL b; does DEL b
become ready,taken
ok "ADD takes a function and names its socket, DEL gives it back"

begins
end_daemon KILL
start_daemon
wait_until 30 is_state real running || fail "after a restart: $("$slipway" ps) $(explain)"
reaches_gateway "a guest after kill -9 of the daemon"
wait_until 30 call CHECK a || fail "CHECK after a restart: $(cat "$work/out")"
[ "$(of 'a["number"]')" = "$number" ] || fail "another function: $("$slipway" vf inspect nics)"
"$slipway" rm --force real >/dev/null || fail "rm: $(explain)"
are ready,taken || fail "the pool after the end: $("$slipway" vf inspect nics)"
ok "a guest in the namespace has the function and goes on over kill -9 of the daemon"
"$slipway" run --accel tcg --queues 2 --network-namespace "/run/netns/$mine-a" "$image" true >"$work/out" 2>&1 && fail "two queue pairs"
grep -q 'has a function of pool nics' "$work/out" || fail "two queue pairs: $(cat "$work/out")"
begins
said=$("$slipway" pause --to-file real 2>&1) && fail "the memory of a sandbox with the attachment's function is in a file"
[[ $said = *'that of a network namespace or of a pool'* ]] || fail "pause --to-file: $said"
reaches_gateway "a guest whose memory cannot be in a file"
"$slipway" rm --force real >/dev/null || fail "rm: $(explain)"
ok "and so does the next guest there, whose memory cannot be in a file"

end_daemon KILL
does DEL a
[ -e "$files/blue,$mine-a,eth0.gone" ] || fail "no note: $(ls "$files")"
start_daemon
become ready,ready
no_files() { [ -z "$(ls "$files")" ]; }
wait_until 30 no_files || fail "left: $(ls "$files")"
ok "DEL without a daemon: the next one gives the function back"

more=', "runtimeConfig": {"bandwidth": {"ingressRate": 800000000, "egressRate": 1600000000, "egressBurst": 80000000}}' does ADD a
rates=$("$slipway" port inspect "$(of '"nics.%d" % a["number"]')" | python3 -c 'import json, sys
x = json.load(sys.stdin)[0]; print(x["receive_bytes_per_second"], x["max_bytes_per_second"], x["max_byte_burst"])')
[ "$rates" = "100000000 200000000 10000000" ] || fail "bandwidth: $rates"
"$slipway" vf return nics --owner "slipway-cni:blue,$mine-a,eth0" >/dev/null || fail "vf return: $(explain)"
refuses 104 'has lost its function' CHECK a
does DEL a
become ready,ready
does ADD a; does ADD b
more=", \"cni.dev/valid-attachments\": [{\"containerID\": \"$mine-b\", \"ifname\": \"eth0\"}]" does GC a
become ready,taken
does GC a
become ready,ready
[ -z "$(ls "$files")" ] || fail "left: $(ls "$files")"
ok "the function has the rates of bandwidth; CHECK sees one that is lost; GC gives back what is not valid"
"$slipway" vf rm nics >/dev/null && "$slipway" vf rm disks >/dev/null && "$slipway" port rm kept >/dev/null || fail "vf rm: $(explain)"
