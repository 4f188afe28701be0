//! The way from a source to an image in the cache: fetch the layers, merge them, build the image,
//! and list it.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use futures_util::{StreamExt, TryStreamExt, stream};
use tempfile::{NamedTempFile, TempPath};

use super::index::{Record, sync_dir};
use super::turn::{ImagePart, NameConflict, WorkRight, check_names};
use super::{Cache, Image, now, origins, remove_file};
use crate::manifest::Plan;
use crate::resolve;
use crate::root::layout::Layout;
use crate::root::merge::Merger;
use crate::source::registry::{Access, Origin, Registry};
use crate::source::{
    Fetcher, Source, Spool, archive, blocking, folder, layers, layout, name_from_path,
};
use crate::{Digest, Error, Event, Progress, Reference, Result};

/// The number of layers that are fetched at once, as in docker.
const CONCURRENT_LAYERS: usize = 3;
/// The bytes of file data between two [`Event::Building`].
const BUILD_STEP: u64 = 4 << 20;

/// The files of an image that is made, in the cache's folder for work.
pub(crate) struct Files {
    pub image: TempPath,
    /// The bytes of the image's file.
    pub size_bytes: u64,
    /// The map of the missing data of a lazily pulled image, and the repository that has them.
    pub map: Option<(TempPath, Origin)>,
}

/// The condition under which [`Cache::ensure`] asks the registry.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum PullPolicy {
    /// Pulls if the image is not in the cache.
    #[default]
    Missing,
    /// Always asks, since a tag may have moved. Layers are fetched only if it has.
    Always,
    /// Never pulls.
    Never,
}

impl Cache {
    /// Pulls the image that `reference` names now, unless exactly this image is in the cache, and
    /// gives it that name.
    ///
    /// If another task or process fetches the same image from the same repository, this waits for
    /// it. Dropping the future stops the download; a build that has begun runs to its end in its
    /// thread.
    ///
    /// # Errors
    /// Most of [`Error`]. Nothing is left in the cache then.
    pub async fn pull(
        &self,
        reference: &Reference,
        access: &Access,
        progress: Arc<dyn Progress>,
    ) -> Result<Image> {
        let (plan, registry) = self.resolve(reference, access, &*progress).await?;
        // The registry decides which image a tag stands for, and the user asked this registry.
        let names = (vec![reference.clone()], NameConflict::Replace);
        self.make(plan, Fetcher::Registry(registry), names, progress).await
    }

    /// Asks the registry which image `reference` names now. Returns its plan, and a client for its
    /// layers.
    pub(crate) async fn resolve(
        &self,
        reference: &Reference,
        access: &Access,
        progress: &dyn Progress,
    ) -> Result<(Plan, Arc<Registry>)> {
        progress.event(Event::Resolving(reference));
        let (for_client, access) = (reference.clone(), access.clone());
        // Making the client reads the system's certificates, so it runs on a blocking thread.
        let limits = self.inner.limits.clone();
        let registry = blocking(move || Registry::new(&for_client, &access, &limits)).await?;
        let registry = Arc::new(registry);
        let bytes = registry.manifest(None, self.inner.limits.document_bytes).await?;
        let fetcher = Fetcher::Registry(registry.clone());
        let name = reference.familiar();
        let plan = resolve::plan(&fetcher, bytes, &name, &self.inner.limits).await?;
        Ok((plan, registry))
    }

    /// Returns the image called `name` from the cache, or pulls it as `policy` says, and marks it
    /// as used now. `name` may also be the digest of an image in the cache.
    ///
    /// # Errors
    /// [`Error::Unknown`] if the image is not in the cache and may not be pulled; the errors of
    /// [`pull`](Self::pull).
    pub async fn ensure(
        &self,
        name: &str,
        access: &Access,
        policy: PullPolicy,
        progress: Arc<dyn Progress>,
    ) -> Result<Image> {
        let image = match self.there(name, policy).await? {
            Some(image) => image,
            None => self.pull(&name.parse()?, access, progress).await?,
        };
        self.touch_aside(image.digest).await?;
        Ok(image)
    }

    /// Returns the image called `name` from the cache, as [`ensure`](Self::ensure) does. Returns
    /// `None` if `policy` says that it is to be pulled.
    ///
    /// # Errors
    /// [`Error::Unknown`] if the image is not in the cache and may not be pulled.
    pub async fn there(&self, name: &str, policy: PullPolicy) -> Result<Option<Image>> {
        if policy != PullPolicy::Always
            && let Some(image) = self.get_aside(name).await?
        {
            return Ok(Some(image));
        }
        match policy == PullPolicy::Never || name.starts_with("sha256:") {
            true => Err(Error::Unknown(name.to_owned())),
            false => Ok(None),
        }
    }

    /// Does as [`get`](Self::get), on a thread that may block.
    pub(crate) async fn get_aside(&self, name: &str) -> Result<Option<Image>> {
        let (cache, name) = (self.clone(), name.to_owned());
        blocking(move || cache.get(&name)).await
    }

    async fn touch_aside(&self, digest: Digest) -> Result<()> {
        let cache = self.clone();
        blocking(move || cache.touch(&digest)).await
    }

    /// Imports an image that is not in a registry. Without `name`, it gets its name in the source,
    /// or one made of the folder's or file's name. A name that this same image has already is no
    /// conflict.
    ///
    /// # Errors
    /// [`Error::NamesTaken`] if another image has a name and `taken` is [`NameConflict::Refuse`];
    /// the errors of [`pull`](Self::pull).
    pub async fn import(
        &self,
        source: &Source,
        name: Option<Reference>,
        taken: NameConflict,
        progress: Arc<dyn Progress>,
    ) -> Result<Image> {
        let (plan, fetcher, own) = self.open_source(source).await?;
        let names = match name {
            Some(name) => vec![name],
            None => own,
        };
        self.make(plan, fetcher, (names, taken), progress).await
    }

    async fn open_source(&self, source: &Source) -> Result<(Plan, Fetcher, Vec<Reference>)> {
        let (work, limits) = (self.work_dir(), self.inner.limits.clone());
        let path = source.path().to_owned();
        let local = match source.clone() {
            Source::Folder(root) => {
                let name = name_from_path(&root, None).into_iter().collect();
                let (plan, file) = blocking(move || folder::pack(&root, &work, &limits)).await?;
                let digests = plan.layers.iter().map(|layer| layer.digest);
                let files: Vec<_> = digests.zip([file]).collect();
                return Ok((plan, Fetcher::Ready(Arc::new(files)), name));
            }
            Source::Layers(paths) => {
                let (plan, files) = blocking(move || layers::open(&paths, &work, &limits)).await?;
                return Ok((plan, Fetcher::Ready(Arc::new(files)), Vec::new()));
            }
            Source::DockerArchive(path, name) => {
                let (plan, local, names) = blocking(move || {
                    let mut local = archive::open(&path, &work, &limits)?;
                    let (plan, names) = archive::plan_docker(&mut local, name.as_deref(), &limits)?;
                    Ok((plan, local, names))
                })
                .await?;
                return Ok((plan, Fetcher::Local(Arc::new(local)), names));
            }
            Source::OciLayout(dir, tag) => (layout::Local::folder(dir)?, tag),
            Source::OciArchive(path, tag) => {
                (blocking(move || archive::open(&path, &work, &limits)).await?, tag)
            }
        };
        let (local, tag) = local;
        let (local, limits) = (Arc::new(local), self.inner.limits.clone());
        let (opened, wanted) = (local.clone(), tag.clone());
        let (bytes, name) = blocking(move || opened.choose(wanted.as_deref(), &limits)).await?;
        let place = local.place.clone();
        let fetcher = Fetcher::Local(local);
        let plan = resolve::plan(&fetcher, bytes, &place, &self.inner.limits).await?;
        let name = name.or_else(|| name_from_path(&path, tag.as_deref()));
        Ok((plan, fetcher, name.into_iter().collect()))
    }

    /// Makes the image of `plan` unless it is in the cache, and gives it `names`.
    async fn make(
        &self,
        plan: Plan,
        fetcher: Fetcher,
        names: (Vec<Reference>, NameConflict),
        progress: Arc<dyn Progress>,
    ) -> Result<Image> {
        let (digest, origin) = (plan.digest, fetcher.origin());
        let turn = |work| self.turn(work, &digest, origin.as_ref(), &names, &*progress);
        let fetching = match turn(ImagePart::Fetch).await? {
            WorkRight::There(image) => return Ok(*image),
            WorkRight::Ours(lock) => lock,
        };
        let layers = self.fetch(&plan, &fetcher, &progress).await?;
        let building = match turn(ImagePart::Build).await? {
            WorkRight::There(image) => return Ok(*image),
            WorkRight::Ours(lock) => lock,
        };
        let cache = self.clone();
        blocking(move || {
            // The locks are held to the end, even if the caller stops waiting.
            let _locks = (fetching, building);
            cache.build(&plan, &layers, (&names.0, names.1), &*progress)
        })
        .await
    }

    /// Fetches all layers into unnamed files, lowest first.
    async fn fetch(
        &self,
        plan: &Plan,
        fetcher: &Fetcher,
        progress: &Arc<dyn Progress>,
    ) -> Result<Vec<File>> {
        let bytes = plan.layers.iter().map(|layer| layer.size).sum();
        progress.event(Event::Layers { count: plan.layers.len(), bytes });
        let spool = Arc::new(Spool {
            dir: self.work_dir(),
            limits: self.inner.limits.clone(),
            total: AtomicU64::new(0),
        });
        stream::iter(plan.layers.iter().copied().enumerate())
            .map(|(index, layer)| {
                let (fetcher, spool, progress) = (fetcher.clone(), spool.clone(), progress.clone());
                async move {
                    let (digest, bytes) = (layer.digest, layer.size);
                    progress.event(Event::LayerStarted { index, digest: &digest, bytes });
                    let meter = progress.clone();
                    let report = move |done| meter.event(Event::LayerBytes { index, done });
                    let file = fetcher.layer(layer, spool, report).await?;
                    progress.event(Event::LayerFinished { index });
                    Ok(file)
                }
            })
            .buffered(CONCURRENT_LAYERS)
            .try_collect()
            .await
    }

    /// Merges the layers, builds the image and lists it.
    fn build(
        &self,
        plan: &Plan,
        layers: &[File],
        names: (&[Reference], NameConflict),
        progress: &dyn Progress,
    ) -> Result<Image> {
        let image = self.work_file(&plan.digest, ".erofs")?;
        let size_bytes = self.build_into(&image, plan, layers, progress)?;
        let image = image.into_temp_path();
        let image = self.commit(Files { image, size_bytes, map: None }, plan, names)?;
        progress.event(Event::Finished(&plan.digest));
        Ok(image)
    }

    /// Makes an empty file for an image that is being made. It is removed when dropped, whatever
    /// fails.
    pub(crate) fn work_file(&self, digest: &Digest, suffix: &str) -> Result<NamedTempFile> {
        // The file has mode 0600.
        let work = self.work_dir();
        tempfile::Builder::new()
            .prefix(&format!("{}-", digest.hex()))
            .suffix(suffix)
            .tempfile_in(&work)
            .map_err(|e| Error::io("write to", &work, e))
    }

    /// Merges the layers and writes the image to `out`, which is on disk when this returns. Returns
    /// its size in bytes.
    fn build_into(
        &self,
        out: &NamedTempFile,
        plan: &Plan,
        layers: &[File],
        progress: &dyn Progress,
    ) -> Result<u64> {
        progress.event(Event::Merging);
        let mut merger = Merger::new(&self.inner.limits);
        for (layer, file) in plan.layers.iter().zip(layers) {
            merger.apply(file, layer.form).map_err(|e| e.of(&layer.digest))?;
        }
        let tree = merger.finish();
        let layout = Layout::of(&tree, plan.digest.uuid())
            .map_err(|reason| Error::too_large(format!("image {}", plan.digest), reason))?;
        let total = layout.file_bytes();
        progress.event(Event::Building { done: 0, total });
        let mut told = 0;
        let mut tell = |done: u64| {
            if done - told >= BUILD_STEP || done == total {
                told = done;
                progress.event(Event::Building { done, total });
            }
        };
        let written = layout.write_image(&tree, layers, out.as_file(), &mut tell);
        let written = written.and_then(|()| out.as_file().sync_all());
        written.map_err(|e| Error::io("write", out.path(), e))?;
        Ok(layout.bytes())
    }

    /// Moves the finished files to their places and lists the image. All of it happens under the
    /// index's lock, so that no [`Cache::open`] in between takes a file for a leftover.
    pub(crate) fn commit(
        &self,
        files: Files,
        plan: &Plan,
        (names, taken): (&[Reference], NameConflict),
    ) -> Result<Image> {
        let mut locked = self.lock_index()?;
        // Names are checked again, since another process may have used one while this image was
        // built.
        check_names(&locked.index, &plan.digest, names, taken)?;
        let (path, map_path) = (self.image_path(&plan.digest), self.map_path(&plan.digest));
        let origins_path = self.origins_path(&plan.digest);
        let persist = |file: TempPath, path: &Path| {
            file.persist(path).map_err(|e| Error::io("create", path, e.error))
        };
        let lazy = files.map.is_some();
        match files.map {
            Some((map, origin)) => {
                persist(map, &map_path)?;
                origins::write(&origins_path, &[origin])?;
            }
            // The map of an image whose file was lost may still be there.
            None => {
                remove_file(&map_path)?;
                remove_file(&origins_path)?;
            }
        }
        persist(files.image, &path)?;
        sync_dir(&self.inner.dir)?;
        let record = Record {
            config: plan.config.config.clone(),
            size_bytes: files.size_bytes,
            created: plan.config.created.clone(),
            added: now(),
            last_used: now(),
            lazy,
        };
        locked.index.images.insert(plan.digest, record);
        for name in names {
            locked.index.references.insert(name.clone(), plan.digest);
        }
        if let Err(e) = locked.save() {
            let _ = remove_file(&path);
            let _ = remove_file(&map_path);
            let _ = remove_file(&origins_path);
            return Err(e);
        }
        self.image(&locked.index, &plan.digest)
            .ok_or_else(|| Error::Unknown(plan.digest.to_string()))
    }
}
