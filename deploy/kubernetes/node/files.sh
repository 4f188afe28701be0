# shellcheck shell=dash
# The files that an installation makes on the node: plans which of them change, replaces them, and removes them.
# Sourced by slipway-node, never run.
#
# The functions hand lists to each other in files of $work, with a path of the node at the end of each line:
#   items        KIND PATH of each thing to install: f a file, l a link, u a unit (a directory, replaced as a whole)
#   changed      the items that the node lacks or has otherwise
#   missing      directories that have to be made
#   directories  these, and those that runs before made and that the state does not list
#   files        the lines of the new state: KIND, digest or target, PATH
#   gone         KIND PATH of things in the state that this version does not have
#   asides       files beside their places, which clean_up removes

# source_of PATH: prints the path of the file that is installed at PATH.
source_of() { if [ -e "$work/tree$1" ]; then echo "$work/tree$1"; else echo "$tree$1"; fi; }
exists() { [ -e "$1" ] || [ -L "$1" ]; }
# is_ours PATH: succeeds if an earlier installation has made PATH.
is_ours() { grep -qs " $1\$" "$host$state/files"; }
# is_others PATH: succeeds if PATH exists on the node and no installation has made it.
is_others() { exists "$host$1" && ! is_ours "$1"; }

# names_keeper: succeeds if the administrator sets `keeper`, in a file of settings or in the option SLIPWAY_SETTINGS.
names_keeper() {
    local file
    for file in "$host/etc/slipway/config.toml" "$host${setting%/*}"/*.toml; do
        [ "$file" = "$host$setting" ] || ! grep -qsE "$keeper_line" "$file" || return 0
    done
    printf '%s\n' "$more_settings" | grep -qE "$keeper_line"
}
keeper_line='^[[:space:]]*keeper[[:space:]]*='

# make_setting: makes the file of settings, if it has any. It sets `keeper`, so that pods outlive the daemon, unless the
# administrator sets that.
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

# own_parts: prints patterns of items that are not installed: a guest kernel and tools that the administrator has set up
# are used, not replaced.
own_parts() {
    local path
    # An item that does not exist: with an empty list of patterns, busybox's grep takes all lines as matching.
    echo '^none$'
    if is_others /var/lib/slipway/kernel; then
        echo '^[lu] /var/lib/slipway/(kernel|node/kernel-.*)$'
    fi
    for path in "$tree"/var/lib/slipway/tools/bin/*; do
        path=${path#"$tree"}
        if is_others "$path"; then printf '^f %s$\n^u %s/tools-\n' "$path" "$state"; fi
    done
}

# list_items: writes the list `items`.
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

# differs KIND PATH: succeeds if PATH on the node is missing or differs from that of the image. The name of a unit has a
# digest of its content, so a unit that exists does not differ.
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

# missing_directories: prints the directories that have to be made for the items, parents first.
missing_directories() {
    local path
    { cut -d ' ' -f 2 "$work/items"; echo "$state/files"; echo "$config"; } | while read -r path; do
        while path=${path%/*} && [ -n "$path" ] && [ ! -d "$host$path" ]; do echo "$path"; done
    done | sort -u
}

# find_left: adds to `asides` and `directories` the files beside their places, and the directories that are not in the
# state, which a run that was killed has left.
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

# describe: prints the lines of the new state for the items. An item of the node that does not change keeps its line.
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

# plan_files: writes all lists. It changes nothing on the node.
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

# check_writable: fails if a directory of the files to change cannot be written.
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

# copy KIND PATH TO: copies the item from the image to TO. A file keeps its mode, a link or a unit all its attributes.
copy() {
    local from
    if [ "$1" != f ]; then cp -a "$tree$2" "$3"; return; fi
    from=$(source_of "$2")
    cp "$from" "$3" && chmod "$(stat -c %a "$from")" "$3"
}

# stage: makes the new files beside their places. Fails if the new `slipway` does not run on this node, or does not take
# the node's settings.
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

# keep_others: copies files that the installation is about to replace and did not make, for a later removal.
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

# keep_old PATH: gives the old file or link at PATH a second name, which stays until the new daemon runs.
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

# rename_all: replaces each file in one step. It runs the node's mv by its path, since `mv` alone would run busybox's,
# which follows a link to a directory.
rename_all() {
    local path new
    while read -r _ path; do
        keep_old "$path"
        new=$(aside "$path")
        on_host /bin/mv -fT "${new#"$host"}" "$path"
    done <"$work/changed"
}

# undo_rename: puts back the version that ran before, with its settings.
undo_rename() {
    local path old
    gone_settings | cat "$work/changed" - >"$work/undone"
    while read -r _ path; do
        old=$(before "$path")
        if exists "$old"; then on_host /bin/mv -fT "${old#"$host"}" "$path"; else rm -rf "${host:?}$path"; fi
    done <"$work/undone"
}

# remove_gone: removes the things of an earlier version that this version does not have.
remove_gone() {
    local kind path
    while read -r kind path; do
        case $kind in
            d) rmdir "$host$path" 2>/dev/null || true ;;
            *) rm -rf "${host:?}$path" ;;
        esac
    done <"$work/gone"
}

# gone_settings: prints the lines of `gone` for files of settings, which this run does not make.
gone_settings() { grep -xF -e "f $setting" -e "f $environment" "$work/gone" || true; }

# remove_settings: removes files of settings that this run does not make. Services that read them start after that.
remove_settings() {
    local path
    gone_settings >"$work/gone-settings"
    while read -r _ path; do
        keep_old "$path"
        rm -f "$host$path"
    done <"$work/gone-settings"
    if grep -qx "f $environment" "$work/changed" "$work/gone"; then echo containerd >>"$host$state/pending"; fi
}

# apply_files: replaces the files that differ, if there are any.
apply_files() {
    [ -s "$work/changed" ] || [ -s "$work/gone" ] || return 0
    stage
    keep_others
    echo slipway >>"$host$state/pending"
    # The state lists the files of both versions meanwhile: if this run is killed, the next one knows all of them.
    cat "$work/files" "$host$state/files" 2>/dev/null | sort -u >"$work/both"
    [ ! -e "$host$state/files" ] || cp -p "$host$state/files" "$work/files-before"
    write_host "$state/files" "$work/both"
    rename_all
    remove_settings
    tell "new files, links and directories: $(wc -l <"$work/changed")"
}

# remove_files: removes the files of the installation. A file or a link that was changed after it was installed stays.
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
    while read -r kind what path; do
        case $kind in f | l) if exists "$host$path"; then say "$path stays: it is not what was installed"; fi ;; esac
    done <"$host$state/files" | sort -u
}

# put_back_others: puts back the files that the installation has replaced and did not make.
put_back_others() {
    local path kept=$host$state/kept
    [ -d "$kept" ] || return 0
    find "$kept" ! -type d ! -name '*.new' | sed "s|^$kept||" | while read -r path; do
        exists "$host$path" || { cp -a "$kept$path" "$(aside "$path")" && mv -f "$(aside "$path")" "$host$path"; }
    done
}

# remove_directories: removes the directories that installations have made, if they are empty.
remove_directories() {
    local path
    sed -n 's/^d - //p' "$work/files-before" | sort -r | while read -r path; do
        rmdir "$host$path" 2>/dev/null || true
    done
}
