//! The holder: a small process beside the serving one, which has a copy of each descriptor that
//! must not be closed when the serving process is killed: the listening socket, containerd's
//! connections, and FIFOs of containers. containerd notices nothing then: the holder starts the
//! next serving process, which gets the descriptors and finds the rest in the
//! [`store`](crate::store).
//!
//! ```text
//!   containerd ──connections──▶ serving process ──socket pair──▶ slipway-shim-holder
//!                                    ▲   └─ starts one that was killed ─▶ │
//!                                    └──────── starts the next one ───────┘
//! ```
//!
//! Each sees the other's end by the end of the socket pair between them, and starts another one. A
//! message is an operation, a name, and for [`PUT`] a descriptor. The holder neither reads from the
//! descriptors nor knows what they are. It ends after [`DONE`], or after [`MOST_STARTS`] serving
//! processes within [`WITHIN`]: something is wrong with the shim then, and containerd removes the
//! containers, as it does when both processes are killed at once.
//!
//! A holder starts no process before it has the listening socket, which it gets last: a holder
//! that did not get all descriptors, since their sender was killed meanwhile, ends. A message that
//! cannot be sent is followed by [`DONE`], and a holder that has no room for a descriptor ends: the
//! next one gets all descriptors.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketFlags, SocketType,
};
use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::args::Args;
use crate::network;

/// The name of the listening socket among the descriptors.
pub const LISTENER: &str = "listener";
/// The name of the holder's process, beside the program's own.
const NAME: &str = "slipway-shim-holder";
/// The name of the serving process.
const SERVING: &str = "containerd-shim-slipway-v2";
/// This program, also if another build has its path by now.
pub const THIS: &str = "/proc/self/exe";
/// The operation that keeps a descriptor, in place of the one by the same name.
const PUT: u8 = 1;
/// The operation that closes a descriptor.
const CLEAR: u8 = 2;
/// The last message: of a holder that has handed over all descriptors, and of a serving process
/// that ends because its work is done.
const DONE: u8 = 3;
/// The longest message, bytes.
const LONGEST: usize = 256;
/// The most serving processes that a holder starts within [`WITHIN`].
const MOST_STARTS: usize = 5;
/// The time in which [`MOST_STARTS`] serving processes may be started.
const WITHIN: Duration = Duration::from_secs(60);
/// The pause after a holder that could not be started, or ended within this time.
const AGAIN: Duration = Duration::from_secs(1);

/// A received message.
struct Message {
    operation: u8,
    name: String,
    file: Option<OwnedFd>,
}

fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    Ok(rustix::net::socketpair(family, kind, SocketFlags::CLOEXEC, None)?)
}

/// Sends a message; waits for room. The kernel has a sent descriptor even if the sender dies at
/// once.
///
/// # Errors
/// [`Errno::TOOBIG`] for a name of which [`receive`] would cut the end; those of sendmsg(2).
fn send(
    socket: impl AsFd,
    operation: u8,
    name: &str,
    file: Option<BorrowedFd<'_>>,
) -> rustix::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files = file.as_slice();
    if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(Errno::TOOBIG);
    }
    if 1 + name.len() > LONGEST {
        return Err(Errno::TOOBIG);
    }
    let operation = [operation];
    let parts = [IoSlice::new(&operation), IoSlice::new(name.as_bytes())];
    loop {
        match rustix::net::sendmsg(&socket, &parts, &mut control, SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            sent => return sent.map(drop),
        }
    }
}

/// Receives a message; waits for one. Returns `None` if the other process has ended.
fn receive(socket: impl AsFd) -> rustix::io::Result<Option<Message>> {
    let mut bytes = [0; LONGEST];
    loop {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        #[allow(clippy::disallowed_methods, reason = "the peer is this program")]
        let received = rustix::net::recvmsg(&socket, &mut parts, &mut control, flags);
        let count = match received {
            Ok(received) => received.bytes,
            // The peer ended without having read all. What it sent follows.
            Err(Errno::INTR | Errno::CONNRESET) => continue,
            Err(error) => return Err(error),
        };
        let mut file = None;
        for part in control.drain() {
            if let RecvAncillaryMessage::ScmRights(mut files) = part {
                file = files.next();
            }
        }
        let Some((operation, name)) = bytes[..count].split_first() else { return Ok(None) };
        let name = String::from_utf8_lossy(name).into_owned();
        return Ok(Some(Message { operation: *operation, name, file }));
    }
}

/// Runs the holder. Standard input is its end of the socket pair.
///
/// # Errors
/// One line: it gives up, and closes all descriptors.
pub fn hold(args: &Args) -> Result<(), String> {
    // Signals to a group or a terminal reach one process of the two at most.
    let _ = rustix::process::setsid();
    let _ = rustix::thread::set_name(c"slipway-holder");
    raise_descriptor_limit();
    let mut socket = take_stdin().map_err(|error| error.to_string())?;
    let (mut held, mut starts, mut serving) = (BTreeMap::new(), Vec::new(), None);
    while !keep_for(&socket, &mut held) {
        if let Some(mut ended) = serving.take() {
            // Its descriptors are closed, so it is about to be a zombie.
            let _ = std::process::Child::wait(&mut ended);
        }
        if !held.contains_key(LISTENER) || !may_start(&mut starts, Instant::now()) {
            return Err("the serving process died too often, or too early".to_owned());
        }
        let (ours, child) = start_serving(args).map_err(|error| error.to_string())?;
        (socket, serving) = (ours, Some(child));
        if hand_over(&socket, &held).is_err() {
            // The process has died, or would wait for the rest. The next round starts another one.
            let _ = rustix::net::shutdown(&socket, Shutdown::Both);
        }
    }
    Ok(())
}

/// Keeps what one serving process wants kept, until that ends. Returns whether this holder is to
/// end: the work of the serving process is done, or a descriptor was lost on its way, since this
/// process has none left. The serving process gives all descriptors to the next holder then.
fn keep_for(socket: &OwnedFd, held: &mut BTreeMap<String, OwnedFd>) -> bool {
    while let Ok(Some(Message { operation, name, file })) = receive(socket) {
        match (operation, file) {
            (PUT, Some(file)) => drop(held.insert(name, file)),
            (CLEAR, _) => drop(held.remove(&name)),
            (PUT, None) | (DONE, _) => return true,
            _ => {}
        }
    }
    false
}

fn hand_over(socket: &OwnedFd, held: &BTreeMap<String, OwnedFd>) -> rustix::io::Result<()> {
    for (name, file) in held {
        send(socket, PUT, name, Some(file.as_fd()))?;
    }
    send(socket, DONE, "", None)
}

/// Returns whether one more serving process may be started at `now`, and notes it then.
fn may_start(starts: &mut Vec<Instant>, now: Instant) -> bool {
    starts.retain(|start| now.duration_since(*start) < WITHIN);
    starts.push(now);
    starts.len() <= MOST_STARTS
}

fn start_serving(args: &Args) -> io::Result<(OwnedFd, std::process::Child)> {
    let (ours, theirs) = pair()?;
    let mut command = Command::new(THIS);
    command.arg0(SERVING).args(args.words()).arg("resume").current_dir("/");
    command.stdin(Stdio::from(theirs)).stdout(Stdio::null()).stderr(Stdio::null());
    Ok((ours, command.spawn()?))
}

/// Returns standard input, and puts `/dev/null` in its place.
///
/// # Errors
/// The process has no descriptor left.
pub fn take_stdin() -> io::Result<OwnedFd> {
    let stdin = io::stdin().as_fd().try_clone_to_owned()?;
    let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    rustix::stdio::dup2_stdin(&null)?;
    Ok(stdin)
}

/// Raises the limit of descriptors as far as the system allows. The holder has up to three for each
/// process of a container, and the serving process six.
pub fn raise_descriptor_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    let _ = setrlimit(Resource::Nofile, limit);
}

/// The serving process's end of the holder.
///
/// A message waits for room with the mutex held, so a holder that does not read holds up the shim.
/// It is this program's, and only root can stop it. A call that went on meanwhile would have
/// descriptors that are closed when this process is killed.
pub struct Holder(Mutex<HolderState>);

struct HolderState {
    socket: OwnedFd,
    /// Copies of what the holder has, for the next holder.
    held: BTreeMap<String, Arc<OwnedFd>>,
}

impl HolderState {
    /// Sends a message to the holder. One that cannot be sent ends the holder, unless that has
    /// died: the next one gets all descriptors.
    fn tell(&self, operation: u8, name: &str, file: Option<BorrowedFd<'_>>) {
        if send(&self.socket, operation, name, file).is_err() {
            let _ = send(&self.socket, DONE, "", None);
        }
    }

    /// Gives all descriptors to the holder at the other end of `socket`.
    fn move_to(&mut self, socket: OwnedFd) -> io::Result<()> {
        let last = self.held.get_key_value(LISTENER);
        let others = self.held.iter().filter(|(name, _)| *name != LISTENER);
        for (name, file) in others.chain(last) {
            send(&socket, PUT, name, Some(file.as_fd()))?;
        }
        self.socket = socket;
        Ok(())
    }
}

impl Holder {
    /// Starts a holder, in the network namespace of the host.
    ///
    /// # Errors
    /// The process cannot be started.
    pub fn start(args: &Args) -> io::Result<Arc<Self>> {
        let state = HolderState { socket: start_holder(args)?, held: BTreeMap::new() };
        Ok(Arc::new(Self(Mutex::new(state))))
    }

    /// Joins the holder at the other end of `socket`, which has started this process. Waits until
    /// it has handed over its descriptors.
    ///
    /// # Errors
    /// It has died.
    pub fn join(socket: OwnedFd) -> io::Result<Arc<Self>> {
        let mut held = BTreeMap::new();
        loop {
            let message = receive(&socket)?.ok_or(io::ErrorKind::UnexpectedEof)?;
            match (message.operation, message.file) {
                (PUT, Some(file)) => drop(held.insert(message.name, Arc::new(file))),
                (DONE, _) => break,
                // This process may have no descriptors left.
                _ => return Err(io::Error::other("a descriptor was lost on its way")),
            }
        }
        Ok(Arc::new(Self(Mutex::new(HolderState { socket, held }))))
    }

    /// Has the holder keep a descriptor by this name, until what is returned is dropped.
    pub fn put(self: &Arc<Self>, name: String, file: OwnedFd) -> KeptDescriptor {
        let file = Arc::new(file);
        let mut state = self.state();
        state.tell(PUT, &name, Some(file.as_fd()));
        state.held.insert(name.clone(), Arc::clone(&file));
        KeptDescriptor { file, kept: Some((Arc::clone(self), name)) }
    }

    /// Returns what an earlier serving process had kept by this name.
    pub fn take(self: &Arc<Self>, name: &str) -> Option<KeptDescriptor> {
        let file = Arc::clone(self.state().held.get(name)?);
        Some(KeptDescriptor { file, kept: Some((Arc::clone(self), name.to_owned())) })
    }

    /// Returns the names that begin with `prefix`.
    pub fn names(&self, prefix: &str) -> Vec<String> {
        let state = self.state();
        state.held.keys().filter(|name| name.starts_with(prefix)).cloned().collect()
    }

    /// Closes what an earlier serving process had kept and nobody has taken: its process or its
    /// connection was forgotten just before the kill. A reader of such a FIFO would wait for ever.
    pub fn close_rest(&self) {
        let mut state = self.state();
        let left = state.held.iter().filter(|(_, file)| Arc::strong_count(file) == 1);
        let left: Vec<_> = left.map(|(name, _)| name.clone()).collect();
        for name in &left {
            state.held.remove(name);
            state.tell(CLEAR, name, None);
        }
    }

    /// Tells the holder to end, as this process does.
    pub fn end(&self) {
        // Fails if the holder has ended.
        let _ = send(&self.state().socket, DONE, "", None);
    }

    /// Starts another holder whenever the present one has ended. Never returns.
    pub async fn watch(&self, args: &Args) {
        let mut replaced: Option<Instant> = None;
        loop {
            let socket = self.state().socket.try_clone();
            let watched = match socket {
                Ok(socket) => gone(socket).await,
                Err(error) => Err(error),
            };
            // The next one may have no room for all descriptors either.
            if replaced.is_some_and(|since| since.elapsed() < AGAIN) {
                crate::log::warn("the holder beside the shim ended at once");
                tokio::time::sleep(AGAIN).await;
            }
            match watched.and_then(|()| self.replace(args)) {
                Ok(()) => replaced = Some(Instant::now()),
                Err(error) => {
                    crate::log::warn(&format!("no holder beside the shim: {error}"));
                    tokio::time::sleep(AGAIN).await;
                }
            }
        }
    }

    fn replace(&self, args: &Args) -> io::Result<()> {
        let socket = start_holder(args)?;
        self.state().move_to(socket)
    }

    fn clear(&self, name: &str, file: &Arc<OwnedFd>) {
        let mut state = self.state();
        // Another descriptor may have the name by now.
        if state.held.get(name).is_some_and(|held| Arc::ptr_eq(held, file)) {
            state.held.remove(name);
            state.tell(CLEAR, name, None);
        }
    }

    fn state(&self) -> MutexGuard<'_, HolderState> {
        // Single insertions and removals: the state is valid after any panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn start_holder(args: &Args) -> io::Result<OwnedFd> {
    let (ours, theirs) = pair()?;
    let mut command = tokio::process::Command::new(THIS);
    command.arg0(NAME).args(args.words_of_holder()).arg("hold").current_dir("/");
    command.stdin(Stdio::from(theirs)).stdout(Stdio::null()).stderr(Stdio::null());
    // tokio reaps it.
    network::spawn_on_host(&mut command).map(drop)?;
    Ok(ours)
}

/// Returns when the process at the other end has ended.
#[allow(unsafe_code)]
async fn gone(socket: OwnedFd) -> io::Result<()> {
    // SAFETY: an OwnedFd refers to one open descriptor until the AsyncFd, its owner, is dropped.
    let socket = unsafe { AsyncFd::register_with_interest(socket, Interest::READABLE) }?;
    loop {
        let mut ready = socket.readable().await?;
        let mut byte = [0; 1];
        #[allow(clippy::disallowed_methods, reason = "the peer is this program")]
        let received = rustix::net::recv(socket.get_ref(), &mut byte, RecvFlags::DONTWAIT);
        match received {
            Err(Errno::AGAIN | Errno::INTR) => ready.clear_ready(),
            // The holder says nothing more.
            _ => return Ok(()),
        }
    }
}

/// A descriptor that the holder has too, as long as this value lives.
pub struct KeptDescriptor {
    file: Arc<OwnedFd>,
    kept: Option<(Arc<Holder>, String)>,
}

impl KeptDescriptor {
    /// Makes a value for a descriptor that this process has alone.
    pub fn alone(file: OwnedFd) -> Self {
        Self { file: Arc::new(file), kept: None }
    }

    /// Returns a path by which what the descriptor stands for can be opened again.
    pub fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.file.as_raw_fd()).into()
    }

    /// Returns a copy of the descriptor as a file.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn copy(&self) -> io::Result<File> {
        self.file.try_clone().map(File::from)
    }
}

impl AsFd for KeptDescriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for KeptDescriptor {
    fn drop(&mut self) {
        if let Some((holder, name)) = &self.kept {
            holder.clear(name, &self.file);
        }
    }
}

#[cfg(test)]
#[path = "tests/hold.rs"]
pub(crate) mod tests;
