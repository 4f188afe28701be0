//! QMP, QEMU's control protocol: one JSON object per line, both ways.
//!
//! After the greeting the client leaves negotiation mode with `qmp_capabilities`; then each command
//! carries an `id` that is returned with its result, and events arrive at any time (QEMU,
//! *docs/interop/qmp-spec.rst*).
//!
//! `slipway-vmm` speaks the part of QMP that is used here, with commands and events of its own:
//! - `slipway-reconnect` gives it a new connection of a function; a descriptor comes with the
//!   command;
//! - `SLIPWAY_FUNCTION_LOST` says that the connection of a function has ended. Each new client is
//!   told so of every function that has none, so that the loss may happen while there is no client.
//!   With `"final": true` the function is broken for good; this is logged once for each function
//!   until another is plugged in its place, whatever the VMM repeats;
//! - `slipway-memory` and `SLIPWAY_MEMORY_CHANGED` are about hot-plug memory;
//! - `slipway-save` saves the machine into a file, and writes its memory to a pipe if both come
//!   with the command; `slipway-copy-ahead` writes most of the memory before, while the guest runs.
//!
//! The peer may be a VMM that its guest took over: lines are capped, unknown ids are ignored, and
//! data that violate QMP end the channel with an error, never with a panic or an endless wait.

mod cpus;
mod functions;
mod memory;
mod message;

use std::collections::{BTreeSet, HashMap};
use std::io::IoSlice;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde_json::{Value, json};
use slipway_peer::Foreign;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::sync::{Notify, broadcast, oneshot};
use tokio::task::JoinHandle;

pub(crate) use functions::{COPY_AHEAD, PORT, SAVE};

use crate::{Error, Result, ShutdownReason, VmEvent};
use message::{Answer, Message, parse};

/// The longest line that is accepted from a VMM, in bytes. QEMU's longest answer to our commands,
/// the list of CPUs, has about 200 bytes for each.
const MAX_LINE: usize = 64 << 10;

/// The number of events that are kept for a slow receiver.
const EVENT_BACKLOG: usize = 64;

/// The pause after which a command with a descriptor is sent again to a VMM that does not read.
const SEND_AGAIN: Duration = Duration::from_millis(10);

/// The most descriptors of a command.
const MOST_FILES: usize = 2;

/// A QMP connection.
pub(crate) struct Qmp {
    /// The connection's socket, for commands with a descriptor.
    socket: Option<Foreign>,
    writer: tokio::sync::Mutex<Box<dyn AsyncWrite + Send + Unpin>>,
    shared: Arc<Shared>,
    reader: JoinHandle<()>,
}

/// The state that the connection's reader shares with its callers.
struct Shared {
    /// The name of the VM, for log lines.
    vm: String,
    state: Mutex<ChannelState>,
    events: broadcast::Sender<VmEvent>,
    /// Wakes the one caller that waits for lost functions.
    lost: Notify,
}

#[derive(Default)]
struct ChannelState {
    next_id: u64,
    waiting: HashMap<u64, Waiting>,
    /// The reason for which the channel ended; once it is set, no command waits any more.
    closed: Option<String>,
    last_shutdown: Option<ShutdownReason>,
    /// The functions whose connections were reported lost, until a caller takes them.
    lost: BTreeSet<usize>,
    /// The functions that were reported broken for good, and logged, since they were plugged. The
    /// numbers are below `VmSpec::MAX_FUNCTIONS`.
    broken: BTreeSet<usize>,
}

/// A command whose answer is awaited.
struct Waiting {
    answer: oneshot::Sender<Answer>,
    /// The command plugs a function, whose number is in the answer.
    plugs: bool,
}

impl Shared {
    fn new(vm: &str) -> Self {
        let (events, _) = broadcast::channel(EVENT_BACKLOG);
        Self { vm: vm.to_owned(), state: Mutex::default(), events, lost: Notify::new() }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, ChannelState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives an answer to the caller that waits for it.
    fn answered(&self, id: u64, answer: Answer) {
        let mut state = self.state();
        // An unknown id belongs to an answer that came after its deadline.
        let Some(waiting) = state.waiting.remove(&id) else { return };
        // Here and not in the caller, who may notice the answer after the new function's events.
        if let (true, Ok(value)) = (waiting.plugs, &answer)
            && let Some(function) = message::function(value)
        {
            state.broken.remove(&function);
        }
        drop(state);
        let _ = waiting.answer.send(answer);
    }

    /// Ends the channel: every waiting caller gets an error.
    fn close(&self, reason: String) {
        let mut state = self.state();
        state.closed = Some(reason);
        state.waiting.clear();
        drop(state);
        let _ = self.events.send(VmEvent::ControlLost);
        self.lost.notify_one();
    }
}

impl Qmp {
    /// Waits for the greeting and leaves negotiation mode. The caller limits the time. Log lines
    /// about the VMM name the VM by `vm`.
    pub(crate) async fn connect<R, W>(vm: &str, reader: R, writer: W) -> Result<Self>
    where
        R: AsyncRead + Send + Unpin + 'static,
        W: AsyncWrite + Send + Unpin + 'static,
    {
        let mut lines = BufReader::new(reader);
        let greeting = read_line(&mut lines).await.map_err(Error::Control)?;
        match parse(&greeting) {
            Ok(Message::Greeting) => {}
            Ok(_) => return Err(Error::Control("it began without a greeting".into())),
            Err(reason) => return Err(Error::Control(reason)),
        }
        let shared = Arc::new(Shared::new(vm));
        let reader = tokio::spawn(read_all(lines, Arc::clone(&shared)));
        let writer = tokio::sync::Mutex::new(Box::new(writer) as Box<_>);
        let qmp = Self { socket: None, writer, shared, reader };
        qmp.execute_unlimited(&Command::named("qmp_capabilities")).await?;
        Ok(qmp)
    }

    /// Sets the socket of the connection, over which descriptors can be passed.
    pub(crate) fn passing_over(mut self, socket: Foreign) -> Self {
        self.socket = Some(socket);
        self
    }

    /// Runs a command without arguments and returns its result.
    pub(crate) async fn execute(&self, command: &str, timeout: Duration) -> Result<Value> {
        self.execute_within(&Command::named(command), timeout).await
    }

    async fn execute_within(&self, command: &Command<'_>, timeout: Duration) -> Result<Value> {
        match tokio::time::timeout(timeout, self.execute_unlimited(command)).await {
            Ok(result) => result,
            Err(_) => Err(Error::Timeout { command: command.name.to_owned(), timeout }),
        }
    }

    async fn execute_unlimited(&self, command: &Command<'_>) -> Result<Value> {
        let (id, answer) = self.register(command)?;
        // Withdraws the registration if this future is dropped at its deadline.
        let _withdraw = Withdraw { shared: &self.shared, id };
        let sent = self.send(command.line(id).as_bytes(), &command.descriptors).await;
        sent.map_err(|error| Error::Control(error.to_string()))?;
        match answer.await {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(message)) => Err(Error::Refused { command: command.name.to_owned(), message }),
            Err(_) => Err(self.closed_error()),
        }
    }

    /// Sends a line, with the descriptors attached to its first byte.
    async fn send(&self, line: &[u8], descriptors: &[OwnedFd]) -> std::io::Result<()> {
        let mut writer = self.writer.lock().await;
        let sent = match descriptors {
            [] => 0,
            _ => self.send_with(line, descriptors).await?,
        };
        writer.write_all(&line[sent..]).await
    }

    /// Sends the beginning of a line together with descriptors. Returns the number of bytes sent.
    async fn send_with(&self, line: &[u8], descriptors: &[OwnedFd]) -> std::io::Result<usize> {
        let Some(socket) = &self.socket else {
            return Err(std::io::ErrorKind::Unsupported.into());
        };
        loop {
            match send_once(socket, line, descriptors) {
                Err(Errno::AGAIN) => tokio::time::sleep(SEND_AGAIN).await,
                sent => return Ok(sent?),
            }
        }
    }

    fn register(&self, command: &Command<'_>) -> Result<(u64, oneshot::Receiver<Answer>)> {
        let mut state = self.shared.state();
        if let Some(reason) = &state.closed {
            return Err(Error::Control(reason.clone()));
        }
        let id = state.next_id;
        state.next_id += 1;
        let (answer, receiver) = oneshot::channel();
        state.waiting.insert(id, Waiting { answer, plugs: command.plugs_function() });
        Ok((id, receiver))
    }

    fn closed_error(&self) -> Error {
        let reason = self.shared.state().closed.clone();
        Error::Control(reason.unwrap_or_else(|| "closed".into()))
    }

    /// Returns the name of the VM, for log lines.
    pub(crate) fn vm(&self) -> &str {
        &self.shared.vm
    }

    /// Returns a receiver of the events from now on.
    pub(crate) fn events(&self) -> broadcast::Receiver<VmEvent> {
        self.shared.events.subscribe()
    }

    /// Returns the reason of the last SHUTDOWN event.
    pub(crate) fn last_shutdown(&self) -> Option<ShutdownReason> {
        self.shared.state().last_shutdown
    }

    /// Waits until the peer has closed the channel and everything that it sent before is processed.
    pub(crate) async fn drained(&self) {
        let mut events = self.events();
        while self.shared.state().closed.is_none() {
            // Every close sends an event after `closed` is set, so none is missed. An error (events
            // lost in a backlog) only leads to another check.
            let _ = events.recv().await;
        }
    }
}

impl Drop for Qmp {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

/// A command to the VMM.
struct Command<'a> {
    name: &'a str,
    arguments: Option<Value>,
    descriptors: Vec<OwnedFd>,
}

impl<'a> Command<'a> {
    /// Returns a command without arguments.
    fn named(name: &'a str) -> Self {
        Self { name, arguments: None, descriptors: Vec::new() }
    }

    /// Returns whether this is `device_add` with the connection of a function.
    fn plugs_function(&self) -> bool {
        self.name == "device_add" && !self.descriptors.is_empty()
    }

    fn line(&self, id: u64) -> String {
        let mut object = json!({ "execute": self.name, "id": id });
        if let Some(arguments) = &self.arguments {
            object["arguments"] = arguments.clone();
        }
        format!("{object}\n")
    }
}

/// Sends bytes and descriptors without waiting. Returns the number of bytes sent.
fn send_once(socket: &Foreign, bytes: &[u8], descriptors: &[OwnedFd]) -> Result<usize, Errno> {
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FILES))];
    let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
    let mut control = SendAncillaryBuffer::new(&mut space);
    // No command has more than there is space for.
    control.push(SendAncillaryMessage::ScmRights(&descriptors));
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)
}

/// Withdraws the registration of a command when its caller has stopped waiting.
struct Withdraw<'a> {
    shared: &'a Shared,
    id: u64,
}

impl Drop for Withdraw<'_> {
    fn drop(&mut self) {
        self.shared.state().waiting.remove(&self.id);
    }
}

/// Processes everything that the VMM sends, until the channel ends.
async fn read_all<R: AsyncRead + Unpin>(mut lines: BufReader<R>, shared: Arc<Shared>) {
    loop {
        let message = match read_line(&mut lines).await {
            Ok(line) => parse(&line),
            Err(reason) => Err(reason),
        };
        match message {
            Ok(message) => dispatch(message, &shared),
            Err(reason) => return shared.close(reason),
        }
    }
}

fn dispatch(message: Message, shared: &Shared) {
    match message {
        Message::Answer { id, answer } => shared.answered(id, answer),
        Message::Event(event) => {
            if let VmEvent::Shutdown(reason) = event {
                shared.state().last_shutdown = Some(reason);
            }
            let _ = shared.events.send(event);
        }
        Message::FunctionLost(index) => {
            shared.state().lost.insert(index);
            shared.lost.notify_one();
        }
        Message::FunctionBroken { function, reason } => {
            let is_new = shared.state().broken.insert(function);
            if is_new {
                tracing::warn!(vm = shared.vm, function, %reason, "a function is broken");
            }
        }
        Message::Greeting | Message::Ignored => {}
    }
}

/// Reads one line, including its end. The error says why there is none.
async fn read_line<R: AsyncRead + Unpin>(lines: &mut BufReader<R>) -> Result<Vec<u8>, String> {
    let mut line = Vec::new();
    let mut limited = lines.take(MAX_LINE as u64);
    match limited.read_until(b'\n', &mut line).await {
        Ok(_) if line.ends_with(b"\n") => Ok(line),
        Ok(MAX_LINE) => Err(format!("a line of more than {MAX_LINE} bytes")),
        Ok(_) => Err("closed by the VM".into()),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests;
