//! QMP, QEMU's control protocol: one JSON object per line, both ways.
//!
//! After the greeting the client leaves negotiation mode with `qmp_capabilities`; then each command
//! carries an `id` that is returned with its result, and events arrive at any time (QEMU,
//! *docs/interop/qmp-spec.rst*).
//!
//! `slipway-vmm` speaks the part of QMP that is used here, with a command and an event of its own:
//! - `slipway-reconnect` gives it a new connection of a function; a descriptor comes with the
//!   command;
//! - `SLIPWAY_FUNCTION_LOST` says that the connection of a function has ended. Each new client is
//!   told so of every function that has none, so that the loss may happen while there is no client.
//!
//! The peer may be a VMM that its guest took over: lines are capped, unknown ids are ignored, and
//! data that violate QMP end the channel with an error, never with a panic or an endless wait.

mod cpus;
mod functions;
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

use crate::{Error, Result, ShutdownReason, VmEvent};
use message::{Answer, Message, parse};

/// The longest line that is accepted from a VMM, in bytes. QEMU's longest answer to our commands,
/// the list of CPUs, has about 200 bytes for each.
const MAX_LINE: usize = 64 << 10;

/// The number of events that are kept for a slow receiver.
const EVENT_BACKLOG: usize = 64;

/// The pause after which a command with a descriptor is sent again to a VMM that does not read.
const SEND_AGAIN: Duration = Duration::from_millis(10);

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
    state: Mutex<ChannelState>,
    events: broadcast::Sender<VmEvent>,
    /// Wakes the one caller that waits for lost functions.
    lost: Notify,
}

#[derive(Default)]
struct ChannelState {
    next_id: u64,
    waiting: HashMap<u64, oneshot::Sender<Answer>>,
    /// The reason for which the channel ended; once it is set, no command waits any more.
    closed: Option<String>,
    last_shutdown: Option<ShutdownReason>,
    /// The functions whose connections were reported lost, until a caller takes them.
    lost: BTreeSet<usize>,
}

impl Shared {
    fn state(&self) -> std::sync::MutexGuard<'_, ChannelState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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
    /// Waits for the greeting and leaves negotiation mode. The caller limits the time.
    pub(crate) async fn connect<R, W>(reader: R, writer: W) -> Result<Self>
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
        let (events, _) = broadcast::channel(EVENT_BACKLOG);
        let shared = Arc::new(Shared { state: Mutex::default(), events, lost: Notify::new() });
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
        let (id, answer) = self.register()?;
        // Withdraws the registration if this future is dropped at its deadline.
        let _withdraw = Withdraw { shared: &self.shared, id };
        let sent = self.send(command.line(id).as_bytes(), command.descriptor.as_ref()).await;
        sent.map_err(|error| Error::Control(error.to_string()))?;
        match answer.await {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(message)) => Err(Error::Refused { command: command.name.to_owned(), message }),
            Err(_) => Err(self.closed_error()),
        }
    }

    /// Sends a line, with a descriptor attached to its first byte if there is one.
    async fn send(&self, line: &[u8], descriptor: Option<&OwnedFd>) -> std::io::Result<()> {
        let mut writer = self.writer.lock().await;
        let sent = match descriptor {
            Some(descriptor) => self.send_with(line, descriptor).await?,
            None => 0,
        };
        writer.write_all(&line[sent..]).await
    }

    /// Sends the beginning of a line together with a descriptor. Returns the number of bytes sent.
    async fn send_with(&self, line: &[u8], descriptor: &OwnedFd) -> std::io::Result<usize> {
        let Some(socket) = &self.socket else {
            return Err(std::io::ErrorKind::Unsupported.into());
        };
        loop {
            match send_once(socket, line, descriptor) {
                Err(Errno::AGAIN) => tokio::time::sleep(SEND_AGAIN).await,
                sent => return Ok(sent?),
            }
        }
    }

    fn register(&self) -> Result<(u64, oneshot::Receiver<Answer>)> {
        let mut state = self.shared.state();
        if let Some(reason) = &state.closed {
            return Err(Error::Control(reason.clone()));
        }
        let id = state.next_id;
        state.next_id += 1;
        let (sender, receiver) = oneshot::channel();
        state.waiting.insert(id, sender);
        Ok((id, receiver))
    }

    fn closed_error(&self) -> Error {
        let reason = self.shared.state().closed.clone();
        Error::Control(reason.unwrap_or_else(|| "closed".into()))
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
    descriptor: Option<OwnedFd>,
}

impl<'a> Command<'a> {
    /// Returns a command without arguments.
    fn named(name: &'a str) -> Self {
        Self { name, arguments: None, descriptor: None }
    }

    fn line(&self, id: u64) -> String {
        let mut object = json!({ "execute": self.name, "id": id });
        if let Some(arguments) = &self.arguments {
            object["arguments"] = arguments.clone();
        }
        format!("{object}\n")
    }
}

/// Sends bytes and a descriptor without waiting. Returns the number of bytes sent.
fn send_once(socket: &Foreign, bytes: &[u8], descriptor: &OwnedFd) -> Result<usize, Errno> {
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [descriptor.as_fd()];
    // The space is that of one descriptor.
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
        Message::Answer { id, answer } => {
            // An unknown id belongs to an answer that came after its deadline.
            if let Some(waiting) = shared.state().waiting.remove(&id) {
                let _ = waiting.send(answer);
            }
        }
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
            tracing::warn!(function, %reason, "a function is broken");
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
mod tests {
    use tokio::io::{DuplexStream, duplex, split};

    use super::*;

    const GREETING: &str = "{\"QMP\": {\"version\": {}, \"capabilities\": [\"oob\"]}}\n";
    const LIMIT: Duration = Duration::from_secs(30);

    /// Plays QEMU: sends the lines of `script`, and reads one command for each `<`.
    async fn play(stream: DuplexStream, script: Vec<String>) -> Vec<String> {
        let (reader, mut writer) = split(stream);
        let mut lines = BufReader::new(reader).lines();
        let mut heard = Vec::new();
        for step in script {
            if step == "<" {
                match lines.next_line().await.unwrap() {
                    Some(line) => heard.push(line),
                    None => break,
                }
            } else if writer.write_all(step.as_bytes()).await.is_err() {
                break;
            }
        }
        heard
    }

    fn script(steps: &[&str]) -> Vec<String> {
        steps.iter().map(|step| step.to_string()).collect()
    }

    /// Returns the script for greeting and capabilities, then `rest`.
    fn negotiated(rest: &[&str]) -> Vec<String> {
        let mut steps = script(&[GREETING, "<", "{\"return\": {}, \"id\": 0}\n"]);
        steps.extend(script(rest));
        steps
    }

    async fn connect(script: Vec<String>) -> (Result<Qmp>, JoinHandle<Vec<String>>) {
        let (ours, theirs) = duplex(256);
        let peer = tokio::spawn(play(theirs, script));
        let (reader, writer) = split(ours);
        let qmp = tokio::time::timeout(LIMIT, Qmp::connect(reader, writer)).await.unwrap();
        (qmp, peer)
    }

    #[tokio::test]
    async fn answers_find_their_commands_whatever_comes_between() {
        let (qmp, peer) = connect(negotiated(&[
            "<",
            "{\"event\": \"RESUME\", \"timestamp\": {\"seconds\": 1, \"microseconds\": 2}}\n",
            "{\"event\": \"NIC_RX_FILTER_CHANGED\", \"data\": {}}\n",
            "{\"return\": \"somebody else's\", \"id\": 77}\n",
            "{\"return\": {\"status\": \"running\"}, \"id\": 1}\n",
        ]))
        .await;
        let qmp = qmp.unwrap();
        let mut events = qmp.events();
        let status = qmp.execute("query-status", LIMIT).await.unwrap();
        assert_eq!(status["status"], "running");
        assert_eq!(events.recv().await.unwrap(), VmEvent::Resumed);
        let heard = peer.await.unwrap();
        assert_eq!(heard[0], r#"{"execute":"qmp_capabilities","id":0}"#);
        assert_eq!(heard[1], r#"{"execute":"query-status","id":1}"#);
    }

    #[tokio::test]
    async fn refusals_carry_the_reason_on_one_line() {
        let (qmp, _peer) = connect(negotiated(&[
            "<",
            "{\"error\": {\"class\": \"GenericError\", \"desc\": \"no\\nway\"}, \"id\": 1}\n",
        ]))
        .await;
        let error = qmp.unwrap().execute("system_powerdown", LIMIT).await.unwrap_err();
        assert_eq!(error.to_string(), "the VM refused 'system_powerdown': no way");
    }

    #[tokio::test]
    async fn a_closed_channel_fails_what_waits_and_what_comes_after() {
        let (qmp, _peer) = connect(negotiated(&[
            "{\"event\": \"SHUTDOWN\", \"data\": {\"guest\": true, \"reason\": \"guest-reset\"}}\n",
            "<",
        ]))
        .await;
        let qmp = qmp.unwrap();
        let first = qmp.execute("quit", LIMIT).await.unwrap_err();
        assert!(matches!(first, Error::Control(_)), "{first}");
        qmp.drained().await;
        let second = qmp.execute("quit", LIMIT).await.unwrap_err();
        assert!(matches!(second, Error::Control(_)), "{second}");
        assert_eq!(qmp.last_shutdown(), Some(ShutdownReason::GuestReset));
    }

    #[tokio::test(start_paused = true)]
    async fn silence_is_a_timeout_and_leaves_nothing_waiting() {
        let (ours, _theirs_kept_open) = duplex(4096);
        let (reader, writer) = split(ours);
        let (events, _) = broadcast::channel(1);
        let shared = Arc::new(Shared { state: Mutex::default(), events, lost: Notify::new() });
        let reader = tokio::spawn(read_all(BufReader::new(reader), Arc::clone(&shared)));
        let writer = tokio::sync::Mutex::new(Box::new(writer) as Box<_>);
        let qmp = Qmp { socket: None, writer, shared, reader };
        let error = qmp.execute("query-status", Duration::from_secs(5)).await.unwrap_err();
        assert!(matches!(error, Error::Timeout { .. }), "{error}");
        assert!(qmp.shared.state().waiting.is_empty());
    }

    #[tokio::test]
    async fn hostile_peers_end_the_channel_and_nothing_else() {
        let long = format!("{{\"QMP\": \"{}\"}}\n", "x".repeat(MAX_LINE));
        let hostile_greetings =
            ["", "\n", "hello\n", "[]\n", "{}\n", "{\"event\": 3}\n", "\u{0}\n", "{\"QMP\"", &long];
        for greeting in hostile_greetings {
            let (qmp, _peer) = connect(script(&[greeting])).await;
            let error = qmp.err().unwrap();
            assert!(matches!(error, Error::Control(_)), "{greeting:.20}: {error}");
        }
        let lost = |function: &str| {
            let data = format!("{{\"function\": {function}}}");
            format!("{{\"event\": \"SLIPWAY_FUNCTION_LOST\", \"data\": {data}}}\n")
        };
        let (no_index, large_index) = (lost("\"0\""), lost("24"));
        let lines = ["nonsense\n", "{}\n", "{\"return\": 1}\n", "{\"return\": 1, \"id\": -1}\n"];
        for line in lines.into_iter().chain([&*no_index, &large_index]) {
            let (qmp, _peer) = connect(negotiated(&["<", line])).await;
            let error = qmp.unwrap().execute("query-status", LIMIT).await.unwrap_err();
            assert!(matches!(error, Error::Control(_)), "{line}: {error}");
        }
    }

    #[tokio::test]
    async fn lost_functions_are_told_once_until_the_channel_ends() {
        let lost = |function: u32| {
            let event = "SLIPWAY_FUNCTION_LOST";
            format!("{{\"event\": \"{event}\", \"data\": {{\"function\": {function}}}}}\n")
        };
        let answer = "{\"return\": {}, \"id\": 1}\n";
        let broken = lost(5).replace("}}", ", \"final\": true, \"reason\": \"it lied\"}}");
        let steps = [&lost(2), &lost(0), &broken, &lost(2), "<", answer, "<", &lost(3), "<"];
        let (qmp, _peer) = connect(negotiated(&steps)).await;
        let qmp = qmp.unwrap();
        qmp.execute("query-status", LIMIT).await.unwrap();
        assert_eq!(qmp.lost_functions().await, Some(BTreeSet::from([0, 2])));
        assert_eq!(qmp.take_lost_functions(), Some(BTreeSet::new()));
        let (lost, stopped) = tokio::join!(qmp.lost_functions(), async {
            tokio::time::timeout(Duration::from_millis(1), qmp.execute("stop", LIMIT)).await
        });
        assert_eq!(lost, Some(BTreeSet::from([3])));
        assert!(stopped.is_err(), "never answered");
        qmp.execute("quit", LIMIT).await.unwrap_err();
        assert_eq!(qmp.lost_functions().await, None);
    }
}
