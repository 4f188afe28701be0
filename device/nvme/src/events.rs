//! Asynchronous events (section 5.2).
//!
//! A new event is a constant of `Event` (`spec/nvme-spec`, `event`) and an element of
//! `Events::KNOWN`, without which a saved state that has it is refused. `Events::raise` reports it;
//! on a lane `Report::raise` does (`engine::report`). Its type is masked until the host reads its
//! log page: `event_type` of `admin::logs`. A notice that a host has to ask for has a bit of OAES,
//! which `admin::identify` sets, and a question to `Features` (`crate::features`), as Namespace
//! Attribute Changed has. Tests: `admin`, `attachment` and `saved` of `src/tests`.

use std::collections::{BTreeSet, VecDeque};

use slipway_nvme_spec::event::{Event, EventType};

/// The most Asynchronous Event Requests that may be outstanding (AERL is one less).
pub(crate) const EVENT_LIMIT: usize = 4;

/// Events to report, and the requests that report them.
#[derive(Debug, Default)]
pub(crate) struct Events {
    /// Command IDs of outstanding requests, oldest first.
    pub requests: VecDeque<u16>,
    /// Events that are not reported yet, each once. There are few kinds, so this is short.
    pub waiting: VecDeque<Event>,
    /// Event types that are masked until their log is read, a bit each.
    pub masked: u8,
    /// The Changed Namespace List (section 5.14.1.4).
    pub changed: BTreeSet<u32>,
}

impl Events {
    /// All events that exist.
    pub const KNOWN: [Event; 4] = [
        Event::INVALID_DOORBELL_REGISTER,
        Event::INVALID_DOORBELL_VALUE,
        Event::TEMPERATURE,
        Event::NAMESPACE_CHANGED,
    ];

    /// Adds an event, unless the same event waits already.
    pub fn raise(&mut self, event: Event) {
        if !self.waiting.contains(&event) {
            self.waiting.push_back(event);
        }
    }

    /// Notes that a namespace came, went or changed its size; `notify` says whether the host wants
    /// an event.
    pub fn namespace_changed(&mut self, nsid: u32, notify: bool) {
        self.changed.insert(nsid);
        if notify {
            self.raise(Event::NAMESPACE_CHANGED);
        }
    }

    /// Removes a part of the Changed Namespace List that the host has read without retaining it.
    pub fn told(&mut self, part: &[u8]) {
        for nsid in part.chunks_exact(4) {
            self.changed.remove(&u32::from_le_bytes([nsid[0], nsid[1], nsid[2], nsid[3]]));
        }
    }

    /// Returns whether an event could be reported now.
    pub fn is_ready(&self) -> bool {
        !self.requests.is_empty() && self.next().is_some()
    }

    /// Takes a request and the event that ends it, and masks the event's type.
    pub fn take(&mut self) -> Option<(u16, Event)> {
        let at = self.next()?;
        let id = self.requests.pop_front()?;
        let event = self.waiting.remove(at)?;
        self.masked |= bit(event.kind);
        Some((id, event))
    }

    /// Unmasks an event type after its log page was read without Retain Asynchronous Event (section
    /// 5.14, RAE).
    pub fn log_read(&mut self, kind: EventType) {
        self.masked &= !bit(kind);
    }

    /// Removes the outstanding request `id`. Returns whether there was one.
    pub fn abort(&mut self, id: u16) -> bool {
        let at = self.requests.iter().position(|request| *request == id);
        at.and_then(|at| self.requests.remove(at)).is_some()
    }

    /// Masks an event type: its events wait until their log is read.
    pub fn mask(&mut self, kind: EventType) {
        self.masked |= bit(kind);
    }

    fn next(&self) -> Option<usize> {
        self.waiting.iter().position(|event| self.masked & bit(event.kind) == 0)
    }
}

fn bit(kind: EventType) -> u8 {
    1 << (kind.0 & 7)
}
