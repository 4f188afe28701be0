#!/usr/bin/env bash
# The image that installs Slipway on a Kubernetes node: it installs, upgrades under running programs, says what is wrong
# and removes itself, on a node of its own with every containerd that this machine has.
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
# shellcheck source=tests/e2e/node.sh
. "$here/node.sh"

make_image --level 0 "$work/tree" "$work/again.tar" >"$work/out" && cmp -s "$work/image.tar" "$work/again.tar" || fail "two images of the same files differ"
rm "$work/again.tar"
ok "an image of $(du -sm "$image" | cut -f 1) MiB, twice the same"
refuses_image() {
    local want=$1; shift
    make_image "$@" "$work/none.tar" >"$work/out" && fail "image.py $* made an image"
    [ "$(wc -l <"$work/out")" = 1 ] && grep -qF -- "$want" "$work/out" || fail "image.py $*: $(cat "$work/out")"
    ok "image.py -> $(cat "$work/out")"
}
mkdir "$work/empty"
refuses_image 'has no bin/slipway' "$work/empty"
refuses_image 'is no static busybox' --busybox "$slipway" "$work/tree"
refuses_image 'has no guest kernel' --kernel "$work/empty" "$work/tree"

before=$(contents)
starts_containerd
refuses 'nothing is installed' status
does remove
has_line 'nothing is installed'
on unshare --mount -- sh -c 'mount -t proc proc /image/proc; exec chroot /image /bin/slipway-node install' >"$work/out" 2>&1 && fail "installed without /host"
has_line "error: the node's root is not mounted at /host"
on unshare --mount --pid --fork -- sh -c 'mount --rbind / /image/host; mount -t proc proc /image/proc; exec chroot /image /bin/slipway-node install' >"$work/out" 2>&1 &&
    fail "installed without hostPID"
has_line "error: process 1 is not the node's: the pod needs hostPID: true"
ok "without the node's root, or its process ids: $(cat "$work/out")"
on mount -o remount,bind,ro /usr/local
refuses '/usr/local/bin on the node cannot be written: is it read-only?' install
on mount -o remount,bind,rw /usr/local
[ -z "$(systemctl_did)" ] || fail "refused installations have called systemctl"

# --- installation, upgrade, removal ------------------------------------------------------------------------------

echo 'of an earlier installation by hand' >"$work/usr-local/bin/slipway-bench"
before=$(contents)
does install
has_line "Slipway is installed: $("$slipway" --version)"
did=$(systemctl_did)
[ "$did" = 'daemon-reload enable --quiet slipway.service restart slipway.service restart containerd.service' ] || fail "systemctl was called: $did"
# The node sees the test's files nowhere, so that they are compared by their sums.
sums() { find usr opt -type f -exec sha256sum {} + | sort -k 2; }
(cd "$work/tree" && sums) >"$work/sums"
on sh -c 'cd / && sha256sum --quiet -c -' <"$work/sums" >"$work/out" 2>&1 || fail "files differ: $(cat "$work/out")"
[ "$(wc -l <"$work/sums")" -ge 60 ] || fail "make install has made $(wc -l <"$work/sums") files"
[ "$(on cat /etc/slipway/config.d/10-node.toml | tail -n 1)" = 'keeper = true' ] || fail "no keeper in the settings"
[ "$(on cat /var/lib/slipway/kernel/release)" = 6.1.0-1-cloud-amd64 ] || fail "no guest kernel"
grep -q -- --tar= <<<"$(on /var/lib/slipway/tools/bin/mkfs.erofs --help 2>&1)" || fail "mkfs.erofs does not run on the node"
grep -q '^agent  *ok' <<<"$(on slipway doctor 2>&1)" || fail "doctor: $(on slipway doctor)"
grep -q 'runtimes.slipway\]' <<<"$(on containerd config dump)" || fail "no runtime: $(on containerd config dump)"
[ "$(on cat /run/kubectl.log)" = '--kubeconfig /etc/kubernetes/kubelet.conf label node one dev.slipway.node=ready --overwrite' ] ||
    fail "kubectl was called: $(on cat /run/kubectl.log)"
does status
refuses 'has not installed its version yet' status --own
ok "installed: $(cat "$work/out")"
# metrics.yaml runs the node's program in the image, with the node's /usr.
shown=$(on unshare --mount -- sh -c 'mount --rbind /usr /image/usr && exec chroot /image /usr/local/bin/slipway --version' 2>&1)
[ "$shown" = "$("$slipway" --version)" ] || fail "the node's program does not run in the image: $shown"
# The node's own containerd takes the image, and runc runs it as the manifests have it: the privileged container that
# shares the node's process ids, with the node's root.
if command -v runc >/dev/null; then
    mv "$work/image.tar" "$node/tmp"
    on ctr image import /tmp/image.tar >"$work/out" 2>&1 || fail "ctr image import: $(cat "$work/out")"
    name=$(on ctr image ls -q)
    [ "$name" = "localhost/slipway-node:$("$slipway" --version | cut -d ' ' -f 2)" ] || fail "the image is called $name"
    on ctr run --rm --privileged --snapshotter native --cgroup '' --runtime io.containerd.runc.v2 --with-ns pid:/proc/1/ns/pid \
        --mount type=bind,src=/,dst=/host,options=rbind:rslave "$name" node /bin/slipway-node install >"$work/out" 2>&1 ||
        fail "ctr run: $(cat "$work/out") $(tail -n 3 "$node/tmp/containerd.log")"
    has_line 'nothing is new'
    ok "containerd imports the image, and runc runs it: $(cat "$work/out")"
else
    say "without runc the image is not run by containerd"
fi
was=$(inodes)
does install
has_line 'nothing is new'
[ "$(inodes)" = "$was" ] || fail "the second installation changed $(diff <(echo "$was") <(inodes))"
did=$(systemctl_did)
[ -z "$did" ] || fail "the second installation called systemctl: $did"
ok "again: no file is touched, nothing is restarted"

on sh -c 'echo slipway >/var/lib/slipway/node/pending'
refuses 'an installation was broken off' status
does install
did=$(systemctl_did)
[ "$did" = 'daemon-reload enable --quiet slipway.service restart slipway.service' ] || fail "after a broken installation systemctl was called: $did"
on sh -c 'sleep 3000 & echo $! >/run/slipway-node.lock; wait' 2>/dev/null &
# The shell that becomes it has the name of the lock in its arguments.
sleeps() { on sh -c 'grep -q ^sleep "/proc/$(cat /run/slipway-node.lock)/cmdline"'; }
wait_until 10 sleeps || fail "no other process is named in the lock"
does install
on sh -c 'echo $$ >/run/slipway-node.lock; sleep 3000; :' slipway-node 2>/dev/null &
holds() { on sh -c 'grep -q slipway-node "/proc/$(cat /run/slipway-node.lock)/cmdline"'; }
disown -a
wait_until 10 holds || fail "nobody holds the lock"
refuses 'is installing or removing Slipway already' install
on sh -c 'kill "$(cat /run/slipway-node.lock)"; rm /run/slipway-node.lock'
systemctl_did >/dev/null

# Another version: one program differs, one file is new, one is gone, and there is another kernel.
two=/tmp/two
mkdir -p "$node$two"
cp -a "$image/slipway/." "$node$two"
echo two >>"$node$two/usr/local/bin/slipway"
rm "$node$two/usr/local/share/man/man1/slipway-run.1"
echo new >"$node$two/usr/local/share/man/man1/slipway-new.1"
(cd "$node$two/var/lib/slipway" && mv node/kernel-* node/kernel-two && echo two >node/kernel-two/release && ln -sfn node/kernel-two kernel)
on sh -c 'slipway keeper --run-dir /run/slipway >/dev/null 2>&1 & echo $! >/run/keeper.pid'
start_shim
wait_until 10 on test -S /run/slipway/keeper.sock || fail "no keeper"
keeper_pid=$(on cat /run/keeper.pid)
files=$two
does install
has_line 'new files, links and directories: 4'
did=$(systemctl_did)
[ "$did" = 'daemon-reload enable --quiet slipway.service restart slipway.service' ] || fail "the upgrade called systemctl: $did"
cmp -s "$node$two/usr/local/bin/slipway" "$work/usr-local/bin/slipway" || fail "slipway is the old one"
[ "$(on cat /var/lib/slipway/kernel/release; on ls /var/lib/slipway/node)" = "two$(printf '\n%s' containerd enabled files kept kernel-two "$(basename "$image"/slipway/var/lib/slipway/node/tools-*)")" ] ||
    fail "the guest kernel is not the new one: $(on ls -l /var/lib/slipway /var/lib/slipway/node)"
[ ! -e "$work/usr-local/share/man/man1/slipway-run.1" ] && [ -e "$work/usr-local/share/man/man1/slipway-new.1" ] || fail "the manual pages are those of the old version"
[ "$(on readlink "/proc/$keeper_pid/exe")" = '/usr/local/bin/slipway (deleted)' ] && on cmp -s "/proc/$keeper_pid/exe" /image/slipway/usr/local/bin/slipway ||
    fail "the keeper does not go on with the old program: $(on readlink "/proc/$keeper_pid/exe")"
asides() { on find /etc /usr/local /usr/libexec /var /opt /run -name '.*.slipway-*'; }
[ -z "$(asides)" ] || fail "left: $(asides)"
ok "an upgrade: a program that runs goes on with its old file"

# variant NAME: a directory of files that differ from the second version by a line in the main program.
variant() {
    cp -al "$node$two" "$node/tmp/$1"
    rm "$node/tmp/$1/usr/local/bin/slipway"
    { cat "$node$two/usr/local/bin/slipway"; echo "of-the-test-$1"; } >"$node/tmp/$1/usr/local/bin/slipway"
    chmod 755 "$node/tmp/$1/usr/local/bin/slipway"
    files=/tmp/$1
}
variant three
echo of-the-test-three >"$node/tmp/refused"
on cp /tmp/refused /run/refused
# The installation's own setting goes with this one, and comes back with the old version.
on sh -c 'echo "keeper = true" >/etc/slipway/config.toml'
refuses 'the new daemon does not start, so the old version is back' install
on test -e /etc/slipway/config.d/10-node.toml || fail "the old version has lost its setting"
on rm /etc/slipway/config.toml
systemctl_did >/dev/null
does status
cmp -s "$node$two/usr/local/bin/slipway" "$work/usr-local/bin/slipway" || fail "the old version is not back"
on rm /run/refused
variant broken
echo 'no program' >"$node/tmp/broken/usr/local/bin/slipway"
refuses "Slipway's programs do not run on this node" install
on kill "$keeper_pid"
wait_until 10 on test ! -e "/proc/$keeper_pid"
files=/tmp/three
refuses 'which has no keeper: drain the node first' install
refuses 'nothing is removed before they have ended' remove
on kill "$(on cat /run/shim.pid)"
wait_until 10 on test ! -e "/proc/$(on cat /run/shim.pid)"
[ -z "$(systemctl_did)" ] || fail "refused installations have called systemctl"
does install
has_line 'new files, links and directories: 1'
systemctl_did >/dev/null
on rm /run/kubectl.log
does remove
[ "$(contents)" = "$before" ] || fail "after the removal: $(diff <(echo "$before") <(contents))"
did=$(systemctl_did)
[ "$did" = 'restart containerd.service disable --quiet slipway.service stop slipway.service daemon-reload' ] || fail "the removal called systemctl: $did"
[ "$(on cat /run/kubectl.log)" = '--kubeconfig /etc/kubernetes/kubelet.conf label node one dev.slipway.node- --overwrite' ] ||
    fail "kubectl was called: $(on cat /run/kubectl.log)"
refuses 'nothing is installed' status
ok "removed: every file is as it was, also one that was there before"

# --wait: it stays until it is told to end, and leaves what it has installed.
light_files
pod install --wait & waiting=$!
wait_until 30 on sh -c 'test -e /var/lib/slipway/node/files -a ! -e /run/slipway-node.lock' || fail "install --wait: $(cat "$work/out")"
sleep 0.3
runs "$waiting" || fail "install --wait has ended: $(cat "$work/out")"
does status --own
on sh -c 'kill $(pgrep -f "[s]lipway-node install --wait")'
wait "$waiting" || fail "install --wait ended with status $?: $(cat "$work/out")"
does status
does remove
[ "$(contents)" = "$before" ] || fail "after the removal: $(diff <(echo "$before") <(contents))"
ok "install --wait ends at SIGTERM, and leaves what is installed"

# Runs that are killed while they copy, rename, or start services: the next one ends what they began.
for sign in "$work/usr-local/bin/.slipway.slipway-new" "$node/var/lib/slipway/node/files" "$node/var/lib/slipway/node/enabled"; do
    # One that comes to its end before it is killed is begun once more.
    for try in {1..20}; do
        pod install & killed=$!
        until [ -e "$sign" ] || ! runs "$killed"; do :; done
        on sh -c 'kill -KILL $(pgrep -f "[s]lipway-node install")' 2>/dev/null
        wait "$killed" 2>/dev/null || break
        [ "$try" -lt 20 ] || fail "an installation ended before it was killed at ${sign##*/}"
        does remove
    done
    # Services that were being started then are started.
    wait_until 20 on sh -c '! pgrep -f "[s]ystemctl restart" >/dev/null' || fail "a service is not started"
    does install
    does status
    [ -z "$(asides)" ] || fail "left: $(asides)"
    does remove
    [ "$(contents)" = "$before" ] || fail "after a kill at ${sign##*/} and a removal: $(diff <(echo "$before") <(contents))"
# The shell says that a job was killed.
done 2>/dev/null
ok "installations that were killed: the next one ends what they began, and a removal restores every file"

# --- settings of containerd --------------------------------------------------------------------------------------

without_systemd

# each_containerd: what an administrator may have.
each_containerd() {
    local plugin='"io.containerd.grpc.v1.cri"'
    rm -f "$settings"
    gives 'no settings' 'runc slipway'
    printf 'version = 2\n[plugins.%s.cni]\n  bin_dir = "/usr/lib/cni"' "$plugin" >"$settings"
    gives 'no runtime named, no newline at the end' 'runc slipway' '/usr/lib/cni'
    cat >"$settings" <<END
version = 2
[plugins.$plugin]
  sandbox_image = "registry.example/pause:3.9"
  [plugins.$plugin.containerd]
    default_runtime_name = "runc"
    [plugins.$plugin.containerd.runtimes.nvidia]
      runtime_type = "io.containerd.runc.v2"
      [plugins.$plugin.containerd.runtimes.nvidia.options]
        BinaryName = "/usr/bin/nvidia-container-runtime"
    [plugins.$plugin.containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins.$plugin.containerd.runtimes.runc.options]
        SystemdCgroup = true
  [plugins.$plugin.registry]
    config_path = "/etc/containerd/certs.d"
END
    gives 'version 2 with two runtimes' 'nvidia runc slipway' 'SystemdCgroup = true'
    on containerd config default | sed 's/SystemdCgroup = false/SystemdCgroup = true/' >"$settings"
    gives "$(grep '^version' "$settings"), all of containerd's own" "$(runtimes "$(dump)") slipway" 'SystemdCgroup = true'
    case $version in
        2.*) imports ;;
        *) imports_lose ;;
    esac
}

# Version 2 adds up what it imports: a drop-in is enough, and the administrator's file stays.
imports() {
    mkdir "$node/etc/containerd/conf.d"
    printf 'version = 3\nimports = ["/etc/containerd/conf.d/*.toml"]\n' >"$settings"
    does install
    [ -e "$node/etc/containerd/conf.d/slipway.toml" ] && ! grep -q slipway "$settings" || fail "no drop-in: $(cat "$settings")"
    does remove
    [ ! -e "$node/etc/containerd/conf.d/slipway.toml" ] || fail "the drop-in stays"
    gives 'version 3 with imports: a drop-in' 'runc slipway'
    rmdir "$node/etc/containerd/conf.d"
}

# Version 1 replaces a plugin's settings by those of a drop-in, so the lines have to be in the file itself.
imports_lose() {
    mkdir "$node/etc/containerd/conf.d"
    printf 'version = 2\nimports = ["/etc/containerd/conf.d/*.toml"]\n[plugins."io.containerd.grpc.v1.cri"]\n  sandbox_image = "a/b:1"\n' >"$settings"
    printf 'version = 2\n[plugins."io.containerd.grpc.v1.cri".containerd]\n  default_runtime_name = "runc"\n' >"$node/etc/containerd/conf.d/one.toml"
    ! grep -qF '"a/b:1"' <<<"$(dump)" || fail "containerd $version adds up what it imports: a drop-in would do"
    rm "$node/etc/containerd/conf.d/one.toml"
    gives 'imports that replace' 'runc slipway' '"a/b:1"'
    rmdir "$node/etc/containerd/conf.d"
}

with_each_containerd each_containerd

# An error is one line, and the node stays as it is.
printf 'version = 2\n[plugins\n' >"$settings"
refuses 'cannot read /etc/containerd/config.toml' install
printf 'disabled_plugins = ["cri"]\n' >"$settings"
refuses 'version 1, or names no version' install
printf 'version = 2\ndisabled_plugins = ["io.containerd.grpc.v1.cri"]\n' >"$settings"
refuses "containerd's CRI plugin is off on the node" install
printf 'version = 2\n[plugins."io.containerd.grpc.v1.cri".containerd]\n  runtimes = {runc = {runtime_type = "io.containerd.runc.v2"}}\n' >"$settings"
refuses 'reads no further runtime in /etc/containerd/config.toml' install
rm "$settings"
printf '#!/bin/sh\necho containerd github.com/containerd/containerd 1.5.9 0\n' >"$work/usr-local/bin/containerd"
chmod 755 "$work/usr-local/bin/containerd"
refuses "containerd '1.5.9' of the node is not known" install
rm "$work/usr-local/bin/containerd"

# The administrator's own: a runtime, a setting and a kernel stay as they are.
mkdir -p "$node"/etc/slipway "$node/var/lib/slipway/kernel"
echo 'keeper = false' >"$node/etc/slipway/config.toml"
printf 'version = 2\n[plugins."io.containerd.grpc.v1.cri".containerd.runtimes]\nrunc.runtime_type = "io.containerd.runc.v2"\nslipway.runtime_type = "io.containerd.slipway.v2"\n' >"$settings"
before=$(contents)
files=/image/slipway
does install
[ ! -e "$node/etc/slipway/config.d" ] && [ ! -L "$node/var/lib/slipway/kernel" ] && ! ls -d "$node"/var/lib/slipway/node/kernel-* >"$work/out" 2>&1 ||
    fail "the administrator's settings or kernel were replaced: $(ls -R "$node/etc/slipway") $(cat "$work/out")"
[ "$(contents | grep config.toml)" = "$(grep config.toml <<<"$before")" ] || fail "the settings have changed"
does remove
[ "$(contents)" = "$before" ] || fail "after the removal: $(diff <(echo "$before") <(contents))"
ok "a runtime, a setting and a guest kernel that are there already stay as they are"

# The manifests name commands that the program has, and the image that the Makefile makes.
for word in install remove; do
    grep -qF "args: [$word, --wait]" "$sources/$word.yaml" || fail "$word.yaml does not call \`$word --wait\`"
    grep -qF "image: localhost/slipway-node:$("$slipway" --version | cut -d ' ' -f 2)" "$sources/$word.yaml" || fail "$word.yaml has another image"
done
grep -qF "$(sed -n 's/^label=//p' "$sources/slipway-node"): ready" "$sources/../runtimeclass.yaml" || fail "the class has another label than the nodes"
for line in "image: localhost/slipway-node:$("$slipway" --version | cut -d ' ' -f 2)" 'dev.slipway.node: ready' 'command: [/usr/local/bin/slipway, metrics, --listen,'; do
    grep -qF "$line" "$sources/../metrics.yaml" || fail "metrics.yaml has no \`$line\`"
done
ok "the manifests name the image and its commands, and the nodes' label"
