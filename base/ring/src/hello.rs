//! The two messages by which a client attaches to a port; the crate's head has the tables.

/// Version of the messages.
pub const PROTOCOL: u32 = 1;

const MAGIC: u64 = u64::from_le_bytes(*b"slipport");

/// The kinds of frames that a client takes beside those that could go over a wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Takes {
    /// The client takes frames whose checksum is to be filled in.
    pub checksum: bool,
    /// The client takes segments of TCP over IPv4 that are to be cut.
    pub tcp4: bool,
    /// The client takes segments of TCP over IPv6 that are to be cut.
    pub tcp6: bool,
    /// The client takes UDP datagrams that are to be cut.
    pub udp: bool,
}

impl Takes {
    fn bits(self) -> u32 {
        let all = [self.checksum, self.tcp4, self.tcp6, self.udp];
        all.iter().enumerate().map(|(bit, set)| u32::from(*set) << bit).sum()
    }

    fn of(bits: u32) -> Option<Self> {
        let bit = |number: u32| bits >> number & 1 != 0;
        let known = Self { checksum: bit(0), tcp4: bit(1), tcp6: bit(2), udp: bit(3) };
        (bits >> 4 == 0).then_some(known)
    }
}

/// The first message of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The kinds of frames that the client takes.
    pub takes: Takes,
}

impl Hello {
    /// The length of the message in bytes.
    pub const LEN: usize = 16;

    /// Encodes the message for the socket.
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..8].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[8..12].copy_from_slice(&PROTOCOL.to_le_bytes());
        bytes[12..].copy_from_slice(&self.takes.bits().to_le_bytes());
        bytes
    }

    /// Decodes a client's message.
    ///
    /// # Errors
    /// The status for the refusal, or 0 if the bytes are no such message and get no answer.
    pub fn decode(bytes: &[u8]) -> Result<Self, u32> {
        if bytes.len() != Self::LEN || word64(bytes, 0) != Some(MAGIC) {
            return Err(0);
        }
        if word32(bytes, 8) != Some(PROTOCOL) {
            return Err(Welcome::VERSION);
        }
        let takes = word32(bytes, 12).and_then(Takes::of);
        takes.map(|takes| Self { takes }).ok_or(Welcome::INVALID)
    }
}

/// The server's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// The server's version of the messages.
    pub version: u32,
    /// 0, or the reason of a refusal: a number of errno(3).
    pub status: u32,
    /// The port's MAC address, or zeros if it has none.
    pub mac: [u8; 6],
}

impl Welcome {
    /// The length of the message in bytes.
    pub const LEN: usize = 32;
    /// The status if another client has the port (`EBUSY`).
    pub const BUSY: u32 = 16;
    /// The status if the server has no means left to wake a client (`EAGAIN`).
    pub const LACKING: u32 = 11;
    /// The status if the client's message is invalid (`EINVAL`).
    pub const INVALID: u32 = 22;
    /// The status if the client has another version (`EPROTONOSUPPORT`).
    pub const VERSION: u32 = 93;

    /// Makes the answer that accepts a client at the port with this MAC address.
    pub fn new(mac: [u8; 6]) -> Self {
        Self { version: PROTOCOL, status: 0, mac }
    }

    /// Makes the answer that refuses a client with a status.
    pub fn refusal(status: u32) -> Self {
        Self { version: PROTOCOL, status, mac: [0; 6] }
    }

    /// Encodes the message for the socket.
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..8].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.version.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.status.to_le_bytes());
        bytes[16..22].copy_from_slice(&self.mac);
        bytes
    }

    /// Decodes a server's answer. Returns `None` if the bytes are no answer.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let known = bytes.len() == Self::LEN && word64(bytes, 0)? == MAGIC;
        let mac = bytes.get(16..22)?.try_into().ok()?;
        known.then_some(Self { version: word32(bytes, 8)?, status: word32(bytes, 12)?, mac })
    }
}

fn word32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn word64(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_understood() {
        for bits in 0..16 {
            let hello = Hello { takes: Takes::of(bits).unwrap() };
            assert_eq!(hello.takes.bits(), bits);
            assert_eq!(Hello::decode(&hello.encode()), Ok(hello));
        }
        let welcome = Welcome { version: 7, status: 16, mac: [1, 2, 3, 4, 5, 6] };
        assert_eq!(Welcome::decode(&welcome.encode()), Some(welcome));
        assert_eq!(&welcome.encode()[..8], b"slipport");
    }

    #[test]
    fn what_is_something_else_is_not() {
        let good = Hello { takes: Takes::default() }.encode();
        assert_eq!(Hello::decode(&good[..15]), Err(0));
        assert_eq!(Hello::decode(&[0; 16]), Err(0));
        let with = |at: usize, byte: u8| {
            let mut bytes = good;
            bytes[at] = byte;
            Hello::decode(&bytes)
        };
        assert_eq!(with(8, 2), Err(Welcome::VERSION));
        assert_eq!(with(12, 16), Err(Welcome::INVALID));
        assert_eq!(Welcome::decode(&[0; 32]), None);
        assert_eq!(Welcome::decode(&Welcome::new([0; 6]).encode()[..31]), None);
    }
}
