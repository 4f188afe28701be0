# shellcheck shell=bash
# QEMU with a vfio-user client (10.1 or later) and a current mkfs.erofs, where the distribution has
# neither: Debian's own packages of a later release, unpacked into a private root and run with that
# root's dynamic loader and libraries. Sourced after private-apt.sh.
#
# $SLIPWAY_TOOLS/root-ID  the unpacked packages, there only when complete
# $SLIPWAY_TOOLS/bin      small programs that run what is in there

# Changes whenever another root must be made.
TOOLS_ID=1
TOOLS_PROGRAMS="qemu-system-x86_64 mkfs.erofs dump.erofs fsck.erofs"

tools_complete() {
    local program
    for program in $TOOLS_PROGRAMS; do
        grep -qs "/root-$TOOLS_ID/" "$SLIPWAY_TOOLS/bin/$program" || return
    done
    # A QEMU that an earlier set-up made had an environment.
    grep -qs '^exec env -i ' "$SLIPWAY_TOOLS/bin/qemu-system-x86_64"
}

# Writes $SLIPWAY_TOOLS/bin/PROGRAM in one step.
wrap() {
    local program=$1 root=$2 file=$SLIPWAY_TOOLS/bin/$1 data="" environment=""
    if [ "$program" = qemu-system-x86_64 ]; then
        data="-L $root/usr/share/qemu -L $root/usr/share/seabios "
        # A VMM has none, and a shell makes one. QEMU finds no modules this way: nothing that
        # sandboxes use is one.
        environment="env -i "
    fi
    cat >"$file.partial" <<END
#!/bin/sh
exec $environment$root/usr/lib64/ld-linux-x86-64.so.2 --library-path $root/usr/lib/x86_64-linux-gnu \\
    $root/usr/bin/$program $data"\$@"
END
    chmod 755 "$file.partial"
    mv "$file.partial" "$file"
}

want_tools() {
    tools_complete && return
    need_debian "QEMU 10.1 or later with vfio-user-pci, and erofs-utils 1.7 or later"
    need_writable "$SLIPWAY_TOOLS" "installing QEMU and erofs-utils for Slipway"
    say "unpacking QEMU 11 and erofs-utils 1.8 from Debian 13 and its backports into" \
        "$SLIPWAY_TOOLS: Debian's own QEMU has no vfio-user client before 10.1"
    local root=$SLIPWAY_TOOLS/root-$TOOLS_ID partial=$SLIPWAY_TOOLS/partial program
    rm -rf "$partial"
    if [ ! -d "$root" ]; then
        mkdir -p "$partial"
        private_apt_begin "$partial/apt" trixie trixie-backports
        private_apt_unpack "$partial/apt" "$partial/root" \
            -t trixie-backports qemu-system-x86 erofs-utils
        chmod 755 "$partial/root"
        mv "$partial/root" "$root"
        rm -rf "$partial"
    fi
    mkdir -p "$SLIPWAY_TOOLS/bin"
    for program in $TOOLS_PROGRAMS; do
        wrap "$program" "$root"
    done
    "$SLIPWAY_TOOLS/bin/qemu-system-x86_64" -device vfio-user-pci,help >/dev/null ||
        die "the QEMU in $root does not run" "remove $SLIPWAY_TOOLS and try again"
    "$SLIPWAY_TOOLS/bin/mkfs.erofs" --version >/dev/null ||
        die "the mkfs.erofs in $root does not run" "remove $SLIPWAY_TOOLS and try again"
    # What earlier set-ups made.
    find "$SLIPWAY_TOOLS" -mindepth 1 -maxdepth 1 -name 'root*' ! -name "root-$TOOLS_ID" \
        -exec rm -rf {} +
}
