//! A process that is launched.

use std::time::Duration;

use crate::process::Process;

/// The time that a killed VMM may take to end.
const END_DEADLINE: Duration = Duration::from_secs(10);

/// A process whose launch is not finished. Dropping this kills the process.
pub(crate) struct Unfinished(Option<Process>);

impl Unfinished {
    /// Takes a process that was just started.
    pub(crate) fn new(process: Process) -> Self {
        Self(Some(process))
    }

    /// Returns the process.
    pub(crate) fn look(&self) -> &Process {
        self.0.as_ref().expect("present until finish, which consumes self")
    }

    /// Returns the process, to wait for its end.
    pub(crate) fn get(&mut self) -> &mut Process {
        self.0.as_mut().expect("present until finish, which consumes self")
    }

    /// Kills the process and waits until it has ended. Returns `false` if it does not end in time;
    /// it is then reaped on another thread.
    pub(crate) async fn end(&mut self) -> bool {
        let process = self.get();
        process.kill().is_ok() && tokio::time::timeout(END_DEADLINE, process.exited()).await.is_ok()
    }

    /// Returns the process, whose launch is over.
    pub(crate) fn finish(mut self) -> Process {
        self.0.take().expect("present until finish, which consumes self")
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if let Some(process) = &mut self.0 {
            process.end_elsewhere();
        }
    }
}
