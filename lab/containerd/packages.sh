# shellcheck shell=bash
# containerd and what it runs with, from package registries, kept in $kept. Sourced after common.sh, never run.
# shellcheck disable=SC2034 # the scripts use them

critest_version=1.36.0
# Changes whenever other packages are needed.
packages_id=1
packages="busybox nginx runc docker-registry containernetworking-plugins iptables"

# Where each containerd comes from: a release of Debian, and a version for Go's module proxy, which is
# taken when that release has moved on, or where there is none.
debian_of() { case $1 in 1.6) echo bookworm ;; 1.7) echo trixie ;; 2.1) echo sid ;; esac; }
proxy_version_of() {
    case $1 in
        2.1) echo v2.1.9 ;;
        2.4) echo v2.4.2 ;;
        *) die "Debian's $(debian_of "$1") has no containerd $1 any more" ;;
    esac
}

# need_leave_to_make WHAT: with `kept_only` nothing is fetched and nothing built.
need_leave_to_make() {
    [ -z "${kept_only:-}" ] || cannot "$1 in $kept, where the same command without --kept puts it"
}

# go_build FOLDER MODULE VERSION ARGUMENT...: `go ARGUMENT...` in a new module that needs MODULE.
go_build() {
    local folder=$1 module=$2 version=$3
    shift 3
    need_programs go:golang-go
    mkdir -p "$folder"
    printf 'module lab\n\ngo 1.24\n\nrequire %s %s\n' "$module" "$version" >"$folder/go.mod"
    (cd "$folder" && GOFLAGS="${GOFLAGS:-} -mod=mod -buildvcs=false" CGO_ENABLED=0 go "$@") >"$work/making" 2>&1 ||
        { tail -n 20 "$work/making" >&2; die "$module $version is not built"; }
}

# Debian's packages of this machine's release, so that they run here; unpacked, not installed.
need_packages() {
    root=$kept/packages-$packages_id
    [ -d "$root" ] && return
    need_leave_to_make "Debian's $packages"
    say "unpacking Debian's $packages (once, about a minute)"
    local release name
    release=$(debian_codename)
    # shellcheck disable=SC2086 # a list
    (
        private_apt_begin "$work/apt" "$release" "$release-security"
        private_apt_unpack "$work/apt" "$work/root" $packages
    )
    # Releases from 13 on have these in /usr alone.
    for name in bin sbin lib lib64; do
        [ -e "$work/root/$name" ] || ln -s "usr/$name" "$work/root/$name"
    done
    mv -T "$work/root" "$root"
}

need_critest() {
    programs=$kept/critest-$critest_version
    [ -d "$programs" ] && return
    need_leave_to_make "critest $critest_version"
    say "building critest $critest_version (once, some minutes)"
    local built=$work/critest module=sigs.k8s.io/cri-tools
    go_build "$built" "$module" "v$critest_version" test -vet=off -c -o critest "$module/cmd/critest"
    go_build "$built" "$module" "v$critest_version" build -o crictl "$module/cmd/crictl"
    mv -T "$built" "$programs"
}

# crictl alone, without the tests.
need_crictl() {
    crictl=$kept/crictl-$critest_version
    [ -e "$crictl" ] && return
    say "building crictl $critest_version (once, about a minute)"
    local module=sigs.k8s.io/cri-tools
    go_build "$work/crictl" "$module" "v$critest_version" build -o crictl "$module/cmd/crictl"
    mv -T "$work/crictl/crictl" "$crictl"
}

# containerd_from_debian VERSION FOLDER: fails if the release has another version.
containerd_from_debian() {
    local release suites
    release=$(debian_of "$1")
    [ -n "$release" ] || return
    suites=$release
    [ "$release" = sid ] || suites="$release $release-security"
    # shellcheck disable=SC2086 # a list
    private_apt_begin "$work/apt-$release" $suites
    private_apt "$work/apt-$release" apt-get -qq download containerd >"$work/making" 2>&1 ||
        { tail -n 20 "$work/making" >&2; die "containerd of Debian's $release cannot be fetched"; }
    dpkg-deb -x "$work/apt-$release"/containerd_*.deb "$work/unpacked"
    mv -T "$work/unpacked/usr/bin" "$2"
    "$2/containerd" --version | grep -q " v\?$1\."
}

containerd_from_proxy() {
    local module=github.com/containerd/containerd/v2 version
    version=$(proxy_version_of "$1")
    say "building containerd $version (once, some minutes)"
    go_build "$work/containerd-build" "$module" "$version" build -trimpath \
        -ldflags "-X $module/version.Version=$version" -o ./ \
        "$module/cmd/containerd" "$module/cmd/ctr" "$module/cmd/containerd-shim-runc-v2"
    rm -rf "$2"
    mkdir "$2"
    mv "$work/containerd-build"/{containerd,ctr,containerd-shim-runc-v2} "$2"
}

# need_containerd VERSION: containerd, ctr and the shim for runc.
need_containerd() {
    containerd=$kept/containerd-$1
    [ -d "$containerd" ] && return
    need_leave_to_make "containerd $1"
    say "fetching containerd $1 (once)"
    containerd_from_debian "$1" "$work/containerd" || containerd_from_proxy "$1" "$work/containerd"
    mv -T "$work/containerd" "$containerd"
}

# need_stress RELEASE: containerd-stress. It fails where it may not raise its own limit of descriptors to 100,000, of
# which it needs a hundred: that is left out.
need_stress() {
    stress_program=$kept/containerd-stress-${1#v}
    [ -e "$stress_program" ] && return
    local module=github.com/containerd/containerd/v2 built=$work/stress
    say "building containerd-stress $1 (once, about a minute)"
    go_build "$built" "$module" "$1" mod download "$module"
    cp -r "$(cd "$built" && GOFLAGS=-mod=mod go list -m -f '{{.Dir}}' "$module")" "$built/source"
    chmod -R u+w "$built/source"
    printf 'package main\n\nfunc setRlimit() error { return nil }\n' >"$built/source/cmd/containerd-stress/rlimit_unix.go"
    go_build "$built" "$module" "$1
replace $module => ./source" build -trimpath -o containerd-stress "$module/cmd/containerd-stress"
    mv -T "$built/containerd-stress" "$stress_program"
}

# need_images [none|some|all]: the images that critest asks for, in the storage of a registry. None of them, some or
# all can be pulled lazily.
need_images() {
    local id lazy=${1:-none} name=images program
    [ "$lazy" = none ] || name=images-lazy-$lazy
    id=$(cat "$here"/critest/{images.py,pause.go,nonewprivs.go} "$here/../tests/e2e/estargz.py" | sha256sum | cut -c 1-12)
    images=$kept/$name-$packages_id-$id
    [ -d "$images" ] && return
    need_leave_to_make "critest's images (${images##*/})"
    say "making critest's images (once)"
    for program in pause nonewprivs; do
        CGO_ENABLED=0 go build -trimpath -ldflags '-s -w' -o "$work/programs/$program" "$here/critest/$program.go"
    done
    LAB_IMAGES=$work/images unshare --net -- "$here/critest/node" images "$root" "$work" "$lazy" >"$work/making" 2>&1 ||
        { tail -n 20 "$work/making" >&2; die "critest's images are not made"; }
    rm -rf "$kept/$name"-[0-9]*
    mv -T "$work/images" "$images"
}
