//! The process that fetches the blocks of images, played by a thread.

use std::fs::File;
use std::io::IoSliceMut;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, socket_with,
};
use slipway_lazy_spec::{Answer, Hello, MOST, Want};
use slipway_peer::{Bin, receive};
use slipway_plane_api::v1;

/// Serves the image `image` in `dir`, of which byte `at` is `content(at)`.
pub fn serve(dir: &Path, image: &str, content: fn(u64) -> u8) {
    let file = Arc::new(File::options().write(true).open(dir.join(image)).unwrap());
    let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    let listener = socket_with(AddressFamily::UNIX, kind, flags, None).unwrap();
    let address = SocketAddrUnix::new(dir.join("fetch.sock")).unwrap();
    rustix::net::bind(&listener, &address).unwrap();
    rustix::net::listen(&listener, 16).unwrap();
    std::thread::spawn(move || {
        while let Ok(socket) = rustix::net::accept(&listener) {
            let file = Arc::clone(&file);
            std::thread::spawn(move || fetch(&socket, &file, content));
        }
    });
}

/// Answers the requests of one disk until it goes.
fn fetch(socket: &OwnedFd, image: &File, content: fn(u64) -> u8) {
    let bin = Bin::new();
    let hear = || {
        let mut message = vec![0; MOST];
        let mut into = [IoSliceMut::new(&mut message)];
        let got = receive(socket, &mut into, &bin, RecvFlags::empty()).ok()?;
        message.truncate(got.bytes);
        (got.bytes > 0).then_some(message)
    };
    let say = |answer: Answer<'_>| {
        // The disk may have gone.
        let _ = rustix::net::send(socket, &answer.encode(), SendFlags::NOSIGNAL);
    };
    let Some(hello) = hear() else { return };
    assert!(Hello::decode(&hello).is_some());
    say(Answer::Open);
    while let Some(message) = hear() {
        let Want(extent) = Want::decode(&message).unwrap();
        let bytes: Vec<u8> = (extent.offset..extent.end()).map(content).collect();
        image.write_all_at(&bytes, extent.offset).unwrap();
        say(Answer::Have(extent));
    }
}

/// Describes a disk of the image `image` in `dir`.
pub fn disk(dir: &Path, image: &str) -> v1::LazyDisk {
    let path = |name: &str| dir.join(name).to_string_lossy().into_owned();
    v1::LazyDisk { path: path(image), digest: vec![7; 32], socket_path: path("fetch.sock") }
}
