//! The atomics that `sleep` uses. Its loom test replaces this file with loom's.

pub(crate) use std::sync::atomic::{AtomicU64, Ordering, fence};
