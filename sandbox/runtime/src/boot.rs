//! Boot files of guests: a kernel, and an initramfs made for it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use slipway_initramfs::{Extras, Kernel, Sockets};
use tokio::sync::OnceCell;

use crate::Result;
use crate::config::{Config, find_library};
use crate::files::Lane;
use crate::lock::lock;
pub use crate::record::Needs;

/// The program of the socket engine in the guest.
const SOCKETS_PROGRAM: &str = "slipway-guest-sockets";

/// The files that a guest boots from.
#[derive(Clone)]
pub struct BootFiles {
    /// The kernel's image.
    pub kernel: PathBuf,
    /// The initramfs, with the agent and the modules that it needs.
    pub initramfs: PathBuf,
}

/// A provider of boot files, which finds or makes them.
pub trait Boot: Send + Sync {
    /// Returns the boot files for `kernel`, or for the node's own kernel. May take seconds, so it
    /// is called on a thread that may wait.
    ///
    /// # Errors
    /// [`Error::Initramfs`](crate::Error::Initramfs) if `kernel` is no kernel or modules are
    /// missing; other errors if files are missing.
    fn files(&self, kernel: Option<&Path>, needs: Needs) -> Result<BootFiles>;
}

/// The provider by the node's settings: it uses what the node has installed, and builds the rest in
/// the node's cache.
pub struct Installed(pub Config);

impl Boot for Installed {
    fn files(&self, kernel: Option<&Path>, needs: Needs) -> Result<BootFiles> {
        let cache = self.0.cache_dir();
        let agent = self.0.find_agent()?;
        let sockets = if needs.sockets { Some(socket_files(&self.0)?) } else { None };
        let kernel = Kernel::locate(kernel, &self.0.kernel_dir)?;
        let Needs { shared_root: pmem, shares, bridge, memory, reporting, hardware, .. } = needs;
        let sockets = sockets.as_ref();
        let extras = Extras { sockets, pmem, shares, bridge, memory, reporting, hardware };
        let initramfs = slipway_initramfs::build(&kernel, &agent, extras, &cache)?;
        Ok(BootFiles { kernel: kernel.bootable(&cache)?, initramfs })
    }
}

/// Returns the host's files that a guest with sockets needs.
///
/// # Errors
/// The errors of finding the engine and the library, with the paths that were tried.
fn socket_files(config: &Config) -> Result<Sockets> {
    Ok(Sockets {
        engine: config.find_program(SOCKETS_PROGRAM)?,
        library: find_library("libslipway.so")?,
        musl_library: find_library("libslipway-musl.so").ok(),
    })
}

type Key = (Option<PathBuf>, Needs);

/// The boot files that were made so far.
pub(crate) struct Known {
    boot: Arc<dyn Boot>,
    lane: Lane,
    files: Mutex<BTreeMap<Key, Arc<OnceCell<BootFiles>>>>,
}

impl Known {
    pub(crate) fn new(boot: Arc<dyn Boot>, lane: Lane) -> Self {
        Self { boot, lane, files: Mutex::default() }
    }

    /// Returns the files of [`Boot::files`], which are made at the first use of each kernel.
    pub(crate) async fn files(&self, kernel: Option<&Path>, needs: Needs) -> Result<BootFiles> {
        let key = (kernel.map(Path::to_path_buf), needs);
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
