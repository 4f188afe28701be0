//! Looks at messages without taking them out of the socket, so that a successor finds them.

use rustix::io::Errno;
use rustix::net::RecvFlags;
use slipway_vfio_user_spec::{Command, HEADER_LEN, Header};
use slipway_vfio_user_wire::{End, Message, Wire, payload_len, read};
use zerocopy::FromBytes;

/// The number of bytes that are peeked at before a message's length is known: nearly all messages
/// are shorter.
const PEEK_AHEAD: usize = 1 << 10;

/// The result of peeking at the socket.
pub(crate) enum Peeked {
    /// Nothing has arrived.
    Nothing,
    /// The beginning of a message, with the message's length if that is known and the message
    /// carries no descriptors.
    Partial(Option<usize>),
    /// A complete message and its length.
    Whole(Message, usize),
}

/// A view of the messages that wait in a socket.
#[derive(Default)]
pub(crate) struct Peeker {
    /// The beginning of what waits.
    bytes: Vec<u8>,
}

impl Peeker {
    /// Peeks at the next message and leaves it in the socket. Its descriptors are duplicates. They
    /// are received only if the request may carry some.
    pub fn peek(&mut self, wire: &Wire) -> Result<Peeked, End> {
        let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
        self.bytes.resize(self.bytes.len().max(PEEK_AHEAD), 0);
        #[allow(
            clippy::disallowed_methods,
            reason = "what is only looked at stays in the socket, so no descriptor is closed here"
        )]
        let looked = rustix::net::recv(wire.file(), &mut self.bytes[..], flags);
        let count = match looked {
            Ok((0, _)) | Err(Errno::CONNRESET) => return Err(End::Closed),
            Ok((count, _)) => count,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(Peeked::Nothing),
            Err(error) => return Err(error.into()),
        };
        if count < HEADER_LEN {
            return Ok(Peeked::Partial(None));
        }
        let header = Header::read_from_bytes(&self.bytes[..HEADER_LEN]).unwrap_or_default();
        let size = HEADER_LEN + payload_len(&header)?;
        let command = Command::from_code(header.command.get());
        let brings_files =
            matches!(command, Some(Command::DmaMap | Command::DmaUnmap | Command::DeviceSetIrqs));
        let (mut files, mut excess) = (Vec::new(), false);
        if brings_files || count < size {
            // Reads no further than the message, since descriptors come with a byte of the stream.
            self.bytes.resize(size, 0);
            let into = &mut self.bytes[..size];
            let peek = RecvFlags::PEEK;
            let from = (wire.file(), wire.bin());
            let count = read(from, into, &mut files, &mut excess, (true, peek))?;
            if count.is_none_or(|count| count < size) {
                return Ok(Peeked::Partial((!brings_files).then_some(size)));
            }
        }
        let payload = self.bytes[HEADER_LEN..size].to_vec();
        Ok(Peeked::Whole(Message { header, payload, files, excess }, size))
    }
}
