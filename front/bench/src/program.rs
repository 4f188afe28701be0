//! The program `slipway`, as its benchmarks start it.

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use rustix::process::{Signal, set_parent_process_death_signal};

/// The program of the benchmarks, which is installed beside `slipway`.
pub const BENCH: &str = "slipway-bench";

/// Returns the path of the program `slipway`: this program, or the one beside it if this program is
/// that of the benchmarks.
///
/// # Errors
/// The kernel does not say which program this is.
pub fn slipway() -> std::io::Result<PathBuf> {
    let own = std::env::current_exe()?;
    let is_bench = own.file_name().is_some_and(|name| name == BENCH);
    Ok(if is_bench { own.with_file_name("slipway") } else { own })
}

/// Has the kernel send SIGTERM to the program that `command` starts when the thread that starts it
/// ends, and so when this process is killed.
pub fn end_with_this_thread(command: &mut Command) {
    let ask = || Ok(set_parent_process_death_signal(Some(Signal::TERM))?);
    #[allow(unsafe_code)] // a server does not end by itself when this process is killed
    // SAFETY: one system call, which is allowed between fork and exec.
    unsafe {
        command.pre_exec(ask);
    }
}
