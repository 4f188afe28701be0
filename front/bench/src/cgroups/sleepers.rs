//! Processes that are moved into control groups.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};

/// Processes that sleep until they are dropped.
#[derive(Debug, Default)]
pub struct Sleepers(Vec<Child>);

impl Sleepers {
    /// Starts `count` processes.
    ///
    /// # Errors
    /// If one cannot be started; those before it are ended.
    pub fn start(count: u32) -> Result<Self> {
        Self::spawn(count, || {
            let mut sleep = Command::new("sleep");
            sleep.arg("infinity").stdin(Stdio::null());
            sleep
        })
    }

    /// Starts `count` processes that sleep in a read of a pipe, by which this process wakes them.
    /// They end when this process has ended. Each takes a descriptor.
    ///
    /// # Errors
    /// If one cannot be started; those before it are ended.
    pub fn on_pipes(count: u32) -> Result<Self> {
        Self::spawn(count, || {
            let mut cat = Command::new("cat");
            cat.stdin(Stdio::piped()).stdout(Stdio::null());
            cat
        })
    }

    fn spawn(count: u32, command: impl Fn() -> Command) -> Result<Self> {
        let mut all = Self::default();
        for number in 0..count {
            let child = command().spawn();
            all.0.push(child.with_context(|| format!("process {number} of {count}"))?);
        }
        Ok(all)
    }

    /// Wakes sleeper `number`, which was started on a pipe. It reads a byte and sleeps again.
    pub(super) fn wake(&self, number: usize) -> Result<()> {
        let pipe = self.0.get(number).and_then(|child| child.stdin.as_ref());
        let mut pipe = pipe.with_context(|| format!("process {number} has no pipe"))?;
        pipe.write_all(b"\n").with_context(|| format!("cannot wake process {number}"))
    }

    /// Returns the process id of sleeper `number`.
    pub(super) fn pid(&self, number: usize) -> Option<u32> {
        self.0.get(number).map(Child::id)
    }

    /// Moves the first `count` processes back to the groups at `roots`.
    pub(super) fn bring_back(&self, count: usize, roots: &[PathBuf]) -> Result<()> {
        for root in roots {
            let procs = root.join("cgroup.procs");
            for child in self.0.iter().take(count) {
                std::fs::write(&procs, child.id().to_string())
                    .with_context(|| format!("cannot move a process by {}", procs.display()))?;
            }
        }
        Ok(())
    }
}

impl Drop for Sleepers {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
        }
        for child in &mut self.0 {
            let _ = child.wait();
        }
    }
}
