//! The working set of forks: the pages that they touch soon after they begin, kept in a file beside
//! the template, or in the directory of a sandbox that comes back from its own save.
//!
//! The plane's pool tells it of a fork that runs ([`touched`]). It is [kept](keep) for later
//! daemons, whose pool copies it ahead of the faults of the next fork ([`copy_ahead`]). The file
//! costs no fork its memory: one that is damaged is passed over, with a line in the log, and made
//! anew.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use slipway_hypervisor::TemplateName;
use slipway_plane_api::{PlaneClient, v1 as plane_v1};
use tonic::Status;

use super::pages::digest;
use super::threads::apart;
use crate::error::MOST_MESSAGE;
use crate::{Error, Result};

/// The version of the file's layout.
const VERSION: u32 = 1;
/// The most bytes of the file: twice those of as many ranges as the pool tells.
const MOST: u64 = 8 << 20;

/// The file's content, as JSON.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    version: u32,
    /// The owner: the digest of the template's memory, or the id of the sandbox.
    of: String,
    /// The start and the end of each range in bytes, ascending.
    ranges: Vec<(u64, u64)>,
    /// SHA-256 of the owner and the ranges ([`Kept::digest`]), in hexadecimal digits.
    sha256: String,
}

impl Kept {
    fn new(of: String, ranges: Vec<(u64, u64)>) -> Self {
        let sha256 = Self::digest(&of, &ranges);
        Self { version: VERSION, of, ranges, sha256 }
    }

    /// Returns the digest of a working set: of the owner's name, a zero, and the bounds of each
    /// range as little-endian words.
    fn digest(of: &str, ranges: &[(u64, u64)]) -> String {
        let words = ranges.iter().flat_map(|(start, end)| [*start, *end]);
        let words = words.flat_map(u64::to_le_bytes);
        digest(&of.bytes().chain([0]).chain(words).collect::<Vec<_>>())
    }

    /// Parses the working set of `of`.
    ///
    /// # Errors
    /// The reason: the file is of another version, of another owner, or damaged.
    fn parse(json: &[u8], of: &str) -> Result<Vec<(u64, u64)>, String> {
        let kept: Self = serde_json::from_slice(json).map_err(|error| {
            // The message repeats names of fields as they are in the file.
            slipway_printable::line(&format!("it is damaged: {error}"), MOST_MESSAGE)
        })?;
        if kept.version != VERSION {
            return Err(format!("it has layout {}, this version reads {VERSION}", kept.version));
        }
        if Self::digest(&kept.of, &kept.ranges) != kept.sha256 {
            return Err("it is damaged: its digest differs".to_owned());
        }
        if kept.of != of {
            return Err("it is that of another memory".to_owned());
        }
        Ok(kept.ranges)
    }
}

/// Returns the path of the working set in a directory.
pub(crate) fn path(dir: &Path) -> PathBuf {
    dir.join("working-set")
}

/// Returns the bytes of a template that a fork has touched by now, and has the pool copy them ahead
/// for those to come. `file` is the device and inode number of the fork's memory.
///
/// # Errors
/// The plane's refusal: `FAILED_PRECONDITION` if they are too many.
pub(crate) async fn touched(
    plane: &PlaneClient,
    template: &TemplateName,
    (device, inode): (u64, u64),
) -> Result<Vec<plane_v1::ByteRange>, Status> {
    let request = plane_v1::LearnTemplateRequest { name: template.to_string(), device, inode };
    let reply = plane.clone().learn_template(request).await?;
    Ok(reply.into_inner().ahead)
}

/// Keeps the working set of `of` in the file at `path`.
///
/// # Errors
/// [`Error::File`]; the file keeps what it had.
pub(crate) async fn keep(
    path: PathBuf,
    of: String,
    ranges: Vec<plane_v1::ByteRange>,
) -> Result<()> {
    apart(move || {
        let kept = Kept::new(of, ranges.iter().map(|range| (range.start, range.end)).collect());
        let json = serde_json::to_vec(&kept).map_err(std::io::Error::from);
        let written = json.and_then(|json| slipway_replace::replace(&path, &json, false));
        written.map_err(Error::file("cannot write", &path))
    })
    .await
}

/// Removes the file at `path`, if there is one.
///
/// # Errors
/// [`Error::File`].
pub(crate) async fn forget(path: PathBuf) -> Result<()> {
    apart(move || {
        slipway_replace::remove(&path).map(drop).map_err(Error::file("cannot remove", &path))
    })
    .await
}

/// Has the pool copy ahead, for each fork of `template` to come, the working set of `of` in the
/// file at `path`. Returns `false` if there is none that can be used.
pub(crate) async fn copy_ahead(
    plane: &PlaneClient,
    template: &TemplateName,
    path: PathBuf,
    of: String,
) -> bool {
    let its = path.clone();
    let Ok(read) = apart(move || Ok(read(&its, &of))).await else { return false };
    let asked = match read {
        Ok(None) => return false,
        Ok(Some(ranges)) => {
            let range = |(start, end)| plane_v1::ByteRange { start, end };
            let ranges = ranges.into_iter().map(range).collect();
            let request = plane_v1::CopyAheadRequest { name: template.to_string(), ranges };
            let asked = plane.clone().copy_ahead(request).await;
            asked.map(drop).map_err(|status| status.message().to_owned())
        }
        Err(why) => Err(why),
    };
    if let Err(why) = &asked {
        tracing::warn!(path = %path.display(), %why, "a working set is not used");
    }
    asked.is_ok()
}

/// Reads the working set of `of`. Returns `None` if there is no file at `path`.
///
/// # Errors
/// The reason for which the file cannot be used.
fn read(path: &Path, of: &str) -> Result<Option<Vec<(u64, u64)>>, String> {
    let mut json = Vec::new();
    let read = File::open(path).and_then(|file| file.take(MOST).read_to_end(&mut json));
    match read {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.to_string()),
        Ok(_) => Kept::parse(&json, of).map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges() -> Vec<plane_v1::ByteRange> {
        let range = |start, end| plane_v1::ByteRange { start, end };
        vec![range(4096, 12288), range(1 << 40, (1 << 40) + 4096)]
    }

    #[tokio::test]
    async fn a_working_set_is_kept_and_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let path = path(dir.path());
        assert_eq!(read(&path, "a"), Ok(None));
        keep(path.clone(), "a".to_owned(), ranges()).await.unwrap();
        let kept = vec![(4096, 12288), (1 << 40, (1 << 40) + 4096)];
        assert_eq!(read(&path, "a"), Ok(Some(kept)));
        assert!(read(&path, "b").unwrap_err().contains("another memory"));
        keep(path.clone(), "b".to_owned(), Vec::new()).await.unwrap();
        assert_eq!(read(&path, "b"), Ok(Some(Vec::new())));
        forget(path.clone()).await.unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        forget(path).await.unwrap();
    }

    #[test]
    fn a_working_set_with_a_changed_byte_is_refused() {
        let kept = Kept::new("a".to_owned(), vec![(0, 4096), (8192, 16384)]);
        let json = serde_json::to_vec(&kept).unwrap();
        assert_eq!(Kept::parse(&json, "a").unwrap(), kept.ranges);
        for at in 0..json.len() {
            let mut changed = json.clone();
            changed[at] ^= 1;
            let why = Kept::parse(&changed, "a").unwrap_err();
            assert!(!why.contains('\n'), "{why}");
            assert!(Kept::parse(&json[..at], "a").is_err(), "{at}");
        }
        let newer = serde_json::to_vec(&Kept { version: 2, ..kept }).unwrap();
        assert!(Kept::parse(&newer, "a").unwrap_err().contains("layout 2"));
    }
}
