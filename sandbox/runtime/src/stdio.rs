//! Standard streams of a process, carried between the agent, the kept log, and attached clients.
//!
//! The output of a container's first process is resumable: its agent keeps output that is not in
//! the log yet, and a daemon asks for it from the position at the log's end.

use std::sync::Mutex;
use std::time::Duration;

use slipway_agent_protocol::MOST_OUTPUT;
use slipway_agent_protocol::v1::{self, stdio_in, stdio_out};
use slipway_telemetry::realtime_ns;
use tokio::sync::{OwnedSemaphorePermit, mpsc, watch};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;

use crate::agent::{Agent, CALL, refused};
use crate::files::Lane;
use crate::log::{self, Record, Stream};
use crate::{Error, Result};

/// The most pieces of output or input in flight to one attached client. A slow client slows the
/// process down; it never makes the daemon's memory grow.
const QUEUE: usize = 16;

/// The most pieces that were received from a guest and wait to be carried on.
const PIECES: usize = 4;
/// The most clients attached to one sandbox's output at once.
const MOST_ATTACHED: usize = 32;

/// The bytes that are recorded between two reports to the agent: a quarter of the bytes that the
/// agent keeps.
const REPORT_BYTES: u64 = 64 << 10;
/// The most pieces that are recorded between two reports to the agent: a quarter of the pieces that
/// the agent keeps. Pieces of a byte or two reach this number long before they have
/// [`REPORT_BYTES`] bytes.
const REPORT_PIECES: u32 = 1024;

/// A position that no output reaches.
const MOST_POSITION: u64 = 1 << 62;

/// The time between two attempts of a report to the agent.
const REPORT_AGAIN: Duration = Duration::from_secs(1);

/// A piece of output.
pub type Output = (Stream, Vec<u8>);

/// A process's output, piece by piece; an error comes last if the agent or its sandbox went away.
pub type Pieces = mpsc::Receiver<Result<Output>>;

/// Input to a process's standard input.
pub enum Input {
    /// Bytes.
    Data(Vec<u8>),
    /// End of file.
    Close,
}

/// Makes a queue for input to a process.
pub fn input_queue() -> (mpsc::Sender<Input>, mpsc::Receiver<Input>) {
    mpsc::channel(QUEUE)
}

/// Opens the agent's stream for `process`, to which `input` is sent, and returns the output.
/// Dropping the output ends the stream and releases `session`.
///
/// # Errors
/// [`Error::Agent`].
pub async fn open(
    agent: &Agent,
    process: Option<v1::ProcessRef>,
    input: mpsc::Receiver<Input>,
    session: OwnedSemaphorePermit,
) -> Result<Pieces> {
    let attach = process.map(stdio_in::Kind::Attach);
    Ok(open_with(agent, attach, (input, CALL), Some(session)).await?.0)
}

/// Opens the agent's stream for `process`, to which `input` is sent, with the output from
/// `position` on, if the agent still has it. Returns the output and the position of its first byte.
/// The agent has `limit` to answer. `session` is released when the output has ended.
///
/// # Errors
/// [`Error::Refused`] if the agent refuses; [`Error::Agent`], also if its position is implausible.
pub async fn resume(
    agent: &Agent,
    process: Option<v1::ProcessRef>,
    position: u64,
    (input, limit): (mpsc::Receiver<Input>, Duration),
    session: Option<OwnedSemaphorePermit>,
) -> Result<(Pieces, u64)> {
    let resume = v1::Resume { process, position };
    let (output, from) =
        open_with(agent, Some(stdio_in::Kind::Resume(resume)), (input, limit), session).await?;
    // The position is the guest's word. It may be later than asked (bytes were lost), never
    // earlier, and it must leave room for counts to be added.
    if !(position..=MOST_POSITION).contains(&from) {
        return Err(Error::Agent("the agent has lost count of the output".to_owned()));
    }
    Ok((output, from))
}

async fn open_with(
    agent: &Agent,
    first: Option<stdio_in::Kind>,
    (input, limit): (mpsc::Receiver<Input>, Duration),
    session: Option<OwnedSemaphorePermit>,
) -> Result<(Pieces, u64)> {
    let first = tokio_stream::once(v1::StdioIn { kind: first });
    let rest = ReceiverStream::new(input).map(|input| v1::StdioIn {
        kind: Some(match input {
            Input::Data(data) => stdio_in::Kind::Stdin(data),
            Input::Close => stdio_in::Kind::StdinClosed(true),
        }),
    });
    let opened = agent.open((MOST_OUTPUT, limit), |mut client| async move {
        let mut output = client.stdio(first.chain(rest)).await.map_err(refused)?.into_inner();
        // The first message says that the streams are attached: from here on no output is lost.
        match output.message().await.map_err(refused)? {
            Some(v1::StdioOut { kind: Some(stdio_out::Kind::Attached(attached)) }) => {
                Ok((output, attached.position))
            }
            _ => Err(Error::Agent("the agent did not attach the process's streams".to_owned())),
        }
    });
    let (output, position) = opened.await?;
    let (sender, pieces) = mpsc::channel(PIECES);
    agent.guests().spawn(take_in(output, sender, session));
    Ok((pieces, position))
}

/// Forwards a guest's output. Runs on the guests' thread; each message is one turn, whatever it
/// contains.
async fn take_in(
    mut output: tonic::Streaming<v1::StdioOut>,
    pieces: mpsc::Sender<Result<Output>>,
    _session: Option<OwnedSemaphorePermit>,
) {
    loop {
        let message = tokio::select! {
            () = pieces.closed() => return,
            message = output.message() => message,
        };
        let piece = match message {
            Ok(Some(message)) => Ok(piece_of(message)),
            Ok(None) => return,
            Err(status) => Err(refused(status)),
        };
        if let Some(piece) = piece.transpose() {
            let last = piece.is_err();
            if pieces.send(piece).await.is_err() || last {
                return;
            }
        }
        tokio::task::yield_now().await;
    }
}

/// Returns the output in a message. Returns `None` if the message has none.
fn piece_of(message: v1::StdioOut) -> Option<Output> {
    let piece = match message.kind? {
        stdio_out::Kind::Stdout(data) => (Stream::Out, data),
        stdio_out::Kind::Stderr(data) => (Stream::Err, data),
        stdio_out::Kind::Attached(_) => return None,
    };
    Some(piece).filter(|(_, data)| !data.is_empty())
}

/// Returns the next piece of a process's output. Returns `None` at the end of the output.
///
/// # Errors
/// [`Error::Agent`] if the agent or its sandbox is gone.
pub async fn next_piece(output: &mut Pieces) -> Result<Option<Output>> {
    output.recv().await.transpose()
}

/// The distributor of the output of a container's first process to the log and to all attached
/// clients.
///
/// The slowest client sets the pace, as a pipe's reader does: a client that stops reading stops the
/// process once all queues are full, and no output is dropped. Such a client cannot stop the
/// sandbox's end.
pub struct Fanout {
    /// The attached clients' queues, or `None` after the output has ended.
    attached: Mutex<Option<Vec<mpsc::Sender<Record>>>>,
}

impl Default for Fanout {
    fn default() -> Self {
        Self { attached: Mutex::new(Some(Vec::new())) }
    }
}

impl Fanout {
    /// Attaches a client. It receives every piece of output from now on until the container ends,
    /// or nothing if the container has ended. Output before the first piece is in the log. `name`
    /// is the sandbox's, for the error.
    ///
    /// # Errors
    /// [`Error::Busy`] if the sandbox has as many attached clients as it may have.
    pub fn attach(&self, name: &str) -> Result<mpsc::Receiver<Record>> {
        let (sender, receiver) = mpsc::channel(QUEUE);
        if let Some(attached) = self.lock().as_mut() {
            attached.retain(|client| !client.is_closed());
            if attached.len() >= MOST_ATTACHED {
                let (name, what) = (name.to_owned(), "clients attached");
                return Err(Error::Busy { name, what, most: MOST_ATTACHED });
            }
            attached.push(sender);
        }
        Ok(receiver)
    }

    /// Ends the streams of all clients, and at once of those that attach later.
    pub fn close(&self) {
        *self.lock() = None;
    }

    /// Carries the output of `process` until its streams end. `output` begins where `log` ends. If
    /// the disk is full, output is no longer kept, the daemon's log says so with the `name` of the
    /// container, and the container goes on. A slow disk slows the container down: `lane` writes
    /// one piece at a time, and the next piece is taken from the guest only after that.
    ///
    /// # Errors
    /// [`Error::Agent`] if the sandbox went away.
    pub async fn carry(
        &self,
        name: &str,
        agent: Agent,
        process: Option<v1::ProcessRef>,
        mut output: Pieces,
        log: log::Writer,
        lane: Lane,
    ) -> Result<()> {
        let mut position = log.position();
        let mut recorded = Recorded::new(position);
        tokio::spawn(report(agent, process, recorded.reported.subscribe()));
        let mut log = Some(log);
        while let Some((stream, mut data)) = next_piece(&mut output).await? {
            if let Some(mut writer) = log.take() {
                let appended = lane.run(move || {
                    let appended = writer.append(stream, &data);
                    (data, appended.map(|()| writer))
                });
                let (kept, appended) = appended.await;
                data = kept;
                match appended {
                    Ok(writer) => log = Some(writer),
                    Err(error) => {
                        tracing::warn!(container = name, %error, "output is no longer kept");
                    }
                }
            }
            let record = Record { position, stream, time_ns: realtime_ns(), data };
            position = record.end();
            recorded.add_piece(position);
            self.send(record).await;
        }
        Ok(())
    }

    /// Sends a piece of output to all attached clients, and waits until each has room for it.
    async fn send(&self, record: Record) {
        let mut attached = self.lock().clone().unwrap_or_default();
        // The last client gets the record itself: most output has one client or none.
        let last = attached.pop();
        let mut gone = false;
        for client in attached {
            gone |= client.send(record.clone()).await.is_err();
        }
        if let Some(client) = last {
            gone |= client.send(record).await.is_err();
        }
        if gone && let Some(attached) = self.lock().as_mut() {
            attached.retain(|client| !client.is_closed());
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Vec<mpsc::Sender<Record>>>> {
        // After a panic elsewhere, the list of senders is still valid.
        self.attached.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// The progress of recording a process's output: decides when the agent gets a report of it.
struct Recorded {
    /// The end of the recorded output as [`report`] is to tell the agent.
    reported: watch::Sender<u64>,
    /// Pieces recorded since `reported` was set.
    pieces: u32,
}

impl Recorded {
    /// Makes the state for output that begins at `position`.
    fn new(position: u64) -> Self {
        Self { reported: watch::Sender::new(position), pieces: 0 }
    }

    /// Counts one more recorded piece, which ends at `position`.
    fn add_piece(&mut self, position: u64) {
        self.pieces += 1;
        if position - *self.reported.borrow() >= REPORT_BYTES || self.pieces >= REPORT_PIECES {
            self.reported.send_replace(position);
            self.pieces = 0;
        }
    }
}

/// Reports to the agent up to which position output is recorded, one call at a time, until the
/// output ends. As long as calls fail, the agent keeps its output, and the process waits when the
/// agent has no more room.
async fn report(agent: Agent, process: Option<v1::ProcessRef>, mut recorded: watch::Receiver<u64>) {
    while recorded.changed().await.is_ok() {
        loop {
            let position = *recorded.borrow_and_update();
            let request = v1::RecordedRequest { process: process.clone(), position };
            let reported =
                agent.call(|mut client| async move { client.recorded(request).await }).await;
            let Err(error) = reported else { break };
            tracing::debug!(%error, "the agent was not told what is recorded");
            tokio::time::sleep(REPORT_AGAIN).await;
            if recorded.has_changed().is_err() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(stream: Stream, data: &[u8]) -> Record {
        Record { position: 0, stream, time_ns: 0, data: data.to_vec() }
    }

    #[tokio::test]
    async fn who_joins_after_the_end_waits_for_nothing() {
        let fanout = Fanout::default();
        let mut early = fanout.attach("one").unwrap();
        fanout.send(record(Stream::Out, b"x")).await;
        fanout.close();
        let mut late = fanout.attach("one").unwrap();
        assert_eq!(early.recv().await, Some(record(Stream::Out, b"x")));
        assert_eq!(early.recv().await, None);
        assert_eq!(late.recv().await, None);
    }

    #[test]
    fn an_agent_hears_of_many_bytes_and_of_many_pieces() {
        let mut recorded = Recorded::new(10);
        let mut reports = recorded.reported.subscribe();
        let mut heard = || reports.has_changed().unwrap().then(|| *reports.borrow_and_update());
        recorded.add_piece(9 + REPORT_BYTES);
        assert_eq!(heard(), None);
        recorded.add_piece(10 + REPORT_BYTES);
        assert_eq!(heard(), Some(10 + REPORT_BYTES));
        let after = |piece| 10 + REPORT_BYTES + u64::from(piece);
        (1..REPORT_PIECES).for_each(|piece| recorded.add_piece(after(piece)));
        assert_eq!(heard(), None);
        recorded.add_piece(after(REPORT_PIECES));
        assert_eq!(heard(), Some(after(REPORT_PIECES)));
        recorded.add_piece(after(REPORT_PIECES + 1));
        assert_eq!(heard(), None);
    }

    #[tokio::test]
    async fn only_so_many_attach() {
        let fanout = Fanout::default();
        let mut all: Vec<_> = (0..MOST_ATTACHED).map(|_| fanout.attach("one").unwrap()).collect();
        let refused = fanout.attach("one").unwrap_err().to_string();
        assert!(refused.contains("one has 32 clients attached"), "{refused}");
        all.pop();
        fanout.attach("one").unwrap();
    }

    #[test]
    fn a_message_without_output_is_none() {
        let of = |kind| piece_of(v1::StdioOut { kind });
        assert_eq!(of(None), None);
        assert_eq!(of(Some(stdio_out::Kind::Stdout(Vec::new()))), None);
        assert_eq!(of(Some(stdio_out::Kind::Attached(v1::Attached { position: 1 }))), None);
        let error = Some(stdio_out::Kind::Stderr(b"x".to_vec()));
        assert_eq!(of(error), Some((Stream::Err, b"x".to_vec())));
    }

    #[tokio::test]
    async fn who_left_is_forgotten() {
        let fanout = Fanout::default();
        drop(fanout.attach("one"));
        let mut stays = fanout.attach("one").unwrap();
        fanout.send(record(Stream::Err, b"y")).await;
        assert_eq!(stays.recv().await, Some(record(Stream::Err, b"y")));
        assert_eq!(fanout.lock().as_ref().map(Vec::len), Some(1));
    }
}
