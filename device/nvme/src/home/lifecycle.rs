//! Enable, reset, shutdown, fatal errors (sections 3.1.5, 3.1.6, 7.3, 7.6).
//!
//! Nothing here waits: each poll takes the steps that are due.

use slipway_nvme_spec::registers::{Configuration, ControllerStatus};

use super::Home;
use crate::cell::Cell;
use crate::engine::Mode;
use crate::events::Events;
use crate::phase::{Phase, Shutdown};
use crate::queue::{CompletionQueue, SubmissionQueue};
use crate::registers::PAGE_MAX;

impl Home {
    /// Tells the engine what it may do in the present phase, which has changed.
    pub fn apply_phase(&mut self) {
        self.engine.page_size = self.registers.page_size();
        self.engine.set_failed(self.registers.status.fatal());
        self.engine.set_mode(match (self.phase, self.shutdown) {
            (Phase::Enabled, Shutdown::None) => Mode::Running,
            (Phase::Enabled, _) => Mode::Draining,
            _ => Mode::Off,
        });
    }

    /// Sets the fatal status: the controller stops until the host resets it (section 9.5).
    pub fn fail(&mut self) {
        self.changed = true;
        let before = self.registers.status;
        self.registers.status.0 |= ControllerStatus::FATAL;
        self.apply_phase();
        if !before.fatal() {
            self.fleet.fail();
        }
    }

    /// Handles a write to CC, whose value was `old`.
    pub fn configured(&mut self, old: Configuration) {
        let new = self.registers.configuration;
        if old.enabled() && !new.enabled() {
            self.begin_reset();
        }
        let none = Configuration::SHUTDOWN_NONE;
        let asked = old.shutdown() == none && new.shutdown() != none;
        if asked && self.shutdown == Shutdown::None {
            self.shutdown = Shutdown::Draining;
            self.set_shutdown_status(ControllerStatus::SHUTDOWN_OCCURRING);
            self.fleet.stop();
        }
        self.apply_phase();
    }

    /// Returns whether a reset waits for nothing any more: the disks have given all memory back,
    /// and lanes have stopped.
    pub fn is_reset_due(&mut self) -> bool {
        self.phase == Phase::Resetting && self.engine.inflight.is_empty() && self.fleet.stop()
    }

    /// Takes every other step that is due. Returns whether there was one.
    pub fn advance(&mut self) -> bool {
        let before = (self.phase, self.shutdown);
        if self.phase == Phase::Disabled && self.registers.configuration.enabled() {
            self.enable();
        }
        self.advance_shutdown();
        let changed = before != (self.phase, self.shutdown);
        if changed {
            self.changed = true;
            self.apply_phase();
        }
        changed
    }

    /// Begins a controller reset (section 7.3.2): queues and settings go at once; CSTS.RDY falls
    /// when the disks have given back all guest memory.
    pub fn begin_reset(&mut self) {
        self.registers.status.0 &= !ControllerStatus::FATAL;
        self.phase = Phase::Resetting;
        self.engine.drop_queues();
        self.apply_phase();
        // Admin commands that waited for lanes or for a queue's end are never ended.
        self.deletions.clear();
        self.fleet.reset();
        self.events = Events::default();
        self.features = self.default_features();
        self.tune();
        for namespace in self.engine.namespaces.iter_mut() {
            namespace.error_recovery = 0;
        }
    }

    /// Completes a reset. Nothing is in flight, and lanes have stopped.
    pub fn finish_reset(&mut self) {
        self.engine.release_memory();
        self.recovered.clear();
        if let Some(journal) = &mut self.engine.journal {
            journal.end_own();
        }
        self.phase = Phase::Disabled;
        self.shutdown = Shutdown::None;
        self.registers.status = ControllerStatus::default();
        self.engine.doorbells.clear();
        self.changed = true;
        self.apply_phase();
    }

    /// Enables the controller after CC.EN rose (section 7.6.1). Settings that CAP does not offer
    /// are fatal.
    fn enable(&mut self) {
        let registers = &self.registers;
        let configuration = registers.configuration;
        let page = registers.page_size();
        let aligned = |address: u64| address & (page - 1) == 0;
        let fine = configuration.command_set() == 0
            && configuration.arbitration() == 0
            && configuration.page_shift() <= PAGE_MAX
            && registers.admin_queues.submission_entries() >= 2
            && registers.admin_queues.completion_entries() >= 2
            && aligned(registers.admin_submission)
            && aligned(registers.admin_completion);
        if !fine {
            self.phase = Phase::Refused;
            self.fail();
            return;
        }
        if self.shutdown == Shutdown::Complete && configuration.shutdown() == 0 {
            // The shutdown came while the controller was disabled. Enabling is the reset that ends
            // it.
            self.shutdown = Shutdown::None;
            self.set_shutdown_status(0);
        }
        self.make_admin_queues();
        self.keep_alive_since = self.engine.clock.now();
        self.registers.status.0 |= ControllerStatus::READY;
        self.phase = Phase::Enabled;
        self.apply_phase();
        self.begin_lanes();
    }

    fn make_admin_queues(&mut self) {
        let epoch = self.engine.journal.as_mut().map_or(0, |journal| {
            journal.open_completion(0);
            journal.open_submission(0)
        });
        let registers = &self.registers;
        self.engine.queues.add_completion(CompletionQueue::new(
            0,
            registers.admin_completion,
            registers.admin_queues.completion_entries(),
            Some(0),
            Cell::new(&self.engine.doorbells, 1),
        ));
        let mut submission = SubmissionQueue::new(
            0,
            0,
            registers.admin_submission,
            registers.admin_queues.submission_entries(),
            Cell::new(&self.engine.doorbells, 0),
        );
        submission.epoch = epoch;
        self.engine.queues.add_submission(submission);
    }

    fn advance_shutdown(&mut self) {
        if self.phase == Phase::Resetting || !self.engine.inflight.is_empty() {
            return;
        }
        match self.shutdown {
            Shutdown::Draining => {
                if !self.fleet.stop() {
                    return;
                }
                self.shutdown = Shutdown::Flushing;
                // Errors are not reported: a host that wants to know of them sends a Flush before.
                self.engine.flush_all(None);
            }
            Shutdown::Flushing => {
                self.shutdown = Shutdown::Complete;
                self.set_shutdown_status(ControllerStatus::SHUTDOWN_COMPLETE);
            }
            Shutdown::None | Shutdown::Complete => {}
        }
    }

    fn set_shutdown_status(&mut self, status: u32) {
        let register = &mut self.registers.status.0;
        *register = *register & !ControllerStatus::SHUTDOWN_MASK | status;
    }
}
