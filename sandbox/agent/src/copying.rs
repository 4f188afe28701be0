//! Files that the host copies out of a container and into it, while it runs: `slipway cp`.
//!
//! The agent reads and writes them itself, by `slipway-tar-tree`: an image needs no `tar`. That
//! happens on a thread which has entered the container's mount namespace, so that volumes and other
//! mounts are there as the container's programs see them. Paths are resolved in the container's
//! root, out of which no link leads. The archive goes through a short queue, so that a host that
//! takes nothing has the thread wait. The wait ends with the container: the thread would keep the
//! mounts of a container that is removed, and with them its disks.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use rustix::fs::{Mode, OFlags};
use rustix::thread::{ThreadNameSpaceType, move_into_thread_name_spaces};
use slipway_agent_protocol::v1::{
    CopyFound, CopyInRequest, CopyInTo, CopyOutReply, CopyOutRequest, LeftOut, copy_in_request,
    copy_out_reply,
};
use slipway_tar_tree::{PieceReader, PieceWriter, Rules, Source, find, pack, place, unpack};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use crate::container::Container;
use crate::copies;
use crate::process::Process;
use crate::statuses::precondition;

/// The most pieces of an archive that wait.
const QUEUE: usize = 4;

/// The replies of a copy out of a container.
pub type Outgoing = ReceiverStream<Result<CopyOutReply, Status>>;
type Sender = mpsc::Sender<Result<CopyOutReply, Status>>;

/// The container at the guest's end of a copy.
pub struct Copied {
    /// A pidfd of the first process.
    process: OwnedFd,
    main: Arc<Process>,
    runtime: Handle,
}

impl Copied {
    /// Returns the end of a copy in `container`. The caller must be in the agent's runtime.
    ///
    /// # Errors
    /// The container does not run.
    pub fn of(container: &Container) -> Result<Self> {
        let (process, main) = (container.first_process()?, Arc::clone(&container.main));
        Ok(Self { process, main, runtime: Handle::current() })
    }

    /// Has a thread of its own wait for `exchanged`, a message to the host or from it.
    ///
    /// # Errors
    /// The container has ended.
    fn wait<T>(&self, exchanged: impl Future<Output = T>) -> io::Result<T> {
        self.runtime.block_on(async {
            tokio::select! {
                biased;
                _ = self.main.ended() => Err(io::Error::other("the container has ended")),
                exchanged = exchanged => Ok(exchanged),
            }
        })
    }
}

/// Sends what `request` names from a container. Dropping the replies ends that, and so does the end
/// of the container.
pub fn copy_out(container: Copied, request: CopyOutRequest) -> Outgoing {
    let (sender, replies) = mpsc::channel(QUEUE);
    tokio::spawn(async move {
        let own = sender.clone();
        let sent = copies::within(move || send(&container, &request, &own)).await;
        if let Err(error) = sent {
            // Without a receiver nobody asks any more.
            let _ = sender.send(Err(precondition(error))).await;
        }
    });
    ReceiverStream::new(replies)
}

/// Packs and sends a file or directory. Runs on a thread of its own.
fn send(container: &Copied, request: &CopyOutRequest, sender: &Sender) -> Result<()> {
    let reply = |kind| {
        let sent = container.wait(sender.send(Ok(CopyOutReply { kind: Some(kind) })));
        sent.and_then(|sent| sent.map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe)))
    };
    let root = enter(&container.process)?;
    let found = find(root.as_fd(), Path::new(&request.path), request.follow)?;
    reply(copy_out_reply::Kind::Found(CopyFound { directory: found.is_directory() }))?;
    let writer = PieceWriter::new(|piece| reply(copy_out_reply::Kind::Data(piece)));
    let left_out = pack(&found, Path::new(OsStr::from_bytes(&request.name)), writer)?;
    Ok(reply(copy_out_reply::Kind::End(message(left_out)))?)
}

/// Unpacks the archive that follows in `input` at the place that `to` names, in a container.
/// Returns what was left out.
///
/// # Errors
/// There is no such place, the archive is malformed or does not come to its end, a file cannot be
/// made, or the container ends. The files before that are there.
pub async fn copy_in(
    container: Copied,
    to: CopyInTo,
    input: Streaming<CopyInRequest>,
) -> Result<LeftOut> {
    let (sender, pieces) = mpsc::channel(QUEUE);
    let taking = tokio::spawn(take_in(input, sender));
    let unpacked = copies::within(move || receive(&container, &to, pieces)).await;
    taking.abort();
    unpacked
}

/// Carries the pieces of an archive to the thread that unpacks it. `None` comes last: the archive
/// is whole.
async fn take_in(mut input: Streaming<CopyInRequest>, sender: mpsc::Sender<Option<Vec<u8>>>) {
    while let Ok(Some(message)) = input.message().await {
        let piece = match message.kind {
            Some(copy_in_request::Kind::Data(data)) => Some(data),
            Some(copy_in_request::Kind::End(_)) => None,
            _ => return,
        };
        let last = piece.is_none();
        if sender.send(piece).await.is_err() || last {
            return;
        }
    }
}

/// Unpacks an archive. Runs on a thread of its own.
fn receive(
    container: &Copied,
    to: &CopyInTo,
    mut pieces: mpsc::Receiver<Option<Vec<u8>>>,
) -> Result<LeftOut> {
    let root = enter(&container.process)?;
    let source = to.source.as_ref().map(|source| Source {
        is_directory: source.directory,
        is_contents: source.contents,
        name: OsStr::from_bytes(&source.name),
    });
    let place = place(root.as_fd(), Path::new(&to.path), source)?;
    let reader = PieceReader::new(|| {
        let broken = || io::Error::new(io::ErrorKind::UnexpectedEof, "it breaks off");
        container.wait(pieces.recv()).and_then(|piece| piece.ok_or_else(broken))
    });
    let left_out = unpack(reader, &place, Rules::of_host(to.owners))?;
    Ok(message(left_out))
}

/// Returns the root of a process's container, with what is mounted in it. The calling thread is in
/// the container's mount namespace from then on, with an empty umask.
fn enter(process: &OwnedFd) -> Result<OwnedFd> {
    copies::empty_umask()?;
    move_into_thread_name_spaces(process.as_fd(), ThreadNameSpaceType::MOUNT)
        .context("joining the container's mount namespace")?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open("/", flags, Mode::empty()).context("the container's root")
}

fn message(left_out: slipway_tar_tree::LeftOut) -> LeftOut {
    LeftOut { count: left_out.count, first: left_out.first }
}
