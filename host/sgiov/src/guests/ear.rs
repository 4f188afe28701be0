//! The receiver to which the links' thread passes signals for the guests' thread.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;
use std::task::Wake;

use slipway_family::Beside;

use super::Bell;
use super::beside::Claims;
use super::carrying::Command;

/// The receiver to which the links' thread passes a family's signals.
pub struct SignalReceiver {
    pub family: u32,
    pub claims: Arc<Claims>,
    pub commands: Sender<Command>,
    pub wake: Arc<Bell>,
}

impl SignalReceiver {
    fn command(&self, command: Command) {
        if self.commands.send(command).is_ok() {
            self.wake.wake_by_ref();
        }
    }
}

impl Beside for SignalReceiver {
    fn stirred(&self, entry: u64) {
        let known = u32::try_from(entry).ok().filter(|entry| self.claims.tell(*entry as usize));
        if let Some(entry) = known {
            self.command(Command::Stirred(self.family, Some(entry)));
        }
    }

    fn overflowed(&self) {
        if !self.claims.told.swap(true, Ordering::SeqCst) {
            self.command(Command::Stirred(self.family, None));
        }
    }

    fn spoiled(&self) {
        self.command(Command::Spoiled(self.family));
    }
}
