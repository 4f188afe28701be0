//! Roots whose layers are not on the host: those of lazily pulled images.
//!
//! `slipway-snapshotter` answers containerd with a directory without files for such a layer, and
//! writes `image.json` beside it: the image, and whether the layer is its topmost one. The image is
//! in the node's cache, or is pulled into it again; the root becomes no image of its own.
//!
//! containerd knows layers by what an image claims of their content, and nobody has checked that
//! for an image that is pulled lazily. So a layer's image counts only if it is of the same
//! repository as the image that the container is to have; otherwise that one is pulled by its name.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use serde::Deserialize;

/// The annotation with the name of a container's image, of containerd's CRI plugin.
pub const IMAGE_NAME: &str = "io.kubernetes.cri.image-name";
/// The file beside a layer's files.
const IMAGE: &str = "image.json";
/// The directory of a layer's files.
const FILES: &str = "fs";
/// The largest file that is read, bytes.
const LARGEST: u64 = 1 << 20;
/// The longest reference, bytes.
const LONGEST: usize = 1024;

/// The image of a layer that is not on the host.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Image {
    /// The image, as `name@digest`.
    pub reference: String,
    /// The digest of its manifest for this platform.
    pub digest: String,
    /// Set if the layer is its topmost one.
    pub whole: bool,
}

/// Finds the image of a root with these layers, the uppermost first. Returns `None` if their files
/// are on the host.
///
/// # Errors
/// One line: only layers below have no files; an `image.json` cannot be read.
pub fn image_of(layers: &[PathBuf]) -> Result<Option<Image>, String> {
    let Some((top, below)) = layers.split_first() else { return Ok(None) };
    if let Some(image) = read(top)? {
        return Ok(Some(image));
    }
    for layer in below {
        if let Some(image) = read(layer)? {
            return Err(format!(
                "the root has layers of its own on those of {}, which was pulled lazily, so that \
                 their files are not here: pull the image with another snapshotter (`ctr image \
                 pull --snapshotter overlayfs`)",
                image.reference
            ));
        }
    }
    Ok(None)
}

/// Refuses changes on top of layers that are not here.
///
/// # Errors
/// One line, if there are changes.
pub fn check_unchanged(image: &Image, changed: Option<&Path>) -> Result<(), String> {
    match changed {
        None => Ok(()),
        Some(upper) => Err(format!(
            "the snapshot has changes of its own in {}, and {} was pulled lazily: begin with a \
             new snapshot, or pull the image with another snapshotter",
            upper.display(),
            image.reference
        )),
    }
}

/// Returns the reference by which the image of a container is pulled: the one of its layers, or
/// `name`, the name of the container's image, if the layers were pulled for another one.
///
/// # Errors
/// One line: the layers are a part of an image, and the container's image has no name.
pub fn reference<'a>(image: &'a Image, name: Option<&'a str>) -> Result<&'a str, String> {
    // Some containers' images are named by a digest alone.
    let name = name.filter(|name| !name.starts_with("sha256:") && is_reference(name));
    match name {
        Some(name) if !image.whole || repository(name) != repository(&image.reference) => Ok(name),
        None if !image.whole => Err(format!(
            "the root has a part of the layers of {}, which was pulled lazily: pull the \
             container's image with another snapshotter (`ctr image pull --snapshotter overlayfs`)",
            image.reference
        )),
        _ => Ok(&image.reference),
    }
}

/// Checks the digest of an image that was pulled by `reference` for these layers.
///
/// # Errors
/// One line: the layers are of an image with another digest.
pub fn check_pulled(layers: &Image, reference: &str, digest: &str) -> Result<(), String> {
    if reference == layers.reference && digest != layers.digest {
        return Err(format!(
            "the registry has another manifest for {reference}: pull the image again"
        ));
    }
    Ok(())
}

/// Reads the file beside a layer. Returns `None` if there is none.
fn read(layer: &Path) -> Result<Option<Image>, String> {
    let Some(dir) = layer.parent().filter(|_| layer.ends_with(FILES)) else { return Ok(None) };
    let path = dir.join(IMAGE);
    let failed = |why: &dyn std::fmt::Display| format!("{}: {why}", path.display());
    let file = match File::open(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        file => file.map_err(|error| failed(&error))?,
    };
    let mut bytes = Vec::new();
    file.take(LARGEST).read_to_end(&mut bytes).map_err(|error| failed(&error))?;
    let image: Image = serde_json::from_slice(&bytes).map_err(|error| failed(&error))?;
    if !is_reference(&image.reference) || !is_digest(&image.digest) {
        return Err(failed(&"it names no image: pull the image again"));
    }
    Ok(Some(image))
}

/// Returns whether a text can be an argument of `slipway image pull`, which parses it.
fn is_reference(text: &str) -> bool {
    let begins = text.starts_with(|first: char| first.is_ascii_alphanumeric() || first == '[');
    begins && text.len() <= LONGEST && text.bytes().all(|byte| byte.is_ascii_graphic())
}

fn is_digest(text: &str) -> bool {
    let digits = text.strip_prefix("sha256:").unwrap_or_default();
    digits.len() == 64 && digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Returns the registry and the repository of a reference, as docker completes short ones.
fn repository(reference: &str) -> String {
    let name = reference.split('@').next().unwrap_or_default();
    // A colon before a slash belongs to a port.
    let name = match name.rsplit_once(':') {
        Some((name, tag)) if !tag.contains('/') => name,
        _ => name,
    };
    match name.split_once('/') {
        Some(("docker.io" | "index.docker.io", rest)) => hub(rest),
        Some((first, _)) if first.contains(['.', ':']) || first == "localhost" => name.to_owned(),
        _ => hub(name),
    }
}

fn hub(name: &str) -> String {
    let folder = if name.contains('/') { "" } else { "library/" };
    format!("docker.io/{folder}{name}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(reference: &str, whole: bool) -> Image {
        let digest = format!("sha256:{}", "0f".repeat(32));
        Image { reference: reference.to_owned(), digest, whole }
    }

    #[test]
    fn short_names_mean_what_they_mean_in_docker() {
        for (one, other) in [
            ("busybox", "docker.io/library/busybox:1@sha256:00"),
            ("index.docker.io/library/busybox", "docker.io/busybox"),
            ("team/app:1", "docker.io/team/app"),
            ("localhost:5000/app", "localhost:5000/app:2"),
            ("[::1]:5000/app:1", "[::1]:5000/app@sha256:00"),
        ] {
            assert_eq!(repository(one), repository(other), "{one}");
        }
        assert_ne!(repository("registry.test/busybox"), repository("busybox"));
        assert_ne!(repository("localhost:5000/app"), repository("localhost:5001/app"));
    }

    #[test]
    fn layers_of_another_image_are_pulled_by_the_containers_name() {
        let layers = image("registry.test/app@sha256:00", true);
        let own = layers.reference.as_str();
        assert_eq!(reference(&layers, None), Ok(own));
        assert_eq!(reference(&layers, Some("registry.test/app:7")), Ok(own));
        assert_eq!(reference(&layers, Some("sha256:00")), Ok(own));
        assert_eq!(reference(&layers, Some("--help")), Ok(own));
        assert_eq!(reference(&layers, Some("victim:1")), Ok("victim:1"));
        let part = image("registry.test/app@sha256:00", false);
        assert_eq!(reference(&part, Some("registry.test/base:1")), Ok("registry.test/base:1"));
        assert_eq!(reference(&part, Some("registry.test/app:1")), Ok("registry.test/app:1"));
        assert!(reference(&part, None).unwrap_err().contains("another snapshotter"));
    }

    #[test]
    fn the_pulled_image_is_the_layers_own() {
        let layers = image("registry.test/app@sha256:00", true);
        assert_eq!(check_pulled(&layers, &layers.reference, &layers.digest), Ok(()));
        assert_eq!(check_pulled(&layers, "registry.test/base:1", "sha256:00"), Ok(()));
        let refused = check_pulled(&layers, &layers.reference, "sha256:00").unwrap_err();
        assert!(refused.contains("another manifest"), "{refused}");
    }

    #[test]
    fn what_names_no_image_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let layer = dir.path().join("fs");
        std::fs::create_dir(&layer).unwrap();
        assert_eq!(read(&layer), Ok(None));
        let digest = image("", true).digest;
        let json = |reference: &str, digest: &str| {
            let json = serde_json::json!({
                "reference": reference, "digest": digest, "layers": [], "whole": true,
            });
            json.to_string()
        };
        for bad in [
            "{".to_owned(),
            json("--plain-http", &digest),
            json("a b", &digest),
            json("", &digest),
            json("a", "sha256:00"),
            json("a", &digest[7..]),
        ] {
            std::fs::write(dir.path().join(IMAGE), &bad).unwrap();
            let refused = read(&layer).unwrap_err();
            assert!(refused.contains(IMAGE) && !refused.contains('\n'), "{refused}");
        }
        std::fs::write(dir.path().join(IMAGE), json("a:1", &digest)).unwrap();
        assert_eq!(read(&layer).unwrap().unwrap().reference, "a:1");
        // Of a directory with another name, it is an ordinary file.
        let other = dir.path().join("root");
        assert_eq!(read(&other), Ok(None));
    }
}
