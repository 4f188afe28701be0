//! Bits of registers.

/// The I/O ports, by which registers are reached, too (section 4.1.2).
pub mod io {
    /// Bytes of ports.
    pub const PORTS: u64 = 64;
    /// IOADDR: the offset of a register.
    pub const ADDRESS: u64 = 0;
    /// IODATA: the register.
    pub const DATA: u64 = 4;
}

/// Device Control (section 13.4.1).
pub mod control {
    /// Full duplex.
    pub const FD: u32 = 1;
    /// Link reset.
    pub const LRST: u32 = 1 << 3;
    /// Auto-speed detection.
    pub const ASDE: u32 = 1 << 5;
    /// Set link up.
    pub const SLU: u32 = 1 << 6;
    /// Speed.
    pub const SPEED: u32 = 0b11 << 8;
    /// Device reset; clears itself.
    pub const RST: u32 = 1 << 26;
    /// VLAN mode: tags are stripped from received frames, and inserted when a descriptor asks.
    pub const VME: u32 = 1 << 30;
    /// PHY reset.
    pub const PHY_RST: u32 = 1 << 31;
}

/// Extended Device Control (section 13.4.5).
pub mod ctrl_ext {
    /// Reads the EEPROM anew; clears itself.
    pub const EE_RST: u32 = 1 << 13;
}

/// Device Status (section 13.4.2).
pub mod status {
    /// Full duplex.
    pub const FD: u32 = 1;
    /// Link up.
    pub const LU: u32 = 1 << 1;
    /// Speed: 1000 Mbit/s.
    pub const SPEED_1000: u32 = 0b10 << 6;
    /// Detected speed: 1000 Mbit/s.
    pub const ASDV_1000: u32 = 0b10 << 8;
}

/// EEPROM/Flash Control and Data (section 13.4.3).
pub mod eecd {
    /// Clock.
    pub const SK: u32 = 1;
    /// Chip select.
    pub const CS: u32 = 1 << 1;
    /// Data into the EEPROM.
    pub const DI: u32 = 1 << 2;
    /// Data out of the EEPROM.
    pub const DO: u32 = 1 << 3;
    /// Flash write enable, two bits.
    pub const FWE: u32 = 0b11 << 4;
    /// Request for access.
    pub const REQ: u32 = 1 << 6;
    /// Access granted.
    pub const GNT: u32 = 1 << 7;
    /// An EEPROM is present.
    pub const PRES: u32 = 1 << 8;
}

/// EEPROM Read (section 13.4.4).
pub mod eerd {
    /// Starts a read; clears itself.
    pub const START: u32 = 1;
    /// The data are valid.
    pub const DONE: u32 = 1 << 4;
    /// Bits below the word's address.
    pub const ADDRESS: u32 = 8;
    /// Bits below the data.
    pub const DATA: u32 = 16;
}

/// MDI Control (section 13.4.6).
pub mod mdic {
    /// Mask of the data.
    pub const DATA: u32 = 0xffff;
    /// Bits below the PHY's register number (five bits).
    pub const REGISTER: u32 = 16;
    /// Bits below the PHY's address (five bits).
    pub const PHY: u32 = 21;
    /// The address of the one PHY.
    pub const PHY_ADDRESS: u32 = 1;
    /// Operation: write.
    pub const WRITE: u32 = 0b01 << 26;
    /// Operation: read.
    pub const READ: u32 = 0b10 << 26;
    /// Mask of the operation.
    pub const OPERATION: u32 = 0b11 << 26;
    /// The operation is over.
    pub const READY: u32 = 1 << 28;
    /// Interrupts at the end of the operation.
    pub const INTERRUPT: u32 = 1 << 29;
    /// The operation failed.
    pub const ERROR: u32 = 1 << 30;
}

/// Interrupt causes: bits of ICR, ICS, IMS and IMC (section 13.4.17).
pub mod cause {
    /// A transmit descriptor was written back.
    pub const TXDW: u32 = 1;
    /// The transmit queue is empty.
    pub const TXQE: u32 = 1 << 1;
    /// The link's state changed.
    pub const LSC: u32 = 1 << 2;
    /// Few receive descriptors are left.
    pub const RXDMT0: u32 = 1 << 4;
    /// A frame was lost for want of a receive descriptor.
    pub const RXO: u32 = 1 << 6;
    /// The receive timer expired.
    pub const RXT0: u32 = 1 << 7;
    /// An access to the PHY is over.
    pub const MDAC: u32 = 1 << 9;
    /// A small packet was received.
    pub const SRPD: u32 = 1 << 16;
    /// All causes that can be set. Reserved ones are among them: the self test of Linux's driver
    /// sets each of the first ten.
    pub const ALL: u32 = 0x0001_ffff;
}

/// Receive Control (section 13.4.22).
pub mod rctl {
    /// Receiver enable.
    pub const EN: u32 = 1 << 1;
    /// Unicast promiscuous.
    pub const UPE: u32 = 1 << 3;
    /// Multicast promiscuous.
    pub const MPE: u32 = 1 << 4;
    /// Long packet enable.
    pub const LPE: u32 = 1 << 5;
    /// Loopback mode: any value but 0 loops.
    pub const LBM: u32 = 0b11 << 6;
    /// Bits below the receive descriptor minimum threshold: 1/2, 1/4 or 1/8 of the ring.
    pub const RDMTS: u32 = 8;
    /// Bits below the multicast offset (two bits).
    pub const MO: u32 = 12;
    /// Broadcast accept.
    pub const BAM: u32 = 1 << 15;
    /// Bits below the buffer size (two bits): 2048, 1024, 512 or 256 bytes, with [`BSEX`] 16 times
    /// as many, except for 0.
    pub const BSIZE: u32 = 16;
    /// VLAN filter enable.
    pub const VFE: u32 = 1 << 18;
    /// Buffer size extension.
    pub const BSEX: u32 = 1 << 25;
    /// Strip the frame check sequence.
    pub const SECRC: u32 = 1 << 26;
    /// The bits that a driver can set.
    pub const WRITABLE: u32 = 0x06df_b3fe;
}

/// Transmit Control (section 13.4.33).
pub mod tctl {
    /// Transmitter enable.
    pub const EN: u32 = 1 << 1;
}

/// Receive Checksum Control (section 13.4.48).
pub mod rxcsum {
    /// The headers of IPv4 are checked.
    pub const IPOFL: u32 = 1 << 8;
    /// TCP and UDP checksums are checked.
    pub const TUOFL: u32 = 1 << 9;
}

/// Receive Address High (section 13.5.3).
pub mod rah {
    /// The address is valid.
    pub const AV: u32 = 1 << 31;
    /// Address select: 0 is the destination, 1 the source.
    pub const AS: u32 = 0b11 << 16;
    /// The bits that a driver can set.
    pub const WRITABLE: u32 = 0x8003_ffff;
}
