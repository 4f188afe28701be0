//! Commands and events of `slipway-vmm` about its functions.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::time::Duration;

use serde_json::json;

use super::{Command, Qmp, message};
use crate::{Error, Result};

impl Qmp {
    /// Gives `slipway-vmm` a new connection of the function `index`.
    pub(crate) async fn reconnect(
        &self,
        index: usize,
        connection: OwnedFd,
        timeout: Duration,
    ) -> Result<()> {
        let command = Command {
            name: "slipway-reconnect",
            arguments: Some(json!({ "function": index })),
            descriptor: Some(connection),
        };
        self.execute_within(&command, timeout).await.map(drop)
    }

    /// Gives `slipway-vmm` the connection of a new function. Returns the function's number.
    pub(crate) async fn plug(
        &self,
        name: &str,
        connection: OwnedFd,
        timeout: Duration,
    ) -> Result<usize> {
        let command = Command {
            name: "device_add",
            arguments: Some(json!({ "driver": "vfio-user-pci", "id": name })),
            descriptor: Some(connection),
        };
        let answer = self.execute_within(&command, timeout).await?;
        let unknown = || Error::Control("device_add did not answer with a function".into());
        message::function(&answer).ok_or_else(unknown)
    }

    /// Waits until connections of functions are reported lost, and takes their indices. Returns
    /// `None` when the channel is closed. For one caller at a time.
    pub(crate) async fn lost_functions(&self) -> Option<BTreeSet<usize>> {
        loop {
            let lost = self.take_lost_functions()?;
            if !lost.is_empty() {
                return Some(lost);
            }
            self.shared.lost.notified().await;
        }
    }

    /// Takes the indices of the functions that were reported lost so far. Returns `None` when the
    /// channel is closed.
    pub(crate) fn take_lost_functions(&self) -> Option<BTreeSet<usize>> {
        let mut state = self.shared.state();
        if state.closed.is_some() { None } else { Some(std::mem::take(&mut state.lost)) }
    }
}
