//! The memories that the pool has of templates. Templates can have the same one: copies of a
//! snapshot that was moved. One memory is loaded or removed by one call at a time. Calls about
//! other memories do not wait for it: a snapshot may have terabytes to check.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use slipway_hypervisor::TemplateName;
use slipway_plane_api::{PlaneClient, v1 as plane_v1};

use super::threads::{Waited, apart};
use crate::lock::lock;
use crate::{Error, Result};

/// The most letters of a name that the pool has for a memory: those of a digest.
const LONGEST_NAME: usize = 64;

/// Returns the name that the pool has for a memory: `prefix` and its digest, cut to
/// [`LONGEST_NAME`] letters. Returns `None` if that is no name.
pub(super) fn memory_name(prefix: &str, digest: &str) -> Option<TemplateName> {
    let room = LONGEST_NAME.saturating_sub(prefix.len());
    TemplateName::new(&format!("{prefix}{digest:.room$}"))
}

/// The number of templates that have a memory. Locked while the pool loads or removes the memory.
type Users = Arc<tokio::sync::Mutex<usize>>;

/// The memories that the pool has of the templates of one place.
pub(super) struct Memories {
    plane: PlaneClient,
    /// The number of memories that the pool has ready for forks of each of them.
    spare_forks: u32,
    /// By name: the memories that templates have, or that calls are about.
    users: Mutex<BTreeMap<String, Users>>,
}

impl Memories {
    /// Returns the memories of a place whose templates are not loaded yet. The pool is to have
    /// `spare_forks` memories ready for forks of each of them.
    pub(super) fn new(plane: PlaneClient, spare_forks: u32) -> Self {
        Self { plane, spare_forks, users: Mutex::default() }
    }

    /// Has the pool load the memory `name` from the file at `path`, unless it has it of another
    /// template. `check` runs meanwhile: both read the same file, so the second of them finds it in
    /// the host's memory. If `check` fails, the pool does not keep what it has loaded, and nothing
    /// has begun with it: the lock is held until then. If the caller does not wait for the end, the
    /// template does not count, and `check` is told by its [`Waited`].
    ///
    /// # Errors
    /// The error of `check`; [`Error::Plane`].
    pub(super) async fn add(
        self: &Arc<Self>,
        name: String,
        path: PathBuf,
        check: impl FnOnce(&Waited) -> Result<()> + Send + 'static,
    ) -> Result<Held> {
        let memories = Arc::clone(self);
        // Dropped with a caller that stops waiting.
        let (_waits, waited) = Waited::new();
        let added = tokio::spawn(async move {
            let added = memories.add_now(&name, &path, move || check(&waited)).await;
            memories.forget_unused(&name);
            added.map(|()| Held { memories: Some(memories), name })
        });
        added.await.unwrap_or(Err(Error::Closed))
    }

    async fn add_now(
        &self,
        name: &str,
        path: &Path,
        check: impl FnOnce() -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let users = self.users_of(name);
        let mut count = users.lock().await;
        if *count > 0 {
            apart(check).await?;
        } else {
            let (checked, loaded) = tokio::join!(apart(check), self.load(name, path));
            if checked.is_err() {
                self.unload(name).await;
            }
            checked.and(loaded)?;
        }
        *count += 1;
        Ok(())
    }

    /// Notes that one template less has a memory. The pool removes it with the last of them.
    pub(super) async fn remove(&self, name: &str) {
        self.remove_now(name).await;
        self.forget_unused(name);
    }

    async fn remove_now(&self, name: &str) {
        let users = self.users_of(name);
        let mut count = users.lock().await;
        *count = count.saturating_sub(1);
        if *count == 0 {
            self.unload(name).await;
        }
    }

    fn users_of(&self, name: &str) -> Users {
        Arc::clone(lock(&self.users).entry(name.to_owned()).or_default())
    }

    /// Forgets a memory that no template has, unless another call is about it.
    fn forget_unused(&self, name: &str) {
        let mut all = lock(&self.users);
        let is_unused =
            |users: &mut Users| Arc::get_mut(users).is_some_and(|count| *count.get_mut() == 0);
        if all.get_mut(name).is_some_and(is_unused) {
            all.remove(name);
        }
    }

    async fn load(&self, name: &str, path: &Path) -> Result<()> {
        let (name, path) = (name.to_owned(), path.to_string_lossy().into_owned());
        let request = plane_v1::AddTemplateRequest { name, path, spare_forks: self.spare_forks };
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

/// A memory that counts as one of a template that is being loaded. If this is dropped, as by a call
/// that is given up, the template does not have it any more.
#[must_use]
pub(super) struct Held {
    /// `None` once the memory is the template's to give back.
    memories: Option<Arc<Memories>>,
    name: String,
}

impl Held {
    /// Leaves the memory to the template, with which it goes ([`Memories::remove`]).
    pub(super) fn keep(mut self) {
        self.memories = None;
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let Some(memories) = self.memories.take() else { return };
        let name = std::mem::take(&mut self.name);
        // Without a runtime the daemon ends, and the plane's pool with it.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move { memories.remove(&name).await });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use tokio::sync::oneshot;
    use tonic::transport::Endpoint;

    use super::*;

    /// Returns the memories of a place whose plane is not there.
    fn memories() -> Arc<Memories> {
        let nobody = Endpoint::from_static("http://[::1]:1").connect_lazy();
        Arc::new(Memories::new(PlaneClient::new(nobody), 0))
    }

    /// Notes that the pool has a memory of one more template.
    async fn give(memories: &Memories, name: &str) {
        *memories.users_of(name).lock().await += 1;
    }

    /// Returns whether a template has a memory, or a call is about it.
    fn is_known(memories: &Memories, name: &str) -> bool {
        lock(&memories.users).contains_key(name)
    }

    /// The test's side of a check that lasts as long as the test says.
    struct HeldCheck {
        /// Is told when the check begins.
        begun: oneshot::Receiver<()>,
        /// The check ends when this is dropped.
        end: mpsc::Sender<()>,
    }

    /// Returns a check with this outcome, and the test's side of it.
    fn held_check(
        outcome: Result<()>,
    ) -> (HeldCheck, impl FnOnce(&Waited) -> Result<()> + Send + 'static) {
        let (begin, begun) = oneshot::channel();
        let (end, ends) = mpsc::channel::<()>();
        let check = move |_: &Waited| {
            let _ = begin.send(());
            let _ = ends.recv();
            outcome
        };
        (HeldCheck { begun, end }, check)
    }

    #[tokio::test]
    async fn a_memory_goes_with_the_last_template_that_has_it() {
        let memories = memories();
        for name in ["a", "a", "b"] {
            give(&memories, name).await;
        }
        memories.remove("a").await;
        assert!(is_known(&memories, "a"));
        memories.remove("a").await;
        assert!(!is_known(&memories, "a") && is_known(&memories, "b"));
        memories.remove("missing").await;
        assert!(!is_known(&memories, "missing"));
    }

    /// The check of a snapshot with much on its disks takes as long as they are read.
    #[tokio::test]
    async fn a_check_that_lasts_holds_up_no_other_memory() {
        let memories = memories();
        give(&memories, "a").await;
        let (held, check) = held_check(Err(Error::Stopped));
        let slow = tokio::spawn({
            let memories = Arc::clone(&memories);
            async move { memories.add("slow".to_owned(), "/memory".into(), check).await }
        });
        held.begun.await.unwrap();
        let others = async {
            memories.add("a".to_owned(), "/memory".into(), |_| Ok(())).await.unwrap().keep();
            memories.remove("a").await;
            memories.remove("a").await;
        };
        let done = tokio::time::timeout(Duration::from_secs(60), others).await;
        drop(held.end);
        done.unwrap();
        assert!(matches!(slow.await.unwrap(), Err(Error::Stopped)));
        assert!(!is_known(&memories, "slow") && !is_known(&memories, "a"));
    }

    /// The client of a call may end while its template is being checked.
    #[tokio::test]
    async fn a_call_that_is_given_up_leaves_no_user() {
        let memories = memories();
        give(&memories, "a").await;
        let (held, check) = held_check(Ok(()));
        let call = tokio::spawn({
            let memories = Arc::clone(&memories);
            async move { memories.add("a".to_owned(), "/memory".into(), check).await.map(drop) }
        });
        held.begun.await.unwrap();
        call.abort();
        assert!(call.await.unwrap_err().is_cancelled());
        drop(held.end);
        // Waits until the memory is checked and counted, and takes the other template's part away.
        memories.remove("a").await;
        let gone = async {
            while is_known(&memories, "a") {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), gone).await.unwrap();
    }

    #[tokio::test]
    async fn a_check_is_told_that_nobody_waits_for_it() {
        let memories = memories();
        let ((begin, begun), (tell, told)) = (oneshot::channel(), oneshot::channel());
        let check = move |waited: &Waited| {
            let _ = begin.send(waited.check().is_ok());
            while waited.check().is_ok() {
                std::thread::sleep(Duration::from_millis(1));
            }
            let _ = tell.send(());
            Err(Error::Stopped)
        };
        let call = tokio::spawn({
            let memories = Arc::clone(&memories);
            async move { memories.add("a".to_owned(), "/memory".into(), check).await.map(drop) }
        });
        assert!(begun.await.unwrap(), "the call waits");
        call.abort();
        tokio::time::timeout(Duration::from_secs(60), told).await.unwrap().unwrap();
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
        let memories = memories();
        let add = |check: fn(&Waited) -> Result<()>| {
            memories.add("a".to_owned(), "/memory".into(), check)
        };
        assert!(matches!(add(|_| Err(Error::Stopped)).await, Err(Error::Stopped)));
        assert!(matches!(add(|_| Ok(())).await, Err(Error::Plane(_))));
        assert!(!is_known(&memories, "a"));
        // The pool has it of another template: nothing is loaded, and its file is checked still.
        give(&memories, "a").await;
        assert!(matches!(add(|_| Err(Error::Stopped)).await, Err(Error::Stopped)));
        add(|_| Ok(())).await.unwrap().keep();
        memories.remove("a").await;
        assert!(is_known(&memories, "a"), "the other one's");
        memories.remove("a").await;
        assert!(!is_known(&memories, "a"));
    }
}
