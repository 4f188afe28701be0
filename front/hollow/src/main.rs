//! `slipway-hollow`: a sandbox's virtual machine without a processor, for measurements of the host.
//!
//! It takes the place of `slipway-vmm` where a sandbox asks for the accelerator `hollow`. To the
//! daemon that starts it, it is a VMM whose guest boots at once: it serves the same control socket,
//! has the same connections to the vfio-user servers of its functions, hands them the same memory,
//! and answers as the guest's agent does. What a guest's kernel would do with the functions is done
//! by Slipway's own drivers: the NVMe controller is brought up and its namespaces are listed, the
//! first block of the image and of the volatile layer is read and checked, the network interface
//! is brought up and sends a frame.
//!
//! So a start costs the host what it costs with `slipway-vmm`, apart from KVM and the guest's own
//! instructions, and hundreds at once can be measured on any machine. No program runs in it: its
//! container begins, does nothing, and ends when it is told to.
//!
//! The pieces: [`args`] is the command line; [`functions`] connects the functions, [`disks`] and
//! [`nic`] drive them in a [`place`] of the memory; [`service`] answers the agent's calls;
//! [`process`] serves the control socket.
//!
//! Not implemented: memory of a pool, templates, shared roots, functions that are plugged or
//! connected again, an e1000's driver, socket functions, commands in the container. Interrupts are
//! not asked for: the drivers poll.
//!
//! Dependencies: `slipway-vmm-process` has the control socket and `slipway-vmm` the layout of the
//! guest's memory, so that both are a `slipway-vmm`'s; `tonic` and `tokio` serve the agent's
//! protocol as the agent does; `lexopt` reads the command line; `anyhow` for errors that are
//! printed and never matched on.
//!
//! `unsafe` is allowed to take over inherited descriptors by their numbers.
#![allow(unsafe_code)]

mod args;
mod disks;
mod functions;
mod nic;
mod place;
mod process;
mod service;

use std::process::ExitCode;

/// The exit status for a wrong command line.
const WRONG_USE: u8 = 2;
/// The exit status when a function could not be driven.
const FAILED: u8 = 1;

fn main() -> ExitCode {
    let args = match args::parse(std::env::args_os()) {
        Ok(args) => args,
        Err(reason) => {
            eprintln!("slipway-hollow: {reason}");
            return ExitCode::from(WRONG_USE);
        }
    };
    match process::run(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("slipway-hollow: {error:#}");
            ExitCode::from(FAILED)
        }
    }
}
