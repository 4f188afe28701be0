//! `slipway socket reload`: reloads a running engine's files.

use std::path::Path;

use anyhow::{Context, Result, bail};

/// Makes the engine read its policy and its links anew, and reports what is wrong with them.
pub fn reload(socket: &Path) -> Result<i32> {
    let done = slipway_sgiov::reload(socket)
        .with_context(|| format!("the socket engine at {} cannot be reloaded", socket.display()))?;
    match done {
        Ok(()) => Ok(0),
        Err(error) => bail!("the socket engine goes on as before: {error}"),
    }
}
