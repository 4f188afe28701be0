//! The program `slipway`, as its benchmarks start it.

use std::path::PathBuf;

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
