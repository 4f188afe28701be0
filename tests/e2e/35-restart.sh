#!/usr/bin/env bash
# A guest writes and verifies on two endpoints while the daemon is killed with -9 every 5 s and
# started again. The guest sees pauses: no error, no reset, no wrong byte.
#
# The guest is QEMU's, started here: a sandbox would die with its daemon.
#   SLIPWAY_RESTART_SECONDS  how long the guest works, 30 unless told otherwise
#   SLIPWAY_RESTART_PAUSE    the longest pause that passes, in ms, on a machine that does nothing else:
#                            1000 is what is promised. Without it pauses are printed
#   SLIPWAY_OTHER            another build of slipway, which takes turns with SLIPWAY: an upgrade
#                            and a way back with each kill
. "$(dirname "$0")/lib.sh"
seconds=${SLIPWAY_RESTART_SECONDS:-30} longest=${SLIPWAY_RESTART_PAUSE:-}
other=${SLIPWAY_OTHER:-$slipway}
tools=${SLIPWAY_TOOLS:-/var/lib/slipway/tools} kernel=${SLIPWAY_KERNEL_DIR:-/var/lib/slipway/kernel}
period=5
need_node
[ -x "$other" ] || fail "$other is not a program"
stop_daemon
rm -f "$SLIPWAY_RUN_DIR"/{slipway,keeper}.sock
echo 'keeper = true' >>"$SLIPWAY_CONFIG"
keeper='' daemon='' guest=''
# A daemon waits until its predecessor's requests have ended, so a medium that stalls is a pause of
# its own. Memory does not.
shm=$(df --output=avail -B1M /dev/shm 2>/dev/null | tail -n 1)
[ "${shm:-0}" -ge 128 ] && shm=/dev/shm || shm=${TMPDIR:-/tmp}
medium=$(mktemp -d "$shm/slipway-e2e.XXXXXX") || fail "no directory in $shm"

# What was started here ends here, in this order: a keeper ends when it holds nothing.
end_all() {
    [ -n "$guest" ] && kill "$guest" 2>/dev/null && wait "$guest" 2>/dev/null
    [ -n "$daemon" ] && timeout 20 "$slipway" endpoint rm ram file >/dev/null 2>&1
    [ -n "$daemon" ] && kill "$daemon" 2>/dev/null && wait "$daemon" 2>/dev/null
    [ -n "$keeper" ] && kill "$keeper" 2>/dev/null && wait "$keeper" 2>/dev/null
    rm -rf "$medium"
}

# The test image as a disk with one partition, which a kernel finds without an initramfs. Its first
# process gets what it shall do from another disk.
root_disk() {
    local digest
    digest=$(python3 -c 'import json, sys
print(next(d for name, d in json.load(open(sys.argv[1]))["references"].items() if sys.argv[2] in name))' \
        "$SLIPWAY_DATA_DIR/images/index.json" "$image") || return
    digest=${digest#sha256:}
    disk=$SLIPWAY_DATA_DIR/cache/e2e-guest-$digest
    [ -f "$disk" ] && return
    PATH=$PATH:$tools/bin fsck.erofs --extract="$work/root" "$SLIPWAY_DATA_DIR/images/$digest.erofs" >/dev/null || return
    cat >"$work/root/first" <<'FIRST'
#!/bin/bash
mount -t proc proc /proc; mount -t sysfs sysfs /sys; mount -t devtmpfs devtmpfs /dev; mount -t tmpfs tmpfs /tmp
cat "/dev/$(grep -lw work /sys/block/nvme*/device/serial | cut -d/ -f4)" >/tmp/work
exec bash /tmp/work
FIRST
    chmod 755 "$work/root/first"
    mkdir -p "${disk%/*}"
    mke2fs -q -t ext4 -m 0 -O ^has_journal -E offset=1048576 -d "$work/root" "$work/disk" 1G >/dev/null || return
    # Signature e22e0001; one Linux partition from block 2048 on.
    printf '\1\0\56\342\0\0\0\0\0\0\203\0\0\0\0\10\0\0\0\0\40\0' |
        dd of="$work/disk" bs=1 seek=440 conv=notrunc status=none
    printf '\125\252' | dd of="$work/disk" bs=1 seek=510 conv=notrunc status=none
    rm -rf "$work/root"
    mv "$work/disk" "$disk"
}

# What the guest does. A line "e2e: …" is for this script.
guests_work() {
    printf 'seconds=%q\n' "$seconds"
    cat <<'WORK'
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
cd /tmp; stty -onlcr
# This clock's place on the host's: the host notes when it sees each line.
tells() { echo "e2e: clock $(date +%s%3N)"; sleep "$1"; }
for i in 1 2 3 4 5 6; do tells 0.2; done
load() {
    local disk
    disk=$(grep -lw "$1" /sys/block/nvme*/device/serial | cut -d/ -f4)
    fio --name="$1" --filename="/dev/$disk" --direct=1 --ioengine=libaio --iodepth=16 \
        --rw=randwrite --bsrange=512-64k --size=48M --time_based --runtime="$seconds" --fdatasync=64 \
        --verify=crc32c --verify_backlog=128 --verify_fatal=1 --log_unix_epoch=1 \
        --write_lat_log="/tmp/$1" --log_avg_msec=10 >"/tmp/$1.out" 2>&1
    echo "$?" >"/tmp/$1.status"
}
loads=()
for name in ram file; do load "$name" & loads+=("$!"); done
sleep 4
echo 'e2e: works'
while :; do tells 1; done & clock=$!
wait "${loads[@]}"
kill "$clock"; wait "$clock"
for name in ram file; do
    [ "$(cat "/tmp/$name.status")" = 0 ] || cat "/tmp/$name.out"
    # Times without a completion; each entry of the log stands for 10 ms.
    sort -n "/tmp/${name}_lat.1.log" | awk -F, -v name="$name" '
        NR > 1 && $1 - last >= 15 { printf "e2e: gap %s %.0f %.0f\n", name, last, $1 - last }
        { last = $1 }'
    echo "e2e: issued $name $(sed -n 's/.*issued rwts: total=\([0-9]*\),\([0-9]*\),.*/\1 reads, \2 writes/p' "/tmp/$name.out")"
    echo "e2e: status $name $(cat "/tmp/$name.status")"
done
dmesg | grep -Ei 'nvme.*(timeout|reset|abort|fail|dead|error)|I/O error|critical .*error' | grep -Ev 'Shutdown timeout set|ommand line' |
    sed 's|^|e2e: kernel |'
echo 'e2e: end'
echo o >/proc/sysrq-trigger
sleep 60
WORK
    # Whole blocks.
    printf '%4096s' ''
}

start_daemon() {
    "$1" daemon 2>>"$work/daemon.log" &
    daemon=$!
}

start_guest() {
    local sockets=() name
    for name in ram file; do
        sockets+=(-device "{\"driver\":\"vfio-user-pci\",\"socket\":{\"type\":\"unix\",\"path\":\"$work/$name.sock\"}}")
    done
    TMPDIR=$work "$tools/bin/qemu-system-x86_64" -M q35,memory-backend=ram -accel tcg,thread=multi -cpu max,la57=off \
        -smp 2 -m 512M -object memory-backend-memfd,id=ram,size=512M,share=on,seal=on \
        -nodefaults -no-user-config -no-reboot -display none -serial "file:$work/console" -device virtio-rng-pci \
        -drive "file=$disk,if=none,id=root,format=raw,snapshot=on" -device nvme,drive=root,serial=root \
        -drive "file=$work/work,if=none,id=work,format=raw" -device nvme,drive=work,serial=work \
        "${sockets[@]}" -kernel "$kernel/vmlinuz" -append "console=ttyS0 loglevel=4 panic=-1 nvme_core.io_timeout=120 \
random.trust_cpu=on mitigations=off tsc=reliable no_timer_check cryptomgr.notests root=PARTUUID=e22e0001-01 rw init=/first" \
        </dev/null >"$work/qemu.log" 2>&1 &
    guest=$!
}

now() { date +%s%3N; }
says() { grep -q "^e2e: $1" "$work/console"; }
explain() { grep -v '^e2e: gap' "$work/console" | tail -n 40; tail -n 20 "$work/qemu.log" "$work/daemon.log"; }

root_disk || fail "the guest's disk cannot be made"
"$slipway" keeper 2>"$work/keeper.log" & keeper=$!
wait_until 20 listens "$SLIPWAY_RUN_DIR/keeper.sock" || fail "no keeper: $(cat "$work/keeper.log")"
start_daemon "$slipway"
# Not by asking: a command that finds no daemon starts one of its own.
wait_until 20 test -S "$SLIPWAY_RUN_DIR/slipway.sock" || fail "no daemon: $(explain)"
truncate -s 64M "$medium/disk.img"
"$slipway" endpoint create ram --socket "$work/ram.sock" --disk ram:64M >/dev/null || fail "endpoint create"
"$slipway" endpoint create file --socket "$work/file.sock" --disk "file:$medium/disk.img" >/dev/null || fail "endpoint create"

started() { says clock || ! runs "$guest"; }
builds=("$slipway" "$other")
# kill_under_guest: a guest that works for so many seconds, while the daemon is killed.
kill_under_guest() {
    local began
    guests_work >"$work/work"
    truncate -s "$(($(stat -c %s "$work/work") / 512 * 512))" "$work/work"
    : >"$work/console"
    rm -f "$work/offsets"
    start_guest
    # When the host sees each line of the guest's; the quickest tells where the guest's clock is.
    tail -n +1 -f --pid="$guest" "$work/console" 2>/dev/null | while read -r _ word rest; do
        case $word in clock) echo "$(($(now) - rest))" >>"$work/offsets" ;; end) break ;; esac
    done &
    wait_until 120 started
    says clock || fail "the guest does not start: $(explain)"
    wait_until 30 says works || fail "the guest does not begin: $(explain)"
    kills=0 began=$SECONDS
    while ! says end; do
        if ! runs "$guest"; then
            # It ends right after its last words.
            says end && break
            fail "the guest has gone: $(explain)"
        fi
        if [ $((SECONDS - began)) -lt "$((seconds - 8))" ]; then
            kills=$((kills + 1))
            runs "$daemon" || fail "the daemon has gone by itself: $(explain)"
            echo "$(now)" >>"$work/kills"
            kill -9 "$daemon"; wait "$daemon" 2>/dev/null
            start_daemon "${builds[$((kills % 2))]}"
        elif [ $((SECONDS - began)) -gt $((seconds + 180 * slower)) ]; then
            fail "the guest does not end: $(explain)"
        fi
        sleep "$period"
    done
    wait "$guest" 2>/dev/null; guest=''
}
# The guest works for a time of its own. A test that stands still for all of that gives it longer.
kill_under_guest
for _ in 1 2 3; do
    [ "$kills" -gt 0 ] && break
    seconds=$((seconds * 2))
    kill_under_guest
done
[ "$kills" -gt 0 ] || fail "no kill"
[ "$kills" -gt 2 ] || printf 'SKIPPED: e2e/%s: more than %s kills need a machine with time for this test\n' "$test_name" "$kills"

python3 - "$work" "${longest:-inf}" <<'P'
import sys
work, longest = sys.argv[1], float(sys.argv[2])
lines = [line.split()[1:] for line in open(f"{work}/console", errors="replace") if line.startswith("e2e: ")]
# A line is seen late and never early.
offset = min(int(line) for line in open(f"{work}/offsets"))
kills = [int(line) for line in open(f"{work}/kills")]
worst = 0
for name in "ram", "file":
    gaps = [(int(g[2]) + offset, int(g[3])) for g in lines if g[:2] == ["gap", name]]
    # The longest time without a completion that begins before 2 s after a kill and ends after it.
    near = lambda kill: [size for at, size in gaps if kill - 50 <= at + size and at <= kill + 2000]
    pauses = [max(near(kill), default=0) for kill in kills]
    ordered = sorted(pauses)
    print(f"35-restart: pauses of {name}, ms:", *(pause or "<15" for pause in pauses))
    print(f"35-restart: pauses of {name}: median {ordered[len(ordered) // 2]} ms, longest {ordered[-1]} ms")
    # None at all would mean that the two clocks do not match.
    assert ordered[-1] > 0, gaps
    worst = max(worst, ordered[-1])
sys.exit(worst > longest)
P
pauses=$?
says kernel && fail "the guest's kernel complains: $(explain)"
for name in ram file; do
    says "status $name 0" || fail "$name: $(explain)"
    say "$(sed -n "s/^e2e: issued //p" "$work/console" | grep "^$name ")"
done
ok "$kills kills of the daemon: no error and no wrong byte on a RAM disk and on a file"
[ "$pauses" = 0 ] || fail "pauses"
[ -z "$longest" ] || ok "no pause of more than $longest ms"
