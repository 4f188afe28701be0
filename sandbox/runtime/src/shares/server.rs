//! The process that serves the shares of one sandbox: its start, its function, and the trees that
//! it has.
//!
//! A sandbox with shares of its own has the process, and the function, from its start, or, as a
//! fork, once its guest goes on. A pod gets both with the first container that has shares, and
//! keeps them. The record says how far that
//! came, so that a daemon which takes over knows whether a process that it finds serves the guest.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use slipway_hypervisor::{Helper, HelperFiles, HelperSpec, Tree};

use super::{DIRECTORY, TAG, socket};
use crate::cgroup;
use crate::node::Node;
use crate::proc::{self, Owned};
use crate::record::{ClientMemory, MountedTree, Record, Share, ShareServer, TreeIdentity};
use crate::sandbox::Sandbox;
use crate::{Error, Result, memory, sockets};

/// The program that serves shares.
const PROGRAM: &str = "slipway-fs";
/// The name of the function that a guest which runs is given, for its VMM.
const FUNCTION: &str = "shares";
/// The time that a process which is killed may take to end.
const END: Duration = Duration::from_secs(5);

/// Starts the process of a sandbox that begins with shares, and mounts them there. When this
/// returns, its socket accepts the VMM.
///
/// # Errors
/// [`Error::Hypervisor`] with the process's last words; [`Error::NoProgram`]; [`Error::File`] with
/// a share that cannot be mounted.
pub(super) async fn start_first(
    node: &Node,
    sandbox: &Arc<Sandbox>,
    cgroup_procs: &[PathBuf],
    memory: ClientMemory,
) -> Result<()> {
    let files = Arc::new(start(node, sandbox, cgroup_procs.to_vec(), memory).await?);
    attach_own(sandbox, &files).await?;
    sandbox.update(|record| record.share_server = ShareServer::Serving).await
}

/// Starts the process of a fork with shares of its own, gives the guest its function, and mounts
/// the shares.
///
/// # Errors
/// As [`start_first`] and [`of_pod`].
pub(super) async fn start_later(node: &Node, sandbox: &Arc<Sandbox>) -> Result<()> {
    sandbox.update(|record| record.share_server = ShareServer::Starting).await?;
    let files = Arc::new(plug(node, sandbox).await?);
    attach_own(sandbox, &files).await
}

/// Mounts the shares of a sandbox's own container in the process's directory.
async fn attach_own(sandbox: &Sandbox, files: &Arc<HelperFiles>) -> Result<()> {
    let shares = sandbox.look(|record| record.shares.clone());
    for (position, share) in shares.iter().enumerate() {
        let tree = clone(sandbox, share).await?;
        let mounted = next(sandbox, &tree);
        sandbox.note(|record| record.shares[position].tree = Some(mounted));
        attach(sandbox, files, mounted.number, tree, share).await?;
    }
    Ok(())
}

/// Returns the files of the process that serves a pod's guest. Starts the process and gives the
/// guest its function if there is none yet. The caller holds the pod's turn.
///
/// # Errors
/// As [`start_first`]; [`Error::Hypervisor`] if the VMM takes no function; [`Error::Agent`] if the
/// process has ended.
pub(super) async fn of_pod(node: &Node, sandbox: &Arc<Sandbox>) -> Result<HelperFiles> {
    match sandbox.look(|record| record.share_server) {
        ShareServer::Serving => {
            let found = find(node, sandbox).await;
            let ended = || {
                let why = "the server of the pod's shares has ended; a new pod has a new one";
                Error::Agent(why.to_owned())
            };
            return found.map(|process| HelperFiles::new(process, DIRECTORY)).ok_or_else(ended);
        }
        ShareServer::Starting => end(node, sandbox).await,
        ShareServer::None => {}
    }
    sandbox.update(|record| record.share_server = ShareServer::Starting).await?;
    let plugged = plug(node, sandbox).await;
    if plugged.is_err() {
        end(node, sandbox).await;
        sandbox.update(|record| record.share_server = ShareServer::None).await?;
    }
    plugged
}

/// Starts the process for a guest that runs, and has the VMM give the guest its function.
async fn plug(node: &Node, sandbox: &Arc<Sandbox>) -> Result<HelperFiles> {
    let vm = sandbox.live_vm()?;
    let memory = sandbox.look(|record| record.plugged.client_memory).ok_or_else(|| {
        Error::Agent("the sandbox is of an earlier version, which shares nothing".to_owned())
    })?;
    let groups = cgroup::procs_files(sandbox).await;
    let files = start(node, sandbox, groups, memory).await?;
    let path = socket(node, &sandbox.id);
    vm.plug(FUNCTION, &path).await?;
    let record = vm.record();
    let saved = sandbox.update(|kept| {
        kept.share_server = ShareServer::Serving;
        kept.vm = Some(record);
    });
    saved.await?;
    Ok(files)
}

/// Starts the process. It ends with its VMM's connection, outlives the daemon as the VMM does, and
/// a later daemon finds it by the control groups.
async fn start(
    node: &Node,
    sandbox: &Arc<Sandbox>,
    cgroup_procs: Vec<PathBuf>,
    memory: ClientMemory,
) -> Result<HelperFiles> {
    let record = sandbox.record();
    let uid = record.vmm_uid.ok_or_else(|| sandbox.wrong_state("it has no microVM"))?;
    let program = node.config.find_program(PROGRAM)?;
    let path = socket(node, &record.id);
    let listener = sandbox.lane.run(move || {
        // An earlier process may have been killed before it served.
        let _ = std::fs::remove_file(&path);
        sockets::listen(&path, uid).map_err(Error::file("cannot listen at", &path))
    });
    let listener = listener.await?;
    let file = match &record.template {
        Some(_) => Some(memory::complete(node, memory).await?),
        None => None,
    };
    let helper = HelperSpec {
        program,
        arguments: arguments(uid, memory, file.as_ref(), &listener),
        passed: [Some(listener), file].into_iter().flatten().collect(),
        cgroup_procs,
        log: node.run_dir(&record.id).join("shares.log"),
    };
    let helper = Helper::start(helper).await?;
    tracing::debug!(sandbox = sandbox.name, pid = helper.pid(), "its shares are served");
    let files = HelperFiles::new(helper.pidfd()?, DIRECTORY);
    let sandbox = Arc::downgrade(sandbox);
    tokio::spawn(async move {
        helper.ended().await;
        if let Some(sandbox) = sandbox.upgrade().filter(|one| one.vm().is_some()) {
            tracing::warn!(sandbox = sandbox.name, "the server of its shares has ended");
        }
    });
    Ok(files)
}

fn arguments(
    uid: u32,
    memory: ClientMemory,
    file_of_memory: Option<&OwnedFd>,
    listener: &OwnedFd,
) -> Vec<OsString> {
    let ClientMemory { limit_bytes, file, shared } = memory;
    let mut words: Vec<OsString> = vec!["--user".into(), uid.to_string().into()];
    words.extend(["--memory".into(), format!("{limit_bytes}:{}:{}", file.0, file.1).into()]);
    if let Some(file) = file_of_memory {
        words.extend(["--file".into(), file.as_raw_fd().to_string().into()]);
    }
    if shared != (0, 0) {
        words.extend(["--pages".into(), format!("{}:{}", shared.0, shared.1).into()]);
    }
    words.extend(["--tag".into(), TAG.into()]);
    words.extend(["--socket".into(), listener.as_raw_fd().to_string().into()]);
    words
}

/// Clones what a share has of the host.
pub(super) async fn clone(sandbox: &Sandbox, share: &Share) -> Result<Tree> {
    let its = share.clone();
    let tree = sandbox.looks.run(&share.source, move || open(&its)).await?;
    tree.map_err(Error::file("cannot share", &share.source))
}

/// Opens the source of a share. One that is a file must have stayed one: the guest is told the path
/// of a file in a directory of the daemon's, and in one of the source's own that could be a link to
/// the guest's own files.
fn open(share: &Share) -> io::Result<Tree> {
    let tree = Tree::open(&share.source, share.access())?;
    match tree.is_file() == share.is_file {
        true => Ok(tree),
        false if share.is_file => Err(io::Error::other("it was a regular file, and is none now")),
        false => Err(io::Error::other("it was a directory, and is none now")),
    }
}

/// Returns a new number for a tree. None is used twice: a guest that has not noticed yet that a
/// tree is gone would take the new one for it.
pub(super) fn next(sandbox: &Sandbox, tree: &Tree) -> MountedTree {
    let mut number = 0;
    sandbox.note(|record| {
        number = record.trees;
        record.trees = record.trees.wrapping_add(1);
    });
    let (mount, device, inode) = tree.identity();
    MountedTree { number, identity: TreeIdentity(mount, device, inode) }
}

/// Mounts a tree in the process's directory. Asks no file system of a share.
pub(super) async fn attach(
    sandbox: &Sandbox,
    files: &Arc<HelperFiles>,
    number: u32,
    tree: Tree,
    share: &Share,
) -> Result<()> {
    let (files, source) = (Arc::clone(files), share.source.clone());
    let attached = sandbox
        .lane
        .run(move || files.attach(number, &tree).map_err(Error::file("cannot share", &source)));
    attached.await
}

/// Unmounts trees from the process's directory. They are gone if the process has ended.
pub(super) async fn detach(node: &Node, sandbox: &Sandbox, numbers: Vec<u32>) {
    let Some(process) = find(node, sandbox).await else { return };
    let name = sandbox.name.clone();
    let detached = sandbox.lane.run(move || {
        let files = HelperFiles::new(process, DIRECTORY);
        for number in numbers {
            match files.detach(number) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::warn!(sandbox = name, number, %error, "a share stays mounted");
                }
                _ => {}
            }
        }
    });
    detached.await;
}

/// Finds the process.
async fn find(node: &Node, sandbox: &Sandbox) -> Option<OwnedFd> {
    let (cgroup, run_dir) = (sandbox.look(cgroup::path), node.run_dir(&sandbox.id));
    let uid = sandbox.look(|record: &Record| record.vmm_uid)?;
    let found = sandbox.lane.run(move || {
        proc::find_helper(&Owned { uid, shares: true, run_dir: &run_dir, cgroup: &cgroup })
    });
    found.await
}

/// Ends a process that does not serve the guest.
async fn end(node: &Node, sandbox: &Sandbox) {
    let (cgroup, run_dir) = (sandbox.look(cgroup::path), node.run_dir(&sandbox.id));
    let ended = sandbox.lane.run(move || {
        // No user has this id: the VMM is not the helper.
        let owned = Owned { uid: u32::MAX, shares: true, run_dir: &run_dir, cgroup: &cgroup };
        proc::kill_all(&owned, END)
    });
    if !ended.await {
        tracing::warn!(sandbox = sandbox.name, "a server of shares is left");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_must_stay_what_it_was() {
        if !rustix::process::geteuid().is_root() {
            println!("SKIPPED: a_source_must_stay_what_it_was: needs root");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "x").unwrap();
        let opened = |source: &std::path::Path, is_file| {
            let share = Share { source: source.to_owned(), is_file, ..Share::default() };
            open(&share).map(|tree| tree.is_file()).map_err(|error| error.to_string())
        };
        assert_eq!((opened(&file, true), opened(dir.path(), false)), (Ok(true), Ok(false)));
        assert!(opened(dir.path(), true).unwrap_err().contains("was a regular file"));
        assert!(opened(&file, false).unwrap_err().contains("was a directory"));
    }

    #[test]
    fn the_process_is_told_whom_it_serves() {
        let (listener, _) = std::os::unix::net::UnixStream::pair().unwrap();
        let listener = OwnedFd::from(listener);
        let words = |memory, file| {
            let words = arguments(7, memory, file, &listener);
            words.iter().map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" ")
        };
        let memory = ClientMemory { limit_bytes: 1, file: (2, 3), shared: (0, 0) };
        let socket = listener.as_raw_fd();
        let expected = format!("--user 7 --memory 1:2:3 --tag shares --socket {socket}");
        assert_eq!(words(memory, None), expected);
        let pages = words(ClientMemory { shared: (4, 5), ..memory }, None);
        assert!(pages.contains("--pages 4:5"), "{pages}");
        let fork = words(memory, Some(&listener));
        assert!(fork.contains(&format!("--memory 1:2:3 --file {socket} ")), "{fork}");
    }
}
