//! The process that fetches the blocks of lazily pulled images, `slipway fetch`: its start, and the
//! connection that keeps it.
//!
//! One process serves a node. It ends by itself when nothing is connected and nothing is left to
//! fetch. While a sandbox has an image that was pulled lazily, the node holds an idle connection,
//! and starts the process again if it ends: reads of the guests wait for that long. Like a keeper,
//! it outlives the daemon. The next daemon holds it for the sandboxes that it adopts.

use std::io::IoSliceMut;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, socket_with,
};
use slipway_peer::{Bin, Foreign, receive};

use crate::config::Config;
use crate::lock::lock;
use crate::templates::apart;
use crate::{Error, Result};

/// The longest time that the process may take to listen.
const START: Duration = Duration::from_secs(10);
/// The time between two attempts to connect to a process that starts.
const LOOK: Duration = Duration::from_millis(5);
/// The pause after which a process that has ended is started again. It doubles each time, up to
/// the longest pause, if the process does not last.
const LEAST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// The time after which a process has lasted.
const LASTS: Duration = Duration::from_secs(60);
/// The most starts at once: a process ends at once if an earlier one has not ended yet.
const MOST_STARTS: u32 = 3;

/// The fetcher of a node.
pub(crate) struct Fetcher {
    /// The program `slipway`: the daemon's own.
    program: Option<PathBuf>,
    run_dir: PathBuf,
    data_dir: PathBuf,
    socket: PathBuf,
    /// The longest time that the process may take to listen.
    patience: Duration,
    /// Closes connections.
    bin: Bin,
    /// Held while the process is started.
    starting: Mutex<()>,
    held: Mutex<Weak<Held>>,
}

/// Keeps the fetcher running until it is dropped.
pub(crate) struct Held {
    /// The connection, or `None` before the first one.
    connection: Mutex<Option<Arc<Foreign>>>,
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(connection) = lock(&self.connection).take() {
            // Wakes the thread that waits for the connection's end.
            let _ = rustix::net::shutdown(&*connection, Shutdown::Both);
        }
    }
}

impl Fetcher {
    /// Makes the fetcher of a node with these settings. Nothing is started.
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            program: std::env::current_exe().ok(),
            run_dir: config.run_dir.clone(),
            data_dir: config.data_dir.clone(),
            socket: config.fetch_socket(),
            patience: START,
            bin: Bin::new(),
            starting: Mutex::default(),
            held: Mutex::new(Weak::new()),
        }
    }

    /// Has the process run until the last of the returned values is dropped. When this returns,
    /// it accepts connections.
    ///
    /// # Errors
    /// [`Error::Tool`] if the process cannot be started, or does not listen.
    pub(crate) async fn hold(self: &Arc<Self>) -> Result<Arc<Held>> {
        let fetcher = Arc::clone(self);
        apart(move || fetcher.reach_and_hold()).await
    }

    /// Does the work of [`Fetcher::hold`] on the calling thread.
    fn reach_and_hold(self: &Arc<Self>) -> Result<Arc<Held>> {
        // Also if one is held already: that may be of a process that has just ended, and only a new
        // connection shows that the process accepts some.
        let connection = self.reach()?;
        self.held_or(Some(connection))
    }

    /// Has the process run until the last of the returned values is dropped, and does not wait for
    /// it.
    ///
    /// # Errors
    /// [`Error::Tool`] if there is no thread left.
    pub(crate) fn hold_later(self: &Arc<Self>) -> Result<Arc<Held>> {
        self.held_or(None)
    }

    /// Returns what keeps the process running, or makes it with this connection.
    fn held_or(self: &Arc<Self>, connection: Option<Foreign>) -> Result<Arc<Held>> {
        let mut known = lock(&self.held);
        if let Some(held) = known.upgrade() {
            return Ok(held);
        }
        let held = Arc::new(Held { connection: Mutex::new(connection.map(Arc::new)) });
        let (fetcher, weak) = (Arc::clone(self), Arc::downgrade(&held));
        let thread = std::thread::Builder::new().name("fetcher".to_owned());
        let spawned = thread.spawn(move || fetcher.supervise(&weak));
        spawned.map_err(|error| failed(format!("no thread for it: {error}")))?;
        *known = Arc::downgrade(&held);
        Ok(held)
    }

    /// Starts the process again whenever it has ended, until nothing holds it.
    fn supervise(&self, held: &Weak<Held>) {
        let mut pause = LEAST_PAUSE;
        while let Some(connection) = held.upgrade().map(|held| lock(&held.connection).clone()) {
            if let Some(connection) = connection {
                let since = Instant::now();
                self.wait_for_end(&connection);
                if held.strong_count() == 0 {
                    return;
                }
                tracing::warn!("the fetcher of lazily pulled images has ended; it starts again");
                pause = next_pause(pause, since.elapsed());
                std::thread::sleep(pause);
            }
            while held.strong_count() > 0 {
                match self.reach() {
                    Ok(connection) => {
                        if let Some(held) = held.upgrade() {
                            *lock(&held.connection) = Some(Arc::new(connection));
                        }
                        break;
                    }
                    Err(error) => {
                        tracing::warn!(%error, "reads of lazily pulled images wait");
                        pause = next_pause(pause, Duration::ZERO);
                        std::thread::sleep(pause);
                    }
                }
            }
        }
    }

    /// Waits until a connection has ended, at either end. The process sends nothing on it.
    fn wait_for_end(&self, connection: &Foreign) {
        loop {
            let _ = rustix::event::poll(&mut [PollFd::new(connection, PollFlags::IN)], None);
            let mut byte = [0];
            let mut into = [IoSliceMut::new(&mut byte)];
            match receive(connection, &mut into, &self.bin, RecvFlags::DONTWAIT) {
                Err(Errno::AGAIN | Errno::INTR) => {}
                Ok(one) if one.bytes > 0 => {}
                Ok(_) | Err(_) => return,
            }
        }
    }

    /// Connects to the process, which is started if there is none.
    fn reach(&self) -> Result<Foreign> {
        let _turn = lock(&self.starting);
        let address = SocketAddrUnix::new(&self.socket)
            .map_err(|error| failed(format!("{}: {error}", self.socket.display())))?;
        let begun = Instant::now();
        let (mut child, mut starts) = (None, 0);
        loop {
            let refused = match self.connect(&address) {
                Ok(connection) => {
                    if let Some(child) = child {
                        reap(child);
                    }
                    return Ok(connection);
                }
                Err(errno) => errno,
            };
            // With this error it listens, and is slow to accept.
            if refused != Errno::AGAIN && child.is_none() {
                child = Some(self.start()?);
                starts += 1;
            }
            if let Some(status) = ended(&mut child) {
                if starts == MOST_STARTS {
                    let why = format!("it ended at once: {status}; {}", self.refusal(refused));
                    return Err(failed(why));
                }
                std::thread::sleep(LEAST_PAUSE);
            }
            if begun.elapsed() > self.patience {
                if let Some(child) = child {
                    end(child);
                }
                let (refusal, patience) = (self.refusal(refused), self.patience);
                let why = format!("it does not accept a connection in {patience:?}; {refusal}");
                return Err(failed(why));
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Describes an error of connecting: "connecting to SOCKET: REASON".
    fn refusal(&self, errno: Errno) -> String {
        format!("connecting to {}: {}", self.socket.display(), std::io::Error::from(errno))
    }

    fn connect(&self, address: &SocketAddrUnix) -> rustix::io::Result<Foreign> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        let socket = Foreign::new(socket, &self.bin);
        rustix::net::connect(&socket, address)?;
        Ok(socket)
    }

    fn start(&self) -> Result<Child> {
        let unknown = || failed("the path of the program `slipway` is not known".to_owned());
        let program = self.program.as_ref().ok_or_else(unknown)?;
        let mut command = Command::new(program);
        command.arg("fetch").arg("--run-dir").arg(&self.run_dir);
        command.arg("--data-dir").arg(&self.data_dir);
        // Its own process group: signals to the daemon's group do not reach it.
        let started = command.current_dir("/").stdin(Stdio::null()).process_group(0).spawn();
        started.map_err(|error| failed(format!("cannot start {}: {error}", program.display())))
    }
}

fn failed(reason: String) -> Error {
    Error::Tool { program: "slipway fetch".to_owned(), reason }
}

/// Returns the pause before the next start of a process that ran for so long.
fn next_pause(pause: Duration, ran: Duration) -> Duration {
    if ran >= LASTS { LEAST_PAUSE } else { (2 * pause).min(LONGEST_PAUSE) }
}

/// Takes the child if it has ended, and returns its status.
fn ended(child: &mut Option<Child>) -> Option<ExitStatus> {
    let status = child.as_mut()?.try_wait().ok().flatten()?;
    *child = None;
    Some(status)
}

/// Has a thread sleep until the child ends, and reap it.
fn reap(mut child: Child) {
    // Without a thread it stays a zombie until the daemon ends, and does no harm.
    let _ = std::thread::Builder::new().name("reaper".to_owned()).spawn(move || child.wait());
}

/// Ends a child that does not serve.
fn end(mut child: Child) {
    let _ = child.kill();
    let _ = child.wait();
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::path::Path;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    /// A folder with a script in the place of `slipway`. The test listens in the script's place.
    struct Rig {
        dir: tempfile::TempDir,
        fetcher: Arc<Fetcher>,
    }

    impl Rig {
        /// Makes a fetcher whose program notes each start with its arguments and does `then`.
        fn new(then: &str, patience: Duration) -> Self {
            let dir = tempfile::tempdir().unwrap();
            let (program, starts) = (dir.path().join("slipway"), dir.path().join("starts"));
            let script = format!("#!/bin/sh\necho \"$@\" >> {}\n{then}\n", starts.display());
            // By another process: a child of another test would keep a file of this one's open for
            // writing, and the script could not be executed.
            let write = "printf %s \"$2\" > \"$1\" && chmod 755 \"$1\"";
            let mut shell = Command::new("/bin/sh");
            shell.args(["-c", write, "sh"]).arg(&program).arg(script);
            assert!(shell.status().unwrap().success());
            let config = Config {
                run_dir: dir.path().to_owned(),
                data_dir: dir.path().join("data"),
                ..Config::default()
            };
            let program = Some(program);
            let fetcher = Fetcher { program, patience, ..Fetcher::new(&config) };
            let fetcher = Arc::new(fetcher);
            Self { dir, fetcher }
        }

        /// Returns the arguments of each start.
        fn starts(&self) -> Vec<String> {
            let starts = std::fs::read_to_string(self.dir.path().join("starts"));
            starts.unwrap_or_default().lines().map(str::to_owned).collect()
        }

        /// Waits until the program was started `count` times.
        fn wait_for_start(&self, count: usize) {
            wait_until(|| self.starts().len() == count);
        }

        fn listen(&self) -> OwnedFd {
            let (path, kind) = (self.dir.path().join("fetch.sock"), SocketType::SEQPACKET);
            slipway_private::listen(&path, kind, None, 4).unwrap()
        }

        fn shut(&self, listener: OwnedFd) {
            std::fs::remove_file(self.dir.path().join("fetch.sock")).unwrap();
            drop(listener);
        }
    }

    /// Stays as long as the folder of its test.
    fn stays(dir: &Path) -> String {
        format!("while [ -e {} ]; do sleep 0.05; done", dir.display())
    }

    fn wait_until(mut is_so: impl FnMut() -> bool) {
        let begun = Instant::now();
        while !is_so() {
            assert!(begun.elapsed() < LONG, "it does not come");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn accept(listener: &OwnedFd) -> OwnedFd {
        rustix::net::accept(listener).unwrap()
    }

    /// Waits until the other end of a connection has gone.
    fn wait_for_end(connection: &OwnedFd) {
        let _ = rustix::event::poll(&mut [PollFd::new(connection, PollFlags::IN)], None);
        let mut byte = [0];
        let mut into = [IoSliceMut::new(&mut byte)];
        let got = receive(connection, &mut into, &Bin::new(), RecvFlags::DONTWAIT);
        assert_eq!(got.map(|got| got.bytes), Ok(0));
    }

    #[test]
    fn it_is_started_held_started_again_and_let_go() {
        let mark = tempfile::tempdir().unwrap();
        let rig = Rig::new(&stays(mark.path()), LONG);
        let (one, listener) = std::thread::scope(|scope| {
            let held = scope.spawn(|| rig.fetcher.reach_and_hold());
            rig.wait_for_start(1);
            let listener = rig.listen();
            (held.join().unwrap().unwrap(), listener)
        });
        let dir = rig.dir.path().display();
        assert_eq!(rig.starts(), [format!("fetch --run-dir {dir} --data-dir {dir}/data")]);
        let connection = accept(&listener);
        // Others hold the same process.
        let two = rig.fetcher.reach_and_hold().unwrap();
        assert!(Arc::ptr_eq(&one, &two));
        wait_for_end(&accept(&listener));
        let later = rig.fetcher.hold_later().unwrap();
        assert!(Arc::ptr_eq(&one, &later));
        drop((two, later));
        // The process ends, and is started again.
        rig.shut(listener);
        drop(connection);
        rig.wait_for_start(2);
        let listener = rig.listen();
        let connection = accept(&listener);
        drop(one);
        wait_for_end(&connection);
        assert_eq!(rig.starts().len(), 2);
    }

    #[test]
    fn the_next_daemon_finds_it_and_waits_for_none() {
        let mark = tempfile::tempdir().unwrap();
        let rig = Rig::new(&stays(mark.path()), LONG);
        let listener = rig.listen();
        let held = rig.fetcher.hold_later().unwrap();
        let connection = accept(&listener);
        drop(held);
        wait_for_end(&connection);
        assert!(rig.starts().is_empty());
        // It is started where there is none.
        rig.shut(listener);
        let held = rig.fetcher.hold_later().unwrap();
        rig.wait_for_start(1);
        let listener = rig.listen();
        let connection = accept(&listener);
        drop(held);
        wait_for_end(&connection);
    }

    #[test]
    fn a_program_that_does_not_serve_is_an_error() {
        let rig = Rig::new("exit 3", LONG);
        let error = rig.fetcher.reach_and_hold().err().unwrap().to_string();
        assert!(error.contains("slipway fetch: it ended at once: exit status: 3"), "{error}");
        assert_eq!(rig.starts().len(), MOST_STARTS as usize);
        let mark = tempfile::tempdir().unwrap();
        let rig = Rig::new(&stays(mark.path()), Duration::from_millis(50));
        let error = rig.fetcher.reach_and_hold().err().unwrap().to_string();
        assert!(error.contains("does not accept a connection in"), "{error}");
        assert!(error.contains("fetch.sock: No such file"), "{error}");
        std::fs::remove_file(rig.dir.path().join("slipway")).unwrap();
        let error = rig.fetcher.reach_and_hold().err().unwrap().to_string();
        assert!(error.contains("cannot start"), "{error}");
    }

    #[test]
    fn a_process_that_does_not_last_is_started_less_and_less_often() {
        let mut pause = LEAST_PAUSE;
        for _ in 0..10 {
            let next = next_pause(pause, Duration::from_secs(1));
            assert!(next > pause || next == LONGEST_PAUSE);
            pause = next;
        }
        assert_eq!(pause, LONGEST_PAUSE);
        assert_eq!(next_pause(pause, LASTS), LEAST_PAUSE);
    }
}
