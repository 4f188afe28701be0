//! `slipway fetch`: the node's fetcher of lazily pulled images.

use anyhow::Result;
use slipway_image::Access;
use slipway_runtime::Config;

use crate::image;

/// Serves until no disk is connected and nothing can be fetched. Registries get the logins of the
/// user that runs this, root on a node.
pub async fn serve(config: &Config) -> Result<i32> {
    let cache = image::cache(config)?;
    slipway_image::serve(cache, &config.run_dir, Access::from_docker_config).await?;
    Ok(0)
}
