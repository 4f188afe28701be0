//! Control groups of sandboxes, and a pool of groups that were made ahead (RunD-V, section IV.A).
//!
//! A sandbox's VMM runs in a [`Group`]: one directory in each hierarchy of cgroup v1, or one in
//! cgroup v2's. Making a group takes the kernel longer than anything else that a sandbox needs of
//! control groups, and groups that are made at the same time wait for each other. So a [`Pool`] has
//! groups that are made:
//! - [`Pool::take`] removes one from a list. Its name stays what it is: cgroup v2 refuses
//!   rename(2), and on v1 a renamed group costs more than a kept name;
//! - [`Pool::give_back`] hands a group to the pool's thread. Once the group's last process is gone,
//!   the thread frees the page cache that is charged to it (the next sandbox would pay for it),
//!   resets what can be reset, checks the result and lists the group again. A group that does not
//!   come clean is removed;
//! - the thread makes groups until the pool has as many as its setting says. While groups are
//!   ready, it makes none as long as requests are served, nor right after a group was taken.
//!
//! Requests for groups take turns in the order of arrival ([`Pool::turn`]), as many at once as
//! there are CPUs: the kernel's locks of control groups let some wait far longer than others.
//!
//! Counters that the kernel cannot reset ([`Counters`]) are read when a group enters the list,
//! where nothing changes them, and are subtracted later ([`Group::usage`]).
//!
//! A pool's groups have a tag in their names, one for each data directory. A daemon that takes over
//! after a crash passes the names that its records own to [`Pool::open`], and the pool takes all
//! others of its tag.
//!
//! [`Moves`] tells whether the host's kernel favours moves of processes by others.
//!
//! A group can be confined to CPUs and memory nodes of the host ([`Hierarchies::confine`]).
//!
//! Where the daemon's own group is delegated to it (systemd's `Delegate=yes` on cgroup v2), all
//! groups are below that group ([`Hierarchies::of_host`]).
//!
//! Dependencies: `rustix` for access checks, extended attributes and the priority of the pool's
//! thread; `serde` for the counters in a sandbox's record; `thiserror`, `tracing`.

mod counters;
mod cpuset;
mod error;
mod group;
mod hierarchy;
mod limits;
mod moves;
mod parents;
mod pool;
mod reset;
mod turns;

pub use counters::Counters;
pub use cpuset::Sets;
pub use error::{Error, Result};
pub use group::{Group, Usage};
pub use hierarchy::{Hierarchies, ROOT, V1_CONTROLLERS};
pub use limits::Limits;
pub use moves::{FAVORDYNMODS, Moves};
pub use pool::{Pool, PoolCounts, Settings};
pub use turns::Slot;
