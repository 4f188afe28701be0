//! The network namespaces of the serving process: its own, which is empty, and the host's.
//!
//! containerd's clients take the network namespace of a task's process, which is this one, for the
//! container's, and would set up the host's (`ctr run --cni`). So the shim leaves the host's. What
//! needs registries, the command that pulls an image, begins in the host's.

use std::io;
use std::path::Path;
use std::sync::OnceLock;

use rustix::thread::UnshareFlags;
use slipway_netns::Namespace;
use tokio::process::{Child, Command};
use tokio::runtime::Handle;

/// The network namespace in which containerd started this process.
static HOST: OnceLock<Namespace> = OnceLock::new();

/// Leaves the host's network for an empty namespace. Threads that are made later are in that one.
///
/// # Errors
/// One line: no right to do it, or no namespace is left.
#[allow(unsafe_code)]
pub fn leave_host() -> Result<(), String> {
    let failed = |why: &dyn std::fmt::Display| format!("no network namespace of its own: {why}");
    let host = Namespace::open_any(Path::new("/proc/thread-self/ns/net"));
    let host = host.map_err(|error| failed(&error))?;
    // SAFETY: unshare(2) with CLONE_NEWNET takes no pointers and shares no memory or descriptors
    // differently.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }
        .map_err(|error| failed(&error))?;
    // Left once in a process.
    let _ = HOST.set(host);
    Ok(())
}

/// Starts a command in the host's network.
///
/// # Errors
/// The namespace cannot be entered, or the command cannot be started.
pub fn spawn_on_host(command: &mut Command) -> io::Result<Child> {
    let Some(host) = HOST.get() else { return command.spawn() };
    let runtime = Handle::current();
    let spawned = host.run(|| {
        let _context = runtime.enter();
        command.spawn()
    });
    spawned.map_err(io::Error::other)?
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the network namespace of a command, as `net:[INODE]`.
    async fn namespace_of(spawn: fn(&mut Command) -> io::Result<Child>) -> String {
        let mut command = Command::new("readlink");
        command.arg("/proc/self/ns/net").stdout(std::process::Stdio::piped());
        let output = spawn(&mut command).unwrap().wait_with_output().await.unwrap();
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    #[test]
    fn a_pull_has_the_hosts_network_and_the_shim_has_not() {
        let host = slipway_netns::own().unwrap().to_string();
        // The thread's alone, since unshare(2) concerns the thread that calls it.
        let thread = std::thread::spawn(move || {
            if let Err(error) = leave_host() {
                println!("SKIPPED: a_pull_has_the_hosts_network: needs root: {error}");
                return;
            }
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(async {
                assert_ne!(namespace_of(Command::spawn).await, host);
                assert_eq!(namespace_of(spawn_on_host).await, host);
            });
        });
        thread.join().unwrap();
    }
}
