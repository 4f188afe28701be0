//! Processes that are moved into control groups.

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
        let mut all = Self::default();
        for number in 0..count {
            let mut sleep = Command::new("sleep");
            let child = sleep.arg("infinity").stdin(Stdio::null()).spawn();
            all.0.push(child.with_context(|| format!("process {number} of {count}"))?);
        }
        Ok(all)
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
