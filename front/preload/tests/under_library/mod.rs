//! Programs under `libslipway.so` that are parts of a test: the test runs itself again, with the
//! library, beside an engine.

use std::process::Command;

use crate::library;

/// The variable that tells a process of the test that it is the program.
const ROLE: &str = "SLIPWAY_TEST_PROGRAM";

/// Runs `program` under the library, as a process that runs the test called `test`, and checks that
/// it ends well. In that process, runs it here.
pub fn run(test: &str, program: fn()) {
    if std::env::var_os(ROLE).is_some() {
        return program();
    }
    let Some(library) = library::library() else {
        return println!("SKIPPED: {test}: needs libslipway.so");
    };
    let ran = library::run_beside_engine(|socket| {
        let mut program = Command::new(std::env::current_exe().unwrap());
        program.args(["--exact", test, "--nocapture"]).env(ROLE, "1");
        program.env("LD_PRELOAD", library).env("SLIPWAY_SOCKET", socket);
        program
    });
    let said = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success() && !said.contains("panicked"), "{}: {said}", ran.status);
}
