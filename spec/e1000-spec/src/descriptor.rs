//! Descriptors of the transmit ring (section 3.3) and of the receive ring (section 3.2).

/// Bytes of every descriptor.
pub const DESCRIPTOR: usize = 16;

/// Bits of a transmit descriptor's command byte (sections 3.3.3.1, 3.3.6.1 and 3.3.7.1).
pub mod command {
    /// The last descriptor of a frame.
    pub const EOP: u8 = 1;
    /// Insert the frame check sequence.
    pub const IFCS: u8 = 1 << 1;
    /// Legacy descriptor: insert a checksum.
    pub const IC: u8 = 1 << 2;
    /// Data descriptor: TCP segmentation. In a context: the context is for segmentation.
    pub const TSE: u8 = 1 << 2;
    /// Report the status.
    pub const RS: u8 = 1 << 3;
    /// Report that the packet was sent; as [`RS`] on this controller.
    pub const RPS: u8 = 1 << 4;
    /// The descriptor is a context or data descriptor.
    pub const DEXT: u8 = 1 << 5;
    /// Insert a VLAN tag.
    pub const VLE: u8 = 1 << 6;
    /// Delay the interrupt.
    pub const IDE: u8 = 1 << 7;
    /// Context: the packets are TCP.
    pub const TCP: u8 = 1;
    /// Context: the packets are IPv4, else IPv6.
    pub const IP: u8 = 1 << 1;
}

/// Bits of a data descriptor's packet options (section 3.3.7.2).
pub mod option {
    /// Insert the IPv4 header's checksum.
    pub const IXSM: u8 = 1;
    /// Insert the TCP or UDP checksum.
    pub const TXSM: u8 = 2;
}

/// Bits of a receive descriptor's status (section 3.2.3.1).
pub mod receive_status {
    /// The descriptor is done.
    pub const DD: u8 = 1;
    /// End of packet.
    pub const EOP: u8 = 1 << 1;
    /// Ignore [`TCPCS`] and [`IPCS`]: no checksum was checked.
    pub const IXSM: u8 = 1 << 2;
    /// A VLAN tag was stripped.
    pub const VP: u8 = 1 << 3;
    /// The TCP or UDP checksum was checked.
    pub const TCPCS: u8 = 1 << 5;
    /// The IPv4 header's checksum was checked.
    pub const IPCS: u8 = 1 << 6;
    /// The frame passed an inexact filter only.
    pub const PIF: u8 = 1 << 7;
}

/// Bits of a receive descriptor's errors (section 3.2.3.2).
pub mod receive_error {
    /// The TCP or UDP checksum is wrong.
    pub const TCPE: u8 = 1 << 5;
    /// The IPv4 header's checksum is wrong.
    pub const IPE: u8 = 1 << 6;
}

/// A legacy transmit descriptor (section 3.3.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Legacy {
    /// The buffer's address.
    pub address: u64,
    /// The buffer's bytes.
    pub length: u16,
    /// The checksum's offset in the frame.
    pub cso: u8,
    /// The offset from which on the checksum is computed.
    pub css: u8,
    /// Bits of [`command`].
    pub command: u8,
    /// The VLAN tag's control information.
    pub special: u16,
}

/// A context descriptor (section 3.3.6): the offloads of the data descriptors that follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Context {
    /// The start of the IP header.
    pub ipcss: u8,
    /// The offset of the IP header's checksum.
    pub ipcso: u8,
    /// The last byte that the IP header's checksum covers.
    pub ipcse: u16,
    /// The start of the TCP or UDP header.
    pub tucss: u8,
    /// The offset of the TCP or UDP checksum.
    pub tucso: u8,
    /// The last byte that the TCP or UDP checksum covers; 0 for the end of the frame.
    pub tucse: u16,
    /// Bytes of payload, for segmentation: 20 bits.
    pub payload: u32,
    /// Bits of [`command`].
    pub command: u8,
    /// Bytes of the headers, for segmentation.
    pub header: u8,
    /// The maximum segment size.
    pub mss: u16,
}

/// A data descriptor (section 3.3.7).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Data {
    /// The buffer's address.
    pub address: u64,
    /// The buffer's bytes: 20 bits.
    pub length: u32,
    /// Bits of [`command`].
    pub command: u8,
    /// Bits of [`option`].
    pub options: u8,
    /// The VLAN tag's control information.
    pub special: u16,
}

/// A transmit descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transmit {
    /// A legacy descriptor.
    Legacy(Legacy),
    /// A context descriptor.
    Context(Context),
    /// A data descriptor.
    Data(Data),
    /// A descriptor of a type that does not exist, with its command byte.
    Unknown(u8),
}

/// The type of a context descriptor (DTYP).
const CONTEXT: u8 = 0;
/// The type of a data descriptor (DTYP).
const DATA: u8 = 1;
/// The status bit "descriptor done" in the last word of a transmit descriptor.
const DONE: u32 = 1;

impl Transmit {
    /// Reads a descriptor. Never fails: every value is a descriptor.
    pub fn read(bytes: &[u8; DESCRIPTOR]) -> Self {
        let bits = u128::from_le_bytes(*bytes);
        let (low, high) = (bits as u64, (bits >> 64) as u64);
        let command = (high >> 24) as u8;
        if command & command::DEXT == 0 {
            return Self::Legacy(Legacy {
                address: low,
                length: high as u16,
                cso: (high >> 16) as u8,
                css: (high >> 40) as u8,
                command,
                special: (high >> 48) as u16,
            });
        }
        match (high >> 20) as u8 & 0xf {
            CONTEXT => Self::Context(context(low, high)),
            DATA => Self::Data(Data {
                address: low,
                length: high as u32 & 0xf_ffff,
                command,
                options: (high >> 40) as u8,
                special: (high >> 48) as u16,
            }),
            _ => Self::Unknown(command),
        }
    }

    /// Returns the descriptor's bytes, not done.
    pub fn bytes(&self) -> [u8; DESCRIPTOR] {
        let (low, high) = match *self {
            Self::Legacy(Legacy { address, length, cso, css, command, special }) => {
                let command = command & !command::DEXT;
                let high = u64::from(length) | u64::from(cso) << 16 | u64::from(command) << 24;
                (address, high | u64::from(css) << 40 | u64::from(special) << 48)
            }
            Self::Context(ref context) => context_words(context),
            Self::Data(Data { address, length, command, options, special }) => {
                let command = command | command::DEXT;
                let high = u64::from(length & 0xf_ffff) | u64::from(DATA) << 20;
                let high = high | u64::from(command) << 24 | u64::from(options) << 40;
                (address, high | u64::from(special) << 48)
            }
            Self::Unknown(command) => (0, 0xf << 20 | u64::from(command | command::DEXT) << 24),
        };
        (u128::from(low) | u128::from(high) << 64).to_le_bytes()
    }

    /// Returns the command byte.
    pub fn command(&self) -> u8 {
        match self {
            Self::Legacy(one) => one.command,
            Self::Context(one) => one.command,
            Self::Data(one) => one.command,
            Self::Unknown(command) => *command,
        }
    }

    /// Returns the last four bytes of the descriptor `bytes`, as a word, with the status "done".
    pub fn done(bytes: &[u8; DESCRIPTOR]) -> u32 {
        (u128::from_le_bytes(*bytes) >> 96) as u32 | DONE
    }

    /// Returns whether a descriptor has the status "done".
    pub fn is_done(bytes: &[u8; DESCRIPTOR]) -> bool {
        bytes[12] & DONE as u8 != 0
    }
}

/// Reads a context descriptor from its two words.
fn context(low: u64, high: u64) -> Context {
    Context {
        ipcss: low as u8,
        ipcso: (low >> 8) as u8,
        ipcse: (low >> 16) as u16,
        tucss: (low >> 32) as u8,
        tucso: (low >> 40) as u8,
        tucse: (low >> 48) as u16,
        payload: high as u32 & 0xf_ffff,
        command: (high >> 24) as u8,
        header: (high >> 40) as u8,
        mss: (high >> 48) as u16,
    }
}

/// Returns the two words of a context descriptor.
fn context_words(context: &Context) -> (u64, u64) {
    let low = u64::from(context.ipcss)
        | u64::from(context.ipcso) << 8
        | u64::from(context.ipcse) << 16
        | u64::from(context.tucss) << 32
        | u64::from(context.tucso) << 40
        | u64::from(context.tucse) << 48;
    let high = u64::from(context.payload & 0xf_ffff)
        | u64::from(context.command | command::DEXT) << 24
        | u64::from(context.header) << 40
        | u64::from(context.mss) << 48;
    (low, high)
}

/// A receive descriptor (section 3.2.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Receive {
    /// The buffer's address.
    pub address: u64,
    /// The bytes that were written to the buffer.
    pub length: u16,
    /// The packet checksum.
    pub checksum: u16,
    /// Bits of [`receive_status`].
    pub status: u8,
    /// Bits of [`receive_error`].
    pub errors: u8,
    /// The stripped VLAN tag's control information.
    pub special: u16,
}

impl Receive {
    /// Reads a descriptor. Never fails.
    pub fn read(bytes: &[u8; DESCRIPTOR]) -> Self {
        let bits = u128::from_le_bytes(*bytes);
        let high = (bits >> 64) as u64;
        Self {
            address: bits as u64,
            length: high as u16,
            checksum: (high >> 16) as u16,
            status: (high >> 32) as u8,
            errors: (high >> 40) as u8,
            special: (high >> 48) as u16,
        }
    }

    /// Returns the descriptor as one number, to be written in little-endian order. The status is in
    /// the last four bytes.
    pub fn bits(&self) -> u128 {
        let high = u64::from(self.length)
            | u64::from(self.checksum) << 16
            | u64::from(self.status) << 32
            | u64::from(self.errors) << 40
            | u64::from(self.special) << 48;
        u128::from(self.address) | u128::from(high) << 64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_has_the_same_meaning_after_it_was_written() {
        let legacy =
            Legacy { address: 1 << 40, length: 60, cso: 16, css: 34, command: 9, special: 7 };
        let data = Data {
            address: 0x1234,
            length: 0xf_ffff,
            command: command::DEXT | command::EOP,
            options: 3,
            special: 0xabc,
        };
        let context = Context {
            ipcss: 14,
            ipcso: 24,
            ipcse: 33,
            tucss: 34,
            tucso: 50,
            tucse: 99,
            payload: 65_000,
            command: command::DEXT | command::TSE | command::TCP,
            header: 66,
            mss: 1448,
        };
        for one in [
            Transmit::Legacy(legacy),
            Transmit::Data(data),
            Transmit::Context(context),
            Transmit::Unknown(command::DEXT),
        ] {
            let bytes = one.bytes();
            assert_eq!(Transmit::read(&bytes), one);
            assert!(!Transmit::is_done(&bytes));
            let mut done = bytes;
            done[12..].copy_from_slice(&Transmit::done(&bytes).to_le_bytes());
            assert!(Transmit::is_done(&done));
            assert_eq!(Transmit::read(&done), one);
        }
    }

    #[test]
    fn fields_lie_where_the_manual_has_them() {
        let legacy = Transmit::Legacy(Legacy {
            address: 0x0807_0605_0403_0201,
            length: 0x0a09,
            cso: 0x0b,
            css: 0x0d,
            command: 0x0c & !command::DEXT,
            special: 0x0f0e,
        });
        assert_eq!(legacy.bytes(), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0, 13, 14, 15]);
        let received = Receive {
            address: 0x0807_0605_0403_0201,
            length: 0x0a09,
            checksum: 0x0c0b,
            status: 0x0d,
            errors: 0x0e,
            special: 0x100f,
        };
        let bytes = received.bits().to_le_bytes();
        assert_eq!(bytes, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]);
        assert_eq!(Receive::read(&bytes), received);
    }
}
