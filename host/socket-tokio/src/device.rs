//! A socket device whose tasks wait on tokio's reactor.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, OwnedFd};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};

use slipway_socket::{Endpoint, Errno, Half, Opened, Spin};
use tokio::io::unix::AsyncFd;
use tokio::task::coop;

use crate::engine::Session;
use crate::readable;
use crate::waiters::Waiters;

/// Attempts in one poll, before other tasks have their turn.
const LOOKS: u32 = 8;

/// An endpoint that is closed when it is dropped.
pub(crate) struct Owned {
    pub endpoint: Endpoint,
    session: Arc<Session>,
}

impl Owned {
    /// Splits an opened connection into the endpoint and the eventfd to wait on.
    pub fn new(opened: Opened, session: &Arc<Session>) -> (Self, OwnedFd) {
        let Opened { endpoint, eventfd } = opened;
        (Self { endpoint, session: session.clone() }, eventfd)
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        self.endpoint.close();
    }
}

pub(crate) struct Device {
    eventfd: AsyncFd<OwnedFd>,
    owned: Owned,
    waiters: Arc<Waiters>,
    /// Wakes all waiters.
    waker: Waker,
    /// The polling history of each half.
    spin: [Spin; 2],
}

impl Device {
    /// Makes a device. Must be called within a runtime.
    pub fn new((owned, eventfd): (Owned, OwnedFd)) -> io::Result<Self> {
        let eventfd = readable(eventfd)?;
        let waiters = Arc::new(Waiters::default());
        owned.session.enrol(&waiters);
        let waker = waiters.clone().into();
        Ok(Self { eventfd, owned, waiters, waker, spin: Default::default() })
    }

    pub fn endpoint(&self) -> &Endpoint {
        &self.owned.endpoint
    }

    pub fn poll_read(&self, cx: &mut Context<'_>, into: &mut [u8]) -> Poll<io::Result<usize>> {
        self.poll_half(Half::Receiving, cx, || self.endpoint().recv(into))
    }

    pub fn poll_peek(&self, cx: &mut Context<'_>, into: &mut [u8]) -> Poll<io::Result<usize>> {
        self.poll_half(Half::Receiving, cx, || self.endpoint().peek(into))
    }

    pub fn poll_write(&self, cx: &mut Context<'_>, from: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_half(Half::Sending, cx, || self.endpoint().send(from))
    }

    pub fn poll_write_vectored(
        &self,
        cx: &mut Context<'_>,
        from: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_half(Half::Sending, cx, || {
            let mut sent = 0;
            for piece in from.iter().filter(|piece| !piece.is_empty()) {
                match self.endpoint().send(piece) {
                    Ok(count) => {
                        sent += count;
                        if count < piece.len() {
                            break;
                        }
                    }
                    // The bytes before the error were sent; the next call returns the error.
                    Err(errno) if sent > 0 => {
                        self.endpoint().leave_reset(errno);
                        break;
                    }
                    Err(errno) => return Err(errno),
                }
            }
            Ok(sent)
        })
    }

    /// Tries `act` until it succeeds, and waits in between.
    fn poll_half(
        &self,
        half: Half,
        cx: &mut Context<'_>,
        mut act: impl FnMut() -> Result<usize, Errno>,
    ) -> Poll<io::Result<usize>> {
        let budget = ready!(coop::poll_proceed(cx));
        let spin = &self.spin[half as usize];
        for _ in 0..LOOKS {
            match act() {
                Err(Errno::AGAIN) => {}
                done => {
                    spin.found();
                    budget.made_progress();
                    return Poll::Ready(done.map_err(io::Error::from));
                }
            }
            if spin.again() {
                return after_others(cx);
            }
            // Before arming, so that a wake-up finds the waker.
            self.waiters.set(half, cx.waker());
            if self.endpoint().arm(half, 1) || self.endpoint().family().is_dead() {
                continue;
            }
            let waits = &mut Context::from_waker(&self.waker);
            let mut raised = match self.eventfd.poll_read_ready(waits) {
                Poll::Ready(raised) => raised?,
                Poll::Pending => {
                    spin.sleeps();
                    return Poll::Pending;
                }
            };
            // The runtime waits for edges; a shared eventfd must not be drained.
            if !self.endpoint().is_shared() {
                slipway_peer::eventfd::drain(self.eventfd.get_ref().as_fd());
            }
            raised.clear_ready();
        }
        after_others(cx)
    }
}

/// Has the task polled again after the runtime has looked at everything else. In a runtime of
/// several threads, a plain wake would let another thread take the task.
fn after_others<T>(cx: &mut Context<'_>) -> Poll<T> {
    let again = pin!(tokio::task::yield_now());
    match again.poll(cx) {
        Poll::Pending => {}
        Poll::Ready(()) => cx.waker().wake_by_ref(),
    }
    Poll::Pending
}
