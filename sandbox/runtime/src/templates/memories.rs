//! The memories that the pool has of templates. Templates can have the same one: copies of a
//! snapshot that was moved. Of one place, one memory is loaded or removed at a time.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use slipway_hypervisor::TemplateName;
use slipway_plane_api::{PlaneClient, v1 as plane_v1};

use super::threads::apart;
use crate::{Error, Result};

/// The most letters of a name that the pool has for a memory: those of a digest.
const LONGEST_NAME: usize = 64;

/// Returns the name that the pool has for a memory: `prefix` and its digest, cut to
/// [`LONGEST_NAME`] letters. Returns `None` if that is no name.
pub(super) fn memory_name(prefix: &str, digest: &str) -> Option<TemplateName> {
    let room = LONGEST_NAME.saturating_sub(prefix.len());
    TemplateName::new(&format!("{prefix}{digest:.room$}"))
}

/// The memories that the pool has of the templates of one place.
pub(super) struct Memories {
    plane: PlaneClient,
    /// Locked while the pool loads or removes a memory.
    users: tokio::sync::Mutex<Users>,
}

impl Memories {
    /// Returns the memories of a place whose templates are not loaded yet.
    pub(super) fn new(plane: PlaneClient) -> Self {
        Self { plane, users: tokio::sync::Mutex::default() }
    }

    /// Has the pool load the memory `name` from the file at `path`, unless it has it of another
    /// template. `check` runs meanwhile: both read the same file, so the second of them finds it in
    /// the host's memory. If `check` fails, the pool does not keep what it has loaded, and nothing
    /// has begun with it: the lock is held until then. A caller that does not wait for the end
    /// changes nothing of that.
    ///
    /// # Errors
    /// The error of `check`; [`Error::Plane`].
    pub(super) async fn add(
        self: &Arc<Self>,
        name: String,
        path: PathBuf,
        check: impl FnOnce() -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let memories = Arc::clone(self);
        let added = tokio::spawn(async move { memories.add_now(name, &path, check).await });
        added.await.unwrap_or(Err(Error::Closed))
    }

    async fn add_now(
        &self,
        name: String,
        path: &Path,
        check: impl FnOnce() -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let mut users = self.users.lock().await;
        if users.has(&name) {
            apart(check).await?;
        } else {
            let (checked, loaded) = tokio::join!(apart(check), self.load(&name, path));
            if checked.is_err() {
                self.unload(&name).await;
            }
            checked.and(loaded)?;
        }
        users.add(name);
        Ok(())
    }

    /// Notes that one template less has a memory. The pool removes it with the last of them.
    pub(super) async fn remove(&self, name: &str) {
        let mut users = self.users.lock().await;
        if users.remove(name) {
            self.unload(name).await;
        }
    }

    async fn load(&self, name: &str, path: &Path) -> Result<()> {
        let (name, path) = (name.to_owned(), path.to_string_lossy().into_owned());
        let request = plane_v1::AddTemplateRequest { name, path };
        self.plane.clone().add_template(request).await.map(drop).map_err(Error::plane)
    }

    async fn unload(&self, name: &str) {
        // A pool that keeps it has less memory for others, and no fork begins with it.
        let request = plane_v1::RemoveTemplateRequest { name: name.to_owned() };
        if let Err(status) = self.plane.clone().remove_template(request).await {
            tracing::warn!(name, error = status.message(), "the memory of a template is kept");
        }
    }
}

/// The memories by their names, each with the number of templates that have it.
#[derive(Default)]
struct Users(BTreeMap<String, usize>);

impl Users {
    /// Returns whether a template has this memory.
    fn has(&self, memory: &str) -> bool {
        self.0.contains_key(memory)
    }

    /// Notes that one more template has this memory.
    fn add(&mut self, memory: String) {
        *self.0.entry(memory).or_default() += 1;
    }

    /// Notes that one template less has this memory. Returns `true` if none has it any more.
    fn remove(&mut self, memory: &str) -> bool {
        if let Some(count) = self.0.get_mut(memory).filter(|count| **count > 1) {
            *count -= 1;
            return false;
        }
        self.0.remove(memory);
        true
    }
}

#[cfg(test)]
mod tests {
    use tonic::transport::Endpoint;

    use super::*;

    #[test]
    fn a_memory_goes_with_the_last_template_that_has_it() {
        let mut memories = Users::default();
        memories.add("a".to_owned());
        memories.add("a".to_owned());
        memories.add("b".to_owned());
        assert!(!memories.remove("a") && memories.has("a"));
        assert!(memories.remove("a") && !memories.has("a"));
        assert!(memories.has("b"));
    }

    /// The bytes of a sandbox that a VMM has saved may be those of a template of the node.
    #[test]
    fn the_memory_of_a_sandboxs_own_save_is_no_other_ones() {
        let digest = "0a".repeat(32);
        let name = |prefix: &str| memory_name(prefix, &digest).unwrap();
        assert_eq!(name("").as_str(), digest);
        let own = name("0123456789ab-");
        assert_eq!(own.as_str(), format!("0123456789ab-{}", &digest[..51]));
        assert!(own != name("0123456789ac-") && own != name(""));
        assert!(memory_name("", "").is_none() && memory_name("a b-", &digest).is_none());
    }

    #[tokio::test]
    async fn a_memory_has_a_user_once_it_is_checked_and_loaded() {
        let nobody = Endpoint::from_static("http://[::1]:1").connect_lazy();
        let memories = Arc::new(Memories::new(PlaneClient::new(nobody)));
        let add = |check: fn() -> Result<()>| memories.add("a".to_owned(), "/memory".into(), check);
        assert!(matches!(add(|| Err(Error::Stopped)).await, Err(Error::Stopped)));
        assert!(matches!(add(|| Ok(())).await, Err(Error::Plane(_))));
        assert!(!memories.users.lock().await.has("a"));
        // The pool has it of another template: nothing is loaded, and its file is checked still.
        memories.users.lock().await.add("a".to_owned());
        assert!(matches!(add(|| Err(Error::Stopped)).await, Err(Error::Stopped)));
        add(|| Ok(())).await.unwrap();
        memories.remove("a").await;
        assert!(memories.users.lock().await.has("a"), "the other one's");
        memories.remove("a").await;
        assert!(!memories.users.lock().await.has("a"));
    }
}
