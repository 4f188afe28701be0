//! An engine on a thread.
#![allow(dead_code)] // not every test needs all of it

use std::path::PathBuf;
use std::thread::JoinHandle;

use slipway_sgiov::{Engine, Reload, Settings, Stop};
use tempfile::TempDir;

/// An engine that ends when this is dropped.
pub struct Running {
    pub dir: TempDir,
    pub reload: Reload,
    stop: Stop,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    pub fn new(settings: Settings) -> Self {
        Self::within(tempfile::tempdir().unwrap(), settings)
    }

    /// Starts an engine with its socket in `dir`; see [`Running::socket_in`].
    pub fn within(dir: TempDir, settings: Settings) -> Self {
        let socket = Self::socket_in(&dir);
        let mut engine = Engine::bind(Settings { socket, ..settings }).unwrap();
        let (stop, reload) = (engine.stop(), engine.reload());
        let thread = Some(std::thread::spawn(move || engine.run().unwrap()));
        Self { dir, reload, stop, thread }
    }

    pub fn socket_in(dir: &TempDir) -> PathBuf {
        dir.path().join("s")
    }

    pub fn socket(&self) -> PathBuf {
        Self::socket_in(&self.dir)
    }

    /// Ends the engine in order.
    pub fn end(&mut self) {
        self.stop.stop();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end();
    }
}
