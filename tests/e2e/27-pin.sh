#!/usr/bin/env bash
# A guest that is told to leave MSI and MSI-X alone: its NVMe driver works by the interrupt pin.
. "$(dirname "$0")/lib.sh"
qemu=${SLIPWAY_TOOLS:-/var/lib/slipway/tools}/bin/qemu-system-x86_64
kernel=${SLIPWAY_KERNEL_DIR:-/var/lib/slipway/kernel}/vmlinuz
busybox=$(command -v busybox)
need_root
[ -x "$slipway" ] || fail "$slipway is not built; \`make build\` builds it"
[ -x "$qemu" ] && [ -e "$kernel" ] || skip "Slipway's own QEMU and guest kernel (deploy/setup)"
# ldd(1) fails for a program that needs no library.
{ [ -n "$busybox" ] && ! ldd "$busybox" >/dev/null 2>&1; } || skip "a static busybox"
command -v cpio >/dev/null || skip "cpio"

mkdir -p "$work/root/bin" "$work/root/dev" "$work/root/proc" "$work/root/sys"
cp "$busybox" "$work/root/bin/busybox"
cat >"$work/root/init" <<'INIT'
#!/bin/busybox sh
b=/bin/busybox
$b mount -t proc p /proc; $b mount -t sysfs s /sys; $b mount -t devtmpfs d /dev
i=0; while [ ! -b /dev/nvme0n1 ] && [ $i -lt 3000 ]; do $b sleep 0.1; i=$((i+1)); done
$b dd if=/dev/urandom of=/data bs=4k count=500 2>/dev/null
$b dd if=/data of=/dev/nvme0n1 bs=4k oflag=direct 2>/dev/null && echo WRITTEN
$b dd if=/dev/nvme0n1 of=/back bs=4k count=500 iflag=direct 2>/dev/null
$b cmp /data /back && echo THE-SAME
$b dmesg | $b grep -iE "nobody cared|QID [0-9]+ timeout|I/O error" && echo TROUBLE
echo "NVME-IRQ $($b grep nvme /proc/interrupts)"
echo GUEST-DONE
$b poweroff -f
INIT
chmod +x "$work/root/init"
(cd "$work/root" && find . | cpio -o -H newc 2>/dev/null | gzip) >"$work/initrd"

stop_daemon
start_daemon
"$slipway" endpoint create pin --socket "$work/pin.sock" --disk ram:16M >/dev/null || fail "endpoint create"
# A daemon that stands still for half a minute is no lost interrupt.
timeout 240 "$qemu" -M q35,memory-backend=m0 -object memory-backend-memfd,id=m0,size=256M,share=on \
    -smp 2 -m 256M -accel tcg -nodefaults -display none -serial stdio -no-reboot \
    -kernel "$kernel" -initrd "$work/initrd" -append "console=ttyS0 quiet pci=nomsi panic=-1 nvme_core.io_timeout=240" \
    -device "{\"driver\":\"vfio-user-pci\",\"socket\":{\"type\":\"unix\",\"path\":\"$work/pin.sock\"}}" \
    >"$work/console" 2>&1 </dev/null
said() { grep -q -- "$1" "$work/console"; }
said GUEST-DONE || fail "the guest did not come to its end: $(tail -5 "$work/console")"
said "NVME-IRQ.*IO-APIC" || fail "its driver has no pin interrupt: $(grep NVME-IRQ "$work/console")"
said WRITTEN && said THE-SAME || fail "what it wrote is not what it read: $(tail -5 "$work/console")"
said TROUBLE && fail "its kernel complains: $(grep -iE 'nobody|QID|error' "$work/console")"
ok "a guest without MSI-X writes and reads by the interrupt pin"
