//! The entropy device (section 5.4): one queue of buffers that the device fills, no configuration.

/// Device type (section 5).
pub const DEVICE_TYPE: u16 = 4;
/// The number of the one queue, requestq (section 5.4.2).
pub const REQUEST_QUEUE: u16 = 0;
