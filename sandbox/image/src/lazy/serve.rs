//! The fetcher's process: connections of disks, and the images that they use.
//!
//! A connection is a task of its own, which sleeps on its peer alone. A peer can have
//! [`MOST_WANTED`] ranges unanswered, and one answer that it does not receive. An image is in
//! memory until it is whole.

use std::collections::HashMap;
use std::io::{self, IoSliceMut};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram as StdDatagram;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use rustix::net::{RecvFlags, SendFlags, SocketType};
use slipway_lazy_spec::{Answer, Extent, Hello, MOST, MOST_WANTED, Want};
use slipway_lock::Lock;
use slipway_peer::{Bin, Peer};
use tokio::io::Interest;
use tokio::net::{UnixDatagram, UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;

use super::budget::Budget;
use super::fill::{Filling, ImageUse};
use super::map::Map;
use super::partial::{Partial, Settings, have_dir, remove_leftovers};
use super::refused::Refused;
use super::stamp::Stamp;
use crate::source::blocking;
use crate::{Access, Cache, Digest, Error, Image, Reference, Result, Silent};

/// The time without connections and without anything to fetch after which a fetcher ends.
const IDLE: Duration = Duration::from_secs(60);
/// The longest wait for a fetcher that is about to end.
const TAKEOVER: Duration = Duration::from_secs(10);
/// The pause between two looks at such a fetcher, and after accept(2) has failed.
const PAUSE: Duration = Duration::from_millis(20);
/// The longest wait for the memory of images that are dropped.
const DROPPED: Duration = Duration::from_secs(5);
/// The connections that may wait to be accepted.
const BACKLOG: i32 = 128;
/// The most connections. Further ones wait to be accepted.
const MOST_CONNECTIONS: usize = 16_384;

/// The fetcher's socket below a run directory.
fn socket_path(run_dir: &Path) -> PathBuf {
    run_dir.join("fetch.sock")
}

/// Fetches lazily pulled images of `cache` for the disks that connect to `fetch.sock` in `run_dir`,
/// and then the rest of these images. `access` returns the access to a registry. Returns after 60
/// seconds without connections in which nothing could be fetched, and at once if another process
/// serves the socket.
///
/// # Errors
/// The socket or its lock cannot be made.
pub async fn serve(
    cache: Cache,
    run_dir: &Path,
    access: impl Fn(&Reference) -> Access + Send + Sync + 'static,
) -> Result<()> {
    serve_until_idle(cache, run_dir, access, IDLE).await
}

/// Does as [`serve`], with another time without work.
pub(crate) async fn serve_until_idle(
    cache: Cache,
    run_dir: &Path,
    access: impl Fn(&Reference) -> Access + Send + Sync + 'static,
    idle: Duration,
) -> Result<()> {
    std::fs::create_dir_all(run_dir).map_err(|e| Error::io("create", run_dir, e))?;
    let Some(_lock) = take_over(run_dir).await? else { return Ok(()) };
    raise_descriptor_limit();
    let path = socket_path(run_dir);
    let listener = listen(&path).map_err(|e| Error::io("listen at", &path, e))?;
    let have_dir = have_dir(run_dir);
    slipway_private::make_folder(&have_dir)?;
    let fetcher = Arc::new(Fetcher::new(cache, have_dir, Box::new(access), Budget::new()));
    accept(&fetcher, &listener, idle).await;
    // The next fetcher finds no socket once it has the lock.
    let _ = std::fs::remove_file(&path);
    Ok(())
}

/// Takes the lock of the fetcher. Returns `None` if another one serves.
async fn take_over(run_dir: &Path) -> Result<Option<Lock>> {
    let (lock_path, socket) = (run_dir.join("fetch.lock"), socket_path(run_dir));
    let end = Instant::now() + TAKEOVER;
    loop {
        match Lock::try_take(&lock_path) {
            Ok(lock) => return Ok(Some(lock)),
            Err(slipway_lock::Error::Held { .. }) if is_served(&socket) => return Ok(None),
            // The other one has just begun, or is about to end.
            Err(slipway_lock::Error::Held { .. }) if Instant::now() < end => {
                tokio::time::sleep(PAUSE).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Returns whether somebody listens at `path`.
fn is_served(path: &Path) -> bool {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags};
    let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
    let connect = || {
        let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)
    };
    // EAGAIN: its backlog is full.
    matches!(connect(), Ok(()) | Err(rustix::io::Errno::AGAIN))
}

/// Listens at `path`, where the socket of a fetcher that was killed may be. The caller holds the
/// lock.
fn listen(path: &Path) -> io::Result<UnixListener> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let socket = slipway_private::listen(path, SocketType::SEQPACKET, None, BACKLOG)?;
    // Accepted connections inherit it.
    slipway_peer::refuse_descriptors(&socket);
    // Nothing in the types that accept connections depends on their being streams.
    let listener = std::os::unix::net::UnixListener::from(socket);
    listener.set_nonblocking(true)?;
    UnixListener::from_std(listener)
}

/// Raises the limit of descriptors as far as the system allows: each sandbox has a connection.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    let _ = setrlimit(Resource::Nofile, limit);
}

/// Serves connections until there are none and nothing is fetched for as long as `idle`.
async fn accept(fetcher: &Arc<Fetcher>, listener: &UnixListener, idle: Duration) {
    let mut connections = JoinSet::new();
    let mut busy = fetcher.busy.subscribe();
    loop {
        let is_idle = *busy.borrow_and_update() == 0 && connections.is_empty();
        tokio::select! {
            accepted = listener.accept(), if connections.len() < MOST_CONNECTIONS => {
                match accepted {
                    Ok((stream, _)) => {
                        connections.spawn(serve_connection(Arc::clone(fetcher), stream));
                    }
                    // Usually no descriptors are left.
                    Err(_) => tokio::time::sleep(PAUSE).await,
                }
            }
            Some(_) = connections.join_next() => {}
            // The sender lives as long as the fetcher.
            _ = busy.changed() => {}
            () = tokio::time::sleep(idle), if is_idle => return,
        }
    }
}

pub(crate) type GetAccess = Box<dyn Fn(&Reference) -> Access + Send + Sync>;

/// The images that are being fetched, by digest.
pub(crate) struct Fetcher {
    cache: Cache,
    have_dir: PathBuf,
    access: GetAccess,
    budget: Arc<Budget>,
    /// The number of images that are being fetched.
    busy: Arc<watch::Sender<usize>>,
    images: Mutex<HashMap<Digest, Arc<Slot>>>,
    refused: Refused,
}

/// An image, or its lack. It is locked while the image is opened, which may take seconds.
type Slot = tokio::sync::Mutex<Option<Fetched>>;

/// An image and the task that fetches it.
struct Fetched {
    filling: Arc<Filling>,
    task: JoinHandle<()>,
}

impl Drop for Fetched {
    fn drop(&mut self) {
        self.task.abort();
        self.filling.partial.close();
    }
}

/// The state of an image in the cache.
pub(crate) enum Opened {
    /// Parts of it are missing.
    Lazy(ImageUse),
    Whole,
}

impl Fetcher {
    pub(crate) fn new(
        cache: Cache,
        have_dir: PathBuf,
        access: GetAccess,
        budget: Arc<Budget>,
    ) -> Self {
        Self {
            cache,
            have_dir,
            access,
            budget,
            busy: Arc::new(watch::Sender::new(0)),
            images: Mutex::default(),
            refused: Refused::default(),
        }
    }

    fn images(&self) -> MutexGuard<'_, HashMap<Digest, Arc<Slot>>> {
        // No code that may panic leaves a half-made change under this lock.
        self.images.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens the image of a disk that reads the file with this device and inode, and begins to
    /// fetch it. Waits for others that open the same image.
    ///
    /// # Errors
    /// There is no such image, its file is another one, or there is no room for it.
    pub(crate) async fn open(self: &Arc<Self>, digest: Digest, file: (u64, u64)) -> Result<Opened> {
        let slot = Arc::clone(self.images().entry(digest).or_default());
        let mut slot = slot.lock().await;
        let unknown = || Error::Unknown(digest.to_string());
        let image = self.cache.get_aside(&digest.to_string()).await?.ok_or_else(unknown)?;
        let path = image.erofs_path.clone();
        let found =
            blocking(move || std::fs::metadata(&path).map_err(|e| Error::io("look at", &path, e)));
        if Stamp::file(&found.await?) != file {
            return Err(another_file(&image));
        }
        if !image.lazy {
            return Ok(Opened::Whole);
        }
        if let Some(fetched) = &*slot {
            let filling = Arc::clone(&fetched.filling);
            let is_of = filling.partial.stamp.is_of(file) && !fetched.task.is_finished();
            if is_of && blocking(move || filling.is_same()).await? {
                return Ok(Opened::Lazy(fetched.filling.connect()));
            }
        }
        // The image was removed and pulled again, or its task has ended.
        let last_origin = slot.take().and_then(|fetched| fetched.filling.partial.origins.good());
        let chunks = self.reserve_chunks(&image).await?;
        let fetcher = Arc::clone(self);
        let partial = blocking(move || {
            remove_leftovers(&fetcher.have_dir, &fetcher.cache);
            let settings = Settings {
                have_dir: Some(&fetcher.have_dir),
                access: &*fetcher.access,
                budget: Arc::clone(&fetcher.budget),
                progress: Arc::new(Silent),
            };
            Partial::open(&fetcher.cache, &image, settings)
        });
        let partial = partial.await?;
        last_origin.iter().for_each(|origin| partial.origins.go_on(origin));
        // It may have been pulled again since the look at its file.
        if !partial.stamp.is_of(file) {
            return Err(Error::Unknown(digest.to_string()));
        }
        let filling = Filling::new(partial, chunks);
        let task = tokio::spawn(Arc::clone(&filling).fill(Arc::clone(&self.busy)));
        let image_use = filling.connect();
        *slot = Some(Fetched { filling, task });
        Ok(Opened::Lazy(image_use))
    }

    /// Takes the chunks of an image that is to be fetched out of the budget of all images. If that
    /// has too few left, images that no disk uses are dropped: the rest of them is fetched with
    /// their next sandbox.
    ///
    /// # Errors
    /// The images that disks use leave too few.
    async fn reserve_chunks(&self, image: &Image) -> Result<OwnedSemaphorePermit> {
        let path = self.cache.map_path(&image.digest);
        let map =
            blocking(move || std::fs::metadata(&path).map_err(|e| Error::io("look at", &path, e)));
        let chunks = Map::most_spans(map.await?.len());
        let mut reserved = self.budget.try_chunks(chunks);
        if reserved.is_none() {
            // The tasks of images that are dropped end soon.
            let dropped = self.keep(|fetched| fetched.filling.is_used());
            let patience = if dropped { DROPPED } else { Duration::ZERO };
            let chunks = self.budget.chunks(chunks);
            reserved = tokio::time::timeout(patience, chunks).await.ok().flatten();
        }
        reserved.ok_or_else(|| {
            let reason = format!(
                "the fetcher has no room for its {chunks} chunks beside those of other images that \
                 are being fetched: wait, or fetch it with `slipway image pull`"
            );
            Error::too_large(format!("image {}", image.digest.short()), reason)
        })
    }

    /// Forgets images that are whole, removed, or could not be opened. Connections that use them
    /// still have them.
    fn forget(&self) {
        self.keep(|fetched| !fetched.task.is_finished() && !fetched.filling.is_whole());
    }

    /// Keeps the images for which `stays` holds, and those that somebody opens. Returns whether
    /// others were dropped.
    fn keep(&self, stays: impl Fn(&Fetched) -> bool) -> bool {
        let mut images = self.images();
        let before = images.len();
        images.retain(|_, slot| {
            // References are made under the lock of all images, so without another one nobody
            // opens the image.
            let Some(slot) = Arc::get_mut(slot) else { return true };
            slot.get_mut().as_ref().is_some_and(&stays)
        });
        images.len() < before
    }
}

/// Makes the error of a disk that reads another file than the image has in this cache.
fn another_file(image: &Image) -> Error {
    let reason = "a disk reads another file, of another data directory or an earlier pull: \
        start its container again";
    Error::bad_document(image.erofs_path.display(), reason)
}

/// Serves one connection. An error ends this connection only.
async fn serve_connection(fetcher: Arc<Fetcher>, stream: UnixStream) {
    let Ok(connection) = Connection::new(stream) else { return };
    // A connection without a greeting keeps the fetcher there.
    let Ok(Some(message)) = connection.receive().await else { return };
    let Some(hello) = Hello::decode(&message) else { return };
    let digest = Digest::from(hello.digest);
    let opened = fetcher.open(digest, (hello.device, hello.inode)).await;
    if opened.is_ok() {
        fetcher.refused.forget(digest);
    }
    let _ = match opened {
        Ok(Opened::Lazy(image)) => match serve_disk(&connection, image).await {
            Ok(true) => {
                // Nothing of the image is in memory while its disk stays.
                fetcher.forget();
                wait_for_end(&connection).await
            }
            ended => ended.map(drop),
        },
        Ok(Opened::Whole) => tell_whole(&connection).await,
        Err(error) => {
            if fetcher.refused.is_first(digest) {
                tracing::error!(image = %digest.short(), %error, "a disk of an image is refused");
            }
            connection.send(Answer::Refused(error.to_string().as_bytes())).await
        }
    };
    fetcher.forget();
}

/// Tells a disk that its image is whole, and waits until it hangs up.
async fn tell_whole(connection: &Connection) -> io::Result<()> {
    connection.send(Answer::Whole).await?;
    wait_for_end(connection).await
}

/// Waits until a disk hangs up that was told that its image is whole, and answers what it wanted
/// before it knew.
async fn wait_for_end(connection: &Connection) -> io::Result<()> {
    while let Some(message) = connection.receive().await? {
        if let Some(Want(extent)) = Want::decode(&message) {
            connection.send(Answer::Have(extent)).await?;
        }
    }
    Ok(())
}

/// Answers a disk until its image is whole, and returns `true` then. Returns `false` when the disk
/// hangs up, or nothing is fetched for it any more: it connects again then, and the image is looked
/// for again.
async fn serve_disk(connection: &Connection, image: ImageUse) -> io::Result<bool> {
    let (partial, mut whole) = (image.partial(), image.whole());
    let bytes = partial.map.bytes;
    let mut wanted = FuturesUnordered::new();
    let mut told = false;
    connection.send(Answer::Open).await?;
    while !told || !wanted.is_empty() {
        tokio::select! {
            message = connection.receive() => {
                let Some(message) = message? else { return Ok(false) };
                match Want::decode(&message) {
                    Some(Want(extent)) if extent.end() <= bytes && wanted.len() < MOST_WANTED => {
                        wanted.push(async move { (extent, partial.want(extent).await) });
                    }
                    _ => return Err(io::ErrorKind::InvalidData.into()),
                }
            }
            Some((extent, found)) = wanted.next() => {
                if found.is_none() && partial.is_closed() {
                    return Ok(false);
                }
                connection.send(answer(extent, found)).await?;
            }
            () = become_true(&mut whole), if !told => {
                told = true;
                connection.send(Answer::Whole).await?;
            }
        }
    }
    Ok(true)
}

async fn become_true(value: &mut watch::Receiver<bool>) {
    // The sender lives as long as the image, which the connection uses.
    let _ = value.wait_for(|value| *value).await;
}

fn answer(wanted: Extent, found: Option<Extent>) -> Answer<'static> {
    match found {
        Some(found) => Answer::Have(found),
        None => Answer::Failed(wanted),
    }
}

/// A connection of packets.
struct Connection {
    /// The socket, until the drop takes it out. The type is one of datagrams, which packets with
    /// their borders are to its functions, too.
    socket: Option<UnixDatagram>,
    bin: Bin,
}

impl Connection {
    /// Takes an accepted connection.
    ///
    /// # Errors
    /// The peer is another user's.
    fn new(stream: UnixStream) -> io::Result<Self> {
        let socket = OwnedFd::from(stream.into_std()?);
        if Peer::of(&socket)?.uid != rustix::process::geteuid().as_raw() {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let socket = UnixDatagram::from_std(StdDatagram::from(socket))?;
        Ok(Self { socket: Some(socket), bin: Bin::new() })
    }

    fn socket(&self) -> io::Result<&UnixDatagram> {
        self.socket.as_ref().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Waits for a packet. Returns `None` if the peer has hung up, or sent an empty packet.
    async fn receive(&self) -> io::Result<Option<Vec<u8>>> {
        let socket = self.socket()?;
        // A longer packet than any is cut off, and is of no form then.
        let mut buffer = [0; MOST + 1];
        let received = socket.async_io(Interest::READABLE, || {
            let part = &mut [IoSliceMut::new(&mut buffer)];
            Ok(slipway_peer::receive(socket, part, &self.bin, RecvFlags::DONTWAIT)?.bytes)
        });
        let bytes = received.await?;
        Ok((bytes > 0).then(|| buffer[..bytes].to_vec()))
    }

    async fn send(&self, answer: Answer<'_>) -> io::Result<()> {
        let (socket, message) = (self.socket()?, answer.encode());
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let sent =
            socket.async_io(Interest::WRITABLE, || Ok(rustix::net::send(socket, &message, flags)?));
        sent.await.map(drop)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // Unread messages are closed with the connection.
        if let Some(Ok(socket)) = self.socket.take().map(UnixDatagram::into_std) {
            self.bin.discard(OwnedFd::from(socket));
        }
    }
}
