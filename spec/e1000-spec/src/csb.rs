//! The communication status block (CSB): memory that driver and device share, through which work is
//! handed over without register accesses (*Speeding Up Packet I/O in Virtual Machines*, section
//! 3.5).
//!
//! A device with the extension has the subsystem ID [`SUBSYSTEM`]. The block is off until the
//! driver writes its address: the high word to [`crate::register::CSBAH`], then the low word with
//! [`ENABLE`] to [`crate::register::CSBAL`]. 0 in the latter, or a reset, turns it off.
//!
//! The block has [`LEN`] bytes and is aligned to [`LEN`]. Its first half is the driver's, which
//! alone writes it; its second half is the device's. All fields are little-endian 32-bit words;
//! those without a name are 0.
//!
//! Rules:
//! - The device takes [`TDT`] and [`RDT`] for the tail registers. A value beyond the ring is
//!   ignored.
//! - The driver kicks the device after it has stored [`TDT`] and found [`NEED_TX_KICK`] not 0. It
//!   writes the register TDT, or [`crate::register::CSBK`] if CSBAL reads with [`KICKS`]. The value
//!   written to CSBK does not matter, so that a hypervisor can take the write for an event without
//!   looking at it. The driver never reads CSBK: such a hypervisor may take that for a write, too.
//!   A full barrier lies between its store and its load, and likewise between the device's store
//!   of [`NEED_TX_KICK`] and its load of [`TDT`].
//! - One kick is enough for the frames that follow it: as long as [`TDH`] has not come to the tail
//!   of a kick, which is the end of a frame, the device looks at [`TDT`] again before it sleeps. So
//!   a driver need not kick until then, although it finds [`NEED_TX_KICK`] set by a
//!   device that has not woken yet.
//! - The device sets the causes RXT0 and TXDW for received frames and for sent ones only while
//!   [`WANT_RX`] or [`WANT_TX`] is not 0. The driver sets the word, and looks at its ring once
//!   more, after a full barrier.
//! - The device stores how far it came in [`TDH`] and [`RDH`], after the descriptors.
//! - With [`OFFLOADS`] in CSBAL, [`HEADER`] bytes lie in front of each received frame, in its first
//!   buffer: virtio's header of a packet (virtio 1.2, section 5.1.6) without the number of buffers,
//!   then zeros. A frame may have work left that its sender left to a device: its checksum is not
//!   filled in, or it is a TCP segment of up to 64 KiB that would be cut for a wire, whatever the
//!   longest frame is (RCTL.LPE). Places in the header are counted without a tag that was taken
//!   off. The descriptor of such a frame says IXSM. A device without this reads the bit as 0.
//!
//! The block knows nothing of the 82540EM: any controller with a ring and a tail in each direction
//! can use it, the Realtek RTL8169 for example, whose descriptors' OWN bits take the place of the
//! heads.

/// Subsystem ID of a device with the extension.
pub const SUBSYSTEM: u16 = 0x5e10;
/// Subsystem ID of a device without it.
pub const PLAIN_SUBSYSTEM: u16 = 0x5e00;
/// In CSBAL, read only: the device takes kicks by CSBK.
pub const KICKS: u32 = 2;
/// Bytes of the block.
pub const LEN: usize = 128;
/// In CSBAL: the block is in use.
pub const ENABLE: u32 = 1;
/// In CSBAL: received frames have a header, and may have work left.
pub const OFFLOADS: u32 = 4;
/// Bytes of the header in front of a received frame, with [`OFFLOADS`].
pub const HEADER: usize = 16;
/// The address bits of CSBAL.
pub const ADDRESS: u32 = !(LEN as u32 - 1);

/// Driver: the transmit tail.
pub const TDT: usize = 0x00;
/// Driver: the receive tail.
pub const RDT: usize = 0x04;
/// Driver: not 0 if it wants to be interrupted for sent frames.
pub const WANT_TX: usize = 0x08;
/// Driver: not 0 if it wants to be interrupted for received frames.
pub const WANT_RX: usize = 0x0c;
/// Device: the transmit head.
pub const TDH: usize = 0x40;
/// Device: the receive head.
pub const RDH: usize = 0x44;
/// Device: not 0 if it sleeps until it is kicked.
pub const NEED_TX_KICK: usize = 0x48;
/// Device: not 0 if it waits until the register RDT is written. This device does not: a frame
/// without a buffer is lost.
pub const NEED_RX_KICK: usize = 0x4c;
