//! Controllers with lanes. All other tests of this crate run with lanes too: see
//! [`everything_with_two_lanes`].

use std::process::Command;
use std::task::Waker;

use slipway_pci::{Function, Progress};

use crate::Controller;

/// The environment variable with the number of lanes of test controllers that do not choose one.
const VARIABLE: &str = "SLIPWAY_NVME_TEST_LANES";

/// Returns the number of lanes of a test's controller.
pub fn wanted() -> u16 {
    std::env::var(VARIABLE).ok().and_then(|lanes| lanes.parse().ok()).unwrap_or(1)
}

impl Controller {
    /// Makes the controller poll its lanes itself, in its own polls, as a host with one thread for
    /// all would.
    pub fn with_lanes_beside(mut self) -> Self {
        let wakers = vec![Waker::noop().clone(); usize::from(self.home.engine.limits.lanes) - 1];
        self.beside = self.take_lanes(Waker::noop().clone(), wakers);
        self
    }

    pub(crate) fn poll_beside(&mut self, found: Progress) -> Progress {
        let mut lanes = std::mem::take(&mut self.beside);
        let found = lanes.iter_mut().fold(found, |found, lane| join(found, lane.poll()));
        self.beside = lanes;
        // A lane's message for the home wakes the home.
        let mail = !self.beside.is_empty() && self.home.fleet.has_post();
        if mail { join(found, Progress::Busy) } else { found }
    }

    pub(crate) fn rest_beside(&mut self, found: Progress) -> Progress {
        let mut lanes = std::mem::take(&mut self.beside);
        let found = lanes.iter_mut().fold(found, |found, lane| join(found, lane.rest()));
        self.beside = lanes;
        found
    }

    pub(crate) fn quiesce_beside(&mut self, quiet: bool) -> bool {
        if self.beside.is_empty() {
            return quiet;
        }
        for _ in 0..4 {
            self.beside.iter_mut().for_each(|lane| {
                lane.poll();
            });
        }
        let quiet = self.home.fleet.stop() && self.home.engine.inflight.is_empty();
        if quiet {
            self.home.collect_reports();
            self.home.engine.release_memory();
        }
        quiet
    }
}

/// Combines the progress of two parts of a function.
fn join(one: Progress, other: Progress) -> Progress {
    use Progress::{Behind, Busy, Idle, Watching};
    let first = |a: Option<_>, b: Option<_>| a.into_iter().chain(b).min();
    match (one, other) {
        (Behind, _) | (_, Behind) => Behind,
        (Busy, _) | (_, Busy) => Busy,
        (Watching(a), Watching(b) | Idle(b)) | (Idle(a), Watching(b)) => Watching(first(a, b)),
        (Idle(a), Idle(b)) => Idle(first(a, b)),
    }
}

#[test]
fn everything_with_two_lanes() {
    if std::env::var_os(VARIABLE).is_some() {
        return;
    }
    let run = Command::new(std::env::current_exe().unwrap())
        .env(VARIABLE, "2")
        // The tests of `killed` choose their own numbers of threads.
        .args(["tests::", "--skip", "tests::killed", "--test-threads", "2"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success(), "with two lanes:\n{said}");
    assert!(!said.contains(" 0 passed"), "nothing was run:\n{said}");
}
