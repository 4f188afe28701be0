//! Enable, reset, shutdown, fatal errors (sections 3.1.5, 3.1.6, 7.3, 7.6).
//!
//! Nothing here waits: each poll takes the steps that are due.

use serde::{Deserialize, Serialize};
use slipway_nvme_spec::NSID_ALL;
use slipway_nvme_spec::registers::{Configuration, ControllerStatus};
use slipway_nvme_spec::status::Status;

use crate::cell::Cell;
use crate::controller::Controller;
use crate::events::Events;
use crate::inflight::{Command, CommandKind};
use crate::journal::Ticket;
use crate::queue::{CompletionQueue, SubmissionQueue};
use crate::registers::PAGE_MAX;

/// The state of a controller between resets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Phase {
    /// CC.EN is 0, or was 0 at the last look. There are no queues.
    Disabled,
    /// CSTS.RDY is 1.
    Enabled,
    /// The controller waits for the disks after CC.EN fell, or after a function-level reset.
    Resetting,
    /// The controller could not be enabled; CSTS.CFS is 1.
    Refused,
}

/// The progress of a shutdown (section 7.6.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Shutdown {
    None,
    /// The controller waits for commands in flight.
    Draining,
    /// The controller waits for the flush of every disk.
    Flushing,
    Complete,
}

impl Controller {
    /// Returns whether commands are started.
    pub(crate) fn is_running(&self) -> bool {
        self.may_post() && self.shutdown == Shutdown::None
    }

    /// Returns whether completions go to the guest.
    pub(crate) fn may_post(&self) -> bool {
        self.phase == Phase::Enabled && !self.registers.status.fatal()
    }

    /// Sets the fatal status: the controller stops until the host resets it (section 9.5).
    pub(crate) fn fail(&mut self) {
        self.changed = true;
        let before = self.registers.status;
        self.registers.status.0 |= ControllerStatus::FATAL;
        let serving = self.lanes.as_ref().is_some_and(|lanes| !lanes.stopped);
        if !before.fatal() && !self.report(|outbox| outbox.fatal = true) && serving {
            self.order(|lane| lane.registers.status.0 |= ControllerStatus::FATAL);
        }
    }

    /// Handles a write to CC, whose value was `old`.
    pub(crate) fn configured(&mut self, old: Configuration) {
        let new = self.registers.configuration;
        if old.enabled() && !new.enabled() {
            self.begin_reset();
        }
        let none = Configuration::SHUTDOWN_NONE;
        let asked = old.shutdown() == none && new.shutdown() != none;
        if asked && self.shutdown == Shutdown::None {
            self.shutdown = Shutdown::Draining;
            self.set_shutdown_status(ControllerStatus::SHUTDOWN_OCCURRING);
            self.stop_lanes();
        }
    }

    /// Takes every step that is due. Returns whether there was one.
    pub(crate) fn advance(&mut self) -> bool {
        let before = (self.phase, self.shutdown);
        if self.phase == Phase::Resetting && self.inflight.is_empty() && self.stop_lanes() {
            if self.lanes.is_some() {
                // Runs what lanes posted before they stopped: it dates from before the reset, and
                // is dropped.
                self.run_jobs();
            }
            self.finish_reset();
        }
        if self.phase == Phase::Disabled && self.registers.configuration.enabled() {
            self.enable();
        }
        self.advance_shutdown();
        let changed = before != (self.phase, self.shutdown);
        self.changed |= changed;
        changed
    }

    /// Begins a controller reset (section 7.3.2): queues and settings go at once; CSTS.RDY falls
    /// when the disks have given back all guest memory.
    pub(crate) fn begin_reset(&mut self) {
        self.registers.status.0 &= !ControllerStatus::FATAL;
        self.drop_queues();
        self.reset_lanes();
        self.events = Events::default();
        self.features = self.default_features();
        for namespace in self.namespaces.iter_mut() {
            namespace.error_recovery = 0;
        }
    }

    /// Gives up all queues. The ends of commands in flight are not reported.
    pub(crate) fn drop_queues(&mut self) {
        self.inflight.orphan_all();
        self.queues.clear();
        if let Some(tracer) = &mut self.tracer {
            tracer.forget();
        }
        self.shadow = None;
        self.phase = Phase::Resetting;
    }

    /// Completes a reset. Nothing is in flight, and lanes have stopped.
    fn finish_reset(&mut self) {
        self.release_memory();
        // Admin commands that waited for lanes or for a queue's end are never ended.
        self.recovered = None;
        if let Some(journal) = &mut self.journal {
            journal.end_own();
        }
        self.phase = Phase::Disabled;
        self.shutdown = Shutdown::None;
        self.registers.status = ControllerStatus::default();
        self.doorbells.clear();
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
        self.keep_alive_since = self.clock.now();
        self.registers.status.0 |= ControllerStatus::READY;
        self.phase = Phase::Enabled;
        self.begin_lanes();
    }

    fn make_admin_queues(&mut self) {
        let epoch = self.journal.as_mut().map_or(0, |journal| {
            journal.open_completion(0);
            journal.open_submission(0)
        });
        let registers = &self.registers;
        self.queues.add_completion(CompletionQueue::new(
            0,
            registers.admin_completion,
            registers.admin_queues.completion_entries(),
            Some(0),
            Cell::new(&self.doorbells, 1),
        ));
        let mut submission = SubmissionQueue::new(
            0,
            0,
            registers.admin_submission,
            registers.admin_queues.submission_entries(),
            Cell::new(&self.doorbells, 0),
        );
        submission.epoch = epoch;
        self.queues.add_submission(submission);
    }

    fn advance_shutdown(&mut self) {
        if self.phase == Phase::Resetting || !self.inflight.is_empty() {
            return;
        }
        match self.shutdown {
            Shutdown::Draining => {
                if !self.stop_lanes() {
                    return;
                }
                self.shutdown = Shutdown::Flushing;
                self.flush_everything();
            }
            Shutdown::Flushing => {
                self.shutdown = Shutdown::Complete;
                self.set_shutdown_status(ControllerStatus::SHUTDOWN_COMPLETE);
            }
            Shutdown::None | Shutdown::Complete => {}
        }
    }

    /// Flushes every disk for a shutdown. Errors are not reported: a host that wants to know of
    /// them sends a Flush before.
    fn flush_everything(&mut self) {
        let parts = self.namespaces.iter().count() as u32;
        if parts == 0 {
            return;
        }
        let slot = self.inflight.insert(Command {
            queue: None,
            id: 0,
            kind: CommandKind::Other,
            nsid: NSID_ALL,
            lba: 0,
            bytes: 0,
            status: Status::SUCCESS,
            parts,
            bounce: None,
            work: None,
            ticket: Ticket::NONE,
        });
        self.flush_parts(NSID_ALL, slot);
    }

    fn set_shutdown_status(&mut self, status: u32) {
        let register = &mut self.registers.status.0;
        *register = *register & !ControllerStatus::SHUTDOWN_MASK | status;
    }
}
