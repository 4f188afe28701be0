#!/bin/sh
# The server of lab/plug: runs a guest, and has its VMM plug and remove a disk twice.
ramdisk /tmp/disk.sock &
disk=$!
{
    slipway-vmm --slots 4 --cpus 1 --memory 192 --kernel /vmlinux --initramfs /guest.cpio \
        --control /tmp/control --cmdline 'console=ttyS0 quiet panic=-1'
    echo "vmm: status $?"
} | while read -r line; do
    echo "$line"
    case $line in
        "guest: waits"*) device /tmp/control add disk /tmp/disk.sock || echo "lab: add failed" ;;
        "guest: has"*) device /tmp/control del disk || echo "lab: del failed" ;;
    esac
done
kill "$disk"
