//! Templates in files on a disk.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use slipway_ram::Template;

use crate::make::MOST;

/// Writes `template` to a new file at `path`, which replaces a file there once all of it is on the
/// disk. Holes of the template are holes of the file. Waits for the disk.
///
/// # Errors
/// The file cannot be written.
pub fn save(template: &Template, path: &Path) -> io::Result<()> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let mut part = name.to_owned();
    part.push(".part");
    let part = path.with_file_name(part);
    let file =
        OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&part)?;
    let written = template.write(file.as_fd()).and_then(|()| file.sync_all());
    let renamed = written.and_then(|()| std::fs::rename(&part, path));
    if renamed.is_err() {
        // The error above is the one that matters.
        let _ = std::fs::remove_file(&part);
    }
    renamed?;
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    File::open(directory.unwrap_or(Path::new(".")))?.sync_all()
}

/// Loads the template that is in the file at `path`. Waits for the disk. A later change of the file
/// does not change the template.
///
/// # Errors
/// The file cannot be read; `InvalidData` if it is no regular file, or too large for a sandbox's
/// memory; those of [`Template::copy_of`].
pub fn load(path: &Path) -> io::Result<Template> {
    // Not waiting for the other end of a pipe.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let found = file.metadata()?;
    if !found.is_file() || found.len() > MOST {
        let text = "no regular file, or larger than a sandbox's memory";
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    Template::copy_of(file.as_fd())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_is_loaded_as_it_was_saved() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("memory");
        let file = rustix::fs::memfd_create(c"saved", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 1 << 20).unwrap();
        rustix::io::pwrite(&file, b"template", 512 << 10).unwrap();
        let template = Template::copy_of(file.as_fd()).unwrap();
        std::fs::write(&path, "an earlier one").unwrap();
        save(&template, &path).unwrap();
        let again = load(&path).unwrap();
        assert_eq!((again.len(), again.data()), (1 << 20, template.data()));
        let mut bytes = [0; 8];
        rustix::io::pread(again.file(), &mut bytes, 512 << 10).unwrap();
        assert_eq!(&bytes, b"template");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
        assert!(load(directory.path()).is_err() && load(&directory.path().join("no")).is_err());
        let large = File::create(&path).unwrap();
        large.set_len(MOST + (1 << 20)).unwrap();
        assert_eq!(load(&path).unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert!(save(&template, Path::new("/")).is_err());
    }
}
