//! The family that this process belongs to.

use std::sync::Arc;

use slipway_socket::Family;
use slipway_socket::lock::Lock;

/// The family, if this process has one.
pub static FAMILY: Lock<Option<Arc<Family>>> = Lock::new(None);
/// Prints one line on standard error if `SLIPWAY_LOG` is set.
pub fn log(text: std::fmt::Arguments<'_>) {
    if std::env::var_os("SLIPWAY_LOG").is_some() {
        eprintln!("libslipway: {text}");
    }
}

/// Returns the family, or `None` if this process has none or its engine is gone.
pub fn known() -> Option<Arc<Family>> {
    FAMILY.hold().clone().filter(|family| !family.is_dead())
}
