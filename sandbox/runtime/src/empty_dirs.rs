//! Directories of a pod's guest that its containers share by name: Kubernetes' `emptyDir` volumes.
//!
//! The first container with one in memory has the agent mount a tmpfs, or a hugetlbfs. All others
//! of a pod are on one disk, which the pod gets with the first container that has one: a namespace
//! of its first function, like the disks of its containers, over a sparse file among the pod's own.
//! The file leaves a part of its file system to others: kubelet does not count it, and would let
//! the guests of a node fill the file system. In a tmpfs their data would be the guest's memory,
//! and in a volatile layer (`layers`) the host's; they may be larger than either, and Kubernetes
//! promises the disk of the node.
//!
//! The directories stay until the pod ends, and the file until the pod is removed. An agent of an
//! earlier version, which a template may have, makes no such directories: then the container has
//! directories of the host (`shares`).

use std::path::{Component, Path};

use crate::node::Node;
use crate::record::{EmptyDir, Record, Share};
use crate::sandbox::Sandbox;
use crate::target::Target;
use crate::v1::{self, RunSpec};
use crate::{Error, Result, name, pod_disks, shares};

/// The most directories of a container, and of a pod.
const MOST: usize = 64;
/// The longest path below a directory, in bytes.
const LONGEST: usize = 1024;
/// The bits of a mode.
const MODE: u32 = 0o7777;

/// Refuses directories for a sandbox: containers of pods have them.
///
/// # Errors
/// [`Error::Invalid`].
pub fn refuse(spec: &RunSpec) -> Result<()> {
    if spec.empty_dirs.is_empty() {
        return Ok(());
    }
    let why = "directories that containers share by name are for the containers of a pod";
    Err(Error::Invalid(why.to_owned()))
}

/// Returns the directories of the guest that a new container of a pod has, and the host's files
/// that it shares: in place of the former, if the guest cannot make any.
///
/// # Errors
/// [`Error::Invalid`], which names the directory; [`Error::WrongState`] if the pod does not run;
/// [`Error::Agent`] for a directory of huge pages, in whose place no share can be.
pub fn split(sandbox: &Sandbox, spec: &RunSpec) -> Result<(Vec<EmptyDir>, Vec<v1::Share>)> {
    let mut shares = spec.shares.clone();
    if spec.empty_dirs.is_empty() {
        return Ok((Vec::new(), shares));
    }
    let agent = sandbox.agent()?;
    if spec.empty_dirs.iter().any(|dir| dir.huge_pages) {
        agent.check_huge_pages()?;
    }
    if agent.makes_empty_dirs() {
        return Ok((check(&spec.empty_dirs)?, shares));
    }
    shares.extend(spec.empty_dirs.iter().map(instead));
    Ok((Vec::new(), shares))
}

/// Returns the host's directory that a container has in place of one of the guest.
fn instead(dir: &v1::EmptyDir) -> v1::Share {
    let (source, path, read_only) = (dir.source.clone(), dir.path.clone(), dir.read_only);
    v1::Share { source, path, read_only, ..v1::Share::default() }
}

/// Checks the directories that a container asks for.
fn check(dirs: &[v1::EmptyDir]) -> Result<Vec<EmptyDir>> {
    if dirs.len() > MOST {
        let text = format!("{} directories of the pod are too many: at most {MOST}", dirs.len());
        return Err(Error::Invalid(text));
    }
    let mut checked: Vec<EmptyDir> = Vec::new();
    for dir in dirs {
        let refused = |why: &str| {
            let v1::EmptyDir { name, path, .. } = dir;
            Error::Invalid(format!("the directory {name:?} cannot be at {path:?}: {why}"))
        };
        name::check_empty_dir(&dir.name)?;
        shares::check_path(&dir.path).map_err(refused)?;
        check_sub_path(&dir.sub_path).map_err(refused)?;
        if dir.mode & !MODE != 0 {
            return Err(refused("its mode has bits that no directory has"));
        }
        if dir.huge_pages && !dir.in_memory {
            return Err(refused("no disk has huge pages"));
        }
        if checked.iter().any(|one| one.path == dir.path) {
            return Err(refused("there are two with this path"));
        }
        checked.push(EmptyDir {
            name: dir.name.clone(),
            path: dir.path.clone(),
            sub_path: dir.sub_path.clone(),
            read_only: dir.read_only,
            in_memory: dir.in_memory,
            size_bytes: dir.size_bytes,
            mode: dir.mode,
            uid: dir.uid,
            gid: dir.gid,
            huge_pages: dir.huge_pages,
        });
    }
    Ok(checked)
}

fn check_sub_path(path: &str) -> std::result::Result<(), &'static str> {
    let plain = |part: Component<'_>| matches!(part, Component::Normal(_));
    if !Path::new(path).components().all(plain) || path.contains('\0') || path.len() > LONGEST {
        return Err("the path below the directory is a relative one, without `..`");
    }
    Ok(())
}

/// Checks that a container has no directory of the guest where it has one of the host.
///
/// # Errors
/// [`Error::Invalid`].
pub fn check_apart(dirs: &[EmptyDir], shares: &[Share]) -> Result<()> {
    let is_taken = |dir: &&EmptyDir| shares.iter().any(|share| share.path == dir.path);
    dirs.iter().find(is_taken).map_or(Ok(()), |EmptyDir { name, path, .. }| {
        let why = "a directory of the host has this path";
        Err(Error::Invalid(format!("the directory {name:?} cannot be at {path:?}: {why}")))
    })
}

/// Gives a pod the disk of the directories that a container has, unless it has the disk or they
/// are all in memory.
///
/// # Errors
/// [`Error::Busy`] if the pod has as many directories as it may have; the errors of
/// [`pod_disks::shared_disk`] and [`pod_disks::attach_shared`].
pub async fn join(node: &Node, target: &Target) -> Result<()> {
    let (sandbox, name) = (&target.sandbox, &target.container.name);
    let dirs = sandbox.look(|record| record.added(name).map(|added| added.empty_dirs.clone()));
    let dirs = dirs.unwrap_or_default();
    if dirs.is_empty() {
        return Ok(());
    }
    let _turn = sandbox.empty_dirs.lock().await;
    let mut entered = Ok(());
    // Saved with the next change of the container's state.
    sandbox.note(|record| entered = enter(record, &dirs));
    entered?;
    if dirs.iter().all(|dir| dir.in_memory) {
        return Ok(());
    }
    let disk = pod_disks::shared_disk(node, sandbox).await?;
    pod_disks::attach_shared(node, sandbox, &disk).await
}

/// Enters the names of directories into the record of their pod.
fn enter(record: &mut Record, dirs: &[EmptyDir]) -> Result<()> {
    let names = &mut record.empty_dirs.names;
    for dir in dirs {
        if names.contains(&dir.name) {
            continue;
        }
        if names.len() >= MOST {
            let (name, what) = (record.name.clone(), "directories that its containers share");
            return Err(Error::Busy { name, what, most: MOST });
        }
        names.push(dir.name.clone());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adopt::tests::record_of;
    use crate::record::SandboxState;

    fn asked(name: &str, path: &str) -> v1::EmptyDir {
        let (name, path) = (name.to_owned(), path.to_owned());
        v1::EmptyDir { name, path, mode: 0o2777, ..v1::EmptyDir::default() }
    }

    #[test]
    fn directories_that_no_container_can_have_are_refused() {
        let sub_path = |path: &str| v1::EmptyDir { sub_path: path.to_owned(), ..asked("a", "/a") };
        let good = [asked("a", "/a"), asked("a", "/b"), sub_path("x/y")];
        assert_eq!(check(&good[..2]).unwrap()[1].path, "/b");
        assert_eq!(check(&good[2..]).unwrap()[0].sub_path, "x/y");
        for wrong in [
            asked("", "/a"),
            asked("..", "/a"),
            asked("a/b", "/a"),
            asked("a", "a"),
            asked("a", "/"),
            asked("a", "/proc/a"),
            asked("a", "/a/../b"),
            sub_path("/etc"),
            sub_path("../b"),
            sub_path("x/../../b"),
            sub_path("x\0"),
            v1::EmptyDir { mode: 0o10777, ..asked("a", "/a") },
            v1::EmptyDir { huge_pages: true, ..asked("a", "/a") },
        ] {
            let refused = check(std::slice::from_ref(&wrong)).unwrap_err().to_string();
            assert!(!refused.contains('\n'), "{wrong:?}: {refused}");
        }
        assert!(check(&[asked("a", "/a"), asked("b", "/a")]).is_err());
        let many: Vec<_> = (0..=MOST).map(|one| asked("a", &format!("/{one}"))).collect();
        check(&many[1..]).unwrap();
        assert!(check(&many).is_err());
        let alone = RunSpec { empty_dirs: vec![asked("a", "/a")], ..RunSpec::default() };
        assert!(refuse(&alone).unwrap_err().to_string().contains("containers of a pod"));
        refuse(&RunSpec::default()).unwrap();
    }

    #[test]
    fn a_directory_of_the_host_takes_the_place_of_the_guests() {
        let source = "/var/lib/kubelet/pods/1/volumes/kubernetes.io~empty-dir/a".to_owned();
        let dir = v1::EmptyDir { source: source.clone(), read_only: true, ..asked("a", "/a") };
        let share = instead(&dir);
        assert_eq!((share.source, share.path.as_str(), share.read_only), (source, "/a", true));
        let dirs = check(&[dir]).unwrap();
        let shares = ["/b", "/a"].map(|path| Share { path: path.into(), ..Share::default() });
        check_apart(&dirs, &shares[..1]).unwrap();
        assert!(check_apart(&dirs, &shares).is_err());
    }

    #[test]
    fn a_pod_has_a_bounded_number_of_directories() {
        let mut record = record_of(SandboxState::Running);
        let dirs = |names: std::ops::Range<usize>| -> Vec<_> {
            let named = |one: usize| EmptyDir { name: one.to_string(), ..EmptyDir::default() };
            names.map(named).collect()
        };
        enter(&mut record, &dirs(0..MOST)).unwrap();
        enter(&mut record, &dirs(0..MOST)).unwrap();
        assert_eq!(record.empty_dirs.names.len(), MOST);
        let refused = enter(&mut record, &dirs(MOST..MOST + 1)).unwrap_err();
        assert!(matches!(refused, Error::Busy { most: MOST, .. }), "{refused}");
    }
}
