//! A keeper for pools of this process.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use slipway_keeper::Keeper;
use slipway_pool::{SLOTS, Shelves};

/// The longest time until the keeper is there.
const PATIENCE: Duration = Duration::from_secs(60);
/// The number of sandboxes that have memory at once; one is not yet back while the next one asks.
const SANDBOXES: u32 = 4;

/// A keeper on a thread of this process, and a directory for the sockets of pools. Memory that is
/// left with it is given before it is zeroed, as a node's is.
pub struct Keeping {
    directory: tempfile::TempDir,
    keeper: Arc<Keeper>,
}

impl Keeping {
    /// Starts a keeper.
    ///
    /// # Errors
    /// No directory for temporary files can be written, or the keeper does not answer.
    pub fn start() -> Result<Self> {
        let directory = tempfile::Builder::new().prefix("slipway-bench").tempdir()?;
        let keeper = keeper_in(directory.path())?;
        keeper.take(PATIENCE).context("a keeper of memory")?;
        Ok(Self { directory, keeper: Arc::new(keeper) })
    }

    /// Returns the places for the memory of a pool.
    pub(crate) fn shelves(&self) -> Shelves {
        Shelves::new(Arc::clone(&self.keeper), 0..SANDBOXES * SLOTS)
    }

    /// Returns the path of a pool's socket.
    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.path().join("pool")
    }
}

/// Starts a keeper on a thread of this process, and connects to it. Its socket is in `directory`.
///
/// # Errors
/// No thread can be started, or the keeper does not answer.
pub fn keeper_in(directory: &Path) -> Result<Keeper> {
    let path = directory.join("keeper");
    let its = path.clone();
    std::thread::Builder::new().name("keeper".into()).spawn(move || slipway_keeper::serve(&its))?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        match Keeper::connect(&path) {
            Ok(keeper) => return Ok(keeper),
            Err(error) if Instant::now() > deadline => {
                return Err(error).context("a keeper of memory");
            }
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}
