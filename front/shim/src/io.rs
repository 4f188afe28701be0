//! A process's standard streams as containerd gives them: FIFOs, or for output a file or a
//! [`logger`](crate::logger).
//!
//! The shim has each FIFO open once more than it uses it, for both ends. So standard input stays
//! open when a client leaves, until CloseIO, and writes to an output do not fail while no client
//! reads: the process then waits, as at a full pipe. The [`holder`](crate::hold) has these
//! descriptors too, so that no client sees the end of a FIFO when the shim's process is killed.
//! They go when the process has ended or is to be killed, so that nothing waits for a reader that
//! never comes.
//!
//! Streams are opened when the process starts and not before, as other shims do it: `ctr` writes
//! its input as soon as the FIFO is open, and tells the end of the input only to a process that it
//! knows of by then.

use std::fs::Metadata;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use serde::{Deserialize, Serialize};
use tokio::io::AsyncWriteExt;
use tokio::net::unix::pipe;

use crate::cursor::{Cursor, PIECE, Stream};
use crate::hold::{Holder, KeptDescriptor};

/// The number of a logger's process among the descriptors of a process, behind those of streams.
const LOGGER: u8 = 3;
/// The beginning of an output's path that stands for a logger.
pub const BINARY: &str = "binary://";
/// The time between two attempts to record a piece of output.
const AGAIN: Duration = Duration::from_millis(if cfg!(test) { 20 } else { 1000 });

/// The paths of a process's streams; an empty path stands for none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Paths {
    /// The path of standard input.
    pub stdin: String,
    /// The path of standard output, or of all that a terminal prints.
    pub stdout: String,
    /// The path of standard error.
    pub stderr: String,
    /// Set if the process has a terminal.
    pub terminal: bool,
}

impl Paths {
    /// Returns the path of the process's logger without its scheme, if it has one. As with runc,
    /// that of standard output takes both outputs.
    pub fn logger(&self) -> Option<&str> {
        self.stdout.strip_prefix(BINARY)
    }
}

/// The ends that the session uses.
pub struct Streams {
    /// Standard input.
    pub stdin: Option<pipe::Receiver>,
    /// Standard output.
    pub stdout: Output,
    /// Standard error.
    pub stderr: Output,
}

/// The FIFOs as they are only held.
#[derive(Default)]
pub struct HeldFifos {
    stdin: Mutex<Option<KeptDescriptor>>,
    stdin_is_closed: AtomicBool,
    outputs: Mutex<Vec<KeptDescriptor>>,
    /// The process of the logger that takes the outputs.
    logger: Mutex<Option<KeptDescriptor>>,
    /// The holder that has them too, and the beginning of their names there.
    holder: OnceLock<(Arc<Holder>, String)>,
}

impl HeldFifos {
    /// Has the holder have the FIFOs too that are opened from here on, by names that begin so.
    pub fn keep_in(&self, holder: &Arc<Holder>, name: String) {
        // Set once: when the process is made.
        let _ = self.holder.set((Arc::clone(holder), name));
    }

    /// Lets standard input end once its writers have left.
    pub fn close_stdin(&self) {
        self.stdin_is_closed.store(true, Ordering::Relaxed);
        lock(&self.stdin).take();
    }

    /// Returns whether standard input was let end.
    pub fn is_stdin_closed(&self) -> bool {
        self.stdin_is_closed.load(Ordering::Relaxed)
    }

    /// Returns the bytes in the FIFOs of outputs that nobody has read, 0 once they are released.
    pub fn unread(&self) -> u64 {
        lock(&self.outputs).iter().filter_map(|fifo| rustix::io::ioctl_fionread(fifo).ok()).sum()
    }

    /// Lets writes to an output without a reader fail.
    pub fn release_outputs(&self) {
        lock(&self.outputs).clear();
    }

    /// Returns whether an earlier serving process has left a FIFO open.
    pub fn has_left(&self) -> bool {
        let names = |(holder, name): &(Arc<Holder>, String)| holder.names(name);
        self.holder.get().is_some_and(|place| !names(place).is_empty())
    }

    /// Returns the FIFOs that an earlier serving process had: standard input, output, error output.
    pub fn left(&self) -> [Option<KeptDescriptor>; 3] {
        let Some((holder, name)) = self.holder.get() else { return [None, None, None] };
        [0, 1, 2].map(|stream| holder.take(&format!("{name}.{stream}")))
    }

    /// Keeps a descriptor of the process of the logger that takes the outputs.
    pub fn keep_logger(&self, process: OwnedFd) {
        *lock(&self.logger) = Some(self.spare(LOGGER, process));
    }

    /// Keeps the descriptor of a logger on that an earlier serving process had.
    fn keep_logger_left(&self) {
        let Some((holder, name)) = self.holder.get() else { return };
        *lock(&self.logger) = holder.take(&format!("{name}.{LOGGER}"));
    }

    /// Takes the descriptor of the logger's process, if there is a logger.
    pub fn take_logger(&self) -> Option<KeptDescriptor> {
        lock(&self.logger).take()
    }

    fn spare(&self, stream: u8, fifo: OwnedFd) -> KeptDescriptor {
        match self.holder.get() {
            Some((holder, name)) => holder.put(format!("{name}.{stream}"), fifo),
            None => KeptDescriptor::alone(fifo),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // The values are valid after any panic: they are replaced whole.
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// The destination of output.
pub enum Output {
    /// Nowhere.
    Nothing,
    /// Into a FIFO.
    Fifo(pipe::Sender),
    /// To the end of a file.
    File(tokio::fs::File),
}

impl Output {
    /// Writes all of `data`, the next output of `stream`, and moves `cursor` behind it. After the
    /// first failure, which is that the last reader has left or the disk is full, output goes
    /// nowhere.
    pub async fn write(&mut self, data: &[u8], stream: Stream, cursor: &Cursor) {
        let end = cursor.carried() + data.len() as u64;
        let written = match self {
            Self::Nothing => Ok(()),
            Self::Fifo(fifo) => write_pieces(fifo, data, stream, cursor).await,
            Self::File(file) => append(file, data, stream, cursor).await,
        };
        cursor.reach(end);
        if let Err(error) = written {
            if error.kind() != io::ErrorKind::BrokenPipe {
                crate::log::warn(&format!("output is lost from here on: {error}"));
            }
            *self = Self::Nothing;
        }
        if matches!(self, Self::Nothing) {
            cursor.pass(stream);
        }
    }

    /// Returns what there is of the destination; `None` if it is nowhere.
    pub fn metadata(&self) -> Option<Metadata> {
        let descriptor = match self {
            Self::Nothing => return None,
            Self::Fifo(fifo) => fifo.as_raw_fd(),
            Self::File(file) => file.as_raw_fd(),
        };
        std::fs::metadata(format!("/proc/self/fd/{descriptor}")).ok()
    }
}

async fn write_pieces(
    fifo: &mut pipe::Sender,
    data: &[u8],
    stream: Stream,
    cursor: &Cursor,
) -> io::Result<()> {
    for piece in data.chunks(PIECE) {
        recorded(|| cursor.begin_fifo(fifo.as_fd(), stream, piece.len())).await;
        fifo.write_all(piece).await?;
        cursor.reach(cursor.carried() + piece.len() as u64);
    }
    Ok(())
}

async fn append(
    file: &mut tokio::fs::File,
    data: &[u8],
    stream: Stream,
    cursor: &Cursor,
) -> io::Result<()> {
    if cursor.is_kept() {
        let size = file.metadata().await?.len();
        recorded(|| cursor.begin_file(stream, data.len(), size)).await;
    }
    file.write_all(data).await?;
    file.flush().await
}

/// Returns once a piece of output is recorded, which is to be written then.
async fn recorded(record: impl Fn() -> io::Result<()>) {
    let mut is_told = false;
    while let Err(error) = record() {
        if !std::mem::replace(&mut is_told, true) {
            crate::log::warn(&format!("output waits, since it cannot be recorded: {error}"));
        }
        tokio::time::sleep(AGAIN).await;
    }
}

/// Opens a process's streams, and puts what is only held into `held`.
///
/// # Errors
/// One line: a path cannot be opened, or is of a kind that the shim does not serve.
pub fn open(paths: &Paths, held: &HeldFifos) -> Result<Streams, String> {
    let stdin = input(&paths.stdin, held)?;
    let stdout = output(&paths.stdout, Stream::Out, held)?;
    // A terminal has one output, whatever the request says.
    let stderr = match paths.terminal {
        true => Output::Nothing,
        false => output(&paths.stderr, Stream::Err, held)?,
    };
    Ok(Streams { stdin, stdout, stderr })
}

/// Makes the streams of a process whose outputs go into these pipes of a logger's, standard output
/// first, and puts what is only held into `held`.
///
/// # Errors
/// One line: the path of standard input cannot be opened, or no descriptor is left.
pub fn open_piped(
    paths: &Paths,
    held: &HeldFifos,
    [stdout, stderr]: [OwnedFd; 2],
) -> Result<Streams, String> {
    let stdin = input(&paths.stdin, held)?;
    let stdout = piped(stdout, Stream::Out, held)?;
    let stderr = match paths.terminal {
        true => Output::Nothing,
        false => piped(stderr, Stream::Err, held)?,
    };
    Ok(Streams { stdin, stdout, stderr })
}

/// Makes an output of the end of a logger's pipe. The other end is the logger's alone, so that
/// writes fail once it has ended.
fn piped(fifo: OwnedFd, stream: Stream, held: &HeldFifos) -> Result<Output, String> {
    let failed = |error: io::Error| format!("no pipe to the logger: {error}");
    let copy = fifo.try_clone().map_err(failed)?;
    let sender = pipe::Sender::from_owned_fd(fifo).map_err(failed)?;
    lock(&held.outputs).push(held.spare(1 + stream as u8, copy));
    Ok(Output::Fifo(sender))
}

/// Opens the streams of a process that an earlier serving process has started: from the holder, or
/// else by their paths. A stream that cannot be opened any more is left out.
pub fn open_again(paths: &Paths, held: &HeldFifos) -> Streams {
    let left = held.left();
    let path = |at: usize, path: &String| match &left[at] {
        Some(fifo) => fifo.path().to_string_lossy().into_owned(),
        None => path.clone(),
    };
    let warned = |reason: &String| crate::log::warn(reason);
    let stdin = input(&path(0, &paths.stdin), held).inspect_err(warned).unwrap_or_default();
    let is_logged = paths.logger().is_some();
    if is_logged {
        held.keep_logger_left();
    }
    let opened = |at: usize, plain: &String, stream: Stream| {
        let opened = match &left[at] {
            Some(fifo) if is_logged => again(fifo, stream, held),
            None if is_logged => Ok(Output::Nothing),
            _ => output(&path(at, plain), stream, held),
        };
        opened.inspect_err(warned).unwrap_or(Output::Nothing)
    };
    let stdout = opened(1, &paths.stdout, Stream::Out);
    let stderr = match paths.terminal {
        true => Output::Nothing,
        false => opened(2, &paths.stderr, Stream::Err),
    };
    Streams { stdin, stdout, stderr }
}

/// Makes an output of the end of a logger's pipe that an earlier serving process had.
fn again(fifo: &KeptDescriptor, stream: Stream, held: &HeldFifos) -> Result<Output, String> {
    let copy = fifo.copy().map_err(|error| format!("no pipe to the logger: {error}"))?;
    piped(copy.into(), stream, held)
}

fn input(path: &str, held: &HeldFifos) -> Result<Option<pipe::Receiver>, String> {
    if path.is_empty() {
        return Ok(None);
    }
    let named = |error| format!("cannot open {path}: {error}");
    let receiver = pipe::OpenOptions::new().open_receiver(path).map_err(named)?;
    if !held.is_stdin_closed() {
        let both = both_ends(path).map_err(named)?;
        *lock(&held.stdin) = Some(held.spare(0, both));
    }
    Ok(Some(receiver))
}

fn output(path: &str, stream: Stream, held: &HeldFifos) -> Result<Output, String> {
    let (scheme, plain) = path.split_once("://").unwrap_or(("fifo", path));
    let named = |error| format!("cannot open {plain}: {error}");
    match scheme {
        _ if plain.is_empty() => Ok(Output::Nothing),
        "fifo" => {
            // Both ends come first: without a read end, opening the write end fails.
            let both = both_ends(plain).map_err(named)?;
            let sender = pipe::OpenOptions::new().open_sender(plain).map_err(named)?;
            lock(&held.outputs).push(held.spare(1 + stream as u8, both));
            Ok(Output::Fifo(sender))
        }
        "file" => {
            let mut options = std::fs::OpenOptions::new();
            // A FIFO without a reader would make the open wait.
            let flags = OFlags::NONBLOCK.bits().cast_signed();
            let file = options.create(true).append(true).custom_flags(flags).open(plain);
            let file = file.map_err(named)?;
            if !file.metadata().map_err(named)?.is_file() {
                return Err(format!("cannot write to {plain}: it is no ordinary file"));
            }
            Ok(Output::File(file.into()))
        }
        _ => Err(format!(
            "output to {scheme}:// is not supported: use FIFOs, file://, or binary:// for both \
             outputs"
        )),
    }
}

/// Opens a FIFO for reading and writing, which waits for nobody (fifo(7)).
fn both_ends(path: &str) -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?)
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    fn fifo(dir: &tempfile::TempDir, name: &str) -> String {
        let path = dir.path().join(name);
        let mode = Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        path.to_string_lossy().into_owned()
    }

    #[tokio::test]
    async fn output_waits_for_a_reader_until_it_is_released() {
        let dir = tempfile::tempdir().unwrap();
        let paths = Paths { stdout: fifo(&dir, "out"), ..Paths::default() };
        let held = HeldFifos::default();
        let mut streams = open(&paths, &held).unwrap();
        let cursor = Cursor::default();
        streams.stdout.write(b"kept", Stream::Out, &cursor).await;
        let mut reader = std::fs::File::open(&paths.stdout).unwrap();
        let mut four = [0; 4];
        reader.read_exact(&mut four).unwrap();
        assert_eq!(&four, b"kept");
        drop(reader);
        let large = vec![0; 1 << 20];
        {
            let write = streams.stdout.write(&large, Stream::Out, &cursor);
            tokio::pin!(write);
            // Nobody reads, and the shim's own end lets it wait.
            assert!(poll_once(&mut write).await.is_none());
            held.release_outputs();
            write.await;
        }
        assert!(matches!(streams.stdout, Output::Nothing));
        assert_eq!(cursor.carried(), 4 + (1 << 20));
    }

    /// Polls a future once.
    async fn poll_once<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
        std::future::poll_fn(|context| {
            std::task::Poll::Ready(match std::pin::Pin::new(&mut *future).poll(context) {
                std::task::Poll::Ready(output) => Some(output),
                std::task::Poll::Pending => None,
            })
        })
        .await
    }

    #[tokio::test]
    async fn input_ends_when_it_is_closed_and_not_when_a_writer_leaves() {
        use tokio::io::AsyncReadExt;
        let dir = tempfile::tempdir().unwrap();
        let paths = Paths { stdin: fifo(&dir, "in"), ..Paths::default() };
        let held = HeldFifos::default();
        let streams = open(&paths, &held).unwrap();
        let mut stdin = streams.stdin.unwrap();
        std::fs::OpenOptions::new().write(true).open(&paths.stdin).map(drop).unwrap();
        let mut buffer = [0; 8];
        {
            let read = stdin.read(&mut buffer);
            tokio::pin!(read);
            assert!(poll_once(&mut read).await.is_none());
        }
        held.close_stdin();
        assert_eq!(stdin.read(&mut buffer).await.unwrap(), 0);
    }

    #[tokio::test]
    async fn other_kinds_of_output_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("log");
        let paths = Paths { stdout: format!("file://{}", file.display()), ..Paths::default() };
        let mut streams = open(&paths, &HeldFifos::default()).unwrap();
        streams.stdout.write(b"line", Stream::Out, &Cursor::default()).await;
        assert_eq!(std::fs::read(&file).unwrap(), b"line");
        for bad in ["binary:///bin/logger", "/no/such/fifo"] {
            let paths = Paths { stdout: bad.into(), ..Paths::default() };
            assert!(open(&paths, &HeldFifos::default()).is_err(), "{bad}");
        }
    }
}
