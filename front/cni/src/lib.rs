//! `slipway-cni`: gives a container an interface in a network of Slipway's, for any runtime that
//! speaks CNI (Container Network Interface, versions 0.3.1, 0.4.0, 1.0.0 and 1.1.0).
//!
//! The runtime starts the program for each operation, with parameters in the environment and the
//! network configuration on its input; the answer is JSON on its output. The pieces:
//! - `environment` and `configuration` parse what the runtime says, `bandwidth` a part of it;
//! - `commands` has the operations: ADD, DEL, CHECK, GC, STATUS, VERSION. The node's daemon does
//!   the work, over gRPC at its socket (`daemon`): the program makes no interface itself;
//! - `ipam` runs the IPAM plugin of a configuration that names one;
//! - `note` leaves a note for the next daemon where DEL finds none, and looks for an attachment in
//!   the daemon's ledger;
//! - `answer` has the results of each version, and `failure` the errors.
//!
//! A runtime starts hundreds of these at once, so the program is small and starts one thread.
//!
//! Not here: changes to the result of a plugin that was called before. Interfaces, addresses and
//! rates are the daemon's (`slipway-network`).
//!
//! Dependencies: `slipway-plane-api` and `tonic` call the daemon, `tokio` runs that on this thread;
//! `serde` and `serde_json` for the configuration and the answers.

mod answer;
mod bandwidth;
mod commands;
mod configuration;
mod daemon;
mod environment;
mod failure;
#[cfg(feature = "fuzz")]
pub mod fuzz;
mod ipam;
mod note;

use std::io::{Read, Write};
use std::process::ExitCode;

use configuration::Configuration;
use environment::Environment;
use failure::{Code, Failure};

/// The largest network configuration in bytes.
const LARGEST: u64 = 1 << 20;

/// Does what the environment and the input ask for, and prints the answer.
pub fn main() -> ExitCode {
    let mut input = Vec::new();
    let read = std::io::stdin().lock().take(LARGEST + 1).read_to_end(&mut input);
    let read = read.map(|_| input).map_err(|error| {
        Failure::new(Code::Input, format!("cannot read the network configuration: {error}"))
    });
    let version =
        read.as_ref().map_or(configuration::LATEST, |input| configuration::version(input));
    let (answer, code) = match read.and_then(|input| run(&input, std::env::vars_os())) {
        Ok(Some(answer)) => (answer, ExitCode::SUCCESS),
        Ok(None) => return ExitCode::SUCCESS,
        Err(failure) => (failure.to_json(version), ExitCode::FAILURE),
    };
    // Nobody is left to tell if the output is closed.
    let _ = writeln!(std::io::stdout().lock(), "{answer}");
    code
}

/// Does what the environment and the configuration ask for. Returns the answer, if the operation
/// has one.
fn run(
    input: &[u8],
    variables: impl Iterator<Item = (std::ffi::OsString, std::ffi::OsString)>,
) -> Result<Option<serde_json::Value>, Failure> {
    let environment = Environment::of(variables)?;
    if input.len() as u64 > LARGEST {
        let text = format!("the network configuration has more than {LARGEST} bytes");
        return Err(Failure::new(Code::Undecodable, text));
    }
    let configuration = Configuration::parse(input, &environment)?;
    commands::run(&environment, &configuration, input)
}
