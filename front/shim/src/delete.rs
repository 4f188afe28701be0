//! `delete`: cleans up after a shim that died, in place of that shim's own Delete.

use std::os::unix::net::UnixStream;
use std::path::Path;

use prost::Message;

use crate::args::Args;
use crate::containerd as cd;
use crate::daemon::{Daemon, REPLACEMENT};
use crate::process::timestamp;
use crate::role::Role;
use crate::spec::Oci;
use crate::task::KILLED;
use crate::{names, role, rootfs};

/// Removes what is left of a container, or of a pod with its containers. Returns the message for
/// standard output.
///
/// # Errors
/// The daemon does not serve, so the container may still run, or it refuses.
pub async fn delete(args: &Args) -> Result<Vec<u8>, String> {
    let bundle = args.bundle();
    let pid = std::fs::read_to_string(bundle.join("shim.pid")).ok();
    // Without a configuration nothing was created, or containerd has removed it.
    let annotations = Oci::load(&bundle).map(|oci| oci.annotations).unwrap_or_default();
    let role = Role::of(&annotations).unwrap_or(Role::Alone);
    let daemon = Daemon::from_environment();
    let removed = daemon.remove(&names::container(args, &args.id, &role), REPLACEMENT).await;
    if let Some(private) = rootfs::private_of(&bundle) {
        rootfs::remove_private(&daemon, &private).await?;
    }
    let group = role::group(&args.id, &annotations).unwrap_or_else(|_| args.id.clone());
    remove_socket(&names::socket(args, &group));
    removed.map_err(|failure| failure.message)?;
    let response = cd::DeleteResponse {
        pid: pid.and_then(|text| text.trim().parse().ok()).unwrap_or(0),
        // Nobody saw its end: SIGKILL may have been it.
        exit_status: KILLED,
        exited_at: Some(timestamp()),
    };
    Ok(response.encode_to_vec())
}

/// Removes the socket of a shim that died. One that serves other containers of a pod keeps it.
fn remove_socket(socket: &Path) {
    if UnixStream::connect(socket).is_err() {
        let _ = std::fs::remove_file(socket);
    }
}
