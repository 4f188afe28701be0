#!/usr/bin/env bash
# The options of the installer for Kubernetes nodes: what they add to the node's settings, units and containerd's settings,
# what they refuse, and that nothing is left once they are not given any more.
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
# shellcheck source=tests/e2e/node.sh
. "$here/node.sh"

# refuses_option WORDS NAME=VALUE…
refuses_option() { local want=$1; shift; options=("$@"); refuses "$want" install; options=(); }

starts_containerd
light_files
clean=$(contents)

# --- settings of the daemon, which its program checks, and units ---

does install
systemctl_did >/dev/null
installed=$(contents)
refuses_option 'SLIPWAY_SETTINGS: ' SLIPWAY_SETTINGS='memory_bites = 1'
has_line memory_bites
refuses_option 'pod_functions = 99: at most' SLIPWAY_SETTINGS=$'cpus = 1\npod_functions = 99'
refuses_option 'SLIPWAY_SETTINGS: ' SLIPWAY_SETTINGS='cpus = "many"'
[ -z "$(systemctl_did)" ] || fail "refused settings have called systemctl"
lines() { on sed '/^#/d' /etc/slipway/config.d/10-node.toml | paste -sd ,; }
restarts='daemon-reload enable --quiet slipway.service restart slipway.service'
options=(SLIPWAY_SETTINGS=$'pod_functions = 2\nmemory_bytes = 201326592' SLIPWAY_DEVICE_PLUGIN=1)
does install
did=$(systemctl_did)
[ "$did" = "$restarts enable --quiet slipway-device-plugin.service restart slipway-device-plugin.service" ] || fail "for options systemctl was called: $did"
[ "$(lines)" = 'keeper = true,pod_functions = 2,memory_bytes = 201326592' ] || fail "the settings are $(lines)"
does install
has_line 'nothing is new'
[ -z "$(systemctl_did)" ] || fail "the same options have called systemctl"
does status
on rm /run/active-slipway-device-plugin
refuses 'slipway-device-plugin.service does not run' status
does install
did=$(systemctl_did)
[ "$did" = 'restart slipway-device-plugin.service' ] || fail "for a unit that has ended systemctl was called: $did"
options=(SLIPWAY_SETTINGS='keeper = false')
does install
did=$(systemctl_did)
[ "$did" = "$restarts disable --quiet slipway-device-plugin.service stop slipway-device-plugin.service" ] || fail "without the unit systemctl was called: $did"
[ "$(lines)" = 'keeper = false' ] || fail "the settings are $(lines)"
options=()
does install
[ "$(systemctl_did)" = "$restarts" ] && [ "$(lines)" = 'keeper = true' ] || fail "without options the settings are $(lines)"
[ "$(contents)" = "$installed" ] || fail "options left: $(diff <(echo "$installed") <(contents))"
on touch /etc/enabled-slipway-device-plugin
options=(SLIPWAY_DEVICE_PLUGIN=1)
does install
has_line 'Slipway is installed'
did=$(systemctl_did)
[ "$did" = 'restart slipway-device-plugin.service' ] || fail "a unit that the administrator has enabled: systemctl was called: $did"
on rm /etc/enabled-slipway-device-plugin
options=()
does remove
[ "$(contents)" = "$clean" ] || fail "after the removal: $(diff <(echo "$clean") <(contents))"
ok "options: settings are checked by the program, a unit runs, and without them all is as before"

# Options of containerd's, with a containerd that knows all of them.
newer=$(find "${SLIPWAY_LAB:-/var/lib/slipway/lab}"/cri/containerd-2.*/containerd 2>/dev/null | sort | tail -n 1)
if [ -n "$newer" ]; then
    cp "$newer" "$work/usr-local/bin/containerd"
    on systemctl restart containerd.service || fail "no containerd: $(tail -n 3 "$node/tmp/containerd.log")"
    systemctl_did >/dev/null
    before=$(contents)
    options=(SLIPWAY_SNAPSHOTTER=1 SLIPWAY_SANDBOXER=shim SLIPWAY_POD_ANNOTATIONS='dev.slipway.mem*')
    does install
    did=$(systemctl_did)
    [ "$did" = "$restarts enable --quiet slipway-snapshotter.service restart slipway-snapshotter.service restart containerd.service" ] ||
        fail "for the snapshotter systemctl was called: $did"
    grep -qx 'Environment=SLIPWAY_POD_ANNOTATIONS=dev.slipway.mem\*' "$node/etc/systemd/system/containerd.service.d/slipway-node.conf" ||
        fail "containerd's environment has no annotations"
    start_shim
    options=()
    refuses 'before SLIPWAY_SNAPSHOTTER is taken back' install
    on kill "$(on cat /run/shim.pid)"
    wait_until 10 on test ! -e "/proc/$(on cat /run/shim.pid)"
    does install
    did=$(systemctl_did)
    [ "$did" = "$restarts restart containerd.service disable --quiet slipway-snapshotter.service stop slipway-snapshotter.service" ] ||
        fail "without the snapshotter systemctl was called: $did"
    [ ! -e "$node/etc/systemd/system/containerd.service.d/slipway-node.conf" ] || fail "containerd's environment stays"
    does remove
    [ "$(contents)" = "$before" ] || fail "after the removal: $(diff <(echo "$before") <(contents))"
    rm "$work/usr-local/bin/containerd"
    ok "the snapshotter and the sandboxer: units and containerd's environment, and back"
else
    say "without a containerd 2.x of lab/cri the units of its options are not tested"
fi

# --- settings of containerd ---

without_systemd

# each_containerd: what options add to settings, with all of containerd's own among them; a run without them takes it back.
each_containerd() {
    local plain
    on containerd config default >"$settings"
    options=(SLIPWAY_POD_ANNOTATIONS='dev.slipway.template, dev.slipway.mem*')
    gives 'annotations' "$(runtimes "$(dump)") slipway" 'pod_annotations = ["dev.slipway.template", "dev.slipway.mem*"]'
    options=(SLIPWAY_SANDBOXER=shim)
    case $version in
        1.*) refuses 'SLIPWAY_SANDBOXER=shim needs containerd 2.x' install ;;
        *) gives 'the sandboxer' "$(runtimes "$(dump)") slipway" 'sandboxer = "shim"' ;;
    esac
    options=(SLIPWAY_SNAPSHOTTER=1)
    case $version in
        1.6.*) refuses 'SLIPWAY_SNAPSHOTTER=1 needs containerd 1.7 or later' install; options=(); return ;;
        2.[0-2].*) lazy_of_version_2 ;;
    esac
    gives 'the snapshotter' "$(runtimes "$(dump)") slipway" 'address = "/run/slipway/snapshotter.sock"'
    options=()
    does install
    plain=$(cat "$settings")
    options=(SLIPWAY_SNAPSHOTTER=1)
    does install
    grep -q 'disable_snapshot_annotations = false' <<<"$(dump)" || fail "the snapshotter is not told of layers: $(dump)"
    grep -q 'snapshotter = "slipway"' <<<"$(dump)" || fail "the runtime has another snapshotter: $(dump)"
    options=()
    does install
    [ "$(cat "$settings")" = "$plain" ] || fail "an option is not taken back: $(diff <(echo "$plain") "$settings")"
    does remove
}

lazy_of_version_2() {
    cp "$settings" "$work/settings"
    printf 'version = 2\n' >"$settings"
    refuses 'of version 3 with containerd' install
    cp "$work/settings" "$settings"
}

with_each_containerd each_containerd

# --- what is refused, and the manifest ---

rm -f "$settings"
refuses_option "SLIPWAY_SNAPSHOTTER is 'yes': 1 or 0" SLIPWAY_SNAPSHOTTER=yes
refuses_option "SLIPWAY_DEVICE_PLUGIN is '2': 1 or 0" SLIPWAY_DEVICE_PLUGIN=2
refuses_option "SLIPWAY_SANDBOXER is 'sh?im': shim or podsandbox" SLIPWAY_SANDBOXER=$'sh\nim'
refuses_option "SLIPWAY_POD_ANNOTATIONS has 'app'" SLIPWAY_POD_ANNOTATIONS=dev.slipway.template,app
refuses_option "SLIPWAY_POD_ANNOTATIONS has ''" SLIPWAY_POD_ANNOTATIONS=dev.slipway.template,
printf 'version = 2\n[plugins."io.containerd.grpc.v1.cri".containerd.runtimes]\nrunc.runtime_type = "io.containerd.runc.v2"\nslipway.runtime_type = "io.containerd.slipway.v2"\n' >"$settings"
refuses_option 'names the runtime slipway already' SLIPWAY_POD_ANNOTATIONS='dev.slipway.*'
for name in SNAPSHOTTER SANDBOXER POD_ANNOTATIONS SETTINGS DEVICE_PLUGIN; do
    grep -qF "{name: SLIPWAY_$name, value: \"\"}" "$sources/install.yaml" || fail "install.yaml has no option SLIPWAY_$name"
done
ok "the manifest has each option"
