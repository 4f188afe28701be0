//! The body of the fuzz target for snapshots that are copied in.

use std::path::Path;

use super::checks::clamp_to_node;
use super::{checked, parse};
use crate::memory::of_host;
use crate::snapshot::begin;
use crate::templates::Manifest;
use crate::v1::RunSpec;

/// The most bytes of layers of this node.
const LAYERS: u64 = 64 << 20;

/// Reads `data` as the description in a directory that anybody may have filled, up to the copy of
/// the files that it names.
pub fn description(data: &[u8]) {
    let from = Path::new("/from");
    if let Err(error) = parse(data, from) {
        assert!(!error.to_string().contains('\n'), "{error}");
    }
    // A description of anybody's has the right digest.
    let parsed = Manifest::parse_unchecked(data).map(|(manifest, _)| manifest);
    let mut manifest = match checked(parsed, from) {
        Ok(manifest) => manifest,
        Err(error) => {
            assert!(!error.to_string().contains('\n'), "{error}");
            return;
        }
    };
    let checked = manifest.snapshot.clone().expect("a template is refused");
    for name in checked.files.iter().map(|file| &file.name) {
        assert!(!name.starts_with('.') && !name.contains('/'), "{name:?} is not beside it");
    }
    for volume in &checked.volumes {
        assert!(volume.overlay && volume.path.is_relative(), "{:?} is of this host", volume.path);
    }
    match clamp_to_node(&mut manifest, LAYERS, Path::new("/")) {
        Ok(()) => assert!(manifest.shape.memory_bytes <= of_host()),
        Err(error) => assert!(!error.to_string().contains('\n'), "{error}"),
    }
    let spec = begin::complete(&RunSpec::default(), &manifest, LAYERS);
    let spec = spec.expect("it asks for nothing");
    assert_eq!(spec.memory_bytes, manifest.shape.memory_bytes);
    assert!(spec.max_memory_bytes <= of_host(), "no request names more");
    assert!(spec.image.is_empty() && spec.kernel.is_empty() && spec.layers_bytes <= 2 * LAYERS);
}
