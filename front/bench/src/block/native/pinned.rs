//! Work on chosen processors.

use anyhow::{Result, bail};

use super::pin;

/// Does `work` on a thread of its own that is bound to `cpus`. The caller's processors stay.
///
/// # Errors
/// The thread cannot run on `cpus`; `work` fails or panics.
pub(crate) fn pinned<T: Send>(
    cpus: &[usize],
    work: impl FnOnce() -> Result<T> + Send,
) -> Result<T> {
    let thread = || {
        pin(cpus)?;
        work()
    };
    std::thread::scope(|scope| match scope.spawn(thread).join() {
        Ok(result) => result,
        Err(_) => bail!("the thread of a turn panicked"),
    })
}
