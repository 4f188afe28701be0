//! The message header (section *Header*) and the commands (section *Commands*).

use crate::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of a [`Header`].
pub const HEADER_LEN: usize = 16;

/// Bits of [`Header::flags`].
pub mod flag {
    /// Mask of the message type.
    pub const TYPE_MASK: u32 = 0xf;
    /// Type: a command.
    pub const COMMAND: u32 = 0x0;
    /// Type: the reply to the command with the same message id.
    pub const REPLY: u32 = 0x1;
    /// In a command: the sender wants no reply, not even for an error.
    pub const NO_REPLY: u32 = 0x10;
    /// In a reply: the command failed, no data follow, and [`super::Header::error`] holds the
    /// errno.
    pub const ERROR: u32 = 0x20;
}

/// The header that begins every message (section *Header*).
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Header {
    /// Message id, chosen by the sender of the command and echoed in the reply. Need not be unique.
    pub id: U16,
    /// Code of a [`Command`], or any other value.
    pub command: U16,
    /// Bytes of the whole message, this header included.
    pub size: U32,
    /// Message type and flags, see [`flag`].
    pub flags: U32,
    /// In a reply with [`flag::ERROR`]: an errno. Zero is allowed by the specification; Slipway
    /// never sends it.
    pub error: U32,
}

impl Header {
    /// Returns the header of a command with `payload` bytes after it.
    pub fn command(id: u16, command: Command, payload: usize) -> Self {
        Self::new(id, command as u16, payload, flag::COMMAND)
    }

    /// Returns the header of a reply to this command, with `payload` bytes after it.
    pub fn reply(&self, payload: usize) -> Self {
        Self::new(self.id.get(), self.command.get(), payload, flag::REPLY)
    }

    /// Returns the header of a reply that reports this command's failure with `errno`.
    pub fn error_reply(&self, errno: i32) -> Self {
        let mut header = self.reply(0);
        header.flags = U32::new(flag::REPLY | flag::ERROR);
        header.error = U32::new(errno.unsigned_abs());
        header
    }

    /// Returns whether the message claims to be a reply.
    pub fn is_reply(&self) -> bool {
        self.flags.get() & flag::TYPE_MASK == flag::REPLY
    }

    /// Returns whether the message claims to be a command.
    pub fn is_command(&self) -> bool {
        self.flags.get() & flag::TYPE_MASK == flag::COMMAND
    }

    /// Returns whether the sender wants no reply.
    pub fn no_reply(&self) -> bool {
        self.flags.get() & flag::NO_REPLY != 0
    }

    /// Returns the errno of a failed command. Returns `None` if the error flag is not set.
    pub fn errno(&self) -> Option<u32> {
        (self.flags.get() & flag::ERROR != 0).then(|| self.error.get())
    }

    fn new(id: u16, command: u16, payload: usize, flags: u32) -> Self {
        Self {
            id: U16::new(id),
            command: U16::new(command),
            size: U32::new((HEADER_LEN + payload) as u32),
            flags: U32::new(flags),
            error: U32::new(0),
        }
    }
}

macro_rules! commands {
    ($($(#[$doc:meta])* $name:ident = $code:literal,)*) => {
        /// The commands of the protocol (section *Commands*).
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u16)]
        pub enum Command { $($(#[$doc])* $name = $code,)* }

        impl Command {
            /// All commands.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// Returns the command with this code. Returns `None` if the code is unknown.
            pub fn from_code(code: u16) -> Option<Self> {
                match code { $($code => Some(Self::$name),)* _ => None }
            }
        }
    };
}

commands! {
    /// Client to server: negotiates version and capabilities. The first message.
    Version = 1,
    /// Client to server: adds memory that the device may access.
    DmaMap = 2,
    /// Client to server: removes memory that the device may no longer access.
    DmaUnmap = 3,
    /// Client to server: asks for the kind of device and its numbers of regions and interrupt
    /// types.
    DeviceGetInfo = 4,
    /// Client to server: asks for one region's size, rights and mappable areas.
    DeviceGetRegionInfo = 5,
    /// Client to server: asks for descriptors that trigger accesses.
    DeviceGetRegionIoFds = 6,
    /// Client to server: asks for one interrupt type's count and abilities.
    DeviceGetIrqInfo = 7,
    /// Client to server: routes, masks or triggers interrupts.
    DeviceSetIrqs = 8,
    /// Client to server: reads registers.
    RegionRead = 9,
    /// Client to server: writes registers.
    RegionWrite = 10,
    /// Server to client: reads client memory.
    DmaRead = 11,
    /// Server to client: writes client memory.
    DmaWrite = 12,
    /// Client to server: resets the device.
    DeviceReset = 13,
    /// Client to server, only in old versions of the protocol: controls dirty-page logging.
    DirtyPages = 14,
    /// Client to server, only if negotiated: makes several small register writes.
    RegionWriteMulti = 15,
    /// Client to server: queries or uses optional features.
    DeviceFeature = 16,
    /// Client to server: reads migration data from the device.
    MigDataRead = 17,
    /// Client to server: writes migration data to the device.
    MigDataWrite = 18,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_sixteen_bytes_in_the_specified_order() {
        let header = Header::command(0x0102, Command::DmaMap, 32);
        assert_eq!(
            header.as_bytes(),
            [0x02, 0x01, 2, 0, 48, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            "id, command, size, flags, error"
        );
        assert_eq!(header.as_bytes().len(), HEADER_LEN);
    }

    #[test]
    fn an_error_reply_has_no_data_and_a_positive_errno() {
        let reply = Header::command(7, Command::RegionRead, 16).error_reply(-22);
        assert_eq!(reply.errno(), Some(22));
        assert_eq!(reply.size.get(), 16);
        assert!(reply.is_reply() && !reply.is_command());
        assert_eq!((reply.id.get(), reply.command.get()), (7, 9));
    }

    #[test]
    fn codes_convert_both_ways() {
        for command in Command::ALL {
            assert_eq!(Command::from_code(*command as u16), Some(*command));
        }
        assert_eq!(Command::from_code(0), None);
        assert_eq!(Command::from_code(19), None);
    }
}
