//! The thread that serves names and published ports.

use crate::proxy::Relay;

/// The thread on which networks are served. Dropping it ends all tasks and frees their addresses.
pub(super) struct ServerThread {
    /// The thread's runtime, on which servers run.
    pub(super) handle: tokio::runtime::Handle,
    /// The means by which published ports are served on it.
    pub(super) relay: Relay,
    /// The sender that stops the thread, and the thread.
    running: Option<(tokio::sync::oneshot::Sender<()>, std::thread::JoinHandle<()>)>,
}

impl ServerThread {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system has no thread or no descriptor left.
    pub(super) fn start() -> std::io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let thread = std::thread::Builder::new().name("networks".to_owned()).spawn(move || {
            // Ends, with all tasks, when the sender is dropped.
            let _ = runtime.block_on(stopped);
            // The calls that may block on a file system end later.
            runtime.shutdown_background();
        })?;
        let relay = Relay::new(handle.clone());
        Ok(Self { handle, relay, running: Some((stop, thread)) })
    }
}

impl Drop for ServerThread {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.running.take() {
            drop(stop);
            // The next server has the same addresses.
            let _ = thread.join();
        }
    }
}
