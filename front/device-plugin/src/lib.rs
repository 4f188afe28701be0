//! A device plugin for kubelet: it advertises functions of the node's pools, disks and network
//! interfaces, so that pods ask for them by `resources: {limits: {"slipway.dev/POOL": 1}}`.
//!
//! `pools` follows the daemon's pools. `plugin` serves kubelet's interface for one of them, and
//! `kubelet` registers it, again after each start of kubelet. Kubelet decides which function a
//! container gets, and is told of a mount that stands for it: containerd hands mounts to a runtime
//! in each of its versions without a setting, and the shim of Slipway's runtime has the daemon give
//! the function to the container's pod. Other runtimes refuse the mount. So nothing is kept here: a
//! plugin that dies holds and loses no function.
//!
//! Kubelets before 1.26 name a host in their calls that is none, which `h2` refuses.
//!
//! A node's socket functions are advertised as a pool of which every pod makes its own: a container
//! that has one of these devices has the socket function of its pod, and the number of devices is
//! how many such containers a node takes.
//!
//! Not implemented: virtual functions of hardware; NUMA nodes of functions.
//!
//! Dependencies: `tonic` and `prost` speak gRPC, `slipway-plane-api` connects to the daemon's and
//! to kubelet's sockets, `slipway-private` makes the plugins' own, `tokio` and `tokio-stream` serve
//! and wait, `tracing` for the log, `thiserror` for errors.

mod kubelet;
mod plugin;
mod pools;

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::sync::watch;

pub use pools::{Device, Devices};

/// Messages, client and server of kubelet's interface.
#[allow(missing_docs)] // generated; the comments are in the .proto file
pub mod v1beta1 {
    tonic::include_proto!("v1beta1");
}

/// The part of a resource's name before that of its pool.
const DOMAIN: &str = "slipway.dev";

/// The usual time without a list of devices after which a kubelet has dropped the plugin: it asks
/// for the list at once when it is registered with.
pub const QUIET: Duration = Duration::from_secs(10);

/// The socket functions that a node has for pods.
#[derive(Clone, Debug)]
pub struct Sockets {
    /// The number of containers that can have the one of their pod, at most 1,024.
    pub count: u32,
    /// The socket of the node's socket engine.
    pub engine: PathBuf,
    /// Returns whether an engine serves at a socket. May wait.
    pub serves: fn(&Path) -> bool,
}

/// The settings of a plugin.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Kubelet's directory for device plugins, usually `/var/lib/kubelet/device-plugins`.
    pub kubelet: PathBuf,
    /// The socket of the node's daemon.
    pub daemon: PathBuf,
    /// The run directory of the node, in which files stand for functions.
    pub run_dir: PathBuf,
    /// The pools to advertise. Empty: all pools, those that are made later too.
    pub pools: Vec<String>,
    /// The socket functions to advertise, under the name of a pool `sockets`; `None`: none.
    pub sockets: Option<Sockets>,
    /// The time after which a kubelet that is registered with and does not ask for the list of
    /// devices is registered with again; [`QUIET`], unless a test has its own.
    pub quiet: Duration,
}

/// The reason why the functions of a node cannot be advertised.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The directory of the files that stand for functions cannot be made.
    #[error("cannot create {}: {source}", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The daemon does not tell its pools.
    #[error("{0}")]
    Daemon(String),
    /// The task that follows the pools has ended, which no input should bring about.
    #[error("the pools are not followed any more: {0}")]
    Ended(tokio::task::JoinError),
}

/// Returns the name of the resource that a pool's functions are for pods, such as
/// `slipway.dev/fast`.
pub fn resource(pool: &str) -> String {
    format!("{DOMAIN}/{pool}")
}

/// Returns the functions that would be advertised now.
///
/// # Errors
/// [`Error::Daemon`].
pub async fn list(settings: &Settings) -> Result<Devices, Error> {
    let sockets = settings.sockets.clone();
    let mut source = pools::Source::new(&settings.daemon, &settings.pools, sockets);
    source.ask().await.map_err(Error::Daemon)
}

/// Advertises functions until this is dropped. Waits for a daemon and for a kubelet that are not
/// there; while no daemon serves, no function is healthy. Must be called within a tokio runtime
/// that has I/O and time enabled.
///
/// # Errors
/// [`Error::Directory`], [`Error::Ended`].
pub async fn serve(settings: Settings) -> Result<Infallible, Error> {
    let files = slipway_plane_api::functions::files(&settings.run_dir);
    std::fs::create_dir_all(&files)
        .map_err(|source| Error::Directory { path: files.clone(), source })?;
    let (sender, devices) = watch::channel(Devices::new());
    let sockets = settings.sockets.clone();
    let source = pools::Source::new(&settings.daemon, &settings.pools, sockets);
    let (kubelet, quiet) = (&settings.kubelet, settings.quiet);
    let mut followed = Aborted(tokio::spawn(source.follow(sender)));
    tokio::select! {
        ended = &mut followed.0 => match ended {
            Ok(never) => match never {},
            Err(error) => Err(Error::Ended(error)),
        },
        never = kubelet::follow(kubelet, &files, quiet, devices) => match never {},
    }
}

/// A task that ends when this is dropped.
struct Aborted<T>(tokio::task::JoinHandle<T>);

impl<T> Drop for Aborted<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}
