//! Admin commands (section 5).
//!
//! A new command has its opcode in `slipway_nvme_spec::opcode::AdminOpcode`, its place in
//! `COMMANDS`, from which log page 5 and the fuzz target `nvme-admin` take it, and its arm in
//! `Home::execute_admin`. What it changes is part of the saved state (`persist::state`) and is
//! there before the command ends: `Home::end_admin` does that. Its bit of OACS (`admin_commands`),
//! if it has one, is in `identify`. Tests (`device/nvme/src/tests`): `admin`, `bad_commands`, and
//! `killed` if it changes state. `docs/disks.md` names the commands of the controller, and
//! `docs/measurements/suites.md` the tests of others that need what it lacks.

mod features;
mod identify;
mod logs;
mod queues;

use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::opcode::AdminOpcode;
use slipway_nvme_spec::status::Status;

use crate::events::EVENT_LIMIT;
use crate::home::Home;
use crate::journal::Done;
use crate::permit::Permit;

/// Most admin commands that start per poll, so that I/O queues get their turns.
const BURST: u32 = 16;

/// The commands that every controller supports. Doorbell Buffer Config depends on the doorbells.
pub(crate) const COMMANDS: [AdminOpcode; 11] = [
    AdminOpcode::DeleteSubmissionQueue,
    AdminOpcode::CreateSubmissionQueue,
    AdminOpcode::GetLogPage,
    AdminOpcode::DeleteCompletionQueue,
    AdminOpcode::CreateCompletionQueue,
    AdminOpcode::Identify,
    AdminOpcode::Abort,
    AdminOpcode::SetFeatures,
    AdminOpcode::GetFeatures,
    AdminOpcode::AsynchronousEventRequest,
    AdminOpcode::KeepAlive,
];

/// Commands that Abort may handle at once, less one (ACL). Abort ends at once, so the number means
/// little.
pub(crate) const ABORT_LIMIT: u8 = 3;

impl Home {
    /// Carries out waiting admin commands. Returns whether there were any.
    pub fn serve_admin(&mut self) -> bool {
        for served in 0..BURST {
            if !self.is_running() {
                return served > 0;
            }
            let Some((entry, permit)) = self.engine.fetch_admin() else { return served > 0 };
            self.execute_admin(&entry, permit);
        }
        true
    }

    /// Carries out an admin command: it ends now, or its permit is kept for its end.
    pub fn execute_admin(&mut self, entry: &SubmissionEntry, permit: Permit) {
        // Over PCI Express the data of admin commands is described by PRPs (section 4.4), and no
        // admin command is fused.
        let plain = entry.fuse() == 0 && entry.data_pointer_type() == 0;
        let ended = match AdminOpcode(entry.opcode) {
            _ if !plain => Err(Status::INVALID_FIELD.dnr()),
            AdminOpcode::DeleteSubmissionQueue => {
                return self.delete_submission_queue(entry, permit);
            }
            AdminOpcode::DeleteCompletionQueue => {
                return self.delete_completion_queue(entry, permit);
            }
            AdminOpcode::Abort => return self.abort(entry, permit),
            AdminOpcode::SetFeatures => return self.set_features(entry, permit),
            AdminOpcode::AsynchronousEventRequest => return self.event_request(permit),
            AdminOpcode::DoorbellBufferConfig => {
                return self.configure_doorbell_buffer(entry, permit);
            }
            AdminOpcode::CreateSubmissionQueue => self.create_submission_queue(entry),
            AdminOpcode::GetLogPage => self.get_log_page(entry),
            AdminOpcode::CreateCompletionQueue => self.create_completion_queue(entry),
            AdminOpcode::Identify => self.identify(entry),
            AdminOpcode::GetFeatures => self.get_features(entry),
            AdminOpcode::KeepAlive => self.keep_alive(),
            _ => Err(Status::INVALID_OPCODE.dnr()),
        };
        let (status, result) = match ended {
            Ok(result) => (Status::SUCCESS, result),
            Err(status) => (status, 0),
        };
        self.end_admin(permit, status, result, entry.nsid.get());
    }

    /// Carries out Keep Alive (section 5.16).
    fn keep_alive(&mut self) -> Result<u32, Status> {
        self.keep_alive_since = self.engine.clock.now();
        Ok(0)
    }

    /// Starts an Asynchronous Event Request (section 5.2). It gives up its slot of the completion
    /// queue while it waits, since it may wait for ever.
    fn event_request(&mut self, permit: Permit) {
        if self.events.requests.len() >= EVENT_LIMIT {
            return self.end_admin(permit, Status::EVENT_LIMIT_EXCEEDED.dnr(), 0, 0);
        }
        self.events.requests.push_back(permit.id);
        self.checkpoint(Some((permit.slot_number, Done::Kept)));
        self.engine.abandon(permit);
    }

    /// Reports events for which there are requests, as far as the admin completion queue has free
    /// slots. Outstanding requests have no slot reserved, since they may wait for ever.
    pub fn deliver_events(&mut self) -> bool {
        let mut busy = false;
        while self.events.is_ready() && self.admin_slot_free() {
            let Some((id, event)) = self.events.take() else { break };
            self.end_event_request(id, Status::SUCCESS, event.dword());
            busy = true;
        }
        busy
    }

    fn admin_slot_free(&mut self) -> bool {
        self.engine.queues.completion(0).is_some_and(|queue| queue.free() > 0)
    }

    /// Carries out Abort (section 5.1): cancels Asynchronous Event Requests, and commands of I/O
    /// queues that the disk has not begun or that stop between two steps. Other commands end by
    /// themselves. Bit 0 of the result is set if the command was not aborted.
    fn abort(&mut self, entry: &SubmissionEntry, permit: Permit) {
        let (queue, id) = (entry.dword(10) as u16, (entry.dword(10) >> 16) as u16);
        let Some(permit) = self.fleet.abort(permit, queue, id) else { return };
        if self.engine.queues.submission(queue).is_none() {
            let status = Status::INVALID_FIELD.dnr();
            return self.end_admin(permit, status, 0, entry.nsid.get());
        }
        let aborted = match queue {
            0 => self.abort_event_request(id),
            _ => self.engine.abort(queue, id),
        };
        self.end_admin(permit, Status::SUCCESS, u32::from(!aborted), 0);
        self.absorb();
    }

    fn abort_event_request(&mut self, id: u16) -> bool {
        let aborted = self.admin_slot_free() && self.events.abort(id);
        if aborted {
            self.end_event_request(id, Status::ABORT_REQUESTED, 0);
        }
        aborted
    }

    /// Writes `data` to the places that the command's PRPs name.
    fn reply(&mut self, entry: &SubmissionEntry, data: &[u8]) -> Result<(), Status> {
        if data.is_empty() {
            return Ok(());
        }
        let pointers = (entry.prp1.get(), entry.prp2.get());
        let engine = &mut self.engine;
        engine.walker.walk(&engine.memory, engine.page_size, pointers, data.len())?;
        engine.walker.write(&engine.memory, data)
    }

    /// Reads the command's data.
    fn payload(&mut self, entry: &SubmissionEntry, into: &mut [u8]) -> Result<(), Status> {
        let pointers = (entry.prp1.get(), entry.prp2.get());
        let engine = &mut self.engine;
        engine.walker.walk(&engine.memory, engine.page_size, pointers, into.len())?;
        engine.walker.read(&engine.memory, into)
    }
}
