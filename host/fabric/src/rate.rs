//! Rates, as the interface has them.

use slipway_switch::Rate;

/// Returns the rate for bytes per second and a burst in bytes, or `None` for any rate: both are 0.
/// A burst without a rate is a rate of 0, which the switch refuses.
pub fn rate(per_second: u64, burst: u64) -> Option<Rate> {
    ((per_second, burst) != (0, 0)).then_some(Rate { per_second, burst })
}
