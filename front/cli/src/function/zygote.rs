//! The zygotes of a function, one in each sandbox: the command runs once in a container, up to
//! where it stops itself, and invocations are forks of it (RunD-V's fork of containers). The daemon
//! and its agents make them; here is what the server asks for and knows of them.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Result, anyhow};
use slipway_runtime::SandboxClient;
use slipway_runtime::v1::{self, run_in, run_out};

use crate::client::{answer, refused};
use crate::session::requests;

/// The name of the container with the zygote, in each sandbox.
pub const CONTAINER: &str = "zygote";

/// The zygotes of a function.
pub struct Zygotes {
    /// The time in which the command is to stop itself.
    ready: Duration,
    /// The longest time of an invocation.
    timeout: Duration,
    /// Invocations that were forks.
    forked: AtomicU64,
    /// The first reason why an invocation was not a fork.
    refused: OnceLock<String>,
}

impl Zygotes {
    /// Makes the record of a function that has none yet.
    pub fn new(ready: Duration, timeout: Duration) -> Self {
        Self { ready, timeout, forked: AtomicU64::new(0), refused: OnceLock::new() }
    }

    /// Returns what an invocation with these variables asks the daemon for.
    pub fn ask(&self, variables: Vec<String>) -> v1::Zygote {
        v1::Zygote {
            ready_ms: milliseconds(self.ready),
            variables,
            prepare: false,
            longest_ms: milliseconds(self.timeout),
        }
    }

    /// Has the container `name` start its zygote, and returns when the zygote is ready, or the
    /// command cannot be forked.
    ///
    /// # Errors
    /// The errors of the daemon.
    pub async fn prepare(
        &self,
        mut client: SandboxClient,
        name: String,
        command: Vec<String>,
    ) -> Result<()> {
        let zygote = Some(v1::Zygote { prepare: true, ..self.ask(Vec::new()) });
        let spec = v1::ExecSpec { name, command, zygote, ..v1::ExecSpec::default() };
        let (_open, stream) = requests(run_in::Kind::Exec(spec));
        let mut replies = answer(client.exec(stream).await)?;
        while let Some(message) = replies.message().await.map_err(refused)? {
            match message.kind {
                Some(run_out::Kind::Started(started)) => self.note(&started),
                Some(run_out::Kind::Exit(_)) => return Ok(()),
                _ => {}
            }
        }
        Err(anyhow!("the daemon closed the session"))
    }

    /// Notes how an invocation began. Logs why it is no fork, once.
    pub fn note(&self, started: &v1::Started) {
        self.forked.fetch_add(u64::from(started.forked), Ordering::Relaxed);
        let reason = &started.not_forked;
        if !reason.is_empty() && self.refused.set(reason.clone()).is_ok() {
            let reason = slipway_printable::line(reason, slipway_printable::MESSAGE);
            tracing::warn!(reason, "zygote: no: the command is started anew");
        }
    }

    /// Returns the number of invocations that were forks.
    pub fn forked(&self) -> u64 {
        self.forked.load(Ordering::Relaxed)
    }

    /// Returns "yes", or "no: " and the first reason why an invocation was no fork.
    pub fn state(&self) -> String {
        self.refused.get().map_or_else(|| "yes".to_owned(), |reason| format!("no: {reason}"))
    }
}

fn milliseconds(time: Duration) -> u32 {
    u32::try_from(time.as_millis()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_reason_is_told() {
        let zygotes = Zygotes::new(Duration::from_secs(10), Duration::MAX);
        let started = |forked, reason: &str| v1::Started {
            forked,
            not_forked: reason.to_owned(),
            ..v1::Started::default()
        };
        zygotes.note(&started(true, ""));
        assert_eq!((zygotes.forked(), zygotes.state().as_str()), (1, "yes"));
        zygotes.note(&started(false, "it has 3 threads"));
        zygotes.note(&started(false, "it has ended"));
        zygotes.note(&started(true, ""));
        assert_eq!((zygotes.forked(), zygotes.state().as_str()), (2, "no: it has 3 threads"));
        let asked = zygotes.ask(Vec::new());
        assert_eq!((asked.ready_ms, asked.longest_ms, asked.prepare), (10_000, u32::MAX, false));
    }
}
