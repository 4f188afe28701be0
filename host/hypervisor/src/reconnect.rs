//! New connections of functions, for a VMM that takes them.
//!
//! A vfio-user connection ends with its server: with a socket engine, or with a plane whose
//! endpoints no keeper holds. It also ends when the server refuses what came over it. The VMM has
//! no file system from which it could connect again, so its launcher does, and passes the
//! connection on.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::files::{connect, elsewhere};
use crate::qmp::Qmp;
use crate::{Error, Result};

/// The time within which a function's server must listen again.
const PATIENCE: Duration = Duration::from_secs(60);

/// The pause between two attempts, however often the VMM reports a loss.
const AGAIN: Duration = Duration::from_millis(20);

/// The time that the VMM may take to accept a connection.
const COMMAND_DEADLINE: Duration = Duration::from_secs(5);

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

    fn get(&self, number: usize) -> Option<PathBuf> {
        self.lock().get(&number).or_else(|| self.first.get(number)).cloned()
    }
}

/// Connects functions again whose connections the VMM reports lost, until the control channel ends.
/// A function without a socket stays lost.
pub(crate) async fn reconnect(qmp: Arc<Qmp>, sockets: Sockets) {
    // The time at which each lost function is given up.
    let mut lost: BTreeMap<usize, Instant> = BTreeMap::new();
    loop {
        let reported =
            if lost.is_empty() { qmp.lost_functions().await } else { qmp.take_lost_functions() };
        let Some(reported) = reported else { return };
        for index in reported {
            let Some(socket) = sockets.get(index) else { continue };
            tracing::info!(socket = %socket.display(), "connection lost");
            lost.entry(index).or_insert_with(|| Instant::now() + PATIENCE);
        }
        for (index, until) in std::mem::take(&mut lost) {
            let Some(socket) = sockets.get(index) else { continue };
            match reconnect_one(&qmp, index, &socket).await {
                Ok(()) => tracing::info!(socket = %socket.display(), "connected again"),
                // The VMM has the function already, or reports it lost once more.
                Err(error @ Error::Refused { .. }) => tracing::warn!(%error, "not connected again"),
                Err(_) if Instant::now() < until => _ = lost.insert(index, until),
                Err(error) => tracing::warn!(%error, "a function stays lost"),
            }
        }
        tokio::time::sleep(AGAIN).await;
    }
}

async fn reconnect_one(qmp: &Qmp, index: usize, socket: &std::path::Path) -> Result<()> {
    let socket = socket.to_owned();
    let connection = elsewhere(move || connect(&socket)).await?;
    qmp.reconnect(index, connection, COMMAND_DEADLINE).await
}
