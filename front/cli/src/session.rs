//! Carries standard streams between this terminal and a process in a sandbox.

use std::io::{IsTerminal, Read, Write};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use slipway_runtime::v1::{self, RunIn, RunOut, run_in, run_out};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tonic::Streaming;

use crate::client::refused;

/// The number of messages that may be queued to the daemon.
const QUEUE: usize = 16;
/// The number of interrupts in a row that end the process by SIGKILL.
const INSIST: u32 = 3;
/// The longest time between two interrupts in a row.
const ROW: Duration = Duration::from_secs(3);
/// The longest time that the process may take to end after that.
const PATIENCE: Duration = Duration::from_secs(3);

/// The settings of a session.
#[derive(Clone, Copy, Debug)]
pub struct SessionSettings {
    /// Standard input is forwarded.
    pub stdin: bool,
    /// The process has a terminal, so ours becomes raw.
    pub tty: bool,
}

/// Returns the size of this terminal in rows and columns, or zeros if there is none.
pub fn terminal_size() -> (u32, u32) {
    tcgetwinsize(std::io::stdout())
        .map_or((0, 0), |size| (u32::from(size.ws_row), u32::from(size.ws_col)))
}

/// The settings of a terminal before it became raw, restored on drop.
struct RawTerminal(Termios);

impl RawTerminal {
    fn enter() -> Option<Self> {
        let before = tcgetattr(std::io::stdin()).ok()?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(std::io::stdin(), OptionalActions::Drain, &raw).ok()?;
        Some(Self(before))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        // Fails if the terminal is gone, which needs no restoring.
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Drain, &self.0);
    }
}

/// An event that a session reports to its caller, beside output.
pub enum Event {
    /// The sandbox was created, with this name.
    Created(String),
    /// This stage of the start began.
    Stage(String),
    /// The process runs; these are the stages of its start.
    Started(Vec<v1::Stage>),
}

/// The receiver of a session's output.
pub trait Sink {
    /// Writes a piece of standard output, or of standard error.
    ///
    /// # Errors
    /// If writing fails; the session ends then.
    fn write(&mut self, error: bool, data: &[u8]) -> std::io::Result<()>;
}

/// Writes output unchanged to this program's own streams.
pub struct Plain;

impl Sink for Plain {
    fn write(&mut self, error: bool, data: &[u8]) -> std::io::Result<()> {
        if error {
            std::io::stderr().lock().write_all(data)
        } else {
            let mut stdout = std::io::stdout().lock();
            stdout.write_all(data)?;
            stdout.flush()
        }
    }
}

/// Makes a stream of requests that begins with `first`, and the sender for the rest.
pub fn requests(
    first: run_in::Kind,
) -> (mpsc::Sender<RunIn>, impl tokio_stream::Stream<Item = RunIn>) {
    use tokio_stream::StreamExt;
    let (sender, receiver) = mpsc::channel(QUEUE);
    let first = tokio_stream::once(RunIn { kind: Some(first) });
    (sender, first.chain(tokio_stream::wrappers::ReceiverStream::new(receiver)))
}

/// Carries a session to its end. Returns `None` if the user detached before the process ended.
///
/// # Errors
/// If the daemon refuses or goes away, or output cannot be written.
pub async fn carry(
    mut replies: Streaming<RunOut>,
    requests: mpsc::Sender<RunIn>,
    wishes: SessionSettings,
    sink: &mut (dyn Sink + Send),
    mut event: impl FnMut(Event),
) -> Result<Option<v1::Exit>> {
    let mut raw = None;
    let insistence = Arc::new(Insistence::default());
    let forwarders = Forwarders::signals(&requests, wishes.tty, &insistence);
    let mut input = None;
    let given_up = insistence.given_up();
    tokio::pin!(given_up);
    loop {
        let message = tokio::select! {
            message = replies.message() => message.map_err(refused)?,
            // A process that reads no input blocks everything queued behind the input, signals
            // included.
            () = &mut given_up => bail!(
                "interrupted {INSIST} times; it may still run: `slipway ps` tells, `slipway rm -f` \
                 ends it"
            ),
        };
        let Some(kind) = message.and_then(|message| message.kind) else { return Ok(None) };
        match kind {
            run_out::Kind::Created(created) => event(Event::Created(created.name)),
            run_out::Kind::Stage(stage) => event(Event::Stage(stage)),
            run_out::Kind::Started(started) => {
                event(Event::Started(started.stages));
                if wishes.tty {
                    raw = raw.or_else(RawTerminal::enter);
                }
                if wishes.stdin {
                    input.get_or_insert_with(|| forward_stdin(requests.clone()));
                }
            }
            run_out::Kind::Stdout(data) => write(sink, false, &data)?,
            run_out::Kind::Stderr(data) => write(sink, true, &data)?,
            run_out::Kind::Exit(exit) => {
                drop((raw, forwarders));
                return Ok(Some(exit));
            }
        }
    }
}

fn write(sink: &mut (dyn Sink + Send), error: bool, data: &[u8]) -> Result<()> {
    sink.write(error, data).map_err(|error| match error.kind() {
        // The reader of our output has left, as `head` does: end as other programs do.
        std::io::ErrorKind::BrokenPipe => anyhow!("the reader of the output is gone"),
        _ => anyhow!("cannot write the output: {error}"),
    })
}

/// Reads standard input on a thread of its own: a read from a terminal cannot be cancelled.
fn forward_stdin(requests: mpsc::Sender<RunIn>) {
    std::thread::spawn(move || {
        let mut buffer = vec![0; 64 << 10];
        let mut stdin = std::io::stdin().lock();
        loop {
            let kind = match stdin.read(&mut buffer) {
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Ok(0) | Err(_) => run_in::Kind::StdinClosed(true),
                Ok(count) => run_in::Kind::Stdin(buffer[..count].to_vec()),
            };
            let last = matches!(kind, run_in::Kind::StdinClosed(_));
            if requests.blocking_send(RunIn { kind: Some(kind) }).is_err() || last {
                return;
            }
        }
    });
}

/// Counts interrupts, to find a user who insists that the process ends.
#[derive(Default)]
struct Insistence {
    /// The number of interrupts in a row, and the time of the last one.
    row: Mutex<(u32, Option<Instant>)>,
    insisted: tokio::sync::Notify,
}

impl Insistence {
    /// Counts a signal that came at `now`. Returns whether the user insists.
    fn count(&self, signal: i32, now: Instant) -> bool {
        if signal != libc::SIGINT && signal != libc::SIGTERM {
            return false;
        }
        let mut row = self.row.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let goes_on = row.1.is_some_and(|last| now.saturating_duration_since(last) <= ROW);
        *row = (if goes_on { row.0 + 1 } else { 1 }, Some(now));
        if row.0 >= INSIST {
            self.insisted.notify_one();
        }
        row.0 >= INSIST
    }

    /// Returns when the user has insisted and the process has not ended within [`PATIENCE`].
    async fn given_up(&self) {
        self.insisted.notified().await;
        tokio::time::sleep(PATIENCE).await;
    }
}

/// Tasks that forward signals, aborted with the session.
struct Forwarders(Vec<tokio::task::JoinHandle<()>>);

impl Drop for Forwarders {
    fn drop(&mut self) {
        for task in &self.0 {
            task.abort();
        }
    }
}

impl Forwarders {
    fn signals(requests: &mpsc::Sender<RunIn>, tty: bool, insistence: &Arc<Insistence>) -> Self {
        let passed = [
            (SignalKind::interrupt(), libc::SIGINT),
            (SignalKind::terminate(), libc::SIGTERM),
            (SignalKind::hangup(), libc::SIGHUP),
            (SignalKind::quit(), libc::SIGQUIT),
            (SignalKind::user_defined1(), libc::SIGUSR1),
            (SignalKind::user_defined2(), libc::SIGUSR2),
        ];
        let mut tasks: Vec<_> = passed
            .into_iter()
            .filter_map(|(kind, number)| {
                let (requests, insistence) = (requests.clone(), Arc::clone(insistence));
                let mut stream = signal(kind).ok()?;
                Some(tokio::spawn(async move {
                    while stream.recv().await.is_some() {
                        // A container's first process ignores signals that it has no handler for.
                        let insists = insistence.count(number, Instant::now());
                        let number = if insists { libc::SIGKILL } else { number };
                        let kind = Some(run_in::Kind::Signal(number as u32));
                        let requests = requests.clone();
                        // A task of its own: this message may wait behind input that the process
                        // does not read; the next signal must not.
                        tokio::spawn(async move { requests.send(RunIn { kind }).await });
                    }
                }))
            })
            .collect();
        if tty && std::io::stdout().is_terminal() {
            tasks.extend(window(requests.clone()));
        }
        Self(tasks)
    }
}

fn window(requests: mpsc::Sender<RunIn>) -> Option<tokio::task::JoinHandle<()>> {
    let mut stream = signal(SignalKind::window_change()).ok()?;
    Some(tokio::spawn(async move {
        while stream.recv().await.is_some() {
            let (rows, columns) = terminal_size();
            let kind = Some(run_in::Kind::Resize(v1::Size { rows, columns }));
            let _ = requests.send(RunIn { kind }).await;
        }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_interrupts_in_a_row_insist() {
        let insistence = Insistence::default();
        let start = Instant::now();
        let after =
            |seconds, signal| insistence.count(signal, start + Duration::from_secs(seconds));
        assert!(!after(0, libc::SIGINT));
        assert!(!after(60, libc::SIGINT));
        assert!(!after(61, libc::SIGTERM));
        for _ in 0..5 {
            assert!(!after(61, libc::SIGUSR1));
        }
        assert!(after(62, libc::SIGINT));
        assert!(!after(90, libc::SIGINT));
    }
}
