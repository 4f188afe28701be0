//! `slipway-snapshotter`: a snapshotter of containerd's, as a plugin that it reaches by a socket
//! ("proxy snapshotter"). `docs/containerd.md` says how it is set up and what it is for.
//!
//! It is containerd's overlayfs snapshotter, with one difference: a layer of an image that can be
//! pulled lazily is neither fetched nor unpacked by containerd. The image goes to the node's cache
//! of images, by `slipway-image`, and the layer is a directory without files beside an
//! `image.json`, by which the shim of Slipway's runtime finds the image.
//!
//! # How the pieces meet
//!
//! `service` is containerd's interface. `store` has the snapshots: their `record`s in the `ledger`
//! and their directories (`folders`), as `mounts`; `filter` parses what a list is asked for.
//! `remote` decides on a layer that containerd is about to fetch, and has its image pulled
//! (`pulls`) into the node's cache (`images`); what is at work there is not removed (`holds`). The
//! layer's directory is made aside (`staging`).
//!
//! The images of remote snapshots stay in the cache as long as one of those is there, and are then
//! removed, unless a sandbox uses them or a user pulled them too. An image that goes earlier
//! (`slipway image rm`) is pulled again by the shim.
//!
//! # What is hostile
//!
//! Labels come from images and pods: their number and size are bounded, references and digests are
//! parsed, and only containerd's own keys for unpacking have an image pulled. Four images are
//! pulled lazily at once, two of one registry, and two as a whole. One more may have names and
//! attributes that take more than 256 MiB of memory. What an image claims to be in its
//! configuration (`diff_ids`) is not checked for one that is pulled lazily, since that would take
//! all of it. So the shim compares a container's image with the one that a layer names.
//!
//! # What is not implemented
//!
//! Mappings of user ids (labels `containerd.io/snapshot/uidmapping`), the option `userxattr` and
//! overlays of a user that is not root; quotas; regular expressions in filters.
//!
//! # Dependencies
//!
//! `slipway-image` and `slipway-runtime` (settings, sandboxes' images) for the node; `tonic` and
//! `prost` speak gRPC; `redb` stores the ledger, `serde` and `serde_json` its records; `tempfile`
//! makes directories aside; `lexopt` parses the command line; `tokio` and `tokio-stream` serve;
//! `rustix` tells the effective user; `slipway-lock`, `slipway-private` and
//! `slipway-printable` keep the root, the socket and messages safe; `tracing` with its subscriber
//! writes the log.

mod args;
mod filter;
mod folders;
mod holds;
mod images;
mod ledger;
mod mounts;
mod pulls;
mod record;
mod refusal;
mod remote;
mod service;
mod staging;
mod store;

/// Messages, client and server of containerd's interface.
#[allow(missing_docs)] // generated; the comments are in the .proto file
pub mod v1 {
    tonic::include_proto!("containerd.services.snapshots.v1");
}

use std::io::{IsTerminal, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use slipway_image::{Cache, Limits};
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;

use crate::args::{Parsed, Settings};
use crate::images::{Images, NodeImages};
use crate::service::Service;
use crate::store::Store;
use crate::v1::snapshots_server::SnapshotsServer;

/// The most connections that wait to be accepted: containerd makes one.
const BACKLOG: i32 = 16;
/// The largest message of containerd's, bytes.
const LARGEST: usize = 1 << 20;

/// Runs the program with the command line of this process.
pub fn main() -> ExitCode {
    match args::parse(std::env::args_os(), |name| std::env::var_os(name)).and_then(run) {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("slipway-snapshotter: {reason}");
            ExitCode::FAILURE
        }
    }
}

fn run(parsed: Parsed) -> Result<(), String> {
    let settings = match parsed {
        Parsed::Print(text) => {
            let mut stdout = std::io::stdout().lock();
            return stdout.write_all(text.as_bytes()).map_err(|error| error.to_string());
        }
        Parsed::Serve(settings) => settings,
    };
    log();
    if !rustix::process::geteuid().is_root() {
        return Err("only root can serve containerd: run it as root".to_owned());
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| error.to_string())?;
    let served = runtime.block_on(serve(&settings));
    // A pull that goes on must not delay the end.
    runtime.shutdown_background();
    served
}

/// Has the program write its log to standard error.
fn log() {
    let filter = tracing_subscriber::EnvFilter::try_from_env("SLIPWAY_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
}

/// Serves containerd until a signal ends it.
async fn serve(settings: &Settings) -> Result<(), String> {
    let config = &settings.config;
    let store = Store::open(&settings.root).map_err(|error| error.to_string())?;
    let cache = Cache::open(config.images_dir(), Limits::default());
    let cache = cache.map_err(|error| error.to_string())?;
    let images: Arc<dyn Images> = Arc::new(NodeImages { cache, config: config.clone() });
    let listener = listen(&settings.socket)?;
    let service = Service::new(Arc::new(store), images);
    service.begin().await;
    tracing::info!(socket = %settings.socket.display(), "serves snapshots");
    let service = SnapshotsServer::new(service).max_decoding_message_size(LARGEST);
    let router = Server::builder().add_service(service);
    let connections = UnixListenerStream::new(listener);
    let ended = ended()?;
    let served = router.serve_with_incoming_shutdown(connections, ended).await;
    let _ = std::fs::remove_file(&settings.socket);
    served.map_err(|error| format!("containerd is not served any more: {error}"))
}

/// Listens at `path`, in place of a process that has died.
fn listen(path: &Path) -> Result<UnixListener, String> {
    let shown = path.display();
    let failed = |why: &dyn std::fmt::Display| {
        format!("cannot listen at {shown}: {why}; --socket names another place")
    };
    if UnixStream::connect(path).is_ok() {
        return Err(failed(&"a process serves there already"));
    }
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).map_err(|error| failed(&error))?;
    }
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(failed(&error)),
        _ => {}
    }
    slipway_private::listen_async(path, BACKLOG).map_err(|error| failed(&error))
}

/// Returns a future that ends with the first signal to end.
fn ended() -> Result<impl Future<Output = ()>, String> {
    let wait = |kind| signal(kind).map_err(|error| error.to_string());
    let (mut term, mut int) = (wait(SignalKind::terminate())?, wait(SignalKind::interrupt())?);
    Ok(async move {
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
        }
    })
}
