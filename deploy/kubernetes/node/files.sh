# shellcheck shell=dash
# The files that an installation makes on the node: what differs, how they are replaced, and how they are taken away.
# Sourced by slipway-node, never run.

# source_of PATH: the file that is installed there.
source_of() { if [ -e "$work/tree$1" ]; then echo "$work/tree$1"; else echo "$tree$1"; fi; }
exists() { [ -e "$1" ] || [ -L "$1" ]; }
# is_ours PATH: an earlier installation has made it.
is_ours() { grep -qs " $1\$" "$host$state/files"; }
# is_others PATH: it is there, and no installation has made it.
is_others() { exists "$host$1" && ! is_ours "$1"; }

# names_keeper: settings of the administrator's, in files or in the option, say something about `keeper`.
names_keeper() {
    local file
    for file in "$host/etc/slipway/config.toml" "$host${setting%/*}"/*.toml; do
        [ "$file" = "$host$setting" ] || ! grep -qsE "$keeper_line" "$file" || return 0
    done
    printf '%s\n' "$more_settings" | grep -qE "$keeper_line"
}
keeper_line='^[[:space:]]*keeper[[:space:]]*='

# The administrator's setting `keeper` is left as it is. Without one, pods have to outlive the daemon.
make_setting() {
    local keeper='# Made by slipway-node: pods go on while the daemon is restarted or upgraded.
keeper = true'
    if names_keeper; then keeper=''; fi
    [ -n "$keeper$more_settings" ] || return 0
    mkdir -p "$work/tree${setting%/*}"
    {
        [ -z "$keeper" ] || printf '%s\n' "$keeper"
        [ -z "$more_settings" ] || printf '%s\n' "# SLIPWAY_SETTINGS of slipway-node's DaemonSet." "$more_settings"
    } >"$work/tree$setting"
}

# A guest kernel and tools that the administrator has set up are used, not replaced.
own_parts() {
    local path
    # busybox's grep takes an empty list for a pattern that all lines match.
    echo '^none$'
    if is_others /var/lib/slipway/kernel; then
        echo '^[lu] /var/lib/slipway/(kernel|node/kernel-.*)$'
    fi
    for path in "$tree"/var/lib/slipway/tools/bin/*; do
        path=${path#"$tree"}
        if is_others "$path"; then printf '^f %s$\n^u %s/tools-\n' "$path" "$state"; fi
    done
}

# list_items: a line `KIND PATH` for each thing to install: a file, a link, or a unit.
list_items() {
    own_parts >"$work/own"
    {
        (cd "$tree" && find . -path ".$state" -prune -o -type f -print) | sed 's/^\./f /'
        (cd "$tree" && find . -path ".$state" -prune -o -type l -print) | sed 's/^\./l /'
        [ ! -d "$tree$state" ] || find "$tree$state" -mindepth 1 -maxdepth 1 | sed "s|^$tree|u |"
        [ ! -e "$work/tree$setting" ] || echo "f $setting"
        [ ! -e "$work/tree$environment" ] || echo "f $environment"
    } | sort | grep -vEf "$work/own" >"$work/items"
}

# differs KIND PATH: the node does not have it as the image has.
differs() {
    local to=$host$2 from
    case $1 in
        u) [ ! -d "$to" ] ;;
        l) [ "$(readlink "$tree$2")" != "$(readlink "$to" 2>/dev/null)" ] ;;
        f)
            from=$(source_of "$2")
            [ -L "$to" ] || ! cmp -s "$from" "$to" || [ "$(stat -c %a "$from")" != "$(stat -c %a "$to")" ]
            ;;
    esac
}

# missing_directories: those that have to be made for the items, parents first.
missing_directories() {
    local path
    { cut -d ' ' -f 2 "$work/items"; echo "$state/files"; echo "$config"; } | while read -r path; do
        while path=${path%/*} && [ -n "$path" ] && [ ! -d "$host$path" ]; do echo "$path"; done
    done | sort -u
}

# find_left: what a run that was killed has left: files beside their places, and directories that the state has not.
find_left() {
    local dir
    {
        sed 's/^[a-z] //' "$work/items"
        echo "$setting"
        echo "$environment"
    } | sed 's|/[^/]*$||' | sort -u | while read -r dir; do
        [ ! -d "$host$dir" ] || find "$host$dir" -mindepth 1 -maxdepth 1 \( -name '.*.slipway-new' -o -name '.*.slipway-old' \)
    done >>"$work/asides"
    cat "$host$made" >>"$work/directories" 2>/dev/null || true
}

# describe: the lines of the state for the items. A file that the node has already has its line.
describe() {
    local kind path
    while read -r kind path; do
        if is_ours "$path" && ! grep -qx "$kind $path" "$work/changed"; then
            grep "^$kind .* $path\$" "$host$state/files"
            continue
        fi
        case $kind in
            f) printf 'f %s %s\n' "$(sha256sum <"$(source_of "$path")" | cut -d ' ' -f 1)" "$path" ;;
            l) printf 'l %s %s\n' "$(readlink "$tree$path")" "$path" ;;
            u) printf 'u - %s\n' "$path" ;;
        esac
    done <"$work/items"
}

# plan_files: the items that differ, the lines of the new state, and what an earlier version has that this has not.
plan_files() {
    local kind path _
    [ -x "$tree/usr/local/bin/slipway" ] || find "$tree" -name slipway -type f 2>/dev/null | grep -q . ||
        die "$tree has no programs of Slipway's: this is not the image that \`make node-image\` makes"
    make_setting
    make_environment
    list_items
    missing_directories >"$work/missing"
    cp "$work/missing" "$work/directories"
    find_left
    while read -r kind path; do
        if differs "$kind" "$path"; then echo "$kind $path"; fi
    done <"$work/items" >"$work/changed"
    {
        describe
        grep -s '^d ' "$host$state/files" || true
        sed 's/^/d - /' "$work/directories"
    } | sort -u >"$work/files"
    : >"$work/gone"
    [ ! -e "$host$state/files" ] || while read -r kind _ path; do
        grep -q " $path\$" "$work/files" || echo "$kind $path"
    done <"$host$state/files" >"$work/gone"
}

# check_writable: fails before anything is changed.
check_writable() {
    local dir
    {
        sed 's/^[a-z] //; s|/[^/]*$||' "$work/changed"
        echo "$state"
        echo "${config%/*}"
    } | sort -u | while read -r dir; do
        while [ ! -d "$host$dir" ]; do dir=${dir%/*}; done
        touch "$host$dir/.slipway-node" 2>/dev/null || { echo "${dir:-/}"; return; }
        rm -f "$host$dir/.slipway-node"
    done >"$work/unwritable"
    [ ! -s "$work/unwritable" ] || die "$(cat "$work/unwritable") on the node cannot be written: is it read-only?"
}

# copy KIND PATH TO
copy() {
    local from
    if [ "$1" != f ]; then cp -a "$tree$2" "$3"; return; fi
    from=$(source_of "$2")
    cp "$from" "$3" && chmod "$(stat -c %a "$from")" "$3"
}

# stage: makes the new files beside their places, and runs the most important one.
stage() {
    local kind path new program=''
    cat "$work/missing" >>"$host$made"
    while read -r path; do
        mkdir -m "$(stat -c %a "$tree$path" 2>/dev/null || echo 755)" "$host$path"
    done <"$work/missing"
    while read -r kind path; do
        new=$(aside "$path")
        note_aside "$new"
        rm -rf "$new"
        copy "$kind" "$path" "$new" 2>"$work/err" || die "$path on the node cannot be written: $(last_line "$work/err")"
        case $path in */bin/slipway) program=${new#"$host"} ;; esac
    done <"$work/changed"
    [ -z "$program" ] || on_host "$program" --version >"$work/out" 2>"$work/err" ||
        die "Slipway's programs do not run on this node: $(last_line "$work/err")"
    check_settings_of_daemon "${program:-$(installed_program)}"
}

# keep_others: files that the installation replaces and did not make.
keep_others() {
    local path kept
    while read -r _ path; do
        is_others "$path" || continue
        kept=$host$state/kept$path
        mkdir -p "${kept%/*}"
        cp -a "$host$path" "$kept.new"
        mv -f "$kept.new" "$kept"
    done <"$work/changed"
}

# keep_old PATH: the old file stays under another name until the new daemon runs.
keep_old() {
    local old
    old=$(before "$1")
    note_aside "$old"
    rm -f "$old"
    if [ -L "$host$1" ]; then
        cp -a "$host$1" "$old"
    elif [ -f "$host$1" ]; then
        ln "$host$1" "$old"
    fi
}

# rename_all: replaces each file in one step. The mv is the node's, by its path: busybox's follows a link to a
# directory, and is what a name alone would run.
rename_all() {
    local path new
    while read -r _ path; do
        keep_old "$path"
        new=$(aside "$path")
        on_host /bin/mv -fT "${new#"$host"}" "$path"
    done <"$work/changed"
}

# undo_rename: the version that ran before, with its settings.
undo_rename() {
    local path old
    gone_settings | cat "$work/changed" - >"$work/undone"
    while read -r _ path; do
        old=$(before "$path")
        if exists "$old"; then on_host /bin/mv -fT "${old#"$host"}" "$path"; else rm -rf "${host:?}$path"; fi
    done <"$work/undone"
}

remove_gone() {
    local kind path
    while read -r kind path; do
        case $kind in
            d) rmdir "$host$path" 2>/dev/null || true ;;
            *) rm -rf "${host:?}$path" ;;
        esac
    done <"$work/gone"
}

# gone_settings: those that an earlier run has made and this one does not.
gone_settings() { grep -xF -e "f $setting" -e "f $environment" "$work/gone" || true; }

# remove_settings: before services are started again, which read them.
remove_settings() {
    local path
    gone_settings >"$work/gone-settings"
    while read -r _ path; do
        keep_old "$path"
        rm -f "$host$path"
    done <"$work/gone-settings"
    if grep -qx "f $environment" "$work/changed" "$work/gone"; then echo containerd >>"$host$state/pending"; fi
}

apply_files() {
    [ -s "$work/changed" ] || [ -s "$work/gone" ] || return 0
    stage
    keep_others
    echo slipway >>"$host$state/pending"
    # A run that is killed after this knows the files of both versions for its own.
    cat "$work/files" "$host$state/files" 2>/dev/null | sort -u >"$work/both"
    [ ! -e "$host$state/files" ] || cp -p "$host$state/files" "$work/files-before"
    write_host "$state/files" "$work/both"
    rename_all
    remove_settings
    tell "new files, links and directories: $(wc -l <"$work/changed")"
}

remove_files() {
    local kind what path
    while read -r kind what path; do
        case $kind in
            f) [ "$({ sha256sum <"$host$path"; } 2>/dev/null | cut -d ' ' -f 1)" = "$what" ] || continue ;;
            l) [ "$(readlink "$host$path" 2>/dev/null)" = "$what" ] || continue ;;
            d) continue ;;
        esac
        rm -rf "${host:?}$path"
    done <"$host$state/files"
    # A file that was changed after it was installed stays.
    while read -r kind what path; do
        case $kind in f | l) if exists "$host$path"; then say "$path stays: it is not what was installed"; fi ;; esac
    done <"$host$state/files" | sort -u
}

put_back_others() {
    local path kept=$host$state/kept
    [ -d "$kept" ] || return 0
    find "$kept" ! -type d ! -name '*.new' | sed "s|^$kept||" | while read -r path; do
        exists "$host$path" || { cp -a "$kept$path" "$(aside "$path")" && mv -f "$(aside "$path")" "$host$path"; }
    done
}

remove_directories() {
    sed -n 's/^d - //p' "$work/files-before" | sort -r | while read -r path; do
        rmdir "$host$path" 2>/dev/null || true
    done
}
