//! Under `libslipway.so`, bytes that a program sent on one connection before those that it sent on
//! another are reported before them.
#![allow(clippy::unwrap_used)]

#[path = "../../../host/socket/tests/engine/mod.rs"]
mod engine;
mod library;

use std::path::Path;
use std::process::Command;

#[test]
fn what_came_first_is_reported_first() {
    let is_there = Command::new("python3").arg("--version").output().is_ok();
    let (true, Some(library)) = (is_there, library::library()) else {
        eprintln!("SKIPPED: what_came_first_is_reported_first: needs python3 and libslipway.so");
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("socket");
    let engine = engine::Engine::new(&socket);
    let (end, stop) = rustix::pipe::pipe().unwrap();
    let engine = std::thread::spawn(move || engine.run(&end));
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/order.py");
    let mut program = Command::new("python3");
    program.arg(script).arg("1000").env("LD_PRELOAD", library).env("SLIPWAY_SOCKET", &socket);
    let ran = program.output().unwrap();
    drop(stop);
    engine.join().unwrap();
    let (told, errors) =
        (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success() && !errors.contains("ours: 0\n"), "{told}{errors}");
}
