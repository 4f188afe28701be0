//! The fetcher's process and the disks that connect to it.

use std::io::IoSliceMut;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, mpsc};
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use slipway_lazy_spec::{Answer, Extent, Hello, MOST, MOST_WANTED, Want};
use tokio::task::JoinHandle;

use super::parts::{CHUNK, Pulled, anonymous, extent, pulled};
use crate::lazy::partial::{have_dir, have_path};
use crate::lazy::serve::serve_until_idle;
use crate::{Access, Image, Reference, Result};

/// The time after which a test counts as waiting for ever.
const FOR_EVER: Duration = Duration::from_secs(60);
/// The idle time of fetchers that are to stay.
const LONG: Duration = Duration::from_secs(3600);

impl Pulled {
    fn serve(&self, idle: Duration) -> JoinHandle<Result<()>> {
        self.serve_with(idle, anonymous)
    }

    fn serve_with(
        &self,
        idle: Duration,
        access: impl Fn(&Reference) -> Access + Send + Sync + 'static,
    ) -> JoinHandle<Result<()>> {
        let (cache, run_dir) = (self.cache.clone(), self.run_dir());
        tokio::spawn(async move { serve_until_idle(cache, &run_dir, access, idle).await })
    }

    /// Connects as a disk of the image.
    fn disk(&self) -> Disk {
        self.disk_of(&self.image)
    }

    fn disk_of(&self, image: &Image) -> Disk {
        let disk = Disk::connect(&self.run_dir());
        disk.send(&hello(image).encode());
        disk
    }

    fn hello(&self) -> Hello {
        hello(&self.image)
    }
}

fn hello(image: &Image) -> Hello {
    let file = std::fs::metadata(&image.erofs_path).unwrap();
    Hello { digest: image.digest.bytes(), device: file.dev(), inode: file.ino() }
}

/// A connection of a disk.
struct Disk(OwnedFd);

fn try_connect(run_dir: &Path) -> rustix::io::Result<Disk> {
    let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(run_dir.join("fetch.sock"))?)?;
    set_socket_timeout(&socket, Timeout::Recv, Some(FOR_EVER))?;
    Ok(Disk(socket))
}

impl Disk {
    /// Connects as soon as a fetcher listens.
    fn connect(run_dir: &Path) -> Self {
        let begun = std::time::Instant::now();
        loop {
            match try_connect(run_dir) {
                Ok(disk) => return disk,
                Err(error) => assert!(begun.elapsed() < FOR_EVER, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn send(&self, message: &[u8]) {
        rustix::net::send(&self.0, message, SendFlags::NOSIGNAL).unwrap();
    }

    /// Returns the next message. Returns `None` if the fetcher has ended the connection.
    fn receive(&self) -> Option<Vec<u8>> {
        let mut buffer = [0; MOST];
        let part = &mut [IoSliceMut::new(&mut buffer)];
        let bin = slipway_peer::Bin::new();
        match slipway_peer::receive(&self.0, part, &bin, RecvFlags::empty()) {
            Ok(received) if received.bytes > 0 => Some(buffer[..received.bytes].to_vec()),
            Ok(_) | Err(rustix::io::Errno::CONNRESET) => None,
            Err(error) => panic!("the fetcher does not answer: {error}"),
        }
    }

    fn opened(self) -> Self {
        assert_eq!(Answer::decode(&self.receive().unwrap()), Some(Answer::Open));
        self
    }

    /// Wants a range, and waits until the fetcher has it.
    fn get(&self, wanted: Extent) {
        self.send(&Want(wanted).encode());
        loop {
            match Answer::decode(&self.receive().unwrap()) {
                Some(Answer::Have(found)) => {
                    assert!(found.offset <= wanted.offset && found.end() >= wanted.end());
                    return;
                }
                // It may be told before the answer.
                Some(Answer::Whole) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    fn until_whole(&self) {
        loop {
            match Answer::decode(&self.receive().unwrap()) {
                Some(Answer::Whole) => return,
                Some(Answer::Open | Answer::Have(_)) => {}
                other => panic!("{other:?}"),
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn equal_wants_are_one_request_and_the_image_becomes_whole() {
    let pulled = pulled().await;
    pulled.registry.hold(true);
    let fetcher = pulled.serve(LONG);
    let disks = [pulled.disk().opened(), pulled.disk().opened()];
    let wanted = pulled.span(CHUNK);
    disks.iter().for_each(|disk| disk.send(&Want(extent(wanted)).encode()));
    pulled.registry.hold(false);
    disks.iter().for_each(Disk::until_whole);
    assert!(pulled.map.spans.iter().all(|span| pulled.registry.asked(&pulled.map, span) == 1));
    pulled.map.spans.iter().for_each(|span| pulled.assert_written(span));
    assert!(!pulled.is_lazy());
    assert!(!pulled.cache.map_path(&pulled.image.digest).exists());
    let have = have_path(&have_dir(&pulled.run_dir()), &pulled.image.digest);
    assert!(!have.exists());
    // Whoever comes later is told at once.
    let later = pulled.disk();
    assert_eq!(Answer::decode(&later.receive().unwrap()), Some(Answer::Whole));
    fetcher.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_is_opened_while_another_one_is_being_opened() {
    let pulled = pulled().await;
    let other = pulled.another().await;
    let ((enter, entered), (release, released)) = (mpsc::channel(), mpsc::channel::<()>());
    let channels = Mutex::new((enter, released));
    // The first image's access does not come before it is released.
    let fetcher = pulled.serve_with(LONG, move |reference| {
        if reference.to_string().ends_with(":1") {
            let channels = channels.lock().unwrap();
            channels.0.send(()).unwrap();
            let _ = channels.1.recv();
        }
        Access::default()
    });
    let first = pulled.disk();
    entered.recv_timeout(FOR_EVER).unwrap();
    let second = pulled.disk_of(&other).opened();
    drop(release);
    first.opened();
    drop(second);
    fetcher.abort();
}

#[tokio::test]
async fn a_fetcher_without_work_ends_and_leaves_no_socket() {
    let pulled = pulled().await;
    let fetcher = pulled.serve(Duration::from_millis(10));
    tokio::time::timeout(FOR_EVER, fetcher).await.unwrap().unwrap().unwrap();
    assert!(!pulled.run_dir().join("fetch.sock").exists());
    assert!(pulled.is_lazy());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_want_that_fails_is_answered_and_can_be_repeated() {
    let pulled = pulled().await;
    pulled.registry.state.corrupts.store(true, Ordering::SeqCst);
    let fetcher = pulled.serve(LONG);
    let disk = pulled.disk().opened();
    let wanted = extent(pulled.span(CHUNK));
    disk.send(&Want(wanted).encode());
    assert_eq!(Answer::decode(&disk.receive().unwrap()), Some(Answer::Failed(wanted)));
    assert!(pulled.is_lazy());
    pulled.registry.state.corrupts.store(false, Ordering::SeqCst);
    disk.get(wanted);
    pulled.assert_written(pulled.span(CHUNK));
    fetcher.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_disks_lose_their_connection_and_nobody_elses() {
    let pulled = pulled().await;
    pulled.registry.hold(true);
    let fetcher = pulled.serve(LONG);
    let good = pulled.disk().opened();
    let unknown = Disk::connect(&pulled.run_dir());
    unknown.send(&Hello { digest: [7; 32], ..pulled.hello() }.encode());
    let refused = unknown.receive().unwrap();
    let Some(Answer::Refused(text)) = Answer::decode(&refused) else { panic!("{refused:?}") };
    assert!(String::from_utf8_lossy(text).contains("no image"));
    assert_eq!(unknown.receive(), None);
    let other = Disk::connect(&pulled.run_dir());
    let hello = pulled.hello();
    other.send(&Hello { inode: hello.inode + 1, ..hello }.encode());
    let refused = other.receive().unwrap();
    let Some(Answer::Refused(text)) = Answer::decode(&refused) else { panic!("{refused:?}") };
    assert!(String::from_utf8_lossy(text).contains("another file"));
    let greets = Disk::connect(&pulled.run_dir());
    greets.send(b"GET / HTTP/1.1");
    assert_eq!(greets.receive(), None);
    let (bytes, long) = (pulled.map.bytes, vec![0; 4096]);
    let beyond = Want(Extent { offset: bytes, bytes: 1 }).encode();
    for message in [&beyond, &Answer::Open.encode(), &long] {
        let disk = pulled.disk().opened();
        disk.send(message);
        assert_eq!(disk.receive(), None);
    }
    let greedy = pulled.disk().opened();
    let wanted = Want(extent(pulled.span(CHUNK))).encode();
    for _ in 0..=MOST_WANTED {
        // The fetcher may have ended the connection before the last one.
        let _ = rustix::net::send(&greedy.0, &wanted, SendFlags::NOSIGNAL);
    }
    assert_eq!(greedy.receive(), None);
    pulled.registry.hold(false);
    good.get(extent(pulled.span(CHUNK)));
    fetcher.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn one_fetcher_serves_and_takes_over_from_a_dead_one() {
    let pulled = pulled().await;
    std::fs::create_dir_all(pulled.run_dir()).unwrap();
    let socket = pulled.run_dir().join("fetch.sock");
    // A killed fetcher leaves its socket.
    drop(slipway_private::listen(&socket, SocketType::SEQPACKET, None, 1).unwrap());
    let fetcher = pulled.serve(LONG);
    let disk = pulled.disk().opened();
    let second = tokio::time::timeout(FOR_EVER, pulled.serve(LONG)).await;
    second.unwrap().unwrap().unwrap();
    disk.get(extent(pulled.span(CHUNK)));
    fetcher.abort();
}
