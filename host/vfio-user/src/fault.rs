//! Points at which a test has the process killed.

/// The environment variable `POINT:COUNT`, which kills the process at the COUNTth passing of POINT.
#[cfg(feature = "fault-points")]
pub const VARIABLE: &str = "SLIPWAY_FAULT";

/// Kills the process, without any cleanup, if it is to be killed at this point.
#[cfg(feature = "fault-points")]
pub fn point(name: &str) {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU64, Ordering};
    static WANTED: OnceLock<Option<(String, AtomicU64)>> = OnceLock::new();
    let wanted = WANTED.get_or_init(|| {
        let text = std::env::var(VARIABLE).ok()?;
        let (point, count) = text.split_once(':')?;
        Some((point.to_owned(), AtomicU64::new(count.parse().ok()?)))
    });
    if let Some((point, left)) = wanted
        && point == name
        && left.fetch_sub(1, Ordering::Relaxed) == 1
    {
        let _ =
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    }
}

/// Does nothing in a program that serves.
#[cfg(not(feature = "fault-points"))]
#[inline(always)]
pub(crate) fn point(_: &str) {}
