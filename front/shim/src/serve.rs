//! The serving process: takes connections on the socket that it was given as standard input.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use tokio::net::{UnixListener, UnixStream};

use crate::args::Args;
use crate::events::{self, Events};
use crate::service::Service;
use crate::ttrpc::server;
use crate::{log, names, network};

/// The pause after a connection that could not be accepted.
const PAUSE: Duration = Duration::from_millis(100);
/// The longest time that the last events may take to reach containerd.
const LAST_EVENTS: Duration = Duration::from_secs(5);

/// Serves until containerd shuts the shim down.
///
/// # Errors
/// Standard input is no listening socket.
pub async fn serve(args: &Args) -> Result<(), String> {
    let listener = listener().map_err(|error| {
        format!("standard input is no socket ({error}); containerd runs this program")
    })?;
    // Fails for the leader of a process group, which a shell may have made this process.
    let _ = rustix::process::setsid();
    if let Ok(bundle) = std::env::current_dir() {
        log::open(&bundle);
    }
    let _ = std::env::set_current_dir("/");
    network::leave_host()?;
    let events = Events::new(&args.namespace, events::socket_from_environment());
    let service = Arc::new(Service::new(args.clone(), events));
    tokio::select! {
        () = accept(listener, Arc::clone(&service)) => {}
        () = service.end.notified() => {}
    }
    let _ = std::fs::remove_file(names::socket(args, &args.id));
    // The answer to Shutdown is under way, and so are the last events.
    service.events().drain(LAST_EVENTS).await;
    tokio::time::sleep(PAUSE).await;
    Ok(())
}

fn listener() -> std::io::Result<UnixListener> {
    let socket = std::io::stdin().as_fd().try_clone_to_owned()?;
    let listener = std::os::unix::net::UnixListener::from(socket);
    // Fails for anything else than a listening socket.
    listener.local_addr()?;
    let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    rustix::stdio::dup2_stdin(&null)?;
    listener.set_nonblocking(true)?;
    UnixListener::from_std(listener)
}

async fn accept(listener: UnixListener, service: Arc<Service>) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) if is_ours(&stream) => {
                tokio::spawn(server::serve(stream, Arc::clone(&service)));
            }
            Ok(_) => log::warn("a program of another user was turned away"),
            // Without descriptors there is nothing to do but to wait for some.
            Err(_) => tokio::time::sleep(PAUSE).await,
        }
    }
}

/// Returns whether the peer is of this process's user.
fn is_ours(stream: &UnixStream) -> bool {
    stream.peer_cred().is_ok_and(|peer| peer.uid() == rustix::process::geteuid().as_raw())
}
