//! The slots of an endpoint's shelf.

/// The number of shelf slots of one endpoint.
pub const KEPT_SLOTS: u32 = slipway_keeper::SHELF;
/// The slots that the endpoint leaves to its host.
pub const HOST_SLOTS: std::ops::Range<u32> = 8..64;

pub(crate) const LISTENER: u32 = 1;
pub(crate) const CLIENT: u32 = 2;
/// The slot of the doorbell page that the client maps.
pub(crate) const DOORBELLS: u32 = 3;
/// The slot of the eventfd that the client raises instead of sending messages.
pub(crate) const BELL: u32 = 4;
pub(crate) const LINES: std::ops::Range<u32> = 64..256;
pub(crate) const REGIONS: std::ops::Range<u32> = 256..KEPT_SLOTS;
