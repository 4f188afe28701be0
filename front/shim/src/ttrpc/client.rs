//! The calling end of ttrpc: one call at a time.

use std::io;
use std::path::Path;

use prost::Message;
use tokio::net::UnixStream;

use super::{frame, v1};

/// A connection to a server.
pub struct Client {
    stream: UnixStream,
    /// The number of the next call.
    next: u32,
}

impl Client {
    /// Connects to the server at `socket`.
    ///
    /// # Errors
    /// Nothing answers there.
    pub async fn connect(socket: &Path) -> io::Result<Self> {
        UnixStream::connect(socket).await.map(Self::over)
    }

    /// Makes a client of a connection on which no call was made yet.
    pub fn over(stream: UnixStream) -> Self {
        Self { stream, next: 1 }
    }

    /// Makes a call, and returns the response's payload. After an error of another kind than
    /// [`io::ErrorKind::Other`] the connection is of no further use.
    ///
    /// # Errors
    /// [`io::ErrorKind::Other`] with the server's message if the server refuses the call;
    /// other kinds if the connection broke.
    pub async fn call(
        &mut self,
        service: &str,
        method: &str,
        payload: Vec<u8>,
    ) -> io::Result<Vec<u8>> {
        let stream = self.next;
        self.next = self.next.wrapping_add(2);
        let (service, method) = (service.to_owned(), method.to_owned());
        let request = v1::Request { service, method, payload, timeout_nano: 0 };
        let request = request.encode_to_vec();
        frame::write(&mut self.stream, stream, frame::REQUEST, &request).await?;
        loop {
            let read = frame::read(&mut self.stream).await?;
            let (header, message) = read.ok_or(io::ErrorKind::UnexpectedEof)?;
            if (header.stream, header.kind) != (stream, frame::RESPONSE) {
                continue;
            }
            let response = v1::Response::decode(message.as_slice())
                .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
            return match response.status {
                Some(status) if status.code != 0 => Err(io::Error::other(status.message)),
                _ => Ok(response.payload),
            };
        }
    }
}
