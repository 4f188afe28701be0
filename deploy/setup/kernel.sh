# shellcheck shell=bash
# The guest kernel: Debian 12's cloud kernel (6.1), unpacked, not installed. Of Debian's cloud
# kernels it starts fastest under software emulation: 1.3 s to init, against 1.7 s of 6.12 and 1.9 s
# of 7.2, which also have more built in that a sandbox never uses. Sourced after private-apt.sh.
#
# $SLIPWAY_KERNEL_DIR is a link to a directory beside it: vmlinuz, release, modules/. So is
# $SLIPWAY_KERNEL_DIR-e1000, on request: Debian 12's kernel for any machine, which has the drivers of
# real hardware that the cloud kernel lacks, e1000 among them.

# Change whenever another kernel must be fetched.
KERNEL_ID=bookworm-cloud-1
HARDWARE_KERNEL_ID=bookworm-1

want_kernel() {
    unpack_kernel "$SLIPWAY_KERNEL_DIR" "$KERNEL_ID" linux-image-cloud-amd64 \
        "a guest kernel with virtio, NVMe, EROFS and overlayfs"
}

want_hardware_kernel() {
    unpack_kernel "$SLIPWAY_KERNEL_DIR-e1000" "$HARDWARE_KERNEL_ID" linux-image-amd64 \
        "a guest kernel with the driver e1000"
}

# unpack_kernel LINK ID PACKAGE WHAT: has LINK lead to the kernel of the package, once for each ID.
unpack_kernel() {
    local link=$1 id=$2 metapackage=$3 what=$4
    [ "$(cat "$link/id" 2>/dev/null)" = "$id" ] && return
    need_debian "$what"
    local parent target partial package release
    parent=$(dirname "$link")
    target=$link-$id
    partial=$target.partial
    need_writable "$parent" "unpacking the guest kernel"
    say "unpacking the guest kernel (Debian 12's $metapackage) into $link"
    rm -rf "$partial" "$target"
    mkdir -p "$partial"
    private_apt_begin "$partial/apt" bookworm bookworm-security
    package=$(private_apt "$partial/apt" apt-cache depends "$metapackage" |
        awk '$1 == "Depends:" && $2 ~ /^linux-image-/ { print $2; exit }')
    [ -n "$package" ] || die "the mirror has no $metapackage" "try another mirror"
    private_apt "$partial/apt" apt-get -qq download "$package" >/dev/null 2>&1 ||
        die "$package cannot be fetched" "check the network and try again"
    dpkg-deb -x "$partial"/apt/"$package"_*.deb "$partial/unpacked"
    release=${package#linux-image-}
    mv "$partial/unpacked/boot/vmlinuz-$release" "$partial/vmlinuz"
    mv "$partial/unpacked/lib/modules/$release" "$partial/modules"
    rm -rf "$partial/apt" "$partial/unpacked"
    printf '%s\n' "$release" >"$partial/release"
    printf '%s\n' "$id" >"$partial/id"
    chmod -R a+rX "$partial"
    mv "$partial" "$target"
    # A link is replaced in one step; a directory of an earlier layout has to go first.
    [ -L "$link" ] || rm -rf "$link"
    ln -s "$(basename "$target")" "$partial"
    mv -T "$partial" "$link"
}
