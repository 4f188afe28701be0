//! Asynchronous events (section 5.2).

open_enum! {
    /// The type of an event. After an event, its type is masked until the host reads the event's
    /// log page (section 5.2.1, bits 2:0).
    EventType(u8) {
        /// Error status.
        Error = 0,
        /// SMART / health status.
        Health = 1,
        /// Notice.
        Notice = 2,
    }
}

/// An asynchronous event as in dword 0 of the completion (section 5.2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// The event's type.
    pub kind: EventType,
    /// Asynchronous Event Information.
    pub information: u8,
    /// The log page with details; reading it unmasks the type.
    pub log: u8,
}

impl Event {
    /// The host wrote a doorbell that belongs to no queue.
    pub const INVALID_DOORBELL_REGISTER: Self =
        Self { kind: EventType::Error, information: 0, log: 1 };
    /// The host wrote an invalid value to a doorbell.
    pub const INVALID_DOORBELL_VALUE: Self =
        Self { kind: EventType::Error, information: 1, log: 1 };
    /// A temperature passed a threshold.
    pub const TEMPERATURE: Self = Self { kind: EventType::Health, information: 1, log: 2 };
    /// A namespace changed.
    pub const NAMESPACE_CHANGED: Self = Self { kind: EventType::Notice, information: 0, log: 4 };

    /// Returns the event as dword 0 of the completion.
    pub const fn dword(self) -> u32 {
        self.kind.0 as u32 | (self.information as u32) << 8 | (self.log as u32) << 16
    }

    /// Returns the event in dword 0 of a completion.
    pub const fn from_dword(dword: u32) -> Self {
        Self {
            kind: EventType(dword as u8 & 7),
            information: (dword >> 8) as u8,
            log: (dword >> 16) as u8,
        }
    }
}
