//! The container's process, from an image's configuration and the user's request.
//!
//! A new property of a process has a field in `RunSpec`, and in `ExecSpec` if further processes
//! choose it (`sandbox.proto`), in the record's `Process` with `#[serde(default)]`, in `process`
//! and `agent_spec`, in `exec_request` (`service/exec.rs`), and in `ProcessSpec` of `agent.proto`.
//! A right of a process is in `Security` of all three in place of that (`security`, where `of_exec`
//! says what a further process has). The agent applies it in `prepare_and_execute` (`init/mod.rs`),
//! in an order that matters: before the rights go, or after. It comes from `front/cli`
//! (`ProcessArgs` of `args/run.rs`, or `args/security.rs`; `spec.rs` for a container, `exec` of
//! `run.rs` for a further process; `fixed` in `snapshot.rs`, and `first_refused` of
//! `snapshot/asked.rs` here, since forks of snapshots have it already), and from containerd by the
//! shim (`spec/oci.rs`; `process_spec` and `exec_spec` of `spec/mod.rs`). Tests: `security` or
//! others of `sandbox/agent`, the shim's `spec`, `12-security.sh`. `docs/sandboxes.md` and
//! `docs/containerd.md` have it.

use slipway_agent_protocol::{limits, v1 as agent_v1};
use slipway_image::ImageConfig;

use crate::record::Process;
use crate::security::Security;
use crate::v1::{Limit, RunSpec};
use crate::{Error, Result};

/// Applies `spec` to the image's configuration. The user's command replaces the image's, and the
/// user's entrypoint replaces both. The environments are merged, and the user's entries win.
///
/// # Errors
/// [`Error::Invalid`] if neither the image nor the user names a program, or an entry of the
/// environment, or of what the process may do, is invalid, or its OOM score adjustment, its working
/// directory or a limit's name.
pub fn process(image: &ImageConfig, spec: &RunSpec) -> Result<Process> {
    let (entrypoint, command) = match &spec.entrypoint {
        Some(entrypoint) => (vec![entrypoint.clone()], spec.command.clone()),
        None if spec.command.is_empty() => (image.entrypoint.clone(), image.cmd.clone()),
        None => (image.entrypoint.clone(), spec.command.clone()),
    };
    let args: Vec<String> =
        entrypoint.into_iter().filter(|part| !part.is_empty()).chain(command).collect();
    if args.is_empty() {
        return Err(Error::Invalid(
            "the image names no command to run; give one after `--`".to_owned(),
        ));
    }
    Ok(Process {
        args,
        env: environment(&image.env, &spec.env)?,
        cwd: working_directory(or(&spec.cwd, &image.working_dir))?,
        user: or(&spec.user, &image.user),
        terminal: spec.terminal,
        rows: spec.rows,
        columns: spec.columns,
        stdin: spec.stdin,
        limits: spec.limits.iter().map(limit).collect::<Result<_>>()?,
        oom_score_adj: spec.oom_score_adj.map(oom_score_adj).transpose()?,
        security: Security::new(spec.security.as_ref())?,
    })
}

/// Checks a working directory, which is empty if none is named.
fn working_directory(path: String) -> Result<String> {
    if path.is_empty() || path.starts_with('/') {
        return Ok(path);
    }
    Err(Error::Invalid(format!("the working directory {path:?} is not an absolute path")))
}

/// Returns a limit in the record's form: its name, and the soft and the hard value.
fn limit(limit: &Limit) -> Result<(String, u64, u64)> {
    match limits::resource(&limit.name) {
        Some(_) => Ok((limit.name.clone(), limit.soft, limit.hard)),
        None => Err(Error::Invalid(format!("unknown limit {:?}", limit.name))),
    }
}

fn oom_score_adj(adjustment: i32) -> Result<i32> {
    match adjustment {
        -1000..=1000 => Ok(adjustment),
        _ => Err(Error::Invalid(format!("an OOM score adjustment of {adjustment}: -1000 to 1000"))),
    }
}

/// Returns `first`, or `second` if `first` is empty.
pub(crate) fn or(first: &str, second: &str) -> String {
    if first.is_empty() { second.to_owned() } else { first.to_owned() }
}

fn environment(image: &[String], user: &[String]) -> Result<Vec<String>> {
    let mut merged: Vec<String> = image.to_vec();
    for entry in user {
        let (name, _) =
            entry.split_once('=').filter(|(name, _)| !name.is_empty()).ok_or_else(|| {
                Error::Invalid(format!("\"{entry}\" is no environment entry: NAME=value"))
            })?;
        merged.retain(|old| old.split_once('=').is_none_or(|(old_name, _)| old_name != name));
        merged.push(entry.clone());
    }
    Ok(merged)
}

/// Returns the number of a signal that is given by name ("SIGTERM", "TERM") or number. Returns
/// `None` if there is no such signal.
pub fn signal_number(name: &str) -> Option<u32> {
    const NAMES: [(&str, i32); 31] = [
        ("HUP", libc::SIGHUP),
        ("INT", libc::SIGINT),
        ("QUIT", libc::SIGQUIT),
        ("ILL", libc::SIGILL),
        ("TRAP", libc::SIGTRAP),
        ("ABRT", libc::SIGABRT),
        ("BUS", libc::SIGBUS),
        ("FPE", libc::SIGFPE),
        ("KILL", libc::SIGKILL),
        ("USR1", libc::SIGUSR1),
        ("SEGV", libc::SIGSEGV),
        ("USR2", libc::SIGUSR2),
        ("PIPE", libc::SIGPIPE),
        ("ALRM", libc::SIGALRM),
        ("TERM", libc::SIGTERM),
        ("STKFLT", libc::SIGSTKFLT),
        ("CHLD", libc::SIGCHLD),
        ("CONT", libc::SIGCONT),
        ("STOP", libc::SIGSTOP),
        ("TSTP", libc::SIGTSTP),
        ("TTIN", libc::SIGTTIN),
        ("TTOU", libc::SIGTTOU),
        ("URG", libc::SIGURG),
        ("XCPU", libc::SIGXCPU),
        ("XFSZ", libc::SIGXFSZ),
        ("VTALRM", libc::SIGVTALRM),
        ("PROF", libc::SIGPROF),
        ("WINCH", libc::SIGWINCH),
        ("IO", libc::SIGIO),
        ("PWR", libc::SIGPWR),
        ("SYS", libc::SIGSYS),
    ];
    if let Ok(number) = name.parse::<u32>() {
        return (1..=64).contains(&number).then_some(number);
    }
    let upper = name.to_ascii_uppercase();
    let bare = upper.strip_prefix("SIG").unwrap_or(&upper);
    NAMES.iter().find(|(known, _)| *known == bare).map(|(_, number)| *number as u32)
}

/// Converts a process of the record to the agent's form.
pub fn agent_spec(process: &Process) -> agent_v1::ProcessSpec {
    let limits = process.limits.iter().map(|(name, soft, hard)| agent_v1::ResourceLimit {
        name: name.clone(),
        soft: *soft,
        hard: *hard,
    });
    agent_v1::ProcessSpec {
        args: process.args.clone(),
        env: process.env.clone(),
        cwd: process.cwd.clone(),
        user: process.user.clone(),
        terminal: process.terminal,
        rows: process.rows,
        columns: process.columns,
        stdin: process.stdin,
        limits: limits.collect(),
        oom_score_adj: process.oom_score_adj.unwrap_or(0),
        security: Some(process.security.of_process()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image() -> ImageConfig {
        ImageConfig {
            entrypoint: vec!["/entry".into()],
            cmd: vec!["default".into()],
            env: vec!["PATH=/bin".into(), "A=1".into()],
            working_dir: "/srv".into(),
            ..ImageConfig::default()
        }
    }

    #[test]
    fn a_command_replaces_the_images_and_keeps_its_entrypoint() {
        let spec = RunSpec { command: vec!["x".into()], ..RunSpec::default() };
        assert_eq!(process(&image(), &spec).unwrap().args, ["/entry", "x"]);
        assert_eq!(process(&image(), &RunSpec::default()).unwrap().args, ["/entry", "default"]);
    }

    #[test]
    fn an_entrypoint_replaces_both() {
        let spec = RunSpec { entrypoint: Some("/sh".into()), ..RunSpec::default() };
        assert_eq!(process(&image(), &spec).unwrap().args, ["/sh"]);
        let none = RunSpec { entrypoint: Some(String::new()), ..RunSpec::default() };
        assert!(process(&image(), &none).is_err());
    }

    #[test]
    fn the_users_environment_wins() {
        let spec = RunSpec { env: vec!["A=2".into(), "B=".into()], ..RunSpec::default() };
        assert_eq!(process(&image(), &spec).unwrap().env, ["PATH=/bin", "A=2", "B="]);
        let bad = RunSpec { env: vec!["=x".into()], ..RunSpec::default() };
        assert!(process(&image(), &bad).is_err());
    }

    #[test]
    fn a_working_directory_is_absolute() {
        let at = |cwd: &str| process(&image(), &RunSpec { cwd: cwd.into(), ..RunSpec::default() });
        assert_eq!(at("").unwrap().cwd, "/srv");
        assert_eq!(at("/a/b").unwrap().cwd, "/a/b");
        for relative in ["rel", "./rel", "../rel"] {
            assert!(matches!(at(relative), Err(Error::Invalid(_))), "{relative}");
        }
        let unnamed = ImageConfig { working_dir: String::new(), ..image() };
        assert_eq!(process(&unnamed, &RunSpec::default()).unwrap().cwd, "");
    }

    #[test]
    fn a_limit_has_a_name_that_the_guest_knows() {
        let with = |name: &str| {
            let limits = vec![Limit { name: name.into(), soft: 1, hard: 2 }];
            process(&image(), &RunSpec { limits, ..RunSpec::default() })
        };
        assert_eq!(with("nofile").unwrap().limits, [("nofile".to_owned(), 1, 2)]);
        assert!(matches!(with("foo"), Err(Error::Invalid(_))));
    }

    #[test]
    fn signals_by_name_and_number() {
        assert_eq!(signal_number("SIGTERM"), Some(15));
        assert_eq!(signal_number("term"), Some(15));
        assert_eq!(signal_number("9"), Some(9));
        assert_eq!(signal_number("0"), None);
        assert_eq!(signal_number("SIGNOPE"), None);
    }
}
