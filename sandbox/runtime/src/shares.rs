//! Directories and files of the host in a sandbox's container.
//!
//! Each is a virtio file system device on a vfio-user socket. One process of the sandbox's own
//! serves all of them, `slipway-fs`, in the sandbox's control groups; a sandbox without shares has
//! none. It ends with its VMM's connections, outlives the daemon as the VMM does, and a later
//! daemon finds it by the control groups. If it is killed, requests of the guest are not answered,
//! and the sandbox goes on.

use std::ffi::OsString;
use std::fs::FileType;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use slipway_agent_protocol::v1 as agent_v1;
use slipway_hypervisor::{Helper, HelperSpec, VmSpec};
use slipway_plane_api::v1 as plane_v1;

use crate::copies::SYSTEM;
use crate::node::Node;
use crate::record::{Record, Share};
use crate::sandbox::Sandbox;
use crate::{Error, Result, sockets, v1};

/// The program that serves shares.
const PROGRAM: &str = "slipway-fs";
/// The name under which it serves a file, as the only entry of a directory.
const ENTRY: &str = "file";
/// Most shares of a sandbox. Each is a PCI function.
const MOST: usize = 16;
/// The longest path in a container, in bytes.
const LONGEST: usize = 1024;

/// Host memory for each share: requests under way, and their copies.
const MEMORY_EACH: u64 = 20 << 20;
/// Host memory for the process, and for what the kernel keeps of files that the guest knows.
const MEMORY: u64 = 64 << 20;
/// Threads of each share, and of the process.
const THREADS_EACH: u32 = 4;
const THREADS: u32 = 16;

/// Returns the host memory in bytes that the shares of a sandbox need.
pub fn memory(record: &Record) -> u64 {
    match record.shares.len() as u64 {
        0 => 0,
        count => MEMORY + count * MEMORY_EACH,
    }
}

/// Returns the number of threads that the shares of a sandbox need.
pub fn threads(record: &Record) -> u32 {
    match record.shares.len() as u32 {
        0 => 0,
        count => THREADS + count * THREADS_EACH,
    }
}

/// Checks the shares of a new sandbox. Waits for the disk.
///
/// # Errors
/// [`Error::Invalid`], which names the share.
pub fn check(shares: &[v1::Share]) -> Result<Vec<Share>> {
    if shares.len() > MOST {
        return Err(Error::Invalid(format!(
            "{} directories and files of the host are too many for one sandbox: at most {MOST}",
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
        let (source, kind) = source(&share.source).map_err(|why| refused(&why))?;
        checked.push(Share {
            source,
            path: share.path.clone(),
            read_only: share.read_only,
            is_file: is_file(kind).map_err(refused)?,
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
fn check_path(path: &str) -> std::result::Result<(), &'static str> {
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

/// Returns the sockets of the shares, in the order of the record.
pub fn sockets<'a>(node: &Node, record: &'a Record) -> impl Iterator<Item = PathBuf> + use<'a> {
    let run_dir = node.run_dir(&record.id);
    (0..record.shares.len()).map(move |number| run_dir.join(format!("share-{number}.sock")))
}

fn tag(number: usize) -> String {
    format!("share-{number}")
}

/// Returns the shares, as the agent mounts them.
pub fn for_agent(record: &Record) -> Vec<agent_v1::Share> {
    let shares = record.shares.iter().enumerate().map(|(number, share)| agent_v1::Share {
        tag: tag(number),
        path: share.path.clone(),
        read_only: share.read_only,
        entry: if share.is_file { ENTRY.to_owned() } else { String::new() },
    });
    shares.collect()
}

/// Starts the process that serves the sandbox's shares. When this returns, their sockets accept the
/// VMM. Returns the sockets; there is no process if there are none.
///
/// # Errors
/// [`Error::Hypervisor`](crate::Error) with the process's last words; [`Error::NoProgram`];
/// [`Error::File`].
pub async fn serve(
    node: &Node,
    sandbox: &Arc<Sandbox>,
    record: &Record,
    spec: &VmSpec,
    client: &plane_v1::ClientMemory,
) -> Result<Vec<PathBuf>> {
    let (Some(uid), false) = (record.vmm_uid, record.shares.is_empty()) else {
        return Ok(Vec::new());
    };
    let paths: Vec<PathBuf> = sockets(node, record).collect();
    let program = node.config.find_program(PROGRAM)?;
    let listeners = paths.clone();
    let listening = sandbox.lane.run(move || {
        let listen = |path: &PathBuf| {
            sockets::listen(path, uid).map_err(Error::file("cannot listen at", path))
        };
        listeners.iter().map(listen).collect::<Result<Vec<_>>>()
    });
    let passed: Vec<OwnedFd> = listening.await?.into_iter().map(OwnedFd::from).collect();
    let helper = HelperSpec {
        program,
        arguments: arguments(record, uid, client, &passed),
        passed,
        cgroup_procs: spec.cgroup_procs.clone(),
        log: node.run_dir(&record.id).join("shares.log"),
    };
    let helper = Helper::start(helper).await?;
    tracing::debug!(sandbox = sandbox.name, pid = helper.pid(), "its shares are served");
    let sandbox = Arc::downgrade(sandbox);
    tokio::spawn(async move {
        helper.ended().await;
        if let Some(sandbox) = sandbox.upgrade().filter(|one| one.vm().is_some()) {
            tracing::warn!(sandbox = sandbox.name, "the server of its shares has ended");
        }
    });
    Ok(paths)
}

fn arguments(
    record: &Record,
    uid: u32,
    client: &plane_v1::ClientMemory,
    listeners: &[OwnedFd],
) -> Vec<OsString> {
    let plane_v1::ClientMemory { limit_bytes, device, inode, shared_device, shared_inode } = client;
    let mut words: Vec<OsString> = vec!["--user".into(), uid.to_string().into()];
    words.extend(["--memory".into(), format!("{limit_bytes}:{device}:{inode}").into()]);
    if (*shared_device, *shared_inode) != (0, 0) {
        words.extend(["--pages".into(), format!("{shared_device}:{shared_inode}").into()]);
    }
    for (number, (share, listener)) in record.shares.iter().zip(listeners).enumerate() {
        words.extend(["--share".into(), tag(number).into()]);
        words.extend(["--source".into(), share.source.clone().into()]);
        words.extend(["--socket".into(), listener.as_raw_fd().to_string().into()]);
        words.extend(share.read_only.then(|| "--read-only".into()));
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::SandboxState;

    fn share(source: &str, path: &str) -> v1::Share {
        v1::Share { source: source.to_owned(), path: path.to_owned(), read_only: true }
    }

    fn refusal(shares: &[v1::Share]) -> String {
        check(shares).unwrap_err().to_string()
    }

    #[test]
    fn a_source_is_recorded_without_links() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        std::fs::create_dir(root.join("d")).unwrap();
        std::fs::write(root.join("d/f"), "x").unwrap();
        std::os::unix::fs::symlink("d", root.join("link")).unwrap();
        let at = |name: &str| root.join(name).to_str().unwrap().to_owned();
        let checked = check(&[share(&at("link"), "/a"), share(&at("link/f"), "/b/c")]).unwrap();
        let expected = |source: &str, path: &str, is_file| Share {
            source: at(source).into(),
            path: path.to_owned(),
            read_only: true,
            is_file,
        };
        assert_eq!(checked, [expected("d", "/a", false), expected("d/f", "/b/c", true)]);
    }

    #[test]
    fn what_cannot_be_shared_is_refused() {
        for path in ["a", "", "/", "/a/../b", "/proc/a", "/sys", "/dev/x", "/a\0b"] {
            assert!(refusal(&[share("/tmp", path)]).starts_with("cannot share"), "{path}");
        }
        assert!(refusal(&[share("tmp", "/a")]).contains("not an absolute"));
        assert!(refusal(&[share("/no/such", "/a")]).contains("No such file"));
        assert!(refusal(&[share("/dev/null", "/a")]).contains("neither a directory"));
        assert!(refusal(&[share("/tmp", "/a"), share("/", "/a")]).contains("two with this path"));
        assert!(refusal(&vec![share("/tmp", "/a"); MOST + 1]).contains("at most 16"));
    }

    #[test]
    fn each_share_has_a_tag_and_a_socket() {
        let one = |is_file| Share {
            source: "/s p".into(),
            path: "/p".to_owned(),
            read_only: is_file,
            is_file,
        };
        let record = Record {
            shares: vec![one(false), one(true)],
            ..crate::adopt::tests::record_of(SandboxState::Running)
        };
        let agents = for_agent(&record);
        assert_eq!((agents[0].tag.as_str(), agents[0].entry.as_str()), ("share-0", ""));
        assert_eq!((agents[1].tag.as_str(), agents[1].entry.as_str()), ("share-1", "file"));
        let (first, second) = std::os::unix::net::UnixStream::pair().unwrap();
        let listeners = [OwnedFd::from(first), OwnedFd::from(second)];
        let client = plane_v1::ClientMemory {
            limit_bytes: 1,
            device: 2,
            inode: 3,
            ..plane_v1::ClientMemory::default()
        };
        let words = arguments(&record, 7, &client, &listeners);
        let words: Vec<_> = words.iter().map(|word| word.to_str().unwrap()).collect();
        let [a, b] = listeners.map(|fd| fd.as_raw_fd());
        let expected = format!(
            "--user|7|--memory|1:2:3|--share|share-0|--source|/s p|--socket|{a}|--share|share-1|\
             --source|/s p|--socket|{b}|--read-only"
        );
        assert_eq!(words.join("|"), expected);
        let none = crate::adopt::tests::record_of(SandboxState::Running);
        assert_eq!((memory(&none), threads(&none)), (0, 0));
        assert!(memory(&record) > memory(&Record { shares: vec![one(true)], ..none }));
    }
}
