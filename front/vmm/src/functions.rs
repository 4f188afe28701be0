//! The functions behind vfio-user sockets, as the event loop serves them.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};

use rustix::event::EventfdFlags;
use serde_json::{Value, json};
use slipway_vmm::Machine;
use slipway_vmm::remote::Attached;

use crate::qmp;
use crate::watch::Watch;

/// The PCI device number of the first function; lower ones belong to the machine's own functions.
const FIRST_DEVICE: u8 = 4;
/// The most functions: the devices of the bus from the first one on.
const MAX_FUNCTIONS: usize = 28;

/// An event of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token {
    /// The function's connection has ended.
    Ended(usize),
    /// The function's pin was asserted.
    Pin(usize),
    /// An attempt to connect again is over.
    Reconnected,
}

struct Function {
    attached: Arc<Attached>,
    /// The end of the connection was reported, and nobody has brought another one.
    lost: bool,
    /// Another connection was brought, and the attempt to use it is not over.
    reconnecting: bool,
}

/// The functions, in the order of the command line.
pub struct Functions {
    all: Vec<Function>,
    /// The answers of attempts to connect again, each with its function and request.
    answers: Arc<Mutex<Vec<Reconnected>>>,
    /// Counts entries of `answers`.
    answered: OwnedFd,
}

/// The result of an attempt to connect again.
struct Reconnected {
    function: usize,
    id: Value,
    outcome: Result<(), String>,
}

impl Functions {
    /// Adds the functions behind `sockets` to the machine.
    ///
    /// # Errors
    /// The reason why one cannot be added, in one line.
    pub fn new(machine: &Machine, sockets: Vec<OwnedFd>) -> Result<Self, String> {
        if sockets.len() > MAX_FUNCTIONS {
            return Err(format!(
                "{} functions: the bus has room for {MAX_FUNCTIONS}",
                sockets.len()
            ));
        }
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let answered = rustix::event::eventfd(0, flags).map_err(|e| format!("eventfd: {e}"))?;
        let numbered = (FIRST_DEVICE..).zip(sockets).enumerate();
        let attach = numbered.map(|(index, (device, socket))| {
            let attached = Attached::new(machine, device, index, socket);
            let attached = Arc::new(attached.map_err(|error| error.to_string())?);
            Ok(Function { attached, lost: false, reconnecting: false })
        });
        let all = attach.collect::<Result<_, String>>()?;
        Ok(Self { all, answers: Arc::default(), answered })
    }

    /// Adds to `watch` what the functions wait for.
    pub fn watch<'a, T: Copy>(&'a self, watch: &mut Watch<'a, T>, token: impl Fn(Token) -> T) {
        watch.read(self.answered.as_fd(), token(Token::Reconnected));
        for (index, function) in self.all.iter().enumerate() {
            if !function.lost && !function.reconnecting {
                watch.read(function.attached.ended(), token(Token::Ended(index)));
            }
            if let Some(pin) = function.attached.pin() {
                watch.read(pin, token(Token::Pin(index)));
            }
        }
    }

    /// Serves an event. Returns the lines for the client of the control socket.
    pub fn serve(&mut self, token: Token) -> Vec<Vec<u8>> {
        match token {
            Token::Pin(index) => {
                self.all[index].attached.pin_raised();
                Vec::new()
            }
            Token::Ended(index) => {
                let function = &mut self.all[index];
                function.lost = function.attached.lost().is_some();
                self.lost_event(index).into_iter().collect()
            }
            Token::Reconnected => self.take_answers(),
        }
    }

    /// Returns an event for each function that has no connection, for a client that has just come.
    pub fn lost_events(&self) -> Vec<Vec<u8>> {
        let lost = (0..self.all.len()).filter(|&index| self.all[index].lost);
        lost.filter_map(|index| self.lost_event(index)).collect()
    }

    /// Returns the event of a function that has no connection. Returns `None` if it has one.
    fn lost_event(&self, index: usize) -> Option<Vec<u8>> {
        let reason = self.all[index].attached.lost()?;
        let data = json!({ "function": index, "reason": reason });
        Some(qmp::event("SLIPWAY_FUNCTION_LOST", data))
    }

    /// Connects a function again, on a thread of its own: the server may take its time.
    ///
    /// # Errors
    /// The reason why that cannot be tried.
    pub fn reconnect(
        &mut self,
        index: usize,
        socket: Option<OwnedFd>,
        id: Value,
    ) -> Result<(), String> {
        let function = self.all.get_mut(index);
        let function = function.ok_or_else(|| format!("there is no function {index}"))?;
        if function.reconnecting {
            return Err(format!("function {index} is being connected already"));
        }
        let socket = socket.ok_or("slipway-reconnect needs a descriptor with its message")?;
        let attached = Arc::clone(&function.attached);
        let answers = Arc::clone(&self.answers);
        let answered = self.answered.try_clone().map_err(|error| error.to_string())?;
        let run = move || {
            let outcome = attached.reconnect(socket);
            let mut answers = answers.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            answers.push(Reconnected { function: index, id, outcome });
            drop(answers);
            let _ = rustix::io::write(&answered, &1u64.to_ne_bytes());
        };
        let thread = std::thread::Builder::new().name("reconnect".into()).spawn(run);
        thread.map_err(|error| error.to_string())?;
        function.reconnecting = true;
        Ok(())
    }

    fn take_answers(&mut self) -> Vec<Vec<u8>> {
        let _ = rustix::io::read(&self.answered, &mut [0; 8]);
        let answers = {
            let mut all = self.answers.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            std::mem::take(&mut *all)
        };
        let mut lines = Vec::new();
        for Reconnected { function, id, outcome } in answers {
            lines.push(qmp::answer(&id, outcome.map(|()| json!({}))));
            let state = &mut self.all[function];
            (state.lost, state.reconnecting) = (state.attached.lost().is_some(), false);
            // The client may try again.
            lines.extend(self.lost_event(function));
        }
        lines
    }
}
