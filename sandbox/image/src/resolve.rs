//! The way from the document that a name stands for to the list of layers to fetch.

use oci_spec::image::ImageManifest;

use crate::manifest::{
    Document, Plan, check_config_type, check_layers, check_platform, check_size, choose,
    descriptor_digest, layers, read,
};
use crate::source::Fetcher;
use crate::{Digest, Error, Limits, Result, config};

/// The deepest nesting of indexes, which may point to indexes; none in use is deeper.
const MAX_NESTING: usize = 4;

/// Parses the document `bytes`, follows indexes to the manifest for the platform of sandboxes,
/// fetches the config and checks that they are consistent. `name` is for messages.
pub(crate) async fn plan(
    fetcher: &Fetcher,
    mut bytes: Vec<u8>,
    name: &str,
    limits: &Limits,
) -> Result<Plan> {
    for _ in 0..MAX_NESTING {
        let entry = match read(&bytes)? {
            Document::Manifest(manifest) => {
                return plan_manifest(fetcher, Digest::of(&bytes), &manifest, name, limits).await;
            }
            Document::Index(index) => choose(&index, name)?.clone(),
        };
        let digest = descriptor_digest(&entry)?;
        check_size("a manifest", entry.size(), limits)?;
        bytes = fetcher.manifest(&digest, entry.size()).await?;
    }
    Err(Error::bad_document(name, "its indexes are nested too deep"))
}

async fn plan_manifest(
    fetcher: &Fetcher,
    digest: Digest,
    manifest: &ImageManifest,
    name: &str,
    limits: &Limits,
) -> Result<Plan> {
    let config = manifest.config();
    check_config_type(manifest, name)?;
    check_size("the image's config", config.size(), limits)?;
    let config = fetcher.config(&descriptor_digest(config)?, config.size()).await?;
    let config = config::parse(&config)?;
    check_platform(&config, name)?;
    let layers = layers(manifest, &config, name)?;
    check_layers(&layers, limits, name)?;
    Ok(Plan { digest, config, layers })
}
