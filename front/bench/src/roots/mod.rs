//! Measurements of roots: many owners ask for a root at the same time, and each reads the first
//! block of its image and of its volatile layer, in several ways in turn (ABAB, never AABB).
//!
//! A root is an NVMe controller on a vfio-user socket, with an image that all share as namespace 1,
//! and a volatile layer on a template as namespace 2. Owners have memory and a small driver in
//! place of a VMM and a guest.
//!
//! - [`RootLoad`]: the number of owners, the number of requests that are served at once, and
//!   whether the files are in the page cache;
//! - [`RootWay`]: a way to a root, which is the subject. [`Way::Made`] makes a function when it is
//!   asked for, [`Way::Ready`] has made it before, and [`Way::Floor`] has also connected it: two
//!   reads are left;
//! - [`RootServer`]: makes functions, as the plane does; [`RootFiles`]: what they are made of;
//! - [`DiskUse`]: requests and bytes of the files' disk meanwhile (RunD-V, figures 4, 5 and 13);
//! - [`Measurement::take`](crate::Measurement::take) runs a [`RootPlan`]; [`RootReport`] is
//!   everything measured, as JSON; [`root_table`] shows it.

mod disk;
mod files;
mod load;
mod owner;
mod report;
mod subjects;
mod table;
mod turn;

pub use disk::DiskUse;
pub use files::RootFiles;
pub use load::RootLoad;
pub use report::{RootMeasured, RootPlan, RootReport, RootSubject};
pub use subjects::{RootServer, RootWay, Way};
pub use table::root_table;
