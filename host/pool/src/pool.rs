//! The pool as its process sees it.

use std::sync::Arc;

use crate::background;
use crate::lease::Lease;
use crate::server::Server;
use crate::shared::{Settings, Shared, Stats};
use crate::shelf::Left;

/// A pool of memory. Dropping it ends its thread; memory that sandboxes have stays with them and is
/// given to the kernel when they have ended.
pub struct Pool(Arc<Shared>);

impl Pool {
    /// Makes an empty pool and starts its thread.
    ///
    /// # Errors
    /// The kernel has no `/dev/userfaultfd` (Linux 6.1), or access is denied; no thread is left.
    pub fn new(settings: Settings) -> std::io::Result<Self> {
        let shared = Arc::new(Shared::new(settings)?);
        if shared.settings.ahead {
            background::start(&shared)?;
        }
        Ok(Self(shared))
    }

    /// Goes on with the memory of the sandboxes that a predecessor left with the keeper. Its
    /// devices find the memory by its file from then on.
    ///
    /// # Errors
    /// No thread is left.
    pub fn resume(&self, left: Vec<Left>) -> std::io::Result<()> {
        for one in left {
            let number = one.number;
            match Lease::resume(&self.0, one) {
                Ok(lease) => lease.spawn()?,
                Err(error) => tracing::error!(%error, number, "memory of a sandbox is lost"),
            }
        }
        Ok(())
    }

    /// Serves launchers at a socket with this path, which only the user of this process may open.
    ///
    /// # Errors
    /// The socket cannot be made; no thread is left.
    pub fn listen(&self, path: &std::path::Path) -> std::io::Result<Server> {
        Server::start(&self.0, path)
    }

    /// Zeroes the first `percent` % (0 to 100) of the granules of each memory that nobody has, in
    /// the calling thread: FastIOV's baselines Pre10, Pre50 and Pre100 have so much zeroed before a
    /// sandbox asks. Granules without a page stay so.
    pub fn zero_free(&self, percent: usize) {
        self.0.zero_free(percent);
    }

    /// Returns the present figures.
    pub fn stats(&self) -> Stats {
        self.0.stats()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.0.end();
    }
}
