//! The controller's registers in BAR0 (section 3.1).

/// Offsets of registers in bytes from the start of BAR0 (section 3.1, figure "Register
/// Definition").
pub mod offset {
    /// CAP, controller capabilities, 64 bits (section 3.1.1).
    pub const CAP: u64 = 0x00;
    /// VS, version, 32 bits (section 3.1.2).
    pub const VS: u64 = 0x08;
    /// INTMS, interrupt mask set, 32 bits, for pin and MSI interrupts (section 3.1.3).
    pub const INTMS: u64 = 0x0c;
    /// INTMC, interrupt mask clear, 32 bits (section 3.1.4).
    pub const INTMC: u64 = 0x10;
    /// CC, controller configuration, 32 bits (section 3.1.5).
    pub const CC: u64 = 0x14;
    /// CSTS, controller status, 32 bits (section 3.1.6).
    pub const CSTS: u64 = 0x1c;
    /// NSSR, NVM subsystem reset, 32 bits (section 3.1.7).
    pub const NSSR: u64 = 0x20;
    /// AQA, admin queue attributes, 32 bits (section 3.1.8).
    pub const AQA: u64 = 0x24;
    /// ASQ, admin submission queue base address, 64 bits (section 3.1.9).
    pub const ASQ: u64 = 0x28;
    /// ACQ, admin completion queue base address, 64 bits (section 3.1.10).
    pub const ACQ: u64 = 0x30;
    /// The first doorbell register (section 3.1, SQ0TDBL).
    pub const DOORBELLS: u64 = 0x1000;
}

/// Returns the number of the doorbell register of a submission queue's tail, with CAP.DSTRD = 0
/// (section 3.1, SQyTDBL). Four times the number is the offset in bytes from [`offset::DOORBELLS`].
pub const fn tail_doorbell(queue: u16) -> usize {
    2 * queue as usize
}

/// Returns the number of the doorbell register of a completion queue's head, with CAP.DSTRD = 0
/// (section 3.1, CQyHDBL).
pub const fn head_doorbell(queue: u16) -> usize {
    2 * queue as usize + 1
}

/// VS of the specification's revision, 1.4.0 (section 3.1.2).
pub const VERSION_1_4: u32 = 0x0001_0400;

/// The controller capabilities register, CAP (section 3.1.1). Fields that are not listed are zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities(pub u64);

impl Capabilities {
    /// Returns MQES: most entries of an I/O queue, as a plain count (the register holds one less).
    pub const fn queue_entries(self) -> u32 {
        (self.0 & 0xffff) as u32 + 1
    }

    /// Returns CQR: whether queues must be physically contiguous.
    pub const fn contiguous_queues(self) -> bool {
        self.0 >> 16 & 1 == 1
    }

    /// Returns TO: longest time for CSTS.RDY to follow CC.EN, in units of 500 ms.
    pub const fn timeout(self) -> u8 {
        (self.0 >> 24) as u8
    }

    /// Returns DSTRD: doorbells are `4 << DSTRD` bytes apart.
    pub const fn doorbell_stride(self) -> u8 {
        (self.0 >> 32) as u8 & 0xf
    }

    /// Returns CSS bit 0: whether the NVM command set is supported.
    pub const fn nvm_commands(self) -> bool {
        self.0 >> 37 & 1 == 1
    }

    /// Returns MPSMIN: the smallest memory page is `4096 << MPSMIN` bytes.
    pub const fn page_min(self) -> u8 {
        (self.0 >> 48) as u8 & 0xf
    }

    /// Returns MPSMAX: the largest memory page is `4096 << MPSMAX` bytes.
    pub const fn page_max(self) -> u8 {
        (self.0 >> 52) as u8 & 0xf
    }

    /// Returns the capabilities of a controller with contiguous queues of at most `queue_entries`
    /// (2 to 65,536) entries, the NVM command set, a doorbell stride of 4 bytes, pages of 4096 to
    /// `4096 << page_max` bytes and a ready timeout of `timeout` times 500 ms.
    pub const fn new(queue_entries: u32, timeout: u8, page_max: u8) -> Self {
        let entries = (queue_entries - 1) as u64 & 0xffff;
        Self(entries | 1 << 16 | (timeout as u64) << 24 | 1 << 37 | (page_max as u64 & 0xf) << 52)
    }
}

/// The controller configuration register, CC (section 3.1.5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Configuration(pub u32);

impl Configuration {
    /// The defined bits of CC; the others are reserved.
    pub const DEFINED: u32 = 0x00ff_fff1;

    /// CSS, MPS and AMS, which a host may change only while EN is 0.
    pub const FROZEN: u32 = 0x3ff0;

    /// Returns EN: whether the controller shall process commands.
    pub const fn enabled(self) -> bool {
        self.0 & 1 == 1
    }

    /// Returns CSS: the I/O command set; 0 is the NVM command set, 7 none (admin only).
    pub const fn command_set(self) -> u8 {
        (self.0 >> 4) as u8 & 7
    }

    /// Returns MPS: memory pages have `4096 << MPS` bytes.
    pub const fn page_shift(self) -> u8 {
        (self.0 >> 7) as u8 & 0xf
    }

    /// Returns AMS: the arbitration mechanism; 0 is round robin.
    pub const fn arbitration(self) -> u8 {
        (self.0 >> 11) as u8 & 7
    }

    /// Returns SHN: the shutdown notification.
    pub const fn shutdown(self) -> u8 {
        (self.0 >> 14) as u8 & 3
    }

    /// Returns IOSQES: submission queue entries have `1 << IOSQES` bytes.
    pub const fn submission_entry_shift(self) -> u8 {
        (self.0 >> 16) as u8 & 0xf
    }

    /// Returns IOCQES: completion queue entries have `1 << IOCQES` bytes.
    pub const fn completion_entry_shift(self) -> u8 {
        (self.0 >> 20) as u8 & 0xf
    }

    /// SHN "no notification".
    pub const SHUTDOWN_NONE: u8 = 0;
    /// SHN "normal shutdown".
    pub const SHUTDOWN_NORMAL: u8 = 1;
    /// SHN "abrupt shutdown".
    pub const SHUTDOWN_ABRUPT: u8 = 2;
    /// EN with entries of 64 and 16 bytes and 4 KiB pages, as drivers write it.
    pub const ENABLE: Self = Self(1 | 6 << 16 | 4 << 20);

    /// Returns the configuration with another shutdown notification.
    pub const fn with_shutdown(self, shutdown: u8) -> Self {
        Self(self.0 & !(3 << 14) | (shutdown as u32 & 3) << 14)
    }
}

/// The controller status register, CSTS (section 3.1.6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ControllerStatus(pub u32);

impl ControllerStatus {
    /// RDY: the controller is ready for commands.
    pub const READY: u32 = 1;
    /// CFS, controller fatal status.
    pub const FATAL: u32 = 1 << 1;
    /// SHST "shutdown processing occurring".
    pub const SHUTDOWN_OCCURRING: u32 = 1 << 2;
    /// SHST "shutdown processing complete".
    pub const SHUTDOWN_COMPLETE: u32 = 2 << 2;
    /// Both bits of SHST.
    pub const SHUTDOWN_MASK: u32 = 3 << 2;

    /// Returns RDY: whether commands are processed.
    pub const fn ready(self) -> bool {
        self.0 & Self::READY != 0
    }

    /// Returns CFS: whether the controller met a fatal error and waits for a reset.
    pub const fn fatal(self) -> bool {
        self.0 & Self::FATAL != 0
    }

    /// Returns whether SHST reports shutdown as complete.
    pub const fn shutdown_complete(self) -> bool {
        self.0 & Self::SHUTDOWN_MASK == Self::SHUTDOWN_COMPLETE
    }

    /// Returns whether SHST reports shutdown as in progress.
    pub const fn shutdown_occurring(self) -> bool {
        self.0 & Self::SHUTDOWN_MASK == Self::SHUTDOWN_OCCURRING
    }
}

/// The admin queue attributes register, AQA (section 3.1.8).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdminQueueAttributes(pub u32);

impl AdminQueueAttributes {
    /// The defined bits of AQA; the others are reserved.
    pub const DEFINED: u32 = 0x0fff_0fff;

    /// Returns ASQS: entries of the admin submission queue, as a plain count, 1 to 4096 (1 is
    /// invalid).
    pub const fn submission_entries(self) -> u32 {
        (self.0 & 0xfff) + 1
    }

    /// Returns ACQS: entries of the admin completion queue, as a plain count, 1 to 4096 (1 is
    /// invalid).
    pub const fn completion_entries(self) -> u32 {
        (self.0 >> 16 & 0xfff) + 1
    }

    /// Returns the attributes of two queues with `entries` (2 to 4096) entries each.
    pub const fn new(entries: u32) -> Self {
        let size = (entries - 1) & 0xfff;
        Self(size << 16 | size)
    }
}
