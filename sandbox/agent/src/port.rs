//! The virtio-serial port as a sequence of connections.
//!
//! A port is a character device, not a socket. It has no accept, a host's coming and going shows
//! only as POLLHUP appearing and vanishing, and the bytes of two hosts follow each other without a
//! boundary. So a connection begins with HTTP/2's client preface (RFC 9113, section 3.4):
//!
//! - Bytes before the preface are left from the previous connection, and are dropped.
//! - A preface at the start of a read in mid-connection means that the host left and came back
//!   before this side noticed. The old connection ends there, and the new one begins with the
//!   preface. A machine that was saved in mid-connection goes on like this.
//! - Nothing of the old connection is sent from then on, since it would be the first that the new
//!   host reads. So a writer looks for a preface before it writes.
//! - A preface is never torn. A message from the host starts a buffer of its own; for a reader with
//!   less room than a preface, a page is read.
//! - Standard input that looks like a preface at a buffer's start costs a reconnect, nothing more.
//!
//! POLLHUP is level-triggered and final for the runtime's registrations, so registering the port
//! itself and waiting for POLLHUP to vanish would spin. Instead, the port is registered,
//! edge-triggered, with an epoll instance of its own, and that instance with the runtime.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use anyhow::{Context as _, Result};
use rustix::event::{PollFd, PollFlags, epoll, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::Connected;

use crate::lock::lock;
use crate::uevent;

/// The client preface of HTTP/2 (RFC 9113, section 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// The longest wait for the port to appear. It is long, since the host decides when to give up a
/// slow guest (`boot_timeout_s`).
const PATIENCE: Duration = Duration::from_secs(3600);

/// The most bytes that a writer, which looks for a preface, reads ahead of the reader.
const MOST_AHEAD: usize = 64 << 10;

/// The size of reads for which the reader's own buffer is too small; the driver's buffers are
/// pages.
const PAGE: usize = 4096;

/// The open port.
pub struct Port {
    device: OwnedFd,
    events: AsyncFd<OwnedFd>,
    /// The wakers of the reader and the writer. One of them takes an event, which concerns both.
    wakers: Mutex<[Option<Waker>; 2]>,
    /// The beginning of the next connection, read by the last one.
    ahead: Mutex<Vec<u8>>,
}

#[derive(Clone, Copy)]
enum Side {
    Reader,
    Writer,
}

impl Port {
    /// Waits for the port of this name and opens it.
    pub async fn open(sysfs: &Path, name: &str) -> Result<Port> {
        let class = sysfs.join("class/virtio-ports");
        let found = uevent::wait_for(PATIENCE, || {
            let Some(node) = find(&class, name) else { return Ok(None) };
            let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
            match rustix::fs::open(Path::new("/dev").join(node), flags, Mode::empty()) {
                Ok(device) => Ok(Some(device)),
                // The device node appears after the sysfs entry.
                Err(Errno::NOENT | Errno::NXIO) => Ok(None),
                Err(error) => Err(error),
            }
        });
        let device = found.await.context("opening the port")?;
        let device = device.with_context(|| format!("there is no virtio-serial port {name}"))?;
        Ok(Port::new(device)?)
    }

    fn new(device: OwnedFd) -> io::Result<Port> {
        let events = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET;
        epoll::add(&events, &device, epoll::EventData::new_u64(0), flags)?;
        Ok(Port {
            device,
            events: crate::file::register(events, Interest::READABLE)?,
            wakers: Mutex::default(),
            ahead: Mutex::default(),
        })
    }

    /// Returns the connections of this port, each after the previous one has ended.
    pub fn connections(self) -> ReceiverStream<io::Result<Connection>> {
        let (sender, receiver) = mpsc::channel(1);
        let port = Arc::new(self);
        tokio::spawn(async move {
            loop {
                if let Err(error) = port.connected().await {
                    let _ = sender.send(Err(error)).await;
                    return;
                }
                let (alive, ended) = oneshot::channel::<()>();
                let head = std::mem::take(&mut *lock(&port.ahead));
                let port = port.clone();
                let connection = Connection { port, head, synchronised: false, _alive: alive };
                if sender.send(Ok(connection)).await.is_err() {
                    return;
                }
                let _ = ended.await;
            }
        });
        ReceiverStream::new(receiver)
    }

    /// Waits until a host is connected.
    async fn connected(&self) -> io::Result<()> {
        while !self.host_is_there()? {
            std::future::poll_fn(|context| self.poll_event(context, Side::Reader)).await?;
        }
        Ok(())
    }

    fn host_is_there(&self) -> io::Result<bool> {
        let mut fds = [PollFd::new(&self.device, PollFlags::OUT)];
        let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::io::retry_on_intr(|| poll(&mut fds, Some(&now)))?;
        Ok(!fds[0].revents().contains(PollFlags::HUP))
    }

    /// Returns `Ready` after something has happened to the port since the last call.
    fn poll_event(&self, context: &mut Context<'_>, side: Side) -> Poll<io::Result<()>> {
        lock(&self.wakers)[side as usize] = Some(context.waker().clone());
        let mut guard = ready!(self.events.poll_read_ready(context))?;
        let mut events = [const { std::mem::MaybeUninit::uninit() }; 1];
        let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        let _ = epoll::wait(self.events.get_ref(), &mut events[..], Some(&now));
        guard.clear_ready();
        // The caller goes on by itself.
        let [reader, writer] = std::mem::take(&mut *lock(&self.wakers));
        let other = match side {
            Side::Reader => writer,
            Side::Writer => reader,
        };
        other.into_iter().for_each(Waker::wake);
        Poll::Ready(Ok(()))
    }

    /// Reads what is there. Returns 0 if the host is gone, and `None` if nothing is there.
    fn read_now(&self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        match rustix::io::retry_on_intr(|| rustix::io::read(&self.device, &mut *buffer)) {
            Err(Errno::AGAIN) => Ok(None),
            read => Ok(Some(read?)),
        }
    }

    /// Reads from the port. Returns 0 if the host is gone.
    fn poll_read(&self, context: &mut Context<'_>, buffer: &mut [u8]) -> Poll<io::Result<usize>> {
        loop {
            match self.read_now(buffer)? {
                Some(length) => return Poll::Ready(Ok(length)),
                None => ready!(self.poll_event(context, Side::Reader))?,
            }
        }
    }

    /// Returns whether the next connection has begun: its first bytes were read.
    fn has_next(&self) -> bool {
        !lock(&self.ahead).is_empty()
    }

    /// Has the reader look at the port again.
    fn wake_reader(&self) {
        let waker = lock(&self.wakers)[Side::Reader as usize].take();
        waker.into_iter().for_each(Waker::wake);
    }

    /// Keeps `bytes`, the result of one read, for the next connection and returns `true` if they
    /// begin with a preface.
    fn keeps_for_next(&self, bytes: &[u8]) -> bool {
        let begins = bytes.starts_with(PREFACE);
        if begins {
            *lock(&self.ahead) = bytes.to_vec();
        }
        begins
    }

    /// Writes what there is room for. Returns `None` if there is no room.
    fn write_now(&self, bytes: &[u8]) -> io::Result<Option<usize>> {
        match rustix::io::retry_on_intr(|| rustix::io::write(&self.device, bytes)) {
            // A full queue and an absent host look the same.
            Err(Errno::AGAIN) if !self.host_is_there()? => Err(io::ErrorKind::BrokenPipe.into()),
            Err(Errno::AGAIN) => Ok(None),
            written => Ok(Some(written?)),
        }
    }
}

/// Returns the name of the device node of the port called `name`. Returns `None` if there is no
/// such port.
fn find(class: &Path, name: &str) -> Option<std::ffi::OsString> {
    let entries = std::fs::read_dir(class).ok()?;
    entries.filter_map(Result::ok).find_map(|entry| {
        let text = std::fs::read_to_string(entry.path().join("name")).ok()?;
        (text.trim_end() == name).then(|| entry.file_name())
    })
}

/// The connection of one host.
pub struct Connection {
    port: Arc<Port>,
    /// Bytes that were read, but not returned to the reader yet.
    head: Vec<u8>,
    /// Set once the preface was seen.
    synchronised: bool,
    /// Dropped with the connection, after which [`Port::connections`] waits for the next one.
    _alive: oneshot::Sender<()>,
}

impl Connected for Connection {
    type ConnectInfo = ();
    fn connect_info(&self) {}
}

impl Connection {
    /// Drops bytes until the preface is at the front of `head`. Returns `false` if the host is
    /// gone.
    fn poll_synchronise(&mut self, context: &mut Context<'_>) -> Poll<io::Result<bool>> {
        loop {
            if discard_to_preface(&mut self.head) {
                self.synchronised = true;
                return Poll::Ready(Ok(true));
            }
            let mut page = [0; PAGE];
            match ready!(self.port.poll_read(context, &mut page))? {
                0 => return Poll::Ready(Ok(false)),
                length => self.head.extend_from_slice(&page[..length]),
            }
        }
    }

    /// Reads into a buffer with too little room for a preface: the rest of the read waits in
    /// `head`.
    fn poll_read_little(
        &mut self,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut page = [0; PAGE];
        let length = ready!(self.port.poll_read(context, &mut page))?;
        if !self.port.keeps_for_next(&page[..length]) {
            self.head.extend_from_slice(&page[..length]);
            self.return_head(buffer);
        }
        Poll::Ready(Ok(()))
    }

    /// Returns whether another host has taken this one's place. Reads ahead for that: what is no
    /// preface waits for the reader.
    fn is_replaced(&mut self) -> io::Result<bool> {
        let waited = self.head.len();
        while self.synchronised && !self.port.has_next() && self.head.len() < MOST_AHEAD {
            let mut page = [0; PAGE];
            // The reader notices itself that the host is gone.
            let Some(length @ 1..) = self.port.read_now(&mut page)? else { break };
            if self.port.keeps_for_next(&page[..length]) {
                self.head.clear();
            } else {
                self.head.extend_from_slice(&page[..length]);
            }
        }
        if self.port.has_next() || self.head.len() > waited {
            self.port.wake_reader();
        }
        Ok(self.port.has_next())
    }

    /// Moves bytes of `head` to the reader, as many as there is room for.
    fn return_head(&mut self, buffer: &mut ReadBuf<'_>) {
        let length = self.head.len().min(buffer.remaining());
        buffer.put_slice(&self.head[..length]);
        self.head.drain(..length);
    }
}

/// Drops bytes before the preface. Returns whether `bytes` begin with the preface now; otherwise
/// only a possible beginning of it is left.
fn discard_to_preface(bytes: &mut Vec<u8>) -> bool {
    let found = bytes.windows(PREFACE.len()).position(|window| window == PREFACE);
    let keep_from = found.unwrap_or(bytes.len().saturating_sub(PREFACE.len() - 1));
    bytes.drain(..keep_from);
    found.is_some()
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.synchronised && !ready!(self.poll_synchronise(context))? {
            return Poll::Ready(Ok(()));
        }
        if !self.head.is_empty() {
            self.return_head(buffer);
            return Poll::Ready(Ok(()));
        }
        if self.port.has_next() {
            return Poll::Ready(Ok(()));
        }
        if buffer.remaining() < PREFACE.len() {
            return self.poll_read_little(context, buffer);
        }
        let length = ready!(self.port.poll_read(context, buffer.initialize_unfilled()))?;
        if !self.port.keeps_for_next(&buffer.initialize_unfilled()[..length]) {
            buffer.advance(length);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        loop {
            if self.is_replaced()? {
                return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
            }
            if let Some(length) = self.port.write_now(bytes)? {
                return Poll::Ready(Ok(length));
            }
            ready!(self.port.poll_event(context, Side::Writer))?;
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio_stream::StreamExt;

    #[test]
    fn what_precedes_the_preface_is_dropped() {
        let mut bytes = [b"stale ".as_slice(), PREFACE, b"after"].concat();
        assert!(discard_to_preface(&mut bytes));
        assert_eq!(bytes, [PREFACE, b"after"].concat());
        let mut bytes = [b"stale".repeat(100).as_slice(), &PREFACE[..23]].concat();
        assert!(!discard_to_preface(&mut bytes));
        assert_eq!(bytes, &PREFACE[..23]);
        bytes.push(b'\n');
        assert!(discard_to_preface(&mut bytes));
    }

    /// Makes a pair of packet sockets, which keep the boundaries of writes, as the port does.
    fn pair() -> (OwnedFd, OwnedFd) {
        use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
        let flags = SocketFlags::NONBLOCK;
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
    }

    /// Reads the preface and three more bytes.
    async fn begun(connection: &mut Connection) -> Vec<u8> {
        let mut all = vec![0; PREFACE.len() + 3];
        connection.read_exact(&mut all).await.unwrap();
        all
    }

    #[tokio::test]
    async fn a_preface_in_mid_connection_begins_the_next() {
        let (host, device) = pair();
        let mut connections = Port::new(device).unwrap().connections();
        let mut first = connections.next().await.unwrap().unwrap();
        for message in [b"stale".as_slice(), PREFACE, b"one", PREFACE, b"two"] {
            rustix::io::write(&host, message).unwrap();
        }
        let mut all = Vec::new();
        first.read_to_end(&mut all).await.unwrap();
        assert_eq!(all, [PREFACE, b"one"].concat());
        drop(first);
        let mut second = connections.next().await.unwrap().unwrap();
        assert_eq!(begun(&mut second).await, [PREFACE, b"two"].concat());
        second.write_all(b"reply").await.unwrap();
        let mut reply = [0; 5];
        rustix::io::read(&host, &mut reply).unwrap();
        assert_eq!(&reply, b"reply");
    }

    /// The writer of a machine that was saved goes on before its reader looks at the port.
    #[tokio::test]
    async fn the_next_host_gets_nothing_of_the_last_connection() {
        let (host, device) = pair();
        let mut connections = Port::new(device).unwrap().connections();
        let mut first = connections.next().await.unwrap().unwrap();
        for message in [b"the rest of a message".as_slice(), PREFACE, b"one"] {
            rustix::io::write(&host, message).unwrap();
        }
        let mut preface = vec![0; PREFACE.len()];
        first.read_exact(&mut preface).await.unwrap();
        // A message that the writer finds is the reader's.
        first.write_all(b"reply").await.unwrap();
        let mut read = [0; 64];
        assert_eq!(rustix::io::read(&host, &mut read).unwrap(), 5);
        rustix::io::write(&host, &[PREFACE, b"two"].concat()).unwrap();
        let mut message = [0; 3];
        first.read_exact(&mut message).await.unwrap();
        assert_eq!(&message, b"one");
        for _ in 0..2 {
            let error = first.write_all(b"frame").await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
        }
        assert_eq!(rustix::io::read(&host, &mut read), Err(Errno::AGAIN), "nothing was sent");
        assert_eq!(first.read(&mut read).await.unwrap(), 0);
        drop(first);
        let mut second = connections.next().await.unwrap().unwrap();
        assert_eq!(begun(&mut second).await, [PREFACE, b"two"].concat());
    }

    /// A writer that waits for room does not keep its connection when another host has come.
    #[tokio::test]
    async fn a_writer_that_waits_ends_with_its_connection() {
        let (host, device) = pair();
        let mut connections = Port::new(device).unwrap().connections();
        let mut first = connections.next().await.unwrap().unwrap();
        rustix::io::write(&host, PREFACE).unwrap();
        first.read_exact(&mut vec![0; PREFACE.len()]).await.unwrap();
        // The other future has filled the socket by then, and waits.
        let next = async { rustix::io::write(&host, PREFACE).unwrap() };
        let fill = async {
            loop {
                if let Err(error) = first.write_all(&[0; 4096]).await {
                    return error.kind();
                }
            }
        };
        let (kind, _) = tokio::join!(biased; fill, next);
        assert_eq!(kind, io::ErrorKind::BrokenPipe);
        drop(first);
        assert!(connections.next().await.is_some());
    }

    #[tokio::test]
    async fn a_reader_with_little_room_does_not_miss_a_preface() {
        let (host, device) = pair();
        let mut connections = Port::new(device).unwrap().connections();
        let mut first = connections.next().await.unwrap().unwrap();
        for message in [PREFACE, b"a longer message", PREFACE, b"two"] {
            rustix::io::write(&host, message).unwrap();
        }
        let (mut all, mut piece) = (Vec::new(), [0; 5]);
        loop {
            let length = first.read(&mut piece).await.unwrap();
            if length == 0 {
                break;
            }
            all.extend_from_slice(&piece[..length]);
        }
        assert_eq!(all, [PREFACE, b"a longer message"].concat());
        drop(first);
        let mut second = connections.next().await.unwrap().unwrap();
        assert_eq!(begun(&mut second).await, [PREFACE, b"two"].concat());
    }

    #[tokio::test]
    async fn the_next_connection_waits_for_the_end_of_the_last() {
        let (_host, device) = pair();
        let mut connections = Port::new(device).unwrap().connections();
        let first = connections.next().await.unwrap().unwrap();
        let next = connections.next();
        tokio::pin!(next);
        std::future::poll_fn(|context| {
            assert!(next.as_mut().poll(context).is_pending());
            Poll::Ready(())
        })
        .await;
        drop(first);
        assert!(next.await.is_some());
    }
}
