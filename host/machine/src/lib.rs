//! The agreement between `slipway-vmm`, the programs that start it, and the runtime of sandboxes:
//! the processor that a guest sees ([`Template`]), regions of hot-plug memory ([`HotRegion`]), and
//! the size of a saved machine ([`MAX_STATE_BYTES`]).
//!
//! A [`Host`] is what KVM offers on a machine. [`Host::features`] makes of it the CPUID leaves of
//! one virtual CPU. It is a pure function of the host, the template, and the number of the CPU, so
//! that it is tested with the leaves of other machines:
//! - module `whole` has [`Template::Host`]: everything that KVM offers, less what no guest can use;
//! - module `level` has the other templates: exactly the features of a level, from the table in
//!   `features`, on a processor that is made up, but for its vendor (module `vendor`). Module
//!   `leaves` has its caches and topology, module `xsave` its extended state;
//! - module `speculation` has the bits that a template leaves as the host has them: those that tell
//!   a guest which flaws of speculative execution the processor has, and how to work around them.
//!
//! Not implemented: templates of other people's making, masks of model-specific registers. A
//! template keeps guests alike; it is no barrier: most instructions that it hides still work.
//!
//! Dependencies: `kvm-ioctls` and `kvm-bindings`, of the rust-vmm project, for KVM's interface;
//! `thiserror`.

mod error;
mod features;
mod host;
mod hot_memory;
mod leaves;
mod level;
mod offer;
mod speculation;
mod template;
mod vendor;
mod whole;
mod xsave;

pub use error::{Error, Result};
pub use host::Host;
pub use hot_memory::{HotRegion, MAX_HOLE, MAX_HOT_REGIONS, MAX_NODE};
pub use level::PHYSICAL_BITS;
pub use speculation::speculation;
pub use template::{Level, Template};
pub use vendor::processor;

/// The most bytes of a saved machine without its memory: 64 MiB. CPUs take some 20 KiB each,
/// functions what they have in flight, at most 2 MiB each.
pub const MAX_STATE_BYTES: usize = 64 << 20;
