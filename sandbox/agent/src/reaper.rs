//! The only place that waits for children.
//!
//! PID 1 inherits every orphan, so it waits for any child (`waitpid(-1)`) and passes the status to
//! the watchers of its process id; no other code may wait for a process id. Statuses of unwatched
//! processes are dropped, since those are orphans.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use rustix::process::{Pid, WaitOptions, WaitStatus};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::lock::lock;

/// A receiver with `Some(status)` once the process has ended: 0 to 255, or 128 + n for signal n.
pub type Exit = watch::Receiver<Option<u32>>;

/// The dispatcher of exit statuses.
#[derive(Default)]
pub struct Reaper(Mutex<Table>);

#[derive(Default)]
struct Table {
    waiting: HashMap<Pid, watch::Sender<Option<u32>>>,
    /// Statuses of processes that ended before their starter knew their id, each with its number
    /// among all ends. Kept while any start is in progress.
    early: HashMap<Pid, (u64, u32)>,
    /// The number of processes that have ended.
    ends: u64,
    starting: usize,
}

/// A guard during which no exit status is lost between a process's start and [`Starting::watch`].
pub struct Starting {
    reaper: Arc<Reaper>,
    /// The number of processes that had ended before. A start may last, and a status from before
    /// this one is of an earlier process with the same id.
    since: u64,
}

impl Starting {
    /// Returns a receiver of the exit status of `pid`, a child of this process that was started
    /// while there was this guard.
    pub fn watch(self, pid: Pid) -> Exit {
        let mut table = lock(&self.reaper.0);
        let early = table.early.get(&pid).filter(|(end, _)| *end >= self.since);
        if let Some(status) = early.map(|(_, status)| *status) {
            table.early.remove(&pid);
            return watch::channel(Some(status)).1;
        }
        let (sender, receiver) = watch::channel(None);
        table.waiting.insert(pid, sender);
        receiver
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        let mut table = lock(&self.reaper.0);
        table.starting -= 1;
        if table.starting == 0 {
            table.early.clear();
        }
    }
}

impl Reaper {
    /// Returns a guard to be held from before a process is started until it is watched.
    pub fn starting(self: &Arc<Self>) -> Starting {
        let mut table = lock(&self.0);
        table.starting += 1;
        Starting { reaper: self.clone(), since: table.ends }
    }

    /// Reaps children for ever.
    ///
    /// # Errors
    /// The handler for SIGCHLD cannot be installed.
    pub async fn run(self: Arc<Self>) -> std::io::Result<()> {
        let mut signals = signal(SignalKind::child())?;
        loop {
            self.reap();
            signals.recv().await;
        }
    }

    fn reap(&self) {
        while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
            self.ended(pid, exit_status(status));
        }
    }

    fn ended(&self, pid: Pid, status: u32) {
        let mut table = lock(&self.0);
        let end = table.ends;
        table.ends += 1;
        match table.waiting.remove(&pid) {
            Some(sender) => {
                sender.send_replace(Some(status));
            }
            None if table.starting > 0 => {
                table.early.insert(pid, (end, status));
            }
            None => {}
        }
    }
}

fn exit_status(status: WaitStatus) -> u32 {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(status), _) => status as u32,
        (None, Some(signal)) => 128 + signal as u32,
        (None, None) => 255,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_before_the_watch_is_kept_while_starting() {
        let reaper = Arc::new(Reaper::default());
        let pid = Pid::from_raw(4242).unwrap();
        let starting = reaper.starting();
        reaper.ended(pid, 3);
        assert_eq!(*starting.watch(pid).borrow(), Some(3));
        reaper.ended(pid, 4);
        let later = reaper.starting().watch(pid);
        assert_eq!(*later.borrow(), None, "an orphan's status is not kept");
        reaper.ended(pid, 5);
        assert_eq!(*later.borrow(), Some(5));
    }

    #[test]
    fn a_status_from_before_a_start_is_not_taken() {
        let reaper = Arc::new(Reaper::default());
        let pid = Pid::from_raw(4242).unwrap();
        let lasting = reaper.starting();
        reaper.ended(pid, 3);
        let one = reaper.starting().watch(pid);
        assert_eq!(*one.borrow(), None);
        reaper.ended(pid, 4);
        assert_eq!(*one.borrow(), Some(4));
        drop(lasting);
    }
}
