//! Folders and files.

use std::fs::{DirBuilder, File, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Dir, Mode, OFlags};
use rustix::io::Errno;

const FOLDER: u32 = 0o700;
const FILE: u32 = 0o600;
/// The permission bits of other users.
const OTHERS: u32 = 0o077;
/// The permission bits with which other users change what is in a folder.
const WRITABLE: u32 = 0o022;

/// The reason why a folder or file is not this user's alone.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It belongs to another user.
    #[error("{} belongs to user {owner}, not to user {me}", path.display())]
    Foreign {
        /// The folder or file.
        path: PathBuf,
        /// The user id of its owner.
        owner: u32,
        /// The user id of this process.
        me: u32,
    },
    /// A system call failed.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// The failed action, such as "create" or "close".
        action: &'static str,
        /// The folder or file.
        path: PathBuf,
        /// The error of the system call.
        source: io::Error,
    },
}

/// Result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    fn io<E: Into<io::Error>>(action: &'static str, path: &Path) -> impl Fn(E) -> Self {
        move |source| Self::Io { action, path: path.to_owned(), source: source.into() }
    }
}

/// Creates the folder `dir` with mode 0700 if it is missing, and removes the rights of other users
/// from an existing one. Folders above it that are missing have the usual mode.
///
/// # Errors
/// [`Error::Foreign`] if the folder belongs to another user; [`Error::Io`].
pub fn make_folder(dir: &Path) -> Result<()> {
    if let Some(parent) = dir.parent() {
        std::fs::create_dir_all(parent).map_err(Error::io("create", dir))?;
    }
    match DirBuilder::new().mode(FOLDER).create(dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(Error::io("create", dir)(error));
        }
        _ => {}
    }
    close(&open_folder(dir)?, dir, FOLDER)
}

/// Removes the rights of other users from the regular files in `dir` whose names `are_private`
/// chooses. Links and everything else that is no file are left alone. A missing folder has none.
///
/// # Errors
/// [`Error::Foreign`] if the folder or a chosen file belongs to another user; [`Error::Io`], also
/// if other users can write to the folder, as the files are theirs then.
pub fn close_files(dir: &Path, are_private: impl Fn(&str) -> bool) -> Result<()> {
    let folder = match open_folder(dir) {
        Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => return Ok(()),
        opened => opened?,
    };
    let meta = look_at(&folder, dir)?;
    if meta.mode() & WRITABLE != 0 {
        let why = io::Error::other("other users can write to the folder; `chmod go-w` it");
        return Err(Error::io("close the files of", dir)(why));
    }
    for entry in Dir::read_from(&folder).map_err(Error::io("list", dir))? {
        let entry = entry.map_err(Error::io("list", dir))?;
        let Some(name) = entry.file_name().to_str().ok().filter(|name| are_private(name)) else {
            continue;
        };
        let path = dir.join(name);
        // `NONBLOCK`: opening a FIFO would wait for its other end.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match rustix::fs::openat(&folder, name, flags, Mode::empty()) {
            Ok(file) => File::from(file),
            // Removed meanwhile; a link; a socket.
            Err(Errno::NOENT | Errno::LOOP | Errno::NXIO) => continue,
            Err(error) => return Err(Error::io("open", &path)(error)),
        };
        if look_at(&file, &path)?.is_file() {
            close(&file, &path, FILE)?;
        }
    }
    Ok(())
}

fn open_folder(dir: &Path) -> Result<File> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let open = rustix::fs::open(dir, flags, Mode::empty()).map_err(Error::io("open", dir))?;
    let folder = File::from(open);
    owned(&look_at(&folder, dir)?, dir)?;
    Ok(folder)
}

/// Sets `mode` on an open file or folder if other users have any right to it.
fn close(open: &File, path: &Path, mode: u32) -> Result<()> {
    let meta = look_at(open, path)?;
    owned(&meta, path)?;
    if meta.mode() & OTHERS == 0 {
        return Ok(());
    }
    open.set_permissions(Permissions::from_mode(mode)).map_err(Error::io("close", path))
}

fn look_at(open: &File, path: &Path) -> Result<std::fs::Metadata> {
    open.metadata().map_err(Error::io("look at", path))
}

fn owned(meta: &std::fs::Metadata, path: &Path) -> Result<()> {
    let (owner, me) = (meta.uid(), rustix::process::geteuid().as_raw());
    if owner != me {
        return Err(Error::Foreign { path: path.to_owned(), owner, me });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn mode(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().mode() & 0o7777
    }

    fn set_mode(path: &Path, mode: u32) {
        std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_folder_is_its_users_alone_whoever_made_it() {
        let place = tempfile::tempdir().unwrap();
        let dir = place.path().join("above/folder");
        make_folder(&dir).unwrap();
        assert_eq!(mode(&dir), 0o700);
        set_mode(&dir, 0o755);
        make_folder(&dir).unwrap();
        assert_eq!(mode(&dir), 0o700);
        std::fs::write(place.path().join("file"), "").unwrap();
        assert!(make_folder(&place.path().join("file")).is_err());
    }

    #[test]
    fn the_chosen_files_are_closed_and_nothing_else() {
        let place = tempfile::tempdir().unwrap();
        let dir = place.path().join("folder");
        close_files(&dir, |_| true).unwrap();
        std::fs::create_dir(&dir).unwrap();
        set_mode(&dir, 0o711);
        let (elsewhere, folder) = (place.path().join("elsewhere"), dir.join("folder.x"));
        let [chosen, other] = ["chosen.x", "other"].map(|name| dir.join(name));
        for path in [&elsewhere, &chosen, &other] {
            std::fs::write(path, "content").unwrap();
            set_mode(path, 0o644);
        }
        std::fs::create_dir(&folder).unwrap();
        set_mode(&folder, 0o755);
        symlink(&elsewhere, dir.join("link.x")).unwrap();
        close_files(&dir, |name| name.ends_with(".x")).unwrap();
        assert_eq!((mode(&chosen), mode(&other)), (0o600, 0o644));
        assert_eq!((mode(&elsewhere), mode(&folder)), (0o644, 0o755));
        assert_eq!(std::fs::read(&chosen).unwrap(), b"content");
    }

    #[test]
    fn files_in_a_folder_that_others_can_write_to_are_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        set_mode(&file, 0o644);
        set_mode(dir.path(), 0o777);
        let error = close_files(dir.path(), |_| true).unwrap_err().to_string();
        assert!(error.contains("other users can write"), "{error}");
        assert_eq!(mode(&file), 0o644);
    }
}
