//! The templates of a node on disk.
//!
//! A template is made in a directory with a name of its own, which gets the template's name once
//! everything in it is written. A directory that was left half made is removed when the daemon
//! begins. A template that is removed stays usable for forks that begin with it already, since they
//! have its files open. One call at a time makes or removes a template of a name.
//!
//! Reading or writing all of a template takes a while with much memory. That runs on a thread of
//! its own, and never on those that write the sandboxes' records.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use slipway_plane_api::PlaneClient;

use super::files::{self, Template, machine, manifest_path, memory, read_manifest};
use super::memories::Memories;
use super::threads::{Waited, apart};
use super::{Manifest, sizes, working_set};
use crate::lock::lock;
use crate::{Error, Result, name, v1};

/// The name of the file with the digest of the image of a snapshot that is being made.
pub(super) const IMAGE: &str = "image";
/// The end of the name of a directory that is being filled.
pub(crate) const UNFINISHED: &str = ".unfinished";

/// A template once it was checked and loaded. The lock is held while it is.
type Loaded = Arc<tokio::sync::Mutex<Option<Arc<Template>>>>;

/// The templates that were asked for, by their names.
type AllLoaded = Mutex<BTreeMap<String, Loaded>>;

/// The templates of a node.
pub(crate) struct Templates {
    dir: PathBuf,
    plane: PlaneClient,
    /// The beginning of the names that the plane's pool has for their memories.
    prefix: String,
    /// The names of those that are being made or removed.
    busy: Arc<Mutex<BTreeSet<String>>>,
    loaded: Arc<AllLoaded>,
    /// The memories that the pool has of these.
    memories: Arc<Memories>,
}

impl Templates {
    /// Returns the templates in the directory `dir`, which need not exist. The pool is to have
    /// `spare_forks` memories ready for forks of each one that is in use.
    pub(crate) fn new(dir: PathBuf, plane: PlaneClient, spare_forks: u32) -> Self {
        let (prefix, busy, loaded) = Default::default();
        let memories = Arc::new(Memories::new(plane.clone(), spare_forks));
        Self { dir, plane, prefix, busy, loaded, memories }
    }

    /// Returns the templates in a directory of the sandbox `id`. The pool has their memories apart
    /// from those of the node: a VMM chooses the bytes that are saved of its sandbox, and they may
    /// be those of another template, whose memory goes with the last of the node's that has it.
    pub(crate) fn of_sandbox(dir: PathBuf, plane: PlaneClient, id: &str) -> Self {
        Self { prefix: format!("{id}-"), ..Self::new(dir, plane, 0) }
    }

    /// Removes what earlier daemons left half made.
    pub(crate) fn clean(&self) {
        for entry in fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().ends_with(UNFINISHED)
                && let Err(error) = fs::remove_dir_all(entry.path())
            {
                let path = entry.path();
                tracing::warn!(path = %path.display(), %error, "an unfinished template is left");
            }
        }
    }

    /// Returns the template with this name. Checks its files and loads its memory at the first use.
    ///
    /// # Errors
    /// [`Error::NoTemplate`]; [`Error::Template`] if its files are not as they were written.
    pub(crate) async fn get(&self, name: &str) -> Result<Arc<Template>> {
        name::check_template(name)?;
        // Declared before the lock, and dropped after it.
        let asked = Asked::of(&self.loaded, name);
        let mut loaded = asked.place.lock().await;
        if let Some(template) = &*loaded {
            return Ok(Arc::clone(template));
        }
        let template = Arc::new(self.load(name).await?);
        *loaded = Some(Arc::clone(&template));
        Ok(template)
    }

    /// Checks a template and has the plane's pool load its memory, both at a time.
    async fn load(&self, name: &str) -> Result<Template> {
        let (dir, its, prefix) = (self.dir.join(name), name.to_owned(), self.prefix.clone());
        let (path, set) = (memory(&dir), working_set::path(&dir));
        let opened = apart(move || Ok((files::open(&dir, &its, &prefix)?, dir)));
        let (template, dir) = opened.await?;
        let Template { memory, learnt, .. } = &template;
        let manifest = template.manifest.clone();
        let check = move |waited: &Waited| files::read_whole(&dir, &manifest, waited);
        let held = self.memories.add(memory.to_string(), path, check).await?;
        let known = working_set::copy_ahead(&self.plane, memory, set, memory.to_string()).await;
        learnt.store(known, Ordering::Relaxed);
        // The caller notes the template before it waits for anything else.
        held.keep();
        Ok(template)
    }

    /// Returns the manifests of all templates, by name. Damaged ones are left out, and logged.
    pub(crate) async fn list(&self) -> Vec<Manifest> {
        let dir = self.dir.clone();
        apart(move || Ok(list(&dir))).await.unwrap_or_default()
    }

    /// Returns the number and the sizes of all templates by kind. Damaged ones are left out: their
    /// warnings are those of [`Templates::list`], since monitoring asks again and again.
    pub(crate) async fn sizes(&self) -> Vec<v1::SavedMachines> {
        let dir = self.dir.clone();
        let read = move || Ok(sizes::by_kind(manifests(&dir).filter_map(Result::ok)));
        apart(read).await.unwrap_or_default()
    }

    /// Removes a template. A caller that does not wait for the end changes nothing of that.
    ///
    /// # Errors
    /// [`Error::NoTemplate`], [`Error::File`].
    pub(crate) async fn remove(&self, name: &str) -> Result<()> {
        name::check_template(name)?;
        let (dir, gone) = (self.dir.join(name), self.dir.join(format!("{name}{UNFINISHED}")));
        let (its, busy) = (name.to_owned(), self.take_name(name)?);
        let files = move || {
            let _ = fs::remove_dir_all(&gone);
            // Renamed first: a daemon that is killed leaves all of it or what `clean` removes.
            match fs::rename(&dir, &gone) {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                    return Err(Error::NoTemplate(its));
                }
                renamed => renamed.map_err(Error::file("cannot remove", &dir))?,
            }
            fs::remove_dir_all(&gone).map_err(Error::file("cannot remove", &gone))
        };
        let unloaded = self.unloaded(name);
        let removed = tokio::spawn(async move {
            // Another template of the name is not loaded before this one is forgotten.
            let _busy = busy;
            let removed = apart(files).await;
            unloaded.await;
            removed
        });
        removed.await.unwrap_or(Err(Error::Closed))
    }

    /// Forgets what was loaded of a template. Its files stay. A caller that does not wait for the
    /// end changes nothing of that.
    pub(crate) async fn unload(&self, name: &str) {
        let _ = tokio::spawn(self.unloaded(name)).await;
    }

    /// Returns the work of [`Templates::unload`].
    fn unloaded(&self, name: &str) -> impl Future<Output = ()> + Send + use<> {
        let (all, name) = (Arc::clone(&self.loaded), name.to_owned());
        let memories = Arc::clone(&self.memories);
        async move {
            let Some(loaded) = lock(&all).remove(&name) else { return };
            if let Some(template) = &*loaded.lock().await {
                memories.remove(&template.memory.to_string()).await;
            }
        }
    }

    /// Returns whether there is a template or snapshot of this name that is of the other kind.
    ///
    /// # Errors
    /// [`Error::Invalid`]: it is no name.
    pub(crate) async fn is_other(&self, name: &str, snapshot: bool) -> Result<bool> {
        name::check_template(name)?;
        let (dir, its) = (self.place(name), name.to_owned());
        let read = apart(move || read_manifest(&dir, &its)).await;
        // One that cannot be read is of neither kind.
        Ok(read.is_ok_and(|manifest| manifest.snapshot.is_some() != snapshot))
    }

    /// Returns the directory of a template's files.
    pub(crate) fn place(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Makes the directory for a new template.
    ///
    /// # Errors
    /// [`Error::TemplateTaken`] if there is one with this name; [`Error::Template`] if one is being
    /// made or removed; [`Error::File`].
    pub(crate) async fn begin(&self, name: &str) -> Result<Unfinished> {
        name::check_template(name)?;
        let unfinished = Unfinished {
            dir: self.dir.join(format!("{name}{UNFINISHED}")),
            place: self.dir.join(name),
            _busy: self.take_name(name)?,
        };
        let its = name.to_owned();
        let made = apart(move || {
            if unfinished.place.exists() {
                return Err(Error::TemplateTaken(its));
            }
            let _ = fs::remove_dir_all(&unfinished.dir);
            let failed = Error::file("cannot create", &unfinished.dir);
            // The memory of a guest: for nobody else's eyes.
            let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&unfinished.dir);
            made.map_err(failed)?;
            Ok(unfinished)
        });
        made.await
    }

    /// Keeps other calls from making or removing a template of this name.
    fn take_name(&self, name: &str) -> Result<Busy> {
        if !lock(&self.busy).insert(name.to_owned()) {
            let why = "it is being made or removed by another call".to_owned();
            return Err(Error::Template { name: name.to_owned(), why });
        }
        Ok(Busy { name: name.to_owned(), all: Arc::clone(&self.busy) })
    }
}

/// A template that a call asks for. A name that nothing has is forgotten with the last call that
/// asks for it, also if that call is given up.
struct Asked<'a> {
    all: &'a AllLoaded,
    name: &'a str,
    place: Loaded,
}

impl<'a> Asked<'a> {
    fn of(all: &'a AllLoaded, name: &'a str) -> Self {
        let place = Arc::clone(lock(all).entry(name.to_owned()).or_default());
        Self { all, name, place }
    }
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        let mut all = lock(self.all);
        // Dropped before the lock is: of two last calls, the second one finds itself alone.
        let place = std::mem::take(&mut self.place);
        // No call gets another reference meanwhile: there are this one and the map's.
        let is_last = Arc::strong_count(&place) == 2;
        let is_its = all.get(self.name).is_some_and(|one| Arc::ptr_eq(one, &place));
        let is_empty = || place.try_lock().is_ok_and(|loaded| loaded.is_none());
        if is_last && is_its && is_empty() {
            all.remove(self.name);
        }
    }
}

/// The name of a template that is being made or removed.
struct Busy {
    name: String,
    all: Arc<Mutex<BTreeSet<String>>>,
}

impl Drop for Busy {
    fn drop(&mut self) {
        lock(&self.all).remove(&self.name);
    }
}

/// The directory of a template that is being made. It is removed if it does not get its name.
pub(crate) struct Unfinished {
    dir: PathBuf,
    place: PathBuf,
    _busy: Busy,
}

impl Unfinished {
    /// Returns the directory.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the path of the file for the machine's state.
    pub(crate) fn machine(&self) -> PathBuf {
        machine(&self.dir)
    }

    /// Returns the path of the file for the memory.
    pub(crate) fn memory(&self) -> PathBuf {
        memory(&self.dir)
    }

    /// Returns the path of another file.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Writes the manifest and gives the directory its name, once all of it is on disk.
    ///
    /// # Errors
    /// [`Error::File`].
    pub(crate) fn finish(self, manifest: &Manifest) -> Result<()> {
        let path = manifest_path(&self.dir);
        let failed = |path: &PathBuf| Error::file("cannot write", path.clone());
        let json = manifest.to_json().map_err(std::io::Error::from);
        fs::write(&path, json.map_err(failed(&path))?).map_err(failed(&path))?;
        let disks = manifest.snapshot.iter().flat_map(|snapshot| &snapshot.files);
        let disks = disks.map(|disk| self.file(&disk.name));
        let own = [path, self.machine(), self.memory()];
        for path in own.iter().cloned().chain(disks).chain([self.dir.clone()]) {
            File::open(&path).and_then(|file| file.sync_all()).map_err(failed(&path))?;
        }
        fs::rename(&self.dir, &self.place).map_err(failed(&self.place))?;
        // The description names the image now.
        let _ = fs::remove_file(self.place.join(IMAGE));
        Ok(())
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        // Not there any more if it got its name.
        let _ = fs::remove_dir_all(&self.dir);
    }
}

fn list(dir: &Path) -> Vec<Manifest> {
    let warned = manifests(dir).map(|manifest| {
        manifest.inspect_err(|error| tracing::warn!(%error, "a template cannot be used"))
    });
    warned.filter_map(Result::ok).collect()
}

/// Reads the manifests of all templates, by name.
fn manifests(dir: &Path) -> impl Iterator<Item = Result<Manifest>> {
    let mut names: Vec<String> = fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name::check_template(name).is_ok())
        .collect();
    names.sort();
    names.into_iter().map(move |name| read_manifest(&dir.join(&name), &name))
}

/// Creates a file of a template, for root's eyes only, to be written and read.
pub(crate) fn create_file(path: &Path) -> std::io::Result<File> {
    File::options().read(true).write(true).create_new(true).mode(0o600).open(path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::time::Duration;

    use tonic::transport::Endpoint;

    use super::super::manifest::tests::manifest;
    use super::super::pages::{digest, digest_pages};
    use super::*;

    const BYTES: u64 = 128 << 20;

    /// Makes a template of one page.
    async fn make(templates: &Templates, name: &str) {
        let unfinished = templates.begin(name).await.unwrap();
        fs::write(unfinished.machine(), "state").unwrap();
        let memory = File::create_new(unfinished.memory()).unwrap();
        memory.set_len(BYTES).unwrap();
        memory.write_all_at(b"page", 8192).unwrap();
        let memory = File::open(unfinished.memory()).unwrap();
        let mut manifest = manifest(name);
        manifest.machine_sha256 = digest(b"state");
        manifest.memory_sha256 = digest_pages(&memory, BYTES, &|| Ok(())).unwrap();
        unfinished.finish(&manifest).unwrap();
    }

    /// Opens a template and reads all of it.
    fn check(dir: &Path, prefix: &str) -> Result<Template> {
        let template = files::open(dir, "a", prefix)?;
        let (_waits, waited) = Waited::new();
        files::read_whole(dir, &template.manifest, &waited).map(|()| template)
    }

    /// Returns the templates of a node whose plane is not there.
    fn templates(dir: &Path) -> Templates {
        let plane = PlaneClient::new(Endpoint::from_static("http://[::1]:1").connect_lazy());
        Templates::new(dir.join("templates"), plane, 0)
    }

    #[tokio::test]
    async fn a_template_is_there_once_it_is_whole() {
        let dir = tempfile::tempdir().unwrap();
        let (all, place) = (templates(dir.path()), dir.path().join("templates/a"));
        assert!(matches!(all.get("a").await, Err(Error::NoTemplate(_))));
        let half = all.begin("a").await.unwrap();
        fs::write(half.machine(), "state").unwrap();
        assert!(all.list().await.is_empty());
        for refused in [all.begin("a").await.err(), all.remove("a").await.err()] {
            assert!(refused.unwrap().to_string().contains("another call"));
        }
        assert!(half.machine().exists());
        // As if the daemon was killed.
        std::mem::forget(half);
        let all = templates(dir.path());
        all.clean();
        assert_eq!(fs::read_dir(dir.path().join("templates")).unwrap().count(), 0);
        make(&all, "a").await;
        assert!(matches!(all.begin("a").await, Err(Error::TemplateTaken(_))));
        let one = check(&place, "").unwrap();
        assert_eq!(one.memory.as_str(), one.manifest.memory_sha256);
        assert_ne!(check(&place, "0123456789ab-").unwrap().memory, one.memory, "a sandbox's");
        assert_eq!(all.list().await, std::slice::from_ref(&one.manifest));
        make(&all, "auto-0").await;
        let (sizes, touched) = (all.sizes().await, one.manifest.touched_bytes);
        let kinds = sizes.iter().map(|one| (one.kind.as_str(), one.count, one.memory_bytes));
        let both = [("template", 1, touched), ("automatic", 1, touched), ("snapshot", 0, 0)];
        assert_eq!(kinds.collect::<Vec<_>>(), both);
        // Without the plane nothing begins with it.
        assert!(matches!(all.get("a").await, Err(Error::Plane(_))));
        all.remove("a").await.unwrap();
        assert!(matches!(all.get("a").await, Err(Error::NoTemplate(_))));
        assert!(matches!(all.remove("a").await, Err(Error::NoTemplate(_))));
        assert!(matches!(all.get("../a").await, Err(Error::Invalid(_))));
    }

    /// Waits until nothing of any template is loaded, or asked for.
    async fn forgets_all(templates: &Templates) {
        let forgotten = async {
            while !lock(&templates.loaded).is_empty() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), forgotten).await.unwrap();
    }

    #[tokio::test]
    async fn a_call_that_is_given_up_leaves_no_name() {
        let dir = tempfile::tempdir().unwrap();
        let all = templates(dir.path());
        let place = Arc::clone(lock(&all.loaded).entry("a".to_owned()).or_default());
        let held = place.lock().await;
        assert!(tokio::time::timeout(Duration::ZERO, all.get("a")).await.is_err());
        assert!(lock(&all.loaded).contains_key("a"), "another call asks for it");
        drop(held);
        drop(place);
        let _ = tokio::time::timeout(Duration::ZERO, all.get("a")).await;
        forgets_all(&all).await;
        make(&all, "a").await;
        lock(&all.loaded).insert("a".to_owned(), Loaded::default());
        let mut removal = Box::pin(all.remove("a"));
        // Its first part alone.
        std::future::poll_fn(|context| {
            let _ = removal.as_mut().poll(context);
            std::task::Poll::Ready(())
        })
        .await;
        drop(removal);
        forgets_all(&all).await;
        assert!(matches!(all.get("a").await, Err(Error::NoTemplate(_))));
    }

    #[test]
    fn of_two_calls_that_end_at_once_one_forgets_the_name() {
        let (all, barrier) = (AllLoaded::default(), std::sync::Barrier::new(2));
        let ask = || {
            for name in 0..2000 {
                let name = name.to_string();
                let asked = Asked::of(&all, &name);
                barrier.wait();
                drop(asked);
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(ask);
            scope.spawn(ask);
        });
        assert!(lock(&all).is_empty());
    }

    #[tokio::test]
    async fn a_template_with_a_changed_byte_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (all, place) = (templates(dir.path()), dir.path().join("templates/a"));
        let refused = || check(&place, "").err().unwrap().to_string();
        for (file, at) in [("machine", 0), ("memory", 8192), ("memory", 0), ("template.json", 0)] {
            make(&all, "a").await;
            let changed = File::options().write(true).open(place.join(file)).unwrap();
            changed.write_all_at(b"X", at).unwrap();
            assert!(refused().contains("cannot be used"), "{file}: {}", refused());
            all.remove("a").await.unwrap();
        }
        make(&all, "a").await;
        let memory = File::options().write(true).open(place.join("memory")).unwrap();
        memory.set_len(BYTES - 4096).unwrap();
        assert!(refused().contains("another length"), "{}", refused());
    }
}
