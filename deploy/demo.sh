#!/bin/bash
# Four containers of a real Debian image at once, each in a microVM of its own, and where the time
# of their start went.
#
# usage: demo.sh [--bench|--shell] SLIPWAY
set -euo pipefail
what=--demo
case ${1:-} in
    --bench | --shell) what=$1 && shift ;;
esac
slipway=${1:?usage: demo.sh [--bench|--shell] SLIPWAY}
public=docker.io/library/debian:12-slim
built='slipway-demo:bookworm'
pictures=${TMPDIR:-/tmp}/slipway-demo

say() { printf 'demo: %s\n' "$*"; }

has_image() { "$slipway" image ls | awk '{ print $1 }' | grep -xF "${1#docker.io/library/}" >/dev/null; }

# A public image where a registry answers; where none does, one made of Debian's packages.
need_image() {
    for image in "$public" "$built"; do
        has_image "$image" && return
    done
    image=$public
    say "fetching $image"
    timeout 120 "$slipway" image pull "$image" && return
    image=$built
    say "no registry answers: making $image from Debian's packages (once, about a minute)"
    root=$(mktemp -d)
    trap 'rm -rf --one-file-system "$root"' EXIT
    # Its mounts are in a namespace of its own: whatever ends it, nothing of the host lies in the tree
    # that is removed.
    unshare --mount mmdebstrap --quiet --variant=minbase --aptopt='Acquire::Check-Valid-Until "false"' \
        bookworm "$root/root" >/dev/null
    rm -rf "$root"/root/var/cache/apt/* "$root"/root/var/lib/apt/lists/*
    "$slipway" image import "dir:$root/root" "$image"
}

need_image
mkdir -p "$pictures"
case $what in
    --bench) exec "$slipway" bench startup "$image" --svg "$pictures/startup.svg" ;;
    # How the shell ended is its user's business.
    --shell) "$slipway" run --rm -it "$image" -- bash || true; exit ;;
esac
say "running four containers of $image, each in a microVM of its own"
# shellcheck disable=SC2016 # expanded in the container
"$slipway" run --rm --count 4 --timeline "$pictures/timeline.svg" "$image" -- sh -c '
    . /etc/os-release
    read -r model </sys/class/nvme/nvme0/model; read -r serial </sys/class/nvme/nvme0/serial
    echo "$(hostname): $PRETTY_NAME on Linux $(uname -r); its own NVMe function: $model $serial"'
say "the picture of their start: $pictures/timeline.svg"
say "a shell in a microVM: $slipway run --rm -it $image -- bash"
