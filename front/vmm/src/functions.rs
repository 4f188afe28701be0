//! The functions behind vfio-user sockets, as the event loop serves them.

mod plug;
mod saved;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use serde_json::{Value, json};
use slipway_vmm::board::Board;
use slipway_vmm::plug::MAX_FUNCTIONS;
use slipway_vmm::remote::{Attached, Loss};
use slipway_vmm::{Chassis, Machine};

use crate::jobs::WorkerThreads;
use crate::qmp;
use crate::watch::Watch;
use plug::{Leaving, device_of};
pub use saved::NamedFunction;

/// An event of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token {
    /// The function's connection has ended.
    Ended(usize),
    /// The function's pin was asserted.
    Pin(usize),
    /// The work of a thread is over.
    Outcome,
}

struct Function {
    /// The name by which a client removes it.
    name: String,
    attached: Arc<Attached>,
    /// The end of the connection was reported, and nobody has brought another one.
    lost: bool,
    /// Another connection was brought, and the attempt to use it is not over.
    reconnecting: bool,
    leaving: Option<Leaving>,
}

impl Function {
    fn new(name: String, attached: Attached) -> Self {
        let attached = Arc::new(attached);
        Self { name, attached, lost: false, reconnecting: false, leaving: None }
    }
}

/// The functions, by their numbers: function N is the Nth PCI device behind the machine's own ones.
pub struct Functions {
    all: BTreeMap<usize, Function>,
    /// The numbers of functions that threads connect or take apart, with the functions' names.
    reserved: BTreeMap<usize, String>,
    jobs: WorkerThreads<Outcome>,
    chassis: Chassis,
    board: Arc<Board>,
}

/// The outcome of what a thread has done.
enum Outcome {
    /// An attempt to connect a function again, with the client's request.
    Reconnected { number: usize, id: Value, outcome: Result<(), String> },
    /// An attempt to connect a new function, with the client's request.
    Plugged { number: usize, name: String, id: Value, outcome: Result<Attached, String> },
    /// An ejected function is taken apart.
    Removed { number: usize, name: String },
}

impl Functions {
    /// Adds the functions behind `sockets` to the machine.
    ///
    /// # Errors
    /// The reason why one cannot be added, in one line.
    pub fn new(machine: &Machine, sockets: Vec<OwnedFd>) -> Result<Self, String> {
        if sockets.len() > usize::from(MAX_FUNCTIONS) {
            let count = sockets.len();
            return Err(format!("{count} functions: the bus has room for {MAX_FUNCTIONS}"));
        }
        let attach = sockets.into_iter().enumerate().map(|(number, socket)| {
            let attached = Attached::new(machine, device_of(number), number, socket)?;
            machine.board.function_present(device_of(number));
            Ok((number, Function::new(format!("function-{number}"), attached)))
        });
        Self::of(machine, attach.collect::<Result<_, String>>()?)
    }

    fn of(machine: &Machine, all: BTreeMap<usize, Function>) -> Result<Self, String> {
        Ok(Self {
            all,
            reserved: BTreeMap::new(),
            jobs: WorkerThreads::new()?,
            chassis: machine.chassis.clone(),
            board: Arc::clone(&machine.board),
        })
    }

    /// Adds to `watch` what the functions wait for; interrupts of pins if `pins` says so.
    pub fn watch<'a, T: Copy>(
        &'a self,
        watch: &mut Watch<'a, T>,
        pins: bool,
        token: impl Fn(Token) -> T,
    ) {
        watch.read(self.jobs.ended(), token(Token::Outcome));
        for (&index, function) in &self.all {
            if !function.lost && !function.reconnecting {
                watch.read(function.attached.ended(), token(Token::Ended(index)));
            }
            if let Some(pin) = function.attached.pin().filter(|_| pins) {
                watch.read(pin, token(Token::Pin(index)));
            }
        }
    }

    /// Serves an event. Returns the lines for the client of the control socket.
    pub fn serve(&mut self, token: Token) -> Vec<Vec<u8>> {
        match token {
            Token::Pin(index) => {
                if let Some(function) = self.all.get(&index) {
                    function.attached.pin_raised();
                }
                Vec::new()
            }
            Token::Ended(index) => {
                if let Some(function) = self.all.get_mut(&index) {
                    function.lost = function.attached.lost().is_some();
                }
                self.lost_event(index).into_iter().collect()
            }
            Token::Outcome => {
                let outcomes = self.jobs.take();
                outcomes.into_iter().flat_map(|outcome| self.finish(outcome)).collect()
            }
        }
    }

    /// Returns an event for each function that has no connection, for a client that has just come.
    pub fn lost_events(&self) -> Vec<Vec<u8>> {
        let lost = self.all.iter().filter(|(_, function)| function.lost);
        lost.filter_map(|(&index, _)| self.lost_event(index)).collect()
    }

    /// Returns the event of a function that has no connection. Returns `None` if it has one.
    fn lost_event(&self, index: usize) -> Option<Vec<u8>> {
        let Loss { reason, is_final } = self.all.get(&index)?.attached.lost()?;
        let data = json!({ "function": index, "reason": reason, "final": is_final });
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
        let function = self.all.get_mut(&index);
        let function = function.ok_or_else(|| format!("there is no function {index}"))?;
        if function.reconnecting {
            return Err(format!("function {index} is being connected already"));
        }
        let socket = socket.ok_or("slipway-reconnect needs a descriptor with its message")?;
        let attached = Arc::clone(&function.attached);
        self.jobs.spawn("reconnect", move || {
            let outcome = attached.reconnect(socket);
            Some(Outcome::Reconnected { number: index, id, outcome })
        })?;
        function.reconnecting = true;
        Ok(())
    }

    /// Uses what a thread has done. Returns the lines for the client.
    fn finish(&mut self, outcome: Outcome) -> Vec<Vec<u8>> {
        match outcome {
            Outcome::Reconnected { number, id, outcome } => {
                if let Some(state) = self.all.get_mut(&number) {
                    (state.lost, state.reconnecting) = (state.attached.lost().is_some(), false);
                }
                // The client may try again.
                let answer = qmp::answer(&id, outcome.map(|()| json!({})));
                std::iter::once(answer).chain(self.lost_event(number)).collect()
            }
            Outcome::Plugged { number, name, id, outcome } => {
                self.plugged(number, name, &id, outcome)
            }
            Outcome::Removed { number, name } => vec![self.removed(number, &name)],
        }
    }
}
