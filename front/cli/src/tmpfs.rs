//! Parses `--tmpfs`: `PATH[:OPTION,…]`.
//!
//! A tmpfs is one of the directories of a container's own (`FileDir`): it has the files of `--copy`
//! below its path.

use std::str::FromStr;

use anyhow::{Result, bail};
use slipway_runtime::v1;

use crate::size::parse_size;

/// The mode of a tmpfs for which none is given: each user may make files in it.
const MODE: u32 = 0o1777;
/// The bits of a directory's mode.
const MOST_MODE: u32 = 0o7777;

/// The value of one `--tmpfs`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TmpfsArg {
    path: String,
    /// 0: half of the guest's memory.
    size_bytes: u64,
    mode: u32,
    uid: u32,
    gid: u32,
    no_exec: bool,
}

/// Returns the directories of a container for all `--tmpfs` of a run.
pub fn dirs(args: &[TmpfsArg]) -> Vec<v1::FileDir> {
    let dir = |arg: &TmpfsArg| v1::FileDir {
        path: arg.path.clone(),
        mode: arg.mode,
        uid: arg.uid,
        gid: arg.gid,
        size_bytes: Some(arg.size_bytes),
        no_exec: arg.no_exec,
        ..Default::default()
    };
    args.iter().map(dir).collect()
}

/// Fails if the daemon is of an earlier version, which ignores bounds.
pub fn check(status: &v1::StatusReply) -> Result<()> {
    if !status.bounds_file_dirs {
        bail!("the daemon is of an earlier version, which has no --tmpfs: restart it");
    }
    Ok(())
}

impl FromStr for TmpfsArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (path, options) = text.split_once(':').unwrap_or((text, ""));
        let path = path.trim_end_matches('/');
        if !path.starts_with('/') {
            return Err(format!("\"{text}\": expected /PATH[:size=64M,mode=1777]"));
        }
        let (path, mode) = (path.to_owned(), MODE);
        let mut arg = Self { path, size_bytes: 0, mode, uid: 0, gid: 0, no_exec: true };
        options.split(',').filter(|option| !option.is_empty()).try_for_each(|one| arg.set(one))?;
        Ok(arg)
    }
}

impl TmpfsArg {
    fn set(&mut self, option: &str) -> Result<(), String> {
        match option.split_once('=') {
            Some(("size", value)) => self.size_bytes = parse_size(value)?,
            Some(("mode", value)) => self.mode = parse_mode(value)?,
            Some(("uid", value)) => self.uid = parse_id(value)?,
            Some(("gid", value)) => self.gid = parse_id(value)?,
            None if option == "exec" => self.no_exec = false,
            None if option == "noexec" => self.no_exec = true,
            // It is so in any case.
            None if ["rw", "nosuid", "nodev"].contains(&option) => {}
            _ => {
                return Err(format!(
                    "\"{option}\" is no option of a tmpfs: size=, mode=, uid=, gid=, exec, noexec"
                ));
            }
        }
        Ok(())
    }
}

fn parse_mode(text: &str) -> Result<u32, String> {
    let is_octal = !text.is_empty() && text.bytes().all(|byte| (b'0'..=b'7').contains(&byte));
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| is_octal && *mode <= MOST_MODE);
    mode.ok_or_else(|| format!("\"{text}\" is no mode of a directory, as 1777 or 700"))
}

fn parse_id(text: &str) -> Result<u32, String> {
    let id = text.parse().ok().filter(|id| *id < u32::MAX);
    id.ok_or_else(|| format!("\"{text}\" is no number of a user or a group"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tmpfs_has_a_path_and_options_as_docker_writes_them() {
        let plain = || TmpfsArg {
            path: "/run".to_owned(),
            size_bytes: 0,
            mode: 0o1777,
            uid: 0,
            gid: 0,
            no_exec: true,
        };
        for (text, expected) in [
            ("/run", plain()),
            ("/run/", plain()),
            ("/run:", plain()),
            ("/run:rw,noexec,nosuid,nodev", plain()),
            ("/run:size=64m", TmpfsArg { size_bytes: 64 << 20, ..plain() }),
            ("/run:size=65536k,mode=700", {
                TmpfsArg { size_bytes: 64 << 20, mode: 0o700, ..plain() }
            }),
            ("/run:exec,uid=5,gid=6", TmpfsArg { uid: 5, gid: 6, no_exec: false, ..plain() }),
        ] {
            assert_eq!(text.parse(), Ok(expected), "{text}");
        }
        for text in [
            "",
            "/",
            "run",
            ":size=1m",
            "/run:size",
            "/run:size=",
            "/run:size=10%",
            "/run:size=-1",
            "/run:mode=8",
            "/run:mode=+7",
            "/run:mode=",
            "/run:mode=17777",
            "/run:uid=x",
            "/run:uid=4294967295",
            "/run:exec=1",
            "/run:ro",
            "/run:size=1m:mode=1",
        ] {
            let error = text.parse::<TmpfsArg>().unwrap_err();
            assert!(!error.contains('\n') && !error.is_empty(), "{text}: {error}");
        }
    }

    #[test]
    fn a_run_has_its_tmpfs_among_its_directories() {
        let args = ["/a:size=1m".parse().unwrap(), "/b".parse().unwrap()];
        let dirs = dirs(&args);
        assert_eq!((dirs[0].size_bytes, dirs[1].size_bytes), (Some(1 << 20), Some(0)));
        assert!(dirs.iter().all(|dir| dir.no_exec && dir.mode == 0o1777 && !dir.read_only));
    }
}
