//! Decorators of disks: for tests (faults, delays) and for statistics (traces).

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
