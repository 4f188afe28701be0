//! One attached Stdio stream: bytes from a process's pipes or terminal to the host and back.
//!
//! Output is read from the pipe only when HTTP/2 has room for it. So a host that stops reading
//! fills the pipe and stops the process, and unread output waits in the pipe for the next stream.
//! Bytes that were already passed to a connection that breaks are lost with it, unless the host
//! wants to resume: then they are [kept](crate::kept) until the host has recorded them.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use slipway_agent_protocol::v1::{Attached, StdioIn, StdioOut, stdio_in, stdio_out};
use tokio::sync::OwnedMutexGuard;
use tokio::task::AbortHandle;
use tokio_stream::Stream;
use tonic::{Status, Streaming};

use crate::file::AsyncFile;
use crate::kept::PIECE;
use crate::process::{Outputs, Process};

/// The time for the runtime to release a stream that its host gave up.
const RELEASE: Duration = Duration::from_secs(1);

/// The outgoing half of a Stdio stream. Dropping it detaches.
pub struct Attachment {
    process: Arc<Process>,
    outputs: OwnedMutexGuard<Outputs>,
    ended: Pin<Box<dyn Future<Output = ()> + Send>>,
    has_ended: bool,
    /// The bytes of standard output and standard error that were there when the process had ended.
    /// More is not its own: processes that have its pipes may go on writing for ever.
    left: [usize; 2],
    announced: bool,
    /// Set if the host reports what it has recorded. Otherwise bytes count as recorded once they
    /// are sent.
    resumable: bool,
    /// The position up to which everything was sent.
    sent: u64,
    stderr_first: bool,
    buffer: Box<[u8]>,
    input: AbortHandle,
}

impl Attachment {
    /// Locks the process's streams and starts forwarding `input`. `from` is the position at which
    /// the host resumes.
    ///
    /// # Errors
    /// `ALREADY_EXISTS` while another stream is attached.
    pub async fn new(
        process: Arc<Process>,
        from: Option<u64>,
        input: Streaming<StdioIn>,
    ) -> Result<Self, Status> {
        let outputs = streams(&process).await?;
        let waiter = process.clone();
        let kept = {
            let mut kept = process.kept();
            // A host that resumes at a position has recorded everything before it. If that were
            // kept, it might fill the store, and a host with nothing new to record would not report
            // anything that empties it.
            kept.recorded(from.unwrap_or(0));
            kept.range()
        };
        Ok(Attachment {
            ended: Box::pin(async move {
                waiter.ended().await;
            }),
            input: tokio::spawn(forward_input(process.clone(), input)).abort_handle(),
            process,
            outputs,
            has_ended: false,
            left: [0; 2],
            announced: false,
            resumable: from.is_some(),
            sent: from.unwrap_or(0).clamp(kept.start, kept.end),
            stderr_first: false,
            buffer: vec![0; PIECE].into_boxed_slice(),
        })
    }

    /// Reads available bytes of one of the process's streams. Returns whether there were any.
    fn read_output(&mut self, stderr: bool, context: &mut Context<'_>) -> bool {
        let output = if stderr { &mut self.outputs.stderr } else { &mut self.outputs.stdout };
        let Some(file) = output else { return false };
        let left = &mut self.left[usize::from(stderr)];
        let result = if self.has_ended {
            // The runtime's readiness may lag behind the process's end, so the pipe itself is read.
            let most = self.buffer.len().min(*left);
            if most == 0 {
                release(output.take());
                return false;
            }
            file.read_now(&mut self.buffer[..most])
        } else {
            match file.poll_read(context, &mut self.buffer) {
                Poll::Ready(result) => result,
                Poll::Pending => return false,
            }
        };
        match result {
            Ok(length) if length > 0 => {
                *left = left.saturating_sub(length);
                self.process.kept().push(stderr, &self.buffer[..length]);
                return true;
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => release(output.take()),
            // This is the end of the stream; an error of a pipe or terminal counts as the end.
            _ => *output = None,
        }
        false
    }

    /// Returns the next output that was not sent on this stream. Returns `None` if there is none.
    fn take(&mut self) -> Option<StdioOut> {
        let mut kept = self.process.kept();
        let (stderr, bytes) = kept.after(self.sent)?;
        let out = chunk(stderr, bytes);
        self.sent += bytes.len() as u64;
        if !self.resumable {
            kept.recorded(self.sent);
        }
        Some(out)
    }
}

/// Locks a process's streams.
///
/// # Errors
/// `ALREADY_EXISTS` while a stream is attached.
async fn streams(process: &Process) -> Result<OwnedMutexGuard<Outputs>, Status> {
    let lock = process.outputs.clone().lock_owned();
    tokio::time::timeout(RELEASE, lock)
        .await
        .map_err(|_| Status::already_exists("another stream is attached to the process"))
}

/// Closes a process's input, and forgets the output that no host has recorded: bytes that the agent
/// has read, and, of a process that is `stopped`, also those that wait to be read. The output of a
/// stopped process is counted anew. Returns the position of the next output.
///
/// # Errors
/// `ALREADY_EXISTS` while a stream is attached.
pub async fn forget(process: &Process, stopped: bool) -> Result<u64, Status> {
    let outputs = streams(process).await?;
    process.close_stdin();
    if stopped {
        let both = [&outputs.stdout, &outputs.stderr];
        both.into_iter().flatten().for_each(|file| file.drop_available());
    }
    let mut kept = process.kept();
    kept.recorded(u64::MAX);
    if stopped {
        kept.count_anew();
    }
    Ok(kept.range().end)
}

/// Closes a process's streams for good. Nobody gets its output, which neither blocks nor ends it.
///
/// # Errors
/// `ALREADY_EXISTS` while a stream is attached.
pub async fn abandon(process: &Process) -> Result<(), Status> {
    let mut outputs = streams(process).await?;
    process.close_stdin();
    release(outputs.stdout.take());
    release(outputs.stderr.take());
    Ok(())
}

/// Discards the output of processes that an ended process left behind with its pipe. Nobody wants
/// that output, but writing it must neither block nor kill the writer.
fn release(file: Option<Arc<AsyncFile>>) {
    if let Some(file) = file {
        tokio::spawn(async move { file.discard().await });
    }
}

fn chunk(stderr: bool, bytes: &[u8]) -> StdioOut {
    let bytes = bytes.to_vec();
    let kind = if stderr { stdio_out::Kind::Stderr(bytes) } else { stdio_out::Kind::Stdout(bytes) };
    StdioOut { kind: Some(kind) }
}

impl Stream for Attachment {
    type Item = Result<StdioOut, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if !self.announced {
            self.announced = true;
            let kind = Some(stdio_out::Kind::Attached(Attached { position: self.sent }));
            return Poll::Ready(Some(Ok(StdioOut { kind })));
        }
        if let Some(out) = self.take() {
            return Poll::Ready(Some(Ok(out)));
        }
        if !self.has_ended && self.ended.as_mut().poll(context).is_ready() {
            self.has_ended = true;
            let available =
                |file: &Option<Arc<AsyncFile>>| file.as_ref().map_or(0, |file| file.available());
            self.left = [available(&self.outputs.stdout), available(&self.outputs.stderr)];
        }
        ready!(self.process.kept().poll_room(context));
        // The streams alternate, so that a flood on one does not starve the other.
        for stderr in [self.stderr_first, !self.stderr_first] {
            if self.read_output(stderr, context) {
                self.stderr_first = !stderr;
                return Poll::Ready(self.take().map(Ok));
            }
        }
        if self.has_ended {
            return Poll::Ready(None);
        }
        Poll::Pending
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        self.input.abort();
        let is_read = self.outputs.stdout.is_none() && self.outputs.stderr.is_none();
        if self.process.ends_with_stream() && !(self.has_ended && is_read) {
            // A host that leaves asks for no status.
            self.process.note_told();
        }
        if self.has_ended {
            self.process.close_stdin();
        } else if self.process.ends_with_stream() {
            let _ = self.process.signal(libc::SIGKILL as u32);
        }
    }
}

/// Writes the host's input to the process, as fast as the process takes it. If the host's half ends
/// without `stdin_closed`, the process's input stays open for the next stream.
async fn forward_input(process: Arc<Process>, mut input: Streaming<StdioIn>) {
    while let Ok(Some(message)) = input.message().await {
        match message.kind {
            Some(stdio_in::Kind::Stdin(bytes)) => {
                let Some(stdin) = process.stdin() else { continue };
                if stdin.write_all(&bytes).await.is_err() {
                    // The process closed its input; the rest has no reader.
                    process.close_stdin();
                }
            }
            Some(stdio_in::Kind::StdinClosed(true)) => process.close_stdin(),
            Some(
                stdio_in::Kind::StdinClosed(false)
                | stdio_in::Kind::Attach(_)
                | stdio_in::Kind::Resume(_),
            )
            | None => {}
        }
    }
}
