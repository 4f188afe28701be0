//! The host's packet filter, through the program `nft`: the netlink interface is that program's
//! private matter, while its language is documented and stable.

use std::io::Write;
use std::process::Stdio;

use tokio::io::AsyncWriteExt;
use tokio::process::Command;

use crate::{Error, Result};

/// Has `nft` apply `rules`, all or nothing.
///
/// # Errors
/// [`Error::Host`] with the first line of `nft`'s error.
pub async fn apply(rules: &str) -> Result<()> {
    let mut command = Command::from(command());
    command.kill_on_drop(true);
    let mut child = command.spawn().map_err(not_started)?;
    if let Some(mut input) = child.stdin.take() {
        // If `nft` ended early, its own error tells more than the broken pipe.
        let _ = input.write_all(rules.as_bytes()).await;
    }
    result(&child.wait_with_output().await.map_err(Error::host("nft"))?)
}

/// Has `nft` apply `rules` in the network namespace of the calling thread, which it blocks.
///
/// # Errors
/// The errors of [`apply`].
pub fn apply_here(rules: &str) -> Result<()> {
    let mut child = command().spawn().map_err(not_started)?;
    if let Some(mut input) = child.stdin.take() {
        let _ = input.write_all(rules.as_bytes());
    }
    result(&child.wait_with_output().map_err(Error::host("nft"))?)
}

fn command() -> std::process::Command {
    let mut command = std::process::Command::new("nft");
    command.args(["-f", "-"]).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

fn not_started(error: std::io::Error) -> Error {
    match error.kind() {
        std::io::ErrorKind::NotFound => Error::Host(
            "networks need the program nft: `apt-get install nftables` installs it; \
             `--network none` does without a network"
                .to_owned(),
        ),
        _ => Error::Host(format!("nft: {error}")),
    }
}

fn result(output: &std::process::Output) -> Result<()> {
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let first = said.lines().find(|line| !line.trim().is_empty()).unwrap_or("it failed");
    Err(Error::Host(format!("the host's packet filter refuses the network's rules: nft: {first}")))
}
