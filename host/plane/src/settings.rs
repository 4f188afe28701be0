//! Settings of a plane.

use std::time::Duration;

/// The configuration of a plane.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// The number of threads that serve devices, at least 1.
    pub reactors: u32,
    /// The longest time for which such a thread polls for more work before it sleeps: see
    /// [`slipway_reactor::Settings::poll_budget`].
    pub poll_budget: Duration,
    /// The most bytes of memory that a pool holds for sandboxes to come; `None` makes no pool,
    /// unless it is for templates.
    pub pool: Option<u64>,
    /// Set if recycled memory of the pool is zeroed when somebody first needs it, where a keeper
    /// holds it. Otherwise it is zeroed before it is given.
    pub late_zeroing: bool,
    /// Set if there is a pool for memory that begins as a template, where the kernel has what it
    /// needs.
    pub templates: bool,
    /// The most bytes of memory that is ready for forks of templates; 0 has none ready.
    pub spare_bytes: u64,
    /// The most bytes of memory that the overlays of all endpoints hold together.
    pub overlays: u64,
}

impl Default for Settings {
    /// Returns one thread, which polls for more work for 200 us, and no bound for overlays.
    fn default() -> Self {
        let poll_budget = slipway_reactor::Settings::default().poll_budget;
        Self {
            reactors: 1,
            poll_budget,
            pool: None,
            late_zeroing: true,
            templates: false,
            spare_bytes: 0,
            overlays: u64::MAX,
        }
    }
}
