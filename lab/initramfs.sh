# shellcheck shell=bash
# An initramfs of busybox, modules and given files, for an emulated server or for a guest in it.
# Sourced after common.sh; `work` is the caller's own folder, `kernel` the folder of the kernel.

# Begins one in the folder $root.
begin_initramfs() {
    root=$work/root
    added=()
    mkdir -p "$root"/{bin,dev,proc,sys,tmp,run,root,modules}
    cp "$(command -v busybox)" "$root/bin/busybox"
    # Made here: busybox would take longer to do it than the kernel to start.
    local applet
    for applet in $(busybox --list); do
        [ "$applet" = busybox ] || ln -s busybox "$root/bin/$applet"
    done
    : >"$root/modules/order"
    write_now >"$root/bin/now"
    # The kernel opens it for process 1 before anything is mounted.
    mknod "$root/dev/console" c 5 1 || cannot "root, to make device files"
}

# end_initramfs FILE: packs it.
end_initramfs() {
    chmod 755 "$root/init" "$root/bin/now"
    (cd "$root" && find . | LC_ALL=C sort | cpio --quiet -o -H newc -R 0:0) >"$1"
    rm -rf "$root"
}

# unpacked FILE: a module's bytes, whatever Debian's kernel packed it with.
unpacked() {
    case $1 in
        *.xz) xz -dc "$1" ;;
        *.zst) zstd -dc "$1" ;;
        *.gz) gzip -dc "$1" ;;
        *) cat "$1" ;;
    esac
}

# add_module NAME: adds a module, after those that it names as needed. One that is no file is built
# into the kernel.
declare -A added=()
add_module() {
    local name=${1//-/_} file needed
    [ -z "${added[$name]:-}" ] || return 0
    added[$name]=yes
    file=$(find -L "$kernel/modules/" -name "${name//_/[-_]}.ko*" -print -quit)
    [ -n "$file" ] || return 0
    unpacked "$file" >"$root/modules/$name.ko"
    needed=$(tr '\0' '\n' <"$root/modules/$name.ko" | sed -n 's/^depends=//p')
    for needed in ${needed//,/ }; do
        add_module "$needed"
    done
    echo "$name" >>"$root/modules/order"
}

# add_file HOST:GUEST: adds a file or a folder of this machine.
add_file() {
    local from=${1%:*} to=${1##*:}
    [[ $1 = *:/* ]] || die "--file $1: HOST:GUEST is needed, GUEST an absolute path"
    [ -e "$from" ] || die "--file $1: $from is not there"
    mkdir -p "$root$(dirname "$to")"
    cp -rL --preserve=mode "$from" "$root$to"
}

# quoted WORD...: the words of a command as a shell reads them.
quoted() {
    local word
    for word in "$@"; do printf "'%s' " "${word//\'/\'\\\'\'}"; done
}

# The beginning of every process 1.
write_mounts() {
    cat <<'INIT'
#!/bin/busybox sh
export PATH=/bin HOME=/root TERM=dumb
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /run
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs tmpfs /dev/shm
ip link set lo up 2>/dev/null
parameters_of() { :; }
load_modules() {
    while read -r module; do
        insmod "/modules/$module.ko" $(parameters_of "$module") ||
            echo "lab: module $module does not load"
    done </modules/order
}
INIT
}

# The kernel's clock in microseconds; /proc/uptime has hundredths of a second only.
write_now() {
    cat <<'NOW'
#!/bin/busybox sh
while read -r first second nanoseconds _; do
    [ "$first $second" != "now at" ] || break
done </proc/timer_list
echo $((nanoseconds / 1000))
NOW
}
