//! `slipway-vmm`: one virtual machine on KVM, one process.
//!
//! It is given everything as open descriptors by the process that starts it, parses nothing that
//! the guest wrote but its devices' queues, and uses no network and no configuration file. The
//! machine is `slipway_vmm`'s; this crate has the command line ([`args`]), the control socket
//! ([`control`], with the commands and events of [`qmp`]), and the loop that serves both
//! ([`process`]). What the loop serves is in [`ports`] (the machine's own devices), [`functions`]
//! (connections to servers of functions), [`memory`], [`cpus`], [`save`] and [`jobs`]; [`watch`]
//! has the descriptors that it waits for. [`filter`] has each thread's system calls. A process that
//! was started ahead gets its command line over a socket ([`spare`]).
//!
//! Dependencies: `slipway_vmm` is the machine; `lexopt` for the command line (a larger parser would
//! be a quarter of the program); `serde_json` for QMP; `slipway-peer` to receive descriptors;
//! `slipway-ram` to look at the host's setting of overcommit; `rustix` for system calls, `libc` for
//! their numbers and for the one that `rustix` lacks.
//!
//! `unsafe` is allowed to take over inherited descriptors by their numbers, and for getrusage(2).
#![allow(unsafe_code)]

mod args;
mod cpus;
mod filter;
mod functions;
mod jobs;
mod memory;
mod ports;
mod process;
mod save;
mod spare;
mod statistics;
mod watch;

use std::process::ExitCode;

use args::Parsed;
use slipway_vmm_process::{control, qmp, stream};

/// The exit status without a machine, when nothing failed.
const DONE: u8 = 0;
/// The exit status for a wrong command line.
const WRONG_USE: u8 = 2;
/// The exit status when the machine could not be made or run.
const FAILED: u8 = 1;

fn main() -> ExitCode {
    let status = run(args::parse(std::env::args_os(), None)).unwrap_or_else(|(reason, status)| {
        eprintln!("slipway-vmm: {reason}");
        status
    });
    ExitCode::from(status)
}

/// Does what a command line says. Returns the exit status.
///
/// # Errors
/// The reason in one line, and the exit status.
fn run(parsed: Result<Parsed, String>) -> Result<u8, (String, u8)> {
    let failed = |reason| (reason, FAILED);
    match parsed.map_err(|reason| (reason, WRONG_USE))? {
        Parsed::Print(text) => {
            print!("{text}");
            Ok(DONE)
        }
        Parsed::Run(args) => process::run(*args).map_err(failed),
        Parsed::Spare(spare) => match spare.wait().map_err(failed)? {
            Some(given) => run(args::parse(given.words, Some(given.vm))),
            None => Ok(DONE),
        },
    }
}
