//! The program `containerd-shim-slipway-v2`. All of it is in the library, for tests and fuzzing.

use std::process::ExitCode;

fn main() -> ExitCode {
    slipway_shim::main()
}
