//! Listeners.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::io::ReadWriteFlags;
use slipway_socket::{Errno, Listening};
use tokio::io::unix::AsyncFd;
use tokio::net::{TcpListener, ToSocketAddrs};
use tokio::sync::Mutex;
use tokio::task::{JoinHandle, spawn_blocking};

use crate::device::{Device, Owned};
use crate::engine::{Engine, Session};
use crate::stream::Transport;
use crate::{SocketStream, address, readable, socket_address};

/// Connections that may wait in the engine's queue; tokio's listeners have as many in the kernel's.
const BACKLOG: u32 = 1024;

/// A listener with the kernel's queue and the engine's: see the crate's head.
#[derive(Debug)]
pub struct SocketListener {
    kernel: TcpListener,
    queue: Option<Queue>,
}

type Accepted = Result<(Owned, OwnedFd), Errno>;

/// The engine's queue of connections.
struct Queue {
    session: Arc<Session>,
    number: u64,
    /// Eventfd that counts waiting connections.
    eventfd: AsyncFd<OwnedFd>,
    /// A request in flight, kept even if the `accept` that made it was dropped.
    asked: Mutex<Option<JoinHandle<Accepted>>>,
}

impl Engine {
    /// Listens at the address. The kernel must accept it; [`SocketListener::is_device`] tells
    /// whether the engine did.
    ///
    /// # Errors
    /// The errors of bind(2) and listen(2).
    pub async fn bind(&self, at: impl ToSocketAddrs) -> io::Result<SocketListener> {
        let kernel = TcpListener::bind(at).await?;
        let (engine, proof, at) =
            (self.clone(), kernel.as_fd().try_clone_to_owned()?, kernel.local_addr()?);
        let v6_only = at.is_ipv6() && rustix::net::sockopt::ipv6_v6only(&proof)?;
        let ask = move || {
            let session = engine.session()?;
            let proof = Some(proof.as_fd());
            let there = session.family.listen(address(at), BACKLOG, false, v6_only, proof).ok()?;
            Some((session, there))
        };
        let asked = spawn_blocking(ask).await.map_err(io::Error::other)?;
        let queue = asked.map(|(session, there)| Queue::new(session, there)).transpose()?;
        Ok(SocketListener { kernel, queue })
    }
}

impl SocketListener {
    /// Listens as [`Engine::bind`] of the shared engine does.
    ///
    /// # Errors
    /// The errors of [`Engine::bind`].
    pub async fn bind(at: impl ToSocketAddrs) -> io::Result<Self> {
        Engine::shared().bind(at).await
    }

    /// Returns whether the engine knows the listener, and not the kernel alone.
    pub fn is_device(&self) -> bool {
        self.queue.as_ref().is_some_and(|queue| !queue.session.family.is_dead())
    }

    /// Returns the address that it listens at.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.kernel.local_addr()
    }

    /// Accepts the next connection of the engine's queue or the kernel's, and returns it with the
    /// peer's address.
    ///
    /// # Errors
    /// The errors of accept(2).
    pub async fn accept(&self) -> io::Result<(SocketStream, SocketAddr)> {
        let by_kernel = async {
            let (stream, from) = self.kernel.accept().await?;
            Ok((SocketStream(Transport::Kernel(stream)), from))
        };
        let Some(queue) = &self.queue else { return by_kernel.await };
        tokio::select! {
            accepted = queue.accept() => accepted,
            accepted = by_kernel => accepted,
        }
    }
}

impl Queue {
    fn new(session: Arc<Session>, there: Listening) -> io::Result<Self> {
        let eventfd = readable(there.eventfd)?;
        let asked = Mutex::default();
        Ok(Self { session, number: there.listener, eventfd, asked })
    }

    async fn accept(&self) -> io::Result<(SocketStream, SocketAddr)> {
        let mut asked = self.asked.lock().await;
        loop {
            let request = match &mut *asked {
                Some(request) => request,
                none => {
                    self.wait().await?;
                    let (session, number) = (self.session.clone(), self.number);
                    let ask = move || Ok(Owned::new(session.family.accept(number)?, &session));
                    none.insert(spawn_blocking(ask))
                }
            };
            let accepted = request.await;
            *asked = None;
            match accepted.map_err(io::Error::other)? {
                Ok(opened) => {
                    let device = Device::new(opened)?;
                    let from = socket_address(device.endpoint().remote());
                    return Ok((SocketStream(Transport::Device(device.into())), from));
                }
                Err(errno @ (Errno::MFILE | Errno::NFILE | Errno::NOBUFS)) => {
                    return Err(errno.into());
                }
                // The client has gone again, or the engine has: then only the kernel's queue is
                // left.
                Err(_) if self.session.family.is_dead() => std::future::pending().await,
                Err(_) => {}
            }
        }
    }

    /// Waits until the eventfd counts a connection, and takes one.
    async fn wait(&self) -> io::Result<()> {
        loop {
            let mut raised = self.eventfd.readable().await?;
            let mut count = [0; 8];
            let into = &mut [io::IoSliceMut::new(&mut count)];
            let current = u64::MAX;
            match rustix::io::preadv2(&self.eventfd, into, current, ReadWriteFlags::NOWAIT) {
                Ok(_) => return self.leave(u64::from_ne_bytes(count).saturating_sub(1)),
                Err(Errno::AGAIN) => raised.clear_ready(),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Writes a count back: an eventfd that is no semaphore returned its whole count, of which one
    /// was needed.
    fn leave(&self, rest: u64) -> io::Result<()> {
        if rest > 0 {
            rustix::io::write(&self.eventfd, &rest.to_ne_bytes())?;
        }
        Ok(())
    }
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue").field("number", &self.number).finish_non_exhaustive()
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.session.family.unlisten(self.number);
    }
}
