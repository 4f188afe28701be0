//! New connections of functions, for a VMM that takes them.
//!
//! A vfio-user connection of `slipway-vmm` ends with its server: with a socket engine, or with any
//! plane, because a keeper holds nothing of a client that connects again. It also ends when the
//! server refuses what came over it. The VMM has no file system from which it could connect again,
//! so its launcher does, and passes the connection on. QEMU connects once
//! (`docs/walks/restart.md`).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use slipway_machine::FUNCTION_PATIENCE;
use slipway_rate::Lines;
use tokio::time::Instant;

use crate::files::{connect, elsewhere};
use crate::qmp::Qmp;
use crate::{Error, Result, VmSpec};

/// The pause between two attempts, however often the VMM reports a loss.
const AGAIN: Duration = Duration::from_millis(20);

/// The time that the VMM may take to accept a connection.
const COMMAND_DEADLINE: Duration = Duration::from_secs(5);

/// Log lines at once after a pause: enough for each function to be lost and connected again.
const BURST: u64 = 2 * VmSpec::MAX_FUNCTIONS as u64;

/// The sockets from which a VMM gets connections of its functions. Clones are the same.
#[derive(Clone, Debug)]
pub(crate) struct Sockets {
    /// The sockets of the functions that the machine began with.
    first: Arc<[PathBuf]>,
    /// The sockets of the functions that were plugged, by the functions' numbers.
    plugged: Arc<Mutex<BTreeMap<usize, PathBuf>>>,
}

impl Sockets {
    /// Makes the sockets of the functions that a machine begins with, and of those that were
    /// plugged since.
    pub(crate) fn new(first: &[PathBuf], plugged: BTreeMap<usize, PathBuf>) -> Self {
        Self { first: first.into(), plugged: Arc::new(Mutex::new(plugged)) }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<usize, PathBuf>> {
        self.plugged.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes the socket of function `number`, which was plugged. It takes the place of a function
    /// that was removed.
    pub(crate) fn insert(&self, number: usize, socket: PathBuf) {
        self.lock().insert(number, socket);
    }

    /// Returns the sockets of the functions that were plugged, by the functions' numbers.
    pub(crate) fn plugged(&self) -> BTreeMap<usize, PathBuf> {
        self.lock().clone()
    }

    /// Returns the socket of function `number`. Returns `None` if there is no such function.
    pub(crate) fn get(&self, number: usize) -> Option<PathBuf> {
        self.lock().get(&number).or_else(|| self.first.get(number)).cloned()
    }
}

/// The VM's log lines about lost connections. A VMM that was taken over could cause two of them for
/// each function in each turn, so they are limited to one a second after a burst.
struct Log<'a> {
    vm: &'a str,
    lines: Lines,
}

impl<'a> Log<'a> {
    fn new(vm: &'a str) -> Self {
        Self { vm, lines: Lines::new(BURST, Instant::now().into_std()) }
    }

    /// Logs what became of the connection to `socket`, if the limit allows.
    fn info(&mut self, socket: &Path, what: &str) {
        if let Some(left_out) = self.lines.may(Instant::now().into_std()) {
            tracing::info!(vm = self.vm, socket = %socket.display(), left_out, "{what}");
        }
    }

    /// Logs an error of the connection to `socket`, if the limit allows.
    fn warn(&mut self, socket: &Path, error: &Error, what: &str) {
        if let Some(left_out) = self.lines.may(Instant::now().into_std()) {
            tracing::warn!(vm = self.vm, socket = %socket.display(), %error, left_out, "{what}");
        }
    }
}

/// Connects functions again whose connections the VMM reports lost, until the control channel ends.
/// A server must listen within [`FUNCTION_PATIENCE`] of the report. A function without a socket
/// stays lost.
pub(crate) async fn reconnect(qmp: Arc<Qmp>, sockets: Sockets) {
    let mut log = Log::new(qmp.vm());
    // The time at which each lost function is given up.
    let mut lost: BTreeMap<usize, Instant> = BTreeMap::new();
    loop {
        let reported =
            if lost.is_empty() { qmp.lost_functions().await } else { qmp.take_lost_functions() };
        let Some(reported) = reported else { return };
        for index in reported {
            let Some(socket) = sockets.get(index) else { continue };
            log.info(&socket, "connection lost");
            lost.entry(index).or_insert_with(|| Instant::now() + FUNCTION_PATIENCE);
        }
        for (index, until) in std::mem::take(&mut lost) {
            let Some(socket) = sockets.get(index) else { continue };
            match reconnect_one(&qmp, index, &socket).await {
                Ok(()) => log.info(&socket, "connected again"),
                // The VMM has the function already, or reports it lost once more.
                Err(error @ Error::Refused { .. }) => {
                    log.warn(&socket, &error, "not connected again");
                }
                Err(_) if Instant::now() < until => _ = lost.insert(index, until),
                Err(error) => log.warn(&socket, &error, "a function stays lost"),
            }
        }
        tokio::time::sleep(AGAIN).await;
    }
}

async fn reconnect_one(qmp: &Qmp, index: usize, socket: &Path) -> Result<()> {
    let socket = socket.to_owned();
    let connection = elsewhere(move || connect(&socket)).await?;
    qmp.reconnect(index, connection, COMMAND_DEADLINE).await
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::control::tests::play;
    use crate::logged::Logged;

    /// A VMM that was taken over reports a loss as often as it is heard, and refuses each
    /// connection.
    #[tokio::test]
    async fn losses_without_end_are_a_few_lines() {
        const LOSSES: usize = 60;
        let directory = tempfile::tempdir().unwrap();
        let name = |name: &str| directory.path().join(name);
        let _server = std::os::unix::net::UnixListener::bind(name("disk")).unwrap();
        let vmm = play(&name("qmp"), |mut stream, commands| {
            for id in 2..2 + LOSSES {
                let lost = r#"{"event":"SLIPWAY_FUNCTION_LOST","data":{"function":0}}"#;
                writeln!(stream, "{lost}").unwrap();
                commands.next().unwrap();
                writeln!(stream, r#"{{"error":{{"desc":"no"}},"id":{id}}}"#).unwrap();
            }
        });
        let (logged, begun) = (Logged::here(), std::time::Instant::now());
        let qmp = crate::control::connect(&name("qmp")).await.unwrap();
        reconnect(Arc::new(qmp), Sockets::new(&[name("disk")], BTreeMap::new())).await;
        let most = (BURST + 1 + begun.elapsed().as_secs()) as usize;
        vmm.join().unwrap();
        let lines = logged.lines();
        assert!((1..=most).contains(&lines.len()), "{} of {}", lines.len(), 2 * LOSSES);
        let vm = directory.path().file_name().unwrap().to_str().unwrap();
        assert!(lines.iter().all(|line| line.contains(&format!("vm=\"{vm}\""))), "{lines:?}");
    }
}
