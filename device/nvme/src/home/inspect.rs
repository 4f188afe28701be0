//! The view of a controller's own thread.

use super::Home;
use crate::inspect::{ControllerView, ThreadView};
use crate::phase::{Phase, Shutdown};

impl Home {
    /// Returns a view of the controller's registers and of its own thread.
    pub fn inspect(&self) -> ThreadView {
        let controller = ControllerView {
            phase: phase(self.phase).to_owned(),
            shutdown: shutdown(self.shutdown).to_owned(),
            cc: self.registers.configuration.0,
            csts: self.registers.status.0,
            waiting_admin: self.deletions.len() + self.fleet.pending_admin(),
        };
        ThreadView { controller: Some(controller), ..ThreadView::new(&self.engine) }
    }
}

fn phase(phase: Phase) -> &'static str {
    match phase {
        Phase::Disabled => "disabled",
        Phase::Enabled => "enabled",
        Phase::Resetting => "resetting",
        Phase::Refused => "refused",
    }
}

fn shutdown(shutdown: Shutdown) -> &'static str {
    match shutdown {
        Shutdown::None => "none",
        Shutdown::Draining => "draining",
        Shutdown::Flushing => "flushing",
        Shutdown::Complete => "complete",
    }
}
