//! Decorators: disks that wrap another disk and change or observe its requests.
//!
//! They are for tests: no endpoint has one, and no user can ask for one.
//!
//! A new decorator is a module here with a [`Disk`](crate::Disk) that has a field `inner`, the
//! methods of `forward_to_inner`, and `submit`, `poll`, `cancel` and `wake_descriptor` of its own.
//! It is exported here and in `lib.rs`, whose head lists it; its tests are in `tests/decorate.rs`.
//! To offer it to users is to add a kind of disk: the head of `open` in `host/disks`.

/// The methods that every decorator forwards to the disk behind it, its field `inner`.
macro_rules! forward_to_inner {
    () => {
        fn geometry(&self) -> $crate::Geometry {
            self.inner.geometry()
        }

        fn refresh(&mut self) -> $crate::Geometry {
            self.inner.refresh()
        }

        fn release(&mut self) {
            self.inner.release();
        }

        fn copies(&self, operation: $crate::Operation) -> bool {
            self.inner.copies(operation)
        }

        fn bounds_reads(&self) -> bool {
            self.inner.bounds_reads()
        }

        fn allow(&mut self, bytes: u64) {
            self.inner.allow(bytes);
        }

        fn spent(&mut self) -> $crate::Spent {
            self.inner.spent()
        }
    };
}
use forward_to_inner;

mod delay;
mod fault;
mod trace;

pub use delay::DelayDisk;
pub use fault::{FaultDisk, FaultRule};
pub use trace::{DiskStats, Figures, TraceDisk};
