//! Frames of ttrpc: a header of 10 bytes (length and stream in big-endian order, kind, flags), then
//! so many bytes of protobuf.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// The size of a header, bytes.
pub const HEADER: usize = 10;
/// The size of the largest message, bytes; the same as containerd's own limit.
pub const MOST: usize = 4 << 20;
/// The kind of a frame with a [`Request`](super::v1::Request).
pub const REQUEST: u8 = 1;
/// The kind of a frame with a [`Response`](super::v1::Response).
pub const RESPONSE: u8 = 2;

/// The header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The bytes that follow the header.
    pub length: u32,
    /// The number of the call. A client numbers its calls with odd numbers.
    pub stream: u32,
    /// [`REQUEST`] or [`RESPONSE`]; other kinds belong to streams.
    pub kind: u8,
    /// Flags of streams.
    pub flags: u8,
}

impl Header {
    /// Reads a header. Every sequence of bytes is one.
    pub fn parse(bytes: [u8; HEADER]) -> Self {
        let [l0, l1, l2, l3, s0, s1, s2, s3, kind, flags] = bytes;
        Self {
            length: u32::from_be_bytes([l0, l1, l2, l3]),
            stream: u32::from_be_bytes([s0, s1, s2, s3]),
            kind,
            flags,
        }
    }

    /// Returns the header's bytes.
    pub fn bytes(self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[..4].copy_from_slice(&self.length.to_be_bytes());
        bytes[4..8].copy_from_slice(&self.stream.to_be_bytes());
        bytes[8] = self.kind;
        bytes[9] = self.flags;
        bytes
    }
}

/// Reads one frame. Returns `None` if the peer closed the connection between two frames. Memory is
/// taken as bytes arrive, not as the header promises.
///
/// # Errors
/// The connection broke, or the message is larger than [`MOST`].
pub async fn read(from: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<(Header, Vec<u8>)>> {
    let mut bytes = [0; HEADER];
    let first = from.read(&mut bytes).await?;
    if first == 0 {
        return Ok(None);
    }
    from.read_exact(&mut bytes[first..]).await?;
    let header = Header::parse(bytes);
    let length = header.length as usize;
    if length > MOST {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a message larger than 4 MiB"));
    }
    let mut message = Vec::new();
    from.take(length as u64).read_to_end(&mut message).await?;
    if message.len() < length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(Some((header, message)))
}

/// Returns the bytes of a frame.
///
/// # Errors
/// The message is larger than [`MOST`].
pub fn bytes(stream: u32, kind: u8, message: &[u8]) -> io::Result<Vec<u8>> {
    if message.len() > MOST {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a message larger than 4 MiB"));
    }
    let header = Header { length: message.len() as u32, stream, kind, flags: 0 };
    let mut frame = Vec::with_capacity(HEADER + message.len());
    frame.extend(header.bytes());
    frame.extend(message);
    Ok(frame)
}

/// Writes one frame.
///
/// # Errors
/// The connection broke, or the message is larger than [`MOST`].
pub async fn write(
    to: &mut (impl AsyncWrite + Unpin),
    stream: u32,
    kind: u8,
    message: &[u8],
) -> io::Result<()> {
    to.write_all(&bytes(stream, kind, message)?).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_ten_bytes_in_network_order() {
        let header = Header { length: 0x0102, stream: 3, kind: REQUEST, flags: 0 };
        assert_eq!(header.bytes(), [0, 0, 1, 2, 0, 0, 0, 3, 1, 0]);
        assert_eq!(Header::parse(header.bytes()), header);
    }

    #[tokio::test]
    async fn frames_are_read_as_they_were_written() {
        let mut wire = Vec::new();
        write(&mut wire, 5, RESPONSE, b"payload").await.unwrap();
        write(&mut wire, 7, REQUEST, b"").await.unwrap();
        let mut from = wire.as_slice();
        let (header, message) = read(&mut from).await.unwrap().unwrap();
        assert_eq!(
            (header.stream, header.kind, message.as_slice()),
            (5, RESPONSE, &b"payload"[..])
        );
        let (header, message) = read(&mut from).await.unwrap().unwrap();
        assert_eq!((header.stream, message.len()), (7, 0));
        assert!(read(&mut from).await.unwrap().is_none());
    }

    #[tokio::test]
    async fn a_frame_that_is_cut_or_too_long_is_an_error() {
        let header = |length| Header { length, stream: 1, kind: REQUEST, flags: 0 }.bytes();
        let cut = [&header(8)[..], b"four"].concat();
        for bad in [&header(8)[..4], &cut, &header(MOST as u32 + 1), &header(u32::MAX)] {
            assert!(read(&mut &bad[..]).await.is_err(), "{bad:?}");
        }
        let large = vec![0; MOST + 1];
        assert!(write(&mut Vec::new(), 1, RESPONSE, &large).await.is_err());
    }
}
