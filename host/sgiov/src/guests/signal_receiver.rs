//! The receiver to which the links' carrier passes a family's signals for the carrier of guests.

use std::sync::Arc;

use slipway_family::{Beside, CommandSender};

use super::claims::Claims;
use super::messages::Command;

/// Passes the signals of one family's claimed entries to the carrier of guests as commands.
pub struct SignalReceiver {
    pub family: u32,
    pub claims: Arc<Claims>,
    pub commands: CommandSender<Command>,
}

impl Beside for SignalReceiver {
    fn stirred(&self, entry: u64) {
        let known = u32::try_from(entry).ok();
        if let Some(entry) = known.filter(|entry| self.claims.pass_on(*entry as usize)) {
            self.commands.send(Command::Signalled(self.family, Some(entry)));
        }
    }

    fn overflowed(&self) {
        if self.claims.pass_on_overflow() {
            self.commands.send(Command::Signalled(self.family, None));
        }
    }

    fn spoiled(&self) {
        self.commands.send(Command::Spoiled(self.family, self.claims.clone()));
    }
}
