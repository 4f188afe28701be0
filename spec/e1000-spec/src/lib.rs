//! Registers and descriptors of Intel's 82540EM Gigabit Ethernet controller, the `e1000` of drivers
//! and emulators.
//!
//! Section numbers are of Intel's *PCI/PCI-X Family of Gigabit Ethernet Controllers Software
//! Developer's Manual* (317453, revision 4.0), "the manual". The communication status block is an
//! extension: *Speeding Up Packet I/O in Virtual Machines*, section 3.5.
//!
//! - [`register`]: offsets in BAR 0; [`control`], [`status`], [`eecd`], [`eerd`], [`mdic`],
//!   [`cause`], [`rctl`], [`tctl`], [`rxcsum`], [`rah`]: bits of registers;
//! - [`Transmit`], [`Receive`]: descriptors, as values;
//! - [`statistic`]: offsets of the statistics registers;
//! - [`eeprom`]: the layout of the EEPROM; [`phy`]: registers of the PHY;
//! - [`csb`]: the layout of the communication status block.
//!
//! Not here: other members of the family, fibre and its auto-negotiation, flexible filters,
//! management and wake-up except the offsets of the registers that drivers write.
//!
//! No dependencies.
#![no_std]

mod bits;
pub mod csb;
mod descriptor;
pub mod eeprom;
pub mod phy;
pub mod register;
pub mod statistic;

pub use bits::{cause, control, ctrl_ext, eecd, eerd, io, mdic, rah, rctl, rxcsum, status, tctl};
pub use descriptor::{
    Context, DESCRIPTOR, Data, Legacy, Receive, Transmit, command, option, receive_error,
    receive_status,
};

/// Vendor ID: Intel.
pub const VENDOR: u16 = 0x8086;
/// Device ID of the 82540EM.
pub const DEVICE: u16 = 0x100e;
/// Revision ID of the 82540EM.
pub const REVISION: u8 = 2;
/// Class code: network controller, Ethernet.
pub const CLASS: u32 = 0x02_00_00;
/// Bytes of BAR 0, the registers (section 4.1).
pub const REGISTERS: u64 = 128 << 10;

/// Nanoseconds of one unit of the interrupt throttling register (section 13.4.18).
pub const THROTTLE_UNIT: u64 = 256;
/// Nanoseconds of one unit of the delay timers (sections 13.4.30, 13.4.31, 13.4.44 and 13.4.46).
pub const DELAY_UNIT: u64 = 1024;
/// Receive address registers: pairs of RAL and RAH.
pub const ADDRESSES: usize = 16;
/// Words of the multicast table, and of the VLAN filter table.
pub const TABLE: usize = 128;
/// Bytes of a frame check sequence.
pub const FCS: usize = 4;
/// Bytes of the longest frame without a tag that is no long packet, check sequence included.
pub const LONGEST: usize = 1518;
/// Bytes of the longest frame, check sequence included, that a receiver for long packets takes
/// (section 13.4.22).
pub const LONGEST_LONG: usize = 16_384;
