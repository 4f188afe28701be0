# shellcheck shell=bash
# The guest kernel: Debian 12's cloud kernel (6.1), unpacked, not installed. Of Debian's cloud
# kernels it starts fastest under software emulation: 1.3 s to init, against 1.7 s of 6.12 and 1.9 s
# of 7.2, which also have more built in that a sandbox never uses. Sourced after private-apt.sh.
#
# $SLIPWAY_KERNEL_DIR is a link to a directory beside it: vmlinuz, release, modules/. So is
# $SLIPWAY_KERNEL_DIR-e1000, on request: Debian 12's kernel for any machine, which has the drivers of
# real hardware that the cloud kernel lacks, e1000 among them. $SLIPWAY_KERNEL_DIR-e1000-headers leads to that
# kernel's headers, against which modules are built: `make -C … KDIR=$SLIPWAY_KERNEL_DIR-e1000-headers/build`, and
# $SLIPWAY_KERNEL_DIR-headers to those of the cloud kernel.

# Change whenever another kernel must be fetched.
KERNEL_ID=bookworm-cloud-1
HARDWARE_KERNEL_ID=bookworm-1
HEADERS_ID=1

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

# Headers of both kernels, of exactly their releases: their modules are loaded by no other.
want_kernel_headers() {
    want_kernel
    want_hardware_kernel
    unpack_headers "$SLIPWAY_KERNEL_DIR" "$SLIPWAY_KERNEL_DIR-headers" bookworm bookworm-security
    unpack_headers "$SLIPWAY_KERNEL_DIR-e1000" "$SLIPWAY_KERNEL_DIR-e1000-headers" bookworm bookworm-security
}

# unpack_headers KERNEL LINK SUITE...: has LINK lead to the headers of an unpacked kernel, once for each release.
unpack_headers() {
    local kernel=$1 link=$2 release target partial package
    shift 2
    release=$(cat "$kernel/release")
    [ "$(cat "$link/id" 2>/dev/null)" = "$HEADERS_ID-$release" ] && return
    need_debian "headers of the guest kernel"
    target=$link-$HEADERS_ID-$release
    partial=$link.partial
    need_writable "$(dirname "$link")" "unpacking headers of the guest kernel"
    say "unpacking headers of the guest kernel (linux-headers-$release) into $link"
    rm -rf "$partial" "$target"
    mkdir -p "$partial"
    private_apt_begin "$partial/apt" "$@"
    fetch_headers "$partial/apt" "$release"
    for package in "$partial"/apt/linux-*.deb; do
        dpkg-deb -x "$package" "$partial"
    done
    rm -rf "${partial:?}/apt" "${partial:?}/usr/share"
    move_headers "$partial" "$target" "$release"
    printf '%s\n' "$HEADERS_ID-$release" >"$partial/id"
    chmod -R a+rX "$partial"
    mv "$partial" "$target"
    ln -s "$(basename "$target")" "$partial"
    mv -T "$partial" "$link"
}

# fetch_headers APT RELEASE: the packages, and not what they depend on beside them: the compiler is the machine's.
fetch_headers() {
    local names
    # Mirrors have two releases at most.
    names=$(private_apt "$1" apt-cache depends "linux-headers-$2" 2>/dev/null |
        awk '$1 == "Depends:" && $2 ~ /^linux-(headers|kbuild)-/ { print $2 }')
    [ -n "$names" ] || die "the mirror no longer has linux-headers-$2, the headers of the guest kernel" \
        "remove $kernel and run setup again: it unpacks the newest kernel"
    # shellcheck disable=SC2086 # names
    private_apt "$1" apt-get -qq download "linux-headers-$2" $names >/dev/null 2>&1 ||
        die "linux-headers-$2 cannot be fetched" "check the network and try again"
}

# move_headers UNPACKED TARGET RELEASE: the packages name their places below /usr; these are below TARGET now. The
# directory to build in is TARGET/build.
move_headers() {
    local unpacked=$1 target=$2 file link to
    ln -s "usr/src/linux-headers-$3" "$unpacked/build"
    grep -rlIE '/usr/(src|lib)/linux-' "$unpacked"/usr/src/*/Makefile "$unpacked"/usr/src/*/scripts/*.sh 2>/dev/null |
        while read -r file; do
            sed -i -E "s,(^|[^a-zA-Z0-9_.])/usr/(src|lib)/linux-,\\1$target/usr/\\2/linux-,g" "$file"
        done
    find "$unpacked/usr" -type l -lname '/usr/*' | while read -r link; do
        to=$(readlink "$link")
        ln -sfn "$target$to" "$link"
    done
}
