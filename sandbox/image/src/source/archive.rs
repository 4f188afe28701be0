//! Images in one tar archive: an OCI layout, or what `docker save` writes.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;

use super::layout::{Local, Store, open_regular};
use crate::manifest::{self, Layer, Plan};
use crate::root::Form;
use crate::root::read::{EntryContent, TarReader};
use crate::root::tree::{NodeKind, split_path};
use crate::{Digest, Error, Limits, Reference, Result, spool};

/// The most files in an archive of one image, which has some for each layer.
const MAX_MEMBERS: usize = 100_000;
/// The longest chain of links from layer to layer, as old versions of docker wrote them.
const MAX_LINKS: usize = 8;

/// One image in `manifest.json`.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DockerImage {
    config: String,
    #[serde(default)]
    repo_tags: Option<Vec<String>>,
    #[serde(default)]
    layers: Vec<String>,
}

/// Opens the archive `path`. A compressed archive is first uncompressed into an unnamed file in
/// `dir`.
pub(crate) fn open(path: &Path, dir: &Path, limits: &Limits) -> Result<Local> {
    let place = path.display().to_string();
    let file = open_regular(path).map_err(|e| Error::io("open", path, e))?;
    let len = file.metadata().map_err(|e| Error::io("read", path, e))?.len();
    let max = limits.archive_bytes(len);
    let file = spool::uncompress_archive(&file, dir, max, &place)?.unwrap_or(file);
    let members = members(&file, limits).map_err(|e| Error::source(&place, e))?;
    Ok(Local { store: Store::Archive(Arc::new(file), members), paths: HashMap::new(), place })
}

/// Returns the offset and length of every file in the archive, with links to files resolved.
fn members(file: &File, limits: &Limits) -> Result<HashMap<String, (u64, u64)>, String> {
    let mut reader = TarReader::new(file, limits.path_bytes).map_err(|e| e.to_string())?;
    let (mut files, mut links) = (HashMap::new(), Vec::new());
    while let Some(entry) = reader.next()? {
        if files.len() + links.len() >= MAX_MEMBERS {
            return Err(format!("more than {MAX_MEMBERS} files"));
        }
        let path = joined("", &entry.path, limits)?;
        match entry.what {
            EntryContent::Node(NodeKind::File(data)) => match data.pieces.as_slice() {
                [] => drop(files.insert(path, (0, 0))),
                [one] if one.len == data.len => drop(files.insert(path, (one.from, one.len))),
                _ => return Err(format!("the sparse file {path}")),
            },
            EntryContent::Node(NodeKind::Symlink(target)) => {
                let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder).to_owned();
                links.push((path, folder, target));
            }
            EntryContent::HardLink(target) => links.push((path, String::new(), target)),
            _ => {}
        }
    }
    for _ in 0..MAX_LINKS {
        for (path, folder, target) in &links {
            if let Some(&found) = link_target(folder, target).and_then(|t| files.get(&t)) {
                files.insert(path.clone(), found);
            }
        }
    }
    Ok(files)
}

fn joined(folder: &str, path: &[u8], limits: &Limits) -> Result<String, String> {
    let parts = split_path(path, limits.path_bytes)?;
    let parts = parts.iter().map(|part| String::from_utf8_lossy(part));
    let path = parts.collect::<Vec<_>>().join("/");
    Ok(if folder.is_empty() { path } else { format!("{folder}/{path}") })
}

/// Resolves a link's target such as `../ID/layer.tar`, relative to `folder`. Returns `None` if it
/// leads out of the archive.
fn link_target(folder: &str, target: &[u8]) -> Option<String> {
    let mut parts: Vec<&str> = folder.split('/').filter(|part| !part.is_empty()).collect();
    for part in std::str::from_utf8(target).ok()?.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()?),
            _ => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

/// Returns the plan for image `name` of a `docker save` archive, or for its only image, and the
/// image's names. Stores the paths of the image's layers in `local`.
pub(crate) fn plan_docker(
    local: &mut Local,
    name: Option<&str>,
    limits: &Limits,
) -> Result<(Plan, Vec<Reference>)> {
    let place = local.place.clone();
    let fail = |reason: String| Error::source(&place, reason);
    let max = limits.document_bytes;
    let list = local.read("manifest.json", max)?;
    let list = list.ok_or_else(|| fail("is no docker archive: manifest.json is missing".into()))?;
    let images: Vec<DockerImage> =
        serde_json::from_slice(&list).map_err(|e| Error::bad_document("manifest.json", e))?;
    let image = pick(&images, name).map_err(fail)?;
    let config = local.read(&image.config, max)?;
    let config = config.ok_or_else(|| fail(format!("{} is missing", image.config)))?;
    check_config_name(&image.config, &config)?;
    let layers = layers(local, image, &config)?;
    manifest::check_layers(&layers, limits, &place)?;
    let plan = manifest::synthesise(&config, layers, &place)?;
    let names = image.repo_tags.iter().flatten().filter_map(|tag| tag.parse().ok()).collect();
    Ok((plan, names))
}

fn pick<'a>(images: &'a [DockerImage], name: Option<&str>) -> Result<&'a DockerImage, String> {
    let parse = |text: &str| text.parse::<Reference>().ok();
    let all =
        || images.iter().flat_map(|i| i.repo_tags.iter().flatten().cloned()).collect::<Vec<_>>();
    match (name, images) {
        (_, []) => Err("has no image".into()),
        (Some(name), _) => images
            .iter()
            .find(|i| {
                i.repo_tags
                    .iter()
                    .flatten()
                    .any(|t| parse(t).is_some_and(|t| Some(t) == parse(name)))
            })
            .ok_or_else(|| format!("has no image '{name}', but: {}", all().join(", "))),
        (None, [image]) => Ok(image),
        (None, _) => Err(format!("has {} images, say which: {}", images.len(), all().join(", "))),
    }
}

/// Checks the config against the digest in its file's name: `HEX.json` or `blobs/sha256/HEX`.
fn check_config_name(path: &str, config: &[u8]) -> Result<()> {
    let (expected, actual) = (digest_in_name(path), Digest::of(config));
    match expected {
        Some(expected) if expected != actual => {
            Err(Error::DigestMismatch { what: "the image's config".into(), expected, actual })
        }
        _ => Ok(()),
    }
}

fn digest_in_name(path: &str) -> Option<Digest> {
    let name = path.rsplit('/').next().unwrap_or(path);
    let name = name.split('.').next().unwrap_or(name);
    format!("sha256:{name}").parse().ok()
}

fn layers(local: &mut Local, image: &DockerImage, config: &[u8]) -> Result<Vec<Layer>> {
    let diff_ids = crate::config::parse(config)?.diff_ids;
    if image.layers.len() != diff_ids.len() {
        let reason = format!(
            "{} layers, but digests of {} in its config",
            image.layers.len(),
            diff_ids.len()
        );
        return Err(Error::bad_document("manifest.json", reason));
    }
    let mut layers = Vec::new();
    for (path, diff_id) in image.layers.iter().zip(diff_ids) {
        let found = local.store.open(path).map_err(|e| Error::io("read", path.as_ref(), e))?;
        let missing = || Error::source(&local.place, format!("{path} is missing"));
        let (_, size) = found.ok_or_else(missing)?;
        // A blob's name is the digest of its bytes, which may be compressed; `ID/layer.tar` is
        // uncompressed.
        let blob = path.starts_with("blobs/sha256/");
        let digest = digest_in_name(path).filter(|_| blob).unwrap_or(diff_id);
        local.paths.insert(digest, path.clone());
        layers.push(Layer { digest, size, diff_id, form: Form::Changes, toc: None });
    }
    Ok(layers)
}
