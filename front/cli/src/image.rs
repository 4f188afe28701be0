//! `slipway image`, and fetching images for `run`.

use anyhow::{Error, Result};
use slipway_image::{
    Access, Cache, Image, Limits, NameConflict, Prune, PullPolicy, Reference, Removed, Selection,
    Source,
};
use slipway_runtime::{Config, images_in_use};

use crate::args::{ImageCommand, Pull};
use crate::client::need_root;
use crate::progress::Fetch;
use crate::size::show;
use crate::table::{ago, table};

/// Opens the node's image cache, which only its owner may use.
pub fn cache(config: &Config) -> Result<Cache> {
    let dir = config.images_dir();
    let opened = Cache::open(&dir, Limits::default());
    if opened.as_ref().is_err_and(is_refusal) {
        need_root(&format!("the image cache {}", dir.display()))?;
    }
    Ok(opened?)
}

/// Returns whether the error means that the cache belongs to another user.
fn is_refusal(error: &slipway_image::Error) -> bool {
    match error {
        slipway_image::Error::ForeignCache { .. } => true,
        slipway_image::Error::Io { source, .. } => {
            source.kind() == std::io::ErrorKind::PermissionDenied
        }
        _ => false,
    }
}

/// Ensures that the image `named` is in the cache, and fetches it if `policy` says so.
pub async fn ensure(config: &Config, named: &str, policy: Pull) -> Result<Image> {
    let cache = cache(config)?;
    // A name that is no reference may still be a digest in the cache: `ensure` finds out.
    let access = named.parse().map(|reference| Access::from_docker_config(&reference));
    let access = access.unwrap_or_default();
    let ensured = cache.ensure(named, &access, pull_policy(policy), Fetch::new()).await;
    ensured.map_err(|error| not_pulled(error, named, policy))
}

/// Ensures that the image `named` is in the cache as [`ensure`] does. An image that is fetched
/// comes without the data of its files, if its layers allow that.
pub async fn ensure_lazily(config: &Config, named: &str, policy: Pull) -> Result<Image> {
    let cache = cache(config)?;
    let image = match cache.there(named, pull_policy(policy)).await? {
        Some(image) => image,
        None => {
            let reference: Reference = named.parse()?;
            let access = Access::from_docker_config(&reference);
            let failed = |error| not_pulled(error, named, policy);
            match pull_lazily(&cache, &reference, &access).await.map_err(failed)? {
                Some(image) => image,
                None => cache.pull(&reference, &access, Fetch::new()).await.map_err(failed)?,
            }
        }
    };
    cache.touch(&image.digest)?;
    Ok(image)
}

/// Returns the error of an image that could not be had. If its registry is the cause, whose errors
/// do not name the image, the image is named before it: the name may be mistyped.
fn not_pulled(error: slipway_image::Error, named: &str, policy: Pull) -> Error {
    let registry_failed = matches!(error, slipway_image::Error::Registry { .. });
    let error = Error::new(error);
    match (registry_failed, policy) {
        (false, _) => error,
        (true, Pull::Always) => error.context(format!("image \"{named}\" cannot be pulled")),
        (true, _) => {
            error.context(format!("no image \"{named}\" on this node, and it cannot be pulled"))
        }
    }
}

fn pull_policy(policy: Pull) -> PullPolicy {
    match policy {
        Pull::Missing => PullPolicy::Missing,
        Pull::Always => PullPolicy::Always,
        Pull::Never => PullPolicy::Never,
    }
}

/// Pulls an image without the data of its files. Returns `None` after saying so if its layers do
/// not allow that.
async fn pull_lazily(
    cache: &Cache,
    reference: &Reference,
    access: &Access,
) -> Result<Option<Image>, slipway_image::Error> {
    let image = cache.pull_lazy(reference, access, Fetch::new()).await?;
    if image.is_none() {
        let name = reference.familiar();
        eprintln!("slipway: {name} has layers that are no eStargz; it is pulled as a whole");
    }
    Ok(image)
}

async fn pull(
    config: &Config,
    cache: &Cache,
    named: &str,
    (plain_http, lazy): (bool, bool),
) -> Result<Image> {
    let reference: Reference = named.parse()?;
    let mut access = Access::from_docker_config(&reference);
    access.plain_http |= plain_http;
    if lazy && let Some(image) = pull_lazily(cache, &reference, &access).await? {
        return Ok(image);
    }
    let digest = cache.pull(&reference, &access, Fetch::new()).await?.digest;
    // The image may have been pulled lazily before, under the name of another registry.
    let access = Access::from_docker_config;
    Ok(cache.fetch_rest(&digest, &config.run_dir, access, Fetch::new()).await?)
}

/// Runs `slipway image …`.
pub async fn command(config: &Config, command: &ImageCommand) -> Result<i32> {
    if matches!(command, ImageCommand::Pull { .. } | ImageCommand::Import { .. }) {
        crate::import_memory::limit()?;
    }
    let cache = cache(config)?;
    match command {
        ImageCommand::Pull { reference, plain_http, lazy } => {
            let how = (*plain_http, lazy.lazy.unwrap_or(config.lazy_pulls));
            crate::say!("{}", pull(config, &cache, reference, how).await?.digest);
        }
        ImageCommand::Import { source, name, replace } => {
            let source: Source = source.parse()?;
            let name = name.as_deref().map(str::parse).transpose()?;
            let taken = if *replace { NameConflict::Replace } else { NameConflict::Refuse };
            crate::say!("{}", cache.import(&source, name, taken, Fetch::new()).await?.digest);
        }
        ImageCommand::Ls { json: true } => {
            crate::out::json(&json(&images(config, &cache)?)?)?;
        }
        ImageCommand::Ls { json: false } => {
            crate::out::print(format_args!("{}", listing(&images(config, &cache)?)))
        }
        ImageCommand::Rm { images } => {
            let in_use = images_in_use(config)?;
            for image in images {
                say(&cache.remove(image, &in_use, false)?);
            }
        }
        ImageCommand::Prune { all } => {
            let which = if *all { Selection::All } else { Selection::Unnamed };
            let in_use = images_in_use(config)?;
            say(&cache.prune(&Prune { which, unused_for: None, in_use })?);
        }
        ImageCommand::Touch { image } => {
            if let Some(digest) = cache.touch_named(image)? {
                crate::say!("{digest}");
            }
        }
    }
    Ok(0)
}

/// An image, and how many bytes of its file are there. `None` if that cannot be told.
type Listed = (Image, Option<u64>);

fn images(config: &Config, cache: &Cache) -> Result<Vec<Listed>> {
    // An image that becomes whole or is removed meanwhile has no map any more.
    let fetched = |image: &Image| cache.fetched_bytes(image, &config.run_dir).ok();
    let listed = cache.list()?.into_iter().map(|image| {
        let fetched = fetched(&image);
        (image, fetched)
    });
    Ok(listed.collect())
}

fn json(images: &[Listed]) -> Result<Vec<serde_json::Value>> {
    let one = |(image, fetched): &Listed| -> Result<serde_json::Value> {
        let mut value = serde_json::to_value(image)?;
        value["fetched_bytes"] = (*fetched).into();
        Ok(value)
    };
    images.iter().map(one).collect()
}

/// Returns the size of an image's file, and how much of it is there if not all is.
fn size((image, fetched): &Listed) -> String {
    let size = show(image.size_bytes);
    match (image.lazy, fetched) {
        (false, _) => size,
        (true, None) => format!("{size}, lazy"),
        (true, Some(fetched)) => {
            let percent = u128::from(*fetched) * 100 / u128::from(image.size_bytes.max(1));
            format!("{size}, lazy {percent} %")
        }
    }
}

fn listing(images: &[Listed]) -> String {
    let rows: Vec<_> = images
        .iter()
        .flat_map(|listed| {
            let image = &listed.0;
            let names = image.references.iter().map(Reference::familiar);
            let names: Vec<_> = if image.references.is_empty() {
                vec!["(none)".to_owned()]
            } else {
                names.collect()
            };
            names.into_iter().map(|name| {
                let used = ago(image.last_used.saturating_mul(1_000_000_000));
                [name, image.digest.short(), used, size(listed)]
            })
        })
        .collect();
    table(["NAME", "DIGEST", "USED", "SIZE"], &rows)
}

fn say(removed: &Removed) {
    removed.untagged.iter().for_each(|name| crate::say!("untagged {}", name.familiar()));
    removed.deleted.iter().for_each(|digest| crate::say!("deleted {digest}"));
    crate::say!("{} freed", show(removed.freed_bytes));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_that_cannot_be_pulled_is_named() {
        let told = |policy| {
            let (registry, reason) = ("docker.io".to_owned(), "cannot be reached: x".to_owned());
            let error = slipway_image::Error::Registry { registry, reason };
            format!("{:#}", not_pulled(error, "demo:bokworm", policy))
        };
        let cause = "registry docker.io: cannot be reached: x";
        let missing = "no image \"demo:bokworm\" on this node, and it cannot be pulled";
        assert_eq!(told(Pull::Missing), format!("{missing}: {cause}"));
        assert_eq!(told(Pull::Always), format!("image \"demo:bokworm\" cannot be pulled: {cause}"));
        let unknown = slipway_image::Error::NotFound("demo:bokworm".to_owned());
        let text = unknown.to_string();
        assert_eq!(format!("{:#}", not_pulled(unknown, "demo:bokworm", Pull::Missing)), text);
    }
}
