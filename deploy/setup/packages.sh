# shellcheck shell=bash
# Debian packages of the machine itself. Sourced after common.sh.

installed() {
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

# A mirror may be older than its own date of expiry says; then the check is left out, and said.
refresh_lists() {
    say "refreshing the package lists"
    apt-get -q update >/dev/null 2>&1 && return
    say "that failed; trying again without the check that the lists are of this week"
    apt-get -qq -o Acquire::Check-Valid-Until=false update >/dev/null ||
        die "apt-get update fails" "make 'apt-get update' work (network, /etc/apt/sources.list*)"
}

apt_install() {
    # What the package scripts say on standard error is noise, unless the installation fails.
    local log
    log=$(mktemp)
    if DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends \
        -o DPkg::Lock::Timeout=300 install "$@" </dev/null >"$log" 2>&1; then
        rm -f "$log"
        return
    fi
    tail -n 20 "$log" >&2
    rm -f "$log"
    return 1
}

# want_packages WHY PACKAGE...: installs those that are missing.
want_packages() {
    local why=$1 package missing=()
    shift
    need_debian "$*"
    for package in "$@"; do
        installed "$package" || missing+=("$package")
    done
    [ ${#missing[@]} -eq 0 ] && return
    need_root "installing ${missing[*]} (for $why)"
    say "installing ${missing[*]} (for $why)"
    # An installation that was killed half-way is finished first.
    [ -z "$(dpkg --audit)" ] || dpkg --configure -a
    apt-get -qq --simulate install "${missing[@]}" >/dev/null 2>&1 || refresh_lists
    apt_install "${missing[@]}" || { refresh_lists && apt_install "${missing[@]}"; } ||
        die "the packages ${missing[*]} cannot be installed" \
            "see what 'apt-get install ${missing[*]}' says"
}

# The newest of what everything is built with: 1.95 or later.
rust_is_new_enough() {
    local version
    have cargo && version=$(rustc --version 2>/dev/null) || return
    version=${version#rustc }
    dpkg --compare-versions "${version%% *}" ge 1.95
}

# Debian packages a current Rust for its browsers: rustc-web and cargo-web, 1.96 in 12 and 13.
want_rust() {
    rust_is_new_enough && return
    if have rustc; then
        say "$(rustc --version) is older than 1.95"
    fi
    want_packages "building Slipway" rustc-web cargo-web
    hash -r
    rust_is_new_enough || die "rustc on PATH is still $(rustc --version 2>&1)" \
        "take the older one off PATH, or update it (rustup update stable)"
}

# What the sockets' library for programs linked with musl is built with, where this Rust can have it; all else does
# without.
want_musl() {
    local target
    target=$(uname -m)-unknown-linux-musl
    have rustup || return 0
    if ! rustup target list --installed 2>/dev/null | grep -qx "$target"; then
        say "adding Rust's target $target (for libslipway-musl.so)"
        timeout 300 rustup --quiet target add "$target" || { say "it cannot be added: libslipway-musl.so is not built"; return 0; }
    fi
    want_packages "libslipway-musl.so" musl-tools
}

want_lints() {
    { cargo fmt --version && cargo clippy --version; } >/dev/null 2>&1 && return
    case "$(readlink -f "$(command -v cargo)")" in
        /usr/bin/* | /usr/share/*) want_packages "make check" rustfmt-web rust-web-clippy ;;
        *) die "this Rust has no rustfmt or no clippy" "rustup component add rustfmt clippy" ;;
    esac
}

# The tests start a registry of their own; the package would start one for everybody on port 5000.
want_registry() {
    installed docker-registry && return
    need_root "installing docker-registry (for the tests)"
    if [ -d /run/systemd/system ]; then
        say "masking docker-registry.service: the tests need its program only"
        systemctl --quiet mask docker-registry.service
    fi
    want_packages "the tests" docker-registry
}
