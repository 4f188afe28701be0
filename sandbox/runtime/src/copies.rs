//! Files that a container has in place of its image's: copies of its user's.
//!
//! They are in the daemon's memory until the container is created, and never on the host's disk:
//! they may be secrets. A daemon that ends before that takes the start with it.

use std::collections::BTreeSet;
use std::path::{Component, Path};

use slipway_agent_protocol::v1::agent_client::AgentClient;
use slipway_agent_protocol::v1::{
    CreateContainerReply, CreateContainerRequest, File, FileDir, PutFilesRequest,
    RemoveContainerRequest,
};
use slipway_sandbox_api::copies::{MOST, MOST_BYTES, MOST_DIRS, MOST_FILE_BYTES};
use tonic::transport::Channel;
use tonic::{Code, Response, Status};

use crate::agent::Agent;
use crate::{Error, Result, v1};

/// The longest path in bytes.
const LONGEST: usize = 1024;
/// Directories in which the container's own file systems are.
pub(crate) const SYSTEM: [&str; 3] = ["/dev", "/proc", "/sys"];
/// The bits of a directory's mode.
const MODE: u32 = 0o7777;
/// The most bytes of files in the request that creates a container, which has more than files. An
/// agent takes messages of 4 MiB. One file may be larger.
const FIRST: usize = 1 << 20;
/// The most bytes of files in each request after it.
const LATER: usize = 3 << 20;
/// The bytes of a file in a request beside its content, path and link.
const FRAME: usize = 64;
/// The files that an agent writes itself, unless the request that creates the container has them.
const AGENTS: [&str; 3] = ["/etc/hostname", "/etc/hosts", "/etc/resolv.conf"];

/// The files of a new container, and the directories of its own that hold some of them.
#[derive(Debug, Default)]
pub struct Copies {
    /// The files.
    pub files: Vec<File>,
    /// The directories.
    pub dirs: Vec<FileDir>,
}

/// Checks the files of a new sandbox, and the directories for them. Returns them for the agent.
///
/// # Errors
/// [`Error::Invalid`], which names the file or directory.
pub(crate) fn check(spec: &v1::RunSpec) -> Result<Copies> {
    Ok(Copies { files: check_files(&spec.files)?, dirs: check_dirs(&spec.file_dirs)? })
}

fn check_dirs(dirs: &[v1::FileDir]) -> Result<Vec<FileDir>> {
    if dirs.len() > MOST_DIRS {
        let count = dirs.len();
        let text = format!("{count} directories for files are too many: at most {MOST_DIRS}");
        return Err(Error::Invalid(text));
    }
    let mut paths = BTreeSet::new();
    dirs.iter().try_for_each(|dir| {
        let reason = match is_path(&dir.path) {
            Err(reason) => reason,
            Ok(()) if dir.mode & !MODE != 0 => "its mode has bits that no directory has",
            Ok(()) if !paths.insert(&dir.path) => "there are two with this path",
            Ok(()) => return Ok(()),
        };
        let what = if dir.size_bytes.is_some() { "tmpfs" } else { "directory for files" };
        let path = &dir.path;
        Err(Error::Invalid(format!("a {what} cannot be at {path:?}: {reason}")))
    })?;
    let converted = dirs.iter().map(|dir| FileDir {
        path: dir.path.clone(),
        read_only: dir.read_only,
        mode: dir.mode,
        uid: dir.uid,
        gid: dir.gid,
        file: dir.file,
        size_bytes: dir.size_bytes,
        no_exec: dir.no_exec,
    });
    Ok(converted.collect())
}

/// Checks files, and returns them for the agent.
///
/// # Errors
/// [`Error::Invalid`], which names the file.
pub(crate) fn check_files(files: &[v1::File]) -> Result<Vec<File>> {
    let bytes: usize = files.iter().map(|file| file.content.len()).sum();
    let largest = files.iter().map(|file| file.content.len()).max().unwrap_or(0);
    if files.len() > MOST || bytes > MOST_BYTES || largest > MOST_FILE_BYTES {
        let (count, kib) = (files.len(), bytes.div_ceil(1024));
        return Err(Error::Invalid(format!(
            "{count} files with {kib} KiB are too much to copy into a container: at most {MOST} \
             with {} KiB, and {} KiB each; a volume holds more",
            MOST_BYTES >> 10,
            MOST_FILE_BYTES >> 10
        )));
    }
    let mut paths = BTreeSet::new();
    files.iter().try_for_each(|file| {
        let reason = match is_path(&file.path) {
            Err(reason) => reason,
            Ok(()) if !is_sound(file) => "the link has a content, or is too long",
            Ok(()) if !paths.insert(&file.path) => "there are two with this path",
            Ok(()) => return Ok(()),
        };
        Err(Error::Invalid(format!(
            "cannot copy a file to {:?} in a container: {reason}",
            file.path
        )))
    })?;
    let converted = files.iter().map(|file| File {
        path: file.path.clone(),
        content: file.content.clone(),
        mode: file.mode & 0o777,
        uid: file.uid,
        gid: file.gid,
        link: file.link.clone(),
    });
    Ok(converted.collect())
}

/// Has the agent create a container with all of its files.
///
/// # Errors
/// The errors of the agent; [`Error::Invalid`] if the agent is of an earlier version, and would put
/// files where another mount of the container hides them; [`Error::Agent`] if it would ignore a
/// bound.
pub(crate) async fn create(agent: &Agent, mut request: CreateContainerRequest) -> Result<()> {
    if !agent.makes_file_dirs() {
        check_seen(&request)?;
    }
    agent.check_file_dirs(&request.file_dirs)?;
    let (id, mut files) = (request.id.clone(), std::mem::take(&mut request.files));
    files.sort_by_key(|file| !AGENTS.contains(&file.path.as_str()));
    let mut pieces = pieces(files).into_iter();
    request.files = pieces.next().unwrap_or_default();
    agent.call(|client| create_anew(client, request)).await?;
    for files in pieces {
        let request = PutFilesRequest { id: id.clone(), files, removed: Vec::new() };
        agent.call(|mut client| async move { client.put_files(request).await }).await?;
    }
    Ok(())
}

/// Creates a container. One of that name that the guest has is removed first: the host has none, so
/// a daemon that was killed had asked for it, and the guest made it after the next daemon had
/// released it.
async fn create_anew(
    mut client: AgentClient<Channel>,
    request: CreateContainerRequest,
) -> std::result::Result<Response<CreateContainerReply>, Status> {
    match client.create_container(request.clone()).await {
        Err(status) if status.code() == Code::AlreadyExists => {
            let left = RemoveContainerRequest { id: request.id.clone() };
            client.remove_container(left).await?;
            client.create_container(request).await
        }
        created => created,
    }
}

/// Checks that no directory for files is at or below another mount: without the directory, its
/// files would be hidden.
fn check_seen(request: &CreateContainerRequest) -> Result<()> {
    let shares = request.shares.iter().map(|share| &share.path);
    let others: Vec<_> = shares.chain(request.empty_dirs.iter().map(|dir| &dir.path)).collect();
    let is_hidden = |path: &String| others.iter().any(|other| Path::new(path).starts_with(other));
    match request.file_dirs.iter().find(|dir| is_hidden(&dir.path)) {
        None => Ok(()),
        Some(FileDir { path, .. }) => Err(Error::Invalid(format!(
            "the files at {path:?} would be hidden by another mount: the sandbox's agent is of an \
             earlier version, so make its template anew"
        ))),
    }
}

/// Divides files among requests, in order.
pub(crate) fn pieces(files: Vec<File>) -> Vec<Vec<File>> {
    let (mut pieces, mut piece, mut left) = (Vec::new(), Vec::new(), FIRST);
    for file in files {
        let bytes = file.content.len() + file.path.len() + file.link.len() + FRAME;
        if bytes > left && !piece.is_empty() {
            pieces.push(std::mem::take(&mut piece));
            left = LATER;
        }
        left = left.saturating_sub(bytes);
        piece.push(file);
    }
    pieces.push(piece);
    pieces
}

/// Checks the paths of files to remove, and returns them.
///
/// # Errors
/// [`Error::Invalid`], which names the path.
pub(crate) fn check_removed(paths: &[String]) -> Result<Vec<String>> {
    if paths.len() > MOST {
        let count = paths.len();
        return Err(Error::Invalid(format!(
            "{count} files to remove are too many: at most {MOST}"
        )));
    }
    paths.iter().try_for_each(|path| {
        is_path(path).map_err(|reason| {
            Error::Invalid(format!("cannot remove {path:?} from a container: {reason}"))
        })
    })?;
    Ok(paths.to_vec())
}

/// Returns whether the file has a content or is a link, and not both, and the link can exist.
fn is_sound(file: &v1::File) -> bool {
    let link = &file.link;
    link.is_empty() || (file.content.is_empty() && link.len() <= LONGEST && !link.contains('\0'))
}

/// Checks that `path` names a file that is in no file system of the container's own.
pub(crate) fn is_path(path: &str) -> std::result::Result<(), &'static str> {
    is_plain(path)?;
    if SYSTEM.iter().any(|one| Path::new(path).starts_with(one)) {
        return Err("a file system of the container's own is there");
    }
    Ok(())
}

/// Checks that `path` names a file: absolute, with plain names only.
pub(crate) fn is_plain(path: &str) -> std::result::Result<(), &'static str> {
    let mut parts = Path::new(path).components();
    if parts.next() != Some(Component::RootDir) {
        return Err("not an absolute path");
    }
    let plain = |part: Component<'_>| matches!(part, Component::Normal(_));
    let is_file = parts.clone().next().is_some() && !path.ends_with('/');
    if !is_file || !parts.all(plain) || path.contains('\0') || path.len() > LONGEST {
        return Err("not the path of a file");
    }
    Ok(())
}

/// Checks the path of a container's termination message. It may be in the container's own `/dev`,
/// where Kubernetes has it.
pub(crate) fn message_path(path: &str) -> Result<String> {
    let checked = match path.starts_with("/dev/") {
        _ if path.is_empty() => Ok(()),
        true => is_plain(path),
        false => is_path(path),
    };
    let refused =
        |reason| Error::Invalid(format!("a termination message cannot be at {path:?}: {reason}"));
    checked.map(|()| path.to_owned()).map_err(refused)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, bytes: usize) -> v1::File {
        let content = vec![1; bytes];
        v1::File { path: path.to_owned(), content, mode: 0o4755, ..v1::File::default() }
    }

    #[test]
    fn files_keep_path_content_and_permission_bits() {
        let most = MOST_FILE_BYTES;
        let checked = check_files(&[file("/etc/hosts", 3), file("/a", most)]).unwrap();
        let (path, content) = ("/etc/hosts".to_owned(), vec![1; 3]);
        let first = File { path, content, mode: 0o755, ..File::default() };
        assert_eq!((checked.len(), &checked[0]), (2, &first));
    }

    #[test]
    fn a_file_that_cannot_be_is_refused_by_its_path() {
        let long = format!("/{}", "a".repeat(LONGEST));
        for path in [
            "",
            "etc",
            "/",
            "/etc/",
            "/etc/../x",
            "/dev/null",
            "/proc/sys/x",
            "/sys",
            "/a\0b",
            &long,
        ] {
            let refused = check_files(&[file(path, 1)]).unwrap_err().to_string();
            assert!(refused.contains("cannot copy a file to"), "{path}: {refused}");
        }
        check_files(&[file("/device", 1), file("/etc/a..b", 1)]).unwrap();
        let twice = check_files(&[file("/a", 1), file("/a", 2)]).unwrap_err().to_string();
        assert!(twice.contains("two with this path"), "{twice}");
    }

    #[test]
    fn what_is_too_much_is_refused_with_the_limit() {
        let refused = |files: &[v1::File]| check_files(files).unwrap_err().to_string();
        let parts = (0..MOST_BYTES / MOST_FILE_BYTES).map(|one| file(&format!("/{one}"), 2 << 20));
        let mut all: Vec<_> = parts.collect();
        check_files(&all).unwrap();
        all.push(file("/b", 1));
        let much = refused(&all);
        assert!(much.contains("9 files with 16385 KiB") && much.contains("16384 KiB"), "{much}");
        let large = refused(&[file("/a", MOST_FILE_BYTES + 1)]);
        assert!(large.contains("2048 KiB each"), "{large}");
        let many: Vec<_> = (0..=MOST).map(|number| file(&format!("/{number}"), 0)).collect();
        assert!(refused(&many).contains("4097 files"));
    }

    #[test]
    fn a_directory_for_files_is_at_a_path_of_its_own() {
        let dir = |path: &str| {
            let (path, mode) = (path.to_owned(), 0o1777);
            v1::FileDir { path, mode, ..v1::FileDir::default() }
        };
        let checked = check_dirs(&[dir("/etc/app"), dir("/etc")]).unwrap();
        assert_eq!((checked[0].path.as_str(), checked[0].mode), ("/etc/app", 0o1777));
        let refused = |dirs: &[v1::FileDir]| check_dirs(dirs).unwrap_err().to_string();
        for path in ["", "/", "/dev/x", "/etc/"] {
            assert!(refused(&[dir(path)]).contains("a directory for files cannot"), "{path}");
        }
        assert!(refused(&[dir("/a"), dir("/a")]).contains("two with this path"));
        let tmpfs = v1::FileDir { size_bytes: Some(0), ..dir("/sys/a") };
        assert!(refused(&[tmpfs]).contains("a tmpfs cannot be at \"/sys/a\""));
        let odd = v1::FileDir { mode: 0o40755, ..dir("/a") };
        assert!(refused(&[odd]).contains("its mode"));
        assert!(refused(&vec![dir("/a"); MOST_DIRS + 1]).contains("at most 256"));
    }

    #[test]
    fn an_earlier_agent_gets_no_files_that_a_mount_hides() {
        let at = |path: &str| {
            let file_dirs = vec![FileDir { path: path.into(), ..FileDir::default() }];
            let shares = vec![slipway_agent_protocol::v1::Share {
                path: "/var/run".into(),
                ..Default::default()
            }];
            check_seen(&CreateContainerRequest { file_dirs, shares, ..Default::default() })
        };
        at("/var/runs").unwrap();
        for path in ["/var/run", "/var/run/secrets"] {
            let refused = at(path).unwrap_err().to_string();
            assert!(refused.contains(path) && refused.contains("earlier version"), "{refused}");
        }
    }

    #[test]
    fn files_are_divided_among_requests_that_agents_take() {
        const TWO: usize = 2 << 20;
        const HALF: usize = 1 << 19;
        let cases: [(&[usize], &[&[usize]]); 4] = [
            (&[], &[&[]]),
            (&[1, 2], &[&[1, 2]]),
            (&[TWO, 1], &[&[TWO], &[1]]),
            (&[1, TWO, HALF, TWO, 3], &[&[1], &[TWO, HALF], &[TWO, 3]]),
        ];
        for (sizes, expected) in cases {
            let file = |size: &usize| File { content: vec![0; *size], ..File::default() };
            let mut divided: Vec<Vec<usize>> = Vec::new();
            for piece in pieces(sizes.iter().map(file).collect()) {
                divided.push(piece.iter().map(|file| file.content.len()).collect());
            }
            assert_eq!(divided, expected);
        }
    }

    #[test]
    fn a_termination_message_is_in_a_file_of_the_root_or_of_dev() {
        for path in ["", "/dev/termination-log", "/dev/null", "/dev/shm/log", "/var/log/end"] {
            assert_eq!(message_path(path).unwrap(), path);
        }
        let long = format!("/dev/{}", "a".repeat(2000));
        let paths = ["log", "/", "/dev", "/dev/", "/dev/../etc", "/dev/a\0b", "/proc/1/x", &long];
        for path in paths {
            let refused = message_path(path).unwrap_err().to_string();
            assert!(refused.contains("termination message"), "{path}: {refused}");
        }
    }
}
