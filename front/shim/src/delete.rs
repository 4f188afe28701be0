//! `delete`: cleans up after a shim that died, in place of that shim's own Delete.

use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use prost::Message;
use tonic::Code;

use crate::args::{Args, Leftover};
use crate::containerd as cd;
use crate::daemon::{Daemon, REPLACEMENT};
use crate::process::timestamp;
use crate::role::Role;
use crate::spec::Oci;
use crate::task::KILLED;
use crate::ttrpc::Failure;
use crate::{checkpoint, hooks, names, role, rootfs, store};

/// The longest time that the daemon may take to complete a snapshot of the container, so that it
/// can be removed.
const COMPLETION: Duration = Duration::from_secs(600);

/// Removes what is left of a container, or of a pod with its containers. Returns the message for
/// standard output.
///
/// # Errors
/// The daemon refuses, or none served: the container does not run then.
pub async fn delete(args: &Args) -> Result<Vec<u8>, String> {
    let bundle = args.bundle();
    let pid = std::fs::read_to_string(bundle.join("shim.pid")).ok();
    // Without a configuration nothing was created, or containerd has removed it.
    let annotations = Oci::load(&bundle).map(|oci| oci.annotations).unwrap_or_default();
    let role = Role::of(&annotations).unwrap_or(Role::Alone);
    let daemon = Daemon::from_environment();
    let left = Leftover {
        name: names::container(args, &args.id, &role),
        private: rootfs::private_of(&bundle),
        snapshots: checkpoint::left_of(&bundle),
    };
    let removed = remove(&daemon, &left, (REPLACEMENT, Duration::ZERO)).await;
    let group = role::group(&args.id, &annotations).unwrap_or_else(|_| args.id.clone());
    remove_socket(&names::socket(args, &group));
    store::sweep(Path::new(names::SOCKETS));
    if let Err(failed) = removed {
        let is_later = match failed.code {
            Code::Unavailable => daemon.is_between_lives(),
            // A snapshot is still being made.
            Code::Aborted => true,
            _ => false,
        };
        if !is_later {
            return Err(failed.message);
        }
        // containerd ends this command now, and would ask again only at its next start.
        remove_later(args, left).map_err(|error| format!("cannot remove it later: {error}"))?;
    }
    hooks::ended(&args.id, &bundle, None).await;
    let response = cd::DeleteResponse {
        pid: pid.and_then(|text| text.trim().parse().ok()).unwrap_or(0),
        // Nobody saw its end: SIGKILL may have been it.
        exit_status: KILLED,
        exited_at: Some(timestamp()),
    };
    Ok(response.encode_to_vec())
}

/// Carries on a removal for which no daemon served while containerd waited, until one serves, or
/// for which a daemon was not done with a snapshot.
///
/// # Errors
/// The daemon refuses, or was stopped.
pub async fn carry_on(args: &Args) -> Result<(), String> {
    let daemon = Daemon::from_environment();
    let removed = remove(&daemon, &args.leftover, (Duration::MAX, COMPLETION)).await;
    removed.map_err(|failed| failed.message)
}

/// Removes what is left of a container. Waits for the next daemon for at most `replacement`, and
/// for each snapshot that is still being made for at most `completion`.
async fn remove(
    daemon: &Daemon,
    left: &Leftover,
    (replacement, completion): (Duration, Duration),
) -> Result<(), Failure> {
    // First, so that no snapshot of it begins any more.
    daemon.remove(&left.name, replacement).await?;
    // Before the image, which stays as long as a snapshot has it.
    for snapshot in &left.snapshots {
        checkpoint::remove_within(daemon, snapshot, completion).await?;
    }
    if let Some(private) = &left.private {
        rootfs::remove_private(daemon, private).await?;
    }
    Ok(())
}

/// Starts a process that carries on the removal.
fn remove_later(args: &Args, left: Leftover) -> std::io::Result<()> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["-namespace", &args.namespace, "-id", &args.id, "-name", &left.name]);
    if let Some(private) = &left.private {
        command.args(["-private", private]);
    }
    for snapshot in &left.snapshots {
        command.args(["-snapshot", snapshot]);
    }
    // containerd reads this command's outputs to their end, and removes the bundle.
    let silent = command.arg("remove").stdin(Stdio::null()).stdout(Stdio::null());
    silent.stderr(Stdio::null()).current_dir("/").process_group(0).spawn().map(drop)
}

/// Removes the socket of a shim that died with its holder. A shim that still serves other
/// containers of a pod keeps its socket.
fn remove_socket(socket: &Path) {
    if UnixStream::connect(socket).is_err() {
        let _ = std::fs::remove_file(socket);
    }
}
