//! The host's files that a snapshot refers to: those of read-only volumes, which are not copied.
//!
//! Their directories may be a user's, who can put another file there. The guest of a fork has parts
//! of a file in its memory, so the file must be the one that the saved sandbox had, as it was then.

use std::os::unix::fs::MetadataExt;

use crate::look::Looks;
use crate::record::{FileStamp, Volume};
use crate::{Error, Result};

/// The reason for which a path with another file is refused.
const OTHER: &str = "it is another file than the sandbox has";

/// Completes the volumes of a sandbox that is to be saved by what its snapshot must know of the
/// files that it refers to. The volumes of a fork keep what the snapshot of the fork knew.
///
/// # Errors
/// [`Error::Invalid`], which names the volume, if its path leads to another file by now;
/// [`Error::File`] if a file system does not answer.
pub(crate) async fn identify(looks: &Looks, mut volumes: Vec<Volume>) -> Result<Vec<Volume>> {
    for volume in volumes.iter_mut().filter(|one| is_referred_to(one) && one.stamp.is_none()) {
        let (file, stamp) = look(looks, volume).await?;
        (volume.file, volume.stamp) = (Some(file), Some(stamp));
    }
    Ok(volumes)
}

/// Checks that the files to which a snapshot with these volumes refers are those that it knows.
///
/// # Errors
/// [`Error::Invalid`], which names the volume; [`Error::File`] if a file system does not answer.
pub(crate) async fn check(looks: &Looks, volumes: &[Volume]) -> Result<()> {
    for volume in volumes.iter().filter(|one| is_referred_to(one) && one.file.is_some()) {
        let (_, stamp) = look(looks, volume).await?;
        if volume.stamp.is_some_and(|meant| meant != stamp) {
            let why = "it was changed since the snapshot: make the snapshot anew";
            return Err(refused(volume, why));
        }
    }
    Ok(())
}

/// Returns whether the snapshot of a sandbox with this volume refers to its file.
fn is_referred_to(volume: &Volume) -> bool {
    volume.read_only && !volume.overlay && volume.host_device.is_none()
}

/// Looks at the file of a volume, without opening it or following a link. Returns the device and
/// inode number, which are those that the volume has if they are known, and the stamp.
async fn look(looks: &Looks, volume: &Volume) -> Result<((u64, u64), FileStamp)> {
    let path = volume.path.clone();
    let found = looks.run(&volume.path, move || std::fs::symlink_metadata(path)).await?;
    let status = found.map_err(|error| refused(volume, &error.to_string()))?;
    let file = (status.dev(), status.ino());
    match status.is_file() && volume.file.is_none_or(|meant| meant == file) {
        true => Ok((file, FileStamp::from(&status))),
        false => Err(refused(volume, OTHER)),
    }
}

fn refused(volume: &Volume, why: &str) -> Error {
    Error::Invalid(format!("volume {}: {:?}: {why}", volume.name, volume.path))
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::path::Path;
    use std::time::Duration;

    use rustix::fs::{CWD, Mode};

    use super::*;
    use crate::snapshot::begin::tests::snapshot;

    /// Returns the volumes of a sandbox: one of its own, and one of the file at `path`.
    fn volumes(path: &Path, file: Option<(u64, u64)>) -> Vec<Volume> {
        let [own, shared] = <[Volume; 2]>::try_from(snapshot().volumes).unwrap();
        vec![own, Volume { path: path.to_owned(), file, ..shared }]
    }

    fn identity(path: &Path) -> Option<(u64, u64)> {
        let status = fs::metadata(path).unwrap();
        Some((status.dev(), status.ino()))
    }

    /// Sets the time of change of a file back by `seconds`.
    fn set_back(path: &Path, seconds: u64) {
        let file = File::options().write(true).open(path).unwrap();
        let modified = file.metadata().unwrap().modified().unwrap();
        file.set_modified(modified - Duration::from_secs(seconds)).unwrap();
    }

    #[tokio::test]
    async fn a_file_that_was_replaced_is_refused_by_saves_and_forks() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        fs::write(&path, "x").unwrap();
        let looks = Looks::new(1);
        let volumes = volumes(&path, identity(&path));
        check(&looks, &volumes).await.unwrap();
        identify(&looks, volumes.clone()).await.unwrap();
        fs::rename(&path, dir.path().join("other")).unwrap();
        let refused = async |why: &str| {
            let fork = check(&looks, &volumes).await.unwrap_err().to_string();
            let save = identify(&looks, volumes.clone()).await.unwrap_err().to_string();
            assert!(fork.starts_with("volume shared: ") && fork.contains(why), "{fork}");
            assert_eq!(fork, save);
        };
        refused("No such file").await;
        // A link to the right file is not that file.
        std::os::unix::fs::symlink("other", &path).unwrap();
        refused(OTHER).await;
        fs::remove_file(&path).unwrap();
        // Nothing waits for its other end.
        rustix::fs::mkfifoat(CWD, &path, Mode::RUSR).unwrap();
        refused(OTHER).await;
        fs::remove_file(&path).unwrap();
        fs::write(&path, "x").unwrap();
        refused(OTHER).await;
        fs::rename(dir.path().join("other"), &path).unwrap();
        check(&looks, &volumes).await.unwrap();
    }

    #[tokio::test]
    async fn a_file_that_was_changed_since_the_snapshot_is_refused_by_forks() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        fs::write(&path, "one").unwrap();
        let looks = Looks::new(1);
        let saved = identify(&looks, volumes(&path, None)).await.unwrap();
        assert_eq!((saved[0].file, saved[0].stamp), (None, None));
        assert_eq!((saved[1].file, saved[1].stamp.unwrap().size_bytes), (identity(&path), 3));
        check(&looks, &saved).await.unwrap();
        set_back(&path, 60);
        let refused = check(&looks, &saved).await.unwrap_err().to_string();
        assert!(refused.starts_with("volume shared: "), "{refused}");
        assert!(refused.contains("changed since the snapshot"), "{refused}");
        // A fork that is saved refers to what its own snapshot meant.
        assert_eq!(identify(&looks, saved.clone()).await.unwrap(), saved);
    }

    #[tokio::test]
    async fn a_snapshot_of_an_earlier_version_is_checked_by_what_it_knows() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        fs::write(&path, "one").unwrap();
        let looks = Looks::new(1);
        let numbers = volumes(&path, identity(&path));
        set_back(&path, 60);
        check(&looks, &numbers).await.unwrap();
        let nothing = volumes(&path, None);
        fs::remove_file(&path).unwrap();
        check(&looks, &nothing).await.unwrap();
        assert!(check(&looks, &numbers).await.is_err());
    }
}
