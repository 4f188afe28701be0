//! The socket engine as a subject's helper: a process of its own, which ends with this one.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use crate::packet::process::{Running, wait_for};

/// The library that programs load before their own.
const LIBRARY: &str = "libslipway.so";
/// How long the engine may need until it serves.
const PATIENCE: Duration = Duration::from_secs(20);

/// An engine that runs, and how programs find it.
pub struct Engine {
    running: Running,
    library: PathBuf,
    socket: PathBuf,
    _directory: TempDir,
}

impl Engine {
    /// Starts `program` (slipway itself), with the library that lies beside it.
    ///
    /// # Errors
    /// There is no library, or the engine does not begin to serve.
    pub fn start(program: &Path) -> Result<Self> {
        let library = program.with_file_name(LIBRARY);
        ensure!(library.is_file(), "{} is not there", library.display());
        let directory = tempfile::Builder::new().prefix("slipway-bench").tempdir()?;
        let socket = directory.path().join("socket");
        let mut command = Command::new(program);
        command.args(["socket", "engine", "--socket"]).arg(&socket).stdin(Stdio::null());
        // Standard output is the report's; what goes wrong is on standard error.
        command.stdout(Stdio::null()).env("SLIPWAY_LOG", "warn");
        let mut running = Running::start(&mut command)?;
        wait_for(&socket, &mut running, Instant::now() + PATIENCE).context("the socket engine")?;
        Ok(Self { running, library, socket, _directory: directory })
    }

    /// The process.
    pub(super) fn id(&self) -> u32 {
        self.running.id()
    }

    /// What a program must have in its environment.
    pub(super) fn environment(&self) -> [(&'static str, OsString); 2] {
        [
            ("LD_PRELOAD", self.library.clone().into()),
            ("SLIPWAY_SOCKET", self.socket.clone().into()),
        ]
    }
}
