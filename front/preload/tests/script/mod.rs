//! Tests that are Python scripts under `libslipway.so`.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::library;

/// The output of a script that has ended.
pub struct Ran {
    pub succeeded: bool,
    pub output: String,
    pub errors: String,
}

/// Returns the path of a file beside the tests.
pub fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name)
}

/// Runs the command that `command` makes for the paths of the library and of an engine's socket.
/// Returns `None`, and prints that `test` is skipped, without python3 or without the library.
pub fn run(test: &str, command: impl FnOnce(&Path, &Path) -> Command) -> Option<Ran> {
    let has_python = Command::new("python3").arg("--version").output().is_ok();
    let (true, Some(library)) = (has_python, library::library()) else {
        eprintln!("SKIPPED: {test}: needs python3 and libslipway.so");
        return None;
    };
    let ran = library::run_beside_engine(|socket| command(&library, socket));
    let [output, errors] =
        [ran.stdout, ran.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    Some(Ran { succeeded: ran.status.success(), output, errors })
}
