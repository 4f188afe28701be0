//! The limits of a group, and the files that set them.
//!
//! A new limit of VMMs is a field of `Limits`, written by `set` under its names in both versions of
//! control groups. `sandbox/runtime` (`cgroup`) chooses it, for a sandbox and for the groups that
//! the pool makes ahead; `front/bench` measures the same limits (`cgroups/subjects.rs`). What a
//! group keeps of its last owner beside limits is reset in `reset`. A controller that no group uses
//! yet is one of `V1_CONTROLLERS`, and `hierarchy` enables it. Tests: below,
//! `tests/pool_as_root.rs`, `tests/e2e/65-cgroup-limits.sh`; `docs/operation.md`, "Control groups".
//! A limit of a container within its guest is none of these: `record/container.rs` of
//! `sandbox/runtime`.

use std::fs;
use std::path::Path;

use crate::{Error, Result};

/// The resource limits of a VMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Host memory of the VMM in bytes: guest memory and its own.
    pub memory_bytes: u64,
    /// CPU time, as a number of CPUs.
    pub cpus: u32,
    /// The number of threads.
    pub threads: u32,
}

const PERIOD_US: u64 = 100_000;

/// Writes `limits` to those of their files that `dir` has, with the names of v2 and of v1. A limit
/// that `before` has already is not written again.
pub(crate) fn set(dir: &Path, limits: Limits, before: Option<Limits>) -> Result<()> {
    let changed = |part: fn(&Limits) -> u64| before.is_none_or(|old| part(&old) != part(&limits));
    if changed(|one| one.memory_bytes) {
        set_memory(dir, limits.memory_bytes)?;
    }
    if changed(|one| one.cpus.into()) {
        set_cpus(dir, limits.cpus)?;
    }
    if changed(|one| one.threads.into()) {
        write(dir, "pids.max", &limits.threads.to_string())?;
    }
    Ok(())
}

/// Limits the CPU time, as a number of CPUs.
pub(crate) fn set_cpus(dir: &Path, cpus: u32) -> Result<()> {
    let quota = u64::from(cpus) * PERIOD_US;
    write(dir, "cpu.max", &format!("{quota} {PERIOD_US}"))?;
    write(dir, "cpu.cfs_period_us", &PERIOD_US.to_string())?;
    write(dir, "cpu.cfs_quota_us", &quota.to_string())
}

/// Limits the memory, in bytes.
pub(crate) fn set_memory(dir: &Path, bytes: u64) -> Result<()> {
    write(dir, "memory.max", &bytes.to_string())?;
    write(dir, "memory.limit_in_bytes", &bytes.to_string())
}

/// Writes to a file if it exists: each hierarchy has files of its own controllers only.
fn write(dir: &Path, file: &str, value: &str) -> Result<()> {
    let path = dir.join(file);
    // Opened without O_CREAT, which the kernel refuses with EPERM in a control group.
    let written = fs::OpenOptions::new().write(true).open(&path).and_then(|mut file| {
        use std::io::Write;
        file.write_all(value.as_bytes())
    });
    match written {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        written => written.map_err(Error::at("cannot set", &path)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { memory_bytes: 1 << 30, cpus: 2, threads: 64 };

    fn dir(files: &[&str]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for file in files {
            fs::write(dir.path().join(file), "").unwrap();
        }
        dir
    }

    #[test]
    fn a_limit_is_written_where_its_file_is() {
        let v2 = dir(&["cpu.max", "memory.max"]);
        set(v2.path(), LIMITS, None).unwrap();
        let read = |file| fs::read_to_string(v2.path().join(file)).unwrap();
        assert_eq!(
            (read("cpu.max"), read("memory.max")),
            ("200000 100000".into(), "1073741824".into())
        );
        assert_eq!(fs::read_dir(v2.path()).unwrap().count(), 2);
    }

    #[test]
    fn what_is_in_force_is_not_written_again() {
        let pids = dir(&["pids.max", "memory.limit_in_bytes"]);
        set(pids.path(), LIMITS, Some(Limits { memory_bytes: 1, ..LIMITS })).unwrap();
        let read = |file| fs::read_to_string(pids.path().join(file)).unwrap();
        assert_eq!(
            (read("pids.max"), read("memory.limit_in_bytes")),
            (String::new(), "1073741824".into())
        );
    }
}
