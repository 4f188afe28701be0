//! The engine of this crate's tests as a program: `tiny_engine SOCKET`.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../tests/engine/mod.rs"]
mod engine;

fn main() {
    let path = std::env::args_os().nth(1).unwrap();
    let (stop, _keep) = rustix::pipe::pipe().unwrap();
    engine::Engine::new(std::path::Path::new(&path)).run(&stop);
}
