//! The news that an engine has for its thread.

use std::collections::VecDeque;

use slipway_nvme_spec::event::Event;
use slipway_nvme_spec::log::ErrorEntry;
use slipway_nvme_spec::status::Status;

use crate::health::ERROR_ENTRIES;
use crate::permit::Permit;

/// The news of an engine since the last look. The size is bounded, however much the guest does
/// wrong: only the newest errors are kept, as many as the log has room for.
#[derive(Debug, Default)]
pub(crate) struct Report {
    /// `true` if a queue's memory cannot be reached.
    pub fatal: bool,
    /// Failed commands, for the Error Information log.
    pub errors: VecDeque<ErrorEntry>,
    /// Events of invalid doorbells, each once.
    pub events: Vec<Event>,
    /// Submission queues that were deleted, since their last command has ended.
    pub gone: Vec<u16>,
    /// Admin commands whose requests have ended, with their status.
    pub ended: Vec<(Permit, Status)>,
    /// Namespaces whose size has changed.
    pub resized: Vec<u32>,
}

impl Report {
    /// Returns whether there is no news.
    pub fn is_empty(&self) -> bool {
        !self.fatal
            && self.errors.is_empty()
            && self.events.is_empty()
            && self.gone.is_empty()
            && self.ended.is_empty()
            && self.resized.is_empty()
    }

    /// Drops the news, and keeps the memory.
    pub fn clear(&mut self) {
        self.fatal = false;
        self.errors.clear();
        self.events.clear();
        self.gone.clear();
        self.ended.clear();
        self.resized.clear();
    }

    /// Adds a failed command.
    pub fn log(&mut self, error: ErrorEntry) {
        if self.errors.len() == ERROR_ENTRIES {
            self.errors.pop_front();
        }
        self.errors.push_back(error);
    }

    /// Adds an event of an invalid doorbell.
    pub fn raise(&mut self, event: Event) {
        if !self.events.contains(&event) {
            self.events.push(event);
        }
    }
}
