//! Control messages (section 5.3.6.2): the state of the dialogue between one port and the driver.

use serde::{Deserialize, Serialize};
use slipway_virtio_spec::console::{Control, event};
use zerocopy::IntoBytes;

use crate::PortSettings;

/// How far the driver knows the port. The order is that of time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum Stage {
    /// The driver has not said that it is ready.
    #[default]
    Unknown,
    /// The driver is to be told of the port.
    Announced,
    /// The driver was told of the port.
    Added,
    /// The driver has set the port up.
    Ready,
}

/// A message for the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Notice {
    Add,
    Console,
    Name,
    Open(bool),
}

/// The part of a port that a successor needs to know. The default is the state after a reset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Dialogue {
    pub stage: Stage,
    /// `true` if the driver is to be told that the port is a console.
    pub tells_console: bool,
    /// `true` if the driver is to be told the port's name.
    pub tells_name: bool,
    /// `true` if the host's end is open as far as the driver was told.
    pub told_open: bool,
    /// `true` if the driver is to be told of a close, even if the host's end is open again.
    pub tells_close: bool,
    /// `true` if the driver's end is open.
    pub guest_open: bool,
}

impl Dialogue {
    /// Returns whether messages could have led to this state.
    pub fn is_sound(&self) -> bool {
        let told = self.tells_console || self.tells_name || self.told_open;
        (self.stage == Stage::Ready || !told)
            && (self.stage >= Stage::Added || !self.guest_open)
            && (self.told_open || !self.tells_close)
    }

    /// Takes the driver's message that it is ready.
    pub fn driver_ready(&mut self) {
        if self.stage == Stage::Unknown {
            self.stage = Stage::Announced;
        }
    }

    /// Takes the driver's message that it has set the port up.
    pub fn port_ready(&mut self, settings: &PortSettings) {
        if self.stage == Stage::Added {
            self.stage = Stage::Ready;
            self.tells_console = settings.is_console;
            self.tells_name = !settings.name.is_empty();
        }
    }

    /// Takes the driver's message about its end. Linux may open a port before it says that the port
    /// is ready.
    pub fn guest_opened(&mut self, open: bool) {
        if self.stage >= Stage::Added {
            self.guest_open = open;
        }
    }

    /// Notes that the host has closed its end.
    pub fn host_closed(&mut self) {
        self.tells_close = self.told_open;
    }

    /// Returns the next message for the driver, while the host's end is as `host_open` says.
    pub fn notice(&self, host_open: bool) -> Option<Notice> {
        match self.stage {
            Stage::Announced => Some(Notice::Add),
            Stage::Unknown | Stage::Added => None,
            Stage::Ready if self.tells_console => Some(Notice::Console),
            Stage::Ready if self.tells_name => Some(Notice::Name),
            Stage::Ready if self.tells_close => Some(Notice::Open(false)),
            Stage::Ready if self.told_open != host_open => Some(Notice::Open(host_open)),
            Stage::Ready => None,
        }
    }

    /// Notes that the driver was told.
    pub fn told(&mut self, notice: Notice) {
        match notice {
            Notice::Add => self.stage = Stage::Added,
            Notice::Console => self.tells_console = false,
            Notice::Name => self.tells_name = false,
            Notice::Open(open) => (self.told_open, self.tells_close) = (open, false),
        }
    }
}

/// Returns the bytes of a message about port `number`.
pub(crate) fn encode(notice: Notice, number: u16, settings: &PortSettings) -> Vec<u8> {
    let (event, value) = match notice {
        Notice::Add => (event::PORT_ADD, 1),
        Notice::Console => (event::CONSOLE_PORT, 1),
        Notice::Name => (event::PORT_NAME, 1),
        Notice::Open(open) => (event::PORT_OPEN, u16::from(open)),
    };
    let control =
        Control { id: u32::from(number).into(), event: event.into(), value: value.into() };
    let mut bytes = control.as_bytes().to_vec();
    if notice == Notice::Name {
        bytes.extend(settings.name.as_bytes());
    }
    bytes
}
