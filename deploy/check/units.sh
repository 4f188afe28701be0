#!/bin/bash
# The units of systemd have only directives and values that systemd-analyze(1) knows. It reports a wrong one and ends with
# status 0, so that any word of it is a failure. And each unit gives up what its program does not need: systemd-analyze's
# exposure of it, in tenths, is within a bound. Bounds have some room, since versions of systemd weigh differently.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
command -v systemd-analyze >/dev/null || { echo 'SKIPPED: check/units: needs systemd-analyze (package systemd)'; exit 0; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for unit in *.service; do
    # The programs need not be installed here.
    sed -E 's#^(Exec[A-Za-z]*=)/usr/bin/[a-z-]+#\1/bin/true#' "$unit" >"$work/$unit"
done
if ! systemd-analyze verify --man=no "$work"/*.service >"$work/said" 2>&1 || [ -s "$work/said" ]; then
    sed "s#$work/#deploy/#" "$work/said" >&2
    exit 1
fi

# From version 250 on, a unit can be judged without the service manager.
systemd-analyze --help | grep -q -e --threshold || { echo 'SKIPPED: check/units: exposure needs systemd 250'; exit 0; }
# bound UNIT: of docs/operation.md ("The unit") for the daemon, which gives up less than the others can.
bound() {
    case $1 in
        slipway.service) echo 74 ;;
        *) echo 55 ;;
    esac
}
for unit in *.service; do
    if ! systemd-analyze security --no-pager --offline=yes --threshold="$(bound "$unit")" "$work/$unit" >"$work/said" 2>&1; then
        echo "deploy/$unit: more exposed than $(bound "$unit") tenths:" >&2
        cat "$work/said" >&2
        exit 1
    fi
done
