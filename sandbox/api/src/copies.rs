//! Files of the host that a container gets copies of.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::v1;

/// The most bytes of all files of a container: the daemon takes no more.
const MOST_BYTES: usize = 1 << 20;
/// The most files of a container: the daemon takes no more.
const MOST: usize = 1024;
/// The most directories within each other.
const DEPTH: usize = 16;

/// The reason why a file of the host cannot be copied into a container.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// The file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file or directory.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// It is a device, a socket or a pipe.
    #[error("{} is neither a file nor a directory", .0.display())]
    Kind(PathBuf),
    /// A name is not UTF-8.
    #[error("{} has a name that is not UTF-8", .0.display())]
    Name(PathBuf),
    /// There is more than a container can have.
    #[error(
        "{} is too large to copy: at most {MOST} files with {} KiB, {DEPTH} directories deep; a \
         volume holds more",
        .0.display(),
        MOST_BYTES >> 10
    )]
    TooLarge(PathBuf),
}

/// Reads a file of the host, or all files below a directory, for the path `target` in a container.
/// Symbolic links are followed. Names that begin with `..` are left out: Kubernetes keeps the
/// versions of a volume of its own there, and links to the current one.
///
/// # Errors
/// [`CopyError`], which names the file.
pub fn read(host: &Path, target: &str) -> Result<Vec<v1::File>, CopyError> {
    let mut copies = Copies { top: host, files: Vec::new(), bytes: 0 };
    copies.add(host, target.to_owned(), 0)?;
    Ok(copies.files)
}

struct Copies<'a> {
    /// The path that was asked for.
    top: &'a Path,
    files: Vec<v1::File>,
    bytes: usize,
}

impl Copies<'_> {
    fn add(&mut self, path: &Path, target: String, depth: usize) -> Result<(), CopyError> {
        let failed = |source| CopyError::Read { path: path.to_owned(), source };
        let metadata = fs::metadata(path).map_err(failed)?;
        if metadata.is_dir() {
            return self.add_all(path, target.trim_end_matches('/'), depth);
        }
        if !metadata.is_file() {
            return Err(CopyError::Kind(path.to_owned()));
        }
        let (mut content, left) = (Vec::new(), MOST_BYTES - self.bytes);
        let file = File::open(path).map_err(failed)?;
        file.take(left as u64 + 1).read_to_end(&mut content).map_err(failed)?;
        if content.len() > left || self.files.len() == MOST {
            return Err(self.too_large());
        }
        self.bytes += content.len();
        let mode = metadata.permissions().mode() & 0o777;
        self.files.push(v1::File { path: target, content, mode });
        Ok(())
    }

    fn add_all(&mut self, path: &Path, target: &str, depth: usize) -> Result<(), CopyError> {
        // A link may lead back to a directory above.
        if depth == DEPTH {
            return Err(self.too_large());
        }
        let failed = |source| CopyError::Read { path: path.to_owned(), source };
        let entries = fs::read_dir(path).map_err(failed)?;
        let mut names = entries
            .map(|entry| entry.map(|entry| entry.file_name()))
            .take(MOST + 2)
            .collect::<Result<Vec<_>, _>>()
            .map_err(failed)?;
        names.sort();
        for name in names {
            let path = path.join(&name);
            let Some(name) = name.to_str() else { return Err(CopyError::Name(path)) };
            if !name.starts_with("..") {
                self.add(&path, format!("{target}/{name}"), depth + 1)?;
            }
        }
        Ok(())
    }

    fn too_large(&self) -> CopyError {
        CopyError::TooLarge(self.top.to_owned())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn paths(files: &[v1::File]) -> Vec<&str> {
        files.iter().map(|file| file.path.as_str()).collect()
    }

    #[test]
    fn a_file_has_its_content_and_permission_bits() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("one");
        fs::write(&path, "text").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o4640)).unwrap();
        let expected = v1::File { path: "/etc/a".into(), content: b"text".to_vec(), mode: 0o640 };
        assert_eq!(read(&path, "/etc/a").unwrap(), [expected]);
    }

    #[test]
    fn a_directory_is_all_its_files_as_kubernetes_lays_them_out() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("..2026")).unwrap();
        fs::write(dir.path().join("..2026/key"), "secret").unwrap();
        symlink("..2026", dir.path().join("..data")).unwrap();
        symlink("..data/key", dir.path().join("key")).unwrap();
        fs::create_dir(dir.path().join("more")).unwrap();
        fs::write(dir.path().join("more/x"), "").unwrap();
        let files = read(dir.path(), "/run/secrets/").unwrap();
        assert_eq!(paths(&files), ["/run/secrets/key", "/run/secrets/more/x"]);
        assert_eq!(files[0].content, b"secret");
    }

    #[test]
    fn too_much_is_refused_whatever_its_shape() {
        let dir = tempfile::tempdir().unwrap();
        let large = |path: &Path| matches!(read(path, "/a"), Err(CopyError::TooLarge(_)));
        let file = dir.path().join("large");
        fs::write(&file, vec![0; MOST_BYTES]).unwrap();
        assert_eq!(read(&file, "/a").unwrap().len(), 1);
        fs::write(&file, vec![0; MOST_BYTES + 1]).unwrap();
        assert!(large(&file));
        fs::remove_file(&file).unwrap();
        symlink(".", dir.path().join("again")).unwrap();
        assert!(large(dir.path()));
    }

    #[test]
    fn what_is_no_file_is_named() {
        let error = read(Path::new("/dev/null"), "/a").unwrap_err().to_string();
        assert_eq!(error, "/dev/null is neither a file nor a directory");
        let error = read(Path::new("/no/such"), "/a").unwrap_err().to_string();
        assert!(error.starts_with("cannot read /no/such: "), "{error}");
    }
}
