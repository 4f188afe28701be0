# shellcheck shell=bash
# Kubernetes' programs, kept in $lab/kubernetes. Sourced by lab/kubernetes, never run.
# shellcheck disable=SC2034 # lab/kubernetes uses them

kubernetes_version=1.37.2
built_programs="kubelet kube-apiserver kube-controller-manager kube-scheduler kube-proxy"

# Everything that go.mod does not say comes from it: Go's checksum database vouches for each module.
kubernetes_id() { { cat "$here/cluster/go.mod"; echo "$built_programs"; } | sha256sum | cut -c 1-12; }

# build_kubernetes DIR: some 18 minutes of a processor. Modules and cache, 5 GB, are removed afterwards.
build_kubernetes() {
    local folder=$work/kubernetes-build program packages=() flag=k8s.io/component-base/version
    need_programs go:golang-go
    mkdir -p "$folder"
    cp "$here/cluster/go.mod" "$folder"
    for program in $built_programs; do packages+=("k8s.io/kubernetes/cmd/$program"); done
    (
        cd "$folder"
        export GOMODCACHE=$folder/modules GOCACHE=$folder/cache CGO_ENABLED=0
        export GOFLAGS="${GOFLAGS:-} -mod=mod -buildvcs=false -modcacherw"
        go build -trimpath -o "$1/" -ldflags "-s -w -X $flag.gitVersion=v$kubernetes_version \
            -X $flag.gitMajor=1 -X $flag.gitMinor=37" "${packages[@]}"
    ) >"$work/making" 2>&1 || { tail -n 20 "$work/making" >&2; die "Kubernetes $kubernetes_version is not built"; }
    rm -rf "$folder"
}

# fetch_from_sid DIR: kubectl and etcd need nothing but a C library, and Debian's unstable has both.
fetch_from_sid() {
    local deb
    private_apt_begin "$work/apt-kubernetes" sid
    private_apt "$work/apt-kubernetes" apt-get -qq download kubectl etcd-server >"$work/making" 2>&1 ||
        { tail -n 20 "$work/making" >&2; die "kubectl and etcd cannot be fetched"; }
    for deb in "$work/apt-kubernetes"/*.deb; do dpkg-deb -x "$deb" "$work/unpacked-kubernetes"; done
    cp "$work/unpacked-kubernetes/usr/bin"/{kubectl,etcd} "$1"
}

need_kubernetes() {
    programs=$lab/kubernetes/$(kubernetes_id)
    [ -d "$programs" ] && return
    say "building Kubernetes $kubernetes_version (once, 10 to 20 minutes)"
    mkdir -p "$lab/kubernetes" "$work/kubernetes"
    build_kubernetes "$work/kubernetes"
    fetch_from_sid "$work/kubernetes"
    find "$lab/kubernetes" -mindepth 1 -maxdepth 1 -type d -exec rm -rf {} +
    mv -T "$work/kubernetes" "$programs"
}
