//! Requests to a running engine, and the limit of descriptors that an engine needs of the system.

use std::io::{Error, ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use slipway_peer::{Bin, Foreign};
use slipway_sgiov_spec::control::{DESCRIPTORS, REPLY, Reply, Request};

use crate::place::AdminDirectory;
use crate::{Function, Report};

/// The longest wait for an engine.
const PATIENCE: Duration = Duration::from_secs(10);
/// The most bytes of a report.
const LARGEST: u64 = 1 << 30;
/// The pause between two looks whether a reload is finished.
const LOOK: Duration = Duration::from_millis(10);

fn connect(path: &Path) -> std::io::Result<OwnedFd> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    set_socket_timeout(&socket, Timeout::Send, Some(PATIENCE))?;
    rustix::net::connect(&socket, &address)?;
    Ok(socket)
}

/// Connects to the administrator's socket of the engine at `path`.
///
/// # Errors
/// No engine serves there, or this process may not enter the administrator's directory.
fn administer(path: &Path) -> std::io::Result<OwnedFd> {
    connect(&AdminDirectory::open(path)?.socket())
}

/// Returns whether a process accepts connections at the socket.
pub fn is_served(path: &Path) -> bool {
    connect(path).is_ok()
}

/// Returns what the engine at `path` serves. A caller that may enter the administrator's directory
/// gets all of it; any other gets what programs of the same user in the same network namespace
/// have.
///
/// # Errors
/// No process serves there, or one that is no socket engine.
pub fn report(path: &Path) -> std::io::Result<Report> {
    let socket = administer(path).or_else(|_| connect(path))?;
    match ask(&socket, Request::Report, &[])? {
        (Reply::Report { bytes }, Some(file)) => crate::sealed::decode(file, bytes, LARGEST),
        _ => Err(no_engine()),
    }
}

/// Has the engine at `path` serve a guest's socket function. The VMM connects to `listener`, a Unix
/// socket that listens. Only the administrator may call this.
///
/// `memory` is the file that [`Function::memory`] names, for a VMM whose own descriptor of it can
/// be neither read nor mapped, as of a pool's memory. All of it must have the bytes that the guest
/// sees. The engine keeps the file for as long as it serves the function.
///
/// The caller keeps the returned connection until the VMM has connected. The function ends if the
/// connection is closed before.
///
/// # Errors
/// No process serves there, or one that is no socket engine; the error that the engine answers.
pub fn serve_function(
    path: &Path,
    listener: BorrowedFd<'_>,
    function: &Function,
    memory: Option<BorrowedFd<'_>>,
) -> std::io::Result<OwnedFd> {
    let socket = administer(path)?;
    let (file, bytes) = function.to_file()?;
    let files: Vec<_> = [listener, file.as_fd()].into_iter().chain(memory).collect();
    match ask(&socket, Request::Function { bytes }, &files)? {
        (Reply::Done, _) => Ok(socket),
        _ => Err(no_engine()),
    }
}

/// Has the engine at `path` reload its policy and its links, and waits for the result. The inner
/// `Err` says why everything stays as it was.
///
/// # Errors
/// No engine serves there, this process may not send it a signal, or it does not reload in time.
pub fn reload(path: &Path) -> std::io::Result<Result<(), String>> {
    let before = report(path)?.reloads.tried;
    let engine = rustix::net::sockopt::socket_peercred(administer(path)?)?.pid;
    rustix::process::kill_process(engine, rustix::process::Signal::HUP)?;
    let begun = Instant::now();
    while begun.elapsed() < PATIENCE {
        let now = report(path)?.reloads;
        if now.tried != before {
            return Ok(now.error.map_or(Ok(()), Err));
        }
        std::thread::sleep(LOOK);
    }
    Err(ErrorKind::TimedOut.into())
}

fn no_engine() -> Error {
    Error::new(ErrorKind::InvalidData, "what answers is no socket engine")
}

/// Sends a request and waits for the reply, and the descriptor that may come with it.
fn ask(
    socket: &OwnedFd,
    request: Request,
    files: &[BorrowedFd<'_>],
) -> std::io::Result<(Reply, Option<Foreign>)> {
    set_socket_timeout(socket, Timeout::Recv, Some(PATIENCE))?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(ErrorKind::InvalidInput.into());
    }
    let request = request.encode();
    let parts = [IoSlice::new(&request)];
    let sent = rustix::net::sendmsg(socket, &parts, &mut control, SendFlags::NOSIGNAL);
    // `EPIPE`: the engine is gone, or it refused this user and sent the reason before it closed.
    if sent.is_err_and(|errno| errno != Errno::PIPE) {
        sent?;
    }
    let mut bytes = [0; REPLY];
    let parts = &mut [IoSliceMut::new(&mut bytes)];
    let received = slipway_peer::receive_reply(socket, parts, &Bin::new(), RecvFlags::empty())?;
    let (count, file) = (received.bytes, received.files.into_iter().next());
    if count == 0 {
        sent?;
    }
    match bytes.get(..count).and_then(Reply::decode) {
        Some(Reply::Refused(errno)) => Err(Error::from_raw_os_error(errno as i32)),
        Some(reply) => Ok((reply, file)),
        None => Err(no_engine()),
    }
}

/// Raises the limit of open descriptors to `wanted`, or as high as the process may. Returns the
/// limit that holds then.
pub fn raise_descriptor_limit(wanted: u64) -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let most = std::fs::read_to_string("/proc/sys/fs/nr_open");
    let most = most.ok().and_then(|text| text.trim().parse::<u64>().ok()).unwrap_or(1 << 20);
    let high = wanted.min(most);
    if limit.current.is_none_or(|now| now >= high) {
        return limit.current.unwrap_or(u64::MAX);
    }
    let hard = limit.maximum.map_or(high, |hard| hard.max(high));
    let privileged = Rlimit { current: Some(high), maximum: Some(hard) };
    let plain = Rlimit { current: limit.maximum, maximum: limit.maximum };
    let outcome: Result<(), Errno> =
        setrlimit(Resource::Nofile, privileged).or_else(|_| setrlimit(Resource::Nofile, plain));
    let _ = outcome;
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}
