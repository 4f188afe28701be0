# shellcheck shell=bash
# QEMU inside an emulated server, as the VMM of a guest there. Sourced after common.sh; `work` is the
# caller's own folder.

# The files that QEMU needs of the tool root, with those of q35's firmware.
tool_root=$tools/root-1
firmware=(qemu/qboot.rom qemu/kvmvapic.bin qemu/pvh.bin qemu/linuxboot_dma.bin)

# gather_qemu [PROGRAM]: QEMU itself without the script that finds its libraries, so that no shell is
# measured, and the library that the given program has beside them. `qemu_files` are the options by
# which `tiny` has it: /usr/bin/qemu-system-x86_64 of the server.
gather_qemu() {
    local loader=$tool_root/usr/lib64/ld-linux-x86-64.so.2 libraries name file
    [ -d "$tool_root" ] || cannot "the QEMU that \`make setup\` puts into $tool_root"
    libraries=$tool_root/usr/lib/x86_64-linux-gnu
    mkdir -p "$work"/qemu/{bin,lib64,lib,share/qemu}
    cp -L "$tool_root/usr/bin/qemu-system-x86_64" "$work/qemu/bin"
    cp -L "$loader" "$work/qemu/lib64"
    "$loader" --library-path "$libraries" --list "$tool_root/usr/bin/qemu-system-x86_64" |
        sed -n 's/^[[:space:]]*\([^/ ]*\) => \(\/[^ ]*\) .*/\1 \2/p' |
        while read -r name file; do cp -L "$file" "$work/qemu/lib/$name"; done
    for file in "${firmware[@]}"; do cp -L "$tool_root/usr/share/$file" "$work/qemu/share/qemu"; done
    # Of the program, which QEMU has no use for.
    [ $# = 0 ] || ldd "$1" | sed -n 's/.*libgcc_s.* => \([^ ]*\) .*/\1/p' |
        while read -r file; do cp -L "$file" "$work/qemu/lib"; done
    # shellcheck disable=SC2034 # used by the scripts that source this
    qemu_files=(--file "$work/qemu/bin:/usr/bin" --file "$work/qemu/lib64:/lib64"
        --file "$work/qemu/lib:/lib/x86_64-linux-gnu" --file "$work/qemu/share:/usr/share")
}
