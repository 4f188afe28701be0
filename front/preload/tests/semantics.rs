//! A script of socket calls behaves the same under `libslipway.so` as with kernel sockets, errno
//! for errno.
#![allow(clippy::unwrap_used)]

#[path = "../../../host/socket/tests/engine/mod.rs"]
mod engine;
mod library;

use std::path::Path;
use std::process::Command;

#[test]
fn sockets_behave_as_the_kernels_do() {
    let is_there = Command::new("python3").arg("--version").output().is_ok();
    let (true, Some(library)) = (is_there, library::library()) else {
        eprintln!("SKIPPED: sockets_behave_as_the_kernels_do: needs python3 and libslipway.so");
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("socket");
    let engine = engine::Engine::new(&socket);
    let (end, stop) = rustix::pipe::pipe().unwrap();
    let engine = std::thread::spawn(move || engine.run(&end));
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/run.sh");
    let ran = Command::new(script).arg(library).arg(socket).output().unwrap();
    drop(stop);
    engine.join().unwrap();
    let said = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success(), "{said}{}", String::from_utf8_lossy(&ran.stderr));
}
