//! The body of the fuzz target for templates.

use super::Manifest;
use super::images::described_in;

/// Reads `data` as the description in the directory of a template or snapshot.
pub fn description(data: &[u8]) {
    let manifest = match Manifest::parse_unchecked(data) {
        Ok((manifest, _)) => manifest,
        Err(why) => {
            assert!(!why.contains('\n'), "{why}");
            return;
        }
    };
    // Nothing of a description is passed over.
    let json = manifest.to_json().expect("a description is JSON");
    let again = Manifest::parse(&json, &manifest.name).expect("it was written by this build");
    assert_eq!(again, manifest);
    assert_eq!(manifest.shape.check(&again.shape), Ok(()));
    // No image of a snapshot is passed over when images are removed.
    if let Ok(image) = described_in(data) {
        assert_eq!(image.is_some(), manifest.snapshot.is_some());
    }
}
