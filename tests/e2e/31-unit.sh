#!/usr/bin/env bash
# A daemon with no more rights than its unit leaves it (deploy/slipway.service): a sandbox with a network, a port below 1024,
# a directory of the host and a volume comes up and goes.
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
need_node
command -v setpriv >/dev/null || skip setpriv
stop_daemon
end_all() { end_node; }

# The names of the capabilities that the unit gives up, as setpriv(1) has them: "-audit_control,-audit_read,…".
given_up=$(sed -e ':join' -e '/\\$/{N;s/\\\n//;b join' -e '}' "$top/deploy/slipway.service" |
    sed -n 's/^CapabilityBoundingSet=~//p' | tr -s ' ' '\n' | sed 's/^CAP_/-/' | tr 'A-Z\n' 'a-z,' | sed 's/,$//')
case $given_up in
    *,-sys_module,*,-syslog,*) ;;
    *) fail "the unit's capabilities: $given_up" ;;
esac
cat >"$work/confined" <<END
#!/bin/sh
exec setpriv --no-new-privs --bounding-set=$given_up "$slipway" "\$@"
END
chmod +x "$work/confined"
start_daemon "$work/confined"
grep -q '^NoNewPrivs:[[:space:]]*1$' "/proc/$daemon/status" || fail "the daemon may have new privileges"
# CAP_SYS_MODULE is bit 16, and CAP_SYS_ADMIN bit 21 (capability.h).
bound=$((16#$(awk '$1 == "CapBnd:" { print $2 }' "/proc/$daemon/status")))
[ $((bound >> 16 & 1)):$((bound >> 21 & 1)) = 0:1 ] || fail "the daemon's bounding set: $bound"
ok "a daemon without $(tr -cd , <<<"$given_up" | wc -c) capabilities and more"

mkdir "$work/dir"; chmod 711 "$work"; echo host >"$work/dir/hello"
timeout 300 "$slipway" run -d --name one --wait-network --publish 83:80 --volume data:16M:/data -v "$work/dir:/srv/dir" "$image" -- \
    sleep 100000 >/dev/null || fail "run: $(explain)"
in_one() { timeout 60 "$slipway" exec one -- bash -c "$1"; }
in_one 'set -e; cd /srv/dir; [ "$(cat hello)" = host ]; echo guest >made; chown 1234:1235 made; chmod 4755 made; echo x >/data/x; sync' ||
    fail "in the sandbox: $(explain)"
[ "$(stat -c '%u:%g %a' "$work/dir/made")" = '1234:1235 4755' ] || fail "a file of the container's: $(stat "$work/dir/made")"
grep -q 'dport 83 dnat' <<<"$(nft list ruleset)" || fail "its port is not published: $(nft list ruleset)"
vmm=$(vmm_of one)
[ $((16#$(awk '$1 == "CapBnd:" { print $2 }' "/proc/$vmm/status") >> 16 & 1)) = 0 ] || fail "the VMM has more than its daemon"
ok "a sandbox with network, port, volume and a directory of the host, its owners and set-user-ID bits included"

timeout 60 "$slipway" rm --force one >/dev/null || fail "rm: $(explain)"
[ -z "$(vmms)" ] || fail "left: $(vmms)"
ok "and nothing of it is left"
