//! The entries of the fuzz targets.

pub use crate::snapshot::moved::fuzz::description as import;
pub use crate::templates::fuzz::description as template;
