//! Manifests and indexes of images: parsing, checks that need no other document, and manifests for
//! images that come without one.

use oci_spec::image::{Descriptor, ImageIndex, ImageManifest, MediaType};
use serde_json::Value;

use crate::config::{self, Parsed};
use crate::root::Form;
use crate::{Digest, Error, Limits, Result};

/// The platform of sandboxes.
pub(crate) const PLATFORM: &str = "linux/amd64";

/// The media types of manifests. The first is that of manifests made here.
const MANIFESTS: [&str; 2] = [
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
];
/// The media types of indexes.
const INDEXES: [&str; 2] = [
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
];
/// The media types of a container image's config. The first is that of configs made here.
const CONFIGS: [&str; 2] =
    ["application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json"];

/// The annotation of a layer that has the digest of the layer's eStargz index.
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
    /// The parsed config.
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

/// Refuses a document of more than [`Limits::document_bytes`].
pub(crate) fn check_size(what: &str, size: u64, limits: &Limits) -> Result<()> {
    check_limit(what, size, "bytes", limits.document_bytes)
}

/// Refuses `what` if its `number` of `things`, such as "bytes", is greater than `limit`.
fn check_limit(what: impl ToString, number: u64, things: &str, limit: u64) -> Result<()> {
    match number > limit {
        true => {
            let reason = format!("{number} {things} are more than the limit of {limit}");
            Err(Error::too_large(what, reason))
        }
        false => Ok(()),
    }
}

/// Returns the layers of a manifest, lowest first, with the digests of their uncompressed blobs
/// from the config.
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
/// there is no such annotation or its value is no SHA-256 digest: the layer then counts as one
/// without an index.
fn toc_digest(layer: &Descriptor) -> Option<Digest> {
    layer.annotations().as_ref()?.get(TOC_DIGEST)?.parse().ok()
}

/// Refuses the type of a layer that is no tar archive, such as an encrypted layer or an artifact.
/// The type does not decide the compression, which is detected in the layer itself.
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
    check_limit(name, layers.len() as u64, "layers", limits.layers as u64)?;
    for layer in layers {
        check_limit(
            format_args!("layer {}", layer.digest),
            layer.size,
            "bytes",
            limits.layer_compressed,
        )?;
    }
    let total = layers.iter().fold(0_u64, |sum, layer| sum.saturating_add(layer.size));
    check_limit(name, total, "bytes of layers", limits.image_compressed)
}

/// Returns the digest in a descriptor. Refuses algorithms other than SHA-256.
pub(crate) fn descriptor_digest(descriptor: &Descriptor) -> Result<Digest> {
    Ok(descriptor.digest().to_string().parse()?)
}

/// A document to which a name or an entry of an index refers.
pub(crate) enum Document {
    /// The manifest of one image.
    Manifest(Box<ImageManifest>),
    /// An index of manifests for several platforms.
    Index(Box<ImageIndex>),
}

/// Parses a manifest or an index, told apart by the media type in the document, or without one by
/// its fields. Refuses a document that could be read as both: two readers could take the same
/// digest for different images.
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

/// Returns the entry for [`PLATFORM`]: the first whose variant is absent or v1, or else the first
/// with another variant. If there is none and no entry names another platform either, returns the
/// only entry without a platform; the platforms of attestations count for nothing.
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
    // The JSON is formatted here, since its bytes must never depend on a library's version.
    let descriptor = |kind: &str, digest: &Digest, size: u64| {
        format!(r#"{{"mediaType":"{kind}","digest":"{digest}","size":{size}}}"#)
    };
    // The type is a part of the image's identity, since the same bytes make different images: a
    // name that begins with `.wh.` deletes a file in a layer of changes, and is an ordinary name in
    // one of files.
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

/// Makes a config and a manifest for an image that has only `layers`, and returns its plan. The
/// config sets nothing.
pub(crate) fn without_config(layers: Vec<Layer>, name: &str) -> Result<Plan> {
    let ids: Vec<_> = layers.iter().map(|layer| format!("\"{}\"", layer.diff_id)).collect();
    let layers_json = format!(r#"{{"type":"layers","diff_ids":[{}]}}"#, ids.join(","));
    let config =
        format!(r#"{{"architecture":"amd64","os":"linux","config":{{}},"rootfs":{layers_json}}}"#);
    synthesise(config.as_bytes(), layers, name)
}
