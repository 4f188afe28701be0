//! Admin commands (section 5).

pub(crate) mod features;
mod identify;
mod logs;
mod queues;

use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::opcode::AdminOpcode;
use slipway_nvme_spec::status::Status;

use crate::controller::Controller;
use crate::events::EVENT_LIMIT;
use crate::inflight::Inflight;
use crate::io::Outcome;
use crate::journal::Done;

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

impl From<Result<u32, Status>> for Outcome {
    fn from(result: Result<u32, Status>) -> Self {
        match result {
            Ok(result) => Self::Done(Status::SUCCESS, result),
            Err(status) => Self::Done(status, 0),
        }
    }
}

impl Controller {
    /// Carries out an admin command.
    pub(crate) fn execute_admin(&mut self, entry: &SubmissionEntry) -> Outcome {
        // Over PCI Express the data of admin commands is described by PRPs (section 4.4), and no
        // admin command is fused.
        if entry.fuse() != 0 || entry.data_pointer_type() != 0 {
            return Status::INVALID_FIELD.dnr().into();
        }
        match AdminOpcode(entry.opcode) {
            AdminOpcode::DeleteSubmissionQueue => self.delete_submission_queue(entry),
            AdminOpcode::CreateSubmissionQueue => self.create_submission_queue(entry).into(),
            AdminOpcode::GetLogPage => self.get_log_page(entry).into(),
            AdminOpcode::DeleteCompletionQueue => self.delete_completion_queue(entry),
            AdminOpcode::CreateCompletionQueue => self.create_completion_queue(entry).into(),
            AdminOpcode::Identify => self.identify(entry).into(),
            AdminOpcode::Abort => self.abort(entry),
            AdminOpcode::SetFeatures => self.set_features(entry),
            AdminOpcode::GetFeatures => self.get_features(entry).into(),
            AdminOpcode::AsynchronousEventRequest => self.event_request(entry),
            AdminOpcode::KeepAlive => self.keep_alive().into(),
            AdminOpcode::DoorbellBufferConfig => self.configure_doorbell_buffer(entry),
            _ => Status::INVALID_OPCODE.dnr().into(),
        }
    }

    /// Carries out Keep Alive (section 5.16).
    fn keep_alive(&mut self) -> Result<u32, Status> {
        self.keep_alive_since = self.clock.now();
        Ok(0)
    }

    /// Starts an Asynchronous Event Request (section 5.2). It has no slot of the completion queue
    /// reserved while it waits, since it may wait for ever.
    fn event_request(&mut self, entry: &SubmissionEntry) -> Outcome {
        if self.events.requests.len() >= EVENT_LIMIT {
            return Status::EVENT_LIMIT_EXCEEDED.dnr().into();
        }
        self.events.requests.push_back(entry.id.get());
        if let Some((submission, completion)) = self.queues.pair(0) {
            submission.in_flight -= 1;
            completion.reserved -= 1;
        }
        self.checkpoint(Some(Done::Kept));
        self.conclude();
        Outcome::Pending
    }

    /// Carries out Abort (section 5.1): cancels Asynchronous Event Requests, and commands of I/O
    /// queues that the disk has not begun or that stop between two steps. Other commands end by
    /// themselves. Bit 0 of the result is set if the command was not aborted.
    fn abort(&mut self, entry: &SubmissionEntry) -> Outcome {
        let (queue, id) = (entry.dword(10) as u16, (entry.dword(10) >> 16) as u16);
        if let Some(far) = self.abort_far(entry.id.get(), queue, id) {
            return far;
        }
        if self.queues.submission(queue).is_none() {
            return Status::INVALID_FIELD.dnr().into();
        }
        let at_hand = self.ticket;
        let aborted = match queue {
            0 => self.abort_event_request(id),
            _ => self.abort_io(queue, id),
        };
        self.ticket = at_hand;
        Outcome::Done(Status::SUCCESS, u32::from(!aborted))
    }

    fn abort_event_request(&mut self, id: u16) -> bool {
        let slot = self.queues.completion(0).is_some_and(|queue| queue.free() > 0);
        let aborted = slot && self.events.abort(id);
        if aborted {
            self.end_event_request(id, Status::ABORT_REQUESTED, 0);
        }
        aborted
    }

    /// Aborts a command of an I/O queue, and returns whether it was or will be aborted. It ends
    /// before the Abort if the disk gives its request back at once. A command with several
    /// requests, such as Dataset Management of many ranges, is left to end by itself.
    pub(crate) fn abort_io(&mut self, queue: u16, id: u16) -> bool {
        let Some((slot, command)) = self.inflight.find(queue, id) else { return false };
        let (nsid, single) = (command.nsid, command.parts == 1);
        let mut stops = false;
        if command.work.as_ref().is_some_and(|work| work.stops()) {
            // The command ends with this status instead of taking its next step.
            command.status = Status::ABORT_REQUESTED;
            stops = true;
        }
        let mut ended = Vec::new();
        if single && let Some(namespace) = self.namespaces.get_mut(nsid) {
            stops |= namespace.cancel(Inflight::tag(slot, 0), &mut ended);
        }
        ended.into_iter().for_each(|completion| self.end_request(completion));
        stops
    }

    /// Writes `data` to the places that the command's PRPs name.
    fn reply(&mut self, entry: &SubmissionEntry, data: &[u8]) -> Result<(), Status> {
        if data.is_empty() {
            return Ok(());
        }
        let pointers = (entry.prp1.get(), entry.prp2.get());
        self.walker.walk(&self.memory, self.registers.page_size(), pointers, data.len())?;
        self.walker.write(&self.memory, data)
    }

    /// Reads the command's data.
    fn payload(&mut self, entry: &SubmissionEntry, into: &mut [u8]) -> Result<(), Status> {
        let pointers = (entry.prp1.get(), entry.prp2.get());
        self.walker.walk(&self.memory, self.registers.page_size(), pointers, into.len())?;
        self.walker.read(&self.memory, into)
    }
}
