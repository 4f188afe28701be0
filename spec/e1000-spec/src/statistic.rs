//! Offsets of the statistics registers (section 13.7). All are cleared when they are read.

/// The first register.
pub const FIRST: u32 = 0x4000;
/// The byte after the last register.
pub const END: u32 = 0x4100;
/// Missed packets: no descriptor was free.
pub const MPC: u32 = 0x4010;
/// Received packets of 64 bytes; those of the following lengths are in the five registers behind.
pub const PRC64: u32 = 0x405c;
/// Good packets received.
pub const GPRC: u32 = 0x4074;
/// Good broadcast packets received.
pub const BPRC: u32 = 0x4078;
/// Good multicast packets received.
pub const MPRC: u32 = 0x407c;
/// Good packets sent.
pub const GPTC: u32 = 0x4080;
/// Good bytes received, low; the high word follows.
pub const GORCL: u32 = 0x4088;
/// Good bytes sent, low; the high word follows.
pub const GOTCL: u32 = 0x4090;
/// Times that no receive buffer was there.
pub const RNBC: u32 = 0x40a0;
/// Received packets that were too short.
pub const RUC: u32 = 0x40a4;
/// Received packets that were too long.
pub const ROC: u32 = 0x40ac;
/// All bytes received, low; the high word follows.
pub const TORL: u32 = 0x40c0;
/// All bytes sent, low; the high word follows.
pub const TOTL: u32 = 0x40c8;
/// All packets received.
pub const TPR: u32 = 0x40d0;
/// All packets sent.
pub const TPT: u32 = 0x40d4;
/// Sent packets of 64 bytes; those of the following lengths are in the five registers behind.
pub const PTC64: u32 = 0x40d8;
/// Multicast packets sent.
pub const MPTC: u32 = 0x40f0;
/// Broadcast packets sent.
pub const BPTC: u32 = 0x40f4;
/// TCP segmentation contexts sent.
pub const TSCTC: u32 = 0x40f8;

/// Returns the number of the register of a packet's length, counted from that of 64 bytes: up to
/// 64, 127, 255, 511, 1023 bytes, or more.
pub fn length_class(bytes: usize) -> u32 {
    match bytes {
        0..=64 => 0,
        65..=127 => 1,
        128..=255 => 2,
        256..=511 => 3,
        512..=1023 => 4,
        _ => 5,
    }
}
