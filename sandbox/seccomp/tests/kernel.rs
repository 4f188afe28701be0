//! Programs loaded into this machine's kernel, in children of the test.

#![allow(missing_docs)]
#![allow(clippy::unwrap_used)] // a failed unwrap is the failure report
#![allow(unsafe_code)] // pre_exec

use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, Output};

use serde_json::{Value, json};
use slipway_seccomp::Profile;

/// Runs a shell under the profile.
fn shell(profile: Value, text: &str) -> Output {
    let profile: Profile = serde_json::from_value(profile).unwrap();
    let bytes = profile.compile(&[]).unwrap();
    let mut program: Vec<_> = bytes
        .chunks_exact(8)
        .map(|one| libc::sock_filter {
            code: u16::from_le_bytes([one[0], one[1]]),
            jt: one[2],
            jf: one[3],
            k: u32::from_le_bytes([one[4], one[5], one[6], one[7]]),
        })
        .collect();
    let mut command = Command::new("/bin/sh");
    command.args(["-c", text]);
    let load = move || {
        let fprog = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
        // SAFETY: two system calls; the kernel reads the program, which is whole.
        let loaded = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
                && libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &fprog) == 0
        };
        if loaded { Ok(()) } else { Err(io::Error::last_os_error()) }
    };
    // SAFETY: the closure makes system calls only and does not allocate.
    unsafe { command.pre_exec(load) };
    command.output().unwrap()
}

fn deny(rule: Value) -> Value {
    json!({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [rule]})
}

#[test]
fn a_call_fails_with_the_profiles_error() {
    let rule = json!({"names": ["chdir"], "action": "SCMP_ACT_ERRNO", "errnoRet": libc::ENOTBLK});
    let output = shell(deny(rule), "cd /tmp; echo on");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "on\n");
    assert!(!output.stderr.is_empty(), "cd did not fail");
    assert!(shell(json!({"defaultAction": "SCMP_ACT_ALLOW"}), "cd /tmp").stderr.is_empty());
}

#[test]
fn arguments_decide() {
    // umask(2) of 0o077 kills; any other does not.
    let arg = json!({"index": 0, "value": 0o077, "op": "SCMP_CMP_EQ"});
    let rule = json!({"names": ["umask"], "action": "SCMP_ACT_KILL_PROCESS", "args": [arg]});
    assert_eq!(shell(deny(rule.clone()), "umask 022; echo on").stdout, b"on\n");
    let output = shell(deny(rule), "umask 077; echo on");
    assert_eq!((output.stdout.as_slice(), output.status.signal()), (&b""[..], Some(libc::SIGSYS)));
}

#[test]
fn a_large_profile_is_loaded() {
    let names: Vec<_> = syscalls::x86_64::Sysno::iter()
        .map(|one| one.name())
        .filter(|name| !["chdir", "fchdir"].contains(name))
        .collect();
    let arg = |value: u64| json!({"index": 1, "value": value, "op": "SCMP_CMP_EQ"});
    let conditional: Vec<_> = (0..60).map(arg).collect();
    let profile = json!({"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [
        {"names": names, "action": "SCMP_ACT_ALLOW"},
        {"names": ["chdir", "fchdir"], "action": "SCMP_ACT_KILL", "args": conditional},
    ]});
    let output = shell(profile, "echo on");
    assert_eq!(output.stdout, b"on\n", "{output:?}");
}
