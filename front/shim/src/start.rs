//! `start`: makes the shim's socket, starts the process that serves it, and prints its address.
//! Containers of a pod, and of a group, have one shim: the first `start` makes it.
//!
//! containerd takes all that this command prints for the address, so it prints nothing else unless
//! it fails. Standard input has the runtime's [`options`], and since version 2.3 parameters, which
//! tell which answers containerd understands.

use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::Mode;
use slipway_lock::Lock;

use crate::args::Args;
use crate::spec::Oci;
use crate::{log, names, options, role};

/// The most that is read of standard input, bytes.
const MOST_INPUT: u64 = 4 << 20;
/// This process's adjustment of its score for the kernel's OOM killer (proc_pid_oom_score_adj(5)).
const OOM_SCORE: &str = "/proc/self/oom_score_adj";
/// The largest adjustment.
const MOST_OOM_SCORE: i32 = 1000;
/// The time after which a socket that takes no connection is one that a dead shim has left.
const LISTENS: Duration = Duration::from_millis(500);
/// The time between two attempts to connect.
const LOOK: Duration = Duration::from_millis(5);
/// The name of the lock of a directory of sockets.
const LOCK: &str = "slipway.lock";
/// The longest wait for the lock: several commands may find sockets of dead shims.
const TURN: Duration = Duration::from_secs(10);

/// Starts a shim, or finds the running one of this container or its group. Returns its address.
///
/// # Errors
/// One line that says what failed.
pub fn start(args: &Args) -> Result<String, String> {
    let input = input();
    let cgroup = options::shim_cgroup(&input, args)?;
    let group = group(args)?;
    let (socket, address) = (names::socket(args, &group), names::address(args, &group));
    if let Some(listener) = listen(&socket).map_err(|e| format!("{}: {e}", socket.display()))? {
        // The process that serves is in the same control group as this one, and has its score.
        let joined = cgroup.map_or(Ok(()), |path| options::join(&path));
        if let Err(error) = raise_oom_score(Path::new(OOM_SCORE)) {
            log::open(&args.bundle());
            log::warn(&format!("the shim keeps containerd's OOM score: {OOM_SCORE}: {error}"));
        }
        let pid = joined.and_then(|()| {
            serve(args, &group, listener).map_err(|error| format!("cannot start a shim: {error}"))
        });
        if pid.is_err() {
            // Nobody serves there.
            let _ = std::fs::remove_file(&socket);
        }
        write_file("shim.pid", &pid?.to_string())?;
    }
    // By this file containerd finds the shim after a restart.
    write_file("address", &address)?;
    Ok(answer(address, options::takes_version_3(&input, args)))
}

/// Returns the name of the group of containers that one shim serves. The bundle of a sandbox of
/// containerd's Sandbox API has no configuration: containerd starts no other shim for its
/// containers, or their configurations name it.
fn group(args: &Args) -> Result<String, String> {
    let bundle = args.bundle();
    if let Ok(false) = bundle.join("config.json").try_exists() {
        return Ok(args.id.clone());
    }
    role::group(&args.id, &Oci::load(&bundle)?.annotations)
}

/// Returns the answer to containerd: the address, or parameters of version 3, of the later task
/// service and the Sandbox API. containerd takes a plain address for version 2.
fn answer(address: String, is_version_3: bool) -> String {
    if !is_version_3 {
        return address;
    }
    serde_json::json!({"version": 3, "address": address, "protocol": "ttrpc"}).to_string()
}

/// Raises the adjustment in `file` by one. containerd passes its own adjustment to the processes
/// that it starts, so that its shims end before it when memory is short, as runc's do.
fn raise_oom_score(file: &Path) -> io::Result<()> {
    let score: i32 = std::fs::read_to_string(file)?.trim().parse().map_err(io::Error::other)?;
    std::fs::write(file, (score + 1).min(MOST_OOM_SCORE).to_string())
}

fn input() -> Vec<u8> {
    let (stdin, mut bytes) = (io::stdin().lock(), Vec::new());
    if !rustix::termios::isatty(&stdin) {
        // Read to its end, so that its writer does not fail. What cannot be read says nothing.
        let _ = stdin.take(MOST_INPUT).read_to_end(&mut bytes);
    }
    bytes
}

fn write_file(name: &str, text: &str) -> Result<(), String> {
    // Readers see the old file or the new one, never a part.
    let temporary = format!(".{name}");
    std::fs::write(&temporary, text)
        .and_then(|()| std::fs::rename(&temporary, name))
        .map_err(|error| format!("cannot write {name} into the bundle: {error}"))
}

/// Makes a socket that only root can connect to. Returns `None` if a shim serves there already.
fn listen(socket: &Path) -> io::Result<Option<UnixListener>> {
    rustix::process::umask(Mode::from_raw_mode(0o077));
    if let Some(dir) = socket.parent() {
        make_directory(dir)?;
    }
    match UnixListener::bind(socket) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            if UnixStream::connect(socket).is_ok() {
                return Ok(None);
            }
            replace_dead(socket)
        }
        bound => bound.map(Some),
    }
}

/// Makes a socket in place of the one that a dead shim has left. Returns `None` if a shim serves
/// there: a socket that another command has just made takes no connection until it listens. One
/// command at a time is here, so that none removes the socket that another one makes.
fn replace_dead(socket: &Path) -> io::Result<Option<UnixListener>> {
    let lock = socket.with_file_name(LOCK);
    let _turn = Lock::within(&lock, TURN).map_err(io::Error::other)?;
    let begun = Instant::now();
    while UnixStream::connect(socket).is_err() {
        if begun.elapsed() >= LISTENS {
            match std::fs::remove_file(socket) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => return UnixListener::bind(socket).map(Some),
            }
        }
        std::thread::sleep(LOOK);
    }
    Ok(None)
}

fn make_directory(dir: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().recursive(true).mode(0o711).create(dir)
}

/// Starts the process that serves. The listening socket is its standard input. It begins a session
/// of its own, so signals to containerd's group do not reach it.
fn serve(args: &Args, group: &str, listener: UnixListener) -> io::Result<u32> {
    let child = Command::new(std::env::current_exe()?)
        .args(Args { id: group.to_owned(), ..args.clone() }.words())
        .stdin(Stdio::from(OwnedFd::from(listener)))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    Ok(child.id())
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};

    use super::*;

    #[test]
    fn a_socket_that_does_not_listen_yet_is_not_taken_for_a_dead_shims() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let made = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&made, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(4 * LOOK);
                rustix::net::listen(&made, 1).unwrap();
            });
            assert!(replace_dead(&path).unwrap().is_none());
        });
        drop(made);
        let listener = replace_dead(&path).unwrap();
        assert!(listener.is_some() && UnixStream::connect(&path).is_ok());
        assert!(replace_dead(&path).unwrap().is_none());
    }

    #[test]
    fn a_sandbox_without_a_configuration_is_a_group_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let args = Args { id: "pod".into(), bundle: dir.path().into(), ..Args::default() };
        assert_eq!(group(&args), Ok("pod".to_owned()));
        let config = dir.path().join("config.json");
        std::fs::write(&config, r#"{"annotations": {"io.kubernetes.cri.sandbox-id": "other"}}"#)
            .unwrap();
        assert_eq!(group(&args), Ok("other".to_owned()));
        std::fs::write(&config, "{").unwrap();
        assert!(group(&args).is_err());
    }

    #[test]
    fn the_answer_is_an_address_or_parameters() {
        let address = || "unix:///run/containerd/s/1".to_owned();
        assert_eq!(answer(address(), false), address());
        let json: serde_json::Value = serde_json::from_str(&answer(address(), true)).unwrap();
        let expected = serde_json::json!({
            "version": 3, "address": "unix:///run/containerd/s/1", "protocol": "ttrpc"
        });
        assert_eq!(json, expected);
    }

    #[test]
    fn the_oom_score_is_one_more_than_the_parents_up_to_the_most() {
        let own: i32 = std::fs::read_to_string(OOM_SCORE).unwrap().trim().parse().unwrap();
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let file = format!("/proc/{}/oom_score_adj", child.id());
        let score = || std::fs::read_to_string(&file).unwrap().trim().parse::<i32>().unwrap();
        raise_oom_score(Path::new(&file)).unwrap();
        assert_eq!(score(), (own + 1).min(MOST_OOM_SCORE));
        std::fs::write(&file, MOST_OOM_SCORE.to_string()).unwrap();
        raise_oom_score(Path::new(&file)).unwrap();
        assert_eq!(score(), MOST_OOM_SCORE);
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(raise_oom_score(Path::new(&file)).is_err(), "of no process");
    }
}
