//! Registers of an IOAPIC (Intel 82093AA, *I/O Advanced Programmable Interrupt Controller*), and
//! the messages by which it interrupts a local APIC (Intel SDM, volume 3, *Message Signalled
//! Interrupts*).
//!
//! Not here: the effect of a pin, and the end of an interrupt.
//!
//! No dependencies.
#![no_std]

/// Bytes of memory from the IOAPIC's address on.
pub mod place {
    /// Register select.
    pub const SELECT: u64 = 0x00;
    /// The window of the selected register.
    pub const WINDOW: u64 = 0x10;
    /// EOI register (version 0x20 and later).
    pub const EOI: u64 = 0x40;
}

/// Selected registers.
pub mod register {
    /// Identification.
    pub const ID: u8 = 0;
    /// Version, see [`super::version`].
    pub const VERSION: u8 = 1;
    /// Arbitration.
    pub const ARBITRATION: u8 = 2;
    /// Redirection entries, two 32-bit registers for each pin from here on.
    pub const REDIRECTION: u8 = 0x10;
    /// The bits of [`ID`] that software can change.
    pub const ID_BITS: u32 = 0x0f00_0000;
}

/// Returns the version register of an IOAPIC with this number of pins: version 0x20, which has an
/// EOI register.
pub const fn version(pins: usize) -> u32 {
    0x20 | (pins as u32 - 1) << 16
}

/// Fields of a redirection entry.
pub mod entry {
    /// Vector.
    pub const VECTOR: u64 = 0xff;
    /// Delivery mode.
    pub const DELIVERY_MODE: u64 = 0b111 << 8;
    /// The destination is a logical one.
    pub const LOGICAL_DESTINATION: u64 = 1 << 11;
    /// Remote IRR: a local APIC has accepted the level, and not ended the interrupt.
    pub const REMOTE_IRR: u64 = 1 << 14;
    /// The pin is triggered by level, not by edge.
    pub const LEVEL: u64 = 1 << 15;
    /// The pin is masked.
    pub const MASKED: u64 = 1 << 16;
    /// Bits that software cannot change: delivery status and remote IRR.
    pub const READ_ONLY: u64 = 1 << 12 | REMOTE_IRR;
    /// The lowest bit of the destination, of eight bits.
    pub const DESTINATION_SHIFT: u32 = 56;

    /// Returns whether the bits that only the IOAPIC changes can be: nothing is being delivered,
    /// and only a level is waiting for its end.
    pub fn is_sound(entry: u64) -> bool {
        let waits = entry & REMOTE_IRR != 0;
        entry & READ_ONLY & !REMOTE_IRR == 0 && (entry & LEVEL != 0 || !waits)
    }

    /// Returns the entry after a write of `value` to its upper or lower half.
    pub fn written(entry: u64, high: bool, value: u32) -> u64 {
        let new = if high {
            entry & 0xffff_ffff | u64::from(value) << 32
        } else {
            entry & !0xffff_ffff | u64::from(value)
        };
        let new = new & !READ_ONLY | entry & READ_ONLY;
        if new & LEVEL == 0 { new & !REMOTE_IRR } else { new }
    }

    /// Returns address and data of the message of an entry.
    pub fn message(entry: u64) -> (u64, u32) {
        /// The address of messages to local APICs (*Message Address Register*).
        const ADDRESS: u64 = 0xfee0_0000;
        /// Trigger level: assert.
        const ASSERT: u64 = 1 << 14;
        let destination = entry >> DESTINATION_SHIFT & 0xff;
        let logical = u64::from(entry & LOGICAL_DESTINATION != 0) << 2;
        // Redirection hint: lowest priority.
        let lowest = u64::from(entry & DELIVERY_MODE == 1 << 8) << 3;
        let data = entry & (VECTOR | DELIVERY_MODE | LEVEL) | ASSERT;
        (ADDRESS | destination << 12 | logical | lowest, data as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::entry::*;
    use super::*;

    #[test]
    fn a_message_has_vector_mode_trigger_and_destination() {
        assert_eq!(message(1 << DESTINATION_SHIFT | 0x30), (0xfee0_1000, 0x4030));
        assert_eq!(message(LEVEL | MASKED | 0x31), (0xfee0_0000, 0xc031));
        assert_eq!(message(LOGICAL_DESTINATION | 1 << 8 | 0x32), (0xfee0_000c, 0x4132));
    }

    #[test]
    fn software_changes_no_read_only_bit() {
        let waiting = LEVEL | REMOTE_IRR | 0x30;
        assert_eq!(written(waiting, false, u32::MAX) & READ_ONLY, REMOTE_IRR);
        assert_eq!(written(waiting, false, 0x31), 0x31, "an edge does not wait");
        assert_eq!(written(waiting, true, 1 << 24), waiting | 1 << DESTINATION_SHIFT);
        assert!(is_sound(waiting) && !is_sound(REMOTE_IRR) && !is_sound(1 << 12));
        assert_eq!(version(7), 0x0006_0020);
    }
}
