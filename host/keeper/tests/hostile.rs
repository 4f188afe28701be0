//! Endpoints' clients that try to block the keeper, and other users that connect to it.

#![allow(clippy::unwrap_used)] // a test
#![allow(
    clippy::disallowed_methods,
    reason = "an attacker waits for its own descriptors if it must"
)]

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};
use slipway_keeper::{Keeper, SHELF};

/// Far longer than a keeper needs that is not blocked.
const PATIENCE: Duration = Duration::from_secs(100);

struct Rig {
    path: PathBuf,
    serving: JoinHandle<std::io::Result<()>>,
    _dir: tempfile::TempDir,
}

impl Rig {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keeper.sock");
        let serving = {
            let path = path.clone();
            std::thread::spawn(move || slipway_keeper::serve(&path))
        };
        Self { path, serving, _dir: dir }
    }

    fn connect(&self) -> Keeper {
        for _ in 0..6000 {
            if let Ok(keeper) = Keeper::connect(&self.path) {
                return keeper;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("no keeper at {}", self.path.display());
    }
}

fn slots(keeper: &Keeper) -> Vec<u32> {
    keeper.take(PATIENCE).unwrap().into_iter().map(|(slot, _)| slot).collect()
}

fn send(to: impl AsFd, bytes: &[u8], file: BorrowedFd<'_>) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files = [file];
    assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
    let part = [IoSlice::new(bytes)];
    rustix::net::sendmsg(to, &part, &mut control, SendFlags::NOSIGNAL).unwrap();
}

/// Returns a client's connection, as the keeper gets it, with a descriptor in its queue whose close
/// lasts until the second value is closed.
fn connection_with_a_bomb() -> (UnixStream, TcpStream) {
    let (ours, clients) = UnixStream::pair().unwrap();
    let (bomb, other) = slipway_peer::testing::lingering().unwrap();
    send(&clients, b"bomb", bomb.as_fd());
    (ours, other)
}

#[test]
fn a_connection_whose_close_waits_holds_up_nothing_of_other_endpoints() {
    let rig = Rig::new();
    let keeper = rig.connect();
    let (client, bomb) = connection_with_a_bomb();
    keeper.put(SHELF + 2, &client).unwrap();
    drop(client);
    keeper.clear(SHELF + 2).unwrap();
    // While the close is blocked, another endpoint's descriptors come and go.
    let (kept, other) = UnixStream::pair().unwrap();
    keeper.put(7, &kept).unwrap();
    drop(kept);
    assert_eq!(slots(&keeper), [7]);
    keeper.clear(7).unwrap();
    assert_eq!(slots(&keeper), [0_u32; 0]);
    other.set_read_timeout(Some(PATIENCE)).unwrap();
    let closed = rustix::net::recv(&other, &mut [0; 1], rustix::net::RecvFlags::empty());
    assert_eq!(closed.map(|(count, _)| count), Ok(0), "the other endpoint's connection is closed");
    // Descriptors of the next endpoint on the same shelf come and go, too.
    let (kept, other) = UnixStream::pair().unwrap();
    keeper.put(SHELF + 3, &kept).unwrap();
    drop(kept);
    keeper.clear(SHELF + 3).unwrap();
    other.set_read_timeout(Some(PATIENCE)).unwrap();
    let closed = rustix::net::recv(&other, &mut [0; 1], rustix::net::RecvFlags::empty());
    assert_eq!(closed.map(|(count, _)| count), Ok(0), "the next endpoint's connection is closed");
    drop(keeper);
    // The next daemon finds a keeper that serves, or one that ended as it should.
    rig.serving.join().unwrap().unwrap();
    drop(bomb);
}

#[test]
fn a_daemon_that_was_killed_leaves_a_keeper_that_serves_the_next_one() {
    let rig = Rig::new();
    let first = rig.connect();
    let (kept, _other) = UnixStream::pair().unwrap();
    first.put(9, &kept).unwrap();
    let (client, bomb) = connection_with_a_bomb();
    first.put(SHELF + 2, &client).unwrap();
    // The keeper's copy is the last one from here on: closing it waits, and this test must not.
    drop(client);
    // Replaced without a clear: the old descriptor is closed all the same.
    first.put(SHELF + 2, &kept).unwrap();
    drop(first);
    let next = rig.connect();
    assert_eq!(slots(&next), [9, SHELF + 2]);
    drop(bomb);
    next.clear(9).unwrap();
    next.clear(SHELF + 2).unwrap();
    drop(next);
    rig.serving.join().unwrap().unwrap();
}

/// Connects as another user and sends a request with a descriptor whose close blocks.
fn connect_as(user: u32, path: &Path, bomb: &TcpStream) -> Result<OwnedFd, rustix::io::Errno> {
    let uid = rustix::process::Uid::from_raw(user);
    // Changes the user of this thread only, for good: the thread is the stranger's.
    rustix::thread::set_thread_res_uid(uid, uid, uid)?;
    let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    let put: Vec<u8> = [1_u32, 5].iter().flat_map(|word| word.to_ne_bytes()).collect();
    send(&socket, &put, bomb.as_fd());
    Ok(socket)
}

#[test]
fn a_stranger_is_refused_and_holds_up_nothing_as_root() {
    if !rustix::process::geteuid().is_root() {
        println!("SKIPPED: a_stranger_is_refused_and_holds_up_nothing_as_root: needs root");
        return;
    }
    let rig = Rig::new();
    let keeper = rig.connect();
    let (kept, _other) = UnixStream::pair().unwrap();
    keeper.put(3, &kept).unwrap();
    let stranger = |bomb: &TcpStream| {
        std::thread::scope(|scope| {
            scope.spawn(|| connect_as(65534, &rig.path, bomb)).join().unwrap()
        })
    };
    let (bomb, other) = slipway_peer::testing::lingering().unwrap();
    // The mode of the socket is the first barrier.
    std::fs::set_permissions(rig.path.parent().unwrap(), PermissionsExt::from_mode(0o755)).unwrap();
    assert_eq!(stranger(&bomb).err(), Some(rustix::io::Errno::ACCESS));
    // With that gone, the credentials are the second barrier.
    std::fs::set_permissions(&rig.path, PermissionsExt::from_mode(0o666)).unwrap();
    let strangers = stranger(&bomb).unwrap();
    // The keeper still has a client: the copy that the stranger sent is the last one.
    drop((bomb, keeper));
    let next = rig.connect();
    assert_eq!(slots(&next), [3], "nothing of the stranger's is kept");
    let gone = rustix::net::recv(&strangers, &mut [0; 8], rustix::net::RecvFlags::empty());
    // The connection was closed with a message unread.
    assert!(matches!(gone, Ok((0, _)) | Err(rustix::io::Errno::CONNRESET)), "{gone:?}");
    next.clear(3).unwrap();
    drop(next);
    rig.serving.join().unwrap().unwrap();
    drop(other);
}
