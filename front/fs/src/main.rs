//! `slipway-fs`: directories and files of the host for the guest of one sandbox, one process.
//!
//! The guest has one virtio file system device (`slipway_virtio_fs`), on a vfio-user socket that
//! the process which starts this one has opened. Each share is a mount in the file system's root,
//! which comes and goes while the guest runs: the daemon mounts it in this process's namespace
//! (`slipway_hypervisor::HelperFiles`), read-only if it is to be. The FUSE requests are carried out
//! by virtiofsd's library, which opens files by descriptors and follows no link.
//!
//! The process is root, since files belong to any user. It is started in a cage (namespaces of its
//! own, an empty environment; `slipway_hypervisor`), and gives up what is left before it serves:
//! [`jail`] replaces its root by one that has the shares alone, and leaves it the capabilities that
//! ownership and permissions of files need; [`filter`] lists the system calls that it needs.
//!
//! How the pieces meet:
//! - [`args`] is the command line;
//! - [`device`] is the device behind its socket, on the process's reactor;
//! - [`pool`] has the threads on which requests wait for files; [`session`] is what a guest's mount
//!   knows: inodes and open files;
//! - [`names`] refuses requests that the library must not see, such as paths in place of names;
//! - [`message`] carries one request to virtiofsd's library, in memory of the process's own.
//!
//! The process ends when its VMM has disconnected. If it ends earlier, requests of the guest are
//! not answered.
//!
//! Dependencies: `virtiofsd` for operations on files, with `virtio-queue`, `vm-memory` and
//! `vhost-user-backend`, in whose types its messages are; `lexopt` for the command line;
//! `rustix` for system calls, `libc` for their numbers.
//!
//! `unsafe` is allowed to take over inherited descriptors by their numbers.
#![allow(unsafe_code)]

mod args;
mod device;
mod filter;
mod jail;
mod message;
mod names;
mod pool;
mod process;
mod session;

use std::process::ExitCode;

/// The exit status for a wrong command line.
const WRONG_USE: u8 = 2;
/// The exit status when the device could not be served.
const FAILED: u8 = 1;

fn main() -> ExitCode {
    match args::parse(std::env::args_os()) {
        Ok(args::Parsed::Print(text)) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        Ok(args::Parsed::Run(args)) => match process::run(args) {
            Ok(()) => ExitCode::SUCCESS,
            Err(reason) => {
                eprintln!("slipway-fs: {reason}");
                ExitCode::from(FAILED)
            }
        },
        Err(reason) => {
            eprintln!("slipway-fs: {reason}");
            ExitCode::from(WRONG_USE)
        }
    }
}
