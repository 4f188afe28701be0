#!/usr/bin/env bash
# `slipway metrics`: what a sandbox's start adds to the figures, those of reactors, templates, the socket engine and a function,
# their server, and what it says without a daemon. Traces of the same starts, at a collector. `slipway inspect --live`: the
# queues of a sandbox.
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
need_node
for program in curl python3; do command -v "$program" >/dev/null || skip "$program"; done
stop_daemon
server='' engine='' serving=''
end_all() {
    local pid
    for pid in $server $engine $serving; do kill -9 "$pid" 2>/dev/null; done
    rm -f "$SLIPWAY_RUN_DIR"/vf.ledger*
}
rm -f "$SLIPWAY_RUN_DIR"/vf.ledger*

"$slipway" metrics >"$work/out" 2>&1 && fail "figures without a daemon: $(cat "$work/out")"
grep -q 'no daemon runs at' "$work/out" || fail "without a daemon: $(cat "$work/out")"
[ ! -e "$SLIPWAY_RUN_DIR/slipway.sock" ] || fail "a question for figures started a daemon"
ok "without a daemon -> $(cat "$work/out")"

start_collector
export TRACEPARENT=$traceparent
start_daemon
"$slipway" metrics --listen 127.0.0.1:0 2>"$work/server" & server=$!
wait_until 20 grep -q '^Serving ' "$work/server" || fail "no server: $(cat "$work/server")"
url=$(sed -n 's/^Serving //p' "$work/server")
figure() { "$slipway" metrics | awk -v name="$1" '$1 == name { print $2; found = 1 } END { exit !found }'; }

[ "$(figure 'slipway_sandbox_starts_total{outcome="running"}')" = 0 ] || fail "starts before the first: $("$slipway" metrics)"
"$slipway" run -d --name one "$image" -- sleep 100000 >/dev/null || fail "run: $(explain)"
[ "$(figure 'slipway_sandbox_starts_total{outcome="running"}')" = 1 ] || fail "after a start: $("$slipway" metrics)"
[ "$(figure 'slipway_sandboxes{state="running"}')" = 1 ] || fail "one runs: $("$slipway" metrics)"
for stage in cgroup rootfs vf-attach vmm kernel agent container total; do
    [ "$(figure "slipway_sandbox_start_seconds_count{stage=\"$stage\"}")" = 1 ] || fail "the stage $stage: $("$slipway" metrics)"
done
figure 'slipway_build_info{version="'"$("$slipway" --version | cut -d ' ' -f 2)"'"}' >/dev/null || fail "no version: $("$slipway" metrics)"
"$slipway" metrics >"$work/out"
grep -q '^slipway_endpoint_messages_total{endpoint=' "$work/out" || fail "no endpoint: $("$slipway" metrics)"
id=$("$slipway" inspect one | python3 -c 'import json, sys; print(json.load(sys.stdin)[0]["id"])')
io() { figure "slipway_endpoint_$1_total{endpoint=\"$id\"}"; }
[ "$(io reads)" -gt 0 ] && [ "$(io read_bytes)" -gt 0 ] || fail "the guest has read its root: $("$slipway" metrics)"
[ "$(io media_errors)" = 0 ] || fail "errors of disks: $("$slipway" metrics)"
wrote=$(io written_bytes)
timeout 120 "$slipway" exec one -- sh -c 'head -c 1048576 /dev/urandom >/file && sync' || fail "exec: $(explain)"
more_written() { [ "$(io written_bytes)" -ge $((wrote + 1048576)) ]; }
wait_until 20 more_written || fail "after writes of 1 MiB to its root: $("$slipway" metrics)"
ok "a start is counted, with its stages; so is the I/O of its disks"

[ "$(figure "slipway_endpoint_connected{endpoint=\"$id\"}")" = 1 ] || fail "its VMM is connected: $("$slipway" metrics)"
[ "$(figure "slipway_endpoint_dma_mapped_bytes{endpoint=\"$id\"}")" -gt 0 ] || fail "its memory is mapped: $("$slipway" metrics)"
of_reactors() { "$slipway" metrics | awk -v name="slipway_reactor_$1{" 'index($1, name) == 1 { sum += $2 } END { print sum + 0 }'; }
[ "$(of_reactors endpoints)" -ge 1 ] || fail "reactors have no endpoints: $("$slipway" metrics)"
awk -v busy="$(of_reactors busy_seconds_total)" 'BEGIN { exit !(busy > 0) }' || fail "no reactor was busy: $("$slipway" metrics)"
ok "reactors have served its endpoints"

for kind in template automatic snapshot; do
    figure "slipway_saved_machines{kind=\"$kind\"}" >/dev/null || fail "no number of machines, $kind: $("$slipway" metrics)"
done
[ "$(figure 'slipway_sandbox_forks_total{kind="snapshot"}')" = 0 ] || fail "a fork before the first: $("$slipway" metrics)"

# Its socket is where the engine of a node has it.
[ "$(figure slipway_socket_engine_up)" = 0 ] || fail "a socket engine serves: $("$slipway" metrics)"
"$slipway" socket engine --socket "$SLIPWAY_RUN_DIR/socket.sock" 2>"$work/engine" & engine=$!
engine_is() { [ "$(figure slipway_socket_engine_up)" = "$1" ]; }
wait_until 20 engine_is 1 || fail "the socket engine: $(cat "$work/engine"; "$slipway" metrics)"
nobody_uses_it() { [ "$(figure slipway_socket_families)" = 0 ] && [ "$(figure slipway_socket_sent_bytes_total)" = 0 ]; }
wait_until 20 nobody_uses_it || fail "nobody uses the engine: $("$slipway" metrics)"
kill -STOP "$engine"
engine_is 0 || fail "an engine that is stopped: $("$slipway" metrics)"
kill -CONT "$engine"
wait_until 20 engine_is 1 || fail "an engine that goes on: $("$slipway" metrics)"
kill "$engine"; wait "$engine" 2>/dev/null; engine=''
ok "a socket engine has its figures, and nothing waits for one that is stopped"

# A sum of a field of the I/O queues, or the numbers of all submission queues.
live() {
    "$slipway" inspect --live one --json | python3 -c '
import json, sys
id, kind, field = sys.argv[1:]
live = json.load(sys.stdin)
[view] = [one for one in live["endpoints"] if one["id"] == id]
assert view["kind"] == "nvme" and view["server"]["stage"] == "connected" and view["server"]["mapped_bytes"] > 0, view
threads = [thread["view"] for thread in view["threads"]]
assert threads[0]["controller"]["phase"] == "enabled", threads
queues = [queue for thread in threads for queue in thread[kind]]
print(*sorted(queue["id"] for queue in queues) if field == "id" else [sum(queue[field] for queue in queues if queue["id"])])
' "$id" "$@"
}
numbers=$(live submission id) || fail "the live objects: $("$slipway" inspect --live one)"
[[ "$numbers" == "0 1"* ]] || fail "the queues of an idle sandbox: $numbers"
[ "$(live completion id)" = "$numbers" ] || fail "the completion queues: $(live completion id), not $numbers"
fetched=$(live submission fetched) posted=$(live completion posted)
timeout 120 "$slipway" exec one -- sh -c 'head -c 1048576 /dev/urandom >/more && sync' || fail "exec: $(explain)"
moved() { [ "$(live submission fetched)" -gt "$fetched" ] && [ "$(live completion posted)" -gt "$posted" ]; }
wait_until 20 moved || fail "the queues after writes: $("$slipway" inspect --live one)"
no_flight() { [ "$(live submission in_flight)" = 0 ]; }
wait_until 20 no_flight || fail "commands in flight: $("$slipway" inspect --live one)"
"$slipway" inspect --live one >"$work/out" || fail "as text: $(cat "$work/out")"
grep -q "^endpoint $id (nvme): connected" "$work/out" || fail "no endpoint: $(cat "$work/out")"
grep -q '^  home on reactor [0-9]*: running' "$work/out" || fail "no thread: $(cat "$work/out")"
grep -q '^    SQ  *CQ  *SIZE' "$work/out" || fail "no queues: $(cat "$work/out")"
"$slipway" inspect --live >"$work/out" || fail "all of it: $(cat "$work/out")"
grep -q '^REACTOR' "$work/out" && grep -q "^endpoint $id " "$work/out" || fail "all of it: $(cat "$work/out")"
"$slipway" inspect --live nobody >"$work/out" 2>&1 && fail "the live objects of nobody: $(cat "$work/out")"
grep -q 'there is no endpoint "nobody"' "$work/out" || fail "nobody: $(cat "$work/out")"
ok "the queues of a sandbox are named while it is idle, and its writes move their numbers ($numbers)"

run=slipway.sandbox.v1.Sandboxes/Run
has_span() { [ -n "$(spans_of "$1")" ]; }
wait_until 20 has_span "$run" || fail "no span of the start: $(cat "$work/spans") $(explain)"
call=$(spans_of "$run" | cut -d ' ' -f 2)
[ "$(spans_of "$run" | cut -d ' ' -f 1,3,4)" = "$trace $caller ok" ] || fail "the call: $(spans_of "$run")"
spans_of "$run" | grep ' container.name=one ' >/dev/null || fail "the call's names: $(spans_of "$run")"
# The stages come before the call's end; kernel and agent are the guest's.
for stage in cgroup rootfs vf-attach vmm kernel agent container; do
    spans_of "$stage" | grep "^$trace [0-9a-f]* $call ok " >/dev/null || fail "the span of $stage: $(cat "$work/spans")"
done
sent() { [ "$(figure 'slipway_trace_spans_total{outcome="sent"}')" -ge "$(wc -l <"$work/spans")" ]; }
wait_until 20 sent || fail "spans sent: $("$slipway" metrics)"
# A collector that stands still for longer than the daemon waits loses a batch, and the log says so. Nothing else drops a span.
stood_still() { grep 'the collector takes no spans' "$work/daemon.log" | grep -q 'no answer within'; }
[ "$(figure 'slipway_trace_spans_total{outcome="dropped"}')" = 0 ] || stood_still || fail "spans dropped: $("$slipway" metrics)"
ok "the start is a part of its caller's trace: $(wc -l <"$work/spans") spans"

# The server's answer may be a second old.
sleep 1.1
curl -s "$url" >"$work/served"
grep -qx 'slipway_sandboxes{state="running"} 1' "$work/served" || fail "served: $(cat "$work/served")"
[ "$(tail -n 1 "$work/served")" = '# EOF' ] || fail "the text is cut: $(cat "$work/served")"
ok "the server has the same; $(grep -vc '^#' "$work/served") figures"

"$slipway" run --name two "$image" -- nosuchprog >/dev/null 2>&1 && fail "a program that is not there ran"
[ "$(figure 'slipway_sandbox_starts_total{outcome="running"}')" = 1 ] || fail "after a failure: $("$slipway" metrics)"
[ "$(figure 'slipway_sandbox_starts_total{outcome="failed"}')" = 1 ] || fail "after a failure: $("$slipway" metrics)"
ok "a start that failed is no start that ran"
two_failed() { spans_of "$run" | grep ' error .* container.name=two ' >/dev/null; }
wait_until 20 two_failed || fail "the span of the start that failed: $(spans_of "$run")"
spans_of container | grep ' error ' >/dev/null || fail "the span of the stage that failed: $(spans_of container)"
ok "its span and that of its container say so"

figure 'slipway_vf_pool_takes_total{pool="drives"}' >/dev/null && fail "a pool before it is made: $("$slipway" metrics)"
"$slipway" vf create drives --disk ram:1M --count 2 >/dev/null || fail "vf create: $(explain)"
vfs_are() { [ "$(figure "slipway_vf_pool_functions{pool=\"drives\",state=\"$1\"}")" = "$2" ]; }
wait_until 60 vfs_are ready 2 || fail "a pool that was made: $("$slipway" metrics)"
"$slipway" vf take drives --owner test:one >/dev/null || fail "vf take: $(explain)"
"$slipway" vf take drives --owner test:one >/dev/null 2>&1 && fail "an owner has two functions"
if ! vfs_are ready 1 || ! vfs_are taken 1; then fail "after a take: $("$slipway" metrics)"; fi
[ "$(figure 'slipway_vf_pool_takes_total{pool="drives"}')" = 1 ] || fail "takes: $("$slipway" metrics)"
[ "$(figure 'slipway_vf_pool_refusals_total{pool="drives"}')" = 1 ] || fail "refusals: $("$slipway" metrics)"
resets=$(figure 'slipway_vf_pool_resets_total{pool="drives"}')
"$slipway" vf return drives --owner test:one >/dev/null || fail "vf return: $(explain)"
wait_until 60 vfs_are ready 2 || fail "after a return: $("$slipway" metrics)"
[ "$(figure 'slipway_vf_pool_resets_total{pool="drives"}')" = $((resets + 1)) ] || fail "resets: $("$slipway" metrics)"
"$slipway" vf rm drives >/dev/null || fail "vf rm: $(explain)"
ok "a pool of virtual functions has its states, takes, refusals and resets"

cni=${SLIPWAY_CNI:-$(dirname "$slipway")/../x86_64-unknown-linux-gnu/agent/slipway-cni}
[ -x "$cni" ] || fail "$cni is not built; \`make build\` builds it"
call() {
    CNI_COMMAND=$1 CNI_CONTAINERID=none CNI_NETNS=/run/netns/none CNI_IFNAME=eth0 CNI_PATH=/opt/cni/bin "$cni" \
        <<<'{"cniVersion": "1.1.0", "name": "metrics", "type": "slipway-cni"}' >"$work/out" 2>&1
}
operations() { figure "slipway_cni_operations_total{command=\"$1\",outcome=\"$2\"}"; }
[ "$(operations DEL succeeded)" = 0 ] || fail "operations before the first: $("$slipway" metrics)"
call DEL || fail "DEL of what is not there: $(cat "$work/out")"
call CHECK && fail "CHECK of what is not there: $(cat "$work/out")"
[ "$(operations DEL succeeded):$(operations DEL failed)" = 1:0 ] || fail "after a DEL: $("$slipway" metrics)"
[ "$(operations CHECK succeeded):$(operations CHECK failed)" = 0:1 ] || fail "after a CHECK: $("$slipway" metrics)"
[ "$(figure 'slipway_cni_operation_seconds_count{command="DEL"}')" = 1 ] || fail "durations: $("$slipway" metrics)"
ok "operations of the CNI plugin are counted by outcome"

"$slipway" function serve --listen 127.0.0.1:0 --max-sandboxes 1 --from none --timeout 1h --queue-time 1h --keep-alive 1h few "$image" \
    -- cat 2>"$work/few" & serving=$!
wait_until 60 grep -q '^Serving few ' "$work/few" || fail "no server of a function: $(cat "$work/few")"
few() { [ "$(figure "slipway_function_$1{function=\"few\"}")" = "$2" ]; }
# A server on a busy machine may not tell its figures in time.
few_had() { few up 1 && few invocations_total "$1" && few failed_invocations_total 0 && few sandboxes "$1"; }
wait_until 60 few_had 0 || fail "before the first invocation: $("$slipway" metrics)"
timeout 300 "$slipway" function invoke few >/dev/null 2>"$work/out" || fail "invoke: $(cat "$work/out" "$work/few")"
wait_until 60 few_had 1 || fail "after one: $("$slipway" metrics)"
kill -9 "$serving"; wait "$serving" 2>/dev/null; serving=''
few up 0 || fail "a server that was killed: $("$slipway" metrics)"
figure 'slipway_function_replicas{function="few"}' >/dev/null && fail "figures of a server that was killed: $("$slipway" metrics)"
rm -f "$SLIPWAY_RUN_DIR"/functions/few.*
timeout 60 "$slipway" rm --force few-1 >/dev/null || fail "the function's sandbox: $(explain)"
ok "a function has its figures, and a server that was killed has none"

status() { curl -s -o "$work/body" -w '%{http_code}' "$@"; }
[ "$(status "${url%/metrics}/other")" = 404 ] || fail "another path: $(cat "$work/body")"
[ "$(status -X POST "$url")" = 405 ] || fail "POST: $(cat "$work/body")"
# Clients that send nothing take no place for long, and none from others.
for _ in 1 2 3 4; do (exec 3<>"/dev/tcp/127.0.0.1/$(sed 's,.*:\([0-9]*\)/.*,\1,' <<<"$url")"; sleep 5) & done
[ "$(status -m 120 "$url")" = 200 ] || fail "beside silent clients: $(cat "$work/body")"
"$slipway" rm --force one two >/dev/null
end_daemon KILL
sleep 1.1
[ "$(status "$url")" = 503 ] || fail "without a daemon: $(cat "$work/body")"
grep -q 'no daemon runs' "$work/body" || fail "without a daemon: $(cat "$work/body")"
ok "404, 405, 503 -> $(cat "$work/body")"
start_daemon
[ "$(status "$url")" = 200 ] || fail "the next daemon: $(cat "$work/body")"
ok "the server finds the next daemon"

"$slipway" metrics --listen nowhere >"$work/out" 2>&1 && fail "an address that is none"
ok "--listen nowhere -> $(head -n 1 "$work/out")"
