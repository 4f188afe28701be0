//! The session of one mount in a guest: the inodes that it knows and the files that it has open.

use std::fs::File;
use std::time::Duration;

use virtiofsd::descriptor_utils::{Reader, Writer};
use virtiofsd::passthrough::{CachePolicy, Config, PassthroughFs};
use virtiofsd::server::Server;

/// How long a guest may use names and attributes without asking again. Programs of the host change
/// files as well.
const VALID: Duration = Duration::from_secs(1);

/// The directory that a session serves.
#[derive(Debug)]
pub struct Root {
    /// Its path in the process's root.
    pub path: &'static str,
    /// The process's own descriptors (`/proc/self/fd`), by which files are opened again.
    pub descriptors: File,
    /// Most descriptors of files that the guest may have.
    pub most_files: u64,
}

/// A session.
pub struct Session(Server<PassthroughFs>);

impl Session {
    /// Begins a session.
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn new(root: &Root) -> std::io::Result<Self> {
        let config = Config {
            entry_timeout: VALID,
            attr_timeout: VALID,
            cache_policy: CachePolicy::Auto,
            root_dir: root.path.to_owned(),
            proc_sfd_rawfd: Some(root.descriptors.try_clone()?),
            killpriv_v2: true,
            guest_fd_limit: root.most_files,
            // Each mount is a file system of its own for the guest, too: inode numbers differ, and
            // the guest forgets the files of one that it unmounts.
            announce_submounts: true,
            ..Config::default()
        };
        Ok(Self(Server::new(PassthroughFs::new(config)?)))
    }

    /// Answers a message. Returns the bytes of the reply.
    ///
    /// # Errors
    /// The message is not what FUSE messages are.
    pub fn handle(&self, reader: Reader<'_>, writer: Writer<'_>) -> virtiofsd::Result<usize> {
        // There is no window of shared memory (DAX) to map files into.
        self.0.handle_message(reader, writer, None::<&mut ()>)
    }
}
