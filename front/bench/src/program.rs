//! The program `slipway`, as its benchmarks start it.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::{Signal, set_parent_process_death_signal};

/// The program of the benchmarks, which is installed beside `slipway`.
pub const BENCH: &str = "slipway-bench";
/// The beginning of the names of Slipway's programs, and the name of the shim.
const OURS: &str = "slipway";
const SHIM: &str = "containerd-shim-slipway";

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

/// Returns whether a process runs a program of Slipway's other than the benchmarks.
pub(crate) fn runs_slipway(id: u32) -> bool {
    // Processes of the kernel have no program, and the process may have ended.
    let program = std::fs::read_link(format!("/proc/{id}/exe"));
    program.is_ok_and(|program| is_ours(&program))
}

/// Returns whether a program is one of Slipway's, other than the benchmarks.
fn is_ours(program: &Path) -> bool {
    let name = program.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    (name.starts_with(OURS) || name.starts_with(SHIM)) && !name.starts_with(BENCH)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_of_ours_are_known_by_their_names() {
        let ours = ["slipway", "slipway-fs", "containerd-shim-slipway-v2", "slipway (deleted)"];
        assert!(ours.iter().all(|name| is_ours(&Path::new("/usr/bin").join(name))));
        for other in ["/usr/bin/slipway-bench", "/usr/bin/qemu-system-x86_64", "/", "/opt/sl"] {
            assert!(!is_ours(Path::new(other)), "{other}");
        }
    }
}
