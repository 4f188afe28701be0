//! Charges to tenants whose memory makes the carrier sleep (`slipway_family::Stalls`).

use std::time::Instant;

use slipway_family::Stalls;

use super::guest::Tenants;
use crate::log::Log;

/// The means to charge tenants, while other parts of the carrier's state are in use.
pub struct Charger<'a> {
    /// The tenants that have to pay.
    pub stalls: &'a mut Stalls<Tenants>,
    /// The log, which has a line for a tenant that stands still.
    pub log: &'a mut Log,
}

impl Charger<'_> {
    /// Charges these tenants if the thread slept in the work since the last call, which was for
    /// them. Without tenants, nobody pays.
    pub fn charge(&mut self, tenants: Option<&Tenants>) {
        let Some((slept, tenants)) = self.stalls.slept().zip(tenants) else { return };
        if self.stalls.charge(tenants, slept) {
            let ([one, other], millis) = (tenants, slept.as_millis());
            let text = format_args!(
                "all streams with guests waited {millis} ms for memory of tenant {one} or {other}: \
                 the streams between the two stand still for a while"
            );
            self.log.line("stall", text);
        }
    }

    /// Has nobody pay for the work since the last charge.
    pub fn skip(&mut self) {
        if self.stalls.is_alert() {
            self.stalls.begin(Instant::now());
        }
    }

    /// Returns whether these tenants are left out.
    pub fn is_left_out(&self, tenants: &Tenants) -> bool {
        self.stalls.until(tenants).is_some()
    }
}
