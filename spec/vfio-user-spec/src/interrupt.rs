//! Sections *VFIO_USER_DEVICE_GET_IRQ_INFO* and *VFIO_USER_DEVICE_SET_IRQS*.

use crate::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Interrupt types of a PCI device (`VFIO_PCI_*_IRQ_INDEX` of `<linux/vfio.h>`).
pub mod irq {
    /// INTx.
    pub const INTX: u32 = 0;
    /// MSI.
    pub const MSI: u32 = 1;
    /// MSI-X.
    pub const MSIX: u32 = 2;
    /// Error: the device failed.
    pub const ERR: u32 = 3;
    /// Request: the server asks the client to give the device back.
    pub const REQ: u32 = 4;
    /// Number of interrupt types that every PCI device reports.
    pub const COUNT: u32 = 5;
}

bitflags::bitflags! {
    /// Flags of [`IrqInfo`].
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct IrqInfoFlags: u32 {
        /// The type can be routed to eventfds.
        const EVENTFD = 1 << 0;
        /// The type can be masked and unmasked by messages.
        const MASKABLE = 1 << 1;
        /// An interrupt of the type masks itself when it triggers.
        const AUTOMASKED = 1 << 2;
        /// More vectors can be added only by setting up the whole type anew.
        const NORESIZE = 1 << 3;
    }
}

/// Request and reply of `VFIO_USER_DEVICE_GET_IRQ_INFO`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct IrqInfo {
    /// Request: largest reply payload that the client takes. Reply: bytes of this structure.
    pub argsz: U32,
    /// [`IrqInfoFlags`].
    pub flags: U32,
    /// Interrupt type, see [`irq`].
    pub index: U32,
    /// Number of interrupts of the type.
    pub count: U32,
}

impl IrqInfo {
    /// Returns the request about type `index`.
    pub fn request(index: u32) -> Self {
        Self { argsz: U32::new(16), index: U32::new(index), ..Self::default() }
    }
}

bitflags::bitflags! {
    /// Flags of [`IrqSet`]: exactly one `DATA_*` and exactly one action.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct IrqSetFlags: u32 {
        /// No data follow: the action applies to every interrupt of the range.
        const DATA_NONE = 1 << 0;
        /// One byte per interrupt follows: the action applies where the byte is not zero.
        const DATA_BOOL = 1 << 1;
        /// One descriptor per interrupt comes with the message; without descriptors, the routes are
        /// removed.
        const DATA_EVENTFD = 1 << 2;
        /// Action: masks interrupts.
        const MASK = 1 << 3;
        /// Action: unmasks interrupts.
        const UNMASK = 1 << 4;
        /// Action: triggers interrupts, or routes them to eventfds.
        const TRIGGER = 1 << 5;
        /// All data flags.
        const DATA = 0b111;
        /// All action flags.
        const ACTION = 0b111 << 3;
    }
}

/// Request of `VFIO_USER_DEVICE_SET_IRQS`; one byte per interrupt may follow. The reply has no
/// payload.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct IrqSet {
    /// Bytes of the request's payload (QEMU does not count the bytes after this structure).
    pub argsz: U32,
    /// [`IrqSetFlags`].
    pub flags: U32,
    /// Interrupt type, see [`irq`].
    pub index: U32,
    /// First interrupt of the range.
    pub start: U32,
    /// Number of interrupts; zero with `DATA_NONE` and `TRIGGER` disables the whole type.
    pub count: U32,
}

impl IrqSet {
    /// Returns the request about `count` interrupts of type `index` from `start` on, with `len`
    /// bytes behind it.
    pub fn new(flags: IrqSetFlags, index: u32, start: u32, count: u32, len: usize) -> Self {
        Self {
            argsz: U32::new(20 + len as u32),
            flags: U32::new(flags.bits()),
            index: U32::new(index),
            start: U32::new(start),
            count: U32::new(count),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_the_specified_ones() {
        assert_eq!(size_of::<IrqInfo>(), 16);
        assert_eq!(size_of::<IrqSet>(), 20);
    }
}
