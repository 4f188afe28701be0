# shellcheck shell=bash
# What every emulated server shares. Sourced, never run; `usage` prints the head of the script that
# sources it.
# shellcheck disable=SC2034 # the scripts use them

state=${SLIPWAY_STATE:-/var/lib/slipway}
tools=${SLIPWAY_TOOLS:-$state/tools}
kernel=${SLIPWAY_KERNEL_DIR:-$state/kernel}
lab=${SLIPWAY_LAB:-$state/lab}
qemu=$tools/bin/qemu-system-x86_64
script=$(basename "$0")

say() { printf '%s: %s\n' "$script" "$*"; }
die() { say "error: $*" >&2; exit 1; }
cannot() { say "this needs $*" >&2; exit 77; }
usage() { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"; exit 2; }

need_programs() {
    local pair
    for pair in "$@"; do
        command -v "${pair%%:*}" >/dev/null ||
            cannot "${pair%%:*}: apt-get install ${pair##*:}"
    done
}

need_qemu() { [ -x "$qemu" ] || cannot "the QEMU that \`make setup\` puts into $tools"; }

# need_kernel DIR: a kernel on which a server runs KVM.
need_kernel() {
    compgen -G "$1/modules/kernel/arch/x86/kvm/kvm-amd.ko*" >/dev/null ||
        cannot "a guest kernel with kvm-amd as a module, as \`make setup\` puts into $kernel"
}

need_memory() {
    awk -v need="$1" '/^MemAvailable:/ { exit $2 / 1024 < need }' /proc/meminfo ||
        cannot "$1 MiB of free memory"
}

# build_svm_once FOLDER: builds svm-once.ko in FOLDER, for the servers' kernel. The module keeps a defect of QEMU's from their
# guests (README.md, "Interrupts that come twice").
build_svm_once() {
    make -s -C "$here/svm-once" KDIR="$kernel-headers/build" OUT="$1" module >"$work/log" 2>&1 ||
        die "lab/svm-once is not built: $(tail -n 3 "$work/log")"
}

need_headers() {
    need_programs make:make gcc-12:gcc-12
    [ -f "$kernel-headers/build/Makefile" ] || cannot "the headers of the server's kernel: deploy/setup/setup.sh driver"
}
