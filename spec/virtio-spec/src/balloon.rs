//! The memory balloon device (section 5.5): pages that the driver gives up, or reports as free.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::U32;

/// Device type (section 5).
pub const DEVICE_TYPE: u16 = 5;

/// Numbers of queues (section 5.5.2).
pub mod queue {
    /// inflateq: numbers of pages that the driver gives up.
    pub const INFLATE: u16 = 0;
    /// deflateq: numbers of pages that the driver takes back.
    pub const DEFLATE: u16 = 1;
    /// reporting_vq, as the specification has it.
    pub const REPORTING: u16 = 4;
    /// reporting_vq, as Linux and QEMU have it without the queues of features that are not offered
    /// (statsq and free_page_vq).
    pub const REPORTING_WITHOUT_OTHERS: u16 = 2;
}

bitflags::bitflags! {
    /// Feature bits (section 5.5.3).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct Features: u64 {
        /// VIRTIO_BALLOON_F_PAGE_POISON: the driver says what it fills free pages with.
        const PAGE_POISON = 1 << 4;
        /// VIRTIO_BALLOON_F_PAGE_REPORTING: the driver reports ranges of free pages.
        const PAGE_REPORTING = 1 << 5;
    }
}

/// `struct virtio_balloon_config` (section 5.5.4).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Config {
    /// The pages of 4 KiB that the device asks the driver to give up.
    pub num_pages: U32,
    /// The pages of 4 KiB that the driver has given up.
    pub actual: U32,
    /// The command of free page hinting.
    pub free_page_hint_cmd_id: U32,
    /// The value with which the driver fills free pages, valid with [`Features::PAGE_POISON`].
    pub poison_val: U32,
}
