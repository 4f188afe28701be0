//! Manifests and indexes: their contents, and the checks that need nothing but them.

use oci_spec::image::{Descriptor, ImageIndex, ImageManifest, MediaType};
use serde_json::Value;

use crate::config::{self, Parsed};
use crate::root::Form;
use crate::{Digest, Error, Limits, Result};

/// The platform of sandboxes.
pub(crate) const PLATFORM: &str = "linux/amd64";

const MANIFESTS: [&str; 2] = [
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
];
const INDEXES: [&str; 2] = [
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
];
const CONFIGS: [&str; 2] =
    ["application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json"];

/// The annotation of a layer with the digest of its eStargz index.
const TOC_DIGEST: &str = "containerd.io/snapshot/stargz/toc.digest";

/// Returns the media types that are requested from a registry.
pub(crate) fn accepted() -> Vec<&'static str> {
    MANIFESTS.into_iter().chain(INDEXES).collect()
}

/// One layer to fetch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layer {
    /// The digest of the blob as it is stored.
    pub digest: Digest,
    /// The size in bytes of the blob as it is stored.
    pub size: u64,
    /// The digest of the uncompressed blob.
    pub diff_id: Digest,
    /// The format of the uncompressed blob.
    pub form: Form,
    /// The digest of the layer's eStargz index, if the manifest has one.
    pub toc: Option<Digest>,
}

/// The description of an image before its layers are fetched.
#[derive(Debug)]
pub(crate) struct Plan {
    /// The digest of the manifest, which identifies the image in the cache.
    pub digest: Digest,
    pub config: Parsed,
    /// The layers, lowest first.
    pub layers: Vec<Layer>,
}

/// Refuses a manifest whose config is not a container image's.
pub(crate) fn check_config_type(manifest: &ImageManifest, name: &str) -> Result<()> {
    let kind = manifest.config().media_type().to_string();
    match CONFIGS.contains(&kind.as_str()) {
        true => Ok(()),
        false => {
            let reason = format!("it is no container image (its config is of type {kind})");
            Err(Error::bad_document(name, reason))
        }
    }
}

/// Refuses an image whose config is for another platform.
pub(crate) fn check_platform(config: &Parsed, name: &str) -> Result<()> {
    match config.platform == PLATFORM {
        true => Ok(()),
        false => Err(wrong_platform(name, config.platform.clone())),
    }
}

fn wrong_platform(name: &str, offers: String) -> Error {
    Error::WrongPlatform { image: name.to_owned(), wanted: PLATFORM, offers }
}

/// Refuses a document of a larger size than the limit.
pub(crate) fn check_size(what: &str, size: u64, limits: &Limits) -> Result<()> {
    match size > limits.document_bytes {
        true => Err(Error::too_large(
            what,
            format!("{size} bytes are more than the limit of {}", limits.document_bytes),
        )),
        false => Ok(()),
    }
}

/// Returns the layers of a manifest with their digests from the config, lowest first.
pub(crate) fn layers(manifest: &ImageManifest, config: &Parsed, name: &str) -> Result<Vec<Layer>> {
    let (layers, diff_ids) = (manifest.layers(), &config.diff_ids);
    if layers.len() != diff_ids.len() {
        let reason =
            format!("{} layers, but digests of {} in the config", layers.len(), diff_ids.len());
        return Err(Error::bad_document(name, reason));
    }
    layers
        .iter()
        .zip(diff_ids)
        .map(|(layer, &diff_id)| {
            check_layer_type(layer.media_type(), name)?;
            let digest = descriptor_digest(layer)?;
            let (size, form, toc) = (layer.size(), Form::Changes, toc_digest(layer));
            Ok(Layer { digest, size, diff_id, form, toc })
        })
        .collect()
}

/// Returns the digest of a layer's eStargz index from the layer's annotations. Returns `None` if
/// there is none, or one of another algorithm: the layer then counts as one without an index.
fn toc_digest(layer: &Descriptor) -> Option<Digest> {
    layer.annotations().as_ref()?.get(TOC_DIGEST)?.parse().ok()
}

/// Refuses layers that are not tar archives (encrypted layers, artifacts). The compression is
/// detected in the layer itself.
fn check_layer_type(kind: &MediaType, name: &str) -> Result<()> {
    let kind = kind.to_string();
    let known = kind.starts_with("application/vnd.oci.image.layer.")
        || kind.starts_with("application/vnd.docker.image.rootfs.");
    let plain = [".tar", "+gzip", ".gzip", "+zstd", ".zstd"].iter().any(|end| kind.ends_with(end));
    match known && plain {
        true => Ok(()),
        false => Err(Error::bad_document(name, format!("a layer of the unknown type {kind}"))),
    }
}

/// Refuses images that are too large according to their manifest, before anything is fetched.
pub(crate) fn check_layers(layers: &[Layer], limits: &Limits, name: &str) -> Result<()> {
    if layers.len() > limits.layers {
        let reason =
            format!("{} layers are more than the limit of {}", layers.len(), limits.layers);
        return Err(Error::too_large(name, reason));
    }
    if let Some(layer) = layers.iter().find(|layer| layer.size > limits.layer_compressed) {
        let reason =
            format!("{} bytes are more than the limit of {}", layer.size, limits.layer_compressed);
        return Err(Error::too_large(format!("layer {}", layer.digest), reason));
    }
    let total = layers.iter().fold(0_u64, |sum, layer| sum.saturating_add(layer.size));
    match total > limits.image_compressed {
        true => Err(Error::too_large(
            name,
            format!("{total} bytes of layers are more than {}", limits.image_compressed),
        )),
        false => Ok(()),
    }
}

/// Returns the digest in a descriptor. Other algorithms than SHA-256 are refused.
pub(crate) fn descriptor_digest(descriptor: &Descriptor) -> Result<Digest> {
    Ok(descriptor.digest().to_string().parse()?)
}

/// A document that a name or an index stands for.
pub(crate) enum Document {
    Manifest(Box<ImageManifest>),
    Index(Box<ImageIndex>),
}

/// Tells manifests from indexes by their media type, or without one by their fields. A document
/// that could be read as both is refused, since two readers might disagree on what a digest stands
/// for.
pub(crate) fn read(bytes: &[u8]) -> Result<Document> {
    let bad = |reason: String| Error::bad_document("the image's manifest", reason);
    let json: Value = serde_json::from_slice(bytes).map_err(|e| bad(e.to_string()))?;
    if !json.is_object() {
        return Err(bad("it is no JSON object".into()));
    }
    if json["schemaVersion"] == 1 {
        return Err(
            bad("it has the old schema 1; push the image again with a current tool".into()),
        );
    }
    let kind = json["mediaType"].as_str();
    let has = |field| json.get(field).is_some();
    let is_index = match kind {
        Some(kind) if MANIFESTS.contains(&kind) => false,
        Some(kind) if INDEXES.contains(&kind) => true,
        Some(kind) => return Err(bad(format!("it is of the unknown type {kind}"))),
        None => has("manifests"),
    };
    let other = if is_index { has("layers") || has("config") } else { has("manifests") };
    if other {
        return Err(bad("it could be read both as a manifest and as an index".into()));
    }
    match is_index {
        true => serde_json::from_value(json).map(|i| Document::Index(Box::new(i))),
        false => serde_json::from_value(json).map(|m| Document::Manifest(Box::new(m))),
    }
    .map_err(|e| bad(e.to_string()))
}

/// Returns the entry for [`PLATFORM`], or a single entry without a platform if there are no others.
pub(crate) fn choose<'a>(index: &'a ImageIndex, name: &str) -> Result<&'a Descriptor> {
    let mut silent = Vec::new();
    let mut offers = Vec::new();
    let mut fitting = None;
    for entry in index.manifests() {
        let Some(platform) = entry.platform() else {
            silent.push(entry);
            continue;
        };
        let text = format!("{}/{}", platform.os(), platform.architecture());
        let plain = matches!(platform.variant().as_deref(), None | Some("" | "v1"));
        if text == PLATFORM && (plain || fitting.is_none()) {
            if plain {
                return Ok(entry);
            }
            fitting = Some(entry);
        }
        // Attestations of build tools have the platform unknown/unknown.
        if !text.starts_with("unknown/") {
            let variant = platform.variant().as_ref().map(|v| format!("/{v}")).unwrap_or_default();
            offers.push(text + &variant);
        }
    }
    match (fitting, silent.as_slice(), offers.is_empty()) {
        (Some(entry), ..) => Ok(entry),
        (None, [entry], true) => Ok(entry),
        (None, [], true) => Err(wrong_platform(name, "nothing".into())),
        (None, _, true) => Err(Error::bad_document(
            name,
            "its index has several images and says of none which platform it is for",
        )),
        (None, ..) => {
            offers.dedup();
            Err(wrong_platform(name, offers.join(", ")))
        }
    }
}

/// Makes a manifest for an image without one, and returns its plan. The digest of the manifest
/// depends only on the config and the layers. Returns an error if `config` is for another platform.
pub(crate) fn synthesise(config: &[u8], layers: Vec<Layer>, name: &str) -> Result<Plan> {
    let parsed = config::parse(config)?;
    check_platform(&parsed, name)?;
    // The JSON is written by hand, since its bytes must never depend on a library's version.
    let descriptor = |kind: &str, digest: &Digest, size: u64| {
        format!(r#"{{"mediaType":"{kind}","digest":"{digest}","size":{size}}}"#)
    };
    // The same bytes make another image in another form: a name that begins with `.wh.` is a
    // deletion among changes, and a name like any other among files.
    let kind = |form| match form {
        Form::Changes => "application/vnd.oci.image.layer.v1.tar",
        Form::Files => "application/vnd.slipway.files.v1.tar",
        Form::Erofs => "application/vnd.erofs.layer.v1",
    };
    let list: Vec<_> = layers.iter().map(|l| descriptor(kind(l.form), &l.digest, l.size)).collect();
    let manifest = format!(
        r#"{{"schemaVersion":2,"mediaType":"{}","config":{},"layers":[{}]}}"#,
        MANIFESTS[0],
        descriptor(CONFIGS[0], &Digest::of(config), config.len() as u64),
        list.join(",")
    );
    let digest = Digest::of(manifest.as_bytes());
    Ok(Plan { digest, config: parsed, layers })
}

/// Returns the plan of an image of `layers` alone, whose config is empty.
pub(crate) fn without_config(layers: Vec<Layer>, name: &str) -> Result<Plan> {
    let ids: Vec<_> = layers.iter().map(|layer| format!("\"{}\"", layer.diff_id)).collect();
    let layers_json = format!(r#"{{"type":"layers","diff_ids":[{}]}}"#, ids.join(","));
    let config =
        format!(r#"{{"architecture":"amd64","os":"linux","config":{{}},"rootfs":{layers_json}}}"#);
    synthesise(config.as_bytes(), layers, name)
}
