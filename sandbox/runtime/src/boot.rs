//! What a guest boots from: a kernel, and an initramfs made for it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use slipway_initramfs::Kernel;
use tokio::sync::OnceCell;

use crate::config::Config;
use crate::files::Lane;
use crate::sandbox::lock;
use crate::{Result, sockets};

/// What a guest boots from.
#[derive(Clone)]
pub struct BootFiles {
    /// The kernel.
    pub kernel: PathBuf,
    /// The agent and the modules it needs.
    pub initramfs: PathBuf,
}

/// Finds and makes what guests boot from.
pub trait Boot: Send + Sync {
    /// The files for `kernel`, or for the node's own; with `sockets` for a sandbox with a socket function.
    /// May take seconds; called from a thread that may wait.
    ///
    /// # Errors
    /// [`Error::Initramfs`](crate::Error::Initramfs): a kernel that is none, modules that are missing; files
    /// that are not there.
    fn files(&self, kernel: Option<&Path>, sockets: bool) -> Result<BootFiles>;
}

/// Boot files by the node's settings: what it has installed, and what is built of that in its cache.
pub struct Installed(pub Config);

impl Boot for Installed {
    fn files(&self, kernel: Option<&Path>, sockets: bool) -> Result<BootFiles> {
        let cache = self.0.cache_dir();
        let agent = self.0.find_agent()?;
        let sockets = if sockets { Some(sockets::files(&self.0)?) } else { None };
        let kernel = Kernel::locate(kernel, &self.0.kernel_dir)?;
        let initramfs = slipway_initramfs::build(&kernel, &agent, sockets.as_ref(), &cache)?;
        Ok(BootFiles { kernel: kernel.bootable(&cache)?, initramfs })
    }
}

/// Kernel, and whether there are sockets.
type Key = (Option<PathBuf>, bool);

/// The boot files that were asked for so far.
pub(crate) struct Known {
    boot: Arc<dyn Boot>,
    lane: Lane,
    files: Mutex<BTreeMap<Key, Arc<OnceCell<BootFiles>>>>,
}

impl Known {
    pub(crate) fn new(boot: Arc<dyn Boot>, lane: Lane) -> Self {
        Self { boot, lane, files: Mutex::default() }
    }

    /// As [`Boot::files`], made at the first use of each kernel.
    pub(crate) async fn files(&self, kernel: Option<&Path>, sockets: bool) -> Result<BootFiles> {
        let key = (kernel.map(Path::to_path_buf), sockets);
        let cell = Arc::clone(lock(&self.files).entry(key.clone()).or_default());
        let make = || {
            let boot = Arc::clone(&self.boot);
            self.lane.run(move || boot.files(key.0.as_deref(), key.1))
        };
        let files = cell.get_or_try_init(make).await.cloned();
        if files.is_err() {
            // A path that is no kernel is not remembered.
            lock(&self.files).retain(|_, cell| cell.initialized() || Arc::strong_count(cell) > 1);
        }
        files
    }
}
