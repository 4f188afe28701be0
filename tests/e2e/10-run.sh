#!/usr/bin/env bash
# Sandboxes start, alone and many at once, and say where the time went.
. "$(dirname "$0")/lib.sh"
need_node
# All sandboxes boot, whatever the number of CPUs, and nothing is made after them.
stop_daemon
log=$SLIPWAY_DATA_DIR/daemon.log
rm -f "$log"
echo 'templates = "off"' >>"$SLIPWAY_CONFIG"

mkdir -p "$work/conf/sub"
echo 'hosts of mine' >"$work/hosts"; echo one >"$work/conf/a"; echo two >"$work/conf/sub/b"
chmod 640 "$work/conf/a"
out=$("$slipway" run --rm --timeline "$work/one.json" --read-only --copy "$work/hosts:/etc/hosts" --copy "$work/conf:/srv/app/conf" \
    --tmpfs /scratch:size=1m,mode=700 "$image" -- sh -c 'uname -r; grep ^PRETTY_NAME= /etc/os-release
    cat /etc/hosts /srv/app/conf/a /srv/app/conf/sub/b; stat -c "%a %u" /srv/app/conf/a
    stat -c %a /scratch; grep " /scratch " /proc/mounts | tr , "\n" | grep -cxE "noexec|size=1024k"
    head -c 2000000 /dev/zero >/scratch/x 2>/dev/null; stat -c %s /scratch/x') || fail "a sandbox did not run: $out"
grep -q 'Debian GNU/Linux 12' <<<"$out" || fail "no Debian in: $out"
ok "one sandbox runs Debian 12 on $(head -1 <<<"$out")"
[ "$(tail -n +3 <<<"$out")" = "hosts of mine
one
two
640 0
700
2
1048576" ] || fail "copies, --tmpfs: $out"
ok "copies of a file and of a directory are in the container, and a tmpfs that is bounded"

agent_ms=$(python3 - "$work/one.json" <<'P'
import json, sys
stages = json.load(open(sys.argv[1]))[0]["stages"]
names = {s["name"] for s in stages}
want = {"image", "cgroup", "dma-ram", "rootfs", "dma-image", "vf-attach", "vf-driver", "vmm", "kernel", "agent", "container"}
assert want <= names, f"missing stages: {want - names}"
print(max(s["end_ns"] for s in stages if s["name"] == "agent") // 1_000_000)
P
) || fail "the timeline lacks stages"
ok "agent reached after $agent_ms ms, all stages recorded"

# Twice as many as the smallest machine has processors.
out=$("$slipway" run --rm --count 4 --timeline "$work/four.svg" "$image" -- \
    sh -c 'uname -r; cat /etc/os-release' 2>"$work/four.err") || fail "four: status $?, $(grep -E 'slipway:|exit' "$work/four.err" | head -5)"
[ "$(grep -c 'PRETTY_NAME' <<<"$out")" = 4 ] || fail "four sandboxes printed: $out"
grep -q '<svg' "$work/four.svg" || fail "no SVG"
grep -q 'vf-attach' "$work/four.err" || fail "no table"
ok "four at once, table and SVG"
[ -z "$("$slipway" ps --quiet)" ] || fail "--rm left sandboxes: $("$slipway" ps)"
ok "--rm leaves nothing"
# Nothing was missing, so no warning says that something is.
[ -f "$log" ] || fail "no log of the daemon at $log"
! grep -E 'WARN.*(no file|No such file)' "$log" || fail "a good run warns"
ok "the log of good runs has no warning about a missing file"
