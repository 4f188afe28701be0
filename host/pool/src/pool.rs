//! The pool as its process sees it.

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use slipway_pool_spec::TemplateName;
use slipway_ram::Template;

use crate::background;
use crate::lease::Lease;
use crate::prepare;
use crate::server::Server;
use crate::shared::{Settings, Shared, Stats};
use crate::shelf::Left;
use crate::templates::NameTaken;

/// A pool of memory. Dropping it ends its threads; memory that sandboxes have stays with them and
/// is given to the kernel when they have ended.
pub struct Pool(Arc<Shared>);

impl Pool {
    /// Makes an empty pool and starts its threads.
    ///
    /// # Errors
    /// The kernel has no `/dev/userfaultfd` (Linux 6.1), or access is denied; no thread is left.
    pub fn new(settings: Settings) -> std::io::Result<Self> {
        let shared = Arc::new(Shared::new(settings)?);
        if shared.settings.ahead {
            background::start(&shared)?;
        }
        if shared.settings.spare_bytes > 0 {
            prepare::start(&shared)?;
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

    /// Makes a template of `file`, the memory of a VM that does not run: of this pool, by any
    /// descriptor of it, or any other. Bytes that the VM has not seen are not in it. Waits for the
    /// copy.
    ///
    /// # Errors
    /// As for [`slipway_ram::LateFiles::template`].
    pub fn freeze(&self, file: BorrowedFd<'_>) -> std::io::Result<Template> {
        self.0.settings.files.template(file)
    }

    /// Gives `template` a name, by which launchers may ask for memory that begins as it.
    ///
    /// A successor of this process does not know it. Forks that run keep theirs.
    ///
    /// # Errors
    /// [`NameTaken`].
    pub fn add_template(&self, name: TemplateName, template: Template) -> Result<(), NameTaken> {
        self.0.templates.add(name, template)
    }

    /// Removes a template: no more forks are made of it. Its pages go to the kernel with the last
    /// of its forks. Returns `false` if there is none of this name.
    pub fn remove_template(&self, name: TemplateName) -> bool {
        self.0.templates.remove(&name)
    }

    /// Has these bytes of a template copied ahead for each fork to come, in their order, while its
    /// VM begins. Returns `false` if there is no such template.
    pub fn copy_ahead(&self, name: TemplateName, ranges: &[Range<u64>]) -> bool {
        self.0.templates.copy_ahead(&name, ranges)
    }

    /// Has up to `count` memories ready for forks of a template, at most 64. The bytes of
    /// [`Pool::copy_ahead`] are copied into them already. A fork is given one of them at once, and
    /// a thread makes another when a CPU is idle. They are made while forks of the template begin,
    /// and go to the kernel ten minutes after the last of them, or with the template. Each costs
    /// the bytes that are copied ahead; [`Settings::spare_bytes`] bounds them for all templates
    /// together. Returns `false` if there is no such template.
    pub fn keep_ready(&self, name: TemplateName, count: usize) -> bool {
        self.0.templates.keep_ready(&name, count)
    }

    /// Returns the bytes of its template that a sandbox has of its own by now, for
    /// [`Pool::copy_ahead`]; `identity` is the device and inode number of its memory. They are the
    /// pages that it has touched, if nothing was copied ahead for it. Returns `None` if no sandbox
    /// has this memory.
    pub fn copied(&self, identity: (u64, u64)) -> Option<Vec<Range<u64>>> {
        self.0.lent(identity).map(|memory| memory.copied())
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
