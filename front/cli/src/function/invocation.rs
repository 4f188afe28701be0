//! An invocation in a replica: its input, and its output until its end.

use anyhow::{Error, anyhow};
use hyper::body::Bytes;
use slipway_runtime::v1::{self, RunIn, RunOut, run_in, run_out};
use tokio::sync::mpsc;
use tonic::Streaming;

use super::scheduler::End;
use crate::client::refused;

/// The size of the pieces in which a request's body is sent, bytes.
const PIECE: usize = 64 << 10;
/// The most bytes of an invocation's standard error that are kept, the last ones.
const LAST_WORDS: usize = 2 << 10;
/// The lowest exit status of a process that was ended by a signal.
const BY_SIGNAL: u32 = 128;

/// An invocation.
pub struct Call {
    /// The standard input of the command.
    pub body: Bytes,
    /// More of its environment, as "NAME=value".
    pub env: Vec<String>,
}

/// The end of an invocation.
pub enum Outcome {
    /// The command ended with status 0; its standard output.
    Answer(Vec<u8>),
    /// The command ended with another status; its last words, or why it could not be run.
    Failed(u32, String),
    /// The answer has too many bytes.
    TooLarge,
    /// The command ran for too long.
    Late,
    /// The command was not run, or its end is not known.
    Lost(Error),
}

impl Outcome {
    /// Returns the end as the scheduler counts it: it decides whether the replica is used again.
    pub fn end(&self) -> End {
        match self {
            Self::Answer(_) => End::Answered,
            Self::Failed(status, _) if *status < BY_SIGNAL => End::Failed,
            // A signal may be that of the guest's out-of-memory killer, which may have ended other
            // processes of the replica, too.
            Self::Failed(..) | Self::TooLarge | Self::Late | Self::Lost(_) => End::Broken,
        }
    }
}

/// Sends the standard input of a process and its end. Never returns: a process may end before it
/// has read all of it.
pub async fn feed(sender: &mpsc::Sender<RunIn>, body: &Bytes) -> Outcome {
    let pieces = body.chunks(PIECE).map(|piece| run_in::Kind::Stdin(piece.to_vec()));
    for kind in pieces.chain([run_in::Kind::StdinClosed(true)]) {
        // Fails if the process has ended, which its replies tell.
        let _ = sender.send(RunIn { kind: Some(kind) }).await;
    }
    std::future::pending().await
}

/// Collects the standard output of a process, at most `most` bytes, until the process ends. Calls
/// `note` when it begins.
pub async fn collect(
    mut replies: Streaming<RunOut>,
    most: usize,
    note: impl Fn(&v1::Started),
) -> Outcome {
    let (mut answer, mut words) = (Vec::new(), Vec::new());
    loop {
        let kind = match replies.message().await {
            Ok(Some(message)) => message.kind,
            Ok(None) => return Outcome::Lost(anyhow!("the daemon closed the session")),
            Err(status) => return Outcome::Lost(refused(status)),
        };
        match kind {
            Some(run_out::Kind::Started(started)) => note(&started),
            Some(run_out::Kind::Stdout(data)) if answer.len() + data.len() > most => {
                return Outcome::TooLarge;
            }
            Some(run_out::Kind::Stdout(data)) => answer.extend(data),
            Some(run_out::Kind::Stderr(data)) => {
                words.extend(data);
                words.drain(..words.len().saturating_sub(LAST_WORDS));
            }
            Some(run_out::Kind::Exit(exit)) if exit.status == 0 => return Outcome::Answer(answer),
            Some(run_out::Kind::Exit(exit)) => {
                let words = match exit.reason.is_empty() {
                    true => String::from_utf8_lossy(&words).into_owned(),
                    false => exit.reason,
                };
                return Outcome::Failed(exit.status, words);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_by_a_signal_is_the_end_of_the_replica() {
        let failed = |status| Outcome::Failed(status, String::new()).end();
        assert_eq!((failed(1), failed(127)), (End::Failed, End::Failed));
        assert_eq!((failed(128 + 9), Outcome::Late.end()), (End::Broken, End::Broken));
        assert_eq!(Outcome::Answer(Vec::new()).end(), End::Answered);
    }
}
