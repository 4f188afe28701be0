//! The socket between the agent and one `container-init`: reports in one direction, "go" in the
//! other.
//!
//! A sequenced-packet socket keeps message boundaries. Its end in the container closes on execute,
//! so the end of the stream tells the agent that the program runs.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use anyhow::{Context, Result};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, recvmsg, sendmsg,
};

/// The longest report; a longer message is cut.
const MAX_REPORT: usize = 4096;
const GO: &[u8] = b"go";

/// A report of `container-init` to the agent.
#[derive(Debug)]
pub enum Report {
    /// The outer stage reports the inner stage's process id. This may arrive after the inner
    /// stage's reports.
    Pid(i32),
    /// Setup is complete, and the program runs when the agent says so. Carries the terminal's
    /// master side.
    Ready(Option<OwnedFd>),
    /// No program will run. `exit_status` is 126 or 127 if the program is the reason, otherwise 0.
    Failed {
        /// The exit status for `Wait`.
        exit_status: u32,
        /// The message for the user.
        message: String,
    },
}

/// The channel's end in `container-init`.
pub struct Channel(OwnedFd);

impl Channel {
    /// Uses one end of a sequenced-packet socket pair.
    pub fn new(fd: OwnedFd) -> Self {
        Channel(fd)
    }

    /// Sends a report without a descriptor.
    pub fn report(&self, report: &Report) -> Result<()> {
        let bytes = match report {
            Report::Pid(pid) => [b"P".as_slice(), &pid.to_le_bytes()].concat(),
            Report::Ready(_) => b"R".to_vec(),
            Report::Failed { exit_status, message } => {
                let message = &message.as_bytes()[..message.len().min(MAX_REPORT - 5)];
                [b"F".as_slice(), &exit_status.to_le_bytes(), message].concat()
            }
        };
        rustix::net::send(&self.0, &bytes, SendFlags::NOSIGNAL)
            .context("reporting to the agent")?;
        Ok(())
    }

    /// Reports [`Report::Ready`] and sends the terminal's master side.
    pub fn ready(&self, master: Option<OwnedFd>) -> Result<()> {
        let Some(master) = master else { return self.report(&Report::Ready(None)) };
        let fds = [master.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&fds));
        sendmsg(&self.0, &[IoSlice::new(b"R")], &mut control, SendFlags::NOSIGNAL)
            .context("handing over the terminal")?;
        Ok(())
    }

    /// Ends the channel in a process that runs no program.
    pub fn leave(&self) -> Result<()> {
        rustix::net::shutdown(&self.0, Shutdown::Both).context("leaving the agent")
    }

    /// Waits for the agent. Returns `false` if the agent closed its end instead.
    pub fn wait_for_go(&self) -> Result<bool> {
        let mut buffer = [0u8; 8];
        loop {
            #[allow(
                clippy::disallowed_methods,
                reason = "the agent, which started this process, is at the other end"
            )]
            let received = rustix::net::recv(&self.0, &mut buffer, RecvFlags::empty());
            match received {
                Ok((length, _)) => return Ok(&buffer[..length.min(8)] == GO),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error).context("waiting for the agent"),
            }
        }
    }
}

/// Lets the program run. Called by the agent.
pub fn go(socket: impl AsFd) -> io::Result<()> {
    rustix::net::send(socket, GO, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
    Ok(())
}

/// Receives one report without waiting. Called by the agent. Returns `None` at the end of the
/// stream.
///
/// # Errors
/// `WouldBlock` if there is no report yet; `InvalidData` if the message is malformed.
pub fn receive(socket: impl AsFd) -> io::Result<Option<Report>> {
    let mut buffer = [0u8; MAX_REPORT];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    #[allow(
        clippy::disallowed_methods,
        reason = "the other end is this program's, until it has become the container's and holds \
            it no more"
    )]
    let length = recvmsg(socket, &mut [IoSliceMut::new(&mut buffer)], &mut control, flags)?.bytes;
    let master = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    parse(&buffer[..length], master)
}

fn parse(bytes: &[u8], master: Option<OwnedFd>) -> io::Result<Option<Report>> {
    let invalid = || io::Error::new(io::ErrorKind::InvalidData, "malformed report");
    let Some((kind, rest)) = bytes.split_first() else { return Ok(None) };
    let report = match kind {
        b'P' => Report::Pid(i32::from_le_bytes(rest.try_into().map_err(|_| invalid())?)),
        b'R' => Report::Ready(master),
        b'F' => {
            let (status, message) = rest.split_first_chunk().ok_or_else(invalid)?;
            Report::Failed {
                exit_status: u32::from_le_bytes(*status),
                message: String::from_utf8_lossy(message).into_owned(),
            }
        }
        _ => return Err(invalid()),
    };
    Ok(Some(report))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    fn pair() -> (OwnedFd, Channel) {
        let (a, b) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        (a, Channel::new(b))
    }

    #[test]
    fn reports_keep_their_order_and_borders() {
        let (agent, child) = pair();
        child.report(&Report::Pid(77)).unwrap();
        child.report(&Report::Failed { exit_status: 127, message: "no".into() }).unwrap();
        drop(child);
        assert!(matches!(receive(&agent).unwrap(), Some(Report::Pid(77))));
        let Some(Report::Failed { exit_status: 127, message }) = receive(&agent).unwrap() else {
            panic!("not the failure");
        };
        assert_eq!(message, "no");
        assert!(receive(&agent).unwrap().is_none());
    }

    #[test]
    fn a_descriptor_travels_with_ready() {
        let (agent, child) = pair();
        let (read, write) = rustix::pipe::pipe().unwrap();
        child.ready(Some(write)).unwrap();
        let Some(Report::Ready(Some(write))) = receive(&agent).unwrap() else {
            panic!("no descriptor");
        };
        rustix::io::write(&write, b"x").unwrap();
        let mut buffer = [0; 1];
        assert_eq!(rustix::io::read(&read, &mut buffer).unwrap(), 1);
    }

    #[test]
    fn a_long_message_is_cut_and_an_empty_channel_would_block() {
        let (agent, child) = pair();
        assert_eq!(receive(&agent).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        child.report(&Report::Failed { exit_status: 0, message: "é".repeat(9000) }).unwrap();
        assert!(matches!(receive(&agent).unwrap(), Some(Report::Failed { .. })));
    }

    #[test]
    fn malformed_reports_are_errors() {
        assert!(parse(b"P12", None).is_err());
        assert!(parse(b"F1", None).is_err());
        assert!(parse(b"?", None).is_err());
    }

    #[test]
    fn go_and_giving_up_differ() {
        let (agent, child) = pair();
        go(&agent).unwrap();
        assert!(child.wait_for_go().unwrap());
        drop(agent);
        assert!(!child.wait_for_go().unwrap());
    }
}
