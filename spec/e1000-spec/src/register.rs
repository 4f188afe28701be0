//! Offsets of the registers in BAR 0 (table 13-2).

/// Device Control.
pub const CTRL: u32 = 0x0000;
/// Device Status.
pub const STATUS: u32 = 0x0008;
/// EEPROM/Flash Control and Data.
pub const EECD: u32 = 0x0010;
/// EEPROM Read.
pub const EERD: u32 = 0x0014;
/// Extended Device Control.
pub const CTRL_EXT: u32 = 0x0018;
/// Flash Access.
pub const FLA: u32 = 0x001c;
/// MDI Control: access to the PHY.
pub const MDIC: u32 = 0x0020;
/// Flow Control Address, low.
pub const FCAL: u32 = 0x0028;
/// Flow Control Address, high.
pub const FCAH: u32 = 0x002c;
/// Flow Control Type.
pub const FCT: u32 = 0x0030;
/// VLAN Ether Type.
pub const VET: u32 = 0x0038;
/// Interrupt Cause Read.
pub const ICR: u32 = 0x00c0;
/// Interrupt Throttling.
pub const ITR: u32 = 0x00c4;
/// Interrupt Cause Set.
pub const ICS: u32 = 0x00c8;
/// Interrupt Mask Set/Read.
pub const IMS: u32 = 0x00d0;
/// Interrupt Mask Clear.
pub const IMC: u32 = 0x00d8;
/// Receive Control.
pub const RCTL: u32 = 0x0100;
/// Flow Control Transmit Timer Value.
pub const FCTTV: u32 = 0x0170;
/// Transmit Configuration Word.
pub const TXCW: u32 = 0x0178;
/// Receive Configuration Word.
pub const RXCW: u32 = 0x0180;
/// Transmit Control.
pub const TCTL: u32 = 0x0400;
/// Transmit Inter Packet Gap.
pub const TIPG: u32 = 0x0410;
/// Adaptive IFS Throttle.
pub const AIFS: u32 = 0x0458;
/// LED Control.
pub const LEDCTL: u32 = 0x0e00;
/// Packet Buffer Allocation.
pub const PBA: u32 = 0x1000;
/// Flow Control Receive Threshold, low.
pub const FCRTL: u32 = 0x2160;
/// Flow Control Receive Threshold, high.
pub const FCRTH: u32 = 0x2168;
/// Receive Descriptor Base Address, low.
pub const RDBAL: u32 = 0x2800;
/// Receive Descriptor Base Address, high.
pub const RDBAH: u32 = 0x2804;
/// Receive Descriptor Length.
pub const RDLEN: u32 = 0x2808;
/// Receive Descriptor Head.
pub const RDH: u32 = 0x2810;
/// Receive Descriptor Tail.
pub const RDT: u32 = 0x2818;
/// Receive Delay Timer.
pub const RDTR: u32 = 0x2820;
/// Receive Descriptor Control.
pub const RXDCTL: u32 = 0x2828;
/// Receive Interrupt Absolute Delay Timer.
pub const RADV: u32 = 0x282c;
/// Communication status block, address low and enable; an extension ([`crate::csb`]).
pub const CSBAL: u32 = 0x2830;
/// Communication status block, address high; an extension ([`crate::csb`]).
pub const CSBAH: u32 = 0x2834;
/// Communication status block, kick; an extension ([`crate::csb`]).
pub const CSBK: u32 = 0x2838;
/// Receive Small Packet Detect.
pub const RSRPD: u32 = 0x2c00;
/// Transmit DMA Control.
pub const TXDMAC: u32 = 0x3000;
/// Transmit Descriptor Base Address, low.
pub const TDBAL: u32 = 0x3800;
/// Transmit Descriptor Base Address, high.
pub const TDBAH: u32 = 0x3804;
/// Transmit Descriptor Length.
pub const TDLEN: u32 = 0x3808;
/// Transmit Descriptor Head.
pub const TDH: u32 = 0x3810;
/// Transmit Descriptor Tail.
pub const TDT: u32 = 0x3818;
/// Transmit Interrupt Delay Value.
pub const TIDV: u32 = 0x3820;
/// Transmit Descriptor Control.
pub const TXDCTL: u32 = 0x3828;
/// Transmit Absolute Interrupt Delay Value.
pub const TADV: u32 = 0x382c;
/// TCP Segmentation Pad and Minimum Threshold.
pub const TSPMT: u32 = 0x3830;
/// Receive Checksum Control.
pub const RXCSUM: u32 = 0x5000;
/// Multicast Table Array, first of 128 words.
pub const MTA: u32 = 0x5200;
/// Receive Address Low, first; RAH follows, then the next pair.
pub const RAL: u32 = 0x5400;
/// VLAN Filter Table Array, first of 128 words.
pub const VFTA: u32 = 0x5600;
/// Wake Up Control.
pub const WUC: u32 = 0x5800;
/// Wake Up Filter Control.
pub const WUFC: u32 = 0x5808;
/// Wake Up Status.
pub const WUS: u32 = 0x5810;
/// Management Control.
pub const MANC: u32 = 0x5820;
/// IP Address Valid.
pub const IPAV: u32 = 0x5838;
