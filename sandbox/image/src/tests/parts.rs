//! A registry on loopback that sends parts of blobs, or fails when it is told to, and an image that
//! was pulled lazily from it.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use slipway_lazy_spec::Extent;
use tar::EntryType;

use super::estargz::Stargz;
use super::support::*;
use crate::lazy::budget::Budget;
use crate::lazy::map::{Map, Span};
use crate::lazy::partial::{Partial, Settings, have_dir};
use crate::{Access, Cache, Digest, Image, Limits, Reference, Silent};

/// A registry that sends parts of blobs.
#[derive(Clone, Default)]
pub struct Registry {
    host: String,
    documents: Arc<Mutex<BTreeMap<String, Vec<u8>>>>,
    pub state: Arc<OriginState>,
}

#[derive(Default)]
pub struct OriginState {
    /// The parts that were asked for: blob, first and last byte.
    pub asked: Mutex<Vec<(String, u64, u64)>>,
    /// The number of the next requests for parts that fail.
    pub failures: AtomicUsize,
    /// Set while parts are sent with other bytes.
    pub corrupts: AtomicBool,
    /// Set while requests for parts wait.
    held: Mutex<bool>,
    released: Condvar,
}

impl Registry {
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let host = listener.local_addr().unwrap().to_string();
        let registry = Self { host, ..Self::default() };
        let served = registry.clone();
        // The thread ends with the test's process.
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let registry = served.clone();
                // A client that hangs up is no failure.
                std::thread::spawn(move || registry.answer(stream));
            }
        });
        registry
    }

    pub fn reference(&self, tag: &str) -> Reference {
        format!("{}/app:{tag}", self.host).parse().unwrap()
    }

    /// Adds an image of `layers`, with the digests of their indexes.
    pub fn put(&self, tag: &str, layers: &[(Blob, Digest)]) {
        let blobs: Vec<_> = layers.iter().map(|(blob, _)| blob.clone()).collect();
        let config = config_json("amd64", &blobs);
        let layer = |(blob, toc): &(Blob, Digest)| {
            let key = "containerd.io/snapshot/stargz/toc.digest";
            descriptor(blob.kind, &blob.bytes, &format!(r#","annotations":{{"{key}":"{toc}"}}"#))
        };
        let manifest = format!(
            r#"{{"schemaVersion":2,"mediaType":"{MANIFEST}","config":{},"layers":[{}]}}"#,
            descriptor("application/vnd.oci.image.config.v1+json", config.as_bytes(), ""),
            layers.iter().map(layer).collect::<Vec<_>>().join(",")
        );
        let mut documents = self.documents.lock().unwrap();
        for bytes in blobs.into_iter().map(|blob| blob.bytes).chain([config.into_bytes()]) {
            documents.insert(Digest::of(&bytes).to_string(), bytes);
        }
        documents.insert(tag.into(), manifest.into_bytes());
    }

    async fn pull_lazy(&self, cache: &Cache, tag: &str) -> Image {
        let (reference, access) = (self.reference(tag), Access::default());
        let image = cache.pull_lazy(&reference, &access, Arc::new(Silent)).await;
        image.unwrap().expect("all layers are eStargz")
    }

    /// Starts another registry with the same images.
    pub fn copy(&self) -> Self {
        let copy = Self::start();
        copy.documents.lock().unwrap().clone_from(&self.documents.lock().unwrap());
        copy
    }

    pub fn hold(&self, held: bool) {
        *self.state.held.lock().unwrap() = held;
        self.state.released.notify_all();
    }

    /// Returns how often a part was asked for that has the beginning of a span.
    pub fn asked(&self, map: &Map, span: &Span) -> usize {
        let layer = map.layers[span.layer as usize].digest.to_string();
        let asked = self.state.asked.lock().unwrap();
        let has = |(blob, first, last): &&(String, u64, u64)| {
            *blob == layer && (*first..=*last).contains(&span.stream)
        };
        asked.iter().filter(has).count()
    }

    fn answer(&self, mut stream: TcpStream) -> std::io::Result<()> {
        let mut lines = BufReader::new(stream.try_clone()?).lines();
        let first = lines.next().unwrap_or_else(|| Ok(String::new()))?;
        let path = first.split(' ').nth(1).unwrap_or_default();
        let name = path.rsplit('/').next().unwrap_or_default();
        let mut range = None;
        for line in lines {
            let line = line?.to_ascii_lowercase();
            if let Some(value) = line.strip_prefix("range: bytes=") {
                let ends = value.split_once('-').unwrap();
                range = Some((ends.0.parse::<u64>().unwrap(), ends.1.parse::<u64>().unwrap()));
            }
            if line.is_empty() {
                break;
            }
        }
        let blob = self.documents.lock().unwrap().get(name).cloned();
        let (Some(blob), state) = (blob, &self.state) else {
            return send(&mut stream, "404 Not Found", b"");
        };
        let Some((from, last)) = range else { return send(&mut stream, "200 OK", &blob) };
        state.asked.lock().unwrap().push((name.to_owned(), from, last));
        let held = state.held.lock().unwrap();
        drop(state.released.wait_while(held, |held| *held).unwrap());
        let fewer = |left: usize| left.checked_sub(1);
        if state.failures.fetch_update(Ordering::SeqCst, Ordering::SeqCst, fewer).is_ok() {
            return send(&mut stream, "503 Later", b"");
        }
        let mut part = blob[from as usize..=last as usize].to_vec();
        if state.corrupts.load(Ordering::SeqCst) {
            part.iter_mut().for_each(|byte| *byte ^= 0x55);
        }
        let range = format!("Content-Range: bytes {from}-{last}/{}", blob.len());
        send(&mut stream, &format!("206 Part\r\n{range}"), &part)
    }
}

fn send(stream: &mut TcpStream, status: &str, body: &[u8]) -> std::io::Result<()> {
    let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n", body.len());
    stream.write_all(format!("{head}Connection: close\r\n\r\n").as_bytes())?;
    stream.write_all(body)
}

/// A lazily pulled image of two layers, and where it came from.
pub struct Pulled {
    pub registry: Registry,
    dir: tempfile::TempDir,
    pub cache: Cache,
    pub image: Image,
    pub map: Map,
}

/// Returns data that hardly compresses, so that members are too far apart for one request.
pub fn noise(bytes: usize, seed: u64) -> String {
    let mut state = seed;
    let mut letter = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        char::from(b'!' + ((state >> 33) % 90) as u8)
    };
    (0..bytes).map(|_| letter()).collect()
}

/// The size of the largest chunks.
pub const CHUNK: usize = 150_000;

pub async fn pulled() -> Pulled {
    let registry = Registry::start();
    let lower = Stargz::new()
        .dir("etc/")
        .file("etc/passwd", "root:x:0:0:root:/root:/bin/sh\n", 100)
        .file("big", &noise(4 * CHUNK, 1), CHUNK)
        .end();
    let upper = Stargz::new()
        .file("first", "needed soon", 100)
        .file(".prefetch.landmark", "\u{f}", 1)
        .dir("data/")
        .packed(&[("data/one", "1"), ("data/two", "22")])
        .dir("data/deep/")
        .file("data/deep/three", &noise(CHUNK - 1, 2), CHUNK)
        .entry(EntryType::Symlink, "data/out", "/etc/passwd")
        .entry(EntryType::Symlink, "way", "data")
        .entry(EntryType::Fifo, "data/pipe", "")
        .end();
    registry.put("1", &[lower, upper]);
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::open(dir.path().join("images"), Limits::default()).unwrap();
    let image = registry.pull_lazy(&cache, "1").await;
    let map = Map::read(&cache.map_path(&image.digest), &Limits::default()).unwrap();
    registry.state.asked.lock().unwrap().clear();
    Pulled { registry, dir, cache, image, map }
}

pub fn anonymous(_: &Reference) -> Access {
    Access::default()
}

pub fn extent(span: &Span) -> Extent {
    Extent { offset: span.image, bytes: span.bytes }
}

impl Pulled {
    pub fn run_dir(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    /// Pulls another image into the same cache, by the tag `2`.
    pub async fn another(&self) -> Image {
        self.registry.put("2", &[Stargz::new().file("other", "of another image", 100).end()]);
        self.registry.pull_lazy(&self.cache, "2").await
    }

    /// Opens the image as a fetcher does.
    pub fn partial(&self) -> Arc<Partial> {
        self.partial_with(Budget::new())
    }

    /// Opens the image as a fetcher with this budget does.
    pub fn partial_with(&self, budget: Arc<Budget>) -> Arc<Partial> {
        let have_dir = have_dir(&self.run_dir());
        slipway_private::make_folder(&have_dir).unwrap();
        let (have_dir, access) = (Some(have_dir.as_path()), &anonymous);
        let progress = Arc::new(Silent);
        let settings = Settings { have_dir, access, budget, progress };
        Arc::new(Partial::open(&self.cache, &self.image, settings).unwrap())
    }

    /// Returns the first span that is at least this long.
    pub fn span(&self, bytes: usize) -> &Span {
        self.map.spans.iter().find(|span| span.bytes >= bytes as u64).unwrap()
    }

    /// Checks that the file has the data of a span.
    pub fn assert_written(&self, span: &Span) {
        let file = std::fs::File::open(&self.image.erofs_path).unwrap();
        let mut bytes = vec![0; span.bytes as usize];
        file.read_exact_at(&mut bytes, span.image).unwrap();
        assert_eq!(Digest::of(&bytes), span.digest);
    }

    pub fn is_lazy(&self) -> bool {
        self.cache.get(&self.image.digest.to_string()).unwrap().unwrap().lazy
    }
}
