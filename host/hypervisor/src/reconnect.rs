//! New connections of functions, for a VMM that takes them.
//!
//! A vfio-user connection ends with its server: with a socket engine, or with a plane whose
//! endpoints no keeper holds. It also ends when the server refuses what came over it. The VMM has
//! no file system from which it could connect again, so its launcher does, and passes the
//! connection on.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
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

/// Connects functions again whose connections the VMM reports lost, until the control channel ends.
/// `sockets` are those of the functions, in their order on the bus; a function without one stays
/// lost.
pub(crate) async fn reconnect(qmp: Arc<Qmp>, sockets: Vec<PathBuf>) {
    // The time at which each lost function is given up.
    let mut lost: BTreeMap<usize, Instant> = BTreeMap::new();
    loop {
        let reported =
            if lost.is_empty() { qmp.lost_functions().await } else { qmp.take_lost_functions() };
        let Some(reported) = reported else { return };
        for index in reported.into_iter().filter(|index| *index < sockets.len()) {
            tracing::info!(socket = %sockets[index].display(), "connection lost");
            lost.entry(index).or_insert_with(|| Instant::now() + PATIENCE);
        }
        for (index, until) in std::mem::take(&mut lost) {
            match reconnect_one(&qmp, index, &sockets[index]).await {
                Ok(()) => tracing::info!(socket = %sockets[index].display(), "connected again"),
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
