//! The parts of a container that are made beside its configuration: its image, copies of files of
//! the host, and the file for its termination message.

use std::fs::File;
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use slipway_sandbox_api::copies::{MOST, MOST_BYTES, MOST_DIRS};
use slipway_sandbox_api::v1;

use super::TaskMaker;
use crate::containerd as cd;
use crate::copies::{self, Copy, Room};
use crate::reads::on_a_thread;
use crate::spec::{self, Container, Oci};
use crate::ttrpc::Failure;
use crate::{lazy, rootfs};

/// The parts of a container that are made beside its configuration.
#[derive(Default)]
pub(super) struct Content {
    /// The name of the image that is the container's alone, if there is one.
    pub private: Option<String>,
    /// The files of the host that it has copies of.
    pub copies: Vec<Copy>,
    /// The bytes of the guest's memory that all its copies take together.
    pub copied: usize,
    /// The host's file for its termination message.
    pub message: Option<File>,
    /// The name of the snapshot that was made of its checkpoint.
    pub snapshot: Option<String>,
}

impl TaskMaker<'_> {
    /// Adds to `run` what a container has beside its configuration: its streams, copies of files
    /// of the host, and its root.
    pub(super) async fn content(
        &self,
        request: &cd::CreateTaskRequest,
        oci: &Oci,
        container: Container<'_>,
        owner: &str,
        run: &mut v1::RunSpec,
    ) -> Result<Content, Failure> {
        run.terminal = request.terminal;
        run.stdin = !request.stdin.is_empty();
        // The next serving process goes on with it.
        run.keeps_input = run.stdin;
        let message = spec::message_file(&oci.mounts).filter(|_| container.in_pod);
        let mounts = spec::copied(&oci.mounts, container).map_err(Failure::invalid)?;
        let room = self.room(&mounts, run).await?;
        let shares = std::mem::take(&mut run.shares);
        let read = on_a_thread(self.reads, move || {
            let message = message.and_then(|path| open_message(&path));
            copies::read(mounts, shares, room).map(|read| (read, message))
        });
        let (read, message) = read.await?.map_err(Failure::invalid)?;
        let (copied, copies) = (read.bytes(), read.copies);
        (run.files, run.file_dirs, run.shares) = (read.files, read.dirs, read.shares);
        let root = self.root(request, oci, owner).await?;
        run.image = root.image.clone();
        run.image_digest = root.digest;
        let private = root.is_private.then_some(root.image);
        Ok(Content { private, copies, copied, message, snapshot: None })
    }

    /// Returns the room for copies of a container's mounts: what those of its pod's other
    /// containers and the pod's resolver configuration leave. An earlier daemon gives containers no
    /// directories of their own.
    async fn room(&self, mounts: &[spec::Mount], run: &v1::RunSpec) -> Result<Room, Failure> {
        let need_dirs = copies::need_dirs(mounts, &run.shares);
        let has_dirs = need_dirs && self.daemon.makes_file_dirs().await?;
        let taken = self.tasks.copied(&run.pod) + spec::MOST_RESOLVER;
        let dirs = if has_dirs { MOST_DIRS } else { 0 };
        Ok(Room { bytes: MOST_BYTES.saturating_sub(taken), files: MOST - 1, dirs })
    }

    /// Makes an image of a container's root, or finds it.
    pub(super) async fn root(
        &self,
        request: &cd::CreateTaskRequest,
        oci: &Oci,
        owner: &str,
    ) -> Result<rootfs::Root, Failure> {
        let root = rootfs::RootRequest {
            mounts: &request.rootfs,
            path: oci.root_path(),
            bundle: Path::new(&request.bundle),
            owner,
            image_name: oci.annotations.get(lazy::IMAGE_NAME).map(String::as_str),
        };
        rootfs::prepare(self.daemon, &root).await
    }
}

/// Opens the host's file for a termination message, once: its path may lead elsewhere when the
/// container ends. Without one that is a regular file, no message is written.
fn open_message(path: &Path) -> Option<File> {
    let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty()).ok()?);
    file.metadata().is_ok_and(|metadata| metadata.is_file()).then_some(file)
}
