//! Processes that are moved into control groups, or move themselves.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};

use super::mover::Mover;

/// Processes that sleep until they are dropped.
#[derive(Debug, Default)]
pub struct Sleepers(Vec<Sleeper>);

#[derive(Debug)]
enum Sleeper {
    /// A process that sleeps in a read of a pipe.
    OnPipe(Child),
    /// A process that moves itself when it is told to.
    Mover(Mover),
}

impl Sleeper {
    fn id(&self) -> u32 {
        match self {
            Self::OnPipe(child) => child.id(),
            Self::Mover(mover) => mover.id(),
        }
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        // A mover ends by itself.
        if let Self::OnPipe(child) = self {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Sleepers {
    /// Starts `count` processes, which can move themselves. Each takes a descriptor.
    ///
    /// # Errors
    /// If one cannot be started; those before it are ended.
    pub fn start(count: u32) -> Result<Self> {
        Self::make(count, || Ok(Sleeper::Mover(Mover::start()?)))
    }

    /// Starts `count` processes that sleep in a read of a pipe, by which this process wakes them.
    /// They end when this process has ended. Each takes a descriptor.
    ///
    /// # Errors
    /// If one cannot be started; those before it are ended.
    pub fn on_pipes(count: u32) -> Result<Self> {
        Self::make(count, || {
            let mut cat = Command::new("cat");
            cat.stdin(Stdio::piped()).stdout(Stdio::null());
            Ok(Sleeper::OnPipe(cat.spawn()?))
        })
    }

    fn make(count: u32, one: impl Fn() -> std::io::Result<Sleeper>) -> Result<Self> {
        let mut all = Self::default();
        for number in 0..count {
            all.0.push(one().with_context(|| format!("process {number} of {count}"))?);
        }
        Ok(all)
    }

    /// Wakes sleeper `number`, which was started on a pipe. It reads a byte and sleeps again.
    pub(super) fn wake(&self, number: usize) -> Result<()> {
        let pipe = match self.0.get(number) {
            Some(Sleeper::OnPipe(child)) => child.stdin.as_ref(),
            _ => None,
        };
        let mut pipe = pipe.with_context(|| format!("process {number} has no pipe"))?;
        pipe.write_all(b"\n").with_context(|| format!("cannot wake process {number}"))
    }

    /// Returns the process id of sleeper `number`.
    pub(super) fn pid(&self, number: usize) -> Option<u32> {
        self.0.get(number).map(Sleeper::id)
    }

    /// Has sleeper `number`, which was started by [`start`](Self::start), move itself by `files`,
    /// and waits until it has.
    pub(super) fn enter(&self, number: usize, files: &[PathBuf]) -> Result<()> {
        match self.0.get(number) {
            Some(Sleeper::Mover(mover)) => mover.enter(files),
            _ => bail!("process {number} does not move itself"),
        }
    }

    /// Moves the first `count` processes back to the groups at `roots`.
    pub(super) fn bring_back(&self, count: usize, roots: &[PathBuf]) -> Result<()> {
        for root in roots {
            let procs = root.join("cgroup.procs");
            for sleeper in self.0.iter().take(count) {
                std::fs::write(&procs, sleeper.id().to_string())
                    .with_context(|| format!("cannot move a process by {}", procs.display()))?;
            }
        }
        Ok(())
    }
}
