//! Removal of a measurement's sandboxes.

use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use futures_util::future::join_all;
use slipway_runtime::{SandboxClient, v1};

use crate::client::refused;
use crate::manage::list;

/// How often sandboxes that are left are looked for, and the time in between: one that was being
/// created when its start was given up appears a little later.
const LOOKS: u32 = 10;
const BETWEEN: Duration = Duration::from_millis(300);

/// Removes a sandbox, whether it runs or not.
pub async fn remove(mut client: SandboxClient, name: String) -> Result<()> {
    let request = v1::RemoveRequest { name, force: true, ..Default::default() };
    client.remove(request).await.map_err(refused)?;
    Ok(())
}

/// Removes a daemon's sandboxes whose names begin like this, until no further one appears.
///
/// # Errors
/// The daemon goes away, or does not remove one; the others are removed even so.
pub async fn remove_all(client: &SandboxClient, beginning: &str) -> Result<()> {
    let names = async || {
        let all = list(&mut client.clone()).await?;
        let names = all.into_iter().map(|one| one.name);
        anyhow::Ok(names.filter(|name| name.starts_with(beginning)).collect::<Vec<_>>())
    };
    let removed = until_none(names, |name| remove(client.clone(), name)).await;
    removed.with_context(|| format!("sandboxes {beginning}* of the measurement are left"))
}

/// Removes what `names` finds, until it finds nothing.
async fn until_none<R: Future<Output = Result<()>>>(
    names: impl AsyncFn() -> Result<Vec<String>>,
    remove: impl Fn(String) -> R,
) -> Result<()> {
    let mut error = None;
    for look in 0..LOOKS {
        let left = names().await?;
        if left.is_empty() && look > 0 {
            return Ok(());
        }
        let removed = join_all(left.into_iter().map(&remove)).await;
        error = removed.into_iter().find_map(Result::err).or(error);
        tokio::time::sleep(BETWEEN).await;
    }
    Err(error.unwrap_or_else(|| anyhow!("further ones appear")))
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::future::ready;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_sandbox_that_appears_late_is_removed() {
        let (looks, there) = (Cell::new(0), RefCell::new(vec!["a".to_owned()]));
        let names = async || {
            looks.set(looks.get() + 1);
            if looks.get() == 2 {
                there.borrow_mut().push("late".to_owned());
            }
            anyhow::Ok(there.borrow().clone())
        };
        let remove = |name: String| {
            there.borrow_mut().retain(|one| *one != name);
            ready(anyhow::Ok(()))
        };
        until_none(names, remove).await.unwrap();
        assert!(there.borrow().is_empty());
        assert_eq!(looks.get(), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_stays_is_an_error_and_others_go() {
        let there = RefCell::new(vec!["stays".to_owned(), "goes".to_owned()]);
        let names = async || anyhow::Ok(there.borrow().clone());
        let remove = |name: String| {
            if name == "stays" {
                return ready(Err(anyhow!("no")));
            }
            there.borrow_mut().retain(|one| *one != name);
            ready(Ok(()))
        };
        assert_eq!(until_none(names, remove).await.unwrap_err().to_string(), "no");
        assert_eq!(*there.borrow(), ["stays"]);
    }
}
