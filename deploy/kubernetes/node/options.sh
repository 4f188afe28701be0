# shellcheck shell=dash
# The options of an installation, which are environment variables of the DaemonSet. One that is not given any more is
# taken back by the next run. Sourced by slipway-node, never run.
# shellcheck disable=SC2034 # the other parts use them

usual_annotations=dev.slipway.template,dev.slipway.empty-dir
# The values with which everything is taken away again.
lazy=0 sandboxer=podsandbox annotations=$usual_annotations device_plugin=0 more_settings=''

# shown TEXT: in one line of an error.
shown() { printf '%s' "$1" | tr -c ' -~' '?' | cut -c 1-60; }
check_switch() { case $2 in 0 | 1) ;; *) die "$1 is '$(shown "$2")': 1 or 0" ;; esac; }

# annotation_list: one a line.
annotation_list() { printf '%s\n' "$annotations" | tr ',' '\n' | tr -d ' '; }

read_options() {
    local wrong
    lazy=${SLIPWAY_SNAPSHOTTER:-0} device_plugin=${SLIPWAY_DEVICE_PLUGIN:-0}
    sandboxer=${SLIPWAY_SANDBOXER:-podsandbox} annotations=${SLIPWAY_POD_ANNOTATIONS:-$usual_annotations}
    more_settings=${SLIPWAY_SETTINGS:-}
    check_switch SLIPWAY_SNAPSHOTTER "$lazy"
    check_switch SLIPWAY_DEVICE_PLUGIN "$device_plugin"
    case $sandboxer in
        podsandbox | shim) ;;
        *) die "SLIPWAY_SANDBOXER is '$(shown "$sandboxer")': shim or podsandbox" ;;
    esac
    wrong=$(annotation_list | grep -vxE 'dev\.slipway\.([a-z][a-z-]*)?\*|dev\.slipway\.[a-z][a-z-]*' | head -n 1 | sed 's/^/./')
    [ -z "$wrong" ] || die "SLIPWAY_POD_ANNOTATIONS has '$(shown "${wrong#.}")': names as dev.slipway.memory, or dev.slipway.*," \
        "with commas between them"
}

# before_2 NUMBER: containerd is older than 2.NUMBER.
before_2() {
    local minor=${release#2.}
    [ "$major" -lt 2 ] || [ "${minor%%.*}" -lt "$1" ]
}

# check_options: containerd can do what they ask for.
check_options() {
    [ "$sandboxer" = podsandbox ] || [ "$major" -ge 2 ] ||
        die "SLIPWAY_SANDBOXER=shim needs containerd 2.x, and the node has $release"
    [ "$lazy" = 0 ] || case $release in
        1.6.*) die "SLIPWAY_SNAPSHOTTER=1 needs containerd 1.7 or later: $release has one snapshotter for all runtimes" ;;
    esac
    [ "$lazy" = 1 ] || ! own_units | grep -q '^slipway-snapshotter.service ' || [ -z "$(running)" ] ||
        die "sandboxes run on this node that may have layers of slipway-snapshotter: drain the node before" \
            "SLIPWAY_SNAPSHOTTER is taken back ($guide)"
}

# check_version: of the settings of containerd. A runtime's snapshotter in a file of version 2 is lost for pulls.
check_version() {
    [ "$lazy" = 0 ] || [ "$major" -lt 2 ] || [ "$version" -ge 3 ] || ! before_2 3 ||
        die "SLIPWAY_SNAPSHOTTER=1 needs $config of version 3 with containerd $release: \`containerd config migrate\` prints it"
}

# check_own_runtime: the administrator's runtime stays as it is.
check_own_runtime() {
    [ "$lazy $sandboxer $annotations" = "0 podsandbox $usual_annotations" ] ||
        die "$config names the runtime slipway already: SLIPWAY_SNAPSHOTTER, SLIPWAY_SANDBOXER and" \
            "SLIPWAY_POD_ANNOTATIONS do not change it"
}

# runtime_options: the lines of the runtime that options add.
runtime_options() {
    if [ "$sandboxer" = shim ]; then
        echo '  sandboxer = "shim"'
        before_2 4 || echo '  disable_pause_image_pull = true'
    fi
    if [ "$lazy" = 1 ]; then echo '  snapshotter = "slipway"'; fi
}

# annotated_section PLUGIN: the section with the key `disable_snapshot_annotations`.
annotated_section() {
    case $1 in
        *.grpc.*) echo "[plugins.\"$1\".containerd]" ;;
        *) echo '[plugins."io.containerd.cri.v1.images"]' ;;
    esac
}

# The name of the section of a line, however it is quoted and set. For awk.
name_of_section='function name(text) { sub(/#.*/, "", text); gsub(/[ \t\r]/, "", text); gsub(/\047/, "\"", text); return text }'

# has_section FILE SECTION
has_section() {
    awk -v section="$2" "$name_of_section"'
        /^[ \t]*\[/ && name($0) == section { found = 1 }
        END { exit !found }' "$1"
}

# edit_sections FILE PLUGIN: the file with the key that the snapshotter needs in its section, if it has that. What the
# key was stays in a comment, by which cut_block restores the file byte for byte.
edit_sections() {
    if [ "$lazy" = 0 ]; then cat "$1"; return; fi
    awk -v section="$(annotated_section "$2")" -v key="$annotated_key" -v was="$was" -v added="$added" "$name_of_section"'
        /^[ \t]*\[/ {
            inside = name($0) == section
            print
            if (inside) print key " = false " added
            next
        }
        inside && $0 ~ "^[ \t]*" key "[ \t]*=" { print was $0; next }
        { print }' "$1"
}
annotated_key=disable_snapshot_annotations

# snapshotter_block PLUGIN FILE: the sections that the snapshotter needs, beside those of the file.
snapshotter_block() {
    [ "$lazy" = 1 ] || return 0
    cat <<END
[proxy_plugins.slipway]
  type = "snapshot"
  address = "/run/slipway/snapshotter.sock"
  [proxy_plugins.slipway.exports]
    root = "/var/lib/slipway/snapshotter"
END
    has_section "$2" "$(annotated_section "$1")" || printf '%s\n  %s = false\n' "$(annotated_section "$1")" "$annotated_key"
    case $1 in
        *.grpc.*) ;;
        *) printf '%s\n' '[plugins."io.containerd.cri.v1.images".runtime_platforms.slipway]' '  snapshotter = "slipway"' ;;
    esac
}

# needs_environment: with sandboxes of the shim's, the shim itself counts annotations, by containerd's environment.
needs_environment() { [ "$sandboxer" = shim ] && [ "$annotations" != "$usual_annotations" ]; }
environment_words() { echo "SLIPWAY_POD_ANNOTATIONS=$(annotation_list | paste -s -d ,)"; }

make_environment() {
    { needs_environment && has_systemd; } || return 0
    mkdir -p "$work/tree${environment%/*}"
    printf '%s\n' '# Made by slipway-node.' '[Service]' "Environment=$(environment_words)" >"$work/tree$environment"
}

# by_hand: what a node without systemd needs for the options beside a restart.
by_hand() {
    wanted_units | sed 's/^/; have it run /' | tr -d '\n'
    ! needs_environment || printf '; give containerd %s in its environment' "$(environment_words)"
}

# check_settings_of_daemon PROGRAM: the daemon takes all settings of the node together with those of the option.
check_settings_of_daemon() {
    local dir=/run/slipway-node.settings
    [ -n "$more_settings" ] && [ -e "$work/tree$setting" ] || return 0
    note_aside "$host$dir"
    rm -rf "${host:?}$dir"
    # The node's settings may be root's alone.
    mkdir -m 700 "$host$dir"
    mkdir "$host$dir/config.d"
    cat "$host/etc/slipway/config.toml" >"$host$dir/config.toml" 2>/dev/null || true
    cp "$host${setting%/*}"/*.toml "$host$dir/config.d" 2>/dev/null || true
    cp "$work/tree$setting" "$host$dir/config.d"
    on_host "$1" --config "$dir/config.toml" daemon --check >"$work/out" 2>"$work/err" ||
        die "SLIPWAY_SETTINGS: $(last_line "$work/err" | sed "s|$dir|/etc/slipway|g")"
}

# wanted_units: the units that options ask for.
wanted_units() {
    if [ "$lazy" = 1 ]; then echo slipway-snapshotter.service; fi
    if [ "$device_plugin" = 1 ]; then echo slipway-device-plugin.service; fi
}
# own_units: a line `UNIT here` for each unit that the installation has enabled, `UNIT before` if it was enabled.
own_units() { cat "$host$state/units" 2>/dev/null || true; }
units_change() { has_systemd && [ "$(wanted_units | sort)" != "$(own_units | cut -d ' ' -f 1 | sort)" ]; }

# start_units: those that options ask for; programs that are new are started again.
start_units() {
    local unit before
    for unit in $(wanted_units); do
        before=here
        if on_host systemctl is-enabled --quiet "$unit" 2>/dev/null; then before=before; fi
        own_units | grep -q "^$unit " || echo "$unit $before" >>"$host$state/units"
        [ "$before" = before ] || on_host systemctl enable --quiet "$unit" 2>"$work/err" ||
            die "$unit cannot be enabled: $(last_line "$work/err")"
        if ! grep -qsx slipway "$host$state/pending" && is_active "$unit"; then continue; fi
        { on_host systemctl restart "$unit" 2>"$work/err" && is_active "$unit"; } ||
            die "$unit does not start: see \`journalctl -u $unit\` on the node"
        tell "$unit was started"
    done
}

# stop_units: those that an installation has enabled and no option asks for.
stop_units() {
    local unit
    [ -e "$host$state/units" ] || return 0
    # busybox's grep takes an empty list for a pattern that all lines match.
    { wanted_units; echo none; } >"$work/wanted-units"
    for unit in $(own_units | cut -d ' ' -f 1 | grep -vxF -f "$work/wanted-units"); do
        if own_units | grep -qx "$unit here"; then
            on_host systemctl disable --quiet "$unit" 2>/dev/null || true
            on_host systemctl stop "$unit" || die "$unit cannot be stopped: see \`systemctl status $unit\` on the node"
            tell "$unit was stopped"
        fi
        own_units | grep -v "^$unit " >"$work/units" || true
        write_host "$state/units" "$work/units"
    done
    [ -s "$host$state/units" ] || rm -f "$host$state/units"
}
