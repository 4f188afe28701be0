#!/bin/bash
# Brings a Debian 12 or 13 machine to where Slipway can be built, run, tested or checked. Installs
# what is missing and says what and why; run again it does nothing. Killed at any moment it leaves
# nothing that the next run trips over: everything is made aside and renamed when it is whole.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
for part in common packages private-apt tools kernel; do
    # shellcheck source=/dev/null
    . "$here/$part.sh"
done

usage() {
    cat <<'END'
usage: setup.sh build|run|e1000|driver|guest-kernel|demo|image|test|fuzz|check|site...

  build  a C compiler for linking, Rust 1.95 or later; where rustup is, its target for musl, and musl-tools
  run    QEMU 10.1 or later, erofs-utils, e2fsprogs, nftables, a guest kernel
  e1000  a guest kernel with the driver of --nic e1000
  driver that kernel, and what modules of guests are built with (guest/e1000-slipway, lab/svm-once): headers, a compiler
  guest-kernel  what guest/kernel/build needs: a compiler, flex, bison, libraries
  demo   mmdebstrap, which makes an image where no registry answers
  image  a static busybox and python3, for the image that installs Slipway on Kubernetes' nodes
  test   what the tests use beside these: a registry, containerd, plugins of CNI, mmdebstrap, python3, procps, cpio, tcpdump, xz,
         iperf3, curl, and nginx, wrk, redis, memcached and socat to be run under libslipway.so
  fuzz   a C++ compiler, for the fuzzing engine
  check  rustfmt, clippy, shellcheck, python3
  site   python3 with Python-Markdown
END
}

set_up() {
    case $1 in
        build)
            want_packages "building Slipway" gcc libc6-dev libcap-ng-dev
            want_rust
            want_musl
            ;;
        run)
            want_packages "running sandboxes" ca-certificates e2fsprogs nftables
            want_tools
            want_kernel
            ;;
        e1000) want_hardware_kernel ;;
        driver)
            want_packages "building drivers of guests" gcc-12 libc6-dev libelf1 make
            want_kernel_headers
            ;;
        guest-kernel)
            want_packages "building a guest kernel" bc bison flex gcc libc6-dev libelf-dev libssl-dev make xz-utils
            ;;
        demo) want_packages "making an image where no registry answers" mmdebstrap ;;
        image) want_packages "the image of the nodes' installer" busybox-static python3 ;;
        test)
            want_packages "the tests" busybox-static containerd containernetworking-plugins cpio curl erofs-utils iperf3 iproute2 iputils-ping memcached mmdebstrap \
                nginx-light procps python3 redis-server redis-tools socat tcpdump wrk xz-utils
            want_registry
            ;;
        fuzz) want_packages "fuzzing" g++ ;;
        check)
            want_lints
            want_packages "make check" python3 shellcheck
            ;;
        site) want_packages "the site" python3 python3-markdown git ;;
        *)
            usage >&2
            exit 2
            ;;
    esac
}

[ $# -gt 0 ] || { usage >&2; exit 2; }
# One set-up at a time: two would build in the same places.
if mkdir -p "$SLIPWAY_STATE" 2>/dev/null && [ -w "$SLIPWAY_STATE" ]; then
    exec 9>"$SLIPWAY_STATE/setup.lock"
    flock -n 9 || { say "another set-up is running; waiting for it" && flock 9; }
fi
for purpose in "$@"; do
    set_up "$purpose"
done
