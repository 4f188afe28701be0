//! A running VMM.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::{broadcast, watch};
use tokio::task::JoinHandle;

use crate::cage::{Cage, PLACE};
use crate::console::StderrTail;
use crate::exit::exit_of;
use crate::files::{connect, elsewhere, remove};
use crate::pages::PageStream;
use crate::process::Process;
use crate::qmp::Qmp;
use crate::reconnect::{Sockets, reconnect};
use crate::rest::await_rest;
use crate::saved::StateFile;
use crate::{
    Accel, BoxFuture, CpuSlot, Error, LaunchTimes, MemoryDevice, PageSink, Result, Vm, VmEvent,
    VmExit, VmRecord, VmSpec, identity, no_hot_memory, saves_none,
};

/// The time that a new function may take: the VMM waits for its server for up to a minute.
const PLUG_DEADLINE: Duration = Duration::from_secs(70);

/// The time that saving a machine may take: each function's server ends what it has begun. The
/// machine's memory is part of it.
const SAVE_DEADLINE: Duration = Duration::from_secs(60);

/// The time that a copy of the memory may take while the guest runs.
const AHEAD_DEADLINE: Duration = Duration::from_secs(300);

/// The time that any other command may take. None makes a VMM wait for anything.
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
    /// The sockets from which the VMM gets connections of its functions; `None` if it takes none
    /// while it runs.
    pub(crate) functions: Option<Sockets>,
}

/// A VMM that was launched, or left by another launcher.
pub(crate) struct LaunchedVm {
    record: VmRecord,
    times: Option<LaunchTimes>,
    accel: Accel,
    qmp: Arc<Qmp>,
    functions: Option<Sockets>,
    pidfd: OwnedFd,
    exit: watch::Receiver<Option<VmExit>>,
    detached: AtomicBool,
    /// Held while QEMU is given a function.
    plugging: tokio::sync::Mutex<()>,
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
        let functions = supervised.functions.clone();
        let (ended, exit) = watch::channel(None);
        tokio::spawn(supervise(supervised, Arc::clone(&qmp), ended));
        let detached = AtomicBool::new(false);
        let plugging = tokio::sync::Mutex::default();
        Ok(Self { record, times, accel, qmp, functions, pidfd, exit, detached, plugging })
    }

    /// Adds a function to QEMU, which connects to the socket itself.
    async fn plug_at_port(&self, name: &str, socket: &Path) -> Result<String> {
        // There is one place for sockets.
        let _turn = self.plugging.lock().await;
        let port = self.qmp.free_port(COMMAND_DEADLINE).await?;
        let Some(cage) = Cage::of_launcher() else {
            let path = socket.to_string_lossy();
            return self.qmp.plug_at_port(port, name, &path, PLUG_DEADLINE).await;
        };
        let process = || {
            let failed = |source| Error::system("duplicating a descriptor", source);
            self.pidfd.try_clone().map_err(failed)
        };
        cage.show(process()?, socket.to_owned()).await?;
        let path = PLACE.to_string_lossy();
        let plugged = self.qmp.plug_at_port(port, name, &path, PLUG_DEADLINE).await;
        cage.hide(process()?).await?;
        plugged
    }

    /// Saves the machine, and writes its memory to `pages` if there is such a pipe; with `rest`
    /// only what was written to since it was copied ahead.
    async fn save_into(
        &self,
        (pages, rest): (Option<OwnedFd>, bool),
        timeout: Duration,
    ) -> Result<Vec<u8>> {
        if self.functions.is_none() {
            return saves_none();
        }
        let file = StateFile::new()?;
        let bytes = self.qmp.save(file.descriptor()?, (pages, rest), timeout).await?;
        elsewhere(move || file.read(bytes)).await
    }

    /// Saves the machine, and gives `page` its memory of `bytes` bytes, or the rest of it.
    async fn save_pages(&self, bytes: u64, page: PageSink, rest: bool) -> Result<Vec<u8>> {
        let (stream, pipe) = PageStream::new(bytes)?;
        // The VMM has time to notice that the reader has given up.
        let saved = self.save_into((Some(pipe), rest), SAVE_DEADLINE + COMMAND_DEADLINE);
        let read = elsewhere(move || stream.read(page, SAVE_DEADLINE));
        let (saved, read) = tokio::join!(saved, read);
        // After an error of the reader the VMM says no more than that its pipe is broken.
        let whole = read?;
        let saved = saved?;
        whole.then_some(saved).ok_or_else(cut)
    }

    fn command<'a>(&'a self, name: &'static str) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move { self.qmp.execute(name, COMMAND_DEADLINE).await.map(drop) })
    }
}

/// Returns the error of a stream of memory that was cut.
fn cut() -> Error {
    Error::Control("a machine's memory ended before its end".into())
}

/// Waits for the end of the process, reports it, and removes the files that the VM left.
async fn supervise(supervised: Supervised, qmp: Arc<Qmp>, ended: watch::Sender<Option<VmExit>>) {
    let Supervised { mut process, mut stderr, console, made, functions } = supervised;
    let reconnects = functions.map(|sockets| tokio::spawn(reconnect(Arc::clone(&qmp), sockets)));
    // An error here means that the process has ended already; exit_of reports the same.
    let _ = process.exited().await;
    if let Some(task) = reconnects {
        task.abort();
    }
    let exit = exit_of(&mut process, &mut stderr, Some(&qmp)).await;
    // The log is complete when the end is reported, unless its disk does not respond.
    let _ = tokio::time::timeout(LOG_DEADLINE, console).await;
    // Only now: a VM that outlives this task needs these files to be taken over.
    let _ = tokio::task::spawn_blocking(move || remove(&made)).await;
    tracing::debug!(%exit, "VM ended");
    let _ = ended.send(Some(exit));
}

impl Vm for LaunchedVm {
    fn record(&self) -> VmRecord {
        let plugged = self.functions.as_ref().map(Sockets::plugged);
        VmRecord { plugged: plugged.unwrap_or_default(), ..self.record.clone() }
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

    fn rest(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let pid = self.record.pid;
            match await_rest(pid).await {
                Ok(true) => {}
                Ok(false) => tracing::info!(pid, "the guest does not rest"),
                Err(error) => tracing::warn!(pid, %error, "no processor time of a VM"),
            }
        })
    }

    fn pause(&self) -> BoxFuture<'_, Result<()>> {
        self.command("stop")
    }

    fn resume(&self) -> BoxFuture<'_, Result<()>> {
        self.command("cont")
    }

    fn save(&self) -> BoxFuture<'_, Result<Vec<u8>>> {
        Box::pin(self.save_into((None, false), SAVE_DEADLINE))
    }

    fn save_with_memory(&self, bytes: u64, page: PageSink) -> BoxFuture<'_, Result<Vec<u8>>> {
        Box::pin(self.save_pages(bytes, page, false))
    }

    fn copy_ahead(&self, bytes: u64, page: PageSink) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            if self.functions.is_none() {
                return saves_none();
            }
            let (stream, pipe) = PageStream::ahead(bytes)?;
            let copied = self.qmp.copy_ahead(pipe, AHEAD_DEADLINE + COMMAND_DEADLINE);
            let read = elsewhere(move || stream.read(page, AHEAD_DEADLINE));
            let (copied, read) = tokio::join!(copied, read);
            // A VMM that cannot closes the pipe, and says why.
            match (copied, read?) {
                (Ok(()), true) => Ok(()),
                (Ok(()), false) => Err(cut()),
                (Err(error), _) => Err(error),
            }
        })
    }

    fn save_rest(&self, bytes: u64, page: PageSink) -> BoxFuture<'_, Result<Vec<u8>>> {
        Box::pin(self.save_pages(bytes, page, true))
    }

    fn plug<'a>(&'a self, name: &'a str, socket: &'a Path) -> BoxFuture<'a, Result<String>> {
        Box::pin(async move {
            let Some(functions) = &self.functions else {
                return self.plug_at_port(name, socket).await;
            };
            let path = socket.to_owned();
            let connection = elsewhere(move || connect(&path)).await?;
            let number = self.qmp.plug(name, connection, PLUG_DEADLINE).await?;
            functions.insert(number, socket.to_owned());
            Ok(VmSpec::function_address(number))
        })
    }

    fn broken_functions(&self) -> Vec<PathBuf> {
        let Some(functions) = &self.functions else { return Vec::new() };
        let broken = self.qmp.broken_functions();
        broken.into_iter().filter_map(|number| functions.get(number)).collect()
    }

    fn cpus(&self) -> BoxFuture<'_, Result<Vec<CpuSlot>>> {
        Box::pin(self.qmp.cpus(COMMAND_DEADLINE))
    }

    fn plug_cpu<'a>(&'a self, name: &'a str, cpu: u32) -> BoxFuture<'a, Result<()>> {
        Box::pin(self.qmp.plug_cpu(name, cpu, COMMAND_DEADLINE))
    }

    fn memory_devices(&self) -> BoxFuture<'_, Result<Vec<MemoryDevice>>> {
        Box::pin(async move {
            match self.functions {
                Some(_) => self.qmp.memory_devices(COMMAND_DEADLINE).await,
                None => no_hot_memory(),
            }
        })
    }

    fn set_memory(&self, device: usize, bytes: u64) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            match self.functions {
                Some(_) => self.qmp.set_memory(device, bytes, COMMAND_DEADLINE).await,
                None => no_hot_memory(),
            }
        })
    }

    fn unplug<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            // Each thread of a CPU takes one of `maxcpus` contexts of the translator for good, so
            // that QEMU (11.1, *tcg/tcg.c*, `tcg_register_thread`) aborts when a CPU comes back.
            if self.accel == Accel::Tcg {
                let what = "QEMU's software emulation takes no CPU back";
                return Err(Error::Unsupported { what });
            }
            self.qmp.unplug(name, COMMAND_DEADLINE).await
        })
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
