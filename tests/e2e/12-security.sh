#!/usr/bin/env bash
# What a container's processes may do: capabilities, groups, kernel settings, system calls.
. "$(dirname "$0")/lib.sh"
need_node

# Prints groups, the bounding set, and whether new privileges and system calls are kept from the process.
look='id -G; grep -E "^(CapEff|CapBnd|NoNewPrivs|Seccomp):" /proc/self/status | tr -d "\t"'
cat >"$work/profile.json" <<'END'
{"defaultAction": "SCMP_ACT_ALLOW", "archMap": [{"architecture": "SCMP_ARCH_X86_64", "subArchitectures": ["SCMP_ARCH_X86"]}],
 "syscalls": [
  {"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 15, "args": null},
  {"names": ["rmdir"], "action": "SCMP_ACT_ERRNO", "includes": {"caps": ["CAP_SYS_ADMIN"]}}]}
END

out=$("$slipway" run --rm --cap-drop ALL --cap-add net_raw --cap-add CAP_CHOWN --group-add 77 --group-add 5 \
    --security-opt no-new-privileges --security-opt "seccomp=$work/profile.json" \
    --sysctl net.core.somaxconn=77 --sysctl kernel.shmmni=99 "$image" -- sh -c "$look
    cat /proc/sys/net/core/somaxconn /proc/sys/kernel/shmmni; mkdir /tmp/x 2>&1; rmdir /no 2>&1") || true
[ "$out" = "0 5 77
CapEff:0000000000002001
CapBnd:0000000000002001
NoNewPrivs:1
Seccomp:2
77
99
mkdir: cannot create directory '/tmp/x': Block device required
rmdir: failed to remove '/no': No such file or directory" ] || fail "a restricted container: $out"
ok "capabilities, groups, no new privileges, kernel settings and a profile of system calls are as asked for"

# These are in one pod.
"$slipway" pod create pod --network none >/dev/null || fail "pod create"
out=$("$slipway" run --pod pod --rm --user 1000:1000 --security-opt "seccomp=$work/profile.json" "$image" -- \
    sh -c "$look; mkdir /tmp/x 2>&1") || true
[ "$out" = "1000
CapEff:0000000000000000
CapBnd:00000000a80425fb
NoNewPrivs:0
Seccomp:2
mkdir: cannot create directory '/tmp/x': Block device required" ] || fail "a user under a profile: $out"
ok "a profile counts for a user who is not root, who has no capabilities"

"$slipway" run --pod pod -d --name kept --cap-drop ALL --cap-add KILL --security-opt "seccomp=$work/profile.json" "$image" -- sleep 1000 >/dev/null ||
    fail "a container for exec did not start"
out=$("$slipway" exec pod/kept -- sh -c "$look"
"$slipway" exec --cap-add chown --group-add 9 --security-opt no-new-privileges pod/kept -- sh -c "$look")
[ "$out" = "0
CapEff:0000000000000020
CapBnd:0000000000000020
NoNewPrivs:0
Seccomp:2
0 9
CapEff:0000000000000021
CapBnd:0000000000000021
NoNewPrivs:1
Seccomp:2" ] || fail "exec: $out"
"$slipway" rm --force pod >/dev/null || fail "rm"
ok "a further process has its container's rights, or its own"

# refuses WORDS ARGUMENTS…: `slipway run` fails and says so.
refuses() {
    local want=$1; shift
    "$slipway" run --rm "$@" "$image" -- true >"$work/out" 2>&1 && fail "$* ran"
    grep -qF -- "$want" "$work/out" || fail "$*: $(cat "$work/out")"
    ok "$* -> $(tail -n 1 "$work/out")"
}
refuses 'not one of a network, IPC or UTS namespace' --sysctl vm.swappiness=1
refuses 'is no capability' --cap-add NET_EVERYTHING
refuses 'is not supported' --security-opt apparmor=strict
echo '{"defaultAction": "SCMP_ACT_ERRNO"}' >"$work/profile.json"
refuses 'no program can start under it' --security-opt "seccomp=$work/profile.json"
[ -z "$("$slipway" ps --quiet)" ] || fail "sandboxes are left: $("$slipway" ps)"
