//! Standard streams of a process: between the agent, the kept log, and whoever is attached.

use std::sync::Mutex;

use slipway_agent_protocol::v1::{self, stdio_in, stdio_out};
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;

use crate::agent::{Agent, refused};
use crate::log::{self, Stream};
use crate::{Error, Result};

/// Pieces of output or input under way to one attached client: a slow client holds the process
/// back, it never grows the daemon.
const QUEUE: usize = 16;

/// A piece of output.
pub type Output = (Stream, Vec<u8>);

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

/// Opens the agent's stream for `process`; returns its output. What comes out of `input` goes in.
///
/// # Errors
/// [`Error::Agent`].
pub async fn open(
    agent: &Agent,
    process: Option<v1::ProcessRef>,
    input: mpsc::Receiver<Input>,
) -> Result<tonic::Streaming<v1::StdioOut>> {
    let attach = process.map(stdio_in::Kind::Attach);
    let first = tokio_stream::once(v1::StdioIn { kind: attach });
    let rest = ReceiverStream::new(input).map(|input| v1::StdioIn {
        kind: Some(match input {
            Input::Data(data) => stdio_in::Kind::Stdin(data),
            Input::Close => stdio_in::Kind::StdinClosed(true),
        }),
    });
    let reply = agent.client().stdio(first.chain(rest)).await.map_err(refused)?;
    let mut output = reply.into_inner();
    // The first message says that the streams are attached: nothing is lost from here on.
    match output.message().await.map_err(refused)? {
        Some(v1::StdioOut { kind: Some(stdio_out::Kind::Attached(_)) }) => Ok(output),
        _ => Err(Error::Agent("the agent did not attach the process's streams".to_owned())),
    }
}

/// The next piece of a process's output; None at its end.
///
/// # Errors
/// [`Error::Agent`] when the agent or its sandbox is gone.
pub async fn next(output: &mut tonic::Streaming<v1::StdioOut>) -> Result<Option<Output>> {
    loop {
        let Some(message) = output.message().await.map_err(refused)? else { return Ok(None) };
        match message.kind {
            Some(stdio_out::Kind::Stdout(data)) => return Ok(Some((Stream::Out, data))),
            Some(stdio_out::Kind::Stderr(data)) => return Ok(Some((Stream::Err, data))),
            _ => {}
        }
    }
}

/// Hands the output of a container's first process to the log and to all who are attached.
///
/// The slowest of the attached sets the pace, as a pipe's reader does: one that stops reading
/// stops the process once all queues are full, and nothing of the output is dropped. It cannot
/// stop the sandbox's end.
pub struct Fanout {
    /// None: the output has ended.
    attached: Mutex<Option<Vec<mpsc::Sender<Output>>>>,
}

impl Default for Fanout {
    fn default() -> Self {
        Self { attached: Mutex::new(Some(Vec::new())) }
    }
}

impl Fanout {
    /// Joins: every piece of output from now on, until the container ends; nothing when it has.
    pub fn attach(&self) -> mpsc::Receiver<Output> {
        let (sender, receiver) = mpsc::channel(QUEUE);
        if let Some(attached) = self.lock().as_mut() {
            attached.push(sender);
        }
        receiver
    }

    /// Ends everybody's stream, those that join later included.
    pub fn close(&self) {
        *self.lock() = None;
    }

    /// Carries output until the process's streams end. A full disk costs the log, with a word in
    /// the daemon's own log, never the container.
    ///
    /// # Errors
    /// [`Error::Agent`] when the sandbox went away.
    pub async fn carry(
        &self,
        mut output: tonic::Streaming<v1::StdioOut>,
        mut log: log::Writer,
    ) -> Result<()> {
        let mut log_works = true;
        while let Some((stream, data)) = next(&mut output).await? {
            if log_works && let Err(error) = log.append(stream, &data) {
                tracing::warn!(%error, "output is no longer kept");
                log_works = false;
            }
            self.send(stream, data).await;
        }
        Ok(())
    }

    async fn send(&self, stream: Stream, data: Vec<u8>) {
        let attached = self.lock().clone().unwrap_or_default();
        let mut gone = false;
        for client in attached {
            gone |= client.send((stream, data.clone())).await.is_err();
        }
        if gone && let Some(attached) = self.lock().as_mut() {
            attached.retain(|client| !client.is_closed());
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Vec<mpsc::Sender<Output>>>> {
        // A panic elsewhere leaves a list of senders that is still a list of senders.
        self.attached.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn who_joins_after_the_end_waits_for_nothing() {
        let fanout = Fanout::default();
        let mut early = fanout.attach();
        fanout.send(Stream::Out, b"x".to_vec()).await;
        fanout.close();
        let mut late = fanout.attach();
        assert_eq!(early.recv().await, Some((Stream::Out, b"x".to_vec())));
        assert_eq!(early.recv().await, None);
        assert_eq!(late.recv().await, None);
    }

    #[tokio::test]
    async fn who_left_is_forgotten() {
        let fanout = Fanout::default();
        drop(fanout.attach());
        let mut stays = fanout.attach();
        fanout.send(Stream::Err, b"y".to_vec()).await;
        assert_eq!(stays.recv().await, Some((Stream::Err, b"y".to_vec())));
        assert_eq!(fanout.lock().as_ref().map(Vec::len), Some(1));
    }
}
