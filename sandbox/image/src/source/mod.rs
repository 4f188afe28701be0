//! Sources of images. [`Source`] is the source as a user names it. A [`Fetcher`] is an opened
//! source, which provides documents and layers by digest and checks both.
//!
//! A new kind of local source is a variant of [`Source`], whose prefix `from_str` parses.
//! `Cache::open_source` (`cache/make.rs`) makes of it the plan of an image and a [`Fetcher`]:
//! `Local` if documents lead to its layers, `Ready` if it is layers alone. `Error::BadSource`, the
//! help of `slipway image import` (`front/cli/src/args/manage.rs`) and `docs/images.md` name the
//! kind. Its author is hostile: links, sizes and counts are bounded by [`Limits`], and a parser of
//! its own has a fuzz target. Tests are a file of `src/tests` as `layout.rs` or `folder.rs`,
//! `hostile.rs`, and `tests/e2e/50-bad-input.sh`.

pub(crate) mod archive;
mod beneath;
pub(crate) mod folder;
pub(crate) mod layers;
pub(crate) mod layout;
pub(crate) mod registry;

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use tokio::sync::mpsc;

use crate::manifest::Layer;
use crate::spool::Spooler;
use crate::{Digest, Error, Limits, Reference, Result};
use layout::Local;
use registry::{Origin, Registry};

/// An image that is not in a registry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A folder in OCI image layout, and the name of the image if it has several.
    OciLayout(PathBuf, Option<String>),
    /// A tar archive of such a folder, possibly compressed.
    OciArchive(PathBuf, Option<String>),
    /// An archive of `docker save`, possibly compressed.
    DockerArchive(PathBuf, Option<String>),
    /// A plain folder that becomes the container's root, for instance of debootstrap. It must not
    /// change while it is read: a change is an error, and a user who can change it gets nothing
    /// from outside of the folder into the image. Nothing below its mount points is read.
    Folder(PathBuf),
    /// Layers as a snapshotter keeps them, the uppermost first: EROFS files, which are read and not
    /// mounted, or upper directories of overlayfs, which are read as [`Source::Folder`] is.
    Layers(Vec<PathBuf>),
}

impl FromStr for Source {
    type Err = Error;

    /// Parses `oci:DIR[:TAG]`, `oci-archive:FILE[:TAG]`, `docker-archive:FILE[:NAME]`, `dir:PATH`
    /// and `layers:PATH[:PATH…]`. A path with a colon in its last part needs a tag after it.
    fn from_str(text: &str) -> Result<Self> {
        let bad = || Error::BadSource(text.to_owned());
        let (kind, rest) = text.split_once(':').ok_or_else(bad)?;
        if kind == "layers" {
            let paths: Vec<_> = rest.split(':').map(PathBuf::from).collect();
            let complete = paths.iter().all(|path| !path.as_os_str().is_empty());
            return if complete { Ok(Self::Layers(paths)) } else { Err(bad()) };
        }
        let (path, tag) = match rest.split_once(':') {
            // NAME of docker-archive may have slashes and a colon of its own.
            Some((path, name)) if kind == "docker-archive" => (path, Some(name)),
            _ => match rest.rsplit_once(':') {
                Some((path, tag)) if !tag.contains('/') => (path, Some(tag)),
                _ => (rest, None),
            },
        };
        let (path, tag) = if kind == "dir" { (rest, None) } else { (path, tag) };
        if path.is_empty() || tag == Some("") {
            return Err(bad());
        }
        let (path, tag) = (PathBuf::from(path), tag.map(str::to_owned));
        match kind {
            "oci" => Ok(Self::OciLayout(path, tag)),
            "oci-archive" => Ok(Self::OciArchive(path, tag)),
            "docker-archive" => Ok(Self::DockerArchive(path, tag)),
            "dir" => Ok(Self::Folder(path)),
            _ => Err(bad()),
        }
    }
}

impl Source {
    /// Returns the source's path, of the uppermost layer if it has several.
    pub fn path(&self) -> &Path {
        match self {
            Self::Layers(paths) => paths.first().map_or(Path::new(""), PathBuf::as_path),
            Self::OciLayout(path, _)
            | Self::OciArchive(path, _)
            | Self::DockerArchive(path, _)
            | Self::Folder(path) => path,
        }
    }
}

/// An opened source.
#[derive(Clone)]
pub(crate) enum Fetcher {
    Registry(Arc<Registry>),
    Local(Arc<Local>),
    /// The layers, already uncompressed, in files by their digests.
    Ready(Arc<Vec<(Digest, File)>>),
}

/// The shared settings and state for fetching layers, beside the source.
pub(crate) struct Spool {
    pub dir: PathBuf,
    pub limits: Limits,
    pub total: AtomicU64,
}

impl Fetcher {
    /// Returns the repository that the image comes from. Returns `None` if it is on this machine.
    pub(crate) fn origin(&self) -> Option<Origin> {
        match self {
            Self::Registry(registry) => Some(registry.origin()),
            Self::Local(_) | Self::Ready(_) => None,
        }
    }

    /// Returns the manifest or index with this digest, of at most `size` bytes, checked.
    pub(crate) async fn manifest(&self, digest: &Digest, size: u64) -> Result<Vec<u8>> {
        match self {
            Self::Registry(registry) => registry.manifest(Some(digest), size).await,
            _ => self.document("manifest", digest, size).await,
        }
    }

    /// Returns the config with this digest, of at most `size` bytes, checked.
    pub(crate) async fn config(&self, digest: &Digest, size: u64) -> Result<Vec<u8>> {
        self.document("config", digest, size).await
    }

    async fn document(&self, what: &'static str, digest: &Digest, size: u64) -> Result<Vec<u8>> {
        let bytes = match self {
            Self::Registry(registry) => registry.blob(digest, size).await?,
            Self::Local(local) => {
                let (local, digest) = (local.clone(), *digest);
                blocking(move || local.document(&digest, size)).await?
            }
            Self::Ready(_) => return Err(Error::source("layers", "they have no documents")),
        };
        let actual = Digest::of(&bytes);
        match actual == *digest {
            true => Ok(bytes),
            false => Err(Error::DigestMismatch {
                what: format!("the image's {what}"),
                expected: *digest,
                actual,
            }),
        }
    }

    /// Fetches `layer` to disk, uncompressed and checked. `progress` gets the number of bytes read
    /// so far.
    pub(crate) async fn layer(
        &self,
        layer: Layer,
        spool: Arc<Spool>,
        mut progress: impl FnMut(u64) + Send + 'static,
    ) -> Result<File> {
        let mut spool_from = move |blob: Box<dyn Read + Send>| {
            let Spool { dir, limits, total } = &*spool;
            Spooler { dir, limits, total }.spool(blob, &layer, &mut progress)
        };
        match self {
            Self::Ready(files) => {
                let file = files.iter().find(|(digest, _)| *digest == layer.digest);
                let missing = || Error::bad_layer(layer.digest, "it is not there");
                let (_, file) = file.ok_or_else(missing)?;
                file.try_clone().map_err(|e| Error::io("use", "layer".as_ref(), e))
            }
            Self::Local(local) => {
                let local = local.clone();
                blocking(move || spool_from(local.open_layer(&layer)?)).await
            }
            Self::Registry(registry) => {
                let (sender, receiver) = mpsc::channel(16);
                let feed = registry.feed(layer.digest, sender);
                let reader = ChannelReader { receiver, chunk: Vec::new(), used: 0, failed: None };
                let spool = blocking(move || spool_from(Box::new(reader)));
                // The feed is not a task of its own: when this future is dropped, the channel
                // closes, and the reader in its thread ends at once.
                match tokio::join!(feed, spool) {
                    (Err(network), Err(Error::BadLayer { .. })) => Err(network),
                    (_, result) => result,
                }
            }
        }
    }
}

/// Runs blocking work on a thread for such work. A panic there becomes an error here.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(e) => Err(Error::Worker(e.to_string())),
    }
}

/// The receiving end of a stream of chunks, as a blocking reader. After an error, every read fails.
struct ChannelReader {
    receiver: mpsc::Receiver<io::Result<Vec<u8>>>,
    chunk: Vec<u8>,
    used: usize,
    failed: Option<String>,
}

impl Read for ChannelReader {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        loop {
            if let Some(reason) = &self.failed {
                return Err(io::Error::other(reason.clone()));
            }
            let left = &self.chunk[self.used..];
            if !left.is_empty() {
                let n = left.len().min(buf.len());
                buf[..n].copy_from_slice(&left[..n]);
                self.used += n;
                return Ok(n);
            }
            self.used = 0;
            self.chunk.clear();
            match self.receiver.blocking_recv() {
                None => return Ok(0),
                Some(Ok(chunk)) => self.chunk = chunk,
                Some(Err(e)) => self.failed = Some(e.to_string()),
            }
        }
    }
}

/// Returns the message of an error and of its sources, which name the actual cause ("connection
/// refused").
fn reason(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut below = error.source();
    while let Some(error) = below {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        below = error.source();
    }
    text.lines().collect::<Vec<_>>().join(" ")
}

/// Makes a name for an image without one, from the name of its folder or file.
pub(crate) fn name_from_path(path: &Path, tag: Option<&str>) -> Option<Reference> {
    let name = path.canonicalize().ok()?.file_name()?.to_str()?.to_lowercase();
    let name = name.split(".tar").next().unwrap_or(&name);
    format!("{name}:{}", tag.unwrap_or("latest")).parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources() {
        let p = PathBuf::from;
        for (text, source) in [
            ("oci:/a/b", Source::OciLayout(p("/a/b"), None)),
            ("oci:/a/b:12", Source::OciLayout(p("/a/b"), Some("12".into()))),
            ("oci:/a:b/c", Source::OciLayout(p("/a:b/c"), None)),
            ("oci-archive:x.tar:t", Source::OciArchive(p("x.tar"), Some("t".into()))),
            (
                "docker-archive:x.tar:localhost:5000/a/b:1",
                Source::DockerArchive(p("x.tar"), Some("localhost:5000/a/b:1".into())),
            ),
            ("dir:/a:b", Source::Folder(p("/a:b"))),
            ("layers:/a/2:/b/1", Source::Layers(vec![p("/a/2"), p("/b/1")])),
        ] {
            assert_eq!(text.parse::<Source>().unwrap(), source, "{text}");
        }
        for bad in [
            "",
            "debian",
            "debian:12",
            "oci:",
            "dir:",
            "oci::",
            "oci:a:",
            "layers:",
            "layers:/a:",
            "zip:x",
        ] {
            assert!(bad.parse::<Source>().is_err(), "{bad}");
        }
    }
}
