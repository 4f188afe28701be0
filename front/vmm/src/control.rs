//! The control socket: reads a client's commands, sends answers and events.

use std::os::fd::OwnedFd;

use slipway_peer::{Foreign, Received};

use crate::qmp::{self, Request};
use crate::stream::{Client, Ended};

/// The longest command in bytes.
const MAX_LINE: usize = 16 << 10;
/// The most bytes of answers and events that wait for a client.
const MAX_UNSENT: usize = 256 << 10;
/// The most descriptors that wait for the command that they belong to.
const MAX_FILES: usize = 4;

/// The socket and its client.
pub struct Control {
    listener: OwnedFd,
    client: Option<Connection>,
}

struct Connection {
    client: Client,
    /// Bytes of a line whose end has not come yet.
    line: Vec<u8>,
    files: Vec<Foreign>,
}

/// A command, and the descriptors that came with it or before it.
pub struct Incoming {
    /// The command.
    pub request: Request,
    /// The descriptors, in the order in which they were sent; the client may have sent any.
    pub files: Vec<Foreign>,
}

impl Control {
    /// Serves the clients of `listener`, one after the other.
    pub fn new(listener: OwnedFd) -> Self {
        Self { listener, client: None }
    }

    /// Returns the listening socket.
    pub fn listener(&self) -> &OwnedFd {
        &self.listener
    }

    /// Returns the client.
    pub fn client(&self) -> Option<&Client> {
        self.client.as_ref().map(|connection| &connection.client)
    }

    /// Accepts a client, which takes the place of the one before: a daemon that comes back after a
    /// crash must not wait for its predecessor's connection to be noticed as ended.
    pub fn accept(&mut self) {
        let Some(mut client) = Client::accept(&self.listener, MAX_UNSENT) else { return };
        if client.send(&qmp::greeting()).is_ok() {
            self.client = Some(Connection { client, line: Vec::new(), files: Vec::new() });
        }
    }

    /// Receives what the client has sent, and returns its complete commands.
    pub fn receive(&mut self) -> Vec<Incoming> {
        self.with_client(Connection::receive).unwrap_or_default()
    }

    /// Sends as many of the waiting bytes as the client takes.
    pub fn flush(&mut self) {
        self.with_client(|connection| connection.client.flush());
    }

    /// Sends a line to the client, if there is one.
    pub fn send(&mut self, line: &[u8]) {
        self.with_client(|connection| connection.client.send(line));
    }

    /// Uses the client's connection, and drops one that has ended. Returns `None` if there is none.
    fn with_client<T>(&mut self, act: impl Fn(&mut Connection) -> Result<T, Ended>) -> Option<T> {
        let outcome = act(self.client.as_mut()?);
        self.client = self.client.take().filter(|_| outcome.is_ok());
        outcome.ok()
    }
}

impl Connection {
    fn receive(&mut self) -> Result<Vec<Incoming>, Ended> {
        let mut bytes = [0; 4096];
        let Some(Received { bytes: len, files, .. }) = self.client.receive(&mut bytes)? else {
            return Ok(Vec::new());
        };
        self.files.extend(files);
        if self.files.len() > MAX_FILES {
            return Err(Ended);
        }
        let mut commands = Vec::new();
        for &byte in &bytes[..len] {
            if byte != b'\n' {
                self.line.push(byte);
            } else if !self.line.iter().all(u8::is_ascii_whitespace) {
                let request = qmp::parse(&self.line);
                commands.push(Incoming { request, files: Vec::new() });
                self.line.clear();
            }
            if self.line.len() > MAX_LINE {
                return Err(Ended);
            }
        }
        // Descriptors belong to the last command that they came with: a client sends a command with
        // its descriptors as one message.
        if let Some(last) = commands.last_mut() {
            last.files = std::mem::take(&mut self.files);
        }
        Ok(commands)
    }
}
