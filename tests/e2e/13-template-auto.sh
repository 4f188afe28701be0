#!/usr/bin/env bash
# Templates that the node makes by itself: for --from auto, for sandboxes that start together, and for images that are
# started often. A damaged one is made anew. In a network namespace of the test's own.
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
# shellcheck source=tests/e2e/templates.sh
. "$here/templates.sh"
need_network_node "$@"
need_native
start_keeper
start_daemon

# Templates of the node's own: the first sandbox boots and has the template made, the next one is a fork.
forks_of() { "$slipway" metrics | sed -n "s/^slipway_sandbox_forks_total{kind=\"$1\"} //p"; }
named=$(forks_of template)
[ "$(automatic)" = boot ] || fail "there is a template already: $(templates) $(explain)"
wait_until 120 has 1 || fail "no template is made: $(templates) $(explain)"
templates | grep -qx 'auto-[0-9a-f]* 256 1 virtio' || fail "templates: $(templates)"
[ "$(automatic)" = fork ] || fail "the second sandbox boots: $(templates) $(explain)"
[ "$(automatic --memory 320M --network none)" = boot ] || fail "another machine: $(templates) $(explain)"
wait_until 120 has 2 || fail "no second template is made: $(templates) $(explain)"
[ "$(automatic --memory 320M --network none)" = fork ] || fail "another machine boots again: $(templates) $(explain)"
[ -z "$("$slipway" ps --quiet)" ] || fail "a sandbox is left: $("$slipway" ps)"
ok "the node makes a template of each machine that is asked for with --from auto, and the next such sandbox is a fork"
[ "$(forks_of template) $(forks_of automatic)" = "$named 2" ] || fail "counts of forks: $("$slipway" metrics)"
ok "metrics tell forks of the node's own templates apart"

# Sandboxes that start together are forks without being told to. Of few, the first burst boots, and of more than two for
# each CPU, it waits for the template: one boot, and no kernel's stage in any of them.
# burst COUNT OPTION...: how sandboxes that start together began.
burst() {
    timeout 600 "$slipway" run --rm --count "$1" --timeline "$work/burst.json" "${@:2}" "$image" -- true >/dev/null 2>"$work/burst" ||
        fail "a burst of $*: $(tail -n 5 "$work/burst"; explain)"
    python3 -c 'import collections, json, sys
ways = collections.Counter("fork" if {"resume"} <= {one["name"] for one in run["stages"]} else "boot" for run in json.load(open(sys.argv[1])))
print(*(f"{way} {count}" for way, count in sorted(ways.items())))' "$work/burst.json"
}
many=$((2 * $(nproc) + 1))
began=$(burst 2 --network none --memory 288M); [ "$began" = "boot 2" ] || fail "two sandboxes do not boot: $began: $(templates) $(explain)"
wait_until 120 has 3 || fail "no template is made of two that booted: $(templates) $(explain)"
began=$(burst 2 --network none --memory 288M); [ "$began" = "fork 2" ] || fail "two sandboxes boot again: $began: $(templates) $(explain)"
began=$(burst "$many" --network none --memory 304M); [ "$began" = "fork $many" ] || fail "of $many sandboxes some boot: $began: $(templates) $(explain)"
has 4 || fail "no template of a burst, or several: $(templates)"
began=$(burst 2 --network none --memory 272M --max-memory 512M); [ "$began" = "boot 2" ] || fail "two sandboxes with room do not boot: $began: $(templates) $(explain)"
wait_until 120 has 5 || fail "no template with room is made: $(templates) $(explain)"
began=$(burst 2 --network none --memory 272M --max-memory 512M); [ "$began" = "fork 2" ] || fail "two sandboxes with room boot again: $began: $(templates) $(explain)"
# A pod with memory of containers, too. Another limit with the same regions is the same machine.
timeout 300 "$slipway" pod create --from auto --network none --memory 192M --bind-memory 100M first >/dev/null || fail "pod create: $(explain)"
wait_until 120 has 6 || fail "no template with memory of containers is made: $(templates) $(explain)"
timeout 300 "$slipway" pod create --from auto --network none --memory 192M --bind-memory 120M second >/dev/null || fail "pod create: $(explain)"
[[ "$(of_record first 'one["template"]') $(of_record second 'one["template"]')" =~ ^None\ auto- ]] || fail "pods with --from auto: $("$slipway" inspect first second)"
"$slipway" rm --force first second >/dev/null || fail "rm: $(explain)"
for made in $(templates | awk '$2 == 192 || $2 == 272 || $2 == 288 || $2 == 304 { print $1 }'); do
    "$slipway" template rm "$made" >/dev/null || fail "template rm: $(explain)"
done
[ -z "$("$slipway" ps --quiet)" ] || fail "a sandbox is left: $("$slipway" ps)"
ok "sandboxes that start together are forks; $many of them wait for their template"

# Two interfaces of a network namespace, whose other ends are down. The namespace's name is the machine's.
two=slipway-e2e-$$-two
ip netns add "$two" || fail "ip netns add"
for name in eth0 net1; do
    ip -n "$two" link add "$name" type veth peer name "far-$name" && ip -n "$two" link set "$name" up
done
own=$(templates | sed -n '1s/ .*//p')
named=$(refused run --rm --network-namespace "/run/netns/$two" --from "$own" "$image" -- true)
starts=$(for _ in 1 2; do automatic --network-namespace "/run/netns/$two"; done | xargs)
ip netns delete "$two"
grep -q "a sandbox with several network interfaces boots" <<<"$named" || fail "a template for two interfaces: $named"
[ "$starts" = "boot boot" ] || fail "two interfaces and --from auto: $starts $(explain)"
ok "a sandbox with several interfaces boots with --from auto, and a named template is refused"

# A damaged template is no error: the next sandbox boots, and the node makes the template again.
end_daemon TERM
for damaged in "$SLIPWAY_DATA_DIR"/templates/auto-*; do
    printf X | dd of="$damaged/memory" bs=1 seek=$((1 << 20)) conv=notrunc 2>/dev/null
done
start_daemon
[ "$(automatic)" = boot ] || fail "a damaged template: $(explain)"
forks() { [ "$(automatic)" = fork ]; }
wait_until 120 forks || fail "a damaged template is not made anew: $(templates) $(explain)"
for name in $(templates | cut -d ' ' -f 1); do "$slipway" template rm "$name" >/dev/null || fail "template rm: $(explain)"; done
ok "a damaged template of the node's own is made anew"

# Single sandboxes of an image that is started often do as with --from auto, without being told to.
end_daemon TERM
printf '%s\n' 'templates_after = 2' 'templates_within_s = 86400' >>"$SLIPWAY_CONFIG"
start_daemon
# single OPTION...: how a sandbox began, and why it booted or the name of its template, as inspect says it.
single() {
    timeout 300 "$slipway" run --name single --network none --timeline "$work/single.json" "$@" "$image" -- true || return
    began "$work/single.json"
    "$slipway" inspect single | python3 -c 'import json, sys
one = json.load(sys.stdin)[0]
print(one["template"] or one["template_why_not"])' || return
    "$slipway" rm single >/dev/null
}
# singly PATTERN OPTION...: what `single` says matches.
singly() {
    local said
    said=$(single "${@:2}" | xargs -d '\n')
    [[ $said =~ ^$1 ]] || fail "run ${*:2}: not $1: $said: $(templates) $(explain)"
}
singly 'boot its image was not started often'
has 0 || fail "a template after one start: $(templates)"
singly 'boot the node had no template'
wait_until 120 has 1 || fail "no template of an image that is started often: $(templates) $(explain)"
templates | grep -qx 'auto-[0-9a-f]* 256 1 none' || fail "templates: $(templates)"
singly 'fork auto-'
singly 'boot *$' --from none
singly 'boot its image was not started often' --memory 272M
singly 'boot its image was not started often' --max-memory 512M
singly 'fork auto-'
has 1 || fail "templates of sandboxes that were not started often: $(templates)"
"$slipway" template rm "$(templates | cut -d ' ' -f 1)" >/dev/null || fail "template rm: $(explain)"
ok "single sandboxes of an image that is started often are forks of a template of the node's own; others boot and say why"
