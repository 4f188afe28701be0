//! Directories of a container's own for files of the host: Kubernetes' configMaps, secrets and the
//! like; and those that begin empty (`slipway run --tmpfs`).
//!
//! Each is a tmpfs, so that nothing of the image is seen at its path. The agent has it mounted
//! outside of containers and writes to it there: the container has a clone of the mount
//! (`init/file_dirs`), which may be read-only, and no link of the container's leads the agent out
//! of the directory. A directory goes with its container; the memory of a machine that is saved has
//! it.

use std::ffi::CString;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use anyhow::{Context, Result, bail};
use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use slipway_agent_protocol::v1::{File, FileDir, PutFilesRequest};

use crate::init::{FILE_DIR_FLAGS as FLAGS, FileDirSpec};
use crate::lock::lock;
use crate::{copies, empty_dirs, log};

/// The most directories of a container.
const MOST: usize = 256;
/// The bits of a directory's mode.
const MODE: u32 = 0o7777;
/// The most bytes of a directory for which no other bound is asked: twice 2 MiB in 4,096 files of
/// whole pages, since a new version of a volume is there beside the old one for a moment.
const BYTES: u64 = 2 * ((2 << 20) + 4096 * 4096);
/// The name of the file in a directory that stands for a single file.
const FILE: &str = "file";

/// The directories of a container. They go with this value.
#[derive(Default)]
pub struct FileDirs(Vec<Mounted>);

/// A mounted directory.
struct Mounted {
    /// The path in the container.
    path: PathBuf,
    read_only: bool,
    /// Set if the container has the directory's only file, in place of the directory.
    is_file: bool,
    /// The mount point, outside of containers.
    at: PathBuf,
    root: Arc<OwnedFd>,
}

/// The part of a request that is for one directory, with paths in that.
pub struct DirectoryRequest {
    path: PathBuf,
    is_file: bool,
    root: Arc<OwnedFd>,
    request: PutFilesRequest,
}

impl FileDirs {
    /// Mounts the directories of a container, on mount points below `base`.
    ///
    /// # Errors
    /// There are too many, or one cannot be mounted. None is left then.
    pub async fn make(base: &Path, dirs: &[FileDir]) -> Result<Self> {
        if dirs.is_empty() {
            return Ok(Self::default());
        }
        if dirs.len() > MOST {
            bail!("{} directories for files are too many: at most {MOST}", dirs.len());
        }
        let (base, dirs) = (base.to_owned(), dirs.to_vec());
        let made = tokio::task::spawn_blocking(move || {
            make_base(&base)?;
            let made = dirs.iter().map(|dir| {
                Mounted::make(&base, dir).with_context(|| format!("a directory for {}", dir.path))
            });
            made.collect::<Result<Vec<_>>>().map(Self)
        });
        made.await.context("making directories for files")?
    }

    /// Describes the directories for the first process of their container.
    ///
    /// # Errors
    /// A path is not UTF-8.
    pub fn specs(&self) -> Result<Vec<FileDirSpec>> {
        let spec = |dir: &Mounted| -> Result<FileDirSpec> {
            let (source, path) = (dir.source(), &dir.path);
            Ok(FileDirSpec {
                source: source.to_str().context("a path that is not UTF-8")?.to_owned(),
                path: path.to_str().context("a path that is not UTF-8")?.to_owned(),
                read_only: dir.read_only,
                is_file: dir.is_file,
            })
        };
        self.0.iter().map(spec).collect()
    }

    /// Puts the first files of a container into its directories. Returns those for its root.
    ///
    /// # Errors
    /// The first failure.
    pub async fn fill(&self, files: Vec<File>) -> Result<Vec<File>> {
        let (parts, rest) = self.divide(PutFilesRequest { files, ..PutFilesRequest::default() });
        put(parts).await?;
        Ok(rest.files)
    }

    /// Divides a request into the parts for directories, and the rest, which is for the root.
    pub fn divide(&self, request: PutFilesRequest) -> (Vec<DirectoryRequest>, PutFilesRequest) {
        let mut parts: Vec<DirectoryRequest> = self.0.iter().map(DirectoryRequest::of).collect();
        let mut rest = PutFilesRequest { id: request.id, ..PutFilesRequest::default() };
        for file in request.files {
            match self.find(&file.path) {
                Some((at, path)) => parts[at].request.files.push(File { path, ..file }),
                None => rest.files.push(file),
            }
        }
        for path in request.removed {
            match self.find(&path) {
                Some((at, path)) => parts[at].request.removed.push(path),
                None => rest.removed.push(path),
            }
        }
        parts.retain(|part| !is_empty(&part.request));
        (parts, rest)
    }

    /// Returns the number of the deepest directory in which a path is, and the path in that.
    fn find(&self, path: &str) -> Option<(usize, String)> {
        let dirs = self.0.iter().enumerate();
        let above = dirs.filter_map(|(at, dir)| Some((at, dir.path_in(path)?)));
        above.max_by_key(|(at, _)| self.0[*at].path.components().count())
    }
}

/// Returns whether a request changes nothing.
pub fn is_empty(request: &PutFilesRequest) -> bool {
    request.files.is_empty() && request.removed.is_empty()
}

/// Carries out the parts of a request that are for directories.
///
/// # Errors
/// The first failure. All files that could be put into their places are there.
pub async fn put(parts: Vec<DirectoryRequest>) -> Result<()> {
    if parts.is_empty() {
        return Ok(());
    }
    copies::within(move || {
        copies::empty_umask()?;
        // All are tried before the first failure is returned.
        parts.iter().map(DirectoryRequest::put).fold(Ok(()), Result::and)
    })
    .await
}

impl DirectoryRequest {
    fn of(dir: &Mounted) -> Self {
        let request = PutFilesRequest::default();
        Self { path: dir.path.clone(), is_file: dir.is_file, root: Arc::clone(&dir.root), request }
    }

    fn put(&self) -> Result<()> {
        let root = self.root.as_fd();
        let put = if self.is_file {
            let filled = self.request.files.iter().map(|file| copies::fill(root, FILE, file));
            filled.fold(Ok(()), Result::and)
        } else {
            copies::apply(root, &self.request)
        };
        put.with_context(|| self.path.display().to_string())
    }
}

impl Mounted {
    fn make(base: &Path, dir: &FileDir) -> Result<Self> {
        /// The name of the next mount point.
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let at = base.join(NEXT.fetch_add(1, Ordering::Relaxed).to_string());
        let options = CString::new(options(dir))?;
        std::fs::create_dir(&at).with_context(|| at.display().to_string())?;
        let flags = if dir.no_exec { FLAGS | MountFlags::NOEXEC } else { FLAGS };
        let made = mount("tmpfs", &at, "tmpfs", flags, options.as_c_str());
        made.inspect_err(|_| drop(std::fs::remove_dir(&at))).context("mounting a tmpfs")?;
        Self::open(at.clone(), dir).inspect_err(|_| unmake(&at))
    }

    /// Opens a directory that is mounted, and makes its file if it stands for one.
    fn open(at: PathBuf, dir: &FileDir) -> Result<Self> {
        if dir.file {
            std::fs::write(at.join(FILE), "")?;
        }
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = Arc::new(rustix::fs::open(&at, flags, Mode::empty())?);
        let (path, read_only, is_file) = (PathBuf::from(&dir.path), dir.read_only, dir.file);
        Ok(Self { path, read_only, is_file, at, root })
    }

    /// Returns the path of what the container has, outside of containers.
    fn source(&self) -> PathBuf {
        if self.is_file { self.at.join(FILE) } else { self.at.clone() }
    }

    /// Returns the path in the directory of a path of the container; `None` if it is not in it.
    fn path_in(&self, path: &str) -> Option<String> {
        let below = Path::new(path).strip_prefix(&self.path).ok()?.to_str()?;
        let found = if self.is_file { below.is_empty() } else { !below.is_empty() };
        found.then(|| format!("/{below}"))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        unmake(&self.at);
    }
}

/// Unmounts a directory. Files that the container has open, and its own mounts of the directory,
/// stay until the container ends.
fn unmake(at: &Path) {
    let unmounted = unmount(at, UnmountFlags::DETACH).map_err(std::io::Error::from);
    if let Err(error) = unmounted.and_then(|()| std::fs::remove_dir(at)) {
        log!("{}: {error}", at.display());
    }
}

/// Mounts the file system of the mount points, unless it is mounted.
fn make_base(base: &Path) -> Result<()> {
    /// Held while the directory exists and its file system may not be mounted yet.
    static MAKING: Mutex<()> = Mutex::new(());
    let _making = lock(&MAKING);
    empty_dirs::mount_once(base, |base| {
        let flags = FLAGS | MountFlags::NOEXEC;
        Ok(mount("tmpfs", base, "tmpfs", flags, c"mode=0700,size=1m")?)
    })
}

/// Returns the options of a directory's tmpfs. Without a size the kernel takes half of the memory.
fn options(FileDir { mode, uid, gid, size_bytes, .. }: &FileDir) -> String {
    let size = match size_bytes.unwrap_or(BYTES) {
        0 => String::new(),
        bytes => format!(",size={bytes}"),
    };
    format!("mode={:o},uid={uid},gid={gid}{size}", mode & MODE)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns directories with these paths; those that end with a plus sign are single files.
    fn dirs(paths: &[&str]) -> FileDirs {
        let root = || {
            let flags = OFlags::PATH | OFlags::DIRECTORY;
            Arc::new(rustix::fs::open("/", flags, Mode::empty()).unwrap())
        };
        let mounted = |path: &&str| {
            let (is_file, path) = (path.ends_with('+'), PathBuf::from(path.trim_end_matches('+')));
            let at = PathBuf::from("/no/such");
            Mounted { path, read_only: true, is_file, at, root: root() }
        };
        FileDirs(paths.iter().map(mounted).collect())
    }

    #[test]
    fn files_are_in_the_deepest_directory_above_them() {
        let dirs = dirs(&["/etc", "/etc/app/", "/etc/app/deep", "/srv/one+"]);
        let file = |path: &str| File { path: path.into(), ..File::default() };
        let paths = [
            "/etc/hosts",
            "/etc/app/..1/a",
            "/etc/app/deep/..data",
            "/etc/apps",
            "/srv/x",
            "/srv/one",
            "/srv/one/x",
        ];
        let removed = ["/etc/app/old", "/old"].map(str::to_owned).to_vec();
        let request = PutFilesRequest { id: "a".into(), files: paths.map(file).to_vec(), removed };
        let (parts, rest) = dirs.divide(request);
        let of = |request: &PutFilesRequest| {
            let paths = request.files.iter().map(|file| file.path.clone());
            paths.chain(request.removed.clone()).collect::<Vec<_>>().join(" ")
        };
        let parts: Vec<_> = parts
            .iter()
            .map(|part| (part.path.to_str().unwrap().to_owned(), of(&part.request)))
            .collect();
        let expected = [
            ("/etc", "/hosts /apps"),
            ("/etc/app/", "/..1/a /old"),
            ("/etc/app/deep", "/..data"),
            ("/srv/one", "/"),
        ];
        assert_eq!(parts, expected.map(|(path, files)| (path.to_owned(), files.to_owned())));
        assert_eq!((rest.id.as_str(), of(&rest).as_str()), ("a", "/srv/x /srv/one/x /old"));
    }

    #[test]
    fn a_directory_begins_as_the_hosts() {
        let (mode, uid, gid) = (0o42775, 7, 2000);
        let dir = FileDir { mode, uid, gid, ..FileDir::default() };
        assert_eq!(options(&dir), format!("mode=2775,uid=7,gid=2000,size={}", 36 << 20));
        let sized = |bytes| FileDir { size_bytes: Some(bytes), ..dir.clone() };
        assert_eq!(options(&sized(0)), "mode=2775,uid=7,gid=2000");
        assert_eq!(options(&sized(4096)), "mode=2775,uid=7,gid=2000,size=4096");
    }
}
