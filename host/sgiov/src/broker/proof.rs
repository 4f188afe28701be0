//! The proof that a socket which a program hands over is the kernel's listener at the address that
//! the program names.
//!
//! The kernel's answer may take long: a process that has the socket can hold its lock for as long
//! as it likes, for example in a setsockopt(2) whose argument lies in memory that a FUSE server
//! never provides. So the kernel is asked on the threads of the account's
//! [`Bin`](slipway_peer::Bin), which may be lost, and the engine gets the answer later.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use rustix::event::{EventfdFlags, eventfd};
use slipway_peer::Foreign;
use slipway_sgiov_spec::Address;

use super::listen::ListenRequest;
use super::{Broker, Errno, Outcome};
use crate::peer::Peer;

/// The request of a client that waits for a proof.
pub struct PendingListen {
    number: u64,
    wanted: ListenRequest,
}

/// The result of looking at a socket.
struct ProofResult {
    client: u32,
    number: u64,
    /// The address at which the socket listens, or `None` if it does not.
    at: Option<Address>,
}

/// A value that looks at a socket when it is dropped.
struct SocketProbe {
    client: u32,
    number: u64,
    peer: Peer,
    /// `None` once it is closed.
    socket: Option<Foreign>,
    found: Sender<ProofResult>,
    wake: Arc<OwnedFd>,
}

impl Drop for SocketProbe {
    fn drop(&mut self) {
        let Some(socket) = self.socket.take() else { return };
        let at = crate::peer::listens_at(socket.as_fd(), &self.peer);
        // Closed before the answer, on this thread, which may wait: a program that closes its own
        // socket after that has closed its port.
        drop(socket.into_owned());
        let Self { client, number, .. } = *self;
        if self.found.send(ProofResult { client, number, at }).is_ok() {
            slipway_family::wake(&self.wake);
        }
    }
}

/// Looks in flight.
pub struct Proofs {
    found: Receiver<ProofResult>,
    finds: Sender<ProofResult>,
    wake: Arc<OwnedFd>,
    next: u64,
}

impl Proofs {
    pub fn new() -> std::io::Result<Self> {
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (finds, found) = channel();
        Ok(Self { found, finds, wake, next: 0 })
    }
}

impl Broker {
    /// Returns the descriptor that is readable when [`Broker::proven`] has results.
    pub fn proofs_wake(&self) -> Option<BorrowedFd<'_>> {
        self.proofs.as_ref().map(|proofs| proofs.wake.as_fd())
    }

    /// Has the kernel asked about a client's socket.
    pub(super) fn prove(
        &mut self,
        number: u32,
        wanted: ListenRequest,
        socket: Foreign,
    ) -> Result<Outcome, Errno> {
        let proofs = self.proofs.as_mut().ok_or(Errno::NOBUFS)?;
        let client = self.clients.get_mut(number).ok_or(Errno::INVAL)?;
        if client.proves.is_some() {
            return Ok(Outcome::HangUp("it asks again before it was answered"));
        }
        proofs.next += 1;
        client.proves = Some(PendingListen { number: proofs.next, wanted });
        client.account.bin.discard_value(SocketProbe {
            client: number,
            number: proofs.next,
            peer: client.peer.clone(),
            socket: Some(socket),
            found: proofs.finds.clone(),
            wake: proofs.wake.clone(),
        });
        Ok(Outcome::Nothing)
    }

    /// Returns the outcomes for clients whose sockets were looked at.
    pub fn proven(&mut self) -> Vec<(u32, Outcome)> {
        let Some(proofs) = &self.proofs else { return Vec::new() };
        slipway_peer::eventfd::drain(proofs.wake.as_fd());
        let all: Vec<ProofResult> = proofs.found.try_iter().collect();
        all.into_iter().filter_map(|found| self.prove_one(found)).collect()
    }

    fn prove_one(
        &mut self,
        ProofResult { client: number, number: asked, at }: ProofResult,
    ) -> Option<(u32, Outcome)> {
        let client = self.clients.get_mut(number)?;
        // The client's number may have been reused by now.
        let PendingListen { wanted, .. } =
            client.proves.take_if(|proves| proves.number == asked)?;
        let family = client.family?;
        let outcome = match at {
            Some(at) => self.listen_at(number, family, ListenRequest { at, ..wanted }),
            None => Err(Errno::ACCESS),
        };
        Some((number, outcome.unwrap_or_else(|errno| self.failed(number, errno))))
    }
}
