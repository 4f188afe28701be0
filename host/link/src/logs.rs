//! Log lines that other engines can cause, limited to one a second after a burst.

use std::fmt::Display;
use std::time::Instant;

use slipway_rate::Lines;

/// Lines at once after a pause.
const BURST: u64 = 5;

pub(crate) struct Logs(Lines);

impl Logs {
    pub(crate) fn new(now: Instant) -> Self {
        Self(Lines::new(BURST, now))
    }

    /// Logs a warning about another engine, if the limit allows.
    pub(crate) fn warn(&mut self, now: Instant, engine: &str, what: &dyn Display) {
        if let Some(dropped) = self.0.may(now) {
            tracing::warn!(engine, dropped, "{what}");
        }
    }
}
