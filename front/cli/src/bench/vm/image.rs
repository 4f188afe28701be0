//! The guests' image: Debian with fio, RocksDB's tools and ethtool.

use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use slipway_image::{Image, NameConflict, Source};
use slipway_runtime::Config;

use crate::args::Pull;
use crate::progress::Fetch;

/// The image that is made if the user names none. The number changes with the packages.
const OWN: &str = "slipway-bench:bookworm-2";
const SUITE: &str = "bookworm";
/// The packages that the loads need in a guest.
const PACKAGES: &str = "fio,rocksdb-tools,e2fsprogs,mount,ethtool,iproute2";

/// Returns the image called `named`. Without a name it returns our own, made at the first use from
/// Debian's packages.
pub async fn ready(config: &Config, named: Option<&str>) -> Result<(String, Image)> {
    if let Some(named) = named {
        return Ok((named.to_owned(), crate::image::ensure(config, named, Pull::Missing).await?));
    }
    let cache = crate::image::cache(config)?;
    if let Some(image) = cache.get(OWN)? {
        return Ok((OWN.to_owned(), image));
    }
    eprintln!("Making the image {OWN} from Debian's packages (once; a minute or two)");
    let root = tempfile::Builder::new().prefix("slipway-bench").tempdir_in("/var/tmp")?;
    let tree = root.path().join("root");
    bootstrap(&tree)?;
    let source: Source = format!("dir:{}", tree.display()).parse()?;
    let image =
        cache.import(&source, Some(OWN.parse()?), NameConflict::Refuse, Fetch::new()).await?;
    Ok((OWN.to_owned(), image))
}

fn bootstrap(tree: &std::path::Path) -> Result<()> {
    let missing = "mmdebstrap is missing: `apt-get install mmdebstrap` brings it, or --image \
                   names an image that has fio (rocksdb-tools for --rocksdb; ethtool and \
                   iproute2 for packets)";
    // Mounts are made in their own mount namespace. So in whatever way the command ends, nothing of
    // the host is mounted in the tree, which is removed.
    let output = Command::new("unshare")
        .args([
            "--mount",
            "mmdebstrap",
            "--quiet",
            "--variant=minbase",
            "--aptopt=Acquire::Check-Valid-Until \"false\"",
        ])
        .arg(format!("--include={PACKAGES}"))
        .arg(SUITE)
        .arg(tree)
        .output();
    let output = output.context("cannot start unshare (util-linux)")?;
    // A shell's exit status if there is no such program.
    if output.status.code() == Some(127) {
        bail!(missing);
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    let last = errors.lines().rev().find(|line| !line.is_empty()).unwrap_or_default();
    ensure!(output.status.success(), "mmdebstrap: {last}");
    Ok(())
}
