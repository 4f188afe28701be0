//! A running VMM.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::{broadcast, watch};
use tokio::task::JoinHandle;

use crate::exit::{StderrTail, exit_of};
use crate::files::remove;
use crate::process::Process;
use crate::qmp::Qmp;
use crate::reconnect::reconnect;
use crate::{Accel, BoxFuture, LaunchTimes, Result, Vm, VmEvent, VmExit, VmRecord, identity};

/// The time that a command may take. None of our commands makes a VMM wait for anything.
const COMMAND_DEADLINE: Duration = Duration::from_secs(5);

/// The time that the end of a VM waits for the end of its console's log.
const LOG_DEADLINE: Duration = Duration::from_secs(2);

/// The resources that the supervising task owns until the process has ended.
pub(crate) struct Supervised {
    pub(crate) process: Process,
    pub(crate) stderr: StderrTail,
    /// The task that writes the console's log until the process has closed the pipe.
    pub(crate) console: JoinHandle<std::io::Result<()>>,
    /// The paths that were made in the VM's directory.
    pub(crate) made: Vec<PathBuf>,
    /// The sockets from which the VMM gets new connections of its functions, in their order on the
    /// bus. Empty if the VMM takes none.
    pub(crate) functions: Vec<PathBuf>,
}

/// A VMM that was launched, or left by another launcher.
pub(crate) struct LaunchedVm {
    record: VmRecord,
    times: Option<LaunchTimes>,
    accel: Accel,
    qmp: Arc<Qmp>,
    pidfd: OwnedFd,
    exit: watch::Receiver<Option<VmExit>>,
    detached: AtomicBool,
}

impl LaunchedVm {
    pub(crate) fn new(
        record: VmRecord,
        times: Option<LaunchTimes>,
        accel: Accel,
        qmp: Qmp,
        mut supervised: Supervised,
    ) -> Result<Self> {
        let pidfd = match supervised.process.pidfd() {
            Ok(pidfd) => pidfd,
            Err(error) => {
                supervised.process.end_elsewhere();
                return Err(error);
            }
        };
        let qmp = Arc::new(qmp);
        let (ended, exit) = watch::channel(None);
        tokio::spawn(supervise(supervised, Arc::clone(&qmp), ended));
        Ok(Self { record, times, accel, qmp, pidfd, exit, detached: AtomicBool::new(false) })
    }

    fn command<'a>(&'a self, name: &'static str) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move { self.qmp.execute(name, COMMAND_DEADLINE).await.map(drop) })
    }
}

/// Waits for the end of the process, reports it, and removes the files that the VM left.
async fn supervise(supervised: Supervised, qmp: Arc<Qmp>, ended: watch::Sender<Option<VmExit>>) {
    let Supervised { mut process, mut stderr, console, made, functions } = supervised;
    let reconnects = tokio::spawn(reconnect(Arc::clone(&qmp), functions));
    // An error here means that the process has ended already; exit_of reports the same.
    let _ = process.exited().await;
    reconnects.abort();
    let exit = exit_of(&mut process, &mut stderr, Some(&qmp)).await;
    // The log is complete when the end is reported, unless its disk does not respond.
    let _ = tokio::time::timeout(LOG_DEADLINE, console).await;
    // Only now: a VM that outlives this task needs these files to be taken over.
    let _ = tokio::task::spawn_blocking(move || remove(&made)).await;
    tracing::debug!(%exit, "VM ended");
    let _ = ended.send(Some(exit));
}

impl Vm for LaunchedVm {
    fn record(&self) -> &VmRecord {
        &self.record
    }

    fn times(&self) -> Option<LaunchTimes> {
        self.times
    }

    fn accel(&self) -> Accel {
        self.accel
    }

    fn events(&self) -> broadcast::Receiver<VmEvent> {
        self.qmp.events()
    }

    fn wait(&self) -> BoxFuture<'_, VmExit> {
        let mut exit = self.exit.clone();
        Box::pin(async move {
            match exit.wait_for(Option::is_some).await.map(|exit| exit.clone()) {
                Ok(Some(exit)) => exit,
                // The supervisor ended without a report: the runtime is shutting down.
                _ => VmExit { code: None, signal: None, reason: None, stderr: String::new() },
            }
        })
    }

    fn power_down(&self) -> BoxFuture<'_, Result<()>> {
        self.command("system_powerdown")
    }

    fn quit(&self) -> BoxFuture<'_, Result<()>> {
        self.command("quit")
    }

    fn pause(&self) -> BoxFuture<'_, Result<()>> {
        self.command("stop")
    }

    fn resume(&self) -> BoxFuture<'_, Result<()>> {
        self.command("cont")
    }

    fn kill(&self) -> Result<()> {
        identity::kill(&self.pidfd)
    }

    fn detach(&self) {
        self.detached.store(true, Ordering::Relaxed);
    }
}

impl Drop for LaunchedVm {
    fn drop(&mut self) {
        if !self.detached.load(Ordering::Relaxed)
            && let Err(error) = self.kill()
        {
            tracing::warn!(pid = self.record.pid, %error, "VM not killed");
        }
    }
}
