//! The sandbox's socket engine: a separate program that uses the function that the host's engine
//! serves.
//!
//! The agent starts and watches the engine. When the engine ends, containers' connections are
//! reset, and the library gives them the kernel's sockets for new ones. The engine is not started
//! again, since the host has ended the function.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::process::Pid;

use crate::init::{SocketsSpec, sockets};
use crate::reaper::{Exit, Reaper};
use crate::{huge_pages, log};

/// The longest wait until the engine serves, under emulation and on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// The pause between two checks whether the engine serves.
const PAUSE: Duration = Duration::from_millis(10);
/// The file name of the engine's program.
const PROGRAM: &str = "slipway-guest-sockets";

/// The paths of the engine's files.
pub struct Files {
    /// The folder of the program and the libraries.
    pub fixed: PathBuf,
    /// The folder of the engine's socket, created when the engine starts.
    pub run: PathBuf,
}

impl Files {
    fn socket(&self) -> PathBuf {
        self.run.join("socket.sock")
    }

    /// Returns the folders that are mounted into a container.
    pub fn spec(&self) -> Result<SocketsSpec> {
        let engine = self.run.join("socket.d");
        let text =
            |path: &Path| path.to_str().map(str::to_owned).context("a path that is not UTF-8");
        Ok(SocketsSpec { libraries: text(&self.fixed)?, engine: text(&engine)? })
    }
}

/// Starts the engine. When this returns, programs can attach to it.
///
/// # Errors
/// The engine's program is missing, it ended, or it did not serve in time. It does not run then.
pub async fn start(files: &Files, reaper: &Arc<Reaper>) -> Result<()> {
    std::fs::create_dir_all(&files.run).with_context(|| files.run.display().to_string())?;
    let others = tokio::task::spawn_blocking(huge_pages::added).await?;
    let starting = reaper.starting();
    let program = files.fixed.join(PROGRAM);
    let mut command = Command::new(&program);
    command.env_clear().arg("--socket").arg(files.socket()).current_dir("/").stdin(Stdio::null());
    if others > 0 {
        command.arg("--beside").arg(others.to_string());
    }
    let child = command.spawn().with_context(|| format!("starting {}", program.display()))?;
    let pid = Pid::from_child(&child);
    let exit = starting.watch(pid);
    let serving = tokio::time::timeout(PATIENCE, serving(files, exit.clone()));
    match serving.await {
        Ok(served) => served?,
        Err(_) => {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            bail!("{PROGRAM} does not serve after {} s", PATIENCE.as_secs());
        }
    }
    tokio::spawn(async move {
        let status = ended(exit).await;
        log!("{PROGRAM} ended with status {status}: sockets are the guest's kernel's from now on");
    });
    Ok(())
}

async fn serving(files: &Files, exit: Exit) -> Result<()> {
    let socket = files.run.join("socket.d").join(sockets::ENGINE);
    let look = async {
        while !takes_connections(&socket) {
            tokio::time::sleep(PAUSE).await;
        }
    };
    tokio::select! {
        () = look => Ok(()),
        status = ended(exit) => {
            bail!("{PROGRAM} ended with status {status}; the sandbox's console says why")
        }
    }
}

async fn ended(mut exit: Exit) -> u32 {
    // The reaper outlives every process; 255 means that the reaper is gone.
    exit.wait_for(Option::is_some).await.ok().and_then(|status| *status).unwrap_or(255)
}

fn takes_connections(path: &Path) -> bool {
    let connect = || -> std::io::Result<()> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let kind = SocketType::SEQPACKET;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?;
        let address = rustix::net::SocketAddrUnix::new(path)?;
        Ok(rustix::net::connect(&socket, &address)?)
    };
    connect().is_ok()
}
