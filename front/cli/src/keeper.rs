//! `slipway keeper`, and how the daemon reaches its keeper.

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use slipway_keeper::Keeper;
use slipway_runtime::Config;

/// The longest time that the process of a keeper may take to listen. A busy machine may have it
/// wait for half a minute; one that fails ends before.
const START: Duration = Duration::from_secs(300);

/// Returns the path of the keeper's socket.
pub fn socket(config: &Config) -> PathBuf {
    config.run_dir.join("keeper.sock")
}

/// Serves until there is nothing left to keep.
pub fn serve(config: &Config) -> Result<i32> {
    std::fs::create_dir_all(&config.run_dir)
        .with_context(|| format!("cannot create {}", config.run_dir.display()))?;
    let socket = socket(config);
    slipway_keeper::serve(&socket)
        .with_context(|| format!("cannot keep at {}", socket.display()))?;
    Ok(0)
}

/// Returns whether a keeper waits for the node's daemon.
pub fn waits(config: &Config) -> bool {
    config.keeper && Keeper::is_there(&socket(config))
}

/// Connects to the running keeper, or starts one that outlives the daemon.
pub fn connect(config: &Config) -> Result<Keeper> {
    let socket = socket(config);
    if let Ok(keeper) = Keeper::connect(&socket) {
        return Ok(keeper);
    }
    let mut child = Command::new(slipway_bench::slipway()?)
        .arg("keeper")
        .arg("--run-dir")
        .arg(&config.run_dir)
        .current_dir("/")
        .stdin(Stdio::null())
        // Its own process group: signals to the daemon's group do not reach it.
        .process_group(0)
        .spawn()
        .context("cannot start the keeper")?;
    let begun = Instant::now();
    while begun.elapsed() < START {
        if let Ok(keeper) = Keeper::connect(&socket) {
            // The thread sleeps until the keeper ends, and reaps it.
            std::thread::spawn(move || child.wait());
            return Ok(keeper);
        }
        if let Some(status) = child.try_wait()? {
            // It may have left the socket to another keeper, which listens by now.
            let other = Keeper::connect(&socket);
            return other.with_context(|| format!("the keeper ended at once: {status}"));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    bail!("the keeper does not listen at {}", socket.display())
}
