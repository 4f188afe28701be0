# shellcheck shell=dash
# containerd's settings on the node: the runtime slipway is added to them and taken away. Sourced by slipway-node,
# never run.

find_containerd() {
    local pid=0 words
    containerd=containerd config=${SLIPWAY_CONTAINERD_CONFIG:-}
    if has_systemd; then
        pid=$(on_host systemctl show --property MainPID --value containerd.service 2>/dev/null) || pid=0
        containerd=$(readlink "/proc/${pid:-0}/exe" 2>/dev/null | sed 's/ (deleted)$//')
        [ -n "$containerd" ] ||
            die "the node's containerd is not the systemd service \`containerd\`, or does not run"
        [ -n "$config" ] || config=$(tr '\0' '\n' <"/proc/$pid/cmdline" |
            sed -n '/^--\{0,1\}config=/s/^[^=]*=//p; /^\(-c\|--config\)$/{n;p;}' | head -n 1)
    fi
    config=${config:-/etc/containerd/config.toml}
    words=$(on_host "$containerd" --version 2>"$work/err") ||
        die "the node has no containerd: $(last_line "$work/err")"
    release=$(echo "$words" | cut -d ' ' -f 3 | sed 's/^v//')
    case $release in
        1.6.* | 1.7.*) major=1 ;;
        2.*) major=2 ;;
        *) die "containerd '$release' of the node is not known: 1.6, 1.7 and 2.x are" ;;
    esac
    if exists "$host$config"; then
        config=$(on_host readlink -f "$config") || die "$config leads nowhere"
    fi
}

# cut_block FILE: the file without the lines of an installation, byte for byte. A block without its last line is not
# cut.
cut_block() {
    if ! grep -q "^$begin" "$1" || ! grep -q "^$end" "$1"; then cat "$1"; return; fi
    awk -v begin="$begin" -v end="$end" -v was="$was" -v added="$added" '
        index($0, begin) == 1 { inside = 1; joined = /had no newline/; next }
        index($0, end) == 1 { inside = 0; next }
        inside || substr($0, length($0) - length(added) + 1) == added { next }
        index($0, was) == 1 { $0 = substr($0, length(was) + 1) }
        { if (lines++) print line; line = $0; if (joined) after = 1 }
        END { if (lines) printf joined && !after ? "%s" : "%s\n", line }' "$1"
}

# block PLUGIN BESIDE [FILE]: the lines that name the runtime, with those of options that the file BESIDE has not, and
# before them those of FILE.
block() {
    cat "${3:-/dev/null}"
    cat <<END
[plugins."$1".containerd.runtimes.slipway]
  runtime_type = "io.containerd.slipway.v2"
  privileged_without_host_devices = true
  pod_annotations = [$(annotation_list | sed 's/.*/"&"/' | paste -s -d , | sed 's/,/, /g')]
END
    runtime_options
    snapshotter_block "$1" "$2"
}

# add_block PLUGIN BLOCK: the file $work/without with the block at its end, and the changes of options before.
add_block() {
    local why='`slipway-node remove` takes these lines away' file=$work/without
    edit_sections "$file" "$1" >"$work/edited"
    cat "$work/edited"
    if [ -s "$file" ] && [ -n "$(tail -c 1 "$file")" ]; then
        why="$why; the file had no newline at its end"
        [ -z "$(tail -c 1 "$work/edited")" ] || echo
    fi
    printf '%s (%s)\n' "$begin" "$why"
    cat "$2"
    echo "$end"
}

# flatten: prints `SECTION|KEY = VALUE` for each setting of containerd's dump that is not empty, so that two dumps can
# be compared.
flatten() {
    tr "'" '"' | awk '
        /^[ \t]*\[.*\][ \t]*$/ { gsub(/^[ \t]+|[ \t]+$/, ""); section = $0; next }
        { gsub(/^[ \t]+|[ \t]+$/, "") }
        /^$/ || / = (""|\[\]|\{\}|0|false|"0s")$/ { next }
        { print section "|" $0 }' | sort
}

# dump FILE OUT: what containerd makes of the settings, flat. A file that is there is read in its own directory,
# where its imports are found.
dump() {
    local at=$host/run/slipway-node.toml
    [ ! -d "$host${config%/*}" ] || at=$(aside "$config")
    note_aside "$at"
    cp "$1" "$at" 2>/dev/null || die "${config%/*} on the node cannot be written: is it read-only?"
    on_host "$containerd" --config "${at#"$host"}" config dump >"$work/dump" 2>"$work/err" || return
    rm -f "$at"
    flatten <"$work/dump" >"$2"
}

# The beginning of the sections of runtimes, of either version of the CRI plugin.
runtimes_section='\[plugins\."io\.containerd\.[a-z]*\.v1\.[a-z]*"\.containerd\.runtimes\.'
# runtimes FLAT: the sections of the runtimes of pods.
runtimes() {
    sed -n "s/^\(${runtimes_section}[^|.]*\)[]|.].*/\1]/p" "$1" | sort -u
}
# settings_of_runtimes FLAT PLUGIN: the lines of all runtimes, as a file of settings for the plugin has them.
settings_of_runtimes() {
    grep "^$runtimes_section" "$1" |
        sed "s/^\[plugins\.\"[^\"]*\"/[plugins.\"$2\"/" | awk -F '|' '
            $1 != section { section = $1; print section }
            { print "  " substr($0, length($1) + 2) }'
}
# lacking FILE FILE: the lines of the second that the first has not.
lacking() { awk 'FILENAME == ARGV[1] { found[$0]; next } !($0 in found)' "$1" "$2"; }
# others FLAT FLAT: settings of the first that the second has not. Slipway's own and the imports do not count.
others() {
    lacking "$2" "$1" | grep -v '\.containerd\.runtimes\.slipway[]|.]' | grep -v '^|imports = ' |
        grep -v -e '^\[proxy_plugins\.slipway[].]' -e '\.runtime_platforms\.slipway\]' -e "|$annotated_key = " || true
}

# file_version FILE: the version of the settings' format; 1 is not written.
file_version() {
    awk '
        /^[ \t]*\[/ { exit }
        /^[ \t]*version[ \t]*=/ { sub(/^[^=]*=/, ""); found = $0 + 0; exit }
        END { print found ? found : 1 }' "$1"
}

plugin_of() { case $1 in 2) echo io.containerd.grpc.v1.cri ;; *) echo io.containerd.cri.v1.runtime ;; esac; }

# check_settings BEFORE AFTER: adding the runtime has changed nothing else.
check_settings() {
    local wrong
    [ -s "$2" ] || die "containerd $release reads no further runtime in $config ($(last_line "$work/err")):" \
        "add it by hand ($guide)"
    wrong=$({ others "$1" "$2"; others "$2" "$1"; } | head -n 1)
    [ -z "$wrong" ] || die "the runtime cannot be added to $config without a change of \`$wrong\`:" \
        "add it by hand ($guide)"
    grep -q '\.containerd\.runtimes\.slipway\]|runtime_type = "io\.containerd\.slipway\.v2"' "$2" ||
        die "containerd $release does not see the runtime in $config: add it by hand ($guide)"
    [ "$lazy" = 0 ] || grep -q '^\[proxy_plugins\.slipway\]|address = ' "$2" ||
        die "containerd $release does not see the snapshotter in $config: add it by hand (docs/containerd.md)"
}

make_drop_in() { { printf '%s\n' '# Made by slipway-node.' "version = $version"; block "$1" /dev/null; } >"$work/drop-in"; }

# plan_drop_in PLUGIN: from version 2 on containerd adds up the settings that it imports.
plan_drop_in() {
    local dir=${config%/*}/conf.d
    [ "$major" -ge 2 ] && [ -d "$host$dir" ] || return
    grep -q "^|imports = .*\"\($dir\|conf\.d\)/\*\.toml\"" "$work/before" || return
    drop_in=$dir/slipway.toml
    is_others "$drop_in" && die "$drop_in on the node is not this program's, and names no runtime slipway: remove it"
    try_drop_in "$1"
}

# try_drop_in PLUGIN: it is there for the time of the question only, by another name: nothing is changed before all is
# checked. That name is read after the one of an earlier run.
try_drop_in() {
    local trial=$host${drop_in%/*}/~slipway-node.toml
    make_drop_in "$1"
    note_aside "$trial"
    cp "$work/drop-in" "$trial"
    dump "$work/without" "$work/after" || : >"$work/after"
    rm -f "$trial"
}

# plan_lines PLUGIN: lines at the end of the file. Version 1 of containerd replaces all settings of a plugin by those
# of a file that it imports, so that a drop-in would lose the administrator's.
plan_lines() {
    block "$1" "$work/without" >"$work/block"
    add_block "$1" "$work/block" >"$work/settings"
    dump "$work/settings" "$work/after" || : >"$work/after"
    # A file that names one runtime has lost containerd's own.
    runtimes "$work/before" >"$work/wanted"
    runtimes "$work/after" >"$work/named"
    if [ -n "$(lacking "$work/named" "$work/wanted")" ]; then
        settings_of_runtimes "$work/before" "$1" >"$work/own-runtimes"
        block "$1" "$work/without" "$work/own-runtimes" >"$work/block"
        add_block "$1" "$work/block" >"$work/settings"
        dump "$work/settings" "$work/after" || : >"$work/after"
    fi
    cut_block "$work/settings" | cmp -s - "$work/without" ||
        die "$config could not be restored later: add the runtime by hand ($guide)"
}

# plan_containerd: what the file ($work/settings) or the drop-in ($work/drop-in) has to be, where it has to change.
plan_containerd() {
    rm -f "$work/settings" "$work/drop-in"
    drop_in=$(cat "$host$state/containerd/drop-in" 2>/dev/null) || drop_in=''
    if exists "$host$config"; then
        cut_block "$host$config" >"$work/without"
        version=$(file_version "$work/without")
    else
        version=$((major + 1))
        printf 'version = %d\n' "$version" >"$work/without"
    fi
    dump "$work/without" "$work/before" || die "containerd $release cannot read $config: $(last_line "$work/err")"
    [ "$version" -ge 2 ] || die "$config on the node is of version 1, or names no version: Slipway's runtime needs" \
        "version 2, as \`containerd config default\` prints it"
    check_version
    if [ -n "$drop_in" ] && [ -e "$host$drop_in" ]; then
        try_drop_in "$(plugin_of "$version")"
    elif grep -q '\.containerd\.runtimes\.slipway\]|runtime_type = ' "$work/before"; then
        check_own_runtime
        cp "$work/without" "$work/settings"
        cp "$work/before" "$work/after"
    else
        runtimes "$work/before" | grep -q . ||
            die "containerd's CRI plugin is off on the node: see disabled_plugins in $config"
        plan_drop_in "$(plugin_of "$version")" || plan_lines "$(plugin_of "$version")"
    fi
    check_settings "$work/before" "$work/after"
    if cmp -s "$work/settings" "$host$config"; then rm "$work/settings"; fi
    if [ -n "$drop_in" ] && cmp -s "$work/drop-in" "$host$drop_in"; then rm "$work/drop-in"; fi
}

# write_host PATH FILE: replaces a file of the node in one step, which keeps its owner and mode.
write_host() {
    local new
    new=$(aside "$1")
    note_aside "$new"
    if [ -e "$host$1" ]; then cp -p "$host$1" "$new"; else mkdir -p "$host${1%/*}"; : >"$new"; chmod 644 "$new"; fi
    cat "$2" >"$new"
    mv -f "$new" "$host$1"
}

containerd_changes() { [ -e "$work/settings" ] || [ -e "$work/drop-in" ]; }

# apply_containerd: writes what was planned. A containerd that does not start with it gets its old settings back.
apply_containerd() {
    local kept=$host$state/containerd
    containerd_changes || return 0
    mkdir -p "$kept"
    echo containerd >>"$host$state/pending"
    echo "$config" >"$kept/path"
    if [ -e "$work/settings" ]; then
        if exists "$host$config"; then cp -p "$host$config" "$kept/before"; else cp "$work/without" "$kept/made"; fi
        write_host "$config" "$work/settings"
        tell "$config names the runtime slipway"
    fi
    if [ -e "$work/drop-in" ]; then
        echo "$drop_in" >"$kept/drop-in"
        write_host "$drop_in" "$work/drop-in"
        tell "$drop_in names the runtime slipway"
    fi
}

# restore_containerd: takes the lines or the drop-in away. Succeeds if there was something to take.
restore_containerd() {
    local kept=$host$state/containerd path found=1
    path=$(cat "$kept/drop-in" 2>/dev/null) || path=''
    if [ -n "$path" ] && [ -e "$host$path" ]; then rm -f "$host$path"; found=0; fi
    path=$(cat "$kept/path" 2>/dev/null) || path=''
    if [ -n "$path" ] && grep -qs "^$begin" "$host$path"; then
        cut_block "$host$path" >"$work/without"
        if cmp -s "$kept/made" "$work/without"; then rm -f "$host$path"; else write_host "$path" "$work/without"; fi
        found=0
    fi
    return "$found"
}

restart_containerd() {
    if on_host systemctl restart containerd.service 2>"$work/err" && is_active containerd.service; then
        tell "containerd $release was restarted"
        return
    fi
    restore_containerd || true
    on_host systemctl restart containerd.service || true
    die "containerd does not start with the runtime slipway, and has its old settings again: $(last_line "$work/err")"
}
