//! Calls of a benchmark to the daemon, which a signal ends.

use std::cell::Cell;
use std::mem::ManuallyDrop;

use anyhow::{Result, anyhow, ensure};
use tokio::runtime::Runtime;
use tokio::sync::Mutex;

use crate::fork::EndSignals;

/// Blocking calls that a signal ends, so that the benchmark can remove what it has made.
pub(super) struct Interruptible {
    /// Never dropped: that would wait for helper threads, one of which may be blocked. The process
    /// ends soon after the calls.
    runtime: ManuallyDrop<Runtime>,
    ends: Mutex<EndSignals>,
    is_ended: Cell<bool>,
}

impl Interruptible {
    /// Has signals wait for the next call.
    ///
    /// # Errors
    /// The operating system has no descriptors left.
    pub fn new() -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let ends = {
            let _inside = runtime.enter();
            Mutex::new(EndSignals::catch()?)
        };
        Ok(Self { runtime: ManuallyDrop::new(runtime), ends, is_ended: Cell::new(false) })
    }

    /// Blocks until `work` is done.
    ///
    /// # Errors
    /// The errors of `work`, or a signal has ended this call or an earlier one.
    pub fn wait<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        self.check()?;
        self.runtime.block_on(async {
            let mut ends = self.ends.lock().await;
            tokio::select! {
                done = work => done,
                () = ends.next() => {
                    self.is_ended.set(true);
                    Err(anyhow!("interrupted"))
                }
            }
        })
    }

    /// Blocks until `work` is done, whatever signals come.
    pub fn wait_to_end<T>(&self, work: impl Future<Output = T>) -> T {
        self.runtime.block_on(work)
    }

    /// Checks that no signal has ended a call.
    ///
    /// # Errors
    /// A signal has ended one.
    pub fn check(&self) -> Result<()> {
        ensure!(!self.is_ended.get(), "interrupted");
        Ok(())
    }
}
