//! Registration with kubelet.
//!
//! A kubelet that starts removes all sockets of its directory and makes its own. So each plugin
//! looks whether its socket and kubelet's are those that it knows, and otherwise listens and
//! registers anew. A socket is known by its inode and the time of that inode's last change, since
//! inode numbers are used again. A kubelet that has ended its call for the list of devices has
//! dropped the plugin, and is registered with again.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;

use crate::plugin::{OPTIONS, Plugin};
use crate::pools::Devices;
use crate::v1beta1::RegisterRequest;
use crate::v1beta1::device_plugin_server::DevicePluginServer;
use crate::v1beta1::registration_client::RegistrationClient;
use crate::{Aborted, resource};

/// The version of the interface.
const VERSION: &str = "v1beta1";
/// The name of kubelet's socket in its directory.
const SOCKET: &str = "kubelet.sock";
/// The most connections that wait to be accepted: kubelet makes one or two.
const BACKLOG: i32 = 16;
/// The time between two looks at the sockets.
const LOOK: Duration = Duration::from_millis(500);
/// The longest time of a registration, in which kubelet connects to the plugin.
const REGISTRATION: Duration = Duration::from_secs(15);
/// The largest message of kubelet, bytes: 1,024 names of functions in two lists are far less.
const LARGEST: usize = 1 << 20;

/// A socket that is there: device, inode, and the time of the inode's last change.
type Identity = (u64, u64, i64, i64);

/// Registers the pools with the kubelet of a directory, whenever that is needed. Each pool has a
/// task of its own: kubelet may take long to answer one of them.
pub(crate) async fn follow(
    directory: &Path,
    files: &Path,
    quiet: Duration,
    mut devices: watch::Receiver<Devices>,
) -> Infallible {
    let mut tasks: BTreeMap<String, Aborted<Infallible>> = BTreeMap::new();
    loop {
        let pools: Vec<String> = devices.borrow_and_update().keys().cloned().collect();
        // A pool that was forgotten: its socket is removed, and its lists end by themselves.
        tasks.retain(|pool, _| pools.contains(pool));
        for pool in pools {
            let seat = || {
                let seat = Seat::new(directory, &pool, quiet);
                let (devices, files) = (devices.clone(), files.to_owned());
                Aborted(tokio::spawn(seat.follow(directory.to_owned(), files, devices)))
            };
            tasks.entry(pool.clone()).or_insert_with(seat);
        }
        if devices.changed().await.is_err() {
            // The source has ended, with the program.
            std::future::pending::<()>().await;
        }
    }
}

/// The place of a pool's plugin in kubelet's directory.
struct Seat {
    pool: String,
    path: PathBuf,
    serving: Option<Serving>,
    /// The socket of the kubelet that knows the plugin.
    kubelet: Option<Identity>,
    /// Each list of devices that kubelet is being told holds one more reference.
    lists: Arc<()>,
    silence: Silence,
    /// The last line of the log about what fails.
    told: String,
}

/// The time since kubelet was last being told a list of devices.
struct Silence {
    /// The longest time that a kubelet which knows the plugin is without a list.
    most: Duration,
    since: Option<Instant>,
}

impl Silence {
    /// Returns whether a kubelet that has had no list for long has dropped the plugin.
    fn is_long(&mut self, is_told: bool, now: Instant) -> bool {
        if is_told {
            self.since = None;
            return false;
        }
        let since = *self.since.get_or_insert(now);
        now.saturating_duration_since(since) >= self.most
    }
}

/// A socket at which a plugin serves.
struct Serving {
    socket: Identity,
    _server: Aborted<()>,
}

impl Drop for Seat {
    fn drop(&mut self) {
        let own = self.serving.as_ref().map(|serving| serving.socket);
        if own.is_some() && identity(&self.path) == own {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl Seat {
    fn new(directory: &Path, pool: &str, quiet: Duration) -> Self {
        Self {
            pool: pool.to_owned(),
            path: directory.join(format!("slipway-{pool}.sock")),
            serving: None,
            kubelet: None,
            lists: Arc::default(),
            silence: Silence { most: quiet, since: None },
            told: String::new(),
        }
    }

    /// Serves and registers the plugin with the kubelet of a directory, whenever that is needed.
    async fn follow(
        mut self,
        directory: PathBuf,
        files: PathBuf,
        devices: watch::Receiver<Devices>,
    ) -> Infallible {
        let pool = self.pool.clone();
        loop {
            let plugin = |lists| {
                let (pool, devices, files) = (pool.clone(), devices.clone(), files.clone());
                Plugin { pool, devices, files, lists }
            };
            self.keep(&directory, plugin).await;
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Serves and registers the plugin, unless the kubelet that is there knows it.
    async fn keep(&mut self, directory: &Path, plugin: impl FnOnce(Weak<()>) -> Plugin) {
        let socket = directory.join(SOCKET);
        let Some(kubelet) = identity(&socket) else {
            self.kubelet = None;
            return self.tell(format!("no kubelet listens at {}", socket.display()));
        };
        let serves = identity(&self.path);
        let serves = serves.is_some() && serves == self.serving.as_ref().map(|one| one.socket);
        let is_told = Arc::strong_count(&self.lists) > 1;
        let is_dropped = self.silence.is_long(is_told, Instant::now());
        if serves && self.kubelet == Some(kubelet) && !is_dropped {
            return;
        }
        self.kubelet = None;
        if !serves {
            // Lists of the server before are not this one's.
            self.lists = Arc::default();
            if let Err(error) = self.serve(plugin(Arc::downgrade(&self.lists))) {
                return self.tell(format!("cannot listen at {}: {error}", self.path.display()));
            }
        }
        self.silence.since = None;
        match register(&socket, &self.pool).await {
            Ok(()) => {
                let resource = resource(&self.pool);
                tracing::info!(resource, "registered with kubelet");
                (self.kubelet, self.told) = (Some(kubelet), String::new());
            }
            Err(why) => self.tell(why),
        }
    }

    fn serve(&mut self, plugin: Plugin) -> std::io::Result<()> {
        // The connections of the server before end with the kubelet that made them.
        self.serving = None;
        let _ = std::fs::remove_file(&self.path);
        let listener = slipway_private::listen_async(&self.path, BACKLOG)?;
        let gone = || std::io::Error::other("it was removed at once");
        let socket = identity(&self.path).ok_or_else(gone)?;
        let service = DevicePluginServer::new(plugin).max_decoding_message_size(LARGEST);
        let router = Server::builder().add_service(service);
        let pool = self.pool.clone();
        let server = tokio::spawn(async move {
            let served = router.serve_with_incoming(UnixListenerStream::new(listener)).await;
            if let Err(error) = served {
                tracing::warn!(pool, %error, "a plugin serves no more");
            }
        });
        self.serving = Some(Serving { socket, _server: Aborted(server) });
        Ok(())
    }

    /// Logs what fails, once until it is something else.
    fn tell(&mut self, why: String) {
        if self.told != why {
            tracing::warn!(resource = resource(&self.pool), why, "not registered with kubelet");
            self.told = why;
        }
    }
}

/// Registers a pool's plugin with the kubelet at a socket.
///
/// # Errors
/// One line.
async fn register(socket: &Path, pool: &str) -> Result<(), String> {
    let request = RegisterRequest {
        version: VERSION.to_owned(),
        endpoint: format!("slipway-{pool}.sock"),
        resource_name: resource(pool),
        options: Some(OPTIONS),
    };
    let registered = tokio::time::timeout(REGISTRATION, async {
        let channel = slipway_plane_api::connect(socket).await;
        let channel = channel.map_err(|_| "kubelet takes no connection".to_owned())?;
        let mut client = RegistrationClient::new(channel).max_decoding_message_size(LARGEST);
        let reply = client.register(request).await;
        reply.map(drop).map_err(|status| status.message().to_owned())
    });
    let limit = REGISTRATION.as_secs();
    let late = |_| Err(format!("kubelet does not answer within {limit} s"));
    registered.await.unwrap_or_else(late)
}

fn identity(path: &Path) -> Option<Identity> {
    let found = std::fs::symlink_metadata(path).ok()?;
    Some((found.dev(), found.ino(), found.ctime(), found.ctime_nsec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kubelet_without_a_list_for_long_has_dropped_the_plugin() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let mut silence = Silence { most: Duration::from_secs(10), since: None };
        assert!(!silence.is_long(false, at(0)));
        assert!(!silence.is_long(false, at(9)));
        assert!(silence.is_long(false, at(10)));
        assert!(!silence.is_long(true, at(11)));
        // Counted from when the list was first missed.
        assert!(!silence.is_long(false, at(30)));
        assert!(!silence.is_long(false, at(39)));
        assert!(silence.is_long(false, at(40)));
    }
}
