#!/usr/bin/env bash
# Named disks under running guests: shared by two, attached, detached, resized; Linux rescans by itself.
. "$(dirname "$0")/lib.sh"
need_node

# in_guest NAME COMMAND…: a command in a running sandbox.
in_guest() { local name=$1; shift; "$slipway" exec "$name" "$@"; }
# sectors NAME NSID: what the guest's kernel thinks the namespace has, in sectors of 512 bytes.
sectors() { in_guest "$1" cat "/sys/class/block/nvme0n$2/size" 2>/dev/null; }
has_sectors() { [ "$(sectors "$1" "$2")" = "$3" ]; }
id_of() { "$slipway" inspect "$1" | python3 -c 'import json,sys; print(json.load(sys.stdin)[0]["id"])'; }

truncate -s 64M "$work/shared.img"
"$slipway" disk create shared "file:$work/shared.img" >/dev/null || fail "disk create"
"$slipway" disk create shared ram:1M 2>"$work/err" && fail "a name was given twice"
grep -q 'a disk called "shared" is there already' "$work/err" || fail "disk create: $(cat "$work/err")"
for name in one two; do
    "$slipway" run -d --name "$name" --privileged "$image" -- sleep 100000 >/dev/null || fail "run $name"
done
one=$(id_of one)

nsid=$("$slipway" endpoint attach "$one" shared) || fail "attach"
[ "$("$slipway" endpoint attach two shared:ro --nsid "$nsid")" = "$nsid" ] || fail "attach read-only"
for name in one two; do
    wait_until 30 has_sectors "$name" "$nsid" 131072 || fail "no /dev/nvme0n$nsid in $name: $(in_guest "$name" ls /sys/class/block)"
done
"$slipway" endpoint inspect two | python3 -c 'import json, sys
sys.exit(not any(one["disk"] == "shared" and one["read_only"] for one in json.load(sys.stdin)[0]["namespaces"]))' ||
    fail "endpoint inspect: $("$slipway" endpoint inspect two)"
"$slipway" endpoint rm two 2>"$work/err" && fail "a sandbox lost its endpoint"
grep -q '"two" is a sandbox and no endpoint' "$work/err" || fail "endpoint rm: $(cat "$work/err")"
"$slipway" endpoint attach nobody shared 2>"$work/err" && fail "nobody has a disk"
grep -q 'there is no endpoint "nobody".*there is no sandbox "nobody"' "$work/err" || fail "endpoint attach: $(cat "$work/err")"
ok "a disk appears in two running guests as /dev/nvme0n$nsid"

d=/dev/nvme0n$nsid
in_guest one sh -c "mknod -m 600 $d b \$(tr : ' ' < /sys/class/block/nvme0n$nsid/dev) 2>/dev/null; test -b $d" || fail "no node in one"
in_guest two sh -c "mknod -m 600 $d b \$(tr : ' ' < /sys/class/block/nvme0n$nsid/dev) 2>/dev/null; test -b $d" || fail "no node in two"
in_guest one sh -c "printf 'from one' | dd of=$d bs=4096 conv=sync oflag=direct status=none" || fail "writing in one"
[ "$(in_guest two dd if=$d bs=4096 count=1 iflag=direct status=none | head -c 8)" = "from one" ] || fail "two does not read what one wrote"
in_guest two dd if=/dev/zero of=$d bs=4096 count=1 oflag=direct status=none 2>"$work/err" && fail "two wrote its read-only disk"
grep -qi 'not permitted\|read-only\|permission denied' "$work/err" || fail "two's write failed otherwise: $(cat "$work/err")"
[ "$(in_guest one dd if=$d bs=4096 count=1 iflag=direct status=none | head -c 8)" = "from one" ] || fail "two's write has changed the disk"
[ "$(in_guest one cat "/sys/class/block/nvme0n$nsid/wwid")" = "$(in_guest two cat "/sys/class/block/nvme0n$nsid/wwid")" ] || fail "the disk has two names"
ok "the read-only guest reads what the other one writes, and cannot write; both see the same wwid"

"$slipway" disk resize shared 32M 2>"$work/err" && fail "it shrank without being asked to"
grep -q 'disk shared has 67108864 bytes:.*`--shrink` allows it' "$work/err" || fail "disk resize: $(cat "$work/err")"
"$slipway" disk resize shared 128M >/dev/null || fail "resize"
for name in one two; do
    wait_until 30 has_sectors "$name" "$nsid" 262144 || fail "$name does not see the new size: $(sectors "$name" "$nsid")"
done
[ "$(stat -c %s "$work/shared.img")" = 134217728 ] || fail "the file did not grow"
ok "it grows under both guests"

"$slipway" disk rm shared 2>"$work/err" && fail "a disk in use was removed"
grep -q 'disk "shared" is attached to endpoint ' "$work/err" || fail "disk rm: $(cat "$work/err")"
in_guest one sh -c "while dd if=/dev/zero of=$d bs=64k count=16 conv=nocreat oflag=direct status=none 2>/dev/null; do echo written; done" \
    >"$work/written" & load=$!
wait_until 30 test -s "$work/written" || fail "one does not write"
"$slipway" endpoint detach "$one" shared >/dev/null || fail "detach under load"
wait "$load"
gone() { in_guest "$1" sh -c "! test -e /sys/class/block/nvme0n$nsid"; }
wait_until 30 gone one || fail "the disk does not go from one"
has_sectors two "$nsid" 262144 || fail "it went from two as well"
"$slipway" endpoint detach two "$nsid" >/dev/null || fail "detach by number"
wait_until 30 gone two || fail "the disk does not go from two"
in_guest one true && in_guest two true || fail "a guest is stuck"
ok "it vanishes from one guest under load and from the other after"

[ "$("$slipway" disk ls --json | python3 -c 'import json,sys; print(json.load(sys.stdin)[0]["users"])')" = "[]" ] || fail "disk ls"
"$slipway" disk rm shared >/dev/null || fail "disk rm"
for bad in "create 7 ram:1M" "create x overlay:/x" "create x disk:y" "create x ram:1X" "resize nothing 1M" "rm nothing"; do
    # shellcheck disable=SC2086
    "$slipway" disk $bad >/dev/null 2>"$work/err" && fail "disk $bad was taken"
    [ "$(wc -l <"$work/err")" = 1 ] || fail "disk $bad: $(cat "$work/err")"
done
ok "bad input gets one line"
