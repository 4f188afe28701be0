//! The serving process: takes connections on the socket that it was given as standard input, or
//! goes on in place of one that was killed.
//!
//! [`serve`] begins a shim, with a holder that starts the next process if this one is killed;
//! [`resume`] is that next process. Both end in [`run`], which serves [`Connections`].

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::args::Args;
use crate::events::{self, Events};
use crate::hold::{self, Holder, KeptDescriptor};
use crate::service::Service;
use crate::store::{RestartStore, Store};
use crate::ttrpc::kept::Record;
use crate::ttrpc::server;
use crate::{hooks, log, names, network};

/// The pause after a connection that could not be accepted.
const PAUSE: Duration = Duration::from_millis(100);
/// The longest time that the last events may take to reach containerd.
const LAST_EVENTS: Duration = Duration::from_secs(5);
/// The name of the log among the holder's descriptors.
const LOG: &str = "log";
/// The name of the store's directory among the holder's descriptors.
const STORE: &str = "store";
/// The beginning of the names of connections among the holder's descriptors; a number follows.
const CONNECTION: &str = "connection-";
/// The file in the store that is there once the shim's work is done.
const OVER: &str = "over";

/// Serves until containerd shuts the shim down.
///
/// # Errors
/// Standard input is no listening socket.
pub async fn serve(args: &Args) -> Result<(), String> {
    // containerd starts its programs with the soft limit of its service, 1024 as a rule.
    hold::raise_descriptor_limit();
    let socket = hold::take_stdin().and_then(|stdin| listener(stdin.as_fd()).map(|it| (stdin, it)));
    let (socket, listener) = socket.map_err(|error| {
        format!("standard input is no socket ({error}); containerd runs this program")
    })?;
    if let Ok(bundle) = std::env::current_dir() {
        log::open(&bundle);
    }
    // Before there is a holder: it would take this end for another one.
    let signals = terminations()?;
    let keep = keep(args);
    let kept = keep.holder.as_ref().map(|holder| hold_on(holder, &keep.store, socket));
    let served = run(args, listener, signals, &keep, Beginning::Fresh).await;
    drop(kept);
    served
}

/// Serves in place of a process that was killed. Standard input leads to the holder.
///
/// # Errors
/// The holder has died, or lacks what a shim needs.
pub async fn resume(args: &Args) -> Result<(), String> {
    let signals = terminations()?;
    let _ = rustix::thread::set_name(c"containerd-shim");
    let failed = |error: std::io::Error| error.to_string();
    let holder = hold::take_stdin().and_then(Holder::join).map_err(failed)?;
    let log = holder.take(LOG);
    if let Some(Ok(file)) = log.as_ref().map(KeptDescriptor::copy) {
        log::take(file);
    }
    log::warn("the shim's process was killed: another one goes on");
    let socket = holder.take(hold::LISTENER).ok_or("the holder has no listening socket")?;
    let listener = listener(socket.as_fd()).map_err(failed)?;
    let kept = holder.take(STORE).ok_or("the holder has no store")?;
    let store = Store::open(kept.as_fd().try_clone_to_owned().map_err(failed)?);
    if store.is_gone() {
        // The process that was killed had removed it last.
        holder.end();
        return Ok(());
    }
    let keep = RestartStore { store, holder: Some(holder) };
    let served = run(args, listener, signals, &keep, Beginning::Resumed).await;
    drop((log, socket, kept));
    served
}

/// Prepares for the next serving process. Without a holder there will be none.
fn keep(args: &Args) -> RestartStore {
    let made = Store::make(&names::state(args, &args.id));
    let started = made.and_then(|store| {
        let holder = Holder::start(args).inspect_err(|_| store.delete())?;
        Ok(RestartStore { store, holder: Some(holder) })
    });
    started.unwrap_or_else(|error| {
        log::warn(&format!("the shim has no holder: its death ends the container: {error}"));
        RestartStore::default()
    })
}

/// Has the holder keep what every serving process needs.
fn hold_on(holder: &Arc<Holder>, store: &Store, socket: OwnedFd) -> Vec<KeptDescriptor> {
    let put = |name: &str, file| holder.put(name.to_owned(), file);
    let log = log::share().map(|log| put(LOG, log));
    // Without the store, the next process ends at once.
    let store = store.share().ok().map(|store| put(STORE, store));
    // Last: with it, a holder starts the next process.
    log.into_iter().chain(store).chain([put(hold::LISTENER, socket)]).collect()
}

/// The beginning of a serving process.
enum Beginning {
    /// It is the first one of the shim.
    Fresh,
    /// It goes on in place of one that was killed.
    Resumed,
}

/// Serves until the shim is to end, and takes away what the next serving process would need.
async fn run(
    args: &Args,
    listener: UnixListener,
    mut signals: Signal,
    keep: &RestartStore,
    beginning: Beginning,
) -> Result<(), String> {
    // Fails for the leader of a process group, which a shell may have made this process.
    let _ = rustix::process::setsid();
    let _ = std::env::set_current_dir("/");
    network::leave_host()?;
    let to = events::socket_from_environment();
    let events = Events::kept(&args.namespace, to, keep.store.clone());
    let service = Arc::new(Service::new(args.clone(), events, keep.clone()));
    let connections = Connections { service: Arc::clone(&service), keep, next: AtomicU64::new(0) };
    let was_over = match beginning {
        Beginning::Fresh => false,
        Beginning::Resumed => go_on(&service, &connections, keep).await,
    };
    let was_asked = tokio::select! {
        () = connections.accept(listener) => true,
        () = service.end.notified() => true,
        // Whoever sends it wants the shim to end, and containerd to clean up.
        _ = signals.recv() => false,
        () = watch(args, keep) => true,
        () = keep.store.catch_up() => true,
    };
    keep.store.put(OVER, b"");
    if was_asked {
        if !was_over {
            // Once: after that, the one of this name may be the next shim's.
            let _ = std::fs::remove_file(names::socket(args, &args.id));
        }
        // The answer to Shutdown is under way, and so are the last events.
        service.events().drain(LAST_EVENTS).await;
        tokio::time::sleep(PAUSE).await;
    }
    // Before the store: without it the next process would serve nothing, and never end.
    if let Some(holder) = &keep.holder {
        holder.end();
    }
    // Without the socket, the next shim of this name may have begun, with a store of its own.
    keep.store.delete();
    Ok(())
}

/// Goes on with what an earlier process has left. Returns whether the shim's work was done by then:
/// the shim ends at once.
async fn go_on(service: &Service, connections: &Connections<'_>, keep: &RestartStore) -> bool {
    let was_over = keep.store.get(OVER).is_some();
    if let Some(holder) = &keep.holder {
        // Before calls are answered that run others.
        hooks::end_left(holder).await;
    }
    service.resume();
    connections.resume();
    if let Some(holder) = &keep.holder {
        holder.close_rest();
    }
    if was_over {
        service.end.notify_one();
    }
    was_over
}

/// Takes SIGTERM from here on.
fn terminations() -> Result<Signal, String> {
    signal(SignalKind::terminate()).map_err(|error| error.to_string())
}

/// Keeps a holder beside this process. Never returns.
async fn watch(args: &Args, keep: &RestartStore) {
    match &keep.holder {
        Some(holder) => holder.watch(args).await,
        None => std::future::pending().await,
    }
}

fn listener(socket: impl AsFd) -> std::io::Result<UnixListener> {
    let listener = std::os::unix::net::UnixListener::from(socket.as_fd().try_clone_to_owned()?);
    // Fails for anything else than a listening socket.
    listener.local_addr()?;
    listener.set_nonblocking(true)?;
    UnixListener::from_std(listener)
}

/// The connections of a shim, which the holder and the next serving process number alike.
struct Connections<'a> {
    service: Arc<Service>,
    keep: &'a RestartStore,
    /// The number of the next one.
    next: AtomicU64,
}

impl Connections<'_> {
    /// Goes on with the connections that an earlier process has left.
    fn resume(&self) {
        let Some(holder) = &self.keep.holder else { return };
        for name in holder.names(CONNECTION) {
            let Ok(number) = name[CONNECTION.len()..].parse::<u64>() else { continue };
            self.next.fetch_max(number + 1, Ordering::Relaxed);
            let Some(spare) = holder.take(&name) else { continue };
            let stream = spare.as_fd().try_clone_to_owned().and_then(|socket| {
                let stream = std::os::unix::net::UnixStream::from(socket);
                stream.set_nonblocking(true)?;
                UnixStream::from_std(stream)
            });
            match stream {
                Ok(stream) => self.serve(stream, Some(spare), number, true),
                Err(error) => {
                    log::warn(&format!("a connection is lost: {error}"));
                    Record::new(&self.keep.store, number).delete();
                }
            }
        }
    }

    async fn accept(&self, listener: UnixListener) {
        loop {
            match listener.accept().await {
                Ok((stream, _)) if is_ours(&stream) => {
                    let number = self.next.fetch_add(1, Ordering::Relaxed);
                    let copy = stream.as_fd().try_clone_to_owned().ok();
                    let name = format!("{CONNECTION}{number}");
                    let both = self.keep.holder.as_ref().zip(copy);
                    let spare = both.map(|(holder, copy)| holder.put(name, copy));
                    self.serve(stream, spare, number, false);
                }
                Ok(_) => log::warn("a program of another user was turned away"),
                // Without descriptors there is nothing to do but to wait for some.
                Err(_) => tokio::time::sleep(PAUSE).await,
            }
        }
    }

    fn serve(&self, stream: UnixStream, spare: Option<KeptDescriptor>, number: u64, again: bool) {
        let record = Record::new(&self.keep.store, number);
        let service = Arc::clone(&self.service);
        tokio::spawn(async move {
            server::serve_kept(stream, service, record, again).await;
            // Its last copy here: the peer sees the end.
            drop(spare);
        });
    }
}

/// Returns whether the peer is of this process's user.
fn is_ours(stream: &UnixStream) -> bool {
    stream.peer_cred().is_ok_and(|peer| peer.uid() == rustix::process::geteuid().as_raw())
}
