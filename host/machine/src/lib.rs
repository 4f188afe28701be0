//! The agreement between `slipway-vmm`, the programs that start it, and the runtime of sandboxes:
//! the processor that a guest sees ([`Template`]), regions of hot-plug memory ([`HotRegion`]),
//! the size of a saved machine ([`MAX_STATE_BYTES`]), the stream of its memory ([`pages`]), the
//! message to a VMM that was started ahead ([`spare`]), and the time for which a guest waits for a
//! function's server ([`FUNCTION_PATIENCE`]).
//!
//! A [`Host`] is what KVM offers on a machine. [`Host::features`] makes of it the CPUID leaves of
//! one virtual CPU. It is a pure function of the host, the template, and the number of the CPU, so
//! that it is tested with the leaves of other machines:
//! - module `whole` has [`Template::Host`]: everything that KVM offers, less what no guest can use;
//! - module `level` has the other templates: exactly the features of a level, on a processor that
//!   is made up, but for its vendor, and for the bits that tell a guest which flaws of speculative
//!   execution the processor has, and how to work around them. Its parts are the tables of
//!   `slipway-cpuid-spec`.
//!
//! Not implemented: templates of other people's making, masks of model-specific registers. A
//! template keeps guests alike; it is no barrier: most instructions that it hides still work.
//!
//! Dependencies: `kvm-ioctls` and `kvm-bindings`, of the rust-vmm project, for KVM's interface;
//! `thiserror`.

mod error;
mod host;
mod hot_memory;
mod level;
mod offer;
pub mod pages;
pub mod spare;
mod whole;

pub use error::{Error, Result};
pub use host::{Host, processor};
pub use hot_memory::{HotRegion, MAX_HOLE, MAX_HOT_REGIONS, MAX_NODE};
pub use level::PHYSICAL_BITS;
pub use slipway_cpuid_spec::speculation::speculation;
pub use slipway_cpuid_spec::{Leaf, Level, Template};

use std::time::Duration;

/// The most bytes of a saved machine without its memory: 64 MiB. CPUs take some 20 KiB each,
/// functions what they have in flight, at most 2 MiB each.
pub const MAX_STATE_BYTES: usize = 64 << 20;

/// The longest time that an access of a guest waits for its function's server, a restart of the
/// server included; `slipway-vmm` then takes the function as broken for good, and its registers
/// read as all ones. Whoever started the VMM tries for as long to connect the function again. A
/// function that nobody accesses waits for any time.
pub const FUNCTION_PATIENCE: Duration = Duration::from_secs(60);
