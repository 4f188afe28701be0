//! The locks that `devset` and `table` use. Their loom test replaces this file with loom's.

pub(crate) use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};
