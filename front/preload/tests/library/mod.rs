//! The library under test: cargo does not build it for tests, since no test links it.

use std::path::PathBuf;

/// Returns `SLIPWAY_LIBRARY`, or the library beside the test's program or one folder above it.
/// Returns `None` if there is none.
pub fn library() -> Option<PathBuf> {
    let named = std::env::var_os("SLIPWAY_LIBRARY").map(PathBuf::from);
    let test = std::env::current_exe().ok()?;
    let near = test.ancestors().skip(1).take(2).map(|folder| folder.join("libslipway.so"));
    named.into_iter().chain(near).find(|path| path.exists())
}
