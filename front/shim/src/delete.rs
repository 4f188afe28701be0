//! `delete`: cleans up after a shim that died, in place of that shim's own Delete.

use std::path::{Path, PathBuf};

use prost::Message;

use crate::args::Args;
use crate::containerd as cd;
use crate::daemon::Daemon;
use crate::process::timestamp;
use crate::{names, rootfs};

/// The exit status of a container whose end nobody saw: that of one that SIGKILL ended.
const KILLED: u32 = 128 + 9;

/// Removes what is left of a container. Returns the message for standard output.
///
/// # Errors
/// The daemon does not serve, so the sandbox may still run, or it refuses.
pub async fn delete(args: &Args) -> Result<Vec<u8>, String> {
    let bundle = bundle(args);
    let pid = std::fs::read_to_string(bundle.join("shim.pid")).ok();
    let removed = Daemon::from_environment().remove(&names::sandbox(args)).await;
    if let Some(private) = rootfs::private_of(&bundle) {
        rootfs::remove_private(&Daemon::from_environment(), &private).await?;
    }
    let _ = std::fs::remove_file(names::socket(args));
    removed.map_err(|failure| failure.message)?;
    let response = cd::DeleteResponse {
        pid: pid.and_then(|text| text.trim().parse().ok()).unwrap_or(0),
        exit_status: KILLED,
        exited_at: Some(timestamp()),
    };
    Ok(response.encode_to_vec())
}

/// Returns the container's bundle.
pub fn bundle(args: &Args) -> PathBuf {
    if args.bundle.as_os_str().is_empty() {
        std::env::current_dir().unwrap_or_else(|_| Path::new("/").to_owned())
    } else {
        args.bundle.clone()
    }
}
