//! A process's standard streams as containerd gives them: FIFOs, or a file for output.
//!
//! The shim holds more ends of a FIFO than it uses. A write end of standard input keeps the input
//! open when a client leaves, until CloseIO. A read end of each output keeps writes from failing
//! while no client reads: the process then waits, as at a full pipe. These ends go when the
//! process has ended or is to be killed, so that nothing waits for a reader that never comes.
//!
//! Streams are opened when the process starts and not before, as other shims do it: `ctr` writes
//! its input as soon as the FIFO is open, and tells the end of the input only to a process that it
//! knows of by then.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{Mode, OFlags};
use tokio::io::AsyncWriteExt;
use tokio::net::unix::pipe;

/// The paths of a process's streams; an empty path stands for none.
#[derive(Clone, Debug, Default)]
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

/// The ends that the session uses.
pub struct Streams {
    /// Standard input.
    pub stdin: Option<pipe::Receiver>,
    /// Standard output.
    pub stdout: Output,
    /// Standard error.
    pub stderr: Output,
}

/// The ends that are only held.
#[derive(Default)]
pub struct Held {
    stdin: Mutex<Option<OwnedFd>>,
    stdin_is_closed: AtomicBool,
    readers: Mutex<Vec<OwnedFd>>,
}

impl Held {
    /// Lets standard input end once its writers have left.
    pub fn close_stdin(&self) {
        self.stdin_is_closed.store(true, Ordering::Relaxed);
        lock(&self.stdin).take();
    }

    /// Returns the bytes in the FIFOs of outputs that nobody has read, 0 once they are released.
    pub fn unread(&self) -> u64 {
        lock(&self.readers).iter().filter_map(|fifo| rustix::io::ioctl_fionread(fifo).ok()).sum()
    }

    /// Lets writes to an output without a reader fail.
    pub fn release_outputs(&self) {
        lock(&self.readers).clear();
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
    /// Writes all of `data`. After the first failure, which is that the last reader has left or the
    /// disk is full, output goes nowhere.
    pub async fn write(&mut self, data: &[u8]) {
        let written = match self {
            Self::Nothing => return,
            Self::Fifo(fifo) => fifo.write_all(data).await,
            Self::File(file) => async { file.write_all(data).await.and(file.flush().await) }.await,
        };
        if let Err(error) = written {
            if error.kind() != io::ErrorKind::BrokenPipe {
                crate::log::warn(&format!("output is lost from here on: {error}"));
            }
            *self = Self::Nothing;
        }
    }
}

/// Opens a process's streams, and puts the ends that are only held into `held`.
///
/// # Errors
/// One line: a path cannot be opened, or is of a kind that the shim does not serve.
pub fn open(paths: &Paths, held: &Held) -> Result<Streams, String> {
    let stdin = if paths.stdin.is_empty() {
        None
    } else {
        let named = |error| format!("cannot open {}: {error}", paths.stdin);
        let receiver = pipe::OpenOptions::new().open_receiver(&paths.stdin).map_err(named)?;
        let writer = fifo_end(&paths.stdin, OFlags::WRONLY).map_err(named)?;
        let mut stdin = lock(&held.stdin);
        *stdin = Some(writer).filter(|_| !held.stdin_is_closed.load(Ordering::Relaxed));
        Some(receiver)
    };
    let stdout = output(&paths.stdout, held)?;
    // A terminal has one output, whatever the request says.
    let stderr = if paths.terminal { Output::Nothing } else { output(&paths.stderr, held)? };
    Ok(Streams { stdin, stdout, stderr })
}

fn output(path: &str, held: &Held) -> Result<Output, String> {
    let (scheme, plain) = path.split_once("://").unwrap_or(("fifo", path));
    let named = |error| format!("cannot open {plain}: {error}");
    match scheme {
        _ if plain.is_empty() => Ok(Output::Nothing),
        "fifo" => {
            // The read end comes first: without one, opening the write end fails.
            let reader = fifo_end(plain, OFlags::RDONLY).map_err(named)?;
            let sender = pipe::OpenOptions::new().open_sender(plain).map_err(named)?;
            lock(&held.readers).push(reader);
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
        _ => Err(format!("output to {scheme}:// is not supported: use FIFOs or file://")),
    }
}

fn fifo_end(path: &str, access: OFlags) -> io::Result<OwnedFd> {
    let flags = access | OFlags::NONBLOCK | OFlags::CLOEXEC;
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
        let held = Held::default();
        let mut streams = open(&paths, &held).unwrap();
        streams.stdout.write(b"kept").await;
        let mut reader = std::fs::File::open(&paths.stdout).unwrap();
        let mut four = [0; 4];
        reader.read_exact(&mut four).unwrap();
        assert_eq!(&four, b"kept");
        drop(reader);
        let large = vec![0; 1 << 20];
        {
            let write = streams.stdout.write(&large);
            tokio::pin!(write);
            // Nobody reads, and the shim's own end lets it wait.
            assert!(poll_once(&mut write).await.is_none());
            held.release_outputs();
            write.await;
        }
        assert!(matches!(streams.stdout, Output::Nothing));
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
        let held = Held::default();
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
        let mut streams = open(&paths, &Held::default()).unwrap();
        streams.stdout.write(b"line").await;
        assert_eq!(std::fs::read(&file).unwrap(), b"line");
        for bad in ["binary:///bin/logger", "/no/such/fifo"] {
            let paths = Paths { stdout: bad.into(), ..Paths::default() };
            assert!(open(&paths, &Held::default()).is_err(), "{bad}");
        }
    }
}
