//! Standard streams of a process: between the agent, the kept log, and whoever is attached.
//!
//! The output of a container's first process is resumable: its agent keeps what is not in the log
//! yet, and the log's end says from where a daemon asks for it.

use std::sync::Mutex;
use std::time::Duration;

use slipway_agent_protocol::MOST_OUTPUT;
use slipway_agent_protocol::v1::{self, stdio_in, stdio_out};
use tokio::sync::{OwnedSemaphorePermit, mpsc, watch};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;

use crate::agent::{Agent, refused};
use crate::files::Lane;
use crate::log::{self, Record, Stream};
use crate::time::realtime_ns;
use crate::{Error, Result};

/// Pieces of output or input under way to one attached client: a slow client holds the process
/// back, it never grows the daemon.
const QUEUE: usize = 16;

/// Pieces that were taken from a guest and wait for whoever carries them on.
const PIECES: usize = 4;
/// Most clients that have one sandbox's output at once.
const MOST_ATTACHED: usize = 32;

/// Bytes after which the agent is told what was recorded: a quarter of what it keeps.
const TELL: u64 = 64 << 10;
/// Pieces after which it is told: a quarter of what it keeps, too. Many of a byte or two are far from
/// [`TELL`] bytes when it has no room for more.
const TELL_PIECES: u32 = 1024;

/// Further than any output comes.
const MOST_POSITION: u64 = 1 << 62;

/// Between two attempts to tell it.
const TELL_AGAIN: Duration = Duration::from_secs(1);

/// A piece of output.
pub type Output = (Stream, Vec<u8>);

/// A process's output, piece by piece, and an error if the agent or its sandbox went away.
pub type Pieces = mpsc::Receiver<Result<Output>>;

/// What goes to a process's standard input.
pub enum Input {
    /// Bytes.
    Data(Vec<u8>),
    /// End of file.
    Close,
}

/// A queue for input to a process.
pub fn input() -> (mpsc::Sender<Input>, mpsc::Receiver<Input>) {
    mpsc::channel(QUEUE)
}

/// Opens the agent's stream for `process`; returns its output. What comes out of `input` goes in. The stream
/// ends when the output is dropped, and `session` with it.
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
    Ok(open_with(agent, attach, input, Some(session)).await?.0)
}

/// Like [`open`], with the output from `position` on, if the agent still has that. Returns the
/// position of what comes first as well.
///
/// # Errors
/// [`Error::Agent`].
pub async fn resume(
    agent: &Agent,
    process: Option<v1::ProcessRef>,
    position: u64,
    input: mpsc::Receiver<Input>,
) -> Result<(Pieces, u64)> {
    let resume = v1::Resume { process, position };
    let (output, from) =
        open_with(agent, Some(stdio_in::Kind::Resume(resume)), input, None).await?;
    // The guest's word: it may have lost bytes, never gone back, and counts can still be added to.
    if !(position..=MOST_POSITION).contains(&from) {
        return Err(Error::Agent("the agent has lost count of the output".to_owned()));
    }
    Ok((output, from))
}

async fn open_with(
    agent: &Agent,
    first: Option<stdio_in::Kind>,
    input: mpsc::Receiver<Input>,
    session: Option<OwnedSemaphorePermit>,
) -> Result<(Pieces, u64)> {
    let first = tokio_stream::once(v1::StdioIn { kind: first });
    let rest = ReceiverStream::new(input).map(|input| v1::StdioIn {
        kind: Some(match input {
            Input::Data(data) => stdio_in::Kind::Stdin(data),
            Input::Close => stdio_in::Kind::StdinClosed(true),
        }),
    });
    let opened = agent.open(MOST_OUTPUT, |mut client| async move {
        let mut output = client.stdio(first.chain(rest)).await.map_err(refused)?.into_inner();
        // The first message says that the streams are attached: nothing is lost from here on.
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

/// Hands on a guest's output. Runs on the guests' thread; each message is a turn, whatever is in it.
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

/// The output in a message; None: there is none.
fn piece_of(message: v1::StdioOut) -> Option<Output> {
    let piece = match message.kind? {
        stdio_out::Kind::Stdout(data) => (Stream::Out, data),
        stdio_out::Kind::Stderr(data) => (Stream::Err, data),
        stdio_out::Kind::Attached(_) => return None,
    };
    Some(piece).filter(|(_, data)| !data.is_empty())
}

/// The next piece of a process's output; None at its end.
///
/// # Errors
/// [`Error::Agent`] when the agent or its sandbox is gone.
pub async fn next(output: &mut Pieces) -> Result<Option<Output>> {
    output.recv().await.transpose()
}

/// Hands the output of a container's first process to the log and to all who are attached.
///
/// The slowest of the attached sets the pace, as a pipe's reader does: one that stops reading
/// stops the process once all queues are full, and nothing of the output is dropped. It cannot
/// stop the sandbox's end.
pub struct Fanout {
    /// None: the output has ended.
    attached: Mutex<Option<Vec<mpsc::Sender<Record>>>>,
}

impl Default for Fanout {
    fn default() -> Self {
        Self { attached: Mutex::new(Some(Vec::new())) }
    }
}

impl Fanout {
    /// Joins: every piece of output from now on, until the container ends; nothing when it has.
    /// What precedes the first piece is in the log. `name` is the sandbox's.
    ///
    /// # Errors
    /// [`Error::Busy`].
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

    /// Ends everybody's stream, those that join later included.
    pub fn close(&self) {
        *self.lock() = None;
    }

    /// Carries the output of `process` until its streams end; `output` begins where `log` ends. A full
    /// disk costs the log, with a word in the daemon's own log, never the container. A slow disk slows the
    /// container down: `lane` writes one piece at a time, and the next one is taken from the guest after that.
    ///
    /// # Errors
    /// [`Error::Agent`] when the sandbox went away.
    pub async fn carry(
        &self,
        agent: Agent,
        process: Option<v1::ProcessRef>,
        mut output: Pieces,
        log: log::Writer,
        lane: Lane,
    ) -> Result<()> {
        let mut position = log.position();
        let mut recorded = Recorded::from(position);
        tokio::spawn(tell(agent, process, recorded.told.subscribe()));
        let mut log = Some(log);
        while let Some((stream, mut data)) = next(&mut output).await? {
            if let Some(mut writer) = log.take() {
                let appended = lane.run(move || {
                    let appended = writer.append(stream, &data);
                    (data, appended.map(|()| writer))
                });
                let (kept, appended) = appended.await;
                data = kept;
                match appended {
                    Ok(writer) => log = Some(writer),
                    Err(error) => tracing::warn!(%error, "output is no longer kept"),
                }
            }
            let record = Record { position, stream, time_ns: realtime_ns(), data };
            position = record.end();
            recorded.upto(position);
            self.send(record).await;
        }
        Ok(())
    }

    async fn send(&self, record: Record) {
        let attached = self.lock().clone().unwrap_or_default();
        let mut gone = false;
        for client in attached {
            gone |= client.send(record.clone()).await.is_err();
        }
        if gone && let Some(attached) = self.lock().as_mut() {
            attached.retain(|client| !client.is_closed());
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Vec<mpsc::Sender<Record>>>> {
        // A panic elsewhere leaves a list of senders that is still a list of senders.
        self.attached.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// What is recorded of a process's output, and what of that its agent is to be told.
struct Recorded {
    told: watch::Sender<u64>,
    /// Recorded since then.
    pieces: u32,
}

impl Recorded {
    /// Output from `position` on is to come.
    fn from(position: u64) -> Self {
        Self { told: watch::Sender::new(position), pieces: 0 }
    }

    /// One more piece is recorded, up to `position`.
    fn upto(&mut self, position: u64) {
        self.pieces += 1;
        if position - *self.told.borrow() >= TELL || self.pieces >= TELL_PIECES {
            self.told.send_replace(position);
            self.pieces = 0;
        }
    }
}

/// Tells the agent up to which position output is recorded, one call at a time, until there is no
/// more to come. An agent that cannot be told keeps what it has, and the process waits.
async fn tell(agent: Agent, process: Option<v1::ProcessRef>, mut recorded: watch::Receiver<u64>) {
    while recorded.changed().await.is_ok() {
        loop {
            let position = *recorded.borrow_and_update();
            let request = v1::RecordedRequest { process: process.clone(), position };
            let told = agent.call(|mut client| async move { client.recorded(request).await }).await;
            let Err(error) = told else { break };
            tracing::debug!(%error, "the agent was not told what is recorded");
            tokio::time::sleep(TELL_AGAIN).await;
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
        let mut recorded = Recorded::from(10);
        let mut told = recorded.told.subscribe();
        let mut heard = || told.has_changed().unwrap().then(|| *told.borrow_and_update());
        recorded.upto(9 + TELL);
        assert_eq!(heard(), None);
        recorded.upto(10 + TELL);
        assert_eq!(heard(), Some(10 + TELL));
        let after = |piece| 10 + TELL + u64::from(piece);
        (1..TELL_PIECES).for_each(|piece| recorded.upto(after(piece)));
        assert_eq!(heard(), None);
        recorded.upto(after(TELL_PIECES));
        assert_eq!(heard(), Some(after(TELL_PIECES)));
        recorded.upto(after(TELL_PIECES + 1));
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
