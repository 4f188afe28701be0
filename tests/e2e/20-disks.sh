#!/usr/bin/env bash
# NVMe in the guest: who it says it is, verified I/O, discard, file systems, power-off in mid-write. All of it in one sandbox
# with several volumes, which loses its power in the end, and in one that finds the disk afterwards.
. "$(dirname "$0")/lib.sh"
need_node

truncate -s 64M "$work/disk.img" "$work/fixed.img"
truncate -s 256M "$work/power.img"
printf 'fixed bytes' | dd of="$work/fixed.img" conv=notrunc status=none
# Namespaces 1 and 2 are the image and the layer.
volumes=(--volume data:64M --volume four:64M:4k --volume at:16M:/at --volume four-at:16M:4k:/four
    --volume "file:$work/disk.img" --volume "file:$work/fixed.img:ro" --volume "file:$work/power.img")
"$slipway" run -d --name disks --privileged --memory 512M "${volumes[@]}" "$image" -- sleep 100000 >/dev/null || fail "run"
in_guest() { timeout 600 "$slipway" exec disks sh -ec "$1"; }

out=$(in_guest '
    nvme id-ctrl /dev/nvme0 | grep "^mn .*Slipway"
    test "$(nvme list-ns /dev/nvme0 | wc -l)" = 9
    nvme smart-log /dev/nvme0 | grep -q "^critical_warning[[:space:]]*: 0"
    nvme error-log /dev/nvme0 | grep -q "Error Log Entries"
    nvme fw-log /dev/nvme0 | grep -q frs1
    nvme get-log /dev/nvme0 --log-id=5 --log-len=4096 | grep -q "0000:.* 01 "
    nvme get-feature /dev/nvme0 -f 7 | grep -qi "value"
    nvme id-ns /dev/nvme0 -n 3 | grep -q "^nsze *: 0x20000"
    nvme ns-descs /dev/nvme0 -n 3 | grep -q uuid
    nvme flush /dev/nvme0n3
    nvme admin-passthru /dev/nvme0 --opcode=0x7f 2>&1 | grep -qi "invalid"
    nvme reset /dev/nvme0; head -c 4096 /dev/slipway/data | wc -c' 2>"$work/err") \
    && [ "$(tail -1 <<<"$out")" = 4096 ] || fail "nvme-cli: $out $(cat "$work/err")"
ok "nvme id-ctrl: $(grep '^mn ' <<<"$out" | tr -s ' ')"
ok "nvme-cli: namespaces, logs, features, descriptors, a bad opcode, a reset"

out=$(in_guest '
    c=/dev/nvme0 d=/dev/nvme0n3 four=/dev/nvme0n4
    head -c 4096 /dev/urandom > /tmp/a; cp /tmp/a /tmp/b
    head -c 1 /tmp/a | tr "\000-\377" "\001-\377\000" | dd of=/tmp/b conv=notrunc status=none
    same() { nvme compare $1 -s $2 -c $3 -z 4096 -d /tmp/a >/dev/null; }
    nvme write $d -s 8 -c 7 -z 4096 -d /tmp/a
    same $d 8 7
    nvme compare $d -s 8 -c 7 -z 4096 -d /tmp/b 2>&1 | grep -q "Compare Failure"
    nvme verify $d -s 0 -c 65535
    nvme verify $d -s 131071 -c 1 2>&1 | grep -q "LBA Out of Range"
    nvme copy $d --sdlba=100 --slbs=8,12 --blocks=3,3
    same $d 100 7
    nvme copy $d --sdlba=131071 --slbs=8 --blocks=3 2>&1 | grep -q "LBA Out of Range"
    nvme write-zeroes $d -s 100 -c 7
    nvme read $d -s 100 -c 7 -z 4096 2>/dev/null | cmp -n 4096 - /dev/zero
    nvme dsm $d --ad --slbs=8 --blocks=8
    nvme read $d -s 8 -c 7 -z 4096 2>/dev/null | cmp -n 4096 - /dev/zero
    for id in 1 2 4 5 6 7 8 9 0xa 0xb 0xe 0xf 0x16 0x81; do nvme get-feature $c -n 3 -f $id; done
    for set in "1 3" "4 0x15e" "8 0x105" "0xa 1"; do
        nvme set-feature $c -f ${set% *} -v ${set#* }
        test $(($(nvme get-feature $c -f ${set% *} | sed "s/.*value://"))) = $((${set#* }))
    done
    nvme set-feature $c -n 3 -f 1 -v 3 2>&1 | grep -qi "not namespace specific"
    nvme format --force $d 2>&1 | grep -q "Invalid Command Opcode"
    nvme admin-passthru $c --opcode=8 --cdw10=0x70001 2>&1 | grep -q "result: 0x00000001"
    nvme io-passthru $d --opcode=2 --namespace-id=3 --cdw10=8 --cdw12=7 --data-len=4096 --read >/dev/null
    test "$(blockdev --getss $d) $(blockdev --getss $four)" = "512 4096"
    nvme write $four -s 1 -c 0 -z 4096 -d /tmp/a; same $four 1 0
    mkfs.ext4 -q $four; e2fsck -fn $four >/dev/null 2>&1
    nvme reset $c
    echo done' 2>"$work/err") && [ "$(tail -1 <<<"$out")" = "done" ] || fail "NVMe commands: $(tail -3 <<<"$out") $(tail -3 "$work/err")"
ok "compare, verify, copy, write-zeroes, dsm, every feature, abort; a volume with blocks of 4 KiB"

in_guest 'fio --name=verify --filename=/dev/slipway/data --rw=randwrite --bsrange=512-128k --bs_unaligned=0 \
    --blockalign=4k --iodepth=32 --numjobs=4 --size=16M --offset_increment=16M --direct=1 \
    --ioengine=libaio --verify=crc32c --do_verify=1 --verify_fatal=1 --group_reporting --minimal' \
    >"$work/fio" 2>&1 || fail "fio: $(tail -5 "$work/fio")"
ok "fio verify=crc32c, random writes of mixed sizes, depth 32, 4 jobs, 64 MiB"
# Linux takes SGLs for large segments; here for all.
in_guest 'threshold=/sys/module/nvme/parameters/sgl_threshold
    echo 512 > $threshold
    test "$(cat $threshold)" = 512
    fio --name=sgl --filename=/dev/slipway/data --rw=randwrite --bsrange=4k-256k --blockalign=4k --iodepth=16 \
        --size=32M --direct=1 --ioengine=libaio --verify=crc32c --do_verify=1 --verify_fatal=1 --minimal
    echo 32768 > $threshold' >"$work/fio" 2>&1 || fail "fio over SGLs: $(tail -5 "$work/fio")"
ok "fio verify=crc32c with SGLs"

out=$(in_guest 'for at in /at /four; do echo mounted >$at/file; cat $at/file; grep " $at ext4 " /proc/mounts; done
    printf "kept bytes" | dd of=/dev/slipway/disk.img bs=4096 conv=sync oflag=direct status=none; sync') \
    || fail "volumes with a mount point, and of a file: $out"
[ "$(grep -c mounted <<<"$out")" = 2 ] || fail "volumes with a mount point: $out"
ok "a scratch volume with a mount point has a file system"
[ "$(head -c 10 "$work/disk.img")" = "kept bytes" ] || fail "the file volume lacks what was written"
[ "$(in_guest 'head -c 11 /dev/slipway/fixed.img')" = "fixed bytes" ] || fail "a read-only volume cannot be read"
in_guest 'dd if=/dev/zero of=/dev/slipway/fixed.img bs=4096 count=1 oflag=direct status=none' 2>/dev/null \
    && fail "a read-only volume was written"
[ "$(head -c 11 "$work/fixed.img")" = "fixed bytes" ] || fail "a read-only volume changed"
ok "a read-only volume refuses writes"

in_guest '
    d=/dev/slipway/data
    head -c 1M /dev/urandom > $d; sync
    blkdiscard $d
    cmp -n 1048576 $d /dev/zero
    mkfs.ext4 -q $d; mkdir /m; mount $d /m
    head -c 20M /dev/urandom > /m/f; sum=$(sha256sum < /m/f); umount /m
    e2fsck -fn $d >/dev/null 2>&1
    mount $d /m; test "$sum" = "$(sha256sum < /m/f)"; umount /m' || fail "blkdiscard, mkfs.ext4"
ok "blkdiscard zeroes; mkfs.ext4, mount, write, remount, fsck"

in_guest '
    d=/dev/slipway/power.img; mkfs.ext4 -q $d; mkdir /power; mount $d /power
    echo synced > /power/first; sync
    i=0; while :; do head -c 300k /dev/urandom > /power/f$((i % 40)); i=$((i + 1)); echo $i; done' >"$work/writes" 2>/dev/null & writer=$!
wait_until 60 grep -q '^20$' "$work/writes" || fail "the writer does not write: $(tail -3 "$work/writes")"
kill -9 "$(vmm_of disks)"
wait_until 20 is_state disks failed || fail "after the power-off: $("$slipway" ps)"
wait "$writer"
"$slipway" rm disks >/dev/null || fail "rm"
[ "$(head -c 10 "$work/disk.img")" = "kept bytes" ] || fail "the file volume lost its bytes"
ok "a file volume keeps its bytes"
"$slipway" run --rm --privileged --volume "file:$work/power.img" "$image" -- sh -c '
    d=/dev/slipway/power.img; e2fsck -fy $d >/dev/null 2>&1; s=$?; [ $s -le 1 ] || exit 9
    e2fsck -fn $d >/dev/null 2>&1 || exit 8
    mkdir /m; mount $d /m; test "$(cat /m/first)" = synced' || fail "fsck after a power-off in mid-write: $?"
ok "a power-off in mid-write: fsck mends it and what was synced is there"
