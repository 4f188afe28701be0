//! The library under test, which cargo does not build for tests, since no test links it; and an
//! engine for the programs that load it.

#[path = "../../../../host/socket/tests/engine/mod.rs"]
mod engine;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Returns `SLIPWAY_LIBRARY`, or the library beside the test's program or one folder above it.
/// Returns `None` if there is none.
pub fn library() -> Option<PathBuf> {
    let named = std::env::var_os("SLIPWAY_LIBRARY").map(PathBuf::from);
    let test = std::env::current_exe().ok()?;
    let near = test.ancestors().skip(1).take(2).map(|folder| folder.join("libslipway.so"));
    named.into_iter().chain(near).find(|path| path.exists())
}

/// Runs the command that `command` makes for the path of an engine's socket. The engine serves
/// until the command has ended.
pub fn run_beside_engine(command: impl FnOnce(&Path) -> Command) -> Output {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("socket");
    let engine = engine::Engine::new(&socket);
    let (end, stop) = rustix::pipe::pipe().unwrap();
    let engine = std::thread::spawn(move || engine.run(&end));
    let ran = command(&socket).output().unwrap();
    drop(stop);
    engine.join().unwrap();
    ran
}
