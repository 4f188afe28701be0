//! The fetcher's process: connections of disks, and the images that they use.
//!
//! A connection is a task of its own, which sleeps on its peer alone. A peer can have
//! [`MOST_WANTED`] ranges unanswered, and one answer that it does not receive.

use std::collections::HashMap;
use std::io::{self, IoSliceMut};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram as StdDatagram;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use rustix::net::{RecvFlags, SendFlags, SocketType};
use slipway_lazy_spec::{Answer, Extent, Hello, MOST, MOST_WANTED, Want};
use slipway_lock::Lock;
use slipway_peer::{Bin, Peer};
use tokio::io::Interest;
use tokio::net::{UnixDatagram, UnixListener, UnixStream};
use tokio::sync::{Mutex, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;

use super::budget::Budget;
use super::fetch::{Partial, Settings, have_dir};
use super::fill::{Filling, Use};
use super::stamp::Stamp;
use crate::source::blocking;
use crate::{Access, Cache, Digest, Error, Image, Reference, Result, Silent};

/// The time without connections and without anything to fetch after which a fetcher ends.
const IDLE: Duration = Duration::from_secs(60);
/// The longest wait for a fetcher that is about to end.
const TAKEOVER: Duration = Duration::from_secs(10);
/// The pause between two looks at such a fetcher, and after accept(2) has failed.
const PAUSE: Duration = Duration::from_millis(20);
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
    let fetcher = Arc::new(Fetcher::new(cache, have_dir, Box::new(access)));
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
                        connections.spawn(attend(Arc::clone(fetcher), stream));
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

type GetAccess = Box<dyn Fn(&Reference) -> Access + Send + Sync>;

/// The images that are being fetched, by digest.
struct Fetcher {
    cache: Cache,
    have_dir: PathBuf,
    access: GetAccess,
    budget: Arc<Budget>,
    /// The number of images that are being fetched.
    busy: Arc<watch::Sender<usize>>,
    images: Mutex<HashMap<Digest, Fetched>>,
}

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
enum Opened {
    /// Parts of it are missing.
    Lazy(Use),
    Whole,
}

impl Fetcher {
    fn new(cache: Cache, have_dir: PathBuf, access: GetAccess) -> Self {
        Self {
            cache,
            have_dir,
            access,
            budget: Budget::new(),
            busy: Arc::new(watch::Sender::new(0)),
            images: Mutex::new(HashMap::new()),
        }
    }

    /// Opens the image of a disk that reads the file with this device and inode, and begins to
    /// fetch it.
    async fn open(self: &Arc<Self>, digest: Digest, file: (u64, u64)) -> Result<Opened> {
        let mut images = self.images.lock().await;
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
        if let Some(fetched) = images.get(&digest) {
            let filling = Arc::clone(&fetched.filling);
            let is_of = filling.partial.stamp.is_of(file) && !fetched.task.is_finished();
            if is_of && blocking(move || filling.is_same()).await? {
                return Ok(Opened::Lazy(fetched.filling.connect()));
            }
        }
        // The image was removed and pulled again, or its task has ended.
        images.remove(&digest);
        let fetcher = Arc::clone(self);
        let partial = blocking(move || {
            let settings = Settings {
                have_dir: Some(&fetcher.have_dir),
                access: &*fetcher.access,
                budget: Arc::clone(&fetcher.budget),
                progress: Arc::new(Silent),
            };
            Partial::open(&fetcher.cache, &image, settings)
        });
        let partial = partial.await?;
        // It may have been pulled again since the look at its file.
        if !partial.stamp.is_of(file) {
            return Err(Error::Unknown(digest.to_string()));
        }
        let filling = Filling::new(partial);
        let task = tokio::spawn(Arc::clone(&filling).fill(Arc::clone(&self.busy)));
        let one = filling.connect();
        images.insert(digest, Fetched { filling, task });
        Ok(Opened::Lazy(one))
    }

    /// Forgets images that are whole. Connections that use them still have them.
    async fn forget(&self) {
        self.images.lock().await.retain(|_, fetched| !fetched.task.is_finished());
    }
}

/// Makes the error of a disk that reads another file than the image has in this cache.
fn another_file(image: &Image) -> Error {
    let reason = "a disk reads another file, of another data directory or an earlier pull: \
        start its container again";
    Error::bad_document(image.erofs_path.display(), reason)
}

/// Serves one connection. An error ends this connection only.
async fn attend(fetcher: Arc<Fetcher>, stream: UnixStream) {
    let Ok(connection) = Connection::new(stream) else { return };
    // A connection without a greeting keeps the fetcher there.
    let Ok(Some(message)) = connection.receive().await else { return };
    let Some(hello) = Hello::decode(&message) else { return };
    let _ = match fetcher.open(hello.digest.into(), (hello.device, hello.inode)).await {
        Ok(Opened::Lazy(image)) => serve_disk(&connection, &image).await,
        Ok(Opened::Whole) => tell_whole(&connection).await,
        Err(error) => {
            tracing::error!(%error, "a disk of an image is refused");
            connection.send(Answer::Refused(error.to_string().as_bytes())).await
        }
    };
    fetcher.forget().await;
}

/// Tells a disk that its image is whole, and waits until it hangs up.
async fn tell_whole(connection: &Connection) -> io::Result<()> {
    connection.send(Answer::Whole).await?;
    while connection.receive().await?.is_some() {}
    Ok(())
}

/// Answers a disk until it hangs up, or nothing is fetched for it any more: it connects again then,
/// and the image is looked for again.
async fn serve_disk(connection: &Connection, image: &Use) -> io::Result<()> {
    let (partial, mut whole) = (image.partial(), image.whole());
    let bytes = partial.map.bytes;
    let mut wanted = FuturesUnordered::new();
    let mut told = false;
    connection.send(Answer::Open).await?;
    loop {
        tokio::select! {
            message = connection.receive() => {
                let Some(message) = message? else { return Ok(()) };
                match Want::decode(&message) {
                    Some(Want(extent)) if extent.end() <= bytes && wanted.len() < MOST_WANTED => {
                        wanted.push(async move { (extent, partial.want(extent).await) });
                    }
                    _ => return Err(io::ErrorKind::InvalidData.into()),
                }
            }
            Some((extent, found)) = wanted.next() => {
                if found.is_none() && partial.is_closed() {
                    return Ok(());
                }
                connection.send(answer(extent, found)).await?;
            }
            () = become_true(&mut whole), if !told => {
                told = true;
                connection.send(Answer::Whole).await?;
            }
        }
    }
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
