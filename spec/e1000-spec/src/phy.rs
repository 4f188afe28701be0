//! Registers of the PHY, a Marvell 88E1011 (section 13.4.6.1), and their bits (IEEE 802.3 clauses
//! 22.2.4 and 40.5.1).

/// Control.
pub const CONTROL: u8 = 0;
/// Status.
pub const STATUS: u8 = 1;
/// Identifier, high.
pub const ID1: u8 = 2;
/// Identifier, low, with the revision.
pub const ID2: u8 = 3;
/// Auto-negotiation advertisement.
pub const ADVERTISEMENT: u8 = 4;
/// Link partner's ability.
pub const PARTNER: u8 = 5;
/// Auto-negotiation expansion.
pub const EXPANSION: u8 = 6;
/// Next page.
pub const NEXT_PAGE: u8 = 7;
/// 1000BASE-T control.
pub const GIGABIT_CONTROL: u8 = 9;
/// 1000BASE-T status.
pub const GIGABIT_STATUS: u8 = 10;
/// Extended status.
pub const EXTENDED_STATUS: u8 = 15;
/// PHY-specific control.
pub const SPECIFIC_CONTROL: u8 = 16;
/// PHY-specific status.
pub const SPECIFIC_STATUS: u8 = 17;
/// Interrupt enable.
pub const INTERRUPT_ENABLE: u8 = 18;
/// Extended PHY-specific control.
pub const EXTENDED_CONTROL: u8 = 20;
/// Registers that exist.
pub const COUNT: usize = 32;

/// The identifier, in two registers.
pub const IDENTIFIER: [u16; 2] = [0x0141, 0x0c20];

/// Bits of [`CONTROL`].
pub mod control {
    /// Reset; clears itself.
    pub const RESET: u16 = 1 << 15;
    /// Loopback.
    pub const LOOPBACK: u16 = 1 << 14;
    /// Auto-negotiation enable.
    pub const AUTO: u16 = 1 << 12;
    /// Power down.
    pub const POWER_DOWN: u16 = 1 << 11;
    /// Restart auto-negotiation; clears itself.
    pub const RESTART: u16 = 1 << 9;
    /// The value after a reset: 1000 Mbit/s, full duplex, auto-negotiation.
    pub const INITIAL: u16 = 0x1140;
}

/// Bits of [`STATUS`].
pub mod status {
    /// Auto-negotiation is complete.
    pub const COMPLETE: u16 = 1 << 5;
    /// The link is up. A link that was lost reads as lost once.
    pub const LINK: u16 = 1 << 2;
    /// Abilities: 100BASE-X and 10BASE-T, full and half duplex, extended status, preamble
    /// suppression, auto-negotiation, extended registers.
    pub const ABILITIES: u16 = 0x7949;
}

/// Bits of [`SPECIFIC_STATUS`].
pub mod specific {
    /// 1000 Mbit/s, full duplex, resolved.
    pub const GIGABIT: u16 = 0x8000 | 0x2000 | 0x0800;
    /// The link is up, in real time.
    pub const LINK: u16 = 0x0400;
}

/// Bits of [`GIGABIT_STATUS`]: the local and the remote receiver are well, and the partner can do
/// 1000BASE-T, full and half duplex.
pub const GIGABIT_GOOD: u16 = 0x3c00;
/// [`PARTNER`] of a switch: 10 and 100 Mbit/s, full and half duplex, acknowledged, no pause.
pub const PARTNER_ABILITY: u16 = 0x41e1;
/// [`ADVERTISEMENT`] after a reset: 10 and 100 Mbit/s, full and half duplex, IEEE 802.3.
pub const ADVERTISED: u16 = 0x01e1;
/// [`GIGABIT_CONTROL`] after a reset: 1000BASE-T, full and half duplex.
pub const GIGABIT_ADVERTISED: u16 = 0x0300;
/// [`EXTENDED_STATUS`]: 1000BASE-T, full and half duplex.
pub const GIGABIT_ABLE: u16 = 0x3000;
/// [`EXPANSION`]: the partner can negotiate, and a page came.
pub const PARTNER_NEGOTIATES: u16 = 0x0003;
