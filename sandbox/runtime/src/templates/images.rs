//! The images of snapshots, which stay as long as their snapshots.
//!
//! A snapshot's description names its image. A directory that is being filled has no description
//! yet: it has a file with the image's digest until the snapshot has its name.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::path::Path;

use serde::Deserialize;
use slipway_image::Digest;

use super::files::MANIFEST;
use super::manifest::MOST_MANIFEST;
use super::store::{IMAGE, Templates, UNFINISHED, Unfinished};
use super::threads::apart;
use crate::{Error, Result, name};

/// The part of a description that names the image, in any version of the layout.
#[derive(Deserialize)]
struct Described {
    snapshot: Option<Saved>,
}

#[derive(Deserialize)]
struct Saved {
    settings: Settings,
}

#[derive(Deserialize)]
struct Settings {
    image_digest: Digest,
}

impl Templates {
    /// Makes the directory for a new snapshot of a container with this image, which is not removed
    /// from here on.
    ///
    /// # Errors
    /// The errors of [`Templates::begin`].
    pub(crate) async fn begin_snapshot(&self, name: &str, image: &str) -> Result<Unfinished> {
        let (unfinished, image) = (self.begin(name).await?, image.to_owned());
        let noted = apart(move || {
            let path = unfinished.file(IMAGE);
            fs::write(&path, image).map_err(Error::file("cannot write", &path))?;
            Ok(unfinished)
        });
        noted.await
    }
}

/// Returns the digests of the images of the snapshots in the directory `dir`, and of those that are
/// being made there.
///
/// # Errors
/// [`Error::File`]; [`Error::Invalid`], which names a snapshot whose image is not known: no image
/// must be removed then.
pub(crate) fn images_of_snapshots(dir: &Path) -> Result<BTreeSet<Digest>> {
    let failed = |error| Error::file("cannot read", dir)(error);
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(BTreeSet::new()),
        entries => entries.map_err(failed)?,
    };
    let mut images = BTreeSet::new();
    for entry in entries {
        // The names of snapshots are ASCII: another entry is none.
        let Ok(entry) = entry.map_err(failed)?.file_name().into_string() else { continue };
        let name = entry.strip_suffix(UNFINISHED).unwrap_or(&entry);
        if name::check_template(name).is_ok() {
            images.extend(image_of(dir, &entry, name).map_err(|why| unclear(name, &why))?);
        }
    }
    Ok(images)
}

fn unclear(name: &str, why: &str) -> Error {
    Error::Invalid(format!(
        "no image can be removed, since that of snapshot {name} is not known: {why}; `slipway \
         snapshot rm {name}` removes the snapshot"
    ))
}

/// Returns the image of the snapshot `name` in the directory `entry`, which has this name or is
/// being filled. Returns `None` for a template.
///
/// # Errors
/// The reason for which its image is not known.
fn image_of(dir: &Path, entry: &str, name: &str) -> Result<Option<Digest>, String> {
    if entry == name {
        return described(&dir.join(name).join(MANIFEST));
    }
    match read(&dir.join(entry).join(IMAGE))?.as_deref() {
        // It may have got its name meanwhile.
        None => described(&dir.join(name).join(MANIFEST)),
        // The note is being written: the sandbox that is to be saved has the image still.
        Some([]) => Ok(None),
        Some(note) => {
            let digest = String::from_utf8_lossy(note).parse::<Digest>();
            digest.map(Some).map_err(|error| error.to_string())
        }
    }
}

/// Returns the image that the description at `path` names. Without a description there is no
/// snapshot: it is being removed.
fn described(path: &Path) -> Result<Option<Digest>, String> {
    match read(path)? {
        Some(json) => described_in(&json),
        None => Ok(None),
    }
}

/// Returns the image that a description names. Returns `None` for that of a template.
///
/// # Errors
/// The reason for which its image is not known.
pub(super) fn described_in(json: &[u8]) -> Result<Option<Digest>, String> {
    let described: Result<Described, _> = serde_json::from_slice(json);
    let described = described.map_err(|error| format!("its manifest is damaged: {error}"))?;
    Ok(described.snapshot.map(|snapshot| snapshot.settings.image_digest))
}

/// Reads a small file. Returns `None` if there is none.
fn read(path: &Path) -> Result<Option<Vec<u8>>, String> {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(MOST_MANIFEST).read_to_end(&mut bytes));
    match read {
        Ok(_) => Ok(Some(bytes)),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            Ok(None)
        }
        Err(error) => Err(format!("cannot read {}: {error}", path.display())),
    }
}

#[cfg(test)]
mod tests {
    use slipway_plane_api::PlaneClient;
    use tonic::transport::Endpoint;

    use super::super::manifest::tests::manifest;
    use super::super::pages::digest;
    use super::*;
    use crate::snapshot::begin::tests::snapshot;

    /// Returns the templates of a node whose plane is not there.
    fn templates(dir: &Path) -> Templates {
        let plane = PlaneClient::new(Endpoint::from_static("http://[::1]:1").connect_lazy());
        Templates::new(dir.to_owned(), plane, 0)
    }

    #[tokio::test]
    async fn the_image_of_a_snapshot_is_known_from_its_beginning_to_its_end() {
        let dir = tempfile::tempdir().unwrap();
        let (dir, image) = (dir.path(), Digest::of(b"i"));
        let all = templates(dir);
        let images = || images_of_snapshots(dir).unwrap().into_iter().collect::<Vec<_>>();
        assert!(images_of_snapshots(&dir.join("missing")).unwrap().is_empty());
        let unfinished = all.begin_snapshot("web", &image.to_string()).await.unwrap();
        assert_eq!(images(), [image]);
        fs::write(unfinished.machine(), "state").unwrap();
        fs::write(unfinished.memory(), "").unwrap();
        let mut manifest = manifest("web");
        manifest.machine_sha256 = digest(b"state");
        let mut snapshot = snapshot();
        snapshot.settings.image_digest = image.to_string();
        manifest.snapshot = Some(snapshot);
        unfinished.finish(&manifest).unwrap();
        assert_eq!(images(), [image]);
        assert!(!dir.join("web").join(IMAGE).exists());
        all.remove("web").await.unwrap();
        assert!(images().is_empty());
        let begun = all.begin_snapshot("web", &image.to_string()).await.unwrap();
        drop(begun);
        assert!(images().is_empty());
        let template = all.begin("machine").await.unwrap();
        assert!(images().is_empty(), "a template has no image");
        drop(template);
    }

    #[test]
    fn a_snapshot_whose_image_is_not_known_keeps_all_images() {
        let dir = tempfile::tempdir().unwrap();
        let web = dir.path().join("web");
        fs::create_dir(&web).unwrap();
        // No template, and no directory.
        fs::write(dir.path().join("lost"), "").unwrap();
        assert!(images_of_snapshots(dir.path()).unwrap().is_empty());
        let of = |json: &str| {
            fs::write(web.join(MANIFEST), json).unwrap();
            images_of_snapshots(dir.path()).map_err(|error| error.to_string())
        };
        let image = Digest::of(b"i");
        let later =
            format!(r#"{{"version":9,"snapshot":{{"settings":{{"image_digest":"{image}"}}}}}}"#);
        assert_eq!(of(&later), Ok(BTreeSet::from([image])));
        assert_eq!(of(r#"{"version": 1, "name": "web"}"#), Ok(BTreeSet::new()));
        let unnamed = r#"{"snapshot": {"settings": {"image_digest": "debian:12"}}}"#;
        for json in ["", "{", &later[..40], r#"{"snapshot": {}}"#, unnamed] {
            let error = of(json).unwrap_err();
            assert!(error.contains("snapshot web is not known"), "{error}");
            assert!(error.contains("`slipway snapshot rm web`"), "{error}");
            assert!(!error.contains('\n'), "{error}");
        }
        fs::remove_file(web.join(MANIFEST)).unwrap();
        fs::create_dir(web.join(MANIFEST)).unwrap();
        assert!(images_of_snapshots(dir.path()).is_err(), "it cannot be read");
        fs::rename(&web, dir.path().join("web.unfinished")).unwrap();
        fs::write(dir.path().join("web.unfinished").join(IMAGE), "sha256:12").unwrap();
        let error = images_of_snapshots(dir.path()).unwrap_err().to_string();
        assert!(error.contains("snapshot web is not known"), "{error}");
    }
}
