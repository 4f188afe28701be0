//! The rights of a container's processes, from the command line: `--cap-add`, `--cap-drop`,
//! `--group-add`, `--security-opt`, `--sysctl`, with docker's meaning.

use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, bail};
use slipway_runtime::capabilities::{ALL, USUAL};
use slipway_runtime::{SandboxClient, security::Security, v1};

use crate::args::{CapabilityArg, ExecArgs, OptionArg, SecurityArgs, SysctlArg};
use crate::client::record;

/// The size of the largest profile of system calls, bytes.
const MOST_PROFILE: u64 = 1 << 20;

/// Returns what the process of a new container may do. Returns `None` if that is as usual.
pub fn of_run(
    args: &SecurityArgs,
    privileged: bool,
    sysctls: &[SysctlArg],
) -> Result<Option<v1::Security>> {
    let usual = if privileged { &ALL[..] } else { &USUAL };
    let security = v1::Security {
        sysctls: sysctls.iter().map(|one| (one.name.clone(), one.value.clone())).collect(),
        ..of_process(args, &owned(usual), false)?
    };
    Ok((security != v1::Security::default()).then_some(security))
}

/// Returns what a further process of a container may do, in which processes have the rights
/// `container`. Returns `None` if it is the same.
fn of_exec(
    args: &SecurityArgs,
    privileged: bool,
    container: &Security,
) -> Result<Option<v1::Security>> {
    let usual = if privileged { &ALL[..] } else { &USUAL };
    let own = container.capabilities.clone().unwrap_or_else(|| owned(usual));
    let security = of_process(args, &own, true)?;
    Ok((security != v1::Security::default()).then_some(security))
}

/// Returns the rights that `slipway exec` asks for. Returns `None` if they are its container's.
pub async fn asked_by_exec(
    client: &mut SandboxClient,
    args: &ExecArgs,
) -> Result<Option<v1::Security>> {
    let SecurityArgs { cap_add, cap_drop, security_opt, .. } = &args.process.security;
    if cap_add.is_empty() && cap_drop.is_empty() && security_opt.is_empty() {
        return of_exec(&args.process.security, false, &Security::default());
    }
    let record = record(client, &args.name).await?;
    let settings = record.settings_of(&args.name);
    let privileged = args.process.privileged || settings.privileged;
    let mut own = settings.process.security.clone();
    own.capabilities = own.capabilities.filter(|_| !args.process.privileged);
    of_exec(&args.process.security, privileged, &own)
}

fn owned(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

fn of_process(args: &SecurityArgs, own: &[String], joins: bool) -> Result<v1::Security> {
    let mut security = v1::Security { groups: args.group_add.clone(), ..Default::default() };
    let names = changed(own, &args.cap_add, &args.cap_drop);
    if !args.cap_add.is_empty() || !args.cap_drop.is_empty() {
        security.capabilities =
            Some(v1::Capabilities { names: names.clone(), ..Default::default() });
    }
    for option in &args.security_opt {
        match option {
            OptionArg::NoNewPrivileges(wanted) => security.no_new_privileges = *wanted,
            OptionArg::Profile(path) => security.seccomp = profile(path, &names)?,
            OptionArg::Unconfined if joins => {
                bail!("a further process cannot leave its container's filter of system calls")
            }
            OptionArg::Unconfined => security.seccomp.clear(),
        }
    }
    Ok(security)
}

/// Applies additions and removals to capabilities, as docker does.
fn changed(own: &[String], add: &[CapabilityArg], drop: &[CapabilityArg]) -> Vec<String> {
    let dropped = |name: &str| drop.iter().any(|one| is(one, name));
    let mut names: Vec<String> = if add.contains(&CapabilityArg::All) {
        owned(&ALL).into_iter().filter(|name| !dropped(name)).collect()
    } else if drop.contains(&CapabilityArg::All) {
        Vec::new()
    } else {
        own.iter().filter(|name| !dropped(name)).cloned().collect()
    };
    for one in add {
        if let CapabilityArg::One(name) = one
            && !names.iter().any(|known| known == name)
        {
            names.push((*name).to_owned());
        }
    }
    names
}

fn is(arg: &CapabilityArg, name: &str) -> bool {
    matches!(arg, CapabilityArg::One(one) if *one == name)
}

/// Compiles a profile of system calls for processes with these capabilities.
fn profile(path: &Path, capabilities: &[String]) -> Result<Vec<u8>> {
    let shown = || path.display().to_string();
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).with_context(shown)?;
    file.take(MOST_PROFILE + 1).read_to_end(&mut bytes).with_context(shown)?;
    if bytes.len() as u64 > MOST_PROFILE {
        bail!("{}: a seccomp profile has at most {} KiB", shown(), MOST_PROFILE >> 10);
    }
    let profile: slipway_seccomp::Profile =
        serde_json::from_slice(&bytes).with_context(|| format!("{}: no profile", shown()))?;
    profile.compile(capabilities).with_context(shown)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(add: &[&str], drop: &[&str], options: &[&str]) -> SecurityArgs {
        let capabilities = |names: &[&str]| names.iter().map(|one| one.parse().unwrap()).collect();
        SecurityArgs {
            cap_add: capabilities(add),
            cap_drop: capabilities(drop),
            group_add: vec![],
            security_opt: options.iter().map(|one| one.parse().unwrap()).collect(),
        }
    }

    fn capabilities(add: &[&str], drop: &[&str]) -> Vec<String> {
        let security = of_run(&args(add, drop, &[]), false, &[]).unwrap().unwrap();
        security.capabilities.unwrap().names
    }

    #[test]
    fn capabilities_are_added_and_dropped_as_in_docker() {
        assert_eq!(of_run(&args(&[], &[], &[]), false, &[]).unwrap(), None);
        assert_eq!(capabilities(&["net_admin"], &["ALL"]), ["CAP_NET_ADMIN"]);
        assert_eq!(capabilities(&[], &["all"]), [""; 0]);
        let more = capabilities(&["SYS_PTRACE", "CAP_CHOWN"], &["CAP_KILL"]);
        assert_eq!(more.len(), 14);
        assert!(more.contains(&"CAP_SYS_PTRACE".into()) && !more.contains(&"CAP_KILL".into()));
        let all = capabilities(&["ALL"], &["sys_admin"]);
        assert_eq!(all.len(), 40);
    }

    #[test]
    fn an_exec_begins_with_its_containers_capabilities() {
        let own = Security { capabilities: Some(vec!["CAP_KILL".into()]), ..Security::default() };
        let exec = of_exec(&args(&["CHOWN"], &[], &[]), false, &own).unwrap().unwrap();
        assert_eq!(exec.capabilities.unwrap().names, ["CAP_KILL", "CAP_CHOWN"]);
        assert_eq!(of_exec(&args(&[], &[], &[]), false, &own).unwrap(), None);
        let unconfined = args(&[], &[], &["seccomp=unconfined"]);
        assert!(of_exec(&unconfined, false, &own).is_err());
        assert_eq!(of_run(&unconfined, false, &[]).unwrap(), None);
    }

    #[test]
    fn a_profile_is_compiled_for_the_capabilities() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("profile.json");
        let text = r#"{"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [
            {"names": ["execve"], "action": "SCMP_ACT_ALLOW"},
            {"names": ["bpf"], "action": "SCMP_ACT_ALLOW", "includes": {"caps": ["CAP_BPF"]}}]}"#;
        std::fs::write(&path, text).unwrap();
        let option = format!("seccomp={}", path.display());
        let length = |add: &[&str]| {
            let security = of_run(&args(add, &[], &[&option]), false, &[]).unwrap().unwrap();
            security.seccomp.len()
        };
        assert!(length(&[]) % 8 == 0 && length(&[]) < length(&["BPF"]));
        for (text, said) in [("{", "no profile"), ("{}", "unknown action"), ("", "no profile")] {
            std::fs::write(&path, text).unwrap();
            let error = format!("{:#}", profile(&path, &[]).unwrap_err());
            assert!(error.contains("profile.json: ") && error.contains(said), "{error}");
        }
        assert!(
            format!("{:#}", profile(Path::new("/no/such"), &[]).unwrap_err()).contains("/no/such")
        );
    }
}
