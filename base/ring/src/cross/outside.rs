//! What `index` has around it; its loom test has atomics of loom's there.

pub(crate) use std::sync::atomic::{AtomicU64, Ordering, fence};
