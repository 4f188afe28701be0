//! Folders, files and sockets that are their user's alone, whatever the umask is.
//!
//! Opening a file for reading is enough to lock it, and connecting to a socket is enough to ask its
//! server for something. So what is one user's has no rights for others from its first moment on
//! ([`make_folder`], [`listen`]), and what an older build or a copy left open is closed
//! ([`make_folder`], [`close_files`]). A process that has opened a file keeps it.
//!
//! Not here: locks, whose files need more than another mode (`slipway-lock`).
//!
//! # Dependencies
//!
//! `rustix` (openat, fchmod, sockets without a C library), `thiserror`; with the feature `tokio`,
//! `tokio` (listeners of a runtime).

mod folder;
mod socket;

pub use folder::{Error, Result, close_files, make_folder};
pub use socket::listen;
#[cfg(feature = "tokio")]
pub use socket::listen_async;
