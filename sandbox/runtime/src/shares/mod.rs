//! Directories and files of the host in containers.
//!
//! All that a sandbox's containers have of the host's files is in one virtio file system device, on
//! a vfio-user socket. One process of the sandbox's own serves it, `slipway-fs`, in the sandbox's
//! control groups; a sandbox without shares has none. The daemon mounts each share as a tree in
//! that process's directory, under a number, and the agent mounts that entry in the container
//! ([`server`]). Containers of a pod that share the same thing share the tree. A fork is given the
//! device once its guest goes on, since no template has one.
//!
//! If the process is killed, requests of the guest are not answered, and the sandbox goes on.
//!
//! A new option of a share is a field of `Share` in `sandbox.proto` and, with `#[serde(default)]`,
//! of the record's (`record/share.rs`), which [`check`] fills in. `front/cli` parses it in
//! `volume`, `front/shim` in `spec/mounts`. What it changes on the host is in [`server`], where
//! trees are mounted ([`slipway_hypervisor::Tree`]); in the guest it is a field of `Share` in
//! `agent.proto`, which [`for_agent`] fills in and the agent's `shares` reads. `docs/sandboxes.md`,
//! `docs/containerd.md`; `tests/e2e/73-shares.sh`, `73-pod-shares.sh`.

mod server;

use std::fs::FileType;
use std::os::unix::fs::FileTypeExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use slipway_agent_protocol::v1 as agent_v1;
use slipway_hypervisor::ENTRY;
use slipway_plane_api::v1 as plane_v1;

use crate::copies::SYSTEM;
use crate::look::Looks;
use crate::node::Node;
use crate::record::{ClientMemory, MountedTree, Record, Share, ShareServer};
use crate::sandbox::Sandbox;
use crate::target::Target;
use crate::{Error, Result, v1};

/// The tag by which a guest finds the device.
const TAG: &str = "shares";
/// The directory of the process in which trees are mounted.
const DIRECTORY: &str = "/shares";
/// Most shares of a container.
const MOST: usize = 64;
/// Most trees of the containers of a pod.
const MOST_TREES: usize = 512;
/// The longest path in a container, in bytes.
const LONGEST: usize = 1024;

/// Host memory for the process: requests under way and their copies, and what the kernel keeps of
/// files that the guest knows.
const MEMORY: u64 = 128 << 20;
/// Threads of the process.
const THREADS: u32 = 24;

/// Returns the host memory in bytes that the shares of a sandbox may need.
pub fn memory(record: &Record) -> u64 {
    if record.may_share() { MEMORY } else { 0 }
}

/// Returns the number of threads that the shares of a sandbox may need.
pub fn threads(record: &Record) -> u32 {
    if record.may_share() { THREADS } else { 0 }
}

/// Checks the shares of a new container.
///
/// # Errors
/// [`Error::Invalid`], which names the share; [`Error::File`] if its file system does not answer.
pub async fn check(looks: &Looks, shares: &[v1::Share]) -> Result<Vec<Share>> {
    if shares.len() > MOST {
        return Err(Error::Invalid(format!(
            "{} directories and files of the host are too many for one container: at most {MOST}",
            shares.len()
        )));
    }
    let mut checked: Vec<Share> = Vec::new();
    for share in shares {
        let refused = |why: &str| {
            let v1::Share { source, path, .. } = share;
            Error::Invalid(format!("cannot share {source:?} at {path:?}: {why}"))
        };
        check_path(&share.path).map_err(refused)?;
        if checked.iter().any(|one| one.path == share.path) {
            return Err(refused("there are two with this path"));
        }
        let path = share.source.clone();
        let found = looks.run(Path::new(&share.source), move || source(&path)).await?;
        let (source, kind) = found.map_err(|why| refused(&why))?;
        checked.push(Share {
            source,
            path: share.path.clone(),
            read_only: share.read_only,
            below: share.below,
            below_read_only: share.below && share.below_read_only,
            later: share.below && share.later,
            is_file: is_file(kind).map_err(refused)?,
            tree: None,
        });
    }
    Ok(checked)
}

/// Returns the path of a source without symbolic links, and its type.
fn source(path: &str) -> std::result::Result<(PathBuf, FileType), String> {
    if !path.starts_with('/') {
        return Err("the path on the host is not an absolute one".to_owned());
    }
    let full = std::fs::canonicalize(path).map_err(|error| error.to_string())?;
    let kind = std::fs::symlink_metadata(&full).map_err(|error| error.to_string())?.file_type();
    Ok((full, kind))
}

fn is_file(kind: FileType) -> std::result::Result<bool, &'static str> {
    match kind {
        kind if kind.is_dir() => Ok(false),
        kind if kind.is_file() => Ok(true),
        kind if kind.is_block_device() => Err("it is a disk; `--volume file:PATH` takes it"),
        _ => Err("it is neither a directory nor a regular file"),
    }
}

/// Checks that `path` can be mounted on: absolute, with plain names only.
pub(crate) fn check_path(path: &str) -> std::result::Result<(), &'static str> {
    let mut parts = Path::new(path).components();
    if parts.next() != Some(Component::RootDir) {
        return Err("the path in the container is not an absolute one");
    }
    let plain = |part: Component<'_>| matches!(part, Component::Normal(_));
    let named = parts.clone().next().is_some();
    if !named || !parts.all(plain) || path.contains('\0') || path.len() > LONGEST {
        return Err("that is no path in the container that can be mounted on");
    }
    if SYSTEM.iter().any(|one| Path::new(path).starts_with(one)) {
        return Err("a file system of the container's own is there");
    }
    Ok(())
}

/// Returns the path of the socket of a sandbox's shares.
fn socket(node: &Node, id: &str) -> PathBuf {
    node.run_dir(id).join("shares.sock")
}

/// Returns the socket of the function that a sandbox has from its start.
pub fn first_socket(node: &Node, record: &Record) -> Option<PathBuf> {
    record.begins_with_shares().then(|| socket(node, &record.id))
}

/// Returns the mounted shares of a container, as the agent mounts them.
pub fn for_agent(shares: &[Share]) -> Vec<agent_v1::Share> {
    let shares = shares.iter().filter_map(|share| {
        let MountedTree { number, .. } = share.tree?;
        Some(agent_v1::Share {
            tag: TAG.to_owned(),
            path: share.path.clone(),
            read_only: share.all_read_only(),
            entry: if share.is_file { format!("{number}/{ENTRY}") } else { number.to_string() },
            file: share.is_file,
        })
    });
    shares.collect()
}

/// Starts the process that serves the shares with which a sandbox begins. When this returns, its
/// socket accepts the VMM. Returns the socket; there is no process if there are no shares.
///
/// # Errors
/// [`Error::Hypervisor`] with the process's last words; [`Error::NoProgram`]; [`Error::File`] with
/// a share that cannot be mounted.
pub async fn serve(
    node: &Node,
    sandbox: &Arc<Sandbox>,
    cgroup_procs: &[PathBuf],
    client: &plane_v1::ClientMemory,
) -> Result<Option<PathBuf>> {
    let first = sandbox.look(|record| first_socket(node, record));
    if first.is_some() {
        server::start_first(node, sandbox, cgroup_procs, ClientMemory::from(client)).await?;
    }
    Ok(first)
}

/// Gives a fork whose guest goes on the function of shares, with those of its own container.
///
/// # Errors
/// As [`serve`]; the pool cannot complete the fork's memory, or the VMM takes no further function.
pub async fn add(node: &Node, sandbox: &Arc<Sandbox>) -> Result<()> {
    server::start_later(node, sandbox).await
}

/// Mounts the shares of a container of a pod where the pod's process serves them.
///
/// # Errors
/// As [`serve`]; the VMM takes no further function, or the process has ended. [`leave`] releases
/// what was mounted.
pub async fn join(node: &Node, target: &Target) -> Result<()> {
    let (sandbox, name) = (&target.sandbox, &target.container.name);
    let shares = of_added(sandbox, name);
    if shares.is_empty() {
        return Ok(());
    }
    let _turn = sandbox.shares.lock().await;
    let files = Arc::new(server::of_pod(node, sandbox).await?);
    for (position, share) in shares.iter().enumerate() {
        let tree = server::clone(sandbox, share).await?;
        let (found, count) = sandbox.look(|record| {
            let (mount, device, inode) = tree.identity();
            (same(record, share, (mount, device, inode)), trees(record).count())
        });
        if count >= MOST_TREES {
            let name = sandbox.name.clone();
            return Err(Error::Busy { name, what: "shares", most: MOST_TREES });
        }
        let mounted = found.unwrap_or_else(|| server::next(sandbox, &tree));
        let set = |tree| {
            move |record: &mut Record| {
                if let Some(added) = record.added_mut(name) {
                    added.shares[position].tree = tree;
                }
            }
        };
        // Recorded before it is mounted, so that a later daemon releases it.
        sandbox.update(set(Some(mounted))).await?;
        if found.is_none()
            && let Err(error) = server::attach(sandbox, &files, mounted.number, tree, share).await
        {
            // No other container takes it for one that is mounted.
            sandbox.note(set(None));
            return Err(error);
        }
    }
    Ok(())
}

/// Unmounts what a container of a pod has of the host's files, unless other containers have it too.
pub async fn leave(node: &Node, target: &Target) {
    let (sandbox, name) = (&target.sandbox, &target.container.name);
    let _turn = sandbox.shares.lock().await;
    let own = of_added(sandbox, name).into_iter().filter_map(|share| share.tree);
    let own: Vec<u32> = own.map(|tree| tree.number).collect();
    if own.is_empty() || sandbox.look(|record| record.share_server) == ShareServer::None {
        return;
    }
    sandbox.note(|record| {
        if let Some(added) = record.added_mut(name) {
            added.shares.iter_mut().for_each(|share| share.tree = None);
        }
    });
    let left = |number: &u32| sandbox.look(|record| trees(record).all(|one| one.number != *number));
    let unused = own.into_iter().filter(left).collect();
    server::detach(node, sandbox, unused).await;
}

fn of_added(sandbox: &Sandbox, name: &str) -> Vec<Share> {
    sandbox.look(|record| record.added(name).map(|added| added.shares.clone()).unwrap_or_default())
}

/// Returns the trees that containers of a pod have; one that several have is there several times.
fn trees(record: &Record) -> impl Iterator<Item = MountedTree> {
    record.added.iter().flat_map(|added| &added.shares).filter_map(|share| share.tree)
}

/// Finds the tree that another container has of the same thing, with the same access.
fn same(record: &Record, share: &Share, identity: (u64, u64, u64)) -> Option<MountedTree> {
    let all = record.added.iter().flat_map(|added| &added.shares);
    let mut like = all.filter(|one| one.access() == share.access()).filter_map(|one| one.tree);
    like.find(|tree| (tree.identity.0, tree.identity.1, tree.identity.2) == identity)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adopt::tests::{added_of, record_of};
    use crate::fork::cannot_fork;
    use crate::record::{Added, SandboxState, TreeIdentity};

    fn share(source: &str, path: &str) -> v1::Share {
        let (source, path) = (source.to_owned(), path.to_owned());
        v1::Share { source, path, read_only: true, ..v1::Share::default() }
    }

    async fn refusal(shares: &[v1::Share]) -> String {
        check(&Looks::new(1), shares).await.unwrap_err().to_string()
    }

    #[tokio::test]
    async fn a_source_is_recorded_without_links() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        std::fs::create_dir(root.join("d")).unwrap();
        std::fs::write(root.join("d/f"), "x").unwrap();
        std::os::unix::fs::symlink("d", root.join("link")).unwrap();
        let at = |name: &str| root.join(name).to_str().unwrap().to_owned();
        let shares = [share(&at("link"), "/a"), share(&at("link/f"), "/b/c")];
        let checked = check(&Looks::new(1), &shares).await.unwrap();
        let expected = |source: &str, path: &str, is_file| Share {
            source: at(source).into(),
            path: path.to_owned(),
            read_only: true,
            is_file,
            ..Share::default()
        };
        assert_eq!(checked, [expected("d", "/a", false), expected("d/f", "/b/c", true)]);
    }

    #[tokio::test]
    async fn what_cannot_be_shared_is_refused() {
        for path in ["a", "", "/", "/a/../b", "/proc/a", "/sys", "/dev/x", "/a\0b"] {
            assert!(refusal(&[share("/tmp", path)]).await.starts_with("cannot share"), "{path}");
        }
        assert!(refusal(&[share("tmp", "/a")]).await.contains("not an absolute"));
        assert!(refusal(&[share("/no/such", "/a")]).await.contains("No such file"));
        assert!(refusal(&[share("/dev/null", "/a")]).await.contains("neither a directory"));
        assert!(
            refusal(&[share("/tmp", "/a"), share("/", "/a")]).await.contains("two with this path")
        );
        assert!(refusal(&vec![share("/tmp", "/a"); MOST + 1]).await.contains("at most 64"));
    }

    #[test]
    fn a_share_is_an_entry_of_the_device() {
        let identity = TreeIdentity(1, 2, 3);
        let mounted = |number, is_file| Share {
            path: "/p".to_owned(),
            is_file,
            tree: Some(MountedTree { number, identity }),
            ..Share::default()
        };
        let agents = for_agent(&[mounted(7, false), mounted(8, true), Share::default()]);
        let entries: Vec<_> = agents.iter().map(|one| (one.entry.as_str(), one.file)).collect();
        assert_eq!(entries, [("7", false), ("8/file", true)]);
        // A guest's mount passes its flags on to mounts below it.
        for (below, below_read_only, expected) in
            [(false, false, true), (true, true, true), (true, false, false)]
        {
            let share = Share { read_only: true, below, below_read_only, ..mounted(1, false) };
            assert_eq!(for_agent(&[share])[0].read_only, expected);
        }
        let none = record_of(SandboxState::Running);
        assert_eq!((memory(&none), threads(&none), none.begins_with_shares()), (0, 0, false));
        let own = Record { shares: vec![Share::default()], ..none.clone() };
        assert!(memory(&own) > 0 && threads(&own) > 0 && own.begins_with_shares());
        let fork = Record { template: Some("web".to_owned()), ..own };
        assert!(memory(&fork) > 0 && threads(&fork) > 0);
        assert_eq!((fork.begins_with_shares(), fork.forks_with_shares()), (false, true));
        assert_eq!(cannot_fork(&fork), None);
        let pod = Record { pod: true, ..none };
        assert!(memory(&pod) > 0 && !pod.begins_with_shares() && !pod.forks_with_shares());
    }

    #[test]
    fn containers_share_the_tree_of_the_same_thing() {
        let identity = TreeIdentity(1, 2, 3);
        let share = |read_only, tree| Share { read_only, tree, ..Share::default() };
        let mounted = MountedTree { number: 4, identity };
        let shares = vec![share(true, Some(mounted))];
        let added = Added { shares, ..added_of("a", SandboxState::Running) };
        let record = Record { added: vec![added], ..record_of(SandboxState::Running) };
        assert_eq!(same(&record, &share(true, None), (1, 2, 3)), Some(mounted));
        assert_eq!(same(&record, &share(false, None), (1, 2, 3)), None);
        assert_eq!(same(&record, &share(true, None), (1, 2, 4)), None);
        assert_eq!(trees(&record).count(), 1);
    }
}
