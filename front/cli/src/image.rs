//! `slipway image`, and fetching images for `run`.

use anyhow::Result;
use slipway_image::{
    Access, Cache, Image, Limits, Prune, PullPolicy, Reference, Removed, Selection, Source, Taken,
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
    let policy = match policy {
        Pull::Missing => PullPolicy::Missing,
        Pull::Always => PullPolicy::Always,
        Pull::Never => PullPolicy::Never,
    };
    let cache = cache(config)?;
    // A name that is no reference may still be a digest in the cache: `ensure` finds out.
    let access = named.parse().map(|reference| Access::from_docker_config(&reference));
    Ok(cache.ensure(named, &access.unwrap_or_default(), policy, Fetch::new()).await?)
}

async fn pull(cache: &Cache, named: &str, plain_http: bool) -> Result<Image> {
    let reference: Reference = named.parse()?;
    let mut access = Access::from_docker_config(&reference);
    access.plain_http |= plain_http;
    Ok(cache.pull(&reference, &access, Fetch::new()).await?)
}

/// Runs `slipway image …`.
pub async fn command(config: &Config, command: &ImageCommand) -> Result<i32> {
    let cache = cache(config)?;
    match command {
        ImageCommand::Pull { reference, plain_http } => {
            crate::say!("{}", pull(&cache, reference, *plain_http).await?.digest);
        }
        ImageCommand::Import { source, name, replace } => {
            let source: Source = source.parse()?;
            let name = name.as_deref().map(str::parse).transpose()?;
            let taken = if *replace { Taken::Replace } else { Taken::Refuse };
            crate::say!("{}", cache.import(&source, name, taken, Fetch::new()).await?.digest);
        }
        ImageCommand::Ls { json: true } => {
            crate::say!("{}", serde_json::to_string_pretty(&cache.list()?)?);
        }
        ImageCommand::Ls { json: false } => {
            crate::out::print(format_args!("{}", listing(&cache.list()?)))
        }
        ImageCommand::Rm { images } => {
            let in_use = images_in_use(&config.sandboxes_dir())?;
            for image in images {
                say(&cache.remove(image, &in_use, false)?);
            }
        }
        ImageCommand::Prune { all } => {
            let which = if *all { Selection::All } else { Selection::Unnamed };
            let in_use = images_in_use(&config.sandboxes_dir())?;
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

fn listing(images: &[Image]) -> String {
    let rows: Vec<_> = images
        .iter()
        .flat_map(|image| {
            let names = image.references.iter().map(Reference::familiar);
            let names: Vec<_> = if image.references.is_empty() {
                vec!["(none)".to_owned()]
            } else {
                names.collect()
            };
            names.into_iter().map(|name| {
                let used = ago(image.last_used.saturating_mul(1_000_000_000));
                [name, image.digest.short(), used, show(image.size_bytes)]
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
