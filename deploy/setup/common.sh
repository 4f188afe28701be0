# shellcheck shell=bash
# What every set-up step shares. Sourced, never run.

# Tools and guest kernel go here; whoever may write there needs no root for them.
SLIPWAY_STATE=${SLIPWAY_STATE:-/var/lib/slipway}
SLIPWAY_TOOLS=${SLIPWAY_TOOLS:-$SLIPWAY_STATE/tools}
SLIPWAY_KERNEL_DIR=${SLIPWAY_KERNEL_DIR:-$SLIPWAY_STATE/kernel}

say() { printf 'setup: %s\n' "$*"; }

# die WHAT NEXT: the error, and what to do about it.
die() {
    printf 'setup: error: %s\n' "$1" >&2
    printf 'setup: next step: %s\n' "$2" >&2
    exit 1
}

have() { command -v "$1" >/dev/null 2>&1; }

need_root() {
    [ "$(id -u)" -eq 0 ] || die "$1 needs root" "run the same command as root, or with sudo"
}

# need_writable DIR WHAT: makes the directory, or says who could.
need_writable() {
    { mkdir -p "$1" && [ -w "$1" ]; } 2>/dev/null ||
        die "$2 needs to write to $1" "run the same command as root, or with sudo"
}

debian_codename() {
    # shellcheck disable=SC1091 # the system's own file
    (. /etc/os-release && printf '%s\n' "${VERSION_CODENAME:-}")
}

need_debian() {
    { have apt-get && have dpkg-deb; } ||
        die "this machine has no apt: set-up knows Debian 12 and 13 only" \
            "install $1 yourself; README.md lists what is needed"
}
