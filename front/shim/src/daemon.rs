//! The node's daemon, as the shim calls it.

use std::error::Error as _;
use std::path::PathBuf;

use slipway_sandbox_api::{SandboxClient, v1};
use tonic::{Code, Status};

use crate::ttrpc::Failure;

/// The environment variable with the daemon's run directory.
const RUN_DIR: &str = "SLIPWAY_RUN_DIR";
/// The daemon's run directory without that variable.
const DEFAULT_RUN_DIR: &str = "/run/slipway";
/// The size of the largest message of the daemon's, bytes.
const LARGEST: usize = 4 << 20;

/// The node's daemon, by its run directory.
#[derive(Clone, Debug)]
pub struct Daemon {
    run_dir: PathBuf,
}

impl Daemon {
    /// Finds the run directory from the environment.
    pub fn from_environment() -> Self {
        let named = std::env::var_os(RUN_DIR).filter(|dir| !dir.is_empty());
        Self { run_dir: named.map_or_else(|| DEFAULT_RUN_DIR.into(), PathBuf::from) }
    }

    /// Makes the daemon with this run directory.
    #[cfg(test)]
    pub fn at(run_dir: &std::path::Path) -> Self {
        Self { run_dir: run_dir.to_owned() }
    }

    /// Returns the run directory.
    pub fn run_dir(&self) -> &std::path::Path {
        &self.run_dir
    }

    /// Returns the daemon's socket.
    pub fn socket(&self) -> PathBuf {
        self.run_dir.join("slipway.sock")
    }

    /// Returns whether a keeper waits for the next daemon, so that sandboxes go on without one.
    pub async fn is_kept(&self) -> bool {
        tokio::net::UnixStream::connect(self.run_dir.join("keeper.sock")).await.is_ok()
    }

    /// Connects to the daemon.
    ///
    /// # Errors
    /// [`Code::Unavailable`] if none serves; the message says how to start one.
    pub async fn connect(&self) -> Result<SandboxClient, Failure> {
        let channel = slipway_sandbox_api::connect(&self.socket()).await.map_err(|_| {
            let at = self.socket();
            let message = format!(
                "no Slipway daemon serves at {}: start it with `systemctl start slipway` or \
                 `slipway daemon`",
                at.display()
            );
            Failure::new(Code::Unavailable, message)
        })?;
        Ok(SandboxClient::new(channel).max_decoding_message_size(LARGEST))
    }

    /// Removes a sandbox with all that is left of it, running or not. That there is none is no
    /// error.
    ///
    /// # Errors
    /// The daemon does not serve, or refuses.
    pub async fn remove(&self, name: &str) -> Result<(), Failure> {
        let request = v1::RemoveRequest { name: name.to_owned(), force: true };
        match self.connect().await?.remove(request).await {
            Err(status) if status.code() != Code::NotFound => Err(failure(&status)),
            _ => Ok(()),
        }
    }
}

/// Returns whether the call failed because the daemon went away. The transport's own errors have a
/// source, the daemon's have none.
pub fn is_lost(status: &Status) -> bool {
    status.source().is_some()
}

/// Converts the daemon's refusal.
pub fn failure(status: &Status) -> Failure {
    if is_lost(status) {
        let message = format!("the connection to Slipway's daemon broke: {}", status.message());
        return Failure::new(Code::Unavailable, message);
    }
    Failure::new(status.code(), status.message())
}
