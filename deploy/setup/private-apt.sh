# shellcheck shell=bash
# Packages of other Debian releases, unpacked beside the system and never installed on it: an apt
# with configuration, lists and cache of its own in a temporary directory. Needs no root. Sourced
# after common.sh.

# The machine's own mirror for a kind of suite (a pattern), else Debian's.
mirror_of() {
    local found
    # shellcheck disable=SC2016 # apt's placeholders, not the shell's
    found=$(apt-get indextargets --format '$(RELEASE) $(REPO_URI)' 2>/dev/null |
        awk -v suite="$1" '$1 == suite { print $2; exit }')
    printf '%s\n' "${found:-$2}"
}

# private_apt_begin DIR SUITE...: an apt in DIR that knows these suites only.
private_apt_begin() {
    local dir=$1 suite uri codename
    local keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    shift
    codename=$(debian_codename)
    [ -e "$keyring" ] || want_packages "checking Debian's signatures" debian-archive-keyring
    mkdir -p "$dir/lists/partial" "$dir/cache/archives/partial"
    : >"$dir/status"
    for suite in "$@"; do
        case $suite in
            *-security) uri=$(mirror_of "$codename-security" http://deb.debian.org/debian-security) ;;
            *) uri=$(mirror_of "$codename" http://deb.debian.org/debian) ;;
        esac
        printf 'deb [signed-by=%s] %s %s main\n' "$keyring" "$uri" "$suite"
    done >"$dir/sources.list"
    # Mirrors may be older than their lists' date of expiry; signatures are checked all the same.
    cat >"$dir/apt.conf" <<END
Dir::State "$dir";
Dir::State::lists "$dir/lists";
Dir::State::status "$dir/status";
Dir::Cache "$dir/cache";
Dir::Etc::sourcelist "$dir/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
Acquire::Check-Valid-Until "false";
Acquire::Languages "none";
APT::Install-Recommends "false";
APT::Sandbox::User "";
END
    APT_CONFIG=$dir/apt.conf apt-get -qq update >"$dir/log" 2>&1 && return
    cat "$dir/log" >&2
    die "the package lists of $* cannot be fetched or their signatures not checked" \
        "check the network; on a Debian 12 of before 2025: apt-get install debian-archive-keyring"
}

# private_apt DIR PROGRAM ARGUMENT...: apt-get or apt-cache in there.
private_apt() {
    local dir=$1
    shift
    (cd "$dir" && APT_CONFIG=$dir/apt.conf "$@")
}

# private_apt_unpack DIR ROOT [-t SUITE] PACKAGE...: with everything that they depend on.
private_apt_unpack() {
    local dir=$1 root=$2 deb
    shift 2
    private_apt "$dir" apt-get -qq -y --download-only install "$@" >"$dir/log" 2>&1 ||
        { cat "$dir/log" >&2; die "$* cannot be fetched" "check the network and try again"; }
    mkdir -p "$root"
    for deb in "$dir"/cache/archives/*.deb; do
        dpkg-deb -x "$deb" "$root"
    done
}
